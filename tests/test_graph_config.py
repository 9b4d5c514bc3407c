"""Configs and the model catalog: what is accepted, and what a bad one is told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_graph import BERT, GPT, OPT, SWITCH

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.configs.config import list_models, load_model_config
from neusight_jax.graph.memory import footprint


def message(*args: object, **kwargs: object) -> str:
    with pytest.raises(InputError) as caught:
        graph_from_config(*args, **kwargs)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (GPT, "n_embd"),
        (GPT, "n_layer"),
        (GPT, "vocab_size"),
        (OPT, "ffn_dim"),
        (BERT, "intermediate_size"),
        (SWITCH, "d_model"),
        (SWITCH, "vocab_size"),
    ],
)
def test_missing_key_is_named(config: dict[str, object], key: str) -> None:
    broken = {name: value for name, value in config.items() if name != key}
    assert f"config has no '{key}'" in message(broken, 1, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_embd": 0}, "n_embd is 0, expected a positive whole number"),
        ({"n_embd": "64"}, "n_embd is '64', expected a positive whole number"),
        ({"n_layer": 2.5}, "n_layer is 2.5, expected"),
        ({"n_head": 5}, "n_embd 64 is not divisible by n_head 5"),
        ({"attn_pdrop": 1.5}, "attn_pdrop is 1.5, expected a rate"),
        ({"activation_function": "swish"}, "activation_function 'swish' is not supported; expected one of gelu"),
        ({"scale_attn_weights": 1}, "scale_attn_weights is 1, expected true or false"),
        ({"model_type": "gpt9"}, "model_type 'gpt9' is not supported; nearest: gpt2"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported: it has selective scan (Mamba-1)"),
        ({"model_type": ["gpt2"]}, "model_type ['gpt2'] is not supported; nearest: gpt2"),
        ({"n_layer": 10**30}, "n_layer is a whole number of over 18 digits, expected at most 1,000,000,000"),
        ({"model_type": None}, "config has no 'model_type' among its keys"),
    ],
)
def test_bad_value_is_named(change: dict[str, object], text: str) -> None:
    assert text in message({**GPT, **change}, 1, 8)


def test_gated_experts_are_refused() -> None:
    assert "is_gated_act true is not supported" in message({**SWITCH, "is_gated_act": True}, 1, 8)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_workload_must_be_whole(value: object) -> None:
    assert message(GPT, value, 8) == f"batch_size is {value!r}, expected a positive whole number"
    if value is not None:  # None: the longest
        assert message(GPT, 1, value) == f"sequence_length is {value!r}, expected a positive whole number"


def test_numpy_workload_is_accepted() -> None:
    graph = graph_from_config(GPT, np.int64(2), np.int32(8))  # type: ignore[arg-type]
    assert (graph.batch_size, graph.sequence_length) == (2, 8)


def test_mode_and_dtype_are_checked() -> None:
    assert message(GPT, 1, 8, "train") == "mode is 'train', expected one of inference, training"
    assert "unknown dtype 'float'" in message(GPT, 1, 8, dtype="float")


@pytest.mark.parametrize(
    ("name", "limit"), [("gpt2", 1024), ("opt-125m", 2048), ("bert-base", 512), ("roberta-base", 512)]
)
def test_sequence_limit_is_told(name: str, limit: int) -> None:
    graph_from_config(name, 1, limit)
    assert f"longer than the model's limit of {limit}" in message(name, 1, limit + 1)
    assert f"use at most {limit}" in message(name, 1, limit + 1)


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "mine.json"
    good.write_text(json.dumps(GPT))
    assert graph_from_config(good, 1, 8).name == "mine"
    assert graph_from_config(str(good), 1, 8).kernels.num_rows == graph_from_config(GPT, 1, 8).kernels.num_rows
    assert "no such file" in message(tmp_path / "absent.json", 1, 8)
    assert "no such file" in message(str(tmp_path / "absent.json"), 1, 8)
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert "bad.json: not JSON" in message(bad, 1, 8)
    bad.write_text("[" * 100_000)
    assert "bad.json: nested too deeply" in message(bad, 1, 8)
    bad.write_text("[1]")
    assert "holds a list, expected a JSON object" in message(bad, 1, 8)
    bad.write_bytes(b"\xff\xfe{")
    assert "bad.json: cannot be read as UTF-8 text" in message(bad, 1, 8)
    assert "holds no config.json" in message(tmp_path, 1, 8)
    assert "config is int, expected a model name" in message(3, 1, 8)


def test_unknown_model_offers_the_nearest() -> None:
    text = message("gpt2-lage", 1, 8)
    assert text.startswith("unknown model 'gpt2-lage'; nearest: gpt2-large")
    assert "`neusight-jax models` lists all" in text


@pytest.mark.parametrize(
    ("alias", "key", "value"),
    [
        ("gpt2_large", "n_embd", 1280),
        ("gpt2_med", "n_layer", 24),
        ("gpt3_xl", "n_embd", 3072),
        ("gpt3_27", "n_embd", 2560),
        ("gpt3_67", "n_embd", 4096),
        ("gpt3_13", "n_embd", 5120),
        ("opt_13", "hidden_size", 2048),
        ("switchxl4", "num_experts", 4),
        ("bert_large", "hidden_size", 1024),
        ("bert", "num_hidden_layers", 12),
        ("facebook/opt-1.3b", "ffn_dim", 8192),
        ("BERT-Large", "num_attention_heads", 16),
    ],
)
def test_aliases(alias: str, key: str, value: int) -> None:
    assert load_model_config(alias)[key] == value


def test_catalog_lists_and_loads() -> None:
    names = list_models()
    assert {"gpt2-large", "gpt3-xl", "gpt3-175b", "bert-large", "opt-66b", "switch-large-128"} <= set(names)
    for name in names:
        config = load_model_config(name)
        assert "aliases" not in config
    config = load_model_config("gpt2")
    config["vocab_size"] = 1  # a copy: the catalog stays as it is
    assert load_model_config("gpt2")["vocab_size"] > 1


PUBLISHED: tuple[tuple[str, float, float, str], ...] = (
    ("llama-2-7b", 6738415616, 13476831232, "fp16"),
    ("llama-2-70b", 68976648192, 137953296384, "fp16"),
    ("llama-3.1-8b", 8030261248, 16060522496, "bf16"),
    ("llama-3.1-70b", 70553706496, 141107412992, "bf16"),
    ("mistral-7b-v0.1", 7241732096, 14483464192, "bf16"),
    ("mistral-7b", 7248023552, 14496047104, "bf16"),
    ("mixtral-8x7b", 46702792704, 93405585408, "bf16"),
    ("mixtral-8x22b", 140620634112, 281241268224, "bf16"),
    ("qwen2.5-7b", 7615616512, 15231233024, "bf16"),
    ("qwen2.5-32b", 32763876352, 65527752704, "bf16"),
    ("qwen2.5-72b", 72706203648, 145412407296, "bf16"),
    ("qwen3-8b", 8190735360, 16381470720, "bf16"),
    ("qwen3-32b", 32762123264, 65524246528, "bf16"),
    ("qwen3-30b-a3b", 30532122624, 61064245248, "bf16"),
    ("qwen3-235b-a22b", 235093634560, 470187269120, "bf16"),
    ("gpt-oss-20b", 20914757184, 13761264768, "mxfp4"),
    ("gpt-oss-120b", 116829156672, 65248815744, "mxfp4"),
)
"""Names, parameters, bytes and format. Bytes: `total_size` of the model's model.safetensors.index.json on Hugging Face;
parameters: half of it, and of gpt-oss those of the module that transformers builds (model card: 20.9B and 116.8B)."""


@pytest.mark.parametrize(("name", "parameters", "stored", "format_"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_catalog_is_as_published(name: str, parameters: float, stored: float, format_: str) -> None:
    graph = graph_from_config(name, 1, 64, "decode")
    assert graph.parameters == parameters
    assert footprint(graph).weights == stored
    assert format_ == (graph.options["quantization"] or graph.options["weight_dtype"])


@pytest.mark.parametrize(
    ("name", "card", "stored"),
    # Model cards: 671B parameters in fp8 (the files have 685B, an extra layer included); 1T in fp8, block scales.
    [("deepseek-v3", 671e9, 672e9), ("deepseek-r1", 671e9, 672e9), ("kimi-k2", 1.03e12, 1.03e12)],
)
def test_fp8_names_of_the_catalog_are_published_in_fp8(name: str, card: float, stored: float) -> None:
    graph = graph_from_config(name, 1, 64, "decode")
    assert graph.parameters == pytest.approx(card, rel=0.005)
    assert footprint(graph).weights == pytest.approx(stored, rel=0.005)
    assert graph.options["quantization"] == "fp8"
    wide = graph_from_config(name, 1, 64, "decode", weight_dtype="bf16")
    assert footprint(wide).weights == 2 * graph.parameters


def test_quantized_names_are_trained_before_quantization() -> None:
    graph = graph_from_config("gpt-oss-20b", 1, 64, "training")
    assert footprint(graph).weights == 2 * graph.parameters
    assert "quantized as published, for inference; training is of the weights before quantization" in graph.notes
