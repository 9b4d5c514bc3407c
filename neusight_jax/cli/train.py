"""`neusight-jax train | calibrate`: a predictor fitted to measurements, or a checkpoint to a handful of one GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import busy, progress_console, remark
from neusight_jax.cli.options import (
    Checkpoint,
    DropInvalid,
    Gpu,
    GpuFiles,
    MeasurementFolders,
    OutputFolder,
    Resume,
    option,
)
from neusight_jax.errors import InputError, unknown_name


def train(
    measurements: MeasurementFolders,
    recipe: Annotated[str, option("fp32, tensorcore, power, vendor, tiny (a trial), or a baseline.")],
    output: OutputFolder,
    hold_out: Annotated[list[str] | None, option("GPUs whose rows are left out.", metavar="DEVICE")] = None,
    seed: Annotated[int, option("Of the random numbers.")] = 0,
    resume: Resume = False,
    drop_invalid: DropInvalid = False,
    network: Annotated[str | None, option("A flax module of your own.", metavar="PACKAGE.MODULE:CLASS")] = None,
    checkpoint: Annotated[str, option("Which recipes power and vendor start from.")] = "tensorcore",
    gpu_file: GpuFiles = None,
) -> None:
    """Train a predictor on measurements and write a checkpoint."""
    measurements = [*measurements, *(gpu_file or ())]
    held_out = measured_devices(hold_out or (), measurements)
    from neusight_jax.model.network import load_network
    from neusight_jax.training.evaluation.systems import BASELINES, train_baseline
    from neusight_jax.training.fit import kept_steps
    from neusight_jax.training.power import RECIPE as POWER
    from neusight_jax.training.power import train_power
    from neusight_jax.training.recipes import RECIPES
    from neusight_jax.training.recipes import train as train_recipe
    from neusight_jax.training.vendor import RECIPE as VENDOR
    from neusight_jax.training.vendor import train_vendor

    if recipe in RECIPES:
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
                network=load_network({"module": network, "arguments": {}}) if network else None,
            )
    elif recipe not in (POWER, VENDOR, *BASELINES):
        raise unknown_name("recipe", recipe, (*RECIPES, POWER, VENDOR, *BASELINES))
    elif network:
        raise InputError(f"--network is not for {recipe}, which has no network; leave it out")
    elif resume:
        raise InputError(f"--resume is not for {recipe}, which is fitted in one go; leave it out")
    elif recipe == POWER:
        card = train_power(measurements, output, checkpoint, held_out, drop_invalid=drop_invalid)
        for device, percent in card["power"]["errors_percent"].items():
            role = "held out" if device in card["power"]["held_out"] else "fitted"
            typer.echo(f"{device}: watts off by {percent} % in the mean, {role}")
    elif recipe == VENDOR:
        card = train_vendor(measurements, output, checkpoint, held_out, drop_invalid=drop_invalid)
        for role, families in card["vendor"]["errors_percent"].items():
            for name, percents in families.items():
                for device, percent in percents.items():
                    typer.echo(f"{name} on {device}, {role}: off by {percent} % in the mean")
    else:
        card = train_baseline(measurements, recipe, output, held_out, seed, drop_invalid=drop_invalid)
    _remarks(card, output)
    devices = ", ".join(card.get("trained_on", {}).get("devices", ()))
    typer.echo(f"{output}: {card['kind']} checkpoint, trained on {devices}")


def calibrate(
    measurements: MeasurementFolders,
    gpu: Gpu,
    output: OutputFolder,
    checkpoint: Checkpoint = "fp32",
    drop_invalid: DropInvalid = False,
) -> None:
    """Calibrate a checkpoint with measured kernels of one GPU, 4 to 200 of each family.

    Measurements of other GPUs are left out. A filled plan of `neusight-jax profile --plan` will do.
    """
    from neusight_jax.training.calibration import calibrate_checkpoint, summary_lines

    with busy("calibrating"):
        card = calibrate_checkpoint(measurements, gpu, output, checkpoint, drop_invalid=drop_invalid)
    _remarks(card, output)
    for line in summary_lines(card["calibrated"]["summary"]):
        typer.echo(line)
    typer.echo(f"{output}: {checkpoint}, calibrated on {card['calibrated']['gpu']}")


def measured_devices(names: Sequence[str], measurements: Sequence[Path]) -> list[str]:
    """Canonical names of the measured devices meant, with a remark where the catalog means another board.

    Raises: `InputError` for a device without rows, listing those that have some.
    """
    from neusight_jax.datasets.measurements import find_measured
    from neusight_jax.hardware.catalog import canonical_name

    devices: list[str] = find_measured(names, measurements)
    for name, device in zip(names, devices, strict=True):
        if canonical_name(name) not in (None, device):
            remark(f"note: {name} is taken for {device}, which was measured; {canonical_name(name)} was not")
    return devices


def _remarks(card: dict[str, Any], output: Path) -> None:
    """What to know of the checkpoint that was written, as every forecast made with it says."""
    from neusight_jax.model.checkpoint import card_notes, load_card

    for note in (*card.get("notes", ()), *card_notes(load_card(output), str(output))):
        remark(f"note: {note}")
