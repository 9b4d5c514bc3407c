"""`neusight-jax predict`: how long a model takes on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from neusight_jax.cli.console import answer, busy, remark
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    LimitOptions,
    MachineGpu,
    Model,
    PriceFile,
    ReportFile,
    RunOptions,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    takes_workload,
)

if TYPE_CHECKING:
    from neusight_jax.forecast import Forecast
    from neusight_jax.graph.graph import Graph
    from neusight_jax.hardware.cluster import Machine
    from neusight_jax.hardware.gpu import GPU
    from neusight_jax.job.job import Job
    from neusight_jax.model.predictor import Predictor

_CHAKRA = "Also write the job as Chakra traces, one a rank, for ASTRA-sim (extra `chakra`); needs --gpus."
_ROLLOUTS = "Training jobs: a step of reinforcement learning, with so many responses written to each prompt."
_TIMELINE = (
    "Also write its kernels in their order as a Chrome trace, for Perfetto and `scale-trace`: FILE.json, FILE.json.gz, "
    "or a new folder of one file a rank of the pipeline."
)


@takes_workload
def predict(
    model: Model,
    gpu: MachineGpu = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    limits: LimitOptions,
    whole: RunOptions,
    rollouts: Annotated[int | None, option(_ROLLOUTS, metavar="N", default="responses are there")] = None,
    response_tokens: Annotated[int | None, option("With --rollouts: of a response, the rest is prompt.")] = None,
    prices: PriceFile = None,
    checkpoint: WorkloadCheckpoint = None,
    timeline: Annotated[Path | None, option(_TIMELINE, metavar="PATH")] = None,
    chakra: Annotated[Path | None, option(_CHAKRA, metavar="DIR")] = None,
    strict: Annotated[bool, option("Refuse what nothing like it was measured for.")] = False,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Forecast a model on a GPU, kernel by kernel; or a training job on many, with --gpus or any option of its layout.

    MODEL may be a function in a Python file, path/to/file.py:function, that returns a JAX function or a torch module
    and its example arguments: batch, lengths and dtypes are then those of the arguments.

    A GPU the checkpoint was trained on is forecast with its own measured effect, as `evaluate` does.
    """
    from neusight_jax.cli.workloads import held_back, machine_of, work_of
    from neusight_jax.errors import InputError
    from neusight_jax.graph.graph import Graph
    from neusight_jax.hardware.cluster import gpu_of
    from neusight_jax.hardware.files import gpu_in
    from neusight_jax.hardware.prices import price_in
    from neusight_jax.prediction import predict as forecast_model

    run = whole.run(*(["--prices"] if prices is not None else []))
    work = work_of(model, load, job)
    name, machine = machine_of(work, gpu, job)
    price, *price_notes = (None,) if prices is None else price_in(prices, gpu_in(name))
    machine = held_back(machine, limits)
    if isinstance(work, Graph):
        if chakra is not None:
            raise InputError("--chakra writes training jobs; give --mode training with --gpus N, or leave it out")
        work = work.on(gpu_of(machine).paths)
    using = used_for(work, gpu, name, gpu_of(machine), checkpoint)
    with busy("forecasting"):
        notes = [*using.notes, *(run.notes() if run else ()), *price_notes]
        forecast = forecast_model(using.predictor, machine, work, gpu_name=name, notes=notes)
    if rollouts is not None or response_tokens is not None:
        forecast = _rolled_out(forecast, model, work, machine, using.predictor, rollouts, response_tokens)
    if strict:
        _refuse_unmeasured(forecast)
    forecast = run.of(forecast, price) if run else forecast
    _write(forecast, work, using.predictor, machine, timeline, chakra)
    about = {"machine": gpu_of(machine)} if isinstance(work, Graph) else {}
    answer(forecast, as_json, report, about, checkpoint=using.checkpoint)


def _rolled_out(
    update: Forecast,
    model: str,
    work: Graph | Job,
    machine: Machine,
    predictor: Predictor,
    rollouts: int | None,
    response_tokens: int | None,
) -> Forecast:
    """A training step with the rollout before it; `InputError` for other work, and for one option without the other."""
    from neusight_jax.errors import InputError
    from neusight_jax.graph.graph import Graph
    from neusight_jax.serving.rollouts import Rollout, rollout_step

    if rollouts is None or response_tokens is None:
        raise InputError("--rollouts and --response-tokens say one thing together; give both")
    if isinstance(work, Graph):
        raise InputError("--rollouts: of training jobs; give --mode training with --gpus N, or leave it out")
    rollout = Rollout(rollouts, response_tokens)
    with busy("rolling out"):
        return rollout_step(predictor, cast(Any, machine), work, update, rollout, model)


def _refuse_unmeasured(forecast: Forecast) -> None:
    """`InputError` with the first note that nothing like what is forecast was measured."""
    from neusight_jax.errors import InputError
    from neusight_jax.unmeasured import UNLIKE

    for note in forecast.notes:
        if note.startswith(UNLIKE):
            raise InputError(f"refused by --strict: {note}; leave --strict out for a forecast with a wide interval")


@dataclass(frozen=True)
class Used:
    """Forecaster of work on one machine: the checkpoint, its predictor for this GPU, and what to know of it."""

    checkpoint: str
    predictor: Predictor
    notes: list[str]


