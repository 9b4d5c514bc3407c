"""`neusight-jax compare`: which GPU for this workload?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import remark, show, show_json
from neusight_jax.cli.options import AsJson, BatchSize, Dtype, Fused, Mode, Model, SequenceLength, WorkloadCheckpoint


def compare(
    model: Model,
    gpu: Annotated[list[str], typer.Option("--gpu", metavar="GPU", help="GPUs to rank: names, or JSON or YAML files.")],
    batch_size: BatchSize = 1,
    sequence_length: SequenceLength = None,
    mode: Mode = "inference",
    dtype: Dtype = None,
    fused: Fused = False,
    prices: Annotated[
        Path | None, typer.Option("--prices", metavar="FILE", help="JSON or YAML, GPU: price of an hour.")
    ] = None,
    by: Annotated[str, typer.Option("--by", help="latency, throughput or cost.")] = "latency",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    checkpoint: WorkloadCheckpoint = None,
    as_json: AsJson = False,
) -> None:
    """Rank GPUs for a model by latency, throughput or cost.

    Every GPU is forecast from its figures alone, so that all are treated alike.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_predictor
    from neusight_jax.cli.workloads import graph_of
    from neusight_jax.compare import compare as compare_gpus
    from neusight_jax.compare import read_prices

    listed = read_prices(prices) if prices is not None else None
    graph = graph_of(model, batch_size, sequence_length, mode, dtype, bool(fused))
    checkpoint = checkpoint or default_checkpoint(graph.kernels)
    found = compare_gpus(load_predictor(checkpoint), gpu, graph, prices=listed, by=by)
    if plot is not None:
        from neusight_jax.comparison_plot import write_plot

        write_plot(found, plot)
        remark(f"wrote {plot}")
    if as_json:
        show_json({"checkpoint": checkpoint, **found.to_dict()})
        return
    from neusight_jax.comparison_table import comparison_table

    show(comparison_table(found))
