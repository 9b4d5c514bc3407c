"""Fits that leave each GPU out in turn: the evidence for intervals and for every claim about unmeasured GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.hardware.catalog import gpu_info
from neusight_jax.model.checkpoint import with_libraries
from neusight_jax.model.heads import TileChoice
from neusight_jax.model.mixture import FamilyMixture, MixturePredictor
from neusight_jax.model.physics import STANDARD
from neusight_jax.model.residuals import FLOOR, IN_MODEL
from neusight_jax.training.data import Rows
from neusight_jax.training.fit import Job, Settings, fit
from neusight_jax.training.objectives import MixtureObjective, generation_mask, members_of, residuals_of, stack_members


@dataclass(frozen=True)
class LeftOut:
    """One family, fitted once per (seed, device left out).

    Attributes:
      kind, rows: what was fitted to what.
      jobs: the fits; best: their parameters, leading axis [job].
    """

    kind: MixtureObjective
    rows: Rows
    jobs: tuple[Job, ...]
    best: Any

    def members(self, device: str) -> Any:
        """Parameters of the fits that did not see a device [seed, ...]."""
        where = np.array([device in job.held_out for job in self.jobs])
        return jax.tree.map(lambda leaf: leaf[where], self.best)

    def of_seed(self, seed: int) -> LeftOut:
        """The fits of one seed."""
        where = np.array([job.seed == seed for job in self.jobs])
        jobs = tuple(job for job in self.jobs if job.seed == seed)
        return replace(self, jobs=jobs, best=jax.tree.map(lambda leaf: leaf[where], self.best))

    def held_out_with(self, device: str) -> tuple[str, ...]:
        """Devices left out together with a device, itself included."""
        return next(job.held_out for job in self.jobs if device in job.held_out)

    def residuals(self) -> dict[str, np.ndarray]:
        """log(measured / forecast) of the isolated rows of every device, by the fits that did not see it."""
        out: dict[str, np.ndarray] = {}
        for device in self.rows.devices:
            rows = self.rows.of_device(device)
            rows = rows.take(rows.isolated > 0.5)
            if len(rows.seconds):
                out |= residuals_of(self.kind, members_of(self.members(device)), rows, seen=False)
        return out

    def parameters(self, device: str) -> FamilyMixture:
        """The ensemble that did not see a device, with the effect of the device's generation, as `merged` makes it."""
        return merged(self.members(device), self.rows, generation_of=device)


def left_out_jobs(seeds: int, devices: Sequence[str], by: str = "device") -> tuple[Job, ...]:
    """A fit for every seed and every device, which it leaves out; or for every "architecture", all its devices.

    None where that would leave nothing to fit to: a single device, or devices of a single architecture.
    """
    groups: dict[str, tuple[str, ...]] = {}
    for device in devices:
        # Siblings of one architecture would give a GPU away that is left out alone.
        key = device if by == "device" else gpu_info(device).architecture
        groups[key] = (*groups.get(key, ()), device)
    return tuple(Job(seed, group) for seed in range(seeds) for group in groups.values() if len(groups) > 1)


def fit_left_out(kind: MixtureObjective, rows: Rows, seeds: int, settings: Settings, by: str = "device") -> LeftOut:
    """Fit a family with each of its devices (or architectures) left out, all fits together.

    Args:
      rows: of all devices.
      seeds: fits of each that is left out.
      settings: of the optimizer.
      by: "device" or "architecture", what is left out in one.
    """
    jobs = left_out_jobs(seeds, rows.devices, by)
    return LeftOut(kind, rows, jobs, fit(kind, rows, jobs, settings).best)


def left_out_predictor(parts: Mapping[str, LeftOut], tiles: Mapping[str, TileChoice], device: str) -> MixturePredictor:
    """The predictor that did not see a device, of the families measured on it."""
    parameters = {name: part.parameters(device) for name, part in parts.items() if device in part.rows.devices}
    return with_libraries(MixturePredictor(parameters, {name: tiles[name] for name in parameters}), device)


def shared_effect(effect: np.ndarray, rows: Rows, device: str) -> np.ndarray:
    """Effect a device's generation shares [effect], from effects [device and then generation, effect]."""
    position = rows.devices.index(device)
    shared = effect[len(rows.devices) + rows.generation[position]]
    return np.where(generation_mask(rows.family), shared, 0.0)


def merged(best: Any, rows: Rows, generation_of: str | None = None) -> FamilyMixture:
    """Join fits to one ensemble, device effects taken out, that of one generation kept if asked for.

    The launch gap fitted to model nodes timed one by one is what they take beyond their kernel and a view
    (`scaling.tables.event_overhead_s`); a model that runs queues its kernels, so the gap becomes
    `Physics.further_launch_s`. What was measured inside CUDA graphs pays the same floor in a model.
    """
    mean = np.asarray(jnp.mean(best.effect, axis=0))
    effect = np.zeros(mean.shape[-1]) if generation_of is None else shared_effect(mean, rows, generation_of)
    stacked: FamilyMixture = stack_members(replace(best, effect=best.effect[:, None], physics=best.physics[:, None]))
    gap = 0.0 if rows.family.tensor_core else jnp.log(STANDARD.further_launch_s) - stacked.log_floor_s
    residual = stacked.residual.at[:, IN_MODEL, FLOOR].set(gap)
    physics = jnp.mean(stacked.physics, axis=0)
    return replace(stacked, effect=jnp.asarray(effect, jnp.float32), residual=residual, physics=physics)
