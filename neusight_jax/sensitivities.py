"""Sensitivity: d log latency / d log figure of a GPU, per kernel, family, phase and in total.

An elasticity of −0.4 says: one percent more of this figure takes 0.4 percent off the time. Each is a partial
derivative, everything else fixed. Two figures bring others along on a real chip, so `KNOBS` has rows for them as well:
SMs with their share of every peak, and the clock with every peak.

Exact forecasts (relaxation 0) count whole waves, and `ceil` passes no gradient: more SMs at fixed peaks then show only
their slower blocks. `secants` are differences of the exact forecast over ±`SECANT` and say what really happens;
`relaxation` > 0 smooths the waves, and `relaxed_total_s` beside `total_s` is its bias. Where a slope and its secant
disagree (`Sensitivity.disagreements`), a note says which to trust and why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.forecast import Forecast, explained, seconds_of
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of, on_device, topology_of, with_gpu
from neusight_jax.hardware.gpu import FIELDS, SWITCHES, peak_field
from neusight_jax.hardware.variant import ALL_RATES, KNOBS, RATES, knob
from neusight_jax.job.job import job_from_graph
from neusight_jax.job.step import compose, latency, once, seconds_of_job, settled, silent
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.power import CLOCKED, at_clock, is_limited
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Isolated, Relaxation, relaxation_switch
from neusight_jax.model.software import Software
from neusight_jax.model.streams import PLAIN
from neusight_jax.prediction import busiest_rank, predict, rank_rows
from neusight_jax.records import Result

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.job.job import Job

SECANT = 0.05
"""Half width, in log, of the differences the derivatives are shown beside."""
APART = 2.0
"""A slope and its secant disagree where one is more than so many times the other, or of the other sign."""
LEAST = 0.01
"""Elasticities that are both smaller than this are not compared: neither moves anything."""
TOPOLOGY: tuple[str, ...] = ("link_bytes_per_s", "nic_bytes_per_s", "link_latency_s", "nic_latency_s")
"""Figures of a topology that a step has elasticities for; the first is a GPU's too, which has links of its own."""
ROWS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FIELDS if name not in SWITCHES},
    **{knob(name): fields for name, fields in KNOBS.items()},
    ALL_RATES: RATES,
}
"""What an elasticity is given for: every figure alone, `KNOBS`, and all rates together."""
CLUSTER_ROWS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*ROWS, *TOPOLOGY) if name in FIELDS or name in TOPOLOGY},
    **{name: ROWS[name] for name in ROWS if name not in FIELDS},
    ALL_RATES: (*RATES, *TOPOLOGY[1:]),
}
"""The same of a cluster. All rates are then those of chip, links and network, and latencies that fall with them."""


def rows_of(machine: Machine) -> dict[str, tuple[str, ...]]:
    """Rows of figures that a machine has elasticities for."""
    return CLUSTER_ROWS if isinstance(machine, Cluster) else ROWS


def exponent(row: str, name: str) -> float:
    """Power of a figure in a row: latencies fall where all rates rise."""
    return -1.0 if row == ALL_RATES and name.endswith("latency_s") else 1.0


