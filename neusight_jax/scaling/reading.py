"""`read_trace`: the one door for traces of all kinds, by name and by what the file holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from neusight_jax.errors import InputError
from neusight_jax.scaling.trace import PACKED, Trace, content_kind

EXPECTED = "expected .json or .json.gz (PyTorch's or JAX's profiler), .csv (Nsight Systems, rocprof) or .parquet"
_AS_CSV = "write it as CSV: `nsys stats --format csv --report cuda_gpu_trace FILE`"
_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys((".nsys-rep", ".qdrep", ".qdstrm"), f"a report of Nsight Systems; {_AS_CSV}"),
    **dict.fromkeys((".sqlite", ".db"), f"a database; {_AS_CSV}, or `rocprofv3 --output-format csv`"),
    ".ncu-rep": "a report of Nsight Compute, which times kernels one by one; record the run with Nsight Systems",
    ".pb": "a profile in XProf's own format; give the *.trace.json.gz beside it",
    **dict.fromkeys((".pickle", ".pkl"), "a memory snapshot, which has no times; record the run with torch.profiler"),
}
"""Suffix -> what such a file is and how to get what can be read."""


def read_trace(path: str | os.PathLike[str], origin: str = "", select: Mapping[str, str] | None = None) -> Trace:
    """Read a trace.

    Args:
      path: the file; or the folder that `jax.profiler.trace` wrote.
      origin: device of a per-operator table with several. select: column -> value, for one with several runs.
    Raises: `InputError` for one that is not there, damaged or of another kind.
    """
    file = Path(path)
    if not file.exists():
        raise InputError(f"{file}: no such file; expected a trace (.json, .json.gz), a CSV or a Parquet table")
    suffix = "" if file.is_dir() else _suffix(file)
    if suffix == ".parquet":
        from neusight_jax.scaling.tables import read_per_op

        return read_per_op(file, origin or None, select)
    if suffix in (".csv", ".tsv"):
        from neusight_jax.scaling.tables import read_kernel_csv

        return read_kernel_csv(file)
    kind = "json" if file.is_dir() else content_kind(file)
    if kind == "sqlite" or suffix in _ELSEWHERE:
        raise InputError(f"{file}: {_ELSEWHERE[suffix if suffix in _ELSEWHERE else '.sqlite']}")
    if kind == "json" or suffix in (".json", ".trace"):
        from neusight_jax.scaling.chrome import read_chrome

        return read_chrome(file)
    raise InputError(f"{file}: unknown kind of trace; {EXPECTED}")


def _suffix(file: Path) -> str:
    """Suffix of a file's name, that of what is packed where it is."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while len(suffixes) > 1 and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""
