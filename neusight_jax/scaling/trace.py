"""Trace: what was measured on the origin, kernel by kernel, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neusight_jax.kernels.table import Kernel


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched, as far as the trace says.

    Attributes:
      blocks: thread blocks of the grid; threads: threads of a block.
      registers: of a thread, 0 if unknown; shared_bytes: of a block.
    """

    blocks: float
    threads: float
    registers: float = 0.0
    shared_bytes: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Launches that are alike, measured together.

    Attributes:
      name: kernel or node name, for people.
      kind: what the name says it is (`names.KINDS`).
      seconds: measured time of all launches together; count: how many.
      kernels: the work behind one launch in terms this package forecasts; empty if its shapes are unknown.
      dtype: of that work.
      launch: grid and block, if known.
    """

    name: str
    kind: str
    seconds: float
    count: float = 1.0
    kernels: tuple[Kernel, ...] = ()
    dtype: str = "fp32"
    launch: Launch | None = None


@dataclass(frozen=True)
class Trace:
    """A measured run.

    Attributes:
      source: file name, for people.
      items: everything that took time.
      busy_s: time in which at least one kernel ran; less than the sum where streams overlap.
      span_s: from the first start to the last end.
      notes: what was odd in the file, and how it was taken.
    """

    source: str
    items: tuple[Measured, ...]
    busy_s: float
    span_s: float
    notes: tuple[str, ...] = ()

    @property
    def kernel_s(self) -> float:
        """Seconds of all kernels, one after another."""
        return float(sum(item.seconds for item in self.items))


def busy_seconds(starts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Length of the union of intervals, and the span they lie in; seconds. (0, 0) without intervals."""
    if not len(starts):
        return 0.0, 0.0
    order = np.argsort(starts, kind="stable")
    begin, end = starts[order], starts[order] + seconds[order]
    reached = np.maximum.accumulate(end)
    covered_until = np.concatenate([[-np.inf], reached[:-1]])
    busy = np.maximum(end - np.maximum(begin, covered_until), 0.0)
    return float(busy.sum()), float(reached[-1] - begin[0])
