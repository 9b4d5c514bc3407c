"""What commands that forecast models share: the graphs of their workloads, and checks of their options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from neusight_jax.cli.options import WorkloadOptions, lora_of
from neusight_jax.errors import InputError
from neusight_jax.gpu import GPU
from neusight_jax.graph.configs.requests import Lengths
from neusight_jax.graph.graph import Graph
from neusight_jax.units import base_unit, quantity

if TYPE_CHECKING:
    from neusight_jax.graph.traced.trace_options import TraceOptions

TRACING = ("trip_count", "branch", "fp32_products", "parameters")
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


def graph_of(model: str, load: WorkloadOptions) -> Graph:
    """The graph of a model on the command line: a catalog name, a config.json, or PATH.py:FUNCTION.

    Raises: `InputError` for an unusable model or workload, and for what a function's own arguments say already.
    """
    from neusight_jax.graph.traced.source_file import graph_from_source, is_source

    if is_source(model):
        twice = _options(name for name in load.given() if name not in ("mode", "fused", *TRACING))
        if twice:
            raise InputError(
                f"{model}: its example arguments say batch, lengths and dtypes; leave {', '.join(twice)} out"
            )
        return graph_from_source(model, load.mode, trace_options(load))
    tracing = _options(name for name in load.given() if name in TRACING)
    if tracing:
        raise InputError(f"{model} is no PATH.py:FUNCTION; leave {', '.join(tracing)} out")
    from neusight_jax.graph.configs.build import graph_from_config

    graph = graph_from_config(
        model,
        load.batch_size,
        lengths("--sequence-length", load.sequence_length),
        load.mode,
        load.dtype,
        bool(load.fused),
        kv_length=lengths("--kv-length", load.kv_length),
        weight_dtype=load.weight_dtype,
        kv_dtype=load.kv_dtype,
        tensor_parallel=load.tensor_parallel,
        expert_parallel=load.expert_parallel,
        optimizer=load.optimizer,
        lora=lora_of(load.lora_rank, load.lora_targets),
    )
    if load.fused is False and graph.fused:
        note = f"{graph.name} is forecast with its framework's fused kernels: --eager changes nothing"
        return replace(graph, notes=(*graph.notes, note))
    return graph


def trace_options(load: WorkloadOptions) -> TraceOptions:
    """How to read a function or module, as a command line says."""
    from neusight_jax.graph.traced.trace_options import TraceOptions

    named = None if load.parameters is None else tuple(part.strip() for part in load.parameters.split(","))
    branch = int(load.branch) if load.branch.isdecimal() else load.branch
    return TraceOptions(load.fused, load.trip_count, branch, load.fp32_products, parameters=named)


def _options(names: Iterable[str]) -> list[str]:
    """Names of fields as they are written on a command line."""
    return [f"--{name.replace('_', '-')}" for name in names]


def lengths(option: str, text: str | None) -> Lengths | None:
    """One whole number, or several with commas between; `InputError` naming the option otherwise."""
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected a whole number, or one for each request: 512,2048") from None
    return values if len(values) > 1 else values[0]


def default_for(graphs: Iterable[Graph]) -> str:
    """The shipped checkpoint for several models: `tensorcore` if one of them needs it."""
    from neusight_jax.checkpoint import default_checkpoint

    return max(default_checkpoint(graph.kernels) for graph in graphs)


def split_assignment(option: str, text: str) -> tuple[str, str]:
    """`NAME=VALUE` as its two parts; `InputError` naming the option otherwise."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise InputError(f"{option} {text!r}: expected FIELD=..., e.g. {option} mem_bytes_per_s=1e12:8e12")
    return name.strip(), value.strip()


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
        found = quantity(part)
    if found is None:
        raise InputError(f"{option} {text!r}: expected numbers in base units, e.g. 1e12:8e12, or with units: 3.35TB/s")
    value, said = found
    if said not in ("", unit):
        raise InputError(f"{option} {text!r}: {part} is in {said}, expected {unit or 'a number without a unit'}")
    return value
