"""Forecasts of whole servers against public measurements: `silicon_sample.csv` of the package aiconfigurator-core.

    python -m benchmarks.serving_sample [--fit] [--rows FILE.csv]

Aggregated rows: time to the first token and time of a further one at a load generator's concurrency. H100 and H200 are
development, which the numbers of `Engine` are fitted on (`--fit`); all other GPUs are test. Rows left out are counted
by reason. Nothing of the file is copied; it is read from the installed package.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
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
from neusight_jax.cluster_file import load_cluster
from neusight_jax.errors import InputError
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.serving.capacity import capacity
from neusight_jax.serving.engine import LEARNED, WIDTHS, Engine, Options
from neusight_jax.serving.steady import Demand, Lengths, demand, steady
from neusight_jax.serving.steps import Axes, Model, axes, load_model, steps
from neusight_jax.serving.times import Times, bounded_times

SYSTEMS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "NVIDIA B200",
    "b300_sxm": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
}
DEVELOPMENT = ("h100_sxm", "h200_sxm")
CONFIGS = {
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama--Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama--Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen--Qwen3-32B",
    "zhipuai/GLM-5": "zai-org--GLM-5",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai--DeepSeek-R1",
}
"""Config files of models that the package has under another name."""
FOUR_BIT = {
    "deepseek-ai/DeepSeek-R1": "nvidia--DeepSeek-V3.1-NVFP4",
    "nvidia/DeepSeek-R1-NVFP4": "nvidia--DeepSeek-V3.1-NVFP4",
    "nvidia/DeepSeek-V3.1-NVFP4": "nvidia--DeepSeek-V3.1-NVFP4",
    "deepseek-ai/DeepSeek-V3": "nvidia--DeepSeek-V3.1-NVFP4",
    "MiniMaxAI/MiniMax-M2.5": "nvidia--MiniMax-M2.5-NVFP4",
    "Qwen/Qwen3.5-397B-A17B": "nvidia--Qwen3.5-397B-A17B-NVFP4",
    "zhipuai/GLM-5": "nvidia--GLM-5-NVFP4",
    "moonshotai/Kimi-K2.5": "nvidia--Kimi-K2.6-NVFP4",
}
"""Config files of models in nvfp4, which say layer by layer what is narrow."""
NATIVE = ("openai/gpt-oss-120b",)
"""Models whose config has their quantization, whatever a row says of it."""
CHUNK, MOST, LENGTH = 8192, 1024, 16384
"""Tokens of a step and running requests of all engines, larger loads are left out; longest sequence of a table."""
TARGETS = ("tpot", "ttft")


@dataclass(frozen=True)
class Setup:
    """What one table of step times is of."""

    model: str
    quantization: str
    system: str
    tensor: int
    expert: int


def folder() -> Path:
    """The installed package."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise InputError("aiconfigurator_core is not installed; pip install '.[aiconfigurator]'")
    return Path(found.origin).parent


def read() -> tuple[pd.DataFrame, Counter[str]]:
    """Aggregated rows that can be forecast, with their set-up, and reasons of the others."""
    frame = pd.read_csv(folder() / "systems" / "silicon_sample.csv", dtype=str, keep_default_na=False)
    kept, reasons = [], Counter[str]()
    for values in frame.to_dict("records"):
        found = row(values)
        if isinstance(found, str):
            reasons[found] += 1
        else:
            kept.append(found)
    return pd.DataFrame(kept), reasons


def row(values: Mapping[str, str]) -> dict[str, Any] | str:
    """A row of the file as what is forecast, or why it is not."""
    if values["mode"] != "agg":
        return "disaggregated prefill and decode"
    tensor, expert, split, data = (
        int(values[name] or 0) for name in ("tp_size", "moe_ep_size", "moe_tp_size", "attention_dp_size")
    )
    if data > 1:
        return "attention is data parallel"
    if expert > 1 and split > 1 and tensor == expert * split == expert**2:
        tensor, split = expert, 1  # written as a product; the row's id has TP and EP
    if expert > 1 and expert != tensor:
        return "experts are split both ways"
    if tensor > 8:
        return "a replica of more than 8 GPUs"
    said = re.search(r"silicon_concurrency=(\d+)", values["silicon_data_source"])
    load = int(said[1]) if said else int(values["batch_size"])
    if load > MOST:
        return f"more than {MOST:,} requests at once"
    lengths = int(values["isl"]), int(values["osl"])
    quantization = values["gemm_quant_mode"].replace("_block", "") or "bf16"
    setup = Setup(values["model_path"], quantization, values["system"], tensor, max(expert, 1))
    return {
        **vars(setup),
        "setup": setup,
        "backend": values["backend"],
        "input": lengths[0],
        "output": lengths[1],
        "load": load,
        "ttft": float(values["silicon_ttft_ms"]) / 1e3,
        "tpot": float(values["silicon_tpot_ms"]) / 1e3,
        "id": values["id"],
    }


