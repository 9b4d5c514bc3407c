"""Forecasts of whole servers against public measurements: `silicon_sample.csv` of the package aiconfigurator-core.

    python -m benchmarks.serving_sample [--fit] [--rows FILE.csv]

Time to the first token and time of a further one at a load generator's concurrency. Aggregated rows of H100 and H200
are development, which the numbers of `Engine` are fitted on (`--fit`); all other GPUs and all disaggregated rows are
test. Rows left out are counted by reason. Nothing of the file is copied; it is read from the installed package.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import neusight_jax as nj
from benchmarks.serving_rows import DEVELOPMENT, MOST, SYSTEMS, Setup, model_of, read
from neusight_jax.errors import InputError
from neusight_jax.hardware.files import load_cluster
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.serving.layouts import capacity
from neusight_jax.serving.pools import link_bytes_per_s
from neusight_jax.serving.pools import pools as pooled
from neusight_jax.serving.steady import Demand, Lengths, demand, first_interval, steady
from neusight_jax.serving.steps import Axes, axes, steps
from neusight_jax.serving.times import ENGINES, WIDTHS, Engine, Options, Times, bounded_times

CHUNK, LENGTH = 8192, 16384
"""Tokens of a step of all engines; longest sequence of a table."""
TARGETS = ("tpot", "ttft")
GENERATORS = ("own", "dated")
"""Load generators: of the package's own runs, and of those from a dated source."""
SHARES = {"own": 1.0, "dated": 0.9}
"""Of the lengths that a row has, on average: InferenceMAX draws from 0.8 of them on (`--random-range-ratio 0.8`)."""
WAVES: dict[str, dict[str, float]] = {
    "vllm": {"own": 0.121, "dated": 0.129},
    "trtllm": {"own": 0.155, "dated": 0.099},
    "sglang": {"own": 0.747, "dated": 0.126},
}
"""Share of arrivals that come all at once (`Engine.wave`), as `--fit` finds it."""


@functools.cache
def _steps(name: str, quantization: str, layout: Parallelism, paths: tuple[str, ...], grid: Axes) -> Any:
    return steps(model_of(name, quantization), layout, 8, paths, grid)


def table(setup: Setup, predictor: Any) -> tuple[tuple[Times, Times, Times], float, float]:
    """Step times of a set-up with those of both ends of the kernels' intervals, its KV cache in bytes, and that of a
    request of `LENGTH` tokens."""
    cluster = load_cluster(f"{setup.gpus}x {SYSTEMS[setup.system]}")
    model = model_of(setup.model, setup.quantization)
    grid = axes(LENGTH, CHUNK, MOST)
    layout = Parallelism(tensor=setup.tensor, data=setup.data, expert=setup.expert)
    own = _steps(setup.model, setup.quantization, layout, tuple(sorted(cluster.gpu.paths)), grid)
    found = capacity(model, layout, float(np.asarray(cluster.gpu.mem_bytes)), Options(CHUNK, MOST), LENGTH)
    return bounded_times(predictor, cluster, own, Engine()), found.cache_bytes, found.request_bytes


def tables(setups: Iterable[Setup]) -> dict[Setup, tuple[tuple[Times, Times, Times], float, float] | str]:
    """Step times of every set-up, or why there are none."""
    predictor = nj.load_predictor("tensorcore")
    out: dict[Setup, tuple[tuple[Times, Times, Times], float, float] | str] = {}
    for setup in setups:
        try:
            out[setup] = table(setup, predictor)
        except InputError as error:
            out[setup] = re.sub(r"\d+", "N", str(error))[:90]
    return out


@dataclass(frozen=True)
class Batch:
    """Rows stacked for one program: step times of each, what is asked, requests held, and how many run at most; of
    disaggregated ones also times of the replicas that prefill, seconds of a transfer, and how many there are of both.
    """

    times: Times
    asked: Demand
    load: np.ndarray
    most: np.ndarray
    pools: tuple[Times, np.ndarray, np.ndarray, np.ndarray] | None = None


def stacked(frame: pd.DataFrame, found: Mapping[Setup, Any], end: int = 0) -> Batch:
    """All rows, aggregated or not, for one program; by the kernels, or the low (1) or high (2) ends of their
    intervals."""
    own = [found[setup] for setup in frame["setup"]]
    shares = frame["generator"].map(SHARES)
    lengths = [Lengths(*each) for each in zip(frame["input"] * shares, frame["output"] * shares, strict=True)]
    chunks = math.ceil(frame["input"].max() / CHUNK)
    polls = [Options(CHUNK, MOST, poll_steps=int(each)) for each in frame["polls"]]
    asked = [demand(each, own, most_chunks=chunks) for each, own in zip(lengths, polls, strict=True)]
    ranks = [setup.data for setup in frame["setup"]]
    most = [
        count * min(MOST, max(_room(each, length.mean_context), 1.0))
        for count, each, length in zip(ranks, own, lengths, strict=True)
    ]
    rows = jax.tree.map(lambda *each: np.stack([np.asarray(one, np.float32) for one in each]), *asked)
    pools = None
    if frame["prefill"].notna().all():
        sent = [_transfer_s(each, found) for each in frame.to_dict("records")]
        counts = (frame[name].to_numpy(np.float32) for name in ("prefill_replicas", "decode_replicas"))
        pools = (_times(frame["prefill"], found, end), np.array(sent, np.float32), *counts)
    return Batch(_times(frame["setup"], found, end), rows, frame["load"].to_numpy(np.float32), np.array(most), pools)


