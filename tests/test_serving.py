"""Decoders and ViT from config: published sizes, counts by hand, serving steps, memory."""

from __future__ import annotations

from collections.abc import Sequence
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
from neusight_jax.graph.configs.architectures import STEP_ARCHITECTURES
from neusight_jax.graph.configs.catalog import load_model_config
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.memory import footprint

PUBLISHED_BILLIONS = {
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-405b": 405.9,
    "llama-3.2-1b": 1.24,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen3-14b": 14.77,
    "qwen3-30b-a3b": 30.5,
    "qwen3-coder-480b-a35b": 480.0,
    "qwen3-next-80b-a3b": 80.0,
    "glm-4.5": 355.0,
    "glm-4.5-air": 106.0,
    "gemma-7b": 8.54,
    "gemma-2-9b": 9.24,
    "phi-4": 14.66,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "kimi-k2": 1030.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "vit-large": 0.304,
}
"""Parameters, billions, from the model cards and papers."""


def graph(
    model: str, batch: int, lengths: int | Sequence[int], mode: str, dtype: str = "bf16", **options: Any
) -> nj.Graph:
    return nj.graph_from_config(model, batch, lengths, mode, dtype, **options)


def flop_of(work: nj.Graph, *families: str) -> float:
    columns = nj.predict(load_baseline("roofline"), nj.load_gpu("H100"), work).columns
    mine = np.isin(columns["family"].astype(str), families)
    return float((columns["flop"] * columns["count"])[mine].sum())


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parameters_are_the_published_ones(name: str) -> None:
    work = graph(name, 1, 8, "inference")
    assert work.parameters == pytest.approx(1e9 * PUBLISHED_BILLIONS[name], rel=0.01)
    assert footprint(work).weights == 2 * work.parameters


def by_counting(new: int, length: int, window: int, causal: bool) -> tuple[int, int]:
    """Visited pairs and keys, one query after the other."""
    pairs, seen = 0, set[int]()
    for query in range(length - new, length):
        last = query if causal else length - 1
        first = 0 if not window else max(0, (query if causal else length - 1) - window + 1)
        pairs += last - first + 1
        seen |= set(range(first, last + 1))
    return pairs, len(seen)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 50))
def test_pairs_of_causal_attention_by_counting(new: int, cached: int, window: int) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_size": 8}
    dims = attention_dims(np.array([new]), np.array([new + cached]), window=window, **sizes)  # type: ignore[arg-type]
    assert (dims["pairs"][0], dims["keys"][0]) == by_counting(new, new + cached, window, True)


def test_products_of_llama_by_hand() -> None:
    hidden, inner, layers, vocabulary, tokens = 4096, 14336, 32, 128256, 3 * 512
    per_token = layers * (hidden * (4096 + 2 * 1024) + 4096 * hidden + 3 * hidden * inner)
    head = hidden * vocabulary
    every = graph("llama-3.1-8b", 3, 512, "inference")
    assert flop_of(every, "gemm") == pytest.approx(2 * tokens * (per_token + head), rel=1e-6)
    last = graph("llama-3.1-8b", 3, 512, "prefill")
    assert flop_of(last, "gemm") == pytest.approx(2 * (tokens * per_token + 3 * head), rel=1e-6)
    one = graph("llama-3.1-8b", 3, 512, "decode")
    assert flop_of(one, "gemm") == pytest.approx(2 * 3 * (per_token + head), rel=1e-6)
    assert flop_of(one, "decode") == pytest.approx(layers * 4 * 3 * 512 * 4096, rel=1e-6)
    training = graph("llama-3.1-8b", 3, 512, "training")
    assert flop_of(training, "gemm") == pytest.approx(3 * 2 * tokens * (per_token + head), rel=1e-6)


def test_mixed_lengths_are_the_sum_of_requests() -> None:
    apart = [graph("qwen2.5-7b", 1, length, "prefill") for length in (100, 700, 3000)]
    together = graph("qwen2.5-7b", 3, [100, 700, 3000], "prefill")
    assert flop_of(together, "prefill") == pytest.approx(sum(flop_of(each, "prefill") for each in apart), rel=1e-6)
    assert flop_of(together, "gemm") == pytest.approx(sum(flop_of(each, "gemm") for each in apart), rel=1e-6)
    assert together.step_tokens == 3800
    decode = graph("qwen2.5-7b", 3, 1, "decode", kv_length=[100, 700, 3000])
    assert flop_of(decode, "decode") == pytest.approx(28 * 4 * 3800 * 3584, rel=1e-6)
    assert decode.step_tokens == 3


def test_a_prefill_that_goes_on_from_a_cache() -> None:
    whole, half = graph("llama-3.1-8b", 1, 2048, "prefill"), graph("llama-3.1-8b", 1, 1024, "prefill")
    rest = graph("llama-3.1-8b", 1, 1024, "prefill", kv_length=2048)
    assert flop_of(half, "prefill") + flop_of(rest, "prefill") == pytest.approx(flop_of(whole, "prefill"), rel=1e-6)


