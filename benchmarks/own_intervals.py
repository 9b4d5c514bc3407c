"""Intervals of GPUs that were measured: of all measured GPUs' errors, or of each GPU's own.

    python benchmarks/own_intervals.py DIR CHECKPOINT [--device NAME ...]

`DIR` is a folder of the measurement schema. Kernels: a fifth of the rows of every GPU, at random, is left out of a fit
(one seed), and judged by intervals made of the errors of the others. Whole models: the labels are forecast by the
checkpoint, with the effects of their GPUs, and each is judged by intervals made without it, then without any label of
its model. Coverage by GPU, and the interval score (`conformal.interval_score`), GPUs equally weighted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from neusight_jax.checkpoint import load_predictor
from neusight_jax.errors import run_script
from neusight_jax.training.conformal import OTHERS, Residuals, conformal_interval, interval_score, own_width
from neusight_jax.training.data import NETWORKS, devices_with, sweep_rows, thin
from neusight_jax.training.evaluation.protocol import ROWS_PER_DEVICE, read_for
from neusight_jax.training.evaluation.systems import fit_tile
from neusight_jax.training.fit import Job, fit, sample_of, settings_for
from neusight_jax.training.interval_fit import by_device, eager_scores
from neusight_jax.training.objectives import MixtureObjective, effect_penalties, forecast
from neusight_jax.training.rows import Rows

Rule = Callable[[Residuals, str], float]


def pooled(residuals: Residuals, device: str) -> float:
    """One interval for all measured GPUs that have rows left, coverage on a further one right."""
    return conformal_interval({name: each for name, each in residuals.items() if len(each)}).width


def own(others: float) -> Rule:
    """Each GPU's own errors, those of all others counting as so many rows more."""
    return lambda residuals, device: own_width(residuals, device, others=others)


def kernel_table(rows: Rows) -> pd.DataFrame:
    """Coverage and score of the rows left out, by rule and GPU."""
    apart = np.random.default_rng(0).random(len(rows.seconds)) < 0.2
    taught = rows.take(~apart)
    kind = MixtureObjective(fit_tile(taught, Job(0)), penalties=effect_penalties(taught))
    member = jax.tree.map(lambda leaf: leaf[0], fit(kind, taught, (Job(0),), settings_for(rows.family)).best)
    logs = jnp.log(forecast(kind, member, rows.family, sample_of(rows)))
    missed = np.log(rows.seconds) - np.asarray(logs)
    names = dict(enumerate(rows.devices))
    known = {name: missed[(rows.device == at) & ~apart] for at, name in names.items()}
    held = {name: missed[(rows.device == at) & apart] for at, name in names.items()}
    return judged({"pooled": pooled, "own": own(OTHERS)}, {name: [(known, held[name])] for name in held})


def judged(rules: Mapping[str, Rule], tried: Mapping[str, list[tuple[Residuals, np.ndarray]]]) -> pd.DataFrame:
    """Every rule on the cases of each GPU: what is known, and what is then judged."""
    records = []
    for name, rule in rules.items():
        for device, cases in tried.items():
            widths = [rule(known, device) for known, _ in cases]
            found = [interval_score(left, -width, width) for width, (_, left) in zip(widths, cases, strict=True)]
            cover, score = np.average(found, axis=0, weights=[len(left) for _, left in cases])
            records.append({"rule": name, "device": device, "coverage": 100 * cover, "score": score})
    table = pd.DataFrame(records).pivot_table(index="rule", columns="device", values="coverage", sort=False).round(0)
    means = pd.DataFrame(records).groupby("rule", sort=False)[["coverage", "score"]].mean()
    return table.assign(mean=means["coverage"].round(0), score=means["score"].round(3))


def model_table(labels: pd.DataFrame, unit: str) -> pd.DataFrame:
    """Coverage and score of labels, each `unit` ("label" or "model") left out of its GPU's."""
    missed = by_device(labels)
    tried: dict[str, list[tuple[Residuals, np.ndarray]]] = {}
    for name, part in labels.groupby("device"):
        for group in part.index if unit == "label" else part["model"].unique():
            left = part.index == group if unit == "label" else part["model"] == group
            logs = part["log"].to_numpy()
            tried.setdefault(str(name), []).append(({**missed, str(name): logs[~left]}, logs[left]))
    return judged({"pooled": pooled, **{f"own, others {rows:g}": own(rows) for rows in (1, 3, 10)}}, tried)


def main() -> None:
    """A table for every family, and two for whole models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--device", action="append")
    given = parser.parse_args()
    data, names = read_for("own_intervals", [given.folder], 5, given.device, False)
    for family in NETWORKS:
        present = devices_with(data, family, names)
        if present:
            rows = thin(sweep_rows(data, family, present), ROWS_PER_DEVICE)
            print(f"{family}\n{kernel_table(rows).to_string()}\n")
    tuned = {name: load_predictor(given.checkpoint, name) for name in names}
    scores = eager_scores(data, names, tuned.__getitem__)
    if scores.empty:
        return
    for unit in ("label", "model"):
        print(f"whole models, each {unit} left out\n{model_table(scores, unit).to_string()}\n")


if __name__ == "__main__":
    run_script(main)
