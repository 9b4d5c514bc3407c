"""`neusight-jax train`: fit a predictor to measurements and write a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from neusight_jax.cli.console import progress_console
from neusight_jax.cli.options import DropInvalid, MeasurementFolders, OutputFolder
from neusight_jax.errors import InputError


def train(
    measurements: MeasurementFolders,
    recipe: Annotated[str, typer.Option("--recipe", help="What to train: fp32, or a baseline, e.g. gbt.")],
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
    from neusight_jax.training.recipes import RECIPES
    from neusight_jax.training.recipes import train as train_recipe
    from neusight_jax.training.systems import BASELINES, train_baseline

    if recipe in BASELINES and recipe not in RECIPES:
        if resume:
            raise InputError(f"--resume is not for {recipe}: a baseline is fitted in one go; leave it out")
        card = train_baseline(measurements, recipe, output, held_out, seed, drop_invalid=drop_invalid)
        typer.echo(f"{output}: {card['kind']} checkpoint, trained on {', '.join(card['trained_on']['devices'])}")
        return
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
