"""Fused graphs: which chains merge, and what the merged kernels move."""

from __future__ import annotations

import pytest
from test_graph import BERT, CONFIGS, GPT, OPT, SWITCH, kernels_of, product_flop

from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.graph import Graph


def traffic(graph: Graph) -> float:
    """Elements moved by everything but matrix products."""
    return sum(
        kernel.count
        * node.repeat
        * kernel.dims["rows"]
        * kernel.dims["cols"]
        * (kernel.dims["reads"] + kernel.dims["writes"])
        for node in graph.nodes
        for kernels in node.phases
        for kernel in kernels
        if "rows" in kernel.dims
    )


def fused(config: object, mode: str = "inference") -> Graph:
    return graph_from_config(config, 2, 16, mode, fused=True)  # type: ignore[arg-type]


def test_unrolled_gelu_is_one_kernel() -> None:
    graph = fused(GPT)
    assert kernels_of(graph, "layer.mlp.activation.product") == [("elementwise", "add", 1, 1)]
    assert not [node.name for node in graph.nodes if node.name == "layer.mlp.activation.cube"]
    training = fused(GPT, "training")
    assert kernels_of(training, "layer.mlp.activation.product", "backward") == [("elementwise", "add", 2, 1)]


def test_scale_and_mask_join_the_softmax() -> None:
    assert kernels_of(fused(BERT), "layer.attention.softmax") == [("softmax", "softmax", 1 + 1 / 64, 1)]
    assert kernels_of(fused(OPT), "layer.attention.softmax") == [("softmax", "softmax", 2, 1)]
    assert kernels_of(fused(GPT), "layer.attention.softmax") == [("softmax", "softmax", 1 + 1 / 8, 1)]
    training = fused(BERT, "training")
    assert kernels_of(training, "layer.attention.dropout") == [("softmax", "softmax", 1 + 1 / 64, 1)]
    assert kernels_of(training, "layer.attention.dropout", "backward") == [
        ("softmax", "softmax_backward", 2 + 1 / 64, 1)
    ]


def test_residual_joins_the_norm_after_it() -> None:
    assert kernels_of(fused(BERT), "layer.attention.norm") == [("norm", "layernorm", 2, 1)]
    # GPT-2 needs the sum twice, so it is written out.
    assert kernels_of(fused(GPT), "layer.norm_2") == [("norm", "layernorm", 1, 1)]


def test_unrolled_rms_norm_is_one_kernel() -> None:
    assert kernels_of(fused(SWITCH), "encoder.attention.norm.scale") == [("norm", "layernorm", 1 + 1 / 32, 1)]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", CONFIGS)
def test_fusion_keeps_products_and_saves_traffic(name: str, mode: str) -> None:
    eager, merged = (graph_from_config(CONFIGS[name], 2, 16, mode, fused=flag) for flag in (False, True))
    assert product_flop(eager) == product_flop(merged)
    assert merged.launches() < eager.launches()
    assert traffic(merged) < traffic(eager)
    for phase in ("forward", "backward", "weight_gradient"):
        assert merged.launches(phase) <= eager.launches(phase)


def test_copies_stay_apart() -> None:
    graph = fused(BERT)
    assert kernels_of(graph, "layer.attention.merge") == [("memory", "copy", 1, 1)]
    assert len(kernels_of(graph, "layer.attention.scores")) == 3
