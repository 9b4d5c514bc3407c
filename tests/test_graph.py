"""Graphs: what each architecture launches, its arithmetic against closed forms, repeats and phases."""

from __future__ import annotations

import time

import numpy as np
import pytest

from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.configs.config import list_models
from neusight_jax.graph.configs.tape import DROPOUT_GRADIENT_PASSES
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.table import PHASES

GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 5, "n_positions": 32, "vocab_size": 101}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "ffn_dim": 96,
    "max_position_embeddings": 32,
    "vocab_size": 101,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "vocab_size": 101,
}
SWITCH = {
    "model_type": "switch_transformers",
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_experts": 2,
    "expert_capacity": 3,
    "vocab_size": 101,
}
CONFIGS = {"gpt2": GPT, "opt": OPT, "bert": BERT, "switch": SWITCH}


def product_flop(graph: Graph, phase: str | None = None) -> float:
    """FLOP of all matrix products, from the kernel table."""
    total = 0.0
    for family in ("linear", "bmm"):
        batch = graph.kernels.families[family]
        dims = {name: np.asarray(values, np.float64) for name, values in batch.dims.items()}
        flop = 2 * dims["batch"] * dims["m"] * dims["n"] * dims["k"] * np.asarray(batch.count, np.float64)
        keep = np.ones(len(flop), bool) if phase is None else np.asarray(batch.phase) == PHASES.index(phase)
        total += float(flop[keep].sum())
    return total


def kernels_of(graph: Graph, node: str, phase: str = "forward") -> list[tuple[str, str, float, float]]:
    """(family, op, reads, writes) of one node, products with zeros."""
    (found,) = [item for item in graph.nodes if item.name == node]
    return [
        (kernel.family, kernel.op, kernel.dims.get("reads", 0.0), kernel.dims.get("writes", 0.0))
        for kernel in found.phases[PHASES.index(phase)]
        for _ in range(int(kernel.count))
    ]


def test_gpt2_flop_by_closed_form() -> None:
    b, s, h, layers, v = 3, 16, 64, 5, 101
    matmul_parameters = layers * (3 * h * h + h * h + 8 * h * h) + h * v
    attention = layers * 2 * 2 * b * s * s * h
    forward = 2 * b * s * matmul_parameters + attention
    assert product_flop(graph_from_config(GPT, b, s)) == forward
    training = graph_from_config(GPT, b, s, "training")
    assert product_flop(training, "forward") == forward
    assert product_flop(training, "backward") == 2 * b * s * matmul_parameters + 2 * attention
    assert product_flop(training, "weight_gradient") == 2 * b * s * matmul_parameters


def test_gpt3_xl_forward_flop() -> None:
    h, layers, v, s = 3072, 24, 50257, 2048
    expected = 2 * s * (12 * layers * h * h + h * v) + layers * 4 * s * s * h
    assert product_flop(graph_from_config("gpt3_xl", 1, s)) == pytest.approx(expected, rel=1e-6)


def test_opt_and_bert_flop_by_closed_form() -> None:
    b, s, h, f, layers, v = 3, 16, 64, 96, 5, 101
    layer = layers * (4 * h * h + 2 * h * f)
    attention = layers * 4 * b * s * s * h
    assert product_flop(graph_from_config(OPT, b, s)) == 2 * b * s * (layer + h * v) + attention
    heads = 2 * b * (h * h + 2 * h)
    assert product_flop(graph_from_config(BERT, b, s)) == 2 * b * s * layer + attention + heads
    training = graph_from_config(BERT, b, s, "training")
    assert product_flop(training, "forward") == 2 * b * s * (layer + h * h + h * v) + attention + heads


