"""`neusight-jax import`: other projects' measurements in the measurement schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.options import DropInvalid, OutputFolder


def import_neusight(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkout of github.com/sitar-lab/NeuSight.")],
    output: OutputFolder,
    drop_invalid: DropInvalid = False,
) -> None:
    """Import the sweeps and device files of a NeuSight checkout."""
    from neusight_jax.datasets.neusight_import import import_neusight as read_checkout

    report = read_checkout(source, output, on_invalid="drop" if drop_invalid else "refuse")
    for line in report.lines():
        typer.echo(line)
