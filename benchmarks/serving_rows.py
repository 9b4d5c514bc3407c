"""Rows of `silicon_sample.csv` of the package aiconfigurator-core: what each is of, and why others are left out."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from neusight_jax.errors import InputError
from neusight_jax.serving.steps import Model, load_model

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
DRAFTED = ("2026-01-14", "2026-02-05", "2026-02-06")
"""Days of TensorRT-LLM's runs of DeepSeek-R1 that guess tokens ahead. 23 of their set-ups were measured on other days
too, and took 1.2 to 2.3 times as long a token there (median 1.6)."""
POLLED = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3.5-397B-A17B")
POLLS = ((16, 30), (0, 10))
"""Models whose public scripts for Blackwell (InferenceMAX) have SGLang look for new requests every 30th step from 16
requests at once on, every 10th below."""
GATHERED = "meta-llama/Llama-3.1-70B", 1024, 1024
"""Model, input and output of TensorRT-LLM's runs that gather prompts on fewer than 8 GPUs: their first tokens come 15
decode steps later than with 8,192 tokens out on the same GPUs, on H200 as on B200."""
MOST = 1024
"""Running requests of all engines; larger loads are left out."""


@dataclass(frozen=True)
class Setup:
    """What one table of step times is of."""

    model: str
    quantization: str
    system: str
    tensor: int
    expert: int
    data: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return self.tensor * self.data


def folder() -> Path:
    """The installed package."""
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise InputError("aiconfigurator_core is not installed; pip install '.[aiconfigurator]'")
    return Path(found.origin).parent


def read() -> tuple[pd.DataFrame, Counter[str]]:
    """Rows that can be forecast, with their set-up, and reasons of the others."""
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
    disaggregated = values["mode"] != "agg"
    names = ("prefill_", "decode_") if disaggregated else ("",)
    said = re.search(r"silicon_concurrency=(\d+)", values["silicon_data_source"])
    if disaggregated and not all(values[f"{each}num_workers"] for each in names):
        return "disaggregated, without how many replicas"
    if disaggregated and not said:
        return "disaggregated, without its concurrency"
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", values["silicon_data_source"])
    if values["backend"] == "trtllm" and "DeepSeek-R1" in values["model_path"] and day and day[1] in DRAFTED:
        return "tokens are guessed ahead, how many are right is not said"
    setups = [_setup(values, each) for each in names]
    refused = next((each for each in setups if isinstance(each, str)), None)
    if refused is not None:
        return refused
    load = int(said[1]) if said else int(values["batch_size"])
    if load > MOST:
        return f"more than {MOST:,} requests at once"
    *_, decode = setups
    return {
        **vars(decode),
        "setup": decode,
        "prefill": setups[0] if disaggregated else None,
        "prefill_replicas": int(values["prefill_num_workers"]) if disaggregated else 0,
        "decode_replicas": int(values["decode_num_workers"]) if disaggregated else 1,
        "backend": values["backend"],
        "generator": "own" if values["silicon_data_source"].startswith("source_file=/") else "dated",
        "input": int(values["isl"]),
        "output": int(values["osl"]),
        "load": load,
        "polls": _polls(values, load),
        "ttft": float(values["silicon_ttft_ms"]) / 1e3,
        "tpot": float(values["silicon_tpot_ms"]) / 1e3,
        "id": values["id"],
    }


def _polls(values: Mapping[str, str], load: int) -> int:
    """Decode steps from one look for new requests to the next."""
    if values["backend"] == "trtllm" and values["mode"] == "agg":
        run = values["model_path"], int(values["isl"]), int(values["osl"])
        return POLLS[0][1] if run == GATHERED and int(values["tp_size"]) < 8 else 1
    scripted = values["backend"] == "sglang" and values["system"] not in DEVELOPMENT and values["model_path"] in POLLED
    return next(steps for least, steps in POLLS if load >= least) if scripted else 1


def _setup(values: Mapping[str, str], prefix: str) -> Setup | str:
    """The set-up of the replicas whose columns begin so, or why it is not forecast."""
    tensor, expert, split, data = (
        int(values[prefix + name] or 0) for name in ("tp_size", "moe_ep_size", "moe_tp_size", "attention_dp_size")
    )
    data = max(data, 1)
    if data > 1 and tensor > 1:
        return "tensor and data ranks, which may be the same counted twice"
    if data == split * expert == expert**2 > 1:
        data, split = expert, 1  # written as a product; the row's id has TP and EP
    if expert > 1 and split > 1 and tensor == expert * split == expert**2:
        tensor, split = expert, 1  # written as a product; the row's id has TP and EP
    if expert > 1 and expert != tensor * data:
        return "experts are split both ways"
    if tensor * data > 8:
        return "a replica of more than 8 GPUs"
    quantization = values["gemm_quant_mode"].replace("_block", "") or "bf16"
    return Setup(values["model_path"], quantization, values["system"], tensor, max(expert, 1), data)


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
