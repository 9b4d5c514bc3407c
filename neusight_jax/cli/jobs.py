"""Jobs on the command line: a layout from options, and the job on its cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from neusight_jax.cli.options import JobOptions, WorkloadOptions, lora_of
from neusight_jax.cli.workloads import lengths
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.cluster import Cluster
    from neusight_jax.job.job import Job
    from neusight_jax.terms import Predictor


@dataclass(frozen=True)
class AskedJob:
    """A job of a command line, the cluster it runs on with its name, and what forecasts it."""

    job: Job
    cluster: Cluster
    name: str
    predictor: Predictor
    checkpoint: str


def asked_job(model: str, gpu: str, load: WorkloadOptions, asked: JobOptions, checkpoint: str | None) -> AskedJob:
    """A training job on many GPUs in their usual servers.

    Raises: `InputError` for a layout or workload that cannot be used.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_predictor
    from neusight_jax.cluster_file import load_named_cluster
    from neusight_jax.gpu_catalog import canonical_name

    job = job_of(model, load, asked)
    name, cluster = load_named_cluster(f"{asked.gpus}x {gpu}")
    used = checkpoint or default_checkpoint(job.kernels)
    return AskedJob(job, cluster, name, load_predictor(used, canonical_name(gpu)), used)


def job_of(model: str, load: WorkloadOptions, asked: JobOptions) -> Job:
    """A training job on many GPUs; `InputError` for a layout or workload that cannot be used."""
    from neusight_jax.job.job import job_from_config
    from neusight_jax.job.parallelism import Parallelism

    gpus, sequence = asked.gpus, lengths("--sequence-length", load.sequence_length)
    if load.mode != "training" or not isinstance(sequence, int):
        raise InputError(f"--gpus {gpus} forecasts training jobs; give --mode training and one --sequence-length")
    taken = load.tensor_parallel * asked.pipeline_parallel * asked.context_parallel
    if asked.data_parallel is None and (taken < 1 or gpus % taken):
        raise InputError(f"--gpus {gpus} is no multiple of tensor · pipeline · context = {taken}; expected a multiple")
    layout = Parallelism(
        tensor=load.tensor_parallel,
        pipeline=asked.pipeline_parallel,
        data=asked.data_parallel or gpus // taken,
        context=asked.context_parallel,
        expert=load.expert_parallel,
        chunks=asked.chunks,
        zero=asked.zero,
        sequence_parallel=asked.sequence_parallel,
        micro_batch_size=asked.micro_batch_size,
        recompute=asked.recompute,
    )
    return job_from_config(
        model,
        layout,
        global_batch_size=asked.global_batch_size or layout.data * layout.micro_batch_size,
        sequence_length=sequence,
        dtype=load.dtype or "bf16",
        optimizer=load.optimizer or "adamw",
        lora=lora_of(load.lora_rank, load.lora_targets),
    )
