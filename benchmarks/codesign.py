"""`codesign` beside an exhaustive grid of shapes, random and evolutionary search; and published orders found again.

    PYTHONPATH=. python -m benchmarks.codesign [--points 7 17 21 8 5] [--seeds 5] [--json FILE]
    PYTHONPATH=. python -m benchmarks.codesign --orders

Problem: layers, hidden, d_ff, heads and KV heads of a decoder that serves four requests at a time in int4 on an L4, as
fast as it can be with the loss of llama-3.1-8b (Besiroglu et al.). One evaluation is an exact forecast of one shape; a
forecast with its gradient counts as `GRADIENT_COST`. Whether a shape keeps loss and memory costs no forecast.

- random: uniform in log sizes, on the steps, drawn until the budgets are kept.
- evolution: 16 parents, 48 children a generation, each a parent moved by a normal step of 10 % in log sizes; both
  also with every point brought to the loss as the search does it (filled).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import neusight_jax as nj
from neusight_jax.designs.answers import problem
from neusight_jax.designs.model import model_use
from neusight_jax.designs.search import Search, Settings
from neusight_jax.sweeps.space import Grid

RANGES = {"layers": (16, 64), "hidden": (2048, 6144), "d_ff": (4096, 24576), "heads": (16, 64), "kv_heads": (2, 16)}
SETTINGS = Settings(rounds=12)
BATCH, PARENTS, CHILDREN, STEP, PENALTY = 512, 16, 48, 0.1, 10.0
Values = tuple[np.ndarray, np.ndarray]
Order = Callable[[list[float]], bool]


def make_search(points: list[int]) -> Search:
    """The problem of the module docstring."""
    predictor, base = nj.load_predictor("tensorcore"), nj.load_gpu("L4")
    free = [nj.Range(name, *ends, count=count) for (name, ends), count in zip(RANGES.items(), points, strict=True)]
    load = model_use("llama-3.1-8b", base, weight_dtype="int4", batch_size=4)
    return Search(problem(predictor, base, free, [load]), SETTINGS)


def judged(search: Search, logs: np.ndarray, size: int = 64) -> Values:
    """Log objectives and log excesses over the budgets, in batches of one shape."""
    limits, parts = search.limits(), []
    for start in range(0, len(logs), size):
        part = logs[start : start + size]
        padded = np.concatenate([part, np.repeat(part[-1:], size - len(part), axis=0)])
        parts.append([array[: len(part)] for array in search._judge(padded, limits)])
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def fitting(search: Search) -> Callable[[np.ndarray], np.ndarray]:
    """Which points keep the budgets, without a forecast."""
    fits = jax.jit(jax.vmap(search.cheap_fit, in_axes=(None, 0, None)))
    limits = search.limits()
    return lambda logs: np.asarray(fits(search.arguments, jnp.asarray(logs, float), limits))


def grid_best(search: Search, fits: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """The best shape of the grid that keeps the budgets."""
    grid, begin = Grid(search.problem.free), time.perf_counter()
    logs = np.unique(search.on_steps(np.log(np.stack(list(grid.slice(0, grid.rows).values()), axis=1))), axis=0)
    kept = logs[np.concatenate([fits(part) for part in np.array_split(logs, 50)])]
    objective, excess = judged(search, kept, BATCH)
    objective = np.where(excess == 0.0, objective, np.inf)
    best = int(objective.argmin())
    shape = dict(zip(RANGES, np.exp(kept[best]).round().tolist(), strict=True))
    seconds = time.perf_counter() - begin
    return {
        "points": grid.rows,
        "shapes": len(logs),
        "forecast": len(kept),
        "seconds": seconds,
        "objective": float(objective[best]),
        "shape": shape,
    }


def random_points(search: Search, count: int, seed: int, fits: Callable[[np.ndarray], np.ndarray], filled: bool) -> Any:
    """Uniform points on the steps that keep the budgets, or brought to them."""
    random, kept = np.random.default_rng([seed, 5]), list[np.ndarray]()
    while sum(map(len, kept)) < count:
        logs = search.low + (search.high - search.low) * random.random((1024, len(search.low)))
        logs = search.repaired(logs, np.ones_like(logs)) if filled else search.on_steps(logs)
        kept.append(logs if filled else logs[fits(logs)])
    return np.concatenate(kept)[:count]


def evolved(search: Search, count: int, seed: int, fits: Callable[[np.ndarray], np.ndarray], filled: bool) -> Values:
    """All points an evolutionary search forecasts: objectives and excesses, in order."""
    random = np.random.default_rng([seed, 6])
    points = random_points(search, PARENTS, seed, fits, filled)
    objectives, excesses = (list[np.ndarray]() for _ in range(2))
    parents, merits = points, np.full(len(points), np.inf)
    while sum(map(len, objectives)) < count:
        objective, excess = judged(search, points)
        objectives.append(objective)
        excesses.append(excess)
        pool, merit = np.concatenate([parents, points]), np.concatenate([merits, objective + PENALTY * excess])
        best = np.argsort(merit)[:PARENTS]
        parents, merits = pool[best], merit[best]
        points = parents[random.integers(PARENTS, size=CHILDREN)]
        points = np.clip(points + STEP * random.normal(size=points.shape), search.low, search.high)
        points = search.repaired(points, np.ones_like(points)) if filled else search.on_steps(points)
    return np.concatenate(objectives)[:count], np.concatenate(excesses)[:count]


def beside(points: list[int], seeds: int) -> dict[str, Any]:
    """Distance of every method from the best of the grid, by seed; and evaluations until within 1 % of it."""
    search = make_search(points)
    fits = fitting(search)
    grid = grid_best(search, fits)
    print(grid, flush=True)
    spent = search.settings.evaluations
    results: dict[str, list[tuple[float, int | None]]] = {}

    def note(method: str, values: np.ndarray, evaluations: np.ndarray) -> None:
        running = np.minimum.accumulate(values) - grid["objective"]
        near = np.flatnonzero(running < 0.01)
        results.setdefault(method, []).append(
            (float(np.expm1(running[-1])), int(evaluations[near[0]]) if len(near) else None)
        )

    for seed in range(seeds):
        found = search.run(seed)
        note("codesign", np.array([value for _, value in found.trace]), np.array([number for number, _ in found.trace]))
        for filled in (False, True):
            ending = ", filled" * filled
            for method, of_method in (
                ("random", judged(search, random_points(search, spent, seed, fits, filled))),
                ("evolution", evolved(search, spent, seed, fits, filled)),
            ):
                objective, excess = of_method
                note(method + ending, np.where(excess == 0.0, objective, np.inf), np.arange(1, spent + 1))
        print(seed, {name: each[-1] for name, each in results.items()}, flush=True)
    print(f"\ngrid: {grid['points']:,} points, {grid['forecast']:,} keep the budgets; {spent} evaluations each\n")
    print("| method | median | worst seed | evaluations until within 1 % of the grid |\n| --- | ---: | ---: | ---: |")
    for method, rows in results.items():
        gaps, near = [gap for gap, _ in rows], [number for _, number in rows if number is not None]
        reached = (
            f"{np.median(near):.0f}" + (f" ({len(near)} of {seeds})" if len(near) < seeds else "") if near else "-"
        )
        print(f"| {method} | {np.median(gaps):+.2%} | {max(gaps):+.2%} | {reached} |")
    return {"grid": grid, "evaluations": spent, "results": results}


def _of_size(shape: nj.ModelShape, name: str, parameters: float, **sizes: Any) -> nj.ModelShape:
    """A shape with other sizes, `name` set so that it has as many parameters, to 8."""
    low, high = 1.0, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        counted = shape.replace(**sizes, **{name: 8 * max(round(middle / 8), 1)}).graph(mode="decode").parameters or 0.0
        low, high = (middle, high) if counted < parameters else (low, middle)
    return shape.replace(**sizes, **{name: 8 * round(low / 8)})


def rises(values: list[float]) -> bool:
    """Whether values in order grow."""
    return all(before < after for before, after in pairwise(values))


def falls(values: list[float]) -> bool:
    """Whether values in order shrink."""
    return all(before > after for before, after in pairwise(values))


def orders() -> None:
    """Published orders of shapes, with nothing fitted to them."""
    predictor = nj.load_predictor("tensorcore")
    a100, h100 = nj.load_gpu("A100"), nj.load_gpu("H100")

    def seconds(gpu: nj.GPU, shape: nj.ModelShape, **workload: Any) -> float:
        return float(nj.latency(predictor, gpu, nj.kernels_of(shape, dtype="bf16", **workload)))

    def row(claim: str, source: str, forecasts: dict[str, float], shown: str, holds: Order, scale: float = 1.0) -> None:
        """A line of the table; shown: format of a forecast times `scale`; holds: whether forecasts in order agree."""
        numbers = ", ".join(f"{name} {shown.format(scale * value)}" for name, value in forecasts.items())
        found = "yes" if holds(list(forecasts.values())) else "**no**"
        print(f"| {claim} | {source} | {numbers} | {found} |", flush=True)

    print("| claim | source | forecast | found |\n| --- | --- | --- | --- |")
    base = nj.ModelShape.from_config("llama-3.2-1b").replace(
        layers=32, hidden=2560, d_ff=10240, vocabulary=50304, tied=False
    )
    step: dict[str, Any] = {"mode": "training", "batch_size": 4, "sequence_length": 2048}
    wide = {
        f"heads {heads} x {2560 // heads}": seconds(
            a100, base.replace(heads=heads, kv_heads=heads, head_size=2560 // heads), **step
        )
        for heads in (20, 32, 40)
    }
    claim = "heads 64 or 128 wide train faster than 80 (2.7B, A100)"
    row(claim, "2401.14489", wide, "{:.0f} ms", lambda times: max(times[0], times[2]) < times[1], 1e3)
    full = base.replace(heads=20, kv_heads=20, head_size=128)
    vocabulary = {f"{size:,}": seconds(a100, full.replace(vocabulary=size), **step) for size in (50257, 50304)}
    claim = "a vocabulary that is a multiple of 64 trains faster (2.7B, A100)"
    row(claim, "2401.14489", vocabulary, "{:.0f} ms", falls, 1e3)
    odd = {f"hidden {size}": seconds(a100, full.replace(hidden=size), **step) / size for size in (2500, 2560)}
    claim = "a width that is a multiple of 64 trains faster for its size (A100)"
    row(claim, "2401.14489", odd, "{:.0f} us a feature", falls, 1e6)

    llama = nj.ModelShape.from_config("llama-3.1-8b")
    gains = {
        f"context {context:,}": seconds(
            h100, llama.replace(kv_heads=32), mode="decode", batch_size=8, kv_length=context
        )
        / seconds(h100, llama, mode="decode", batch_size=8, kv_length=context)
        for context in (1024, 8192, 65536)
    }
    claim = "grouped heads decode faster than full ones, the more the longer (8B, H100)"
    row(claim, "2510.18245", gains, "{:.2f} times", lambda ratios: rises(ratios) and ratios[0] > 1.0)

    small = nj.ModelShape.from_config("llama-3.2-1b")
    size = small.graph(mode="decode").parameters or 0.0
    decode: dict[str, Any] = {"mode": "decode", "batch_size": 1, "kv_length": 2048}
    shapes = {layers: _of_size(small, "hidden", size, layers=layers) for layers in (8, 16, 32)}
    depth = {f"{layers} layers {shape.hidden} wide": seconds(a100, shape, **decode) for layers, shape in shapes.items()}
    claim = "wide and shallow decodes faster (1.2B, A100, batch 1)"
    row(claim, "2501.18107, 2510.18245", depth, "{:.2f} ms", rises, 1e3)
    widths = {heads: _of_size(small, "d_ff", size, heads=heads, kv_heads=heads // 4) for heads in (48, 32, 16)}
    ratio = {
        f"{heads} heads, d_ff {shape.d_ff}": seconds(a100, shape, mode="decode", batch_size=64, kv_length=4096)
        for heads, shape in widths.items()
    }
    claim = "a larger share of feed-forward decodes faster (1.2B, A100, batch 64)"
    row(claim, "2510.18245", ratio, "{:.2f} ms", falls, 1e3)

    free = [
        nj.Range("layers", 16, 48),
        nj.Range("hidden", 2048, 8192),
        nj.Range("d_ff", 4096, 32768),
        nj.Range("training_tokens", 3e10, 3e12),
    ]
    load = model_use(llama, h100, batch_size=32, price_per_hour=2.5, training_tokens=1.6e11, served_tokens=1e9)
    search = Search(problem(predictor, h100, free, [load], objective="total_cost"), SETTINGS)
    parameters = {}
    for served in (1e9, 1e12, 1e13):
        assert search.arguments.model is not None
        use = replace(search.arguments.model, served_tokens=jnp.asarray(served, float))
        search.arguments = search.arguments._replace(steps=(use,))
        best = search.run(0)
        tokens = float(np.exp(best.logs[3]))
        [measured] = search.metrics(best.logs[None])[0]["parameters"]
        parameters[f"{served:.0e} served, on {tokens / 1e9:.0f} billion:"] = float(measured)
    claim = "the cheapest model of one loss is smaller when more is served (H100)"
    row(claim, "2401.00448", parameters, "{:.1f} billion", falls, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, nargs=5, default=[7, 17, 21, 8, 5])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--orders", action="store_true")
    options = parser.parse_args()
    if options.orders:
        orders()
        return
    results = beside(options.points, options.seeds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
