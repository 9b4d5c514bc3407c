"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name of `neusight-jax models`, a config.json, or PATH.py:FUNCTION."),
]
Gpu = Annotated[str, typer.Option("--gpu", help="A name of `neusight-jax gpus`, or a JSON or YAML file.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Sequences in a batch.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length",
        help="Tokens in a sequence.",
        show_default="2,048 for decoders, else the longest the model takes",
    ),
]
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
    str | None, typer.Option("--weight-dtype", help="Of weights, decoders only.", show_default="as --dtype")
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", help="Of the KV cache, decoders only.", show_default="fp8 for fp8 and fp4, else as --dtype"
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel", help="GPUs a decoder's layers are split over; no collectives are forecast.")
]
ExpertParallel = Annotated[int, typer.Option("--expert-parallel", help="GPUs the experts are split over.")]
Mode = Annotated[
    str, typer.Option("--mode", help="inference, training (forward and backward); decoders also prefill, decode.")
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Of all tensors.", show_default="a decoder's own (its config), fp32 of all others"),
]
Fused = Annotated[
    bool | None,
    typer.Option(
        "--fused/--eager",
        help="Merge elementwise chains as a compiler would, or not.",
        show_default="as the framework runs: JAX functions fused, all others not",
    ),
]
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
    list[str], typer.Argument(metavar="MODEL...", help="Names of `neusight-jax models`, or config.json files.")
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
