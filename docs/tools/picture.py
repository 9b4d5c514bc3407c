"""Draws `docs/forecast.svg`: a training step of GPT-2 large against memory bandwidth, with its 80 % interval.

python docs/tools/picture.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import neusight_jax as nj

OUTPUT = Path(__file__).resolve().parents[1] / "forecast.svg"
TB = 1e12
LEFT, RIGHT, TOP, BOTTOM = 62, 704, 40, 312
"""The frame, in pixels of a picture of 720 by 360."""
STEP_MS = 250
PAGE = """<svg xmlns="http://www.w3.org/2000/svg" width="720" height="360" viewBox="0 0 720 360" \
font-family="sans-serif" font-size="13">
<rect width="720" height="360" fill="white"/>
<text x="{left}" y="24" font-size="16">GPT-2 large, batch 4, on an H100 with other memory</text>
{grid}
<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="black"/>
<polygon points="{band}" fill="#3f51b5" fill-opacity="0.18"/>
<polyline points="{line}" fill="none" stroke="#3f51b5" stroke-width="2.5"/>
<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="#d84315"/>
<text x="{x:.1f}" y="{y:.1f}" dx="12" dy="-12">H100: {here:.0f} ms</text>
<rect x="560" y="52" width="28" height="12" fill="#3f51b5" fill-opacity="0.18"/>
<text x="598" y="63">80 % interval</text>
<path d="M560 80h28" stroke="#3f51b5" stroke-width="2.5"/>
<text x="598" y="85">forecast</text>
<text x="383" y="350" text-anchor="middle">memory bandwidth, TB/s</text>
<text transform="translate(18 176) rotate(-90)" text-anchor="middle">one training step, ms</text>
</svg>
"""


def main() -> None:
    """Forecasts and draws."""
    predictor, gpu = nj.load_predictor("fp32", device="H100"), nj.load_gpu("H100")
    graph = nj.graph_from_config("gpt2-large", batch_size=4, sequence_length=1024, mode="training")
    rates = np.geomspace(1e12, 10e12, 25)
    forecasts = [nj.predict(predictor, gpu.replace(mem_bytes_per_s=rate), graph) for rate in rates]
    low, high = ([each.interval_s[side] * 1e3 for each in forecasts] for side in (0, 1))
    here = nj.predict(predictor, gpu, graph).total_s * 1e3
    most = STEP_MS * math.ceil(max(high) / STEP_MS)

    def across(rate: float) -> float:
        return LEFT + 24 + (RIGHT - LEFT - 48) * math.log10(rate / TB)

    def up(milliseconds: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * milliseconds / most

    def points(places: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{across(rate):.1f},{up(value):.1f}" for rate, value in places)

    grid = [f'<path d="M{across(at * TB):.1f} {TOP}V{BOTTOM}" stroke="#e4e4e4"/>' for at in (1, 2, 3, 5, 10)]
    grid += [f'<text x="{across(at * TB):.1f}" y="330" text-anchor="middle">{at}</text>' for at in (1, 2, 3, 5, 10)]
    for at in range(0, most + 1, STEP_MS):
        grid.append(f'<path d="M{LEFT} {up(at):.1f}H{RIGHT}" stroke="#e4e4e4"/>')
        grid.append(f'<text x="{LEFT - 8}" y="{up(at):.1f}" dy="4" text-anchor="end">{at}</text>')
    text = PAGE.format(
        left=LEFT,
        right=RIGHT,
        top=TOP,
        bottom=BOTTOM,
        grid="\n".join(grid),
        band=points([*zip(rates, low, strict=True), *reversed([*zip(rates, high, strict=True)])]),
        line=points((rate, each.total_s * 1e3) for rate, each in zip(rates, forecasts, strict=True)),
        x=across(float(gpu.mem_bytes_per_s)),
        y=up(here),
        here=here,
    )
    OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
