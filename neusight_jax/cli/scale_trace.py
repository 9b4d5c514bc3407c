"""`neusight-jax scale-trace`: a run measured here, forecast there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from neusight_jax.cli.console import busy, report_to, show, show_json
from neusight_jax.cli.options import AsJson, ReportFile, WorkloadCheckpoint, argument, option
from neusight_jax.errors import InputError

_TRACE = "A trace of PyTorch's or JAX's profiler, a CSV of Nsight Systems or rocprof, or a per-op Parquet."
_PLAIN = "Measured time x forecast over forecast, even where the two GPUs are unlike."


def scale_trace(
    trace: Annotated[Path, argument(_TRACE, "TRACE")],
    to: Annotated[list[str], option("GPUs to forecast it on.", metavar="GPU")],
    origin: Annotated[
        str | None, option("Where it was measured.", "--from", metavar="GPU", default="the GPU that the trace names")
    ] = None,
    select: Annotated[
        list[str] | None, option("One run of a per-op table with several.", metavar="COLUMN=VALUE")
    ] = None,
    checkpoint: WorkloadCheckpoint = None,
    plain: Annotated[bool, option(_PLAIN, "--plain")] = False,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Forecast a measured run on other GPUs, kernel by kernel."""
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.records import schema
    from neusight_jax.scaling.rules import read_trace
    from neusight_jax.scaling.rules import scale_trace as scale

    chosen: dict[str, str] = {}
    for pair in select or ():
        column, sign, chosen[column] = pair.partition("=")
        if not (column and sign):
            raise InputError(f"--select is {pair!r}, expected COLUMN=VALUE, e.g. --select batch_size=4")
    for name in to:
        load_named_gpu(name)  # a wrong name is said before a long file is read
    with busy("reading and scaling"):
        read = read_trace(trace, "" if origin is None else load_named_gpu(origin)[0], chosen)
        runs = [scale(read, origin, name, predictor=checkpoint, plain=plain) for name in to]
    report_to(report, runs[0], checkpoint=runs[0].checkpoint, others=runs[1:])
    if as_json:
        content = {"schema": schema("scaled_runs"), "checkpoint": runs[0].checkpoint}
        show_json({**content, "runs": [run.to_dict() for run in runs]})
        return
    from neusight_jax.reports.scaled_run import tables

    show(tables(*runs))
