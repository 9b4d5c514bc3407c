"""The same graphs in the accounting of the published NeuSight, and every deliberate difference with its reason.

Notation: ("Linear", (M, N, K)) and ("BMM", (B, M, N, K)) with N the contraction, ("VECadd", (rows, columns)),
("MEM", (shape, …)) for traffic over the listed tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from neusight_jax.graph.configs.build import trace
from neusight_jax.graph.graph import Node, Shape, Traced
from neusight_jax.tables import table

Op: TypeAlias = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Difference:
    """A class of nodes for which this package launches other kernels than the reference charges, on purpose.

    Attributes:
      ops: node operators concerned.
      phase: "forward", or "backward" (weight gradients included).
      reason: why.
    """

    ops: tuple[str, ...]
    phase: str
    reason: str


DIFFERENCES: dict[str, Difference] = {
    name: Difference(tuple(row["ops"]), row["phase"], row["reason"])
    for name, row in table("graph.configs", "differences").items()
}
"""Deliberate differences by name, from differences.yaml."""


def reference_kernels(
    config: str | Path | Mapping[str, Any], batch_size: int, sequence_length: int, mode: str = "inference"
) -> Counter[Op]:
    """Kernels the reference charges for a model, as a multiset over forward, backward and weight gradients.

    Arithmetic on sizes (one-element tensors) is left out. Expert gathers have the size of balanced routing.

    Args:
      config: as of `build.trace`.
      batch_size: sequences.
      sequence_length: tokens of a sequence.
      mode: one of `graph.MODES`; "inference" has the forward kernels alone.
    """
    parsed, nodes = trace(config, batch_size, sequence_length, mode)
    counts: Counter[Op] = Counter()
    for node in nodes:
        for op in (*charged(node, "forward"), *(charged(node, "backward") if mode == "training" else ())):
            counts[op] += node.repeat
    if parsed.values["model_type"] == "switch_transformers":
        _apply_matmul_slip(nodes, counts, mode)
    return counts


def charged(node: Node, phase: str) -> list[Op]:
    """What the reference charges for one execution of a node; phase "backward" includes weight gradients."""
    rule = _forward if phase == "forward" else _backward
    return [op for traced in node.traced for op in rule(traced) if not _scalar(op)]


def _scalar(op: Op) -> bool:
    kind, args = op
    if kind == "MEM":
        return all(prod(shape) == 1 for shape in args)
    return kind.startswith("VEC") and prod(args) == 1


def _matrix(shape: Shape) -> tuple[int, int]:
    return prod(shape[:-1]), shape[-1]


def _product(traced: Traced) -> tuple[int, int, int, int]:
    a, b = traced.inputs
    return prod(a[:-2]), a[-2], a[-1], b[-1]


def _forward(traced: Traced) -> list[Op]:
    kind = traced.kind
    if kind == "Linear":
        return [("Linear", (*_matrix(traced.inputs[0]), traced.output[-1]))]
    if kind == "BMM":
        return [("BMM", _product(traced))]
    if kind.startswith("VEC"):
        return [(kind, _matrix(traced.output))]
    if kind == "Weight":
        return []
    return [("MEM", (*traced.inputs, traced.output))]


def _backward(traced: Traced) -> list[Op]:
    kind, output = traced.kind, traced.output
    if kind == "Linear":
        m, n = _matrix(traced.inputs[0])
        k = output[-1]
        return [("Linear", (m, k, n)), ("Linear", (k, m, n)), ("VECadd", (1, k * n)), ("VECadd", (1, k))]
    if kind == "BMM":
        batch, m, n, k = _product(traced)
        return [("BMM", (batch, m, k, n)), ("BMM", (batch, n, m, k))]
    if kind == "EMBEDDING":
        return [("MEM", (traced.weight,))] * 2 + [("VECadd", (1, prod(traced.weight)))]
    if kind == "Weight":
        return [("VECadd", (1, prod(output)))]
    if kind == "rsqrt":
        return [("MEM", (*traced.inputs, output))]
    if not kind.startswith("VEC"):
        return [("MEM", traced.inputs)] * 2
    size = _matrix(output)
    name = kind.removeprefix("VEC")
    if name in ("add", "addu"):
        return [("MEM", (size,))] * len(traced.inputs)
    if name in ("mul", "div"):
        return [(kind, size)] * 2
    if name in ("pow", "powu"):
        return [(kind, size), ("VECmul", size), ("VECmulu", size)]
    if name == "tanh":
        return [("VECmulu", size), ("VECaddu", size)]
    if name == "softmax":
        return [("VECmul", size), (kind, size)]
    if name == "ln":
        return [("VECmul", size), ("VECadd", (1, size[1])), ("VECadd", (1, size[1]))]
    return [(kind, size)]


def _apply_matmul_slip(nodes: Iterable[Node], counts: Counter[Op], mode: str) -> None:
    """Turn the products the reference misnames into Linear, in the multiset."""
    sections: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "matmul":
            sections.setdefault(node.section, []).append(node)
    order: list[Node] = []
    blocks = {name: members[0].repeat for name, members in sections.items()}
    for side in ("encoder", "decoder"):
        names = [name for name in sections if name.startswith(f"{side}.")]
        for _ in range(max((blocks[name] for name in names), default=0)):
            order += [node for name in names for node in sections[name]]
    # The reference takes every node named matmul_4... for a linear layer: numbers 4, 40 to 49, and so on.
    for index, node in enumerate(order):
        if not str(index).startswith("4"):
            continue
        (traced,) = node.traced
        batch, m, n, k = _product(traced)
        linear = Traced("Linear", ((batch * m, n),), (batch * m, k))
        for rule in (_forward, _backward) if mode == "training" else (_forward,):
            counts.subtract(rule(traced))
            counts.update(rule(linear))
    for op in [op for op, count in counts.items() if count == 0]:
        del counts[op]
