"""`nj.finetune`: which GPUs fine-tune a model, how many of them, by which recipe, for how many hours and dollars."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.forecast import Forecast
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.files import gpu_in, load_named_cluster
from neusight_jax.hardware.prices import PriceList
from neusight_jax.job.parallelism import Space
from neusight_jax.layouts.answers import Layouts, Machine, parallelize
from neusight_jax.model.predictor import Predictor
from neusight_jax.runs import Run

if TYPE_CHECKING:
    from rich.console import Console

METHODS: tuple[str, ...] = ("lora", "qlora", "full")
"""Adapters beside frozen weights; the same beside weights in four bits; all weights."""
COUNTS: tuple[int, ...] = (1, 2, 4, 8)
"""Numbers of GPUs that are tried."""
FOUR_BITS = "int4"
"""Storage of QLoRA's frozen weights: NF4 with its scales quantized again takes 4.13 bits (Dettmers et al., "QLoRA",
2023), int4 in groups of 128 takes 4.16."""
ZERO: dict[str, tuple[int, ...]] = {"lora": (0, 3), "qlora": (0,), "full": (0, 1, 2, 3)}
"""ZeRO that is tried: adapters have next to no states to shard, and DeepSpeed does not shard weights in four bits."""
OPTIMIZERS: dict[str, str] = {
    **{"adamw": "adamw_torch_fused", "adamw-foreach": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit"},
    **{"adafactor": "adafactor", "lion": "lion_32bit"},
    "sgd": "sgd",
}
"""Names of optimizers -> those of Hugging Face's trainer."""


def finetune(
    predictor: Predictor | Mapping[str, Predictor],
    gpus: Sequence[str] | Mapping[str, Cluster],
    model: str | Path | Mapping[str, Any],
    *,
    method: str = "lora",
    run: Run | None = None,
    counts: Sequence[int] = COUNTS,
    rank: int = 16,
    targets: Sequence[str] = (),
    global_batch_size: int = 16,
    sequence_length: int = 2048,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    gradient_dtype: str = "fp32",
    prices: PriceList = None,
    notes: Sequence[str] = (),
    console: Console | None = None,
) -> Layouts:
    """Recipes that fine-tune a model, the best of every number of GPUs, ranked as `parallelize` ranks machines.

    Replicas are tried with ZeRO (`ZERO`), micro-batches of 1 to 16 and gradient checkpointing (recompute full) or none.
    Machines on which nothing fits come last and say what they lack.

    Args:
      predictor, gpus: what forecasts, and names or files of GPUs in their usual servers; or clusters by name, with
        predictors by the same names or one for all.
      model: a catalog name, the path of a config.json, or a mapping with Hugging Face keys.
      method: one of `METHODS`.
      run: also what a whole run takes and costs, such as `nj.Run(tokens=50e6)`.
      counts: numbers of each GPU that are tried.
      rank, targets: of adapters, as `nj.Lora` has them.
      global_batch_size, sequence_length: sequences of a step, and tokens of each.
      dtype, optimizer, gradient_dtype: as `nj.job_from_config`.
      prices: of an hour of one GPU (`nj.read_prices`); notes: for the report; console: where progress goes.
    Raises: `InputError` for an unknown method or GPU, and for what `parallelize` cannot use.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if not counts or not gpus:
        raise InputError("no GPUs to try; give names of them, and counts such as 1 2 4 8")
    named = gpus if isinstance(gpus, Mapping) else clusters_of(gpus, counts)
    predictors = predictor if isinstance(predictor, Mapping) else dict.fromkeys(named, predictor)
    lora = None if method == "full" else Lora(rank, tuple(targets), FOUR_BITS if method == "qlora" else None)
    layouts = parallelize(
        predictors,
        named,
        model,
        global_batch_size=global_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer,
        gradient_dtype=gradient_dtype,
        lora=lora,
        space=Space(chunks=(1,), zero=ZERO[method], sequence_parallel=(False,), axes=("data",)),
        prices=prices,
        run=run,
        top=1,
        notes=notes,
        console=console,
    )
    name = str(model) if isinstance(model, str | Path) else layouts.workload["model"]
    return replace(layouts, machines=tuple(_with_commands(machine, name) for machine in layouts.machines))


def _with_commands(machine: Machine, model: str) -> Machine:
    """A machine whose recipes have their command lines."""
    choices = (
        replace(item, command=predict_command(item.step, model, machine.name), trainer=trl_command(item.step))
        for item in machine.choices
    )
    return replace(machine, choices=tuple(choices))


def clusters_of(gpus: Sequence[str], counts: Sequence[int]) -> dict[str, Cluster]:
    """So many of every GPU in their usual servers, by name."""
    return dict(load_named_cluster(f"{count}x {gpu}") for gpu in gpus for count in counts)


def predict_command(step: Forecast, model: str, machine: str) -> str:
    """Command line that forecasts the same step; machine: COUNTx GPU."""
    load, layout = step.workload, step.workload["layout"]
    words = ["neusight-jax", "predict", model, "--gpu", gpu_in(machine), "--gpus", step.gpus, "--mode", "training"]
    words += ["--dtype", load["dtype"], "--sequence-length", load["sequence_length"]]
    words += ["--global-batch-size", load["global_batch_size"], "--micro-batch-size", layout["micro_batch_size"]]
    words += ["--optimizer", load["optimizer"], "--recompute", layout["recompute"]]
    words += ["--zero", layout["zero"]] if layout["zero"] else []
    words += ["--gradient-dtype", load["gradient_dtype"]] if load["gradient_dtype"] != "fp32" else []
    if lora := load.get("lora"):
        words += ["--lora-rank", lora["rank"]]
        words += ["--lora-targets", ",".join(lora["targets"])] if lora["targets"] else []
        words += ["--weight-dtype", lora["weight_dtype"]] if lora.get("weight_dtype") else []
    return shlex.join(map(str, words))


def trl_command(step: Forecast) -> str:
    """The same recipe as a command of Hugging Face's TRL, by the options of its version 1.16.

    Model and data are the reader's to fill in; so are adapters of some products alone, which are named otherwise there.
    """
    load, layout = step.workload, step.workload["layout"]
    sharding = f"zero{layout['zero']}" if layout["zero"] else "multi_gpu" if step.gpus > 1 else "single_gpu"
    words: list[Any] = ["trl", "sft", "--accelerate_config", sharding, "--num_processes", step.gpus]
    words += ["--model_name_or_path", "MODEL", "--dataset_name", "DATASET", "--max_length", load["sequence_length"]]
    words += ["--packing", "true", "--dtype", {"bf16": "bfloat16", "fp16": "float16"}.get(load["dtype"], "float32")]
    words += ["--per_device_train_batch_size", layout["micro_batch_size"]]
    words += ["--gradient_accumulation_steps", load["micro_batches"]]
    words += ["--gradient_checkpointing", str(layout["recompute"] == "full").lower()]
    words += ["--attn_implementation", "flash_attention_2"]
    words += ["--optim", OPTIMIZERS[load["optimizer"]]] if load["optimizer"] in OPTIMIZERS else []
    if lora := load.get("lora"):
        words += ["--use_peft", "--lora_r", lora["rank"], "--lora_target_modules", "all-linear"]
        words += ["--load_in_4bit", "--use_bnb_nested_quant"] if lora.get("weight_dtype") else []
    return shlex.join(map(str, words))
