"""Import of `aiconfigurator-core` (PyPI, Apache-2.0): its measured kernels, cleaned, as the measurement schema.

The package carries millions of kernel latencies of serving frameworks on NVIDIA GPUs. Not all are kernel time. What is
taken, and why the rest is not, stands in `RULES`; every import counts both.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import atomic_folder, refuse_existing, scratch_folder
from neusight_jax.progress import follow

PACKAGE = "aiconfigurator_core"
DATA = Path("systems") / "data"

DEVICES: dict[str, str] = {
    "a100_sxm": "NVIDIA A100-SXM4-80GB",
    "l40s": "NVIDIA L40S",
    "h100_sxm": "NVIDIA H100 80GB HBM3",
    "h200_sxm": "NVIDIA H200",
    "b200_sxm": "NVIDIA B200",
    "b300_sxm": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
    "rtx_pro_6000_server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
"""Folders taken, and their GPUs in the catalog. Others hold collectives only, or another vendor's GPU."""

LONG_NAMES: dict[str, str] = {"bfloat16": "bf16", "nvfp4": "fp4", "fp8": "fp8"}
"""Dtypes taken, by the package's name."""

ATTRIBUTION = """\
Rows of this folder are derived from the measurements in the Python package aiconfigurator-core {version},
https://pypi.org/project/aiconfigurator-core/, Copyright (c) NVIDIA CORPORATION & AFFILIATES.
Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
Changed: rows were selected, converted to seconds, renamed to another schema, and medians taken over frameworks.
"""


@dataclass(frozen=True)
class Rule:
    """What is taken of one kind of table.

    Attributes:
      name: of the output file.
      table: file name in the package; folder: its family folder.
      keep: reason rows are left out -> which rows of a table of one framework and version pass.
      columns: the schema's columns from the package's.
      plus: a second table of the same shapes, whose times are added; "" = none.
      median: whether equal shapes of several frameworks become their median.
    """

    name: str
    folder: str
    table: str
    keep: dict[str, Callable[[pd.DataFrame], pd.Series]]
    columns: Callable[[pd.DataFrame], pd.DataFrame]
    median: bool = False
    plus: str = ""


def _gemm_columns(rows: pd.DataFrame) -> pd.DataFrame:
    # In the package k is the contraction; in the schema it is n.
    return pd.DataFrame(
        {"op": "linear", "dtype": rows["gemm_dtype"].map(LONG_NAMES), "m": rows["m"], "n": rows["k"], "k": rows["n"]}
    )


