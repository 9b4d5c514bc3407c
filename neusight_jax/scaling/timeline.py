"""Timed events as compact columns, and a trace from them: what is double, what overlaps, what was left out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neusight_jax.scaling.trace import Measured, Trace, busy_seconds

LONGEST_S = 1e9
"""A duration or start beyond this (30 years) is no measurement."""


class Interned:
    """Values numbered in order of first sight, so that millions of alike events cost a number each."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        """Number of a value."""
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        """The values by number."""
        return list(self.numbers)


class Columns:
    """Events as compact columns: number of what ran, of what launched it, of its lane, its correlation; seconds."""

    def __init__(self) -> None:
        self.what, self.link, self.lane, self.correlation = array("q"), array("q"), array("q"), array("q")
        self.start_s, self.seconds = array("d"), array("d")

    def add(self, what: int, link: int, lane: int, start_s: float, seconds: float, correlation: int = -1) -> None:
        """One event more."""
        self.what.append(what)
        self.link.append(link)
        self.lane.append(lane)
        self.correlation.append(correlation)
        self.start_s.append(start_s)
        self.seconds.append(seconds)

    def __len__(self) -> int:
        return len(self.what)

    def arrays(self) -> dict[str, np.ndarray]:
        """The columns as arrays of equal length."""
        whole = {name: np.frombuffer(getattr(self, name), np.int64) for name in ("what", "link", "lane", "correlation")}
        return whole | {name: np.frombuffer(getattr(self, name)) for name in ("start_s", "seconds")}


class Account:
    """Rows that were left out, merged or kept against doubt: by reason, how many and how long."""

    def __init__(self) -> None:
        self.reasons: dict[str, tuple[int, float]] = {}

    def add(self, reason: str, seconds: float = 0.0, count: int = 1) -> None:
        """Rows of a reason, which reads after their number."""
        known, total = self.reasons.get(reason, (0, 0.0))
        self.reasons[reason] = (known + count, total + seconds)

    def notes(self) -> list[str]:
        """One note that says them all; none without any."""
        parts = [
            f"{count} {reason}{f' ({duration_text(seconds)})' if seconds > 0.0 else ''}"
            for reason, (count, seconds) in self.reasons.items()
            if count
        ]
        return ["; ".join(parts)] if parts else []


def duration_text(seconds: float) -> str:
    """A duration for people: 12.3 ms."""
    size, unit = next(((size, unit) for size, unit in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
    return f"{seconds / size:.4g} {unit}"


def trace_of_kernels(
    path: Path,
    columns: dict[str, np.ndarray],
    devices: Sequence[Hashable],
    item: Callable[[tuple[int, int], float, int], Measured],
    account: Account,
    notes: Iterable[str] = (),
    gpus: tuple[str, ...] = (),
) -> Trace:
    """A trace from the events of GPUs.

    Args:
      columns: as `Columns.arrays`; `link` is what launched each.
      devices: GPU of every lane.
      item: what ran and what launched it, seconds, count -> `Measured`.
      account: what was left out so far. notes, gpus: of the trace.
    """
    kept = columns if not len(columns["what"]) else _without_doubles(columns, account)
    zero = int((kept["seconds"] == 0.0).sum())
    if zero:
        account.add("GPU events of no duration, kept: they add nothing", count=zero)
    start_s, seconds = kept["start_s"], kept["seconds"]
    busy_s, span_s = busy_seconds(start_s, seconds)
    said = [*account.notes(), *notes, *_device_notes(kept, devices)]
    total = float(seconds.sum())
    if total > 1.001 * busy_s:
        said.append(
            f"streams overlap: {duration_text(total)} of kernels in {duration_text(busy_s)}; kernels are summed one "
            "after another, and the overlap is kept as a share in the time with idle time"
        )
    return Trace(path.name, grouped(kept["what"], kept["link"], seconds, item), busy_s, span_s, tuple(said), gpus)


def grouped(
    what: np.ndarray, link: np.ndarray, seconds: np.ndarray, item: Callable[[tuple[int, int], float, int], Measured]
) -> tuple[Measured, ...]:
    """Events that are alike, together."""
    pairs, where = np.unique(np.stack([what, link], axis=1), axis=0, return_inverse=True)
    where = where.ravel()
    sums = np.bincount(where, weights=seconds, minlength=len(pairs))
    counts = np.bincount(where, minlength=len(pairs))
    return tuple(item((int(pair[0]), int(pair[1])), float(sums[at]), int(counts[at])) for at, pair in enumerate(pairs))


def _without_doubles(columns: dict[str, np.ndarray], account: Account) -> dict[str, np.ndarray]:
    """Events that are not repeated: of the same name, lane, start, duration and correlation."""
    order = np.lexsort(
        (columns["correlation"], columns["seconds"], columns["what"], columns["start_s"], columns["lane"])
    )
    same = np.ones(len(order) - 1, bool)
    for name in ("lane", "start_s", "what", "seconds", "correlation"):
        values = columns[name][order]
        same &= values[1:] == values[:-1]
    same &= columns["seconds"][order][1:] > 0.0
    double = order[1:][same]
    if len(double):
        account.add("GPU events written twice, counted once", float(columns["seconds"][double].sum()), len(double))
    keep = np.ones(len(order), bool)
    keep[double] = False
    return {name: values[keep] for name, values in columns.items()}


def _device_notes(columns: dict[str, np.ndarray], devices: Sequence[Hashable]) -> list[str]:
    sums: dict[Hashable, float] = {}
    for lane, seconds in enumerate(np.bincount(columns["lane"], weights=columns["seconds"], minlength=len(devices))):
        if (columns["lane"] == lane).any():
            sums[devices[lane]] = sums.get(devices[lane], 0.0) + float(seconds)
    if len(sums) < 2:
        return []
    shown = ", ".join(f"{device}: {duration_text(seconds)}" for device, seconds in list(sums.items())[:8])
    return [f"{len(sums)} GPUs in this trace ({shown} of kernels): their kernels are summed, as if on one"]
