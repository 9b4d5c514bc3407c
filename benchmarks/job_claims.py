"""What forecasts of whole jobs say of groups of measured steps: ranks of layouts, memory, scaling over many GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.job import Job


def claims(
    rows: pd.DataFrame, jobs: Sequence[Job], gpus: Sequence[GPU], truth: np.ndarray, forecast: np.ndarray
) -> str:
    """Lines about measured steps, their jobs and GPUs, and forecasts of them, seconds."""
    memory = [float(job.plan.memory.total) / 2**30 for job in jobs]
    room = [float(np.asarray(gpu.mem_bytes)) / 2**30 for gpu in gpus]
    dropped = int(np.sum(np.array(memory) > room))
    frame = rows.assign(measured=truth, forecast=forecast, memory=memory)
    layouts = frame[frame.source == "bigscience-176B"]
    tau = layouts.measured.corr(layouts.forecast, "kendall")
    usual = layouts[(layouts.gpus == layouts.gpus.mode()[0]) & (layouts.gbs == layouts.gbs.mode()[0])]
    behind = usual.measured[usual.forecast.idxmin()] / usual.measured.min() - 1.0
    printed = frame[frame.mem_gib.notna()]
    off = 100.0 * np.abs(printed.memory / printed.mem_gib - 1.0)
    scaled = frame[(frame.source == "mlperf-gpt3") & (frame.gpu == "H100-SXM-80GB")].sort_values("gpus").iloc[[0, -1]]
    ratio = scaled.measured / scaled.forecast
    return "\n".join(
        [
            f"bigscience: Kendall's tau of {len(layouts)} steps {tau:.2f}; of {len(usual)} layouts of one batch the "
            f"fastest by forecast is measured {100.0 * behind:.1f} % over the fastest",
            f"memory of {len(printed)} layouts that print it: {off.mean():.1f} % off, median {off.median():.1f}",
            f"layouts that ran and are said not to fit: {dropped} of {len(jobs)}, {100.0 * dropped / len(jobs):.1f} %",
            f"GPT-3 on {scaled.gpus.iloc[0]:.0f} and {scaled.gpus.iloc[1]:.0f} GPUs: ratio of tokens/s/GPU "
            f"{100.0 * (ratio.iloc[1] / ratio.iloc[0] - 1.0):+.1f} % off",
        ]
    )
