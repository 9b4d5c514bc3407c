"""Products of linear layers forward and in the backward pass, as timed inside models.

    python benchmarks/backward_layouts.py DIR

`DIR` is a folder of the measurement schema with `models/per_op.parquet`. Prints, for every GPU with training runs, what
half of a layer's backward pass takes over its forward product: the same FLOP, the operands laid out otherwise. Once for
layers of 1,024 rows, inputs and outputs, whose three products have equal sizes, and once for all layers.
"""

from __future__ import annotations

import sys

import numpy as np

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import run_script
from neusight_jax.kernels.table import PHASES
from neusight_jax.training.data import measured_devices, model_rows
from neusight_jax.training.rows import Rows

SIDE = 1024.0
SIZES = ("m", "n", "k")


def microseconds(rows: Rows, phase: str) -> dict[tuple[float, ...], float]:
    """Median time of a phase's products, by their sizes in rising order (those of one layer have the same three)."""
    found: dict[tuple[float, ...], list[float]] = {}
    columns = [np.asarray(rows.batch.dims[name]) for name in SIZES]
    for at in np.flatnonzero(np.asarray(rows.batch.phase) == PHASES.index(phase)):
        found.setdefault(tuple(sorted(float(column[at]) for column in columns)), []).append(1e6 * rows.seconds[at])
    return {sizes: float(np.median(each)) for sizes, each in found.items()}


def main(folder: str) -> None:
    """A line for every GPU."""
    data = read_measurements([folder])
    print(f"{'GPU':<24} {'forward':>8} {'backward':>9} us at {SIDE:.0f}^3   over forward, all layers (quartiles)")
    for device in measured_devices(data):
        rows = model_rows(data, "linear", [device])
        forward, backward = (microseconds(rows, phase) for phase in ("forward", "backward"))
        both = [sizes for sizes in forward if sizes in backward]
        if not both:
            continue
        low, middle, high = np.percentile([backward[sizes] / forward[sizes] for sizes in both], [25, 50, 75])
        cube = (SIDE,) * 3
        one, other = forward.get(cube, np.nan), backward.get(cube, np.nan)
        print(
            f"{device:<24} {one:8.0f} {other:9.0f} {'':12} {middle:.2f} ({low:.2f} to {high:.2f}), {len(both)} shapes"
        )


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1]))
