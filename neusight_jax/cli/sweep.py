"""`neusight-jax sweep`: models on many hypothetical machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import answer, plot_to, progress_console
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    Models,
    PlotFile,
    Relaxation,
    ReportFile,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.sweeps.space import Grid, Range, Samples

_GRID = "N values of a field, even in log; all combinations."
_ENERGY = "Also write energy_j of a step and power_w, of all GPUs: it takes about twice as long."
_GRADIENTS = "Also write slope_FIELD, seconds per unit of each field: up to four times as long."
_LENGTHS = "One or several; each one number, or for decoders one for each request: 512,2048."


@takes_workload
def sweep(
    models: Models,
    gpu: Annotated[list[str], option("Base machines, one or several: names, or JSON or YAML files.", metavar="GPU")],
    output: Annotated[Path, option("The Parquet file to write; must not exist.")],
    grid: Annotated[list[str] | None, option(_GRID, metavar="FIELD=LO:HI:N")] = None,
    span: Annotated[
        list[str] | None, option("A field of random points; with --samples.", "--range", metavar="FIELD=LO:HI")
    ] = None,
    samples: Annotated[int, option("How many points to draw from the ranges.")] = 0,
    method: Annotated[str, option("sobol or random points.")] = "sobol",
    seed: Annotated[int, option("Of the points.")] = 0,
    batch_size: Annotated[list[int] | None, option("One or several.", default="1")] = None,
    sequence_length: Annotated[list[str] | None, option(_LENGTHS, default="as predict")] = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    energy: Annotated[bool, option(_ENERGY, "--energy")] = False,
    gradients: Annotated[bool, option(_GRADIENTS, "--gradients")] = False,
    chunk: Annotated[int, option("Machines in one call; memory grows with it.")] = 2048,
    resume: Annotated[bool, option("Go on where an interrupted sweep stopped.", "--resume")] = False,
    coordinator: Annotated[str | None, option("Process 0, to share the work.", metavar="HOST:PORT")] = None,
    num_processes: Annotated[int, option("How many share the work.")] = 1,
    process_id: Annotated[int, option("Which of them this is, from 0.")] = 0,
    plot: PlotFile = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Forecast models on many hypothetical machines, or training jobs on clusters of them; peaks follow SM count and
    clock.
    """
    from neusight_jax.cli.workloads import check_relaxation

    check_relaxation(relaxation)
    space = _space(grid or (), span or (), samples, method, seed)
    loads = [
        replace(load, batch_size=batch, sequence_length=positions)
        for batch in batch_size or (load.batch_size,)
        for positions in sequence_length or (load.sequence_length,)
    ]
    how = {"chunk": chunk, "relaxation": relaxation, "resume": resume, "energy": energy, "gradients": gradients}
    join = (coordinator, num_processes, process_id)
    if job.cluster is not None:
        raise InputError("--cluster is of one machine; name base machines with --gpu, and how many with --gpus")
    done, chosen = _swept(models, gpu, loads, job, checkpoint, join, space, output, **how)
    if process_id > 0:
        return
    plot_to(plot, done)
    answer(done, as_json, report, checkpoint=chosen)


def _swept(
    models: list[str],
    bases: list[str],
    loads: list[WorkloadOptions],
    job: JobOptions,
    checkpoint: str | None,
    join: tuple[str | None, int, int],
    *where: Any,
    **how: Any,
) -> tuple[Any, str]:
    """The sweep of all models and workloads, and the checkpoint that forecast it."""
    from neusight_jax.cli.predict import forecast_notes
    from neusight_jax.cli.workloads import check_dtype, default_for, work_of
    from neusight_jax.hardware.files import load_named_gpus
    from neusight_jax.model.checkpoint import load_card, load_predictor
    from neusight_jax.sweeps.devices import join_processes
    from neusight_jax.sweeps.parts import kept_rows
    from neusight_jax.sweeps.run import sweep as run_sweep

    gpus = load_named_gpus(bases)
    works = [work_of(model, load, job) for model in models for load in loads]
    for work in works:
        for name, machine in gpus.items():
            check_dtype(machine, name, work.dtype)
    chosen = checkpoint or default_for(works)
    notes = [
        note.replace("this GPU", name)
        for name in gpus
        for work in works
        for note in forecast_notes(load_card(chosen), chosen, name, work)
    ]
    with interrupts.kept_as(lambda: kept_rows(where[1])):
        how |= {"label": chosen, "notes": notes, "console": progress_console(), "processes": join_processes(*join)}
        return run_sweep(load_predictor(chosen), gpus, works, *where, **how), chosen


def _space(grid: Sequence[str], span: Sequence[str], samples: int, method: str, seed: int) -> Grid | Samples:
    from neusight_jax.sweeps.space import Grid, Samples

    if bool(grid) == bool(span) or bool(span) != (samples != 0):
        raise InputError(
            "say what to sweep: either --grid FIELD=LO:HI:N ..., or --range FIELD=LO:HI ... with --samples N"
        )
    if grid and (method != "sobol" or seed):
        raise InputError("--method and --seed are of random points; give --range and --samples, or leave them out")
    if grid:
        return Grid(tuple(_range("--grid", text) for text in grid))
    if method not in ("sobol", "random"):
        raise InputError(f"--method is {method!r}, expected sobol or random")
    ranges = tuple(_range("--range", text) for text in span)
    return Samples(ranges, samples, "sobol" if method == "sobol" else "random", seed)


def _range(option: str, text: str) -> Range:
    from neusight_jax.cli.workloads import numbers, split_assignment
    from neusight_jax.sweeps.space import Range

    field, value = split_assignment(option, text)
    form = "FIELD=LO:HI:N" if option == "--grid" else "FIELD=LO:HI"
    wanted, (*parts, last) = form.count(":") + 1, value.split(":")
    log = len(parts) != wanted
    if len(parts) not in (wanted - 1, wanted):
        raise InputError(f"{option} {text!r}: expected {form}, or {form}:linear for values even in the field itself")
    if not log and last != "linear":
        raise InputError(f"{option} {text!r}: {last!r} is no spacing, expected {form}:linear or {form}")
    low, high, *points = numbers(option, text, [*parts, last][:wanted], field)
    if points and (not points[0] >= 1 or points[0] % 1):
        raise InputError(f"{option} {text!r}: {points[0]:g} points, expected a whole number of at least 1")
    return Range(field, low, high, count=int(points[0]) if points else 0, log=log)
