"""Fit the law of `model.power` to measured watts, and score it on machines left out.

    python -m benchmarks.power_law MEASUREMENTS_FOLDER

Reads `power/`: kernels of B200 and GB200, whole models on an A100 at locked clocks, chat servers on an H100, and an RTX
3090 under caps. Prints errors of watts by what was left out, the 3090's speed and watts over its caps and the A100's
slopes by clock, each from a fit without that board, the constants, and errors on this repository's kernels and whole
models of an H200, which are in no fit.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import neusight_jax as nj
from neusight_jax.datasets.aiconfigurator import RULES, Rule
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.datasets.row_checks import MODES
from neusight_jax.graph.configs.config import load_model_config
from neusight_jax.graph.graph import Graph
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.power import FLOP_A_LANE, PICOJOULE, PowerLaw, at_clock
from neusight_jax.training.power import (
    ENERGIES,
    REGULATED,
    SHORTEST_S,
    Measured,
    errors,
    fit_power,
    joules_of,
    measured_kernels,
)

KERNELS: tuple[tuple[str, str, str | None, str | None], ...] = (
    ("gemm", "gemm_bf16", "gemm_dtype", "bfloat16"),
    ("gemm", "gemm_fp8", "gemm_dtype", "fp8"),
    ("gemm", "gemm_fp4", "gemm_dtype", "nvfp4"),
    ("context_attention", "prefill", "attn_dtype", "bfloat16"),
    ("context_attention", "prefill", "attn_dtype", "fp8"),
    ("generation_attention", "decode", None, None),
    ("moe", "experts_bfloat16", "moe_dtype", "bfloat16"),
    ("moe", "experts_fp8_block", "moe_dtype", "fp8"),
    ("moe", "experts_nvfp4", "moe_dtype", "nvfp4"),
    ("computescale", "quantize", None, None),
    ("scale_matrix", "quantize", None, None),
)
"""Tables taken: the rule of the import that reads one, and the column and dtype of its rows. Products in fp8 by blocks
are left out: their host bounds them."""
ROWS = 2500
"""Rows taken of each table and GPU."""
MODELS = {
    "optmodel_opt-1p3b": ("opt-1.3b", "OPTModel"),
    "bertmodel_large": ("bert-large", "BertModel"),
    "gpt2model_gpt2": ("gpt2", "GPT2Model"),
    "vitmodel_large": ("vit-large", "ViTModel"),
    "qwen2model_qwen2-1p5b": ("qwen2-1.5b", "Qwen2Model"),
}
"""Beginning of a workload's name: the model, and its class, which has no head."""
A100, H100, RTX_3090 = "NVIDIA A100-PCIE-40GB", "H100", "RTX 3090"


def of_step(predictor: Any, gpu: Any, graph: Any) -> tuple[np.ndarray, float]:
    """Joules of a graph's kernels for each constant of `ENERGIES` at 1 [constant], and their seconds."""
    table = graph.kernels
    seconds = kernel_latency(predictor, gpu, table)
    count = in_row_order(table, {name: np.asarray(batch.count) for name, batch in table.families.items()})
    cost = in_row_order(table, {name: np.asarray(each) for name, each in seconds.items()}) * count
    return joules_of(gpu, table, seconds) @ count, float(cost.sum())


RELEASES = (
    "an older version measured again later",
    "another version",
    "another kernel; fp8_block is bound by its host",
)
"""Reasons of the import that do not hold here: all watts are of one release, which names its kernels otherwise."""


def forecast_alone(rows: pd.DataFrame, rule: Rule) -> pd.DataFrame:
    """Rows of the kernels that forecasts are of: those that the import would take."""
    for reason, query in rule.keep.items():
        if reason not in RELEASES:
            rows = rows.query(query, engine="python")
    return rows


