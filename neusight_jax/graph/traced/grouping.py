"""Operations as kernels: one each, or fused as a compiler would.

The rule of the fused form follows XLA on GPUs: operations that iterate over the same elements join the kernel of the
operation that makes their input, a reduction over innermost axes may be read back by its own kernel (softmax, norms),
any other reduction ends one, and a smaller array that only one kernel reads is made inside it. No kernel may need its
own result by way of another. What is cheap is computed again rather than stored. Matrix products, convolutions, gathers
and sorts stay apart. A kernel reads each outer array once and writes each array that something outside it reads: its
time is that traffic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import UNMODELLED, Graph, Node, Operand
from neusight_jax.graph.kernel import streamed
from neusight_jax.graph.traced.linear_algebra import complex_product, is_complex, unrated_dtype, unrated_product
from neusight_jax.graph.traced.memory import BACKWARD, Holding, peak_bytes
from neusight_jax.graph.traced.operation import (
    PRODUCT_FAMILIES,
    Call,
    Kernels,
    Kind,
    Operation,
    TraceOptions,
    Value,
    against_order,
    arithmetic_dtype,
    main_dtype,
    operators,
    producers,
    readers,
)
from neusight_jax.kernels.table import PHASES, Kernel

# From operations to a `Graph`: what nothing reads is left out, groups become nodes, equal nodes one with a repeat.

WORST_FLOP_PER_BYTE = 50.0
"""Weight of a byte beside a FLOP when branches are compared, about the ridge point of today's GPUs in fp32."""
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
    # What a group reads stays in memory until its last member, at whose place it runs.
    for members in group(live, fused):
        inside = {where[id(item)] for item in members}

        def outside(array: int, inside: set[int] = inside) -> bool:
            return array in needed or bool(readers_of.get(array, set()) - inside)

        kernels = kernels_of(members, outside, sources)
        if kernels and members[-1].repeat:
            nodes.append(_node(members, kernels))
        for at in inside:
            steps[at] = max(inside)
            arrays = [value.id for value in live[at].outputs]
            unstored.update((array, None) for array in arrays if array not in sources and not outside(array))
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
        launched="graph" if fused else "host",
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
    # From the end, as a transpose that only dropped transposes read is dropped too.
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
    )


def _merge_equal(nodes: Sequence[Node]) -> list[Node]:
    """Nodes of the same operation, kernels and place (numbers in it aside) as one that repeats."""
    merged: dict[object, Node] = {}
    for node in nodes:
        # Layers written out by a Python loop differ in the number in their names alone.
        place = _NUMBER.sub("*", node.name)
        kernels = tuple(
            tuple((item.family, item.op, item.dtype, item.count, tuple(item.dims.items())) for item in phase)
            for phase in node.phases
        )
        key = (place, node.op, kernels)
        earlier = merged.get(key)
        if earlier is None:
            merged[key] = node
        else:
            same = earlier.name == node.name
            merged[key] = replace(earlier, name=earlier.name if same else place, repeat=earlier.repeat + node.repeat)
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
            dtype = kernel.dtype if kernel.instead is None else kernel.instead.dtype
            weight[dtype] = weight.get(dtype, 0.0) + _elements(kernel) * kernel.count * node.repeat
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


# Attention in a traced program: a product, a softmax of it, a second product with the result.
#
# Scale, mask, bias, dropout and conversions may stand between. What is recognised is marked in the operator's name
# (`attention.scores`, `attention.softmax`, `attention.context`) and stays what it is: two batched products and a row
# kernel.

SCORES, SOFTMAX, CONTEXT = "attention.scores", "attention.softmax", "attention.context"
EXPONENTIALS = frozenset({"exp", "exp2"})
SOFTMAXES = frozenset({"_softmax", "_safe_softmax", "softmax"})
PRODUCTS = frozenset({"dot_general", "bmm", "baddbmm", "mm", "matmul"})
MOST_BETWEEN = 64
"""Operations looked at between the two products."""


