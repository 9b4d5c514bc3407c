"""Decoder-only language models with gated feed-forward blocks, dense or with experts, one table for all of them.

Sources: the `config.json` keys and modelling code of Hugging Face `transformers` for each `model_type`; multi-head
latent attention after DeepSeek-V2 (2024), absorbed into one wide KV head when decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from neusight_jax.errors import InputError
from neusight_jax.graph.config import Config
from neusight_jax.graph.step import Step

MODEL_TYPES: tuple[str, ...] = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"),
)
"""Architectures this file writes."""
QK_NORM: tuple[str, ...] = ("qwen3", "qwen3_moe", "gemma3_text")
"""Those that norm queries and keys head by head."""
SANDWICH_NORM: tuple[str, ...] = ("gemma2", "gemma3_text")
"""Those that also norm what attention and feed-forward block return."""
WINDOW_EVERY: dict[str, int] = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""Those with windows in all layers but every n-th."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of the queries (0 = none) and of keys and values, and widths of a head."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """Routed experts: how many, how many a token takes, their width, and the width of those all tokens share."""

    count: int
    top_k: int
    inner: int
    shared: int


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, this device's part of them under tensor and expert parallelism.

    Attributes:
      windows: indices of layers by attention window (0 = none) and by whether they have experts.
    """

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    tied: bool
    latent: Latent | None
    experts: Experts | None
    windows: Mapping[tuple[int, bool], list[int]]