def kernels(folder: Path, device: str, name: str, *, every: bool = False) -> Measured:
    """Kernels of one GPU, each measured alone.

    Args:
      folder: with the rows.
      device: as they name it.
      name: of it in the catalog.
      every: also kernels that no forecast is of: other frameworks', caches in eight bits, uneven experts.
    """
    frame = pd.read_parquet(folder / "kernels.parquet")
    frame = frame[(frame.device == device) & (frame.latency_s >= SHORTEST_S) & (frame.power_w > IDLE_W)]
    frame = frame.assign(window_size=frame.window_size.fillna(0))
    rules, parts = {rule.name: rule for rule in RULES}, []
    for table, rule, column, dtype in KERNELS:
        rows = frame[(frame.table == table) & (True if column is None else frame[column] == dtype)]
        rows = rows if every else forecast_alone(rows, rules[rule])
        rows = rows.sample(min(ROWS, len(rows)), random_state=0)
        sizes = pd.DataFrame({key: rows.eval(text, engine="python") for key, text in rules[rule].columns.items()})
        sizes = sizes.assign(power_w=rows.power_w, power_limit_w=rows.power_limit_w)
        parts += [sizes[sizes.notna().all(axis=1)]] if len(sizes) else []
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / f"{at}.parquet" for at in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            part.assign(device=name, latency_s=1.0).to_parquet(file)
        read = read_measurements(files).frame
    return measured_kernels(nj.load_predictor("tensorcore"), nj.load_gpu(name), read)


OWN = Path(__file__).resolve().parents[1] / "measurements" / "h200-watts"
"""Kernels of an H200 that PyTorch launched, measured here."""
UNSEEN = {"fp32": "fp32-heldout", "tensorcore": "tensorcore-heldout-hopper"}
"""Weights that no Hopper is in: those that ship have seen engines' kernels on an H200."""


def launched(*, every: bool = False) -> Measured:
    """The same of kernels that PyTorch launches.

    Args:
      every: also attention over a cache, which forecasts are of as engines run it.
    """
    frame, gpu = read_measurements(OWN).frame, nj.load_gpu("H200")
    frame = frame[every | (frame.family != "decode")]
    frame = frame.assign(clock_hz=np.nan)  # forecast seconds hold the clock that a board settles at
    eager = (frame.dtype == "fp32").to_numpy()
    parts = [
        measured_kernels(nj.load_predictor(UNSEEN[name]), gpu, frame[rows].reset_index(drop=True))
        for name, rows in (("fp32", eager), ("tensorcore", ~eager))
    ]
    columns = zip(*(part[:-1] for part in parts), strict=True)
    return Measured(*(np.concatenate(column, axis=-1) for column in columns), gpu)


def launched_steps(law: PowerLaw) -> pd.DataFrame:
    """Whole models as PyTorch runs them on an H200, with transformers: forecast and measured."""
    gpu, rows = nj.load_gpu("H200"), []
    for row in pd.read_csv(OWN / "models" / "end_to_end.csv", dtype={"mode": str}).itertuples():
        own = row.dtype == "fp32"
        predictor = dataclasses.replace(nj.load_predictor(UNSEEN["fp32" if own else "tensorcore"]), power=law)
        execution = "compiled" if row.option == "fusion" else "eager"
        sizes = (row.batch_size, row.sequence_length, MODES[row.mode], row.dtype)
        step = nj.predict(predictor, gpu, nj.graph_from_config(row.model, *sizes, execution=execution))
        joules = row.power_w * row.e2e_s
        rows.append((row.model, step.total_s, row.e2e_s, step.power_w, row.power_w, step.energy_j, joules))
    names = ["model", "seconds", "measured_seconds", "watts", "measured_watts", "joules", "measured_joules"]
    return pd.DataFrame(rows, columns=names)


NEAR_MHZ = 120.0
"""The clock of least joules is met so near: a step of the locks is 90 MHz."""
FAULTY = ("qwen2model_qwen2-1p5b_pbf16_b8_s4096_modeprefill_attneager",)
"""Faults of the source: eight sequences of 4,096 tokens cannot take less than four of 2,048, at 61 W."""
IDLE_W = 50.0
"""A board that draws less was not measured."""
IDLE_STEP = 1.1
"""A step that takes no longer than the fastest of its model, over this, is bound by its host."""


def whole_models(folder: Path) -> pd.DataFrame:
    """Measured steps of models that are known here, with the parts of their names."""
    frame = pd.read_csv(folder / "models_by_clock.csv")
    pattern = (
        r"(?P<name_>.+?)_+p(?P<dtype_>bf16|fp32)_b(?P<batch>\d+)(?:_s(?P<length>\d+))?(?:_modeprefill)?(?:_attneager)?$"
    )
    frame = frame.join(frame.workload.str.extract(pattern))
    frame = frame[frame.name_.isin(MODELS)]
    return frame[~frame.workload.isin(FAULTY)]


