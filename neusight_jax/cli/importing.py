"""`neusight-jax import`: other projects' measurements in the measurement schema."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from neusight_jax.cli.console import progress_console
from neusight_jax.cli.options import DropInvalid, OutputFolder, argument

_PACKAGE = "The wheel of aiconfigurator-core, or its folder; default: the installed package."


def import_neusight(
    source: Annotated[Path, argument("A checkout of github.com/sitar-lab/NeuSight.", "SOURCE")],
    output: OutputFolder,
    drop_invalid: DropInvalid = False,
) -> None:
    """Import the sweeps and device files of a NeuSight checkout."""
    from neusight_jax.datasets.neusight import import_neusight as read_checkout

    on_invalid: Literal["drop", "refuse"] = "drop" if drop_invalid else "refuse"
    for line in read_checkout(source, output, on_invalid=on_invalid, console=progress_console()).lines():
        typer.echo(line)


def import_aiter(
    source: Annotated[Path, argument("A checkout of github.com/ROCm/aiter, or a table of its rows.", "SOURCE")],
    output: OutputFolder,
) -> None:
    """Import tuned matrix products of AMD's matrix cores from a checkout of ROCm/aiter."""
    from neusight_jax.datasets.aiter import import_aiter as read_configs

    for line in read_configs(source, output).lines():
        typer.echo(line)


def import_aiconfigurator(
    output: OutputFolder, source: Annotated[Path | None, argument(_PACKAGE, "[PATH]")] = None
) -> None:
    """Import tensor-core kernels (bf16, fp8, nvfp4; attention; experts) from the package aiconfigurator-core."""
    from neusight_jax.datasets.aiconfigurator import import_aiconfigurator as read_package

    for line in read_package(source, output, progress_console()).lines():
        typer.echo(line)