def read_decoder(config: Config, context: int) -> Decoder:
    """Sizes from a config; `InputError` naming the key that is missing, or a `context` beyond the model's."""
    kind = str(config.values["model_type"])
    hidden, layers, heads = (config.size(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    config.limit_sequence(context, "max_position_embeddings")
    latent = None
    if kind.startswith("deepseek"):
        latent = Latent(
            config.count("q_lora_rank", 0),
            config.size("kv_lora_rank"),
            config.size("qk_nope_head_dim"),
            config.size("qk_rope_head_dim"),
            config.size("v_head_dim"),
        )
    explicit = config.values.get("head_dim")
    head = (
        config.size("head_dim")
        if explicit
        else hidden // heads
        if latent
        else config.head_size("hidden_size", "num_attention_heads")
    )
    experts = _experts(config, kind)
    windows: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for at in range(layers):
        windows[_window(config, kind, at), _has_experts(config, kind, at, experts)].append(at)
    return Decoder(
        kind=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=head,
        inner=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings", kind.startswith("gemma")),
        latent=latent,
        experts=experts,
        windows=dict(windows),
    )


def _experts(config: Config, kind: str) -> Experts | None:
    if kind in ("mixtral", "gpt_oss"):
        return Experts(
            config.size("num_local_experts"), config.size("num_experts_per_tok"), config.size("intermediate_size"), 0
        )
    if kind in ("qwen2_moe", "qwen3_moe"):
        shared = config.count("shared_expert_intermediate_size", 0)
        inner = config.size("moe_intermediate_size")
        return Experts(config.size("num_experts"), config.size("num_experts_per_tok"), inner, shared)
    if kind.startswith("deepseek") and config.values.get("n_routed_experts"):
        inner = config.size("moe_intermediate_size")
        shared = inner * config.count("n_shared_experts", 0)
        return Experts(config.size("n_routed_experts"), config.size("num_experts_per_tok"), inner, shared)
    return None


def _has_experts(config: Config, kind: str, layer: int, experts: Experts | None) -> bool:
    if experts is None:
        return False
    if kind.startswith("deepseek"):
        return layer >= config.count("first_k_dense_replace", 0) and layer % config.size("moe_layer_freq", 1) == 0
    if layer in config.values.get("mlp_only_layers", ()):
        return False
    return (layer + 1) % config.size("decoder_sparse_step", 1) == 0


def _window(config: Config, kind: str, layer: int) -> int:
    """Attention window of a layer, 0 for none."""
    size = config.values.get("sliding_window")
    if not size or (kind.startswith("qwen") and not config.flag("use_sliding_window", False)):
        return 0
    types = config.values.get("layer_types")
    if types:
        return int(size) if types[layer] == "sliding_attention" else 0
    if kind == "gpt_oss":
        return int(size) if layer % 2 == 0 else 0
    every = config.size("sliding_window_pattern", WINDOW_EVERY.get(kind, 1))
    return int(size) if every == 1 or (layer + 1) % every else 0


def record(step: Step, config: Config, mode: str, tensor_parallel: int = 1, expert_parallel: int = 1) -> None:
    """Write one step of a decoder.

    Args:
      mode: "prefill" and "decode" return the logits of each request's last token only, the others of all tokens.
      tensor_parallel, expert_parallel: devices the layers, or the experts, are split over; what one of them does.
    """
    model = read_decoder(config, max(step.requests.context))
    _check_split(config, model, tensor_parallel, expert_parallel)
    tokens = step.requests.tokens
    vocabulary = -(-model.vocabulary // tensor_parallel)
    step.weight(float(vocabulary) * model.hidden, step.precision.activations)
    step.stream("embedding", "stream", "embedding", tokens, model.hidden, 1, 1)
    for (window, has_experts), layers in model.windows.items():
        words = ["window"] * bool(window) + ["experts"] * (has_experts and len(model.windows) > 1)
        with step.section("_".join(["layer", *words]), len(layers), layers):
            _attention(step, model, window, tensor_parallel, mode)
            step.norm("mlp_norm", tokens, model.hidden, residual=True)
            if has_experts and model.experts is not None:
                _experts_block(step, model, model.experts, tensor_parallel, expert_parallel)
            else:
                _feed_forward(step, "mlp", model.hidden, model.inner // tensor_parallel)
            if model.kind in SANDWICH_NORM:
                step.norm("mlp_post_norm", tokens, model.hidden)
    step.norm("norm", tokens, model.hidden, residual=True)
    rows = len(step.requests.queries) if mode in ("prefill", "decode") else tokens
    step.linear("head", rows, vocabulary, model.hidden, dtype=step.precision.activations, tied=model.tied)
    if mode in ("prefill", "decode"):
        step.stream("sampling", "reduction", "softmax", rows, vocabulary, 1, 1)


def _check_split(config: Config, model: Decoder, tensor_parallel: int, expert_parallel: int) -> None:
    if model.heads % tensor_parallel or model.inner % tensor_parallel:
        raise InputError(
            f"{config.name}: {model.heads} heads do not split over {tensor_parallel} GPUs; expected a divisor"
        )
    if model.experts is None and expert_parallel > 1:
        raise InputError(f"{config.name} has no experts; leave expert_parallel out")
    if model.experts is not None and model.experts.count % expert_parallel:
        raise InputError(
            f"{config.name}: {model.experts.count} experts do not split over expert_parallel={expert_parallel}; "
            "expected a divisor"
        )


def _attention(step: Step, model: Decoder, window: int, split: int, mode: str) -> None:
    tokens, hidden, size = step.requests.tokens, model.hidden, model.head_size
    heads, kv_heads = model.heads // split, max(model.kv_heads // split, 1)
    step.norm("attention_norm", tokens, hidden, residual=True)
    if model.latent is not None:
        _latent_attention(step, model, model.latent, heads, mode)
    else:
        step.linear("attention.qkv", tokens, (heads + 2 * kv_heads) * size, hidden)
        if model.kind in QK_NORM:
            step.norm("attention.qk_norm", tokens * (heads + kv_heads), size)
        step.stream("attention.rotary", "stream", "pointwise", tokens, (heads + kv_heads) * size, 1, 1)
        cache = 2.0 * kv_heads * size
        step.attention(
            "attention", heads=heads, kv_heads=kv_heads, head_size=size, cache_per_token=cache, window=window
        )
        step.linear("attention.output", tokens, hidden, heads * size)
    if model.kind in SANDWICH_NORM:
        step.norm("attention_post_norm", tokens, hidden)


def _latent_attention(step: Step, model: Decoder, latent: Latent, heads: int, mode: str) -> None:
    """Keys and values from one small vector a token; when decoding, queries meet that vector itself."""
    tokens, hidden = step.requests.tokens, model.hidden
    query = latent.nope + latent.rope
    small = latent.kv_rank + latent.rope
    if latent.query_rank:
        step.linear("attention.qkv_down", tokens, latent.query_rank + small, hidden)
        step.norm("attention.query_norm", tokens, latent.query_rank)
        step.linear("attention.query_up", tokens, heads * query, latent.query_rank)
    else:
        step.linear("attention.qkv", tokens, heads * query + small, hidden)
    step.norm("attention.kv_norm", tokens, latent.kv_rank)
    step.stream("attention.rotary", "stream", "pointwise", tokens, (heads + 1) * latent.rope, 1, 1)
    if mode == "decode":
        step.batched("attention.key_absorb", heads, tokens, latent.kv_rank, latent.nope)
        width = (small + latent.kv_rank) / 2.0
        step.attention("attention", heads=heads, kv_heads=1, head_size=width, cache_per_token=small)
        step.batched("attention.value_absorb", heads, tokens, latent.value, latent.kv_rank)
    else:
        step.linear("attention.kv_up", tokens, heads * (latent.nope + latent.value), latent.kv_rank)
        width = (query + latent.value) / 2.0
        # What stays is the small vector, not the keys and values made of it.
        read = heads * 2.0 * width
        step.attention(
            "attention", heads=heads, kv_heads=heads, head_size=width, cache_per_token=read, kept_per_token=small
        )
    step.linear("attention.output", tokens, hidden, heads * latent.value)


def _feed_forward(step: Step, name: str, hidden: int, inner: int) -> None:
    tokens = step.requests.tokens
    step.linear(f"{name}.gate_up", tokens, 2 * inner, hidden)
    step.stream(f"{name}.activation", "stream", "pointwise", tokens, inner, 2, 1, grad=5.0 / 3.0)
    step.linear(f"{name}.down", tokens, hidden, inner)


def _experts_block(step: Step, model: Decoder, experts: Experts, split: int, expert_parallel: int) -> None:
    tokens = step.requests.tokens
    step.linear("mlp.router", tokens, experts.count, model.hidden, dtype=step.precision.activations)
    step.stream("mlp.top_k", "reduction", "softmax", tokens, experts.count, 1, 1)
    if experts.shared:
        _feed_forward(step, "mlp.shared", model.hidden, experts.shared // split)
    step.experts(
        "mlp.experts",
        experts=experts.count,
        top_k=experts.top_k,
        hidden=model.hidden,
        inner=experts.inner,
        expert_parallel=expert_parallel,
        tensor_parallel=split,
    )
