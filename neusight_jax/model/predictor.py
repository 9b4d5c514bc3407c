"""The forecast of kernels with its parts, the interface that every predictor gives it through, and the roofline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.errors import unknown_name
from neusight_jax.hardware.cluster import Machine, gpu_of, topology_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family, Work
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.heads import ChosenTile, largest_tile
from neusight_jax.model.roofline import (
    Isolated,
    LowerBounds,
    Relaxation,
    Scalar,
    element_bytes,
    lower_bounds,
    peak_flop_per_s,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelForecast:
    """A forecast of kernels with its parts, all [kernel].

    Attributes:
      seconds: forecast latency of one launch.
      bounds: lower bounds.
      compute_s, memory_s: time of the arithmetic side (its limits included) and of memory, before they overlap; the
        way between L2 and SMs is in neither.
      launch_s: what is added before and after the body: launch and serial overhead.
      tile: the tile reported.
    """

    seconds: Float[Array, " kernel"]
    bounds: LowerBounds
    compute_s: Float[Array, " kernel"]
    memory_s: Float[Array, " kernel"]
    launch_s: Float[Array, " kernel"]
    tile: ChosenTile

    def at_least(self, waited_s: Float[Array, "*kernel"]) -> KernelForecast:
        """The same kernels where each takes no less than this, seconds: what it waits is part of its launch."""
        waits_s = jnp.maximum(waited_s - self.seconds, 0.0)
        return replace(self, seconds=self.seconds + waits_s, launch_s=self.launch_s + waits_s)

    @property
    def utilization(self) -> Float[Array, " kernel"]:
        """Share of the speed of light reached while the kernel runs, in (0, 1].

        An ensemble mean keeps it at most 1: a geometric mean of sums is at least the sum of the geometric means.
        """
        return jnp.minimum(self.bounds.speed_of_light_s / (self.seconds - self.launch_s), 1.0)


@runtime_checkable
class Predictor(Protocol):
    """Interface of every predictor and baseline: a pytree that forecasts the families it covers."""

    def covers(self, family: Family) -> bool:
        """Whether it can forecast a family; a checkpoint covers those it was trained on."""
        ...

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast the kernels of one family on one machine.

        Args:
          family: of all kernels of the batch; the predictor covers it.
          machine: a GPU, or a cluster for a family that sends to other GPUs; figures are scalars or arrays [kernel].
          batch: the kernels, padding rows included.
          isolated: whether a kernel runs alone, as a sweep measures it, launch floor included; one answer, or [kernel].
          relaxation: how far whole waves are smoothed, 0 to 1 (`roofline.whole_waves` states the bias).
        """
        ...


# Textbook roofline: max(FLOP / peak, bytes / bandwidth), every byte from memory, no launch; and what baselines share.
#
# Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.


class Bounded(NamedTuple):
    """Kernels of one family on a GPU, with their bounds.

    Attributes:
      gpu, work: the machine, and what the kernels ask of it.
      peak: of the kernels' arithmetic path, FLOP/s.
      bounds: lower bounds; memory_s: all bytes at full bandwidth, seconds.
    """

    gpu: GPU
    work: Work
    peak: Float[Array, " kernel"]
    bounds: LowerBounds
    memory_s: Float[Array, " kernel"]

    def forecast(
        self,
        body_s: Float[Array, " kernel"],
        launch_s: Scalar = 0.0,
        compute_s: Array | None = None,
        memory_s: Array | None = None,
    ) -> KernelForecast:
        """A forecast of body and launch, the body never below the speed of light.

        Args:
          body_s: seconds without what is added before and after.
          launch_s: seconds that are added.
          compute_s: seconds of the arithmetic side [kernel]; None = its bound.
          memory_s: seconds of memory [kernel]; None = all bytes at full bandwidth.
        """
        body_s = jnp.maximum(body_s, self.bounds.speed_of_light_s)
        launch_s = jnp.broadcast_to(jnp.asarray(launch_s, body_s.dtype), body_s.shape)
        compute_s = self.bounds.compute_s if compute_s is None else compute_s
        memory_s = self.memory_s if memory_s is None else memory_s
        tile = largest_tile(self.gpu, self.work)
        return KernelForecast(body_s + launch_s, self.bounds, compute_s, memory_s, launch_s, tile)


def bounded(family: Family, machine: Machine, batch: KernelBatch) -> Bounded:
    """Kernels of one family on a machine, with their bounds."""
    gpu = gpu_of(machine)
    work = family.work(batch.dims, element_bytes(batch.dtype))
    peak = peak_flop_per_s(gpu, family, batch.dtype)
    return Bounded(
        gpu,
        work,
        peak,
        lower_bounds(gpu, work, peak, topology_of(machine) if family.linked else None),
        work.bytes_moved / gpu.mem_bytes_per_s,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RooflinePredictor:
    """The textbook roofline; it has no parameters."""

    def covers(self, family: Family) -> bool:
        """All families."""
        return True

    def forecast_kernels(
        self, family: Family, machine: Machine, batch: KernelBatch, *, isolated: Isolated, relaxation: Relaxation = 0.0
    ) -> KernelForecast:
        """Forecast kernels of one family; `isolated` and `relaxation` change nothing.

        Args: as of `Predictor.forecast_kernels`.
        """
        kernels = bounded(family, machine, batch)
        return kernels.forecast(kernels.bounds.roofline_s)


BASELINES: dict[str, Predictor] = {"roofline": RooflinePredictor()}
"""Baselines that need no fitting, by name."""


def load_baseline(name: str) -> Predictor:
    """A baseline by name; `InputError` for an unknown one."""
    if name not in BASELINES:
        raise unknown_name("baseline", name, BASELINES)
    return BASELINES[name]
