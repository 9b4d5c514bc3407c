"""A workload of a sweep or a design: a graph's distinct kernels, what it is called, and how much it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.distinct import distinct
from neusight_jax.kernels.table import KernelBatch, KernelTable


@dataclass(frozen=True)
class Workload:
    """A model at work.

    Attributes:
      name: unique among the workloads it is used with.
      graph: the model and its workload.
      kernels: its distinct kernels.
      weight: how much it counts beside others, > 0.
    """

    name: str
    graph: Graph
    kernels: KernelTable
    weight: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.graph.step_tokens


def workload(graph: Graph, weight: float = 1.0, name: str = "") -> Workload:
    """A workload from a graph, called "MODEL MODE batch×sequence" unless it is given a name."""
    if not weight > 0:
        raise InputError(f"weight of {graph.name} is {weight:g}, expected a positive number")
    shape = f"{graph.batch_size}x{graph.sequence_length}"
    return Workload(name or f"{graph.name} {graph.mode} {shape}", graph, distinct(graph.kernels), float(weight))


def combined(loads: Sequence[Workload]) -> tuple[KernelTable, dict[str, Float[np.ndarray, "workload kernel"]]]:
    """One table of all workloads' kernels, and how often each workload launches each: one program for all of them."""
    families, counts = {}, {}
    for name in dict.fromkeys(name for load in loads for name in load.kernels.families):
        own = [
            (place, load.kernels.families[name]) for place, load in enumerate(loads) if name in load.kernels.families
        ]
        rows = np.cumsum([0, *(len(batch.row) for _, batch in own)])
        counts[name] = np.zeros((len(loads), rows[-1]), np.float32)
        for (place, batch), start, stop in zip(own, rows[:-1], rows[1:], strict=True):
            counts[name][place, start:stop] = batch.count
        families[name] = _joined([batch for _, batch in own])
    return KernelTable(families), counts


def _joined(batches: Sequence[KernelBatch]) -> KernelBatch:
    first = batches[0]
    columns: dict[str, Any] = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in _COLUMNS}
    dims: dict[str, Any] = {dim: np.concatenate([batch.dims[dim] for batch in batches]) for dim in first.dims}
    return replace(first, dims=dims, **columns)


_COLUMNS = ("op", "dtype", "count", "phase", "node", "row")
