"""`neusight-jax sensitivity`: what one percent more of each figure of a GPU buys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from neusight_jax.cli.console import answer, busy, remark
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    MachineGpu,
    Model,
    Relaxation,
    ReportFile,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError


@takes_workload
def sensitivity(
    model: Model,
    gpu: MachineGpu = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    plot: Annotated[Path | None, option("Also draw it: a .png, .svg or .pdf file.")] = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """What one percent more of every figure of a GPU does to a model's latency, in percent (elasticities); or of
    a cluster to the step of a training job, with --gpus or any option of its layout.

    The GPU is forecast from its figures alone; `predict` also uses what was measured of it.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_card, load_predictor
    from neusight_jax.cli.predict import job_predictor, plain_notes
    from neusight_jax.cli.workloads import check_dtype, check_relaxation, machine_of, work_of
    from neusight_jax.cluster import gpu_of
    from neusight_jax.graph.graph import Graph
    from neusight_jax.sensitivities import sensitivity as elasticities_of

    check_relaxation(relaxation)
    if plot is not None:
        from neusight_jax.reports.files import require_format

        require_format(plot)
    graph = work_of(model, load, job)
    gpu_name, machine = machine_of(graph, gpu, job)
    checkpoint = checkpoint or default_checkpoint(graph.kernels)
    if not isinstance(graph, Graph):
        if plot is not None or relaxation:
            raise InputError("--plot and --relaxation are of steps on one machine; leave them out for a job")
        with busy("differentiating"):
            step = elasticities_of(job_predictor(checkpoint, gpu), machine, graph, gpu_name=gpu_name)
        answer(step, as_json, report, checkpoint=checkpoint)
        return
    check_dtype(gpu_of(machine), gpu_name, graph.dtype)
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
