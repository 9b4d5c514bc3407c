"""Quantized models: bytes by hand for every method, weight-only products, what configs say of single modules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictors import random_predictor

import neusight_jax as nj
from neusight_jax.baselines import load_baseline
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.catalog import load_model_config
from neusight_jax.graph.configs.config import read_config
from neusight_jax.graph.kernel import matrix_product
from neusight_jax.graph.quantization.methods import METHODS
from neusight_jax.graph.quantization.quantization import read_quantization
from neusight_jax.graph.quantization.scheme import INT4, MXFP4, NVFP4
from neusight_jax.kernels.family import WEIGHT_SHARE
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.latency import in_row_order, kernel_terms, on_device
from neusight_jax.memory import footprint
from neusight_jax.units import GIB

HIDDEN, INNER, LAYERS, VOCABULARY, HEAD, HEADS, KV_HEADS = 512, 1280, 3, 1000, 64, 8, 2
DENSE = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EXPERTS, EXPERT = 8, 256
SPARSE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT,
    "head_dim": HEAD,
}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": EXPERT}
QKV, OUT = ((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), (HIDDEN, HEADS * HEAD)
GATE_UP, DOWN = (2 * INNER, HIDDEN), (HIDDEN, INNER)
LINEAR = (QKV, OUT, GATE_UP, DOWN)
EMBEDDING = VOCABULARY * HIDDEN * 2
NORMS = (2 * LAYERS + 1) * HIDDEN * 2
"""Shapes of a layer's weights, outputs first, and bytes of what stays bf16."""

Bytes = Callable[[int, int], float]


def plain(n: int, k: int) -> float:
    return 2.0 * n * k


def grouped(bits: float, group: int, extra_bits: float) -> Bytes:
    """Elements of some bits, and so many bits for each group along k."""
    return lambda n, k: n * k * bits / 8 + n * math.ceil(k / group) * extra_bits / 8


def per_row(bits: float, scale_bits: float) -> Bytes:
    return lambda n, k: n * k * bits / 8 + n * scale_bits / 8


def per_tensor(n: int, k: int) -> float:
    return n * k + 4.0


def blocks(n: int, k: int) -> float:
    return n * k + math.ceil(n / 128) * math.ceil(k / 128) * 4.0


