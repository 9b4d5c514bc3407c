"""`neusight-jax profile-model`: measure whole models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from neusight_jax.cli.console import progress_console
from neusight_jax.cli.options import OutputFolder


def profile_model(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="PATH.py:FUNCTION, or names and config.json files (transformers)."),
    ],
    output: OutputFolder,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Of models from configs.")] = None,
    sequence_length: Annotated[int | None, typer.Option("--sequence-length", help="Of models from configs.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", help="inference, training, or both.", show_default="both")
    ] = None,
    execution: Annotated[
        list[str] | None, typer.Option("--execution", help="eager, compiled, or both.", show_default="both")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of models from configs: fp32, bf16, fp16.")] = "fp32",
    seconds: Annotated[float, typer.Option("--seconds", help="For each model and way to run it.")] = 5.0,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="File of the device's figures, if the catalog lacks it.")
    ] = None,
) -> None:
    """Measure whole models end to end on the GPU of this machine (or its CPU, marked as such).

    A function in a Python file returns a JAX function, a flax NNX module or a torch module, and its arguments, as for
    `predict`. Training is the forward pass and all gradients, without an optimizer step: of a torch module's
    parameters, of the first argument of a JAX function. Compiled is jax.jit or torch.compile.
    """
    from neusight_jax.profiling.model_run import EXECUTIONS, MODES, profile_models

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
    skipped = f", {card['skipped']} skipped (skipped.csv)" if card["skipped"] else ""
    typer.echo(f"{output}: {card['rows']['end_to_end']} rows on {card['device']}{skipped}")
