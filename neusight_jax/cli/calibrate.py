"""`neusight-jax calibrate`: a checkpoint fitted to a handful of measured kernels of one GPU."""

from __future__ import annotations

import typer

from neusight_jax.cli.console import remark
from neusight_jax.cli.options import Checkpoint, DropInvalid, Gpu, MeasurementFolders, OutputFolder


def calibrate(
    measurements: MeasurementFolders,
    gpu: Gpu,
    output: OutputFolder,
    checkpoint: Checkpoint = "fp32",
    drop_invalid: DropInvalid = False,
) -> None:
    """Calibrate a checkpoint with measured kernels of one GPU, 4 to 200 of each family.

    Measurements of other GPUs are left out. A filled list of `neusight-jax profile --list` will do, as CSV too.
    """
    from neusight_jax.training.calibrated_checkpoint import calibrate_checkpoint
    from neusight_jax.training.calibration import summary_lines

    card = calibrate_checkpoint(measurements, gpu, output, checkpoint, drop_invalid=drop_invalid)
    for note in card["notes"]:
        remark(f"note: {note}")
    for line in summary_lines(card["calibrated"]["summary"]):
        typer.echo(line)
    typer.echo(f"{output}: {checkpoint}, calibrated on {card['calibrated']['gpu']}")
