"""`neusight-jax sensitivity`: what one percent more of each figure of a GPU buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from neusight_jax.cli.console import answer, busy, remark
from neusight_jax.cli.options import (
    AsJson,
    Gpu,
    JobOptions,
    Model,
    Relaxation,
    ReportFile,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)


@takes_workload
def sensitivity(
    model: Model,
    gpu: Gpu,
    load: WorkloadOptions,
    job: JobOptions,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    plot: Annotated[Path | None, option("Also draw it: a .png, .svg or .pdf file.")] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """What one percent more of every figure of a GPU does to a model's latency, in percent (elasticities); or with
    --gpus of a cluster to the step of a training job.

    The GPU is forecast from its figures alone; `predict` also uses what was measured of it.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_card, load_predictor
    from neusight_jax.cli.predict import plain_notes
    from neusight_jax.cli.workloads import check_dtype, check_relaxation, graph_of
    from neusight_jax.gpu_file import load_named_gpu
    from neusight_jax.sensitivities import sensitivity as elasticities_of

    if job.gpus > 1:
        from neusight_jax.cli.jobs import asked_job
        from neusight_jax.job.elasticities import step_sensitivity

        asked = asked_job(model, gpu, load, job, checkpoint)
        with busy("differentiating"):
            step = step_sensitivity(asked.predictor, asked.cluster, asked.job, asked.name)
        answer(step, as_json, report, checkpoint=asked.checkpoint)
        return
    check_relaxation(relaxation)
    if plot is not None:
        from neusight_jax.reports.files import require_format

        require_format(plot)
    gpu_name, machine = load_named_gpu(gpu)
    graph = graph_of(model, load)
    check_dtype(machine, gpu_name, graph.dtype)
    checkpoint = checkpoint or default_checkpoint(graph.kernels)
    notes = plain_notes(load_card(checkpoint), checkpoint, gpu_name, graph)
    predictor = load_predictor(checkpoint)
    with busy("differentiating"):
        result = elasticities_of(predictor, machine, graph, relaxation=relaxation, gpu_name=gpu_name, notes=notes)
    if plot is not None:
        from neusight_jax.reports import figures
        from neusight_jax.reports.files import save

        save(figures.bars(result), plot)
        remark(f"wrote {plot}")
    answer(result, as_json, report, {"machine": machine}, checkpoint=checkpoint)
