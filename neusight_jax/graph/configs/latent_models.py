"""Decoders with latent attention (DeepSeek and its descendants): from config to layers.

Sources: modelling code of Hugging Face `transformers` 5.24 (`deepseek_v2`, `deepseek_v3`, `deepseek_v32`,
`glm_moe_dsa`, `glm4_moe_lite`, `mistral4`, `deepseek_v4`); multi-head latent attention after DeepSeek-V2 (2024).
"""

from __future__ import annotations

from dataclasses import replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Compressed, Decoder, Indexer, Latent
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.families import decoder, feed_forward, read_experts, sizes

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
    attention = latent_attention(config)
    mixers = [attention] * layers
    if kind in INDEXED:
        if not attention.query_rank:
            raise InputError(
                f"{config.name}: config has no 'q_lora_rank'; the indexer reads queries of that rank, add it"
            )
        indexer = _indexer(config, attention.query_rank, norms=2)
        chosen = replace(attention, indexer=indexer)
        # A layer without an indexer of its own sees the keys chosen for the layer before.
        reused = replace(attention, indexer=replace(indexer, heads=0))
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
    words = config.listed("indexer_types", layers, ("full", "shared"))
    if words is not None:
        return [word == "full" for word in words]
    words = config.listed("index_topk_pattern", layers, ("full", "shared"))
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