def tensors(weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A section of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


EXPLAINED = jax.jit(lambda predictor, gpu, table: kernel_terms(predictor, gpu, table, isolated=False))
INT, FLOAT = {"type": "int"}, {"type": "float"}
BY_HAND: list[tuple[str, dict[str, Any], Bytes, str]] = [
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128}, grouped(4, 128, 20), "bf16"),
    ("awq 64", {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64}, grouped(4, 64, 20), "bf16"),
    ("awq symmetric", {"quant_method": "awq", "bits": 4, "zero_point": False}, grouped(4, 128, 16), "bf16"),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, grouped(4, 32, 20), "bf16"),
    ("gptq 8", {"quant_method": "gptq_marlin", "bits": 8, "group_size": 128}, grouped(8, 128, 24), "bf16"),
    ("gptq 3, whole rows", {"quant_method": "gptq", "bits": 3, "group_size": -1}, per_row(3, 19), "bf16"),
    ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}, per_tensor, "fp8"),
    ("fp8 blocks", {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, blocks, "fp8"),
    ("fbgemm", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, per_row(8, 32), "fp8"),
    (
        "nf4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        grouped(4, 64, 32),
        "bf16",
    ),
    (
        "nf4 twice",
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        grouped(4, 64, 8.125),
        "bf16",
    ),
    ("llm.int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, per_row(8, 32), "int8"),
    (
        "ct w4a16",
        tensors({**INT, "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}),
        grouped(4, 128, 16),
        "bf16",
    ),
    (
        "ct w4a16 asymmetric",
        tensors({**INT, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        grouped(4, 32, 20),
        "bf16",
    ),
    (
        "ct w8a8 int",
        tensors({**INT, "num_bits": 8, "strategy": "channel"}, {**INT, "num_bits": 8, "strategy": "token"}),
        per_row(8, 16),
        "int8",
    ),
    (
        "ct w8a8 fp",
        tensors({**FLOAT, "num_bits": 8, "strategy": "tensor"}, {**FLOAT, "num_bits": 8, "dynamic": True}),
        per_tensor,
        "fp8",
    ),
    (
        "ct blocks",
        tensors({**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}, {**FLOAT, "num_bits": 8}),
        blocks,
        "fp8",
    ),
    (
        "ct nvfp4",
        tensors({**FLOAT, "num_bits": 4, "group_size": 16}, {**FLOAT, "num_bits": 4, "group_size": 16}),
        grouped(4, 16, 8),
        "fp4",
    ),
    ("ct mxfp4", tensors({**FLOAT, "num_bits": 4, "group_size": 32, "strategy": "group"}), grouped(4, 32, 8), "bf16"),
    (
        "ct w4a8",
        tensors({**INT, "num_bits": 4, "group_size": 128}, {**FLOAT, "num_bits": 8}),
        grouped(4, 128, 16),
        "fp8",
    ),
    ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, grouped(4, 16, 8), "fp4"),
    ("nvfp4 alone", {"quant_algo": "W4A16_NVFP4"}, grouped(4, 16, 8), "bf16"),
    ("modelopt fp8", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, per_tensor, "fp8"),
    ("modelopt awq", {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, grouped(4, 128, 16), "bf16"),
    ("mxfp8", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, grouped(8, 32, 8), "fp8"),
    ("kv alone", {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, plain, "bf16"),
    ("auto-round", {"quant_method": "intel/auto-round", "bits": 2, "group_size": 128}, grouped(2, 128, 16), "bf16"),
    (
        "torchao",
        {"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 32}},
        grouped(4, 32, 32),
        "bf16",
    ),
    (
        "torchao 8",
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}},
        },
        per_row(8, 32),
        "fp8",
    ),
    (
        "hqq",
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}},
        grouped(4, 64, 32),
        "bf16",
    ),
    ("quanto", {"quant_method": "quanto", "weights": "int4"}, grouped(4, 128, 32), "bf16"),
    ("quanto w8a8", {"quant_method": "quanto", "weights": "int8", "activations": "int8"}, per_row(8, 16), "int8"),
    ("eetq", {"quant_method": "eetq", "weights": "int8"}, per_row(8, 16), "bf16"),
]
"""A method, its section, bytes of a weight of n × k, and the dtype of products on a GPU that has every path."""
SECTIONS = {row[0]: row[1] for row in BY_HAND}
AWQ = SECTIONS["awq"]


def graph(
    config: dict[str, Any], section: dict[str, Any] | None = None, dtype: str = "bf16", **options: Any
) -> nj.Graph:
    values = config if section is None else {**config, "quantization_config": section}
    return nj.graph_from_config(values, 2, options.pop("length", 64), options.pop("mode", "decode"), dtype, **options)


def told(work: nj.Graph) -> list[str]:
    """What a graph says of its weights."""
    return [note for note in work.notes if note.startswith("weights")]


def products(work: nj.Graph, node: str) -> list[tuple[str, float, float]]:
    """Dtype, count in the model and weight share (9 digits) of the forward products of a node."""
    found = [each for each in work.nodes if each.name.endswith(node)]
    assert found, [each.name for each in work.nodes]
    return [
        (kernel.dtype, round(kernel.count * each.repeat, 6), round(kernel.dims.get(WEIGHT_SHARE, 1.0), 9))
        for each in found
        for kernel in each.forward
    ]


@pytest.mark.parametrize(("section", "stored", "dtype"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND])
def test_bytes_of_every_method_by_hand(section: dict[str, Any], stored: Bytes, dtype: str) -> None:
    work = graph(DENSE, section)
    layer = sum(stored(n, k) for n, k in LINEAR)
    assert footprint(work).weights == pytest.approx(LAYERS * layer + 2 * EMBEDDING + NORMS, rel=1e-9)
    [(own, count, share)] = products(work, "mlp.down")
    assert (own, count) == (dtype, LAYERS)
    if own == "bf16":  # weight-only: the kernel reads what is stored
        assert share == pytest.approx(stored(*DOWN) / (2.0 * math.prod(DOWN)), abs=1e-9)
    assert products(work, "head") == [("bf16", 1, 1.0)]
    assert len(told(work)) == (own != "bf16" or share < 1.0)


def test_every_method_has_bytes_by_hand() -> None:
    methods = {str(row[1].get("quant_method", "modelopt")).lower() for row in BY_HAND}
    folded = {name.removeprefix("intel/").removesuffix("_marlin") for name in methods} | {"mxfp4"}
    assert folded == set(METHODS)


def test_mxfp4_stores_experts_alone() -> None:
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    work = graph({**DENSE, **MIXTRAL}, section)
    layer = plain(*QKV) + plain(*OUT) + plain(EXPERTS, HIDDEN)
    experts = EXPERTS * sum(grouped(4, 32, 8)(n, k) for n, k in ((2 * EXPERT, HIDDEN), (HIDDEN, EXPERT)))
    assert footprint(work).weights == pytest.approx(LAYERS * (layer + experts) + 2 * EMBEDDING + NORMS, rel=1e-9)
    assert products(work, "mlp.experts") == [("bf16", LAYERS, 4.25 / 16)]
    assert told(work) == [
        "weights fp4 (mxfp4, group 32), products in bf16; embeddings, attention, router and head bf16"
    ]


def test_llama_in_awq() -> None:
    """Llama-3.1-8B: 32 layers of 218M weights in 4.15625 bits, 2 × 128,256 × 4,096 in bf16: 5.3 GiB by hand."""
    llama = {**load_model_config("llama-3.1-8b"), "quantization_config": AWQ}
    work = nj.graph_from_config(llama, 1, 8192, "decode", "bf16")
    elements = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336)
    assert footprint(work).weights == pytest.approx(elements * 4.15625 / 8 + 2 * 128256 * 4096 * 2, rel=1e-3)
    assert footprint(work).weights / GIB == pytest.approx(5.33, abs=0.01)
    assert told(work) == ["weights int4 (awq, group 128), products in bf16; embeddings and head bf16"]
    assert work.options["weight_dtype"] == "int4"
    assert work.options["quantization"] == "awq"


def test_gpt_oss_in_mxfp4() -> None:
    """gpt-oss-120b as published: 60.8 GiB, made to fit one GPU of 80 GB (OpenAI, model card, 2025)."""
    section = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    work = nj.graph_from_config(
        {**load_model_config("gpt-oss-120b"), "quantization_config": section}, 1, 1024, "decode", "bf16"
    )
    assert footprint(work).weights / GIB == pytest.approx(60.8, abs=0.4)
    assert footprint(work).total < 80e9


def test_deepseek_in_fp8_blocks() -> None:
    """DeepSeek-V3 without its extra layer: 671B, all but embeddings, head, norms and routers in one byte and 1/4096."""
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = {**load_model_config("deepseek-v3"), "quantization_config": section}
    work = nj.graph_from_config(config, 1, 1024, "prefill", "bf16")
    wide = 2 * 129280 * 7168 + 58 * 256 * 7168
    assert footprint(work).weights == pytest.approx((671.03e9 - wide) * (1 + 4 / 128**2) + 2 * wide, rel=1e-3)
    assert {dtype for dtype, _, _ in products(work, "mlp.experts")} == {"fp8"}
    assert {dtype for dtype, _, _ in products(work, "mlp.router")} == {"bf16"}


# What is left alone


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
    with pytest.raises(InputError, match=r"hf_quant_config\.json: cannot be read"):
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


# Options beside a config


def test_weight_dtype_replaces_the_config() -> None:
    wide = graph(DENSE, AWQ, weight_dtype="bf16")
    assert footprint(wide).weights == footprint(graph(DENSE)).weights
    [said] = told(wide)
    assert said.startswith("weights bf16 (as asked for, in place of the config's quantization), products in bf16; ")
    eight = graph(DENSE, AWQ, weight_dtype="fp8")
    assert products(eight, "mlp.down") == [("bf16", LAYERS, 0.5)]
    assert told(graph(DENSE)) == []


@pytest.mark.parametrize(
    ("section", "dtype", "expected"),
    [
        (AWQ, "fp8", ("fp8", 4.15625 / 8)),  # four-bit weights, eight-bit activations
        (AWQ, "fp16", ("fp16", 4.15625 / 16)),
        (SECTIONS["fp8 blocks"], "fp8", ("fp8", 1.0)),
        (SECTIONS["fp8 blocks"], "fp4", ("fp8", 1.0)),  # weights are wider than fp4: as the config has it
        (SECTIONS["fp8 blocks"], "fp32", ("fp8", 1.0)),
    ],
)
def test_dtype_beside_a_config(section: dict[str, Any], dtype: str, expected: tuple[str, float]) -> None:
    [(own, _, share)] = products(graph(DENSE, section, dtype), "mlp.down")
    assert (own, share) == expected


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "own", "share"),
    [
        ("bf16", "int4", "bf16", 4.15625 / 16),
        ("bf16", "fp4", "bf16", 4.5 / 16),
        ("bf16", "int8", "bf16", 0.5),
        ("fp16", "fp8", "fp16", 0.5),
        ("fp8", "int4", "fp8", 4.15625 / 8),
        ("fp8", None, "fp8", 1.0),
        ("fp4", None, "fp4", 1.0),
        ("fp8", "bf16", "bf16", 1.0),
        ("bf16", "fp32", "fp32", 1.0),
        ("fp32", "int4", "fp32", 4.15625 / 32),
    ],
)
def test_weight_dtype_is_storage_and_dtype_arithmetic(
    dtype: str, weight_dtype: str | None, own: str, share: float
) -> None:
    work = graph(DENSE, None, dtype, weight_dtype=weight_dtype)
    assert products(work, "mlp.down") == [(own, LAYERS, round(share, 9))]
    assert work.dtype == own
    weight_only = share < 1.0
    assert bool(told(work)) == weight_only
    if weight_only:
        assert work.options["weight_dtype"] == weight_dtype