def _times(setups: Iterable[Setup], found: Mapping[Setup, Any], end: int) -> Times:
    """Step times of set-ups stacked, for whatever engine."""
    own = [found[setup][0][end] for setup in setups]
    tables = {name: np.stack([each.tables[name] for each in own]) for name in own[0].tables}
    ranks = np.array([each.attention_ranks for each in own], np.float32)
    return Times(tables, None, own[0].axes, attention_ranks=ranks)


def _room(found: tuple[Any, float, float], context: float) -> float:
    """Requests of this mean length whose KV cache fits."""
    return found[1] / found[2] * LENGTH / context


def _transfer_s(row: Mapping[str, Any], found: Mapping[Setup, Any]) -> float:
    """Seconds that the KV cache of a prompt takes to the replica that decodes."""
    setups = row["prefill"], row["setup"]
    gpus = sum(each.gpus * row[f"{name}_replicas"] for each, name in zip(setups, ("prefill", "decode"), strict=True))
    sent = max(found[each][2] for each in setups) * SHARES[row["generator"]] * row["input"] / LENGTH
    return sent / link_bytes_per_s(load_cluster(f"{gpus}x {SYSTEMS[row['system']]}"), gpus)


def _forecasts(engine: Engine, waves: Any, rows: Any) -> Any:
    def one(wave: Any, times: Times, asked: Demand, load: Any, most: Any, pools: Any) -> Any:
        own = engine.replace(wave=wave)
        times = replace(times, engine=own)
        if pools is None:
            state = steady(times, asked, load, most)
        else:
            first, *rest = pools
            sent, *counts = rest
            state = pooled(replace(first, engine=own), times, asked, load, sent, most, *counts)
        return jnp.stack([state.tpot_s, state.ttft_s])

    return jax.vmap(one)(waves, *rows)


_forecast = jax.jit(_forecasts)


def forecast(rows: Batch, engine: Engine, waves: np.ndarray) -> np.ndarray:
    """TPOT and TTFT of every row, seconds [row, 2], with the share of its arrivals that come all at once."""
    return np.asarray(_forecast(engine, waves, (rows.times, rows.asked, rows.load, rows.most, rows.pools)))


