"""Operations as kernels: one each, or fused as a compiler would.

The rule of the fused form follows XLA on GPUs: operations that iterate over the same elements join the kernel of the
operation that makes their input, a reduction over innermost axes may be read back by its own kernel (softmax, norms),
any other reduction ends one, and a smaller array that only one kernel reads is made inside it. No kernel may need its
own result by way of another. What is cheap is computed again rather than stored. Matrix products, convolutions, gathers
and sorts stay apart. A kernel reads each outer array once and writes each array that something outside it reads: its
time is that traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from neusight_jax.graph.kernel import streamed
from neusight_jax.graph.traced.attention import EXPONENTIALS, SOFTMAX
from neusight_jax.graph.traced.operation import Operation, Value, main_dtype, operators, producers, readers
from neusight_jax.graph.traced.strides import against_order
from neusight_jax.kernels.table import PHASES, Kernel

FUSABLE = frozenset({"pointwise", "row", "column"})
SCALAR_ELEMENTS = 1
"""Arrays of so many elements are kernel arguments, not traffic."""
JOINING = frozenset({"concatenate", "pad", "cat", "stack"})
"""Operations whose inputs are parts of their output."""
CHEAP = operators("fusion", "cheap")
"""Operations that cost less to repeat than to store: XLA repeats them in every kernel that reads their result."""
COPIES = operators("fusion", "copies")
"""Operations that only move elements."""
_BACKWARD = PHASES.index("backward")


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
        for at, item in enumerate(self.operations):
            makers = sorted({self.producer[value.id] for value in item.inputs if value.id in self.producer})
            makers = [maker for maker in makers if maker != at]
            above = 0
            for maker in makers:
                above |= self.above[maker] | (1 << maker)
            self.above.append(above)
            own = Group([at], None, 1 << at, set(makers))
            if item.kind == "row":
                own.row = (max(prod(item.loop) // max(item.reduced, 1), 1), item.reduced)
            self.group_of.append(own)
            if item.kind in FUSABLE:
                for value in item.inputs:
                    source = self.producer.get(value.id)
                    if source is not None and source != at:
                        self._try(at, source)
        seen: set[int] = set()
        out = []
        for at in range(len(self.operations) - 1, -1, -1):
            found = self.group_of[at]
            if id(found) not in seen:
                seen.add(id(found))
                out.append([self.operations[member] for member in sorted(found.members)])
        return [members for members in reversed(out) if members[0].kind != "free"]

    def _try(self, at: int, maker: int) -> None:
        mine, theirs = self.group_of[at], self.group_of[maker]
        if mine is theirs:
            return
        reader, source = self.operations[at], self.operations[maker]
        if source.kind not in ("pointwise", "row") or (source.body, source.phase) != (reader.body, reader.phase):
            return
        if self._fits(mine, theirs, reader, source) and not self._circular(mine, theirs):
            self._merge(mine, theirs)

    def _fits(self, mine: Group, theirs: Group, reader: Operation, source: Operation) -> bool:
        if mine.row and theirs.row and mine.row != theirs.row:
            return False
        if (theirs.row and reader.kind == "column") or (mine.row and self._has_column(theirs)):
            return False
        row = mine.row or theirs.row
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
        return alone and there < here and source.kind == "pointwise" and theirs.row is None

    def _has_column(self, found: Group) -> bool:
        return any(self.operations[member].kind == "column" for member in found.members)

    def _circular(self, one: Group, other: Group) -> bool:
        both = one.mask | other.mask
        return any(not (both >> maker) & 1 and self.above[maker] & both for maker in one.outer | other.outer)

    def _merge(self, mine: Group, theirs: Group) -> None:
        theirs.members += mine.members
        theirs.row = theirs.row or mine.row
        theirs.mask |= mine.mask
        theirs.outer |= mine.outer
        for member in mine.members:
            self.group_of[member] = theirs


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
    family, op, cols = _family(members)
    kernel = streamed(family, op, loop, in_bytes, out_bytes, dtype, cols)
    return (against_order(kernel, first),) if len(members) == 1 else (kernel,)


def _family(members: Sequence[Operation]) -> tuple[str, str, int | None]:
    """Family, operator and row length of a group that streams."""
    rows = [item for item in members if item.kind == "row"]
    columns = [item for item in members if item.kind == "column"]
    if rows:
        reduced = {value.id for item in rows for value in item.outputs}
        stats = set(reduced)
        back = False
        for item in members:
            if any(value.id in stats for value in item.inputs):
                if prod(item.loop) == prod(rows[0].loop) and item.kind == "pointwise":
                    back = True
                else:
                    stats |= {value.id for value in item.outputs}
        if back:
            softmax = any(item.op in (*EXPONENTIALS, SOFTMAX) for item in members)
            backward = members[0].phase == _BACKWARD
            if softmax:
                return "softmax", "softmax_backward" if backward else "softmax", rows[0].reduced
            return "norm", "layernorm_backward" if backward else "layernorm", rows[0].reduced
        return "memory", "reduce", rows[0].reduced
    if columns:
        return "memory", "reduce", None
    if all(item.op in COPIES for item in members):
        return "memory", "copy", None
    return "elementwise", "pointwise", None
