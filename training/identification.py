"""Identification: figures of a machine that explain measured kernels or steps, how sure they are, and what is not told.

With θ the logarithms of figures over those of the base, y and f(θ) the logarithms of measured and forecast seconds,

    −2 log p(θ | y) = (y − f(θ))ᵀ (C + N)⁻¹ (y − f(θ)) + Σ (θ / width)²

C is the covariance of the predictor's own errors on a machine nobody has measured, and N that of a measurement
(`prior.error_covariance`). So figures move only as far as the forecast is to be believed. The most probable θ is found
by damped Gauss-Newton steps from several starts, and the posterior around it is normal (Laplace). Rows that do not fit
count less, as in a calibration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import FIELDS, LIMITS, SWITCHES
from neusight_jax.hardware.variant import vary, vary_plainly
from neusight_jax.job.job import Job
from neusight_jax.job.step import latency
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.residuals import FLOOR
from neusight_jax.prediction import predict
from neusight_jax.records import Record, Result
from neusight_jax.training.calibration import calibratable, measured_kernels
from neusight_jax.training.prior import DEVIATIONS, Prior, error_covariance

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.datasets.measurements import Measurements

LAUNCH = "launch_s"
"""Seconds of a launch, its host included: the floor of the predictor, the one figure that no sheet has."""
FIGURES: tuple[str, ...] = ("clock_hz", "mem_bytes_per_s", "l2_bytes", "power_limit_w", LAUNCH)
"""Figures that are looked for unless others are named; peaks go with the clock."""
MOVABLE: tuple[str, ...] = (*(name for name in FIELDS if name not in SWITCHES), *LIMITS, LAUNCH)
"""Figures that can be looked for."""
WIDTH = 1.0
"""Prior width of a figure, natural logarithm: the sheet may be wrong by a factor of three."""
MOST_ODDS = 50.0
"""Largest odds that are told, natural logarithm: beyond, a number says nothing more."""
STARTS, STEPS, ROUNDS = 16, 25, 3
"""Starts drawn from the prior, steps from each, and rounds of those with the errors as they are at the answer."""
FARTHEST = 1.0
"""Longest step of a figure, natural logarithm."""
UNTOLD = 0.7
"""Posterior over prior width from which a direction counts as not narrowed: half of the variance is left."""
TOGETHER, TIED = 0.3, 0.8
"""Least part of a figure in a direction that names it; correlation from which two figures are said to be tied."""

Steps: TypeAlias = Sequence[tuple[Graph | Job, float]]
"""Measured steps: a model with its workload, or a job, and seconds."""


@dataclass(frozen=True)
class IdentifiedFigure(Record):
    """A figure of a machine as measurements have it.

    Attributes:
      name: of the figure.
      sheet, value: of the base, and the most probable one.
      low, high: its 80 % interval.
      prior_width: in logarithms; left: posterior over prior width, 1 = the measurements say nothing of it.
    """

    name: str
    sheet: float
    value: float
    low: float
    high: float
    prior_width: float
    left: float


@dataclass(frozen=True)
class Explanation(Record):
    """Some of the figures being off, and no others.

    Attributes:
      off: names of them; none = the base is right.
      misfit: squared errors of the measurements over what they may be off by, a measurement; near 1 = explained.
      odds: probability of the measurements over that with all figures free; a figure that needs not move costs it.
    """

    off: tuple[str, ...]
    misfit: float
    odds: float


@dataclass(frozen=True)
class Identification(Result):
    """A machine as measurements have it.

    Attributes:
      gpu: name of the base; measurements: how many; error_percent: mean error with the base, and with the answer.
      figures: see `IdentifiedFigure`; explanations: the most probable first.
      correlation: of the posterior, [figure, figure].
      machine: the base with its most probable figures; `LAUNCH` is none of a machine.
      notes: what cannot be told apart.
    """

    kind: ClassVar[str] = "identification"
    gpu: str
    measurements: int
    error_percent: tuple[float, float]
    figures: tuple[IdentifiedFigure, ...]
    explanations: tuple[Explanation, ...]
    correlation: tuple[tuple[float, ...], ...]
    machine: Machine
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row per figure."""
        import pandas as pd

        return pd.DataFrame([figure.figures() for figure in self.figures])

    def values(self) -> dict[str, Any]:
        """All of it; of the machine its figures."""
        names = ("gpu", "measurements", "error_percent", "figures", "explanations", "correlation")
        figures = {name: float(np.asarray(value)) for name, value in gpu_of(self.machine).known().items()}
        return {**self._fields(*names), "machine": figures, "notes": self.notes}


