"""`neusight-jax sweep`: many hypothetical machines × models into one Parquet file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import answer, progress_console
from neusight_jax.cli.options import AsJson, Models, Relaxation, WorkloadCheckpoint, WorkloadOptions, takes_workload
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.sweeps.space import Range


@takes_workload
def sweep(
    models: Models,
    gpu: Annotated[
        list[str],
        typer.Option("--gpu", metavar="GPU", help="Base machines, one or several: names, or JSON or YAML files."),
    ],
    output: Annotated[Path, typer.Option("--output", help="The Parquet file to write; must not exist.")],
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="FIELD=LO:HI:N", help="N values of a field, even in log; all combinations."),
    ] = None,
    span: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="FIELD=LO:HI", help="A field of random points; with --samples."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="How many points to draw from the ranges.")] = 0,
    method: Annotated[str, typer.Option("--method", help="sobol or random points.")] = "sobol",
    seed: Annotated[int, typer.Option("--seed", help="Of the points.")] = 0,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="One or several.", show_default="1")
    ] = None,
    sequence_length: Annotated[
        list[str] | None,
        typer.Option(
            "--sequence-length",
            help="One or several; each one number, or for decoders one for each request: 512,2048.",
            show_default="as predict",
        ),
    ] = None,
    *,
    load: WorkloadOptions,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    chunk: Annotated[int, typer.Option("--chunk", help="Machines in one call; memory grows with it.")] = 2048,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted sweep stopped.")] = False,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", metavar="HOST:PORT", help="Process 0, to share the work.")
    ] = None,
    num_processes: Annotated[int, typer.Option("--num-processes", help="How many share the work.")] = 1,
    process_id: Annotated[int, typer.Option("--process-id", help="Which of them this is, from 0.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the first two fields as a heat map: .png or .svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast models on many hypothetical machines; peaks follow SM count and clock."""
    from neusight_jax.cli.workloads import check_dtype, check_relaxation, default_for, graph_of
    from neusight_jax.sweeps.space import Grid, Samples

    check_relaxation(relaxation)
    if plot is not None:
        from neusight_jax.reports.files import require_format

        require_format(plot)
    if bool(grid) == bool(span) or bool(span) != (samples != 0):
        raise InputError(
            "say what to sweep: either --grid FIELD=LO:HI:N ..., or --range FIELD=LO:HI ... with --samples N"
        )
    space: Grid | Samples
    if grid:
        space = Grid(tuple(_range("--grid", text) for text in grid))
    else:
        if method not in ("sobol", "random"):
            raise InputError(f"--method is {method!r}, expected sobol or random")
        ranges = tuple(_range("--range", text) for text in span or ())
        space = Samples(ranges, samples, "sobol" if method == "sobol" else "random", seed)
    if plot is not None and len(space.fields) < 2:
        raise InputError("--plot needs two fields that vary; add a --grid, or drop --plot")
    from neusight_jax.sweeps.devices import join_processes

    join_processes(coordinator, num_processes, process_id)
    import jax

    from neusight_jax.checkpoint import load_card, load_predictor
    from neusight_jax.cli.predict import forecast_notes
    from neusight_jax.gpu_file import load_named_gpus
    from neusight_jax.sweeps.parts import kept_rows
    from neusight_jax.sweeps.run import sweep as run_sweep

    gpus = load_named_gpus(gpu)
    graphs = [
        graph_of(model, replace(load, batch_size=batch, sequence_length=positions))
        for model in models
        for batch in batch_size or (load.batch_size,)
        for positions in sequence_length or (load.sequence_length,)
    ]
    for graph in graphs:
        for name, machine in gpus.items():
            check_dtype(machine, name, graph.dtype)
    chosen = checkpoint or default_for(graphs)
    card = load_card(chosen)
    notes = [
        note.replace("this GPU", name)
        for name in gpus
        for graph in graphs
        for note in forecast_notes(card, chosen, name, graph)
    ]
    with interrupts.kept_as(lambda: kept_rows(output)):
        done = run_sweep(
            load_predictor(chosen),
            gpus,
            graphs,
            space,
            output,
            chunk=chunk,
            relaxation=relaxation,
            resume=resume,
            label=chosen,
            notes=notes,
            console=progress_console(),
        )
    if jax.process_index() > 0:
        return
    if plot is not None:
        from neusight_jax.reports.figures import heat_map
        from neusight_jax.reports.files import save

        save(heat_map(done.to_frame(), *space.fields[:2]), plot)
    answer(done, as_json, checkpoint=chosen)


def _range(option: str, text: str) -> Range:
    from neusight_jax.cli.workloads import numbers, split_assignment
    from neusight_jax.sweeps.space import Range

    field, value = split_assignment(option, text)
    parts = value.split(":")
    wanted = 3 if option == "--grid" else 2
    form = "FIELD=LO:HI:N" if option == "--grid" else "FIELD=LO:HI"
    if len(parts) not in (wanted, wanted + 1):
        raise InputError(f"{option} {text!r}: expected {form}, or {form}:linear for values even in the field itself")
    log = len(parts) == wanted
    if not log and parts[-1] != "linear":
        raise InputError(f"{option} {text!r}: {parts[-1]!r} is no spacing, expected {form}:linear or {form}")
    figures = numbers(option, text, parts[:wanted])
    count = int(figures[2]) if wanted == 3 else 0
    if wanted == 3 and (count != figures[2] or count < 1):
        raise InputError(f"{option} {text!r}: {parts[2]} points, expected a whole number of at least 1")
    return Range(field, figures[0], figures[1], count=count, log=log)
