"""Progress of long work, for people: on a terminal what is done, how long it has taken, and how long it may take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from neusight_jax.errors import InputError
from neusight_jax.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
MOST_TIMES = 200
"""Command lines whose time is kept."""


@contextmanager
def working(
    what: str, console: Console | None, total: int | None = None, done: int = 0, usual_s: float | None = None
) -> Iterator[Callable[..., None]]:
    """Show what is being done while the block runs, and take it away when the block ends; on a terminal only.

    Args:
      what: in a word or two; console: where, None = nowhere.
      total, done: pieces of work there are, and those done before; None = unknown, then `usual_s` is the estimate.
      usual_s: seconds that it took before.
    Yields: a function of the pieces done since, and of what is done now if that changes.
    """
    if console is None or not console.is_terminal:
        yield lambda count=1.0, what=what: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    left = [TextColumn("left"), TimeRemainingColumn()]
    counted = [BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left]
    usual = [] if usual_s is None else [TextColumn(f"of about {usual_s:.0f} s, as before")]
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *(counted if total else [TimeElapsedColumn(), *usual]),
    ]
    # A piece may take minutes, so the speed is that of the last two minutes and not of the last seconds.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=120) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count=1.0, what=what: bar.update(task, advance=count, description=what)


def follow(items: Collection[T], what: str, console: Console | None) -> Iterator[T]:
    """The items, with a bar that follows them. None = quiet."""
    with working(what, console, len(items)) as advance:
        for item in items:
            yield item
            advance()


def past_seconds(file: Path, command: str) -> float | None:
    """Seconds that a command line took last, else the last one of its command; None where none is kept."""
    times = _times(file)
    kind = command.split()[:2]
    alike = (seconds for line, seconds in reversed(times.items()) if line.split()[:2] == kind)
    return times.get(command) or next(alike, None)


@contextmanager
def timed(file: Path | None, command: str) -> Iterator[None]:
    """Keep the seconds that the block takes as those of a command line; None = nowhere. A failed block is not kept."""
    begin = time.monotonic()
    yield
    if file is None:
        return
    times = _times(file)
    times.pop(command, None)
    times = dict([*times.items(), (command, round(time.monotonic() - begin, 1))][-MOST_TIMES:])
    try:
        write_atomically(file, lambda path: path.write_text(json.dumps(times), encoding="utf-8"), result=False)
    except InputError:  # no room, or not ours: an estimate is not worth a failure
        return


def _times(file: Path) -> dict[str, float]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {str(line): float(seconds) for line, seconds in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or damaged
        return {}
