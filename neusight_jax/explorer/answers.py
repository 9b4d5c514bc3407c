"""Answers to the explorer's page: choices, forecasts of variants of machines, their files and reports."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from neusight_jax.arithmetic import DTYPES
from neusight_jax.errors import InputError
from neusight_jax.explorer.asked import Catalog, Variant, Workload, read
from neusight_jax.forecast import Forecast
from neusight_jax.graph.configs.build import assumed_length, graph_from_config
from neusight_jax.graph.configs.config import language_config, list_models, read_config
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.catalog import list_gpus
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Machine, gpu_of
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import FIELDS, SWITCHES, WIDTH, WIDTH_PEAKS
from neusight_jax.job.job import Job, job_from_config
from neusight_jax.job.parallelism import RECOMPUTE, Parallelism
from neusight_jax.model.checkpoint import default_checkpoint, load_predictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.reports import forecast as forecasts
from neusight_jax.reports import plots
from neusight_jax.reports.page import Plot, page_of
from neusight_jax.sensitivities import TOPOLOGY, Sensitivity, sensitivity
from neusight_jax.units import MS, UNITS, US

REACH = 8.0
"""A slider goes from the base's figure over this to this many times it."""
MODES: tuple[str, ...] = ("inference", "training", "prefill", "decode")
WAYS: tuple[str, ...] = ("tensor", "pipeline", "context", "zero", "micro_batch_size", "recompute")
"""Fields of `Parallelism` that the page says; the rest of the GPUs are replicas."""


def _figures(machine: Machine) -> dict[str, float]:
    """Figures of a GPU, and of a cluster's links."""
    figures = {name: float(getattr(gpu_of(machine), name)) for name in FIELDS}
    links = {name: float(getattr(machine.topology, name)) for name in TOPOLOGY} if isinstance(machine, Cluster) else {}
    return figures | links


def choices() -> dict[str, Any]:
    """Names that the page offers."""
    names = {"models": list_models(), "gpus": list_gpus(), "modes": MODES, "dtypes": ["", *DTYPES]}
    return {**names, "recompute": RECOMPUTE}


