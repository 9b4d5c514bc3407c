"""`nj.design`, Pareto fronts and inverse questions: from a problem to answers a person can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.designs.cost import CostModel, costs_for
from neusight_jax.designs.loads import ALONE, Service
from neusight_jax.designs.model import LossFunction, ModelUse, model_use
from neusight_jax.designs.problem import OBJECTIVES, Given, Problem, arguments, metrics
from neusight_jax.designs.search import Found, Search, Settings
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.shape import ModelShape
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import memory_bytes
from neusight_jax.hardware.catalog import catalog_gpu, list_gpus, list_servers
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of
from neusight_jax.hardware.files import node_topology
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.hardware.variant import fields_of, figure, vary_plainly
from neusight_jax.job.job import Job
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.intervals import far_note, ratio_interval
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.prediction import carries_intervals, predict
from neusight_jax.records import Result
from neusight_jax.sweeps.space import MODEL_FIELDS, Range
from neusight_jax.units import with_unit
from neusight_jax.workloads import Workload, workload, workload_dict

if TYPE_CHECKING:
    import pandas as pd


# Which budgets bind, and what one percent more of each would buy.

BINDING = 0.01
"""A budget binds when less than this share of it is left (steps of the fields leave some)."""
RELAXATION = 1.0
"""Of whole waves in the derivatives: exact ones do not see the SM count's waves."""


@dataclass(frozen=True)
class Multipliers:
    """First-order conditions at a machine, in logarithms.

    Attributes:
      budgets: budget -> −d log objective / d log limit: one percent more buys this many percent; 0 if it does not bind.
      left: budget -> share of it that is left.
      bounds: fields at a bound -> the same for moving that bound outwards by 1 %.
      residual: norm of what the multipliers leave of the objective's gradient, over its norm; small at an optimum.
      slopes: free field -> d log objective / d log field: their ratios are what a percent of one is worth in another.
    """

    budgets: dict[str, float]
    left: dict[str, float]
    bounds: dict[str, float]
    residual: float
    slopes: dict[str, float] = field(default_factory=dict)


def multipliers(
    search: Search, logs: Float[np.ndarray, " field"], limits: dict[str, float] | None = None
) -> Multipliers:
    """Non-negative least squares of −∇ log objective on the gradients of binding budgets and bounds.

    Reference: Karush-Kuhn-Tucker conditions; Lawson and Hanson, Solving Least Squares Problems, 1974 (scipy nnls).
    """
    from scipy.optimize import nnls

    problem = search.problem
    chosen = {**problem.budgets, **(limits or {})}
    slope, slopes = search.slopes(logs, RELAXATION)
    _, spent = search.values(logs[None])
    left = {name: 1.0 - float(np.exp(spent[name][0])) / limit for name, limit in chosen.items()}
    columns: list[tuple[str, str, np.ndarray]] = [
        ("budget", name, slopes[name]) for name in chosen if left[name] < BINDING
    ]
    for place, axis in enumerate(problem.free):
        for end, sign in ((search.high, 1.0), (search.low, -1.0)):
            if abs(logs[place] - end[place]) < AT_BOUND:
                columns.append(("bound", axis.field, sign * np.eye(len(logs))[place]))
    budgets, bounds = dict.fromkeys(chosen, 0.0), {}
    residual = 1.0
    if columns:
        matrix = np.stack([column for _, _, column in columns], axis=1)
        prices, rest = nnls(matrix, -slope)
        size = float(np.linalg.norm(slope))
        residual = float(rest) / size if size > 0.0 else 0.0
        for (kind, name, _), price in zip(columns, prices, strict=True):
            if kind == "budget":
                budgets[name] = float(price)
            else:
                bounds[name] = float(price)
    prices_of = {axis.field: float(slope[place]) for place, axis in enumerate(problem.free)}
    return Multipliers(budgets, left, bounds, residual, prices_of)


# What to know of a design before trusting it: bounds it ends on, what nobody measured, workloads that are unlike.

AT_BOUND = 1e-3
"""A field is at its bound within this distance in log."""


def ends_of(ranges: Sequence[Range], figures: Mapping[str, float]) -> dict[str, str]:
    """Fields that ended on a bound of their range: "low", "high", or "low and high" where the range is one value."""
    out = {}
    for axis in ranges:
        ends = {"low": float(axis.rounded(axis.low)), "high": float(axis.rounded(axis.high))}
        met = [end for end, value in ends.items() if abs(np.log(figures[axis.field] / value)) < AT_BOUND]
        if met:
            out[axis.field] = " and ".join(met)
    return out


