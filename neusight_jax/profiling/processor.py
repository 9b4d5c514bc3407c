"""The processor of this machine, as if it were a GPU: its name, memory and the figures a forecast needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neusight_jax.units import GIGA, MIB

PLACEHOLDERS: dict[str, float] = {"tdp_w": 15.0, "link_bytes_per_s": 1e10, "process_nm": 7.0}
"""Figures nobody can read off a processor: watts are per core."""
LEAST_MEM_BYTES_PER_S = 1e10
MARGIN = 1.05
"""A measured rate may be this much faster next time."""
_FMA_PER_CYCLE: tuple[tuple[str, int], ...] = (("avx512f", 32), ("avx2", 16), ("asimd", 8))
"""fp32 multiply-adds per cycle and core, by instruction set: two vector units."""


def _fields() -> dict[str, str]:
    """Fields of the first core in /proc/cpuinfo; nothing where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """A name that no GPU has: `CPU <model>, <n> cores`."""
    model = _fields().get("model name") or platform.processor() or platform.machine()
    return f"CPU {' '.join(model.split())}, {cores()} cores"


def clock_hz() -> float:
    """Highest clock the system admits to, Hz."""
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text()) * 1e3
    except (OSError, ValueError):
        pass
    try:
        return float(_fields()["cpu MHz"]) * 1e6
    except (KeyError, ValueError):
        return 2.5 * GIGA


def cache_bytes() -> float:
    """Largest cache one core sees, bytes."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1024.0, "M": MIB}.get(text[-1:], 1.0)
        sizes.append(float(text.rstrip("KM")) * factor)
    return max(sizes, default=32.0 * MIB)


def memory_bytes() -> float:
    """Memory of the machine, bytes."""
    return float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))


def available_bytes() -> float | None:
    """Memory that can be had without swapping, bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def free_bytes() -> float:
    """Memory that can be had without swapping, bytes; half of all where the system does not say."""
    available = available_bytes()
    return 0.5 * memory_bytes() if available is None else available


def processor_figures(rates: Iterable[tuple[float, float, float]] = ()) -> dict[str, Any]:
    """A GPU file (`files.load_gpu`) for the processor.

    Peaks are cores × vector lanes × clock, bandwidth the least a GPU may have; both are raised to what was measured,
    since boost clocks and memory channels are not to be seen from inside. The rest are placeholders, and marked.

    Args:
      rates: (FLOP, bytes, seconds) of measured kernels; bytes that fit the cache must be given as 0.
    """
    flags = _fields().get("flags", _fields().get("Features", "")).split()
    per_cycle = next((count for name, count in _FMA_PER_CYCLE if name in flags), 4)
    peak, bandwidth = 2.0 * per_cycle * cores() * clock_hz(), LEAST_MEM_BYTES_PER_S
    for flop, moved, seconds in rates:
        peak, bandwidth = max(peak, MARGIN * flop / seconds), max(bandwidth, MARGIN * moved / seconds)
    peak = max(peak, 1.1e10)
    sixteen = 2.0 * peak if {"avx512_bf16", "amx_bf16"} & set(flags) else peak
    return {
        "name": processor_name(),
        "note": "a processor described as a GPU by neusight-jax profile: SMs are cores, L2 is the last-level cache",
        "estimates": sorted(
            ["fp32_flop_per_s", "bf16_flop_per_s", "fp16_flop_per_s", "mem_bytes_per_s", *PLACEHOLDERS]
        ),
        "num_sms": float(cores()),
        "clock_hz": clock_hz(),
        "mem_bytes_per_s": bandwidth,
        "mem_bytes": max(memory_bytes(), 1e9),
        "l2_bytes": max(cache_bytes(), 1e5),
        **PLACEHOLDERS,
        "tdp_w": PLACEHOLDERS["tdp_w"] * cores(),
        "fp32_flop_per_s": peak,
        "bf16_flop_per_s": sixteen,
        "fp16_flop_per_s": peak,
    }