def eager(row: Any) -> tuple[Any, Any]:
    """The graph of a measured step that PyTorch ran operator by operator, and the predictor of its dtype."""
    tokens = IMAGE_TOKENS if pd.isna(row.length) else int(row.length)
    name, architecture = MODELS[row.name_]
    config = {**load_model_config(name), "architectures": [architecture]}
    graph = nj.graph_from_config(config, int(row.batch), tokens, "inference", row.dtype_, execution="eager")
    own = row.dtype_ == "fp32" and name not in ("vit-large", "qwen2-1.5b")
    return graph, nj.load_predictor("fp32" if own else "tensorcore")


def models(folder: Path, without: Collection[str] = ()) -> Measured:
    """Whole models on an A100 at locked clocks, run operator by operator, but for some workloads."""
    frame, gpu, parts = whole_models(folder), nj.load_gpu(A100), []
    fastest = frame.groupby("name_").step_s.transform("min")
    frame = frame.assign(hosted=frame.step_s < IDLE_STEP * fastest)
    frame = frame[~frame.workload.isin(without)]
    for _, rows in frame.groupby("workload"):
        graph, predictor = eager(rows.iloc[0])
        for row in rows.itertuples():
            share = row.clock_mhz * 1e6 / float(gpu.clock_hz)
            joules, seconds = of_step(predictor, at_clock(gpu, share), graph)
            # Where the host bounds a step its kernels take what they take; else they take all of it.
            joules[:BUSY] *= min(1.0, row.step_s / seconds) if row.hosted else row.step_s / seconds
            group = f"{MODELS[row.name_][0]} {row.dtype_}"
            parts.append((joules, row.step_s, 0.0, row.power_w, share, REGULATED * gpu.tdp_w, group))
    columns = [np.array(column) for column in zip(*parts, strict=True)]
    return Measured(columns[0].T, *columns[1:], gpu)


SERVED = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}
BUSY = 4
"""Rows of `ENERGIES` that are of busy lanes: energies of their time."""
IMAGE_TOKENS = 197
"""Of ViT: patches of a picture and one more."""
PROMPT_TOKENS = 200
"""Of a chat; the source says about 100 to 500."""
PROMPT_SHARE = 0.5
"""Share of the peak that prompts between the steps of a server reach."""


def served(folder: Path) -> Measured:
    """Decode steps of chat servers on one H100, at their mean batch and measured time."""
    frame, gpu = pd.read_csv(folder / "serving_energy.csv"), nj.load_gpu(H100)
    predictor, parts = nj.load_predictor("tensorcore"), []
    frame = frame[(frame.num_gpus == 1) & (frame.weight_precision == "bfloat16") & frame.model_id.isin(SERVED)]
    for row in frame.itertuples():
        batch, context = max(1, round(row.avg_batch_size)), PROMPT_TOKENS + int(row.avg_output_len / 2.0)
        graph = nj.graph_from_config(SERVED[row.model_id], batch, context, "decode", "bf16")
        joules, seconds = of_step(predictor, gpu, graph)
        step_s = max(row.median_itl_ms * 1e-3, seconds)
        rest = step_s - seconds  # prompts of other chats
        joules[ENERGIES.index("product_pj")] += PICOJOULE * rest * gpu.fp32_flop_per_s / FLOP_A_LANE
        joules[ENERGIES.index("flop16_pj")] += rest * PROMPT_SHARE * gpu.bf16_flop_per_s * PICOJOULE
        parts.append((joules, step_s, 0.0, row.avg_power_watts, 1.0, REGULATED * gpu.tdp_w, row.model_id))
    columns = [np.array(column) for column in zip(*parts, strict=True)]
    return Measured(columns[0].T, *columns[1:], gpu)


CAPPED: dict[str, tuple[str, str, str]] = {
    "3090-a3b-decode:data": ("qwen3-30b-a3b", "decode", "Q4_K_M"),
    "3090-a3b-prefill:data": ("qwen3-30b-a3b", "prefill", "Q4_K_M"),
    "3090-prefill:data": ("qwen3-32b", "prefill", "Q3_K_M"),
    "3090-qwen36:data": ("qwen3-32b", "decode", "Q3_K_M"),
}
"""Series of the RTX 3090 in llama.cpp, and a model of about their size; the source's own are not here."""


