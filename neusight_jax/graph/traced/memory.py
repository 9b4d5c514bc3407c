"""Allocation: device memory of a traced program, what it is given and what it makes on the way."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any, Literal, TypeAlias, get_args

from neusight_jax.errors import unknown_name
from neusight_jax.graph.graph import OPTIMIZER_BYTES, RUNTIME_BYTES, Footprint
from neusight_jax.graph.traced.operation import Operation, Value
from neusight_jax.kernels.table import PHASES
from neusight_jax.units import MIB


@dataclass(frozen=True)
class Holding:
    """Memory a traced program holds beside the arrays it makes.

    Attributes:
      footprint: all of it but the activations.
      parameters: elements of the parameters, each once; trained: those of them that are.
      counted: ids of arrays that the footprint counts: arguments, gradients, what is updated in place.
      memory: id of an array -> id of the array whose memory it is, where that is another.
    """

    footprint: Footprint
    parameters: float = 0.0
    trained: float = 0.0
    counted: frozenset[int] = frozenset()
    memory: Mapping[int, int] = field(default_factory=dict)


def given_footprint(
    weights: float,
    inputs: float,
    buffers: float,
    learned: Iterable[tuple[float, float]],
    optimizer: float | None = None,
) -> Footprint:
    """Memory of what a program is given, bytes, and of a training step.

    Args:
      weights, inputs, buffers: bytes.
      learned: elements and bytes of each parameter that has a gradient; none in inference.
      optimizer: bytes of its state; None = Adam's two moments of each parameter in fp32.
    """
    trained = list(learned)
    moments = OPTIMIZER_BYTES * sum(elements for elements, _ in trained)
    return Footprint(
        weights=weights,
        gradients=sum(size for _, size in trained),
        optimizer=moments if optimizer is None else optimizer,
        runtime=RUNTIME_BYTES,
        inputs=inputs,
        buffers=buffers,
    )


def peak_bytes(
    operations: Sequence[Operation],
    steps: Sequence[int],
    unstored: Mapping[int, Value | None],
    results: Collection[int],
    holding: Holding,
) -> float:
    """The most bytes of arrays a program has made and still needs, at any of its operations.

    Args:
      operations: in order of execution; steps: when each runs, those of one kernel together.
      unstored: arrays that are never in memory: inside a kernel (None), or computed again from the array given.
      results: ids of the arrays the program returns.
      holding: what is counted elsewhere, and which arrays share memory.
    """
    born: dict[int, int] = {}
    size: dict[int, float] = {}
    last: dict[int, int] = {}
    begin: dict[int, int] = {}  # the first step of each loop body

    def memory(array: int) -> int:
        while array in holding.memory:
            array = holding.memory[array]
        return array

    # Birth and last use of every array, so that one sweep over the steps finds the peak.
    for item, step in zip(operations, steps, strict=True):
        begin.setdefault(item.body, step)
        for value in item.inputs:
            source = unstored.get(value.id) or value
            last[memory(source.id)] = step
        # What a loop stacks is there from its beginning.
        start = begin.get(item.looped, step) if item.looped else step
        for value in item.outputs:
            array = memory(value.id)
            if array in holding.counted or value.id in holding.counted or value.id in unstored:
                continue
            born[array] = min(born.get(array, start), start)
            size[array] = max(size.get(array, 0.0), value.elements * value.element_bytes)
    end = max(steps, default=0)
    kept = {memory(array) for array in results}
    change = [0.0] * (end + 2)
    for array, start in born.items():
        change[start] += size[array]
        change[(end if array in kept else max(last.get(array, start), start)) + 1] -= size[array]
    return max(accumulate(change), default=0.0)


# Arguments of a JAX function by what they are: parameters, inputs, buffers, state of an optimizer.
#
# JAX does not say which arrays are parameters. What a program does with an array tells most: the window of a
# convolution, or the right side of a product with something computed, is a parameter, what an index comes from is an
# input, what only an update reads is state of the optimizer. Where that is silent, names and neighbours in the same
# argument decide.

Role: TypeAlias = Literal["parameter", "input", "buffer", "optimizer"]
Path: TypeAlias = tuple[str, ...]

SURE, NAMED, LIKELY = 4.0, 2.0, 1.0
"""Weights of the pieces of evidence: what only one reading explains, a name, a habit. Positive for a parameter."""
PARAMETERS = re.compile(
    r"^(.*_)?(p|w|u|b|params?|parameters|weights?|kernels?|bias|biases|scales?|gamma|beta|theta|tables?|model|variables"
    r"|[wu]_?\d+|w_?[a-z]{1,3}|embeddings?|experts?)$"
)
INPUTS = re.compile(
    r"^(.*_)?(x|xs|xt|x_?\d+|inputs?|batch|data|images?|imgs?|pixels?|tokens?|ids|idx|indices|labels?|targets?|y|ys|q|k|v"
    r"|query|queries|keys?|values?|masks?|rng|cache|kv|carry|h|h0|hidden|lhs|t|n|steps?|lengths?|positions?)$"
)
COLLECTIONS: Mapping[str, Role] = {
    "params": "parameter",
    "batch_stats": "buffer",
    "stats": "buffer",
    "cache": "input",
    "opt_state": "optimizer",
}
"""Keys of flax and optax that say what lies below them."""
QUANTIZED = frozenset({"int2", "int4", "int8", "uint2", "uint4", "uint8"})
"""Dtypes of integers that weights are kept in, and that may be pixels."""
MOVES = frozenset({"dynamic_slice", "squeeze", "copy", "gather"})
"""Operations that hand on a part of their first operand."""
BACKWARD = PHASES.index("backward")
UPDATES = ("dynamic_update_slice", "scatter")


@dataclass(frozen=True)
class Leaf:
    """An array a program is given.

    Attributes:
      argument: name of the argument it is in, "" for a constant the function closes over.
      path: keys inside that argument.
      value: the array.
    """

    argument: str
    path: Path
    value: Value

    @property
    def floating(self) -> bool:
        """Whether it holds floating-point or complex numbers."""
        return self.value.dtype.startswith(("float", "bfloat", "complex"))


def roles(
    leaves: Sequence[Leaf], operations: Sequence[Operation], carried: Set[tuple[int, int]]
) -> tuple[list[Role], list[bool]]:
    """Role of each leaf, and whether it is sure.

    Args:
      leaves: arrays the program is given.
      operations: of the whole program.
      carried: (loop body, id of an array) of what a loop carries from one step to the next.
    """
    evidence = _Evidence({leaf.value.id for leaf in leaves}, carried).read(operations)
    training = any(item.phase for item in operations)
    needed, updating = _needed_by(operations, BACKWARD), _needed_by(operations, BACKWARD + 1)
    scores = [_own(leaf, evidence.get(leaf.value.id, 0.0), leaves) for leaf in leaves]
    chosen: list[Role] = []
    sure: list[bool] = []
    # Parameters mostly come as a tree in one argument, so neighbours count, but never against what is sure.
    for leaf, score in zip(leaves, scores, strict=True):
        beside = sum(
            other for it, other in zip(leaves, scores, strict=True) if it.argument == leaf.argument and it is not leaf
        )
        total = score + (max(-NAMED, min(NAMED, beside)) if leaf.argument else 0.0)
        declared = next((COLLECTIONS[key] for key in (leaf.argument, *leaf.path) if key in COLLECTIONS), None)
        role: Role = "parameter" if total > 0 else "input"
        if declared is not None:
            role = declared
        elif not leaf.argument:  # a constant that a product reads is no input
            role = "parameter" if leaf.floating and leaf.value.id in evidence else "buffer"
        elif training and leaf.floating and leaf.value.id in updating - needed:
            role = "optimizer"
        chosen.append(role)
        sure.append(declared is not None or role == "optimizer" or not leaf.argument or abs(total) >= NAMED)
    return chosen, sure


def _needed_by(operations: Sequence[Operation], phase: int) -> set[int]:
    """Ids of all arrays that operations of a phase come from: state of an optimizer is for updates, not gradients."""
    needed: set[int] = set()
    for item in reversed(operations):
        if item.phase == phase or any(value.id in needed for value in item.outputs):
            needed |= {value.id for value in item.inputs}
    return needed


def _own(leaf: Leaf, score: float, leaves: Sequence[Leaf]) -> float:
    """Evidence of one leaf: uses, dtype, name, and whether its argument is a tree of arrays."""
    if not leaf.floating and (leaf.value.dtype not in QUANTIZED or len(leaf.value.shape) < 2):
        return -SURE
    for names, evidence in ((PARAMETERS, NAMED), (INPUTS, -NAMED)):
        if any(names.match(name.lower()) for name in (leaf.argument, *leaf.path)):
            return score + evidence
    tree = sum(other.argument == leaf.argument and other.floating for other in leaves) > 1
    return score + LIKELY * (tree and bool(leaf.argument))


class _Evidence:
    """Reads the forward pass for what it does with the arrays it is given.

    `origin`: id of an array -> the given array it comes from alone (converted, transposed, scaled by a number), or None
    for what is computed from several.
    """

    def __init__(self, arguments: Set[int], carried: Set[tuple[int, int]]) -> None:
        self.origin: dict[int, int | None] = {array: array for array in arguments}
        self.carried = carried
        self.score: dict[int, float] = {}
        self.parts: dict[int, set[int]] = {}

    def read(self, operations: Sequence[Operation]) -> dict[int, float]:
        """Evidence by the id of each given array."""
        # In order of execution, so that the origin of an array is known before it is read.
        for item in operations:
            if item.phase == 0 and item.inputs:
                self._judge(item)
            moved = item.op in MOVES and not (item.op == "gather" and self._from(item, 1) != _ABSENT)
            inputs = item.inputs[:1] if moved else [value for value in item.inputs if value.stored > 1]
            sources = {self._origin(item, value) for value in inputs} - {_ABSENT}
            alone = len(sources) == 1 and (moved or item.kind != "opaque")
            made = sources.pop() if alone else (None if sources or item.kind == "opaque" else _ABSENT)
            if made != _ABSENT:
                self.origin.update((value.id, made) for value in item.outputs)
            if made is None and item.kind == "pointwise":
                self._combine(item)
        return self.score

    def _combine(self, item: Operation) -> None:
        """Note what is made of given arrays alone without a product: a weight from codes and scales."""
        parts: set[int] = set()
        for value in item.inputs:
            source = self._origin(item, value)
            if source is None and value.id not in self.parts:
                return
            parts |= self.parts.get(value.id, set() if source in (None, _ABSENT) else {source})
        self.parts.update((value.id, parts) for value in item.outputs)

    def _origin(self, item: Operation, value: Value) -> int | None:
        if (item.body, value.id) in self.carried:
            return None
        return self.origin.get(value.id, _ABSENT)

    def _from(self, item: Operation, at: int) -> int | None:
        return self._origin(item, item.inputs[at]) if at < len(item.inputs) else _ABSENT

    def _add(self, array: int | None, evidence: float) -> None:
        if array is not None and array != _ABSENT:
            self.score[array] = self.score.get(array, 0.0) + evidence

    def _judge(self, item: Operation) -> None:
        left, right = self._from(item, 0), self._from(item, 1)
        if item.op in ("conv_general_dilated", "ragged_dot", "ragged_dot_general"):
            self._add(left, -SURE)
            self._add(right, SURE)
            for at in range(2, len(item.inputs)):
                self._add(self._from(item, at), -SURE)
        elif item.op == "dot_general":
            self._product(item, left, right)
        elif item.op == "gather":
            self._add(right, -SURE)
            if right != _ABSENT:
                self._add(left, NAMED)
        elif item.op.startswith(UPDATES):
            self._add(left, -SURE)
        elif item.kind == "pointwise":
            self._broadcast(item)

    def _product(self, item: Operation, left: int | None, right: int | None) -> None:
        batched = bool(item.kernels) and item.kernels[0].family == "bmm"
        # Weights stand on the right of a product, where the left side is an activation.
        computed = left is None or left == _ABSENT  # what is made from nothing is the start of a state
        if batched:
            self._add(left, 0.0 if right is None else -LIKELY)
            self._add(right, LIKELY if computed else -LIKELY)
        elif right is None:
            self._add(left, 0.0)
            parts = self.parts.get(item.inputs[1].id, set())
            for array in parts if left not in parts else ():
                self._add(array, LIKELY)
        elif left != right:
            self._add(left, -LIKELY)
            self._add(right, SURE if computed else LIKELY)

    def _broadcast(self, item: Operation) -> None:
        """A bias, or a scale: broadcast to something of the whole size."""
        whole = prod(item.loop)
        sides = [(self._origin(item, value), value.stored) for value in item.inputs]
        if not any(stored >= whole and source != _ABSENT for source, stored in sides):
            return
        for source, stored in sides:
            if 1 < stored < whole and any(other != source for other, size in sides if size >= whole):
                self._add(source, LIKELY)


_ABSENT = -1
"""Origin of what comes from no array that is given."""


def learned(leaves: Sequence[Leaf], results: Sequence[tuple[Path, Value]], late: Set[int]) -> list[bool]:
    """Whether the program returns a gradient or an update of each leaf, by shape and path."""
    made = [(path, value.shape) for path, value in results if value.id in late]
    matches = []
    # A result is the gradient of one parameter at most, so it is struck off when it is matched.
    for leaf in leaves:
        shape, keys = leaf.value.shape, len(leaf.path)
        match = next((item for item in made if item[1] == shape and item[0][len(item[0]) - keys :] == leaf.path), None)
        if match is not None:
            made.remove(match)
        matches.append(match is not None)
    return matches


def argument_names(fn: Callable[..., Any], count: int) -> dict[str, str]:
    """Position of each of `count` positional arguments -> its name, where the function says."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return {}
    positional = itertools.takewhile(lambda item: item.kind is not item.VAR_POSITIONAL, parameters)
    return {str(at): item.name for at, item in zip(range(count), positional, strict=False)}


