"""`neusight-jax scale-trace`: a run measured here, forecast there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import show, show_json
from neusight_jax.cli.options import AsJson, WorkloadCheckpoint
from neusight_jax.errors import InputError


def scale_trace(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A trace of PyTorch's or JAX's profiler, a CSV of Nsight Systems or rocprof, or a per-op Parquet.",
        ),
    ],
    to: Annotated[list[str], typer.Option("--to", metavar="GPU", help="GPUs to forecast it on.")],
    origin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="GPU", help="Where it was measured.", show_default="the GPU that the trace names"
        ),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="COLUMN=VALUE", help="One run of a per-op table with several."),
    ] = None,
    checkpoint: WorkloadCheckpoint = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Measured time x forecast over forecast, even where the two GPUs are unlike."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast a measured run on other GPUs, kernel by kernel."""
    from neusight_jax.gpu_file import load_named_gpu
    from neusight_jax.results import schema
    from neusight_jax.scaling.reading import read_trace
    from neusight_jax.scaling.scale import scale_trace as scale

    chosen: dict[str, str] = {}
    for pair in select or ():
        column, found, value = pair.partition("=")
        if not (column and found):
            raise InputError(f"--select is {pair!r}, expected COLUMN=VALUE, e.g. --select batch_size=4")
        chosen[column] = value
    for name in to:
        load_named_gpu(name)  # a wrong name is said before a long file is read
    read = read_trace(trace, "" if origin is None else load_named_gpu(origin)[0], chosen)
    runs = [scale(read, origin, name, predictor=checkpoint, plain=plain) for name in to]
    if as_json:
        content = {"schema": schema("scaled_runs"), "checkpoint": runs[0].checkpoint}
        show_json({**content, "runs": [run.to_dict() for run in runs]})
        return
    from neusight_jax.reports.scaled_run import tables

    show(tables(*runs))