def test_switch_flop_by_closed_form() -> None:
    b, s, h, f, w, v, experts, rows = 2, 16, 64, 96, 32, 101, 2, 2 * 3
    attention = 4 * 2 * b * s * h * w + 2 * 2 * b * s * s * w
    dense = 2 * 2 * b * s * h * f
    sparse = 2 * b * s * h * experts + experts * 2 * 2 * rows * h * f
    expected = (4 + 4 + 4) * attention + 2 * (2 * dense + 2 * sparse) + 2 * b * s * h * v
    assert product_flop(graph_from_config(SWITCH, b, s)) == expected


def test_switch_adds_a_permuted_bias_to_its_own_scores_only() -> None:
    """The bias is looked up as (query, key, head) and permuted: heads lie innermost; across, it is made of zeros."""
    b, s, heads = 2, 16, 4
    graph = graph_from_config(SWITCH, b, s)
    batch = graph.kernels.families["strided"]
    real = np.asarray(batch.count) > 0
    assert float(np.asarray(batch.count)[real].sum()) == 4 + 4
    assert set(np.asarray(batch.dims["rows"])[real]) == {b * heads * s}
    assert set(np.asarray(batch.dims["window"])[real]) == {s * s}
    nodes = [node for node in graph.nodes if node.name.endswith("attention.bias")]
    assert [node.forward[0].family for node in nodes] == ["strided", "strided", "elementwise"]
    assert "strided" not in graph_from_config(GPT, b, s).kernels.families


@pytest.mark.parametrize("name", CONFIGS)
def test_inference_has_forward_only(name: str) -> None:
    graph = graph_from_config(CONFIGS[name], 2, 16)
    assert graph.launches() == graph.launches("forward") > 0
    assert all(not node.backward and not node.weight_gradient for node in graph.nodes)
    training = graph_from_config(CONFIGS[name], 2, 16, "training", optimizer="adamw")
    assert min(training.launches(phase) for phase in PHASES) > 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("fused", [False, True])
def test_table_holds_every_launch(name: str, mode: str, fused: bool) -> None:
    graph = graph_from_config(CONFIGS[name], 2, 16, mode, fused=fused)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    counted = sum(float(np.asarray(batch.count).sum()) for batch in graph.kernels.families.values())
    assert counted == graph.launches()
    for batch in graph.kernels.families.values():
        assert all(np.isfinite(values).all() and (np.asarray(values) >= 0).all() for values in batch.dims.values())


def test_layers_are_stored_once() -> None:
    few, many = graph_from_config(GPT, 1, 8), graph_from_config({**GPT, "n_layer": 50}, 1, 8)
    assert len(few.nodes) == len(many.nodes)
    assert {node.repeat for node in many.nodes if node.name.startswith("layer.")} == {50}


def test_linear_bias_and_its_gradients() -> None:
    graph = graph_from_config(GPT, 2, 16, "training")
    assert kernels_of(graph, "layer.mlp.up", "weight_gradient") == [
        ("linear", "linear", 0, 0),
        ("memory", "reduce", 1, 1 / 32),
        ("elementwise", "add", 2, 1),
        ("elementwise", "add", 2, 1),
    ]
    assert [item[1] for item in kernels_of(graph, "head", "weight_gradient")] == ["linear", "add"]


def test_attention_passes() -> None:
    graph = graph_from_config(BERT, 2, 16, "training")
    assert kernels_of(graph, "layer.attention.softmax", "backward") == [
        ("elementwise", "mul", 2, 1),
        ("softmax", "softmax_backward", 2, 1),
    ]
    assert kernels_of(graph, "layer.attention.dropout") == [("memory", "dropout", 1, 1.25)]
    reads, writes = DROPOUT_GRADIENT_PASSES
    assert kernels_of(graph, "layer.attention.dropout", "backward") == [
        ("memory", "dropout_backward", 0.25 + reads, writes)
    ]
    assert kernels_of(graph, "layer.attention.mask") == [("elementwise", "add", 1 + 1 / (4 * 16), 1)]
    assert kernels_of(graph, "layer.attention.mask", "backward") == []
    opt = graph_from_config(OPT, 2, 16)
    assert kernels_of(opt, "layer.attention.mask") == [("elementwise", "add", 2, 1)]
    assert kernels_of(opt, "layer.attention.max") == [("memory", "max", 1, 1)]


