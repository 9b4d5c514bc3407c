"""Where output goes: results to stdout, progress and remarks to stderr."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from neusight_jax.records import Printed, Result
    from neusight_jax.reports.page import Plot

COMMAND: contextvars.ContextVar[str] = contextvars.ContextVar("command", default="")
"""The command line that runs, for reports."""
PIPE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


def show(renderable: RenderableType) -> None:
    """Print a table to stdout: coloured on a terminal, plain text elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console(markup=False).print(renderable)
        return
    from neusight_jax.records import as_text

    text = as_text(renderable, PIPE_WIDTH)
    typer.echo("\n".join(line.rstrip() for line in text.rstrip().splitlines()))


def answer(
    result: Result, as_json: bool, report: Path | None = None, about: Mapping[str, Any] | None = None, **request: Any
) -> None:
    """Print a result to stdout: as JSON after what was asked for, or as a table.

    Args:
      report: also written as a page there; about: what its function of `reports` takes beside the result.
    """
    report_to(report, result, checkpoint=request.get("checkpoint"), **(about or {}))
    if as_json:
        show_json(result.to_dict(), **request)
    else:
        show(result)


def report_to(path: Path | None, result: Printed, **about: Any) -> None:
    """Write the page of a result, headed by the command line; None = no page."""
    if path is None:
        return
    from neusight_jax.reports.page import write_report

    write_report(path, result, command=COMMAND.get(), **about)
    remark(f"wrote {path}")


def plot_to(path: Path | None, result: Result, *plots: Plot) -> None:
    """Write a page of pictures alone, those of the result's report unless some are given; None = no page."""
    if path is None:
        return
    from neusight_jax.reports.page import write_plots

    write_plots(path, result, *plots, command=COMMAND.get())
    remark(f"wrote {path}")


def show_json(result: Mapping[str, Any], **request: Any) -> None:
    """Print a result as JSON, and nothing else, to stdout: its schema, what was asked for, then the rest."""
    from neusight_jax.records import json_text

    typer.echo(json_text({"schema": result["schema"], **request, **result}))


def remark(line: str) -> None:
    """A line for people, on stderr."""
    typer.echo(line, err=True)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """While the block runs, what it does, on stderr and on a terminal only, with an estimate from past runs."""
    from neusight_jax.progress import past_seconds, timed, working

    console, command = progress_console(), COMMAND.get()
    folder = getattr(getattr(sys.modules.get("jax"), "config", None), "jax_compilation_cache_dir", None)
    file = Path(folder) / "seconds.json" if folder and console.is_terminal else None
    usual_s = past_seconds(file, command) if file is not None else None
    with timed(file, command), working(what, console, usual_s=usual_s):
        yield


def progress_console() -> Console:
    """The console progress goes to: stderr."""
    from rich.console import Console

    return Console(stderr=True, markup=False)
