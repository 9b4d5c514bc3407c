"""Fit the law of `model.power` to measured watts, and score it on machines left out.

    python -m benchmarks.power_law MEASUREMENTS_FOLDER

Reads `power/`: kernels of B200 and GB200, whole models on an A100 at locked clocks, and an RTX 3090 under caps, which
no fit sees. Prints errors of watts by what was left out, the 3090's speed and watts over its caps, and the constants.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.optimize import least_squares

import neusight_jax as nj
from neusight_jax.datasets.aiconfigurator_rules import RULES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.power import REFERENCE_NM, PowerLaw, draw_of

KERNELS: tuple[tuple[str, str, str, str], ...] = (
    ("gemm", "gemm_bf16", "gemm_dtype", "bfloat16"),
    ("gemm", "gemm_fp8", "gemm_dtype", "fp8"),
    ("gemm", "gemm_fp4", "gemm_dtype", "nvfp4"),
    ("context_attention", "prefill", "attn_dtype", "bfloat16"),
    ("generation_attention", "decode", "attn_dtype", "bfloat16"),
    ("moe", "experts_bfloat16", "moe_dtype", "bfloat16"),
    ("moe", "experts_nvfp4", "moe_dtype", "nvfp4"),
)
"""Tables taken: the rule of the import that reads one, and the column and dtype of its rows."""
SHORTEST_S = 50e-6
"""Kernels shorter than this have watts of more than themselves in a window of NVML."""
ROWS = 1500
"""Rows taken of each table and GPU."""
MODELS = {
    "optmodel_opt-1p3b": "opt-1.3b",
    "bertmodel_large": "bert-large",
    "gpt2model_gpt2": "gpt2",
    "vitmodel_large": "vit-large",
}
A100 = "NVIDIA A100-PCIE-40GB"
MOVING = (
    "product_share",
    "attention_share",
    "decode_share",
    "stream_share",
    "flop16_pj",
    "flop8_pj",
    "flop4_pj",
    "flop32_pj",
    "dram_pj",
)
"""Constants that watts are linear in: the first of busy SMs, then of arithmetic, the last of memory."""
BUSY = 4
NAMES = tuple(each.name for each in dataclasses.fields(PowerLaw))
NOISE = 0.15
"""Spread of measured over forecast watts beside the law, in logarithms."""


def basis(gpu: nj.GPU, table: KernelTable, seconds: dict[str, Any]) -> np.ndarray:
    """Watts of one launch for each constant of `MOVING` at 1, node and volts left out, [constant, row]."""
    found = []
    for name in MOVING:
        law = PowerLaw(**{**dict.fromkeys(NAMES, 0.0), name: 1.0})
        watts = {}
        for family, batch in table.families.items():
            draw = draw_of(law, gpu, family, batch, jnp.asarray(seconds[family]))
            watts[family] = np.asarray(draw.busy_w + (draw.flop_j + draw.dram_j) / jnp.maximum(draw.seconds, 1e-12))
        found.append(in_row_order(table, watts))
    return np.array(found, np.float64)


def of_step(predictor: Any, gpu: Any, graph: Any) -> tuple[np.ndarray, float]:
    """Joules of a graph's kernels for each constant of `MOVING` at 1 [constant], and their seconds."""
    table = graph.kernels
    seconds = kernel_latency(predictor, gpu, table)
    count = in_row_order(table, {name: np.asarray(batch.count) for name, batch in table.families.items()})
    cost = in_row_order(table, {name: np.asarray(each) for name, each in seconds.items()}) * count
    return basis(gpu, table, seconds) @ cost, float(cost.sum())


def kernels(folder: Path, device: str, name: str) -> dict[str, np.ndarray]:
    """Measured kernels of one GPU: what each constant adds, watts, limits and where they are from."""
    frame, predictor, gpu = (
        pd.read_parquet(folder / "kernels.parquet"),
        nj.load_predictor("tensorcore"),
        nj.load_gpu(name),
    )
    frame = frame[(frame.device == device) & (frame.latency_s >= SHORTEST_S)]
    rules, parts = {rule.name: rule for rule in RULES}, []
    for table, rule, column, dtype in KERNELS:
        rows = frame[(frame.table == table) & (frame[column] == dtype)].assign(window_size=0)
        rows = rows.sample(min(ROWS, len(rows)), random_state=0)
        sizes = pd.DataFrame({key: rows.eval(text, engine="python") for key, text in rules[rule].columns.items()})
        whole = sizes.notna().all(axis=1)
        with tempfile.TemporaryDirectory() as place:
            sizes[whole].to_parquet(Path(place) / "rows.parquet")
            read = nj.read_kernels(Path(place) / "rows.parquet")
        seconds = kernel_latency(predictor, gpu, read, isolated=True)
        own = rows[whole]
        parts.append(
            (basis(gpu, read, seconds), own.power_w.to_numpy(), own.power_limit_w.to_numpy(), [table] * len(own))
        )
    joined = [np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)]
    fixed = {"tdp": gpu.tdp_w, "nm": gpu.process_nm, "share": 1.0, "weight": 0.1}
    return dict(zip(("moving", "watts", "limit", "what"), joined, strict=True)) | fixed  # type: ignore[arg-type]


