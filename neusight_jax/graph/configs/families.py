"""Decoders whose layers are an attention and a feed-forward block: from config to layers, by a table of traits.

Source: the modelling code of Hugging Face `transformers` 5.24 for each `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Attention, Decoder, Dense, Experts, FeedForward, Layer, by_kind
from neusight_jax.graph.configs.config import Config

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LAYER_TYPES: tuple[str, ...] = (FULL, SLIDING, CHUNKED)
"""Words of `layer_types` for softmax attention."""


@dataclass(frozen=True)
class Traits:
    """What tells one type from another beside sizes.

    Attributes:
      bias, output_bias, mlp_bias: of projections: always, never, or as the key named says.
      qk_norm: as in `Attention`, where the key `qk_norm_if` (if any) is true.
      gated: three matrices in a feed-forward block.
      norm_weights: vectors of weights of a norm; sandwich, post_norm, parallel: as in `Layer`.
      windowed: which layers have the window where `layer_types` does not say; opt_in: only if `use_sliding_window`.
      experts: how the keys of the experts are spelled.
      head_bias: of the head.
    """

    bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: str = ""
    qk_norm_if: str = ""
    gated: bool = True
    norm_weights: int = 1
    sandwich: bool = False
    post_norm: bool = False
    parallel: bool = False
    windowed: str = "all"
    opt_in: bool = False
    experts: str = ""
    head_bias: bool | str = False


_BOTH = Traits(bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN2 = Traits(bias=True, windowed="upper", opt_in=True)
_QWEN3 = Traits(bias="attention_bias", output_bias="attention_bias", qk_norm="head", windowed="upper", opt_in=True)
_GEMMA = Traits(bias="attention_bias", output_bias="attention_bias")
_GLM = Traits(bias="attention_bias")
_GLM_MOE = Traits(bias="attention_bias", qk_norm="head", qk_norm_if="use_qk_norm", experts="deepseek")

TRAITS: dict[str, Traits] = {
    "llama": replace(_BOTH, windowed="none"),
    "mistral": Traits(),
    "ministral": Traits(),
    "ministral3": Traits(),
    "mixtral": Traits(experts="mixtral"),
    "phi3": Traits(),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "mimo": _QWEN2,
    "qwen2_moe": replace(_QWEN2, windowed="lower_alternate", experts="qwen"),
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, windowed="none"),
    "qwen3_moe": replace(_QWEN3, windowed="all", experts="qwen"),
    "qwen3_vl_moe_text": replace(_QWEN3, windowed="none", experts="qwen"),
    "gemma": replace(_GEMMA, windowed="none"),
    "gemma2": replace(_GEMMA, sandwich=True, windowed="pattern:2"),
    "gemma3_text": replace(_GEMMA, sandwich=True, qk_norm="head", windowed="pattern:6"),
    "gpt_oss": Traits(bias="attention_bias", output_bias="attention_bias", windowed="pattern:2", experts="gpt_oss"),
    "glm": replace(_GLM, windowed="none"),
    "glm4": replace(_GLM, sandwich=True, windowed="none"),
    "glm4v_text": Traits(bias=True, sandwich=True, windowed="none"),
    "glm4_moe": replace(_GLM_MOE, windowed="none"),
    "glm4v_moe_text": Traits(bias="attention_bias", windowed="none", experts="deepseek"),
    "solar_open": Traits(bias="attention_bias", windowed="none", experts="deepseek"),
    "dots1": Traits(
        bias="attention_bias", output_bias="attention_bias", qk_norm="head", windowed="upper", experts="deepseek"
    ),
    "minimax_m2": Traits(qk_norm="whole", windowed="none", experts="mixtral"),
    "granite": replace(_BOTH, windowed="none"),
    "granitemoe": Traits(bias="attention_bias", output_bias="attention_bias", windowed="none", experts="mixtral"),
    "olmo": Traits(bias="attention_bias", output_bias="attention_bias", norm_weights=0, windowed="none"),
    "olmo2": Traits(
        bias="attention_bias", output_bias="attention_bias", qk_norm="whole", post_norm=True, windowed="none"
    ),
    "olmo3": Traits(
        bias="attention_bias", output_bias="attention_bias", qk_norm="whole", post_norm=True, windowed="pattern:4"
    ),
    "olmoe": Traits(
        bias="attention_bias", output_bias="attention_bias", qk_norm="whole", windowed="none", experts="olmoe"
    ),
    "smollm3": replace(_BOTH, windowed="no_rope", opt_in=True),
    "cohere": Traits(
        bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="whole",
        qk_norm_if="use_qk_norm",
        parallel=True,
        windowed="none",
    ),
    "cohere2": Traits(bias="attention_bias", output_bias="attention_bias", parallel=True, windowed="pattern:4"),
    "starcoder2": Traits(bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", gated=False, norm_weights=2),
    "seed_oss": Traits(bias="attention_bias", output_bias="attention_out_bias", mlp_bias="mlp_bias", windowed="none"),
    "ernie4_5": Traits(bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", windowed="none"),
    "ernie4_5_moe": Traits(
        bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", windowed="none", experts="ernie"
    ),
    "hunyuan_v1_dense": Traits(bias="attention_bias", output_bias="attention_bias", qk_norm="head", windowed="none"),
    "exaone4": Traits(qk_norm="head", post_norm=True, windowed="pattern:4"),
    "nemotron": replace(_BOTH, gated=False, norm_weights=2, windowed="none"),
    "arcee": replace(_BOTH, gated=False, windowed="none"),
    "stablelm": Traits(bias="use_qkv_bias", norm_weights=2, windowed="none"),
    "phimoe": Traits(
        bias="attention_bias",
        output_bias="attention_bias",
        norm_weights=2,
        experts="mixtral",
        head_bias="lm_head_bias",
    ),
}
"""Types this file reads."""


def said(config: Config, flag: bool | str) -> bool:
    """A trait that is always so, or as the key it names says."""
    return config.flag(flag, False) if isinstance(flag, str) else flag


def head_size(config: Config) -> int:
    """Width of a head: said, the class's, or the model's over its heads."""
    return config.size("head_dim") if config.has("head_dim") else config.head_size("hidden_size", "num_attention_heads")


def kv_heads(config: Config, heads: int, key: str = "num_key_value_heads") -> int:
    """Heads of keys and values, as many as of queries where nothing says how many; they divide those."""
    count = config.size(config.first(key, "num_attention_groups"), heads)
    if heads % count:
        raise InputError(
            f"{config.name}: num_attention_heads {heads} is not divisible by {key} {count}; expected a multiple"
        )
    return count


def read_family(config: Config) -> Decoder:
    """The layers of a type of the table."""
    kind = str(config.values["model_type"])
    traits = TRAITS[kind]
    layers, heads = config.layers(), config.size("num_attention_heads")
    windows = _windows(config, layers, traits)
    wants_norm = not traits.qk_norm_if or config.flag(traits.qk_norm_if, False)
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_size=head_size(config),
        bias=said(config, traits.bias),
        output_bias=said(config, traits.output_bias),
        qk_norm=traits.qk_norm if wants_norm else "",
        sinks=kind == "gpt_oss",
    )
    if config.flag("qk_layernorm", False) and kind == "stablelm":
        raise InputError(f"{config.name}: qk_layernorm true is not supported: norms of queries and keys by head")
    parallel = traits.parallel or (kind == "stablelm" and config.flag("use_parallel_residual", False))
    blocks = _feed_forward(config, traits, layers)
    return Decoder(
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", False),
        layers=by_kind(
            Layer(
                replace(attention, window=window, rotary=rotary),
                block,
                sandwich=traits.sandwich,
                post_norm=traits.post_norm,
                parallel=parallel,
            )
            for window, block, rotary in zip(windows, blocks, rotary_layers(config, layers), strict=True)
        ),
        norm_weights=traits.norm_weights,
        head_bias=said(config, traits.head_bias),
    )


def _windows(config: Config, layers: int, traits: Traits) -> list[int]:
    """Attention window of each layer, 0 for none."""
    windowed = traits.windowed
    types = config.listed("layer_types", layers, (FULL, SLIDING))
    if types is not None and SLIDING not in types:
        return [0] * layers
    if (windowed == "none" and types is None) or not config.flag("use_sliding_window", not traits.opt_in):
        return [0] * layers
    size = config.count("sliding_window", 0)
    if types is not None:
        if not size:
            raise InputError(f"{config.name}: layer_types has {SLIDING} but sliding_window is absent; add it")
        return [size if word == SLIDING else 0 for word in types]
    if windowed == "upper":
        # Only layers from max_window_layers on have the window.
        first = config.count("max_window_layers", 0)
        return [size if at >= first else 0 for at in range(layers)]
    if windowed == "lower_alternate":
        last = config.count("max_window_layers", layers)
        return [size if at % 2 == 0 and at < last else 0 for at in range(layers)]
    if windowed == "no_rope":
        return [0 if rotary else size for rotary in rotary_layers(config, layers)]
    if windowed.startswith("pattern:"):
        every = config.size("sliding_window_pattern", int(windowed.removeprefix("pattern:")))
        return [size if every == 1 or (at + 1) % every else 0 for at in range(layers)]
    return [size] * layers


def rotary_layers(config: Config, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: `no_rope_layers` (1 = they do), or all but every n-th."""
    flags = config.listed("no_rope_layers", layers, (0, 1)) if config.values.get("no_rope_layers") else None
    if flags:
        return [flag == 1 for flag in flags]
    every = config.count("no_rope_layer_interval", 0)
    return [not every or (at + 1) % every != 0 for at in range(layers)]


