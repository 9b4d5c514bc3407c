"""Methods of quantization: bytes by hand for every one, what is refused, configs of others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized import (
    AWQ,
    BY_HAND,
    DENSE,
    DOWN,
    EMBEDDING,
    EXPERT,
    EXPERTS,
    HIDDEN,
    INT,
    LAYERS,
    LINEAR,
    MIXTRAL,
    NORMS,
    OUT,
    QKV,
    SECTIONS,
    Bytes,
    graph,
    grouped,
    plain,
    products,
    tensors,
    told,
)

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import load_model_config, read_config
from neusight_jax.graph.memory import footprint
from neusight_jax.graph.quantization.methods import METHODS
from neusight_jax.graph.quantization.quantization import read_quantization
from neusight_jax.graph.quantization.scheme import INT4, MXFP4, NVFP4
from neusight_jax.units import GIB


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
    folded = {name.removeprefix("intel/").removesuffix("_marlin") for name in methods} | {"mxfp4", "mlx", "gguf"}
    assert folded == set(METHODS)


def test_mxfp4_stores_experts_alone() -> None:
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    work = graph({**DENSE, **MIXTRAL}, section)
    layer = plain(*QKV) + plain(*OUT) + plain(EXPERTS, HIDDEN)
    experts = EXPERTS * sum(grouped(4, 32, 8)(n, k) for n, k in ((2 * EXPERT, HIDDEN), (HIDDEN, EXPERT)))
    assert footprint(work).weights == pytest.approx(LAYERS * (layer + experts) + 2 * EMBEDDING + NORMS, rel=1e-9)
    assert products(work, "mlp.experts") == [("fp8", LAYERS, 4.25 / 8)]
    assert told(work) == ["weights fp4 (mxfp4, group 32), products in fp8; embeddings, attention, router and head bf16"]
    assert products(work.on(nj.load_gpu("B200").paths), "mlp.experts") == [("fp8", LAYERS, 4.25 / 8)]
    hopper = work.on(nj.load_gpu("H100").paths)  # it has fp8, but not scales of the format
    assert products(hopper, "mlp.experts") == [("bf16", LAYERS, 4.25 / 16)]
    assert any("no fp4 arithmetic on this GPU" in note for note in hopper.notes)


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
