"""The front-end for JAX functions: what merges into one kernel, what costs nothing, and attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from graphs import array, kernels, products, trace
from jax import lax


def test_chain_becomes_one_kernel_of_its_outer_traffic() -> None:
    def chain(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.exp(x + bias) * 2.0)

    fused, eager = trace(chain, array(512, 256), array(256)), trace(chain, array(512, 256), array(256), fused=False)
    ((kernel, count),) = kernels(fused)
    assert count == 1
    assert (kernel.family, kernel.dims["rows"], kernel.dims["cols"]) == ("elementwise", 512, 256)
    assert kernel.dims["reads"] == pytest.approx(1 + 1 / 512)
    assert kernel.dims["writes"] == 1
    assert eager.launches() == 4
    assert fused.fused
    assert not eager.fused


def test_softmax_and_norm_are_row_kernels() -> None:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.mean(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6) * scale

    ((soft, _),) = kernels(trace(lambda x: jax.nn.softmax(x), array(128, 1024)))
    assert (soft.family, soft.op, soft.dims["rows"], soft.dims["cols"]) == ("softmax", "softmax", 128, 1024)
    assert (soft.dims["reads"], soft.dims["writes"]) == (1, 1)
    ((row, _),) = kernels(trace(norm, array(128, 1024), array(1024)))
    assert (row.family, row.dims["rows"], row.dims["cols"]) == ("norm", 128, 1024)


def test_reduction_over_outer_axes_ends_a_kernel() -> None:
    graph = trace(lambda x: jnp.tanh(jnp.sum(jnp.exp(x), axis=0)), array(4096, 64))
    first, second = (kernel for kernel, _ in kernels(graph))
    assert (first.family, first.op) == ("memory", "reduce")
    assert first.dims["reads"] == 1
    assert second.dims["rows"] * second.dims["cols"] == 64


def test_fusion_never_needs_its_own_result() -> None:
    """x + f(x @ w) reads x twice: the chain before the product cannot hold what comes after it."""

    def residual(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return jnp.tanh(y @ w) + y

    graph = trace(residual, array(64, 64), array(64, 64))
    assert [node.op for node in graph.nodes] == ["tanh", "dot_general", "fused(tanh+add)"]


def test_views_and_layouts_are_free() -> None:
    def views(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 0, 1).reshape(8, 32) @ w[:, :4]

    graph = trace(views, array(32, 8), array(32, 16))
    assert [kernel.family for kernel, _ in kernels(graph)] == ["linear"]


def test_unused_results_cost_nothing() -> None:
    def wasteful(x: jax.Array) -> jax.Array:
        _ = x @ x
        return x + 1.0

    assert not products(trace(wasteful, array(64, 64)))


@pytest.mark.parametrize("style", ["written out", "dot_product_attention"])
def test_attention_is_recognised(style: str) -> None:
    def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0
        scores = jnp.where(jnp.tril(jnp.ones((128, 128), bool)), scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    fn = written if style == "written out" else lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = array(2, 128, 4, 64)
    graph = trace(fn, x, x, x)
    ops = [node.op for node in graph.nodes]
    assert [op for op in ops if op.startswith("attention")] == [
        "attention.scores",
        "attention.softmax",
        "attention.context",
    ]
    softmax = next(node for node in graph.nodes if node.op == "attention.softmax").forward[0]
    assert (softmax.family, softmax.dims["rows"], softmax.dims["cols"]) == ("softmax", 2 * 4 * 128, 128)


def test_a_softmax_between_unlike_products_is_no_attention() -> None:
    def router(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ v

    graph = trace(router, array(64, 32), array(32, 16), array(16, 8))
    assert not [node for node in graph.nodes if node.op.startswith("attention")]
