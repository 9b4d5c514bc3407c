"""Decoders whose layers differ among each other in sizes: from config to layers, one reader each.

Sources: modelling code of Hugging Face `transformers` 5.24 (`llama4`, `gemma4`, `mimo_v2_flash`, `step3p7`,
`minimax_m3_vl`); `nemotron-nas`: `modeling_decilm.py` of nvidia/Llama-3_3-Nemotron-Super-49B-v1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Attention, Decoder, Dense, FeedForward, Indexer, Mixer, Square
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.families import (
    CHUNKED,
    FULL,
    SLIDING,
    attention,
    decoder,
    feed_forward,
    kv_heads,
    read_experts,
    rotary_layers,
    sparse_layers,
)
from neusight_jax.graph.keys import Keys

FFN_MULTIPLE = 256
"""Nemotron-NAS rounds widths of feed-forward blocks up to a multiple of it."""
INDEX_KEYS: dict[str, str] = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_block_size": "sparse_block_size",
}
"""MiniMax-M3's indexer, and how its `sparse_attention_config` spells it."""


def _window(config: Config, words: Sequence[str]) -> int:
    """The window of the layers that have one, which then must be said."""
    return config.size("sliding_window") if SLIDING in words else 0


def read_llama4(config: Config) -> Decoder:
    """Attention in chunks but for every fourth layer, which has no rotary embedding; experts in every n-th layer."""
    layers = config.layers()
    rotary, chunk = rotary_layers(config, layers), config.count("attention_chunk_size", 0)
    words = config.listed("layer_types", layers, (FULL, CHUNKED))
    if words is None:
        words = [CHUNKED if rotates and chunk else FULL for rotates in rotary]
    if CHUNKED in words and not chunk:
        raise InputError(f"{config.name}: layer_types has {CHUNKED} but attention_chunk_size is absent; add it")
    bias, norms = config.flag("attention_bias", False), config.flag("use_qk_norm", True)
    plain = attention(config, bias=bias, output_bias=bias)
    mixers = [
        replace(plain, chunk=chunk * (word == CHUNKED), rotary=rotates, qk_norm="plain" if norms and rotates else "")
        for word, rotates in zip(words, rotary, strict=True)
    ]
    step = config.size("interleave_moe_layer_step", 1)
    chosen = config.indices("moe_layers") if config.has("moe_layers") else set(range(step - 1, layers, step))
    sparse = [at in chosen for at in range(layers)]
    return decoder(config, mixers, feed_forward(config, layers, "llama4_text", sparse, key="intermediate_size_mlp"))


