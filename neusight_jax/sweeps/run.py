"""`nj.sweep`: machines × workloads, chunk by chunk, into one Parquet file."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine, gpu_of, topology_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.variant import vary
from neusight_jax.job.step import latency, seconds_and_joules
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import require_covered
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import Relaxation, relaxation_switch
from neusight_jax.progress import working
from neusight_jax.records import Result, json_text, schema
from neusight_jax.sweeps.devices import ALONE, Processes, Spread, on_host, spread_rows
from neusight_jax.sweeps.parts import METADATA, Parts
from neusight_jax.sweeps.space import Space
from neusight_jax.workloads import Workload, usual_machine, workload, workload_dict

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from neusight_jax.job.job import Job

EXTRAS: tuple[str, ...] = ("energy", "gradients")
"""What the rows of a sweep may have beside their seconds."""
CHUNK = 2048
"""Machines in one program call, and in one file of an unfinished sweep."""


@dataclass(frozen=True)
class Sweep(Result):
    """Outcome of a sweep.

    Attributes:
      output: the Parquet file.
      rows: rows in it.
      resumed_rows: of them, rows an earlier run had left.
      asked: what it is of, as in the metadata of the file: label, gpus, workloads, space ...
      notes: what to know before trusting the numbers.
    """

    kind: ClassVar[str] = "sweep"
    output: Path
    rows: int
    resumed_rows: int
    asked: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """The rows of the file."""
        import pandas as pd

        return pd.read_parquet(self.output)

    def values(self) -> dict[str, Any]:
        """Request of the sweep; the rows are in the file."""
        return {**self._fields("output", "rows", "resumed_rows"), **self.asked, "notes": self.notes}


@dataclass(frozen=True)
class _Task:
    """One base machine under one workload, and its place among the workloads."""

    gpu_name: str
    machine: Machine
    place: int
    load: Workload


@dataclass(frozen=True)
class _Chunk:
    """A run of samples of one task; rows [start, stop) of the sweep are samples [first, first + stop − start)."""

    task: _Task
    start: int
    stop: int
    first: int


@functools.partial(jax.jit, static_argnames="extras")
def _forecasts(
    predictor: Predictor,
    base: Machine,
    figures: Mapping[str, Array],
    work: KernelTable | Job,
    relaxation: Relaxation,
    extras: tuple[str, ...],
) -> dict[str, Float[Array, " gpu"]]:
    """Columns of a sweep: seconds, with the `EXTRAS` that are asked for."""

    def seconds_at(point: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
        machine = vary(base, point)
        if "energy" not in extras:
            return latency(predictor, machine, work, relaxation=relaxation), {}
        seconds, joules = seconds_and_joules(predictor, machine, work, relaxation=relaxation)
        return seconds, {"energy_j": joules, "power_w": joules / seconds}

    def one(point: Mapping[str, Array]) -> dict[str, Array]:
        if "gradients" not in extras:
            seconds, power = seconds_at(point)
            return {"seconds": seconds, **power}
        (seconds, power), slopes = jax.value_and_grad(seconds_at, has_aux=True)(point)
        return {"seconds": seconds, **power, **{f"slope_{name}": slope for name, slope in slopes.items()}}

    return jax.vmap(one)(figures)


def sweep(
    predictor: Predictor,
    gpus: Mapping[str, GPU],
    works: Sequence[Graph | Job],
    space: Space,
    output: Path | str,
    *,
    chunk: int = CHUNK,
    relaxation: float = 0.0,
    resume: bool = False,
    energy: bool = False,
    gradients: bool = False,
    label: str = "",
    notes: Sequence[str] = (),
    console: Console | None = None,
    processes: Processes = ALONE,
) -> Sweep:
    """Forecast every point of a space around every base GPU under every workload; write them to a Parquet file.

    Args:
      predictor: what forecasts.
      gpus: name -> base machine; the space replaces its fields, peaks follow SM count and clock (`variant.vary`).
      works: the workloads: graphs, and jobs on clusters of so many of each base.
      space: a `Grid` or `Samples`.
      output: the Parquet file: sample, gpu, workload (its place among the `workloads` of the file's metadata), model,
        mode, dtype, batch_size, sequence_length, the fields, `seconds`; with `energy` `energy_j` and `power_w`; with
        `gradients` `slope_FIELD` of every field.
      chunk: machines in one call; memory grows with it.
      relaxation: see `latency.kernel_latency`; 0 = exact.
      resume: go on with an interrupted sweep that was asked the same.
      energy: whether every row has joules of a step and mean watts too, of all GPUs; it then takes about twice as
        long.
      gradients: whether every row has its slopes too: seconds per unit of each field, peaks following SM count and
        clock; it then takes up to four times as long.
      label: what made the predictor, e.g. the checkpoint's name; resuming with another is refused.
      notes: what to know beside the notes of the graphs; kept in the file's metadata.
      console: where progress is shown; None = nowhere.
      processes: who shares the work (`sweeps.devices.join_processes`); every one of them calls this with equal
        arguments and sees the same file system.
    Rows lie in the order gpu, workload, sample. All devices of all processes share the rows of a chunk. A killed sweep
    leaves its rows in a hidden folder beside the output; no row is lost or computed twice but those of the chunk it was
    at. The other processes of a killed one end too.
    Raises: `InputError` for an unusable request, when the output or an unfinished sweep is in the way, or when another
      process has ended.
    """
    output = Path(output)
    tasks = [_task(name, gpu, place, work) for name, gpu in gpus.items() for place, work in enumerate(works)]
    remarks = tuple(dict.fromkeys((*notes, *(note for task in tasks for note in task.load.graph.notes))))
    _check(predictor, tasks, chunk)
    request = {"label": label, **_asked(gpus, works, space), "relaxation": relaxation, "chunk": chunk}
    extras = tuple(name for name, is_asked in zip(EXTRAS, (energy, gradients), strict=True) if is_asked)
    parts = Parts(output, {**request, **dict.fromkeys(extras, True)})
    rows, done = _run(predictor, tasks, space, parts, chunk, relaxation, resume, extras, remarks, console, processes)
    return Sweep(output, rows, done, parts.asked, remarks)


def _task(name: str, gpu: GPU, place: int, work: Graph | Job) -> _Task:
    """Work on a GPU, or on as many as it occupies in their usual servers."""
    machine = usual_machine(name, gpu, work)
    return _Task(name, machine, place, workload(work.on(gpu.paths, topology_of(machine).gpus_per_domain)))


def _run(
    predictor: Predictor,
    tasks: Sequence[_Task],
    space: Space,
    parts: Parts,
    chunk: int,
    relaxation: float,
    resume: bool,
    extras: tuple[str, ...],
    notes: Sequence[str],
    console: Console | None,
    processes: Processes,
) -> tuple[int, int]:
    """Compute what is missing of a sweep and merge its parts; how many rows it has, and how many were there before."""
    rows = space.rows * len(tasks)
    first = processes.index == 0
    # No process touches a file before all are known to be asked the same.
    processes.barrier(json_text({**parts.asked, "resume": resume}))
    complete = parts.complete(resume)
    # The first one removes the parts of a sweep that is complete, so all must have looked before.
    processes.barrier("looked for the output")
    if complete:
        if first:
            parts.remove()
        return rows, rows
    if first:
        parts.open(resume)
    processes.barrier("opened")
    chunks = _chunks(tasks, space.rows, chunk)
    missing = parts.missing([(piece.start, piece.stop) for piece in chunks])
    lacking = [piece for piece, lacks in zip(chunks, missing, strict=True) if lacks]
    spread = spread_rows(min(chunk, space.rows), processes)
    shares = [_shares(piece, spread) for piece in lacking]
    processes.barrier("looked")
    if first:
        parts.clear([(piece.start, piece.stop) for piece in lacking], {span for spans in shares for span in spans})
    processes.barrier("cleared")
    there = set(parts.spans())
    processes.barrier("counted")
    done = sum(stop - start for start, stop in there)
    todo = [
        piece
        for piece, spans in zip(lacking, shares, strict=True)
        if processes.index < len(spans) and spans[processes.index] not in there
    ]
    with working("forecasts", console if first else None, rows, done) as advance:
        for part in _computed(on_host(predictor), todo, space, spread, relaxation, extras):
            processes.check()
            _write(*part, spread, parts)
            advance((rows - done) / len(todo))
    processes.barrier("computed")
    if first:
        kept = {"schema": schema("sweep"), **parts.asked, "notes": list(notes)}
        parts.merge(rows, {METADATA: json_text(kept)})
    processes.barrier("merged")
    return rows, done


def _asked(gpus: Mapping[str, GPU], works: Sequence[Graph | Job], space: Space) -> dict[str, Any]:
    """Request of a sweep, for the metadata of its file."""
    return {
        "gpus": {
            name: {figure: float(np.asarray(value)) for figure, value in gpu.known().items()}
            for name, gpu in gpus.items()
        },
        "workloads": [{**workload_dict(work), "launches": work.launches()} for work in works],
        "space": space.describe(),
    }


def _chunks(tasks: Sequence[_Task], rows: int, chunk: int) -> list[_Chunk]:
    """Runs of at most `chunk` of the `rows` samples of every task, in the order of the file."""
    return [
        _Chunk(task, place * rows + low, place * rows + min(low + chunk, rows), low)
        for place, task in enumerate(tasks)
        for low in range(0, rows, chunk)
    ]


def _check(predictor: Predictor, tasks: Sequence[_Task], chunk: int) -> None:
    if not tasks:
        raise InputError("nothing to sweep; expected at least one GPU and one model")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}, expected at least 1")
    for task in tasks:
        require_covered(predictor, task.load.kernels)
        try:
            for dtype in task.load.graph.arithmetic:
                gpu_of(task.machine).peak_flop_per_s(dtype)
        except InputError as error:
            raise InputError(f"{task.gpu_name}: {error}") from None


def _shares(chunk: _Chunk, spread: Spread) -> list[tuple[int, int]]:
    """Rows [start, stop) of a chunk that are each process's; the last processes may have none."""
    share = spread.stop - spread.start
    return [(low, min(low + share, chunk.stop)) for low in range(chunk.start, chunk.stop, share)]


def _computed(
    predictor: Predictor,
    todo: Sequence[_Chunk],
    space: Space,
    spread: Spread,
    relaxation: float,
    extras: tuple[str, ...],
) -> Iterator[tuple[_Chunk, dict[str, np.ndarray], dict[str, Array]]]:
    """This process's rows of every chunk and their forecasts; one chunk is computed while the last is written."""
    pending: tuple[_Chunk, dict[str, np.ndarray], dict[str, Array]] | None = None
    for chunk in todo:
        # Rows past the end repeat the last sample, so that every chunk has one shape.
        last = chunk.first + chunk.stop - chunk.start
        low, high = (min(chunk.first + place, last - 1) for place in (spread.start, spread.stop - 1))
        figures = space.slice(low, high + 1)
        load = chunk.task.load
        work = load.graph.kernels if load.graph.nodes else load.step
        base = on_host(chunk.task.machine)
        columns = _forecasts(predictor, base, spread.put(figures), work, relaxation_switch(relaxation), extras)
        if pending is not None:
            yield pending
        pending = (chunk, figures, columns)
    if pending is not None:
        yield pending


def _write(
    chunk: _Chunk, figures: Mapping[str, np.ndarray], forecasts: Mapping[str, Array], spread: Spread, parts: Parts
) -> None:
    import pyarrow as pa

    count = max(min(spread.stop, chunk.stop - chunk.start) - spread.start, 0)
    if count == 0:
        return
    graph = chunk.task.load.graph

    def constant(text: str) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))

    texts = {"gpu": chunk.task.gpu_name, "model": graph.name, "mode": graph.mode, "dtype": graph.dtype}
    sizes = {"batch_size": graph.batch_size, "sequence_length": graph.sequence_length}
    sample = chunk.first + spread.start
    columns = {
        "sample": pa.array(np.arange(sample, sample + count)),
        "workload": pa.array(np.full(count, chunk.task.place, np.int32)),
        **{name: constant(text) for name, text in texts.items()},
        **{name: pa.array(np.full(count, size, np.int32)) for name, size in sizes.items()},
        **{
            name: pa.array(np.asarray(values)[:count].astype(np.float32))
            for name, values in {**figures, **forecasts}.items()
        },
    }
    start = chunk.start + spread.start
    parts.write(start, start + count, pa.table(columns))
