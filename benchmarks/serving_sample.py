"""Forecasts of whole servers against public measurements: `silicon_sample.csv` of the package aiconfigurator-core.

    python -m benchmarks.serving_sample [--fit] [--rows FILE.csv]

Time to the first token and time of a further one at a load generator's concurrency. Aggregated rows of H100 and H200
are development, which the numbers of `Engine` are fitted on (`--fit`); all other GPUs and all disaggregated rows are
test. Rows left out are counted by reason. Nothing of the file is copied; it is read from the installed package.
"""

from __future__ import annotations

import argparse
import functools
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from neusight_jax.serving.capacity import capacity
from neusight_jax.serving.disaggregated import link_bytes_per_s
from neusight_jax.serving.pools import pools as pooled
from neusight_jax.serving.steady import Demand, Lengths, demand, steady
from neusight_jax.serving.steps import Axes, axes, steps
from neusight_jax.serving.times import ENGINES, WIDTHS, Engine, Options, Times, bounded_times

CHUNK, LENGTH = 8192, 16384
"""Tokens of a step of all engines; longest sequence of a table."""
TARGETS = ("tpot", "ttft")
GENERATORS = ("own", "dated")
"""Load generators: of the package's own runs, and of those from a dated source."""
WAVES: dict[str, dict[str, float]] = {
    "vllm": {"own": 0.103, "dated": 0.109},
    "trtllm": {"own": 0.109, "dated": 0.081},
    "sglang": {"own": 0.643, "dated": 0.087},
}
"""Share of arrivals that come all at once (`Engine.wave`), as `--fit` finds it."""


@functools.cache
def _steps(name: str, quantization: str, tensor: int, expert: int, paths: tuple[str, ...], grid: Axes) -> Any:
    layout = Parallelism(tensor=tensor, expert=expert)
    return steps(model_of(name, quantization), layout, 8, paths, grid)


def table(setup: Setup, predictor: Any) -> tuple[Times, float, float]:
    """Step times of a set-up, its KV cache in bytes, and that of a request of `LENGTH` tokens."""
    cluster = load_cluster(f"{setup.tensor}x {SYSTEMS[setup.system]}")
    model = model_of(setup.model, setup.quantization)
    grid = axes(LENGTH, CHUNK, MOST)
    own = _steps(setup.model, setup.quantization, setup.tensor, setup.expert, tuple(sorted(cluster.gpu.paths)), grid)
    layout = Parallelism(tensor=setup.tensor, expert=setup.expert)
    found = capacity(model, layout, float(np.asarray(cluster.gpu.mem_bytes)), Options(CHUNK, MOST), LENGTH)
    return bounded_times(predictor, cluster, own, Engine())[0], found.cache_bytes, found.request_bytes


def tables(setups: Iterable[Setup]) -> dict[Setup, tuple[Times, float, float] | str]:
    """Step times of every set-up, or why there are none."""
    predictor = nj.load_predictor("tensorcore")
    out: dict[Setup, tuple[Times, float, float] | str] = {}
    for setup in setups:
        try:
            out[setup] = table(setup, predictor)
        except InputError as error:
            out[setup] = re.sub(r"\d+", "N", str(error))[:90]
    return out


@dataclass(frozen=True)
class Batch:
    """Rows stacked for one program: step times of each, what is asked, requests held, and how many run at most; of
    disaggregated ones also of the replicas that prefill, seconds of a transfer, and how many there are of both."""

    times: Times
    asked: Demand
    load: np.ndarray
    most: np.ndarray
    pools: tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray] | None = None


