"""Progress of long work, for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")


def follow(items: Collection[T], what: str, console: Console | None) -> Iterable[T]:
    """The items, with a bar that follows them and goes when they are done; on a terminal only. None = quiet."""
    if console is None or not console.is_terminal or not items:
        return items
    from rich.progress import track

    return track(items, what, console=console, transient=True)