def mark_attention(operations: Sequence[Operation]) -> list[Operation]:
    """The same operations, those of attention marked in their `op`."""
    producer = producers(operations)
    marks: dict[int, str] = {}
    for at, item in enumerate(operations):
        if item.op not in PRODUCTS or item.phase != 0:
            continue
        for value in item.inputs[:2]:
            chain = _between(operations, producer, value.id, prod(value.shape))
            if chain is None:
                continue
            scores, softmax = chain
            marks[scores], marks[at] = SCORES, CONTEXT
            marks |= dict.fromkeys(softmax, SOFTMAX)
    return [replace(item, op=marks[at]) if at in marks else item for at, item in enumerate(operations)]


def _between(
    operations: Sequence[Operation], producer: dict[int, int], array: int, elements: int
) -> tuple[int, list[int]] | None:
    """The product an operand comes from and the softmax on the way; None when it is not the shape of attention."""
    todo, seen = [array], set[int]()
    products: set[int] = set()
    softmax: list[int] = []
    reduced = False
    # Up from the operand to the nearest products: attention has one, with a softmax on the way.
    while todo:
        at = producer.get(todo.pop())
        if at is None or at in seen:
            continue
        seen.add(at)
        item = operations[at]
        if len(seen) > MOST_BETWEEN:
            return None
        if item.op in PRODUCTS:
            products.add(at)
            continue
        if item.op in SOFTMAXES:
            softmax.append(at)
            reduced = True
        elif item.op in EXPONENTIALS and prod(item.loop) == elements:
            softmax.append(at)
        elif item.kind == "row":
            reduced = True
        elif item.kind not in ("pointwise", "free") and item.op != "dropout":
            continue
        # Single numbers, such as the scale, lead to nothing that belongs to attention.
        todo += [value.id for value in item.inputs if value.stored > 1]
    if len(products) != 1 or not softmax or not reduced:
        return None
    (scores,) = products
    return (scores, softmax) if operations[scores].outputs[0].elements == elements else None


# Walk: what the walkers of jaxprs and of aten graphs share as they write operations down.


