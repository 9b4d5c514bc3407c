"""What a streaming kernel measured alone waits for: host and kernel side by side, or one after the other.

    python benchmarks/launch.py DIR [--device P4 ...]

Two laws are fitted to every device and elementwise operator, by log error, on rows that lie far below or
far above the L2: `max(host, before + bytes / rate)` and `host + bytes / rate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

import neusight_jax as nj
from neusight_jax.datasets.row_checks import flop_and_bytes
from neusight_jax.errors import run_script
from neusight_jax.gpu_catalog import gpu_info
from neusight_jax.kernels.families import FAMILIES

L2_CLEAR = 3.0
"""Rows that move less than a third of the L2 or this many times it are used."""


def _fitted(law: Callable[..., np.ndarray], start: list[float], times_s: np.ndarray) -> tuple[np.ndarray, float]:
    """Positive parameters of a law and its mean absolute percentage error."""
    found = least_squares(
        lambda logs: np.log(law(*np.exp(logs)) / times_s), np.log(start), loss="soft_l1", f_scale=0.03
    )
    values = np.exp(found.x)
    return values, float(100 * np.mean(np.abs(law(*values) / times_s - 1)))


def launch_law(frame: pd.DataFrame, device: str, op: str) -> dict[str, object]:
    """Both laws on the rows of one device and operator."""
    gpu = nj.load_gpu(device)
    rows = frame[(frame["device"] == device) & (frame["op"] == op)]
    dims = {name: rows[name].to_numpy(np.float64) for name in FAMILIES["elementwise"].dims}
    _, moved = flop_and_bytes("elementwise", dims, np.zeros(len(rows), np.int32))
    fill = moved / float(gpu.l2_bytes)
    clear = (fill < 1 / L2_CLEAR) | (fill > L2_CLEAR)
    times_s, ideal_s = rows["latency_s"].to_numpy(np.float64)[clear], moved[clear] / float(gpu.mem_bytes_per_s)
    beside, error = _fitted(
        lambda host, before, slow: np.maximum(host, before + ideal_s * slow), [3e-5, 1.5e-5, 1.2], times_s
    )
    _, error_of_sum = _fitted(lambda host, slow: host + ideal_s * slow, [3e-5, 1.2], times_s)
    return {
        "device": device,
        "op": op,
        "host, us": round(1e6 * beside[0], 1),
        "share before": round(beside[1] / beside[0], 2),
        "share of bandwidth": round(1 / beside[2], 2),
        "error, side by side": round(error, 1),
        "error, in a row": round(error_of_sum, 1),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements")
    parser.add_argument("--device", action="append")
    options = parser.parse_args()
    data = nj.read_measurements(options.measurements)
    frame = data.frame[data.frame["family"] == "elementwise"]
    names = [gpu_info(name).name for name in options.device] if options.device else sorted(frame["device"].unique())
    table = pd.DataFrame([launch_law(frame, name, op) for name in names for op in sorted(frame["op"].unique())])
    columns = list(table.columns)
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in table.itertuples(index=False):
        print("| " + " | ".join(str(value) for value in row) + " |")
    medians = table.groupby("device", sort=False)[columns[2:]].median().round(2)
    print(medians.to_string())


if __name__ == "__main__":
    run_script(main)
