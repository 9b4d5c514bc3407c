"""Pictures as files: PNG, SVG or PDF."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING

from neusight_jax.errors import InputError
from neusight_jax.files import write_atomically, write_text_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
"""Of PNG files."""
PICTURES: tuple[str, ...] = (".png", ".svg", ".pdf")


def require_plot() -> None:
    """`InputError` unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("pictures need matplotlib; install it with `pip install '.[plot]'`")


def require_format(path: Path) -> None:
    """`InputError` unless matplotlib is there, and a picture can be written to such a path."""
    if path.suffix.lower() not in PICTURES:
        page = "; for a page give --report" if path.suffix.lower() == ".html" else ""
        raise InputError(f"cannot draw {path.name}: expected a name that ends in {', '.join(PICTURES)}{page}")
    require_plot()


def save(drawn: Figure, path: Path | str) -> None:
    """Write a picture by the ending of its path, whole or not at all."""
    path = Path(path)
    ending = path.suffix.lower()
    if ending == ".svg":
        write_text_atomically(path, svg(drawn, path.stem))
    else:
        require_format(path)
        write_atomically(path, lambda target: drawn.savefig(target, dpi=DPI, format=ending[1:]))


def svg(figure: Figure, salt: str) -> str:
    """A figure as SVG text without a date; equal figures give equal text.

    Args:
      salt: names of shapes are made from it; figures on one page need different ones.
    """
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
