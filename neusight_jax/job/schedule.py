"""Schedules of a pipeline as static tables, and how often each duration lies on the critical path of a step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neusight_jax.model.roofline import Relaxation

FORWARD, BACKWARD, WEIGHT = range(3)
"""Kinds of work of a micro-batch on a stage; BACKWARD holds the gradients of weights too where they are not apart."""
Work = tuple[int, int, int]
"""One piece of work: kind, micro-batch, chunk."""


def _one_forward_one_backward(ranks: int, rank: int, batches: int, chunks: int) -> list[Work]:
    """1F1B; with chunks as Megatron interleaves them (Narayanan et al., SC 2021)."""
    total = batches * chunks

    def place(at: int, kind: int) -> Work:
        group, inside = divmod(at, ranks * chunks)
        width = min(ranks, batches - group * ranks)
        chunk, batch = divmod(inside, width)
        return kind, group * ranks + batch, chunks - 1 - chunk if kind == BACKWARD else chunk

    warm = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    warm = min(warm, total)
    works = [place(at, FORWARD) for at in range(warm)]
    for at in range(total - warm):
        works += [place(at + warm, FORWARD), place(at, BACKWARD)]
    return works + [place(at, BACKWARD) for at in range(total - warm, total)]


def _gpipe(ranks: int, rank: int, batches: int, chunks: int) -> list[Work]:
    return [(kind, batch, 0) for kind in (FORWARD, BACKWARD) for batch in range(batches)]


def _zero_bubble(ranks: int, rank: int, batches: int, chunks: int) -> list[Work]:
    """ZB-H1 (Qi et al., ICLR 2024): the gradients of weights wait, the longer the later the rank."""
    works: list[Work] = []
    done = 0
    for work in _one_forward_one_backward(ranks, rank, batches, 1):
        works.append(work)
        if work[0] == BACKWARD and work[1] >= rank:
            works.append((WEIGHT, done, 0))
            done += 1
    return works + [(WEIGHT, batch, 0) for batch in range(done, batches)]


ORDERS = {
    "1f1b": _one_forward_one_backward,
    "interleaved": _one_forward_one_backward,
    "gpipe": _gpipe,
    "zero-bubble": _zero_bubble,
}
"""Order of work on a rank: (ranks, rank, micro-batches, chunks) -> works."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule as rows of work that may run at once, one column a rank; every row needs earlier rows only.

    Attributes:
      duration: position in the flattened durations [stage, kind], or the one after the last where a rank idles.
      needs: flat position (row, rank) + ranks of the work on another rank it waits for; 0 = of none.
      messages: whether what it waits for comes over the network.
    """

    duration: Int[np.ndarray, "row rank"]
    needs: Int[np.ndarray, "row rank"]
    messages: Float[np.ndarray, "row rank"]


@functools.lru_cache(maxsize=64)
def schedule_table(name: str, ranks: int, batches: int, chunks: int = 1) -> Schedule:
    """The table of a schedule of `ORDERS`; the stage of a chunk is chunk · ranks + rank.

    Args:
      name: of `ORDERS`.
      ranks: of the pipeline.
      batches: micro-batches of a step.
      chunks: stages of one rank.
    """
    orders = [ORDERS[name](ranks, rank, batches, chunks) for rank in range(ranks)]
    stages, at = ranks * chunks, [0] * ranks
    done: dict[tuple[int, int, int], int] = {}
    rows: list[list[tuple[int, int, float]]] = []
    # A row is what every rank can do next; a rank idles in it where what it waits for has not ended before the row.
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        row, ended = [], []
        for rank in range(ranks):
            found = (stages * 3, 0, 0.0)
            if at[rank] < len(orders[rank]):
                kind, batch, chunk = orders[rank][at[rank]]
                stage = chunk * ranks + rank
                other = {FORWARD: stage - 1, BACKWARD: stage + 1}.get(kind, -1)
                waits = 0 <= other < stages
                ready = done.get((kind, batch, other)) if waits else 0
                if ready is not None:
                    found = (stage * 3 + kind, ready, float(waits and ranks > 1))
                    ended.append(((kind, batch, stage), (len(rows) + 1) * ranks + rank))
                    at[rank] += 1
            row.append(found)
        done.update(ended)
        rows.append(row)
        if not ended:
            raise AssertionError(f"schedule {name} waits for itself at {ranks} ranks, {batches} micro-batches")
    step = max(32, 1 << max(len(rows).bit_length() - 4, 0))  # idle rows, so that jobs share programs
    idle = [[(stages * 3, 0, 0.0)] * ranks] * (-len(rows) % step)
    table = np.array(rows + idle, np.float64)
    return Schedule(table[..., 0].astype(np.int32), table[..., 1].astype(np.int32), table[..., 2].astype(np.float32))


def _ends(own: Array, needs: Array, message: Array) -> tuple[Array, Array]:
    """When each piece of work ends, and whether it waited for another rank longer than for its own."""
    rows, ranks = own.shape

    def run(carry: tuple[Array, Array], row: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        (ends, last), (place, takes, needed, late) = carry, row
        other = ends[needed] + late
        waited = other > last
        last = jnp.where(waited, other, last) + takes
        return (jax.lax.dynamic_update_slice(ends, last, (place,)), last), waited

    start = (jnp.zeros((rows + 1) * ranks, own.dtype), jnp.zeros(ranks, own.dtype))
    places = (jnp.arange(rows) + 1) * ranks
    (_, last), waited = jax.lax.scan(run, start, (places, own, needs, message), unroll=4)
    return last, waited


def _path(last: Array, waited: Array, needs: Array, duration: Array, message: Array, size: int) -> tuple[Array, Array]:
    """How often each duration, and a message, lies on the path that ends last."""
    rows, ranks = waited.shape
    waited, needs, duration, message = (each.reshape(-1) for each in (waited, needs, duration, message))

    def back(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at, counts, messages = state
        here = at - ranks
        jump = waited[here]
        messages = messages + jnp.where(jump, message[here], 0.0)
        return jnp.where(jump, needs[here], here), counts.at[duration[here]].add(1.0), messages

    start = (rows * ranks + jnp.argmax(last), jnp.zeros(size + 1, last.dtype), jnp.zeros((), last.dtype))
    _, counts, messages = jax.lax.while_loop(lambda state: state[0] >= ranks, back, start)
    return counts[:size], messages


def critical_counts(
    schedule: Schedule, durations: Float[Array, "stage kind"], message_s: Float[Array, ""]
) -> tuple[Float[Array, "stage kind"], Float[Array, ""]]:
    """How often each duration, and a message between ranks, lies on the critical path; no gradient passes.

    The step takes Σ counts · durations + messages · message_s, and the counts are its gradient wherever one path is
    the longest alone.
    """
    durations, message_s = jax.lax.stop_gradient((durations, message_s))
    flat = jnp.concatenate([durations.reshape(-1), jnp.zeros(1, durations.dtype)])
    duration, needs = jnp.asarray(schedule.duration), jnp.asarray(schedule.needs)
    message = jnp.asarray(schedule.messages, durations.dtype)
    last, waited = _ends(flat[duration], needs, message * message_s)
    counts, messages = _path(last, waited, needs, duration, message, durations.size)
    return counts.reshape(durations.shape), messages


def pipeline_end(
    schedule: Schedule,
    durations: Float[np.ndarray, "... stage kind"],
    message_s: Float[np.ndarray, "..."] | float = 0.0,
) -> Float[np.ndarray, "..."]:
    """`pipeline_seconds` of many jobs with one schedule. Host only: it compiles nothing."""
    times, late = np.asarray(durations, np.float64), np.asarray(message_s, np.float64)[..., None]
    rows, ranks = schedule.needs.shape
    flat = np.append(times.reshape(*times.shape[:-2], -1), np.zeros((*times.shape[:-2], 1)), axis=-1)
    last = np.zeros((*times.shape[:-2], ranks))
    ends = np.zeros((*times.shape[:-2], (rows + 1) * ranks))
    for row in range(rows):
        other = ends[..., schedule.needs[row]] + schedule.messages[row] * late
        last = np.maximum(last, other) + flat[..., schedule.duration[row]]
        ends[..., (row + 1) * ranks : (row + 2) * ranks] = last
    found: np.ndarray = last.max(axis=-1)
    return found


def pipeline_seconds(
    schedule: Schedule,
    durations: Float[Array, "stage kind"],
    message_s: Float[Array, ""] | float = 0.0,
    relaxation: Relaxation = 0.0,
) -> Float[Array, ""]:
    """Seconds from the first forward to the last backward pass of a step.

    Args:
      durations: of one micro-batch on a stage, by kind of work, seconds; message_s: between neighbouring stages.
      relaxation: 0 (or None) = exact. Above, a soft maximum (below the exact one) over the paths that are critical
        when one stage is slower by that share, so that the slope reaches stages that nearly bind. May be traced.
    Gradients: reach durations and message_s, exact almost everywhere at relaxation 0.
    """
    message_s = jnp.asarray(message_s, durations.dtype)

    def of_path(scale: Array) -> Array:
        counts, messages = critical_counts(schedule, durations * scale[:, None], message_s)
        return jnp.sum(counts * durations) + messages * message_s

    stages = durations.shape[0]
    exact = of_path(jnp.ones(stages, durations.dtype))
    if relaxation is None or (isinstance(relaxation, int | float) and relaxation == 0.0):
        return exact
    share = jnp.where(jnp.asarray(relaxation) > 0.0, relaxation, 1.0)
    paths = jax.vmap(of_path)(1.0 + share * jnp.eye(stages, dtype=durations.dtype))
    most = jax.lax.stop_gradient(jnp.max(paths))
    softly = most * share
    relaxed = most + softly * jnp.log(jnp.mean(jnp.exp((paths - most) / softly)))
    return jnp.where(jnp.asarray(relaxation) > 0.0, relaxed, exact)