class Walk:
    """Operations of a program, in order.

    Attributes:
      options: how to read it.
      memory: array -> the array whose memory it is, where that is another.
    """

    def __init__(self, options: TraceOptions) -> None:
        self.options = options
        self.operations: list[Operation] = []
        self.memory: dict[int, int] = {}

    def operation(
        self,
        call: Call,
        kind: Kind,
        kernels: Kernels,
        *,
        modelled: bool,
        axes: Sequence[int],
        scope: Iterable[str],
        full_name: str,
        **place: Any,
    ) -> Operation:
        """A call as an operation.

        Args:
          kind: how it runs; kernels: of its own, for kind "opaque".
          modelled: whether it is modelled; if not, `full_name` says what it is.
          axes: of a reduction.
          scope: where it stands in the program; place: repeat, loop body.
        """
        path = self.options.fp32_products
        if call.op == "conv_general_dilated":
            path = self.options.fp32_convolutions or path
        # The fused attention of fp32 has no tf32, and torch's convolutions know their path.
        if path != "fp32" and "attention" not in call.op and not call.op.startswith("convolution"):
            kernels = tuple(
                replace(kernel, dtype=path) if kernel.family in PRODUCT_FAMILIES and kernel.dtype == "fp32" else kernel
                for kernel in kernels
            )
        if any(kernel.family in PRODUCT_FAMILIES for kernel in kernels):
            if unrated := unrated_dtype(call):
                kernels, modelled, full_name = unrated_product(call, kernels), False, f"{full_name} of {unrated}"
            elif is_complex(call.inputs[0]):
                kernels = tuple(complex_product(kernel) for kernel in kernels)
        loop, reduced = call.outputs[0].shape if call.outputs else (), 1
        if kind in ("row", "column"):
            loop = call.inputs[0].shape
            reduced = prod(loop[axis] for axis in axes)
        return Operation(
            name=".".join((*scope, call.op)),
            op=call.op if modelled else f"{UNMODELLED} {full_name}",
            kind=kind,
            inputs=call.inputs,
            outputs=call.outputs,
            loop=loop,
            kernels=kernels,
            phase=call.phase,
            reduced=reduced,
            **place,
        )

    def branch(self, walks: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """Results of the branch of a condition that the options choose: one by its number, or that of most work."""
        chosen = self.options.branch
        if isinstance(chosen, int) and chosen not in range(len(walks)):
            raise InputError(f"branch is {chosen}, but a cond has {len(walks)} branches; expected one from 0")
        # The work of a branch is known once it is walked; only the chosen one is kept.
        start, walked = len(self.operations), []
        for walk in walks if chosen == "worst" else (walks[int(chosen)],):
            results = walk()
            walked.append((self.operations[start:], results))
            del self.operations[start:]
        operations, results = max(walked, key=lambda pair: loop_cost(pair[0]))
        self.operations += operations
        return results


FUSABLE = frozenset({"pointwise", "row", "column"})
SCALAR_ELEMENTS = 1
"""Arrays of so many elements are kernel arguments, not traffic."""
JOINING = frozenset({"concatenate", "pad", "cat", "stack"})
"""Operations whose inputs are parts of their output."""
CHEAP = operators("fusion", "cheap")
"""Operations that cost less to repeat than to store: XLA repeats them in every kernel that reads their result."""
COPIES = operators("fusion", "copies")
"""Operations that only move elements."""


@dataclass
class Group:
    """Operations that run as one kernel (or one operation with its own kernels).

    Attributes:
      members: in order of execution.
      row: (rows, cols) of the reductions over innermost axes inside, None without one.
      mask: members as bits; outer: operations outside that make its inputs.
    """

    members: list[int] = field(default_factory=list)
    row: tuple[int, int] | None = None
    mask: int = 0
    outer: set[int] = field(default_factory=set)


def group(operations: Sequence[Operation], fused: bool) -> list[list[Operation]]:
    """Operations that run together, in order of execution; each alone unless `fused`."""
    if not fused:
        return [[item] for item in operations if item.kind != "free"]
    return _Grouping(operations).result()


class _Grouping:
    """One pass over the operations, each joined to groups of its producers where the rules allow."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self.producer, self.readers = producers(operations), readers(operations)
        self.above: list[int] = []  # bit mask of all operations each one depends on
        self.group_of: list[Group] = []

    def result(self) -> list[list[Operation]]:
        """Groups in the order of their last member."""
        # Ancestors are bits of one integer, so that the test for circles is one AND and not a walk.
        for at, item in enumerate(self.operations):
            makers = sorted({self.producer[value.id] for value in item.inputs if value.id in self.producer})
            makers = [maker for maker in makers if maker != at]
            above = 0
            for maker in makers:
                above |= self.above[maker] | (1 << maker)
            self.above.append(above)
            singleton = Group([at], None, 1 << at, set(makers))
            if item.kind == "row":
                singleton.row = (max(prod(item.loop) // max(item.reduced, 1), 1), item.reduced)
            self.group_of.append(singleton)
            if item.kind in FUSABLE:
                for value in item.inputs:
                    source = self.producer.get(value.id)
                    if source is not None and source != at:
                        self._try(at, source)
        # From the end each group is met first at its last member, where it runs.
        last_first = {id(fusion): sorted(fusion.members) for fusion in reversed(self.group_of)}
        groups = [[self.operations[member] for member in members] for members in reversed(last_first.values())]
        return [members for members in groups if members[0].kind != "free"]

    def _try(self, at: int, maker: int) -> None:
        consumer, producer = self.group_of[at], self.group_of[maker]
        if consumer is producer:
            return
        reader, source = self.operations[at], self.operations[maker]
        if source.kind not in ("pointwise", "row") or (source.body, source.phase) != (reader.body, reader.phase):
            return
        if self._fits(consumer, producer, reader, source) and not self._circular(consumer, producer):
            self._merge(consumer, producer)

    def _fits(self, consumer: Group, producer: Group, reader: Operation, source: Operation) -> bool:
        if consumer.row and producer.row and consumer.row != producer.row:
            return False
        has_column = any(self.operations[member].kind == "column" for member in producer.members)
        if (producer.row and reader.kind == "column") or (consumer.row and has_column):
            return False
        row = consumer.row or producer.row
        there = max(prod(source.outputs[0].shape), 1)
        here = max(prod(reader.loop), 1)
        if source.kind == "row":
            return row is not None and (here in (row[0], row[0] * row[1]))
        if there == here:
            return True
        if row is not None and {there, here} == {row[0], row[0] * row[1]}:
            return True
        if there < here and reader.op in JOINING:
            return True
        alone = len(self.readers.get(source.outputs[0].id, ())) == 1
        return alone and there < here and source.kind == "pointwise" and producer.row is None

    def _circular(self, one: Group, other: Group) -> bool:
        # A maker outside that needs a member would need the result of a kernel that waits for it.
        both = one.mask | other.mask
        return any(not (both >> maker) & 1 and self.above[maker] & both for maker in one.outer | other.outer)

    def _merge(self, consumer: Group, producer: Group) -> None:
        producer.members += consumer.members
        producer.row = producer.row or consumer.row
        producer.mask |= consumer.mask
        producer.outer |= consumer.outer
        for member in consumer.members:
            self.group_of[member] = producer


def cheap_sources(operations: Sequence[Operation], results: Iterable[int]) -> dict[int, Value]:
    """Arrays that a kernel computes again from another rather than read: id -> the array to read.

    Those are made by cheap operations from one array of the same size, and no product or gather reads them.
    """
    opaque = {value.id for item in operations if item.kind == "opaque" for value in item.inputs}
    opaque.update(results)
    sources: dict[int, Value] = {}
    for item in operations:
        big = [value for value in item.inputs if value.stored > SCALAR_ELEMENTS]
        if item.op not in CHEAP or len(big) != 1 or item.outputs[0].id in opaque:
            continue
        if big[0].stored == item.outputs[0].elements:
            sources[item.outputs[0].id] = sources.get(big[0].id, big[0])
    return sources


def kernels_of(
    members: Sequence[Operation], outside: Callable[[int], bool], sources: Mapping[int, Value]
) -> tuple[Kernel, ...]:
    """The kernels of operations that run together.

    Args:
      members: one group.
      outside: whether something outside the group reads the array of this id.
      sources: arrays that are computed again from others (`cheap_sources`).
    """
    first = members[0]
    if first.kind == "opaque":
        return first.kernels
    made = {value.id for item in members for value in item.outputs}
    read: dict[int, Value] = {}
    # An array that is seen by several views is read once, by the view that needs most of it.
    for item in members:
        for seen in item.inputs:
            value = sources.get(seen.id, seen)
            if value.id not in made and (value.id not in read or read[value.id].stored < value.stored):
                read[value.id] = value
    leaving = [value for item in members for value in item.outputs if outside(value.id)]
    written = {value.id: value for value in (sources.get(value.id, value) for value in leaving) if value.id in made}
    loop = max((item.loop for item in members), key=prod)
    big = [value for value in (*read.values(), *written.values()) if value.stored > SCALAR_ELEMENTS]
    if not big and prod(loop) <= SCALAR_ELEMENTS:
        return ()
    dtype = main_dtype(big)
    in_bytes = sum(value.bytes for value in read.values() if value.stored > SCALAR_ELEMENTS)
    out_bytes = sum(value.bytes for value in written.values())
    op, cols = _operator(members)
    kernel = streamed(op, loop, in_bytes, out_bytes, dtype, cols)
    return (against_order(kernel, first),) if len(members) == 1 else (kernel,)


def _operator(members: Sequence[Operation]) -> tuple[str, int | None]:
    """Operator of `kernel.rowwise` and row length of a group that streams."""
    rows = [item for item in members if item.kind == "row"]
    if rows:
        # A softmax or norm reads its statistics back: an operation on whole rows depends on what a reduction made.
        stats = {value.id for item in rows for value in item.outputs}
        back = False
        for item in members:
            if any(value.id in stats for value in item.inputs):
                if prod(item.loop) == prod(rows[0].loop) and item.kind == "pointwise":
                    back = True
                else:
                    stats |= {value.id for value in item.outputs}
        if back:
            softmax = any(item.op in (*EXPONENTIALS, SOFTMAX) for item in members)
            backward = members[0].phase == BACKWARD
            if softmax:
                return "softmax_backward" if backward else "softmax", rows[0].reduced
            return "layernorm_backward" if backward else "layernorm", rows[0].reduced
        return "reduce", rows[0].reduced
    if any(item.kind == "column" for item in members):
        return "reduce", None
    if all(item.op in COPIES for item in members):
        return "copy", None
    return "pointwise", None
