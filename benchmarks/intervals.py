"""Rules for intervals, each checked on GPUs left out: coverage as shown, and the interval score.

    python benchmarks/intervals.py LOGO [LOGO ...]

`LOGO` are folders that `evaluate --protocol logo` or `logo-models` wrote. For every rule each GPU is judged by the
interval made of the others' errors, widened as it would be for that GPU. The score (`conformal.interval_score`) is
the mean over GPUs, then over families and whole models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

import neusight_jax as nj
from neusight_jax.errors import run_script
from neusight_jax.training.conformal import CANDIDATES, Residuals, interval_score, pooled_quantile
from neusight_jax.training.evaluation.scores import protocol_rows
from neusight_jax.trust import LEVEL, gpu_ratios, outside, range_of

Quantiles = Callable[[Residuals, float], tuple[float, float]]


def each_side(residuals: Residuals, level: float) -> tuple[float, float]:
    """A quantile on each side, devices weighing the same; holds 0."""
    values = np.concatenate(list(residuals.values()))
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in residuals.values()]) / len(residuals)
    order = np.argsort(values)
    places = np.searchsorted(np.cumsum(weights[order]), [(1 - level) / 2, (1 + level) / 2 - 1e-9])
    low, high = values[order][np.minimum(places, len(values) - 1)]
    return min(float(low), 0.0), max(float(high), 0.0)


def alike(residuals: Residuals, level: float) -> tuple[float, float]:
    """As wide on one side as on the other."""
    width = pooled_quantile(residuals, level)
    return -width, width


@dataclass(frozen=True)
class Rule:
    """Quantiles, what a distance adds to the widening, whether distances are summed, errors divided by the widening."""

    name: str
    quantiles: Quantiles
    per_distance: float
    summed: bool = False
    divided: bool = True


RULES: tuple[Rule, ...] = (
    Rule("each side, 1 + sum of distances, not divided", each_side, 1.0, summed=True, divided=False),
    Rule("each side, 1 + d / 2", each_side, 0.5),
    *(Rule(f"alike, 1 + {factor} d", alike, factor) for factor in (0.0, 0.25, 0.5, 1.0)),
)


def left_out_residuals(folders: list[str]) -> dict[str, Residuals]:
    """log(measured / forecast) by family (or "models") and device, from the protocols' rows."""
    found: dict[str, Residuals] = {}
    for folder in folders:
        rows = protocol_rows(folder)
        if "forecast_s" in rows:
            rows = rows[(rows["system"] == "mixture") & (rows["option"] == "eager") & (rows["draw"] == 0)]
            rows = rows.assign(family="models", mixture_s=rows["forecast_s"])
        rows = rows.assign(log=np.log(rows["measured_s"] / rows["mixture_s"]))
        for family, part in rows.groupby("family"):
            found[str(family)] = {str(name): own["log"].to_numpy() for name, own in part.groupby("device")}
    return found


def widenings(rule: Rule, devices: list[str]) -> dict[str, float]:
    """What intervals of each device that a family was measured on are widened by when it is left out."""
    ratios = {name: np.asarray(gpu_ratios(nj.load_gpu(name))) for name in devices}
    out = {}
    for name, own in ratios.items():
        others = np.stack([each for other, each in ratios.items() if other != name])
        far = np.asarray(outside(own, *range_of(others)))
        out[name] = 1.0 + rule.per_distance * float(far.sum() if rule.summed else np.linalg.norm(far))
    return out


def judged(rule: Rule, residuals: Residuals, widening: Mapping[str, float], level: float) -> tuple[float, float, float]:
    """Mean coverage of each GPU by the others: as the level is chosen, and as shown; and the mean score."""
    scale = {name: widening[name] if rule.divided else 1.0 for name in residuals}
    inside, shown, scores = [], [], []
    for name, own in residuals.items():
        low, high = rule.quantiles({at: each / scale[at] for at, each in residuals.items() if at != name}, level)
        inside.append(np.mean((own >= low * scale[name]) & (own <= high * scale[name])))
        low, high = low * widening[name], high * widening[name]
        covered, score = interval_score(own, low, high)
        shown.append(covered)
        scores.append(score)
    return float(np.mean(inside)), float(np.mean(shown)), float(np.mean(scores))


def main(folders: list[str]) -> None:
    """A line for every rule."""
    families = left_out_residuals(folders)
    for rule in RULES:
        best = []
        for residuals in families.values():
            widening = widenings(rule, sorted(residuals))
            tried = [judged(rule, residuals, widening, level) for level in CANDIDATES]
            best.append(min(tried, key=lambda one: abs(one[0] - LEVEL)))
        shown = ", ".join(f"{name} {100 * one[1]:.0f}" for name, one in zip(families, best, strict=True))
        print(f"{rule.name}: score {np.mean([one[2] for one in best]):.3f}; coverage as shown, %: {shown}")


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