def identify(
    predictor: Predictor,
    base: Machine,
    measurements: KernelTable | Measurements | Steps,
    seconds: Float[np.ndarray, " row"] | Sequence[float] | None = None,
    figures: Sequence[str] | Mapping[str, float] = FIGURES,
    *,
    gpu_name: str = "",
) -> Identification:
    """Identify a machine: which figures explain what was measured on it.

    Args:
      predictor: of kind `mixture`, uncalibrated.
      base: the machine as its sheet has it, or as somebody guesses.
      measurements: kernels measured one by one, as `calibrate` takes them; or steps, each with its seconds.
      seconds: measured latency of each row of a table of kernels.
      figures: names of `MOVABLE`, or a mapping from them to prior widths in logarithms; all others are believed.
      gpu_name: for the report only.
    Raises: `InputError` for a predictor of another kind, unknown figures, figures the base lacks, unusable seconds.
    """
    mixture = calibratable(predictor)
    widths = _widths(base, figures)
    steps = not isinstance(measurements, KernelTable) and isinstance(measurements, Sequence)
    if steps:
        evidence = _of_steps(mixture, base, measurements)
    else:
        table, measured = measured_kernels(mixture, measurements, seconds)  # type: ignore[arg-type]
        evidence = _Evidence(np.log(measured), table, lambda machine: error_covariance(mixture, machine, table))
    sheet = _sheet(mixture, base, tuple(widths))
    run = _runner(mixture, base, evidence.works, sheet)
    return _Search(evidence, run, base, sheet, np.array([*widths.values()])).answer(gpu_name)


