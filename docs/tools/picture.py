"""Draws `docs/forecast.svg`: a training step of GPT-2 large against memory bandwidth, with its 80 % interval.

python docs/tools/picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import neusight_jax as nj

OUTPUT = Path(__file__).resolve().parents[1] / "forecast.svg"
TB = 1e12


def main() -> None:
    """Forecasts and draws."""
    predictor, gpu = nj.load_predictor("fp32", device="H100"), nj.load_gpu("H100")
    graph = nj.graph_from_config("gpt2-large", batch_size=4, sequence_length=1024, mode="training")
    rates = np.geomspace(1e12, 10e12, 25)
    forecasts = [nj.predict(predictor, gpu.replace(mem_bytes_per_s=rate), graph) for rate in rates]
    low, high = (np.array([each.interval_s[side] for each in forecasts]) * 1e3 for side in (0, 1))
    middle = np.array([each.total_s for each in forecasts]) * 1e3
    here = nj.predict(predictor, gpu, graph)
    mpl.rcParams.update({"svg.hashsalt": "neusight_jax", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    axes.fill_between(rates / TB, low, high, color="#3f51b5", alpha=0.18, linewidth=0, label="80 % interval")
    axes.plot(rates / TB, middle, color="#3f51b5", linewidth=2, label="forecast")
    axes.plot(gpu.mem_bytes_per_s / TB, here.total_s * 1e3, "o", color="#d84315", markersize=8)
    note = f"H100: {here.total_s * 1e3:.0f} ms"
    axes.annotate(note, (gpu.mem_bytes_per_s / TB, here.total_s * 1e3), xytext=(10, 10), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 3, 5, 10], labels=["1", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_ylim(0, None)
    axes.set_xlabel("memory bandwidth, TB/s")
    axes.set_ylabel("one training step, ms")
    axes.set_title("GPT-2 large, batch 4, on an H100 with other memory", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(OUTPUT, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
