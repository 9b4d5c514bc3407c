"""Prediction: forecasts of models on GPUs and of jobs on clusters, and where their steps go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from neusight_jax.forecast import (
    BOUND_COLUMNS,
    COLUMNS,
    PARTS,
    Forecast,
    columns_of,
    explained,
    interval_of,
    with_nodes,
)
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import crowded_notes, footprint, longest_context, offload_notes
from neusight_jax.hardware.cluster import Cluster, Machine, as_cluster, gpu_of, on_device, topology_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.flop import StepFlop, peak_flop_per_s, step_flop
from neusight_jax.job.job import Job, Plan, job_from_graph
from neusight_jax.job.step import (
    Seconds,
    check_cluster,
    compose,
    durations_of,
    facts,
    once,
    seconds_of_job,
    settled,
    silent,
    step_counts,
)
from neusight_jax.job.work import WORK
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, KernelTable
from neusight_jax.model.intervals import in_labels, kernel_interval
from neusight_jax.model.latency import in_row_order, require_covered
from neusight_jax.model.power import Draw, PowerLaw, Settled, at_clock, is_limited, power_law, settle
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Relaxation
from neusight_jax.model.software import EXPERT_SPREAD, STEP_SPREAD, Software
from neusight_jax.model.streams import EXPERTS, PLAIN, step_seconds
from neusight_jax.units import GIGA
from neusight_jax.unmeasured import unmeasured_notes
from neusight_jax.workloads import plan_dict, workload_dict

Run = Callable[..., Mapping[str, Any]]
NOTHING_S = 1e-12
"""What a phase without kernels takes at most, by rounding."""
NOT_HELD = 0.9999
"""A clock above this share of the stock one is not held back."""
LAUNCH_BOUND = 2.0
"""A phase that takes so many times its kernels is bound by their launches."""


def predict(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph | Job,
    *,
    gpu_name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> Forecast:
    """Forecast a model on a GPU, kernels as they run inside the model; or a job on a cluster.

    A training step of a decoder on one GPU is a job of one rank (`job.job_from_graph`).

    Args:
      predictor, gpu: what forecasts, and for which machine: a GPU, or the cluster that a model is split over.
      graph: the model and its workload.
      gpu_name, notes: for the report only.
      relaxation: see `latency.kernel_latency`; 0 = exact.
    Raises: `InputError` when the GPU lacks the arithmetic path of the work's dtype, or the cluster has another number
      of GPUs than a job.
    """
    board, machine, gpu = gpu_of(gpu), gpu, gpu_of(gpu)
    graph = graph.on(gpu.paths, topology_of(machine).gpus_per_domain)
    for dtype in graph.arithmetic:
        gpu.peak_flop_per_s(dtype)
    require_covered(predictor, graph.kernels)
    state = None
    if is_limited(machine):
        work = graph.kernels if isinstance(graph, Graph) else graph
        state = settled(predictor, machine, work, relaxation=relaxation)
        machine = at_clock(machine, float(state.clock))
        gpu, notes = gpu_of(machine), (*notes, limit_note(board, state))
    if not isinstance(graph, Graph) or graph.launched == "eager":
        step = predict_step(predictor, machine, graph, gpu_name, notes, relaxation)
        return with_flop(with_energy(power_law(predictor), step, board, state), step_flop(graph), board, graph)
    rows = columns_of(graph.kernels, explained(predictor, machine, graph.kernels, relaxation))
    told = (*notes, *graph.notes, *unmeasured_notes(graph, rows, gpu))
    rows = with_nodes(rows, [node.name for node in graph.nodes])
    memory = footprint(graph) if graph.nodes else None
    mem_bytes = float(np.asarray(gpu.mem_bytes))
    interval, warnings = interval_of(predictor, gpu, rows)
    crowded = crowded_notes(memory.total, mem_bytes) if memory and graph.mode == "training" else ()
    crowded += offload_notes(graph, mem_bytes)
    cost = np.asarray(rows["seconds"] * rows["count"], np.float64)
    made = Forecast(
        model=graph.name,
        gpu=gpu_name,
        workload=workload_dict(graph),
        parts={**dict.fromkeys(PARTS, 0.0), "compute_s": float(np.sum(cost))},
        phases={phase: float(cost[rows["phase"] == phase].sum()) for phase in PHASES},
        columns=rows,
        tokens=graph.step_tokens,
        gpus=graph.num_gpus,
        memory=memory,
        mem_bytes=mem_bytes,
        longest_context=longest_context(graph, mem_bytes),
        interval_s=interval,
        notes=(*told, *crowded, *warnings),
    )
    return with_flop(with_energy(power_law(predictor), made, board, state), step_flop(graph), board, graph)


def with_flop(forecast: Forecast, flop: StepFlop, gpu: GPU, work: Graph | Job) -> Forecast:
    """A forecast with what its utilization is measured by.

    Args:
      forecast: of the work.
      flop: of its model, and of what the hardware does.
      gpu: the board, whose clock is its boost.
      work: whose dtypes say which peak it is measured by.
    """
    peak = peak_flop_per_s(gpu, work)
    return replace(forecast, model_flop=flop.model, hardware_flop=flop.hardware, peak_flop_per_s=peak)


def with_energy(law: PowerLaw, forecast: Forecast, gpu: GPU, state: Settled | None) -> Forecast:
    """A forecast with what its GPUs draw (`model.power`), and the columns that are shown.

    Args:
      law: of power.
      forecast: its columns hold what kernels take, as `forecast.explained` has it.
      gpu: the board.
      state: where it settled under its cap or lock, whose clock the forecast is at; None = it has neither.
    """
    rows, total_s = forecast.columns, max(forecast.total_s, 1e-30)
    clock = 1.0 if state is None else float(state.clock)
    seconds, count = np.asarray(rows["seconds"], np.float64), np.asarray(rows["count"], np.float64)
    busy_j = np.asarray(rows["busy_j"], np.float64) / clock  # the rows have it at the clock they are at
    sums = [float(np.sum(energy_j * count)) for energy_j in (busy_j, rows["flop_j"], rows["dram_j"])]
    if state is None:
        draw = Draw(*(np.float32(amount) for amount in (sums[0] / total_s, *sums[1:], total_s)))  # type: ignore[arg-type]
        state = _by_itself(law, gpu, draw)
    share, watts = float(state.share), float(state.power_w)
    static_w, volts = float(np.asarray(law.static_share * gpu.tdp_w)), float(law.volts(share)) ** 2
    moving = volts * (busy_j * share + rows["flop_j"]) + rows["dram_j"]
    # What a board draws while nothing moves is every kernel's by its time; the rest by what it moves, within the limit.
    rest = max(watts - static_w, 0.0) * total_s / max(float(np.sum(moving * count)), 1e-30)
    joules = static_w * seconds + rest * moving
    columns = {**rows, "energy_j": joules, "power_w": joules / np.maximum(seconds, 1e-30)}
    return replace(
        forecast,
        columns={name: columns[name] for name in COLUMNS},
        energy_j=watts * total_s * forecast.gpus,
        clock_hz=share * float(np.asarray(gpu.clock_hz)),
    )


def limit_note(gpu: GPU, state: Settled) -> str:
    """Effect of a cap and a lock of a board on a step, in words."""
    words = {"power_limit_w": "power capped at {:.4g} W", "clock_limit_hz": "clock locked at {:.4g} Hz"}
    held = " and ".join(words[name].format(float(np.asarray(value))) for name, value in gpu.limits().items())
    if float(state.clock) > NOT_HELD:
        return f"{held}: that holds nothing back, the step draws {float(state.power_w):.0f} W"
    boost = float(np.asarray(gpu.clock_hz))
    return f"{held}: the clock settles at {float(state.share) * boost / GIGA:.2f} of {boost / GIGA:.2f} GHz"


@jax.jit
def _by_itself(law: PowerLaw, gpu: GPU, draw: Draw) -> Settled:
    return settle(law, gpu, draw)


def predict_step(
    predictor: Predictor,
    machine: Machine,
    work: Graph | Job,
    name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> Forecast:
    """Forecast a training step; `forecast.predict` comes here with a job, or a graph that is one of one rank.

    Args: as `forecast.predict`; name: of the machine.
    Raises: `InputError` where the cluster has another number of GPUs.
    """
    job = job_from_graph(work) if isinstance(work, Graph) else work
    check_cluster(machine, job)
    cluster, plan = as_cluster(machine), job.plan
    families = explained(predictor, cluster.gpu, job.kernels, relaxation)
    pieces = seconds_of_job(predictor, machine, job, run=_kernels_as(job, families))
    quiet = silent(pieces)
    parts = (compose(variant, job.software, plan, relaxation) for variant in (pieces, quiet))
    (whole, tail, _), (alone, rest, busy) = (tuple(map(float, part)) for part in parts)
    shares = Shares(busy + rest, alone - busy, whole + tail - alone - rest, *busiest_rank(job, quiet, rest))
    rows = columns_of(job.kernels, families)
    taken = _in_step(job, cluster.gpu, families, with_nodes(rows, plan.nodes), shares.busiest)
    interval, warnings = _interval(predictor, machine, job, families, taken, pieces, whole + tail, relaxation)
    step = step_forecast(shares, job.software, plan, cluster, name=name, interval_s=interval)
    taken = _with_waits(taken, step.phases)
    told = work.notes
    if isinstance(work, Graph):
        told = (*told, *unmeasured_notes(work, rows, cluster.gpu), *warnings)
    return replace(
        step, workload=workload_dict(work), columns=taken, tokens=work.step_tokens, notes=(*notes, *told, *step.notes)
    )


def _interval(
    predictor: Predictor,
    machine: Machine,
    job: Job,
    families: Mapping[str, Mapping[str, Any]],
    rows: dict[str, np.ndarray],
    pieces: Seconds,
    step: float,
    relaxation: Relaxation,
) -> tuple[tuple[float, float] | None, list[str]]:
    """80 % interval of a step, seconds, and what a reader should know of it.

    Of one GPU whose kernels whole models were measured with, that of whole models; else `step_interval`.
    """
    if not carries_intervals(predictor):
        return None, []

    def total(seconds: Seconds) -> float:
        return float(sum(compose(seconds, job.software, job.plan, relaxation)[:2]))

    gpu = gpu_of(machine)
    labels, warnings = interval_of(predictor, gpu, rows)
    intervals: Any = predictor
    if labels is not None and job.plan.layout.gpus == 1 and np.all(in_labels(intervals.intervals, rows["network"])):
        kernels_s = float(np.sum(rows["seconds"] * rows["count"], dtype=np.float64))
        return (labels[0] / kernels_s * step, labels[1] / kernels_s * step), warnings
    ends = (seconds_of_job(predictor, machine, job, run=_kernels_as(job, families, side)) for side in (0, 1))
    low, high = map(total, ends)
    return step_interval(step, (low, high), float(expert_share(pieces))), warnings


def _kernels_as(job: Job, families: Mapping[str, Mapping[str, Any]], side: int | None = None) -> Run:
    """A run for `step.seconds_of_job`, with the kernels of the job as they were found.

    Args:
      side: of the intervals all kernels and messages are at, 0 = low, 1 = high; None = as forecast.
    """
    run = once if side is None else once_at(side)

    def recall(using: Predictor, where: Machine, kernels: KernelTable) -> Mapping[str, Any]:
        if kernels is not job.kernels:
            return run(using, where, kernels)
        if side is None:
            return {name: columns["seconds"] for name, columns in families.items()}
        bounds = {name: np.asarray(columns[("log_low", "log_high")[side]]) for name, columns in families.items()}
        return {
            name: np.asarray(columns["seconds"]) * np.exp(np.nan_to_num(bounds[name]))
            for name, columns in families.items()
        }

    return recall


@dataclass(frozen=True)
class Shares:
    """Where a step goes, seconds.

    Attributes:
      busy: what the busiest rank does, with what follows the pipeline; bubble, exposed: as `forecast.PARTS`.
      phases: of the busiest rank, by phase; busiest: whether it is the first, an inner or the last one.
    """

    busy: float
    bubble: float
    exposed: float
    phases: Mapping[str, float] = field(default_factory=dict)
    busiest: int = 0


def busiest_rank(job: Job, pieces: Seconds, rest: float) -> tuple[dict[str, float], int]:
    """Seconds of the busiest rank by phase, messages left out, and which rank it is: of the first, inner and last one.

    Args:
      rest: what follows the pipeline.
    """
    plan, step = job.plan, float(np.asarray(job.software.step_s))
    read = facts(plan)
    durations = np.asarray(durations_of(pieces, job.software, read)[0], np.float64)
    of_rank = np.asarray(read.chunks, np.float64) @ durations * plan.micro_batches
    busiest = int(np.argmax(of_rank.sum(axis=1)))
    forward, backward, weight = of_rank[busiest].tolist()
    phases = {"forward": forward, "backward": backward, "weight_gradient": weight, "optimizer": rest - step}
    return {name: seconds if seconds > NOTHING_S else 0.0 for name, seconds in phases.items()}, busiest


def rank_rows(job: Job, busiest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kernels that a rank launches in a step: positions in the job's table, work, and how often [row].

    Args:
      busiest: whether it is the first, an inner or the last rank.
    """
    counts = step_counts(job, np.asarray(facts(job.plan).chunks)[busiest])
    count = np.stack(
        [
            in_row_order(job.kernels, {name: launches[:, work] for name, launches in counts.items()})
            for work in range(len(WORK))
        ]
    ).T
    place, work = np.nonzero(count)
    return place, work, count[place, work]