def models(folder: Path) -> dict[str, np.ndarray]:
    """Whole models on an A100 at locked clocks, kernels as they take their share of the measured step."""
    frame, gpu = pd.read_csv(folder / "models_by_clock.csv"), nj.load_gpu(A100)
    boost, parts = float(gpu.clock_hz), []
    for workload, rows in frame.groupby("workload"):
        read = re.match(r"(.+?)_+p(bf16|fp32)_b(\d+)(?:_s(\d+))?(?:_modeprefill)?(?:_attneager)?$", str(workload))
        if read is None or read[1] not in MODELS:
            continue
        name, dtype = MODELS[read[1]], read[2]
        graph = nj.graph_from_config(name, int(read[3]), int(read[4] or 197), "inference", dtype)
        predictor = nj.load_predictor("fp32" if dtype == "fp32" and "vit" not in name else "tensorcore")
        energy, kernels_s = of_step(predictor, gpu, graph)
        for row in rows.itertuples():
            share = row.clock_mhz * 1e6 / boost
            busy = np.arange(len(MOVING)) < BUSY
            # SMs are busy for as long as the kernels take, arithmetic and memory take their joules in any time.
            part = np.where(busy, share * min(1.0, row.step_s / kernels_s), 1.0) / row.step_s
            parts.append((energy * part, row.power_w, 250.0, share, f"{name} {dtype}"))
    moving, watts, limit, share, what = zip(*parts, strict=True)
    sizes = {"moving": np.array(moving).T, "watts": np.array(watts), "limit": np.array(limit), "share": np.array(share)}
    return sizes | {"what": np.array(what), "tdp": gpu.tdp_w, "nm": gpu.process_nm}  # type: ignore[dict-item]


SERVED = {
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
}
CHAT_TOKENS = 700
"""Context of a chat in the middle of its answer; the source states no prompts, its answers have 500 to 1,000 tokens."""


def served(folder: Path) -> dict[str, np.ndarray]:
    """Decode steps of chat servers on one H100, at their mean batch and measured time."""
    frame, gpu, predictor = (
        pd.read_csv(folder / "serving_energy.csv"),
        nj.load_gpu("H100"),
        nj.load_predictor("tensorcore"),
    )
    frame = frame[(frame.num_gpus == 1) & (frame.weight_precision == "bfloat16") & frame.model_id.isin(SERVED)]
    parts = []
    for row in frame.itertuples():
        batch = max(1, round(row.avg_batch_size))
        graph = nj.graph_from_config(SERVED[row.model_id], batch, CHAT_TOKENS, "decode", "bf16")
        energy, kernels_s = of_step(predictor, gpu, graph)
        step_s = max(row.median_itl_ms * 1e-3, kernels_s)
        parts.append((energy / step_s, row.avg_power_watts, row.model_id))
    moving, watts, what = zip(*parts, strict=True)
    sizes = {"moving": np.array(moving).T, "watts": np.array(watts), "what": np.array(what), "share": 1.0}
    return sizes | {"limit": float(gpu.tdp_w), "tdp": gpu.tdp_w, "nm": gpu.process_nm}  # type: ignore[dict-item]


def watts(numbers: dict[str, float], data: dict[str, Any]) -> np.ndarray:
    """Watts by the law, within the limit of the board."""
    node = (data["nm"] / REFERENCE_NM) ** numbers["node_exponent"]
    volts = (1.0 + numbers["slope"] * np.maximum(np.asarray(data["share"]) - numbers["flat"], 0.0)) ** 2
    busy = sum(numbers[name] * data["moving"][at] for at, name in enumerate(MOVING[:BUSY]))
    flop = sum(numbers[name] * data["moving"][BUSY + at] for at, name in enumerate(MOVING[BUSY:-1])) * node
    moving = (busy + flop) * volts
    total = numbers["static_share"] * data["tdp"] + moving + numbers["dram_pj"] * data["moving"][-1]
    return total / (1.0 + (total / data["limit"]) ** 12) ** (1.0 / 12.0)


