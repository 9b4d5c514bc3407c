"""Step: from seconds of kernels and messages to seconds of a training step; pure, differentiable in the cluster."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.arithmetic import dtype_index
from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import Cluster, Machine, as_cluster
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.job import KINDS, WORK, Job, Plan
from neusight_jax.job.messages import SLOTS, Message
from neusight_jax.job.parallelism import Group, Parallelism, groups
from neusight_jax.job.schedule import BACKWARD, FORWARD, WEIGHT, Schedule, schedule_table
from neusight_jax.job.schedule import pipeline_seconds as _pipeline_seconds
from neusight_jax.job.stages import INNER
from neusight_jax.kernels.collective import COLLECTIVE, OPS, expert_copies
from neusight_jax.kernels.table import KernelTable, batch_from_columns
from neusight_jax.model.latency import (
    kernel_latency,
    predict_kernels,
    require_covered,
    settled_step,
    step_draw,
)
from neusight_jax.model.latency import latency as table_latency
from neusight_jax.model.latency import settled as table_settled
from neusight_jax.model.power import PowerLaw, Settled, at_clock, draw_of, is_limited, power_law
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Isolated, Relaxation
from neusight_jax.model.software import NAMES, OVERLAPS, STEP_NOISE, WIDTHS, Software
from neusight_jax.model.streams import CLASSES, classes_of, factors, launch_seconds, longer

# Calibration of a cluster's software: a few measured steps, used for other layouts and models there.

ROUNDS = 4
"""Linearisations: seconds are nearly linear in the logarithms of what is fitted."""


def calibrate_steps(
    predictor: Predictor,
    machine: Machine,
    steps: Sequence[tuple[Job, float]],
    *,
    noise: float = STEP_NOISE,
) -> Software:
    """The software of a cluster from measured steps of jobs on it: for `Job.replace`, `nj.job_from_config` and
    `nj.parallelize`.

    Every number of the software starts from that of the first job and moves as far as its prior lets it and the steps
    ask for: the most probable values, with logarithms of numbers and of measured over forecast seconds normal.

    Args:
      predictor, machine: as `nj.predict`; steps: (job, measured seconds of a step).
      noise: spread of steps around a forecast with the right software, in logarithms.
    Raises: `InputError` for no step, or seconds that are no positive number.
    """
    pairs = list(steps)
    if not pairs:
        raise InputError("no measured step; expected at least one pair of a job and its seconds")
    for job, seconds in pairs:
        check_cluster(machine, job)
        if not (math.isfinite(seconds) and seconds > 0.0):
            raise InputError(f"a measured step of {job.plan.model} is {seconds!r} s, expected a positive number")
    first = np.array([float(np.asarray(getattr(pairs[0][0].software, name))) for name in NAMES])
    owns = [seconds_of_job(predictor, machine, job, run=once) for job, _ in pairs]

    def steps_at(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values = [_log_seconds(logs, first, own, job) for own, (job, _) in zip(owns, pairs, strict=True)]
        return np.array([value for value, _ in values]), np.stack([slope for _, slope in values])

    widths = np.array([WIDTHS[name] for name in NAMES])
    moved = most_probable(steps_at, np.log([seconds for _, seconds in pairs]), widths, noise)
    return Software(**dict(zip(NAMES, (first * np.exp(moved)).tolist(), strict=True)))


def most_probable(
    forecast: Callable[[np.ndarray], tuple[Any, Any]], measured: np.ndarray, widths: np.ndarray, noise: float
) -> np.ndarray:
    """How far numbers move from where they start, the most probable ones where all is normal in logarithms.

    Args:
      forecast: logarithms of what was measured, by those of the numbers over their start, and the slopes
        [measured, number].
      measured: logarithms of the measurements.
      widths: of the priors of the numbers.
      noise: spread of measurements around forecasts with the right numbers.
    """
    at = np.zeros(len(widths))
    for _ in range(ROUNDS):
        values, slopes = (np.asarray(part, np.float64) for part in forecast(at))
        spread = slopes * widths**2
        left = measured - values + slopes @ at
        at = spread.T @ np.linalg.solve(spread @ slopes.T + noise**2 * np.eye(len(measured)), left)
    return at


def _log_seconds(at: np.ndarray, first: np.ndarray, own: Seconds, job: Job) -> tuple[float, np.ndarray]:
    """ln of a step, and its slopes by the logarithms of the software's numbers."""

    def seconds(logs: Array) -> Any:
        numbers = dict(zip(NAMES, jnp.asarray(first) * jnp.exp(logs), strict=True))
        pipeline, tail, _ = compose(own, Software(**numbers), job.plan)
        return jnp.log(pipeline + tail)

    value, slope = jax.value_and_grad(seconds)(jnp.asarray(at, jnp.float32))
    return float(value), np.asarray(slope, np.float64)


