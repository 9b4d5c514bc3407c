"""What a config means beside its sizes: class defaults, windows, wrappers, positions, assumed dtypes; bad configs."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from refusals import Fails
from refusals import message as refused
from small_configs import DECODERS, ENCODERS

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.build import longest_sequence
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import footprint
from neusight_jax.units import GIB

QWEN2: dict[str, Any] = {
    **{"model_type": "qwen2", "hidden_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 1000, "max_position_embeddings": 65536},
    **{"use_sliding_window": True, "sliding_window": 1000, "tie_word_embeddings": False},
}
KV_OF_TOKEN = 2 * 2 * 128 * 2
"""Bytes of a token's keys and values in one layer of it, bf16."""


def graph(values: dict[str, Any], tokens: int = 4000, mode: str = "decode", **options: Any) -> Graph:
    return nj.graph_from_config(values, 1, tokens, mode, "bf16", **options)


def kv_bytes(values: dict[str, Any], tokens: int = 4000, **options: Any) -> float:
    return footprint(graph(values, tokens, **options)).kv_cache


def message(values: dict[str, Any], **options: Any) -> str:
    return refused(lambda: nj.graph_from_config(values, **options))


@pytest.mark.parametrize(("first", "windowed"), [(0, 10), (4, 6), (10, 0), (28, 0)])
def test_windows_from_max_window_layers_on(first: int, windowed: int) -> None:
    seen = windowed * 1000 + (10 - windowed) * 4000
    assert kv_bytes({**QWEN2, "max_window_layers": first}) == seen * KV_OF_TOKEN


@pytest.mark.parametrize(
    ("change", "windowed"),
    [
        ({"use_sliding_window": False}, 0),
        ({"sliding_window": None}, 0),
        ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 7}, 3),
        # Two further entries are those of layers that predict further tokens.
        ({"layer_types": ["sliding_attention"] * 12, "num_nextn_predict_layers": 2}, 10),
        ({"model_type": "mistral"}, 10),
        ({"model_type": "gemma2"}, 5),
        ({"model_type": "gemma3_text"}, 9),  # all but every sixth
        ({"model_type": "gemma3_text", "sliding_window_pattern": 5}, 8),
        ({"model_type": "qwen2_moe", "max_window_layers": 5, "num_experts": 4, "moe_intermediate_size": 64}, 3),
        ({"model_type": "qwen3", "max_window_layers": 8}, 2),
    ],
)
def test_windows_of_types(change: dict[str, Any], windowed: int) -> None:
    values = {"max_window_layers": 0, "head_dim": 128, **QWEN2, **change}
    assert kv_bytes(values) == (windowed * 1000 + (10 - windowed) * 4000) * KV_OF_TOKEN


def test_class_defaults_fill_what_a_config_leaves_out() -> None:
    values = {key: value for key, value in QWEN2.items() if not key.endswith("sliding_window")}
    plain = graph({**values, "model_type": "qwen3", "num_attention_heads": 16})
    # 128 wide heads by the class, not 1024 / 16.
    assert footprint(plain).kv_cache == 10 * 4000 * KV_OF_TOKEN
    assert any("head_dim 128" in note for note in plain.notes)
    said = graph({**values, "model_type": "qwen3", "num_attention_heads": 16, "head_dim": 64})
    assert footprint(said).kv_cache == footprint(plain).kv_cache / 2
    assert not any("head_dim" in note for note in said.notes)
    # null is said: as many as the model's width gives.
    null = graph({**values, "model_type": "qwen3", "num_attention_heads": 16, "head_dim": None})
    assert footprint(null).kv_cache == footprint(said).kv_cache


def test_ties_by_class() -> None:
    values = {key: value for key, value in QWEN2.items() if key != "tie_word_embeddings"}
    embedding = 1000 * 1024
    for kind, tied in (("llama", False), ("qwen2", False), ("gemma", True), ("starcoder2", True)):
        usual = graph({**values, "model_type": kind}).parameters or 0.0
        other = graph({**values, "model_type": kind, "tie_word_embeddings": not tied}).parameters or 0.0
        assert other - usual == (embedding if tied else -embedding)


