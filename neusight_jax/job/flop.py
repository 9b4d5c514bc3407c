"""FLOP of a step: those of the model, which utilization is measured by, and all that its GPUs run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from neusight_jax.graph.graph import Graph
from neusight_jax.graph.kernel import BACKWARD_ATTENTION
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.job import Job, graph_launches
from neusight_jax.job.work import KINDS, WORK
from neusight_jax.kernels import attention, gemm, grouped_gemm

PRODUCTS: dict[str, Any] = {
    **dict.fromkeys(("linear", "bmm", "gemm", "gemm_fp8", "gemm_fp4", "conv", "tensor_conv"), gemm.flop),
    **dict.fromkeys(("prefill", "decode"), attention.flop),
    "grouped_gemm": grouped_gemm.flop,
}
"""FLOP of a launch, by the families that count for utilization."""
ATTENTION: tuple[str, ...] = ("prefill", "decode")
"""Families whose backward kernels compute the scores again: 2.5 times the forward FLOP, of which the model asks 2."""


class StepFlop(NamedTuple):
    """FLOP of a step, of all its GPUs.

    Attributes:
      model: matrix products, convolutions and attention of the forward and the backward pass, each once. Attention
        counts the pairs that its mask leaves, about half of them where it is causal.
      hardware: those, and what the backward pass runs again: recomputed layers, and attention's scores.
    """

    model: float
    hardware: float


def step_flop(work: Graph | Job) -> StepFlop:
    """FLOP of a step.

    MFU is `model` over seconds · GPUs · peak, HFU is `hardware` over the same (Chowdhery et al., "PaLM", 2022, appendix
    B, which counts attention without a mask; Korthikanti et al., "Reducing Activation Recomputation", 2022).
    """
    model = hardware = 0.0
    for name, counts in _launches(work).items():
        if name not in PRODUCTS:
            continue
        dims = {key: np.asarray(size, np.float64) for key, size in work.kernels.families[name].dims.items()}
        of_work = dict(zip(WORK, counts @ PRODUCTS[name](dims), strict=True))
        hardware += sum(of_work.values())
        scores = 2.0 / BACKWARD_ATTENTION if name in ATTENTION else 1.0
        model += of_work["forward"] + of_work["backward"] * scores + of_work["weight_gradient"]
    return StepFlop(float(model), float(hardware))


def _launches(work: Graph | Job) -> dict[str, Float[np.ndarray, "work kernel"]]:
    """Launches of all GPUs in a step, by family."""
    if isinstance(work, Graph):
        return {name: launches * work.num_gpus for name, launches in graph_launches(work).items()}
    plan = work.plan
    stages = np.bincount(plan.kinds, minlength=KINDS)
    passes = stages * plan.micro_batches * plan.layout.replica_ranks  # of one rank and micro-batch
    return {name: np.einsum("s,swk->wk", passes, np.asarray(counts)) for name, counts in work.counts.items()}


def peak_flop_per_s(gpu: GPU, work: Graph | Job) -> float:
    """Peak of a GPU in the dtype of the products, FLOP/s: the fastest of its paths; 0 where it has none."""
    peaks = [gpu.peak_flop_per_s(path) for path in (work.dtype, f"{work.dtype}_matrix") if path in gpu.paths]
    return max((float(np.asarray(peak)) for peak in peaks), default=0.0)
