"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name of `neusight-jax models`, a config.json, or PATH.py:FUNCTION."),
]
Gpu = Annotated[str, typer.Option("--gpu", help="A name of `neusight-jax gpus`, or a JSON or YAML file.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences in a batch.")]
RequestLengths = Annotated[
    str | None,
    typer.Option(
        "--sequence-length",
        help="Tokens in a sequence; decoders take one for each request too: 512,2048.",
        show_default="2,048 for decoders, else the longest the model takes",
    ),
]
KvLength = Annotated[
    str | None,
    typer.Option(
        "--kv-length",
        help="Prefill and decode: keys the last new token sees, one number or one for each request.",
        show_default="the sequence length",
    ),
]
WeightDtype = Annotated[
    str | None,
    typer.Option(
        "--weight-dtype",
        help="What weights are stored in, decoders only: int4, fp4, fp8, int8 or wider. Narrower than --dtype, they "
        "are widened in the products (weight-only).",
        show_default="as the config's quantization, else as --dtype",
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="Of the KV cache, decoders only.",
        show_default="as the config's quantization, fp8 for fp8 and fp4, else as --dtype",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option("--tensor-parallel", help="GPUs a decoder's layers are split over; collectives are not in forecasts."),
]
ExpertParallel = Annotated[
    int, typer.Option("--expert-parallel", help="GPUs the experts are split over, on top of --tensor-parallel.")
]
Mode = Annotated[
    str, typer.Option("--mode", help="inference, training (forward and backward); decoders also prefill, decode.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Of the arithmetic, and of all tensors nothing else is said of.",
        show_default="a decoder's own (its config), fp32 of all others",
    ),
]
Fused = Annotated[
    bool | None,
    typer.Option(
        "--fused/--eager",
        help="Merge elementwise chains as a compiler would, or not; decoders and ViT run fused kernels either way.",
        show_default="as the framework runs: JAX functions fused, all others not",
    ),
]
TripCount = Annotated[
    int | None,
    typer.Option(
        "--trip-count",
        help="PATH.py:FUNCTION: how often the body of a while loop or fori_loop of unknown count runs.",
        show_default="a function with one is refused",
    ),
]
Branch = Annotated[
    str,
    typer.Option("--branch", help="PATH.py:FUNCTION: branch of a cond or switch that runs, worst or its index from 0."),
]
Fp32Products = Annotated[
    str, typer.Option("--fp32-products", help="PATH.py:FUNCTION: path of fp32 matrix products, fp32 or tf32.")
]
Parameters = Annotated[
    str | None,
    typer.Option(
        "--parameters",
        help="PATH.py:FUNCTION, in JAX: arguments that hold parameters, by name or position: w,u. For the memory.",
        show_default="as their use tells",
    ),
]


@dataclass(frozen=True)
class WorkloadOptions:
    """What a command line says of a workload beside its model: the same in every command that forecasts models."""

    batch_size: BatchSize = 1
    sequence_length: RequestLengths = None
    mode: Mode = "inference"
    dtype: Dtype = None
    fused: Fused = None
    kv_length: KvLength = None
    weight_dtype: WeightDtype = None
    kv_dtype: KvDtype = None
    tensor_parallel: TensorParallel = 1
    expert_parallel: ExpertParallel = 1
    trip_count: TripCount = None
    branch: Branch = "worst"
    fp32_products: Fp32Products = "fp32"
    parameters: Parameters = None

    def given(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }


def takes_workload(command: Callable[..., None]) -> Callable[..., None]:
    """A command with every field of `WorkloadOptions` as an option, in the place of its parameter `load`.

    Options that the command has itself stay its own, and have their defaults in `load`.
    """
    hints = get_type_hints(command, include_extras=True)
    options = get_type_hints(WorkloadOptions, include_extras=True)
    own = inspect.signature(command).parameters
    added = [each for each in fields(WorkloadOptions) if each.name not in own]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for name, parameter in own.items():
        if name == "load":
            parameters += [inspect.Parameter(each.name, keyword, default=each.default) for each in added]
        else:
            parameters.append(parameter.replace(kind=keyword))
    kinds = {**{each.name: options[each.name] for each in added}, **hints}
    parameters = [each.replace(annotation=kinds[each.name]) for each in parameters]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        load = WorkloadOptions(**{each.name: given.pop(each.name) for each in added})
        command(load=load, **given)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


Checkpoint = Annotated[
    str, typer.Option("--checkpoint", help="A name of `neusight-jax checkpoints`, or a folder written by `train`.")
]
WorkloadCheckpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        help="A name of `neusight-jax checkpoints`, or a folder written by `train`.",
        show_default="fp32; tensorcore when the model computes in another dtype",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL...", help="Names of `neusight-jax models`, config.json files, or PATH.py:FUNCTION."),
]
Relaxation = Annotated[
    float, typer.Option("--relaxation", help="0 = whole waves, 1 = none: smooths what has no slope.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
MeasurementFolders = Annotated[
    list[Path], typer.Option("--measurements", help="Folders or Parquet files of the measurement schema.")
]
DropInvalid = Annotated[bool, typer.Option("--drop-invalid", help="Leave bad rows out instead of refusing them.")]
OutputFolder = Annotated[Path, typer.Option("--output", help="The folder to write; new or empty.")]
