"""80 % intervals of steps: those of the kernels, and the spread of measured jobs around their forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.software import EXPERT_SPREAD, STEP_SPREAD
from neusight_jax.job.step import Seconds, once
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.intervals import kernel_interval
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot


@one_shot
def _log_bounds(predictor: Predictor, gpu: GPU, kernels: KernelTable) -> dict[str, list[Any]]:
    found = {name: kernel_interval(predictor, FAMILIES[name], gpu, batch) for name, batch in kernels.families.items()}
    return {name: [each.log_low, each.log_high] for name, each in found.items()}


def once_at(side: int) -> Callable[..., dict[str, np.ndarray]]:
    """`step.once` with every kernel at the low (0) or high (1) end of its interval."""

    def run(predictor: Predictor, machine: Machine, kernels: KernelTable) -> dict[str, np.ndarray]:
        bounds = _log_bounds(predictor, on_device(gpu_of(machine)), kernels)
        seconds = once(predictor, machine, kernels)
        return {name: each * np.exp(np.nan_to_num(np.asarray(bounds[name][side]))) for name, each in seconds.items()}

    return run


def carries_intervals(predictor: Predictor) -> bool:
    """Whether a predictor knows how far its kernels are off."""
    return getattr(predictor, "intervals", None) is not None


def expert_share(own: Seconds) -> np.ndarray:
    """Share of the kernels' time that is in experts, of passes of one stage of each kind, [...]."""
    experts, work = (np.asarray(each)[..., :-1].sum(axis=(-2, -1)) for each in (own.experts, own.work))
    share: np.ndarray = experts / np.maximum(work, 1e-30)
    return share


def step_interval(total: float, ends: tuple[float, float], share: float) -> tuple[float, float]:
    """The 80 % interval of a step, seconds.

    Args:
      ends: of the step with all kernels at the low and the high end of theirs; share: `expert_share`.
    """
    spread = STEP_SPREAD**2 + (EXPERT_SPREAD * share) ** 2
    low, high = (math.sqrt(math.log(end / total) ** 2 + spread) for end in ends)
    return total * math.exp(-low), total * math.exp(high)
