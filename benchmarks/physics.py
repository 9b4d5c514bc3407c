"""Physics of forecasts and derivatives over random (GPU, kernel) pairs, log-uniform: violations, counted.

    python benchmarks/physics.py --pairs 100000 --seeds 5 [--checkpoint fp32 ...]

Random predictors (weights nobody trained) show what holds by construction; checkpoints are checked beside them.
Machines and shapes are drawn from far wider ranges than real ones (tests/predictors.py).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import neusight_jax as nj
from neusight_jax.errors import run_script
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.variant import PEAKS, RATES
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.predictor import Predictor
from neusight_jax.sensitivities import ALL_RATES, elasticities, knob

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import predictors
import test_physics

FALLING = ("mem_bytes_per_s", "l2_bytes", "clock_hz", "tdp_w", knob("num_sms"), knob("clock_hz"), *PEAKS)
"""Elasticities that may not be positive; the SM count at a fixed rate per SM."""
ROUNDING = 1e-4
"""A positive elasticity below this is rounding of single precision."""
RELAXATIONS = (0.1, 0.3, 0.5, 1.0)


def members_of(predictor: Any) -> list[Predictor]:
    """An ensemble's members as predictors of their own; anything else as it is."""
    families = getattr(predictor, "families", None)
    if not families:
        return [predictor]
    count = len(next(iter(families.values())).log_floor_s)
    return [test_physics._member(predictor, member, count) for member in range(count)]


def signs(predictor: Predictor, gpus: GPU, kernels: KernelTable, isolated: bool, relaxation: float) -> Counter[str]:
    """Derivatives that say a better figure makes it slower, by name."""
    _, slopes = elasticities(predictor, gpus, kernels, isolated=isolated, relaxation=relaxation)
    found = Counter[str]()
    for name in FALLING:
        found[name] += sum(int(np.sum(~(np.asarray(each) <= ROUNDING))) for each in slopes[name].values())
    return found


def rate_residual(predictor: Predictor, gpus: GPU, kernels: KernelTable, isolated: bool) -> np.ndarray:
    """|sum of rate elasticities + 1 − launch share| of every pair; the share is that of an infinitely fast machine.

    The log of an ensemble is the mean over members, so that its share is the mean of theirs.
    """
    _, slopes = elasticities(predictor, gpus, kernels, isolated=isolated)
    fast = predictors.scaled(gpus, tuple(name for name in RATES), 1e10)
    shares: dict[str, list[Any]] = {name: [] for name in kernels.families}
    for member in members_of(predictor):
        now = kernel_latency(member, gpus, kernels, isolated=isolated)
        floor = kernel_latency(member, fast, kernels, isolated=isolated)
        for name in kernels.families:
            shares[name].append(np.asarray(floor[name], np.float64) / np.asarray(now[name], np.float64))
    rest = [np.asarray(slopes[ALL_RATES][name]) + 1.0 - np.mean(shares[name], axis=0) for name in shares]
    return np.abs(np.concatenate(rest))


def relaxation_bias(predictor: Predictor, gpus: GPU, kernels: KernelTable, relaxation: float) -> np.ndarray:
    """Relaxed over exact time, less one, of every pair."""
    exact = kernel_latency(predictor, gpus, kernels)
    relaxed = kernel_latency(predictor, gpus, kernels, relaxation=relaxation)
    return np.concatenate([np.asarray(relaxed[name]) / np.asarray(exact[name]) - 1.0 for name in exact])


def report(label: str, draw: Any, seeds: int, pairs: int) -> None:
    """Print all figures of one predictor (or one for each seed)."""
    covered = [name for name, family in FAMILIES.items() if draw(0).covers(family)]
    rows = -(-pairs // (seeds * len(covered)))
    pairs = seeds * rows * len(covered)
    wrong, light, slower = Counter[str](), Counter[str](), Counter[str]()
    residuals, biases = [], {value: [] for value in RELAXATIONS}
    test_physics.ROWS = rows
    for seed in range(seeds):
        predictor, kernels = draw(seed), predictors.only(predictors.random_kernels(seed, rows), *covered)
        gpus = predictors.random_gpus(seed, rows, absent=0.5)
        for isolated in (False, True):
            for relaxation in (0.0, 0.5):
                wrong += signs(predictor, gpus, kernels, isolated, relaxation)
                light += test_physics.beyond_light(predictor, kernels, gpus, isolated, relaxation)
                slower += test_physics.slower_when_better(predictor, kernels, gpus, isolated, relaxation, seed)
        residuals.append(rate_residual(predictor, gpus, kernels, isolated=False))  # alone they run beside a host
        for value in RELAXATIONS:
            biases[value].append(relaxation_bias(predictor, gpus, kernels, value))
    rest = np.concatenate(residuals)
    print(f"{label}: {pairs} (GPU, kernel) pairs, seeds 0-{seeds - 1}, isolated and in-model, relaxation 0 and 0.5")
    print(f"  finite steps that make it slower   {dict(+slower) or 0} of {4 * pairs} each")
    print(f"  derivatives of the wrong sign      {dict(+wrong) or 0} of {4 * pairs} each")
    print(f"  not finite, beyond light           {dict(+light) or 0} of {4 * pairs}")
    print(
        f"  in-model |sum of rate elasticities + 1 - launch share|: max {rest.max():.1e}, "
        f"p99.9 {np.quantile(rest, 0.999):.1e}, "
        f"above 1e-3: {int((rest > 1e-3).sum())} of {len(rest)}"
    )
    for value, parts in biases.items():
        bias = np.concatenate(parts)
        low, middle, high = np.quantile(bias, [0.01, 0.5, 0.99])
        print(
            f"  relaxation {value}: time off by median {middle:+.2%}, 1st percentile {low:+.2%}, 99th {high:+.2%}, "
            f"largest {bias.max():+.1e}"
        )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--checkpoint", nargs="*", default=["fp32", "tensorcore"])
    parser.add_argument("--no-random", action="store_true", help="checkpoints alone")
    chosen = parser.parse_args()
    if not chosen.no_random:
        report(
            "random mixture",
            lambda seed: predictors.random_predictor("mixture", seed, 1 + 2 * (seed == 0)),
            chosen.seeds,
            chosen.pairs,
        )
        report(
            "random neusight", lambda seed: predictors.random_predictor("neusight", seed), chosen.seeds, chosen.pairs
        )
    for name in chosen.checkpoint:
        trained = nj.load_predictor(name)
        report(f"checkpoint {name}", lambda _, trained=trained: trained, chosen.seeds, chosen.pairs)


if __name__ == "__main__":
    run_script(main)
