"""Parts of all commands that forecast models: the work of a command line and its machine, and checks of options."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from neusight_jax.cli.options import JobOptions, LimitOptions, WorkloadOptions, lora_of, option_names
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.requests import Lengths
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.gpu import GPU
from neusight_jax.units import base_unit, quantity

if TYPE_CHECKING:
    from neusight_jax.graph.traced.operation import TraceOptions
    from neusight_jax.hardware.cluster import Cluster, Machine
    from neusight_jax.job.job import Job
    from neusight_jax.job.parallelism import Parallelism
    from neusight_jax.model.predictor import Predictor

TRACING = ("trip_count", "branch", "fp32_products", "fp32_convolutions", "parameters")
"""Options of functions and modules alone."""


def check_dtype(gpu: GPU, gpu_name: str, dtype: str) -> None:
    """`InputError` naming the GPU when it lacks the arithmetic path of a dtype."""
    try:
        gpu.peak_flop_per_s(dtype)
    except InputError as error:
        others = " or ".join(f"--dtype {path}" for path in ("fp16", "fp32") if path in gpu.paths)
        raise InputError(f"{gpu_name}: {error}; give {others}") from None


def check_relaxation(relaxation: float) -> None:
    """`InputError` unless 0 <= relaxation <= 1."""
    if not 0.0 <= relaxation <= 1.0:
        raise InputError(f"--relaxation is {relaxation:g}, expected 0 (whole waves) to 1 (none)")


def work_of(model: str, load: WorkloadOptions, job: JobOptions) -> Graph | Job:
    """Work of a command line: a step on one machine, or a training job where any of its layout is given.

    Raises: `InputError` for an unusable model, workload or layout, and for options that would change nothing.
    """
    from neusight_jax.graph.traced.source_file import is_source

    laid = job.layout() or load.tensor_parallel * load.expert_parallel > 1 or count_of(job) not in (None, 1)
    if load.mode == "training" and laid:
        return job_of(model, load, job)
    graph, gpus = graph_of(model, load) if is_source(model) else None, job.gpus
    if graph is not None and laid and graph.mode == "training" and graph.num_gpus == 1:  # it says itself that it trains
        return _replicas_of(model, load, job, graph)
    if job.layout():
        raise InputError(f"{', '.join(job.layout())}: of training jobs; give --mode training, or leave out")
    graph = graph or graph_of(model, load)
    if gpus is not None and gpus != graph.num_gpus:
        raise InputError(
            f"--gpus {gpus}: the step occupies {graph.num_gpus}; give --mode training for a job, --tensor-parallel to "
            "split a model, or take `serve` for replicas"
        )
    return graph


def limit_figures(limits: LimitOptions) -> dict[str, float]:
    """Limits as figures of a GPU, by name; `InputError` for what is no believable value."""
    from neusight_jax.hardware.gpu import check_figure

    flags = {"power_limit_w": ("--power-limit", limits.power_limit), "clock_limit_hz": ("--clock", limits.clock)}
    figures = {}
    for name, (flag, text) in flags.items():
        if text is not None:
            figures[name] = numbers(flag, text, [text], name)[0]
            check_figure(name, figures[name], flag)
    return figures


def held_back(machine: Machine, limits: LimitOptions) -> Machine:
    """A machine with its GPUs held back."""
    from neusight_jax.hardware.cluster import with_gpu

    return with_gpu(machine, **limit_figures(limits))


class Jobs(NamedTuple):
    """What forecasts jobs of a model on several clusters.

    Attributes:
      clusters, predictors: by the same names; GPUs held back, and measured effects where a checkpoint has them.
      dtype, checkpoint: stated or assumed.
      notes: to say beside every forecast.
    """

    clusters: dict[str, Cluster]
    predictors: dict[str, Predictor]
    dtype: str
    checkpoint: str
    notes: tuple[str, ...]


def jobs_on(
    model: str, clusters: Mapping[str, Cluster], limits: LimitOptions, dtype: str | None, checkpoint: str | None
) -> Jobs:
    """What forecasts jobs of a decoder on clusters of a command line.

    Args:
      model: a config; clusters: by name, COUNTx GPU.
      limits: of every GPU.
      dtype: of matrix products, None = the model's own; checkpoint: None = by the dtype.
    """
    from neusight_jax.graph.configs.build import assumed_dtype
    from neusight_jax.graph.configs.config import language_config, read_config
    from neusight_jax.hardware.catalog import canonical_name
    from neusight_jax.hardware.files import gpu_in
    from neusight_jax.model.checkpoint import card_notes, load_card, load_predictor

    held: dict[str, Any] = {name: held_back(cluster, limits) for name, cluster in clusters.items()}
    dtype, notes = assumed_dtype(language_config(read_config(model)), dtype)
    used = checkpoint or ("fp32" if dtype == "fp32" else "tensorcore")
    devices = {name: canonical_name(gpu_in(name)) for name in held}
    loaded = {device: load_predictor(used, device) for device in dict.fromkeys(devices.values())}
    predictors = {name: loaded[device] for name, device in devices.items()}
    return Jobs(held, predictors, dtype, used, (*card_notes(load_card(used), used), *notes))


def require_config(model: str, what: str) -> None:
    """`InputError` for a function in a file where only models by config will do; what: of them, in words."""
    from neusight_jax.graph.traced.source_file import is_source

    if is_source(model):
        raise InputError(f"{model}: {what} by name or config.json; a function has one step, give it to `predict`")


def count_of(job: JobOptions) -> int | None:
    """GPUs that a command line says; None where the layout is to say it."""
    if job.cluster is None:
        return job.gpus
    from neusight_jax.hardware.files import load_cluster

    count = load_cluster(job.cluster).count
    if job.gpus not in (None, count):
        raise InputError(f"--gpus {job.gpus}: {job.cluster} has {count}; leave --gpus out, or change the file")
    return count


def machine_of(work: Graph | Job, gpu: str | os.PathLike[str] | None, job: JobOptions) -> tuple[str, Machine]:
    """Name and figures of the machine that work runs on: a GPU, the server it is split over, or a job's cluster."""
    from neusight_jax.hardware.files import load_named_cluster, load_named_gpu, load_named_server

    if (gpu is None) == (job.cluster is None):
        raise InputError("which machine? give either --gpu NAME, with --gpus for several, or --cluster FILE")
    if job.cluster is not None:
        return load_named_cluster(job.cluster)
    name = os.fspath(gpu or "")
    if not isinstance(work, Graph):
        return load_named_cluster(f"{work.plan.layout.gpus}x {name}")
    return load_named_gpu(name) if work.num_gpus == 1 else load_named_server(name)


