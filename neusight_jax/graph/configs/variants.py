"""Decoders whose layers differ among each other in sizes: from config to layers, one reader each.

Sources: modelling code of Hugging Face `transformers` 5.24 (`llama4`, `gemma4`, `mimo_v2_flash`, `step3p7`,
`minimax_m3_vl`); `nemotron-nas`: `modeling_decilm.py` of nvidia/Llama-3_3-Nemotron-Super-49B-v1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Decoder,
    Dense,
    Experts,
    FeedForward,
    Indexer,
    Layer,
    Mixer,
    Square,
    by_kind,
)
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.families import (
    CHUNKED,
    FULL,
    SLIDING,
    deepseek_experts,
    head_size,
    kv_heads,
    rotary_layers,
    sparse_layers,
    top_k,
)

FFN_MULTIPLE = 256
"""Nemotron-NAS rounds widths of feed-forward blocks up to a multiple of it."""
INDEX_KEYS: dict[str, str] = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_block_size": "sparse_block_size",
}
"""MiniMax-M3's indexer, and how its `sparse_attention_config` spells it."""


def _decoder(config: Config, mixers: Sequence[Mixer | None], blocks: Sequence[FeedForward | None]) -> Decoder:
    return Decoder(
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", False),
        layers=by_kind(Layer(*pair) for pair in zip(mixers, blocks, strict=True)),
    )


def _window(config: Config, words: Sequence[str]) -> int:
    """The window of the layers that have one, which then must be said."""
    return config.size("sliding_window") if SLIDING in words else 0


def read_llama4(config: Config) -> Decoder:
    """Attention in chunks but for every fourth layer, which has no rotary embedding; experts in every n-th layer."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    rotary = rotary_layers(config, layers)
    chunk = config.count("attention_chunk_size", 0)
    words = config.listed("layer_types", layers, (FULL, CHUNKED))
    if words is None:
        words = [CHUNKED if rotates and chunk else FULL for rotates in rotary]
    if CHUNKED in words and not chunk:
        raise InputError(f"{config.name}: layer_types has {CHUNKED} but attention_chunk_size is absent; add it")
    bias = config.flag("attention_bias", False)
    plain = Attention(heads, kv_heads(config, heads), head_size(config), bias=bias, output_bias=bias)
    norms = config.flag("use_qk_norm", True)
    mixers = [
        replace(plain, chunk=chunk * (word == CHUNKED), rotary=rotates, qk_norm="plain" if norms and rotates else "")
        for word, rotates in zip(words, rotary, strict=True)
    ]
    count, inner = config.size("num_local_experts"), config.size("intermediate_size")
    experts = Experts(count, top_k(config, count), inner, shared=inner)
    step = config.size("interleave_moe_layer_step", 1)
    chosen = config.indices("moe_layers") if config.has("moe_layers") else set(range(step - 1, layers, step))
    dense = None if len(chosen) >= layers else Dense(config.size("intermediate_size_mlp"))
    return _decoder(config, mixers, [experts if at in chosen or dense is None else dense for at in range(layers)])


def read_gemma4(config: Config) -> Decoder:
    """Windowed layers, and full ones with wider heads, whose values may be the keys; last layers may reuse a cache."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    words = config.listed("layer_types", layers, (FULL, SLIDING))
    if words is None:
        words = [SLIDING if (at + 1) % 6 else FULL for at in range(layers)]
    words[-1] = FULL
    shares = config.flag("attention_k_eq_v", False)
    local = Attention(heads, kv_heads(config, heads), head_size(config), window=_window(config, words), qk_norm="head")
    wide = (
        kv_heads(config, heads, "num_global_key_value_heads")
        if shares and config.has("num_global_key_value_heads")
        else local.kv_heads
    )
    size = config.size("global_head_dim", 512)
    full = replace(local, kv_heads=wide, head_size=size, window=0, values=not shares)
    reused = config.count("num_kv_shared_layers", 0)
    if reused > layers or (reused == layers):
        raise InputError(f"{config.name}: num_kv_shared_layers is {reused}, expected fewer than the {layers} layers")
    mixers = [replace(full if word == FULL else local, cached=at < layers - reused) for at, word in enumerate(words)]
    inner = config.size("intermediate_size")
    doubled = config.flag("use_double_wide_mlp", False)
    blocks: list[FeedForward]
    if config.flag("enable_moe_block", False):
        count = config.size("num_experts")
        inner_of_expert = config.size("moe_intermediate_size")
        experts = Experts(
            count, top_k(config, count, "top_k_experts"), inner_of_expert, router_scales=True, beside=inner
        )
        blocks = [experts] * layers
    else:
        blocks = [Dense(inner * 2 if doubled and not mixer.cached else inner) for mixer in mixers]
    width = config.count("hidden_size_per_layer_input", 0)
    return Decoder(
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", True),
        layers=by_kind(Layer(*pair, sandwich=True) for pair in zip(mixers, blocks, strict=True)),
        layer_inputs=width,
        layer_vocabulary=config.size("vocab_size_per_layer_input") if width else 0,
    )


