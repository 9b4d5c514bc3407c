"""Jobs: a training step on many GPUs as a workload of a design, so that links and network may vary too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine
from neusight_jax.job.forecast import job_workload
from neusight_jax.job.job import Job
from neusight_jax.job.step import compose, seconds_of_job
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.roofline import Relaxation
from neusight_jax.model.terms import Predictor
from neusight_jax.workloads import Workload


def job_load(job: Job, weight: float = 1.0, name: str = "") -> Workload:
    """A job as a workload of `nj.design`, called "MODEL training on N GPUs" unless it is given a name."""
    if not weight > 0:
        raise InputError(f"weight of {job.plan.model} is {weight:g}, expected a positive number")
    plan, gpus = job.plan, job.plan.layout.gpus
    asked = {key: value for key, value in job_workload(plan).items() if key not in ("model", "mode", "dtype")}
    graph = Graph(
        plan.model,
        (),
        plan.mode,
        plan.dtype,
        plan.global_batch_size,
        plan.sequence_length,
        True,
        tokens=plan.tokens,
        footprint=plan.memory,
        options={**asked, "gpus": gpus},
        notes=plan.notes,
    )
    return Workload(name or f"{plan.model} training on {gpus} GPUs", graph, job.kernels, float(weight), job=job)


def job_seconds(
    job: Job, predictor: Predictor, machine: Machine, relaxation: Relaxation = 0.0
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Seconds of a step, and of the kernels and messages of one micro-batch of every kind of stage by family.

    `relaxation` is of the waves of kernels (`latency.kernel_latency`); the pipeline's path is exact.
    """
    families: dict[str, Array] = {}

    def run(using: Predictor, where: Machine, kernels: KernelTable) -> Mapping[str, Any]:
        found = kernel_latency(using, where, kernels, relaxation=relaxation)
        for family, seconds in found.items():
            families[family] = jnp.sum(job.counts[family] * seconds if family in job.counts else seconds)
        return found

    own = seconds_of_job(predictor, machine, job, run=run)
    pipeline, tail, _ = compose(own, job.software, job.plan)
    return pipeline + tail, families
