"""The design search beside random search, CMA-ES and TPE at equal numbers of forecasts, and an exhaustive grid.

    pip install '.[bench]'
    python -m benchmarks.search --seeds 10 --grid 32 [--methods NAME ...] [--json FILE]
    python -m benchmarks.search --descents [--seeds 5]

Problem: SM count, clock, bandwidth and L2 of an H100-like machine, for GPT-3 XL training and BERT-large inference
(geometric mean of their seconds), at most 800 mm2 and 600 W. One evaluation is an exact forecast of both workloads on
one machine; a forecast with its gradient counts as `GRADIENT_COST` evaluations (the measured ratio is printed).
Checking a budget costs no evaluation: no method needs a forecast to know that a machine breaks one.

- random: uniform in log fields, on the steps, drawn until the budgets are kept.
- random, filled: the same directions, each point grown or shrunk to the budgets with the bisection our search uses.
- CMA-ES (evosax, population 16) and TPE (Optuna): objective plus 10 × log excess over each budget; both also filled.

With --descents, the descents alone are replaced by SciPy's, from the same starts, grown to the budgets, with as many
values and gradients of the relaxed objective: SLSQP with budgets as constraints, L-BFGS-B with the penalty above. Also
for the sizes of a model (`benchmarks.codesign`). Exact objectives of where they end, on the steps and within budgets,
and after the refinement that follows them; over the best seen.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.optimize import minimize

import neusight_jax as nj
from neusight_jax.designs.answers import answer, problem
from neusight_jax.designs.search import GRADIENT_COST, Search, Settings
from neusight_jax.sweeps.space import Grid, Range

BATCH = 64
PENALTY = 10.0
FIELDS = (("num_sms", 60, 220, 0.0), ("clock_hz", 1e9, 2.4e9, 15e6), ("mem_bytes_per_s", 1e12, 8e12, 0.0))
L2 = ("l2_bytes", 16 * 2.0**20, 256 * 2.0**20, 2.0**20)
BUDGETS = {"area_mm2": 800.0, "power_w": 600.0}
Trace = list[tuple[int, float]]


def make_search(checkpoint: str, points: int, settings: Settings) -> Search:
    """The problem of the module docstring."""
    free = [Range(field, low, high, count=points, step=step) for field, low, high, step in (*FIELDS, L2)]
    graphs = [
        nj.graph_from_config("gpt3-xl", batch_size=2, sequence_length=2048, mode="training"),
        nj.graph_from_config("bert-large", batch_size=8, sequence_length=512),
    ]
    base = nj.load_gpu("H100")
    return Search(problem(nj.load_predictor(checkpoint), base, free, graphs, budgets=BUDGETS), settings)


def values(search: Search, logs: np.ndarray, size: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Exact log objective and summed log excess over the budgets, in batches of one shape."""
    objectives, excesses = [], []
    for start in range(0, len(logs), size):
        part = logs[start : start + size]
        padded = np.concatenate([part, np.repeat(part[-1:], size - len(part), axis=0)])
        objective, spent = search.values(padded)
        over = sum(np.maximum(spent[name] - np.log(limit), 0.0) for name, limit in BUDGETS.items())
        objectives.append(objective[: len(part)])
        excesses.append(np.asarray(over)[: len(part)])
    return np.concatenate(objectives), np.concatenate(excesses)


