"""Kernels that configs and traced programs both launch: products, convolutions, streams, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Shape
from neusight_jax.kernels.attention import REQUEST_DIMS, attention_dims
from neusight_jax.kernels.collective import collective_dims
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.family import UNPACK, WEIGHT_SHARE, is_traced, namespace, number
from neusight_jax.kernels.gemm import LOAD_BYTES
from neusight_jax.kernels.rowwise import ELEMENTWISE, MEMORY, NORM, REDUCTION, SOFTMAX, STREAM, STRIDED, WINDOW
from neusight_jax.kernels.table import Kernel

FLASH: tuple[str, ...] = ("bf16", "fp16")
"""Activations that fused attention takes; others run as two products and a softmax."""
BACKWARD_ATTENTION = 2.5
"""Products of the gradient of fused attention over those of its forward pass: five for two."""


_LAUNCHED = {op: family.name for family in (WINDOW, STRIDED, MEMORY, NORM, SOFTMAX, ELEMENTWISE) for op in family.ops}
_GRAPHED = {op: family.name for family in (REDUCTION, STREAM) for op in family.ops}
"""Families of streaming operators: launched one by one, and inside CUDA graphs beside kernels of tensor cores."""


def stream(op: str, shape: Shape, reads: float, writes: float, count: int = 1) -> Kernel:
    """A kernel that streams a tensor, in the dtype of the graph.

    Args:
      shape: of the tensor; its last axis is the row.
      op, reads, writes, count: as of `rowwise`.
    """
    return rowwise(op, prod(shape[:-1]), shape[-1], reads, writes, count=float(count))


def rowwise(
    op: str,
    rows: float,
    cols: float,
    reads: float,
    writes: float,
    dtype: str = "",
    count: float = 1.0,
    *,
    graphed: bool = False,
) -> Kernel:
    """A kernel of `kernels.rowwise`, whose sizes may be traced.

    Args:
      op: an operator, which decides the family.
      rows: of the tensor.
      cols: elements of a row.
      reads: passes over the tensor that are read; a smaller operand counts its share.
      writes: passes that are written.
      dtype: of the tensor; "" = that of the graph.
      count: launches.
      graphed: whether it runs inside a CUDA graph, beside kernels of tensor cores.
    """
    dims = {"rows": number(rows), "cols": number(cols), "reads": reads, "writes": writes}
    return Kernel((_GRAPHED if graphed else _LAUNCHED)[op], op, dims, count, dtype)


def streamed(
    op: str, loop: Shape, read_bytes: float, write_bytes: float, dtype: str, cols: int | None = None
) -> Kernel:
    """A kernel known by the bytes it moves.

    Args:
      op: as of `rowwise`.
      loop: shape it iterates over.
      read_bytes: bytes read, all operands together.
      write_bytes: bytes written.
      dtype: of the tensors, one of `arithmetic.DTYPES`.
      cols: elements of a row; None = the last axis of `loop`.
    """
    size = max(prod(loop), 1)
    width = cols if cols is not None else (loop[-1] if loop else 1)
    width = max(width, 1)
    full = size * dtype_bytes(dtype)
    return rowwise(op, size / width, width, read_bytes / full, write_bytes / full, dtype)


def matrix_product(
    batch: float,
    m: float,
    n: float,
    k: float,
    dtype: str,
    count: float = 1.0,
    weight_share: float = 1.0,
    unpack: float = 0.0,
    *,
    upright: bool = True,
) -> Kernel:
    """A product M×K · K×N, K the contraction; `linear` when there is one, `bmm` when there is a batch of them.

    Args:
      batch: products of one launch, all of the same size.
      m: rows of the result.
      n: columns of the result.
      k: contraction.
      dtype: of the arithmetic, one of `arithmetic.DTYPES`.
      count: launches.
      weight_share: bytes of K×N as stored over those in `dtype`.
      unpack: instructions of a lane that an element of K×N takes to be unpacked, where they were counted.
      upright: whether rows of M×K lie in memory. Else its columns do, as in the gradient of weights: on tensor cores
        M's alignment then counts as N's does, so that the worse of them is N.
    """
    if not upright and dtype != "fp32":
        lies = _grain(m, dtype) < _grain(n, dtype)
        where = namespace(m, n).where
        m, n = where(lies, n, m), where(lies, m, n)
    # A traced batch may be above 1, and a batch of one product is right as well.
    family = "bmm" if is_traced(batch) or batch > 1 else "linear"
    dims = {"batch": number(batch), "m": number(m), "n": number(n), "k": number(k)}
    narrow = {WEIGHT_SHARE: weight_share} if is_traced(weight_share) or weight_share != 1.0 else {}
    narrow |= {UNPACK: unpack} if unpack else {}
    return Kernel(family, family, {**dims, **narrow}, count, dtype)


def _grain(size: float, dtype: str) -> Any:
    """Bytes that rows of a size are aligned to, at most the widest load; those of a size between whole numbers are."""
    if not is_traced(size):
        # Rows start on whatever divides both their length and the widest load.
        return float(np.gcd(int(size * dtype_bytes(dtype)), int(LOAD_BYTES)))
    grains = LOAD_BYTES / jnp.array([1.0, 2.0, 4.0, 8.0, 16.0])
    aligned = (size * dtype_bytes(dtype) % grains == 0) | (size % 1.0 != 0)
    return jnp.max(jnp.where(aligned, grains, 0.5))


def collective_kernel(
    op: str, payload_bytes: float, ranks: float, domains: float = 1.0, *, dtype: str = "bf16"
) -> Kernel:
    """A collective of a group of GPUs, run by a library.

    Args:
      op: one of `collective.OPS`.
      payload_bytes: by operator as in `kernels.collective`, bytes.
      ranks: GPUs of the group.
      domains: domains of fast links it spans, equally many ranks in each.
      dtype: of the tensors, one of `arithmetic.DTYPES`.
    Raises: `InputError` for an unknown operator, and where ranks do not fill the domains.
    """
    if not (ranks >= 1 and domains >= 1 and domains <= ranks):
        raise InputError(f"a group of {ranks:g} ranks in {domains:g} domains; expected at least one rank in each")
    dims = collective_dims(op, payload_bytes, ranks, domains)
    return Kernel("collective", op, {name: float(size) for name, size in dims.items()}, 1.0, dtype)


def attention_kernels(
    batch: int, queries: int, keys: int, head: int, value_head: int, dtype: str, *, backward: bool = False
) -> tuple[Kernel, ...]:
    """Kernels of an attention that a framework runs as one operator.

    Args:
      batch: batch times heads.
      queries, keys: lengths of the two sequences, tokens.
      head, value_head: widths.
      dtype: of the operands, one of `arithmetic.DTYPES`.
      backward: its gradient, scores computed again: five products for the forward pass's two.
    """
    scores = matrix_product(batch, queries, keys, head, dtype)
    context = matrix_product(batch, queries, value_head, keys, dtype)
    loop = (batch * queries, keys)
    one_pass = float(batch * queries * keys) * (2.0 if dtype in FLASH else max(dtype_bytes(dtype), 4.0))
    if not backward:
        return (scores, streamed("softmax", loop, one_pass, one_pass, dtype), context)
    return (
        scores,
        matrix_product(batch, queries, keys, value_head, dtype),
        streamed("softmax_backward", loop, 2.0 * one_pass, one_pass, dtype),
        matrix_product(batch, queries, head, keys, dtype),
        matrix_product(batch, keys, head, queries, dtype),
        matrix_product(batch, keys, value_head, queries, dtype),
    )


def fused_attention(
    queries: ArrayLike, context: ArrayLike, dtype: str, *, repeat: float = 1.0, **sizes: Any
) -> tuple[Kernel, Kernel]:
    """Attention of a batch as the one kernel of FlashAttention, and its gradient; a step of one token is a decode.

    Args:
      queries: new tokens of each request [request], or of all where they are alike.
      context: tokens of its whole sequence, likewise.
      dtype: of the activations, one of `FLASH`.
      repeat: requests that are alike.
      sizes: of heads, window and cache, as of `attention_dims`; the mean where heads of keys and values differ.
    """
    of_requests = attention_dims(np.atleast_1d(queries), np.atleast_1d(context), repeat=repeat, **sizes)
    # The batch is one launch: its requests add up, the sizes of heads are the same for all.
    dims = {name: number(size.sum() if name in REQUEST_DIMS else size[0]) for name, size in of_requests.items()}
    family = "decode" if dims["queries"] == dims["requests"] else "prefill"
    forward = Kernel(family, family, dims, 1.0, dtype)
    return forward, replace(forward, count=BACKWARD_ATTENTION)


def conv_kernel(op: str, dtype: str, sizes: Mapping[str, Any]) -> tuple[Kernel, ...]:
    """One pass of a convolution; where its window is one pixel of an ungrouped image, it is a plain matrix product.

    `sizes`: arguments of `kernels.conv.conv_dims`.
    """
    inputs, outputs = sizes["in_channels"], sizes["out_channels"]
    # Frameworks launch nothing for a tensor without elements.
    if min(sizes["batch"], inputs, outputs, *sizes["in_size"], *sizes["out_size"], *sizes["window"], 1) == 0:
        return ()
    if prod(sizes["window"]) == 1 and sizes["groups"] == 1 and prod(sizes["stride"]) == 1:
        rows = sizes["batch"] * prod(sizes["out_size"])
        m, n, k = {
            "conv": (rows, outputs, inputs),
            "conv_data_gradient": (rows, inputs, outputs),
            "conv_weight_gradient": (outputs, inputs, rows),
        }[op]
        return (matrix_product(1, m, n, k, dtype, upright=op != "conv_weight_gradient"),)
    # A group of one channel is no matrix product: libraries have kernels that stream it.
    if sizes["groups"] == inputs > 1:
        return (_depthwise(op, dtype, sizes),)
    numbers: dict[str, Any] = {
        name: [float(extent) for extent in size] if isinstance(size, Sequence) else float(size)
        for name, size in sizes.items()
    }
    dims = conv_dims(op, **numbers)
    return (Kernel("conv", op, {name: float(size) for name, size in dims.items()}, 1.0, dtype),)


def _depthwise(op: str, dtype: str, sizes: Mapping[str, Any]) -> Kernel:
    """One pass of a convolution with a group for every channel; it loops over what it writes, or the result."""
    image = sizes["batch"] * sizes["in_channels"] * prod(sizes["in_size"])
    result = sizes["batch"] * sizes["out_channels"] * prod(sizes["out_size"])
    looped = image if op == "conv_data_gradient" else result
    read = {"conv": image, "conv_data_gradient": result, "conv_weight_gradient": image + result}[op]
    filters = sizes["out_channels"] * prod(sizes["window"])
    written = filters if op == "conv_weight_gradient" else looped
    dims = {
        "rows": looped / sizes["out_channels"],
        "cols": sizes["out_channels"],
        "reads": (read if op == "conv_weight_gradient" else read + filters) / looped,
        "writes": written / looped,
        "taps": prod(sizes["window"]) * result / looped,
    }
    return Kernel("window", f"depthwise_{op}", {name: float(size) for name, size in dims.items()}, 1.0, dtype)
