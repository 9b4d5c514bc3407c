"""Assembly: seconds of many layouts on one machine, from one forecast of their distinct kernels and messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.cluster import Cluster, Machine
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.messages import SLOTS
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.pieces import PIECE_WORK, Ask, Entries, Messages, Pieces
from neusight_jax.job.schedule import BACKWARD, FORWARD, WEIGHT, pipeline_end, schedule_table
from neusight_jax.job.step import Facts, Seconds, durations_of, facts_of, kernel_joules, once, row_seconds
from neusight_jax.job.work import KINDS, WORK
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.power import CLOCKS, JOULES, PowerLaw, at_clock, drawn_in, power_law, settle, slower_by
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.software import Software
from neusight_jax.model.streams import CLASSES, classes_once

CHUNK = 1024
"""Rows of a family that one program forecasts at a time, so that it is compiled once whatever the number of layouts."""
Run = Callable[..., dict[str, np.ndarray]]


def in_chunks(run: Run) -> Run:
    """A forecast of kernels by family, so many rows at a time."""

    def chunked(predictor: Predictor, machine: Machine, kernels: KernelTable) -> dict[str, np.ndarray]:
        out = {}
        for name, batch in kernels.families.items():
            length = len(batch.row)
            parts = []
            # The last chunk is padded to the length of the others, so that all run one compiled program.
            for start in range(0, batch.num_rows, CHUNK):
                part: Any = jax.tree.map(lambda column, at=start: np.asarray(column)[at : at + CHUNK], batch)
                size = len(part.row)
                width = CHUNK if length > CHUNK else length
                part = jax.tree.map(lambda column, more=width - size: np.pad(column, (0, more), mode="edge"), part)
                rows = np.where(np.arange(width) < size, np.arange(width), -1).astype(np.int32)
                part = KernelTable({name: part.__class__(**{**vars(part), "row": rows})})
                parts.append(run(predictor, machine, part)[name][:size])
            seconds = np.concatenate(parts) if parts else np.zeros(0, np.float32)
            out[name] = np.pad(seconds, (0, length - len(seconds)))
        return out

    return chunked


@dataclass(frozen=True)
class Sum:
    """A sparse sum: rows, columns and factors of its entries, and how many rows there are."""

    rows: np.ndarray
    columns: np.ndarray
    factors: np.ndarray
    size: int

    def of(self, values: np.ndarray) -> np.ndarray:
        """The sum over the values of the columns, [row]."""
        return np.bincount(self.rows, self.factors * values[self.columns], self.size)


@dataclass(frozen=True)
class Assembly:
    """Layouts as sparse sums over distinct kernels and messages.

    Attributes:
      ask, layouts: what they share, and each; memory, kinds (of stages), layers: of each; facts: stacked.
      table: the distinct kernels, in the order of the sums' columns; messages: rows of `step.sizes`.
      pieces: kernels -> work of pieces; passes: pieces -> passes of kinds of stages, by recompute.
      updates: kernels -> what runs over parameters; sent: messages -> slots; between: the message between stages.
    """

    ask: Ask
    layouts: tuple[Parallelism, ...]
    memory: tuple[Footprint, ...]
    kinds: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...]
    facts: Facts
    table: KernelTable
    messages: np.ndarray
    sums: dict[str, Sum]
    between: np.ndarray

    def of_one(self, predictor: Predictor, cluster: Cluster, run: Run = once) -> dict[str, np.ndarray]:
        """Seconds of one launch of every kernel of the search, by family."""
        by_family: dict[str, np.ndarray] = in_chunks(run)(predictor, cluster.gpu, self.table)
        return by_family

    def seconds(
        self,
        predictor: Predictor,
        cluster: Cluster,
        run: Run = once,
        by_family: Mapping[str, np.ndarray] | None = None,
    ) -> Seconds:
        """Seconds every layout is made of on a machine, [layout, ...].

        Args:
          predictor: of kernels and messages.
          cluster: the machine.
          run: what forecasts kernels.
          by_family: as `of_one` has them, where they are known.
        """
        forecast, flash2 = in_chunks(run), self.ask.recipe.flash2
        by_family = self.of_one(predictor, cluster, run) if by_family is None else by_family
        rows = {name: np.asarray(self.table.families[name].row) for name in by_family}
        seconds, marks = np.zeros(self.table.num_rows), np.zeros((len(CLASSES), self.table.num_rows))
        for name, forecast_s in by_family.items():
            real, family = rows[name] >= 0, KernelTable({name: self.table.families[name]}, "eager")
            kernel_s, classes = classes_once(cluster.gpu, family, {name: jnp.asarray(forecast_s)}, flash2)[name]
            seconds[rows[name][real]] = np.asarray(kernel_s)[real]
            marks[:, rows[name][real]] = np.asarray(classes)[:, real]
        message_s = np.asarray(row_seconds(predictor, cluster, self.messages, forecast), np.float64)
        sent = self.sums["sent"].of(message_s).reshape(-1, KINDS, len(SLOTS))
        kernels, launches = (np.stack(list(map(self._work, values)), axis=1) for values in (seconds * marks, marks))
        launches = launches * float(not self.ask.recipe.cuda_graphs)
        columns = (kernels, launches, sent, message_s[self.between])
        return Seconds(*(np.asarray(column, np.float32) for column in columns))  # type: ignore[arg-type]

    def joules(
        self, law: PowerLaw, gpu: GPU, by_family: Mapping[str, np.ndarray]
    ) -> Float[np.ndarray, "rank layout part"]:
        """Joules that the kernels of a step take on a GPU of the first, an inner and the last rank, by `power.JOULES`.

        Args:
          law: of power.
          gpu: the board, without cap and lock.
          by_family: as `of_one` has them.
        """
        values = np.zeros((len(JOULES), self.table.num_rows))
        for name, batch in self.table.families.items():  # one at a time, so that searches share programs
            parts = kernel_joules(law, gpu, KernelTable({name: batch}), {name: jnp.asarray(by_family[name])})[name]
            row = np.asarray(batch.row)
            values[:, row[row >= 0]] = np.asarray(parts)[:, row >= 0]
        by_part = [self._work(part) for part in values]
        batches = np.array([layout.micro_batches(self.ask.global_batch_size) for layout in self.layouts], float)
        times = np.where(np.array(WORK) == "optimizer", 1.0, batches[:, None])
        chunks = np.asarray(self.facts.chunks, float)
        joules: np.ndarray = np.einsum("lrk,plkw,lw->rlp", chunks, np.stack(by_part), times)
        return joules

    def _work(self, values: np.ndarray) -> Float[np.ndarray, "layout kind work"]:
        """Sums of values of kernels by `job.WORK`."""
        if not values.any():
            return np.zeros((len(self.layouts), KINDS, len(WORK)))
        pieces = self.sums["pieces"].of(values)
        passes: np.ndarray = self.sums["passes"].of(pieces).reshape(-1, KINDS, len(WORK))
        updates: np.ndarray = self.sums["updates"].of(values).reshape(-1, KINDS, len(WORK))
        total: np.ndarray = passes + updates
        return total


def assemble(
    pieces: Pieces, gpus_per_domain: int, layouts: Sequence[Parallelism], memory: Sequence[Footprint]
) -> Assembly:
    """Layouts over domains of so many GPUs as sums.

    Args:
      pieces: what the layouts' stages are made of.
      gpus_per_domain: that share fast links, 0 = all.
      layouts: to sum up.
      memory: of the fullest rank of each.
    """
    messages = Messages(pieces, gpus_per_domain)
    entries = {name: Entries() for name in ("passes", "updates", "sent")}
    between, layers = [], []
    for at, layout in enumerate(layouts):
        form = pieces.form(layout)
        start = at * KINDS * len(WORK)
        entries["passes"].add(pieces.passes(layout), start)
        entries["updates"].add(pieces.updates(layout), start)
        sent, last = messages.of(layout)
        for block in sent:
            entries["sent"].add(block, at * KINDS * len(SLOTS))
        between.append(last)
        layers.append(form.layer_counts)
    batches = [layout.micro_batches(pieces.ask.global_batch_size) for layout in layouts]
    kinds = tuple(map(pieces.kinds, layouts))
    number = len(layouts) * KINDS
    sizes = {"passes": number * len(WORK), "updates": number * len(WORK), "sent": number * len(SLOTS)}
    sums = {name: Sum(*terms.arrays(), sizes[name]) for name, terms in entries.items()}
    sums["pieces"] = Sum(*pieces.work.arrays(), len(pieces.stages) * PIECE_WORK)
    return Assembly(
        ask=pieces.ask,
        layouts=tuple(layouts),
        memory=tuple(memory),
        kinds=kinds,
        layers=tuple(layers),
        facts=facts_of(layouts, kinds, layers, batches, pieces.ask.recipe.overlaps),
        table=pieces.pool.table(pieces.ask.dtype),
        messages=messages.rows,
        sums=sums,
        between=np.array(between, np.int64),
    )


def least_seconds(assembly: Assembly, durations: np.ndarray, between: np.ndarray) -> np.ndarray:
    """Seconds that no step of a layout is below, [layout].

    A rank's own work, what runs before its first and after its last micro-batch on earlier ranks, and the messages on
    that way; without chunks Σ t + (m - 1) max t, what a 1F1B step takes but for messages that its ranks wait for.
    """
    whole = durations.sum(axis=-1)
    busy = np.einsum("lrk,lk->lr", np.asarray(assembly.facts.chunks), whole)
    of = assembly.layouts
    batches = np.array([layout.micro_batches(assembly.ask.global_batch_size) for layout in of], float)
    ranks, stages = (np.array([getattr(layout, name) for layout in of], float) for name in ("pipeline", "stages"))
    plain = ranks * (stages == ranks) > 1
    # Stages on the way to the last rank, and through it where it has only one.
    passed = [
        np.bincount(kinds[: layout.pipeline - (layout.chunks > 1)], minlength=KINDS)
        for kinds, layout in zip(assembly.kinds, of, strict=True)
    ]
    through = np.einsum("lk,lk->l", np.array(passed), whole)
    most = np.max(np.where(np.array(passed) > 0, whole, 0.0), axis=-1)
    flow = through + (batches - 1.0) * most + 2.0 * (ranks - 1.0) * between
    chunked = np.maximum(batches * busy[:, 0], batches * busy[:, 2] + through + 2.0 * (ranks - 1.0) * between)
    least: np.ndarray = np.where(ranks == 1, batches * busy[:, 0], np.where(plain, flow, chunked))
    return least


@dataclass(frozen=True)
class Timed:
    """Durations of many layouts: [layout, kind of stage, kind of work], after the pipeline [layout], and of the message
    between stages [layout], seconds."""

    durations: np.ndarray
    tail: np.ndarray
    between: np.ndarray


def timed_under_limits(
    assembly: Assembly, predictor: Predictor, cluster: Cluster, software: Software
) -> tuple[Timed, np.ndarray]:
    """Durations of the layouts on boards with a cap or a lock, each where its boards settle, and that clock [layout].

    Between the clocks of `power.CLOCKS` they are powers of the clock.

    Args:
      assembly: of the layouts.
      predictor: weights.
      cluster: whose boards have the cap or the lock.
      software: what it adds to kernels and messages.
    """
    stock, law = at_clock(cluster, 1.0), power_law(predictor)
    at_clocks = [timed(assembly, assembly.seconds(predictor, at_clock(cluster, clock)), software) for clock in CLOCKS]
    seconds = jnp.stack([least_seconds(assembly, times.durations, times.between) + times.tail for times in at_clocks])
    joules = assembly.joules(law, stock.gpu, assembly.of_one(predictor, stock))
    state = settle(law, cluster.gpu, drawn_in(seconds[-1], jnp.asarray(joules.mean(axis=0).T)), slower_by(seconds))
    clock = np.asarray(state.clock, float)
    place = np.interp(np.log(clock), np.log(CLOCKS), np.arange(len(CLOCKS), dtype=float))
    low = np.minimum(place.astype(int), len(CLOCKS) - 2)

    def between(name: str) -> np.ndarray:
        logs = np.log(np.maximum([getattr(times, name) for times in at_clocks], 1e-30))
        share = (place - low).reshape(-1, *[1] * (logs.ndim - 2))
        rows = np.arange(len(low))
        values: np.ndarray = np.exp((1.0 - share) * logs[low, rows] + share * logs[low + 1, rows])
        return values

    return Timed(*map(between, ("durations", "tail", "between"))), clock


def timed(assembly: Assembly, seconds: Seconds, software: Software) -> Timed:
    """Durations of the layouts from what they are made of."""
    durations, tail, _ = (np.asarray(array, np.float64) for array in durations_of(seconds, software, assembly.facts))
    return Timed(durations, tail, np.asarray(software.messages * seconds.between, np.float64))


def best_of(assembly: Assembly, times: Timed, top: int) -> list[int]:
    """The fastest layouts, in order.

    The schedule is run for as many, by `least_seconds`, as could be among them.
    """
    least = least_seconds(assembly, times.durations, times.between) + times.tail
    order, step = np.argsort(least), max(2 * top, 16)
    fastest: list[tuple[float, int]] = []
    for start in range(0, len(order), step):
        if len(fastest) == top and fastest[-1][0] <= least[order[start]]:
            break
        chosen = order[start : start + step]
        whole = pipelines(assembly, times, chosen)[0] + times.tail[chosen]
        fastest = sorted([*fastest, *zip(whole.tolist(), chosen.tolist(), strict=True)])[:top]
    return [at for _, at in fastest]


def pipelines(assembly: Assembly, times: Timed, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the pipelines of some layouts, those of one schedule together, and of their busiest ranks alone."""
    same: dict[tuple[int, int, int], list[int]] = {}
    for place, at in enumerate(chosen):
        layout = assembly.layouts[at]
        batches = layout.micro_batches(assembly.ask.global_batch_size)
        same.setdefault((layout.pipeline, batches, layout.chunks), []).append(place)
    whole, busy = np.zeros(len(chosen)), np.zeros(len(chosen))
    for (ranks, batches, chunks), places in same.items():
        group = chosen[places]
        of_stage = times.durations[group][:, np.array(assembly.kinds[group[0]])]
        busy[places] = of_stage.reshape(len(group), -1, ranks, 3).sum(axis=(1, 3)).max(axis=-1) * batches
        backward = of_stage[..., BACKWARD] + of_stage[..., WEIGHT]
        of_stage = np.stack([of_stage[..., FORWARD], backward, 0.0 * backward], axis=-1)
        if ranks > 1:
            whole[places] = pipeline_end(schedule_table("1f1b", ranks, batches, chunks), of_stage, times.between[group])
        else:
            whole[places] = busy[places]
    return whole, busy
