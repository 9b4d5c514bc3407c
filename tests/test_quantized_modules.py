"""What quantized configs say of single modules: what is left alone, mixed precision, the KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized import (
    AWQ,
    DENSE,
    DOWN,
    EMBEDDING,
    FLOAT,
    GATE_UP,
    HEAD,
    INT,
    KV_HEADS,
    LAYERS,
    NORMS,
    OUT,
    QKV,
    SPARSE,
    graph,
    grouped,
    plain,
    products,
    told,
)

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import load_model_config
from neusight_jax.graph.memory import footprint
from neusight_jax.graph.quantization.quantization import read_quantization


def shares(section: dict[str, Any], node: str, config: dict[str, Any] = DENSE) -> dict[str, float]:
    """Share of a node's layers and modules by the name of its element."""
    quantized = read_quantization("config", {**config, "quantization_config": section})
    assert quantized is not None
    return {"" if scheme is None else scheme.name: share for scheme, share in quantized.shares(node).items()}


@pytest.mark.parametrize(
    ("listed", "node", "expected"),
    [
        (["self_attn"], "attention.qkv", {"": 1.0}),
        (["self_attn"], "mlp.down", {"int4": 1.0}),
        (["gate"], "mlp.gate_up", {"int4": 1.0}),  # a router, not gate_proj
        (["mlp"], "mlp.gate_up", {"": 1.0}),
        (["model.layers.1"], "mlp.down", {"": 1 / 3, "int4": 2 / 3}),
        (["model.layers.1."], "attention.output", {"": 1 / 3, "int4": 2 / 3}),
        (["model.language_model.layers.0*"], "mlp.down", {"": 1 / 3, "int4": 2 / 3}),
        (["model.layers.*.self_attn.o_proj"], "attention.output", {"": 1.0}),
        (["*.down_proj"], "mlp.down", {"": 1.0}),
        ([r"re:.*mlp\.(gate|up)_proj.*"], "mlp.gate_up", {"": 1.0}),
        ([r"re:.*mlp\.(gate|up)_proj.*"], "mlp.down", {"int4": 1.0}),
        ([r"re:language_model\.model\.layers\.[01]\..*"], "mlp.down", {"": 2 / 3, "int4": 1 / 3}),
        (["model.layers.2.self_attn.qkv_proj"], "attention.qkv", {"": 1 / 3, "int4": 2 / 3}),
        (
            ["visual", "vision_tower.layers.0.self_attn.q_proj", "model.layers.61*", "mtp*"],
            "attention.qkv",
            {"int4": 1.0},
        ),
        (["lm_head"], "head", {"": 1.0}),
        (None, "head", {"": 1.0}),
    ],
)
def test_modules_left_alone(listed: list[str] | None, node: str, expected: dict[str, float]) -> None:
    assert shares({**AWQ, "modules_to_not_convert": listed}, node) == pytest.approx(expected)


def test_some_layers_run_as_they_are() -> None:
    work = graph(DENSE, {**AWQ, "modules_to_not_convert": ["model.layers.1.mlp"]})
    assert products(work, "mlp.down") == [("bf16", 2, 4.15625 / 16), ("bf16", 1, 1.0)]
    narrow = grouped(4, 128, 20)
    attention, mlp = narrow(*QKV) + narrow(*OUT), (GATE_UP, DOWN)
    layers = 3 * attention + 2 * sum(narrow(*each) for each in mlp) + sum(plain(*each) for each in mlp)
    assert footprint(work).weights == pytest.approx(layers + 2 * EMBEDDING + NORMS, rel=1e-9)
    assert "part of feed-forward bf16" in told(work)[0]


def test_dense_layers_of_a_model_with_experts_are_looked_up_by_index() -> None:
    """Exclusion of the first, dense layer leaves nothing of it quantized and all of the experts."""
    small = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "max_position_embeddings": 4096}
    config = {**load_model_config("deepseek-v3"), **small}
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.0*", "lm_head"]}
    work = nj.graph_from_config({**config, "quantization_config": section}, 1, 128, "decode", "bf16")
    assert products(work, "layer.mlp.down") == [("bf16", 1, 1.0)]
    assert products(work, "layer_experts.mlp.experts") == [("fp4", 3, 1.0)]


