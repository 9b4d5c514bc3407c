"""Bars with intervals, as SVG: the one picture of each notebook. It loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from IPython.display import SVG

WIDTH, LEFT, RIGHT, ROW = 720, 190, 120, 30
"""Of the picture, of the names, of the numbers, and of one bar, in pixels."""


def bars(title: str, values: Mapping[str, tuple[float, float, float] | float]) -> SVG:
    """A bar for each name; a value with its low and high end has a line between them."""
    ends = {name: value if isinstance(value, tuple) else (value,) * 3 for name, value in values.items()}
    scale = (WIDTH - LEFT - RIGHT) / max(high for _, _, high in ends.values())
    parts = [f'<text x="8" y="20" font-size="15">{escape(title)}</text>']
    for row, (name, (value, low, high)) in enumerate(ends.items()):
        top = 34 + ROW * row
        middle = top + 10
        parts += [
            f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{scale * value:.1f}" height="20" fill="#3f51b5" fill-opacity="0.55"/>',
            f'<path d="M{LEFT + scale * low:.1f} {middle}H{LEFT + scale * high:.1f}" stroke="black" stroke-width="2"/>',
            f'<text x="{LEFT + scale * max(value, high) + 8:.1f}" y="{middle + 4}">{_number(value)}</text>',
        ]
    height = 44 + ROW * len(ends)
    frame = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13"'
    return SVG(
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"
