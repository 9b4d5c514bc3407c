"""Options of commands: how they are written, and those that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from neusight_jax.cli.help import gpu_names, model_names
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.graph.configs.adapters import Lora
    from neusight_jax.runs import Run


def option(
    text: str,
    *names: str,
    default: str | None = None,
    metavar: str | None = None,
    group: str | None = None,
    complete: Callable[[str], list[str]] | None = None,
) -> Any:
    """An option with its help.

    Args:
      names: as it is written; none = as the parameter is called. default: what the help says of a default of None.
      group: the head it stands under in the help; complete: what a shell offers for the beginning of a value.
    """
    shown: dict[str, Any] = {"show_default": default or True, "metavar": metavar, "rich_help_panel": group}
    return typer.Option(*names, help=text, autocompletion=complete, **shown)


def argument(text: str, metavar: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """An argument with its help; complete: as of `option`."""
    return typer.Argument(help=text, metavar=metavar, autocompletion=complete)


_CHECKPOINT = "A name of `neusight-jax checkpoints`, or a folder written by `train`."
Model = Annotated[
    str, argument("A name of `neusight-jax models`, a config.json, or PATH.py:FUNCTION.", "MODEL", model_names)
]
Models = Annotated[
    list[str],
    argument("Names of `neusight-jax models`, config.json files, or PATH.py:FUNCTION.", "MODEL...", model_names),
]
Gpu = Annotated[str, option("A name of `neusight-jax gpus`, or a JSON or YAML file.", complete=gpu_names)]
MachineGpu = Annotated[
    str | None, option("A name of `neusight-jax gpus`, or a JSON or YAML file; or give --cluster.", complete=gpu_names)
]
OwnGpu = Annotated[str | None, option("File of the device's figures, if the catalog lacks it; for a list: any GPU.")]
Checkpoint = Annotated[str, option(_CHECKPOINT)]
WorkloadCheckpoint = Annotated[
    str | None, option(_CHECKPOINT, default="fp32; tensorcore when the model computes in another dtype")
]
Relaxation = Annotated[float, option("0 = whole waves, 1 = none: smooths what has no slope.")]


def _page(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The path of a page, checked before the work begins."""
    if path is not None:
        from neusight_jax.reports.page import require_report

        require_report(path, param.opts[0])
    return path


ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        callback=_page,
        help="Also write it as a page for a browser, .html, all in one file; or for a pull request, .md.",
    ),
]
PriceFile = Annotated[Path | None, option("JSON, YAML or CSV, GPU: price of one for an hour.", metavar="FILE")]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.html", callback=_page, help="Also draw it: a page of pictures alone."),
]
AsJson = Annotated[bool, option("Print JSON alone.", "--json")]
MeasurementFolders = Annotated[list[Path], option("Parquet or CSV files of measured kernels, or folders of them.")]
GpuFiles = Annotated[
    list[Path] | None,
    option("Figures of measured GPUs that the catalog lacks.", metavar="FILE", default="gpu.json beside the rows"),
]
DropInvalid = Annotated[bool, option("Leave bad rows out instead of refusing them.", "--drop-invalid")]
OutputFolder = Annotated[Path, option("The folder to write; new or empty.")]
Resume = Annotated[bool, option("Go on where an interrupted run stopped; nothing twice.", "--resume")]
LORA_RANK = "Training of decoders with LoRA: rank of the adapters that alone are trained."
LORA_TARGETS = "With --lora-rank: parts of names of the products that have one: qkv, attention, mlp.down ..."
_KV_DTYPE = "as the config's quantization, fp8 for fp8 and fp4, else as --dtype"
_WEIGHT_DTYPE = (
    "What weights are stored in, decoders only: int4, fp4, fp8, int8 or wider, or a mixture of GGUF such as Q4_K_M. "
    "Narrower than --dtype, they are widened in the products (weight-only)."
)
_FUSED = "Merge elementwise chains as a compiler would, or not; decoders and ViT run fused kernels either way."
_EXECUTION = "Software that runs it: eager (PyTorch, its host included), compiled, or engine."
_LOOPS = "PATH.py:FUNCTION: how often the body of a while loop or fori_loop of unknown count runs."
_LENGTHS = "2,048 for decoders, else the longest the model takes"
_ARGUMENTS = "PATH.py:FUNCTION, in JAX: arguments that hold parameters, by name or position: w,u. For the memory."