def read_mimo_v2(config: Config) -> Decoder:
    """Windowed layers with sinks and other KV heads than the full ones; narrower values than keys."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    words = config.listed("layer_types", layers, (FULL, SLIDING))
    if words is None:
        flags = config.listed("hybrid_layer_pattern", layers, (0, 1))
        windowed = [flag == 1 for flag in flags] if flags else [at > 0 and (at + 1) % 6 != 0 for at in range(layers)]
        words = [SLIDING if has else FULL for has in windowed]
    window = _window(config, words)
    full = Attention(
        heads,
        kv_heads(config, heads),
        head_size(config),
        value_size=config.size("v_head_dim"),
        bias=config.flag("attention_bias", False),
        sinks=config.flag("add_full_attention_sink_bias", False),
    )
    own = config.size("swa_num_attention_heads", heads)
    kv = config.size("swa_num_key_value_heads", 2 * full.kv_heads)
    if own % kv:
        raise InputError(f"{config.name}: swa_num_attention_heads {own} is not divisible by its KV heads {kv}")
    local = replace(
        full,
        heads=own,
        kv_heads=kv,
        head_size=config.size("swa_head_dim", full.head_size),
        value_size=config.size("swa_v_head_dim", full.value_size),
        window=window,
        sinks=config.flag("add_swa_attention_sink_bias", True),
    )
    experts, _ = deepseek_experts(config, layers)
    sparse = _after_first(config, layers)
    dense = Dense(config.size("intermediate_size"))
    mixers = [local if word == SLIDING else full for word in words]
    return _decoder(config, mixers, [experts if has else dense for has in sparse])


def _after_first(config: Config, layers: int) -> list[bool]:
    """Experts where the config says, else in all layers but the first."""
    if config.has("mlp_layer_types") or config.has("moe_layer_freq"):
        return sparse_layers(config, layers)
    return [at > 0 for at in range(layers)]


def read_step3(config: Config) -> Decoder:
    """Windowed layers, in most models with more heads than the full ones; a gate for every head."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    words = config.listed("layer_types", layers, (FULL, SLIDING)) or [FULL] * layers
    bias = config.flag("attention_bias", False)
    full = Attention(
        heads,
        kv_heads(config, heads),
        head_size(config),
        bias=bias,
        output_bias=bias,
        qk_norm="head",
        gate="head",
    )
    other = config.part("attention_other_setting")
    own = other.size("num_attention_heads", config.size("num_sliding_attention_heads", heads))
    if own % full.kv_heads:
        raise InputError(f"{config.name}: {own} heads of windowed layers are not divisible by {full.kv_heads} KV heads")
    local = replace(full, heads=own, window=_window(config, words))
    count = config.size(config.first("n_routed_experts", "moe_num_experts", "num_experts"))
    inner = config.size("moe_intermediate_size")
    shared = config.count(config.first("share_expert_dim", "share_expert_dims"), 0)
    experts = Experts(count, top_k(config, count, "num_experts_per_tok", "moe_top_k"), inner, shared)
    dense = Dense(config.size("intermediate_size"))
    mixers = [local if word == SLIDING else full for word in words]
    return _decoder(config, mixers, [experts if has else dense for has in _step3_sparse(config, layers)])


