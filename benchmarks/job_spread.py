"""How far forecasts of whole jobs are off, and what a measured step mends, on `training_steps.csv`.

    python -m benchmarks.job_spread MEASUREMENTS_FOLDER

Prints the spreads of `job.software`, the coverage of the 80 % interval with sources left out, and the errors of a
source's other steps after one or three of them calibrated its software.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from benchmarks.job_steps import Rows, every_seconds, fit, read, stacked
from neusight_jax.model.software import NAMES, STEP_NOISE, WIDTHS, Software
from neusight_jax.prediction import expert_share, once_at

GRID = np.arange(0.0, 4.0, 0.005)
"""Spreads that are tried."""


class Spread:
    """Rows with the logarithms of measured over forecast seconds, the software fitted without their source."""

    def __init__(self, rows: Rows) -> None:
        self.frame, self.rows = rows.frame, rows
        self.source, self.moe = rows.frame.source.to_numpy(), rows.frame.moe.notna().to_numpy()
        number = rows.frame.groupby("source").source.transform("size").to_numpy()
        self.weight, self.share = 1.0 / np.sqrt(number), expert_share(rows.own)
        ends = [stacked(every_seconds(rows.found, once_at(side))) for side in (0, 1)]
        size = len(rows.truth)
        self.error, self.ends, self.slopes = np.zeros(size), np.zeros((2, size)), np.zeros((size, len(NAMES)))
        for source in dict.fromkeys(self.source):
            self._without(source, ends)

    def _without(self, source: str, ends: list[Any]) -> None:
        own, rows = self.source == source, self.rows
        software = fit(rows, ~own)
        counts = rows.counts(software)
        first = jnp.array([getattr(software, name) for name in NAMES])

        def logs(step: Any) -> Any:
            numbers = dict(zip(NAMES, first * jnp.exp(step), strict=True))
            return jnp.log(rows.forecast(Software(**numbers), counts))

        zero = jnp.zeros(len(NAMES))
        forecast = np.asarray(logs(zero))
        self.error[own] = (np.log(rows.truth) - forecast)[own]
        self.slopes[own] = np.asarray(jax.jacfwd(logs)(zero))[own]
        plain = rows.own
        for side, each in enumerate(ends):
            rows.own = each
            self.ends[side, own] = (np.asarray(logs(zero)) - forecast)[own]
        rows.own = plain

    def inside(self, spread: float, experts: float) -> np.ndarray:
        """Rows whose measured step is in the interval."""
        more = spread**2 + (experts * self.share) ** 2
        low, high = (np.sqrt(end**2 + more) for end in self.ends)
        found: np.ndarray = (self.error >= -low) & (self.error <= high)
        return found

    def least(self, chosen: np.ndarray, spread: float | None = None) -> float:
        """The least spread (of experts, where that of the rest is given) that holds 80 % of the rows, by weight."""
        weight = self.weight * chosen
        for each in GRID:
            held = self.inside(each, 0.0) if spread is None else self.inside(spread, each)
            if np.sum(held * weight) >= 0.8 * np.sum(weight):
                return float(each)
        raise AssertionError("no spread holds 80 %")

    def coverage(self) -> pd.Series:
        """Of dense rows by source, each with the spread of the others."""
        found = {}
        for source in dict.fromkeys(self.source[~self.moe]):
            own = (self.source == source) & ~self.moe
            found[source] = self.inside(self.least(~own & ~self.moe), 0.0)[own]
        sizes = {f"{source} ({len(held)})": held.mean() for source, held in found.items()}
        return pd.Series({**sizes, "all rows": np.concatenate(list(found.values())).mean()})

    def layouts(self) -> float:
        """What the ratio of two steps of one job on one machine is off by, in 80 % of pairs; each job by its rows."""
        names = ["source", "model", "gpu", "gpus", "gbs", "seq", "layers", "hidden", "heads"]
        groups = self.frame[names].astype(str).agg("|".join, axis=1)
        pairs = [
            (abs(self.error[a] - self.error[b]), 2.0 / (len(places) - 1))
            for places in groups.groupby(groups).indices.values()
            for a, b in combinations(places, 2)
        ]
        errors, weights = np.array(sorted(pairs)).T
        return float(errors[np.searchsorted(np.cumsum(weights), 0.8 * weights.sum())])

    def calibrated(self, steps: int, draws: int = 30) -> pd.DataFrame:
        """Mean errors in percent of a source's rows on one GPU, before and after some of them calibrated it."""
        rng, found = np.random.default_rng(0), {}
        spread = (self.slopes * np.array([WIDTHS[name] for name in NAMES]) ** 2) @ self.slopes.T
        for name, own in self.frame.groupby([self.frame.source, self.frame.gpu]).indices.items():
            scores = []
            for _ in range(draws if len(own) > steps else 0):
                seen = rng.choice(own, steps, replace=False)
                rest = np.setdiff1d(own, seen)
                among = spread[np.ix_(seen, seen)] + STEP_NOISE**2 * np.eye(steps)
                moved = spread[np.ix_(rest, seen)] @ np.linalg.solve(among, self.error[seen])
                left = (self.error[rest], self.error[rest] - moved)
                scores.append([100 * np.abs(np.exp(-each) - 1).mean() for each in left])
            if scores:
                found[" ".join(name)] = (len(own), *np.mean(scores, axis=0))
        return pd.DataFrame(found, index=["rows", "before", "after"]).T


def main() -> None:
    """Score and print."""
    own = Spread(Rows(read(Path(sys.argv[1]))))
    spread = own.least(~own.moe)
    print(
        f"STEP_SPREAD {spread:.3f}  EXPERT_SPREAD {own.least(own.moe, spread):.2f}  LAYOUT_SPREAD {own.layouts():.3f}"
    )
    print(own.coverage().round(2).to_string())
    for steps in (1, 3):
        frame = own.calibrated(steps)
        print(f"\ncalibrated with {steps}\n{frame.round(1).to_string()}")
        print("mean of rows", np.average(frame[["before", "after"]], axis=0, weights=frame.rows).round(1))


if __name__ == "__main__":
    main()
