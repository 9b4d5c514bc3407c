"""Jobs on the command line: a layout from options, and the forecast of its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neusight_jax.cli.options import WorkloadOptions
from neusight_jax.cli.workloads import lengths
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.job.forecast import StepForecast


def forecast_job(
    model: str,
    gpu: str,
    gpus: int,
    load: WorkloadOptions,
    split: Mapping[str, Any],
    global_batch_size: int | None,
    checkpoint: str | None,
) -> tuple[StepForecast, str]:
    """A step of a model on many GPUs in their usual servers, and the checkpoint that forecast it.

    Args:
      split: fields of `Parallelism`; `data` None = what is left of the GPUs.
    Raises: `InputError` for a layout or workload that cannot be used.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_predictor
    from neusight_jax.cluster_file import load_named_cluster
    from neusight_jax.gpu_catalog import canonical_name
    from neusight_jax.job.forecast import predict_job
    from neusight_jax.job.job import job_from_config
    from neusight_jax.job.parallelism import Parallelism

    sequence = lengths("--sequence-length", load.sequence_length)
    if load.mode != "training" or not isinstance(sequence, int):
        raise InputError(f"--gpus {gpus} forecasts training jobs; give --mode training and one --sequence-length")
    taken = split["tensor"] * split["pipeline"] * split["context"]
    if split["data"] is None and (taken < 1 or gpus % taken):
        raise InputError(f"--gpus {gpus} is no multiple of tensor · pipeline · context = {taken}; expected a multiple")
    layout = Parallelism(**{**split, "data": split["data"] or gpus // taken})
    name, cluster = load_named_cluster(f"{gpus}x {gpu}")
    job = job_from_config(
        model,
        layout,
        global_batch_size=global_batch_size or layout.data * layout.micro_batch_size,
        sequence_length=sequence,
        dtype=load.dtype or "bf16",
        optimizer=load.optimizer or "adamw",
    )
    used = checkpoint or default_checkpoint(job.kernels)
    return predict_job(load_predictor(used, canonical_name(gpu)), cluster, job, name=name), used
