"""Pieces of a job's step in their order: what timelines and Chakra traces are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from neusight_jax.hardware.cluster import Machine, as_cluster
from neusight_jax.job.job import Job, Plan
from neusight_jax.job.messages import SLOTS
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.schedule import BACKWARD, WEIGHT
from neusight_jax.job.step import Seconds, compose, facts, once, schedule_of, seconds_of_job, silent, stage_durations
from neusight_jax.model.predictor import Predictor

WORK_NAMES: tuple[str, ...] = ("forward", "backward", "weight gradient")
"""Kinds of work of a micro-batch."""
BESIDE: tuple[tuple[str, ...], ...] = (
    ("tensor_forward", "context_forward", "expert_forward", "gather"),
    ("tensor_backward", "context_backward", "expert_backward", "gather", "reduce"),
    (),
)
"""Slots of the messages that go with each."""
LAST: tuple[str, ...] = ("gradients", "parameters")
"""Slots of those that follow the pipeline."""


@dataclass(frozen=True)
class Piece:
    """Computation, and the messages beside it, of which the part that nothing hides comes after it, seconds."""

    compute_s: float
    whole_s: float
    sent_s: float

    @property
    def drawn_s(self) -> float:
        """Seconds that messages are drawn for: they end with the piece."""
        return min(max(self.sent_s, self.whole_s - self.compute_s), self.whole_s) if self.sent_s > 0 else 0.0


@dataclass(frozen=True)
class StepTimes:
    """Times of a step as drawn: pieces by stage and kind of work, what follows the pipeline on every rank, one message
    between stages, and what a step takes beside its work."""

    pieces: tuple[tuple[Piece, ...], ...]
    tail: Piece
    between_s: float
    fixed_s: float


@dataclass(frozen=True)
class Work:
    """One piece of work in its schedule.

    Attributes:
      rank, stage, kind, batch: of the pipeline; kind as in `schedule`.
      place, needs: its position in the table, and that of the work whose message it waits for, 0 = none.
      arrives_s: when that message is there, 0 = none is sent.
    """

    rank: int
    stage: int
    kind: int
    batch: int
    place: int
    needs: int
    arrives_s: float
    start_s: float
    end_s: float


def step_times(predictor: Predictor, machine: Machine, job: Job) -> StepTimes:
    """Times of a job's pieces on a machine."""
    plan = job.plan
    seconds = seconds_of_job(predictor, as_cluster(machine), job, run=once)
    silent_seconds, order = silent(seconds), list(plan.kinds)
    whole, quiet = (
        np.asarray(stage_durations(variant, job.software, facts(plan))[0])[order]
        for variant in (seconds, silent_seconds)
    )
    slower = float(np.asarray(job.software.messages))
    sent = slower * _sent(seconds)[order]
    if weight_in_backward(plan.layout):
        for durations in (whole, quiet, sent):
            durations[:, BACKWARD] += durations[:, WEIGHT]
            durations[:, WEIGHT] = 0.0
    pieces = tuple(
        tuple(Piece(*map(float, (quiet[stage, kind], whole[stage, kind], sent[stage, kind]))) for kind in range(3))
        for stage in range(len(whole))
    )
    (_, tail, _), (_, rest, _) = (compose(variant, job.software, plan) for variant in (seconds, silent_seconds))
    fixed_s = float(np.asarray(job.software.step_s))
    slots = slower * np.asarray(seconds.messages)
    last_s = float(sum(slots[:, SLOTS.index(name)].max() for name in LAST))
    after = Piece(float(rest) - fixed_s, float(tail) - fixed_s, last_s)
    return StepTimes(pieces, after, slower * float(seconds.between), fixed_s)


def weight_in_backward(layout: Parallelism) -> bool:
    """Whether gradients of weights are part of the backward pass."""
    return layout.pipeline == 1 or layout.schedule != "zero-bubble"


def _sent(seconds: Seconds) -> np.ndarray:
    """Seconds of all messages of a piece of work, [kind of stage, kind of work]."""
    slots = dict(zip(SLOTS, np.moveaxis(np.asarray(seconds.messages), -1, 0), strict=True))
    return np.stack([sum((slots[name] for name in names), 0.0 * slots[SLOTS[0]]) for names in BESIDE], axis=-1)


def works(plan: Plan, times: StepTimes) -> Iterator[Work]:
    """The pieces of a pipeline by its table, those of a rank in their order."""
    table, ranks = schedule_of(plan), plan.layout.pipeline
    ends, last, seen = np.zeros((len(table.duration) + 1) * ranks), np.zeros(ranks), dict[tuple[int, int], int]()
    # A piece starts when its rank is free and what it needs has arrived; both are of pieces before it.
    for row, places in enumerate(table.duration):
        for rank, place in enumerate(places):
            stage, kind = divmod(int(place), 3)
            if stage >= len(times.pieces):
                continue
            batch = seen[stage, kind] = seen.get((stage, kind), -1) + 1
            needs, sent = int(table.needs[row, rank]), float(table.messages[row, rank])
            arrives = float(ends[needs] + sent * times.between_s)
            start = max(float(last[rank]), arrives)
            here, end = (row + 1) * ranks + rank, start + times.pieces[stage][kind].whole_s
            last[rank] = ends[here] = end
            yield Work(rank, stage, kind, batch, here, needs if sent else 0, arrives if sent else 0.0, start, end)
