"""`nj.design`, Pareto fronts and inverse questions: from a problem to answers a person can read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.design.cost import CostModel, costs_for
from neusight_jax.design.multipliers import Multipliers, multipliers
from neusight_jax.design.problem import Given, Problem, arguments, metrics
from neusight_jax.design.search import Found, Search, Settings
from neusight_jax.errors import InputError
from neusight_jax.gpu import FIELDS, GPU
from neusight_jax.graph.graph import Graph
from neusight_jax.hypothetical import vary
from neusight_jax.programs import one_shot
from neusight_jax.sweep.space import Range
from neusight_jax.terms import Predictor
from neusight_jax.workload import Workload, workload


@dataclass(frozen=True)
class Design:
    """A machine a search found.

    Attributes:
      gpu: the machine, plain numbers.
      free: its free fields.
      metrics: exact metrics of it: latency_s, tokens_per_s, costs.
      base_metrics: the same of the base machine.
      seconds: workload -> exact seconds; base_seconds of the base machine.
      budgets: metric -> limit.
      feasible: whether every budget is kept.
      multipliers: which budgets bind and what 1 % more buys.
      objective: log objective. evaluations: forecasts spent, gradients at `GRADIENT_COST`.
      seed: of the search. trace: (evaluations, best log objective so far).
    """

    gpu: GPU
    free: dict[str, float]
    metrics: dict[str, float]
    base_metrics: dict[str, float]
    seconds: dict[str, float]
    base_seconds: dict[str, float]
    budgets: dict[str, float]
    feasible: bool
    multipliers: Multipliers
    objective: float
    evaluations: int
    seed: int
    trace: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinite entries of the trace are null."""
        return {
            **{name: getattr(self, name) for name in ("free", "metrics", "base_metrics", "seconds", "base_seconds")},
            "gpu": {name: float(np.asarray(getattr(self.gpu, name))) for name in FIELDS},
            "budgets": self.budgets,
            "feasible": self.feasible,
            "multipliers": vars(self.multipliers),
            "log_objective": self.objective,
            "evaluations": self.evaluations,
            "seed": self.seed,
            "trace": [[spent, value if np.isfinite(value) else None] for spent, value in self.trace],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        """A table for people."""
        from neusight_jax.design.report import design_tables
        from neusight_jax.report import as_text

        return as_text(design_tables(self))


def problem(
    predictor: Predictor,
    base: GPU,
    free: Sequence[Range],
    graphs: Sequence[Graph | Workload],
    *,
    objective: str | Mapping[str, float] = "latency",
    budgets: Mapping[str, float] | None = None,
    costs: CostModel | None = None,
) -> Problem:
    """A checked design problem; graphs count equally, `Workload`s by their weights."""
    loads = tuple(each if isinstance(each, Workload) else workload(each) for each in graphs)
    return Problem(predictor, base, tuple(free), loads, costs or costs_for(base), objective, dict(budgets or {}))


def design(
    predictor: Predictor,
    base: GPU,
    free: Sequence[Range],
    graphs: Sequence[Graph | Workload],
    *,
    objective: str | Mapping[str, float] = "latency",
    budgets: Mapping[str, float] | None = None,
    costs: CostModel | None = None,
    settings: Settings | None = None,
    seed: int = 0,
) -> Design:
    """Search the machine that does best under budgets (`design.search` says how).

    Args:
      predictor: what forecasts.
      base: the machine to start from; fields that are not free stay, peaks follow SM count and clock.
      free: `Range` of every free field, with steps where values come in multiples.
      graphs: what it is for, with weights if given as `Workload`.
      objective: a name of `design.problem.OBJECTIVES`, or metric -> exponent of a product to minimise.
      budgets: metric -> upper limit, e.g. {"area_mm2": 800, "power_w": 700}.
      costs: the cost model; default `costs_for(base)`.
      settings, seed: how hard to search; equal seeds give equal answers.
    Raises: `InputError` for an unusable problem. A machine that breaks a budget is returned only if none was found that
      keeps all (`feasible` False).
    """
    search = Search(problem(predictor, base, free, graphs, objective=objective, budgets=budgets, costs=costs), settings)
    return answer(search, search.run(seed), seed)


def answer(search: Search, found: Found, seed: int = 0, limits: dict[str, float] | None = None) -> Design:
    """A found point as a `Design`: exact metrics, multipliers, the base beside it."""
    asked = search.problem
    figures = {each.field: float(value) for each, value in zip(asked.free, np.exp(found.logs), strict=True)}
    figures = {name: float(each.rounded(figures[name])) for name, each in zip(figures, asked.free, strict=True)}
    base_logs = np.log([float(np.asarray(getattr(asked.base, each.field))) for each in asked.free])
    metrics_of, seconds_of = search.metrics(np.stack([found.logs, base_logs]))
    own, before = (
        {name: float(values[place]) for name, values in metrics_of.items() if name not in FIELDS} for place in (0, 1)
    )
    seconds, base_seconds = (
        {load.name: float(value) for load, value in zip(asked.workloads, seconds_of[place], strict=True)}
        for place in (0, 1)
    )
    return Design(
        gpu=jax.tree.map(float, vary(asked.base, figures)),
        free=figures,
        metrics=own,
        base_metrics=before,
        seconds=seconds,
        base_seconds=base_seconds,
        budgets={**asked.budgets, **(limits or {})},
        feasible=found.feasible,
        multipliers=multipliers(search, found.logs, limits),
        objective=found.objective,
        evaluations=found.evaluations,
        seed=seed,
        trace=found.trace,
    )


def pareto(search: Search, metric: str, limits: Sequence[float], seed: int = 0) -> list[Design]:
    """The front of the objective against a metric: one search per limit on it, dominated answers left out.

    Args:
      search: of a problem that has a budget on `metric`; each limit replaces it.
      limits: of the metric, in any order.
    Returns: designs that keep their budgets and are not dominated, by rising metric.
    """
    if metric not in search.problem.budgets:
        raise InputError(f"a Pareto front over {metric} needs a budget on it")
    found = []
    for limit in sorted(limits):
        chosen = {metric: float(limit)}
        each = search.run(seed, chosen)
        if each.feasible:
            found.append(answer(search, each, seed, chosen))
    return non_dominated(found, metric)


def non_dominated(designs: Sequence[Design], metric: str) -> list[Design]:
    """Designs no other beats in both log objective and metric, by rising metric."""
    front: list[Design] = []
    for each in sorted(designs, key=lambda one: (one.metrics[metric], one.objective)):
        if not front or each.objective < front[-1].objective:
            front.append(each)
    return front


def required(
    predictor: Predictor,
    base: GPU,
    graph: Graph | Workload,
    wanted: Range,
    target_s: float,
    *,
    points: int = 64,
    rounds: int = 4,
) -> float:
    """The least value of one field with which a model meets a latency: the bandwidth needed for X ms.

    Args:
      wanted: the field and where to look for it.
      target_s: seconds to meet; exact forecasts, whole waves.
      points, rounds: the range is cut into so many, so many times.
    Raises: `InputError` saying the least time in the range, when that misses the target.
    """
    load = graph if isinstance(graph, Workload) else workload(graph)
    asked = Problem(predictor, base, (wanted,), (load,), costs_for(base))
    given = arguments(asked)
    low, high = np.log(float(wanted.rounded(wanted.low))), np.log(float(wanted.rounded(wanted.high)))
    for _ in range(rounds):
        values = np.asarray(wanted.rounded(np.exp(np.linspace(low, high, points))), np.float64)
        seconds = np.asarray(_times(given, {wanted.field: jnp.asarray(values, float)}), np.float64)[:, 0]
        met = np.flatnonzero(seconds <= target_s)
        if not len(met):
            least = f"{seconds.min():.4g} s at {wanted.field} = {values[int(seconds.argmin())]:.4g}"
            raise InputError(
                f"{load.name} does not get to {target_s:.4g} s: {least} is the least; change more than this field"
            )
        place = int(met[0])
        if place == 0:
            return float(values[0])
        low, high = np.log(values[place - 1]), np.log(values[place])
    return float(values[place])


@one_shot
def _times(given: Given, figures: dict[str, Array]) -> Float[Array, "gpu workload"]:
    return jax.vmap(lambda each: metrics(given, each, 0.0)[1])(figures)


def read_costs(path: Path, base: GPU) -> CostModel:
    """The shipped cost model with coefficients from a JSON or YAML file."""
    from neusight_jax.gpu_file import read_mapping

    try:
        return costs_for(base, read_mapping(path))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
