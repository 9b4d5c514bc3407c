"""Writers of what stands in a layer: attention of all kinds, layers of a constant state, feed-forward blocks, experts.

Sources: `deepseek_v32`, `glm_moe_dsa`, `minimax_m3_vl` and `deepseek_v4` of Hugging Face `transformers` 5.24 for
indexers that choose keys and attention over compressed tokens; Yang et al., Gated Delta Networks, 2024, and Dao and Gu,
Transformers are SSMs, 2024, for layers of a constant state: one token a request reads and writes it, more go in chunks,
whose scan is batched products. The kernels of neither were measured: scores are written as products, the choice of keys
as a row kernel over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.blocks import (
    Attention,
    Compressed,
    DeltaNet,
    Dense,
    Experts,
    Indexer,
    Latent,
    Mamba2,
    Square,
)
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.kernel import matrix_product, rowwise
from neusight_jax.graph.quantization.scheme import Stored
from neusight_jax.kernels.family import UNPACK, WEIGHT_SHARE, is_traced, namespace, number
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel


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
        step.stream("attention.rotary", "pointwise", tokens, turned, 1, 1, saved_bytes=0.0)
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
        step.stream("attention.gated", "pointwise", tokens, heads * value, 2, 1)
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
        step.stream("attention.qk_norm", "layernorm", tokens * (heads + kv), size, 1, 1, grad=1.5)


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
        # A token sees its own chunk alone, so a prompt over several chunks is as many requests.
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
    step.stream("attention.rotary", "pointwise", tokens, (heads + 1) * mixer.rope, 1, 1, saved_bytes=0.0)
    seen, window, sparse = None, 0, False
    if mixer.indexer is not None:
        write_indexer(step, mixer.indexer, hidden, rotary=mixer.rope)
        seen, window = chosen_keys(step.requests, mixer.indexer.top_k)
        sparse = max(step.requests.context) > mixer.indexer.top_k
    if step.mode == "decode" or sparse:
        # Chosen keys are read as small vectors also in a prefill.
        # Up-projections move over to queries and results, so that the cache is read as it is (DeepSeek-V2, 2024).
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
        step.stream("attention.gated", "pointwise", tokens, heads * mixer.value, 2, 1)
    step.linear("attention.output", tokens, hidden, heads * mixer.value, bias=hidden * mixer.bias)


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
    step.stream("attention.indexer.rotary", "pointwise", rows, min(rotary, indexer.size), 1, 1)
    _choose(step, indexer, step.requests, 1)
    step.keep(sum(step.requests.context) * indexer.size, step.precision.kv_cache)


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
    step.stream("attention.indexer.top_k", "softmax", rows, cols, 1, 1, grad=0.0)


def write_compressed(step: Step, mixer: Compressed, hidden: int) -> None:
    """Attention over the last tokens and over compressed older ones; keys are values, one head of them."""
    tokens, heads, size, rank = step.requests.tokens, mixer.heads, mixer.head_size, mixer.query_rank
    step.linear("attention.qkv_down", tokens, rank + size, hidden)
    step.norm("attention.query_norm", tokens, rank)
    step.linear("attention.query_up", tokens, heads * size, rank)
    step.norm("attention.kv_norm", tokens, size)
    step.stream("attention.rotary", "pointwise", tokens, (heads + 1) * size, 1, 1)
    step.weight(heads)  # sinks
    if mixer.ratio:
        _compress(step, "attention.compressor", mixer, size, hidden)
    if mixer.indexer is not None:
        _compressed_indexer(step, mixer, mixer.indexer, hidden)
    seen, window = _visible(step.requests, mixer)
    step.attention(heads, 1, float(size), float(size), kept_per_token=0.0, window=window, requests=seen)
    kept = sum(min(length, mixer.window) + _entries(length, mixer) for length in step.requests.context)
    step.keep(kept * size, step.precision.kv_cache)
    group = heads * size // mixer.output_groups
    step.batched("attention.output_down", mixer.output_groups, tokens, mixer.output_rank, group)
    step.linear("attention.output", tokens, hidden, mixer.output_groups * mixer.output_rank)


def _entries(length: int, mixer: Compressed) -> int:
    return length // mixer.ratio if mixer.ratio else 0


def _compress(step: Step, name: str, mixer: Compressed, size: int, hidden: int) -> None:
    """Values and gates of every token, and the sum over each window of `ratio` tokens."""
    tokens, wide = step.requests.tokens, size * (2 if mixer.overlap else 1)
    step.linear(f"{name}.kv_gate", tokens, 2 * wide, hidden)
    step.stream(f"{name}.sum", "softmax", tokens, wide, 2, 1.0 / mixer.ratio, grad=1.5)
    step.weight(mixer.ratio * wide + size)  # bias by position, and a norm


def _compressed_indexer(step: Step, mixer: Compressed, indexer: Indexer, hidden: int) -> None:
    tokens = step.requests.tokens
    _compress(step, "attention.indexer", mixer, indexer.size, hidden)
    step.linear("attention.indexer.query", tokens, indexer.heads * indexer.size, indexer.query_rank)
    step.linear("attention.indexer.weights", tokens, indexer.heads, hidden)
    _choose(step, indexer, step.requests, mixer.ratio)
    entries = sum(_entries(length, mixer) for length in step.requests.context)
    step.keep(entries * indexer.size, step.precision.kv_cache)


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


DELTA_CHUNK = 64
"""Tokens in a chunk of the delta rule, as flash-linear-attention cuts it."""


def write_delta(step: Step, mixer: DeltaNet, hidden: int) -> None:
    """Projections, a short convolution, the delta rule, a gated norm, output."""
    tokens, keys, values = step.requests.tokens, mixer.key_heads * mixer.key_size, mixer.value_heads * mixer.value_size
    mixed = 2 * keys + values
    if mixer.gates == "scalar":
        step.linear("linear_attention.qkvz", tokens, mixed + values, hidden)
        step.linear("linear_attention.gates", tokens, 2 * mixer.value_heads, hidden)
        weights = 2 * mixer.value_heads
    else:
        wide = mixer.gates == "vector_wide"
        step.linear("linear_attention.qkvz" if wide else "linear_attention.qkv", tokens, mixed + values * wide, hidden)
        narrow = mixer.key_size * (1 if wide else 2) + mixer.value_heads
        step.linear("linear_attention.gates", tokens, narrow, hidden)
        step.linear("linear_attention.decay", tokens, keys, mixer.key_size)
        if not wide:
            step.linear("linear_attention.gate", tokens, values, mixer.key_size)
        weights = keys + mixer.value_heads
    step.weight(weights)
    _convolution(step, "linear_attention.conv", mixed, mixer.conv, bias=False)
    _state(
        step, "linear_attention", mixer.value_heads, mixer.key_size, mixer.value_size, mixer.state_bytes, DELTA_CHUNK
    )
    if max(step.requests.queries) > 1:
        _delta_scan(step, mixer)
    step.norm("linear_attention.norm", tokens * mixer.value_heads, mixer.value_size)
    step.linear("linear_attention.output", tokens, hidden, values)


def _delta_scan(step: Step, mixer: DeltaNet) -> None:
    """The delta rule by chunks: scores inside a chunk, their triangular inverse, and the state between chunks."""
    length, chunks = _chunks(step, DELTA_CHUNK)
    batch, key, value = chunks * mixer.value_heads, mixer.key_size, mixer.value_size
    name = "linear_attention.scan"
    step.batched(f"{name}_scores", 2 * batch, length, length, key, learned=False)
    step.batched(f"{name}_inverse", batch, length, length, length, learned=False)
    step.batched(f"{name}_keys", batch, length, key, length, learned=False)
    step.batched(f"{name}_values", 2 * batch, length, value, length, learned=False)
    step.batched(f"{name}_from_state", 2 * batch, length, value, key, learned=False)
    step.batched(f"{name}_to_state", batch, key, value, length, learned=False)


def write_mamba2(step: Step, mixer: Mamba2, hidden: int) -> None:
    """Projection in, a short convolution, the state-space scan, a gated norm, projection out."""
    tokens, inner = step.requests.tokens, mixer.heads * mixer.head_size
    shared = 2 * mixer.groups * mixer.state
    features = 2 * inner + shared + mixer.heads
    step.linear("mamba.in", tokens, features, hidden)
    step.weight(features * float(mixer.bias) + 3.0 * mixer.heads)
    _convolution(step, "mamba.conv", inner + shared, mixer.conv, bias=mixer.conv_bias)
    _state(step, "mamba", mixer.heads, mixer.head_size, mixer.state, mixer.state_bytes, mixer.chunk)
    if max(step.requests.queries) > 1:
        length, chunks = _chunks(step, mixer.chunk)
        batch = chunks * mixer.heads
        step.batched("mamba.scan_scores", chunks * mixer.groups, length, length, mixer.state, learned=False)
        step.batched("mamba.scan_values", batch, length, mixer.head_size, length, learned=False)
        step.batched("mamba.scan_to_state", batch, mixer.state, mixer.head_size, length, learned=False)
        step.batched("mamba.scan_from_state", batch, length, mixer.head_size, mixer.state, learned=False)
    step.norm("mamba.norm", tokens, inner)
    step.linear("mamba.out", tokens, hidden, inner)
    step.weight(hidden * float(mixer.bias))


def _chunks(step: Step, size: int) -> tuple[int, int]:
    """Tokens of a chunk and chunks of all requests."""
    queries = step.requests.queries
    length = min(size, max(queries))
    return length, sum(-(-new // length) for new in queries)


def _convolution(step: Step, name: str, channels: int, width: int, *, bias: bool) -> None:
    """A short convolution along the sequence, each channel by itself, and the tokens it keeps for the next step."""
    step.weight(channels * (width + bias))
    step.stream(name, "pointwise", step.requests.tokens, channels, 1, 1, grad=2.0)
    step.keep(len(step.requests.queries) * channels * (width - 1), step.precision.activations)


def _state(step: Step, name: str, heads: int, rows: int, cols: int, element_bytes: float, chunk: int) -> None:
    """The states of all requests read and written: once a step of one token each, else once a chunk."""
    requests = len(step.requests.queries)
    step.cache_bytes += step.repeat * float(requests * heads * rows * cols) * element_bytes
    share = element_bytes / dtype_bytes(step.precision.activations)
    passes = requests if max(step.requests.queries) == 1 else _chunks(step, chunk)[1]
    step.stream(f"{name}.state", "pointwise", passes * heads * rows, cols, share, share, grad=2.0)


def write_dense(step: Step, block: Dense, hidden: int, name: str = "mlp") -> None:
    """Write a dense feed-forward block: up, with a gate or without, activation, down.

    Args:
      step: takes the nodes.
      block: this GPU's part of the block.
      hidden: width of the model.
      name: start of the nodes' names.
    """
    tokens, inner = step.requests.tokens, block.inner
    wide = inner * (2 if block.gated else 1)
    step.linear(f"{name}.gate_up" if block.gated else f"{name}.up", tokens, wide, hidden, bias=wide * block.bias)
    reads, grad = (2, 5.0 / 3.0) if block.gated else (1, 1.5)
    step.stream(f"{name}.activation", "pointwise", tokens, inner, reads, 1, grad=grad)
    step.linear(f"{name}.down", tokens, hidden, inner, bias=hidden * block.bias)


def write_experts(step: Step, block: Experts, hidden: int, expert_parallel: int) -> None:
    """Write router, shared expert, routed experts on this device, and what stands beside them.

    Args:
      step: takes the nodes.
      block: all experts of a layer, each as wide as it is on this device.
      hidden: width of the model.
      expert_parallel: devices that hold the experts, equally many on each.
    """
    tokens = step.requests.tokens
    bias = block.count * block.router_bias + (hidden + block.count) * block.router_scales
    step.linear("mlp.router", tokens, block.count, hidden, dtype=step.precision.activations, bias=bias)
    step.stream("mlp.top_k", "softmax", tokens, block.count, 1, 1)
    if block.beside:
        write_dense(step, Dense(block.beside, block.gated), hidden)
        for name in ("beside_norm", "experts_input_norm", "experts_norm"):
            step.norm(f"mlp.{name}", tokens, hidden)
    beside = _runs_beside(step, block)
    if is_traced(block.shared) or block.shared:
        if not beside:
            write_dense(step, Dense(block.shared, block.gated, block.bias), hidden, "mlp.shared")
            step.summed()
        step.weight(hidden * block.shared_gate)  # one more row of the router
    width = block.latent or hidden
    if block.latent:
        step.linear("mlp.latent_down", tokens, width, hidden, bias=width * block.bias)
    if block.latent_norm:
        step.norm("mlp.latent_norm", tokens, width)
    if step.shard is not None:
        # Tokens in the order of their experts and back, gradients likewise.
        step.stream("mlp.permute", "pointwise", tokens * block.top_k, width, 2, 2)
    _write_routed(step, block, width, expert_parallel, number(block.shared) if beside else 0.0)
    local = block.count / expert_parallel
    step.weight(local * (block.inner * (2 if block.gated else 1) + width) * block.bias)
    if block.latent:
        step.linear("mlp.latent_up", tokens, hidden, width, bias=hidden * block.bias)


def _runs_beside(step: Step, block: Experts) -> bool:
    """Whether the shared expert runs beside the routed ones: in their kernel (SGLang), or a second stream (vLLM,
    `shared_experts_stream`; TensorRT-LLM). Then it is so many more of them."""
    shared = is_traced(block.shared) or block.shared
    alone = not step.serving or not shared or not block.gated or bool(block.bias or block.latent)
    return not alone and step.stored("mlp.shared.gate_up") == step.stored("mlp.experts")


def _write_routed(step: Step, block: Experts, hidden: int, expert_parallel: int, beside: float) -> None:
    """The experts of a layer on this device, tokens spread at random.

    Args:
      hidden: what they read; beside: width of a shared one that runs with them, 0 = none does.

    An expert of two matrices counts as one of three that is as much narrower.
    """
    local, width = (number(namespace(size).maximum(size, 1.0)) for size in (block.count / expert_parallel, block.inner))
    tokens, matrices = step.requests.tokens, 3 if block.gated else 2
    sizes = expert_dims(
        float(tokens) * step.gathered,
        experts=block.count,
        local_experts=local,
        top_k=block.top_k,
        hidden=hidden,
        inner=width * matrices / 3.0,
        distribution="random",
        skew=step.expert_skew,
    )
    shared = beside / width
    dims = {key: number(value) for key, value in sizes.items()}
    # A shared expert that runs with the others is one more that every token takes.
    dims |= {"rows": dims["rows"] + shared * tokens, "active": dims["active"] + shared}
    phases: tuple[list[Kernel], list[Kernel], list[Kernel]] = [], [], []
    # Layers may differ in how they store their experts: every way of storing has its share of the launches.
    for part in step.stored("mlp.experts"):
        elements = matrices * hidden * width
        stored = part.scheme.weight_bytes((matrices - 1) * width, hidden) + part.scheme.weight_bytes(hidden, width)
        step.count((local + shared) * elements * part.share, (local + shared) * stored * part.share)
        step.expert_parameters += local * elements * part.share * step.repeat
        step.ledger.add("mlp.experts", part.of_rows(tokens), (local + shared) * elements * step.repeat)
        if not step.training:
            phases[0].append(_expert_kernel(dims, part, stored / elements))
            continue
        # Training runs products of experts as one batch each, or expert by expert.
        active, grouped = dims["active"], step.shard is None or step.shard.grouped_experts
        rows, batch, count = dims["rows"] / active, active if grouped else 1.0, 1.0 if grouped else active
        for features, read in (((matrices - 1) * width, hidden), (hidden, width)):
            products = step.products(part, rows, features, read, count * part.share, batch)
            for phase, kernels in zip(phases, products, strict=True):
                for kernel in kernels:
                    # Families of fp32 products have no operator of experts.
                    tensor = kernel.family in ("linear", "bmm") and kernel.dtype != "fp32"
                    phase.append(replace(kernel, op="expert") if tensor else kernel)
    if step.training:
        for phase, passes in zip(phases, (matrices, 2 * matrices - 1), strict=False):
            dtype = step.precision.activations
            phase.append(rowwise("pointwise", dims["rows"], width, passes - 1.0, 1.0, dtype, graphed=True))
    step.read(hidden, step.precision.products, step.lora is None)
    # Gate and up as they are, what the activation makes of them as the product after it reads it.
    size, narrow = (dtype_bytes(of) for of in (step.precision.activations, step.precision.products))
    down = dims["rows"] * width * narrow * float(step.lora is None)
    inside = dims["rows"] * (matrices - 1) * width * size + down
    step.emit(
        *("mlp.experts", "experts"),
        *phases,
        (tokens, hidden),
        saved_bytes=float(tokens) * hidden * size + inside,
        rebuilt_bytes=down,
    )


def _expert_kernel(dims: Mapping[str, float], part: Stored, stored_bytes: float) -> Kernel:
    """The kernel of experts; `stored_bytes`: of one weight, scales included."""

    def kernel(dtype: str) -> Kernel:
        same = part.scheme.bits == 8.0 * dtype_bytes(dtype)
        narrow = {} if same else {WEIGHT_SHARE: stored_bytes / dtype_bytes(dtype)}
        narrow |= {UNPACK: part.scheme.unpack} if part.scheme.unpack else {}
        return Kernel("grouped_gemm", "experts", {**dims, **narrow}, part.share, dtype)

    return part.of_rows(dims["tokens"]).either(kernel)


WRITERS: dict[type, Callable[[Step, Any, int], None]] = {
    Attention: write_attention,
    Latent: write_latent,
    Compressed: write_compressed,
    DeltaNet: write_delta,
    Mamba2: write_mamba2,
    Square: lambda step, mixer, hidden: step.linear(mixer.name, step.requests.tokens, hidden, hidden),
    Dense: write_dense,
}
"""Writers of what stands in a layer; that of experts needs to know how they are split."""