def stacked(frame: pd.DataFrame, found: Mapping[Setup, Any]) -> Batch:
    """All rows, aggregated or not, for one program."""
    own = [found[setup] for setup in frame["setup"]]
    lengths = [Lengths(*each) for each in zip(frame["input"], frame["output"], strict=True)]
    chunks = int(-(-frame["input"].max() // CHUNK))
    polls = [Options(CHUNK, MOST, poll_steps=int(each)) for each in frame["polls"]]
    asked = [demand(each, own, most_chunks=chunks) for each, own in zip(lengths, polls, strict=True)]
    most = [min(MOST, max(_room(each, length.mean_context), 1.0)) for each, length in zip(own, lengths, strict=True)]
    rows = jax.tree.map(lambda *each: np.stack([np.asarray(one, np.float32) for one in each]), *asked)
    pools = None
    if frame["prefill"].notna().all():
        sent = [_transfer_s(each, found) for each in frame.to_dict("records")]
        counts = (frame[name].to_numpy(np.float32) for name in ("prefill_replicas", "decode_replicas"))
        pools = (_tables([found[each] for each in frame["prefill"]]), np.array(sent, np.float32), *counts)
    times = Times(_tables(own), Engine(), own[0][0].axes)
    return Batch(times, rows, frame["load"].to_numpy(np.float32), np.array(most), pools)


def _tables(own: list[Any]) -> dict[str, Any]:
    return {name: np.stack([each[0].tables[name] for each in own]) for name in own[0][0].tables}


def _room(found: tuple[Times, float, float], context: float) -> float:
    """Requests of this mean length whose KV cache fits."""
    return found[1] / found[2] * LENGTH / context


def _transfer_s(row: Mapping[str, Any], found: Mapping[Setup, Any]) -> float:
    """Seconds that the KV cache of a prompt takes to the replica that decodes."""
    setups = row["prefill"], row["setup"]
    gpus = sum(each.tensor * row[f"{name}_replicas"] for each, name in zip(setups, ("prefill", "decode"), strict=True))
    sent = max(found[each][2] for each in setups) * row["input"] / LENGTH
    return sent / link_bytes_per_s(load_cluster(f"{gpus}x {SYSTEMS[row['system']]}"), gpus)


@jax.jit
def _forecast(engine: Engine, waves: Any, rows: Any) -> Any:
    def one(wave: Any, times: Times, asked: Demand, load: Any, most: Any, pools: Any) -> Any:
        own = engine.replace(wave=wave)
        times = Times(times.tables, own, times.axes)
        if pools is None:
            state = steady(times, asked, load, most)
        else:
            first, *rest = pools
            sent, *counts = rest
            state = pooled(Times(first, own, times.axes), times, asked, load, sent, most, *counts)
        return jnp.stack([state.tpot_s, state.ttft_s])

    times, *rest = rows
    return jax.vmap(lambda wave, tables, *each: one(wave, Times(tables, engine, times.axes), *each))(
        waves, times.tables, *rest
    )


def forecast(rows: Batch, engine: Engine, waves: np.ndarray) -> np.ndarray:
    """TPOT and TTFT of every row, seconds [row, 2], with the share of its arrivals that come all at once."""
    return np.asarray(_forecast(engine, waves, (rows.times, rows.asked, rows.load, rows.most, rows.pools)))


def fit(rows: Batch, frame: pd.DataFrame, weights: np.ndarray) -> tuple[Engine, dict[str, float]]:
    """Numbers of an engine, and the wave of each load generator, on rows of some weight, by absolute errors in
    logarithms under their priors."""
    from scipy.optimize import minimize

    names = [*(name for name in WIDTHS if name != "wave"), *GENERATORS]
    prior = np.log([float(np.asarray(getattr(Engine(), name, Engine().wave))) for name in names])
    widths = np.array([WIDTHS.get(name, WIDTHS["wave"]) for name in names])
    measured, generators = frame[list(TARGETS)].to_numpy(), frame["generator"].to_numpy()

    def values(raw: np.ndarray) -> tuple[Engine, dict[str, float]]:
        every = {name: float(np.exp(each)) for name, each in zip(names, raw, strict=True)}
        waves = {name: min(every.pop(name), 1.0) for name in GENERATORS}
        return Engine(**every), waves

    def loss(raw: np.ndarray) -> float:
        engine, waves = values(raw)
        found = forecast(rows, engine, np.array([waves[each] for each in generators], np.float32))
        error = np.abs(np.log(found / measured)) * weights[:, None]
        return float(np.nansum(error) / weights.sum() + 0.01 * np.sum(((raw - prior) / widths) ** 2))

    best = minimize(loss, prior, method="Nelder-Mead", options={"maxiter": 400, "xatol": 0.01, "fatol": 1e-4})
    return values(best.x)


def scores(frame: pd.DataFrame, found: np.ndarray) -> pd.DataFrame:
    """Median and mean absolute errors in percent, by part of the rows."""
    rows = []
    pools = frame["prefill"].notna()
    development = frame["system"].isin(DEVELOPMENT) & ~pools
    parts = {"development": development, "test": ~development & ~pools, "disaggregated": pools}
    for part, chosen in parts.items():
        for loads, few in (("at most 8", frame["load"] <= 8), ("all", frame["load"] > 0)):
            own = (chosen & few).to_numpy()
            entry: dict[str, Any] = {"part": part, "concurrency": loads, "rows": int(own.sum())}
            for at, name in enumerate(TARGETS):
                ratio = found[own, at] / frame[name].to_numpy()[own]
                entry[f"{name} median"] = round(float(np.median(np.abs(ratio - 1))) * 100, 1)
                entry[f"{name} mean"] = round(float(np.mean(np.abs(ratio - 1))) * 100, 1)
                entry[f"{name} bias"] = round(float(np.median(ratio) - 1) * 100, 1)
            rows.append(entry)
    return pd.DataFrame(rows)


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
    found, _ = forecasts(frame, tabled, fitted=asked.fit)
    print(scores(frame, found).to_string(index=False))
    for reason, count in reasons.most_common():
        print(f"left out {count}: {reason}")
    if asked.rows is not None:
        for at, name in enumerate(TARGETS):
            frame[f"{name}_forecast"] = found[:, at]
        frame.drop(columns=["setup", "prefill"]).to_csv(asked.rows, index=False)


def forecasts(
    frame: pd.DataFrame, tabled: Mapping[Setup, Any], *, fitted: bool
) -> tuple[np.ndarray, dict[str, tuple[Engine, dict[str, float]]]]:
    """TPOT and TTFT of every row by the numbers of its engine and load generator, which come too; `fitted` here on
    development rows, or those that ship."""
    pools = frame["prefill"].notna().to_numpy()
    development = frame["system"].isin(DEVELOPMENT).to_numpy() & ~pools
    found, numbers = np.full((len(frame), 2), np.nan), {}
    for name, engine in ENGINES.items():
        backend = (frame["backend"] == name).to_numpy()
        numbers[name] = engine, WAVES[name]
        if fitted:
            own = frame[backend & development].reset_index(drop=True)
            numbers[name] = fit(stacked(own, tabled), own, np.ones(len(own)))
            print(name, *numbers[name], flush=True)
        for part in (backend & ~pools, backend & pools):
            own = frame[part].reset_index(drop=True)
            if len(own):
                engine, waves = numbers[name]
                found[part] = forecast(
                    stacked(own, tabled), engine, np.array([waves[each] for each in own["generator"]], np.float32)
                )
    return found, numbers


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
