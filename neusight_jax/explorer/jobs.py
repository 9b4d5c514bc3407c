"""Jobs on clusters, for the explorer's page."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from neusight_jax.errors import InputError
from neusight_jax.explorer.asked import Variant, Workload
from neusight_jax.forecast import Forecast
from neusight_jax.graph.configs.build import assumed_length
from neusight_jax.graph.configs.config import language_config, read_config
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import FIELDS
from neusight_jax.job.job import Job, job_from_config
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.model.checkpoint import default_checkpoint
from neusight_jax.model.predictor import Predictor
from neusight_jax.prediction import predict
from neusight_jax.reports import forecast as forecasts

PredictorOf = Callable[[str], Predictor]
"""Of a checkpoint's name."""
WAYS: tuple[str, ...] = ("tensor", "pipeline", "context", "zero", "micro_batch_size", "recompute")
"""Of `Parallelism`, that the page says; the rest of the GPUs are replicas."""


LINKS: tuple[str, ...] = ("link_bytes_per_s", "nic_bytes_per_s", "link_latency_s", "nic_latency_s")
"""Figures of `Topology` that are moved."""


def figures(variant: Variant, gpus: int) -> dict[str, float]:
    """Figures of a cluster: those of its GPU, and of its links."""
    return cluster_figures(variant.cluster(gpus)[1])


def cluster_figures(cluster: Cluster) -> dict[str, float]:
    """Figures of the GPU of a cluster, and of its links."""
    own = {name: float(getattr(cluster.gpu, name)) for name in FIELDS}
    return own | {name: float(getattr(cluster.topology, name)) for name in LINKS}


@functools.lru_cache(maxsize=16)
def _job(load: Workload) -> Job:
    taken = load.tensor * load.pipeline * load.context
    if taken < 1 or load.gpus % taken:
        raise InputError(f"{load.gpus} GPUs are no multiple of tensor · pipeline · context = {taken}; mend one")
    layout = Parallelism(data=load.gpus // taken, **{name: getattr(load, name) for name in WAYS})
    dtype = load.dtype or "bf16"
    tokens = load.sequence_length or usual_length(load.model)
    sizes: dict[str, Any] = {"global_batch_size": load.batch_size, "sequence_length": tokens}
    return job_from_config(load.model, layout, dtype=dtype, **sizes)


@functools.lru_cache(maxsize=64)
def usual_length(model: str) -> int | None:
    """Tokens of a sequence where nobody says how many, as in every command; None where a model takes any number."""
    try:
        tokens, _ = assumed_length(language_config(read_config(model)), None, "training", None)
    except InputError:
        return None
    return tokens if isinstance(tokens, int) else None


def explored(load: Workload, variant: Variant, predictor_of: PredictorOf) -> tuple[Forecast, Cluster, str]:
    """The forecast of a step on a variant, the cluster, and the checkpoint."""
    job, (name, cluster) = _job(load), variant.cluster(load.gpus)
    checkpoint = default_checkpoint(job.kernels)
    try:
        return predict(predictor_of(checkpoint), cluster, job, gpu_name=name), cluster, checkpoint
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def answer(load: Workload, variants: Sequence[Variant], predictor_of: PredictorOf) -> dict[str, Any]:
    """Numbers and pictures of the clusters that the page shows."""
    shown = [explored(load, variant, predictor_of) for variant in variants]
    names = [f"{'AB'[place]}: {load.gpus}x {variant.base}" for place, variant in enumerate(variants)]
    pictures = forecasts.pictures(dict(zip(names, (step for step, *_ in shown), strict=True)))
    return {
        "machines": [
            {
                "total_s": step.total_s,
                "interval_s": step.interval_s,
                "exposed_communication_s": step.exposed_communication_s,
                "cards": forecasts.cards(step),
                "checkpoint": checkpoint,
                "figures": cluster_figures(cluster),
                "notes": step.notes,
            }
            for step, cluster, checkpoint in shown
        ],
        "sequence_length": usual_length(load.model),
        "plots": [{"title": each.title, "data": each.traces, "layout": dict(each.layout)} for each in pictures],
    }


def cluster_yaml(load: Workload, variant: Variant) -> str:
    """A variant as a cluster file."""
    base, (name, cluster) = load_named_gpu(variant.base), variant.cluster(load.gpus)
    pairs = {each: (float(getattr(base[1], each)), float(getattr(cluster.gpu, each))) for each in FIELDS}
    moved = {each: new for each, (old, new) in pairs.items() if not math.isclose(old, new, rel_tol=1e-6)}
    changed = {each: variant.figures.get(each, value) for each, value in moved.items()}
    joined: Mapping[str, Any] = {each: getattr(cluster.topology, each) for each in TOPOLOGY_FIELDS}
    topology = {each: value if isinstance(value, int) else float(value) for each, value in joined.items()}
    gpu = {"name": f"{base[0]}, changed", "base": base[0], **changed} if changed else base[0]
    content = {"name": name, "gpu": gpu, "count": load.gpus, "topology": topology}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