def capped_graph(series: str) -> Graph:
    """A step of a series."""
    model, mode, weights = CAPPED[series]
    return nj.graph_from_config(model, 1, 2048, mode, "fp16", weight_dtype=weights, engine="llama.cpp")


def clocked(folder: Path, chosen: Collection[str] = tuple(CAPPED), points: int | None = None) -> Measured:
    """The RTX 3090 at the clocks that it settled at under its caps, of some series, at all points or so many."""
    frame, gpu = pd.read_csv(folder / "caps_rtx3090.csv"), nj.load_gpu(RTX_3090)
    predictor, parts = nj.load_predictor("tensorcore"), []
    for series in chosen:
        graph, rows = capped_graph(series), frame[frame.series == series].sort_values("cap_w")
        taken = np.linspace(0, len(rows) - 1, points or len(rows)).round().astype(int)
        for row in rows.iloc[taken].itertuples():
            share = row.sm_clock_mhz * 1e6 / float(gpu.clock_hz)
            joules, seconds = of_step(predictor, at_clock(gpu, share), graph)
            parts.append((joules, seconds, 0.0, row.drawn_w, share, UNLIMITED_W, series))
    columns = [np.array(column) for column in zip(*parts, strict=True)]
    return Measured(columns[0].T, *columns[1:], gpu)


UNLIMITED_W = 1e6
"""Where the clock was measured, the cap is in it."""


POINTS = 10
"""Of a series, where it is fitted too."""


def capped(folder: Path, law: PowerLaw, chosen: Collection[str] = tuple(CAPPED)) -> pd.DataFrame:
    """Speed over that at the highest cap, and watts, forecast and measured, of the RTX 3090 at every cap."""
    frame, gpu = pd.read_csv(folder / "caps_rtx3090.csv"), nj.load_gpu(RTX_3090)
    predictor = dataclasses.replace(nj.load_predictor("tensorcore"), power=law)  # type: ignore[type-var]
    parts = []
    for series in chosen:
        graph = capped_graph(series)
        rows = frame[frame.series == series].sort_values("cap_w")
        steps = [nj.predict(predictor, gpu.replace(power_limit_w=float(cap)), graph) for cap in rows.cap_w]
        parts.append(
            rows.assign(
                speed=[steps[-1].total_s / step.total_s for step in steps],
                measured_speed=rows.tokens_per_s / rows.tokens_per_s.iloc[-1],
                watts=[step.power_w for step in steps],
            )
        )
    return pd.concat(parts, ignore_index=True)


def locked_workloads(folder: Path) -> list[str]:
    """Workloads that were measured at every locked clock."""
    frame = whole_models(folder)
    return sorted(frame[frame["set"] == "dvfs"].workload.unique())


def by_clock(folder: Path, law: PowerLaw, workloads: Collection[str]) -> pd.DataFrame:
    """Workloads on an A100 at every locked clock: seconds and joules, forecast and measured."""
    frame, gpu = whole_models(folder), nj.load_gpu(A100)
    rows = []
    for workload, points in frame[(frame["set"] == "dvfs") & frame.workload.isin(workloads)].groupby("workload"):
        graph, predictor = eager(points.iloc[0])
        predictor = dataclasses.replace(predictor, power=law)
        for point in points.itertuples():
            step = nj.predict(predictor, gpu.replace(clock_limit_hz=point.clock_mhz * 1e6), graph)
            rows.append((workload, point.clock_mhz, step.total_s, point.step_s, step.energy_j, point.energy_j))
    return pd.DataFrame(rows, columns=["workload", "clock_mhz", "seconds", "measured_s", "joules", "measured_j"])


def simple(data: Measured, other: Measured) -> tuple[float, float]:
    """Errors of two answers without a law: the board is at its limit; the share of it that the other's rows have."""
    shares = pd.Series(other.watts / other.limit_w).groupby(other.group).median()
    at_limit = np.abs(data.limit_w / data.watts - 1.0)
    as_other = np.abs(data.limit_w * shares.reindex(data.group).to_numpy() / data.watts - 1.0)
    return float(at_limit.mean()), float(np.nanmean(as_other))


def elasticity(points: pd.DataFrame, column: str) -> float:
    """Slope of a logarithm by that of the clock."""
    return float(np.polyfit(np.log(points.clock_mhz), np.log(points[column]), 1)[0])