OptimizerName = Annotated[
    str | None,
    option(
        "Training: adamw (fused), adamw-foreach, adamw-8bit, adafactor, lion, muon, sgd, sgd-momentum.",
        default="no step of one on one GPU, adamw for a job",
    ),
]
GradientDtype = Annotated[
    str, option("Training: what gradients are kept in: fp32 (18 bytes a 16-bit weight with AdamW) or bf16 (16).")
]
LoraRank = Annotated[int | None, option(LORA_RANK, default="all weights are trained")]
LoraTargets = Annotated[str | None, option(LORA_TARGETS, default="all of a layer")]
Experts = Annotated[
    str | None,
    option("Training: products of experts grouped (one kernel) or looped (by the host).", default="looped"),
]
Framework = Annotated[
    str | None,
    option(
        "Whose defaults hold: megatron, nemo, torchtitan, deepspeed, nanotron, llm-foundry, hf-trainer.",
        metavar="NAME",
        default="none in particular",
    ),
]
CudaGraphs = Annotated[
    bool | None, option("Training passes replayed as CUDA graphs.", "--cuda-graphs/--no-cuda-graphs", default="no")
]
DocumentTokens = Annotated[
    int | None,
    option("Mean tokens of the documents packed into a sequence, which attention stays inside of.", default="all"),
]
GatherDtype = Annotated[
    str | None,
    option(
        "With --zero 3: what parameters are gathered in, such as fp8.", metavar="NAME", default="as activations are"
    ),
]
JobAttention = Annotated[
    str | None, option("flash, flash2 (FlashAttention-2) or unfused.", metavar="NAME", default="as --framework has it")
]
RECOMPUTE_CHOICES = "none, selective (attention), full, full:LAYERS of each stage, or of attention,norm,activation."
WeightDtype = Annotated[
    str | None,
    option(
        _WEIGHT_DTYPE,
        *("--weight-dtype", "--weights"),
        metavar="NAME",
        default="as the config's quantization, else as --dtype",
    ),
]
KvDtype = Annotated[str | None, option("Of the KV cache, decoders only.", default=_KV_DTYPE)]