def best_so_far(objective: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Running best of the feasible points."""
    return np.minimum.accumulate(np.where(excess <= 1e-5, objective, np.inf))


def grid_best(search: Search) -> tuple[float, np.ndarray, int, float]:
    """Best feasible point of the exhaustive grid: objective, log fields, points, seconds."""
    grid, best, where = Grid(search.problem.free), np.inf, np.zeros(len(search.problem.free))
    size, begin = 4096, time.perf_counter()
    for start in range(0, grid.rows, size):
        columns = grid.slice(start, min(start + size, grid.rows))
        logs = np.log(np.stack(list(columns.values()), axis=1))
        objective, excess = values(search, logs, size)
        objective = np.where(excess <= 1e-5, objective, np.inf)
        if objective.min() < best:
            best, where = float(objective.min()), logs[int(objective.argmin())]
    return best, where, grid.rows, time.perf_counter() - begin


def random_points(search: Search, count: int, seed: int, filled: bool) -> np.ndarray:
    """Uniform points on the steps, feasible; or filled up to the budgets."""
    random = np.random.default_rng([seed, 5])
    if filled:
        shares = random.random((count, len(search.low)))
        ways = np.ones_like(shares)
        return search.repaired(search.low + (search.high - search.low) * shares, ways)
    fits = jax.jit(jax.vmap(search.cheap_fit, in_axes=(None, 0, None)))
    kept: list[np.ndarray] = []
    while sum(map(len, kept)) < count:
        shares = random.random((4096, len(search.low)))
        logs = search.on_steps(search.low + (search.high - search.low) * shares)
        kept.append(logs[np.asarray(fits(search.arguments, jnp.asarray(logs, float), search.limits()))])
    return np.concatenate(kept)[:count]


def run_random(search: Search, budget: int, seed: int, filled: bool) -> np.ndarray:
    return best_so_far(*values(search, random_points(search, budget, seed, filled)))


def run_cma(search: Search, budget: int, seed: int, filled: bool) -> np.ndarray:
    from evosax.algorithms import CMA_ES

    size = 16
    strategy = CMA_ES(population_size=size, solution=jnp.zeros(len(search.low)))
    params = strategy.default_params.replace(std_init=0.3)
    key = jax.random.key(seed)
    state = strategy.init(key, jnp.full(len(search.low), 0.5), params)
    objectives, excesses = [], []
    for number in range(budget // size):
        ask, tell = jax.random.split(jax.random.fold_in(key, number))
        population, state = strategy.ask(ask, state, params)
        logs = points_at(search, np.clip(np.asarray(population), 0.0, 1.0), filled)
        objective, excess = values(search, logs)
        state, _ = strategy.tell(
            tell, population, jnp.asarray(objective + PENALTY * excess, jnp.float32), state, params
        )
        objectives.append(objective)
        excesses.append(excess)
    return best_so_far(np.concatenate(objectives), np.concatenate(excesses))


def points_at(search: Search, shares: np.ndarray, filled: bool) -> np.ndarray:
    """Points of the unit cube as log fields on the steps, filled if asked."""
    logs = search.low + (search.high - search.low) * shares
    return search.repaired(logs, np.ones_like(logs)) if filled else search.on_steps(logs)


def run_tpe(search: Search, budget: int, seed: int, filled: bool) -> np.ndarray:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
    names = [f"x{place}" for place in range(len(search.low))]
    objectives, excesses = [], []
    for _ in range(budget):
        trial = study.ask()
        shares = np.array([[trial.suggest_float(name, 0.0, 1.0) for name in names]])
        objective, excess = values(search, points_at(search, shares, filled))
        study.tell(trial, float(objective[0] + PENALTY * excess[0]))
        objectives.append(objective)
        excesses.append(excess)
    return best_so_far(np.concatenate(objectives), np.concatenate(excesses))


def run_ours(search: Search, budget: int, seed: int) -> np.ndarray:
    found = search.run(seed)
    assert found.evaluations <= budget
    out = np.full(budget, np.inf)
    for spent, value in found.trace:
        out[spent - 1 :] = value
    return out


class _Spent(Exception):
    """All values and gradients of a descent are spent."""


@functools.cache
def budget_slopes(search: Search) -> Callable[[Array], tuple[Array, Array]]:
    """Log costs that have budgets, and their slopes by log field, as one program for all descents."""

    def costs(logs: Array) -> Array:
        amounts = search.arguments.cheap(search.problem.figures(logs))
        return jnp.stack([jnp.log(amounts[name]) for name in search.problem.cheap])

    return jax.jit(lambda logs: (costs(logs), jax.jacfwd(costs)(logs)))


def descend(search: Search, method: str, start: np.ndarray) -> np.ndarray:
    """Log fields where a solver of SciPy ends from a point, the best of all it asked for."""
    span, costs = search.high - search.low, budget_slopes(search)
    limits = np.array([float(jnp.log(search.limits()[name])) for name in search.problem.cheap])
    left, best, least = search.settings.steps, start, np.inf

    def over(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        spent, slopes = costs(jnp.asarray(search.low + span * share, float))
        return np.asarray(spent, np.float64) - limits, np.asarray(slopes, np.float64) * span

    def both(share: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal left, best, least
        if left == 0:
            raise _Spent
        left -= 1
        logs = search.low + span * share
        (values_, _), (slopes, _) = search._sloped(logs[None], search.settings.relaxation)
        spent, of_spent = over(share)
        merit = float(values_[0]) + PENALTY * float(np.maximum(spent, 0.0).sum())
        if merit < least:
            best, least = logs, merit
        if method == "SLSQP":
            return float(values_[0]), slopes[0] * span
        return merit, slopes[0] * span + PENALTY * (of_spent * (spent > 0.0)[:, None]).sum(axis=0)

    kept = {"type": "ineq", "fun": lambda share: -over(share)[0], "jac": lambda share: -over(share)[1]}
    constraints = kept if method == "SLSQP" else ()
    with contextlib.suppress(_Spent):
        share = np.clip((start - search.low) / span, 0.0, 1.0)
        minimize(both, share, jac=True, method=method, bounds=[(0.0, 1.0)] * len(span), constraints=constraints)
    return best


def solved(search: Search, method: str, seeds: int) -> np.ndarray:
    """Exact log objectives [seed, 2]: the best end of the descents by a method, and after the refinement."""

    def ends(starts: np.ndarray, limits: Any) -> np.ndarray:
        grown = search.repaired(starts, np.ones_like(starts))
        return np.array([descend(search, method, start) for start in grown])

    with contextlib.nullcontext() if method == "ours" else patch.object(search, "_ends", ends):
        found = [search.run(seed) for seed in range(seeds)]
    return np.array([[each.trace[search.settings.starts - 1][1], each.objective] for each in found])


def descents(seeds: int) -> None:
    """Print the table of the descents."""
    from benchmarks.codesign import make_search as make_model_search

    searches = {"chip": make_search("fp32", 1, Settings()), "model": make_model_search([1] * 5)}
    print("| problem | descent | ends: median | ends: worst | refined: median | refined: worst |", flush=True)
    for problem_name, search in searches.items():
        results = {method: solved(search, method, seeds) for method in ("ours", "SLSQP", "L-BFGS-B")}
        best = min(result.min() for result in results.values())
        for method, result in results.items():
            off = np.expm1(result - best)
            cells = " | ".join(f"{np.median(off[:, at]):.2%} | {off[:, at].max():.2%}" for at in (0, 1))
            print(f"| {problem_name} | {method} | {cells} |", flush=True)


def gradient_ratio(search: Search) -> float:
    """Measured time of a value with its gradient over a value's, for one batch of machines."""
    value = jax.jit(jax.vmap(lambda given, logs: search._value(given, logs, 1.0)[0][0], in_axes=(None, 0)))
    both = jax.jit(
        jax.vmap(jax.value_and_grad(lambda logs, given: search._value(given, logs, 1.0)[0][0]), in_axes=(0, None))
    )
    logs = jnp.asarray(np.linspace(search.low, search.high, BATCH), float)

    def best(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    return best(lambda: both(logs, search.arguments)) / best(lambda: value(search.arguments, logs))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--grid", type=int, default=32, help="points per field of the exhaustive grid; 0 = none")
    parser.add_argument("--checkpoint", default="fp32")
    parser.add_argument("--methods", nargs="*", help="only these; default all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--descents", action="store_true", help="only ours beside SciPy's, within the same search")
    chosen = parser.parse_args()
    if chosen.descents:
        return descents(chosen.seeds)
    begin = time.perf_counter()
    search = make_search(chosen.checkpoint, max(chosen.grid, 1), Settings())
    search.run(0)
    print(f"compilation and first search {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    search.run(1)
    print(f"a search of {search.settings.evaluations} evaluations {time.perf_counter() - begin:.3f} s")
    print(f"value with gradient over value: {gradient_ratio(search):.2f}, counted as {GRADIENT_COST}")
    methods: dict[str, Callable[[int], np.ndarray]] = {"ours": lambda seed: run_ours(search, chosen.evaluations, seed)}
    for filled in (False, True):
        more = ", filled" if filled else ""
        methods["random" + more] = lambda seed, f=filled: run_random(search, chosen.evaluations, seed, f)
        methods["CMA-ES" + more] = lambda seed, f=filled: run_cma(search, chosen.evaluations, seed, f)
        methods["TPE" + more] = lambda seed, f=filled: run_tpe(search, chosen.evaluations, seed, f)
    traces = {}
    for name, run in methods.items():
        if chosen.methods and name not in chosen.methods:
            continue
        begin = time.perf_counter()
        traces[name] = np.array([run(seed)[: chosen.evaluations] for seed in range(chosen.seeds)])
        print(f"{name}: {(time.perf_counter() - begin) / chosen.seeds:.2f} s a seed", flush=True)
    best = min(trace.min() for trace in traces.values())
    label = "best seen"
    if chosen.grid:
        grid, where, points, seconds = grid_best(search)
        figures = {each.field: float(value) for each, value in zip(search.problem.free, np.exp(where), strict=True)}
        each = seconds / points * 1e6
        print(f"grid: {points} points in {seconds:.1f} s ({each:.1f} us each), best {np.exp(grid):.6f} s")
        print(f"  at {figures}; best of any method {np.expm1(best - grid):+.3%}")
        best, label = grid, "best of the grid"
    target = float(np.median(traces["random"][:, -1])) if "random" in traces else best
    print(f"\n{chosen.seeds} seeds, {chosen.evaluations} evaluations; distance from the {label}")
    print(f"{'method':<16} {'median':>8} {'least':>8} {'most':>8}   evaluations to the random median (median, most)")
    table = {}
    for name, trace in traces.items():
        final = np.expm1(trace[:, -1] - best)
        reached = [int(np.argmax(each <= target)) + 1 if each[-1] <= target else -1 for each in trace]
        found = [each for each in reached if each > 0]
        when = (
            f"{np.median(found):.0f}, {max(found)}"
            if len(found) == len(reached)
            else f"{len(found)}/{len(reached)} did"
        )
        print(f"{name:<16} {np.median(final):>8.3%} {final.min():>8.3%} {final.max():>8.3%}   {when}")
        table[name] = {"final": final.tolist(), "reached": reached}
    print(answer(search, search.run(0)))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
