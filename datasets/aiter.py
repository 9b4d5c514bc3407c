"""Import of ROCm/aiter (GitHub, MIT): its tuned matrix products on AMD's matrix cores, as the measurement schema.

Each row is the fastest of all kernels its authors tried, so a bound under what default libraries reach. A file names
its board by the number of compute units alone: 304 are MI300X or MI325X, taken as MI300X. A file of which a row beats
the peak of that board was measured on another one, and is left out whole.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from neusight_jax.datasets.imported import ImportReport, write_measurements
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing
from neusight_jax.hardware.catalog import catalog_gpu
from neusight_jax.kernels.family import SCALE_BLOCK

CONFIGS = "aiter/configs"
DEVICES: dict[tuple[str, int], str] = {
    ("gfx942", 304): "AMD Instinct MI300X",
    ("gfx942", 80): "AMD Instinct MI308X",
    ("gfx950", 256): "AMD Instinct MI355X",
}
"""GPUs of the catalog by architecture and compute units; MI350X has as many as MI355X, and files do not tell them
apart."""
FORMATS: dict[str, tuple[str, float]] = {
    "a4w4": ("fp4", 32.0),
    "a8w8_blockscale": ("fp8", 128.0),
    "a8w8": ("fp8", 0.0),
    "bf16": ("bf16", 0.0),
}
"""Dtype, and elements that share a scale, by how the name of a file begins."""
COLUMNS: tuple[str, ...] = ("gfx", "cu_num", "batch", "m", "n", "k", "format", "file", "latency_s")
"""Columns of a Parquet table of the rows, its formats named bf16, fp8, fp8_block and fp4."""
_TABLE_FORMATS = {"fp4": "a4w4", "fp8_block": "a8w8_blockscale", "fp8": "a8w8", "bf16": "bf16"}
SHORTEST_S = 1.5e-6
"""No kernel is shorter than its launch: shorter rows are failed measurements."""
FAR_FROM_LIGHT = 1.1
"""How many times the peak of its board a row must reach for its file to be another board's."""

ATTRIBUTION = """\
Rows of this folder are derived from the tuned configurations of ROCm/aiter, https://github.com/ROCm/aiter,
Copyright (c) Advanced Micro Devices, Inc., under the MIT License.
Changed: rows were selected, converted to seconds, and renamed to another schema.
"""


def import_aiter(source: Path | str, output: Path | str) -> ImportReport:
    """Import tuned products of ROCm/aiter into a folder of the measurement schema.

    Args:
      source: a checkout, its folder `aiter/configs`, or a Parquet table of the rows (`COLUMNS`).
      output: folder to write, new or empty; gets `kernels/aiter.parquet` and `ATTRIBUTION`.
    Raises: `InputError` when the source holds no such rows.
    """
    target, origin = Path(output), Path(source)
    refuse_existing(target)
    raw = _table(origin) if origin.is_file() else _configs(origin)
    if raw.empty:
        raise InputError(f"{origin}: holds no tuned product; expected a checkout of ROCm/aiter, or its {CONFIGS}")
    left_out: Counter[str] = Counter()
    frame = _in_schema(raw, left_out)
    if frame.empty:
        raise InputError(f"{origin}: no row is of a known board; expected {', '.join(sorted(set(DEVICES.values())))}")
    light = check_rows(frame, "aiter")[1].bad
    left_out["rows faster than light"] += int(light.sum())
    frame = frame[~light].reset_index(drop=True)
    write_measurements(target, {"kernels/aiter.parquet": frame}, {"ATTRIBUTION": ATTRIBUTION})
    rows = dict(sorted(Counter(frame["device"] + " " + frame["dtype"]).items()))
    return ImportReport(target, "of ROCm/aiter", rows, {("", why): count for why, count in left_out.items()})


def _table(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)[list(COLUMNS)]
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{file}: not a Parquet table with columns {', '.join(COLUMNS)} ({reason})") from None
    return frame.assign(format=frame["format"].astype(str).map(_TABLE_FORMATS), file=frame["file"].astype(str))


def _configs(folder: Path) -> pd.DataFrame:
    """Rows of all files of products below a folder, in `COLUMNS`."""
    parts = []
    # Formats stand in the names of files alone; folders hold tunings of other kernels too.
    for file in sorted(folder.rglob("*gemm*.csv")):
        form = next((key for key in FORMATS if key in file.name), None)
        if form is None:
            continue
        raw = pd.read_csv(file, skipinitialspace=True)
        raw.columns = [str(name).strip().lower() for name in raw.columns]
        missing = [name for name in ("cu_num", "m", "n", "k", "us") if name not in raw]
        if missing:
            raise InputError(f"{file}: column {missing[0]} is missing; expected a file of tuned products of ROCm/aiter")
        # Older files have no architecture: they are of the one that was tuned first.
        usual = {"batch": raw.get("b", 1), "gfx": raw.get("gfx", np.where(raw["cu_num"] == 256, "gfx950", "gfx942"))}
        seconds = pd.to_numeric(raw["us"], errors="coerce") * 1e-6
        parts.append(raw.assign(**usual, format=form, file=file.name, latency_s=seconds)[list(COLUMNS)])
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=COLUMNS)


def _in_schema(raw: pd.DataFrame, left_out: Counter[str]) -> pd.DataFrame:
    """Rows of known boards in the schema's columns, where n is the contraction; the others are counted by reason."""
    boards = [DEVICES.get((str(gfx), int(units))) for gfx, units in zip(raw["gfx"], raw["cu_num"], strict=True)]
    timed = np.isfinite(raw["latency_s"]) & (raw["latency_s"] >= SHORTEST_S)
    of_board = pd.Series(boards, index=raw.index).notna() & raw["format"].notna()
    left_out["rows of another board or format"] += int((~of_board).sum())
    left_out["rows without a time"] += int((of_board & ~timed).sum())
    rows = raw.assign(device=pd.Series(boards, index=raw.index, dtype=object))[of_board & timed]
    forms = [FORMATS[form] for form in rows["format"]]
    frame = pd.DataFrame(
        {
            "device": rows["device"],
            "op": np.where(rows["batch"] > 1, "bmm", "linear"),
            "dtype": [dtype for dtype, _ in forms],
            **{"b": rows["batch"], "m": rows["m"], "n": rows["k"], "k": rows["n"]},
            SCALE_BLOCK: [block for _, block in forms],
            "latency_s": rows["latency_s"],
            "source": rows["file"],
        }
    )
    flop = 2.0 * frame["b"] * frame["m"] * frame["n"] * frame["k"]
    peaks = {
        (device, dtype): float(np.asarray(getattr(catalog_gpu(device), f"{dtype}_flop_per_s")))
        for device, dtype in set(zip(frame["device"], frame["dtype"], strict=True))
    }
    peak = np.array([peaks[key] for key in zip(frame["device"], frame["dtype"], strict=True)])
    share = pd.Series(np.where(peak > 0, flop / frame["latency_s"] / np.maximum(peak, 1.0), np.inf), frame.index)
    foreign = share.groupby([frame["device"], frame["source"]]).transform("max") > FAR_FROM_LIGHT
    left_out["rows of files that beat the peak of their board: measured on another one"] += int(foreign.sum())
    return frame[~foreign].reset_index(drop=True)
