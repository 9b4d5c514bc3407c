"""SI constants and conversions, used where data come in and go out. Inside, everything is in base units."""

from __future__ import annotations

import operator
import re
from typing import Any

GB = 1e9
"""Gigabyte: 1e9 bytes, the unit of data sheets for bandwidth."""
GIB = 2.0**30
"""Gibibyte: 2**30 bytes, the unit of most memory sizes."""
MIB = 2.0**20
"""Mebibyte: 2**20 bytes, the unit of cache sizes."""
TERA = 1e12
"""Tera, as in TFLOP/s."""
GIGA = 1e9
"""Giga, as in GFLOP/s and GHz."""
MEGA = 1e6
"""Mega, as in MHz."""
MS = 1e-3
"""Millisecond, in seconds."""
US = 1e-6
"""Microsecond, in seconds."""
ENERGIES: tuple[tuple[float, str], ...] = ((GIGA, "GJ"), (MEGA, "MJ"), (1e3, "kJ"), (1.0, "J"))
"""Units of energy, the largest first."""
LONG_TIMES: tuple[tuple[float, float, str], ...] = ((172800.0, 86400.0, "days"), (3600.0, 3600.0, "h"))
"""From how many seconds on a time is told in a unit, and the unit."""

UNITS: dict[str, tuple[float, str]] = {
    "clock_hz": (GIGA, "GHz"),
    "mem_bytes_per_s": (GB, "GB/s"),
    "link_bytes_per_s": (GB, "GB/s"),
    "nic_bytes_per_s": (GB, "GB/s"),
    "pair_share": (1.0, "of the link rate"),
    "switch_reduction": (1.0, "of the reductions"),
    "oversubscription": (1.0, "to 1"),
    "l2_bytes": (MIB, "MiB"),
    "mem_bytes": (GB, "GB"),
    "tdp_w": (1.0, "W"),
    "process_nm": (1.0, "nm"),
    "num_sms": (1.0, "SMs"),
    "area_mm2": (1.0, "mm2"),
    "power_w": (1.0, "W"),
    "dollars": (1.0, "$"),
    "pin_bit_per_s": (GIGA, "Gbit/s"),
    "tokens_per_s": (1.0, "tokens/s"),
    "cost_per_mtok": (1.0, "per million tokens"),
    "price_per_hour": (1.0, "per hour"),
    "requests_at_once": (1.0, "requests"),
    "slo_ratio": (1.0, "of the limit"),
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "head_size", "d_ff"), (1.0, "")),
    **dict.fromkeys(("experts", "top_k", "vocabulary"), (1.0, "")),
    **dict.fromkeys(("parameters", "active_parameters", "training_tokens"), (GIGA, "billion")),
    "memory_bytes": (GB, "GB"),
    "memory_share": (1.0, "of the memory"),
    "loss": (1.0, "nats a token"),
    "train_days": (1.0, "days"),
    "total_dollars": (1.0, "$"),
    "energy_j": (1.0, "J"),
    "total_joules": (MEGA, "MJ"),
}
"""Figure or metric -> the unit people use, in base units, and its name; others are times, or FLOP/s by their names."""

TITLES: dict[str, str] = {
    "num_sms": "multiprocessors",
    "clock_hz": "clock",
    "mem_bytes_per_s": "memory bandwidth",
    "mem_bytes": "memory",
    "l2_bytes": "L2 cache",
    "tdp_w": "board power",
    "link_bytes_per_s": "link to other GPUs",
    "nic_bytes_per_s": "network of a GPU",
    "link_latency_s": "link latency",
    "nic_latency_s": "network latency",
    "process_nm": "process node",
    "exp_per_s": "exponentials",
    "matrix_flop_per_cycle": "width of matrix units",
    "power_limit_w": "power cap",
    "clock_limit_hz": "locked clock",
    "area_mm2": "chip area",
    "power_w": "power",
    "latency_s": "latency",
}
"""Figure or metric -> what people call it; peaks are called by their path, others by their name."""


