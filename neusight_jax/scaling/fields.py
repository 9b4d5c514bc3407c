"""Values of events as files write them, checked: a value that is not what it should be is None, -1 or text."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from neusight_jax.scaling.trace import Launch


def number(value: Any) -> float | None:
    """A finite number, or None; old exporters write numbers as text."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def identifier(args: Mapping[str, Any], *names: str) -> int:
    """A whole number under the first of these names, as 64 bits; -1 without one."""
    value = next((args[name] for name in names if name in args), None)
    try:
        found = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return -1
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)


def printable(name: str) -> str:
    """A name without lone surrogates, which no terminal takes."""
    return name.encode("utf-8", "replace").decode()


def launch_of(grid: Any, block: Any, registers: Any = None, shared: Any = None) -> Launch | None:
    """A launch from sizes as a file gives them; None if they are no sizes."""
    try:
        blocks, threads = (math.prod(float(size) for size in sizes) for sizes in (grid or [0], block or [0]))
    except (TypeError, ValueError, OverflowError):
        return None
    if not (0 < blocks < 1e15 and 0 < threads <= 65536):
        return None
    return Launch(blocks, threads, max(number(registers) or 0.0, 0.0), max(number(shared) or 0.0, 0.0))


def hashable(value: Any) -> Hashable:
    """A value of JSON as a key; a list or object as its text."""
    if isinstance(value, str):
        return printable(value)
    return value if isinstance(value, int | float | type(None)) else printable(repr(value))