# Network: seconds of a job's messages, by the predictor's collectives, or from the figures of a cluster alone.


def message_seconds(
    predictor: Predictor,
    cluster: Cluster,
    messages: Sequence[Message],
    groups: Mapping[str, Group],
    run: Callable[..., Mapping[str, Any]],
) -> Float[Array, " message"]:
    """Seconds of one of each message.

    Args:
      predictor, cluster: what forecasts, and on which links.
      messages: collectives of a rank.
      groups: ranks of each group, by name.
      run: forecasts kernels by family, as `latency.kernel_latency` does.
    """
    return row_seconds(predictor, cluster, sizes(messages, groups), run)


def sizes(messages: Sequence[Message], groups: Mapping[str, Group]) -> np.ndarray:
    """Bytes, ranks, domains, operator and crossing share of every message, [message, 5]."""
    rows = [message_size(each, groups[each.group]) for each in messages]
    return np.array(rows, np.float64).reshape(-1, 5)


def message_size(message: Message, group: Group) -> tuple[float, ...]:
    """A row of `sizes`."""
    payload, share = message.payload_bytes, 1.0
    if message.top_k:
        copies, share = expert_copies(message.top_k, group.ranks, group.domains)
        payload *= copies
    return payload, group.ranks, group.domains, OPS.index(message.op), share


def row_seconds(
    predictor: Predictor, cluster: Cluster, rows: np.ndarray, run: Callable[..., Mapping[str, Any]]
) -> Float[Array, " row"]:
    """Seconds of every row of `sizes`.

    Args:
      predictor, cluster: as `message_seconds`.
      rows: bytes, ranks, domains, operator, crossing share [row, 5].
      run: as `message_seconds`.
    """
    payload, ranks, domains, op, share = rows.T
    zero = np.zeros(len(rows))
    given = {"bytes": payload, "ranks": ranks, "domains": domains, "operation": 1.0 + op, "crossing_share": share}
    batch = batch_from_columns(
        COLLECTIVE,
        [OPS[int(each)] for each in op],
        given,
        dtype=zero + dtype_index("bf16"),
        count=zero + 1.0,
        phase=zero,
        node=zero,
        row=np.arange(len(rows)),
    )
    if not np.any(ranks > 1):
        return cast(Array, np.zeros(len(rows), np.float32))
    seconds = jnp.asarray(run(predictor, cluster, KernelTable({COLLECTIVE.name: batch}))[COLLECTIVE.name])
    return jnp.where(ranks > 1, seconds[: len(rows)], 0.0)