def read_gemma4(config: Config) -> Decoder:
    """Windowed layers, and full ones with wider heads, whose values may be the keys; last layers may reuse a cache."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    words = config.listed("layer_types", layers, (FULL, SLIDING))
    if words is None:
        words = [SLIDING if (at + 1) % 6 else FULL for at in range(layers)]
    words[-1] = FULL
    shares, wide = config.flag("attention_k_eq_v", False), "num_global_key_value_heads"
    local = attention(config, window=_window(config, words), qk_norm="head")
    full = replace(
        local,
        kv_heads=kv_heads(config, heads, wide) if shares and config.has(wide) else local.kv_heads,
        head_size=config.size("global_head_dim", 512),
        window=0,
        values=not shares,
    )
    wide_layers = config.part("per_layer_config").values
    if all(entry == {"head_dim": full.head_size} for entry in wide_layers.values()):
        config.values.settle("per_layer_config")  # as configs of transformers spell `global_head_dim`
    reused = config.count("num_kv_shared_layers", 0)
    if reused >= layers:
        raise InputError(f"{config.name}: num_kv_shared_layers is {reused}, expected fewer than the {layers} layers")
    mixers = [replace(full if word == FULL else local, cached=at < layers - reused) for at, word in enumerate(words)]
    inner, doubled = config.size("intermediate_size"), config.flag("use_double_wide_mlp", False)
    blocks: list[FeedForward] = [Dense(inner * 2 if doubled and not mixer.cached else inner) for mixer in mixers]
    if config.flag("enable_moe_block", False):
        blocks = [replace(read_experts(config, "gemma4_text"), beside=inner)] * layers
    width = config.count("hidden_size_per_layer_input", 0)
    rows = config.size("vocab_size_per_layer_input") if width else 0
    kept = {"layer_inputs": width, "layer_vocabulary": rows}
    return decoder(config, mixers, blocks, tied=True, layer={"sandwich": True}, **kept)


def read_mimo_v2(config: Config) -> Decoder:
    """Windowed layers with sinks and other KV heads than the full ones; narrower values than keys."""
    layers = config.layers()
    words = config.listed("layer_types", layers, (FULL, SLIDING))
    if words is None:
        flags = config.listed("hybrid_layer_pattern", layers, (0, 1))
        windowed = [flag == 1 for flag in flags] if flags else [at > 0 and (at + 1) % 6 != 0 for at in range(layers)]
        words = [SLIDING if has else FULL for has in windowed]
    full = attention(
        config,
        value_size=config.size("v_head_dim"),
        bias=config.flag("attention_bias", False),
        sinks=config.flag("add_full_attention_sink_bias", False),
    )
    local = replace(
        full,
        heads=config.size("swa_num_attention_heads", full.heads),
        kv_heads=config.size("swa_num_key_value_heads", 2 * full.kv_heads),
        head_size=config.size("swa_head_dim", full.head_size),
        value_size=config.size("swa_v_head_dim", full.value_size),
        window=_window(config, words),
        sinks=config.flag("add_swa_attention_sink_bias", True),
    )
    if local.heads % local.kv_heads:
        raise InputError(
            f"{config.name}: swa_num_attention_heads {local.heads} is not divisible by its KV heads {local.kv_heads}"
        )
    has_list = config.has("mlp_layer_types") or config.has("moe_layer_freq")
    sparse = sparse_layers(config, layers) if has_list else [at > 0 for at in range(layers)]
    mixers = [local if word == SLIDING else full for word in words]
    return decoder(config, mixers, feed_forward(config, layers, "deepseek", sparse))


def read_step3(config: Config) -> Decoder:
    """Windowed layers, in most models with more heads than the full ones; a gate for every head."""
    layers = config.layers()
    words = config.listed("layer_types", layers, (FULL, SLIDING)) or [FULL] * layers
    bias = config.flag("attention_bias", False)
    full = attention(config, bias=bias, output_bias=bias, qk_norm="head", gate="head")
    other = config.part("attention_other_setting")
    heads = other.size("num_attention_heads", config.size("num_sliding_attention_heads", full.heads))
    if heads % full.kv_heads:
        raise InputError(
            f"{config.name}: {heads} heads of windowed layers are not divisible by {full.kv_heads} KV heads"
        )
    local = replace(full, heads=heads, window=_window(config, words))
    mixers = [local if word == SLIDING else full for word in words]
    return decoder(config, mixers, feed_forward(config, layers, "step3p5", _step3_sparse(config, layers)))


def _step3_sparse(config: Config, layers: int) -> list[bool]:
    numbers = config.values.get("moe_layers_enum")
    if numbers is None:
        has_list = config.has("mlp_layer_types") or config.has("first_k_dense_replace")
        return sparse_layers(config, layers) if has_list else [at >= 3 for at in range(layers)]
    if isinstance(numbers, str):
        parts = [part.strip() for part in numbers.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise InputError(f"{config.name}: moe_layers_enum is {numbers[:40]!r}, expected layer numbers with commas")
        chosen = {int(part) for part in parts}
    else:
        chosen = config.indices("moe_layers_enum")
    return [at in chosen for at in range(layers)]


def read_minimax_m3(config: Config) -> Decoder:
    """Attention over blocks of keys that an indexer chose, dense in the first layers."""
    layers = config.layers()
    words = config.listed("layer_types", layers, (FULL, "minimax_m3_sparse"))
    inside = config.part("sparse_attention_config")
    if words is None:
        rows = Config(config.name, Keys({**inside.values, "num_nextn_predict_layers": None}, inside.values))
        flags = rows.listed("sparse_attention_freq", layers, (0, 1)) or [0] * layers
        sparse = inside.flag("use_sparse_attention", True)
        words = ["minimax_m3_sparse" if flag and sparse else FULL for flag in flags]
    heads, size, chosen, block = (
        inside.size(other) if inside.has(other) else config.size(key) for key, other in INDEX_KEYS.items()
    )
    config.require("attention_output_gate", False, False)
    indexer = Indexer(heads, size, chosen * block, query_rank=0, block=block, norms=2 * size, head_weights=False)
    plain = attention(config, qk_norm="head" if config.flag("use_qk_norm", True) else "")
    mixers = [plain if word == FULL else replace(plain, indexer=indexer) for word in words]
    return decoder(config, mixers, feed_forward(config, layers, "minimax_m3_vl_text", key="dense_intermediate_size"))


def read_nemotron_nas(config: Config) -> Decoder:
    """Llama with layers that a search made narrower, linear, or left out."""
    layers = config.layers()
    entries = config.values.get("block_configs")
    if not isinstance(entries, list) or len(entries) != layers or not all(isinstance(item, dict) for item in entries):
        raise InputError(
            f"{config.name}: block_configs is no list of {layers} JSON objects; expected one for each layer"
        )
    mixers: list[Mixer | None] = []
    blocks: list[FeedForward | None] = []
    for at, item in enumerate(entries):
        whole = Config(f"{config.name}: block_configs of layer {at}", item)
        mixers.append(_kept(whole.part("attention"), "attention", partial(_grouped_attention, config)))
        blocks.append(_kept(whole.part("ffn"), "mlp", partial(_narrowed, config)))
    return decoder(config, mixers, blocks)


def _kept(part: Config, name: str, read: Callable[[Config], Any]) -> Any:
    """A part of a layer as it is, or one linear layer, or nothing."""
    if part.flag("no_op", False):
        return None
    return Square(f"{name}.linear") if part.flag("replace_with_linear", False) else read(part)


def _grouped_attention(config: Config, part: Config) -> Attention:
    heads, group = config.size("num_attention_heads"), part.size("n_heads_in_group")
    if heads % group:
        raise InputError(f"{part.name}: n_heads_in_group is {group}, expected a divisor of {heads} heads")
    bias = config.flag("attention_bias", False)
    mixer = attention(config, window=part.count("window_length", 0), bias=bias, output_bias=bias)
    return replace(mixer, kv_heads=heads // group)


def _narrowed(config: Config, part: Config) -> Dense:
    inner = int(2 * part.number("ffn_mult") * config.size("hidden_size") / 3)
    return Dense(-(-inner // FFN_MULTIPLE) * FFN_MULTIPLE, bias=config.flag("mlp_bias", False))
