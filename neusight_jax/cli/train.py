"""`neusight-jax train`: fit a predictor to measurements and write a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from neusight_jax.cli.console import progress_console
from neusight_jax.cli.options import DropInvalid, MeasurementFolders, OutputFolder


def train(
    measurements: MeasurementFolders,
    recipe: Annotated[str, typer.Option("--recipe", help="What to train, and how.")],
    output: OutputFolder,
    hold_out: Annotated[
        list[str] | None, typer.Option("--hold-out", metavar="DEVICE", help="GPUs whose rows are left out.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    drop_invalid: DropInvalid = False,
) -> None:
    """Train a predictor on measurements and write a checkpoint."""
    from neusight_jax.gpu_catalog import gpu_info

    held_out = [gpu_info(name).name for name in hold_out or ()]
    from neusight_jax.training.recipes import train as train_recipe

    card = train_recipe(
        measurements=measurements,
        recipe=recipe,
        output=output,
        hold_out=held_out,
        seed=seed,
        resume=resume,
        drop_invalid=drop_invalid,
        console=progress_console(),
    )
    devices = ", ".join(card.get("trained_on", {}).get("devices", ()))
    typer.echo(f"{output}: {card['kind']} checkpoint, trained on {devices}")
