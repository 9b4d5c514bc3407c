"""Importer of the NeuSight repository's device files: one JSON per device, GFLOP/s, GB/s, GB, MB and MHz."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.hardware.gpu import (
    FIELDS,
    GPU,
    NAMED,
    REQUIRED_FIELDS,
    check_figure,
    named_figure,
    vendor_of_name,
    with_derived,
)
from neusight_jax.units import GB, GIB, GIGA, MEGA, MIB

_COLUMNS: dict[str, tuple[str, str, float]] = {
    "num_sms": ("Num_Sm num_sms number_of_sms num_cu number_of_cus sm_count", "", 1.0),
    "clock_hz": ("Clock clock_mhz Freq frequency gpu_clock boost_clock sm_clock", "MHz", MEGA),
    "mem_bytes_per_s": ("Mem_Bw memory_bandwidth_gb_per_s memory_bandwidth mem_bandwidth bandwidth", "GB/s", GB),
    "mem_bytes": ("Dev_Mem memory_size_gb device_memory memory_size mem_size memory", "GB", GIB),
    "l2_bytes": ("L2Cache l2_cache_mb l2_cache_size l2_size l2", "MB", MIB),
    "fp32_flop_per_s": (
        "SingleFLOPs peak_fp32_gflop_per_s single_flop SingleFLOPsVEC single_flops_vector peak_fp32_vector_gflop_per_s",
        "GFLOP/s",
        GIGA,
    ),
    "fp32_matrix_flop_per_s": ("SingleFLOPsMM single_flops_matrix peak_fp32_matrix_gflop_per_s", "GFLOP/s", GIGA),
}
"""Figures of a device file: the spellings they go by, the first for messages, their unit, and it in base units."""
_EXTRA = {field: (field, "", 1.0) for field in FIELDS if field not in _COLUMNS}
"""Figures in base units that a device file may carry beside its own."""
_DEVICE = ("device", "device_name", "name", "gpu")
_CORES = ("cores_per_sm", "core_per_sm", "num_core_per_sm", "num_cores_per_sm", "cuda_cores_per_sm")
_SLIPS: dict[tuple[str, str], tuple[float, float]] = {
    ("Tesla P4", "num_sms"): (40.0, 20.0),  # listed as 40 SMs of 64 lanes, is 20 of 128
    ("NVIDIA L4", "num_sms"): (60.0, 58.0),  # the full AD104 die; the L4 has 58 enabled
    ("NVIDIA L4", "fp32_flop_per_s"): (31.334e12, 30.29e12),  # computed from 60 SMs
    ("AMD Instinct MI210", "l2_bytes"): (16 * MIB, 8 * MIB),  # a die has 8 MiB
    ("AMD Instinct MI250", "l2_bytes"): (16 * MIB, 8 * MIB),
}
"""Known slips of the reference sheet, (device, field) -> (listed, true); corrected on import."""


def is_reference_sheet(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is in the layout of the NeuSight repository's device files, judged by its keys."""
    if "base" in content or any(field in content for field in _COLUMNS):
        return False
    spellings = {_fold(name) for names, _, _ in _COLUMNS.values() for name in names.split()}
    return any(_fold(key) in spellings for key in content)


