"""Decoders that are no row of the table of traits: from config to layers, one reader for each kind of them.

Sources: modelling code of Hugging Face `transformers` 5.24 for each type; multi-head latent attention after DeepSeek-V2
(2024); `nemotron-nas`: `modeling_decilm.py` of nvidia/Llama-3_3-Nemotron-Super-49B-v1; what Kimi-K3 adds to
`kimi_linear`, as aiconfigurator-core 0.12 describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Compressed,
    Decoder,
    DeltaNet,
    Dense,
    FeedForward,
    Indexer,
    Latent,
    Mamba2,
    Mixer,
    Square,
)
from neusight_jax.graph.configs.config import Config, shown
from neusight_jax.graph.configs.families import (
    CHUNKED,
    FULL,
    SLIDING,
    TRAITS,
    attention,
    decoder,
    feed_forward,
    kv_heads,
    read_experts,
    read_family,
    rotary_layers,
    sizes,
    sparse_layers,
)
from neusight_jax.graph.keys import Keys

INDEXED: tuple[str, ...] = ("deepseek_v32", "glm_moe_dsa")
"""Types whose attention sees keys that an indexer chose."""
LATENT_TYPES: tuple[str, ...] = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", *INDEXED)
"""Types `read_latent` reads."""
RATIO_LAYERS: dict[int, str] = {0: "sliding_attention", 4: "compressed_sparse_attention"}
"""DeepSeek-V4's `compress_ratios` as layer types; every other ratio is heavily compressed attention."""
HEAVY = "heavily_compressed_attention"


def latent_attention(config: Config) -> Latent:
    """Latent attention of a config, without indexer."""
    return Latent(
        heads=config.size("num_attention_heads"),
        query_rank=config.count("q_lora_rank", 0),
        bias=config.flag("attention_bias", False),
        **sizes(config, "latent"),
    )


def read_latent(config: Config) -> Decoder:
    """The layers of a type in `LATENT_TYPES`."""
    kind, layers = str(config.values["model_type"]), config.layers()
    latent = latent_attention(config)
    mixers = [latent] * layers
    if kind in INDEXED:
        if not latent.query_rank:
            raise InputError(
                f"{config.name}: config has no 'q_lora_rank'; the indexer reads queries of that rank, add it"
            )
        indexer = _indexer(config, latent.query_rank, norms=2)
        chosen = replace(latent, indexer=indexer)
        # A layer without an indexer of its own sees the keys chosen for the layer before.
        reused = replace(latent, indexer=replace(indexer, heads=0))
        mixers = [chosen if has_indexer else reused for has_indexer in _own_indexers(config, layers)]
    routed = config.has(config.first("n_routed_experts", "num_experts", "num_local_experts"))
    plain = not routed and kind in ("deepseek_v2", "deepseek_v3")
    return decoder(config, mixers, feed_forward(config, layers, "" if plain else "deepseek"))


def _indexer(config: Config, query_rank: int, norms: int) -> Indexer:
    """An indexer; `norms`: weights of its norms over its size."""
    dims = sizes(config, "indexer")
    return Indexer(**dims, query_rank=query_rank, block=1, norms=norms * dims["size"], head_weights=True)


def _own_indexers(config: Config, layers: int) -> list[bool]:
    """Whether each layer chooses keys itself; the others take what the layer before chose."""
    kinds = ("full", "shared")
    words = config.listed("indexer_types", layers, kinds) or config.listed("index_topk_pattern", layers, kinds)
    if words is not None:
        return [word == "full" for word in words]
    every, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
    return [max(at - offset + 1, 0) % every == 0 for at in range(layers)]


def read_deepseek_v4(config: Config) -> Decoder:
    """Windowed layers, compressed ones with an indexer, heavily compressed ones; residual streams; hashed experts."""
    layers, experts = config.layers(), read_experts(config, "deepseek_v4")
    plain = Compressed(**sizes(config, "compressed"), ratio=0, overlap=False, indexer=None)
    if plain.heads % plain.output_groups:
        raise InputError(
            f"{config.name}: num_attention_heads {plain.heads} is not divisible by o_groups {plain.output_groups}"
        )
    rates = config.part("compress_rates")
    sparse, heavy = rates.size(RATIO_LAYERS[4], 4), rates.size(HEAVY, 128)
    mixers = {
        RATIO_LAYERS[0]: plain,
        RATIO_LAYERS[4]: replace(
            plain, ratio=sparse, overlap=True, indexer=_indexer(config, plain.query_rank, norms=1)
        ),
        HEAVY: replace(plain, ratio=heavy),
    }
    words = [mixers[word] for word in _v4_layers(config, layers, heavy)]
    return decoder(config, words, [experts] * layers, streams=config.size("hc_mult", most=64))


