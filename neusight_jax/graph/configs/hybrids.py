"""Decoders that mix softmax attention with layers of a constant state: from config to layers.

Source: modelling code of Hugging Face `transformers` 5.24 (`qwen3_next`, `qwen3_5`, `qwen3_5_moe`, `kimi_linear`,
`nemotron_h`, `granitemoehybrid`); what Kimi-K3 adds to `kimi_linear`, as aiconfigurator-core 0.12 describes it.
"""

from __future__ import annotations

from dataclasses import replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Attention, Decoder, DeltaNet, Dense, FeedForward, Mamba2, Mixer
from neusight_jax.graph.configs.config import Config, shown
from neusight_jax.graph.configs.families import (
    FULL,
    attention,
    decoder,
    feed_forward,
    kv_heads,
    read_experts,
    sizes,
)
from neusight_jax.graph.configs.latent_models import latent_attention

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
