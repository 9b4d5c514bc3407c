"""Writers of sparse attention: indexers that choose keys, and attention over compressed tokens (DeepSeek-V4).

Sources: `deepseek_v32`, `glm_moe_dsa`, `minimax_m3_vl` and `deepseek_v4` of Hugging Face `transformers` 5.24. None of
their kernels was measured: scores are written as products, the choice as a row kernel over them.
"""

from __future__ import annotations

from collections import Counter

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.blocks import Compressed, Indexer
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.kernel import matrix_product


def chosen_keys(requests: Requests, most: int) -> tuple[Requests | None, int]:
    """Requests as attention over `most` chosen keys sees them, and its window.

    A decode sees a gathered sequence of that length; of a prefill every query sees as many keys as with a window.
    """
    if max(requests.context) <= most:
        return None, 0
    if max(requests.queries) == 1:
        return Requests(requests.queries, tuple(min(length, most) for length in requests.context)), 0
    return None, most


def write_indexer(step: Step, indexer: Indexer, hidden: int, *, rotary: int) -> None:
    """Write queries and keys of an indexer, its scores and its choice; nothing where a layer takes an earlier one's.

    Args:
      step: takes the nodes.
      indexer: without heads (0) where the layer sees the keys chosen for an earlier one.
      hidden: width of the model.
      rotary: features of a head that the rotary embedding turns, if the indexer's heads have so many.
    """
    if not indexer.heads:
        return
    tokens, width = step.requests.tokens, indexer.heads * indexer.size
    step.linear("attention.indexer.query", tokens, width, indexer.query_rank or hidden)
    step.linear("attention.indexer.key", tokens, indexer.size, hidden)
    step.norm("attention.indexer.norm", tokens, indexer.size)
    step.weight(indexer.norms - indexer.size)
    if indexer.head_weights:
        step.linear("attention.indexer.weights", tokens, indexer.heads, hidden)
    rows = tokens * (indexer.heads + 1)
    step.stream("attention.indexer.rotary", "stream", "pointwise", rows, min(rotary, indexer.size), 1, 1)
    _choose(step, indexer, step.requests, 1)
    keep(step, sum(step.requests.context) * indexer.size)


def keep(step: Step, elements: float) -> None:
    """Count elements of the KV cache that a layer keeps beside its keys and values."""
    step.cache_bytes += step.repeat * float(elements) * dtype_bytes(step.precision.kv_cache)


def _choose(step: Step, indexer: Indexer, requests: Requests, ratio: int) -> None:
    """Scores of every query with the keys before it, one for each `ratio` tokens, and the best of them."""
    pairs: Counter[tuple[int, int]] = Counter()
    for new, length in zip(requests.queries, requests.context, strict=True):
        # A query sees on average the sequence without half of the new tokens.
        pairs[new, max(round((length - (new - 1) / 2.0) / ratio), 1)] += 1
    dtype = step.precision.activations
    forward = [matrix_product(n, indexer.heads * new, keys, indexer.size, dtype) for (new, keys), n in pairs.items()]
    shape = (requests.tokens, max(keys for _, keys in pairs))
    step.emit("attention.indexer.scores", "bmm", forward, (), (), shape)
    mean = sum(new * keys * n for (new, keys), n in pairs.items()) / requests.tokens
    rows, cols = requests.tokens, max(round(mean / indexer.block), 1)
    step.stream("attention.indexer.top_k", "reduction", "softmax", rows, cols, 1, 1, grad=0.0)


def write_compressed(step: Step, mixer: Compressed, hidden: int) -> None:
    """Attention over the last tokens and over compressed older ones; keys are values, one head of them."""
    tokens, heads, size, rank = step.requests.tokens, mixer.heads, mixer.head_size, mixer.query_rank
    step.linear("attention.qkv_down", tokens, rank + size, hidden)
    step.norm("attention.query_norm", tokens, rank)
    step.linear("attention.query_up", tokens, heads * size, rank)
    step.norm("attention.kv_norm", tokens, size)
    step.stream("attention.rotary", "stream", "pointwise", tokens, (heads + 1) * size, 1, 1)
    step.weight(heads)  # sinks
    if mixer.ratio:
        _compress(step, "attention.compressor", mixer, size, hidden)
    if mixer.indexer is not None:
        _compressed_indexer(step, mixer, mixer.indexer, hidden)
    seen, window = _visible(step.requests, mixer)
    step.attention(heads, 1, float(size), float(size), kept_per_token=0.0, window=window, requests=seen)
    kept = sum(min(length, mixer.window) + _entries(length, mixer) for length in step.requests.context)
    keep(step, kept * size)
    group = heads * size // mixer.output_groups
    step.batched("attention.output_down", mixer.output_groups, tokens, mixer.output_rank, group)
    step.linear("attention.output", tokens, hidden, mixer.output_groups * mixer.output_rank)


def _entries(length: int, mixer: Compressed) -> int:
    return length // mixer.ratio if mixer.ratio else 0


def _compress(step: Step, name: str, mixer: Compressed, size: int, hidden: int) -> None:
    """Values and gates of every token, and the sum over each window of `ratio` tokens."""
    tokens, wide = step.requests.tokens, size * (2 if mixer.overlap else 1)
    step.linear(f"{name}.kv_gate", tokens, 2 * wide, hidden)
    step.stream(f"{name}.sum", "reduction", "softmax", tokens, wide, 2, 1.0 / mixer.ratio, grad=1.5)
    step.weight(mixer.ratio * wide + size)  # bias by position, and a norm


def _compressed_indexer(step: Step, mixer: Compressed, indexer: Indexer, hidden: int) -> None:
    tokens = step.requests.tokens
    _compress(step, "attention.indexer", mixer, indexer.size, hidden)
    step.linear("attention.indexer.query", tokens, indexer.heads * indexer.size, indexer.query_rank)
    step.linear("attention.indexer.weights", tokens, indexer.heads, hidden)
    _choose(step, indexer, step.requests, mixer.ratio)
    keep(step, sum(_entries(length, mixer) for length in step.requests.context) * indexer.size)


def _visible(requests: Requests, mixer: Compressed) -> tuple[Requests, int]:
    """Keys a query sees: the window and the entries before it, as one sequence."""

    def entries(length: float) -> float:
        count = length / mixer.ratio if mixer.ratio else 0.0
        return min(count, mixer.indexer.top_k) if mixer.indexer is not None else count

    if max(requests.queries) == 1:
        context = tuple(min(length, mixer.window) + int(entries(length)) for length in requests.context)
        return Requests(requests.queries, context), 0
    # On average over its queries, a request sees the entries of the middle of its new tokens.
    middles = [length - (new - 1) / 2.0 for new, length in zip(requests.queries, requests.context, strict=True)]
    weights = requests.queries
    mean = sum(entries(at) * new for at, new in zip(middles, weights, strict=True)) / requests.tokens
    return requests, mixer.window + round(mean)
