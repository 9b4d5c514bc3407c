"""Pieces of a job's step and their messages, in seconds: what nodes of timelines and Chakra traces are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.hardware.cluster import Machine, as_cluster
from neusight_jax.job.job import Job, Plan
from neusight_jax.job.messages import Message, message_size
from neusight_jax.job.parallelism import Parallelism, groups
from neusight_jax.job.schedule import BACKWARD, WEIGHT
from neusight_jax.job.step import (
    Seconds,
    compose,
    facts,
    message_seconds,
    once,
    schedule_of,
    seconds_of_job,
    settled,
    silent,
    stage_durations,
)
from neusight_jax.job.work import KINDS, WORK
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.power import at_clock, is_limited
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import element_bytes

WORK_NAMES: tuple[str, ...] = ("forward", "backward", "weight gradient")
"""Kinds of work of a micro-batch."""


@dataclass(frozen=True)
class Piece:
    """One micro-batch's work on a stage, seconds.

    Attributes:
      kernels_s, host_s: of its kernels, and what launching them adds.
      base_s: with its messages; whole_s: and with what a rank waits for slower ones.
    """

    kernels_s: float
    host_s: float
    base_s: float
    whole_s: float


@dataclass(frozen=True)
class Transfer:
    """A message of a stage as it is sent `count` times.

    Attributes:
      bytes: of one, as ASTRA-sim counts them; seconds: of one.
      exposed: share of it that still adds to computation it runs beside (`Software.overlap`).
    """

    message: Message
    bytes: float
    seconds: float
    count: float
    exposed: float


@dataclass(frozen=True)
class StepPieces:
    """Pieces of a step.

    Attributes:
      pieces: by stage and kind of work; optimizer: what follows the pipeline on a rank, without messages.
      transfers: messages by kind of stage.
      flop, bytes: of kernels, [kind of stage, work].
      between_s: of a message between stages; fixed_s: what a step takes beside its work; total_s: of the step.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    optimizer: Piece
    transfers: Mapping[int, tuple[Transfer, ...]]
    flop: np.ndarray
    bytes: np.ndarray
    between_s: float
    fixed_s: float
    total_s: float

    def amount(self, kind: int, works: tuple[str, ...]) -> np.ndarray:
        """FLOP and bytes of a kind of stage's work."""
        places = [WORK.index(name) for name in works]
        return np.array([self.flop[kind, places].sum(), self.bytes[kind, places].sum()])


@dataclass(frozen=True)
class Work:
    """One piece of work in its schedule.

    Attributes:
      rank, stage, kind, batch: of the pipeline; kind as in `schedule`.
      place, needs: its position in the table, and that of the work whose message it waits for, 0 = none.
      last: whether it is the last of its stage and kind in the step.
    """

    rank: int
    stage: int
    kind: int
    batch: int
    place: int
    needs: int
    last: bool


def step_pieces(predictor: Predictor, machine: Machine, job: Job) -> StepPieces:
    """Pieces of a job on a machine, at the clock that its boards settle at."""
    # Under a cap pieces take as long as at the clock that boards settle at over the whole step.
    if is_limited(machine):
        machine = at_clock(machine, settled(predictor, machine, job).clock)
    plan, software = job.plan, job.software
    seconds = seconds_of_job(predictor, as_cluster(machine), job, run=once)
    quiet = silent(seconds)
    bare = replace(quiet, launches=jnp.zeros_like(quiet.launches))
    read = facts(plan)
    together = replace(read, log_gpus=jnp.zeros_like(read.log_gpus))

    def durations(variant: Seconds, alike: bool = True) -> np.ndarray:
        table = stage_durations(variant, software, together if alike else read)[0]
        of_stage = np.array(table, np.float64)[list(plan.kinds)]
        # Only a zero-bubble schedule moves gradients of weights away from the backward pass.
        if weight_in_backward(plan.layout):
            of_stage[:, BACKWARD] += of_stage[:, WEIGHT]
            of_stage[:, WEIGHT] = 0.0
        return of_stage

    kernels, busy, base, whole = durations(bare), durations(quiet), durations(seconds), durations(seconds, False)
    table = np.stack([kernels, busy - kernels, base, whole], axis=-1)
    fixed_s = float(np.asarray(software.step_s))
    (pipeline, tail, _), (_, rest, _), (_, bare_rest, _) = (
        compose(variant, software, plan) for variant in (seconds, quiet, bare)
    )
    alone_s, busy_s = float(bare_rest) - fixed_s, float(rest) - fixed_s
    slower = float(np.asarray(software.messages))
    flop, moved = _amounts(job)
    return StepPieces(
        pieces=tuple(tuple(Piece(*map(float, piece)) for piece in stage) for stage in table),
        optimizer=Piece(alone_s, busy_s - alone_s, busy_s, busy_s),
        transfers=_transfers(predictor, machine, job),
        flop=flop,
        bytes=moved,
        between_s=slower * float(seconds.between),
        fixed_s=fixed_s,
        total_s=float(pipeline) + float(tail),
    )


