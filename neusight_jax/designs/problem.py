"""A design problem: what may vary, what it is for, what is wanted and what it may cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.designs.cost import CostModel
from neusight_jax.designs.loads import SERVED, Service, by_workload, job_seconds, served_metrics, step_joules
from neusight_jax.designs.model import LOSS, SIZED, ModelUse, model_metrics
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.variant import fields_of, figure, require_field, vary
from neusight_jax.job.job import Job
from neusight_jax.job.step import check_cluster, mean_counts
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_latency, require_covered
from neusight_jax.model.power import is_limited
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import Relaxation
from neusight_jax.sweeps.space import GRAINS, MODEL_FIELDS, Range
from neusight_jax.workloads import Workload, combined

OBJECTIVES: dict[str, dict[str, float]] = {
    "latency": {"latency_s": 1.0},
    "throughput": {"tokens_per_s": -1.0},
    "latency_area": {"latency_s": 1.0, "area_mm2": 1.0},
    "energy": {"energy_j": 1.0},
    "energy_delay": {"energy_j": 1.0, "latency_s": 1.0},
    "performance_per_dollar": {"latency_s": 1.0, "dollars": 1.0},
    "area": {"area_mm2": 1.0},
    "power": {"power_w": 1.0},
    "cost": {"dollars": 1.0},
    "cost_per_mtok": {"cost_per_mtok": 1.0},
    "loss": {"loss": 1.0},
    "total_cost": {"total_dollars": 1.0},
    "total_energy": {"total_joules": 1.0},
}
"""Objectives as exponents: the product of metrics to these powers is minimised (its logarithm, in the search).

Energy of a step is that of the law of power (`model.power`), of all its GPUs; `power` is the budget of a board by the
cost model. Performance per dollar is maximised. Cost per million tokens is of services (`designs.service`) and models
whose sizes vary (`designs.model`), of which alone loss and the totals of training and serving are."""
TIMES: tuple[str, ...] = ("latency_s", "tokens_per_s")
"""Metrics of all workloads' seconds."""
ENERGY = "energy_j"
"""Metric of all workloads' joules: the weighted geometric mean of those of their steps."""


class Group(NamedTuple):
    """Free fields that a search grows and shrinks together.

    Attributes:
      fields: which of the free fields.
      ceilings, floors: budgets without a forecast that rise, and that fall, as they grow.
      larger_is_better, smaller_is_better: whether larger, or smaller, is never worse by the objective, so that they are
        grown or shrunk until a budget binds.
    """

    fields: tuple[bool, ...]
    ceilings: tuple[str, ...]
    floors: tuple[str, ...]
    larger_is_better: bool = False
    smaller_is_better: bool = False