def used_for(work: Graph | Job, gpu: str | None, name: str, figures: GPU, checkpoint: str | None) -> Used:
    """Forecaster of work on a machine, with what was measured of its GPU.

    Args:
      gpu: as a command line names it, None of a cluster file; name: of the machine (`machine_of`); figures: of its GPU.
    Raises: `InputError` where the GPU lacks the arithmetic of the work.
    """
    from neusight_jax.cli.workloads import check_dtype
    from neusight_jax.hardware.files import gpu_in
    from neusight_jax.model.checkpoint import default_checkpoint, load_card, load_predictor

    gpu_name = gpu_in(name)
    for dtype in work.arithmetic:
        check_dtype(figures, gpu_name, dtype)
    checkpoint = checkpoint or default_checkpoint(work.kernels)
    card = load_card(checkpoint)
    device = _measured_device(card, gpu or gpu_name, gpu_name)
    notes = forecast_notes(card, checkpoint, gpu_name, work)
    measured, unknown = measured_networks(card, device, work)
    if measured:
        but = f", but for {', '.join(unknown)}" if unknown else ""
        notes.append(
            f"with the effect {checkpoint} measured on this GPU{but}; other GPUs are forecast from figures alone"
        )
    return Used(checkpoint, load_predictor(checkpoint, device), notes)


def _measured_device(card: Mapping[str, Any], gpu: str, gpu_name: str) -> str | None:
    """The GPU whose measured effects may be used: a name of the catalog, as a file's figures may be others; or, where
    the catalog lacks it, the name in its file."""
    from neusight_jax.hardware.catalog import canonical_name

    if canonical_name(gpu_name) is None and gpu_name in card.get("device_effects", {}):
        return gpu_name
    return canonical_name(gpu)


def _write(
    forecast: Forecast,
    work: Graph | Job,
    predictor: Predictor,
    machine: Machine,
    timeline: Path | None,
    chakra: Path | None,
) -> None:
    """Writes the files that are asked for."""
    if timeline is not None:
        from neusight_jax.graph.graph import Graph
        from neusight_jax.reports.timeline import forecast_timeline, step_timeline, write_timeline

        made = (
            forecast_timeline(cast(Any, forecast), work)
            if isinstance(work, Graph)
            else step_timeline(predictor, machine, work, cast(Any, forecast))
        )
        made_files = write_timeline(timeline, made)
        remark(f"wrote {timeline}" if made_files == [timeline] else f"wrote {len(made_files)} files to {timeline}")
    if chakra is not None:
        from neusight_jax.reports.chakra import write_chakra

        with busy("writing traces"):
            written = write_chakra(chakra, predictor, machine, cast(Any, work))
        remark(f"wrote {len(written)} files to {chakra}")


def plain_notes(card: Mapping[str, Any], checkpoint: str, gpu_name: str, graph: Graph | Job) -> list[str]:
    """`forecast_notes` of a command that treats every GPU as unmeasured, and whether `predict` would not.

    Args: as of `forecast_notes`.
    """
    notes = forecast_notes(card, checkpoint, gpu_name, graph)
    if measured_networks(card, gpu_name, graph)[0]:
        notes.append("forecast from its figures alone, as all GPUs are here; `predict` uses what was measured of it")
    return notes


def measured_networks(card: Mapping[str, Any], device: str | None, graph: Graph | Job) -> tuple[list[str], list[str]]:
    """Networks of a model that the card has effects of a device for, and those that it has none for."""
    effects, networks = card.get("device_effects", {}).get(device, {}), sorted(graph.kernels.networks)
    return [name for name in networks if name in effects], [name for name in networks if name not in effects]


def forecast_notes(card: Mapping[str, Any], checkpoint: str, gpu_name: str, graph: Graph | Job) -> list[str]:
    """Notes to read before trusting a forecast: figures that are estimates, and what training did not see.

    A GPU on which only other families were measured was not in training, for this model.

    Args:
      card: of the checkpoint; checkpoint: its name or folder.
      gpu_name: in the catalog, or of a file.
      graph: what is forecast.
    """
    from neusight_jax.hardware.catalog import canonical_name, gpu_info
    from neusight_jax.model.checkpoint import card_notes

    notes = card_notes(card, checkpoint)
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
    catalogued = canonical_name(gpu_name) == gpu_name
    if trained_on and catalogued and not (calibrated is not None and calibrated["gpu"] == gpu_name):
        architecture = gpu_info(gpu_name).architecture
        if architecture not in {gpu_info(name).architecture for name in trained_on if canonical_name(name)}:
            notes.append(f"no GPU of the architecture {architecture} was measured for {checkpoint}")
    dtypes = card.get("trained_dtypes")
    for dtype in graph.arithmetic:
        if dtypes is None or dtype in dtypes:
            continue
        seen = ", ".join(dtypes)
        notes.append(f"{checkpoint} was trained on {seen} only: this {dtype} forecast is an extrapolation")
    estimates = gpu_info(gpu_name).estimates if catalogued else ()
    if estimates:
        notes.append(f"figures of this GPU that are estimates, not public: {', '.join(estimates)}")
    return notes
