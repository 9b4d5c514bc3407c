"""Power: one law of clock, volts and watts, and the joules of kernels.

Volts over their floor, 1 up to a clock and rising above it, watts of a board, and the clock it settles at:

    V(f) = 1 + slope · max(0, f / boost − flat)
    P(f) = static + V(f)² · (busy · f + FLOP · e / t) + DRAM bytes · e_dram / t
    f*   = the largest f up to boost and any lock with P(f) <= limit;  time = t(f*), energy = time · P(f*)

`busy` is what SMs take in every clock that they are at work; e falls with the width of formats, and both with the node.
What the times of a forecast hold already is the clock that a board settles at within its own power (`stock`): a cap or
a lock moves it from there, and everything that counts clocks with it (`at_clock`). The root has no unrolled loop in
its gradient: bisection finds it, and one Newton step carries the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.arithmetic import DTYPES
from neusight_jax.hardware.cluster import AnyMachine, Machine, gpu_of, with_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.variant import PEAKS
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelBatch, KernelTable
from neusight_jax.model.physics import fitted
from neusight_jax.model.roofline import element_bytes
from neusight_jax.records import Record

PICOJOULE, MICROSECOND = 1e-12, 1e-6
"""Joules of a picojoule, seconds of a microsecond."""
FLOP_A_LANE = 2.0
"""Of a vector lane in a clock: a product and a sum."""
REFERENCE_NM = 4.0
"""Node that energies are given at, nm."""
LEAST_CLOCK = 0.1
"""Lowest clock a board settles at, of its boost clock."""
CLOCKS: tuple[float, ...] = (0.1, 0.25, 0.45, 0.7, 1.0)
"""Clocks, over the stock one, that work is forecast at; between them seconds are powers of the clock."""
STEPS = 40
"""Bisections of the clock: to 1e-12 of it."""
JOULES: tuple[str, ...] = ("busy_j", "flop_j", "dram_j")
"""Energies of kernels: of busy lanes, of arithmetic, of device memory."""
CLOCKED: tuple[str, ...] = ("clock_hz", "exp_per_s", "tdp_w", *PEAKS)
"""Figures that go with the clock. The power head of a forecast holds energy a FLOP over watts, so that its watts go
with it too."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PowerLaw(Record):
    """Constants of the law, traced; each with the width of its prior, in logarithms.

    Attributes:
      static_share: what a board draws with nothing to do, of its power.
      product_pj, attention_pj, decode_pj, stream_pj: energy of a clock of one vector lane, and of what serves it, while
        its SM is at work on matrix products, on attention over many and over single queries, and on all other kernels,
        at 4 nm, picojoules.
      flop16_pj, flop8_pj, flop4_pj, flop32_pj: energy of a FLOP of 16, 8 and 4 bits on matrix units, and of one of 32
        on vector lanes, at 4 nm, picojoules.
      dram_pj: of a byte of device memory, picojoules.
      node_exponent: energies rise as (node / 4 nm) to this power.
      flat: clock up to which volts are at their floor, of the boost clock; slope: volts gained over that clock.
      gap_us: wait between launches where a kernel is measured again and again, microseconds.
    """

    static_share: ArrayLike = field(default=0.22, metadata=fitted(0.4, "idle watts of server boards: 0.1 to 0.4"))
    product_pj: ArrayLike = field(default=5.0, metadata=fitted(0.7, "estimate"))
    attention_pj: ArrayLike = field(default=6.0, metadata=fitted(0.7, "estimate"))
    decode_pj: ArrayLike = field(default=3.0, metadata=fitted(0.7, "estimate"))
    stream_pj: ArrayLike = field(default=5.0, metadata=fitted(0.7, "estimate"))
    flop16_pj: ArrayLike = field(default=0.25, metadata=fitted(0.7, "estimate"))
    flop8_pj: ArrayLike = field(default=0.15, metadata=fitted(0.7, "estimate"))
    flop4_pj: ArrayLike = field(default=0.1, metadata=fitted(0.7, "estimate"))
    flop32_pj: ArrayLike = field(default=3.0, metadata=fitted(0.7, "estimate"))
    dram_pj: ArrayLike = field(default=35.0, metadata=fitted(0.5, "4 to 7 pJ a bit of HBM, and the way to the SMs"))
    node_exponent: ArrayLike = field(default=0.74, metadata=fitted(0.1, "TSMC: N5 takes 0.7 of the power of N7"))
    flat: ArrayLike = field(default=0.72, metadata=fitted(0.1, "A100 at locked clocks: linear to 1.05 of 1.41 GHz"))
    slope: ArrayLike = field(default=1.3, metadata=fitted(0.3, "RTX 3090 over its caps: 0.92 a GHz"))
    gap_us: ArrayLike = field(default=10.0, metadata=fitted(1.0, "a launch from a host takes 5 to 20 us"))

    def volts(self, share: ArrayLike) -> Array:
        """Volts over their floor at a share of the boost clock."""
        return jnp.asarray(1.0 + self.slope * jnp.maximum(jnp.asarray(share) - self.flat, 0.0))