_OF_REPLICAS = ("data_parallel", "zero", "shards", "micro_batch_size", "global_batch_size", "framework")
"""Options of jobs that replicas have too."""
_OF_JOBS = (
    *("batch_size", "sequence_length", "mode", "dtype", "tensor_parallel", "expert_parallel"),
    *("optimizer", "gradient_dtype", "lora_rank", "lora_targets", "weight_dtype", "attention", "experts"),
)
"""Options of workloads that jobs have too."""


def job_of(model: str, load: WorkloadOptions, job: JobOptions) -> Job:
    """A training job; `InputError` for a layout or workload that cannot be used."""
    from neusight_jax.graph.configs.build import assumed_dtype, assumed_length
    from neusight_jax.graph.configs.config import language_config, read_config
    from neusight_jax.graph.traced.source_file import is_source
    from neusight_jax.job.job import job_from_config
    from neusight_jax.job.stages import is_split

    if is_source(model) or not is_split(model) or load.execution == "eager":
        return _replicas_of(model, load, job)
    if others := option_names(name for name in load.given() if name not in _OF_JOBS):
        raise InputError(f"{', '.join(others)}: training jobs have no such choice; leave out")
    length = lengths("--sequence-length", load.sequence_length)
    if not (length is None or isinstance(length, int)):
        raise InputError(f"--sequence-length {load.sequence_length}: a job has one length; give one number")
    config = language_config(read_config(model))
    dtype, dtype_notes = assumed_dtype(config, load.dtype)
    sequence, length_notes = assumed_length(config, length, "training", None)
    layout = _layout(load, job)
    made = job_from_config(
        model,
        layout,
        global_batch_size=job.global_batch_size or layout.data * layout.micro_batch_size,
        sequence_length=int(sequence),  # type: ignore[arg-type]
        dtype=dtype,
        optimizer=load.optimizer or "adamw",
        gradient_dtype=load.gradient_dtype,
        lora=lora_of(load.lora_rank, load.lora_targets, load.weight_dtype),
        framework=job.framework,
        attention=load.attention,
        experts=load.experts,
        cuda_graphs=job.cuda_graphs,
        gather_dtype=job.gather_dtype,
        document_tokens=job.document_tokens,
    )
    optimizer = ["optimizer adamw assumed"] if load.optimizer is None else []
    notes = (*dtype_notes, *length_notes, *optimizer, *made.plan.notes)
    return made.replace(plan=replace(made.plan, notes=tuple(dict.fromkeys(notes))))


