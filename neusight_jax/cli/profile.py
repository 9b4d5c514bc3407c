"""`neusight-jax profile`: which kernels to measure first on a GPU. Measuring them is not there yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import remark, show
from neusight_jax.cli.options import Checkpoint
from neusight_jax.errors import InputError


def profile(
    plan: Annotated[
        str | None, typer.Option("--plan", help="List the kernels to measure first: quick (10) or full (50).")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="The GPU they are for, a name or a file; default: a list for any GPU.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Write the list here, .csv or .parquet.")] = None,
    checkpoint: Checkpoint = "fp32",
) -> None:
    """List the kernels to measure first on a GPU, the most telling of each family first.

    Measuring is not there yet: fill the column latency_s by other means (the mean of the fastest of some runs, one
    launch at a time) and give the file to `neusight-jax calibrate`.
    """
    if plan is None:
        raise InputError(
            "measuring kernels on this machine's GPU is not there yet; `--plan quick --output plan.csv` lists the "
            "kernels to measure, fill in latency_s and give the file to `neusight-jax calibrate`"
        )
    from neusight_jax.training.plan import plan_kernels

    chosen = plan_kernels(plan, gpu, checkpoint)
    if output is not None:
        chosen.write(output)
        remark(
            f"wrote {output}: {len(chosen.frame)} kernels; fill in latency_s, seconds, then `neusight-jax calibrate`"
        )
        return
    from neusight_jax.report import table

    frame = chosen.frame.drop(columns=["device", "latency_s"])
    rows = [
        ["" if value != value or value is None else str(value) for value in row]
        for row in frame.astype(object).where(frame.notna(), None).values.tolist()
    ]
    show(
        table(
            f"Kernels to measure first, plan {plan}, {chosen.gpu or 'any GPU'}; n is the contraction",
            list(frame.columns),
            rows,
        )
    )
