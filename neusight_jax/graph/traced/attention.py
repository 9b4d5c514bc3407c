"""Attention in a traced program: a product, a softmax of it, a second product with the result.

Scale, mask, bias, dropout and conversions may stand between. What is recognised is marked in the operator's name
(`attention.scores`, `attention.softmax`, `attention.context`) and stays what it is: two batched products and a row
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from neusight_jax.graph.traced.operation import Operation, producers

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
            found = _between(operations, producer, value.id, prod(value.shape))
            if found is None:
                continue
            scores, softmax = found
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
        todo += [value.id for value in item.inputs if value.stored > 1]
    if len(products) != 1 or not softmax or not reduced:
        return None
    (scores,) = products
    return (scores, softmax) if operations[scores].outputs[0].elements == elements else None
