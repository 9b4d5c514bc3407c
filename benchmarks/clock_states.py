"""Clock states in a sweep of batched products: a GPU's times beside other GPUs' times of the same products.

    python benchmarks/clock_states.py DIR [--device T4] [--beside P4 --beside V100-PCIE-32GB] [--without FILE]

The rows of the sweep go through the batch in ranges (up to 33, 34 to 66, 67 to 129, ...), so that products of batch 33
and 34 are neighbours in shape and thousands of rows apart. Time on a GPU over time on another, same shapes, just before
and just after: shape changes it smoothly, a clock state by a step. With --without the products are written again, less
those of the slow states that were found so (`SLOW`), to be scored apart.
"""

from __future__ import annotations

import argparse
import itertools

import pandas as pd

import neusight_jax as nj
from neusight_jax.datasets.devices import find_device
from neusight_jax.errors import run_script

SHAPE = ["batch", "m", "n", "k"]
BATCH_EDGES = (0, 20, 33, 48, 66, 97, 130, 200)
M_EDGES = (16, 32, 64, 128, 256, 1024)
LEAST_CONTRACTION = 128
LEAST_S = 60e-6
"""Shorter kernels wait for their host."""
SLOW = {"Tesla T4": ((33, 256), (66, 64)), "NVIDIA A100-PCIE-40GB": ((33, 32),)}
"""Products of batch and M up to these were timed at a lower clock."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", help="folder or file of the measurement schema")
    parser.add_argument("--device", default="T4", help="the GPU in question")
    parser.add_argument("--beside", action="append", help="a GPU to compare with; give it again for more")
    parser.add_argument("--without", metavar="FILE", help="write the products without those of slow states, Parquet")
    arguments = parser.parse_args()
    beside = arguments.beside or ["P4", "V100-PCIE-32GB"]
    names = [arguments.device, *beside]
    products = nj.read_measurements(arguments.measurements, ops=["bmm"]).frame
    times = {name: _seconds(products, name) for name in names}
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
    if arguments.without:
        _write_without(products, arguments.without)


def _write_without(rows: pd.DataFrame, written: str) -> None:
    slow = pd.Series(data=False, index=rows.index)
    for device, corners in SLOW.items():
        for batch, m in corners:
            slow |= (rows["device"] == device) & (rows["batch"] <= batch) & (rows["m"] <= m)
    raw = pd.concat(
        pd.read_parquet(file).drop(index=rows.loc[slow & (rows["file"] == file), "row"])
        for file in rows["file"].unique()
    )
    raw.to_parquet(written, index=False)
    print(f"{written}: {len(raw)} of {len(rows)} products, {int(slow.sum())} of slow states left out")


def _seconds(rows: pd.DataFrame, name: str) -> pd.Series:
    return rows[rows["device"] == find_device(name)[0]].groupby(SHAPE)["latency_s"].median()


def _ranges(edges: tuple[int, ...]) -> list[str]:
    return [f"{low + 1}-{high}" for low, high in itertools.pairwise(edges)]


if __name__ == "__main__":
    run_script(main)