@dataclass(frozen=True)
class Problem:
    """One design question.

    Attributes:
      predictor, base: what forecasts, and the machine whose other figures stay (peaks follow SM count and clock).
      free: fields that vary, with bounds and steps.
      workloads: what the machine is for; `latency_s` is the weighted geometric mean of their seconds, so that weights
        trade percents for percents.
      objective: a name of `OBJECTIVES`, or exponents of metrics.
      budgets: metric -> upper limit. Metrics: the cost model's, `latency_s`, a workload's name (seconds), figures of
        the machine.
      costs: the cost model.
      notes: what to say beside every answer.
    """

    predictor: Predictor
    base: Machine
    free: tuple[Range, ...]
    workloads: tuple[Workload, ...]
    costs: CostModel
    objective: str | Mapping[str, float] = "latency"
    budgets: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fields = [axis.field for axis in self.free]
        if not fields:
            raise InputError("a design needs at least one free field, e.g. mem_bytes_per_s=1e12:8e12")
        if not self.workloads:
            raise InputError("a design needs at least one model to run")
        for names, what in ((fields, "free field"), ([load.name for load in self.workloads], "workload")):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise InputError(f"{what} {twice[0]} is given twice, expected once")
        for name in fields:
            if self.model is None or name not in MODEL_FIELDS:
                require_field(name, self.base)
        for load in self.workloads:
            require_covered(self.predictor, load.kernels)
            for dtype in load.graph.arithmetic:
                gpu_of(self.base).peak_flop_per_s(dtype)
            if isinstance(load.step, Job):
                check_cluster(self.base, load.step)
        if self.model is not None and len(self.workloads) > 1:
            raise InputError("a model whose sizes vary is designed alone, and there are several workloads")
        if isinstance(self.objective, str) and self.objective not in OBJECTIVES:
            raise unknown_name("objective", self.objective, OBJECTIVES)
        if len({isinstance(load.step, Service) for load in self.workloads}) > 1:
            raise InputError("some workloads are services and others are not; expected targets for all or for none")
        jobs = any(isinstance(load.step, Job) for load in self.workloads)
        if jobs and len({load.graph.num_gpus for load in self.workloads}) > 1:
            raise InputError("some workloads are jobs on many GPUs and others are not; expected one or the other")
        if isinstance(self.workloads[0].step, Service) and "dollars" not in self.metric_names:
            raise InputError("the cost model has no dollars, from which the price of an hour follows; expected dollars")
        for name in (*self.exponents, *self.budgets):
            if self.model is None and name in SERVED and name not in self.metric_names:
                raise InputError(f"{name} is of models that are served; give targets: --slo 'ttft<=1s tpot<=50ms'")
            if self.model is None and name == ENERGY and name not in self.metric_names:
                raise InputError(
                    f"{name} is of steps on boards that nothing holds back; leave out targets, caps and locked clocks"
                )
            if name not in self.metric_names:
                raise unknown_name("metric", name, self.metric_names)
        for name, limit in self.budgets.items():
            if not 0 < limit < math.inf:
                raise InputError(f"budget of {name} is {limit!r}, expected a positive number")

    @property
    def exponents(self) -> Mapping[str, float]:
        """Metric -> exponent in the objective."""
        return OBJECTIVES[self.objective] if isinstance(self.objective, str) else self.objective

    @property
    def model(self) -> ModelUse | None:
        """The model whose sizes may vary, if there is one."""
        step = self.workloads[0].step
        return step if isinstance(step, ModelUse) else None

    def figure(self, name: str) -> ArrayLike:
        """A figure of the base, or of the model there is."""
        return self.model.figure(name) if self.model and name in MODEL_FIELDS else figure(self.base, name)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Everything an objective or a budget may name."""
        costs = tuple(jax.eval_shape(lambda: self.costs.costs(_floats(self.base))))
        sized = () if self.model is None else self.model.sized_names
        return (*self.timed_names, *sized, *costs, *fields_of(self.base))

    @property
    def timed_names(self) -> tuple[str, ...]:
        """Metrics that need a forecast; the others need only the cost model."""
        if self.model is not None:
            return (*TIMES, *self.model.metric_names, self.workloads[0].name)
        services = SERVED if all(isinstance(load.step, Service) for load in self.workloads) else ()
        if not services and not is_limited(self.base):
            services = (ENERGY,)
        return (*TIMES, *services, *(load.name for load in self.workloads))

    @property
    def groups(self) -> tuple[Group, ...]:
        """Free fields that grow together: those of the machine, and those of the model."""
        of_model = np.array([self.model is not None and axis.field in MODEL_FIELDS for axis in self.free])
        times = all(name in self.timed_names and name not in (*SERVED, ENERGY) for name in self.exponents)
        sized = tuple(name for name in self.cheap if name in SIZED)
        floors = tuple(name for name in self.cheap if name == LOSS)
        costs = tuple(name for name in self.cheap if name not in (*SIZED, LOSS))
        groups = (
            Group(tuple(~of_model), costs, (), times),
            Group(tuple(of_model), sized, floors, list(self.exponents) == [LOSS], LOSS not in self.exponents),
        )
        return tuple(group for group in groups if any(group.fields))

    @property
    def cheap(self) -> tuple[str, ...]:
        """Budgets that need no forecast."""
        return tuple(name for name in self.budgets if name not in self.timed_names)

    @property
    def bounds(self) -> tuple[Float[np.ndarray, " field"], Float[np.ndarray, " field"]]:
        """Logarithms of the lowest and highest value of every free field, on its grain."""
        ends = [(axis.rounded(axis.low), axis.rounded(axis.high)) for axis in self.free]
        low, high = (np.log(np.array([float(end[side]) for end in ends])) for side in (0, 1))
        return low, high

    def figures(self, logs: Float[Array, " field"], *, whole: bool | Array = False) -> dict[str, Float[Array, ""]]:
        """Free fields by name from their logarithms; `whole` undoes the rounding of logarithms of whole numbers.

        128 SMs must not come back as 127.99999: ten waves would be eleven.
        """
        figures = {axis.field: jnp.exp(logs[place]) for place, axis in enumerate(self.free)}
        rounded = {name: jnp.where(whole, jnp.round(value), value) for name, value in figures.items() if name in GRAINS}
        return {**figures, **rounded}


def _floats(machine: Machine) -> Machine:
    floats: Machine = jax.tree.map(lambda value: jnp.asarray(value, float), machine)
    return floats


class Given(NamedTuple):
    """A problem as arrays: what does not vary in a search.

    Attributes:
      predictor, costs, base: as `Problem`.
      kernels, counts: as `workload.combined`.
      shares: weights of the workloads, summing to 1.
      tokens: of one step of each workload.
      steps: of each workload (`Workload.step`), None of one whose kernels run one after another.
    """

    predictor: Predictor
    costs: CostModel
    base: Machine
    kernels: KernelTable
    counts: dict[str, Any]
    shares: Float[Array, " workload"]
    tokens: Float[Array, " workload"]
    steps: tuple[Job | Service | ModelUse | None, ...]

    @property
    def model(self) -> ModelUse | None:
        """The model whose sizes may vary, if there is one."""
        return self.steps[0] if isinstance(self.steps[0], ModelUse) else None

    def machine(self, figures: Mapping[str, Array]) -> Machine:
        """The base with its free figures."""
        return vary(self.base, {name: value for name, value in figures.items() if name not in MODEL_FIELDS})

    def cheap(self, figures: Mapping[str, Array]) -> dict[str, Array]:
        """Metrics that need no forecast: costs, the machine's figures, sizes of a model and its loss."""
        machine = self.machine(figures)
        own = {name: jnp.asarray(figure(machine, name)) for name in fields_of(self.base)}
        sized = {} if self.model is None else self.model.at(figures).sized(own["mem_bytes"])
        return {**self.costs.costs(machine), **own, **sized}


