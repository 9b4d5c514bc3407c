"""The front-end for JAX functions: convolutions of every pass and pooling, counts by hand and beside XLA's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from graphs import array, conv_kernels, kernels, product_flop, products, trace
from jax import lax


def test_flop_beside_xla() -> None:
    """XLA's count is the same for products; it leaves out what a convolution's window finds in the padding."""

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def counted(fn: Callable[..., Any], *args: Any) -> float:
        return float(jax.jit(fn).lower(*args).cost_analysis()["flops"])

    args = array(32, 64), array(64, 16)
    assert product_flop(trace(dense, *args)) == counted(dense, *args) == 2 * 32 * 64 * 16
    image, window = array(1, 8, 8, 4), array(3, 3, 4, 16)
    ours = product_flop(trace(conv, image, window))
    assert ours == 2 * 64 * 9 * 4 * 16
    # Of 8 · 3 positions along an axis, 2 lie in the padding: (22 / 24)² of the products.
    assert counted(conv, image, window) == pytest.approx(ours * (22 / 24) ** 2)


@pytest.mark.parametrize(("stride", "groups", "side"), [(1, 1, 16), (2, 1, 16), (1, 8, 16), (2, 1, 9)])
def test_every_pass_of_a_convolution_is_as_much_work(stride: int, groups: int, side: int) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )
        return jnp.sum(out**2)

    x, w = array(4, side, side, 8), array(3, 3, 8 // groups, 16)
    found = conv_kernels(trace(jax.grad(loss, argnums=(0, 1)), x, w))
    out = -(-side // stride)
    forward = 2 * 4 * out * out * 9 * (8 // groups) * 16
    assert sorted(found) == ["conv", "conv_data_gradient", "conv_weight_gradient"]
    assert [found[op] for op in sorted(found)] == [pytest.approx(forward)] * 3


def test_transposed_convolution_is_a_gradient() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(lax.conv_transpose(x, w, (2, 2), "SAME") ** 2)

    found = conv_kernels(trace(jax.grad(loss, argnums=(0, 1)), array(4, 8, 8, 32), array(4, 4, 32, 16)))
    assert {op: round(flop) for op, flop in found.items()} == dict.fromkeys(
        ("conv", "conv_data_gradient", "conv_weight_gradient"), 2 * 4 * 64 * 16 * 32 * 16
    )


def test_a_window_of_one_pixel_is_a_product() -> None:
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    graph = trace(conv, array(4, 8, 8, 32), array(1, 1, 32, 16))
    assert products(graph) == Counter({(1, 16, 256, 32): 1})


def test_pooling_goes_by_bytes_and_loads_of_its_windows() -> None:
    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    ((kernel, _),) = kernels(trace(pool, array(2, 16, 16, 8)))
    assert (kernel.family, kernel.op, kernel.dims["taps"]) == ("window", "pool", 9)
    assert (kernel.dims["reads"], kernel.dims["writes"]) == (4, 1)  # of a quarter as many results
