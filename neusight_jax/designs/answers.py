"""`nj.design`, Pareto fronts and inverse questions: from a problem to answers a person can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.designs.cost import CostModel, costs_for
from neusight_jax.designs.jobs import job_load
from neusight_jax.designs.multipliers import BINDING, Multipliers, multipliers
from neusight_jax.designs.notes import (
    bound_notes,
    coincidence_note,
    ends_of,
    infeasible_note,
    machine_notes,
    workload_notes,
)
from neusight_jax.designs.problem import Given, Problem, arguments, metrics
from neusight_jax.designs.search import Found, Search, Settings
from neusight_jax.designs.service import ALONE
from neusight_jax.errors import InputError
from neusight_jax.forecast import predict
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.hardware.variant import fields_of, figure, vary_plainly
from neusight_jax.job.interval import carries_intervals
from neusight_jax.job.job import Job
from neusight_jax.model.intervals import ratio_interval
from neusight_jax.model.programs import one_shot
from neusight_jax.model.terms import Predictor
from neusight_jax.results import Result
from neusight_jax.sweeps.space import Range
from neusight_jax.units import with_unit
from neusight_jax.workloads import Workload, workload, workload_dict

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Design(Result):
    """A machine a search found.

    Attributes:
      gpu: the machine, or one of its GPUs, plain numbers. cluster: of a cluster, the whole.
      free: its free fields.
      metrics: exact metrics of it: latency_s, tokens_per_s, costs, and whatever else has a budget.
      base_metrics: the same of the base machine.
      seconds: workload -> exact seconds; base_seconds of the base machine.
      intervals: `latency_s` and workload -> 80 % interval of its seconds; change_intervals: of its seconds over the
        base's (`intervals.ratio_interval`). None from a predictor without intervals, nor of a service.
      budgets: metric -> limit.
      feasible: whether every budget is kept.
      multipliers: which budgets bind and what 1 % more buys.
      objective: log objective. evaluations: forecasts spent, gradients at `GRADIENT_COST`.
      seed: of the search. trace: (evaluations, best log objective so far).
      workloads: what it is for: `workload_dict` of each, with its name and weight.
      at_bounds: free fields that ended on a bound of their range: "low", "high" or "low and high".
      notes: what to know before trusting it.
      front_notes: of the first design on a front: which limits gave none of their own, and what held them.
    """

    kind: ClassVar[str] = "design"
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
    evaluations: int = 0
    seed: int = 0
    trace: tuple[tuple[int, float], ...] = ()
    workloads: tuple[Mapping[str, Any], ...] = ()
    at_bounds: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    front_notes: tuple[str, ...] = ()
    cluster: Cluster | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    change_intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """One row per figure of the machine and per metric: name, value, value of the base (NaN for figures)."""
        import pandas as pd

        before = {**self.base_seconds, **self.base_metrics}
        values = {**self.free, **self.seconds, **self.metrics}
        return pd.DataFrame([(name, value, before.get(name, np.nan)) for name, value in values.items()], columns=_FRAME)

    def values(self) -> dict[str, Any]:
        """The machine, what it does beside the base, and how it was found; infinite entries of the trace are None."""
        joined = {} if self.cluster is None else {"topology": self.cluster.topology, "gpus": self.cluster.count}
        return {
            **self._fields("workloads", "free", "metrics", "base_metrics", "seconds", "base_seconds"),
            **self._fields("intervals", "change_intervals"),
            "gpu": {name: float(np.asarray(getattr(self.gpu, name))) for name in FIELDS},
            **joined,
            **self._fields("at_bounds", "budgets", "feasible", "multipliers"),
            "log_objective": self.objective,
            **self._fields("evaluations", "seed"),
            "trace": [(spent, value if np.isfinite(value) else None) for spent, value in self.trace],
            "notes": (*self.notes, *self.front_notes),
        }


_FRAME = ["name", "design", "base"]


def problem(
    predictor: Predictor,
    base: Machine,
    free: Sequence[Range],
    graphs: Sequence[Graph | Job | Workload],
    *,
    objective: str | Mapping[str, float] = "latency",
    budgets: Mapping[str, float] | None = None,
    costs: CostModel | None = None,
    notes: Sequence[str] = (),
) -> Problem:
    """A checked design problem; graphs and jobs count equally, `Workload`s by their weights."""
    loads = tuple(_load(each) for each in graphs)
    alone = ALONE if any(each.service is not None for each in loads) else {}
    limits, said = {**alone, **(budgets or {})}, tuple(dict.fromkeys(notes))
    return Problem(predictor, base, tuple(free), loads, costs or costs_for(base), objective, limits, said)


def _load(asked: Graph | Job | Workload) -> Workload:
    if isinstance(asked, Workload):
        return asked
    return job_load(asked) if isinstance(asked, Job) else workload(asked)


def design(
    predictor: Predictor,
    base: Machine,
    free: Sequence[Range],
    graphs: Sequence[Graph | Job | Workload],
    *,
    objective: str | Mapping[str, float] = "latency",
    budgets: Mapping[str, float] | None = None,
    costs: CostModel | None = None,
    settings: Settings | None = None,
    seed: int = 0,
) -> Design:
    """Search the machine that does best under budgets (`designs.search` says how).

    Args:
      predictor: what forecasts.
      base: the GPU or cluster to start from; fields that are not free stay, peaks follow SM count and clock.
      free: `Range` of every free field, with steps where values come in multiples; of a cluster its topology's too.
      graphs: what it is for, with weights if given as `Workload`; jobs on many GPUs need a cluster of as many.
      objective: a name of `designs.problem.OBJECTIVES`, or metric -> exponent of a product to minimise.
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
    base_logs = np.log([float(np.asarray(figure(asked.base, each.field))) for each in asked.free])
    metrics_of, seconds_of, parts = search.metrics(np.stack([found.logs, base_logs]))
    seconds, base_seconds = (
        {load.name: float(value) for load, value in zip(asked.workloads, seconds_of[place], strict=True)}
        for place in (0, 1)
    )
    named = [name for name in metrics_of if name not in fields_of(asked.base) or name in asked.budgets]
    own, before = (
        {name: float(metrics_of[name][place]) for name in named}
        | {name: value for name, value in each.items() if name in asked.budgets}
        for place, each in enumerate((seconds, base_seconds))
    )
    machine = vary_plainly(asked.base, figures)
    gpu = gpu_of(machine)
    intervals, changes = time_intervals(asked, machine)
    notes = [
        *asked.notes,
        *bound_notes(asked.free, figures),
        *machine_notes(asked, gpu, {name: values[0] for name, values in parts.items()}),
        *workload_notes(asked),
    ]
    return Design(
        gpu=gpu,
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
        workloads=tuple(
            {"name": load.name, "weight": load.weight, **workload_dict(load.graph)} for load in asked.workloads
        ),
        at_bounds=ends_of(asked.free, figures),
        notes=tuple(notes),
        cluster=machine if isinstance(machine, Cluster) else None,
        intervals=intervals,
        change_intervals=changes,
    )