# GPUs


def forecast(work: nj.Graph, gpu: str = "A100-SXM4-80GB") -> nj.Forecast:
    return nj.predict(load_baseline("roofline"), nj.load_gpu(gpu), work)


def test_weight_only_products_read_fewer_bytes_and_do_the_same_arithmetic() -> None:
    plain_, narrow = forecast(graph(DENSE)), forecast(graph(DENSE, None, weight_dtype="int4"))
    assert narrow.to_dict()["flop"] == plain_.to_dict()["flop"]
    saved = LAYERS * sum(n * k * 2 - grouped(4, 128, 20)(n, k) for n, k in LINEAR)
    assert plain_.to_dict()["bytes"] - narrow.to_dict()["bytes"] == pytest.approx(saved, rel=1e-5)
    assert narrow.total_s < plain_.total_s
    assert not any("never measured" in note for note in plain_.notes)
    assert any("weight-only products" in note and "never measured" in note for note in narrow.notes)


@pytest.mark.parametrize("section", [SECTIONS["fp8 blocks"], SECTIONS["ct w8a8 int"]], ids=["fp8", "int8"])
def test_a_gpu_without_the_path_widens_the_weights(section: dict[str, Any]) -> None:
    work = graph(DENSE, section)
    there = forecast(work, "H100")
    assert not any("arithmetic on this GPU" in note for note in there.notes)
    lacking = nj.load_gpu("A100-SXM4-80GB").replace(int8_flop_per_s=0.0)
    other = nj.predict(load_baseline("roofline"), lacking, work)
    assert any("weight-only" in note and "arithmetic on this GPU" in note for note in other.notes)
    assert "gemm_fp8" not in set(other.columns["family"])
    assert work.on(nj.load_gpu("H100").paths) is work
    assert products(work.on(lacking.paths), "mlp.down")[0][2] == pytest.approx(0.5, rel=2e-2)


