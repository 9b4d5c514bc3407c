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