class Draw(NamedTuple):
    """Draw of kernels beside static power; of one kernel, or of a step.

    Attributes:
      busy_w: watts of SMs at work, at the boost clock and volts at their floor.
      flop_j: joules of arithmetic at that volts; dram_j: of device memory.
      seconds: that they take as forecast, at the clock a board settles at by itself.
    """

    busy_w: Array
    flop_j: Array
    dram_j: Array
    seconds: Array

    @property
    def joules(self) -> tuple[Array, Array, Array]:
        """`JOULES` at the boost clock."""
        return self.busy_w * self.seconds, self.flop_j, self.dram_j


def drawn_in(seconds: Array, joules: Iterable[Array]) -> Draw:
    """A draw of so many `JOULES` in so many seconds."""
    busy_j, flop_j, dram_j = joules
    return Draw(busy_j / jnp.maximum(seconds, 1e-30), flop_j, dram_j, seconds)


class Settled(NamedTuple):
    """A board at work.

    Attributes:
      clock: over that it settles at without a cap; share: of the boost clock; power_w: that it draws.
    """

    clock: Array
    share: Array
    power_w: Array


def at_clock(machine: AnyMachine, clock: ArrayLike) -> AnyMachine:
    """A machine whose clock is so many times as high, without a cap or a lock; memory and links stay."""
    gpu = gpu_of(machine)
    moved = {name: jnp.asarray(getattr(gpu, name)) * clock for name in CLOCKED}
    return with_gpu(machine, power_limit_w=None, clock_limit_hz=None, **moved)


def is_limited(machine: Machine) -> bool:
    """Whether a machine has a cap of its power or a locked clock."""
    gpu = gpu_of(machine)
    return gpu.power_limit_w is not None or gpu.clock_limit_hz is not None


def _joules(law: PowerLaw, name: str, dtype: Array) -> tuple[Array, Array]:
    """Energy of a clock of one lane at work on a family, and of a FLOP of each kernel's dtype, at 4 nm."""
    if not FAMILIES[name].matrix:
        return jnp.asarray(law.stream_pj) * PICOJOULE, jnp.full(dtype.shape, 1.0) * law.flop32_pj * PICOJOULE
    by_dtype = {"fp8": law.flop8_pj, "int8": law.flop8_pj, "fp4": law.flop4_pj, "fp32": law.flop32_pj}
    pj = jnp.stack([jnp.asarray(by_dtype.get(dtype_name, law.flop16_pj), float) for dtype_name in DTYPES])
    clock_pj = {"prefill": law.attention_pj, "decode": law.decode_pj}.get(name, law.product_pj)
    return jnp.asarray(clock_pj) * PICOJOULE, pj[dtype] * PICOJOULE


def draw_of(law: PowerLaw, gpu: GPU, family: str, kernels: KernelBatch, seconds: Float[Array, " kernel"]) -> Draw:
    """Draw of one launch of every kernel of a family.

    Args:
      gpu: scalars, or arrays [kernel]; seconds: of one launch, as forecast on it.
    """
    dtype = jnp.asarray(kernels.dtype)
    dims = {name: jnp.asarray(size) for name, size in kernels.dims.items()}
    work = FAMILIES[family].work(dims, element_bytes(dtype))
    clock_j, flop_j = _joules(law, family, dtype)
    node = (jnp.asarray(gpu.process_nm) / REFERENCE_NM) ** law.node_exponent
    busy = clock_j * node * gpu.fp32_flop_per_s / FLOP_A_LANE
    sizes = (busy, work.flop * flop_j * node, work.bytes_moved * law.dram_pj * PICOJOULE, seconds)
    return Draw(*(jnp.broadcast_to(jnp.asarray(size, float), seconds.shape) for size in sizes))


def with_gaps(law: PowerLaw, draw: Draw, isolated: ArrayLike = 1.0) -> Draw:
    """Kernels that are each measured again and again where `isolated` is 1, with the waits between their launches."""
    return drawn_in(draw.seconds + jnp.asarray(isolated) * law.gap_us * MICROSECOND, draw.joules)


def draw_of_step(
    law: PowerLaw,
    gpu: GPU,
    kernels: KernelTable,
    of_one: Mapping[str, Any],
    counts: Mapping[str, Any],
    seconds: Array,
) -> Draw:
    """Draw of the kernels of a step together.

    Args:
      law: of power.
      gpu: the board, without cap and lock.
      kernels: of the step.
      of_one: by family, seconds of one launch of each kernel, [kernel].
      counts: by family, how often each kernel runs, [kernel].
      seconds: that the step takes, waits included.
    """
    total = [jnp.zeros(())] * 3
    for name, batch in kernels.families.items():
        draw, count = draw_of(law, gpu, name, batch, jnp.asarray(of_one[name])), jnp.asarray(counts[name])
        used = jnp.where(count > 0, count, 0.0)
        # Padding has no work, so that what stands there may be no number.
        total = [
            whole + jnp.sum(jnp.where(count > 0, part, 0.0) * used)
            for whole, part in zip(total, draw.joules, strict=True)
        ]
    return drawn_in(seconds, total)