def test_arithmetic_asked_for_is_not_replaced() -> None:
    for section in (None, AWQ, SECTIONS["fp8 blocks"]):
        with pytest.raises(InputError, match="no arithmetic path 'fp8'"):
            forecast(graph(DENSE, section, "fp8"))


SHARES = (1.0, 0.5, 0.28125, 0.259765625, 0.1)
SHAPES = 60


def products_of_every_share(seed: int) -> KernelTable:
    """Products and experts of random shapes, each with all of `SHARES`."""
    random = np.random.default_rng(seed)
    kernels: list[Kernel] = []
    for _ in range(SHAPES):
        m, n, k = (round(float(np.exp(random.uniform(0, 10)))) for _ in range(3))
        experts = expert_dims(m, experts=32, local_experts=16, top_k=4, hidden=n, inner=k)
        sizes = {name: float(value) for name, value in experts.items()}
        for share in SHARES:
            kernels.append(Kernel("grouped_gemm", "experts", {**sizes, WEIGHT_SHARE: share}, 1.0, "bf16"))
            kernels.append(matrix_product(1, m, n, k, "bf16", weight_share=share))
    table = table_from_kernels(kernels)
    return KernelTable({name: batch for name, batch in table.families.items() if batch.num_rows})


@pytest.mark.parametrize("seed", range(3))
def test_fewer_bits_are_never_slower_nor_below_light(seed: int) -> None:
    table = products_of_every_share(seed)
    terms = EXPLAINED(random_predictor("mixture", seed), on_device(nj.load_gpu("H100")), table)
    seconds = in_row_order(table, {name: np.asarray(term.seconds) for name, term in terms.items()})
    light = in_row_order(table, {name: np.asarray(term.light.speed_of_light_s) for name, term in terms.items()})
    assert (seconds >= light * (1 - 1e-4)).all()
    for times in (seconds, light):
        by_share = times.reshape(SHAPES, len(SHARES), 2)
        assert (by_share[:, 1:] <= by_share[:, :-1] * (1 + 1e-4)).all()
        assert (by_share[:, -1] < 0.9 * by_share[:, 0]).any()


