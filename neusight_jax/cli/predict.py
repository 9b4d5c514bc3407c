"""`neusight-jax predict`: how long a model takes on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neusight_jax.cli.console import show, show_json
from neusight_jax.cli.options import (
    AsJson,
    BatchSize,
    Dtype,
    ExpertParallel,
    Fused,
    Gpu,
    KvDtype,
    KvLength,
    Mode,
    Model,
    RequestLengths,
    TensorParallel,
    WeightDtype,
    WorkloadCheckpoint,
)
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.graph.graph import Graph
    from neusight_jax.graph.requests import Lengths


def predict(
    model: Model,
    gpu: Gpu,
    batch_size: BatchSize = 1,
    sequence_length: RequestLengths = None,
    mode: Mode = "inference",
    dtype: Dtype = "fp32",
    fused: Fused = None,
    kv_length: KvLength = None,
    weight_dtype: WeightDtype = None,
    kv_dtype: KvDtype = None,
    tensor_parallel: TensorParallel = 1,
    expert_parallel: ExpertParallel = 1,
    checkpoint: WorkloadCheckpoint = None,
    as_json: AsJson = False,
) -> None:
    """Forecast a model on a GPU, kernel by kernel.

    MODEL may be a function in a Python file, path/to/file.py:function, that returns a JAX function or a torch module
    and its example arguments: batch, lengths and dtypes are then those of the arguments.

    A GPU the checkpoint was trained on is forecast with its own measured effect, as `evaluate` does.
    """
    from neusight_jax.checkpoint import default_checkpoint, load_card, load_predictor
    from neusight_jax.forecast import predict as forecast_model
    from neusight_jax.gpu_catalog import canonical_name
    from neusight_jax.gpu_file import load_named_gpu

    gpu_name, machine = load_named_gpu(gpu)
    serving = Serving(kv_length, weight_dtype, kv_dtype, tensor_parallel, expert_parallel)
    graph = _graph(model, batch_size, sequence_length, mode, dtype, fused, serving)
    dtype = graph.dtype
    try:
        machine.peak_flop_per_s(dtype)
    except InputError as error:
        raise InputError(f"{gpu_name}: {error}") from None
    checkpoint = checkpoint or default_checkpoint(graph.kernels)
    card = load_card(checkpoint)
    # A name, not a file: the figures are those of the GPU that was measured.
    # A GPU the catalog does not have is known by the name in its file.
    device = canonical_name(gpu)
    if canonical_name(gpu_name) is None and gpu_name in card.get("device_effects", {}):
        device = gpu_name
    notes = forecast_notes(card, checkpoint, gpu_name, graph)
    known, unknown = measured_networks(card, device, graph)
    if known:
        but = f", but for {', '.join(unknown)}" if unknown else ""
        notes.append(
            f"with the effect {checkpoint} measured on this GPU{but}; other GPUs are forecast from figures alone"
        )
    forecast = forecast_model(load_predictor(checkpoint, device), machine, graph, gpu_name=gpu_name, notes=notes)
    if as_json:
        show_json({"checkpoint": checkpoint, **forecast.to_dict()})
        return
    from neusight_jax.report import forecast_tables

    show(forecast_tables(forecast))


@dataclass(frozen=True)
class Serving:
    """Options of decoders alone, as `graph_from_config` takes them."""

    kv_length: str | None
    weight_dtype: str | None
    kv_dtype: str | None
    tensor_parallel: int
    expert_parallel: int


def lengths(option: str, text: str | None) -> Lengths | None:
    """One whole number, or several with commas between; `InputError` naming the option otherwise."""
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} is {text!r}, expected a whole number, or one for each request: 512,2048") from None
    return values if len(values) > 1 else values[0]


def _graph(
    model: str,
    batch_size: int,
    sequence_length: str | None,
    mode: str,
    dtype: str,
    fused: bool | None,
    serving: Serving,
) -> Graph:
    from neusight_jax.graph.source_file import graph_from_source, is_source

    if is_source(model):
        from neusight_jax.graph.trace_options import TraceOptions

        if sequence_length is not None or batch_size != 1 or dtype != "fp32":
            raise InputError(
                f"{model}: its example arguments say batch, lengths and dtypes; "
                "leave --batch-size, --sequence-length and --dtype out"
            )
        return graph_from_source(model, mode, TraceOptions(fused=fused))
    from neusight_jax.graph.build import graph_from_config

    given = lengths("--sequence-length", sequence_length)
    return graph_from_config(
        model,
        batch_size,
        longest(model) if given is None else given,
        mode,
        dtype,
        bool(fused),
        kv_length=lengths("--kv-length", serving.kv_length),
        weight_dtype=serving.weight_dtype,
        kv_dtype=serving.kv_dtype,
        tensor_parallel=serving.tensor_parallel,
        expert_parallel=serving.expert_parallel,
    )


def longest(model: str) -> int:
    """The longest sequence a model takes; `InputError` when it has no limit."""
    from neusight_jax.graph.sequence import longest_sequence

    positions = longest_sequence(model)
    if positions is None:
        raise InputError(f"{model} takes sequences of any length; say which with --sequence-length")
    return positions


def measured_networks(card: Mapping[str, Any], device: str | None, graph: Graph) -> tuple[list[str], list[str]]:
    """Networks of a model that the card has effects of a device for, and those that it has none for."""
    effects, networks = card.get("device_effects", {}).get(device, {}), sorted(graph.kernels.networks)
    return [name for name in networks if name in effects], [name for name in networks if name not in effects]


def forecast_notes(card: Mapping[str, Any], checkpoint: str, gpu_name: str, graph: Graph) -> list[str]:
    """What to know before trusting a forecast: figures that are estimates, and what training did not see.

    A GPU on which only other families were measured was not in training, for this model.
    """
    from neusight_jax.checkpoint import card_notes
    from neusight_jax.gpu_catalog import canonical_name, gpu_info

    notes, dtype = card_notes(card, checkpoint), graph.dtype
    trained_on = card.get("trained_on", {}).get("devices")
    elsewhere = card.get("device_effects", {}).get(gpu_name) and not measured_networks(card, gpu_name, graph)[0]
    calibrated = card.get("calibrated")
    if calibrated is not None and calibrated["gpu"] == gpu_name:
        rows = sum(calibrated["rows"].values())
        notes.append(f"calibrated with {rows} kernels measured on this GPU ({', '.join(calibrated['rows'])})")
    elif calibrated is not None:
        measured, before = calibrated["gpu"], calibrated["checkpoint"]
        notes.append(f"calibrated on {measured}, and forecast as if {gpu_name} deviated alike; {before} does not")
    elif gpu_name in card.get("held_out", ()):
        notes.append(f"this GPU was not in training: checkpoint {checkpoint} held {gpu_name} out")
    elif trained_on is not None and (gpu_name not in trained_on or elsewhere):
        notes.append(f"this GPU was not in training: {checkpoint} forecasts {gpu_name} from its figures alone")
    dtypes = card.get("trained_dtypes")
    if dtypes is not None and dtype not in dtypes:
        seen = ", ".join(dtypes)
        notes.append(f"{checkpoint} was trained on {seen} only: this {dtype} forecast is an extrapolation")
    estimates = gpu_info(gpu_name).estimates if canonical_name(gpu_name) == gpu_name else ()
    if estimates:
        notes.append(f"figures of {gpu_name} that are estimates, not public: {', '.join(estimates)}")
    return notes
