"""Timed events of a GPU as compact columns, and a trace from them: what is double, overlaps, or was left out."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from neusight_jax.scaling.trace import Launch, Measured, Trace, busy_seconds, duration_text

LONGEST_S = 1e9
"""A duration or start beyond this (30 years) is no measurement."""


def number(value: Any) -> float | None:
    """A finite number, or None; old exporters write numbers as text."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def identifier(args: Mapping[str, Any], *names: str) -> int:
    """A whole number under the first of these names, as 64 bits; -1 without one."""
    try:
        found = int(next(args[name] for name in names if name in args))
    except (StopIteration, TypeError, ValueError, OverflowError):
        return -1
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)


def printable(name: str) -> str:
    """A name without lone surrogates, which no terminal takes."""
    return name.encode("utf-8", "replace").decode()


def hashable(value: Any) -> Hashable:
    """A value of JSON as a key; a list or object as its text."""
    return (
        value
        if isinstance(value, int | float | type(None))
        else printable(value if isinstance(value, str) else repr(value))
    )


def launch_of(grid: Any, block: Any, registers: Any = None, shared: Any = None) -> Launch | None:
    """A launch from sizes as a file gives them; None if they are no sizes."""
    try:
        blocks, threads = (math.prod(float(size) for size in sizes) for sizes in (grid or [0], block or [0]))
    except (TypeError, ValueError, OverflowError):
        return None
    if not (0 < blocks < 1e15 and 0 < threads <= 65536):
        return None
    return Launch(blocks, threads, max(number(registers) or 0.0, 0.0), max(number(shared) or 0.0, 0.0))


class Events:
    """Events taken in one by one, a few numbers each, so that millions of alike ones fit.

    Attributes:
      names: what ran -> its number, in order of first sight; lanes: likewise what it ran on.
    """

    def __init__(self) -> None:
        self.names: dict[Any, int] = {}
        self.lanes: dict[Any, int] = {}
        self._numbers, self._seconds = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._seconds) // 2

    def add(self, name: Hashable, lane: Hashable, start_s: float, seconds: float, link: int, correlation: int) -> None:
        """One event more; `link` numbers what launched it, `correlation` its launch, -1 where it is not said."""
        what = self.names.setdefault(name, len(self.names))
        self._numbers.extend((what, self.lanes.setdefault(lane, len(self.lanes)), link, correlation))
        self._seconds.extend((start_s, seconds))

    def frame(self) -> pd.DataFrame:
        """The columns what, lane, link, correlation, start_s, seconds."""
        numbers, seconds = np.frombuffer(self._numbers, np.int64), np.frombuffer(self._seconds)
        whole = pd.DataFrame(numbers.reshape(-1, 4), columns=["what", "lane", "link", "correlation"])
        return whole.assign(start_s=seconds[::2], seconds=seconds[1::2])


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


def trace_of_kernels(
    path: Path,
    events: pd.DataFrame,
    devices: Sequence[Hashable],
    item: Callable[[int, int, float, int], Measured],
    account: Account,
    notes: Iterable[str] = (),
    gpus: tuple[str, ...] = (),
) -> Trace:
    """A trace from the events of GPUs.

    Args:
      events: as `Events.frame`; `link` is what launched each. devices: GPU of every lane.
      item: number of what ran and of what launched it, seconds, count -> `Measured`.
      account: what was left out so far. notes, gpus: of the trace.
    """
    double = events.duplicated(["lane", "start_s", "what", "seconds", "correlation"]) & (events["seconds"] > 0.0)
    if double.any():
        seconds = float(events["seconds"][double].sum())
        account.add("GPU events written twice, counted once", seconds, int(double.sum()))
        events = events[~double]
    if zero := int((events["seconds"] == 0.0).sum()):
        account.add("GPU events of no duration, kept: they add nothing", count=zero)
    busy_s, span_s = busy_seconds(events["start_s"].to_numpy(), events["seconds"].to_numpy())
    said = [*account.notes(), *notes]
    sums = events["seconds"].groupby(events["lane"].map(lambda lane: devices[lane]), sort=False).sum()
    if len(sums) > 1:
        shown = ", ".join(f"{device}: {duration_text(seconds)}" for device, seconds in list(sums.items())[:8])
        said.append(f"{len(sums)} GPUs in this trace ({shown} of kernels): their kernels are summed, as if on one")
    total = float(events["seconds"].sum())
    if total > 1.001 * busy_s:
        said.append(
            f"streams overlap: {duration_text(total)} of kernels in {duration_text(busy_s)}; kernels are summed one "
            "after another, and the overlap is kept as a share in the time with idle time"
        )
    return Trace(path.name, grouped(events, item), busy_s, span_s, tuple(said), gpus)


def grouped(events: pd.DataFrame, item: Callable[[int, int, float, int], Measured]) -> tuple[Measured, ...]:
    """Events that are alike, together."""
    sums = events.groupby(["what", "link"])["seconds"].agg(["sum", "count"]).reset_index()
    return tuple(item(*row) for row in sums.itertuples(index=False, name=None))
