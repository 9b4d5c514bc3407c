"""Decoders that mix softmax attention with layers of a constant state: from config to layers.

Source: modelling code of Hugging Face `transformers` 5.24 (`qwen3_next`, `qwen3_5`, `qwen3_5_moe`, `kimi_linear`,
`nemotron_h`, `granitemoehybrid`); what Kimi-K3 adds to `kimi_linear`, as aiconfigurator-core 0.12 describes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Decoder,
    DeltaNet,
    Dense,
    Experts,
    FeedForward,
    Layer,
    Mamba2,
    Mixer,
    by_kind,
)
from neusight_jax.graph.configs.config import Config, shown
from neusight_jax.graph.configs.families import FULL, head_size, kv_heads, qwen_experts, sparse_layers, top_k
from neusight_jax.graph.configs.latent_models import latent_attention
from neusight_jax.graph.configs.torch_dtypes import TORCH_DTYPES

LINEAR = "linear_attention"
HYBRID_PATTERN: dict[str, str] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
BLOCK_NAMES: dict[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}
"""Newer spellings of the same."""


def _state_bytes(config: Config, key: str, default: str = "float32") -> float:
    """Bytes of an element of a recurrent state; fp32 unless the config says another dtype."""
    word = config.values.get(key, default)
    if word in (None, "auto"):
        word = default
    if not isinstance(word, str) or word.removeprefix("torch.") not in TORCH_DTYPES:
        raise InputError(f"{config.name}: {key} is {shown(word)}, expected one of {', '.join(TORCH_DTYPES)}")
    return dtype_bytes(TORCH_DTYPES[word.removeprefix("torch.")])


def _decoder(config: Config, layers: Mapping[Layer, list[int]]) -> Decoder:
    return Decoder(
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", False),
        layers=layers,
    )


def _softmax(config: Config, **options: object) -> Attention:
    heads = config.size("num_attention_heads")
    plain = Attention(heads, kv_heads(config, heads), head_size(config))
    return replace(plain, **options)  # type: ignore[arg-type]


def _attention_words(config: Config, layers: int) -> list[str]:
    words = config.listed("layer_types", layers, (LINEAR, FULL))
    if words is not None:
        return words
    every = config.size("full_attention_interval", 4)
    return [LINEAR if (at + 1) % every else FULL for at in range(layers)]


def read_qwen_hybrid(config: Config) -> Decoder:
    """Gated delta nets with a gated softmax attention in every fourth layer."""
    layers = config.layers()
    bias = config.flag("attention_bias", False)
    gate = "element" if config.flag("attn_output_gate", True) else ""
    attention = _softmax(config, bias=bias, output_bias=bias, qk_norm="head", gate=gate)
    delta = DeltaNet(
        key_heads=config.size("linear_num_key_heads"),
        value_heads=config.size("linear_num_value_heads"),
        key_size=config.size("linear_key_head_dim"),
        value_size=config.size("linear_value_head_dim"),
        conv=config.size("linear_conv_kernel_dim"),
        gates="scalar",
        state_bytes=_state_bytes(config, "mamba_ssm_dtype"),
    )
    if delta.value_heads % delta.key_heads:
        raise InputError(
            f"{config.name}: linear_num_value_heads {delta.value_heads} is not divisible by linear_num_key_heads "
            f"{delta.key_heads}; expected a multiple"
        )
    blocks: list[FeedForward]
    if config.has("num_experts"):
        experts, sparse = qwen_experts(config, layers)
        dense = None if all(sparse) else Dense(config.size("intermediate_size"))
        blocks = [experts if has or dense is None else dense for has in sparse]
    else:
        blocks = [Dense(config.size("intermediate_size"))] * layers
    mixers: list[Mixer] = [delta if word == LINEAR else attention for word in _attention_words(config, layers)]
    return _decoder(config, by_kind(Layer(*pair) for pair in zip(mixers, blocks, strict=True)))


def read_kimi_linear(config: Config) -> Decoder:
    """Kimi delta attention with latent attention in every fourth layer."""
    layers = config.layers()
    inside = config.part("linear_attn_config")
    spelled = (
        ("num_heads", "linear_num_heads"),
        ("head_dim", "linear_head_dim"),
        ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    heads, size, conv = (inside.size(own) if inside.has(own) else config.size(key) for own, key in spelled)
    gates = "vector_wide" if inside.flag("use_full_rank_gate", False) else "vector"
    delta = DeltaNet(heads, heads, size, size, conv, gates, _state_bytes(config, "mamba_ssm_dtype"))
    latent = latent_attention(config, config.size("num_attention_heads"))
    latent = replace(latent, gate=config.flag("mla_use_output_gate", False))
    words = config.listed("layer_types", layers, (LINEAR, FULL))
    if words is None:
        usual = set(range(5, layers + 1, 4))  # counted from 1
        full = inside.indices("full_attn_layers") if inside.has("full_attn_layers") else usual
        if any(at < 1 or at > layers for at in full):
            raise InputError(f"{config.name}: full_attn_layers names layers beyond the {layers} there are")
        words = [FULL if at + 1 in full else LINEAR for at in range(layers)]
    count = config.size(config.first("num_experts", "num_local_experts"))
    inner = config.size("moe_intermediate_size")
    shared = inner * config.count(config.first("num_shared_experts", "n_shared_experts"), 0)
    experts = Experts(count, top_k(config, count, "num_experts_per_token", "num_experts_per_tok"), inner, shared)
    width = config.count("routed_expert_hidden_size", 0)
    norm = width > 0 and config.flag("latent_moe_use_norm", False)
    experts = replace(experts, latent=width, latent_norm=norm)
    dense = Dense(config.size("intermediate_size"))
    kinds = zip(words, sparse_layers(config, layers), strict=True)
    kept = by_kind(Layer(latent if word == FULL else delta, experts if has else dense) for word, has in kinds)
    return replace(_decoder(config, kept), residual_block=config.count("attn_res_block_size", 0))


def read_nemotron_h(config: Config) -> Decoder:
    """Layers of one block each: state space (Mamba-2), attention, feed-forward or experts."""
    words = _block_words(config)
    mamba = Mamba2(
        heads=config.size("mamba_num_heads"),
        head_size=config.size("mamba_head_dim"),
        groups=config.size(config.first("n_groups", "mamba_n_groups")),
        state=config.size("ssm_state_size"),
        conv=config.size(config.first("conv_kernel", "mamba_d_conv")),
        chunk=config.size(config.first("chunk_size", "mamba_chunk_size")),
        bias=config.flag("use_bias", False),
        conv_bias=config.flag("use_conv_bias", True),
        state_bytes=_state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    bias = config.flag("mlp_bias", False)
    kinds: dict[str, Layer] = {
        "mamba": Layer(mamba, None),
        "attention": Layer(_softmax_of(config), None),
        "mlp": Layer(None, None),
        "moe": Layer(None, None),
    }
    if "mlp" in words:
        kinds["mlp"] = Layer(None, Dense(config.size("intermediate_size"), gated=False, bias=bias))
    if "moe" in words:
        count = config.size("n_routed_experts")
        shared = config.size("moe_shared_expert_intermediate_size") if config.count("n_shared_experts", 1) else 0
        experts = Experts(
            count,
            top_k(config, count),
            config.size("moe_intermediate_size"),
            shared,
            gated=False,
            bias=bias,
            latent=config.count("moe_latent_size", 0),
        )
        kinds["moe"] = Layer(None, experts)
    return _decoder(config, by_kind(kinds[word] for word in words))


def _softmax_of(config: Config) -> Attention:
    """Attention of Nemotron-H, without rotary embedding; older configs call the width of a head otherwise."""
    heads = config.size("num_attention_heads")
    size = config.size(config.first("head_dim", "attention_head_dim"))
    return Attention(heads, kv_heads(config, heads), size, rotary=False, window=config.count("sliding_window", 0))


def _block_words(config: Config) -> list[str]:
    """What stands in each layer: the list or the pattern of letters, which say how many there are."""
    pattern = config.values.get("hybrid_override_pattern")
    given = config.values.get("layers_block_type", config.values.get("layer_types"))
    if given is None and pattern is None:
        raise InputError(f"{config.name}: config has no 'hybrid_override_pattern' and no 'layers_block_type'; add one")
    if given is None:
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(HYBRID_PATTERN):
            raise InputError(
                f"{config.name}: hybrid_override_pattern is {shown(pattern)}, expected letters of "
                f"{', '.join(HYBRID_PATTERN)}"
            )
        given = [HYBRID_PATTERN[letter] for letter in pattern]
    words = (*HYBRID_PATTERN.values(), *BLOCK_NAMES)
    if not isinstance(given, list) or not given or not all(isinstance(word, str) and word in words for word in given):
        raise InputError(f"{config.name}: layers_block_type is {shown(given)}, expected a list of {', '.join(words)}")
    if config.has("num_hidden_layers") and config.layers() != len(given):
        raise InputError(
            f"{config.name}: num_hidden_layers is {config.layers()} but {len(given)} layers are listed; "
            "expected the same number"
        )
    return [BLOCK_NAMES.get(str(word), str(word)) for word in given]


def read_granite_hybrid(config: Config) -> Decoder:
    """Mamba-2 or attention, then experts, if any, and a feed-forward block all tokens share."""
    layers, hidden = config.layers(), config.size("hidden_size")
    inner = int(config.number("mamba_expand", 2) * hidden)
    heads = config.size("mamba_n_heads")
    if inner % heads:
        raise InputError(f"{config.name}: mamba_n_heads {heads} does not divide {inner} features")
    mamba = Mamba2(
        heads=heads,
        head_size=inner // heads,
        groups=config.size("mamba_n_groups"),
        state=config.size("mamba_d_state"),
        conv=config.size("mamba_d_conv"),
        chunk=config.size("mamba_chunk_size"),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        state_bytes=_state_bytes(config, "mamba_ssm_cache_dtype"),
    )
    bias = config.flag("attention_bias", False)
    attention = _softmax(
        config, bias=bias, output_bias=bias, rotary=config.values.get("position_embedding_type") == "rope"
    )
    words = config.listed(
        config.first("layer_types", "layers_block_type"), layers, ("mamba", "attention", LINEAR, FULL)
    )
    if words is None:
        words = ["mamba"] * layers
    shared = config.count("shared_intermediate_size", 0)
    count = config.count("num_local_experts", 0)
    block: FeedForward = (
        Dense(shared) if not count else Experts(count, top_k(config, count), config.size("intermediate_size"), shared)
    )
    mixers = [mamba if word in ("mamba", LINEAR) else attention for word in words]
    return _decoder(config, by_kind(Layer(mixer, block) for mixer in mixers))
