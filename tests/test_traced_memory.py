"""Memory of traced programs: parameters once each, inputs and buffers apart, what is alive on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from graphs import array, trace
from jax import lax

import neusight_jax as nj
from neusight_jax.graph.graph import RUNTIME_BYTES, Footprint
from neusight_jax.graph.memory import footprint, memory_bytes, parameter_count
from neusight_jax.model.predictor import load_baseline
from neusight_jax.reports.forecast import memory_line
from neusight_jax.units import GIB, MIB


def size(tree: Any) -> float:
    """Bytes of the arrays of a tree."""
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")))


def held(fn: Callable[..., Any], *args: Any, **options: Any) -> Footprint:
    return footprint(trace(fn, *args, **options))


def recurrent(w: jax.Array, u: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, xt: (jnp.tanh(h @ w + xt @ u), None), jnp.zeros((32, 512)), x)[0]


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0]


def test_a_scanned_input_is_no_weight() -> None:
    """Two weights of 1 MiB; 1,000 steps of 32 rows of 512, 62.5 MiB; a state, its step and their sum."""
    found = held(recurrent, array(512, 512), array(512, 512), array(1000, 32, 512))
    assert (found.weights, found.inputs, found.buffers) == (2 * MIB, 62.5 * MIB, 0)
    assert found.activations <= 4 * 32 * 512 * 4
    assert found.total == found.weights + found.inputs + found.activations + RUNTIME_BYTES


def test_scanned_weights_count_once_in_full() -> None:
    found = held(layers, array(12, 64, 64), array(8, 64))
    assert (found.weights, found.inputs) == (12 * 64 * 64 * 4, 8 * 64 * 4)


def test_weights_of_convolutions_picked_from_one_array() -> None:
    def stack(w: jax.Array, x: jax.Array) -> jax.Array:
        for layer in range(5):
            x = lax.conv_general_dilated(x, w[layer], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x

    found = held(stack, array(5, 3, 3, 64, 64), array(2, 7, 7, 64))
    assert (found.weights, found.inputs) == (5 * 9 * 64 * 64 * 4, 2 * 49 * 64 * 4)
    assert found.activations == 2 * 2 * 49 * 64 * 4  # one image in, one out


def test_one_weight_used_often_is_one_weight() -> None:
    def often(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(12):
            x = jax.nn.relu(x @ w)
        return x

    graph = trace(often, array(64, 128), array(128, 128))
    assert footprint(graph).weights == 128 * 128 * 4
    assert parameter_count(graph) == graph.parameters == 128 * 128


def _cache_step(params: Any, cache: jax.Array, token: jax.Array, position: jax.Array) -> Any:
    h = params["table"][token]
    query, key, value = (h @ params[name] for name in ("wq", "wk", "wv"))
    cache = lax.dynamic_update_slice(cache, jnp.stack([key, value])[:, :, None], (0, 0, position, 0))
    shares = jax.nn.softmax(jnp.einsum("bd,bsd->bs", query, cache[0]))
    return jnp.einsum("bs,bsd->bd", shares, cache[1]) @ params["table"].T, cache


TABLE = {"table": array(1000, 64), "wq": array(64, 64), "wk": array(64, 64), "wv": array(64, 64)}
BLOCK = {"w1": array(6, 64, 256), "b1": array(6, 256), "w2": array(6, 256, 64)}
GATES = {"wx": array(32, 256), "wh": array(64, 256), "b": array(256)}


def _block(params: Any, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, one: Any) -> Any:
        return h + jax.nn.gelu(h @ one["w1"] + one["b1"]) @ one["w2"], None

    return lax.scan(step, x, params)[0]


def _lstm(params: Any, xs: jax.Array) -> jax.Array:
    def step(state: Any, x: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(x @ params["wx"] + h @ params["wh"] + params["b"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (jnp.zeros((4, 64)), jnp.zeros((4, 64))), xs)[1]


def _dequantized(a: jax.Array, stored: jax.Array, span: jax.Array) -> jax.Array:
    return a @ (stored.astype(jnp.float32) * span)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "product, weight last": (lambda a, b: a @ b, (array(16, 32), array(32, 64)), 32 * 64 * 4),
    "product, weight first": (lambda W, x: W @ x, (array(64, 32), array(32, 16)), 64 * 32 * 4),
    "einsum": (lambda a, b: jnp.einsum("bsd,dhk->bshk", a, b), (array(2, 8, 64), array(64, 4, 16)), 64 * 64 * 4),
    "attention": (jax.nn.dot_product_attention, (array(2, 128, 4, 32),) * 3, 0),
    "decode step": (
        _cache_step,
        (TABLE, array(2, 4, 128, 64), array(4, dtype=jnp.int32), array(dtype=jnp.int32)),
        size(TABLE),
    ),
    "blocks": (_block, (BLOCK, array(8, 64)), size(BLOCK)),
    "gradient of blocks": (jax.grad(lambda p, x: _block(p, x).sum()), (BLOCK, array(8, 64)), size(BLOCK)),
    "lstm": (_lstm, (GATES, array(50, 4, 32)), size(GATES)),
    "gradient of an lstm": (jax.grad(lambda p, x: _lstm(p, x).sum()), (GATES, array(50, 4, 32)), size(GATES)),
    "routed experts": (
        lambda x, experts, rows: jnp.einsum("ecd,edf->ecf", x[rows], experts),
        (array(64, 32), array(8, 32, 48), array(8, 4, dtype=jnp.int32)),
        8 * 32 * 48 * 4,
    ),
    "ragged": (lax.ragged_dot, (array(100, 32), array(8, 32, 16), array(8, dtype=jnp.int32)), 8 * 32 * 16 * 4),
    "quantized": (
        _dequantized,
        (array(16, 64), array(64, 32, dtype=jnp.int8), array(32)),
        64 * 32 + 32 * 4,
    ),
    "transposed convolution": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
        (array(4, 8, 8, 32), array(4, 4, 32, 16)),
        4 * 4 * 32 * 16 * 4,
    ),
    "vmapped": (
        jax.vmap(lambda p, x: jnp.tanh(x @ p["w1"]) @ p["w2"], in_axes=(0, None)),
        ({"w1": array(5, 32, 64), "w2": array(5, 64, 8)}, array(16, 32)),
        5 * (32 * 64 + 64 * 8) * 4,
    ),
    "fourier": (lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), (array(64, 1024),), 0),
}
"""Programs, their arguments, and bytes of those that a reader would call weights."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments_that_are_weights(name: str) -> None:
    fn, args, weights = PROGRAMS[name]
    with jax.numpy_dtype_promotion("standard"):
        found = held(fn, *args)
    assert found.weights == weights
    assert found.weights + found.inputs == size(args)


