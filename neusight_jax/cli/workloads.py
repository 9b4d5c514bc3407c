"""What commands over several models or machines share: their workloads, and checks of their options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neusight_jax.errors import InputError
from neusight_jax.gpu import GPU
from neusight_jax.graph.graph import Graph


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


def graph_of(
    text: str, batch_size: int, sequence_length: int | None, mode: str, dtype: str | None, fused: bool
) -> Graph:
    """The graph of a model on the command line; length and dtype are assumed where they are not given."""
    from neusight_jax.graph.build import graph_from_config

    return graph_from_config(text, batch_size, sequence_length, mode, dtype, fused)


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


def numbers(option: str, text: str, parts: Sequence[str]) -> list[float]:
    """Texts as numbers; `InputError` naming the option and what it was given."""
    try:
        return [float(part) for part in parts]
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers in base units, e.g. 1e12:8e12") from None
