"""`neusight-jax sensitivity`: what one percent more of each figure of a GPU buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import remark, show, show_json
from neusight_jax.cli.options import (
    AsJson,
    BatchSize,
    Dtype,
    Fused,
    Gpu,
    Mode,
    Model,
    Relaxation,
    SequenceLength,
    WorkloadCheckpoint,
)


def sensitivity(
    model: Model,
    gpu: Gpu,
    batch_size: BatchSize = 1,
    sequence_length: SequenceLength = None,
    mode: Mode = "inference",
    dtype: Dtype = None,
    fused: Fused = False,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw it: a .png, .svg or .html file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Elasticities of a model's latency with respect to every figure of a GPU."""
    from neusight_jax.checkpoint import default_checkpoint, load_card, load_predictor
    from neusight_jax.cli.predict import forecast_notes
    from neusight_jax.cli.workloads import check_dtype, check_relaxation, graph_of
    from neusight_jax.gpu_file import load_named_gpu
    from neusight_jax.sensitivity import sensitivity as elasticities_of

    check_relaxation(relaxation)
    if plot is not None:
        from neusight_jax.plot.files import require_format

        require_format(plot, html=True)
    gpu_name, machine = load_named_gpu(gpu)
    graph = graph_of(model, batch_size, sequence_length, mode, dtype, bool(fused))
    check_dtype(machine, gpu_name, graph.dtype)
    checkpoint = checkpoint or default_checkpoint(graph.kernels)
    notes = forecast_notes(load_card(checkpoint), checkpoint, gpu_name, graph)
    predictor = load_predictor(checkpoint)
    result = elasticities_of(predictor, machine, graph, relaxation=relaxation, gpu_name=gpu_name, notes=notes)
    if plot is not None:
        from neusight_jax.plot import figures, report
        from neusight_jax.plot.files import save

        save(report.sensitivity_page(result, machine) if plot.suffix == ".html" else figures.bars(result), plot)
        remark(f"wrote {plot}")
    if as_json:
        show_json({"checkpoint": checkpoint, **result.to_dict()})
        return
    from neusight_jax.sensitivity_report import sensitivity_tables

    show(sensitivity_tables(result))