def time_intervals(
    task: Problem, machine: Machine
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """Intervals of a machine's seconds, and of these over the base's: of every workload, and of `latency_s`."""
    intervals, changes = {}, {}
    for load in task.workloads:
        if load.service is not None or not carries_intervals(task.predictor):
            return {}, {}
        work: Any = load.job or load.graph
        forecast, base = (predict(task.predictor, place, work) for place in (machine, task.base))
        change = ratio_interval(
            (forecast.total_s, base.total_s), (forecast.interval_s, base.interval_s), (machine, task.base)
        )
        if forecast.interval_s is None or change is None:
            return {}, {}
        intervals[load.name], changes[load.name] = forecast.interval_s, change
    weights = [load.weight for load in task.workloads]
    spans, ratios = ({"latency_s": _weighed(bounds, weights), **bounds} for bounds in (intervals, changes))
    return spans, ratios


def _weighed(bounds: Mapping[str, tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Bounds of a geometric mean of several, which are off alike: the mean of the lows, and of the highs."""
    low, high = np.exp(np.average(np.log(list(bounds.values())), axis=0, weights=weights))
    return float(low), float(high)


def pareto(search: Search, metric: str, limits: Sequence[float], seed: int = 0) -> list[Design]:
    """The front of the objective against a metric: one search per limit on it, dominated answers left out.

    What became of limits without a design of their own is in the `front_notes` of the first.

    Args:
      search: of a problem that has a budget on `metric`; each limit replaces it.
      limits: of the metric, in any order.
    Returns: designs that keep their budgets and are not dominated, by rising metric.
    """
    if metric not in search.problem.budgets:
        raise InputError(f"a Pareto front over {metric} needs a budget on it")
    found: list[tuple[float, Design]] = []
    without: list[float] = []
    for limit in sorted(limits):
        chosen = {metric: float(limit)}
        each = search.run(seed, chosen)
        if each.feasible:
            found.append((float(limit), answer(search, each, seed, chosen)))
        else:
            without.append(float(limit))
    front = non_dominated([each for _, each in found], metric)
    if front:
        front[0] = replace(front[0], front_notes=tuple(_held_notes(found, front, metric, without)))
    return front


def _held_notes(
    found: Sequence[tuple[float, Design]], front: Sequence[Design], metric: str, without: Sequence[float]
) -> list[str]:
    """Sentences for limits that gave no point of their own, and which budgets and bounds held their designs."""
    held: dict[tuple[str, ...], list[float]] = {}
    for limit, each in found:
        left = each.multipliers.left
        if left[metric] < BINDING and any(each is kept for kept in front):
            continue
        binding = [
            f"budget {name} <= {with_unit(name, most)}"
            for name, most in each.budgets.items()
            if name != metric and left[name] < BINDING
        ]
        binding += [f"the {end} bound of {name}" for name, end in each.at_bounds.items()]
        held.setdefault(tuple(binding), []).append(limit)
    said = [coincidence_note(metric, limits, binding) for binding, limits in held.items()]
    return [infeasible_note(metric, without), *said] if without else said


def non_dominated(designs: Sequence[Design], metric: str) -> list[Design]:
    """Designs no other beats in both log objective and metric, by rising metric."""
    front: list[Design] = []
    for each in sorted(designs, key=lambda one: (one.metrics[metric], one.objective)):
        if not front or each.objective < front[-1].objective:
            front.append(each)
    return front


def required(
    predictor: Predictor,
    base: Machine,
    graph: Graph | Job | Workload,
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
    load = _load(graph)
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


def read_costs(path: Path, base: Machine) -> CostModel:
    """The shipped cost model with coefficients from a JSON or YAML file."""
    from neusight_jax.hardware.gpu_file import read_mapping

    content = read_mapping(path, "a file of costs in JSON or YAML")
    try:
        return costs_for(base, content)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
