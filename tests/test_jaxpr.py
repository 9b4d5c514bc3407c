"""The front-end for JAX functions: contractions, control flow, convolutions, what is unmodelled; counts by hand."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from graphs import F32, array, kernels, product_flop, products, trace
from jax import lax

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.model.predictor import load_baseline


def stream_bytes(graph: Graph, dtype_bytes: float = 4.0) -> float:
    """Bytes of all kernels that stream."""
    return sum(
        kernel.dims["rows"] * kernel.dims["cols"] * (kernel.dims["reads"] + kernel.dims["writes"]) * dtype_bytes * count
        for kernel, count in kernels(graph)
        if "reads" in kernel.dims
    )


@pytest.mark.parametrize(
    ("equation", "left", "right", "expected"),
    [
        ("mk,kn->mn", (3, 5), (5, 7), (1, 3, 7, 5)),
        ("bmk,bkn->bmn", (2, 3, 5), (2, 5, 7), (2, 3, 7, 5)),
        ("bqhd,bkhd->bhqk", (2, 3, 4, 5), (2, 6, 4, 5), (8, 3, 6, 5)),
        ("abcd,cde->abe", (2, 3, 4, 5), (4, 5, 6), (1, 6, 6, 20)),
        ("m,n->mn", (3,), (4,), (1, 3, 4, 1)),
        ("k,k->", (9,), (9,), (1, 1, 1, 9)),
    ],
)
def test_any_contraction_is_a_product(
    equation: str, left: tuple[int, ...], right: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    graph = trace(lambda a, b: lax.dot_general(a, b, _numbers(equation)), array(*left), array(*right))
    batch, m, n, k = expected
    assert products(graph) == Counter({(batch, *sorted((m, n)), k): 1})
    family = "bmm" if batch > 1 else "linear"
    assert [kernel.family for kernel, _ in kernels(graph)] == [family]


def _numbers(equation: str) -> Any:
    left, right = equation.split("->")[0].split(",")
    out = equation.split("->")[1]
    contract = [name for name in left if name in right and name not in out]
    batch = [name for name in left if name in right and name in out]
    return (
        ([left.index(name) for name in contract], [right.index(name) for name in contract]),
        ([left.index(name) for name in batch], [right.index(name) for name in batch]),
    )


def test_nothing_is_computed() -> None:
    """A product of 10^15 FLOP is traced in no time, from shapes alone and from arrays."""
    huge = array(100_000, 100_000)
    graph = trace(lambda a, b: a @ b, huge, huge)
    assert product_flop(graph) == 2e15
    small = np.ones((4, 4), np.float32)
    assert products(trace(lambda a, b: a @ b, small, jnp.ones((4, 4)))) == Counter({(1, 4, 4, 4): 1})


def test_arguments_that_are_no_arrays_pass_through() -> None:
    def scaled(x: jax.Array, factors: dict[str, Any], *, power: int) -> jax.Array:
        return x @ factors["w"] if factors["use"] and power == 2 else x

    graph = nj.graph_from_function(scaled, array(4, 8), {"w": array(8, 2), "use": True}, power=2)
    assert products(graph) == Counter({(1, 2, 4, 8): 1})
    assert graph.name == "scaled"


def _custom_jvp(fn: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return wrapped


def _custom_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda x: (fn(x), None), lambda _, slope: (slope,))
    return wrapped


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, _custom_jvp, _custom_vjp])
def test_calls_are_walked_through(wrap: Callable[..., Any]) -> None:
    inner = wrap(lambda x: x @ x)
    graph = trace(lambda x: inner(inner(x)), array(16, 16))
    assert products(graph) == Counter({(1, 16, 16, 16): 2})


def test_remat_computes_the_forward_pass_again() -> None:
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    plain = trace(jax.value_and_grad(layer), array(16, 16), array(4, 16))
    again = trace(jax.value_and_grad(jax.checkpoint(layer)), array(16, 16), array(4, 16))
    assert sum(products(plain).values()) == 5  # forward 2, gradients 3, as x needs none
    assert sum(products(again).values()) == 7


def test_scan_repeats_its_body() -> None:
    def loop(w: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(lambda carry, x: (jnp.tanh(carry @ w + x), carry), jnp.zeros((8, 32)), xs)

    one, many = (trace(loop, array(32, 32), array(steps, 8, 32)) for steps in (1, 1000))
    assert products(one) == Counter({(1, 8, 32, 32): 1})
    assert products(many) == Counter({(1, 8, 32, 32): 1000})
    assert len(many.nodes) == len(one.nodes)
    # A step reads its slice of xs, not all of it.
    assert stream_bytes(many) == pytest.approx(1000 * stream_bytes(one), rel=0.01)


def test_gradient_of_a_scan_runs_backward_as_often() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=10)[0])

    graph = trace(jax.grad(loss), array(32, 32), array(8, 32))
    assert products(graph) == Counter({(1, 8, 32, 32): 20, (1, 32, 32, 8): 10})
    assert graph.mode == "training"


def test_while_needs_a_trip_count() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: jnp.sum(x) < 1e9, lambda x: x @ x, x)

    with pytest.raises(
        InputError, match=r"while loop, whose trip count no shape tells; .*--trip-count N.*while_trips=N"
    ):
        trace(loop, array(8, 8))
    assert products(trace(loop, array(8, 8), while_trips=7)) == Counter({(1, 8, 8, 8): 7})


@pytest.mark.parametrize(("rows", "groups"), [(100, 64), (10, 64), (7, 3), (1000, 7), (64, 64), (1, 1)])
def test_every_row_of_a_grouped_product_counts(rows: int, groups: int) -> None:
    """Rows · K · N in each of the three products of a step, whatever the number of groups."""

    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

    args = array(rows, 512), array(groups, 512, 1024), array(groups, dtype=jnp.int32)
    flop = 2 * rows * 512 * 1024
    assert product_flop(trace(lax.ragged_dot, *args)) == pytest.approx(flop, rel=1e-12)
    step = trace(jax.value_and_grad(loss, argnums=(0, 1)), *args)
    assert product_flop(step) == pytest.approx(3 * flop, rel=1e-12)
    # Groups without rows have no work, and nobody reads their matrices.
    assert {kernel.dims["batch"] for kernel, _ in kernels(step) if kernel.family == "bmm"} <= {min(rows, groups)}


def test_grouped_products_of_a_batch_and_over_the_contraction() -> None:
    batched = array(4, 100, 32), array(4, 8, 32, 48), array(4, 8, dtype=jnp.int32)
    assert product_flop(trace(jax.vmap(lax.ragged_dot), *batched)) == pytest.approx(2 * 4 * 100 * 32 * 48)
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    graph = trace(
        lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers),
        array(100, 32),
        array(100, 48),
        array(8, dtype=jnp.int32),
    )
    assert product_flop(graph) == pytest.approx(2 * 100 * 32 * 48)


def test_cond_takes_the_worst_branch_or_the_given_one() -> None:
    def choose(flag: jax.Array, x: jax.Array) -> jax.Array:
        return lax.cond(flag, lambda x: x @ x @ x, lambda x: x + 1.0, x)

    flag, x = array(dtype=jnp.bool_), array(64, 64)
    assert sum(products(trace(choose, flag, x)).values()) == 2
    assert sum(products(trace(choose, flag, x, branch=0)).values()) == 0  # the branch of False comes first
    assert sum(products(trace(choose, flag, x, branch=1)).values()) == 2
    with pytest.raises(InputError, match="branch is 2, but a cond has 2 branches"):
        trace(choose, flag, x, branch=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"while_trips": -1}, "while_trips is -1, expected a whole number"),
        ({"while_trips": 1.5}, "while_trips is 1.5"),
        ({"branch": "best"}, "branch is 'best', expected 'worst' or the index"),
        ({"fp32_products": "fp64"}, "fp32_products is 'fp64', expected 'fp32' or 'tf32'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        nj.TraceOptions(**options)


def test_a_function_that_does_nothing_takes_no_time() -> None:
    for graph in (trace(lambda x: x, array(4)), trace(lambda: 3.0), trace(lambda x: x[None], array(4))):
        forecast = nj.predict(load_baseline("roofline"), nj.load_gpu("T4"), graph)
        assert forecast.total_s == 0
        assert "total 0 us" in str(forecast)


def test_what_cannot_be_traced_is_one_line() -> None:
    with pytest.raises(InputError, match=r"expected a function and its arguments"):
        nj.graph_from_function(3)  # type: ignore[arg-type]

    def branchy(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match=r"^branchy: cannot be traced \(TracerBoolConversionError") as error:
        nj.graph_from_function(branchy, array(3))
    assert "\n" not in str(error.value)


def test_dtypes_follow_the_operands() -> None:
    x = array(32, 64, dtype=jnp.bfloat16)
    graph = trace(lambda a, b: jnp.matmul(a, b, preferred_element_type=F32), x, array(64, 16, dtype=jnp.bfloat16))
    assert graph.dtype == "bf16"
    ((kernel, _),) = kernels(graph)
    assert kernel.dtype == "bf16"
    as_tf32 = trace(lambda a: a @ a, array(16, 16), fp32_products="tf32")
    assert [kernel.dtype for kernel, _ in kernels(as_tf32)] == ["tf32"]


def test_operators_beyond_products() -> None:
    def many(x: jax.Array, ids: jax.Array, key: jax.Array) -> Any:
        return (
            x[ids],
            jnp.zeros((100, 64)).at[ids].add(1.0),
            jnp.sort(x, axis=0),
            jnp.cumsum(x, axis=0),
            jax.random.normal(key, (100, 64)),
            lax.top_k(x, 3)[0],
        )

    graph = trace(many, array(100, 64), array(10, dtype=jnp.int32), jax.random.key(0))
    found = Counter(kernel.op for kernel, _ in kernels(graph))
    assert {"gather", "scatter", "sort", "cumsum", "random"} <= set(found)
    assert not [node for node in graph.nodes if node.op.startswith("unmodelled")]
    fill, scatter = (next(kernel for kernel, _ in kernels(graph) if kernel.op == op) for op in ("fill", "scatter"))
    assert fill.dims["rows"] * fill.dims["cols"] == 6400  # the zeros that are added to
    assert scatter.dims["rows"] * scatter.dims["cols"] == 640
    gather = next(kernel for kernel, _ in kernels(graph) if kernel.op == "gather")
    assert gather.dims["rows"] * gather.dims["cols"] == 640  # the rows that are picked, not the table


def test_the_unmodelled_are_charged_and_listed() -> None:
    def strange(x: jax.Array) -> jax.Array:
        return jnp.abs(jnp.fft.fft(x)) + jnp.linalg.cholesky(x @ x.T)

    with jax.default_matmul_precision("float32"):
        graph, plain = trace(strange, array(256, 256)), trace(lambda x: x @ x, array(8, 8))
    gpu = nj.load_gpu("V100-PCIE-32GB")
    forecast = nj.predict(load_baseline("roofline"), gpu, graph)
    (note,) = forecast.notes
    found = re.findall(r"(\w+) ([\d.]+)%", note)
    assert {name for name, _ in found} == {"cholesky"}
    assert 0 < sum(float(share) for _, share in found) <= 100
    fft = next(node for node in graph.nodes if node.op == "fft").forward[0]
    moved = fft.dims["rows"] * fft.dims["cols"] * (fft.dims["reads"] + fft.dims["writes"]) * 4
    assert moved == 256 * 256 * (8 + 8)  # complex64 in, complex64 out
    assert not nj.predict(load_baseline("roofline"), gpu, plain).notes


def test_a_device_of_a_mesh_runs_its_shard() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("d",))
    spec = jax.sharding.PartitionSpec("d")

    def exchange(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda part: lax.psum(part @ part.T, "d"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
        )(x)

    graph = trace(exchange, array(8, 8))
    assert products(graph) == Counter({(1, 4, 4, 8): 1})
    assert [node.op for node in graph.nodes] == ["dot_general", "psum_invariant"]


def test_a_whole_training_step_with_optax() -> None:
    optimizer = optax.adamw(1e-3)
    shapes = {"w": array(64, 32), "v": array(32, 8)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"]) ** 2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, value

    with jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(optimizer.init, shapes)
        graph = trace(step, shapes, state, array(128, 64))
    forward = {(1, 32, 128, 64): 1, (1, 8, 128, 32): 1}
    assert products(graph) == Counter({**forward, (1, 8, 32, 128): 1, (1, 32, 128, 8): 1, (1, 32, 64, 128): 1})
    phases = Counter(
        phase for node in graph.nodes for phase, found in zip(("f", "b", "u", "o"), node.phases, strict=True) if found
    )
    assert set(phases) == {"f", "b", "u"}
    # AdamW reads and writes weight and two moments, and reads the gradient: 7 passes over each parameter.
    update = [kernel for node in graph.nodes for kernel in node.weight_gradient if kernel.dims["cols"] == 32]
    assert sum(kernel.dims["reads"] + kernel.dims["writes"] for kernel in update) == pytest.approx(7, abs=1.5)


def test_flop_of_a_dense_net_are_exact() -> None:
    sizes = (784, 512, 256, 10)

    def net(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights[:-1]:
            x = jax.nn.relu(x @ w)
        return x @ weights[-1]

    weights = [array(m, n) for m, n in pairwise(sizes)]
    analytic = sum(2 * 64 * m * n for m, n in pairwise(sizes))
    assert product_flop(trace(net, weights, array(64, 784))) == analytic
    loss = jax.value_and_grad(lambda weights, x: jnp.sum(net(weights, x)))
    # Backward: twice as much, less the gradient of the input of the first layer.
    assert product_flop(trace(loss, weights, array(64, 784))) == 3 * analytic - 2 * 64 * sizes[0] * sizes[1]


def test_thousand_equations_in_a_second() -> None:
    def long(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(250):
            x = jnp.tanh(x @ w) * 0.5 + x
        return x

    args, predictor, gpu = (array(64, 64), array(64, 64)), load_baseline("roofline"), nj.load_gpu("T4")
    assert len(jax.make_jaxpr(long)(*args).eqns) == 1000
    nj.predict(predictor, gpu, trace(lambda x, w: x @ w, *args))  # compiles the program all small graphs share
    seconds = []
    for _ in range(3):
        begin = time.process_time()  # of the processor, as other programs share the machine
        graph = trace(long, *args)
        forecast = nj.predict(predictor, gpu, graph)
        seconds.append(time.process_time() - begin)
    assert forecast.total_s > 0
    assert sum(products(graph).values()) == 250
    assert min(seconds) < 1.0


def test_layers_that_are_alike_are_one_node() -> None:
    def net(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for layer, w in enumerate(weights):
            with jax.named_scope(f"layer_{layer}"):
                x = jnp.tanh(x @ w)
        return x

    graph = trace(net, [array(16, 16)] * 12, array(4, 16))
    assert [(node.name, node.repeat) for node in graph.nodes] == [
        ("layer_*.dot_general", 12),
        ("layer_*.tanh", 12),
    ]
    assert graph.launches() == 24


def test_products_of_default_precision_are_said() -> None:
    """On an H100 a GPT-2 of fp32 arrays took 19 ms by default, and 57 ms in fp32."""
    note = "products in fp32"
    assert [text for text in trace(lambda a: a @ a, array(16, 16)).notes if note in text]
    exact = trace(lambda a: jnp.matmul(a, a, precision="highest"), array(16, 16))
    for graph in (exact, trace(lambda a: a @ a, array(16, 16), fp32_products="tf32"), trace(jnp.sin, array(16, 16))):
        assert not [text for text in graph.notes if note in text]
