"""Writers of layers with a constant state: linear attention with the delta rule, and Mamba-2.

One token a request reads and writes the state. More tokens go in chunks, whose scan is batched products (Yang et al.,
Gated Delta Networks, 2024; Dao and Gu, Transformers are SSMs, 2024). None of these kernels was measured.
"""

from __future__ import annotations

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.blocks import DeltaNet, Mamba2
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.kernel import matrix_product

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
    _products(step, f"{name}_scores", 2 * batch, length, length, key)
    _products(step, f"{name}_inverse", batch, length, length, length)
    _products(step, f"{name}_keys", batch, length, key, length)
    _products(step, f"{name}_values", 2 * batch, length, value, length)
    _products(step, f"{name}_from_state", 2 * batch, length, value, key)
    _products(step, f"{name}_to_state", batch, key, value, length)


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
        _products(step, "mamba.scan_scores", chunks * mixer.groups, length, length, mixer.state)
        _products(step, "mamba.scan_values", batch, length, mixer.head_size, length)
        _products(step, "mamba.scan_to_state", batch, mixer.state, mixer.head_size, length)
        _products(step, "mamba.scan_from_state", batch, length, mixer.head_size, mixer.state)
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
    step.stream(name, "stream", "pointwise", step.requests.tokens, channels, 1, 1, grad=2.0)
    kept = len(step.requests.queries) * channels * (width - 1)
    step.cache_bytes += step.repeat * float(kept) * dtype_bytes(step.precision.activations)


def _state(step: Step, name: str, heads: int, rows: int, cols: int, element_bytes: float, chunk: int) -> None:
    """The states of all requests read and written: once a step of one token each, else once a chunk."""
    requests = len(step.requests.queries)
    step.cache_bytes += step.repeat * float(requests * heads * rows * cols) * element_bytes
    share = element_bytes / dtype_bytes(step.precision.activations)
    passes = requests if max(step.requests.queries) == 1 else _chunks(step, chunk)[1]
    step.stream(f"{name}.state", "stream", "pointwise", passes * heads * rows, cols, share, share, grad=2.0)


def _products(step: Step, name: str, batch: int, rows: int, features: int, width: int) -> None:
    """A batch of products of two activations."""
    dtype = step.precision.activations
    gradients = [
        matrix_product(batch, rows, width, features, dtype),
        matrix_product(batch, width, features, rows, dtype),
    ]
    forward = [matrix_product(batch, rows, features, width, dtype)]
    step.emit(name, "bmm", forward, gradients, (), (batch, rows, features))
