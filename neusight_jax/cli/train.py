"""`neusight-jax train`: fit a predictor to measurements and write a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import progress_console, remark
from neusight_jax.cli.measured import measured_devices
from neusight_jax.cli.options import DropInvalid, MeasurementFolders, OutputFolder
from neusight_jax.errors import InputError, unknown_name


def train(
    measurements: MeasurementFolders,
    recipe: Annotated[
        str,
        typer.Option("--recipe", help="fp32, tensorcore, fp32-neusight, tiny (a trial), or a baseline, e.g. gbt."),
    ],
    output: OutputFolder,
    hold_out: Annotated[
        list[str] | None, typer.Option("--hold-out", metavar="DEVICE", help="GPUs whose rows are left out.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    drop_invalid: DropInvalid = False,
) -> None:
    """Train a predictor on measurements and write a checkpoint."""
    held_out = measured_devices(hold_out or (), measurements)
    from neusight_jax.training.evaluation.systems import BASELINES, train_baseline
    from neusight_jax.training.progress import kept_steps
    from neusight_jax.training.recipe import RECIPES
    from neusight_jax.training.recipes import train as train_recipe

    if recipe not in (*RECIPES, *BASELINES):
        raise unknown_name("recipe", recipe, (*RECIPES, *BASELINES))
    if recipe not in RECIPES:
        if resume:
            raise InputError(f"--resume is not for {recipe}: a baseline is fitted in one go; leave it out")
        card = train_baseline(measurements, recipe, output, held_out, seed, drop_invalid=drop_invalid)
        _remarks(card)
        typer.echo(f"{output}: {card['kind']} checkpoint, trained on {', '.join(card['trained_on']['devices'])}")
        return
    if not resume and kept_steps(output):
        remark(f"note: an unfinished run beside {output} is forgotten; --resume would go on with it")
    with interrupts.kept_as(lambda: kept_steps(output)):
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
    _remarks(card)
    devices = ", ".join(card.get("trained_on", {}).get("devices", ()))
    typer.echo(f"{output}: {card['kind']} checkpoint, trained on {devices}")


def _remarks(card: dict[str, Any]) -> None:
    for note in card.get("notes", ()):
        remark(f"note: {note}")
