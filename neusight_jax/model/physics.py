"""Constants of the physics: value, how far it may be off, and source, in one table.

A constant that is published, or a choice of form, is fixed. One that is an estimate of ours has a `width`: it is a leaf
of the weights, fitted together with them under that prior, inside every fold, and saved with them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax import arithmetic


def _fixed(source: str) -> dict[str, Any]:
    return {"width": 0.0, "source": source}


def fitted(width: float, source: str) -> dict[str, Any]:
    """Metadata of a constant that is fitted: width of the prior of its logarithm, and where its default is from."""
    return {"width": width, "source": source}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Physics:
    """Constants of `roofline` and `mixture`; the defaults are the values before any fit.

    Attributes:
      l2_bytes_per_cycle: bytes an SM takes from L2 per clock.
      warp_schedulers: of an SM, where the GPU does not say.
      issue_flop_per_cycle: fp32 FLOP a warp scheduler can issue per clock if every slot is a fused multiply-add. An SM
        of 64 lanes and four schedulers needs half of its slots for that, one of 128 lanes has none to spare.
      matrix_issue: clocks an fp32 matrix instruction takes to run for each it takes to issue.
      exponentials_per_cycle: of an SM's special-function units per clock, where the GPU does not say.
      softmax_flop: fp32 FLOP of a softmax for every score.
      issue_slots: instructions a product on the vector path issues for every fused multiply-add, itself included.
      operand_bytes_per_cycle: bytes of operands and result that pass between L2 and the registers of an SM per clock.
      operand_norm: order of the norm that joins a block's arithmetic and its operands: 1 = one after the other.
      tile_cycles: clocks a block of a product spends however little it has to do.
      block_cycles: clocks a block of fused attention spends however little it has to do.
      trip_cycles: clocks a thread of a row reduction waits for a load and computes with it.
      warm_share: share of the traffic that still goes to DRAM when the working set lies in L2.
      warm_start, warm_width: working set over L2 size from which that share rises to 1, and over what width.
      kept_start, kept_width: likewise of what a running kernel comes back for, over the L2 it finds room in.
      row_start, row_width: likewise of rows that a reduction reads again, in and out, over a cache.
      rotated_start, rotated_width: likewise of products on tensor cores, whose measurements go round several copies of
        the operands.
      joule_per_flop_16nm: energy of one fp32 FLOP on 16 nm silicon, whole board, J.
      process_exponent: energy per FLOP falls as (node / 16 nm) to this power.
      dtype_energy: energy of one FLOP relative to fp32, in the order of `arithmetic.DTYPES`.
      narrow_flop_per_cycle: 16-bit FLOP a clock of an SM's matrix units at which feeding them takes as much energy as
        their arithmetic: the narrower, the fewer FLOP share an operand fetched and an instruction issued.
      joule_per_byte: energy of one byte of DRAM traffic, J.
      further_launch_s: what a launch costs inside a running model, seconds: kernels queue up, so nearly nothing.
      limit_norm: order of the norm that joins a limit (issue rate, power) to the rest: nearly a maximum.
      least_norm: smallest order of the norm that joins heads which overlap.
    """

    l2_bytes_per_cycle: ArrayLike = field(default=64.0, metadata=_fixed("NVIDIA, Volta to Hopper: 64 B a clock and SM"))
    warp_schedulers: ArrayLike = field(default=4.0, metadata=_fixed("NVIDIA architecture papers; AMD's units alike"))
    issue_flop_per_cycle: ArrayLike = field(
        default=64.0, metadata=_fixed("32 lanes, two FLOP: NVIDIA architecture papers")
    )
    matrix_issue: ArrayLike = field(
        default=16.0, metadata=_fixed("AMD CDNA ISA guide, V_MFMA_F32_32X32X2F32: 16 passes of 4 clocks, issued in 4")
    )
    exponentials_per_cycle: ArrayLike = field(
        default=16.0, metadata=_fixed("CUDA programming guide, arithmetic throughput, 7.0 to 10.0")
    )
    softmax_flop: ArrayLike = field(
        default=8.0, metadata=_fixed("counted: scale, maximum, subtraction, sum, correction, conversion")
    )
    issue_slots: ArrayLike = field(
        default=1.1,
        metadata=fitted(0.1, "8 × 8 results a thread: 64 a step, with 4 loads of 16 bytes and two for the loop"),
    )
    operand_bytes_per_cycle: ArrayLike = field(
        default=28.0, metadata=fitted(0.3, "small tiles of products, in whole waves, on five GPUs")
    )
    operand_norm: ArrayLike = field(default=1.33, metadata=fitted(0.1, "the same"))
    tile_cycles: ArrayLike = field(default=900.0, metadata=fitted(0.3, "the same: three times the way to DRAM"))
    block_cycles: ArrayLike = field(
        default=1500.0, metadata=fitted(0.3, "prologue and epilogue of FlashAttention on A100 and H100")
    )
    warm_share: ArrayLike = field(default=0.12, metadata=fitted(0.5, "copies of small arrays launched again and again"))
    warm_start: ArrayLike = field(default=0.9, metadata=fitted(0.2, "the same, on five GPUs"))
    warm_width: ArrayLike = field(default=0.4, metadata=fitted(0.3, "the same"))
    kept_start: ArrayLike = field(default=1.0, metadata=fitted(0.2, "operands of products fetched again"))
    kept_width: ArrayLike = field(default=0.9, metadata=fitted(0.3, "the same"))
    rotated_start: ArrayLike = field(
        default=0.12, metadata=fitted(0.2, "L40S (96 MB) is warm below 16 MB; H200 beats H100 (50 MB) from 6 MB")
    )
    rotated_width: ArrayLike = field(default=0.13, metadata=fitted(0.3, "the same"))
    joule_per_flop_16nm: ArrayLike = field(default=20e-12, metadata=fitted(0.3, "cards that throttle: P4, T4"))
    process_exponent: ArrayLike = field(
        default=0.75, metadata=fitted(0.2, "16 nm 20 pJ, 12 nm 16 pJ, 7 nm 11 pJ, 4 nm 7 pJ")
    )
    dtype_energy: tuple[float, ...] = field(
        default=tuple(dtype.energy for dtype in arithmetic.TABLE.values()),
        metadata=_fixed(
            "boards at full matrix rate within their power; halves by width; fp64: HPL on A100, 14 TFLOP/s in 400 W "
            "(Selene, Top500 of 2020)"
        ),
    )
    narrow_flop_per_cycle: ArrayLike = field(
        default=2048.0,
        metadata=fitted(
            0.3, "L40S (1024) sustains half to two thirds of its peak in 350 W, Hopper (4096) three quarters"
        ),
    )
    joule_per_byte: ArrayLike = field(
        default=50e-12, metadata=_fixed("HBM2 4 pJ/bit (O'Connor et al., MICRO 2017), GDDR6 7.5, and the way")
    )
    further_launch_s: ArrayLike = field(default=2e-6, metadata=fitted(0.3, "kernels of running models, back to back"))
    limit_norm: ArrayLike = field(default=12.0, metadata=_fixed("nearly a maximum: a card throttles only at its limit"))
    least_norm: ArrayLike = field(default=3.0, metadata=_fixed("heads that overlap at best in part"))
    row_start: ArrayLike = field(
        default=0.6, metadata=fitted(0.5, "half is lost where what is in flight is as much as a cache holds")
    )
    row_width: ArrayLike = field(default=0.8, metadata=fitted(0.3, "the same"))
    trip_cycles: ArrayLike = field(
        default=600.0,
        metadata=fitted(0.3, "a load from DRAM takes 470 to 540 clocks (Luo et al. 2024), then arithmetic"),
    )


CONSTANTS: dict[str, dataclasses.Field[Any]] = {item.name: item for item in dataclasses.fields(Physics)}
"""Constants by name: default value, `metadata["width"]` (of its logarithm; 0 = not fitted) and `metadata["source"]`."""
FITTED: tuple[str, ...] = tuple(name for name, item in CONSTANTS.items() if item.metadata["width"] > 0.0)
"""Constants that are leaves of the weights, in the order of a family's `physics`."""
STANDARD = Physics()
"""The constants before any fit: what bounds and baselines take."""


def fitted_physics(moved: Float[Array, " constant"]) -> Physics:
    """The constants of a family.

    Args:
      moved: how far each of `FITTED` is from its default, in widths of its prior; zeros = as `STANDARD`.
    Gradients: reach `moved`; every constant stays positive.
    """
    widths = np.array([CONSTANTS[name].metadata["width"] for name in FITTED])
    values = np.array([getattr(STANDARD, name) for name in FITTED]) * jnp.exp(widths * moved)
    return dataclasses.replace(STANDARD, **dict(zip(FITTED, values, strict=True)))
