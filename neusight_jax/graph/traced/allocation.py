"""Allocation: device memory of a traced program, what it is given and what it makes on the way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from neusight_jax.graph.graph import OPTIMIZER_BYTES, RUNTIME_BYTES, Footprint
from neusight_jax.graph.traced.operation import Operation, Value


@dataclass(frozen=True)
class Holding:
    """What a traced program holds beside the arrays it makes.

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
        activations=0.0,
        kv_cache=0.0,
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