def is_whole(value: Any) -> bool:
    """Whether a value is one whole number, of Python or of NumPy."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def counted(number: int, one: str, ending: str = "s") -> str:
    """A number of things in words: 1 GPU, 8 GPUs."""
    return f"{number:,} {one}{ending if number != 1 else ''}"


def duration(seconds: float, digits: int = 4) -> str:
    """A time with a unit people read, to so many digits: 91.2 days, 3.5 h, 1.234 s, 45.67 ms, 7.891 us."""
    for least, unit, name in LONG_TIMES:
        if seconds >= least:
            return f"{_digits(seconds / unit, digits)} {name}"
    for unit, name in ((1.0, "s"), (MS, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.{digits}g} {name}"
    return f"{seconds / US:.{digits}g} us"


def energy_text(joules: float, digits: int = 4) -> str:
    """Joules with a unit people read, to so many digits: 12.3 J, 603.5 kJ, 1.25 MJ."""
    scale, name = next(((scale, name) for scale, name in ENERGIES if joules >= scale), ENERGIES[-1])
    return f"{joules / scale:.{digits}g} {name}"


def title_of(name: str) -> str:
    """A figure in words; rows of a sensitivity keep what stands behind the figure: clock with peaks."""
    figure, _, rest = name.partition(" ")
    if figure.endswith("_flop_per_s"):
        words = f"{figure.removesuffix('_flop_per_s').replace('_', ' ')} peak"
    else:
        words = TITLES.get(figure, figure)
    return f"{words} {rest}".rstrip()


def unit_of(name: str, value: float = 0.0) -> tuple[float, str]:
    """Factor and name of the unit that people use for a figure; bandwidths are in TB/s where the value takes it."""
    if name in UNITS:
        scale, unit = UNITS[name]
    elif name.endswith("_latency_s"):
        scale, unit = US, "us"
    else:
        scale, unit = _SCALES.get(base_unit(name), (1.0, base_unit(name)))
    return (TERA, "TB/s") if unit == "GB/s" and value >= TERA else (scale, unit)


def labelled(name: str, value: float = 0.0) -> tuple[float, str]:
    """Factor and label of a figure or metric: memory bandwidth, GB/s (`unit_of`)."""
    scale, unit = unit_of(name, value)
    return scale, f"{title_of(name)}, {unit}" if unit else title_of(name)


def with_unit(name: str, value: float) -> str:
    """A figure with the unit people use."""
    if name.endswith("_flop_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name in UNITS:
        scale, unit = UNITS[name]
        return f"{_digits(value / scale)} {unit}".rstrip()
    return duration(value)


def _digits(value: float, digits: int = 5) -> str:
    """So many digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 10.0**digits else f"{value:.{digits}g}"


def figure_text(name: str, value: float) -> str:
    """A figure of any record with its unit; a plain number where its name says none."""
    base = base_unit(name)
    if name in UNITS or base in ("FLOP/s", "s"):
        return with_unit(name, value)
    scale, unit = unit_of(name)
    return f"{_digits(value / scale)} {unit}".rstrip()


_SCALES = {"B": (GIB, "GiB"), "B/s": (GB, "GB/s"), "Hz": (GIGA, "GHz"), "FLOP/s": (TERA, "TFLOP/s")}
"""Base unit -> the unit people use for figures that `UNITS` does not have."""
_PREFIXES = {"": 1.0, "n": 1e-9, "u": US, "µ": US, "m": MS, "k": 1e3, "M": MEGA, "G": GIGA, "T": TERA, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": MIB, "Gi": GIB, "Ti": 2.0**40}
_BASES = ("s", "B", "B/s", "bit/s", "FLOP", "FLOP/s", "Hz", "W", "J", "tokens/s", "1/s")
_FIXED = {"": (1.0, ""), "%": (0.01, ""), "min": (60.0, "s"), "h": (3600.0, "s"), "$": (1.0, "$")}
_FIXED |= {"nm": (1.0, "nm"), "mm2": (1.0, "mm2"), "SMs": (1.0, "")}
_UNIT_OF: dict[str, tuple[float, str]] = {
    **{prefix + base: (scale, base) for prefix, scale in _PREFIXES.items() for base in _BASES},
    **{prefix + base: (scale, base) for prefix, scale in _BINARY.items() for base in ("B", "B/s")},
    **_FIXED,
}
_NUMBER = re.compile(r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(\S*)")
_ENDINGS = {"_flop_per_s": "FLOP/s", "_bit_per_s": "bit/s", "_bytes_per_s": "B/s", "_bytes": "B", "_hz": "Hz"}
_ENDINGS |= {"tokens_per_s": "tokens/s", "_per_s": "1/s", "_s": "s", "_w": "W", "_nm": "nm", "_mm2": "mm2"}
_ENDINGS |= {"dollars": "$", "num_sms": "", "_joule_per_flop": "J"}


def quantity(text: str) -> tuple[float, str] | None:
    """A number with a unit in base units, and the base unit: `16MiB` is (16777216.0, "B"); None if it is none."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _UNIT_OF:
        return None
    scale, base = _UNIT_OF[match[2]]
    return float(match[1].replace(",", "")) * scale, base


_COUNT = re.compile(r"(\d[\d,]*\.?\d*(?:e[-+]?\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def count_of(text: str) -> float | None:
    """A number as people write tokens: `2T` is 2e12, `300B` 3e11, `50M` 5e7, `15e12` itself; None if it is none."""
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else float(match[1].replace(",", "")) * _THOUSANDS[match[2].lower()]


def base_unit(name: str) -> str:
    """The base unit of a figure or metric, by its name: "B/s" of mem_bytes_per_s; "" of a plain number."""
    return next((unit for ending, unit in _ENDINGS.items() if name.endswith(ending)), "")
