"""`neusight-jax profile | profile-model`: measure kernels or models on this machine, or list what to measure first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import progress_console, remark, show
from neusight_jax.cli.options import Checkpoint, OutputFolder, OwnGpu, Resume, argument, option
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.training.plan import Plan

LISTS = (".csv", ".parquet")


def profile(
    output: Annotated[
        Path | None, option("The folder to write, new or empty; or a .csv or .parquet file for a list.")
    ] = None,
    plan: Annotated[
        str | None, option("quick, full, collectives, or a .csv or .parquet file of kernels.", default="quick")
    ] = None,
    backend: Annotated[str, option("jax or torch.")] = "jax",
    dtype: Annotated[list[str] | None, option("One or more: fp32, tf32, bf16, fp16, fp8.", default="fp32")] = None,
    resume: Resume = False,
    gpu: OwnGpu = None,
    seconds: Annotated[float, option("For each kernel, compilation aside.")] = 0.2,
    timing: Annotated[str, option("latency_s is of a loop (no launch overhead), or of a single call.")] = "loop",
    listed: Annotated[bool, option("Only list the most telling kernels: quick (10) or full (50).", "--list")] = False,
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
    from neusight_jax.profiling.run import kept_kernels
    from neusight_jax.profiling.run import profile as measure

    target = output
    if not resume and kept_kernels(target):
        remark(f"note: an unfinished run beside {target} is forgotten; --resume would go on with it")
    with interrupts.kept_as(lambda: kept_kernels(target)):
        dtypes, console = tuple(dict.fromkeys(dtype or ("fp32",))), progress_console()
        settings = {"plan": plan or "quick", "backend": backend, "seconds": seconds, "timing": timing}
        card = measure(output, dtypes=dtypes, gpu=gpu, resume=resume, console=console, **settings)  # type: ignore[arg-type]
    typer.echo(
        f"{output}: {sum(card['rows'].values())} kernels on {card['device']}{_skipped(card['skipped'])}; "
        f"median spread {100 * card['median_spread']:.1f} %, {card['disturbed_rows']} disturbed"
    )
    if card["gpu_file"]:
        typer.echo(f"{output / 'gpu.json'}: figures of this device; give it as --gpu to predict and calibrate")


def profile_model(
    models: Annotated[
        list[str], argument("PATH.py:FUNCTION, or names and config.json files (transformers).", "MODEL...")
    ],
    output: OutputFolder,
    batch_size: Annotated[int | None, option("Of models from configs.")] = None,
    sequence_length: Annotated[int | None, option("Of models from configs.")] = None,
    mode: Annotated[list[str] | None, option("inference, training, or both.", default="both")] = None,
    execution: Annotated[list[str] | None, option("eager, compiled, or both.", default="both")] = None,
    dtype: Annotated[str, option("Of models from configs: fp32, bf16, fp16.")] = "fp32",
    seconds: Annotated[float, option("For each model and way to run it.")] = 5.0,
    gpu: Annotated[str | None, option("File of the device's figures, if the catalog lacks it.")] = None,
) -> None:
    """Measure whole models end to end on the GPU of this machine (or its CPU, marked as such).

    A function in a Python file returns a JAX function, a flax NNX module or a torch module, and its arguments, as for
    `predict`. Training is the forward pass and all gradients, without an optimizer step: of a torch module's
    parameters, of the first argument of a JAX function. Compiled is jax.jit or torch.compile.
    """
    from neusight_jax.profiling.models import EXECUTIONS, MODES, profile_models

    card = profile_models(
        models,
        output,
        batch_size=batch_size,
        sequence_length=sequence_length,
        modes=tuple(dict.fromkeys(mode or MODES)),
        executions=tuple(dict.fromkeys(execution or EXECUTIONS)),
        dtype=dtype,
        seconds=seconds,
        gpu=gpu,
        console=progress_console(),
    )
    typer.echo(f"{output}: {card['rows']['end_to_end']} rows on {card['device']}{_skipped(card['skipped'])}")


def _skipped(count: int) -> str:
    return f", {count} skipped (skipped.csv)" if count else ""


def _list(plan: str, gpu: str | None, output: Path | None, checkpoint: str) -> None:
    from neusight_jax.training.plan import plan_kernels

    publish_plan(plan_kernels(plan, gpu, checkpoint), f"plan {plan}", output)


def publish_plan(chosen: Plan, title: str, output: Path | None) -> None:
    """Write a list of kernels to a file, or print it where there is none."""
    if output is not None:
        chosen.write(output)
        remark(
            f"wrote {output}: {len(chosen.frame)} kernels; measure them with `neusight-jax profile --plan {output}`, "
            "or fill in latency_s, seconds, then `neusight-jax calibrate`"
        )
        return
    from neusight_jax.reports.text import table

    frame = chosen.frame.drop(columns=["device", "latency_s"])
    rows = frame.astype(object).where(frame.notna(), "").astype(str).values.tolist()
    head = f"Kernels to measure first, {title}, {chosen.gpu or 'any GPU'}; n is the contraction"
    show(table(head, list(frame.columns), rows))