def test_overrides_by_module() -> None:
    dynamic = {"+:.*\\.down_proj": {"bits": 8}, "-:.*\\.0\\.self_attn.*": {}}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic, "lm_head": True}
    assert shares(section, "mlp.down") == {"int8": 1.0}
    assert shares(section, "attention.qkv") == pytest.approx({"": 1 / 3, "int4": 2 / 3})
    assert shares(section, "head") == {"int4": 1.0}
    inside = {**section, "dynamic": None, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"]]}
    assert shares(inside, "attention.qkv") == pytest.approx({"int4": 2 / 3, "": 1 / 3})
    assert shares(inside, "mlp.down") == {"": 1.0}
    extra = {"quant_method": "auto-round", "bits": 4, "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 16}}}
    assert shares(extra, "mlp.down") == pytest.approx({"": 1 / 3, "int4": 2 / 3})


@pytest.mark.parametrize(
    ("model_type", "listed", "quantized", "left"),
    [
        ("mixtral", ["block_sparse_moe.gate"], ["mlp.experts", "attention.qkv"], ["mlp.router"]),
        ("mixtral", ["model.layers.*.block_sparse_moe.experts"], ["attention.qkv"], ["mlp.experts"]),
        ("gemma4_text", ["model.language_model.layers.*.mlp*"], ["mlp.experts"], ["mlp.gate_up", "mlp.down"]),
        ("llama4_text", ["re:.*feed_forward.shared_expert.*"], ["mlp.experts", "mlp.gate_up"], ["mlp.shared.down"]),
        ("deepseek_v3", ["shared_experts", "q_a_proj", "kv_a_proj_with_mqa"], ["mlp.experts"], ["attention.qkv_down"]),
        (
            "deepseek_v4",
            ["*.attn.*", "*.ffn.shared_experts.*"],
            ["mlp.experts"],
            ["attention.output", "mlp.shared.down"],
        ),
        ("nemotron_h", ["backbone.layers.*.mixer.in_proj"], ["mamba.out", "mlp.experts"], ["mamba.in"]),
        ("qwen3_next", ["linear_attn.in_proj_ba"], ["linear_attention.qkvz"], ["linear_attention.gates"]),
        ("qwen3_5_moe", ["*linear_attn*"], ["attention.qkv"], ["linear_attention.qkvz", "linear_attention.output"]),
    ],
)
def test_modules_by_the_names_of_their_model(
    model_type: str, listed: list[str], quantized: list[str], left: list[str]
) -> None:
    config = {**DENSE, "model_type": model_type}
    section = {**AWQ, "modules_to_not_convert": listed}
    assert [shares(section, node, config) for node in quantized] == [{"int4": 1.0}] * len(quantized)
    assert [shares(section, node, config) for node in left] == [{"": 1.0}] * len(left)


def test_a_node_that_is_not_in_the_table_is_said() -> None:
    read = read_quantization("config", {**DENSE, "quantization_config": {**AWQ, "ignore": ["self_attn"]}})
    assert read is not None
    assert read.blind("novel.thing")
    assert not read.blind("attention.qkv")


def test_mixed_precision_names_what_is_quantized() -> None:
    layers: dict[str, dict[str, Any]]
    layers = {f"model.layers.{at}.self_attn.{name}_proj": {"quant_algo": "FP8"} for at in range(3) for name in "qkv"}
    layers |= {f"model.layers.{at}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for at in range(3)}
    layers["lm_head"] = {"quant_algo": "W4A16_NVFP4"}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    work = graph(SPARSE, section)
    taken = {node: products(work, node)[0][0] for node in ("attention.qkv", "attention.output", "mlp.experts", "head")}
    assert taken == {"attention.qkv": "fp8", "attention.output": "bf16", "mlp.experts": "fp4", "head": "bf16"}
    assert products(work, "head")[0][2] == pytest.approx(4.5 / 16)
    assert "fp4 (modelopt, group 16), products in fp4" in told(work)[0]


def test_two_groups_of_targets() -> None:
    eight = {
        "targets": ["re:.*self_attn.*"],
        "weights": {**FLOAT, "num_bits": 8},
        "input_activations": {**FLOAT, "num_bits": 8},
    }
    four = {"targets": ["Linear"], "weights": {**INT, "num_bits": 4, "group_size": 32}}
    section = {"config_groups": {"a": eight, "b": four}, "ignore": []}
    assert shares(section, "attention.output") == {"fp8": 1.0}
    assert shares(section, "mlp.gate_up") == {"int4": 1.0}
    assert shares(section, "head") == {"int4": 1.0}  # a linear layer that nothing leaves alone


def test_the_file_beside_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    said = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    work = nj.graph_from_config(tmp_path / "config.json", 2, 64, "decode", "bf16")
    assert products(work, "mlp.down") == [("fp4", LAYERS, 1.0)]
    assert products(work, "attention.qkv") == [("bf16", LAYERS, 1.0)]
    assert footprint(work).kv_cache == 2 * 64 * LAYERS * 2 * KV_HEADS * HEAD
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: not JSON"):
        nj.graph_from_config(tmp_path / "config.json", 2, 64, "decode", "bf16")


@pytest.mark.parametrize(
    ("said", "bytes_each"),
    [
        ({"kv_cache_quant_algo": "FP8"}, 1.0),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1.0),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, 1.0),
        ({"kv_cache_quant_algo": "NVFP4"}, 0.5),
        ({"kv_cache_quant_algo": None}, 2.0),
        ({}, 2.0),
    ],
)
def test_kv_cache_of_a_config(said: dict[str, Any], bytes_each: float) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "FP8", **said}
    elements = 2 * 64 * LAYERS * 2 * KV_HEADS * HEAD
    assert footprint(graph(DENSE, section)).kv_cache == elements * bytes_each
    assert footprint(graph(DENSE, section, kv_dtype="bf16")).kv_cache == elements * 2.0