def test_hidden_copies_need_a_batch() -> None:
    copies = [("memory", "copy", 1, 1)]
    for config in (GPT, BERT):
        graph = graph_from_config(config, 2, 16)
        assert kernels_of(graph, "layer.attention.scores")[:-1] == copies * 2
        assert kernels_of(graph, "layer.attention.context")[:-1] == copies
        assert len(kernels_of(graph_from_config(config, 1, 16), "layer.attention.scores")) == 1
    assert len(kernels_of(graph_from_config(OPT, 2, 16), "layer.attention.scores")) == 1


def test_dropout_rate_zero_launches_nothing() -> None:
    names = {node.op for node in graph_from_config(OPT, 2, 16, "training").nodes if "attention.dropout" in node.name}
    assert not names
    with_rate = graph_from_config({**OPT, "attention_dropout": 0.1}, 2, 16, "training")
    assert any(node.name == "layer.attention.dropout" for node in with_rate.nodes)


def test_narrow_types_widen_masks_and_indices() -> None:
    half = graph_from_config(GPT, 2, 16, "training", "bf16", fused=False)
    assert kernels_of(half, "layer.attention.output_dropout") == [("memory", "dropout", 1, 1.5)]
    assert kernels_of(half, "token_embedding") == [("memory", "embedding", 1 + 4 / 64, 1)]


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
def test_attention_in_16_bits_is_one_kernel(name: str) -> None:
    """As torch runs it by default; in fp32 it is measured operator by operator."""
    graph = graph_from_config(CONFIGS[name], 2, 16, "training", "bf16", fused=False)
    assert not [node for node in graph.nodes if node.op in ("softmax", "matmul")]
    (node,) = [node for node in graph.nodes if node.op == "attention"]
    forward, backward = (node.phases[PHASES.index(phase)][0] for phase in ("forward", "backward"))
    assert (forward.family, forward.dims, forward.count, backward.count) == ("prefill", backward.dims, 1.0, 2.5)
    seen = {"bert": 16}.get(name, 17 / 2)
    assert (forward.dims["queries"], forward.dims["pairs"]) == (2 * 16, 2 * 16 * seen)
    whole = graph_from_config(CONFIGS[name], 2, 16, "training", dtype="fp32")
    assert [node for node in whole.nodes if node.op == "softmax"]


def test_opt_350m_projects_and_norms_after() -> None:
    graph = graph_from_config("opt-350m", 1, 128)
    names = [node.name for node in graph.nodes]
    assert {"project_in", "project_out"} <= set(names)
    assert "norm" not in names
    assert names.index("layer.attention.norm") > names.index("layer.attention.residual")


def test_roberta_has_its_own_heads() -> None:
    assert [node.name for node in graph_from_config("roberta-base", 1, 512).nodes][-1] == "classifier.output"
    assert [node.name for node in graph_from_config("roberta-base", 1, 512, "training").nodes][-1] == "head.decoder"


def test_dense_switch_has_no_experts() -> None:
    dense = {**SWITCH, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
    names = [node.name for node in graph_from_config(dense, 2, 16, "training").nodes]
    assert not [name for name in names if "expert" in name or "router" in name]


@pytest.mark.parametrize("name", list_models())
def test_every_catalog_model_builds(name: str) -> None:
    for mode in ("inference", "training"):
        assert graph_from_config(name, 1, 128, mode).launches() > 0


def test_building_is_fast() -> None:
    graph_from_config("gpt3-xl", 1, 2048)
    start = time.perf_counter()
    graph_from_config("gpt3-xl", 1, 2048, "training")
    assert time.perf_counter() - start < 0.05
