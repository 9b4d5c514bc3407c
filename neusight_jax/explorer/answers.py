"""What the explorer's page asks for: choices, forecasts of variants of GPUs, their files and reports."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from neusight_jax.arithmetic import DTYPES
from neusight_jax.checkpoint import default_checkpoint, load_predictor
from neusight_jax.errors import InputError
from neusight_jax.forecast import Forecast
from neusight_jax.gpu import FIELDS, GPU, SWITCHES, check_figure
from neusight_jax.gpu_catalog import list_gpus
from neusight_jax.gpu_file import load_named_gpu
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.graph.configs.catalog import list_models
from neusight_jax.graph.graph import Graph
from neusight_jax.hypothetical import require_field, vary_plainly
from neusight_jax.reports import forecast as forecasts
from neusight_jax.reports import plots
from neusight_jax.reports.page import Plot, page_of
from neusight_jax.sensitivities import Sensitivity, sensitivity
from neusight_jax.terms import Predictor
from neusight_jax.units import MS, with_unit

REACH = 8.0
"""A slider goes from the base's figure over this to this many times it."""
MODES: tuple[str, ...] = ("inference", "training", "prefill", "decode")
MOST_MACHINES = 2


@dataclass(frozen=True)
class Workload:
    """What the page says of a workload; an empty dtype is the model's own."""

    model: str
    mode: str = "inference"
    batch_size: int = 1
    sequence_length: int | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Variant:
    """A base GPU, by name or file, and the figures of it that were changed."""

    base: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def named(self) -> tuple[str, GPU]:
        """A name that says what was changed, and the machine; peaks that were not changed follow SMs and clock."""
        name, gpu = load_named_gpu(self.base)
        if not self.figures:
            return name, gpu
        for field_name, value in self.figures.items():
            check_figure(require_field(field_name), value, name)
        changed = ", ".join(f"{each} {with_unit(each, value)}" for each, value in self.figures.items())
        return f"{name} with {changed}", vary_plainly(gpu, self.figures)


def choices() -> dict[str, Any]:
    """Names that the page offers."""
    return {"models": list_models(), "gpus": list_gpus(), "modes": MODES, "dtypes": ["", *DTYPES]}


def sliders(base: str) -> list[dict[str, Any]]:
    """Every figure of a GPU that is an amount and that it has: its value, range, unit and what is shown."""
    gpu = load_named_gpu(base)[1]
    found = []
    for name in FIELDS:
        value = float(getattr(gpu, name))
        if name not in SWITCHES and value > 0:
            scale, label = plots.scaled(name) if name != "matrix_flop_per_cycle" else (1.0, name)
            found.append({"name": name, "value": value, "scale": scale, "label": label, "reach": REACH})
    return found


@functools.lru_cache(maxsize=16)
def _graph(load: Workload) -> Graph:
    return graph_from_config(load.model, load.batch_size, load.sequence_length, load.mode, load.dtype or None)


@functools.lru_cache(maxsize=8)
def _predictor(checkpoint: str) -> Predictor:
    return load_predictor(checkpoint)


def explored(load: Workload, variant: Variant, *, secants: bool = False) -> tuple[Sensitivity, GPU, str]:
    """The forecast of a variant with its elasticities, the machine, and the checkpoint."""
    name, gpu = variant.named()
    graph = _graph(load)
    checkpoint = default_checkpoint(graph.kernels)
    try:
        return sensitivity(_predictor(checkpoint), gpu, graph, gpu_name=name, secants=secants), gpu, checkpoint
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and pictures of the machines that the page shows."""
    load, variants = read(asked)
    shown = [explored(load, variant) for variant in variants]
    names = [f"{'AB'[place]}: {variant.base}" for place, variant in enumerate(variants)]
    found = {name: (result.forecast, gpu) for name, (result, gpu, _) in zip(names, shown, strict=True)}
    pictures = [
        _families({name: forecast for name, (forecast, _) in found.items()}),
        _elasticities({name: result.total for name, (result, *_) in zip(names, shown, strict=True)}),
        plots.roofline(found),
    ]
    return {
        "machines": [
            {
                "total_s": result.total_s,
                "cards": forecasts.cards(result.forecast),
                "checkpoint": checkpoint,
                "figures": {name: float(getattr(gpu, name)) for name in FIELDS},
                "notes": result.notes,
            }
            for result, gpu, checkpoint in shown
        ],
        "plots": [{"title": each.title, "data": each.traces, "layout": dict(each.layout)} for each in pictures],
    }


def _families(found: Mapping[str, Forecast]) -> Plot:
    sums = [forecast.seconds_by("family") for forecast in found.values()]
    parts = {
        name: [each.get(name, 0.0) / MS for each in sums]
        for name in dict.fromkeys(key for each in sums for key in each)
    }
    return plots.stacked("Where the time goes", list(found), parts, "ms")


def _elasticities(totals: Mapping[str, Mapping[str, float]]) -> Plot:
    first = next(iter(totals.values()))
    names = [name for name in first if any(abs(total[name]) > plots.LEAST for total in totals.values())]
    names.sort(key=lambda name: -first[name])
    traces = [
        {"type": "bar", "orientation": "h", "name": machine, "y": names, "x": [total[name] for name in names]}
        for machine, total in totals.items()
    ]
    return Plot("What more of a figure buys", traces, {"xaxis": {"title": {"text": "% of time for 1 % more"}}})


def gpu_yaml(asked: Mapping[str, Any]) -> str:
    """A variant as a GPU file: its base and every figure that differs from it."""
    _, (variant, *_) = read(asked)
    base, (name, gpu) = load_named_gpu(variant.base), variant.named()
    changed = {each: float(getattr(gpu, each)) for each in FIELDS if getattr(gpu, each) != getattr(base[1], each)}
    return yaml.safe_dump({"name": name, "base": base[0], **changed}, sort_keys=False, allow_unicode=True)


def report_page(asked: Mapping[str, Any]) -> str:
    """The report of the first machine."""
    load, (variant, *_) = read(asked)
    result, gpu, checkpoint = explored(load, variant, secants=True)
    return page_of(result, machine=gpu, checkpoint=checkpoint, command="neusight-jax explore")


def read(asked: Mapping[str, Any]) -> tuple[Workload, list[Variant]]:
    """A request of the page as records; `InputError` for one that is none."""
    try:
        load = Workload(**asked["workload"])
        variants = [
            Variant(str(each["base"]), {str(name): float(value) for name, value in each.get("figures", {}).items()})
            for each in asked["machines"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"not a request of the page ({error!r}); expected workload and machines") from None
    if not 1 <= len(variants) <= MOST_MACHINES:
        raise InputError(f"{len(variants)} machines, expected 1 or {MOST_MACHINES}")
    return load, variants