def _v4_layers(config: Config, layers: int, heavy: int) -> list[str]:
    words = config.listed("layer_types", layers, (*RATIO_LAYERS.values(), HEAVY))
    if words is not None:
        return words
    ratios = config.listed("compress_ratios", layers, (0, 4, heavy))
    if ratios is not None:
        return [RATIO_LAYERS.get(ratio, HEAVY) for ratio in ratios]
    return [RATIO_LAYERS[4] if at % 2 and at > 2 else HEAVY for at in range(layers)]


LINEAR = "linear_attention"
HYBRID_PATTERN: dict[str, str] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
BLOCK_NAMES: dict[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}
"""Newer spellings of the same."""


def _state_bytes(config: Config, key: str) -> float:
    """Bytes of an element of a recurrent state; fp32 unless the config says another dtype."""
    return dtype_bytes(config.dtype(key) or "fp32")


def read_qwen_hybrid(config: Config) -> Decoder:
    """Gated delta nets with a gated softmax attention in every fourth layer."""
    layers = config.layers()
    bias = config.flag("attention_bias", False)
    gate = "element" if config.flag("attn_output_gate", True) else ""
    softmax = attention(config, bias=bias, output_bias=bias, qk_norm="head", gate=gate)
    state_bytes = _state_bytes(config, "mamba_ssm_dtype")
    delta = DeltaNet(**sizes(config, "delta"), gates="scalar", state_bytes=state_bytes)
    if delta.value_heads % delta.key_heads:
        raise InputError(
            f"{config.name}: linear_num_value_heads {delta.value_heads} is not divisible by linear_num_key_heads "
            f"{delta.key_heads}; expected a multiple"
        )
    blocks = feed_forward(config, layers, "qwen" if config.has("num_experts") else "")
    words = config.listed("layer_types", layers, (LINEAR, FULL))
    if words is None:
        every = config.size("full_attention_interval", 4)
        words = [LINEAR if (at + 1) % every else FULL for at in range(layers)]
    return decoder(config, [delta if word == LINEAR else softmax for word in words], blocks)