def main() -> None:
    """Fit and print."""
    folder = Path(sys.argv[1]) / "power"
    data = {
        "B200": kernels(folder, "B200", "NVIDIA B200"),
        "GB200": kernels(folder, "GB200", "NVIDIA GB200"),
        "A100": models(folder),
        "H100": served(folder),
        "RTX 3090": clocked(folder),
    }
    laws = {out: fit_power([measured for name, measured in data.items() if name != out]) for out in data}
    for out, law in laws.items():
        missed = errors(law, data[out])
        print(f"{out} left out: mean {missed.mean():.1%}, median {missed.median():.1%}")
        print("  " + ", ".join(f"{group} {value:.0%}" for group, value in missed.groupby(level=0).mean().items()))
        if out in ("B200", "GB200"):
            missed = errors(law, kernels(folder, out, f"NVIDIA {out}", every=True))
            print(
                f"  all tables, what no forecast is of included: mean {missed.mean():.1%}, median {missed.median():.1%}"
            )
    for out, other in (("B200", "GB200"), ("GB200", "B200")):
        at_limit, as_other = simple(data[out], data[other])
        print(f"{out} at its limit: {at_limit:.1%}; by the median of {other}: {as_other:.1%}")
    everything = fit_power(list(data.values()))
    for name, measured in data.items():
        missed = errors(everything, measured)
        print(f"{name}, all fitted: mean {missed.mean():.1%}, median {missed.median():.1%}")
    print(everything)
    caps = capped(folder, laws["RTX 3090"])
    speed, drawn = caps.speed / caps.measured_speed - 1.0, caps.watts / caps.drawn_w - 1.0
    print(f"RTX 3090 under caps, left out: speed {speed.abs().mean():.1%}, watts {drawn.abs().mean():.1%}")
    print(speed.abs().groupby(caps.series).mean().to_string(float_format="{:.3f}".format))
    boards = [measured for name, measured in data.items() if name != "RTX 3090"]
    for series in CAPPED:
        caps = capped(folder, fit_power([*boards, clocked(folder, [series], POINTS)]), [series])
        speed = caps.speed / caps.measured_speed - 1.0
        print(f"  with {POINTS} points of it, {series}: speed {speed.abs().mean():.1%}")
    workloads = locked_workloads(folder)
    print_locked("left out", by_clock(folder, laws["A100"], workloads))
    halves = []
    for half in (workloads[::2], workloads[1::2]):
        law = fit_power([*(measured for name, measured in data.items() if name != "A100"), models(folder, half)])
        halves.append(by_clock(folder, law, half))
    print_locked("fitted on the other half of the workloads", pd.concat(halves))
    for kinds, measured in (("", launched()), (", attention over a cache included", launched(every=True))):
        missed = errors(everything, measured)
        print(f"H200, in no fit{kinds}: mean {missed.mean():.1%}, median {missed.median():.1%}")
        print("  " + ", ".join(f"{group} {value:.0%}" for group, value in missed.groupby(level=0).mean().items()))
    steps = launched_steps(everything)
    for each in ("seconds", "watts", "joules"):
        off = (steps[each] / steps[f"measured_{each}"] - 1.0).abs()
        print(f"H200, whole models, in no fit: {each} {off.mean():.1%}, median {off.median():.1%}")


def print_locked(how: str, locked: pd.DataFrame) -> None:
    """Errors of whole models over locked clocks."""
    seconds, joules = locked.seconds / locked.measured_s - 1.0, locked.joules / locked.measured_j - 1.0
    runs = [points for _, points in locked.groupby("workload")]
    off = [abs(elasticity(points, "seconds") - elasticity(points, "measured_s")) for points in runs]
    best = [
        abs(points.clock_mhz[points.joules.idxmin()] - points.clock_mhz[points.measured_j.idxmin()])
        for points in (points.reset_index(drop=True) for points in runs)
    ]
    near = float(np.mean(np.array(best) <= NEAR_MHZ))
    print(f"A100 at locked clocks, {how}: seconds {seconds.abs().mean():.1%}, joules {joules.abs().mean():.1%}")
    print(f"  elasticity of seconds off by {np.mean(off):.2f}; clock of least joules within 120 MHz of {near:.0%}")


if __name__ == "__main__":
    main()