def test_cache_and_weights_by_dtype() -> None:
    plain = footprint(graph("llama-3.1-8b", 4, 8192, "decode"))
    assert plain.kv_cache == 4 * 8192 * 32 * 2 * 8 * 128 * 2
    narrow = footprint(graph("llama-3.1-8b", 4, 8192, "decode", dtype="fp8"))
    assert narrow.kv_cache == plain.kv_cache / 2
    assert 0.5 < narrow.weights / plain.weights < 0.6  # embeddings and head stay bf16
    mixed = footprint(graph("llama-3.1-8b", 4, 8192, "decode", weight_dtype="fp8", kv_dtype="bf16"))
    assert (mixed.weights, mixed.kv_cache) == (narrow.weights, plain.kv_cache)


def test_latent_attention_keeps_one_small_vector() -> None:
    for mode in ("prefill", "decode"):
        assert footprint(graph("deepseek-v3", 2, 1000, mode)).kv_cache == 2 * 1000 * 61 * (512 + 64) * 2


def test_windows_bound_the_cache_and_the_work() -> None:
    wide, narrow = graph("mistral-7b", 1, 16384, "decode"), graph("mistral-7b-v0.1", 1, 16384, "decode")
    assert flop_of(wide, "decode") == pytest.approx(4 * flop_of(narrow, "decode"), rel=1e-6)
    assert footprint(wide).kv_cache == 4 * footprint(narrow).kv_cache


def test_tensor_parallel_splits_products_and_memory() -> None:
    one, four = graph("llama-3.1-70b", 8, 4096, "decode"), graph("llama-3.1-70b", 8, 4096, "decode", tensor_parallel=4)
    assert flop_of(four, "gemm") == pytest.approx(flop_of(one, "gemm") / 4, rel=1e-6)
    assert footprint(four).kv_cache == footprint(one).kv_cache / 4
    split = graph("mixtral-8x7b", 8, 4096, "decode", expert_parallel=8)
    assert footprint(split).weights < 0.2 * footprint(graph("mixtral-8x7b", 8, 4096, "decode")).weights


def test_experts_with_work() -> None:
    sizes = {"experts": 8, "top_k": 2, "hidden": 64, "inner": 32}
    assert expert_dims(1, local_experts=8, **sizes)["active"] == 2  # type: ignore[arg-type]
    assert expert_dims(100, local_experts=8, **sizes)["active"] == 8  # type: ignore[arg-type]
    assert expert_dims(100, local_experts=2, **sizes)["rows"] == 50  # type: ignore[arg-type]
    random = expert_dims(4, local_experts=8, distribution="random", **sizes)["active"]  # type: ignore[arg-type]
    assert random == pytest.approx(8 * (1 - np.exp(-1)))


def test_every_decoder_in_every_mode() -> None:
    predictor, gpu = load_baseline("roofline"), nj.load_gpu("B200")
    seen = set()
    for name in nj.list_models():
        kind = load_model_config(name)["model_type"]
        if kind in seen or kind not in STEP_ARCHITECTURES:
            continue
        seen.add(kind)
        modes = ("inference", "training") if kind == "vit" else ("inference", "training", "prefill", "decode")
        for mode in modes:
            forecast = nj.predict(predictor, gpu, graph(name, 2, 64, mode))
            assert 0 < forecast.forward_s <= forecast.total_s < 10
            assert (forecast.backward_s > forecast.forward_s) == (mode == "training")
    assert len(seen) > 10


def test_gradients_reach_the_gpu_in_every_mode() -> None:
    predictor, gpu = random_predictor("mixture", 0, 2), nj.load_gpu("H200")
    for mode in ("prefill", "decode", "training"):
        slopes = jax.grad(nj.latency, argnums=1)(predictor, gpu, graph("qwen3-30b-a3b", 2, 256, mode).kernels)
        leaves = np.array(jax.tree.leaves(slopes))
        assert np.isfinite(leaves).all()
        assert float(slopes.mem_bytes_per_s) < 0


def test_fp32_decoders_need_no_tensor_cores() -> None:
    families = graph("llama-3.2-1b", 1, 64, "inference", dtype="fp32").kernels.families
    assert "gemm" not in families
    assert "prefill" not in families


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: graph("llama-3.1-8b", 2, [1, 2, 3], "prefill"),
            "sequence_length has 3 entries, expected one",
        ),
        (lambda: graph("llama-3.1-8b", 1, 64, "prefill", kv_length=32), "expected at least its sequence_length, 64"),
        (lambda: graph("llama-3.1-8b", 1, 64, "training", kv_length=64), "goes with mode prefill or decode"),
        (lambda: graph("llama-3.1-8b", 1, 1 << 20, "decode"), "longer than the model's limit of 131072"),
        (lambda: graph("gpt2", 1, 64, "decode", dtype="fp32"), "mode decode is for decoders"),
        (lambda: graph("gpt2", 1, 64, "inference", kv_length=3), "kv_length is for decoders"),
        (lambda: graph("llama-3.1-8b", 1, 64, "decode", tensor_parallel=5), "do not split over 5 GPUs"),
        (lambda: graph("llama-3.1-8b", 1, 64, "decode", expert_parallel=2), "has no experts"),
        (lambda: graph("vit-base", 1, 400, "inference"), "longer than the model's limit of 197"),
        (lambda: graph("llama-3.1-8b", 1, 64, "decode", kv_dtype="fp7"), "unknown dtype 'fp7'"),
        (lambda: graph("llama-3.1-8b", 1, 64, "serve"), "mode is 'serve'"),
    ],
)
def test_bad_workloads_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
