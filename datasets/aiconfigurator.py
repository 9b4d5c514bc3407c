"""Import of `aiconfigurator-core` (PyPI, Apache-2.0): its measured kernels, cleaned, as the measurement schema.

The package carries millions of kernel latencies of serving frameworks on NVIDIA GPUs. Not all are kernel time. What is
taken, and why the rest is not, stands in `aiconfigurator.yaml`; every import counts both.
"""

from __future__ import annotations

import importlib.util
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from rich.console import Console

from neusight_jax.datasets.imported import ImportReport, write_measurements
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing, scratch_folder
from neusight_jax.progress import follow
from neusight_jax.tables import table

PACKAGE = "aiconfigurator_core"
DATA = Path("systems") / "data"

DEVICES: dict[str, str] = table("datasets", "aiconfigurator")["devices"]
"""Folders taken, and their GPUs in the catalog."""

ATTRIBUTION = """\
Rows of this folder are derived from the measurements in the Python package aiconfigurator-core {version},
https://pypi.org/project/aiconfigurator-core/, Copyright (c) NVIDIA CORPORATION & AFFILIATES.
Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
Changed: rows were selected, converted to seconds, renamed to another schema, and medians taken over frameworks.
"""


_WARM = "faster than light (warm in a cache)"


@dataclass(frozen=True)
class Rule:
    """Rule for one kind of table.

    Attributes:
      name: of the output file.
      table: file in the package, below the folder of a GPU and of a framework and version.
      keep: reason rows are left out -> which rows of a table pass, as a query.
      columns: the schema's columns from the package's, as expressions.
      latency: its column of times, milliseconds, as an expression.
      others: (1 or -1, table of the same GPU), quantizations, whose times are added or taken off, shape by shape.
      median: whether equal shapes of several frameworks become their median.
    """

    name: str
    table: str
    keep: dict[str, str]
    columns: dict[str, str]
    median: bool = False
    others: Sequence[tuple[float, str]] = ()
    latency: str = "latency"


def _merged(parts: Iterable[Any], written: Mapping[str, str]) -> dict[str, str]:
    """Mappings, some in lists, as one, a later one before an earlier one; parts of expressions are written out."""
    merged: dict[str, str] = {}
    for part in parts:
        for name, expression in (_merged(part, written) if isinstance(part, list) else part).items():
            merged[name] = str(expression)
            # Parts are made of parts that stand below them, so that one pass writes all of them out.
            for place, text in written.items():
                merged[name] = merged[name].replace(f"<{place}>", text)
    return merged


def _rules() -> Iterator[Rule]:
    content = table("datasets", "aiconfigurator")
    for name, row in content["rules"].items():
        keep, columns = (_merged(row[key], content["parts"]) for key in ("keep", "columns"))
        yield Rule(name, **{**row, "keep": keep, "columns": columns})


RULES: tuple[Rule, ...] = tuple(_rules())


def import_aiconfigurator(
    source: Path | str | None, output: Path | str, console: Console | None = None
) -> ImportReport:
    """Import the clean part of `aiconfigurator-core` into a folder of the measurement schema.

    Rows faster than light are left out and counted: a working set beyond L2 that beats the memory bandwidth was warm
    in a cache. Smaller working sets may, and the model says so itself.

    Args:
      source: an unpacked wheel, a wheel, or None for the installed package (extra `aiconfigurator`).
      output: folder to write, new or empty; gets `kernels/*.parquet` and `ATTRIBUTION`; console: for progress.
    Raises: `InputError` when the source holds no such data.
    """
    target = Path(output)
    refuse_existing(target)
    with _package(source) as root:
        version = _version(root)
        tables = {rule.name: _read(root, rule) for rule in follow(RULES, "reading", console)}
    if not any(len(frame) for frame, _ in tables.values()):
        raise InputError(f"{source or PACKAGE}: holds no row that the rules take; expected aiconfigurator-core 0.12")
    frames = {f"kernels/{name}.parquet": frame for name, (frame, _) in tables.items()}
    write_measurements(target, frames, {"ATTRIBUTION": ATTRIBUTION.format(version=version)})
    rows = {name: len(frame) for name, (frame, _) in tables.items() if len(frame)}
    left_out = {(name, why): count for name, (_, counts) in tables.items() for why, count in counts.items()}
    return ImportReport(target, f"of aiconfigurator-core {version}", rows, left_out)


@contextmanager
def _package(source: Path | str | None) -> Iterator[Path]:
    """The folder that holds `systems/data`."""
    if source is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                "aiconfigurator-core is not installed; from the clone: `pip install '.[aiconfigurator]'`, or give the "
                "path of its wheel or of the unpacked wheel"
            )
        yield Path(next(iter(spec.submodule_search_locations)))
        return
    path = Path(source)
    if path.suffix == ".whl" and path.is_file():
        with scratch_folder() as folder:
            try:
                with zipfile.ZipFile(path) as wheel:
                    wheel.extractall(folder)
            except (zipfile.BadZipFile, OSError) as error:
                raise InputError(f"{path}: not a whole wheel ({error}); download it again") from None
            yield _root(folder, path)
        return
    yield _root(path, path)


