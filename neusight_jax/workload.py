"""A workload of a sweep or a design: a graph's distinct kernels, what it is called, and how much it counts."""

from __future__ import annotations

from dataclasses import dataclass

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.distinct import distinct
from neusight_jax.kernels.table import KernelTable


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
        return self.graph.batch_size * self.graph.sequence_length


def workload(graph: Graph, weight: float = 1.0, name: str = "") -> Workload:
    """A workload from a graph, called "MODEL MODE batch×sequence" unless it is given a name."""
    if not weight > 0:
        raise InputError(f"weight of {graph.name} is {weight:g}, expected a positive number")
    shape = f"{graph.batch_size}x{graph.sequence_length}"
    return Workload(name or f"{graph.name} {graph.mode} {shape}", graph, distinct(graph.kernels), float(weight))
