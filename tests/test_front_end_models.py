"""Whole models through the front-ends: GPT-2 three ways, and the five networks Habitat was judged on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from graphs import kernels, product_flop, products

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.predictor import load_baseline

pytest.importorskip("flax", reason="flax is not installed; `pip install '.[dev]'`")
import flax_models as models

BATCH, LENGTH = 2, 96
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 128,
    "vocab_size": 1000,
    "activation_function": "gelu_new",
}
MIXTURE = {"families": ["linear", "bmm", "conv", "elementwise", "softmax", "norm"], "hidden": [8], "members": 1}
GPUS = ("V100-PCIE-32GB", "T4", "P100-PCIE-16GB", "A100-PCIE-40GB")


@pytest.fixture(autouse=True)
def _models_promote() -> Any:
    """The models are written in JAX's usual promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@cache
def _flax_gpt2(mode: str) -> Graph:
    model = models.Gpt2(GPT2["vocab_size"], GPT2["n_positions"], GPT2["n_embd"], GPT2["n_layer"], GPT2["n_head"])
    params, stats = models.split(models.shapes_of(model, models.tokens(BATCH, LENGTH)))
    run = models.step(model) if mode == "training" else models.apply(model)
    return nj.graph_from_function(run, params, stats, models.tokens(BATCH, LENGTH))