def test_a_window_by_class_is_said() -> None:
    values = {key: value for key, value in QWEN2.items() if not key.endswith("sliding_window")}
    values["model_type"] = "mistral"
    assumed = graph(values, 8000)
    assert footprint(assumed).kv_cache == 10 * 4096 * KV_OF_TOKEN
    assert any("sliding_window 4096" in note for note in assumed.notes)
    assert kv_bytes({**values, "sliding_window": None}, 8000) == 10 * 8000 * KV_OF_TOKEN


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "fullest"),
    [(40, 10, 4, 3), (40, 10, 5, 2), (40, 10, 8, 2), (40, 10, 20, 1), (24, 6, 4, 2), (16, 4, 8, 1), (64, 8, 4, 2)],
)
def test_kv_heads_that_do_not_divide(heads: int, kv_heads: int, devices: int, fullest: int) -> None:
    values = {
        **{**QWEN2, "use_sliding_window": False, "hidden_size": 64 * heads, "intermediate_size": 12800},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads},
    }
    assert kv_bytes(values, tensor_parallel=devices) == 10 * 4000 * 2 * fullest * 64 * 2


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({}, {"tensor_parallel": 3}, "8 heads do not split over 3 GPUs"),
        ({"intermediate_size": 2049}, {"tensor_parallel": 2}, "2049 features of the feed-forward block do not split"),
        ({"num_key_value_heads": 3}, {}, "num_attention_heads 8 is not divisible by num_key_value_heads 3"),
        (DECODERS["qwen3_next"], {"tensor_parallel": 32}, "do not split over 32 GPUs"),
        (DECODERS["mixtral"], {"expert_parallel": 3}, "8 experts do not split over expert_parallel=3"),
        ({**DECODERS["mixtral"], "intermediate_size": 36}, {"tensor_parallel": 8}, "36 features of an expert do not"),
        (DECODERS["nemotron_h"], {"tensor_parallel": 16}, "do not split over 16 GPUs"),
    ],
)
def test_what_does_not_split_is_refused(change: dict[str, Any], options: dict[str, int], text: str) -> None:
    assert text in message({**QWEN2, **change}, mode="decode", **options)


def test_a_language_model_inside_another_config() -> None:
    inner = {**QWEN2, "model_type": "qwen3_vl_text", "head_dim": 128}
    alone = graph(inner)
    outer = {"model_type": "qwen3_vl", "dtype": "float16", "text_config": inner, "vision_config": {"depth": 2}}
    wrapped = nj.graph_from_config(outer, 1, 4000, "decode")
    assert wrapped.parameters == alone.parameters
    assert wrapped.dtype == "fp16"
    assert any("the language part of qwen3_vl" in note for note in wrapped.notes)
    # The head is the whole model's.
    tied = graph({**outer, "tie_word_embeddings": True})
    assert (alone.parameters or 0.0) - (tied.parameters or 0.0) == 1000 * 1024


def test_a_language_part_without_a_type_or_sizes() -> None:
    # A language part may leave sizes to its class: LLaVA's is Llama with 32 layers of 4096.
    part = graph({"model_type": "llava", "text_config": {"vocab_size": 32064, "max_position_embeddings": 4096}})
    whole = graph({**load("llama-2-7b"), "vocab_size": 32064})
    assert part.parameters == whole.parameters
    assert any("hidden_size 4096" in note for note in part.notes)
    flat = {**QWEN2, "model_type": "qwen2_vl", "vision_config": {"depth": 2}}
    assert graph(flat).parameters == graph(QWEN2).parameters


def load(name: str) -> dict[str, Any]:
    from neusight_jax.graph.configs.config import load_model_config

    return load_model_config(name)


