"""`neusight-jax sensitivity`: what one percent more of each figure of a GPU buys."""

from __future__ import annotations

from neusight_jax.cli.console import answer, busy, plot_to
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    LimitOptions,
    MachineGpu,
    Model,
    PlotFile,
    Relaxation,
    ReportFile,
    WorkloadCheckpoint,
    WorkloadOptions,
    takes_workload,
)


@takes_workload
def sensitivity(
    model: Model,
    gpu: MachineGpu = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    limits: LimitOptions,
    checkpoint: WorkloadCheckpoint = None,
    relaxation: Relaxation = 0.0,
    plot: PlotFile = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """What one percent more of every figure of a GPU does to a model's latency, in percent (elasticities); or of
    a cluster to the step of a training job, with --gpus or any option of its layout.

    As `predict` forecasts it, with what was measured of the GPU.
    """
    from neusight_jax.cli.predict import used_for
    from neusight_jax.cli.workloads import check_relaxation, held_back, machine_of, work_of
    from neusight_jax.hardware.cluster import gpu_of
    from neusight_jax.sensitivities import sensitivity as elasticities_of

    check_relaxation(relaxation)
    work = work_of(model, load, job)
    name, machine = machine_of(work, gpu, job)
    machine = held_back(machine, limits)
    using = used_for(work, gpu, name, gpu_of(machine), checkpoint)
    with busy("differentiating"):
        result = elasticities_of(
            using.predictor, machine, work, relaxation=relaxation, gpu_name=name, notes=using.notes
        )
    if plot is not None:
        from neusight_jax.reports.plots import elasticities

        plot_to(plot, result, elasticities({name: result}))
    answer(result, as_json, report, {"machine": gpu_of(machine)}, checkpoint=using.checkpoint)
