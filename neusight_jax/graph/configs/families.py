"""Decoders from config to layers: the pieces readers share, and the reader of all types that are a row of traits.

The tables are in model_types.yaml. Source: the modelling code of Hugging Face `transformers` 5.24 for each type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Attention, Decoder, Dense, Experts, FeedForward, Layer, Mixer, by_kind
from neusight_jax.graph.configs.config import Config
from neusight_jax.tables import table

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Words of `layer_types` for softmax attention."""


@dataclass(frozen=True)
class Traits:
    """Traits that tell one type from another beside sizes.

    Attributes:
      bias, output_bias, mlp_bias, head_bias: of projections: always, never, or as the key named says.
      qk_norm: as in `Attention`, where the key `qk_norm_if` (if any) is true; sinks: as there.
      gated: three matrices in a feed-forward block.
      norm_weights: vectors of weights of a norm; sandwich, post_norm, parallel: as in `Layer`.
      windowed: which layers have the window where `layer_types` does not say; opt_in: only if `use_sliding_window`.
      experts: how the keys of the experts are spelled.
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
    parallel: bool | str = False
    windowed: str = "all"
    opt_in: bool = False
    experts: str = ""
    head_bias: bool | str = False
    sinks: bool = False


TRAITS: dict[str, Traits] = {
    kind: Traits(**row) for kind, row in table("graph.configs", "model_types")["traits"].items()
}
"""Types that are a row of the table."""


def trait(config: Config, flag: bool | str) -> bool:
    """A trait that is always so, or as the key it names says."""
    return config.flag(flag, False) if isinstance(flag, str) else flag


def sizes(config: Config, kind: str) -> dict[str, Any]:
    """The sizes of a record of `blocks`, under the keys the table has for it."""
    rows = table("graph.configs", "model_types")["sizes"][kind]
    return {name: config.size(config.first(*keys)) for name, keys in rows.items()}


def kv_heads(config: Config, heads: int, key: str = "num_key_value_heads") -> int:
    """Heads of keys and values, as many as of queries where nothing says how many; they divide those."""
    count = config.size(config.first(key, "num_attention_groups"), heads)
    if heads % count:
        raise InputError(
            f"{config.name}: num_attention_heads {heads} is not divisible by {key} {count}; expected a multiple"
        )
    return count


def attention(config: Config, **options: Any) -> Attention:
    """Softmax attention of the usual keys; the width of a head is said, the class's, or the model's over its heads."""
    heads = config.size("num_attention_heads")
    shared, explicit = kv_heads(config, heads), config.has("head_dim")
    size = config.size("head_dim") if explicit else config.head_size("hidden_size", "num_attention_heads")
    return Attention(heads, shared, size, **options)


def decoder(
    config: Config,
    mixers: Iterable[Mixer | None],
    blocks: Iterable[FeedForward | None],
    *,
    tied: bool = False,
    layer: dict[str, Any] | None = None,
    **options: Any,
) -> Decoder:
    """A decoder with a mixer and a feed-forward block in each layer.

    Args:
      config: the sizes that all decoders have are read from it.
      mixers, blocks: of every layer, None = it has none.
      tied: whether head and embedding are one where the config does not say.
      layer, options: of `Layer`, of `Decoder`.
    """
    return Decoder(
        hidden=config.size("hidden_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", tied),
        layers=by_kind(Layer(*pair, **(layer or {})) for pair in zip(mixers, blocks, strict=True)),
        **options,
    )


def read_family(config: Config) -> Decoder:
    """The layers of a type of the table."""
    kind = str(config.values["model_type"])
    traits, layers = TRAITS[kind], config.layers()
    windows = _windows(config, layers, traits)
    wants_norm = not traits.qk_norm_if or config.flag(traits.qk_norm_if, False)
    mixer = attention(
        config,
        bias=trait(config, traits.bias),
        output_bias=trait(config, traits.output_bias),
        qk_norm=traits.qk_norm if wants_norm else "",
        sinks=traits.sinks,
    )
    config.listed("attn_type_list", layers, (1,))  # MiniMax: 0 is its linear attention
    if config.flag("qk_layernorm", False) and kind == "stablelm":
        raise InputError(f"{config.name}: qk_layernorm true is not supported: norms of queries and keys by head")
    pairs = zip(windows, rotary_layers(config, layers), strict=True)
    block = {"sandwich": traits.sandwich, "post_norm": traits.post_norm, "parallel": trait(config, traits.parallel)}
    dense = Dense(0, traits.gated, trait(config, traits.mlp_bias))
    return decoder(
        config,
        [replace(mixer, window=window, rotary=rotary) for window, rotary in pairs],
        feed_forward(config, layers, traits.experts, dense=dense),
        layer=block,
        norm_weights=traits.norm_weights,
        head_bias=trait(config, traits.head_bias),
    )


def _windows(config: Config, layers: int, traits: Traits) -> list[int]:
    """Attention window of each layer, 0 for none."""
    types = config.listed("layer_types", layers, (FULL, SLIDING))
    if types is not None and SLIDING not in types:
        return [0] * layers
    if (traits.windowed == "none" and types is None) or not config.flag("use_sliding_window", not traits.opt_in):
        return [0] * layers
    size = config.count("sliding_window", 0)
    if types is not None:
        if not size:
            raise InputError(f"{config.name}: layer_types has {SLIDING} but sliding_window is absent; add it")
        return [size * (word == SLIDING) for word in types]
    return [size * has for has in _windowed(config, layers, traits.windowed)]


def _windowed(config: Config, layers: int, rule: str) -> list[bool]:
    """Whether each layer has the window."""
    key = config.first("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(config.values.get(key), str | list):  # as letters, for types of any rule
        return [word == SLIDING for word in config.listed(key, layers, (SLIDING, FULL)) or []]
    if rule == "upper":  # layers from max_window_layers on
        first = config.count("max_window_layers", 0)
        return [at >= first for at in range(layers)]
    if rule == "lower_alternate":
        last = config.count("max_window_layers", layers)
        return [at % 2 == 0 and at < last for at in range(layers)]
    if rule == "no_rope":
        return [not rotary for rotary in rotary_layers(config, layers)]
    if rule.startswith("pattern:"):
        every = config.size(key, int(rule.removeprefix("pattern:")))
        return [every == 1 or (at + 1) % every != 0 for at in range(layers)]
    return [True] * layers


def rotary_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer rotates queries and keys: `no_rope_layers` (1 = it does), or all but every n-th."""
    flags = config.listed("no_rope_layers", layers, (0, 1)) if config.values.get("no_rope_layers") else None
    if flags:
        return [flag == 1 for flag in flags]
    every = config.count("no_rope_layer_interval", 0)
    return [not every or (at + 1) % every != 0 for at in range(layers)]