MESSAGE = "message"
"""Slot of what neighbouring stages send each other."""
pipeline_seconds = jax.jit(_pipeline_seconds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Seconds:
    """What a job is made of on a machine, of each kind of stage.

    Attributes:
      kernels: seconds of kernels, each as by itself, by `streams.CLASSES` and `job.WORK`; launches: how many.
      messages: seconds of them, by `messages.SLOTS`; between: of one message between stages.
    """

    kernels: Float[Array, "class kind work"]
    launches: Float[Array, "class kind work"]
    messages: Float[Array, "kind slot"]
    between: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Facts:
    """What of a plan the composition reads, as arrays, so that jobs of all layouts share one form.

    Attributes:
      layers: of each kind of stage; overlaps: 1 where a class of `OVERLAPS` runs beside compute.
      chunks: stages of each kind that a first, inner and last rank has; log_gpus: ln of the ranks.
      passes: of one micro-batch through a rank that gradients, or gathered parameters, can travel beside.
    """

    layers: Float[Array, " kind"]
    overlaps: Float[Array, " class"]
    chunks: Float[Array, "rank kind"]
    log_gpus: Float[Array, ""]
    passes: Float[Array, ""]


def facts(plan: Plan) -> Facts:
    """`Facts` of a plan."""
    found: Facts = jax.tree.map(
        lambda each: each[0],
        facts_of([plan.layout], [plan.kinds], [plan.layers], [plan.micro_batches], plan.recipe.overlaps),
    )
    return found


def facts_of(
    layouts: Sequence[Parallelism],
    kinds: Sequence[tuple[int, ...]],
    layers: Sequence[Sequence[int]],
    micro_batches: Sequence[int],
    overlaps: Sequence[str],
) -> Facts:
    """`Facts` of several layouts, stacked.

    Args:
      kinds: of each stage; layers: of each kind of stage; micro_batches: of a step.
    """
    chunks = [_chunks(order, each.pipeline) for order, each in zip(kinds, layouts, strict=True)]
    classes = np.array([float(name in overlaps) for name in OVERLAPS], np.float32)
    columns: tuple[Any, ...] = (
        np.maximum(np.array(layers, np.float32), 1.0),
        np.tile(classes, (len(layouts), 1)),
        np.array(chunks, np.float32),
        np.log(np.array([each.gpus for each in layouts], np.float32)),
        np.array(list(map(_passes, layouts, micro_batches)), np.float32),
    )
    return Facts(*columns)


def _passes(layout: Parallelism, micro_batches: int) -> float:
    """How many passes of one micro-batch the messages of a step's end, or its start, run beside.

    The last one, layer by layer. With chunks a rank is done with one while a group of as many micro-batches as ranks
    still passes through each of its others (interleaved 1F1B: Narayanan et al., SC21, figure 4; Megatron-LM's
    `--overlap-grad-reduce`).
    """
    return 1.0 + (min(layout.pipeline, micro_batches) - 1.0) * (layout.chunks - 1.0) / layout.chunks


@functools.lru_cache(maxsize=256)
def _chunks(kinds: tuple[int, ...], ranks: int) -> np.ndarray:
    """Stages of each kind that the first, the longest inner and the last rank have, [rank, kind]."""
    stages = np.array([np.bincount(kinds[rank::ranks], minlength=KINDS) for rank in range(ranks)])
    inner = stages[1:-1] if ranks > 2 else stages[ranks // 2 : ranks // 2 + 1]
    return np.stack([stages[0], inner[np.argmax(inner[:, INNER])], stages[-1]])


def schedule_of(plan: Plan) -> Schedule:
    """The table of a plan's schedule."""
    return schedule_table(plan.layout.schedule, plan.layout.pipeline, plan.micro_batches, plan.layout.chunks)


def once(predictor: Predictor, machine: Machine, kernels: KernelTable) -> dict[str, np.ndarray]:
    """`kernel_latency` by the program that is compiled fast and run once; not differentiable."""
    rows = predict_kernels(predictor, machine, kernels, isolated=False)
    batches = {name: np.asarray(batch.row) for name, batch in kernels.families.items()}
    return {name: np.where(row >= 0, rows[np.maximum(row, 0)], 0.0) for name, row in batches.items()}


def seconds_of_job(
    predictor: Predictor, machine: Machine, job: Job, run: Callable[..., Mapping[str, Any]] = kernel_latency
) -> Seconds:
    """Seconds of all kernels and messages of a job on a cluster.

    Args:
      predictor, machine, job: as `latency`.
      run: forecasts kernels by family, first the job's own on one GPU, then its messages on the cluster.
    """
    require_covered(predictor, job.kernels)
    cluster, plan = as_cluster(machine), job.plan
    of_one, flash2 = run(predictor, cluster.gpu, job.kernels), plan.recipe.flash2
    kernels, launches = _work_seconds(cluster.gpu, job.kernels, dict(of_one), dict(job.counts), flash2)
    if plan.recipe.cuda_graphs or job.kernels.launched != "eager":
        launches = jnp.zeros_like(launches)
    placed = groups(plan.layout, cluster.topology.gpus_per_domain or plan.layout.gpus)
    between = Message("send_recv", plan.message_bytes, "pipeline", MESSAGE)
    listed = [message for _, message in plan.messages]
    each = message_seconds(predictor, cluster, [*listed, between], placed, run)
    share = np.zeros((KINDS, len(SLOTS), len(listed)), np.float32)
    for at, (kind, message) in enumerate(plan.messages):
        share[kind, SLOTS.index(message.slot), at] = message.count
    sent: Any = share @ each[:-1]
    return Seconds(kernels, launches, sent, each[-1])


@one_shot
def _work_seconds(
    gpu: GPU, kernels: KernelTable, seconds: Mapping[str, Any], counts: Mapping[str, Any], flash2: float
) -> list[Float[Array, "class kind work"]]:
    """Seconds of kernels, each as by itself, and their launches, by `streams.CLASSES`, kind of stage and `job.WORK`.

    Args:
      gpu, kernels, seconds, flash2: as `streams.classes_of`.
      counts: of a job, by family [kind, work, kernel].
    """
    total = launches = jnp.zeros((len(CLASSES), KINDS, len(WORK)))
    for name, (alone, marks) in classes_of(gpu, kernels, seconds, flash2).items():
        count = jnp.asarray(counts[name])
        # A kernel that is never launched may take forever, which 0 launches would make no number.
        alone = jnp.where(jnp.any(count > 0, axis=(0, 1)), alone, 0.0)
        total = total + jnp.einsum("kwn,cn->ckw", count, alone * marks)
        launches = launches + jnp.einsum("kwn,cn->ckw", count, marks)
    return [total, launches]


def silent(own: Seconds) -> Seconds:
    """The same with messages that take no time."""
    return dataclasses.replace(own, messages=jnp.zeros_like(own.messages), between=jnp.zeros_like(own.between))


def stage_durations(
    own: Seconds, software: Software, facts: Facts
) -> tuple[Float[Array, "kind kind_of_work"], Float[Array, ""]]:
    """Durations of one micro-batch on each kind of stage, and what follows once a step on the slowest rank, seconds."""
    slots = dict(zip(SLOTS, jnp.moveaxis(software.messages * own.messages, -1, 0), strict=True))
    overlaps = dict(zip(OVERLAPS, jnp.moveaxis(facts.overlaps, -1, 0), strict=True))

    def exposed(compute: Array, message: Array, name: str) -> Array:
        """What communication adds to compute."""
        beside = jnp.maximum(compute, message) + software.overlap(name) * jnp.minimum(compute, message) - compute
        return jnp.where(overlaps[name][..., None] > 0, beside, message)

    kernels = jnp.einsum("...ckw,c->...kw", own.kernels, factors(software))
    host = jnp.einsum("...ckw,c->...kw", own.launches, launch_seconds(software))
    forward, backward, weight, recomputed, optimizer = jnp.moveaxis(longer(kernels, host), -1, 0)

    def with_layers(compute: Array, back: str) -> Array:
        total = compute
        for name in ("tensor", "context", "expert"):
            total = total + exposed(compute, slots[f"{name}_{back}"], name)
        return total

    # Shards are gathered one layer ahead: nothing hides the first, nor the last that is reduced.
    gather, reduce = slots["gather"], slots["reduce"]
    forward = with_layers(forward, "forward")
    forward = forward + exposed(forward, gather, "shards") + _unhidden(gather, overlaps["shards"], facts)
    backward = with_layers(backward + recomputed, "backward")
    both = backward + weight
    backward = backward + exposed(both, gather + reduce, "shards") + _unhidden(reduce, overlaps["shards"], facts)
    durations = jnp.stack([forward, backward, weight], axis=-1) * (
        1.0 + software.wait * facts.log_gpus[..., None, None]
    )

    def on_rank(of_kind: Array) -> Array:
        return jnp.einsum("...rk,...k->...r", facts.chunks, of_kind)

    tail = on_rank(optimizer)
    for slot, window in (("gradients", durations[..., BACKWARD] + durations[..., WEIGHT]), ("parameters", forward)):
        sent = slots[slot]
        tail = tail + exposed(facts.passes[..., None] * on_rank(window), on_rank(sent), "gradients")
        tail = tail + on_rank(_unhidden(sent, overlaps["gradients"], facts)) / jnp.sum(facts.chunks, axis=-1)
    return durations, jnp.max(tail, axis=-1) + software.step_s


@one_shot
def durations_of(own: Seconds, software: Software, facts: Facts) -> list[Array]:
    """`stage_durations` as one program, and the busiest rank's work of one micro-batch."""
    durations, tail = stage_durations(own, software, facts)
    of_rank = jnp.einsum("...rk,...kw->...r", facts.chunks, durations)
    return [durations, tail, jnp.max(of_rank, axis=-1)]


def _unhidden(message: Array, overlaps: Array, facts: Facts) -> Array:
    """The part of one layer of a stage, which no compute hides; all is exposed already where nothing overlaps."""
    return jnp.where(overlaps[..., None] > 0, message / facts.layers, 0.0)


def compose(
    own: Seconds, software: Software, plan: Plan, relaxation: Relaxation = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Seconds of the pipeline, of what follows it, and of the busiest rank's own work of all micro-batches.

    Args:
      own: seconds of kernels and messages by themselves.
      software: numbers of the framework.
      plan: of the job.
      relaxation: of the pipeline's critical path, 0 = exact.
    """
    durations, tail, of_batch = durations_of(own, software, facts(plan))
    busy = of_batch * plan.micro_batches
    if plan.layout.pipeline == 1:
        return busy, tail, busy
    of_stage = durations[np.array(plan.kinds)]
    if plan.layout.schedule != "zero-bubble":
        whole = of_stage[:, BACKWARD] + of_stage[:, WEIGHT]
        of_stage = jnp.stack([of_stage[:, FORWARD], whole, jnp.zeros_like(whole)], axis=-1)
    between = software.messages * own.between
    exact = isinstance(relaxation, int | float) and relaxation == 0.0  # a smaller program
    return pipeline_seconds(schedule_of(plan), of_stage, between, None if exact else relaxation), tail, busy


def check_cluster(machine: Machine, job: Job) -> None:
    """`InputError` where a job is laid out over another number of GPUs than a cluster has, as far as it says."""
    cluster = as_cluster(machine)
    if isinstance(machine, Cluster) and cluster.count not in (0, job.plan.layout.gpus):
        raise InputError(
            f"the layout takes {job.plan.layout.gpus} GPUs (tensor · context · data · pipeline), but the cluster has "
            f"{cluster.count}; expected the same"
        )


def latency(
    predictor: Predictor,
    machine: Machine,
    work: KernelTable | Job,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> Float[Array, ""]:
    """Seconds of all kernels of a table one after another (`latency.latency`), or of one step of a job.

    A step is its kernels and messages along the critical path. `jax.grad(latency, argnums=1)` is a GPU or a Cluster of
    derivatives; `jax.vmap(latency, in_axes=(None, 0, None))` forecasts many machines with one program. A GPU without
    the arithmetic path of a kernel gives infinity, which has no slopes. `relaxation` is of the waves of kernels, and of
    a job's critical path too (`schedule.pipeline_seconds`).

    Args:
      predictor: what forecasts.
      machine: a GPU, or the cluster of a job.
      work: kernels, or a job.
      isolated: whether kernels run alone, as a sweep measures them.
      relaxation: of waves, and of a job's critical path.
    """
    if isinstance(work, KernelTable):
        return table_latency(predictor, machine, work, isolated=isolated, relaxation=relaxation)
    check_cluster(machine, work)
    if is_limited(machine):
        machine = at_clock(machine, settled(predictor, machine, work, relaxation=relaxation).clock)
    lacking = [jnp.zeros((), bool)]

    def run(using: Predictor, where: Machine, kernels: KernelTable) -> dict[str, Array]:
        seconds = kernel_latency(using, where, kernels, relaxation=relaxation)
        for name, each in seconds.items():
            launched = jnp.asarray(kernels.families[name].count) > 0
            lacking.append(jnp.any(launched & jnp.isinf(each)))
        return {name: jnp.where(jnp.isinf(each), 0.0, each) for name, each in seconds.items()}

    own = seconds_of_job(predictor, machine, work, run=run)
    pipeline, tail, _ = compose(own, work.software, work.plan, relaxation)
    return jnp.where(jnp.any(jnp.stack(lacking)), jnp.inf, pipeline + tail)


# Energy: the law of `model.power` for the steps of a job.


def step_counts(job: Job, stages: Float[np.ndarray, " kind"]) -> dict[str, Float[np.ndarray, "kernel work"]]:
    """How often a GPU with so many stages of each kind launches each kernel in a step, by family."""
    times = _passes_of_work(job)
    return {name: np.einsum("k,kwn,w->nw", stages, np.asarray(counts), times) for name, counts in job.counts.items()}


def _passes_of_work(job: Job) -> Float[np.ndarray, " work"]:
    """How often a stage does each work in a step."""
    return np.where(np.array(WORK) == "optimizer", 1.0, float(job.plan.micro_batches))


def mean_counts(job: Job) -> dict[str, Float[Array, " kernel"]]:
    """How often a GPU of a job launches each kernel in a step, by family: the mean over its ranks."""
    stages, times = np.bincount(job.plan.kinds, minlength=KINDS) / job.plan.layout.pipeline, _passes_of_work(job)
    # Counts may be traced, as in a sweep.
    each = {name: jnp.asarray(counts, float) for name, counts in job.counts.items()}
    return {name: jnp.einsum("k,kwn,w->n", stages, counts, times) for name, counts in each.items()}


def settled(
    predictor: Predictor, machine: Machine, work: KernelTable | Job, *, relaxation: Relaxation = 0.0
) -> Settled:
    """Where the boards settle that work runs on, all alike.

    Args:
      predictor, machine, work: as `latency`.
      relaxation: of waves, 0 = exact.
    """
    if isinstance(work, KernelTable):
        return table_settled(predictor, machine, work, relaxation=relaxation)
    return settled_step(
        power_law(predictor),
        lambda held: latency(predictor, held, work, relaxation=relaxation),
        lambda seconds: step_draw(predictor, as_cluster(machine).gpu, work.kernels, seconds, mean_counts(work)),
        machine,
    )


@one_shot
def kernel_joules(
    law: PowerLaw, gpu: GPU, kernels: KernelTable, seconds: Mapping[str, Any]
) -> dict[str, Float[Array, "part kernel"]]:
    """`power.JOULES` of one launch of every kernel, by family.

    Args:
      law: of power.
      gpu: the board.
      kernels: of any number.
      seconds: of one launch on it, by family [kernel].
    """
    draws = {name: draw_of(law, gpu, name, batch, seconds[name]) for name, batch in kernels.families.items()}
    return {name: jnp.stack(draw.joules) for name, draw in draws.items()}


def energy(
    predictor: Predictor, machine: Machine, work: KernelTable | Job, *, relaxation: Relaxation = 0.0
) -> Float[Array, ""]:
    """Joules of all kernels of a table one after another on one GPU, or of a step of a job on all of its GPUs.

    Of the boards alone: no host, no network, no cooling. Pure and differentiable as `latency` is, in the cap and the
    locked clock too.

    Args: as `latency`.
    """
    return seconds_and_joules(predictor, machine, work, relaxation=relaxation)[1]


def seconds_and_joules(
    predictor: Predictor, machine: Machine, work: KernelTable | Job, *, relaxation: Relaxation = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`latency` and `energy` together, at the cost of the second.

    Args: as `latency`.
    """
    state = settled(predictor, machine, work, relaxation=relaxation)
    seconds = latency(predictor, at_clock(machine, state.clock), work, relaxation=relaxation)
    gpus = 1 if isinstance(work, KernelTable) else work.plan.layout.gpus
    return seconds, gpus * state.power_w * seconds
