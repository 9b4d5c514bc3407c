"""Graph: a model and its workload as nodes, each node as the kernels it launches; and what writes nodes in order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import is_traced, number
from neusight_jax.kernels.table import PHASES, Kernel, KernelTable, Launched, table_from_kernels
from neusight_jax.records import Record
from neusight_jax.units import GIB

Shape: TypeAlias = tuple[int, ...]
Fuse: TypeAlias = Literal["", "pointwise", "softmax", "norm"]

MODES: tuple[str, ...] = ("inference", "training")
"""Workloads: a forward pass, or a forward and a backward pass (no optimizer step)."""

RUNTIME_BYTES = 0.75 * GIB
"""Memory the driver, libraries and their workspaces hold beside the tensors."""
OPTIMIZER_BYTES = 8.0
"""Two fp32 moments of Adam for each parameter; a training run needs them, though no step is forecast."""

SPLITS: tuple[str, ...] = ("tensor_parallel", "expert_parallel")
"""Options that say over how many GPUs a model is split."""
UNMODELLED = "unmodelled"
"""Start of a node's `op` when nobody has modelled its operator; its name follows."""


@dataclass(frozen=True)
class Operand:
    """A tensor a node reads: its name, its elements, and whether a gradient flows back into it."""

    name: str
    elements: int
    grad: bool


@dataclass(frozen=True)
class Node(Record):
    """One operator of a model and the kernels it launches.

    Attributes:
      name: dotted, unique in the graph, e.g. "layer.attention.query".
      op: the operator, e.g. "linear", "add".
      forward, backward, weight_gradient: kernels of one execution, by phase.
      repeat: how often the node runs in the model (layers are stored once); may be traced, as sizes may.
      section: nodes of one section run together; fusion stays inside it.
      operands: tensors it reads; parameters of a matrix product are left out.
      shape: of its output.
      fuse: whether a compiler may merge it with its neighbours, and the reduction it would bring along.
      optimizer: kernels of a step of the optimizer.
      saved_bytes: what one execution keeps for the backward pass, bytes; of fused steps alone (`Step`).
      rebuilt_bytes: the part of it that goes where the node is run again by itself.
    """

    name: str
    op: str
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    weight_gradient: tuple[Kernel, ...]
    repeat: Any
    section: str
    operands: tuple[Operand, ...]
    shape: Shape
    fuse: Fuse
    optimizer: tuple[Kernel, ...] = ()
    saved_bytes: float = 0.0
    rebuilt_bytes: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Description of the node, and the kernels of its phases."""
        names = ("name", "op", "shape", "repeat", "section", "fuse", *PHASES)
        return {name: getattr(self, name) for name in names if getattr(self, name) != ()}

    def summary(self) -> str:
        """Its name and operator."""
        return f"{self.name}, {self.op} to {'x'.join(map(str, self.shape))}, repeat {self.repeat}"

    @property
    def phases(self) -> tuple[tuple[Kernel, ...], ...]:
        """Kernels by phase, in the order of `PHASES`."""
        return (self.forward, self.backward, self.weight_gradient, self.optimizer)


@dataclass(frozen=True)
class Footprint(Record):
    """Device memory of a workload by what holds it, bytes; an estimate.

    Attributes:
      weights, gradients, optimizer, activations, kv_cache: tensors; runtime: driver, libraries and their workspaces.
      inputs, buffers: of traced programs, arguments and constants of a module that are no parameters.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    runtime: float = 0.0
    inputs: float = 0.0
    buffers: float = 0.0

    def figures(self) -> dict[str, float]:
        """Size of each part that holds any memory, and the total, bytes."""
        sizes = {f"{name}_bytes": size for name, size in vars(self).items() if size}
        return {**sizes, "total_bytes": self.total}

    @property
    def total(self) -> float:
        """All of it, bytes."""
        total: float = number(sum(vars(self).values()))
        return total


