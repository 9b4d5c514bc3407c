"""The systems a protocol compares: each fits on the GPUs a job may see and hands back predictors.

A new system is one line in `SYSTEMS`. What is fitted by gradients fits all jobs together (`GradientSystem`); anything
else fits job by job (`JobSystem`). All forecasts then go through `Predictor.terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import jax

from neusight_jax.baselines.gbt import GBTPredictor
from neusight_jax.baselines.roofline import RooflinePredictor
from neusight_jax.terms import Predictor
from neusight_jax.tiles import TileChoice
from neusight_jax.training.fit import Job, Settings, fit, sample_of
from neusight_jax.training.kinds import LatencyKind, MixtureKind, NeuSightKind, Roofline3Kind
from neusight_jax.training.rows import Rows

Fitted: TypeAlias = Mapping[str, Sequence[Predictor]]
"""Held-out GPU -> its predictors, one for each fit: all seeds, or one where nothing is drawn at random."""


class System(Protocol):
    """What a protocol can compare."""

    def fit(self, rows: Rows, jobs: Sequence[Job], tile: TileChoice) -> Fitted:
        """Predictors of the rows' family for every GPU held out; no job sees the rows it holds out.

        Args:
          rows: measured rows of all GPUs; jobs: seeds and the one GPU each holds out.
          tile: the family's tile choice, for systems that carry one.
        """
        ...


@dataclass(frozen=True)
class GradientSystem:
    """A kind of the fitting loop; all jobs run together.

    Attributes:
      kind: from the family's tile choice to what is fitted.
      settings: of the optimizer.
    """

    kind: Callable[[TileChoice], LatencyKind]
    settings: Settings

    def fit(self, rows: Rows, jobs: Sequence[Job], tile: TileChoice) -> Fitted:
        """One predictor for each seed, as for a GPU nobody has measured."""
        kind = self.kind(tile)
        best = fit(kind, rows, jobs, self.settings).best
        unmeasured = sample_of(rows.take(slice(0, 1)), seen=False)  # one row without effect stands for all
        out: dict[str, list[Predictor]] = {}
        for position, job in enumerate(jobs):
            member = jax.tree.map(lambda leaf, at=position: leaf[at], best)
            out.setdefault(job.held_out[0], []).append(kind.predictor(member, rows.family, unmeasured))
        return out


@dataclass(frozen=True)
class JobSystem:
    """Fits one job after the other.

    Attributes:
      fit_rows: from the rows a job may see and its seed to a predictor.
      random: whether the seed matters; if not, each GPU left out has one fit.
    """

    fit_rows: Callable[[Rows, int], Predictor]
    random: bool = False

    def fit(self, rows: Rows, jobs: Sequence[Job], tile: TileChoice) -> Fitted:
        """One predictor for each seed, or one if nothing is random."""
        out: dict[str, list[Predictor]] = {}
        for job in jobs:
            fits = out.setdefault(job.held_out[0], [])
            if self.random or not fits:
                fits.append(self.fit_rows(rows.without(job.held_out), job.seed))
        return out


def _fit_gbt(rows: Rows, seed: int) -> Predictor:
    from neusight_jax.training.boosting import fit_forest

    return GBTPredictor({rows.family.network: fit_forest(rows, seed)})


SYSTEMS: dict[str, System] = {
    "mixture": GradientSystem(MixtureKind, Settings()),
    "neusight": GradientSystem(NeuSightKind, Settings(steps=2000)),
    "roofline": JobSystem(lambda rows, seed: RooflinePredictor()),
    "roofline3": GradientSystem(lambda tile: Roofline3Kind(), Settings(steps=400, learning_rate=0.05)),
    "gbt": JobSystem(_fit_gbt, random=True),
}
"""Every system by name; the first is ours."""
OURS = "mixture"
DEFAULT_SYSTEMS: tuple[str, ...] = ("mixture", "neusight", "roofline3", "roofline")
"""What a protocol compares unless told otherwise."""


def chosen_systems(baselines: Sequence[str]) -> tuple[str, ...]:
    """Ours and the baselines named, `all` for every one; the default without names."""
    if not baselines:
        return DEFAULT_SYSTEMS
    names = tuple(SYSTEMS) if "all" in baselines else (OURS, *baselines)
    return tuple(dict.fromkeys(names))
