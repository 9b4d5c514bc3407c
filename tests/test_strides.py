"""Operands in another order than their kernel runs, against the addresses of every element, counted one by one."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from neusight_jax.graph.traced import operation
from neusight_jax.graph.traced.operation import Operation, Value, against_order, scatter
from neusight_jax.kernels.table import Kernel

LINE = 16  # elements of 4 bytes in a fetch of 64


def _laid_out(number: int, shape: tuple[int, ...], order: tuple[int, ...]) -> Value:
    """An array with its axes in memory in this order, outermost first; size-1 axes broadcast."""
    steps, step = [0] * len(shape), 1
    for axis in reversed(order):
        steps[axis] = step if shape[axis] > 1 else 0
        step *= shape[axis]
    size = float(prod(shape))
    return Value(number, shape, size, 4.0, "float32", tuple(steps))


def _addresses(value: Value, shape: tuple[int, ...]) -> np.ndarray:
    assert value.strides is not None
    grid = np.indices(shape)
    kept = [index if size > 1 else 0 * index for index, size in zip(grid, value.shape, strict=True)]
    return sum(index * step for index, step in zip(kept, value.strides, strict=True)).ravel()


SHAPE = (3, 18, 20, 32)


@pytest.mark.parametrize("result_order", [(0, 1, 2, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("operand_order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (3, 0, 2, 1)])
@pytest.mark.parametrize("broadcast", [(), (0,), (3,)])
def test_every_address_in_the_order_of_the_loop(
    result_order: tuple[int, ...],
    operand_order: tuple[int, ...],
    broadcast: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operation, "KEPT_BYTES", 0.0)
    result = _laid_out(0, SHAPE, result_order)
    operand = _laid_out(1, tuple(1 if axis in broadcast else size for axis, size in enumerate(SHAPE)), operand_order)
    read = _addresses(operand, SHAPE)[np.argsort(_addresses(result, SHAPE))]
    moves = np.flatnonzero(np.diff(read)) + 1  # where the loop goes on to another element
    found = scatter(result, operand)
    if np.all(np.abs(np.diff(read[np.r_[0, moves]])[: LINE - 1]) == 1):
        assert found is None
        return
    assert found is not None
    assert found.passes == pytest.approx((len(moves) + 1) / read.size, rel=1e-6)
    # How long after its first element the next one of the same fetch is wanted.
    line = read // LINE
    first = np.flatnonzero((line == line[0]) & (read != read[0]))[0]
    assert found.window == first
    step = abs(int(read[moves[0]]) - int(read[0]))
    assert found.surplus == pytest.approx((min(step, LINE) - 1) / (LINE - 1))


def _sum(bias_order: tuple[int, ...], batch: int = 2) -> Operation:
    scores = _laid_out(1, (batch, 16, 512, 512), (0, 1, 2, 3))
    bias = _laid_out(2, (1, 16, 512, 512), bias_order)
    out = replace(scores, id=3)
    return Operation("add", "add", "pointwise", (scores, bias), (out,), out.shape)


def _kernel(operation: Operation) -> Kernel:
    dims = {"rows": float(prod(operation.loop)) / 512, "cols": 512.0, "reads": 1.5, "writes": 1.0}
    return Kernel("elementwise", "pointwise", dims, 1.0, "fp32")


def test_a_position_bias_with_its_heads_innermost() -> None:
    """As T5 and Switch Transformer leave theirs."""
    permuted = _sum((0, 2, 3, 1))
    kernel = against_order(_kernel(permuted), permuted)
    assert (kernel.family, kernel.op) == ("strided", "pointwise_permuted")
    # Of the second example of a batch the bias is read again.
    assert dict(kernel.dims) == {"rows": 16384, "cols": 512, "reads": 2, "writes": 1, "scattered": 1, "window": 512**2}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2)])
def test_what_l2_keeps_until_it_is_wanted_again_is_read_as_any_other(order: tuple[int, ...]) -> None:
    plain = _sum(order)
    assert against_order(_kernel(plain), plain) == _kernel(plain)


def test_a_layout_nobody_knows_is_taken_as_the_order_of_the_loop() -> None:
    permuted = _sum((0, 2, 3, 1))
    unknown = replace(permuted, inputs=tuple(replace(value, strides=None) for value in permuted.inputs))
    assert against_order(_kernel(unknown), unknown) == _kernel(unknown)
