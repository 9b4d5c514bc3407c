"""Whether a GPU was in another clock state while part of its batched products were measured.

    python benchmarks/clock_states.py DIR [--device T4] [--beside P4 --beside V100-PCIE-32GB]

The rows of the sweep go through the batch in ranges (up to 33, 34 to 66, 67 to 129, ...), so that products of batch 33
and 34 are neighbours in shape and thousands of rows apart. Time on a GPU over time on another, same shapes, just before
and just after: shape changes it smoothly, a clock state by a step.
"""

from __future__ import annotations

import argparse
import itertools

import pandas as pd

import neusight_jax as nj

SHAPE = ["batch", "m", "n", "k"]
BATCH_EDGES = (0, 20, 25, 29, 33, 37, 42, 50, 66)
M_EDGES = (64, 128, 256, 1024)
LEAST_CONTRACTION = 128
LEAST_S = 60e-6
"""Shorter kernels wait for their host."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", help="folder or file of the measurement schema")
    parser.add_argument("--device", default="T4", help="the GPU in question")
    parser.add_argument("--beside", action="append", help="a GPU to compare with; give it again for more")
    arguments = parser.parse_args()
    beside = arguments.beside or ["P4", "V100-PCIE-32GB"]
    names = [arguments.device, *beside]
    times = {name: _seconds(arguments.measurements, name) for name in names}
    both = pd.DataFrame(times).dropna().reset_index()
    both = both[(both["k"] > LEAST_CONTRACTION) & (both[names] > LEAST_S).all(axis=1)]
    both["batch of"] = pd.cut(both["batch"], [*BATCH_EDGES], labels=_ranges(BATCH_EDGES))
    both["M of"] = pd.cut(both["m"], [*M_EDGES], labels=_ranges(M_EDGES))
    for above, below in itertools.combinations(names, 2):
        print(f"time on {above} / time on {below}, median")
        table = both.assign(ratio=both[above] / both[below]).pivot_table(
            index="M of", columns="batch of", values="ratio", aggfunc="median", observed=True
        )
        print(table.round(2).to_string())


def _seconds(measurements: str, name: str) -> pd.Series:
    rows = nj.read_measurements(measurements, devices=[name]).frame
    return rows[rows["family"] == "bmm"].groupby(SHAPE)["latency_s"].median()


def _ranges(edges: tuple[int, ...]) -> list[str]:
    return [f"{low + 1}-{high}" for low, high in itertools.pairwise(edges)]


if __name__ == "__main__":
    main()
