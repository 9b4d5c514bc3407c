"""`neusight-jax leaderboard`: a page of all systems from what `evaluate` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import remark
from neusight_jax.errors import InputError
from neusight_jax.files import write_text_atomically


def leaderboard(
    evaluations: Annotated[
        list[Path],
        typer.Argument(metavar="EVALUATION...", help="Folders of `evaluate --output`, files of `evaluate --json`."),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="FILE.md", help="The page; a CSV is written beside it.")],
    note: Annotated[
        str, typer.Option("--note", help="A sentence for its end, e.g. the commit and the measurements.")
    ] = "",
) -> None:
    """Write the leaderboard page and its CSV."""
    if output.suffix != ".md":
        raise InputError(f"--output {output}: expected a Markdown file, e.g. docs/leaderboard.md")
    from neusight_jax.training.evaluation.leaderboard import read_leaderboard

    board = read_leaderboard(evaluations)
    beside = output.with_suffix(".csv")
    write_text_atomically(beside, board.scores.round(3).to_csv(index=False))
    write_text_atomically(output, board.to_markdown(beside.name, note))
    remark(f"wrote {output} and {beside}")
