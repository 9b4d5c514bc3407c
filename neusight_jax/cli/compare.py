"""`neusight-jax compare`: which GPU for this workload?"""

from __future__ import annotations

from typing import Annotated

from neusight_jax.cli.console import answer, busy, plot_to
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    LimitOptions,
    Model,
    PlotFile,
    PriceFile,
    ReportFile,
    RunOptions,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError


@takes_workload
def compare(
    model: Model,
    gpu: Annotated[list[str], option("GPUs to rank: names, JSON or YAML files, or all.", metavar="GPU")],
    load: WorkloadOptions,
    job: JobOptions,
    limits: LimitOptions,
    whole: RunOptions,
    prices: PriceFile = None,
    by: Annotated[str, option("latency; throughput, the same order for one batch; or cost.")] = "latency",
    plot: PlotFile = None,
    checkpoint: WorkloadCheckpoint = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Rank GPUs for a model, or for a training job, by latency, throughput or cost.

    Every GPU is forecast from its figures alone, so that all are treated alike; `predict` also uses what was measured
    of a GPU. A GPU that lacks the dtype or the memory comes last, without a rank. Work on several GPUs is priced at
    that many.
    """
    from neusight_jax.cli.predict import plain_notes
    from neusight_jax.cli.workloads import limit_figures, work_of
    from neusight_jax.comparison import compare as compare_gpus
    from neusight_jax.hardware.catalog import list_gpus
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.hardware.prices import read_prices
    from neusight_jax.model.checkpoint import default_checkpoint, load_card, load_predictor

    run = whole.run()
    price_list = read_prices(prices) if prices is not None else None
    gpu = [*dict.fromkeys(name for word in gpu for name in (list_gpus() if word == "all" else [word]))]
    names = [load_named_gpu(name)[0] for name in gpu]
    if job.cluster is not None:
        raise InputError("--cluster is of one machine; name several with --gpu, and how many with --gpus")
    work = work_of(model, load, job)
    checkpoint = checkpoint or default_checkpoint(work.kernels)
    card = load_card(checkpoint)
    notes = {name: plain_notes(card, checkpoint, name, work) for name in names}
    with busy("comparing"):
        ranking = compare_gpus(
            load_predictor(checkpoint),
            gpu,
            work,
            prices=price_list,
            by=by,
            notes=notes,
            limits=limit_figures(limits),
            run=run,
        )
    plot_to(plot, ranking)
    answer(ranking, as_json, report, checkpoint=checkpoint)