def metrics(
    problem: Given, figures: Mapping[str, Array], relaxation: Relaxation
) -> tuple[dict[str, Array], Float[Array, " workload"], dict[str, Float[Array, " workload"]]]:
    """All metrics of one machine, seconds of every workload, and the same by family.

    Args:
      problem: the design problem, traced.
      figures: the free fields.
      relaxation: see `latency.kernel_latency`.
    """
    machine = problem.machine(figures)
    gpu = gpu_of(machine)
    more: dict[str, Array] = {}
    costs = problem.cheap(figures)
    dearer = costs["dollars"] / problem.costs.costs(problem.base)["dollars"] if "dollars" in costs else jnp.ones(())
    if problem.model is not None:
        more, seconds, parts = model_metrics(problem.model.at(figures), problem.predictor, gpu, dearer, relaxation)
    elif services := [step for step in problem.steps if isinstance(step, Service)]:
        more, seconds, parts = served_metrics(services, problem.shares, problem.predictor, gpu, dearer, relaxation)
    else:
        by_kernel = kernel_latency(problem.predictor, machine, problem.kernels, relaxation=relaxation)
        of_kernels = {name: problem.counts[name] @ values for name, values in by_kernel.items()}
        places, totals, by_family, joules = iter(range(len(problem.steps))), [], [], []
        # Graphs share one table of kernels; the time of a job is that of its pipeline, so it is forecast by itself.
        for job in problem.steps:
            if isinstance(job, Job):
                total, families, of_one = job_seconds(job, problem.predictor, machine, relaxation)
                drawn = (job.plan.layout.gpus, job.kernels, of_one, mean_counts(job))
            else:
                place = next(places)
                families = {name: values[place] for name, values in of_kernels.items()}
                total = sum(families.values(), jnp.zeros(()))
                drawn = (
                    1,
                    problem.kernels,
                    by_kernel,
                    {name: counts[place] for name, counts in problem.counts.items()},
                )
            totals.append(total)
            by_family.append(families)
            joules.append(step_joules(problem.predictor, gpu, total, *drawn))
        seconds, parts = jnp.stack(totals), by_workload(by_family)
        if not is_limited(machine):
            more = {ENERGY: jnp.exp(jnp.sum(problem.shares * jnp.log(jnp.stack(joules))))}
    logs = jnp.log(seconds)
    times = {
        "latency_s": jnp.exp(jnp.sum(problem.shares * logs)),
        "tokens_per_s": jnp.exp(jnp.sum(problem.shares * (jnp.log(problem.tokens) - logs))),
    }
    return {**times, **more, **costs}, seconds, parts


def arguments(problem: Problem) -> Given:
    """A problem as arrays."""
    weights = np.array([load.weight for load in problem.workloads])
    tokens = np.array([load.tokens for load in problem.workloads], float)
    return Given(
        problem.predictor,
        problem.costs,
        _floats(problem.base),
        *combined([load for load in problem.workloads if load.step is None]),
        jnp.asarray(weights / weights.sum(), float),
        jnp.asarray(tokens, float),
        tuple(
            jax.tree.map(lambda size: jnp.asarray(size, float), step) if isinstance(step, ModelUse) else step
            for step in (load.step for load in problem.workloads)
        ),
    )