def _step3_sparse(config: Config, layers: int) -> list[bool]:
    listed = config.values.get("moe_layers_enum")
    if isinstance(listed, str):
        parts = [part.strip() for part in listed.split(",") if part.strip()]
        if not all(part.isdecimal() for part in parts):
            raise InputError(f"{config.name}: moe_layers_enum is {listed[:40]!r}, expected layer numbers with commas")
        chosen = {int(part) for part in parts}
        return [at in chosen for at in range(layers)]
    if listed is not None:
        chosen = config.indices("moe_layers_enum")
        return [at in chosen for at in range(layers)]
    if config.has("mlp_layer_types") or config.has("first_k_dense_replace"):
        return sparse_layers(config, layers)
    return [at >= 3 for at in range(layers)]


def read_minimax_m3(config: Config) -> Decoder:
    """Attention over blocks of keys that an indexer chose, dense in the first layers."""
    layers, heads = config.layers(), config.size("num_attention_heads")
    words = config.listed("layer_types", layers, (FULL, "minimax_m3_sparse"))
    inside = config.part("sparse_attention_config")
    if words is None:
        rows = Config(config.name, {**inside.values, "num_nextn_predict_layers": None})
        flags = rows.listed("sparse_attention_freq", layers, (0, 1)) or [0] * layers
        words = ["minimax_m3_sparse" if flag else FULL for flag in flags]
    sizes = {key: inside.size(other) if inside.has(other) else config.size(key) for key, other in INDEX_KEYS.items()}
    config.require("attention_output_gate", False, False)
    indexer = Indexer(
        heads=sizes["index_n_heads"],
        size=sizes["index_head_dim"],
        top_k=sizes["index_topk_blocks"] * sizes["index_block_size"],
        query_rank=0,
        block=sizes["index_block_size"],
        norms=2 * sizes["index_head_dim"],
        head_weights=False,
    )
    plain = Attention(heads, kv_heads(config, heads), head_size(config), qk_norm="head")
    mixers = [plain if word == FULL else replace(plain, indexer=indexer) for word in words]
    count = config.size(config.first("num_local_experts", "num_experts"))
    shared = config.count("shared_intermediate_size", 0) * config.count("n_shared_experts", 1)
    experts = Experts(count, top_k(config, count), config.size("intermediate_size"), shared)
    dense = Dense(config.size("dense_intermediate_size"))
    return _decoder(config, mixers, [experts if has else dense for has in sparse_layers(config, layers)])


def read_nemotron_nas(config: Config) -> Decoder:
    """Llama with layers that a search made narrower, linear, or left out."""
    layers, hidden, heads = config.layers(), config.size("hidden_size"), config.size("num_attention_heads")
    listed = config.values.get("block_configs")
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(item, dict) for item in listed):
        raise InputError(
            f"{config.name}: block_configs is no list of {layers} JSON objects; expected one for each layer"
        )
    mixers: list[Mixer | None] = []
    blocks: list[FeedForward | None] = []
    bias = config.flag("attention_bias", False)
    for at, item in enumerate(listed):
        whole = Config(f"{config.name}: block_configs of layer {at}", item)
        attention, block = whole.part("attention"), whole.part("ffn")
        if attention.flag("no_op", False):
            mixers.append(None)
        elif attention.flag("replace_with_linear", False):
            mixers.append(Square("attention.linear"))
        else:
            group = attention.size("n_heads_in_group")
            if heads % group:
                raise InputError(f"{attention.name}: n_heads_in_group is {group}, expected a divisor of {heads} heads")
            window = attention.count("window_length", 0)
            mixers.append(
                Attention(heads, heads // group, head_size(config), window=window, bias=bias, output_bias=bias)
            )
        if block.flag("no_op", False):
            blocks.append(None)
        elif block.flag("replace_with_linear", False):
            blocks.append(Square("mlp.linear"))
        else:
            inner = int(2 * block.number("ffn_mult") * hidden / 3)
            inner = -(-inner // FFN_MULTIPLE) * FFN_MULTIPLE
            blocks.append(Dense(inner, bias=config.flag("mlp_bias", False)))
    return _decoder(config, mixers, blocks)