def _attention_columns(op: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def columns(rows: pd.DataFrame) -> pd.DataFrame:
        last = rows["isl"] if op == "prefill" else rows["step"] + 1
        return pd.DataFrame(
            {
                "op": op,
                "dtype": "bf16",
                "batch_size": rows["batch_size"],
                "query_length": rows["isl"],
                "kv_length": last,
                "heads": rows["num_heads"],
                "kv_heads": rows["num_key_value_heads"],
                "head_dim": rows["head_dim"],
                "causal": 1,
                "window": rows["window_size"].fillna(0).clip(lower=0) if "window_size" in rows else 0,
            }
        )

    return columns


def _expert_columns(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "op": "experts",
            "dtype": "bf16",
            "tokens": rows["num_tokens"],
            "experts": rows["num_experts"],
            "local_experts": (rows["num_experts"] // rows["moe_ep_size"]).clip(lower=1),
            "top_k": rows["topk"],
            "hidden": rows["hidden_size"],
            "inner": (rows["inter_size"] // rows["moe_tp_size"]).clip(lower=1),
        }
    )


def _quantize_columns(op: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda rows: pd.DataFrame({"op": op, "dtype": "bf16", "b": rows["m"], "h": rows["k"]})


def _is(column: str, *values: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: rows[column].isin(values)


def _wide_enough(rows: pd.DataFrame) -> pd.Series:
    return (rows["n"] >= 64) & (rows["k"] >= 64)


def _current(rows: pd.DataFrame) -> pd.Series:
    return ~rows["version"].isin(("0.5.6.post2", "0.22.0"))


_SUPERSEDED = "an older version measured again later"
_GEMM = {"another dtype": _is("gemm_dtype", "bfloat16"), _SUPERSEDED: _current, "n or k below 64": _wide_enough}


def _quantized(dtype: str, kernel: str) -> dict[str, Callable[[pd.DataFrame], pd.Series]]:
    return {
        "another dtype": _is("gemm_dtype", dtype),
        "another framework: quantized products are software, and one source is taken": _is("framework", "VLLM"),
        "another kernel; fp8_block is bound by its host": lambda rows: rows["kernel_source"].str.match(kernel),
        "n or k below 64": _wide_enough,
    }


def _attention(shortest: int) -> dict[str, Callable[[pd.DataFrame], pd.Series]]:
    return {
        "another framework: attention is software, and one source is taken": _is("framework", "VLLM"),
        _SUPERSEDED: _current,
        "another dtype of tensors or cache": lambda rows: (
            (rows["attn_dtype"] == "bfloat16") & (rows["kv_cache_dtype"] == "bfloat16")
        ),
        "a fallback or trial kernel": lambda rows: ~rows["kernel_source"].str.match(r"vllm_triton_attn|.*_fa4$"),
        "head size above 256": lambda rows: rows["head_dim"] <= 256,
        "fewer than 16 new tokens": lambda rows: rows["isl"] >= shortest,
    }


_QUANTIZE = {
    "another framework": _is("framework", "VLLM"),
    "another dtype": _is("quant_dtype", "fp8"),
}

RULES: tuple[Rule, ...] = (
    Rule("gemm_bf16", "gemm", "gemm_perf.parquet", _GEMM, _gemm_columns, median=True),
    Rule("gemm_fp8", "gemm", "gemm_perf.parquet", _quantized("fp8", "CutlassFP8ScaledMM"), _gemm_columns),
    Rule("gemm_fp4", "gemm", "gemm_perf.parquet", _quantized("nvfp4", "FlashInfer.*NvFp4"), _gemm_columns),
    Rule("prefill", "attention", "context_attention_perf.parquet", _attention(16), _attention_columns("prefill")),
    Rule("decode", "attention", "generation_attention_perf.parquet", _attention(1), _attention_columns("decode")),
    Rule(
        "experts",
        "moe",
        "moe_perf.parquet",
        {
            "another framework": _is("framework", "TRTLLM"),
            "another version": _is("version", "1.3.0rc20"),
            "another dtype": _is("moe_dtype", "bfloat16"),
            "another kernel": _is("kernel_source", "moe_torch_flow_cutlass"),
            "uneven spread of tokens": _is("distribution", "balanced"),
        },
        _expert_columns,
    ),
    Rule("quantize", "quantize", "scale_matrix_perf.parquet", _QUANTIZE, _quantize_columns("quantize")),
    Rule(
        "quantize_rows",
        "quantize",
        "scale_matrix_perf.parquet",
        _QUANTIZE,
        _quantize_columns("quantize_rows"),
        plus="computescale_perf.parquet",
    ),
)
"""What is taken. Products in bf16 are the vendor's BLAS in every framework, so their median is; for the rest one
framework (vLLM; TensorRT-LLM for experts) is the stack a forecast speaks of."""


@dataclass(frozen=True)
class AiconfiguratorReport:
    """What an import did.

    Attributes:
      output: the folder written; version: of the package.
      rows: rows written, by file; left_out: (file, reason) -> rows left out.
    """

    output: Path
    version: str
    rows: dict[str, int]
    left_out: dict[tuple[str, str], int]

    def lines(self) -> list[str]:
        """The report for people, line by line."""
        counts = ", ".join(f"{name} {count}" for name, count in self.rows.items())
        out = [f"{self.output}: {sum(self.rows.values())} rows of aiconfigurator-core {self.version} ({counts})"]
        for name in self.rows:
            reasons = [f"{count} {reason}" for (file, reason), count in self.left_out.items() if file == name and count]
            if reasons:
                out.append(f"{name}: left out {'; '.join(reasons)}")
        return out


def import_aiconfigurator(
    source: Path | str | None, output: Path | str, console: Console | None = None
) -> AiconfiguratorReport:
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
    rows: dict[str, int] = {}
    left_out: dict[tuple[str, str], int] = {}
    with atomic_folder(target) as beside:
        (beside / "kernels").mkdir(parents=True)
        (beside / "ATTRIBUTION").write_text(ATTRIBUTION.format(version=version))
        for name, (frame, counts) in tables.items():
            left_out |= {(name, reason): count for reason, count in counts.items()}
            if len(frame):
                pq.write_table(
                    pa.Table.from_pandas(frame, preserve_index=False), beside / "kernels" / f"{name}.parquet"
                )
                rows[name] = len(frame)
    return AiconfiguratorReport(target, version, rows, left_out)


@contextmanager
def _package(source: Path | str | None) -> Iterator[Path]:
    """The folder that holds `systems/data`."""
    if source is None:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or not found.submodule_search_locations:
            raise InputError(
                "aiconfigurator-core is not installed; from the clone: `pip install '.[aiconfigurator]'`, or give the "
                "path of its wheel or of the unpacked wheel"
            )
        yield Path(next(iter(found.submodule_search_locations)))
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


def _root(folder: Path, given: Path) -> Path:
    for root in (folder, folder / PACKAGE, folder.parent.parent if folder.name == "data" else folder):
        if (root / DATA).is_dir():
            return root
    raise InputError(
        f"{given}: holds no {PACKAGE}/{DATA}; expected the wheel of aiconfigurator-core, or the folder it unpacks to"
    )


def _version(root: Path) -> str:
    found = sorted(root.parent.glob("aiconfigurator_core-*.dist-info"))
    return found[-1].name.removeprefix("aiconfigurator_core-").removesuffix(".dist-info") if found else "unknown"


def _read(root: Path, rule: Rule) -> tuple[pd.DataFrame, dict[str, int]]:
    """Rows of one rule from all GPUs, and how many were left out by reason."""
    parts: list[pd.DataFrame] = []
    counts = dict.fromkeys((*rule.keep, "not a time", "faster than light (warm in a cache)"), 0)
    for folder, device in DEVICES.items():
        for file in sorted((root / DATA / folder / rule.folder).glob(f"*/*/{rule.table}")):
            raw = _table(file)
            try:
                if rule.plus:
                    raw = _added(raw, _table(file.with_name(rule.plus)))
                parts.append(_taken(raw, rule, counts).assign(device=device))
            except KeyError as error:
                raise InputError(f"{file}: column {error} is missing; expected aiconfigurator-core 0.12") from None
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(), counts
    frame = pd.concat(filled, ignore_index=True)
    if rule.median:
        shape = ["device", "op", "dtype", "m", "n", "k"]
        frame = frame.groupby(shape, as_index=False, sort=False).agg(
            latency_s=("latency_s", "median"), framework=("framework", "+".join), version=("version", "+".join)
        )
    warm = check_rows(frame, rule.name).bad
    counts["faster than light (warm in a cache)"] = int(warm.sum())
    return frame[~warm].reset_index(drop=True), counts


def _table(file: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(file)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: not a readable Parquet file ({reason}); install the package again") from None


def _added(raw: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Times of two tables added, shape by shape; the second was measured as a difference, and may be 0."""
    both = raw.merge(other[["m", "k", "latency"]], on=["m", "k"], suffixes=("", "_more"))
    return both.assign(latency=both["latency"] + both["latency_more"].clip(lower=0))


def _taken(raw: pd.DataFrame, rule: Rule, counts: dict[str, int]) -> pd.DataFrame:
    """Rows of one table that pass, in the schema's columns and with where they come from; the others are counted."""
    for reason, passes in rule.keep.items():
        kept = raw[np.asarray(passes(raw), bool)]
        counts[reason] += len(raw) - len(kept)
        raw = kept
    timed = raw[raw["latency"] > 0]
    counts["not a time"] += len(raw) - len(timed)
    return rule.columns(timed).assign(
        latency_s=timed["latency"] * 1e-3,
        framework=timed["framework"].str.lower(),
        version=timed["version"].astype(str),
        kernel_source=timed["kernel_source"],
    )
