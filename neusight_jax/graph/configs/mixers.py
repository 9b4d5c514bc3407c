"""Writers of what mixes tokens in a layer: softmax attention, latent attention, one linear layer."""

from __future__ import annotations

from neusight_jax.graph.configs.blocks import Attention, Latent, Square
from neusight_jax.graph.configs.indexing import chosen_keys, write_indexer
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.step import Step
from neusight_jax.kernels.family import number


def write_attention(step: Step, mixer: Attention, hidden: int) -> None:
    """Projections, norms, rotary embedding, attention, gate, output."""
    tokens, heads, kv, size = step.requests.tokens, mixer.heads, mixer.kv_heads, mixer.head_size
    value = mixer.value_size or size
    kv_features = mixer.cached * kv * (size + mixer.values * value)
    gate = heads * value if mixer.gate == "element" else 0
    features = heads * size + kv_features + gate
    parts = (heads * size + gate, mixer.cached * kv * size, mixer.cached * mixer.values * kv * value)
    step.linear("attention.qkv", tokens, features, hidden * mixer.inputs, bias=features * mixer.bias, parts=parts)
    _norms(step, mixer)
    if mixer.rotary:
        turned = (heads + kv * mixer.cached) * size
        step.stream("attention.rotary", "stream", "pointwise", tokens, turned, 1, 1, saved_bytes=0.0)
    if mixer.indexer is not None:
        write_indexer(step, mixer.indexer, hidden, rotary=size)
    step.weight(heads * mixer.sinks)
    read = number(kv * (size + value))
    seen, window = _seen(step, mixer)
    step.attention(
        heads,
        kv,
        (size + value) / 2.0,
        read,
        kept_per_token=None if mixer.cached else 0.0,
        window=window,
        causal=mixer.causal,
        requests=seen,
        kept_tokens=mixer.chunk or (0 if mixer.indexer is not None else None),
    )
    if mixer.gate == "head":
        step.linear("attention.gate", tokens, heads, hidden)
    if mixer.gate:
        step.stream("attention.gated", "stream", "pointwise", tokens, heads * value, 2, 1)
    step.linear("attention.output", tokens, hidden, heads * value, bias=hidden * mixer.output_bias)


def _norms(step: Step, mixer: Attention) -> None:
    heads, kv, size = mixer.heads, mixer.kv_heads * mixer.cached, mixer.head_size
    tokens = step.requests.tokens
    if mixer.qk_norm == "head":
        step.norm("attention.qk_norm", tokens * (heads + kv), size)
        step.weight(size * mixer.cached)  # queries and keys have a norm each
    elif mixer.qk_norm == "whole":
        step.norm("attention.qk_norm", tokens, (heads + kv) * size)
    elif mixer.qk_norm == "plain":
        step.stream("attention.qk_norm", "reduction", "layernorm", tokens * (heads + kv), size, 1, 1, grad=1.5)


def _seen(step: Step, mixer: Attention) -> tuple[Requests | None, int]:
    """Requests as attention sees them, None where it is all there is, and its window."""
    if mixer.indexer is not None:
        return chosen_keys(step.requests, mixer.indexer.top_k)
    if mixer.chunk:
        return in_chunks(step.requests, mixer.chunk), 0
    return None, mixer.window


def in_chunks(requests: Requests, chunk: int) -> Requests:
    """New tokens by the chunk they fall into, each piece a request that sees its own chunk only."""
    queries: list[int] = []
    context: list[int] = []
    for new, length in zip(requests.queries, requests.context, strict=True):
        first = length - new
        while first < length:
            start = first - first % chunk
            end = min(start + chunk, length)
            queries.append(end - first)
            context.append(end - start)
            first = end
    return Requests(tuple(queries), tuple(context))


def write_latent(step: Step, mixer: Latent, hidden: int) -> None:
    """Keys and values from one small vector a token; when decoding, queries meet that vector itself."""
    tokens, heads = step.requests.tokens, mixer.heads
    query, small = mixer.nope + mixer.rope, mixer.kv_rank + mixer.rope
    if mixer.query_rank:
        step.linear(
            "attention.qkv_down", tokens, mixer.query_rank + small, hidden, bias=(mixer.query_rank + small) * mixer.bias
        )
        step.norm("attention.query_norm", tokens, mixer.query_rank)
        step.linear("attention.query_up", tokens, heads * query, mixer.query_rank)
    else:
        step.linear("attention.qkv", tokens, heads * query + small, hidden, bias=small * mixer.bias)
    step.norm("attention.kv_norm", tokens, mixer.kv_rank)
    step.stream("attention.rotary", "stream", "pointwise", tokens, (heads + 1) * mixer.rope, 1, 1, saved_bytes=0.0)
    seen, window, sparse = None, 0, False
    if mixer.indexer is not None:
        write_indexer(step, mixer.indexer, hidden, rotary=mixer.rope)
        seen, window = chosen_keys(step.requests, mixer.indexer.top_k)
        sparse = max(step.requests.context) > mixer.indexer.top_k
    if step.mode == "decode" or sparse:
        # Chosen keys are read as small vectors also in a prefill.
        step.batched("attention.key_absorb", heads, tokens, mixer.kv_rank, mixer.nope)
        width = (small + mixer.kv_rank) / 2.0
        step.attention(heads, 1, width, small, window=window, requests=seen, kept_tokens=0)
        step.batched("attention.value_absorb", heads, tokens, mixer.value, mixer.kv_rank)
    else:
        step.linear("attention.kv_up", tokens, heads * (mixer.nope + mixer.value), mixer.kv_rank)
        width = (query + mixer.value) / 2.0
        # What stays is the small vector, not the keys and values made of it.
        read = heads * 2.0 * width
        step.attention(heads, heads, width, read, kept_per_token=small)
    if mixer.gate:
        step.linear("attention.gate", tokens, heads * mixer.value, hidden)
        step.stream("attention.gated", "stream", "pointwise", tokens, heads * mixer.value, 2, 1)
    step.linear("attention.output", tokens, hidden, heads * mixer.value, bias=hidden * mixer.bias)


def write_square(step: Step, mixer: Square, hidden: int) -> None:
    """One linear layer as wide as the model."""
    step.linear(mixer.name, step.requests.tokens, hidden, hidden)