def bound_notes(ranges: Sequence[Range], figures: Mapping[str, float]) -> list[str]:
    """A sentence for every field that ended on a bound of its range, or outside all GPUs of the catalog."""
    notes = []
    for name, end in ends_of(ranges, figures).items():
        wider = "" if end == "low and high" else "; a wider --free may give another answer"
        notes.append(f"{name} ends on the {end} bound of its range, {with_unit(name, figures[name])}{wider}")
    for axis in (axis for axis in ranges if axis.field not in MODEL_FIELDS):
        low, high = _catalog_range(axis.field)
        value = figures[axis.field]
        if not low <= value <= high:
            what = "GPU" if axis.field in FIELDS else "server"
            span = f"{with_unit(axis.field, low)} to {with_unit(axis.field, high)}"
            notes.append(
                f"{axis.field} of {with_unit(axis.field, value)} is outside every {what} of the catalog ({span})"
            )
    return notes


@cache
def _catalog_range(field: str) -> tuple[float, float]:
    """Smallest and largest value of a figure among the GPUs, or servers, of the catalog that have it."""
    if field in FIELDS:
        machines: list[Machine] = [catalog_gpu(name) for name in list_gpus()]
    else:  # of links and networks: the usual servers
        gpu = catalog_gpu(list_gpus()[0])
        machines = [Cluster(gpu, node_topology(name, gpu), 1) for name in list_servers()]
    values = [value for machine in machines if (value := float(np.asarray(figure(machine, field)))) > 0]
    return (min(values), max(values)) if values else (0.0, np.inf)


def workload_notes(problem: Problem) -> list[str]:
    """Notes on what the graphs assumed, and whether eager and fused ones count in one objective."""
    graphs = [load.graph for load in problem.workloads]
    notes = list(dict.fromkeys(note for graph in graphs for note in graph.notes))
    names = {fused: [load.name for load in problem.workloads if load.graph.fused is fused] for fused in (True, False)}
    if names[True] and names[False]:
        notes.append(
            f"one objective mixes eager and fused workloads: {', '.join(names[False])} with every elementwise kernel "
            f"by itself, {', '.join(names[True])} with them merged; --fused merges all"
        )
    return notes


def machine_notes(problem: Problem, gpu: GPU, family_s: Mapping[str, Any]) -> list[str]:
    """Notes on how far a machine lies from those measured, and what does not fit into its memory.

    Args:
      family_s: seconds on it by family, of all workloads.
    """
    intervals = getattr(problem.predictor, "intervals", None)
    notes = []
    if intervals is not None:
        network = np.array([FAMILIES[name].network for name in family_s])
        seconds = np.array([float(np.sum(part)) for part in family_s.values()])
        notes += far_note(intervals, gpu, network, seconds, "extrapolated")
    for load in problem.workloads:
        budgeted = isinstance(load.step, Service | ModelUse)  # their memory is a metric of the design
        needed, there = 0.0 if budgeted else memory_bytes(load.graph), float(np.asarray(gpu.mem_bytes))
        if needed > there:
            notes.append(
                f"{load.name} may not fit: it needs about {with_unit('mem_bytes', needed)} of memory, the machine has "
                f"{with_unit('mem_bytes', there)}"
            )
    return notes


def coincidence_note(metric: str, limits: Sequence[float], binding: Sequence[str]) -> str:
    """A sentence for limits of a front that do not bind, or gave nothing better than smaller ones; `binding` does."""
    amounts = ", ".join(with_unit(metric, limit) for limit in limits)
    if not binding:
        return f"{metric} up to {amounts} gives no better design than less of it: there is no use for more"
    points = "points of the front coincide" if len(limits) > 1 else "a point of the front is not at its limit"
    return f"{points}, {metric} up to {amounts}: what holds the design there is {', '.join(binding)}"