def device_of(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The figures of a mapping with its name among them, also where they are nested under the name of their device.

    Raises: `InputError`, opened by `where`, for figures of several devices.
    """
    if not content or not all(isinstance(value, dict) for value in content.values()):
        return content
    if len(content) > 1:
        names = ", ".join(map(repr, content))
        raise InputError(f"{where}: holds {len(content)} devices, {names}; give each device a file of its own")
    [(name, figures)] = content.items()
    return {**({} if any(_fold(key) in map(_fold, _DEVICE) for key in figures) else {"name": name}), **figures}


def gpu_from_sheet(content: Mapping[str, Any], path: Path) -> tuple[str, GPU]:
    """Name and GPU from the mapping in a device file, e.g. Device, Num_Sm, SingleFLOPs (GFLOP/s), Mem_Bw (GB/s).

    Figures it does not have (board power, link, process, matrix paths) are those of the catalog GPU of the same name;
    known slips are corrected where listed as such. The vendor is the one it names, or its name begins with.

    Args:
      content: the mapping; path: of the file, for messages, and the name if it gives none.
    Raises: `InputError` naming the figure to add or to mend.
    """
    where = path.name
    sheet = {_fold(key): value for key, value in content.items()}
    name = str(next((sheet[_fold(key)] for key in _DEVICE if sheet.get(_fold(key))), path.stem))
    canonical = canonical_name(name)
    figures = _figures(sheet, canonical, where)
    _check_peak(sheet, figures, where)
    if canonical is not None:
        return name, catalog_gpu(canonical).replace(**figures)
    missing = [field for field in REQUIRED_FIELDS if field not in figures]
    if missing:
        field = missing[0]
        spellings, unit, _ = _COLUMNS.get(field, ("", "", 0.0))
        add = f"{spellings.split()[0]} ({unit or 'a count'})" if spellings else field
        raise InputError(f"{where}: {name!r} is not in the GPU catalog and the file has no {field}; add {add}")
    return name, GPU(**with_derived(vendor_of_name(name) | figures))


def _figures(sheet: Mapping[str, Any], canonical: str | None, where: str) -> dict[str, float]:
    """Figures of a sheet with folded keys, in base units, slips corrected."""
    figures: dict[str, float] = {}
    for field, (spellings, unit, factor) in (_COLUMNS | _EXTRA).items():
        # Last spelling first: where a sheet has both, the vector peak says more than the plain one.
        for spelling in reversed(spellings.split()):
            if _fold(spelling) in sheet:
                cell = sheet[_fold(spelling)]
                if field in NAMED and isinstance(cell, str):
                    value = named_figure(field, cell, where)
                else:
                    value = _number(cell, spelling, unit, where)
                if field == "clock_hz" and value < 100.0:
                    value *= 1e3  # GHz in a column of MHz
                figures[field] = value * factor
                break
    # A slip is known by the value listed, so that a sheet that somebody mended stays as it is.
    for field, value in figures.items():
        slip, true = _SLIPS.get((canonical or "", field), (math.nan, math.nan))
        if math.isclose(value, slip, rel_tol=1e-3):
            figures[field] = true
        check_figure(field, figures[field], where)
    return figures


def _check_peak(sheet: Mapping[str, Any], figures: Mapping[str, float], where: str) -> None:
    """`InputError` where an NVIDIA sheet's fp32 peak is not near SMs × cores × 2 × clock, as listed."""
    cores = next((sheet[_fold(key)] for key in _CORES if _fold(key) in sheet), None)
    needed = ("num_sms", "clock_hz", "fp32_flop_per_s")
    is_count = isinstance(cores, int | float) and not isinstance(cores, bool) and cores >= 16
    if not is_count or any(field not in figures for field in needed):
        return
    # Cores go with the SMs as listed: a slip may count half SMs with half the cores.
    listed_sms = next(float(sheet[_fold(s)]) for s in _COLUMNS["num_sms"][0].split() if _fold(s) in sheet)
    derived = listed_sms * float(cores or 0) * 2 * figures["clock_hz"]
    ratio = figures["fp32_flop_per_s"] / derived
    if not 0.75 <= ratio <= 1.34:
        raise InputError(
            f"{where}: the fp32 peak is {figures['fp32_flop_per_s'] / GIGA:.0f} GFLOP/s but SMs x cores x 2 x clock is "
            f"{derived / GIGA:.0f}; expected agreement within 25%; is it the peak of another dtype, or of several GPUs?"
        )


def _number(value: object, spelling: str, unit: str, where: str) -> float:
    """A figure of a sheet as a number; `InputError` if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: {spelling} is {value!r}, expected a number{f' in {unit}' if unit else ''}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _fold(key: str) -> str:
    """A key without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", str(key).lower())
