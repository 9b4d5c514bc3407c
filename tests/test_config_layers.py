"""Layers beside full attention and dense blocks: their work and their caches by counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_configs import DECODERS

import neusight_jax as nj
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.writers import in_chunks
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.graph.memory import footprint
from neusight_jax.kernels.table import Kernel


def graph(kind: str, tokens: int | list[int], mode: str = "decode", **change: Any) -> Graph:
    batch = len(tokens) if isinstance(tokens, list) else 1
    return nj.graph_from_config({**DECODERS[kind], **change}, batch, tokens, mode, "bf16")


def cache(work: Graph) -> float:
    return footprint(work).kv_cache


def nodes(work: Graph, name: str) -> list[Node]:
    return [node for node in work.nodes if node.name.endswith(name)]


def kernels(work: Graph, name: str) -> list[tuple[Kernel, int]]:
    return [(kernel, node.repeat) for node in nodes(work, name) for kernel in node.forward]


def pairs(work: Graph) -> float:
    """Query-key pairs of all softmax attention."""
    return sum(kernel.dims["pairs"] * repeat for kernel, repeat in kernels(work, "attention") if "pairs" in kernel.dims)


def products_flop(work: Graph, part: str) -> float:
    chosen = [(kernel, node.repeat) for node in work.nodes if part in node.name for kernel in node.forward]
    return sum(2 * np.prod([kernel.dims[key] for key in ("batch", "m", "n", "k")]) * n for kernel, n in chosen)


def visited(new: int, length: int, chunk: int) -> int:
    """Pairs of causal attention in chunks, one query after the other."""
    return sum(query % chunk + 1 for query in range(length - new, length))


@pytest.mark.parametrize(("new", "length"), [(1, 1), (1, 20), (1, 21), (7, 30), (30, 30), (20, 21), (16, 16)])
def test_pieces_of_chunked_attention_by_counting(new: int, length: int) -> None:
    pieces = in_chunks(Requests((new,), (length,)), 8)
    assert pieces.tokens == new
    causal = sum(
        own * (seen - own) + own * (own + 1) // 2 for own, seen in zip(pieces.queries, pieces.context, strict=True)
    )
    assert causal == visited(new, length, 8)


def test_llama4_attends_in_chunks_and_keeps_one() -> None:
    # Layers 4 of 6 (every fourth) sees all, the others the 100 tokens of their chunk.
    small = {"attention_chunk_size": 100}
    assert pairs(graph("llama4_text", 350, "prefill", **small)) == 5 * visited(350, 350, 100) + 350 * 351 / 2
    decode = graph("llama4_text", 350, **small)
    assert pairs(decode) == 5 * 50 + 350
    assert cache(decode) == (5 * 100 + 350) * 2 * 2 * 128 * 2
    assert pairs(graph("llama4_text", 350, attention_chunk_size=None)) == 6 * 350


def test_states_of_delta_nets_do_not_grow() -> None:
    # Qwen3-Next's class: 16 key and 32 value heads of 128, a convolution over 4 tokens; every fourth layer has a cache.
    state, conv = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2
    softmax = 2 * 2 * 256 * 2
    for tokens in ([300], [300, 700, 50]):
        expected = 5 * len(tokens) * (state + conv) + sum(tokens) * softmax
        assert cache(graph("qwen3_next", tokens)) == expected
        assert cache(graph("qwen3_next", tokens, "prefill")) == expected
    half = graph("qwen3_next", 300, mamba_ssm_dtype="bfloat16")
    assert cache(half) == 5 * (state / 2 + conv) + 300 * softmax


def test_a_decode_reads_and_writes_every_state() -> None:
    for kind, name, elements in (
        ("qwen3_next", "linear_attention.state", 32 * 128 * 128),
        ("kimi_linear", "linear_attention.state", 4 * 32 * 32),
        ("nemotron_h", "mamba.state", 8 * 32 * 128),
        ("granitemoehybrid", "mamba.state", 8 * 64 * 16),
    ):
        found = kernels(graph(kind, [100, 3000]), name)
        assert found
        for kernel, _ in found:
            dims = kernel.dims
            assert dims["rows"] * dims["cols"] * dims["reads"] * 2 == 2 * elements * 4
            assert dims["writes"] == dims["reads"]


def test_scan_of_a_delta_net_by_hand() -> None:
    # 200 tokens are four chunks of 64, each with ten products for every value head.
    chunk, key, value = 64, 128, 128
    one = 2 * chunk * chunk * key + chunk**3 + chunk * chunk * key + 2 * chunk * chunk * value
    one += 2 * chunk * key * value + chunk * key * value
    work = graph("qwen3_next", 200, "prefill")
    assert products_flop(work, "scan_") == 5 * 4 * 32 * 2 * one
    assert not nodes(graph("qwen3_next", 200), "scan_scores")


def test_scan_of_mamba2_by_hand() -> None:
    # 300 tokens are three chunks of 128; 8 heads of 32, 8 groups, a state of 128; two such layers.
    chunk, size, state = 128, 32, 128
    one = 8 * chunk * chunk * state + 8 * (chunk * chunk * size + 2 * chunk * size * state)
    assert products_flop(graph("nemotron_h", 300, "prefill"), "scan_") == 2 * 3 * 2 * one


def test_training_goes_backward_through_scans() -> None:
    for kind in ("qwen3_next", "nemotron_h"):
        work = graph(kind, 256, "training")
        scans = [node for node in work.nodes if "scan_" in node.name]
        assert scans
        assert all(len(node.backward) == 2 * len(node.forward) for node in scans)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_bounds_what_attention_sees(kind: str) -> None:
    few = {"index_topk": 100, "index_head_dim": 64, "index_n_heads": 4}
    owners = 6 if kind == "deepseek_v32" else 2
    work = graph(kind, 1000, **few)
    assert pairs(work) == 6 * 100
    # All latent vectors stay, and the indexer's keys of the layers that have one.
    assert cache(work) == (6 * 1000 * (512 + 64) + owners * 1000 * 64) * 2
    assert products_flop(work, "indexer.scores") == owners * 2 * 4 * 1000 * 64
    assert pairs(graph(kind, 80, **few)) == 6 * 80
    prefill = graph(kind, 1000, "prefill", **few)
    assert pairs(prefill) == 6 * (100 * 101 / 2 + 900 * 100)


def test_minimax_m3_chooses_blocks_of_keys() -> None:
    few = {"index_topk_blocks": 2, "index_block_size": 128, "index_n_heads": 2, "index_head_dim": 32}
    work = graph("minimax_m3_vl_text", 1000, **few)
    assert pairs(work) == 5 * 256 + 1000
    assert cache(work) == (6 * 1000 * 2 * 2 * 128 + 5 * 1000 * 32) * 2


def test_compressed_attention_by_hand() -> None:
    # Layers of DeepSeek-V4 by ratio: window of 128, entries of 4 tokens of which 50 are chosen, entries of 128.
    few = {"index_topk": 50, "index_head_dim": 64, "compress_ratios": [0, 0, 4, 128, 4, 128]}
    work = graph("deepseek_v4", 1000, **few)
    assert pairs(work) == 6 * 128 + 2 * 50 + 2 * (1000 // 128)
    entries = 2 * 250 + 2 * (1000 // 128)
    assert cache(work) == ((6 * 128 + entries) * 512 + 2 * 250 * 64) * 2


def test_layers_that_reuse_a_cache_have_none() -> None:
    # Gemma-4: layers 5 and 6 of 6 reuse; of the first four two are windowed, two full with heads of 512.
    assert cache(graph("gemma4_text", 2000)) == (2 * 512 * 2 * 256 + 2 * 2000 * 2 * 512) * 2 * 2
    assert pairs(graph("gemma4_text", 2000)) == 3 * 512 + 3 * 2000


def test_values_that_are_keys_are_cached_all_the_same() -> None:
    plain = graph("gemma4_text", 2000, num_kv_shared_layers=0)
    shared = graph("gemma4_text", 2000, num_kv_shared_layers=0, attention_k_eq_v=True)
    assert cache(shared) == cache(plain)
    assert (plain.parameters or 0.0) - (shared.parameters or 0.0) == 3 * 2 * 512 * 256


def test_experts_of_two_matrices() -> None:
    ((kernel, repeat),) = kernels(graph("nemotron_h", [10] * 100), "mlp.experts")
    flop = 6.0 * kernel.dims["rows"] * kernel.dims["hidden"] * kernel.dims["inner"]
    assert repeat * flop == pytest.approx(2 * 4.0 * 100 * 2 * 128 * 64, rel=1e-9)


def test_what_was_never_measured_is_said() -> None:
    for kind, words in (
        ("qwen3_next", "linear attention with the delta rule"),
        ("nemotron_h", "state-space scans"),
        ("deepseek_v32", "attention over keys an indexer chose"),
        ("deepseek_v4", "attention over compressed tokens"),
    ):
        (note,) = [note for note in graph(kind, 100).notes if note.startswith("never measured")]
        assert words in note
    assert not any(note.startswith("never measured") for note in graph("llama", 100).notes)


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    plain = graph("deepseek_v3", 100)
    more = graph("deepseek_v3", 100, num_nextn_predict_layers=2)
    assert more.parameters == plain.parameters
    assert any("multi-token prediction (num_nextn_predict_layers 2) is left out" in note for note in more.notes)


@pytest.mark.parametrize("kind", DECODERS)
def test_every_type_in_every_mode(kind: str) -> None:
    for mode in ("inference", "training", "prefill", "decode"):
        work = graph(kind, 700, mode)
        assert all(np.isfinite(list(kernel.dims.values())).all() for node in work.nodes for kernel in node.forward)
        assert len({node.name for node in work.nodes}) == len(work.nodes)
        assert any(node.backward for node in work.nodes) == (mode == "training")
        assert 0 < footprint(work).total < 1e10


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "deepseek_v4", "nemotron_h", "mixtral"])
def test_a_device_holds_its_part(kind: str) -> None:
    one = graph(kind, 500)
    two = nj.graph_from_config(DECODERS[kind], 1, 500, "decode", "bf16", tensor_parallel=2)
    assert 0.45 < (two.parameters or 0.0) / (one.parameters or 1.0) < 0.8


def test_step_has_more_heads_in_windowed_layers_and_a_gate_for_each() -> None:
    local = {"num_attention_heads": 12, "num_attention_groups": 2, "head_dim": 32}
    config = {
        **{"model_type": "step3p5", "hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 8},
        **{"num_attention_groups": 2, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1000},
        **{"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "sliding_window": 128},
        **{"attention_other_setting": local, "moe_num_experts": 16, "moe_top_k": 4, "moe_intermediate_size": 64},
        **{"share_expert_dim": 64, "moe_layers_enum": "2,3,4"},
    }
    work = nj.graph_from_config(config, 1, 1000, "decode", "bf16")
    # Queries and output, keys and values, gate, norms of heads.
    full, windowed = (2 * 256 * 32 * heads + 2 * 256 * 64 + 256 * heads + 2 * 32 for heads in (8, 12))
    experts = 256 * 16 + (16 + 1) * 3 * 256 * 64
    ends = 2 * 1000 * 256 + (5 * 2 + 1) * 256
    assert work.parameters == 2 * full + 3 * windowed + 2 * 3 * 256 * 512 + 3 * experts + ends
    assert pairs(work) == 2 * 1000 + 3 * 128
    with pytest.raises(nj.InputError, match="9 heads of windowed layers are not divisible by 2 KV heads"):
        nj.graph_from_config({**config, "attention_other_setting": {**local, "num_attention_heads": 9}}, 1, 64)
    with pytest.raises(nj.InputError, match="moe_layers_enum is '2;3', expected layer numbers with commas"):
        nj.graph_from_config({**config, "moe_layers_enum": "2;3"}, 1, 64)


def test_layers_that_a_search_narrowed_or_left_out() -> None:
    blocks: list[dict[str, Any]] = [
        {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
    ]
    config = {
        **{"model_type": "nemotron-nas", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8},
        **{"vocab_size": 500, "max_position_embeddings": 4096, "block_configs": blocks},
    }
    work = nj.graph_from_config(config, 1, 1000, "decode", "bf16")
    # 2/3 of twice and once the width, in whole 256.
    attention, wide, narrow = 2 * 256 * 256 + 2 * 256 * 64, 3 * 256 * 512, 3 * 256 * 256
    ends = 2 * 500 * 256 + (2 + 1 + 1 + 1) * 256
    assert work.parameters == attention + wide + narrow + 256 * 256 + ends
    assert cache(work) == 1000 * 2 * 64 * 2
    with pytest.raises(nj.InputError, match="n_heads_in_group is 3, expected a divisor of 8 heads"):
        nj.graph_from_config({**config, "block_configs": [{**blocks[0], "attention": {"n_heads_in_group": 3}}] * 3}, 1)
    with pytest.raises(nj.InputError, match="block_configs is no list of 3 JSON objects"):
        nj.graph_from_config({**config, "block_configs": blocks[:2]}, 1)
