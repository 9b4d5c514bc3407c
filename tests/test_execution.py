"""How a model is run: PyTorch's own kernels one by one, a compiler's, an engine's."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.graph.configs.config import load_model_config
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.table import Kernel
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.software import LEARNED

QWEN: dict[str, Any] = {
    **{"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
    **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768},
    "architectures": ["Qwen2Model"],
}


def kernels(graph: Graph, part: str = "") -> list[tuple[Kernel, float]]:
    """Kernels of the nodes of a name, and how often each runs."""
    return [
        (kernel, kernel.count * node.repeat) for node in graph.nodes if part in node.name for kernel in node.forward
    ]


def test_eager_decoders_launch_the_kernels_that_pytorch_was_seen_to_launch() -> None:
    """Qwen2 1.5B over 4 x 512 tokens in bf16, as the authors of EnergAIzer list its kernels (cd60749)."""
    graph = nj.graph_from_config(QWEN, 4, 512, "prefill", "bf16", execution="eager")
    products = Counter[tuple[str, float, float, float, float]]()
    for kernel, count in kernels(graph):
        if kernel.family in ("linear", "bmm"):
            sizes = (kernel.dims[name] for name in ("batch", "m", "n", "k"))
            products[(kernel.family, *sizes)] += count  # type: ignore[index]
    assert products["linear", 1, 2048, 1536, 1536] == 56  # queries and output
    assert products["linear", 1, 2048, 256, 1536] == 56  # keys and values
    assert products["linear", 1, 2048, 8960, 1536] == 56  # gate and up
    assert products["linear", 1, 2048, 1536, 8960] == 28
    assert products["bmm", 48, 512, 512, 128] == 28
    assert products["bmm", 48, 512, 128, 512] == 28
    softmax = [(kernel, count) for kernel, count in kernels(graph) if kernel.family == "softmax"]
    assert [(kernel.dtype, kernel.dims["rows"], count) for kernel, count in softmax] == [("fp32", 24576.0, 28)]
    assert graph.launched == "eager"
    assert not any(kernel.family in ("prefill", "decode") for kernel, _ in kernels(graph))


def test_flash_attention_stays_one_kernel() -> None:
    graph = nj.graph_from_config(QWEN, 4, 512, "prefill", "bf16", execution="eager", attention="flash")
    assert [kernel.family for kernel, _ in kernels(graph, "layer.attention") if kernel.family == "prefill"] == [
        "prefill"
    ]
    assert not any(kernel.family == "softmax" for kernel, _ in kernels(graph, "layer.attention"))


@pytest.mark.parametrize("name", ["bert-large", "gpt2", "opt-1.3b"])
def test_attention_of_sixteen_bits_may_be_operator_by_operator(name: str) -> None:
    options = {"batch_size": 2, "sequence_length": 128, "dtype": "bf16"}
    flash, unfused = (nj.graph_from_config(name, **options, **more) for more in ({}, {"execution": "eager"}))
    assert any(kernel.family == "prefill" for kernel, _ in kernels(flash))
    assert not any(kernel.family == "prefill" for kernel, _ in kernels(unfused))
    assert any(kernel.family == "softmax" for kernel, _ in kernels(unfused))
    products = [sum(count * flop(kernel) for kernel, count in kernels(graph)) for graph in (flash, unfused)]
    assert products[1] >= products[0]


def flop(kernel: Kernel) -> float:
    """FLOP of a product, 0 of others."""
    dims = kernel.dims
    return 2.0 * dims["batch"] * dims["m"] * dims["n"] * dims["k"] if kernel.family in ("linear", "bmm") else 0.0


def test_work_is_kept() -> None:
    """Eager products are the engine's, but that causal scores are computed whole."""
    engine, eager = (
        nj.graph_from_config(QWEN, 2, 1024, "prefill", "bf16", execution=name) for name in ("engine", "eager")
    )
    whole = [sum(flop(kernel) * count for kernel, count in kernels(graph)) for graph in (engine, eager)]
    attention = 28 * 2 * 2.0 * 2 * 12 * 1024 * 1024 * 128
    assert whole[1] - whole[0] == pytest.approx(attention, rel=1e-6)


def test_the_host_bounds_small_eager_steps() -> None:
    predictor, gpu = nj.load_predictor("tensorcore"), nj.load_gpu("A100-PCIE-40GB")
    steps = {}
    for name in ("eager", "engine"):
        graph = nj.graph_from_config(QWEN, 1, 128, "prefill", "bf16", execution=name)
        slow = gpu.replace(clock_limit_hz=0.7 * 1.41e9)
        steps[name] = [nj.predict(predictor, chip, graph).total_s for chip in (gpu, slow)]
    assert steps["eager"][0] > 2.0 * steps["engine"][0]
    assert steps["eager"][1] / steps["eager"][0] < 1.15 < steps["engine"][1] / steps["engine"][0]


def launches(graph: Graph, phase: str, part: str = "") -> Counter[tuple[str, str]]:
    """Launches of a phase by family and operator."""
    counts = Counter[tuple[str, str]]()
    for node in graph.nodes:
        for kernel in getattr(node, phase) if part in node.name else ():
            counts[kernel.family, kernel.op] += kernel.count * node.repeat  # type: ignore[assignment]
    return counts