@dataclass(frozen=True)
class Graph(Record):
    """A model with its workload.

    Attributes:
      name: of the model.
      nodes: in order of execution, layers once with their repeat count.
      mode: one of `MODES`.
      dtype: of all tensors that do not say otherwise, one of `arithmetic.DTYPES`.
      batch_size, sequence_length: of the input; an encoder-decoder reads it on both sides. 0 where the front-end knows
        neither (functions and modules).
      fused: whether elementwise chains were merged as a compiler would.
      tokens: new tokens of a step, 0 = batch times sequence; footprint: memory, where the front-end knows it.
      options: what else says which workload it is (`weight_dtype`, `tensor_parallel` ...), plain values for reports.
      notes: what the front-end assumed or left out, one line each; every forecast of the graph shows them.
      parameters: elements of all parameters, each once; None where the front-end does not say.
      trained: those of them that are trained; None = all.
      context_bytes: memory of one more token of every request that is served; 0 = not served, or not known.
      launched: how its kernels are launched.
    """

    name: str
    nodes: tuple[Node, ...]
    mode: str
    dtype: str
    batch_size: int
    sequence_length: int
    fused: bool
    tokens: int = 0
    footprint: Footprint | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    parameters: float | None = None
    trained: float | None = None
    context_bytes: float = 0.0
    launched: Launched = "graph"

    def summary(self) -> str:
        """The model and its workload."""
        sizes = f"batch {self.batch_size}, sequence {self.sequence_length}, " if self.sequence_length else ""
        return (
            f"{self.name}: {self.mode}, {sizes}{self.dtype}, {len(self.nodes)} nodes, {self.launches():,.0f} launches"
        )

    @property
    def step_tokens(self) -> int:
        """Tokens a step works on: all of the input, or the new ones of a serving step."""
        return self.tokens or self.batch_size * self.sequence_length

    @property
    def num_gpus(self) -> int:
        """GPUs a step occupies; a graph is the part of one.

        Layers are split over `tensor_parallel` GPUs, and of each part the experts over `expert_parallel`.
        """
        split = math.prod(int(self.options.get(name, 1)) for name in SPLITS)
        return int(self.options.get("gpus", split))

    @cached_property
    def arithmetic(self) -> tuple[str, ...]:
        """Its own dtype, and those of its matrix products: the arithmetic paths a GPU must have."""
        kernels = (kernel for node in self.nodes for phase in node.phases for kernel in phase)
        products = (kernel.dtype for kernel in kernels if kernel.dtype and FAMILIES[kernel.family].matrix)
        return tuple(dict.fromkeys((self.dtype, *products)))

    @cached_property
    def _conditional(self) -> tuple[Kernel, ...]:
        """Kernels that run otherwise on some machines."""
        kernels = (kernel for node in self.nodes for phase in node.phases for kernel in phase)
        return tuple(kernel for kernel in kernels if kernel.instead is not None or FAMILIES[kernel.family].linked)

    def on(self, paths: Collection[str], gpus_per_domain: int = 0) -> Graph:
        """The graph as it runs on GPUs with these arithmetic paths, in domains of so many (`Kernel.on`).

        Products whose path is not there run as their `Kernel.instead` has it, with a note: those of quantized weights,
        and convolutions in tf32.
        """
        where = (paths, gpus_per_domain)
        # `Kernel.on` hands the kernel itself back where nothing changes, so identity tells.
        changed = [(kernel, other) for kernel in self._conditional if (other := kernel.on(*where)) is not kernel]
        if not changed:
            return self
        swapped = {
            (kernel.path or kernel.dtype, other.dtype): None for kernel, other in changed if other is kernel.instead
        }

        def run(node: Node) -> Node:
            phases: dict[str, Any] = {
                phase: tuple(kernel.on(*where) for kernel in kernels)
                for phase, kernels in zip(PHASES, node.phases, strict=True)
            }
            return replace(node, **phases)

        nodes = tuple(map(run, self.nodes))
        notes = (
            f"no {path} arithmetic on this GPU: "
            + (
                f"convolutions run in {other}"
                if path == "tf32"
                else f"products of those weights widen them to {other} (weight-only)"
            )
            for path, other in swapped
        )
        return replace(self, nodes=nodes, notes=(*self.notes, *notes))

    @cached_property
    def kernels(self) -> KernelTable:
        """Distinct launches of the whole model, repeats in `count`; `node` indexes `nodes`, `phase` `PHASES`."""
        # Equal launches of a node are one row: the time of a forecast goes with the rows.
        counts: defaultdict[tuple[Any, ...], Any] = defaultdict(float)
        first: dict[tuple[Any, ...], Kernel] = {}
        for position, node in enumerate(self.nodes):
            for phase, kernels in enumerate(node.phases):
                for kernel in kernels:
                    # Traced sizes are equal where they are the same.
                    sizes = ((name, id(size) if is_traced(size) else size) for name, size in kernel.dims.items())
                    key = (position, phase, kernel.family, kernel.op, kernel.dtype, tuple(sizes))
                    first.setdefault(key, kernel)
                    counts[key] += kernel.count * node.repeat
        return table_from_kernels(
            [replace(kernel, count=counts[key]) for key, kernel in first.items()],
            dtype=self.dtype,
            phase=[key[1] for key in counts],
            node=[key[0] for key in counts],
            launched=self.launched,
        )

    def launches(self, phase: str | None = None) -> float:
        """Kernel launches of one step, of one phase or of all."""
        chosen = PHASES if phase is None else (phase,)
        launches: float = sum(
            kernel.count * node.repeat
            for node in self.nodes
            for name, kernels in zip(PHASES, node.phases, strict=True)
            if name in chosen
            for kernel in kernels
        )
        return launches


class Writer:
    """Writes nodes down; `training` decides whether backward kernels are kept."""

    def __init__(self, training: bool) -> None:
        self.training = training
        self.nodes: list[Node] = []
        self.repeat: Any = 1
        self.layers: tuple[int, ...] = ()
        self._section = ""

    @contextmanager
    def section(self, name: str, repeat: Any = 1, layers: Sequence[int] = ()) -> Iterator[None]:
        """Nodes written inside are named `name.…` and run `repeat` times; `layers`: their indices in the model."""
        outer = self._section, self.repeat, self.layers
        self._section, self.repeat, self.layers = name, repeat, tuple(layers)
        yield
        self._section, self.repeat, self.layers = outer

    def write(
        self,
        name: str,
        op: str,
        phases: tuple[Sequence[Kernel], Sequence[Kernel], Sequence[Kernel]],
        operands: Sequence[Operand],
        shape: Shape,
        *,
        fuse: Fuse = "",
        saved_bytes: float = 0.0,
        rebuilt_bytes: float = 0.0,
    ) -> str:
        """Write one node down; returns its full name.

        Args:
          name: inside the section.
          phases: kernels of one execution: forward, backward, weight gradient; the last two are kept in training alone.
          operands: tensors it reads.
          shape: of its output.
          fuse, saved_bytes, rebuilt_bytes: as of `Node`.
        """
        full = f"{self._section}.{name}" if self._section else name
        forward, backward, weight_gradient = phases
        self.nodes.append(
            Node(
                name=full,
                op=op,
                forward=tuple(forward),
                backward=tuple(backward) if self.training else (),
                weight_gradient=tuple(weight_gradient) if self.training else (),
                repeat=self.repeat,
                section=self._section,
                operands=tuple(operands),
                shape=shape,
                fuse=fuse,
                saved_bytes=saved_bytes,
                rebuilt_bytes=rebuilt_bytes,
            )
        )
        return full
