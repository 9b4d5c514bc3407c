"""Quantized models for tests: sections of configs, and the bytes of their weights by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import WEIGHT_SHARE

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


def graph(config: dict[str, Any], section: dict[str, Any] | None = None, dtype: str = "bf16", **options: Any) -> Graph:
    values = config if section is None else {**config, "quantization_config": section}
    return nj.graph_from_config(values, 2, options.pop("length", 64), options.pop("mode", "decode"), dtype, **options)


def told(work: Graph) -> list[str]:
    """What a graph says of its weights."""
    return [note for note in work.notes if note.startswith("weights")]


def products(work: Graph, node: str) -> list[tuple[str, float, float]]:
    """Dtype, count in the model and weight share (9 digits) of the forward products of a node."""
    found = [each for each in work.nodes if each.name.endswith(node)]
    assert found, [each.name for each in work.nodes]
    return [
        (kernel.dtype, round(kernel.count * each.repeat, 6), round(kernel.dims.get(WEIGHT_SHARE, 1.0), 9))
        for each in found
        for kernel in each.forward
        if FAMILIES[kernel.family].matrix
    ]