def _root(folder: Path, source: Path) -> Path:
    for root in (folder, folder / PACKAGE, folder.parent.parent if folder.name == "data" else folder):
        if (root / DATA).is_dir():
            return root
    raise InputError(
        f"{source}: holds no {PACKAGE}/{DATA}; expected the wheel of aiconfigurator-core, or the folder it unpacks to"
    )


def _version(root: Path) -> str:
    infos = sorted(root.parent.glob("aiconfigurator_core-*.dist-info"))
    return infos[-1].name.removeprefix("aiconfigurator_core-").removesuffix(".dist-info") if infos else "unknown"


def _read(root: Path, rule: Rule) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows of one rule from all GPUs, and how many were left out by reason."""
    parts: list[pd.DataFrame] = []
    counts = dict.fromkeys((*rule.keep, "not a time", _WARM), 0)
    # Medians are over frameworks, each a table of its own, so they wait until all are read.
    for folder, device in DEVICES.items():
        for file in sorted((root / DATA / folder).glob(rule.table)):
            # What says where rows come from is missing in the oldest tables.
            origin: dict[str, Any] = {"framework": file.parts[-3], "version": file.parent.name, "kernel_source": ""}
            origin |= {"folder": folder, "gpus_per_node": 4 if folder in ("gb200", "gb300") else 8}
            raw = _table(file)
            raw = raw.assign(**{name: value for name, value in origin.items() if name not in raw})
            try:
                raw = _kept(raw, rule.keep, counts)
                for sign, other in rule.others if len(raw) else ():
                    raw = _added(raw, sign, _table(root / DATA / folder / other.format(**origin)))
                raw = _kept(raw, {"not a time": f"{rule.latency} > 0"}, counts)
                parts.append(_written(raw, rule).assign(device=device))
            except (KeyError, NameError) as error:
                name = re.search("'.*?'", str(error))
                raise InputError(
                    f"{file}: column {name and name[0]} is missing; expected aiconfigurator-core 0.12"
                ) from None
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(), counts
    frame = pd.concat(filled, ignore_index=True)
    if rule.median:
        shape = ["device", *rule.columns]
        frame = frame.groupby(shape, as_index=False, sort=False).agg(
            latency_s=("latency_s", "median"),
            framework=("framework", "+".join),
            version=("version", "+".join),
            **{name: (name, "median") for name in POWER if name in frame},
        )
    warm = check_rows(frame, rule.name)[1].bad
    counts[_WARM] = int(warm.sum())
    return frame[~warm].reset_index(drop=True), counts


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: not a readable Parquet file ({reason}); install the package again") from None


def _added(raw: pd.DataFrame, sign: float, other: pd.DataFrame) -> pd.DataFrame:
    """Times of two tables added, shape by shape, or taken off; the second may be 0, where it was a difference."""
    both = raw.merge(other[["m", "k", "latency"]], on=["m", "k"], suffixes=("", "_more"))
    both["latency"] += sign * both.pop("latency_more").clip(lower=0)
    return both


def _kept(raw: pd.DataFrame, keep: dict[str, str], counts: dict[str, int]) -> pd.DataFrame:
    """Rows of one table that pass; the others are counted by reason."""
    # One reason after the other, so that a row that several leave out is counted once.
    for reason, passes in keep.items():
        kept = raw.query(passes, engine="python")
        counts[reason] += len(raw) - len(kept)
        raw = kept
    return raw


POWER: dict[str, tuple[str, ...]] = {"power_w": ("power_w", "power"), "power_limit_w": ("power_limit_w", "power_limit")}
"""Columns of watts of the schema, and what versions of the package that have them call them; 0 = not measured."""


def _watts(raw: pd.DataFrame) -> dict[str, pd.Series]:
    """Columns of watts that a table has."""
    present = {column: name for column, names in POWER.items() for name in names if name in raw}
    return {column: raw[name].where(raw[name] > 0.0) for column, name in present.items()}


def _written(raw: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Rows of one table in the schema's columns and with where they come from."""
    if "window_size" not in raw:
        raw = raw.assign(window_size=0)  # older tables of attention have none
    columns = {name: raw.eval(expression, engine="python") for name, expression in rule.columns.items()}
    return pd.DataFrame(columns, index=raw.index).assign(
        latency_s=np.asarray(raw.eval(rule.latency, engine="python"), np.float64) * 1e-3,
        framework=raw["framework"].str.lower(),
        version=raw["version"].astype(str),
        kernel_source=raw["kernel_source"],
        **_watts(raw),
    )
