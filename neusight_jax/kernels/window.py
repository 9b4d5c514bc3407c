"""Kernels that read a window for each output: depthwise convolutions, pooling, cumulative sums.

They stream images as elementwise kernels do, on the vector path whatever the dtype. A tap of the window is one load and
one multiply-add (or comparison), and the output is one store. Neighbours share most of a window, so that its loads hit
a cache: they cost slots of the SM, not traffic. No network was fitted to these kernels: they take that of elementwise
ones.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Float

from neusight_jax.kernels.family import Dims, Work
from neusight_jax.kernels.rowwise import ELEMENTWISE, elements
from neusight_jax.kernels.tensor_gemm import LOADS_PER_CYCLE

OPS: tuple[str, ...] = (
    *("depthwise_conv", "depthwise_conv_data_gradient", "depthwise_conv_weight_gradient"),
    *("pool", "pool_backward", "scan"),
)


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
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


WINDOW = replace(ELEMENTWISE, name="window", ops=OPS, dims=(*ELEMENTWISE.dims, "taps"), work=_work)
"""Rows × cols are the elements of what a pass loops over, `taps` the loads of each of them."""