def test_renamed_types() -> None:
    values = DECODERS["deepseek_v3"]
    assert graph({**values, "model_type": "kimi_k2"}).parameters == graph(values).parameters
    v4 = DECODERS["deepseek_v4"]
    assert graph({**v4, "model_type": "deepseek_ref"}).parameters == graph(v4).parameters
    # Published: 1.04T parameters in all (Kimi-K2's card), its 61 layers' sizes from its config.
    k2 = {**load("deepseek-v3"), "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384}
    k2 |= {"vocab_size": 163840, "first_k_dense_replace": 1}
    assert graph(k2).parameters == pytest.approx(1.03e12, rel=0.01)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}, 65536),
        ({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16384}, 131072),
        ({"rope_type": "yarn", "factor": 2.5}, 163840),
        ({"type": "linear", "factor": 4.0}, 262144),
        ({"rope_type": "dynamic", "factor": 2}, 131072),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 65536),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 65536),
        (
            {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
            131072,
        ),
        ({"rope_type": "default", "rope_theta": 1e6}, 65536),
        (None, 65536),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_positions_follow_the_rotary_scaling(scaling: dict[str, Any] | None, positions: int, key: str) -> None:
    values = {**QWEN2, key: scaling}
    assert longest_sequence(values) == positions
    graph(values, positions)
    assert f"limit of {positions} " in message(values, sequence_length=positions + 1, dtype="bf16")


def test_gemma_says_its_positions_after_scaling() -> None:
    values = {**DECODERS["gemma3_text"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert longest_sequence(values) == 4096


def test_an_unknown_scaling_is_said() -> None:
    notes = graph({**QWEN2, "rope_scaling": {"rope_type": "spiral", "factor": 8.0}}).notes
    assert any("'spiral' is not known: 65536 positions" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_types": ["full_attention"] * 9}, "layer_types has 9 entries, expected one for each of the 10 layers"),
        ({"layer_types": ["full_attention"] * 11}, "layer_types has 11 entries, expected one"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
        ({"layer_types": ["full_attention"] * 9 + ["rope"]}, "layer_types of layer 9 is 'rope'"),
        ({"layer_types": [0] * 10}, "layer_types of layer 0 is 0, which is not supported"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000, expected at most 10,000"),
        ({"hidden_size": None}, "config has no 'hidden_size'"),
        ({"vocab_size": 0}, "vocab_size is 0, expected a positive whole number"),
        ({"rope_scaling": [4]}, "rope_scaling is [4], expected a JSON object"),
        ({"rope_scaling": {"type": 4}}, "rope_type is 4, expected a word such as yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5, expected at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": float("nan")}}, "factor is nan, expected a positive number"),
        ({"torch_dtype": "float99"}, "torch_dtype is 'float99', expected one of float32"),
        ({"dtype": 16}, "dtype is 16, expected one of float32"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"text_config": 3}, "text_config is 3, expected a JSON object"),
        ({"sliding_window": -1}, "sliding_window is -1, expected a whole number of at least 0"),
        ({"model_type": "gemma3n_text"}, "it has alternating updates (AltUp), not written here"),
        ({"model_type": "jamba"}, "it has selective scan (Mamba-1), not written here"),
        ({**DECODERS["nemotron_h"], "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern is 'M*X'"),
        ({**DECODERS["nemotron_h"], "num_hidden_layers": 7}, "num_hidden_layers is 7 but 6 layers are listed"),
        ({**DECODERS["mixtral"], "num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most the 8 experts"),
        ({**DECODERS["deepseek_v4"], "compress_ratios": [0, 4, 128]}, "compress_ratios has 3 entries"),
        (
            {**ENCODERS["bert"], "position_embedding_type": "relative_key"},
            "position_embedding_type 'relative_key' is not",
        ),
        ({**ENCODERS["gpt2"], "add_cross_attention": True}, "add_cross_attention true is not supported"),
        ({**ENCODERS["opt"], "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine false is not"),
        ({**DECODERS["minimax_m3_vl_text"], "attention_output_gate": True}, "attention_output_gate true is not"),
    ],
)
def test_bad_configs_are_one_line(change: dict[str, Any], text: str) -> None:
    assert text in message({**QWEN2, **change})


def test_sizes_a_config_leaves_out_are_named() -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert f"config has no '{key}'" in message({name: value for name, value in QWEN2.items() if name != key})
    assert "config has no 'num_local_experts'" in message(
        {key: value for key, value in DECODERS["mixtral"].items() if key != "num_local_experts"}
    )


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 10**9, 10**40, 2.5, float("nan"), float("inf"), "", "x", "64", "yarn"),
    *([], [None], ["full_attention"], {}, {"a": 1}, {"rope_type": "yarn", "factor": 1e300}, [[]]),
)


def mutated(values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A config with one to three keys dropped, of another type, or lists of another length."""
    out = deepcopy(values)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(list(out) or ["model_type"])
        kind = rng.random()
        if kind < 0.3:
            out.pop(key, None)
        elif kind < 0.5 and isinstance(out.get(key), list) and out[key]:
            out[key] = [*out[key][: len(out[key]) // 2], rng.choice(STRANGE)]
        elif kind < 0.6 and type(out.get(key)) is int:
            out[key] = out[key] * 3 + rng.randint(-1, 1)
        else:
            out[key] = deepcopy(rng.choice(STRANGE))
    return out


def refusal(values: dict[str, Any], options: dict[str, Any]) -> str | None:
    """What the reader says against a config, None for nothing; anything but an `InputError` passes through."""
    try:
        nj.graph_from_config(values, **options)
    except InputError as error:
        return str(error)
    return None


def test_nothing_but_one_line_comes_of_strange_configs() -> None:
    rng = random.Random(0)
    known = [*DECODERS.values(), *ENCODERS.values()]
    known += [{"model_type": "gemma3", "text_config": DECODERS["gemma3_text"], "dtype": "bfloat16"}]
    workloads: tuple[dict[str, Any], ...] = ({}, {"mode": "decode"}, {"mode": "training"}, {"tensor_parallel": 2})
    said = [refusal(mutated(rng.choice(known), rng), rng.choice(workloads)) for _ in range(1500)]
    lines = [text for text in said if text is not None]
    assert 300 < len(lines) < 1400
    assert all("\n" not in text and len(text) < 2000 for text in lines)


@pytest.mark.parametrize(
    ("change", "dtype", "why"),
    [
        ({}, "bf16", "the config says none"),
        ({"torch_dtype": "float16"}, "fp16", "the config's own"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bf16", "the config's own"),
        ({"torch_dtype": "float32"}, "fp32", "the config's own"),
        ({"torch_dtype": "auto"}, "bf16", "the config says none"),
    ],
)
def test_decoders_run_in_their_own_dtype_and_short(change: dict[str, str], dtype: str, why: str) -> None:
    work = nj.graph_from_config({**QWEN2, **change})
    assert (work.dtype, work.sequence_length, work.batch_size) == (dtype, 2048, 1)
    assert f"dtype {dtype} assumed: {why}" in work.notes
    assert "sequence length 2,048 assumed" in work.notes


def test_nothing_is_assumed_of_what_is_said() -> None:
    values = {**QWEN2, "max_window_layers": 4}
    work = nj.graph_from_config(values, 2, 100, "prefill", "fp16")
    assert (work.dtype, work.sequence_length) == ("fp16", 100)
    assert work.notes == ()
    short = nj.graph_from_config({**values, "max_position_embeddings": 512})
    assert short.sequence_length == 512
    decode = nj.graph_from_config(values, 2, mode="decode", dtype="bf16", kv_length=[100, 5000])
    assert (decode.sequence_length, decode.notes) == (5000, ())
    prefill = nj.graph_from_config(values, 1, mode="prefill", dtype="bf16", kv_length=300)
    assert (prefill.tokens, prefill.notes) == (300, ("sequence length 300 assumed",))


def test_encoders_stay_fp32_and_long() -> None:
    work = nj.graph_from_config({**ENCODERS["bert"], "torch_dtype": "float16"})
    assert (work.dtype, work.sequence_length, work.notes) == ("fp32", 4096, ())
    assert nj.graph_from_config(ENCODERS["vit"]).sequence_length == 17


def test_memory_of_an_encoder_with_many_words() -> None:
    # 178M parameters: a multilingual vocabulary of 119,547 on the sizes of BERT base.
    work = nj.graph_from_config({**load("bert-base"), "vocab_size": 119547}, 1, 128)
    assert work.parameters == 177_854_978
    assert footprint(work).weights / GIB == pytest.approx(0.66, abs=0.01)


def test_encoders_by_other_names_and_labels() -> None:
    plain = nj.graph_from_config(ENCODERS["roberta"])
    assert nj.graph_from_config({**ENCODERS["roberta"], "model_type": "xlm-roberta"}).parameters == plain.parameters
    named = nj.graph_from_config({**ENCODERS["roberta"], "id2label": {"0": "a", "1": "b", "2": "c"}})
    assert (named.parameters or 0.0) - (plain.parameters or 0.0) == 256 + 1


def test_commands_assume_the_same(tmp_path: Path, fails: Fails) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN2, "torch_dtype": "bfloat16"}))
    text = fails("predict", str(path), "--gpu", "T4")
    assert "no arithmetic path 'bf16'" in text
    assert "give --dtype fp16 or --dtype fp32" in text
