"""`neusight-jax profile`: measure kernels on this machine, or list which ones to measure first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import progress_console, remark, show
from neusight_jax.cli.options import Checkpoint
from neusight_jax.errors import InputError

LISTS = (".csv", ".parquet")


def profile(
    output: Annotated[
        Path | None,
        typer.Option("--output", help="The folder to write, new or empty; or a .csv or .parquet file for a list."),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", help="quick, full, or a .csv or .parquet file of kernels.", show_default="quick"),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="jax or torch.")] = "jax",
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="One or more: fp32, tf32, bf16, fp16, fp8.", show_default="fp32")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped; no kernel twice.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="File of the device's figures, if the catalog lacks it; for a list: any GPU."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="For each kernel, compilation aside.")] = 0.2,
    timing: Annotated[
        str, typer.Option("--timing", help="latency_s is of a loop (no launch overhead), or of a single call.")
    ] = "loop",
    listed: Annotated[
        bool, typer.Option("--list", help="Only list the most telling kernels: quick (10) or full (50).")
    ] = False,
    checkpoint: Checkpoint = "fp32",
) -> None:
    """Measure kernels on the GPU of this machine, and write a folder for `train` and `calibrate`.

    Without a GPU, the CPU is measured in its place, and marked as such.

    With --list, or an --output that ends in .csv or .parquet, nothing is measured: the kernels that tell most about a
    GPU are listed, the most telling of each family first. Such a file is a --plan; filled in by other means
    (latency_s), `neusight-jax calibrate` takes it too. --checkpoint belongs to lists.
    """
    if listed or (output is not None and output.suffix.lower() in LISTS) or (output is None and plan is not None):
        _list(plan or "quick", gpu, output, checkpoint)
        return
    if output is None:
        raise InputError("--output is missing; give a folder to measure into, or --list to see which kernels tell most")
    from neusight_jax.profiling.journal import kept_kernels
    from neusight_jax.profiling.run import profile as measure

    target = output
    if not resume and kept_kernels(target):
        remark(f"note: an unfinished run beside {target} is forgotten; --resume would go on with it")
    with interrupts.kept_as(lambda: kept_kernels(target)):
        card = measure(
            output,
            plan=plan or "quick",
            backend=backend,
            dtypes=tuple(dict.fromkeys(dtype or ("fp32",))),
            seconds=seconds,
            timing=timing,
            gpu=gpu,
            resume=resume,
            console=progress_console(),
        )
    rows = sum(card["rows"].values())
    skipped = f", {card['skipped']} skipped (skipped.csv)" if card["skipped"] else ""
    typer.echo(
        f"{output}: {rows} kernels on {card['device']}{skipped}; median spread {100 * card['median_spread']:.1f} %, "
        f"{card['disturbed_rows']} disturbed"
    )
    if card["gpu_file"]:
        typer.echo(f"{output / 'gpu.json'}: figures of this device; give it as --gpu to predict and calibrate")


def _list(plan: str, gpu: str | None, output: Path | None, checkpoint: str) -> None:
    from neusight_jax.training.plan import plan_kernels

    chosen = plan_kernels(plan, gpu, checkpoint)
    if output is not None:
        chosen.write(output)
        remark(
            f"wrote {output}: {len(chosen.frame)} kernels; measure them with `neusight-jax profile --plan {output}`, "
            "or fill in latency_s, seconds, then `neusight-jax calibrate`"
        )
        return
    from neusight_jax.reports.text import table

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