def sliders(catalog: Catalog, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every figure of a machine that is an amount and that it has: its value, range, unit and what is shown."""
    base, count = query.get("gpu", ""), query.get("gpus", "1")
    catalog.check_gpu(base)
    gpus = int(count) if count.isascii() and count.isdigit() and len(count) < 8 else 1
    variant, shown = Variant(base), []
    for name, value in _figures((variant.cluster(gpus) if gpus > 1 else variant.named())[1]).items():
        if name not in SWITCHES and value > 0:
            scale, label = _scaled(name)
            shown.append({"name": name, "value": value, "scale": scale, "label": label, "reach": REACH})
    return shown


def _scaled(name: str) -> tuple[float, str]:
    if name in UNITS or name.endswith(("_flop_per_s", "_latency_s")):
        return plots.scaled(name) if not name.endswith("_latency_s") else (US, f"{name} (us)")
    return 1.0, name


@functools.lru_cache(maxsize=16)
def _work(load: Workload) -> Graph | Job:
    if not load.is_job:
        if load.tensor not in (1, load.gpus):
            raise InputError(f"a forward pass is split over all {load.gpus} GPUs; expected tensor {load.gpus}")
        shape = (load.batch_size, load.sequence_length, load.mode, load.dtype or None)
        return graph_from_config(load.model, *shape, tensor_parallel=load.gpus)
    taken = load.tensor * load.pipeline * load.context
    if taken < 1 or load.gpus % taken:
        raise InputError(f"{load.gpus} GPUs are no multiple of tensor · pipeline · context = {taken}; mend one")
    layout = Parallelism(data=load.gpus // taken, **{name: getattr(load, name) for name in WAYS})
    tokens = load.sequence_length or _usual_length(load.model)
    sizes: dict[str, Any] = {"global_batch_size": load.batch_size, "sequence_length": tokens}
    return job_from_config(load.model, layout, dtype=load.dtype or "bf16", **sizes)


@functools.lru_cache(maxsize=64)
def _usual_length(model: str) -> int | None:
    """Tokens of a sequence where nobody says how many, as in every command; None where a model takes any number."""
    try:
        tokens, _ = assumed_length(language_config(read_config(model)), None, "training", None)
    except InputError:
        return None
    return tokens if isinstance(tokens, int) else None


@functools.lru_cache(maxsize=8)
def _predictor(checkpoint: str) -> Predictor:
    return load_predictor(checkpoint)


def explored(load: Workload, variant: Variant, *, secants: bool = False) -> tuple[Sensitivity, Machine, str]:
    """The forecast of a variant with its elasticities, the machine, and the checkpoint."""
    work = _work(load)
    name, machine = variant.named() if load.gpus == 1 else variant.cluster(load.gpus, serves=not load.is_job)
    checkpoint = default_checkpoint(work.kernels)
    try:
        return sensitivity(_predictor(checkpoint), machine, work, gpu_name=name, secants=secants), machine, checkpoint
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


@functools.lru_cache(maxsize=64)
def _turn(load: Workload) -> threading.Lock:
    """Requests for one workload go one after another, so that it is compiled once; others do not wait for it."""
    return threading.Lock()


def answer(catalog: Catalog, content: Any) -> dict[str, Any]:
    """Numbers and pictures of the machines that the page shows."""
    load, variants = read(catalog, content)
    with _turn(load):
        return _answer(load, variants)


def _answer(load: Workload, variants: Sequence[Variant]) -> dict[str, Any]:
    shown = [explored(load, variant) for variant in variants]
    many = f"{load.gpus}x " if load.is_job else ""
    names = [f"{'AB'[place]}: {many}{variant.base}" for place, variant in enumerate(variants)]
    pairs = {name: (result.forecast, gpu_of(machine)) for name, (result, machine, _) in zip(names, shown, strict=True)}
    made = {name: forecast for name, (forecast, _) in pairs.items()}
    pictures = [
        *(forecasts.pictures(made) if load.is_job else ()),
        _families(made),
        _elasticities({name: result.total for name, (result, *_) in zip(names, shown, strict=True)}),
        plots.roofline(pairs),
        plots.power(pairs),
    ]
    return {
        "machines": [
            {
                "total_s": result.total_s,
                "interval_s": result.forecast.interval_s,
                "energy_j": result.forecast.energy_j,
                "power_w": result.forecast.power_w,
                **result.forecast.parts,
                "cards": forecasts.cards(result.forecast),
                "checkpoint": checkpoint,
                "figures": _figures(machine),
                "notes": result.notes,
            }
            for result, machine, checkpoint in shown
        ],
        "sequence_length": _usual_length(load.model),
        "plots": [
            {"title": picture.title, "data": picture.traces, "layout": dict(picture.layout)} for picture in pictures
        ],
    }


def _families(by_machine: Mapping[str, Forecast]) -> Plot:
    sums = [forecast.seconds_by("family") for forecast in by_machine.values()]
    parts = {
        name: [seconds.get(name, 0.0) / MS for seconds in sums]
        for name in dict.fromkeys(key for seconds in sums for key in seconds)
    }
    return plots.stacked("Where the time goes", list(by_machine), parts, "ms")


def _elasticities(totals: Mapping[str, Mapping[str, float]]) -> Plot:
    first = next(iter(totals.values()))
    names = [name for name in first if any(abs(total[name]) > plots.LEAST for total in totals.values())]
    names.sort(key=lambda name: -first[name])
    traces = [
        {"type": "bar", "orientation": "h", "name": machine, "y": names, "x": [total[name] for name in names]}
        for machine, total in totals.items()
    ]
    return Plot("What more of a figure buys", traces, {"xaxis": {"title": {"text": "% of time for 1 % more"}}})


def machine_yaml(catalog: Catalog, content: Any) -> str:
    """A variant as a GPU file, its base and every figure that differs from it; or of several GPUs as a cluster file."""
    load, (variant, *_) = read(catalog, content)
    base, (name, machine) = (
        load_named_gpu(variant.base),
        variant.named() if load.gpus == 1 else variant.cluster(load.gpus),
    )
    gpu = gpu_of(machine)
    changed = {field: float(getattr(gpu, field)) for field in FIELDS if getattr(gpu, field) != getattr(base[1], field)}
    if not isinstance(machine, Cluster):
        if changed.keys() & set(WIDTH_PEAKS):
            changed[WIDTH] = float(getattr(machine, WIDTH))  # not told, it would follow the peaks
        return yaml.safe_dump({"name": name, "base": base[0], **changed}, sort_keys=False, allow_unicode=True)
    joined: Mapping[str, Any] = {field: getattr(machine.topology, field) for field in TOPOLOGY_FIELDS}
    topology = {field: value if isinstance(value, int) else float(value) for field, value in joined.items()}
    gpu_content = {"name": f"{base[0]}, changed", "base": base[0], **changed} if changed else base[0]
    content = {"name": name, "gpu": gpu_content, "count": load.gpus, "topology": topology}
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def report_page(catalog: Catalog, content: Any) -> str:
    """The report of the first machine."""
    load, (variant, *_) = read(catalog, content)
    result, machine, checkpoint = explored(load, variant, secants=not load.is_job)
    return page_of(result, machine=gpu_of(machine), checkpoint=checkpoint, command="neusight-jax explore")
