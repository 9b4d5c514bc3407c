"""Self-contained HTML pages: pictures inline as SVG, no script, nothing loaded from anywhere."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neusight_jax.gpu import GPU
from neusight_jax.reports import figures
from neusight_jax.reports.design import front_table
from neusight_jax.reports.files import svg
from neusight_jax.results import as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from neusight_jax.designs.answers import Design
    from neusight_jax.sensitivities import Sensitivity

_STYLE = """
body { font-family: sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
pre { overflow-x: auto; background: #f4f4f4; padding: 1em; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Sequence[tuple[str, str | Figure]]) -> str:
    """An HTML page of headed parts, each text (kept as it is) or a figure."""
    body = []
    for place, (head, part) in enumerate(parts):
        body.append(f"<h2>{html.escape(head)}</h2>")
        if isinstance(part, str):
            body.append(f"<pre>{html.escape(part)}</pre>")
        else:
            picture = re.sub(r"^.*?(?=<svg)", "", svg(part, f"part{place}"), flags=re.DOTALL)
            body.append(f'<figure role="img" aria-label="{html.escape(head)}">{picture}</figure>')
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>",
            f"<body><h1>{html.escape(title)}</h1>",
            *body,
            "</body></html>",
            "",
        ]
    )


def sensitivity_page(result: Sensitivity, gpu: GPU) -> str:
    """Elasticities and the roofline of one model on one GPU."""
    forecast = result.forecast
    parts: list[tuple[str, str | Figure]] = [
        ("Elasticities", figures.bars(result)),
        ("In figures", str(result)),
        ("Roofline", figures.roofline(forecast, gpu)),
        ("Forecast", str(forecast)),
    ]
    return page(f"{forecast.model} on {forecast.gpu or 'the given GPU'}", parts)


def design_page(design: Design, designs: Sequence[Design] = (), metric: str = "") -> str:
    """A design, how it was found, and the front it lies on if there is one."""
    parts: list[tuple[str, str | Figure]] = [("Design", str(design)), ("Search", figures.progress(design))]
    if designs:
        parts += [
            ("Pareto front", figures.front(designs, metric, design)),
            ("Front in figures", as_text(front_table(designs, metric, design.notes))),
        ]
    return page("A designed GPU", parts)