def fit(sets: list[dict[str, Any]]) -> dict[str, float]:
    """The most probable constants; sets of kernels alone count a tenth of those of whole models and servers."""
    first = np.log([float(each.default) for each in dataclasses.fields(PowerLaw)])  # type: ignore[arg-type]
    widths = np.array([each.metadata["width"] for each in dataclasses.fields(PowerLaw)])

    def residuals(logs: np.ndarray) -> np.ndarray:
        numbers = dict(zip(NAMES, np.exp(logs), strict=True))
        own = [
            np.log(watts(numbers, each) / each["watts"])
            / NOISE
            * np.sqrt(100.0 * each.get("weight", 1.0) / len(each["watts"]))
            for each in sets
        ]
        return np.concatenate([*own, (logs - first) / widths])

    found = least_squares(residuals, first, loss="soft_l1").x
    return dict(zip(NAMES, np.exp(found).tolist(), strict=True))


def errors(numbers: dict[str, float], data: dict[str, Any]) -> pd.Series:
    """Relative errors of watts, by what was measured."""
    return pd.Series(np.abs(watts(numbers, data) / data["watts"] - 1.0), index=data["what"])


CAPPED: dict[str, tuple[str, str]] = {
    "3090-a3b-decode:data": ("qwen3-30b-a3b", "decode"),
    "3090-a3b-prefill:data": ("qwen3-30b-a3b", "prefill"),
    "3090-prefill:data": ("qwen3-32b", "prefill"),
    "3090-qwen36:data": ("qwen3-32b", "decode"),
}
"""Series of the RTX 3090, and a model of about their size with weights of four bits; the source's own are not here."""


def capped(folder: Path) -> pd.DataFrame:
    """Speed over that at the highest cap, and watts, forecast and measured, of the RTX 3090 at every cap."""
    frame, gpu, predictor = (
        pd.read_csv(folder / "caps_rtx3090.csv"),
        nj.load_gpu("RTX 3090"),
        nj.load_predictor("tensorcore"),
    )
    rows = []
    for series, (model, mode) in CAPPED.items():
        graph = nj.graph_from_config(model, 1, 2048, mode, "bf16", weight_dtype="int4")
        own = frame[frame.series == series].sort_values("cap_w")
        steps = [nj.predict(predictor, gpu.replace(power_limit_w=float(cap)), graph) for cap in own.cap_w]
        measured = own.tokens_per_s / own.tokens_per_s.iloc[-1]
        forecast = [steps[-1].total_s / step.total_s for step in steps]
        watts = [step.power_w for step in steps]
        rows.append(own.assign(speed=forecast, measured_speed=measured, watts=watts)[COLUMNS])
    return pd.concat(rows, ignore_index=True)


COLUMNS = ["series", "cap_w", "speed", "measured_speed", "watts", "drawn_w"]
"""Columns of `capped`."""


def main() -> None:
    """Fit and print."""
    folder = Path(sys.argv[1]) / "power"
    data = {
        "B200": kernels(folder, "B200", "NVIDIA B200"),
        "GB200": kernels(folder, "GB200", "NVIDIA GB200"),
        "A100": models(folder),
        "H100": served(folder),
    }
    for out in data:
        numbers = fit([each for name, each in data.items() if name != out])
        found = errors(numbers, data[out])
        print(f"{out} left out: mean {found.mean():.1%}, median {found.median():.1%}")
        print("  " + ", ".join(f"{what} {value:.0%}" for what, value in found.groupby(level=0).mean().items()))
    everything = fit(list(data.values()))
    for name, each in data.items():
        found = errors(everything, each)
        print(f"{name}, all fitted: mean {found.mean():.1%}, median {found.median():.1%}")
    print({name: float(f"{value:.4g}") for name, value in everything.items()})
    caps = capped(folder)
    speed, drawn = caps.speed / caps.measured_speed - 1.0, caps.watts / caps.drawn_w - 1.0
    print(f"RTX 3090 under caps, in no fit: speed {speed.abs().mean():.1%}, watts {drawn.abs().mean():.1%}")
    print(caps.to_string(float_format="{:.2f}".format))


if __name__ == "__main__":
    main()