class _Options:
    """Options of a command line as a record; those at their defaults were not given."""

    def given(self) -> dict[str, Any]:
        """Options that differ from the defaults, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(cast(Any, self))}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class WorkloadOptions(_Options):
    """Workload: what a command line says of it beside its model: the same in every command that forecasts models."""

    batch_size: Annotated[int, option("Sequences in a batch; of a job, those of one forward pass of a replica.")] = 1
    sequence_length: Annotated[
        str | None, option("Tokens in a sequence; decoders take one for each request too: 512,2048.", default=_LENGTHS)
    ] = None
    mode: Annotated[str, option("inference, training (forward and backward); decoders also prefill, decode.")] = (
        "inference"
    )
    dtype: Annotated[
        str | None,
        option(
            "Of the arithmetic, and of all tensors nothing else is said of.",
            default="a decoder's own (its config), fp32 of all others",
        ),
    ] = None
    fused: Annotated[
        bool | None,
        option(_FUSED, "--fused/--eager", default="as the framework runs: JAX functions fused, all others not"),
    ] = None
    execution: Annotated[
        str | None, option(_EXECUTION, metavar="NAME", default="engine for decoders and ViT, else PyTorch's kernels")
    ] = None
    attention: Annotated[
        str | None,
        option("With --execution eager: unfused or flash; of a job also flash2.", metavar="NAME", default="unfused"),
    ] = None
    kv_length: Annotated[
        str | None,
        option(
            "Prefill and decode: keys the last new token sees, one number or one for each request.",
            default="the sequence length",
        ),
    ] = None
    engine: Annotated[
        str | None,
        option("Of a decoder's forward step: llama.cpp.", metavar="NAME", default="a server's, llama.cpp for GGUF"),
    ] = None
    weight_dtype: WeightDtype = None
    kv_dtype: KvDtype = None
    tensor_parallel: Annotated[int, option("GPUs a decoder's layers are split over; their sums are counted.")] = 1
    expert_parallel: Annotated[
        int, option("GPUs the experts are split over, on top of --tensor-parallel; of a job, of all its GPUs.")
    ] = 1
    optimizer: OptimizerName = None
    gradient_dtype: GradientDtype = "fp32"
    lora_rank: LoraRank = None
    lora_targets: LoraTargets = None
    experts: Experts = None
    trip_count: Annotated[int | None, option(_LOOPS, default="a function with one is refused")] = None
    branch: Annotated[
        str, option("PATH.py:FUNCTION: branch of a cond or switch that runs, worst or its index from 0.")
    ] = "worst"
    fp32_products: Annotated[str, option("PATH.py:FUNCTION: path of fp32 matrix products, fp32 or tf32.")] = "fp32"
    fp32_convolutions: Annotated[
        str | None, option("PATH.py:FUNCTION: path of fp32 convolutions, fp32 or tf32. Default: tf32 in torch.")
    ] = None
    parameters: Annotated[str | None, option(_ARGUMENTS, default="as their use tells")] = None


@dataclass(frozen=True)
class JobOptions(_Options):
    """Jobs: what a command line says of how a training step is laid out; any of it makes the step a job."""

    gpus: Annotated[int | None, option("GPUs of a training job.", default="as many as the layout takes")] = None
    cluster: Annotated[
        Path | None, option("A cluster (gpu, count, topology) in place of --gpu and --gpus.", metavar="FILE")
    ] = None
    pipeline_parallel: Annotated[int, option("Stages the layers are cut into.")] = 1
    data_parallel: Annotated[int | None, option("Replicas.", default="what is left of --gpus")] = None
    context_parallel: Annotated[int, option("GPUs a sequence is split over.")] = 1
    chunks: Annotated[int, option("Stages of one pipeline rank (interleaving).")] = 1
    zero: Annotated[int, option("What replicas shard: 0 nothing to 3 parameters too (FSDP).")] = 0
    shards: Annotated[
        int, option("With --zero 3, GPUs that share one copy of the parameters; fewer than all is HSDP.", metavar="N")
    ] = 0
    micro_batch_size: Annotated[
        int | None, option("Sequences of one forward pass of a replica.", default="--batch-size")
    ] = None
    global_batch_size: Annotated[int | None, option("Sequences of a step.", default="one pass of each")] = None
    recompute: Annotated[str, option(RECOMPUTE_CHOICES)] = "none"
    framework: Framework = None
    cuda_graphs: CudaGraphs = None
    gather_dtype: GatherDtype = None
    document_tokens: DocumentTokens = None
    sequence_parallel: Annotated[bool, option("Norms split over --tensor-parallel.")] = False

    def layout(self) -> list[str]:
        """Options given beside those of the machine, as they are written."""
        return option_names(name for name in self.given() if name not in ("gpus", "cluster"))


@dataclass(frozen=True)
class LimitOptions(_Options):
    """Limits: what holds a board back: a cap of its power and a locked clock."""

    power_limit: Annotated[
        str | None, option("Cap of a GPU's power, e.g. 300W.", metavar="WATTS", default="its own")
    ] = None
    clock: Annotated[
        str | None, option("Locked core clock of a GPU, e.g. 1.2GHz.", metavar="HZ", default="up to its boost")
    ] = None


@dataclass(frozen=True)
class RunOptions(_Options):
    """Whole run: how much work, and what it takes: hours, dollars, kilowatt-hours."""

    tokens: Annotated[
        str | None,
        option("To train, or to generate, e.g. 2T, 300B, 50M.", metavar="N", default="a step alone is forecast"),
    ] = None
    samples: Annotated[
        str | None, option("In place of --tokens: sequences, e.g. 52k.", metavar="N", default="a step alone")
    ] = None
    epochs: Annotated[float, option("Passes over --tokens or --samples.")] = 1.0
    mtbf_hours: Annotated[
        float | None,
        option("Hours between failures of one GPU, e.g. 50e3; N fail N times as often.", default="nothing fails"),
    ] = None
    checkpoint_s: Annotated[
        float | None, option("Seconds for which a checkpoint stops the job; with --mtbf-hours.", default="none is made")
    ] = None
    restart_s: Annotated[float, option("Seconds from a failure until the job runs on; with --mtbf-hours.")] = 0.0
    electricity: Annotated[
        float | None, option("Dollars of a kWh, e.g. 0.12; with --tokens.", metavar="DOLLARS", default="not counted")
    ] = None
    pue: Annotated[float, option("Watts of the building over those of its servers; 1 = nothing for cooling.")] = 1.0
    host_watts: Annotated[
        float, option("Watts of the rest of a server for each of its GPUs, e.g. 150.", default="0: the boards alone")
    ] = 0.0
    grid: Annotated[
        float | None, option("Grams of CO2e of a kWh, e.g. 400; with --tokens.", metavar="GRAMS", default="not counted")
    ] = None

    def run(self, *options: str) -> Run | None:
        """The run to count, None without tokens and samples; `InputError` for values that cannot be.

        Args:
          options: others of the command line that need a run.
        """
        from neusight_jax.runs import Run

        if self.tokens is None and self.samples is None:
            if flags := [*option_names(self.given()), *options]:
                raise InputError(f"{', '.join(flags)}: of how long a run? give --tokens, such as --tokens 2T")
            return None
        return Run(
            tokens=_count("--tokens", self.tokens),
            samples=_count("--samples", self.samples),
            epochs=self.epochs,
            dollars_per_kwh=self.electricity,
            pue=self.pue,
            host_w=self.host_watts,
            grid_g_per_kwh=self.grid,
            mtbf_hours=self.mtbf_hours,
            checkpoint_s=self.checkpoint_s,
            restart_s=self.restart_s,
        )


def _count(flag: str, text: str | None) -> float | None:
    """A number of tokens or samples of a command line."""
    from neusight_jax.units import count_of

    number = None if text is None else count_of(text)
    if text is not None and number is None:
        raise InputError(f"{flag} is {text!r}, expected a number such as 2T, 300B, 50M or 15e12")
    return number


def option_names(names: Iterable[str]) -> list[str]:
    """Names of fields as they are written on a command line."""
    return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True)
class ServiceOptions(_Options):
    """Serving: what a command line says of requests and targets of models that are served, in place of steps."""

    slo: Annotated[
        str | None, option("Models are served within targets, e.g. 'ttft<=1s tpot<=50ms'.", metavar="TARGETS")
    ] = None
    input_tokens: Annotated[int | None, option("Of a prompt, with --slo.")] = None
    output_tokens: Annotated[int | None, option("Of an answer, with --slo.")] = None
    percentile: Annotated[int, option("Of requests that have to meet the targets: 50 or 95.")] = 95
    gpu_price: Annotated[
        float | None,
        option("Of an hour of the base; other GPUs in proportion to their dollars.", default="1, hours of the base"),
    ] = None


@dataclass(frozen=True)
class ModelOptions(_Options):
    """Use: what a command line says of how a model that is designed is served and trained."""

    input_tokens: Annotated[int, option("Of a prompt.")] = 1024
    output_tokens: Annotated[int, option("Of an answer.")] = 256
    batch_size: Annotated[int, option("Requests served together.")] = 1
    dtype: Annotated[str, option("Of the arithmetic.")] = "bf16"
    weight_dtype: WeightDtype = None
    kv_dtype: KvDtype = None
    training_tokens: Annotated[float | None, option("It is trained on.", default="20 for a parameter of MODEL")] = None
    served_tokens: Annotated[float, option("Of prompts and answers over its life.")] = 0.0
    training_gpus: Annotated[float, option("That train it.")] = 1.0
    price_per_hour: Annotated[
        float | None,
        option(
            "Of the base; other GPUs in proportion to their dollars.", "--gpu-price", default="1, hours of the base"
        ),
    ] = None


def lora_of(rank: int | None, targets: str | None, weight_dtype: str | None = None) -> Lora | None:
    """Adapters as a command line says; `InputError` for targets or narrow frozen weights without a rank.

    Args:
      rank, targets: of the adapters.
      weight_dtype: what the frozen weights of a job are stored in.
    """
    from neusight_jax.graph.configs.adapters import Lora

    if rank is None and targets is not None:
        raise InputError(f"--lora-targets {targets}: of which rank? give --lora-rank, such as --lora-rank 16")
    if rank is None and weight_dtype is not None:
        raise InputError(f"--weight-dtype {weight_dtype}: a job trains its weights; give --lora-rank for QLoRA, say 16")
    words = tuple(word.strip() for word in (targets or "").split(",") if word.strip())
    return None if rank is None else Lora(rank, words, weight_dtype)


_OF_FUNCTIONS = ("trip_count", "branch", "fp32_products", "fp32_convolutions", "parameters")
"""Options of models that are functions."""


def takes_workload(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the fields of its parameters that are records, as `WorkloadOptions`, as options in their place.

    Options that the command has itself stay its own, and have their defaults in the record.
    """
    params, hints = inspect.signature(command).parameters, get_type_hints(command, include_extras=True)
    groups = {name: hints[name] for name in params if is_dataclass(hints[name])}
    added = {name: {field.name: field.default for field in fields(group)} for name, group in groups.items()}
    added = {
        name: {key: value for key, value in entries.items() if key not in params} for name, entries in added.items()
    }
    for group in groups.values():
        hints = get_type_hints(group, include_extras=True) | hints
        for field in fields(group):
            head = group.__doc__.partition(":")[0]
            hints[field.name].__metadata__[0].rich_help_panel = "Functions" if field.name in _OF_FUNCTIONS else head
    defaults: dict[str, Any] = {}
    for name, parameter in params.items():
        defaults |= added.get(name, {name: parameter.default})
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        made = {name: groups[name](**{key: values.pop(key) for key in keys}) for name, keys in added.items()}
        command(**made, **values)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {param.name: param.annotation for param in parameters}
    return with_options
