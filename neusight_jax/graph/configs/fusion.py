"""Fusion: elementwise chains merged into one kernel each, as torch.compile and XLA do.

A node joins its producer when it is the producer's only consumer. Matrix products, copies, gathers and reductions
other than softmax and norm stay apart, and a chain holds one softmax or norm at most. A merged forward kernel reads
each outer operand once and writes its result once. Its backward kernel reads the incoming gradient and the outer
operands (inner values are computed again) and writes one gradient per outer operand that needs one; it is used where
it moves less than the eager kernels. Weight-gradient kernels stay as they are. The sum of gradients over several
consumers rides along with the kernel that follows: one more read each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from neusight_jax.graph.graph import Node, Operand
from neusight_jax.graph.kernel import stream
from neusight_jax.kernels.table import Kernel

_FAMILY = {"pointwise": ("elementwise", "add"), "softmax": ("softmax", "softmax"), "norm": ("norm", "layernorm")}
_BACKWARD = {
    "pointwise": ("elementwise", "add"),
    "softmax": ("softmax", "softmax_backward"),
    "norm": ("norm", "layernorm_backward"),
}
_LINEAR_OPS = frozenset({"add", "addu", "mulu", "divu", "where", "dropout", "embedding"})
"""Operators whose gradient needs none of their operands."""


def fuse(nodes: Sequence[Node]) -> list[Node]:
    """Nodes with fusable chains merged, in order of execution."""
    groups = _groups(nodes)
    members: dict[int, list[Node]] = {}
    for position, node in enumerate(nodes):
        members.setdefault(groups[position], []).append(node)
    by_name = {node.name: groups[position] for position, node in enumerate(nodes)}
    merged: list[Node] = []
    for position, node in enumerate(nodes):
        chain = members[groups[position]]
        if node.op == "gradient_sum":
            merged.extend(_ride_along(node, nodes, by_name))
        elif chain[-1] is node:
            merged.append(_merge(chain) if len(chain) > 1 else node)
    return merged


def _groups(nodes: Sequence[Node]) -> list[int]:
    """Group of each node: joined with producers it alone consumes, in the same section."""
    where = {node.name: position for position, node in enumerate(nodes)}
    consumers: Counter[str] = Counter()
    for node in nodes:
        if node.op != "gradient_sum":
            consumers.update({operand.name for operand in node.operands})
    # In order of execution producers are settled before what reads them, so one pass joins whole chains.
    group = list(range(len(nodes)))
    kind = [node.fuse for node in nodes]
    for position, node in enumerate(nodes):
        if not node.fuse:
            continue
        for operand in node.operands:
            source = where.get(operand.name)
            if source is None or source >= position or consumers[operand.name] != 1:
                continue
            if not nodes[source].fuse or nodes[source].section != node.section:
                continue
            kinds = {kind[group[source]], kind[group[position]]} - {"pointwise"}
            if len(kinds) > 1 or (kind[group[source]] == kind[group[position]] != "pointwise"):
                continue
            old, new = group[source], group[position]
            kind[new] = kinds.pop() if kinds else "pointwise"
            group = [new if item == old else item for item in group]
    return group


def _merge(chain: Sequence[Node]) -> Node:
    inner = {node.name for node in chain}
    outer: dict[str, Operand] = {}
    # A tensor that is read anew for every copy has more elements as that operand: the larger traffic counts.
    for node in chain:
        for operand in node.operands:
            largest = outer.get(operand.name)
            if operand.name not in inner and (largest is None or largest.elements < operand.elements):
                outer[operand.name] = operand
    last = chain[-1]
    size = prod(last.shape)
    reductions = [node.fuse for node in chain if node.fuse != "pointwise"]
    kind = reductions[0] if reductions else "pointwise"
    reads = sum(operand.elements for operand in outer.values()) / size
    family, op = _FAMILY[kind]
    return replace(
        last,
        op="fused(" + "+".join(node.op for node in chain) + ")",
        forward=(stream(family, op, last.shape, reads, 1),),
        backward=_backward(chain, outer, kind),
        weight_gradient=tuple(kernel for node in chain for kernel in node.weight_gradient),
        operands=tuple(outer.values()),
        fuse="",
    )


def _backward(chain: Sequence[Node], outer: dict[str, Operand], kind: str) -> tuple[Kernel, ...]:
    eager = tuple(kernel for node in chain for kernel in node.backward)
    if not eager:
        return ()
    last = chain[-1]
    size = prod(last.shape)
    linear = all(node.op in _LINEAR_OPS for node in chain)
    reads = 1 + (0 if linear else sum(operand.elements for operand in outer.values()) / size)
    writes = sum(operand.elements for operand in outer.values() if operand.grad) / size
    if writes == 0:
        return eager
    family, op = _BACKWARD[kind]
    single = stream(family, op, last.shape, reads, writes)
    return (single,) if _traffic(single) < sum(_traffic(kernel) for kernel in eager) else eager


def _traffic(kernel: Kernel) -> float:
    dims = kernel.dims
    return kernel.count * dims["rows"] * dims["cols"] * (dims["reads"] + dims["writes"])


def _ride_along(node: Node, nodes: Sequence[Node], by_name: dict[str, int]) -> list[Node]:
    (kernel,) = node.backward
    (operand,) = node.operands
    users = [
        item.name
        for item in nodes
        if item.op != "gradient_sum" and operand.name in {other.name for other in item.operands if other.grad}
    ]
    if users and len({by_name[name] for name in users}) == 1:
        return []  # the tensor has one consumer left
    return [replace(node, backward=(stream("elementwise", "add", node.shape, 1, 0, int(kernel.count)),))]
