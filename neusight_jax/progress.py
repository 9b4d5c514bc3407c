"""Progress of long work, for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def follow(items: Collection[T], what: str, console: Console | None) -> Iterable[T]:
    """The items, with a bar on the console that follows them and goes when they are done; None = quiet."""
    if console is None or not items:
        return items
    from rich.progress import track

    return track(items, what, console=console, transient=True)