def read_kimi_linear(config: Config) -> Decoder:
    """Kimi delta attention with latent attention in every fourth layer."""
    layers = config.layers()
    inside = config.part("linear_attn_config")
    spelled = (
        ("num_heads", "linear_num_heads"),
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    heads, size, conv = (inside.size(nested) if inside.has(nested) else config.size(key) for nested, key in spelled)
    inside.values.settle("kda_layers", "full_attn_layers")  # what `layer_types` says too, where it is there
    gates = "vector_wide" if inside.flag("use_full_rank_gate", False) else "vector"
    delta = DeltaNet(heads, heads, size, size, conv, gates, _state_bytes(config, "mamba_ssm_dtype"))
    latent = replace(latent_attention(config), gate=config.flag("mla_use_output_gate", False))
    words = config.listed("layer_types", layers, (LINEAR, FULL))
    if words is None:
        usual = set(range(5, layers + 1, 4))  # counted from 1
        if inside.has("kda_layers"):
            usual = set(range(1, layers + 1)) - inside.indices("kda_layers")
        full = inside.indices("full_attn_layers") if inside.has("full_attn_layers") else usual
        if any(at < 1 or at > layers for at in full):
            raise InputError(f"{config.name}: full_attn_layers names layers beyond the {layers} there are")
        words = [FULL if at + 1 in full else LINEAR for at in range(layers)]
    width = config.count("routed_expert_hidden_size", 0)
    norm = width > 0 and config.flag("latent_moe_use_norm", False)
    routed = replace(read_experts(config, "kimi_linear"), latent=width, latent_norm=norm)
    blocks = [block if isinstance(block, Dense) else routed for block in feed_forward(config, layers, "kimi_linear")]
    mixers = [latent if word == FULL else delta for word in words]
    return decoder(config, mixers, blocks, residual_block=config.count("attn_res_block_size", 0))


def read_nemotron_h(config: Config) -> Decoder:
    """Layers of one block each: state space (Mamba-2), attention, feed-forward or experts."""
    words = _block_words(config)
    mamba = Mamba2(
        **sizes(config, "nemotron_h"),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        state_bytes=_state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    heads = config.size("num_attention_heads")
    size = config.size(config.first("head_dim", "attention_head_dim"))  # as older configs call it
    softmax = Attention(heads, kv_heads(config, heads), size, rotary=False, window=config.count("sliding_window", 0))
    mixers: dict[str, Mixer] = {"mamba": mamba, "attention": softmax}
    blocks: dict[str, FeedForward] = {}
    if "mlp" in words:
        bias = config.flag("mlp_bias", False)
        blocks["mlp"] = Dense(config.size("intermediate_size"), gated=False, bias=bias)
    if "moe" in words:
        shared = config.size("moe_shared_expert_intermediate_size") if config.count("n_shared_experts", 1) else 0
        latent = config.count("moe_latent_size", 0)
        blocks["moe"] = replace(read_experts(config, "nemotron_h"), shared=shared, latent=latent)
    return decoder(config, map(mixers.get, words), map(blocks.get, words))


def _block_words(config: Config) -> list[str]:
    """Kind of block in each layer: the list or the pattern of letters, which say how many there are."""
    pattern = config.values.get("hybrid_override_pattern")
    blocks = config.values.get("layers_block_type", config.values.get("layer_types"))
    if blocks is None and pattern is None:
        raise InputError(f"{config.name}: config has no 'hybrid_override_pattern' and no 'layers_block_type'; add one")
    if blocks is None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(HYBRID_PATTERN):
            raise InputError(
                f"{config.name}: hybrid_override_pattern is {shown(pattern)}, expected letters of "
                f"{', '.join(HYBRID_PATTERN)}"
            )
        blocks = [HYBRID_PATTERN[letter] for letter in pattern]
    words = (*HYBRID_PATTERN.values(), *BLOCK_NAMES)
    if (
        not isinstance(blocks, list)
        or not blocks
        or not all(isinstance(word, str) and word in words for word in blocks)
    ):
        raise InputError(f"{config.name}: layers_block_type is {shown(blocks)}, expected a list of {', '.join(words)}")
    if config.has("num_hidden_layers") and config.layers() != len(blocks):
        raise InputError(
            f"{config.name}: num_hidden_layers is {config.layers()} but {len(blocks)} layers are listed; "
            "expected the same number"
        )
    return [BLOCK_NAMES.get(str(word), str(word)) for word in blocks]


def read_granite_hybrid(config: Config) -> Decoder:
    """Mamba-2 or attention, then experts, if any, and a feed-forward block all tokens share."""
    layers = config.layers()
    inner, dims = int(config.number("mamba_expand", 2) * config.size("hidden_size")), sizes(config, "granitemoehybrid")
    if inner % dims["heads"]:
        raise InputError(f"{config.name}: mamba_n_heads {dims['heads']} does not divide {inner} features")
    mamba = Mamba2(
        **dims,
        head_size=inner // dims["heads"],
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        state_bytes=_state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    bias, rotary = config.flag("attention_bias", False), config.values.get("position_embedding_type") == "rope"
    softmax = attention(config, bias=bias, output_bias=bias, rotary=rotary)
    key = config.first("layer_types", "layers_block_type")
    words = config.listed(key, layers, ("mamba", "attention", LINEAR, FULL)) or ["mamba"] * layers
    routed = config.count("num_local_experts", 0)
    if routed:
        blocks = feed_forward(config, layers, "granitemoehybrid")
    else:
        blocks = [Dense(config.count("shared_intermediate_size", 0))] * layers
    return decoder(config, [mamba if word in ("mamba", LINEAR) else softmax for word in words], blocks)


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
    usual = [SLIDING if (at + 1) % 6 else FULL for at in range(layers)]
    words = config.listed("layer_types", layers, (FULL, SLIDING)) or usual
    # The class makes the last layer a full one whatever the list says.
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


READERS: dict[str, Callable[[Config], Decoder]] = {
    **dict.fromkeys(TRAITS, read_family),
    **dict.fromkeys(LATENT_TYPES, read_latent),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), read_qwen_hybrid),
    "deepseek_v4": read_deepseek_v4,
    "llama4_text": read_llama4,
    "gemma4_text": read_gemma4,
    "mimo_v2_flash": read_mimo_v2,
    "step3p5": read_step3,
    "minimax_m3_vl_text": read_minimax_m3,
    "nemotron-nas": read_nemotron_nas,
    "nemotron_h": read_nemotron_h,
    "kimi_linear": read_kimi_linear,
    "granitemoehybrid": read_granite_hybrid,
}
"""Readers by `model_type`. A new type is one row here, and a new reader where its layers are not a row of a table."""
