"""Pictures as files: PNG, SVG, or inside an HTML page."""

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


def require_plot() -> None:
    """`InputError` unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("pictures need matplotlib; install it with `pip install '.[plot]'`")


def require_format(path: Path, *, html: bool = False) -> None:
    """`InputError` unless a picture can be written to this path: .png or .svg (or .html), and matplotlib is there."""
    endings = (".png", ".svg", *((".html",) if html else ()))
    if path.suffix.lower() not in endings:
        raise InputError(f"cannot draw {path.name}: expected a name that ends in {', '.join(endings)}")
    require_plot()


def save(drawn: Figure | str, path: Path | str) -> None:
    """Write a picture by the ending of its path, or an HTML page, whole or not at all."""
    path = Path(path)
    if isinstance(drawn, str):
        write_text_atomically(path, drawn)
        return
    require_format(path)
    if path.suffix.lower() == ".svg":
        write_text_atomically(path, svg(drawn, path.stem))
        return
    write_atomically(path, lambda target: drawn.savefig(target, dpi=DPI, format="png"))


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
