"""Decoders with latent attention (DeepSeek and its descendants): from config to layers.

Sources: modelling code of Hugging Face `transformers` 5.24 (`deepseek_v2`, `deepseek_v3`, `deepseek_v32`,
`glm_moe_dsa`, `glm4_moe_lite`, `mistral4`, `deepseek_v4`); multi-head latent attention after DeepSeek-V2 (2024).
"""

from __future__ import annotations

from dataclasses import replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Compressed,
    Decoder,
    Dense,
    Experts,
    FeedForward,
    Indexer,
    Latent,
    Layer,
    by_kind,
)
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.families import deepseek_experts, top_k

INDEXED: tuple[str, ...] = ("deepseek_v32", "glm_moe_dsa")
"""Types whose attention sees keys that an indexer chose."""
LATENT_TYPES: tuple[str, ...] = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", *INDEXED)
"""Types `read_latent` reads."""
RATIO_LAYERS: dict[int, str] = {0: "sliding_attention", 4: "compressed_sparse_attention"}
"""DeepSeek-V4's `compress_ratios` as layer types; every other ratio is heavily compressed attention."""
HEAVY = "heavily_compressed_attention"


def latent_attention(config: Config, heads: int) -> Latent:
    """Latent attention of a config, without indexer."""
    return Latent(
        heads=heads,
        query_rank=config.count("q_lora_rank", 0),
        kv_rank=config.size("kv_lora_rank"),
        nope=config.size("qk_nope_head_dim"),
        rope=config.size("qk_rope_head_dim"),
        value=config.size("v_head_dim"),
        bias=config.flag("attention_bias", False),
    )


def read_latent(config: Config) -> Decoder:
    """The layers of a type in `LATENT_TYPES`."""
    kind = str(config.values["model_type"])
    layers, hidden = config.layers(), config.size("hidden_size")
    attention = latent_attention(config, config.size("num_attention_heads"))
    mixers = [attention] * layers
    if kind in INDEXED:
        indexer = _indexer(config, attention.query_rank)
        chosen = replace(attention, indexer=indexer)
        # A layer without an indexer of its own sees the keys chosen for the layer before.
        reused = replace(attention, indexer=replace(indexer, heads=0))
        mixers = [chosen if own else reused for own in _own_indexers(config, layers)]
    return Decoder(
        hidden=hidden,
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", False),
        layers=by_kind(Layer(mixer, block) for mixer, block in zip(mixers, _blocks(config, kind, layers), strict=True)),
    )


def _blocks(config: Config, kind: str, layers: int) -> list[FeedForward]:
    key = config.first("n_routed_experts", "num_experts", "num_local_experts")
    if not config.has(key) and kind in ("deepseek_v2", "deepseek_v3"):
        return [Dense(config.size("intermediate_size"))] * layers
    experts, sparse = deepseek_experts(config, layers)
    dense = None if all(sparse) else Dense(config.size("intermediate_size"))
    return [experts if has or dense is None else dense for has in sparse]


def _indexer(config: Config, query_rank: int) -> Indexer:
    if not query_rank:
        raise InputError(f"{config.name}: config has no 'q_lora_rank'; the indexer reads queries of that rank, add it")
    size = config.size("index_head_dim")
    return Indexer(
        heads=config.size("index_n_heads"),
        size=size,
        top_k=config.size("index_topk"),
        query_rank=query_rank,
        block=1,
        norms=2 * size,
        head_weights=True,
    )


def _own_indexers(config: Config, layers: int) -> list[bool]:
    """Which layers choose keys themselves; the others take what the layer before chose."""
    words = config.listed("indexer_types", layers, ("full", "shared"))
    pattern = config.values.get("index_topk_pattern")
    if words is None and isinstance(pattern, str):
        spelled = replace_values(config, index_topk_pattern=list(pattern))
        letters = spelled.listed("index_topk_pattern", layers, ("F", "S")) or []
        return [letter == "F" for letter in letters]
    if words is None:
        every, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
        return [max(at - offset + 1, 0) % every == 0 for at in range(layers)]
    return [word == "full" for word in words]


def replace_values(config: Config, **values: object) -> Config:
    """A config with some values in another form."""
    return Config(config.name, {**config.values, **values}, config.defaults)


def read_deepseek_v4(config: Config) -> Decoder:
    """Windowed layers, compressed ones with an indexer, heavily compressed ones; residual streams; hashed experts."""
    layers, hidden = config.layers(), config.size("hidden_size")
    inner = config.size(config.first("moe_intermediate_size", "intermediate_size"))
    count = config.size(config.first("n_routed_experts", "num_local_experts"))
    experts = Experts(count, top_k(config, count), inner, inner * config.count("n_shared_experts", 1))
    heads, groups = config.size("num_attention_heads"), config.size("o_groups")
    if heads % groups:
        raise InputError(f"{config.name}: num_attention_heads {heads} is not divisible by o_groups {groups}")
    size = config.size("index_head_dim")
    indexer = Indexer(
        heads=config.size("index_n_heads"),
        size=size,
        top_k=config.size("index_topk"),
        query_rank=config.size("q_lora_rank"),
        block=1,
        norms=size,
        head_weights=True,
    )
    plain = Compressed(
        heads=heads,
        head_size=config.size("head_dim"),
        query_rank=config.size("q_lora_rank"),
        output_groups=groups,
        output_rank=config.size("o_lora_rank"),
        window=config.size("sliding_window"),
        ratio=0,
        overlap=False,
        indexer=None,
    )
    rates = config.part("compress_rates")
    sparse, heavy = rates.size(RATIO_LAYERS[4], 4), rates.size(HEAVY, 128)
    mixers = {
        RATIO_LAYERS[0]: plain,
        RATIO_LAYERS[4]: replace(plain, ratio=sparse, overlap=True, indexer=indexer),
        HEAVY: replace(plain, ratio=heavy),
    }
    return Decoder(
        hidden=hidden,
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", False),
        layers=by_kind(Layer(mixers[word], experts) for word in _v4_layers(config, layers, heavy)),
        streams=config.size("hc_mult", most=64),
    )


def _v4_layers(config: Config, layers: int, heavy: int) -> list[str]:
    words = config.listed("layer_types", layers, (*RATIO_LAYERS.values(), HEAVY))
    if words is not None:
        return words
    ratios = config.listed("compress_ratios", layers, (0, 4, heavy))
    if ratios is not None:
        return [RATIO_LAYERS.get(ratio, HEAVY) for ratio in ratios]
    return [RATIO_LAYERS[4] if at % 2 and at > 2 else HEAVY for at in range(layers)]