# Refusals


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"quant_method": "aqlm"}, r"quant_method 'aqlm' is not read \(codebooks\)"),
        ({"quant_method": "quark"}, "quant_method 'quark' is not read"),
        ({"quant_method": "tomorrow"}, "quant_method 'tomorrow' is not read; expected one of awq"),
        ({"bits": 4, "group_size": 64}, "has no quant_method"),
        ("awq", "is 'awq', expected an object"),
        ({"quant_method": "gptq"}, "has no bits"),
        ({"quant_method": "awq", "bits": "four"}, "bits is 'four'"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": [1]}, "expected a list of module names"),
        ({"quant_method": "awq", "bits": 4, "ignore": ["re:("]}, "is no regular expression"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128."),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (tensors({**INT, "num_bits": 4}, sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP3"}, "quant_algo is 'NVFP3', expected one of FP8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP6"}, "KV cache in FP6"),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, "torchao quant_type 'autoquant' is not read"),
    ],
)
def test_refusals(section: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        graph(DENSE, section)
    assert "\n" not in str(caught.value)


def test_refused_workloads() -> None:
    with pytest.raises(InputError, match="weights in awq are not trained; expected weight_dtype"):
        graph(DENSE, AWQ, mode="training")
    with pytest.raises(InputError, match="int4 weights are not trained"):
        graph(DENSE, None, mode="training", weight_dtype="int4")
    assert graph(DENSE, AWQ, mode="training", weight_dtype="bf16").nodes
    assert graph(DENSE, {**SECTIONS["fp8"], "dequantize": True}).options["quantization"] is None
    with pytest.raises(InputError, match="unknown weight dtype 'int3'"):
        graph(DENSE, None, weight_dtype="int3")
    with pytest.raises(InputError, match="unknown dtype 'int4'"):
        graph(DENSE, None, "int4")
    bert = {**load_model_config("bert-base"), "quantization_config": AWQ}
    with pytest.raises(InputError, match="quantization_config is read for decoders only"):
        nj.graph_from_config(bert, 1, 128)


JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False), st.text(max_size=8)),
    *(
        st.lists(st.one_of(st.text(max_size=6), st.integers()), max_size=3),
        st.dictionaries(st.text(max_size=4), st.none()),
    ),
)
KEYS = sorted({key for _, section, _, _ in BY_HAND for key in section} | {"ignore", "dynamic", "quantized_layers"})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BY_HAND), st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3))
def test_whatever_a_section_holds_it_is_read_or_refused(row: Any, changes: dict[str, Any]) -> None:
    try:
        work = graph(DENSE, {**row[1], **changes})
    except InputError:
        return
    weights = footprint(work).weights
    assert math.isfinite(weights)
    assert weights > 2 * EMBEDDING


# Configs of others


def test_every_bundled_config_is_read() -> None:
    core = pytest.importorskip("aiconfigurator_core")
    folder = Path(core.__file__).parent / "model_configs"
    files = [path for path in sorted(folder.glob("*_config.json")) if "hf_quant" not in path.name]
    read = {path.name: read_quantization(path.name, read_config(path).values) for path in files}
    quantized = {name: each for name, each in read.items() if each is not None}
    assert len(quantized) >= 50
    for name, each in quantized.items():
        nodes = ("attention.output", "mlp.gate_up", "mlp.experts", "head")
        narrow = {scheme for node in nodes for scheme in each.shares(node)} - {None}
        assert narrow, name
        assert ("NVFP4" in name) == any(
            scheme is not None and scheme.bits == 4 and scheme.group[1] == 16 for scheme in narrow
        )
    beside = {path.name for path in folder.glob("*hf_quant_config.json")}
    assert beside <= {name.replace("_config.json", "_hf_quant_config.json") for name in quantized}


def test_constants_of_the_formats() -> None:
    for scheme, bits in ((NVFP4, 4.5), (MXFP4, 4.25), (INT4, 4.15625)):
        assert scheme.weight_bytes(256, 1024) * 8 == 256 * 1024 * bits
    assert replace(INT4, group=(1, 0)).weight_bytes(2, 100) == 2 * (100 * 4 + 20) / 8


def test_rows_of_a_forecast_know_their_layers() -> None:
    """A node whose layers differ is two rows, and their counts are those of the layers."""
    work = graph(DENSE, {**AWQ, "modules_to_not_convert": ["model.layers.0", "model.layers.2"]})
    rows = forecast(work).to_frame()
    counts: Sequence[float] = rows[rows["node"] == "layer.mlp.down"]["count"].tolist()
    assert sorted(np.round(counts, 5)) == [1.0, 2.0]
