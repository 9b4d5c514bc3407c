"""How much of its peak a card reaches in a matrix product measured alone, by how long the product takes.

    python benchmarks/power_limit.py DIR [--device P4 ...]

Only products that fill the card: many tiles of 128 × 128, mostly inside the result, and a long contraction. What falls
with the duration is the power limit setting in. The second table is of `linear` that lasts 20 ms and more, by the tile
that the library launched and the length of the contraction, with how many products: what falls with the contraction
does so for small tiles, whatever the card.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

import neusight_jax as nj
from neusight_jax.errors import run_script
from neusight_jax.kernels import gemm

FAMILIES = ("linear", "bmm")
TILE = 128
LEAST_FILLED, LEAST_TILES, LEAST_CONTRACTION = 0.8, 200, 200
LAUNCH_S = 25e-6
"""Taken off every latency: what a launch costs on these hosts."""
EDGES_MS = (0.4, 0.75, 1.33, 2.4, 4.2, 13.0, np.inf)
COLUMNS = ("0.5 ms", "1 ms", "1.8 ms", "3 ms", "10 ms", "20 ms and more")
LONG_MS = 20.0
CONTRACTIONS = (LEAST_CONTRACTION, 1000, 3000, 6000, 12000, 20000, 40000, np.inf)
CONTRACTION_NAMES = ("to 1,000", "to 3,000", "to 6,000", "to 12,000", "to 20,000", "to 40,000", "longer")
LEAST_PRODUCTS = 20
"""Tiles that fewer long products were launched with are left out of the second table."""


def filling(frame: pd.DataFrame) -> pd.DataFrame:
    """Products that fill a card, with the share of its peak that they reach."""
    rows = frame[frame["family"].isin(FAMILIES)]
    tiles_m, tiles_n = np.ceil(rows["m"] / TILE), np.ceil(rows["n"] / TILE)
    filled = rows["m"] * rows["n"] / (tiles_m * tiles_n * TILE**2)
    many = rows["batch"] * tiles_m * tiles_n >= LEAST_TILES
    rows = rows[(filled >= LEAST_FILLED) & many & (rows["k"] >= LEAST_CONTRACTION)]
    peak = rows["device"].map({name: float(nj.load_gpu(name).fp32_flop_per_s) for name in rows["device"].unique()})
    flop = np.asarray(gemm.flop({name: rows[name].to_numpy(np.float64) for name in ("batch", "m", "n", "k")}))
    return rows.assign(share=flop / (rows["latency_s"] - LAUNCH_S) / peak)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", help="folder or file of the measurement schema")
    parser.add_argument("--device", action="append", help="only this GPU; give it again for more")
    arguments = parser.parse_args()
    rows = filling(nj.read_measurements(arguments.measurements, devices=arguments.device).frame)
    lasting_ms = 1e3 * rows["latency_s"]
    lasting = rows.assign(lasting=pd.cut(lasting_ms, [*EDGES_MS], labels=[*COLUMNS]))
    print(_medians(lasting, "family", "lasting").to_string())
    long = rows[(rows["family"] == "linear") & (lasting_ms > LONG_MS)]
    long = long.assign(contraction=pd.cut(long["k"], [*CONTRACTIONS], labels=[*CONTRACTION_NAMES]))
    table = _medians(long, "tile", "contraction").assign(products=long.groupby(["device", "tile"]).size())
    print(table[table["products"] >= LEAST_PRODUCTS].to_string())


def _medians(rows: pd.DataFrame, by: str, across: str) -> pd.DataFrame:
    """Median share by device and something else, and across something third."""
    table = rows.pivot_table(index=["device", by], columns=across, values="share", aggfunc="median", observed=True)
    return table.round(2)


if __name__ == "__main__":
    run_script(main)