@functools.cache
def model_of(name: str, quantization: str) -> Model:
    """The model of a row."""
    place = folder() / "model_configs"
    file = CONFIGS.get(name, name.replace("/", "--"))
    if quantization == "nvfp4" and name not in NATIVE:
        file = FOUR_BIT.get(name, file)
    path = place / f"{file}_config.json"
    if not path.exists():
        raise InputError(f"no config of {name}")
    if name in NATIVE or quantization == "int4_wo" or file in FOUR_BIT.values():
        return load_model(path)
    dtype = {"nvfp4": "fp4"}.get(quantization, quantization)
    return load_model(path, dtype, weight_dtype="fp4" if dtype == "fp4" else None)


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
    """Rows stacked for one program: step times of each, what is asked, requests held, and how many run at most."""

    times: Times
    asked: Demand
    load: np.ndarray
    most: np.ndarray


def stacked(frame: pd.DataFrame, found: Mapping[Setup, Any]) -> Batch:
    """All rows for one program."""
    own = [found[setup] for setup in frame["setup"]]
    tables = {name: np.stack([each[0].tables[name] for each in own]) for name in own[0][0].tables}
    options = Options(CHUNK, MOST)
    lengths = [Lengths(*each) for each in zip(frame["input"], frame["output"], strict=True)]
    chunks = int(-(-frame["input"].max() // CHUNK))
    asked = [demand(each, options, most_chunks=chunks) for each in lengths]
    most = [
        min(MOST, max(room / one * LENGTH / each.mean_context, 1.0))
        for (_, room, one), each in zip(own, lengths, strict=True)
    ]
    rows = jax.tree.map(lambda *each: np.stack([np.asarray(one, np.float32) for one in each]), *asked)
    return Batch(Times(tables, Engine(), own[0][0].axes), rows, frame["load"].to_numpy(np.float32), np.array(most))


@jax.jit
def _forecast(engine: Engine, batch_times: Times, asked: Demand, load: Any, most: Any) -> Any:
    def one(tables: Any, asked: Demand, load: Any, most: Any) -> Any:
        state = steady(Times(tables, engine, batch_times.axes), asked, load, most)
        return jnp.stack([state.tpot_s, state.ttft_s])

    return jax.vmap(one)(batch_times.tables, asked, load, most)


def forecast(rows: Batch, engine: Engine) -> np.ndarray:
    """TPOT and TTFT of every row, seconds [row, 2]."""
    return np.asarray(_forecast(engine, rows.times, rows.asked, rows.load, rows.most))


def fit(rows: Batch, frame: pd.DataFrame, weights: np.ndarray) -> Engine:
    """Numbers of an engine on rows of some weight, by absolute errors in logarithms under their priors."""
    from scipy.optimize import minimize

    names = list(WIDTHS)
    start = {name: max(float(np.asarray(getattr(LEARNED, name))), 0.05) for name in ("wave",)}
    prior = np.log([start.get(name, float(np.asarray(getattr(Engine(), name)))) for name in names])
    widths = np.array([WIDTHS[name] for name in names])
    measured = frame[list(TARGETS)].to_numpy()

    def loss(raw: np.ndarray) -> float:
        engine = Engine(**{name: float(np.exp(each)) for name, each in zip(names, raw, strict=True)})
        found = forecast(rows, engine)
        error = np.abs(np.log(found / measured)) * weights[:, None]
        return float(np.nansum(error) / weights.sum() + 0.01 * np.sum(((raw - prior) / widths) ** 2))

    best = minimize(loss, prior, method="Nelder-Mead", options={"maxiter": 300, "xatol": 0.01, "fatol": 1e-4}).x
    return Engine(**{name: float(np.exp(each)) for name, each in zip(names, best, strict=True)})


def scores(frame: pd.DataFrame, found: np.ndarray) -> pd.DataFrame:
    """Median and mean absolute errors in percent, by part of the rows."""
    rows = []
    development = frame["system"].isin(DEVELOPMENT)
    for part, chosen in (("development", development), ("test", ~development)):
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


def prepared() -> tuple[pd.DataFrame, Batch, Counter[str], dict[Setup, Any]]:
    """Rows that can be forecast, grouped, and why others cannot."""
    frame, reasons = read()
    found = tables(dict.fromkeys(frame["setup"]))
    for setup in frame["setup"]:
        if isinstance(found[setup], str):
            reasons[found[setup]] += 1
    frame = frame[[not isinstance(found[setup], str) for setup in frame["setup"]]].reset_index(drop=True)
    return frame, stacked(frame, found), reasons, found


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the numbers of Engine on development rows")
    parser.add_argument("--rows", type=Path, help="write every row with its forecast")
    asked = parser.parse_args()
    frame, rows, reasons, _ = prepared()
    engine = LEARNED
    if asked.fit:
        engine = fit(rows, frame, frame["system"].isin(DEVELOPMENT).to_numpy(float))
        print(engine)
    found = forecast(rows, engine)
    print(scores(frame, found).to_string(index=False))
    for reason, count in reasons.most_common():
        print(f"left out {count}: {reason}")
    if asked.rows is not None:
        for at, name in enumerate(TARGETS):
            frame[f"{name}_forecast"] = found[:, at]
        frame.drop(columns="setup").to_csv(asked.rows, index=False)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
