"""`neusight-jax finetune`: which GPUs fine-tune a model, by which recipe, for how many hours and dollars."""

from __future__ import annotations

from typing import Annotated

from neusight_jax.cli.console import answer, progress_console
from neusight_jax.cli.options import (
    AsJson,
    GradientDtype,
    LimitOptions,
    LoraTargets,
    Model,
    OptimizerName,
    PriceFile,
    ReportFile,
    RunOptions,
    WorkloadCheckpoint,
    lora_of,
    option,
    takes_workload,
)
from neusight_jax.errors import InputError


@takes_workload
def finetune(
    model: Model,
    gpu: Annotated[list[str], option("GPUs to choose from, in their usual servers.", metavar="GPU")],
    method: Annotated[str, option("lora, qlora (frozen weights in four bits) or full (all weights).")] = "lora",
    gpus: Annotated[list[int] | None, option("How many of each.", metavar="N", default="1 2 4 8")] = None,
    global_batch_size: Annotated[int, option("Sequences of a step.")] = 16,
    sequence_length: Annotated[int, option("Tokens of a sequence, packed.")] = 2048,
    dtype: Annotated[str | None, option("Of matrix products.", default="the model's own")] = None,
    lora_rank: Annotated[int | None, option("Of the adapters, with lora and qlora.", default="16")] = None,
    lora_targets: LoraTargets = None,
    optimizer: OptimizerName = None,
    gradient_dtype: GradientDtype = "fp32",
    prices: PriceFile = None,
    *,
    whole: RunOptions,
    limits: LimitOptions,
    checkpoint: WorkloadCheckpoint = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model: the GPUs on which it fits, the recipe that is fastest there, hours, dollars and joules.

    Gradient checkpointing, micro-batch and sharding are chosen. Every recipe has the `predict` command that forecasts
    it, and the command of Hugging Face's TRL that runs it. What does not fit says what it lacks.
    """
    from neusight_jax.cli.workloads import jobs_on, require_config
    from neusight_jax.hardware.prices import read_prices
    from neusight_jax.layouts.finetune import COUNTS, clusters_of
    from neusight_jax.layouts.finetune import finetune as recipes

    require_config(model, "jobs are of decoders")
    if method == "full" and (lora_rank is not None or lora_targets is not None):
        raise InputError("--lora-rank, --lora-targets: of adapters; give --method lora, or leave them out")
    run, price_list = whole.run(), read_prices(prices) if prices is not None else None
    lora = lora_of(16 if lora_rank is None else lora_rank, lora_targets)
    jobs = jobs_on(model, clusters_of(gpu, gpus or COUNTS), limits, dtype, checkpoint)
    layouts = recipes(
        jobs.predictors,
        jobs.clusters,
        model,
        method=method,
        run=run,
        rank=lora.rank if lora else 16,
        targets=lora.targets if lora else (),
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        dtype=jobs.dtype,
        optimizer=optimizer or "adamw",
        gradient_dtype=gradient_dtype,
        prices=price_list,
        notes=jobs.notes,
        console=progress_console(),
    )
    answer(layouts, as_json, report, checkpoint=jobs.checkpoint)
