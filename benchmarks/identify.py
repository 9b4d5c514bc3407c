"""`identify` on GPUs left out: which clock and bandwidth explain ten kernels, and is a cap told from a lower clock?

    python -m benchmarks.identify FP32_FOLDER [--kept FILE] [--draws 5]
    python -m benchmarks.identify --power [--draws 6]

Every GPU of `unseen` with clock (peaks follow) and bandwidth of another one, `OTHER`, in its sheet. Ten kernels, of
60 drawn of each family, are those of plan quick. Figures over the true sheet's, and how often 80 % intervals hold it.

With --power: kernels of an H100 at 60 % of its watts, or at the locked clock that takes as long in all, with errors
drawn from the prior.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

import neusight_jax as nj
from benchmarks.unseen import Unseen, unseen_gpus
from neusight_jax.errors import run_script
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.checkpoint import load_predictor
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.data import Rows
from neusight_jax.training.evaluation.protocols import designed_order
from neusight_jax.training.identification import LAUNCH, identify
from neusight_jax.training.plan import PLANS
from neusight_jax.training.prior import error_covariance, prior_of

FIGURES = ("clock_hz", "mem_bytes_per_s", LAUNCH)
OTHER = {"clock_hz": 2.52e9, "mem_bytes_per_s": 504e9}
"""Of an RTX 4070: no GPU here is near both."""
KERNELS, CANDIDATES = 10, 60


def padded(parts: dict[str, Rows], length: int, chosen: dict[str, np.ndarray]) -> tuple[KernelTable, np.ndarray]:
    """Some rows of every family as a table of one length for each, and their seconds: tables share a program."""
    families, seconds = {}, [np.zeros(0)]
    for name, rows in parts.items():
        places, start = chosen[name], sum(map(len, seconds))
        filled = np.append(places, np.zeros(length - len(places), int))
        row = np.where(np.arange(length) < len(places), start + np.arange(length), -1).astype(np.int32)
        families[name] = replace(rows.take(filled).batch, row=row, count=np.where(row < 0, 0.0, 1.0).astype(np.float32))
        seconds.append(rows.seconds[places])
    return KernelTable(families), np.concatenate(seconds)


def taken(parts: dict[str, Rows], order: list[int]) -> tuple[KernelTable, np.ndarray]:
    """Rows at these places of parts below each other."""
    chosen, start = {}, 0
    for name, rows in parts.items():
        chosen[name] = np.array([at - start for at in order if start <= at < start + len(rows.seconds)], int)
        start += len(rows.seconds)
    return padded(parts, KERNELS, chosen)


def of_plan(unseen: Unseen, base: nj.GPU, parts: dict[str, Rows]) -> list[int]:
    """Places of the kernels of plan quick."""
    order, start, plan = [], 0, PLANS["quick"]
    counts = {name: plan[name] for name in parts} if len(parts) > 2 else dict.fromkeys(parts, KERNELS // len(parts))
    for name, rows in parts.items():
        random = np.random.default_rng(0)
        order += [
            start + at for at in designed_order(unseen.predictor, rows, base, counts[name], prior_of(name), random)
        ]
        start += len(rows.seconds)
    return order


def scores(unseen: Unseen, draws: int) -> list[dict[str, object]]:
    """Figures of one GPU over the true ones, by draw and choice of kernels."""
    base, records = vary_plainly(unseen.gpu, OTHER), []
    for draw in range(draws):
        random = np.random.default_rng(draw)
        parts = {
            name: rows.take(np.sort(random.permutation(len(rows.seconds))[:CANDIDATES]))
            for name, rows in unseen.rows.items()
        }
        answer = identify(unseen.predictor, base, *taken(parts, of_plan(unseen, base, parts)), FIGURES)
        for figure in answer.figures[:2]:
            true = float(np.asarray(getattr(unseen.gpu, figure.name)))
            ends = figure.low / true, figure.high / true
            records.append(
                {"GPU": unseen.name, "figure": figure.name, "ratio": figure.value / true}
                | {"inside": ends[0] <= 1.0 <= ends[1], "width": ends[1] / ends[0]}
            )
    return records


def sheets(folder: Path, kept: Path | None, draws: int) -> None:
    """Print figures of all GPUs."""
    records: list[dict[str, object]] = []
    for unseen in unseen_gpus(folder, kept)[1]:
        records += scores(unseen, draws)
        print(pd.DataFrame(records[-2 * draws :]).round(2).to_string(header=False), flush=True)
    frame = pd.DataFrame(records)
    frame["off"] = np.abs(np.log(frame.ratio))
    print(
        frame.groupby(["figure", "GPU"], sort=False)[["ratio", "inside", "width"]]
        .agg({"ratio": "median", "inside": "mean", "width": "median"})
        .round(2)
        .to_string()
    )
    print(frame.groupby("figure")[["off", "inside"]].agg({"off": "median", "inside": "mean"}).round(3).to_string())


H100, SHARE = "NVIDIA H100 80GB HBM3", 0.6
HELD = ("power_limit_w", "clock_limit_hz")
PRODUCTS = [(8192, 8192, 8192), (4096, 4096, 4096), (2048, 8192, 4096), (16384, 4096, 1024), (1024, 4096, 4096)]
PRODUCTS += [(rows, columns, 8192) for rows in (8, 64) for columns in (8192, 28672)] + [(256, 8192, 8192)]
"""Ten bf16 products (m, n, k): five that keep the board busy, four that wait for memory, and one between."""


def told_apart(predictor: MixturePredictor, draws: int) -> pd.DataFrame:
    """A cap, and the locked clock that takes as long in all, with errors of the prior: which is found, and where."""
    gpu = nj.load_gpu(H100)
    sizes = [{"batch": 1.0, "m": m, "n": n, "k": k} for m, n, k in PRODUCTS]
    table = table_from_kernels([Kernel("gemm", FAMILIES["gemm"].ops[0], size) for size in sizes], dtype="bf16")
    cap_w = SHARE * gpu.tdp_w
    capped_s = predict_kernels(predictor, gpu.replace(power_limit_w=cap_w), table)
    clocks = np.linspace(0.3, 1.0, 71) * gpu.clock_hz
    totals = [predict_kernels(predictor, gpu.replace(clock_limit_hz=clock), table).sum() for clock in clocks]
    clock_hz = float(clocks[np.argmin(np.abs(np.log(totals) - np.log(capped_s.sum())))])
    truths = {"power_limit_w": cap_w, "clock_limit_hz": clock_hz}
    covariance, noise = error_covariance(predictor, gpu, table)
    mixing, records = np.linalg.cholesky(covariance + np.diag(noise)), []
    for name, value in truths.items():
        exact_s = predict_kernels(predictor, gpu.replace(**{name: value}), table)
        for draw in range(draws):
            errors = mixing @ np.random.default_rng(draw).normal(size=len(PRODUCTS))
            answer = identify(predictor, gpu, table, exact_s * np.exp(errors), HELD)
            odds = {item.off: item.odds for item in answer.explanations}
            figure = next(figure for figure in answer.figures if figure.name == name)
            other = next(other for other in HELD if other != name)
            records.append(
                {"held by": name, "told": odds[name,] > odds[other,], "odds": odds[name,] / odds[other,]}
                | {"ratio": figure.value / value, "inside": figure.low <= value <= figure.high}
            )
    return pd.DataFrame(records)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--kept", type=Path)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--power", action="store_true")
    options = parser.parse_args()
    if options.folder is not None:
        sheets(options.folder, options.kept, options.draws)
    if options.power:
        apart = told_apart(load_predictor("tensorcore", H100), options.draws)
        columns = {"told": "mean", "odds": "median", "ratio": "median", "inside": "mean"}
        print(apart.groupby("held by", sort=False).agg(columns).round(2).to_string())


if __name__ == "__main__":
    run_script(main)
