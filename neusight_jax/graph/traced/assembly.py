"""From operations to a `Graph`: what nothing reads is left out, groups become nodes, equal nodes one with a repeat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from neusight_jax.graph.graph import Graph, Node, Operand
from neusight_jax.graph.traced.allocation import Holding, peak_bytes
from neusight_jax.graph.traced.attention import SOFTMAX, mark_attention
from neusight_jax.graph.traced.grouping import cheap_sources, group, kernels_of
from neusight_jax.graph.traced.operation import Operation, Value, arithmetic_dtype, producers, readers
from neusight_jax.graph.traced.trace_options import PRODUCT_FAMILIES
from neusight_jax.kernels.table import PHASES, Kernel

WORST_FLOP_PER_BYTE = 50.0
"""What a byte counts beside a FLOP when branches are compared, about the ridge point of today's GPUs in fp32."""
_NUMBER = re.compile(r"\d+")


def assemble(
    name: str, operations: Sequence[Operation], results: Iterable[int], fused: bool, mode: str, holding: Holding
) -> Graph:
    """The graph of a traced program.

    Args:
      name: of the program.
      operations: in order of execution.
      results: ids of the arrays the program returns.
      fused: whether operations are fused, as `grouping` says.
      mode: one of `graph.MODES`.
      holding: what it holds beside the arrays it makes.
    """
    needed = set(results)
    live, needed = _free_transposes(mark_attention(_live(operations, needed)), needed)
    readers_of = readers(live)
    where = {id(item): at for at, item in enumerate(live)}
    sources = cheap_sources(live, needed) if fused else {}
    nodes = []
    steps, unstored = list(range(len(live))), dict[int, Value | None](sources)
    for members in group(live, fused):
        inside = {where[id(item)] for item in members}

        def outside(array: int, inside: set[int] = inside) -> bool:
            return array in needed or bool(readers_of.get(array, set()) - inside)

        kernels = kernels_of(members, outside, sources)
        if kernels and members[-1].repeat:
            nodes.append(_node(members, kernels))
        for at in inside:
            steps[at] = max(inside)
            own = [value.id for value in live[at].outputs]
            unstored.update((array, None) for array in own if array not in sources and not outside(array))
    merged = _merge_equal(nodes)
    return Graph(
        name=name,
        nodes=tuple(merged),
        mode=mode,
        dtype=_main_dtype(merged),
        batch_size=0,
        sequence_length=0,
        fused=fused,
        footprint=replace(holding.footprint, activations=peak_bytes(live, steps, unstored, needed, holding)),
        parameters=holding.parameters,
        trained=holding.trained,
    )


def _live(operations: Sequence[Operation], results: set[int]) -> list[Operation]:
    """Operations whose result is used."""
    used = set(results)
    kept = []
    for item in reversed(operations):
        if not item.outputs or any(value.id in used for value in item.outputs):
            used |= {value.id for value in item.inputs}
            kept.append(item)
    return kept[::-1]


def _free_transposes(operations: Sequence[Operation], results: set[int]) -> tuple[list[Operation], set[int]]:
    """Transposes beside products are left out, as products read and write either order; operations and results."""
    readers_of, maker = readers(operations), producers(operations)
    dropped: set[int] = set()
    names: dict[int, int] = {}
    for at in range(len(operations) - 1, -1, -1):
        if operations[at].op != "transpose":
            continue
        source, made = operations[at].inputs[0].id, operations[at].outputs[0].id
        users = readers_of.get(made, ())
        read = made not in results and all(_is_product(operations[user]) or user in dropped for user in users)
        written = source in maker and _is_product(operations[maker[source]]) and len(readers_of[source]) == 1
        if read or (written and source not in results):
            dropped.add(at)
            names[made] = source

    def stands_for(array: int) -> int:
        while array in names:
            array = names[array]
        return array

    kept = [
        replace(item, inputs=tuple(replace(value, id=stands_for(value.id)) for value in item.inputs))
        for at, item in enumerate(operations)
        if at not in dropped
    ]
    return kept, {stands_for(array) for array in results}


def _is_product(item: Operation) -> bool:
    return bool(item.kernels) and item.kernels[0].family in PRODUCT_FAMILIES


def _node(members: Sequence[Operation], kernels: tuple[Kernel, ...]) -> Node:
    last = members[-1]
    made = {value.id for item in members for value in item.outputs}
    read = {value.id: value.elements for item in members for value in item.inputs if value.id not in made}
    ops = list(dict.fromkeys(item.op for item in members))
    op = ops[0] if len(members) == 1 else f"fused({'+'.join(ops[:6])}{'+...' if len(ops) > 6 else ''})"
    if SOFTMAX in ops:
        op = SOFTMAX
    by_phase = [kernels if last.phase == phase else () for phase in range(len(PHASES))]
    return Node(
        name=last.name,
        op=op,
        forward=by_phase[0],
        backward=by_phase[1],
        weight_gradient=by_phase[2],
        repeat=round(last.repeat),
        section="",
        operands=tuple(Operand(f"array{array}", elements, False) for array, elements in read.items()),
        shape=last.outputs[0].shape if last.outputs else (),
        fuse="",
        traced=(),
    )


def _merge_equal(nodes: Sequence[Node]) -> list[Node]:
    """Nodes of the same operation, kernels and place (numbers in it aside) as one that repeats."""
    merged: dict[object, Node] = {}
    for node in nodes:
        place = _NUMBER.sub("*", node.name)
        kernels = tuple(
            tuple((item.family, item.op, item.dtype, item.count, tuple(item.dims.items())) for item in phase)
            for phase in node.phases
        )
        key = (place, node.op, kernels)
        known = merged.get(key)
        if known is None:
            merged[key] = node
        else:
            same = known.name == node.name
            merged[key] = replace(known, name=known.name if same else place, repeat=known.repeat + node.repeat)
    seen: dict[str, int] = {}
    out = []
    for node in merged.values():
        seen[node.name] = seen.get(node.name, 0) + 1
        out.append(node if seen[node.name] == 1 else replace(node, name=f"{node.name}#{seen[node.name]}"))
    return out


def _main_dtype(nodes: Sequence[Node]) -> str:
    """The dtype most of the work is in: matrix products first, then traffic."""
    weight: dict[str, float] = {}
    for node in nodes:
        for kernel in (item for phase in node.phases for item in phase):
            weight[kernel.dtype] = weight.get(kernel.dtype, 0.0) + _elements(kernel) * kernel.count * node.repeat
    return max(weight, key=lambda name: weight[name]) if weight else arithmetic_dtype("float32")


def _elements(kernel: Kernel) -> float:
    """Multiply-adds of a product, elements of all else."""
    dims = kernel.dims
    if kernel.family not in PRODUCT_FAMILIES:
        return dims.get("rows", 0.0) * dims.get("cols", 0.0)  # collectives have neither
    return dims.get("batch", 1.0) * dims["m"] * dims["n"] * dims["k"]


def loop_cost(operations: Iterable[Operation]) -> float:
    """Work whatever the machine, to choose the worst of branches: FLOP of products + `WORST_FLOP_PER_BYTE` · bytes."""
    total = 0.0
    for item in operations:
        if item.kind == "free":
            continue
        for kernel in item.kernels:
            if kernel.family in PRODUCT_FAMILIES:
                total += 2.0 * _elements(kernel) * kernel.count * item.repeat
        traffic = sum(value.bytes for value in (*item.inputs, *item.outputs))
        total += WORST_FLOP_PER_BYTE * item.repeat * traffic
    return total