def _feed_forward(config: Config, traits: Traits, layers: int) -> list[FeedForward]:
    dense = Dense(0, traits.gated, said(config, traits.mlp_bias))
    if not traits.experts:
        return [replace(dense, inner=config.size("intermediate_size"))] * layers
    experts, sparse = EXPERTS[traits.experts](config, layers)
    if all(sparse):
        return [experts] * layers
    dense = replace(dense, inner=config.size("intermediate_size"))
    return [experts if has else dense for has in sparse]


def top_k(config: Config, count: int, *keys: str) -> int:
    """Experts a token takes, at most as many as there are."""
    key = config.first(*(keys or ("num_experts_per_tok",)))
    chosen = config.size(key)
    if chosen > count:
        raise InputError(f"{config.name}: {key} is {chosen}, expected at most the {count} experts there are")
    return chosen


def _mixtral(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    count = config.size(config.first("num_local_experts", "num_experts"))
    return Experts(count, top_k(config, count), config.size("intermediate_size")), [True] * layers


def _olmoe(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    count = config.size(config.first("num_experts", "num_local_experts"))
    return Experts(count, top_k(config, count), config.size("intermediate_size")), [True] * layers


def _gpt_oss(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    experts, sparse = _mixtral(config, layers)
    return replace(experts, bias=True, router_bias=True), sparse


def qwen_experts(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    """Experts of the Qwen family, and which layers have them."""
    count = config.size("num_experts")
    shared = config.count("shared_expert_intermediate_size", 0)
    experts = Experts(count, top_k(config, count), config.size("moe_intermediate_size"), shared, shared > 0)
    dense, step = config.indices("mlp_only_layers"), config.size("decoder_sparse_step", 1)
    return experts, [at not in dense and (at + 1) % step == 0 for at in range(layers)]


def deepseek_experts(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    """Experts as DeepSeek spells them, and which layers have them."""
    count = config.size(config.first("n_routed_experts", "num_experts", "num_local_experts"))
    inner = config.size("moe_intermediate_size")
    experts = Experts(count, top_k(config, count), inner, inner * config.count("n_shared_experts", 0))
    return experts, sparse_layers(config, layers)


def sparse_layers(config: Config, layers: int) -> list[bool]:
    """Which layers have experts: `mlp_layer_types`, `moe_layer_freq` (a list or a step) or those after the first."""
    types = config.listed("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return [word == "sparse" for word in types]
    first, step = config.count("first_k_dense_replace", 0), config.values.get("moe_layer_freq", 1)
    if isinstance(step, list):
        flags = config.listed("moe_layer_freq", layers, (0, 1)) or []
        return [flag == 1 for flag in flags]
    step = config.size("moe_layer_freq", 1)
    return [at >= first and at % step == 0 for at in range(layers)]


def _ernie(config: Config, layers: int) -> tuple[Experts, list[bool]]:
    count, inner = config.size("moe_num_experts"), config.size("moe_intermediate_size")
    shared = inner * config.count("moe_num_shared_experts", 0)
    experts = Experts(
        count, top_k(config, count, "moe_k"), inner, shared, bias=said(config, "use_bias"), router_bias=True
    )
    first, step = config.count("moe_layer_start_index", 0), config.size("moe_layer_interval", 1)
    last = config.values.get("moe_layer_end_index")
    end = layers - 1 if last in (None, -1) else config.count("moe_layer_end_index")
    return experts, [(at + 1) % step == 0 and first <= at <= end for at in range(layers)]


EXPERTS: dict[str, Callable[[Config, int], tuple[Experts, list[bool]]]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "qwen": qwen_experts,
    "deepseek": deepseek_experts,
    "ernie": _ernie,
}
"""Readers of expert layers by spelling."""
