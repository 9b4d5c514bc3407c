"""Depthwise convolutions: every channel by a filter of its own, on the vector path whatever the dtype.

A kernel streams images as elementwise ones do, and every tap of the window is one load from shared memory and one
multiply-add. An SM makes 32 such loads a clock (shared memory has 32 banks, CUDA C++ Programming Guide), fewer than it
has lanes, so loads bind where windows are large. No network was fitted to these kernels: they take that of elementwise
ones.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Array, Float

from neusight_jax.kernels.family import Dims, Work
from neusight_jax.kernels.rowwise import ELEMENTWISE, elements

BANKS = 32.0
"""Banks of shared memory, each a word a clock of an SM (NVIDIA, CUDA C++ Programming Guide, "Shared Memory")."""
OPS: tuple[str, ...] = ("depthwise_conv", "depthwise_conv_data_gradient", "depthwise_conv_weight_gradient")


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    streamed, taps = ELEMENTWISE.work(dims, element_bytes), dims["taps"]
    # A multiply-add waits for its load.
    block_taps = streamed.block_flop * taps[:, None, None]
    return replace(
        streamed,
        flop=2.0 * taps * elements(dims),
        block_flop=2.0 * block_taps,
        load_blocks=streamed.blocks,
        load_cycles=block_taps / BANKS,
    )


DEPTHWISE = replace(ELEMENTWISE, name="depthwise", ops=OPS, dims=(*ELEMENTWISE.dims, "taps"), work=_work)
"""Forward, gradient of the data, gradient of the weights; rows × cols are the elements of what a pass loops over."""