def infeasible_note(metric: str, limits: Sequence[float]) -> str:
    """A sentence for limits of a front that no machine keeps together with the budgets."""
    amounts = ", ".join(with_unit(metric, limit) for limit in limits)
    return f"no machine in the bounds keeps every budget with {metric} up to {amounts}: no point there"


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
      rounding: objective over the least that a model or machine reaches without steps, whole tiles and waves.
      shape: of a model that was designed too, its sizes.
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
    rounding: float = 1.0
    shape: ModelShape | None = None

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
            **self._fields("rounding", "evaluations", "seed"),
            **({} if self.shape is None else {"shape": self.shape.figures()}),
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
    """A checked design problem; graphs and jobs count equally, `Workload`s by their weights.

    Args:
      predictor, base, free: as `design`.
      graphs: workloads, with weights as `Workload`.
      objective, budgets, costs: as `design`.
      notes: to say beside every answer.
    """
    loads = tuple(_load(work) for work in graphs)
    alone: Mapping[str, float] = ALONE if any(isinstance(load.step, Service) for load in loads) else {}
    if loads and isinstance(use := loads[0].step, ModelUse):
        asked = {*(OBJECTIVES.get(objective, ()) if isinstance(objective, str) else objective), *(budgets or {})}
        loads = (replace(loads[0], step=use.asked(asked)), *loads[1:])
        alone = use.usual_budgets(asked, gpu_of(base).mem_bytes)
    limits, remarks = {**alone, **(budgets or {})}, tuple(dict.fromkeys(notes))
    return Problem(predictor, base, tuple(free), loads, costs or costs_for(base), objective, limits, remarks)


def _load(work: Graph | Job | Workload) -> Workload:
    if isinstance(work, Workload):
        return work
    return workload(work)


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


def codesign(
    predictor: Predictor,
    machine: GPU,
    base_shape: ModelShape | str | Path | Mapping[str, Any],
    free: Mapping[str, Sequence[float]] | Sequence[Range],
    objective: str | Mapping[str, float] = "latency",
    *,
    loss: str | LossFunction | None = "besiroglu",
    budgets: Mapping[str, float] | None = None,
    costs: CostModel | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    **use: Any,
) -> Design:
    """Search the sizes of a model, with figures of its machine where those are free too: a `design` of both.

    Args:
      predictor: what forecasts.
      machine: the GPU it is served on, or to start from.
      base_shape: sizes to start from, or a config; those that are not free stay.
      free: (low, high) or (low, high, step) of every free field, of `space.MODEL_FIELDS` or of the GPU; or `Range`s.
      objective: as of `design`: latency (of a request), throughput, cost_per_mtok, energy, loss, total_cost and
        total_energy (training and the tokens served), or metric -> exponent.
      loss: law of the loss (`designs.model.model_use`).
      budgets: as of `design`, of `designs.model` too: loss (that of the base unless another is given), ttft_s, tpot_s,
        memory_bytes, parameters, train_days. A model always fits into the memory there is.
      costs, settings, seed: as of `design`.
      use: requests, training and prices, as of `model_use`.
    Raises: `InputError` for an unusable problem.
    """
    ranges = (
        free
        if not isinstance(free, Mapping)
        else [Range(name, ends[0], ends[1], step=ends[2] if len(ends) > 2 else 0.0) for name, ends in free.items()]
    )
    load = model_use(base_shape, machine, loss=loss, **use)
    options: dict[str, Any] = {"costs": costs, "settings": settings, "seed": seed}
    return design(predictor, machine, ranges, [load], objective=objective, budgets=budgets, **options)


def answer(search: Search, point: Found, seed: int = 0, limits: dict[str, float] | None = None) -> Design:
    """A found point as a `Design`: exact metrics, multipliers, the base beside it.

    Args:
      search: whose problem it is.
      point: found by a search.
      seed: of the search, for the record.
      limits: budgets in place of the problem's, by metric.
    """
    task = search.problem
    figures = {axis.field: float(value) for axis, value in zip(task.free, np.exp(point.logs), strict=True)}
    figures = {name: float(axis.rounded(figures[name])) for name, axis in zip(figures, task.free, strict=True)}
    base_logs = np.log([float(np.asarray(task.figure(axis.field))) for axis in task.free])
    metrics_of, seconds_of, parts = search.metrics(np.stack([point.logs, base_logs]))
    seconds, base_seconds = (
        {load.name: float(value) for load, value in zip(task.workloads, seconds_of[place], strict=True)}
        for place in (0, 1)
    )
    names = [name for name in metrics_of if name not in fields_of(task.base) or name in task.budgets]
    after, before = (
        {name: float(metrics_of[name][place]) for name in names}
        | {name: value for name, value in times.items() if name in task.budgets}
        for place, times in enumerate((seconds, base_seconds))
    )
    machine = vary_plainly(task.base, {name: value for name, value in figures.items() if name not in MODEL_FIELDS})
    gpu, use = gpu_of(machine), None if task.model is None else task.model.at(figures)
    rounding = search.rounding(point, limits)
    intervals, changes = time_intervals(task, machine)
    notes = [
        *task.notes,
        *bound_notes(task.free, figures),
        *machine_notes(task, gpu, {name: values[0] for name, values in parts.items()}),
        *workload_notes(task),
    ]
    if use is not None:
        notes += use.notes({name: float(values[0]) for name, values in metrics_of.items()})
        notes.append(f"whole steps, tiles and waves cost {rounding - 1.0:.1%} over the best without any")
    return Design(
        gpu=gpu,
        free=figures,
        metrics=after,
        base_metrics=before,
        seconds=seconds,
        base_seconds=base_seconds,
        budgets={**task.budgets, **(limits or {})},
        feasible=point.feasible,
        multipliers=multipliers(search, point.logs, limits),
        objective=point.objective,
        evaluations=point.evaluations,
        seed=seed,
        trace=point.trace,
        workloads=tuple(
            {"name": load.name, "weight": load.weight, **workload_dict(load.graph)} for load in task.workloads
        ),
        at_bounds=ends_of(task.free, figures),
        notes=tuple(notes),
        cluster=machine if isinstance(machine, Cluster) else None,
        intervals=intervals,
        change_intervals=changes,
        rounding=rounding,
        shape=None if use is None else use.shape,
    )