@dataclass(frozen=True)
class Sensitivity(Result):
    """Elasticities of a model's step on one machine.

    The elasticity of the step is Σ over kernels of `weights` times `elasticities`, and `others` on top.

    Attributes:
      forecast: the exact forecast they belong to, kernel by kernel.
      elasticities: name of `rows_of` the machine -> [kernel], in the forecast's row order.
      weights: share of the step's time that is each kernel's, d log step / d log seconds [kernel].
      others: name of `rows_of` -> what messages between GPUs add.
      host: share of the step that no machine buys: launches by the host, and what a step takes beside its work.
      relaxed_total_s: seconds of the step at `relaxation`.
      relaxation: smoothing of whole waves the derivatives were taken at, 0 = exact.
      secants: name of `rows_of` -> elasticity of the exact total over ±`SECANT`; empty where not asked for.
    """

    kind: ClassVar[str] = "sensitivity"
    forecast: Forecast
    elasticities: dict[str, np.ndarray]
    weights: Float[np.ndarray, " kernel"]
    relaxed_total_s: float
    relaxation: float = 0.0
    secants: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def total_s(self) -> float:
        """Exact seconds of the step."""
        return self.forecast.total_s

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of slopes that disagree with their secants, and of the forecast."""
        return (*disagreement_notes(self.disagreements, self.relaxation), *self.forecast.notes)

    @property
    def disagreements(self) -> dict[str, tuple[float, float]]:
        """Name of `rows_of` -> (slope, secant) where the two disagree (`APART`, `LEAST`)."""
        total = self.total
        pairs = {name: (total[name], secant) for name, secant in self.secants.items()}
        return {name: pair for name, pair in pairs.items() if disagree(*pair)}

    @property
    def trusted(self) -> dict[str, float]:
        """Elasticities of the total within ±`SECANT`: the secant where the slope disagrees with it."""
        return {**self.total, **{name: secant for name, (_, secant) in self.disagreements.items()}}

    @property
    def total(self) -> dict[str, float]:
        """Elasticities of the total, in the order of `rows_of`."""
        return {
            name: float(values @ self.weights) + self.others.get(name, 0.0)
            for name, values in self.elasticities.items()
        }

    def by(self, column: str) -> dict[str, dict[str, float]]:
        """Elasticities by the values of a forecast column (family, phase, node, op, bound), dearest first.

        The elasticity of a sum is the mean of elasticities, weighted with time.
        """
        labels, groups = self.forecast.columns[column].astype(str), {}
        for label in self.forecast.seconds_by(column):
            weights = np.where(labels == label, self.weights, 0.0)
            weights = weights / (weights.sum() or 1.0)
            groups[label] = {name: float(values @ weights) for name, values in self.elasticities.items()}
        return groups

    def to_frame(self) -> pd.DataFrame:
        """The forecast's table with a column `d_FIELD` for every name of `rows_of`."""
        frame = self.forecast.to_frame()
        return frame.assign(**{f"d_{name}": values for name, values in self.elasticities.items()})

    def values(self) -> dict[str, Any]:
        """Totals, elasticities in total, by family and phase, secants, and which of the two to trust."""
        names = ("model", "gpu", "workload", "mode", "dtype", "batch_size", "sequence_length")
        return {
            **{name: getattr(self.forecast, name) for name in names},
            **self._fields("relaxation", "total_s", "relaxed_total_s", "total"),
            "secant": self.secants,
            "trusted": self.trusted,
            "host": self.host,
            "power_w": self.forecast.power_w,
            "clock_hz": self.forecast.clock_hz,
            "family": self.by("family"),
            "phase": self.by("phase"),
            "notes": self.notes,
        }


def disagree(slope: float, secant: float) -> bool:
    """Whether a slope and its secant say different things of a figure that matters."""
    small, large = sorted((abs(slope), abs(secant)))
    return large > LEAST and (slope * secant <= 0.0 or large > APART * small)


def disagreement_notes(pairs: Mapping[str, tuple[float, float]], relaxation: float) -> list[str]:
    """A sentence for figures whose slope and secant disagree: which to trust, and why; counts of SMs and others apart.

    Args:
      pairs: figure -> (slope, secant); relaxation: of the slopes.
    """
    near = f"trust the exact difference over ±{SECANT:.0%} for a chip one would build"
    waves = f"{near}: whole waves are steps, which pass no gradient; --relaxation 1 has a slope without them"
    if relaxation > 0.0:
        waves = f"trust the difference within ±{SECANT:.0%}, where whole waves count, and the slope over a wider range"
    kink = f"{near}: another limit takes over within ±{SECANT:.0%}, and a slope sees one side of the bend"
    notes = []
    for verdict, of_sms in ((waves, True), (kink, False)):
        cases = [
            f"{name} (slope {slope:+.3f}, difference {secant:+.3f})"
            for name, (slope, secant) in pairs.items()
            if name.startswith("num_sms") is of_sms
        ]
        notes += [f"{', '.join(cases)}: {verdict}"] if cases else []
    return notes