_step_seconds = one_shot(step_seconds)


def _in_step(
    job: Job, gpu: GPU, families: Mapping[str, Mapping[str, Any]], rows: Mapping[str, np.ndarray], busiest: int
) -> dict[str, np.ndarray]:
    """Rows of a rank's kernels as they run in a step: one for each kernel and phase it runs in.

    Args:
      families: as `forecast.explained`; rows: of the kernels, each by itself (`forecast.columns_of`).
    """
    of_one: dict[str, Any] = {name: np.asarray(columns["seconds"]) for name, columns in families.items()}
    in_step = _step_seconds(gpu, job.kernels, of_one, job.software, job.plan.recipe.flash2)
    slower = {name: np.asarray(in_step[name]) / np.maximum(seconds, 1e-30) for name, seconds in of_one.items()}
    place, work, count = rank_rows(job, busiest)
    factor = in_row_order(job.kernels, slower)[place]
    taken = {name: values[place] for name, values in rows.items()}
    taken |= {name: taken[name] * factor for name in ("seconds", "seconds_low", "seconds_high")}
    taken |= {"count": count, "phase": np.array(WORK, object)[work]}
    return taken


def _with_waits(rows: dict[str, np.ndarray], phases: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Rows with their share of what launches, and waits for slower ranks, add to their phase: they sum to `phases`."""
    cost, phase = np.asarray(rows["seconds"] * rows["count"], np.float64), rows["phase"]
    phase = np.where(phase == "recomputed", "backward", phase)  # both are of the backward pass
    longer = np.ones(len(cost))
    for name, seconds in phases.items():
        mask = phase == name
        longer[mask] = seconds / max(float(cost[mask].sum()), 1e-30)
    bound = np.where(longer > LAUNCH_BOUND, "launch", rows["bound"]).astype(object)
    return {**rows, **{name: rows[name] * longer for name in ("seconds", *BOUND_COLUMNS)}, "bound": bound}


def step_forecast(
    shares: Shares,
    software: Software,
    plan: Plan,
    cluster: Cluster,
    *,
    name: str = "",
    notes: Sequence[str] = (),
    interval_s: tuple[float, float] | None = None,
) -> Forecast:
    """The forecast of a step from where it goes.

    Bubble and exposed communication are differences of sums, so that rounding may leave less than nothing; the busy
    time takes it.

    Args:
      shares: where the step goes.
      software: numbers of the framework.
      plan: of the job.
      cluster: that it runs on.
      name: of the cluster.
      notes: for the reader.
      interval_s: 80 % interval, None = there is none.
    """
    bubble, exposed = max(shares.bubble, 0.0), max(shares.exposed, 0.0)
    busy = shares.busy + shares.bubble + shares.exposed - bubble - exposed
    fixed, mem_bytes = float(np.asarray(software.step_s)), float(np.asarray(cluster.gpu.mem_bytes))
    compute = busy - fixed
    return Forecast(
        model=plan.model,
        gpu=name,
        workload=plan_dict(plan),
        parts=dict(zip(PARTS, (compute, bubble, exposed, fixed), strict=True)),
        phases={
            phase: seconds / max(sum(shares.phases.values()), 1e-30) * compute
            for phase, seconds in shares.phases.items()
        },
        memory=plan.memory,
        mem_bytes=mem_bytes,
        tokens=plan.tokens,
        gpus=plan.layout.gpus,
        notes=(*notes, *crowded_notes(plan.memory.total, mem_bytes)),
        interval_s=interval_s,
    )


# The 80 % intervals of steps: those of the kernels, and the spread of measured jobs around their forecasts.


@one_shot
def _log_bounds(predictor: Predictor, gpu: GPU, kernels: KernelTable) -> dict[str, list[Any]]:
    intervals = {
        name: kernel_interval(predictor, FAMILIES[name], gpu, batch) for name, batch in kernels.families.items()
    }
    return {name: [interval.log_low, interval.log_high] for name, interval in intervals.items()}


def once_at(side: int) -> Callable[..., dict[str, np.ndarray]]:
    """`step.once` with every kernel at the low (0) or high (1) end of its interval."""

    def run(predictor: Predictor, machine: Machine, kernels: KernelTable) -> dict[str, np.ndarray]:
        bounds = _log_bounds(predictor, on_device(gpu_of(machine)), kernels)
        seconds = once(predictor, machine, kernels)
        return {
            name: family_s * np.exp(np.nan_to_num(np.asarray(bounds[name][side]))) for name, family_s in seconds.items()
        }

    return run


def carries_intervals(predictor: Predictor) -> bool:
    """Whether a predictor knows how far its kernels are off."""
    return getattr(predictor, "intervals", None) is not None


def expert_share(pieces: Seconds) -> np.ndarray:
    """Share of the kernels' time that is in experts, of passes of one stage of each kind, [...]."""
    of_class = np.asarray(pieces.kernels)[..., :-1].sum(axis=(-2, -1))
    experts, work = of_class[..., list(EXPERTS)].sum(axis=-1), np.delete(of_class, PLAIN, axis=-1).sum(axis=-1)
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