def _analytic_gpt2() -> float:
    """FLOP of a forward pass: 24·h²  per token and layer, 4·s·h for attention, the head."""
    h, tokens = GPT2["n_embd"], BATCH * LENGTH
    return tokens * (GPT2["n_layer"] * (24 * h * h + 4 * LENGTH * h) + 2 * h * GPT2["vocab_size"])


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_gpt2_in_flax_equals_the_config(mode: str) -> None:
    ours, config = _flax_gpt2(mode), nj.graph_from_config(GPT2, BATCH, LENGTH, mode)
    assert products(ours) == products(config)
    assert product_flop(ours) == product_flop(config) == _analytic_gpt2() * (3 if mode == "training" else 1)
    assert ours.mode == mode


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_gpt2_in_transformers_equals_the_config(mode: str, attention: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {key: value for key, value in GPT2.items() if key != "model_type"}
    with torch.device("meta"):
        config = transformers.GPT2Config(**sizes, attn_implementation=attention, bos_token_id=1, eos_token_id=1)
        model = transformers.GPT2LMHeadModel(config).train(mode == "training")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    graph = nj.graph_from_torch(model, (), {"input_ids": ids, "use_cache": False}, mode)
    wanted = products(nj.graph_from_config(GPT2, BATCH, LENGTH, mode))
    assert wanted == products(_flax_gpt2(mode))
    # The gradient of fused attention computes its scores again.
    heads, layers = GPT2["n_head"], GPT2["n_layer"] if (attention, mode) == ("sdpa", "training") else 0
    size = GPT2["n_embd"] // heads
    wanted[(BATCH * heads, LENGTH, LENGTH, size)] += layers
    assert products(graph) == wanted
    again = 2 * layers * BATCH * heads * LENGTH * LENGTH * size
    assert product_flop(graph) == _analytic_gpt2() * (3 if mode == "training" else 1) + again


def test_flop_beside_xla() -> None:
    """XLA counts the elementwise arithmetic as well, and divisions and exponentials as one FLOP each."""
    model = models.Gpt2(1000, 128, 64, 3, 4)
    params, stats = models.split(models.shapes_of(model, models.tokens(BATCH, LENGTH)))
    counted = jax.jit(models.apply(model)).lower(params, stats, models.tokens(BATCH, LENGTH)).cost_analysis()["flops"]
    assert 1.0 < counted / _analytic_gpt2() < 1.10


def test_flop_beside_torch() -> None:
    """`torch.utils.flop_counter` counts products alone, as this package does, but takes the weight gradient of a
    grouped convolution for that of an ungrouped one: `groups` times too much."""
    torch = pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3, padding=1, groups=4),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 64, 10),
        )
        image = torch.zeros(4, 3, 16, 16)
        with FlopCounterMode(display=False) as counter:
            net(image).sum().backward()
    grouped = 2 * 4 * 64 * (9 * 8 // 4) * 16
    ours = product_flop(nj.graph_from_torch(net, (image,), mode="training"))
    assert counter.get_total_flops() == ours + (4 - 1) * grouped


# Network: model, inputs, published parameters, FLOP of a forward pass, and where both are from.
RESNET = 4_089_184_256  # multiply-adds of one 224×224 image: torchvision's 4.09 GFLOPS of resnet50
INCEPTION = 5_713_216_096  # of one 299×299 image: torchvision's 5.71 GFLOPS of inception_v3
DCGAN = 104_628_224  # 16 · (100·512 + 16·512·256 + 64·256·128 + 256·128·64 + 1024·64·3), PyTorch's example
NETWORKS: dict[str, tuple[Any, tuple[Any, ...], int, float | None]] = {
    # torchvision's resnet50: 25,557,032 parameters.
    "resnet50": (models.ResNet50(), (models.images(2, 224),), 25_557_032, 2 * 2 * RESNET),
    # torchvision's inception_v3: 27,161,264 parameters; its auxiliary classifier, not used here, has 3,326,696 of them.
    "inception_v3": (models.Inception(), (models.images(2, 299),), 27_161_264 - 3_326_696, 2 * 2 * INCEPTION),
    # Published: 65 M. By hand: 37,000·512 of the shared embedding, 6 encoder layers of 4·512² + 2·512·2048, 6 decoder
    # layers of 8·512² + 2·512·2048, and per layer 2,560 biases and 2 or 3 norms of 1,024.
    "transformer": (
        models.Transformer(),
        (models.tokens(2, 64), models.tokens(2, 64)),
        37_000 * 512 + 6 * (12 * 512**2 + 2560 + 2 * 1024) + 6 * (16 * 512**2 + 2560 + 3 * 1024),
        None,
    ),
    # No published count of this one; by hand: two embeddings and a head of 32,320 · 1024, two projections of 1024², and
    # nine LSTMs of 4 · 1024 gates with inputs of 1024, or of 2048 for four.
    "gnmt": (
        models.Gnmt(),
        (models.tokens(2, 50), models.tokens(2, 50)),
        3 * 32_320 * 1024 + 32_320 + 2 * (1024**2 + 1024) + 4096 * (9 * (1024 + 1) + 5 * 1024 + 4 * 2048),
        None,
    ),
    # PyTorch's DCGAN example: netG 3,576,704 and netD 2,765,568 parameters; its batch, 64. (Of two images the
    # discriminator's last two layers are a few thread blocks that sum 4,096 and 8,192 products in series, forward only:
    # that pass is forecast up to 10 % longer than the backward one.)
    "dcgan_generator": (
        models.Generator(),
        (jax.ShapeDtypeStruct((64, 1, 1, 100), jnp.float32),),
        3_576_704,
        2 * 64 * DCGAN,
    ),
    "dcgan_discriminator": (models.Discriminator(), (models.images(64, 64),), 2_765_568, None),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_habitats_networks(name: str) -> None:
    """A training step of each: parameters and FLOP as published, forecast by the shipped checkpoint on four GPUs."""
    model, inputs, published, flop = NETWORKS[name]
    variables = models.shapes_of(model, *inputs)
    assert models.parameters(variables) == published
    params, stats = models.split(variables)
    step = nj.graph_from_function(models.step(model), params, stats, *inputs)
    forward = product_flop(step, phase=0)
    if flop is not None:
        assert forward == pytest.approx(flop, rel=1e-9)
    # The backward pass is twice the forward one, less the gradient of the first layer's input.
    assert 2.9 < product_flop(step) / forward <= 3.0
    assert not [node.op for node in step.nodes if node.op.startswith("unmodelled")]
    predictor, seconds = nj.load_predictor("fp32"), {}
    for device in GPUS:
        forecast = nj.predict(predictor, nj.load_gpu(device), step)
        bound = nj.predict(load_baseline("roofline"), nj.load_gpu(device), step)
        assert 0 < forecast.forward_s < forecast.backward_s < 1
        assert bound.total_s < forecast.total_s
        assert forecast.interval_s is not None
        assert 0 < forecast.interval_s[0] < forecast.total_s < forecast.interval_s[1] < 10 * forecast.total_s
        seconds[device] = forecast.total_s
    assert seconds["A100-PCIE-40GB"] < seconds["V100-PCIE-32GB"] < seconds["T4"]


def test_the_mixture_forecasts_convolutions() -> None:
    model, inputs = models.Discriminator(), (models.images(2, 64),)
    params, stats = models.split(models.shapes_of(model, *inputs))
    step = nj.graph_from_function(models.step(model), params, stats, *inputs)
    forecast = nj.predict(untrained("mixture", MIXTURE), nj.load_gpu("T4"), step)
    bound = nj.predict(load_baseline("roofline"), nj.load_gpu("T4"), step)
    assert forecast.total_s > bound.total_s > 0
    assert {"conv", "conv_data_gradient", "conv_weight_gradient"} <= set(forecast.columns["op"])
    without = {**MIXTURE, "families": ["linear", "elementwise"]}
    with pytest.raises(nj.InputError, match=r"not trained on conv, and the table holds \d+ kernels of it"):
        nj.predict(untrained("mixture", without), nj.load_gpu("T4"), step)


def test_an_lstm_is_its_products() -> None:
    """GNMT: 8 layers of 4·1024 gates, an input and a hidden product a step; the first layer runs both ways."""
    model, inputs = models.Gnmt(), (models.tokens(4, 25), models.tokens(4, 25))
    params, stats = models.split(models.shapes_of(model, *inputs))
    found = products(nj.graph_from_function(models.apply(model), params, stats, *inputs))
    steps, layers = 25, 9
    hidden = found[(1, 4, 4096, 1024)]
    wide = found[(1, 4, 4096, 2048)]
    assert hidden + wide == 2 * steps * layers
    assert wide == 4 * steps  # the layers that read two concatenated vectors of 1024


def test_flax_nnx_and_equinox() -> None:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.gelu(self.first(x)))

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32)
    definition, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(definition, state)(x) ** 2)

    expected = {(1, 16, 64, 32): 1, (1, 8, 16, 64): 1}
    forward = nj.graph_from_function(lambda state, x: nnx.merge(definition, state)(x), state, x)
    assert products(forward) == expected
    step = nj.graph_from_function(jax.value_and_grad(loss), state, x)
    backward = {(1, 8, 64, 16): 1, (1, 16, 64, 8): 1, (1, 32, 64, 16): 1}
    assert products(step) == {**expected, **backward}

    equinox = pytest.importorskip("equinox", reason="equinox is not installed; `pip install '.[dev]'`")
    mlp = equinox.filter_eval_shape(equinox.nn.MLP, 32, 8, 64, 1, key=jax.random.key(0))
    graph = nj.graph_from_function(lambda model, x: jax.vmap(model)(x), mlp, x)
    assert products(graph) == expected
    graph = nj.graph_from_function(
        equinox.filter_value_and_grad(lambda model, x: jnp.sum(jax.vmap(model)(x) ** 2)), mlp, x
    )
    assert products(graph) == {**expected, **backward}


def test_training_forecast_of_gpt2_is_close_between_front_ends() -> None:
    """The same products, so that seconds differ by the elementwise kernels alone."""
    predictor, gpu = load_baseline("roofline"), nj.load_gpu("V100-PCIE-32GB")
    for mode in ("inference", "training"):
        ours = nj.predict(predictor, gpu, _flax_gpt2(mode)).seconds_by("family")
        eager = replace(nj.graph_from_config(GPT2, BATCH, LENGTH, mode), launched="graph")  # launches take no time
        config = nj.predict(predictor, gpu, eager).seconds_by("family")
        assert ours["linear"] == pytest.approx(config["linear"], rel=1e-5)
        assert ours["bmm"] == pytest.approx(config["bmm"], rel=1e-5)
    assert len(kernels(_flax_gpt2("training"))) > 20