def elasticities(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> tuple[dict[str, Float[Array, " kernel"]], dict[str, dict[str, Float[Array, " kernel"]]]]:
    """Seconds of every kernel and their elasticities, by family.

    Args: as `latency.kernel_latency`; a GPU of arrays [kernel] gives every kernel a machine of its own.
    Returns: family -> seconds [kernel]; name of `rows_of` the machine -> family -> d log seconds / d log figure
      [kernel].
    """
    seconds, slopes = by_figure(predictor, machine, kernels, isolated, relaxation)
    return seconds, {
        row: {name: sum(exponent(row, figure) * slopes[name][figure] for figure in fields) for name in seconds}
        for row, fields in rows_of(machine).items()
    }


def by_figure(
    predictor: Predictor, machine: Machine, kernels: KernelTable, isolated: Isolated, relaxation: Relaxation
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """By family, seconds of every kernel, and by figure d log seconds / d log figure [kernel].

    Args:
      predictor, machine, kernels, isolated, relaxation: as `latency.kernel_latency`.
    """
    switches = (jnp.asarray(isolated, float), relaxation_switch(relaxation))
    seconds, slopes = _elasticities(predictor, on_device(machine), kernels, *switches)
    return seconds, slopes


def _figures(machine: Machine) -> dict[str, Any]:
    """Figures of a machine's GPU, and of a cluster's topology, whose links take the place of the GPU's."""
    figures = {name: getattr(gpu_of(machine), name) for name in FIELDS}
    return figures | (
        {name: getattr(machine.topology, name) for name in TOPOLOGY} if isinstance(machine, Cluster) else {}
    )


@one_shot
def _elasticities(predictor: Predictor, machine: Machine, kernels: KernelTable, isolated: Any, relaxation: Any) -> Any:
    value, slopes = {}, {}
    for name, batch in kernels.families.items():

        def seconds(machine: Machine, name: str = name) -> Array:
            part = KernelTable({name: kernels.families[name]}, kernels.launched)
            return kernel_latency(predictor, machine, part, isolated=isolated, relaxation=relaxation)[name]

        # With a machine of its own for every kernel, one pass backwards has all derivatives of all kernels.
        machines = jax.tree.map(lambda figure, rows=batch.row.shape: jnp.broadcast_to(figure, rows), machine)
        value[name], backwards = jax.vjp(seconds, machines)
        (slope,) = backwards(1.0 / value[name])
        slopes[name] = {figure: gradient * _figures(machines)[figure] for figure, gradient in _figures(slope).items()}
    return value, slopes


def secants_of(machine: Machine, total: Callable[[Machine], float]) -> dict[str, float]:
    """Elasticity of the exact total by differences over ±`SECANT`, for every name of `rows_of` the machine."""
    figures = {name: float(np.asarray(value)) for name, value in _figures(machine).items()}

    def log_total(row: str, change: float) -> float:
        fields = rows_of(machine)[row]
        changed = {name: figures[name] * math.exp(exponent(row, name) * change) for name in fields}
        moved: Machine = gpu_of(machine).replace(**{name: value for name, value in changed.items() if name in FIELDS})
        if isinstance(machine, Cluster):
            links = {name: value for name, value in changed.items() if name in TOPOLOGY}
            moved = machine.replace(gpu=moved, topology=machine.topology.replace(**links))
        return math.log(total(moved))

    return {row: (log_total(row, SECANT) - log_total(row, -SECANT)) / (2.0 * SECANT) for row in rows_of(machine)}


def sensitivity(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph | Job,
    *,
    relaxation: float = 0.0,
    gpu_name: str = "",
    notes: tuple[str, ...] | list[str] = (),
    secants: bool = True,
) -> Sensitivity:
    """Elasticities of a model's latency with respect to every figure of a GPU, or of a job's step to a cluster's.

    Args:
      predictor, gpu, graph: as `nj.predict`.
      relaxation: 0 = exact; 1 = no whole waves (module docstring).
      gpu_name, notes: for the report only.
      secants: whether to take them too, which is most of the work.
    Raises: `InputError` when the GPU lacks the arithmetic path of the work's dtype.
    """
    graph = graph.on(gpu_of(gpu).paths, topology_of(gpu).gpus_per_domain)
    forecast = predict(predictor, gpu, graph, gpu_name=gpu_name, notes=notes)
    work = graph.kernels if isinstance(graph, Graph) else graph
    if not is_limited(gpu):
        return _sensitivity(predictor, gpu, graph, forecast, relaxation, secants)
    # The cap and the lock reach the step by its clock alone; seconds at other clocks are numbers, traced by nobody.
    clock, slopes = jax.value_and_grad(lambda limits: settled(predictor, with_gpu(gpu, **limits), work).clock)(
        {name: jnp.asarray(value, float) for name, value in gpu_of(gpu).limits().items()}
    )
    result = _sensitivity(predictor, at_clock(gpu, float(clock)), graph, forecast, relaxation, secants)
    by_limit = {name: float(slope) / float(clock) for name, slope in slopes.items()}
    return _with_limits(result, by_limit, predictor, gpu, work)


def _with_limits(
    result: Sensitivity, by_limit: Mapping[str, float], predictor: Predictor, gpu: Machine, work: KernelTable | Job
) -> Sensitivity:
    """Elasticities at the clock that a board settles at, with those to its cap and its lock.

    Args:
      result: at that clock.
      by_limit: limit -> d log clock / d limit.
      predictor, gpu, work: of the forecast, the board under its limits.
    """
    by_clock = sum(result.total[name] for name in CLOCKED)
    limits = {name: float(np.asarray(value)) for name, value in gpu_of(gpu).limits().items()}
    rows = {name: by_clock * by_limit[name] * value for name, value in limits.items()}

    def log_seconds(name: str, change: float) -> float:
        return math.log(float(latency(predictor, with_gpu(gpu, **{name: limits[name] * math.exp(change)}), work)))

    exact = {}
    if result.secants:
        exact = {name: (log_seconds(name, SECANT) - log_seconds(name, -SECANT)) / (2.0 * SECANT) for name in rows}
    none = dict.fromkeys(rows, np.zeros(len(result.weights)))
    return replace(
        result,
        elasticities={**result.elasticities, **none},
        others={**result.others, **rows},
        secants={**result.secants, **exact},
    )


def _sensitivity(
    predictor: Predictor, gpu: Machine, graph: Graph | Job, forecast: Forecast, relaxation: float, secants: bool
) -> Sensitivity:
    if not isinstance(graph, Graph) or graph.launched == "eager":
        return step_sensitivity(predictor, gpu, graph, forecast, relaxation, secants)
    table, count = graph.kernels, forecast.columns["count"]
    seconds, slopes = elasticities(predictor, gpu, table, relaxation=relaxation)
    cost = np.asarray(_rows(table, seconds) * count, np.float64)

    def total(machine: Machine) -> float:
        return float(np.sum(seconds_of(predictor, machine, table) * count, dtype=np.float64))

    return Sensitivity(
        forecast=forecast,
        elasticities={name: _rows(table, values) for name, values in slopes.items()},
        weights=cost / cost.sum(),
        relaxed_total_s=float(cost.sum()),
        relaxation=float(relaxation),
        secants=secants_of(gpu, total) if secants else {},
    )


def _rows(table: KernelTable, values: Mapping[str, Array]) -> np.ndarray:
    return in_row_order(table, {name: np.asarray(column, np.float64) for name, column in values.items()})


# Sensitivity: the slope of a step by its kernels and messages, times theirs by the figures of the machine.

_HOST: tuple[str, ...] = ("launch_s", "expert_launch_s", "step_s")
"""Numbers of the software that no machine buys."""


def step_sensitivity(
    predictor: Predictor, machine: Machine, work: Graph | Job, forecast: Forecast, relaxation: float, secants: bool
) -> Sensitivity:
    """Elasticities of a step with respect to the figures of a machine; `sensitivity` comes here.

    Args:
      predictor, machine, work: as `sensitivity`.
      forecast: of the work.
      relaxation: of waves, 0 = exact.
      secants: whether exact differences are taken too.
    """
    job = job_from_graph(work) if isinstance(work, Graph) else work
    calls: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []

    def noted(using: Predictor, where: Machine, kernels: KernelTable) -> dict[str, Any]:
        calls.append(by_figure(using, where, kernels, False, relaxation))
        return calls[-1][0]

    pieces = seconds_of_job(predictor, machine, job, run=noted)
    value, kernels, numbers, plain = _slopes(job, machine, predictor, [seconds for seconds, _ in calls], relaxation)
    seconds, slopes = calls[0]
    place, _, count = rank_rows(job, busiest_rank(job, silent(pieces), 0.0)[1])
    cost = in_row_order(job.kernels, {name: np.asarray(family_s) for name, family_s in seconds.items()})[place] * count
    of_kernel = np.bincount(place, cost, job.kernels.num_rows)[place]
    share = in_row_order(job.kernels, {name: np.asarray(gradient) for name, gradient in kernels[0].items()})[place]
    rows, others = rows_of(machine), dict.fromkeys(rows_of(machine), 0.0)
    masks = {family: np.isin(np.asarray(job.kernels.families[family].row), place) for family in seconds}
    # Messages, and kernels that only ranks launch which wait for others, are no rows of the forecast.
    for (_, derivatives), weights in zip(calls, kernels, strict=True):
        for family, weight in weights.items():
            weight = np.where(masks[family], 0.0, weight) if derivatives is slopes else weight
            for row, fields in rows.items():
                of_row = sum(exponent(row, name) * np.asarray(derivatives[family].get(name, 0.0)) for name in fields)
                others[row] += float(np.where(weight != 0.0, of_row, 0.0) @ weight) / value
    for row, fields in rows.items():
        others[row] -= plain / value * (peak_field("fp32") in fields)
    return Sensitivity(
        forecast=forecast,
        elasticities={
            row: np.nan_to_num(_row(job.kernels, slopes, row, fields))[place] for row, fields in rows.items()
        },
        weights=share * cost / np.maximum(of_kernel, 1e-30) / value,
        relaxed_total_s=value,
        relaxation=float(relaxation),
        secants=secants_of(machine, functools.partial(_exact, predictor, job)) if secants else {},
        others=others,
        host=sum(float(getattr(numbers, number)) * float(np.asarray(getattr(job.software, number))) for number in _HOST)
        / value,
    )


def _row(
    table: KernelTable, slopes: Mapping[str, Mapping[str, Any]], row: str, fields: Sequence[str]
) -> Float[np.ndarray, " kernel"]:
    """Elasticities of kernels for one of `rows_of`, from those by family and figure."""
    sums = {
        family: sum(exponent(row, name) * np.asarray(of[name], np.float64) for name in fields if name in of)
        for family, of in slopes.items()
    }
    of_family = {name: sums[name] + np.zeros(len(table.families[name].row)) for name in sums}
    return in_row_order(table, of_family)


def _slopes(
    job: Job, machine: Machine, predictor: Predictor, called: Sequence[Mapping[str, Any]], relaxation: float
) -> tuple[float, list[dict[str, np.ndarray]], Software, float]:
    """Seconds of a step, and what one more of every kernel and message, of the software's numbers and of products
    without tensor cores adds to it, relatively; of the software absolutely."""

    def total(scales: list[dict[str, Array]], software: Software, plain: Array) -> Array:
        left = iter(zip(called, scales, strict=True))

        def scaled(*arguments: Any) -> dict[str, Array]:
            seconds, scale = next(left)
            return {family: jnp.asarray(family_s) * scale[family] for family, family_s in seconds.items()}

        pieces = seconds_of_job(predictor, machine, job, run=scaled)
        pieces = replace(pieces, kernels=pieces.kernels.at[PLAIN].multiply(plain))
        pipeline, tail, _ = compose(pieces, software, job.plan, relaxation)
        return pipeline + tail

    ones = [{family: jnp.ones(len(family_s)) for family, family_s in seconds.items()} for seconds in called]
    software = jax.tree.map(lambda number: jnp.asarray(number, float), job.software)
    value, (kernels, numbers, plain) = jax.value_and_grad(total, argnums=(0, 1, 2))(ones, software, jnp.ones(()))
    return float(value), jax.tree.map(np.asarray, kernels), numbers, float(plain)


def _exact(predictor: Predictor, job: Job, machine: Machine) -> float:
    """Seconds of a step by the programs that `forecast.predict` has compiled already."""

    def run(using: Predictor, where: Machine, kernels: KernelTable) -> Mapping[str, Any]:
        if kernels is not job.kernels:
            return once(using, where, kernels)
        return {name: columns["seconds"] for name, columns in explained(using, where, kernels).items()}

    pipeline, tail, _ = compose(seconds_of_job(predictor, machine, job, run=run), job.software, job.plan)
    return float(pipeline + tail)