def _amounts(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """FLOP and bytes of a job's kernels, [kind of stage, work]."""
    flop, moved = np.zeros((KINDS, len(WORK))), np.zeros((KINDS, len(WORK)))
    for name, batch in job.kernels.families.items():
        dims, dtype = jax.tree.map(jnp.asarray, (batch.dims, batch.dtype))
        work, counts = FAMILIES[name].work(dims, element_bytes(dtype)), np.asarray(job.counts[name])
        for out, amount in ((flop, work.flop), (moved, work.bytes_moved)):
            out += np.where(counts > 0, counts * np.asarray(amount, np.float64), 0.0).sum(axis=-1)
    return flop, moved


def overlap_class(message: Message) -> str:
    """The class of `software.OVERLAPS` that a message belongs to."""
    words = {"gather": "shards", "reduce": "shards", "gradients": "gradients", "parameters": "gradients"}
    return words.get(message.slot) or message.slot.partition("_")[0]


def _transfers(predictor: Predictor, machine: Machine, job: Job) -> dict[int, tuple[Transfer, ...]]:
    """Messages of a job by kind of stage, those that a rank sends to nobody left out."""
    plan, cluster, software = job.plan, as_cluster(machine), job.software
    slower = float(np.asarray(software.messages))
    placed = groups(plan.layout, cluster.topology.gpus_per_domain or plan.layout.gpus)
    traffic = [message for _, message in plan.messages]
    seconds = np.asarray(message_seconds(predictor, cluster, traffic, placed, once)) if traffic else np.zeros(0)
    transfers_of: dict[int, list[Transfer]] = {kind: [] for kind in plan.kinds}
    for (kind, message), message_s in zip(plan.messages, seconds, strict=True):
        group = placed[message.group]
        if group.ranks > 1 and message.count > 0:
            size = message_size(message, group)[0]
            share = size / group.ranks if message.op == "all_gather" else size  # what a rank brings along
            exposed = float(np.asarray(software.overlap(overlap_class(message))))
            transfers_of[kind].append(Transfer(message, share, slower * float(message_s), message.count, exposed))
    return {kind: tuple(transfers) for kind, transfers in transfers_of.items()}


def weight_in_backward(layout: Parallelism) -> bool:
    """Whether gradients of weights are part of the backward pass."""
    return layout.pipeline == 1 or layout.schedule != "zero-bubble"


def works(plan: Plan) -> Iterator[Work]:
    """The pieces of a pipeline by its table: what one needs comes before it, and those of a rank in their order."""
    table, ranks, stages = schedule_of(plan), plan.layout.pipeline, len(plan.kinds)
    seen = dict[tuple[int, int], int]()
    for row, places in enumerate(table.duration):
        for rank, place in enumerate(places):
            stage, kind = divmod(int(place), 3)
            if stage >= stages:
                continue
            batch = seen[stage, kind] = seen.get((stage, kind), -1) + 1
            needs = int(table.needs[row, rank]) if table.messages[row, rank] else 0
            yield Work(rank, stage, kind, batch, (row + 1) * ranks + rank, needs, batch + 1 == plan.micro_batches)
