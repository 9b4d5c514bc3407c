"""`neusight-jax parallelize`: which layout, how many GPUs, does it fit, what does it cost?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from neusight_jax.cli.console import answer, progress_console
from neusight_jax.cli.options import (
    RECOMPUTE_CHOICES,
    AsJson,
    CudaGraphs,
    DocumentTokens,
    Experts,
    Framework,
    GatherDtype,
    GradientDtype,
    JobAttention,
    LimitOptions,
    LoraRank,
    LoraTargets,
    Model,
    OptimizerName,
    PriceFile,
    ReportFile,
    RunOptions,
    WeightDtype,
    WorkloadCheckpoint,
    lora_of,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.hardware.cluster import Cluster

_GPU = "GPUs or servers in their usual nodes, or cluster files (gpu, count, topology)."


@takes_workload
def parallelize(
    model: Model,
    gpu: Annotated[list[str], option(_GPU, metavar="GPU")],
    global_batch_size: Annotated[int, option("Sequences of a step.")],
    sequence_length: Annotated[int | None, option("Tokens of a sequence.", default="needed by decoders")] = None,
    gpus: Annotated[list[int] | None, option("How many GPUs.", metavar="N", default="as cluster files say")] = None,
    dtype: Annotated[str | None, option("Of matrix products.", default="the model's own")] = None,
    recompute: Annotated[list[str] | None, option(RECOMPUTE_CHOICES, default="none and full")] = None,
    framework: Framework = None,
    attention: JobAttention = None,
    experts: Experts = None,
    cuda_graphs: CudaGraphs = None,
    gather_dtype: GatherDtype = None,
    document_tokens: DocumentTokens = None,
    optimizer: OptimizerName = None,
    gradient_dtype: GradientDtype = "fp32",
    lora_rank: LoraRank = None,
    lora_targets: LoraTargets = None,
    weight_dtype: WeightDtype = None,
    prices: PriceFile = None,
    top: Annotated[int, option("Layouts shown of every machine.")] = 5,
    *,
    limits: LimitOptions,
    whole: RunOptions,
    checkpoint: WorkloadCheckpoint = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Rank all layouts of a training job that fit: tensor, pipeline, data, context and expert parallelism, ZeRO,
    sequence parallelism, micro-batches, chunks, recompute.

    Several GPUs and numbers of GPUs are compared by their best layouts; with prices by cost.
    """
    from neusight_jax.cli.workloads import jobs_on, require_config
    from neusight_jax.hardware.prices import read_prices
    from neusight_jax.job.parallelism import Space
    from neusight_jax.layouts.answers import parallelize as ranked

    require_config(model, "jobs are of models")
    run = whole.run()
    price_list = read_prices(prices) if prices is not None else None
    jobs = jobs_on(model, _clusters(gpu, gpus or []), limits, dtype, checkpoint)
    ranking = ranked(
        jobs.predictors,
        jobs.clusters,
        model,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        dtype=jobs.dtype,
        optimizer=optimizer or "adamw",
        gradient_dtype=gradient_dtype,
        lora=lora_of(lora_rank, lora_targets, weight_dtype),
        framework=framework,
        attention=attention,
        experts=experts,
        cuda_graphs=cuda_graphs,
        gather_dtype=gather_dtype,
        document_tokens=document_tokens,
        space=Space(recompute=tuple(recompute)) if recompute else None,
        prices=price_list,
        run=run,
        top=top,
        notes=jobs.notes,
        console=progress_console(),
    )
    answer(ranking, as_json, report, checkpoint=jobs.checkpoint)


def _clusters(gpus: list[str], counts: list[int]) -> dict[str, Cluster]:
    """The clusters of a command line by name."""
    from neusight_jax.hardware.files import load_named_cluster

    clusters: dict[str, Cluster] = {}
    for gpu in gpus:
        if gpu.lower().endswith((".json", ".yaml", ".yml")):
            name, cluster = load_named_cluster(gpu)
            sizes = {f"{count}x {name.partition('x ')[2] or name}": count for count in counts} or {name: cluster.count}
            clusters |= {label: cluster.replace(count=count) for label, count in sizes.items()}
        elif counts:
            clusters |= dict(load_named_cluster(f"{count}x {gpu}") for count in counts)
        else:
            raise InputError(f"--gpu {gpu}: how many? give --gpus, such as --gpus 8 16 32 64")
    return clusters
