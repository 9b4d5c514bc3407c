"""Kernels that stream a rows × cols tensor: elementwise, softmax, norm, and plain memory traffic.

Their dims say how many full rows × cols tensors a launch reads and writes (`reads`, `writes`; fractions are fine: a
broadcast operand counts its share). Their FLOP count matters little, their bytes are everything.

Kernels that read a window for each output are among them: depthwise convolutions, pooling, cumulative sums.
They stream images as elementwise kernels do, on the vector path whatever the dtype. A tap of the window is one load and
one multiply-add (or comparison), and the output is one store. Neighbours share most of a window, so that its loads hit
a cache: they cost slots of the SM, not traffic. No network was fitted to these kernels: they take that of elementwise
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.kernels.family import Dims, Family, RowPasses, Work, is_multiple, whole
from neusight_jax.kernels.gemm import LOADS_PER_CYCLE

DIMS: tuple[str, ...] = ("rows", "cols", "reads", "writes")
TRAFFIC_DIMS: tuple[str, ...] = ("reads", "writes", "scattered", "window")
"""Those that say how often a tensor is moved, not how large it is."""
STRIDED_DIMS: tuple[str, ...] = (*DIMS, "scattered", "window")
"""Dims of strided kernels: of the reads, passes over an operand that lies in another order than the loop runs, so that
every element brings a whole fetch; and how many elements the loop passes until it comes back for the next of a
fetch."""
FETCH_BYTES = 64.0
"""Bytes DRAM hands to L2 for a load that wants less: two sectors, the line of Volta's and Turing's L2 (Jia et al. 2018
and 2019, by microbenchmark; Pascal's is 32) and the default of CUDA's `cudaLimitMaxL2FetchGranularity` since Ampere."""
BINARY_OPS: tuple[str, ...] = ("add", "mul", "div", "pow")
UNARY_OPS: tuple[str, ...] = ("addu", "mulu", "divu", "powu", "tanh", "relu", "gelu")

ELEMENT_BLOCKS: tuple[int, ...] = (256, 512, 1024, 2048)
"""Elements one block of an elementwise kernel handles: the tile menu."""
ROW_BLOCKS: tuple[int, ...] = (1, 2, 4, 8)
"""Rows one block of a row reduction handles: the tile menu."""
WIDE_COLS = 1024.0
"""Columns beyond which a softmax takes a block of threads for a row instead of a warp."""
LOADED_ELEMENTS = 4.0
"""Elements that a thread of a row reduction loads at a time: 16 bytes of fp32."""
FLOP_PER_ELEMENT: dict[str, float] = {
    **{"elementwise": 1.0, "strided": 1.0, "softmax": 5.0, "norm": 6.0, "memory": 0.0},
    **{"stream": 1.0, "reduction": 6.0, "counted": 0.0},
}
"""Arithmetic per element by family, as the reference counts it; a memory kernel counts none."""


def elements(dims: Dims) -> Float[Array, " kernel"]:
    """Elements of the tensor."""
    return dims["rows"] * dims["cols"]


def bytes_moved(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
    """Memory traffic: (reads + writes) passes over the tensor, bytes."""
    return (dims["reads"] + dims["writes"]) * elements(dims) * element_bytes


def _counted_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    """Work of `MEMORY` with `flop` spread evenly over its blocks."""
    work = MEMORY.work(dims, element_bytes)
    block_flop = jnp.maximum(dims["flop"][:, None, None] / work.blocks, work.block_flop)
    return replace(work, flop=dims["flop"], block_flop=block_flop)


def _window_work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    streamed, taps = ELEMENTWISE.work(dims, element_bytes), dims["taps"]
    # A multiply-add waits for its load.
    block_taps = streamed.block_flop * taps[:, None, None]
    return replace(
        streamed,
        flop=2.0 * taps * elements(dims),
        block_flop=2.0 * block_taps,
        load_blocks=streamed.blocks,
        load_cycles=streamed.block_flop * (taps + 1.0)[:, None, None] / LOADS_PER_CYCLE,
    )


def _softmax_passes(dims: Dims, element_bytes: Float[Array, " kernel"]) -> RowPasses:
    """Passes of PyTorch's softmax: up to `WIDE_COLS` columns a warp keeps its row in registers; beyond, a block of up
    to 1024 threads reads it for the maximum, for the sum and for the result; backward two operands twice."""
    wide = dims["cols"] > WIDE_COLS
    threads = jnp.where(wide, jnp.clip(dims["cols"] / LOADED_ELEMENTS, 32.0, 1024.0), 32.0)
    return _passes(dims, element_bytes, jnp.where(wide, 2.0, 0.0), threads, jnp.where(wide, 3.0, 1.0))


def _norm_passes(dims: Dims, element_bytes: Float[Array, " kernel"]) -> RowPasses:
    """Passes of PyTorch's layer norm: a block of 128 threads reads a row for its moments and for the result."""
    return _passes(dims, element_bytes, dims["reads"], jnp.full_like(dims["cols"], 128.0), 2.0)


def _passes(
    dims: Dims,
    element_bytes: Float[Array, " kernel"],
    again: Float[Array, " kernel"],
    threads: Float[Array, " kernel"],
    passes: Float[Array, " kernel"] | float,
) -> RowPasses:
    """Passes over rows.

    Args:
      dims: of the kernels.
      element_bytes: of an element.
      again: tensors read once more.
      threads: that work on a row.
      passes: over an operand, one after another.
    """
    return RowPasses(
        again_bytes=again * elements(dims) * element_bytes,
        thread_bytes=(dims["reads"] + dims["writes"]) * dims["cols"] * element_bytes / threads,
        threads=dims["rows"] * threads,
        trips=passes * jnp.maximum(dims["cols"] / (LOADED_ELEMENTS * threads), 1.0),
    )


def _family(
    name: str,
    ops: tuple[str, ...],
    passes: Callable[[Dims, Float[Array, " kernel"]], RowPasses] | None = None,
    *,
    by_rows: bool = False,
    graphed: bool = False,
) -> Family:
    """A family that streams tensors.

    Args:
      name: of the family.
      ops: its operators.
      passes: over rows that only a cache can serve; None = every element is moved once.
      by_rows: whether blocks take whole rows, as reductions do, and not so many elements.
      graphed: whether its kernels run inside CUDA graphs, beside those of tensor cores.
    """
    menu = ROW_BLOCKS if by_rows else ELEMENT_BLOCKS

    def work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
        tile = jnp.array(menu, jnp.float32)[None, :]
        blocks = whole((dims["rows"] if by_rows else elements(dims))[:, None] / tile, dims)
        block_elements = tile * dims["cols"][:, None] if by_rows else jnp.broadcast_to(tile, blocks.shape)
        traffic = (dims["reads"] + dims["writes"]) * element_bytes
        scattered = dims.get("scattered")
        fetched = None if scattered is None else scattered * jnp.maximum(FETCH_BYTES - element_bytes, 0.0)
        return Work(
            flop=FLOP_PER_ELEMENT[name] * elements(dims),
            bytes_moved=bytes_moved(dims, element_bytes),
            blocks=blocks[:, :, None],
            # Moving an element takes an instruction even where nothing is computed of it.
            block_flop=(max(FLOP_PER_ELEMENT[name], 1.0) * block_elements)[:, :, None],
            block_bytes=(traffic[:, None] * block_elements)[:, :, None],
            block_steps=jnp.ones_like(blocks)[:, :, None],
            fetched_bytes=None if fetched is None else fetched * elements(dims),
            window_bytes=None if fetched is None else (traffic + fetched) * dims["window"],
            row_passes=None if passes is None else passes(dims, element_bytes),
        )

    return Family(
        name=name,
        ops=ops,
        dims=DIMS,
        tiles=tuple(f"{size} rows" if by_rows else str(size) for size in menu),
        matrix=False,
        network=name if by_rows or graphed else "elementwise",
        work=work,
        features=_reduction_features if by_rows else _stream_features,
        tensor_core=graphed,
        generations="tensor" if graphed else "blas",
    )


def _stream_features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel _feature"]:
    """Bytes only: measured kernels make two or three passes, so a network that saw the passes could not interpolate."""
    total = bytes_moved(dims, element_bytes)
    return jnp.stack(
        [jnp.log(dims["rows"]), jnp.log(total / dims["rows"]), jnp.log(total), _aligned_row(dims, element_bytes)],
        axis=-1,
    )


def _reduction_features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel _feature"]:
    """The shape only; the passes of every measured reduction are the same."""
    rows, cols = dims["rows"], dims["cols"]
    wide = jnp.where(cols > WIDE_COLS, 1.0, 0.0)
    return jnp.stack(
        [jnp.log(rows), jnp.log(cols), jnp.log(rows * cols), _aligned_row(dims, element_bytes), wide], axis=-1
    )


def _aligned_row(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
    """1 where rows start on 16 bytes, the widest load."""
    return jnp.where(is_multiple(dims["cols"], 16.0 / element_bytes, dims), 1.0, 0.0)


ELEMENTWISE_OPS: tuple[str, ...] = (*BINARY_OPS, *UNARY_OPS, "pointwise")
ELEMENTWISE = _family("elementwise", ELEMENTWISE_OPS)
STRIDED_OPS: tuple[str, ...] = ("add_permuted", "pointwise_permuted", "copy_permuted")
STRIDED = replace(_family("strided", STRIDED_OPS), dims=STRIDED_DIMS)
"""Elementwise kernels with an operand in another order than the rest, as a permuted view leaves it."""
SOFTMAX = _family("softmax", ("softmax", "softmax_backward"), _softmax_passes, by_rows=True)
NORM = _family(
    "norm",
    (
        *("layernorm", "layernorm_backward", "layernorm_weight_gradient"),
        *("batchnorm_channels", "batchnorm_channels_backward", "groupnorm", "groupnorm_backward"),
    ),
    _norm_passes,
    by_rows=True,
)
"""Layer norms; group norms, a block of threads a group of an image; batch norms where the pixels of a channel lie
together, a block a channel. Their reads are those of one pass."""
MEMORY = _family(
    "memory",
    (
        "embedding",
        "embedding_backward",
        "copy",
        "dropout",
        "dropout_backward",
        "where",
        "fill",
        "gather",
        "scatter",
        "cumsum",
        "reduce",
        "max",
        "sort",
        "random",
        "batchnorm",
        "batchnorm_backward",
        "unmodelled",
    ),
)

COUNTED = replace(_family("counted", ("fft", "unmodelled")), dims=(*DIMS, "flop"), work=_counted_work)
"""Operators known by their FLOP and bytes alone, on the vector path: FFTs, and unmodelled ones whose FLOP a textbook
counts (factorisations, products in a dtype without a rate)."""

STREAM = _family("stream", ("quantize", "pointwise", "add", "gelu", "embedding"), graphed=True)
"""Elementwise kernels of serving frameworks, inside CUDA graphs; fitted to the quantization of activations."""
REDUCTION = _family("reduction", ("quantize_rows", "layernorm", "softmax"), by_rows=True, graphed=True)
"""Their row reductions, likewise; fitted to quantization with a scale for each row."""
WINDOW_OPS: tuple[str, ...] = (
    *("depthwise_conv", "depthwise_conv_data_gradient", "depthwise_conv_weight_gradient"),
    *("pool", "pool_backward", "scan"),
)
WINDOW = replace(ELEMENTWISE, name="window", ops=WINDOW_OPS, dims=(*ELEMENTWISE.dims, "taps"), work=_window_work)
"""Rows × cols are the elements of what a pass loops over, `taps` the loads of each of them."""