def power_w(law: PowerLaw, gpu: GPU, draw: Draw, share: ArrayLike, slower: ArrayLike = 1.0) -> Array:
    """Watts at a share of the boost clock, where everything takes so many times as long.

    Args:
      law: its constants.
      gpu: the board, without cap and lock.
      draw: what the work takes.
      share: of the boost clock.
      slower: times as long as `draw` says.
    """
    seconds = jnp.maximum(draw.seconds * slower, 1e-30)
    moving = law.volts(share) ** 2 * (draw.busy_w * share + draw.flop_j / seconds)
    return jnp.asarray(law.static_share * gpu.tdp_w + moving + draw.dram_j / seconds)


def _root(excess: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where a rising function is 0 between two points; `high` where it is not yet, `low` where it always is above."""

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        above = excess(middle) > 0.0
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    fixed = jax.lax.stop_gradient
    within = excess(high) <= 0.0
    at, _ = jax.lax.fori_loop(0, STEPS, halve, (fixed(low), fixed(high)))
    at = fixed(at)
    value, slope = jax.jvp(excess, (at,), (jnp.ones_like(at),))
    # Of the value at the root nothing is left but its derivative by what else it depends on.
    step = (value - fixed(value)) / fixed(jnp.where(jnp.abs(slope) > 1e-12, slope, 1e-12))
    moved = jnp.where(at <= low, low, at - step)
    return jnp.where(within, high, moved)


def stock(law: PowerLaw, gpu: GPU, draw: Draw) -> Array:
    """Share of the boost clock that a board settles at within its own power, whose time the forecast is."""
    limit = jnp.asarray(gpu.tdp_w)
    one = jnp.ones_like(draw.seconds)
    return _root(lambda share: power_w(law, gpu, draw, share) - limit, LEAST_CLOCK * one, one)


def slower_by(seconds: Float[Array, "clock ..."]) -> Callable[[Array], Array]:
    """Slowdown of work at a clock over the stock one, from its seconds at `CLOCKS`."""
    at, logs = jnp.log(jnp.array(CLOCKS)), jnp.log(jnp.maximum(seconds, 1e-30))
    logs = logs - logs[-1]

    def slower(clock: Array) -> Array:
        place = jnp.log(clock)
        pieces = [
            logs[knot] + (logs[knot + 1] - logs[knot]) * (place - at[knot]) / (at[knot + 1] - at[knot])
            for knot in range(len(CLOCKS) - 1)
        ]
        log_ratio = pieces[0]
        for knot, piece in enumerate(pieces[1:], 1):
            log_ratio = jnp.where(place > at[knot], piece, log_ratio)
        return jnp.exp(log_ratio)

    return slower


def settle(law: PowerLaw, gpu: GPU, draw: Draw, slower: Callable[[Array], Array] = jnp.ones_like) -> Settled:
    """Where a board settles under its cap and its lock; by itself without either.

    Args:
      slower: how many times as long the work takes at a clock so many times the stock one; of a board without a cap
        and a lock nothing asks.
    """
    by_itself = stock(law, gpu, draw)
    stock_w = jnp.minimum(power_w(law, gpu, draw, by_itself), gpu.tdp_w)
    if not is_limited(gpu):
        return Settled(jnp.ones_like(by_itself), by_itself, stock_w)
    limit = jnp.asarray(gpu.tdp_w if gpu.power_limit_w is None else gpu.power_limit_w)
    lock = jnp.asarray(gpu.clock_hz if gpu.clock_limit_hz is None else gpu.clock_limit_hz) / gpu.clock_hz
    highest = jnp.minimum(lock, 1.0) / by_itself

    def excess(clock: Array) -> Array:
        return power_w(law, gpu, draw, clock * by_itself, slower(clock)) - limit

    clock = _root(excess, jnp.broadcast_to(LEAST_CLOCK / by_itself, highest.shape), highest)
    drawn = power_w(law, gpu, draw, clock * by_itself, slower(clock))
    return Settled(clock, clock * by_itself, jnp.minimum(drawn, jnp.maximum(limit, law.static_share * gpu.tdp_w)))


POWER = PowerLaw(
    static_share=0.2259,
    product_pj=6.031,
    attention_pj=8.451,
    decode_pj=2.161,
    stream_pj=7.706,
    flop16_pj=0.2701,
    flop8_pj=0.1377,
    flop4_pj=0.06965,
    flop32_pj=2.276,
    dram_pj=41.66,
    node_exponent=0.642,
    flat=0.7226,
    slope=0.584,
    gap_us=9.99,
)
"""Fitted to measured watts of kernels, whole models and servers under those priors (`benchmarks.power_law`)."""


def fitted_law(predictor: object) -> PowerLaw | None:
    """The law that was fitted to watts with a predictor, None where none was."""
    law: PowerLaw | None = getattr(getattr(predictor, "base", predictor), "power", None)
    return law


def power_law(predictor: object) -> PowerLaw:
    """The law of a predictor: that fitted with it, else `POWER`."""
    law = fitted_law(predictor)
    return POWER if law is None else law