def holding_of(
    leaves: Sequence[Leaf],
    operations: Sequence[Operation],
    results: Sequence[tuple[Path, Value]],
    carried: Set[tuple[int, int]],
    late: Set[int],
    memory: Mapping[int, int],
    chosen: Sequence[str] | None,
) -> tuple[Holding, tuple[str, ...]]:
    """Memory a JAX program holds beside the arrays it makes, and what had to be assumed for that.

    Args:
      leaves, operations, carried: as for `roles`; late: ids of arrays computed from gradients.
      results: what it returns, with paths.
      memory: array -> the array whose memory it is.
      chosen: names of the arguments that hold the parameters; None = as `roles` finds them.
    """
    leaf_roles, sure = roles(leaves, operations, carried)
    if chosen is not None:
        arguments = {leaf.argument for leaf in leaves}
        for name in chosen:
            if name not in arguments:
                raise unknown_name("argument", name, sorted(arguments - {""}))
        leaf_roles = [
            "parameter" if leaf.argument in chosen else "input" if role == "parameter" and leaf.argument else role
            for leaf, role in zip(leaves, leaf_roles, strict=True)
        ]
    parameters = [leaf for leaf, role in zip(leaves, leaf_roles, strict=True) if role == "parameter"]
    returned = learned(parameters, results, late)
    trained = [leaf for leaf, match in zip(parameters, returned, strict=True) if match or not any(returned)]
    shapes = {leaf.value.shape for leaf in (trained if late else [])}
    updates = any(item.phase > BACKWARD for item in operations)
    sizes = {
        role: sum(leaf.value.bytes for leaf, other in zip(leaves, leaf_roles, strict=True) if other == role)
        for role in get_args(Role)
    }
    # Gradients, and what an update makes, have the shapes of parameters.
    gradients = {
        value.id for item in operations for value in item.outputs if value.id in late and value.shape in shapes
    }
    holding = Holding(
        footprint=given_footprint(
            sizes["parameter"],
            sizes["input"],
            sizes["buffer"],
            [(float(leaf.value.elements), leaf.value.bytes) for leaf in (trained if late else [])],
            sizes["optimizer"] if updates else None,
        ),
        parameters=float(sum(leaf.value.elements for leaf in parameters)),
        trained=float(sum(leaf.value.elements for leaf in trained)),
        counted=frozenset(gradients | {leaf.value.id for leaf in leaves}),
        memory=memory,
    )
    return holding, () if chosen is not None else _assumed(leaves, leaf_roles, sure)


def _assumed(leaves: Sequence[Leaf], leaf_roles: Sequence[Role], sure: Sequence[bool]) -> tuple[str, ...]:
    """One note where it is not sure what a large argument is."""
    doubtful = [leaf for leaf, certain in zip(leaves, sure, strict=True) if not certain and leaf.value.bytes >= MIB]
    if not doubtful:
        return ()

    def holding(role: Role) -> str:
        names = dict.fromkeys(leaf.argument for leaf, other in zip(leaves, leaf_roles, strict=True) if other == role)
        return ", ".join(name for name in names if name) or "none"

    return (
        f"memory: parameters are taken to be in the arguments {holding('parameter')}, inputs in {holding('input')}; "
        "--parameters (TraceOptions(parameters=...)) says which hold parameters",
    )
