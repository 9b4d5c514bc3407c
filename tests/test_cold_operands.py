"""Weights and the KV cache come from DRAM in a running model: no decode step is faster than their bytes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.arithmetic import ELEMENT_BYTES
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import footprint
from neusight_jax.hardware.gpu import stack_gpus
from neusight_jax.model.latency import kernel_forecasts

GPUS = {name: gpu for name in nj.list_gpus() if "fp16" in (gpu := nj.load_gpu(name)).paths}
SECONDS = jax.jit(
    jax.vmap(
        lambda predictor, gpu, table, isolated: {
            name: term.seconds for name, term in kernel_forecasts(predictor, gpu, table, isolated=isolated).items()
        },
        in_axes=(None, 0, None, None),
    )
)
PLAIN, MIXED, LATENT = "llama-3.2-1b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite"
WORKLOADS: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"batch_size": 1, "sequence_length": 512}),
    (PLAIN, {"batch_size": 16, "sequence_length": 2048, "weight_dtype": "int4"}),
    (PLAIN, {"batch_size": 1, "sequence_length": 512, "weight_dtype": "Q4_K_M"}),
    (MIXED, {"batch_size": 4, "sequence_length": 1024}),
    (LATENT, {"batch_size": 2, "sequence_length": 4096}),
]


def decode(model: str, load: dict[str, Any]) -> Graph:
    return nj.graph_from_config(model, mode="decode", dtype="fp16", **load)


def cold(family: str, dims: dict[str, np.ndarray], size: np.ndarray) -> np.ndarray:
    """Bytes of weights, or of the cache before this step, that a kernel reads."""
    if family in ("gemm", "gemm_fp8", "gemm_fp4"):
        return dims["batch"] * dims["n"] * dims["k"] * dims["weight_share"] * size
    if family == "grouped_gemm":
        return 3.0 * dims["active"] * dims["hidden"] * dims["inner"] * dims["weight_share"] * size
    if family == "decode":
        cache = (dims["keys"] - dims["requests"]) * dims["kv_heads"] * dims["head_size"]
        return 2.0 * cache * dims["kv_share"] * size
    return np.zeros_like(size)


def least_and_forecast(work: Graph, isolated: float) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [kernel] and seconds over seconds at DRAM bandwidth [gpu, kernel], of kernels that read anything cold."""
    seconds = SECONDS(nj.load_predictor("tensorcore"), stack_gpus(list(GPUS.values())), work.kernels, isolated)
    rate = np.array([gpu.mem_bytes_per_s for gpu in GPUS.values()])[:, None]
    moved, ratios = [], []
    for name, batch in work.kernels.families.items():
        dims = {key: np.asarray(value, np.float64) for key, value in batch.dims.items()}
        read = cold(name, dims, np.array(ELEMENT_BYTES)[batch.dtype])
        mask = (np.asarray(batch.count) > 0) & (read > 0)
        moved.append((read * batch.count)[mask])
        ratios.append(np.asarray(seconds[name], np.float64)[:, mask] * rate / read[mask])
    return np.concatenate(moved), np.concatenate(ratios, axis=1)


@pytest.mark.parametrize(("model", "load"), WORKLOADS)
def test_no_kernel_of_a_decode_step_beats_dram(model: str, load: dict[str, Any]) -> None:
    work = decode(model, load)
    read, ratios = least_and_forecast(work, 0.0)
    worst = dict(zip(GPUS, ratios.min(axis=1), strict=True))
    assert min(worst.values()) >= 1.0 - 1e-5, min(worst.items(), key=lambda item: item[1])
    if model == PLAIN:  # what is read is what is kept, but for the embedding, which is the head as well here
        memory = footprint(work)
        assert read.sum() == pytest.approx(memory.weights + memory.kv_cache, rel=0.01)


def test_alone_a_kernel_may_find_its_weights_in_l2() -> None:
    """The control: measured again and again, small products do beat DRAM on a board with a large L2."""
    _, ratios = least_and_forecast(decode(*WORKLOADS[0]), 1.0)
    assert ratios[list(GPUS).index("NVIDIA L40S")].min() < 0.9