def fit(rows: Batch, frame: pd.DataFrame) -> tuple[Engine, dict[str, float]]:
    """Numbers of an engine, and the wave of each load generator, by absolute errors in logarithms under their
    priors."""
    from scipy.optimize import minimize

    names = [name for name in WIDTHS if name != "wave"]
    prior = np.log([*(float(np.asarray(getattr(Engine(), name))) for name in names), *(Engine().wave,) * 2])
    widths = np.array([*(WIDTHS[name] for name in names), *(WIDTHS["wave"],) * 2])
    own = jnp.asarray([GENERATORS.index(name) for name in frame["generator"]])
    measured = jnp.log(jnp.asarray(frame[list(TARGETS)].to_numpy()))
    every = rows.times, rows.asked, rows.load, rows.most, rows.pools

    @jax.jit
    @jax.value_and_grad
    def loss(raw: Any) -> Any:
        values = jnp.exp(raw)
        engine = Engine(**dict(zip(names, values[:-2], strict=True)))
        found = _forecasts(engine, jnp.minimum(values[-2:], 1.0)[own], every)
        error = jnp.sqrt((jnp.log(found) - measured) ** 2 + 1e-4)
        return jnp.mean(jnp.sum(error, axis=1)) + 0.01 * jnp.sum(((raw - prior) / widths) ** 2)

    def slopes(raw: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = loss(jnp.asarray(raw, jnp.float32))
        return float(value), np.asarray(slope, float)

    best = minimize(slopes, prior, jac=True, method="L-BFGS-B", options={"maxiter": 60})
    *numbers, one, other = (float(value) for value in np.exp(best.x))
    return Engine(**dict(zip(names, numbers, strict=True))), dict(zip(GENERATORS, (min(one, 1.0), other), strict=True))


def scores(frame: pd.DataFrame, found: np.ndarray) -> pd.DataFrame:
    """Median and mean absolute errors in percent, and the share of rows in the 80 % interval, by part of the rows.

    Args:
      found: TPOT and TTFT by the kernels, and by the low and the high ends of their intervals [end, row, 2].
    """
    rows = []
    pools, shared = frame["prefill"].notna(), _shared(frame)
    development = frame["system"].isin(DEVELOPMENT) & ~pools & ~shared
    test = ~development & ~pools & ~shared
    parts = {"development": development, "test": test, "disaggregated": pools & ~shared, "data parallel": shared}
    for part, chosen in parts.items():
        for loads, few in (("at most 8", frame["load"] <= 8), ("all", frame["load"] > 0)):
            own = (chosen & few).to_numpy()
            entry: dict[str, Any] = {"part": part, "concurrency": loads, "rows": int(own.sum())}
            for at, name in enumerate(TARGETS):
                measured = frame[name].to_numpy()[own]
                ratio = found[0, own, at] / measured
                central, low, high = found[:, own, at]
                low, high = first_interval(central, low, high) if name == "ttft" else (low, high)
                entry[f"{name} median"] = round(float(np.median(np.abs(ratio - 1))) * 100, 1)
                entry[f"{name} mean"] = round(float(np.mean(np.abs(ratio - 1))) * 100, 1)
                entry[f"{name} bias"] = round(float(np.median(ratio) - 1) * 100, 1)
                entry[f"{name} inside"] = round(float(np.mean((low <= measured) & (measured <= high))) * 100, 1)
            rows.append(entry)
    return pd.DataFrame(rows)


def _shared(frame: pd.DataFrame) -> pd.Series:
    """Rows with data-parallel attention, of prompts or answers."""
    either: pd.Series = (frame["data"] > 1) | frame["prefill"].map(lambda each: each is not None and each.data > 1)
    return either


def prepared(
    known: Mapping[Setup, Any] | None = None,
) -> tuple[pd.DataFrame, Counter[str], dict[Setup, Any]]:
    """Rows that can be forecast, why others cannot, and step times of every set-up, those `known` apart."""
    frame, reasons = read()
    setups = dict.fromkeys([*frame["setup"], *frame["prefill"].dropna()])
    known = known or {}
    found = {**known, **tables(each for each in setups if each not in known)}
    kept = []
    for values in frame.to_dict("records"):
        reason = _unusable(values, found)
        kept.append(reason is None)
        if reason is not None:
            reasons[reason] += 1
    return frame[kept].reset_index(drop=True), reasons, found


def _unusable(row: Mapping[str, Any], found: Mapping[Setup, Any]) -> str | None:
    """Why a row has no forecast, given step times."""
    own = [row["setup"], *([row["prefill"]] if row["prefill"] is not None else [])]
    context = Lengths(row["input"], row["output"]).mean_context
    for each in (found[setup] for setup in own):
        if isinstance(each, str):
            return each
        if _room(each, context) < 1.0:
            return "no request fits the memory of the GPUs it names"
    return None


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the numbers of Engine on development rows")
    parser.add_argument("--rows", type=Path, help="write every row with its forecast")
    asked = parser.parse_args()
    frame, reasons, tabled = prepared()
    found = forecasts(frame, tabled, fitted=asked.fit)
    print(scores(frame, found).to_string(index=False))
    for reason, count in reasons.most_common():
        print(f"left out {count}: {reason}")
    if asked.rows is not None:
        for at, name in enumerate(TARGETS):
            frame[f"{name}_forecast"] = found[0, :, at]
        frame.drop(columns=["setup", "prefill"]).to_csv(asked.rows, index=False)


def forecasts(frame: pd.DataFrame, tabled: Mapping[Setup, Any], *, fitted: bool) -> np.ndarray:
    """TPOT and TTFT of every row [end, row, 2] by the numbers of its engine and load generator, those that ship or
    `fitted` here on development rows, which are printed."""
    pools = frame["prefill"].notna().to_numpy()
    development = frame["system"].isin(DEVELOPMENT).to_numpy() & ~pools & ~_shared(frame).to_numpy()
    found = np.full((3, len(frame), 2), np.nan)
    for name, engine in ENGINES.items():
        backend, waves = (frame["backend"] == name).to_numpy(), WAVES[name]
        if fitted:
            own = frame[backend & development].reset_index(drop=True)
            engine, waves = fit(stacked(own, tabled), own)
            print(name, engine, waves, flush=True)
        for part in (backend & ~pools, backend & pools):
            if part.any():
                found[:, part] = _ends(frame[part], tabled, engine, waves)
    if fitted:
        print("spread of first tokens", _spread(found[:, development, 1], frame["ttft"].to_numpy()[development]))
    return found


def _ends(frame: pd.DataFrame, tabled: Mapping[Setup, Any], engine: Engine, waves: Mapping[str, float]) -> np.ndarray:
    """TPOT and TTFT of rows by the kernels and both ends of their intervals [end, row, 2]."""
    frame = frame.reset_index(drop=True)
    wave = frame["generator"].map(waves).to_numpy(np.float32)
    return np.stack([forecast(stacked(frame, tabled, end), engine, wave) for end in range(3)])


def _spread(found: np.ndarray, measured: np.ndarray) -> float:
    """Half width in logarithms that leaves a fifth of rows outside, beside that of the kernels (`FIRST_SPREAD`)."""
    central = found[0]
    end = np.where(measured < central, np.minimum(found[1], central), np.maximum(found[2], central))
    kernels, error = np.log(end / central), np.log(measured / central)
    return float(np.sqrt(max(np.quantile(error**2 - kernels**2, 0.8), 0.0)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