def _loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)


PARAMS = {"up": array(64, 256), "down": array(256, 64)}


def test_a_training_step_holds_its_own_optimizer() -> None:
    """Gradients as large as the parameters; AdamW's moments are arguments, plain descent has none."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, slopes = jax.value_and_grad(_loss)(params, x)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, value

    def descent(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, slope: p - 0.1 * slope, params, jax.grad(_loss)(params, x))

    state, x = jax.eval_shape(optimizer.init, PARAMS), array(128, 64)
    with jax.numpy_dtype_promotion("standard"):
        found, plain = held(step, PARAMS, state, x), held(descent, PARAMS, x)
    assert found.weights == found.gradients == size(PARAMS)
    assert found.optimizer == pytest.approx(2 * size(PARAMS), abs=8)  # beside a counter of steps
    assert (plain.weights, plain.gradients, plain.optimizer) == (size(PARAMS), size(PARAMS), 0)
    # What is alive: the input, the hidden layer before or after the activation, and its gradient.
    assert 128 * 256 * 4 <= plain.activations <= 4 * 128 * 256 * 4


def test_gradients_alone_are_for_an_optimizer_that_is_still_to_come() -> None:
    found = held(jax.value_and_grad(_loss), PARAMS, array(128, 64))
    assert (found.gradients, found.optimizer) == (size(PARAMS), 2 * size(PARAMS))


def test_frozen_weights_have_no_gradients() -> None:
    base, low = {"w": array(256, 256)}, {"a": array(256, 8), "b": array(8, 256)}

    def adapted(base: Any, low: Any, x: jax.Array) -> Any:
        return jax.grad(lambda low: ((x @ base["w"] + x @ low["a"] @ low["b"]) ** 2).sum())(low)

    found = held(adapted, base, low, array(16, 256))
    assert (found.weights, found.gradients) == (size(base) + size(low), size(low))


def test_constants_a_function_closes_over() -> None:
    w, table = jnp.ones((32, 64)), jnp.arange(1000)

    def closed(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w.T @ w + table[:64].astype(jnp.float32)

    found = held(closed, array(16, 32))
    assert (found.weights, found.buffers, found.inputs) == (size(w), size(table), 16 * 32 * 4)


def test_the_user_may_say_which_arguments_are_parameters() -> None:
    args = array(1024, 512), array(512, 1024)
    assert held(lambda a, b: a @ b, *args).weights == 2 * MIB
    assert "parameters are taken to be in the arguments b, inputs in a" in trace(lambda a, b: a @ b, *args).notes[0]
    for chosen in (("a", "b"), ("0", "1")):
        with jax.default_matmul_precision("float32"):
            graph = trace(lambda a, b: a @ b, *args, parameters=chosen)
        assert (footprint(graph).weights, footprint(graph).inputs, graph.notes) == (4 * MIB, 0, ())
    with pytest.raises(nj.InputError, match="unknown argument 'c'; expected one of: a, b"):
        trace(lambda a, b: a @ b, *args, parameters=("c",))


def test_what_is_alive_is_counted_and_no_more() -> None:
    """A chain holds two arrays at a time, whatever its length; a value needed at the end stays."""

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.sort(x @ w, axis=0)
        return x

    def kept(x: jax.Array, w: jax.Array) -> jax.Array:
        first = x @ w
        return chain(first, w) @ first.T

    row = 64 * 64 * 4
    args = array(64, 64), array(64, 64)
    assert held(chain, *args).activations == 2 * row
    assert held(kept, *args).activations == 3 * row


def test_memory_beside_xla() -> None:
    """What XLA's own analysis of the compiled gradient allocates: temporaries and results."""
    args = array(8, 128, 128), array(64, 128)
    gradient = jax.grad(lambda w, x: layers(w, x).sum())
    found = held(gradient, *args)
    analysis = jax.jit(gradient).lower(*args).compile().memory_analysis()
    xla = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert found.activations + found.gradients == pytest.approx(xla, rel=0.25)
    assert found.weights + found.inputs == analysis.argument_size_in_bytes