def feed_forward(
    config: Config,
    layers: int,
    kind: str,
    sparse: Sequence[bool] | None = None,
    *,
    dense: Dense | None = None,
    key: str = "intermediate_size",
) -> list[FeedForward]:
    """The feed-forward block of each layer.

    Args:
      config: of the decoder.
      layers: how many it has.
      kind: how the keys of experts are spelled, "" = there are none.
      sparse: which layers have experts, where the spelling does not say it.
      dense: the blocks of the other layers.
      key: of their width.
    """
    has = sparse
    if has is None or not kind:
        rule = table("graph.configs", "model_types")["experts"][kind].get("sparse") if kind else None
        has = SPARSE[rule](config, layers) if rule else [bool(kind)] * layers
    experts = read_experts(config, kind) if kind else None
    plain = dense or Dense(0)
    if experts is None or not all(has):
        plain = replace(plain, inner=config.size(key))
    return [experts if experts is not None and routed else plain for routed in has]


def read_experts(config: Config, kind: str) -> Experts:
    """Experts as a row of the table spells them; a token takes at most as many as there are."""
    row = dict(table("graph.configs", "model_types")["experts"][kind])
    row.pop("sparse", None)
    count = config.size(config.first(*row.pop("count")))
    key = config.first(*row.pop("top_k", ("num_experts_per_tok",)))
    chosen = config.size(key)
    if chosen > count:
        raise InputError(f"{config.name}: {key} is {chosen}, expected at most the {count} experts there are")
    inner = config.size(config.first(*row.pop("inner")))
    shared_keys, times, usual = row.pop("shared", None), row.pop("times", None), row.pop("usual_times", 0)
    shared = config.count(config.first(*shared_keys), 0) if shared_keys else inner
    shared *= config.count(config.first(*times), usual) if times else bool(shared_keys)
    flags = {name: trait(config, flag) for name, flag in row.items()}
    return Experts(count, chosen, inner, shared, **{**flags, "shared_gate": "shared_gate" in flags and shared > 0})


def sparse_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has experts: `mlp_layer_types`, `moe_layer_freq` (list or step) or those after the first."""
    types = config.listed("mlp_layer_types", layers, ("dense", "sparse"))
    if types is not None:
        return [word == "sparse" for word in types]
    first = config.count("first_k_dense_replace", 0)
    if isinstance(config.values.get("moe_layer_freq"), list):
        return [flag == 1 for flag in config.listed("moe_layer_freq", layers, (0, 1)) or []]
    step = config.size("moe_layer_freq", 1)
    return [at >= first and at % step == 0 for at in range(layers)]


def _by_step(config: Config, layers: int) -> list[bool]:
    dense, step = config.indices("mlp_only_layers"), config.size("decoder_sparse_step", 1)
    return [at not in dense and (at + 1) % step == 0 for at in range(layers)]


def _by_interval(config: Config, layers: int) -> list[bool]:
    first, step = config.count("moe_layer_start_index", 0), config.size("moe_layer_interval", 1)
    last = config.values.get("moe_layer_end_index")
    end = layers - 1 if last in (None, -1) else config.count("moe_layer_end_index")
    return [(at + 1) % step == 0 and first <= at <= end for at in range(layers)]


SPARSE: dict[str, Callable[[Config, int], list[bool]]] = {
    "first": sparse_layers,
    "step": _by_step,
    "interval": _by_interval,
}
"""Rules for which layers have experts, by the table's word."""