def _replicas_of(model: str, load: WorkloadOptions, job: JobOptions, graph: Graph | None = None) -> Job:
    """A training job of a model whose layers are not split: replicas, whose gradients are summed.

    Args:
      model, load, job: of the command line.
      graph: of the model, where it was read already.
    """
    from neusight_jax.job.job import job_from_graph

    splits = [name for name in ("tensor_parallel", "expert_parallel") if name in load.given()]
    facts = [name for name in job.given() if name not in (*_OF_REPLICAS, "gpus", "cluster")]
    if words := ", ".join(option_names([*splits, *facts])):
        other = "--execution too" if load.execution == "eager" else "or take a decoder by name or config.json"
        raise InputError(f"{model} runs as replicas, its layers are not split; leave {words} out, {other}")
    layout = _layout(load, job)
    if graph is None:
        if "micro_batch_size" in job.given():
            load = replace(load, batch_size=layout.micro_batch_size)
        graph = graph_of(model, load)
    return job_from_graph(graph, layout, global_batch_size=job.global_batch_size, framework=job.framework)


def _layout(load: WorkloadOptions, job: JobOptions) -> Parallelism:
    """The layout of a job; replicas are what is left of its GPUs, or as few as the experts need."""
    from neusight_jax.job.parallelism import Parallelism

    micro = job.micro_batch_size
    if micro is not None and load.batch_size not in (1, micro):
        raise InputError(f"--batch-size {load.batch_size}, --micro-batch-size {micro}: both say one thing; give one")
    gpus, within = count_of(job), load.tensor_parallel * job.context_parallel
    taken = within * job.pipeline_parallel
    if gpus is not None and job.data_parallel is None and (taken < 1 or gpus % taken):
        raise InputError(f"--gpus {gpus} is no multiple of tensor · pipeline · context = {taken}; expected a multiple")
    fewest = load.expert_parallel // math.gcd(load.expert_parallel, within) if within > 0 else 1
    layout = Parallelism(
        tensor=load.tensor_parallel,
        pipeline=job.pipeline_parallel,
        data=job.data_parallel or (fewest if gpus is None else gpus // taken),
        context=job.context_parallel,
        expert=load.expert_parallel,
        chunks=job.chunks,
        zero=job.zero,
        shards=job.shards,
        sequence_parallel=job.sequence_parallel,
        micro_batch_size=load.batch_size if micro is None else micro,
        recompute=job.recompute,
    )
    if gpus not in (None, layout.gpus):
        raise InputError(
            f"--gpus {gpus}, but the layout takes {layout.gpus} (tensor · context · data · pipeline); leave "
            "--data-parallel out, or mend one"
        )
    return layout


def graph_of(model: str, load: WorkloadOptions) -> Graph:
    """The graph of a model on the command line: a catalog name, a config.json, or PATH.py:FUNCTION.

    Raises: `InputError` for an unusable model or workload, and for what a function's own arguments say already.
    """
    from neusight_jax.graph.traced.source_file import graph_from_source, is_source

    if is_source(model):
        twice = option_names(name for name in load.given() if name not in ("mode", "fused", *TRACING))
        if twice:
            raise InputError(
                f"{model}: its example arguments say batch, lengths and dtypes; leave {', '.join(twice)} out"
            )
        return graph_from_source(model, load.mode, trace_options(load))
    tracing = option_names(name for name in load.given() if name in TRACING)
    if tracing:
        raise InputError(f"{model} is no PATH.py:FUNCTION; leave {', '.join(tracing)} out")
    from neusight_jax.graph.configs.build import graph_from_config

    graph = graph_from_config(
        model,
        load.batch_size,
        lengths("--sequence-length", load.sequence_length),
        load.mode,
        load.dtype,
        load.fused,
        kv_length=lengths("--kv-length", load.kv_length),
        weight_dtype=load.weight_dtype,
        kv_dtype=load.kv_dtype,
        tensor_parallel=load.tensor_parallel,
        expert_parallel=load.expert_parallel,
        optimizer=load.optimizer,
        gradient_dtype=load.gradient_dtype,
        lora=lora_of(load.lora_rank, load.lora_targets),
        experts=load.experts,
        execution=load.execution,
        attention=load.attention,
        engine=load.engine,
    )
    if load.fused is not None and "weight_dtype" in graph.options:  # a decoder or ViT
        flag = "--fused" if load.fused else "--eager"
        note = f"{graph.name} is forecast with its framework's fused kernels: {flag} changes nothing"
        return replace(graph, notes=(*graph.notes, note))
    return graph


def trace_options(load: WorkloadOptions) -> TraceOptions:
    """Options for reading a function or module, as a command line says."""
    from neusight_jax.graph.traced.operation import TraceOptions

    parameters = None if load.parameters is None else tuple(part.strip() for part in load.parameters.split(","))
    branch = int(load.branch) if load.branch.isdecimal() else load.branch
    return TraceOptions(
        load.fused,
        load.trip_count,
        branch,
        load.fp32_products,
        parameters=parameters,
        fp32_convolutions=load.fp32_convolutions,
    )


def lengths(option: str, text: str | None) -> Lengths | None:
    """One whole number, or several with commas between; `InputError` naming the option otherwise."""
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected a whole number, or one for each request: 512,2048") from None
    return values if len(values) > 1 else values[0]


def default_for(works: Iterable[Graph | Job]) -> str:
    """The shipped checkpoint for several models: `tensorcore` if one of them needs it."""
    from neusight_jax.model.checkpoint import default_checkpoint

    return max(default_checkpoint(work.kernels) for work in works)


def split_assignment(option: str, text: str) -> tuple[str, str]:
    """`NAME=VALUE` as its two parts; `InputError` naming the option otherwise."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise InputError(f"{option} {text!r}: expected FIELD=..., e.g. {option} mem_bytes_per_s=1e12:8e12")
    return name.strip(), value.strip()


def targets_of(text: str, names: Collection[str], expected: str) -> dict[str, float]:
    """`ttft<=1s tpot<=50ms` as seconds by name; `InputError` that says what was expected."""
    targets: dict[str, float] = {}
    for part in re.sub(r"\s*<=\s*", "<=", text).replace(",", " ").split():
        name, _, value = part.partition("<=")
        if name not in names or not value or name in targets:
            raise InputError(f"--slo {text!r}: expected {expected}")
        targets[name] = seconds_of(f"--slo {name}", value)
    return targets


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}


def seconds_of(name: str, text: str) -> float:
    """A time with or without a unit, in seconds."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?\d+)?)\s*(s|ms|us|)\s*", text)
    try:
        return float(match[1]) * _UNITS[match[2]] if match else _bad(name, text)
    except ValueError:
        return _bad(name, text)


def _bad(name: str, text: str) -> float:
    raise InputError(f"{name} is {text!r}, expected a time such as 1s, 800ms or 0.05")


def numbers(option: str, text: str, parts: Sequence[str], name: str = "") -> list[float]:
    """Texts as numbers in base units: `3.35TB/s` is 3.35e12; `InputError` naming the option and what it was given.

    Args:
      name: of the figure or metric; a unit must be one of it.
    """
    return [_number(option, text, part, base_unit(name)) for part in parts]


def _number(option: str, text: str, part: str, unit: str) -> float:
    try:
        return float(part)
    except ValueError:
        amount = quantity(part)
    if amount is None:
        raise InputError(f"{option} {text!r}: expected numbers in base units, e.g. 1e12:8e12, or with units: 3.35TB/s")
    value, symbol = amount
    if symbol not in ("", unit):
        raise InputError(f"{option} {text!r}: {part} is in {symbol}, expected {unit or 'a number without a unit'}")
    return value