def time_intervals(
    task: Problem, machine: Machine
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """Intervals of a machine's seconds, and of these over the base's: of every workload, and of `latency_s`."""
    intervals, changes = {}, {}
    # A mean of workloads has an interval only where each of them has one.
    for load in task.workloads:
        if isinstance(load.step, Service | ModelUse) or not carries_intervals(task.predictor):
            return {}, {}
        work = load.step or load.graph
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
    points: list[tuple[float, Design]] = []
    without: list[float] = []
    for limit in sorted(limits):
        chosen = {metric: float(limit)}
        point = search.run(seed, chosen)
        if point.feasible:
            points.append((float(limit), answer(search, point, seed, chosen)))
        else:
            without.append(float(limit))
    front = non_dominated([candidate for _, candidate in points], metric)
    if front:
        front[0] = replace(front[0], front_notes=tuple(_held_notes(points, front, metric, without)))
    return front


def _held_notes(
    points: Sequence[tuple[float, Design]], front: Sequence[Design], metric: str, without: Sequence[float]
) -> list[str]:
    """Sentences for limits that gave no point of their own, and which budgets and bounds held their designs."""
    held: dict[tuple[str, ...], list[float]] = {}
    # Where another budget or a bound binds first, more of the metric buys nothing: the reader must learn which.
    for limit, candidate in points:
        left = candidate.multipliers.left
        if left[metric] < BINDING and any(candidate is kept for kept in front):
            continue
        binding = [
            f"budget {name} <= {with_unit(name, most)}"
            for name, most in candidate.budgets.items()
            if name != metric and left[name] < BINDING
        ]
        binding += [f"the {end} bound of {name}" for name, end in candidate.at_bounds.items()]
        held.setdefault(tuple(binding), []).append(limit)
    sentences = [coincidence_note(metric, limits, binding) for binding, limits in held.items()]
    return [infeasible_note(metric, without), *sentences] if without else sentences


def non_dominated(designs: Sequence[Design], metric: str) -> list[Design]:
    """Designs no other beats in both log objective and metric, by rising metric."""
    front: list[Design] = []
    for candidate in sorted(designs, key=lambda one: (one.metrics[metric], one.objective)):
        if not front or candidate.objective < front[-1].objective:
            front.append(candidate)
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
    task = Problem(predictor, base, (wanted,), (load,), costs_for(base))
    inputs = arguments(task)
    low, high = np.log(float(wanted.rounded(wanted.low))), np.log(float(wanted.rounded(wanted.high)))
    # Each round looks closer, between the first value that meets the target and the one before it, which misses.
    for _ in range(rounds):
        values = np.asarray(wanted.rounded(np.exp(np.linspace(low, high, points))), np.float64)
        seconds = np.asarray(_times(inputs, {wanted.field: jnp.asarray(values, float)}), np.float64)[:, 0]
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
def _times(inputs: Given, figures: dict[str, Array]) -> Float[Array, "gpu workload"]:
    return jax.vmap(lambda row: metrics(inputs, row, 0.0)[1])(figures)


def read_costs(path: Path, base: Machine) -> CostModel:
    """The shipped cost model with coefficients from a JSON or YAML file."""
    from neusight_jax.hardware.files import read_mapping

    content = read_mapping(path, "a file of costs in JSON or YAML")
    try:
        return costs_for(base, content)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