def test_what_the_report_prints() -> None:
    graph = trace(recurrent, array(512, 512), array(512, 512), array(8000, 32, 512))
    forecast = nj.predict(load_baseline("roofline"), nj.load_gpu("T4"), graph)
    assert forecast.fits
    assert "memory 1.2 GiB (weights 2 MiB, inputs 0.49, activations 0.188 MiB): fits in 15.0 GiB" in str(forecast)
    said = forecast.to_dict()["memory"]
    assert (said["weights_bytes"], said["inputs_bytes"], said["buffers_bytes"]) == (2 * MIB, 8000 * 32 * 512 * 4, 0)
    assert memory_bytes(graph) == said["total_bytes"]
    assert "(weights 2.8, activations 0.5 MiB)" in memory_line(Footprint(2.81 * GIB, 0, 0, MIB / 2, 0, 0), GIB)


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")


def test_a_torch_weight_used_twelve_times(torch: Any) -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Linear(256, 256, bias=False)
            self.register_buffer("unread", torch.zeros(10))

        def forward(self, x: Any) -> Any:
            for _ in range(12):
                x = torch.relu(self.w(x))
            return x

    with torch.device("meta"):
        net, x = Shared(), torch.zeros(64, 256)
    found = footprint(nj.graph_from_torch(net, (x,)))
    weight, row = 256 * 256 * 4, 64 * 256 * 4
    assert (found.weights, found.inputs, found.buffers, found.activations) == (weight, row, 40, 2 * row)
    found = footprint(nj.graph_from_torch(net, (x,), mode="training"))
    assert (found.weights, found.gradients, found.optimizer) == (weight, weight, 2 * weight)
    assert 12 * row <= found.activations <= 16 * row + 3 * weight  # kept for the backward pass, and sums of gradients


def test_tied_frozen_and_half_weights(torch: Any) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 64, dtype=torch.bfloat16)
            self.head = torch.nn.Linear(64, 100, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.table.weight
            self.norm = torch.nn.LayerNorm(64)
            self.norm.requires_grad_(False)

        def forward(self, ids: Any) -> Any:
            return self.head(self.norm(self.table(ids).float()).bfloat16())

    with torch.device("meta"):
        net, ids = Tied(), torch.zeros(2, 8, dtype=torch.long)
    for mode, trained in (("inference", 0), ("training", 6400)):
        graph = nj.graph_from_torch(net, (ids,), mode=mode)
        found = footprint(graph)
        assert graph.parameters == 6400 + 128
        assert (found.weights, found.gradients, found.optimizer) == (6400 * 2 + 128 * 4, trained * 2, trained * 8)


def test_an_expanded_operand_is_one_element_along_that_axis(torch: Any) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x + y

    wide = torch.zeros(1, 64, device="meta").expand(1000, 64)
    graph = nj.graph_from_torch(Sum(), (torch.zeros(1000, 64, device="meta"), wide))
    assert footprint(graph).inputs == (1000 + 1) * 64 * 4
    (kernel,) = graph.nodes[0].forward
    assert kernel.dims["reads"] == pytest.approx(1.001)


def test_the_command_line_says_parameters_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from neusight_jax.cli.app import run

    (tmp_path / "pair.py").write_text(
        "import jax\ndef pair():\n    s = jax.ShapeDtypeStruct((1024, 1024), 'float32')\n"
        "    return (lambda a, b: a @ b), (s, s)\n"
    )
    command = ["predict", f"{tmp_path / 'pair.py'}:pair", "--gpu", "T4"]
    assert run(command) == 0
    assert "(weights 4 MiB, inputs 4 MiB, activations 4 MiB)" in capsys.readouterr().out
    assert run([*command, "--parameters", "a,b"]) == 0
    assert "(weights 8 MiB, activations 4 MiB)" in capsys.readouterr().out
    assert run([*command, "--parameters", "c"]) == 2
    assert capsys.readouterr().err == "error: unknown argument 'c'; expected one of: a, b\n"