@pytest.mark.parametrize("attention", ["unfused", "flash"])
def test_an_eager_training_step_is_the_forward_pass_and_its_gradients(attention: str) -> None:
    options = {"execution": "eager", "attention": attention}
    forward, step = (nj.graph_from_config(QWEN, 2, 256, mode, "bf16", **options) for mode in ("inference", "training"))
    layer = "layer."
    assert launches(step, "forward", layer) == launches(forward, "forward", layer)
    work = {
        phase: sum(flop(kernel) * kernel.count * node.repeat for node in step.nodes for kernel in getattr(node, phase))
        for phase in ("forward", "backward", "weight_gradient")
    }
    scores = 28 * 2 * 2.0 * 2 * 12 * 256 * 256 * 128 if attention == "unfused" else 0.0
    products = work["forward"] - scores
    assert work["weight_gradient"] == pytest.approx(products)  # attention has no weights
    assert work["backward"] == pytest.approx(products + 2.0 * scores)
    # Queries, keys and values each have a gradient by what they read: two sums, and one of gate and up projection.
    sums = sum(
        kernel.count * node.repeat
        for node in step.nodes
        for kernel in node.backward
        if node.name.endswith(("qkv", "gate_up")) and kernel.op == "add"
    )
    assert sums == 3 * 28


def test_eager_training_keeps_more_for_its_gradients() -> None:
    def kept(**options: Any) -> float:
        graph = nj.graph_from_config(QWEN, 2, 256, "training", "bf16", **options)
        assert graph.footprint is not None
        return graph.footprint.activations

    flash, unfused = (kept(execution="eager", attention=attention) for attention in ("flash", "unfused"))
    assert kept() < flash < unfused
    # Probabilities in fp32 and in 16 bits, keys and values for all heads.
    layers = 28 * (6.0 * 2 * 12 * 256 * 256 + 2 * 2.0 * 2 * 12 * 256 * 128)
    assert unfused - flash == pytest.approx(layers, rel=0.05)


def test_frozen_weights_have_no_gradient_in_eager_training() -> None:
    options = {"mode": "training", "dtype": "bf16", "execution": "eager", "lora": nj.Lora(8)}
    graph = nj.graph_from_config(QWEN, 1, 128, **options)
    learned = {node.name.rpartition(".")[2] for node in graph.nodes if node.weight_gradient}
    assert learned == {"lora"}


def test_packed_weights_are_widened_before_eager_products() -> None:
    options = {"mode": "training", "dtype": "bf16", "execution": "eager", "lora": nj.Lora(8, weight_dtype="int4")}
    graph = nj.graph_from_config("llama-3.2-1b", sequence_length=64, **options)
    (gate_up,) = (node for node in graph.nodes if node.name.endswith("gate_up"))
    assert [kernel.op for kernel in gate_up.forward] == ["pointwise", "linear", "linear"]


def test_eager_replicas_are_the_graph() -> None:
    predictor, cluster = nj.load_predictor("tensorcore"), nj.load_cluster("1x H100")
    graph = nj.graph_from_config(QWEN, 2, 256, "training", "bf16", execution="eager", optimizer="adamw")
    seconds = [nj.predict(predictor, cluster, work).total_s for work in (graph, nj.job_from_graph(graph))]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-6)
    words = ("predict", "qwen2-1.5b", "--gpu", "H100", "--mode", "training", "--gpus", "8", "--zero", "1", "--json")
    assert run([*words, "--sequence-length", "256", "--execution", "eager"]) == 0
    assert run([*words, "--pipeline-parallel", "2", "--execution", "eager"]) == 2


def test_engine_of_gpt2_is_that_of_a_decoder() -> None:
    graph = nj.graph_from_config("gpt2", 2, 128, "inference", "bf16", execution="engine")
    assert any(kernel.family in ("reduction", "stream") for kernel, _ in kernels(graph))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"execution": "fast"}, "unknown execution 'fast'"),
        ({"execution": "eager", "fused": True}, "both say how it runs"),
        ({"attention": "unfused"}, "attention unfused is a choice of eager execution"),
        ({"execution": "eager", "mode": "training", "dtype": "fp8"}, "by itself trains in 16 bits or wider, not fp8"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        nj.graph_from_config(QWEN, 1, 128, **{"mode": "prefill", "dtype": "bf16", **options})
    with pytest.raises(nj.InputError, match="engines run decoders"):
        nj.graph_from_config("bert-large", 1, 128, execution="engine")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "predict",
        "qwen2-1.5b",
        "--gpu",
        "A100-PCIE-40GB",
        "--mode",
        "prefill",
        "--sequence-length",
        "512",
        "--json",
    )
    totals = []
    for more in ((), ("--execution", "eager", "--attention", "flash"), ("--execution", "eager")):
        assert run([*words, *more]) == 0
        totals.append(json.loads(capsys.readouterr().out)["total_s"])
    assert totals == sorted(totals)
    assert load_model_config("qwen2-1.5b")["model_type"] == "qwen2"


def test_a_host_takes_its_time_for_every_launch() -> None:
    """Kernels of eager BERT in fp32 take no less than a launch of the host inside the model; alone they may."""
    predictor, gpu = nj.load_predictor("fp32"), nj.load_gpu("H100")
    graph = nj.graph_from_config("bert-tiny", batch_size=1, sequence_length=16, mode="inference", dtype="fp32")
    assert graph.kernels.launched == "host"
    inside, alone = (
        np.concatenate(list(map(np.asarray, kernel_latency(predictor, gpu, table, isolated=False).values())))
        for table in (graph.kernels, dataclasses.replace(graph.kernels, launched="graph"))
    )
    np.testing.assert_allclose(inside, np.maximum(alone, LEARNED.launch_s), rtol=1e-6)
    assert (alone < LEARNED.launch_s).any()
