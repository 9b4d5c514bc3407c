"""SI constants and conversions, used where data come in and go out. Inside, everything is in base units."""

GB = 1e9
"""Gigabyte: 1e9 bytes, the unit of data sheets for bandwidth."""
GIB = 2.0**30
"""Gibibyte: 2**30 bytes, the unit of most memory sizes."""
MB = 1e6
"""Megabyte: 1e6 bytes."""
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

UNITS: dict[str, tuple[float, str]] = {
    "clock_hz": (GIGA, "GHz"),
    "mem_bytes_per_s": (GB, "GB/s"),
    "link_bytes_per_s": (GB, "GB/s"),
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
}
"""Figure or metric -> the unit people use, in base units, and its name; others are times, or FLOP/s by their names."""


def duration(seconds: float) -> str:
    """A time with a unit people read, four digits: 1.234 s, 45.67 ms, 7.891 us."""
    for unit, name in ((1.0, "s"), (MS, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / US:.4g} us"


def with_unit(name: str, value: float) -> str:
    """A figure with the unit people use."""
    if name.endswith("_flop_per_s"):
        return f"{value / TERA:.4g} TFLOP/s"
    if name in UNITS:
        scale, unit = UNITS[name]
        return f"{value / scale:.5g} {unit}"
    return duration(value)