def _widths(base: Machine, figures: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    widths = dict(figures) if isinstance(figures, Mapping) else dict.fromkeys(figures, WIDTH)
    if not widths:
        raise InputError(f"no figure to look for; expected some of {', '.join(MOVABLE)}")
    for name, width in widths.items():
        if name not in MOVABLE:
            raise unknown_name("figure", name, MOVABLE)
        if not 0.0 < width < np.inf:
            raise InputError(f"the prior width of {name} is {width!r}, expected a number above 0 in logarithms")
        if name in FIELDS and not float(np.asarray(getattr(gpu_of(base), name))) > 0.0:
            raise InputError(f"{name} of the base is 0, which says nothing; give it a first guess, or leave it out")
    return widths


def _sheet(predictor: MixturePredictor, base: Machine, names: Sequence[str]) -> dict[str, float]:
    """Figures of the base; of the launch the mean floor of the families, in logarithms."""
    gpu = gpu_of(base)
    floors = [
        np.mean(np.asarray(family.log_floor_s)) + np.asarray(family.effect)[FLOOR]
        for family in predictor.families.values()
    ]
    usual = {"power_limit_w": gpu.tdp_w, "clock_limit_hz": gpu.clock_hz, LAUNCH: np.exp(np.mean(floors))}
    figures = {**usual, **gpu.known()}
    return {name: float(np.asarray(figures[name])) for name in names}


def _moved(
    predictor: MixturePredictor, base: Machine, figures: Mapping[str, ArrayLike], launch_log: ArrayLike
) -> tuple[MixturePredictor, Machine]:
    """A predictor and a machine with other figures; traced.

    Args:
      figures: of the machine; launch_log: logarithm of the launch over that of the predictor.
    """
    families = {
        name: replace(family, effect=jnp.asarray(family.effect).at[FLOOR].add(launch_log))
        for name, family in predictor.families.items()
    }
    return replace(predictor, families=families), vary(base, figures) if figures else base


Errors: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Covariance of log errors of a forecast [row, row], and variance of each measurement [row]."""
Run: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From θ [start, figure] to logarithms of forecasts [start, row] and their slopes [start, row, figure]."""


@dataclass(frozen=True)
class _Evidence:
    """Measurements.

    Attributes:
      logs: of measured seconds.
      works: a table of kernels measured one by one, or the works of steps.
      errors: how far forecasts may be off on a machine.
    """

    logs: np.ndarray
    works: KernelTable | tuple[KernelTable | Job, ...]
    errors: Callable[[Machine], Errors]


def _of_steps(predictor: MixturePredictor, base: Machine, steps: Any) -> _Evidence:
    """Steps, whose errors are one: of a GPU left out, all whole models are off alike (docs/accuracy.md, intervals)."""
    forecasts = [predict(predictor, base, work) for work, _ in steps]
    measured = np.array([seconds for _, seconds in steps], np.float64)
    if not len(measured) or not np.all(np.isfinite(measured) & (measured > 0.0)):
        raise InputError(f"measured steps take {measured.tolist()} s, expected positive numbers, at least one")
    if any(forecast.interval_s is None for forecast in forecasts):
        raise InputError("this predictor carries no intervals of whole models; take a checkpoint such as fp32")
    ends = np.array([forecast.interval_s for forecast in forecasts])
    deviation = 0.5 * np.log(ends[:, 1] / ends[:, 0]) / DEVIATIONS
    works = tuple(work.kernels if isinstance(work, Graph) else work for work, _ in steps)
    errors = np.outer(deviation, deviation), np.full(len(measured), Prior().noise ** 2)
    return _Evidence(np.log(measured), works, lambda machine: errors)


@functools.partial(jax.jit, static_argnames="names")
def _forecast(
    predictor: MixturePredictor, base: Machine, works: Any, places: Array, sheet: Array, theta: Array, *, names: Any
) -> tuple[Array, Array]:
    """Logarithms of forecasts and their slopes, of many θ at once.

    Args:
      predictor, base: where θ is 0.
      works: as of `_Evidence`; places: of the rows of a table among its families.
      sheet: figures of the base; theta: [start, figure].
      names: of the figures.
    """

    def logs(theta: Array) -> Array:
        logs_of = dict(zip(names, theta, strict=True))
        launch_log = logs_of.pop(LAUNCH, jnp.zeros(()))
        values = dict(zip(names, sheet, strict=True))
        figures = {name: values[name] * jnp.exp(log) for name, log in logs_of.items()}
        using, machine = _moved(predictor, base, figures, launch_log)
        if not isinstance(works, KernelTable):
            return jnp.stack([jnp.log(latency(using, machine, work)) for work in works])
        seconds = kernel_latency(using, machine, works, isolated=True)
        return jnp.log(jnp.concatenate([seconds[name] for name in sorted(seconds)])[places])

    return jax.vmap(lambda one: (logs(one), jax.jacfwd(logs)(one)))(theta)


def _runner(predictor: MixturePredictor, base: Machine, works: Any, sheet: Mapping[str, float]) -> Run:
    places = np.zeros(0, int)
    if isinstance(works, KernelTable):
        order = np.concatenate([np.asarray(works.families[name].row) for name in sorted(works.families)])
        places = np.argsort(order, kind="stable")[len(order) - works.num_rows :]  # padding rows are negative
    names, figures = tuple(sheet), jnp.asarray(list(sheet.values()), float)

    def run(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = jnp.asarray(theta, float)
        values, slopes = _forecast(predictor, on_device(base), works, places, figures, at, names=names)
        return np.asarray(values, np.float64), np.asarray(slopes, np.float64)

    return run


@dataclass(frozen=True)
class _Fits:
    """Most probable θ under each mask, one row each.

    Attributes:
      theta: [mask, figure]; logs: forecast there [mask, row]; slopes: [mask, row, figure].
      cost: −log p without constants [mask].
      precision: of the errors [row, row].
    """

    theta: np.ndarray
    logs: np.ndarray
    slopes: np.ndarray
    cost: np.ndarray
    precision: np.ndarray


@dataclass(frozen=True)
class _Search:
    """The most probable figures.

    Attributes:
      evidence: what was measured; run: what is forecast.
      base, sheet: the machine where θ is 0, and its figures.
      widths: of the prior.
    """

    evidence: _Evidence
    run: Run
    base: Machine
    sheet: dict[str, float]
    widths: np.ndarray

    def answer(self, gpu_name: str) -> Identification:
        """The record of the search."""
        names, count = tuple(self.sheet), len(self.evidence.logs)
        fits = self._fits()
        hessians = self._hessians(fits.slopes, fits.precision)
        covariance = np.linalg.inv(hessians[0])
        deviation = np.sqrt(np.diag(covariance))
        ends = np.exp(fits.theta[0][:, None] + DEVIATIONS * np.outer(deviation, (0.0, -1.0, 1.0)))
        columns = (self.sheet.items(), ends.tolist(), self.widths.tolist(), (deviation / self.widths).tolist())
        figures = tuple(
            IdentifiedFigure(name, sheet, sheet * middle, sheet * low, sheet * high, width, left)
            for (name, sheet), (middle, low, high), width, left in zip(*columns, strict=True)
        )
        evidence = -fits.cost - 0.5 * np.linalg.slogdet(hessians * np.outer(self.widths, self.widths))[1]
        residual = self.evidence.logs - fits.logs
        misfits = np.einsum("mr,rs,ms->m", residual, fits.precision, residual) / count
        odds_of_all = np.exp(np.minimum(evidence - evidence[0], MOST_ODDS))
        explanations = [
            Explanation(tuple(np.array(names)[mask].tolist()), float(misfit), float(odds))
            for mask, misfit, odds in zip(self._masks(), misfits, odds_of_all, strict=True)
        ]
        correlation = covariance / np.outer(deviation, deviation)
        errors = 100.0 * np.mean(np.abs(np.expm1(-residual)), axis=1)
        return Identification(
            gpu=gpu_name,
            measurements=count,
            error_percent=(float(errors[-1]), float(errors[0])),
            figures=figures,
            explanations=tuple(sorted(explanations, key=lambda item: -item.odds)),
            correlation=tuple(map(tuple, correlation.tolist())),
            machine=self._machine(fits.theta[0]),
            notes=tuple(_untold(names, covariance, self.widths)),
        )

    def _machine(self, theta: np.ndarray) -> Machine:
        """The machine at θ as plain numbers; figures that did not move are those of the base."""
        moved = zip(self.sheet.items(), np.exp(theta), strict=True)
        values = {name: float(value * factor) for (name, value), factor in moved if name != LAUNCH}
        return vary_plainly(self.base, values) if values else self.base

    def _masks(self) -> np.ndarray:
        """Figures that may move: all, each alone, none."""
        count = len(self.widths)
        return np.concatenate([np.ones((1, count)), np.eye(count), np.zeros((1, count))]).astype(bool)

    def _hessians(self, slopes: np.ndarray, precision: np.ndarray) -> np.ndarray:
        bent = np.einsum("brf,rs,bsg->bfg", slopes, precision, slopes)
        curved: np.ndarray = bent + np.diag(self.widths**-2.0)
        return curved

    def _fits(self) -> _Fits:
        """The fit of every mask, with the errors that a forecast has where all figures are at their best."""
        masks = self._masks()
        drawn = np.random.default_rng(0).normal(size=(STARTS - 1, len(self.widths))) * self.widths
        starts = np.concatenate([np.zeros((1, len(self.widths))), drawn])
        theta = (masks[:, None] * starts[None]).reshape(-1, len(self.widths))
        free = np.repeat(masks, STARTS, axis=0)
        weight, machine = np.ones(len(self.evidence.logs)), self.base
        # The errors of a forecast depend on the machine, and which rows fit on the answer: both are asked again there.
        for _ in range(ROUNDS):
            covariance, noise = self.evidence.errors(machine)
            precision = np.linalg.inv(covariance + np.diag(noise / weight))
            theta, logs, slopes, cost = self._descended(theta, free, precision)
            best = cost.reshape(len(masks), STARTS).argmin(axis=1) + STARTS * np.arange(len(masks))
            machine = self._machine(theta[best[0]])
            alone = noise / weight * (precision @ (self.evidence.logs - logs[best[0]]))
            weight = Prior().weight(alone)
        return _Fits(theta[best], logs[best], slopes[best], cost[best], precision)

    def _descended(
        self, theta: np.ndarray, free: np.ndarray, precision: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Damped Gauss-Newton steps of many starts at once: θ, forecasts, slopes and cost where they end.

        Args:
          theta: where they start; free: figures that move.
          precision: of the errors.
        """
        prior = self.widths**-2.0

        def judged(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            logs, slopes = self.run(theta)
            residual = self.evidence.logs - logs
            cost = 0.5 * np.einsum("br,rs,bs->b", residual, precision, residual) + 0.5 * theta**2 @ prior
            return logs, slopes * free[:, None], cost

        # All starts step together: a compiled program of many costs little more than that of one.
        damping = np.full(len(theta), 1e-3)
        logs, slopes, cost = judged(theta)
        for _ in range(STEPS):
            hessians = self._hessians(slopes, precision)
            diagonal = np.einsum("bff->bf", hessians)
            pull = np.einsum("brf,rs,bs->bf", slopes, precision, self.evidence.logs - logs) - theta * prior * free
            damped = hessians + (damping[:, None] * diagonal)[:, None] * np.eye(len(prior))
            step = np.linalg.solve(damped, pull[..., None])[..., 0]
            there = theta + np.clip(step, -FARTHEST, FARTHEST)
            new_logs, new_slopes, new_cost = judged(there)
            better = new_cost < cost
            # A step that mends nothing is tried shorter, one that does is trusted more.
            damping = np.where(better, damping / 4.0, damping * 6.0)
            theta = np.where(better[:, None], there, theta)
            logs = np.where(better[:, None], new_logs, logs)
            slopes = np.where(better[:, None, None], new_slopes, slopes)
            cost = np.where(better, new_cost, cost)
        return theta, logs, slopes, cost


def _untold(names: Sequence[str], covariance: np.ndarray, widths: np.ndarray) -> list[str]:
    """What the measurements do not tell: directions that they do not narrow, and figures that go together."""
    values, ways = np.linalg.eigh(covariance / np.outer(widths, widths))
    notes = []
    for value, way in zip(values[::-1], ways.T[::-1], strict=True):
        if value > UNTOLD**2:
            strong = [place for place in np.argsort(-np.abs(way)) if abs(way[place]) > TOGETHER]
            text = " with ".join(
                f"{names[place]}{'' if way[place] * way[strong[0]] > 0 else ' the other way'}" for place in strong
            )
            notes.append(f"not told by these measurements: {text} (still {np.sqrt(value):.0%} of the prior width)")
    deviation = np.sqrt(np.diag(covariance))
    for one, name in enumerate(names):
        for other in range(one):
            tie = covariance[one, other] / (deviation[one] * deviation[other])
            if abs(tie) > TIED:
                notes.append(f"{names[other]} and {name} are told together, not apart (correlation {tie:+.2f})")
    return notes
