"""Answers to the explorer's page: choices, forecasts of variants of machines, and reports of other questions."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from neusight_jax.arithmetic import DTYPES
from neusight_jax.designs.answers import Design
from neusight_jax.errors import InputError
from neusight_jax.explorer.asked import (
    MOST_BUDGETS,
    Catalog,
    Question,
    Variant,
    Workload,
    has_sizes,
    is_decoder,
    machine_of,
    read,
    usual_length,
    work_of,
)
from neusight_jax.explorer.copies import copies
from neusight_jax.explorer.questions import answer_to, predictor_of
from neusight_jax.forecast import Forecast
from neusight_jax.graph.configs.config import list_models
from neusight_jax.hardware.catalog import catalog_gpu, list_gpus
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of
from neusight_jax.hardware.gpu import FIELDS, GPU, LIMITS, SWITCHES
from neusight_jax.job.parallelism import RECOMPUTE
from neusight_jax.markup import markup, without_notes
from neusight_jax.model.checkpoint import default_checkpoint
from neusight_jax.model.intervals import ratio_interval
from neusight_jax.power_curves import LOWEST_CAP
from neusight_jax.prediction import predict
from neusight_jax.reports import forecast as forecasts
from neusight_jax.reports import plots
from neusight_jax.reports.page import Plot, page_of, report_of
from neusight_jax.reports.sensitivity import helps
from neusight_jax.reports.text import INTERVAL, between
from neusight_jax.sensitivities import TOPOLOGY, Sensitivity, sensitivity
from neusight_jax.units import duration, energy_text, labelled

REACH = 8.0
"""A slider goes from the base's figure over this to this many times it."""
MODES: tuple[str, ...] = ("inference", "training", "prefill", "decode")
LANDMARKS: tuple[str, ...] = ("T4", "V100", "L4", "A100", "L40S", "RTX 4090", "H100", "H200", "B200", "MI300X")
"""GPUs that people know: their figures are marked on sliders."""
CLUSTER = 8
"""GPUs that the page opens its cluster with."""
COMMON: tuple[tuple[str, str], ...] = (("llama-3.1-8b", "prefill"), ("bert-large", "inference"))
"""Models and modes of `common`, beside those of the page."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Chip and memory": ("num_sms", "clock_hz", "mem_bytes_per_s", "mem_bytes", "l2_bytes"),
    "Power and caps": ("tdp_w", "process_nm", *LIMITS),
    "Links": TOPOLOGY,
}
"""Groups of sliders; other figures are peaks."""


def _figures(machine: Machine) -> dict[str, float]:
    """Figures of a GPU, those that hold it back, and those of a cluster's links."""
    gpu = gpu_of(machine)
    figures = {name: float(np.asarray(getattr(gpu, name))) for name in FIELDS}
    held = {name: float(np.asarray(value)) for name, value in gpu.limits().items()}
    links = {name: float(getattr(machine.topology, name)) for name in TOPOLOGY} if isinstance(machine, Cluster) else {}
    return figures | links | held


def choices(first: str) -> dict[str, Any]:
    """Names that the page offers, `first` of the models; which models have every mode and are served, and which have
    sizes that may vary; and how many budgets a front has at most."""
    models = list_models()
    models = models if first in models else [first, *models]
    names = {"models": models, "gpus": list_gpus(), "modes": MODES, "dtypes": ["", *DTYPES], "recompute": RECOMPUTE}
    return {
        **names,
        "decoders": [*filter(is_decoder, models)],
        "shapes": [*filter(has_sizes, models)],
        "budgets": MOST_BUDGETS,
    }


def sliders(catalog: Catalog, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every figure of a machine that is an amount and that it has: its value, range, label, and real GPUs on it."""
    base, count = query.get("gpu", ""), query.get("gpus", "1")
    catalog.check_gpu(base)
    gpus = int(count) if count.isascii() and count.isdigit() and len(count) < 8 else 1
    variant, shown = Variant(base), []
    figures = _figures((variant.cluster(gpus) if gpus > 1 else variant.named())[1])
    for name, value in (figures | {name: figures[of] for name, of in LIMITS.items()}).items():
        if name not in SWITCHES and value > 0:
            low, high = (LOWEST_CAP * value, value) if name in LIMITS else (value / REACH, value * REACH)
            scale, label = labelled(name, value)
            ticks = [(gpu, figure) for gpu, figure in _landmarks(name).items() if low <= figure <= high]
            group = next((title for title, names in GROUPS.items() if name in names), "Peaks")
            place = {"low": low, "high": high, "ticks": ticks}
            shown.append({"name": name, "value": value, "scale": scale, "label": label, "group": group, **place})
    return sorted(shown, key=lambda slider: [*GROUPS, "Peaks"].index(slider["group"]))


@functools.cache
def _landmarks(name: str) -> dict[str, float]:
    """A figure of GPUs that people know; the first of those that share a value."""
    if name not in FIELDS:
        return {}
    values: dict[float, str] = {}
    for gpu in LANDMARKS:
        values.setdefault(float(np.asarray(getattr(catalog_gpu(gpu), name))), gpu)
    return {gpu: value for value, gpu in values.items()}


def explored(load: Workload, variant: Variant, *, secants: bool = False) -> tuple[Sensitivity, Machine, str]:
    """The forecast of a variant with its elasticities, the machine, and the checkpoint."""
    work = work_of(load)
    name, machine = machine_of(load, variant)
    checkpoint = default_checkpoint(work.kernels)
    try:
        return sensitivity(predictor_of(checkpoint), machine, work, gpu_name=name, secants=secants), machine, checkpoint
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


@functools.lru_cache(maxsize=64)
def _turn(load: Workload) -> threading.Lock:
    """Requests for one workload go one after another, so that it is compiled once; others do not wait for it."""
    return threading.Lock()


def answer(catalog: Catalog, content: Any) -> dict[str, Any]:
    """Numbers and pictures of the machines that the page shows."""
    load, variants, _ = read(catalog, content)
    with _turn(load):
        return _answer(load, variants)


def common(model: str) -> list[Workload]:
    """Workloads that people open the page for, the one that it shows first: compiled ahead (`warm`)."""
    job: dict[str, Any] = {"mode": "training", "batch_size": CLUSTER, "gpus": CLUSTER}
    return [Workload(model), Workload(model, **job), *(Workload(name, mode=mode) for name, mode in COMMON)]


def warm(catalog: Catalog, load: Workload) -> None:
    """Compile what a workload needs: the answer to it is thrown away, and so is what is wrong with it."""
    with suppress(InputError):
        answer(catalog, {"workload": asdict(load), "machines": [{"base": catalog.gpu}]})


def _answer(load: Workload, variants: Sequence[Variant]) -> dict[str, Any]:
    shown = [explored(load, variant) for variant in variants]
    many = f"{load.gpus}x " if load.is_job else ""
    live, machine, checkpoint = shown[-1]
    letters = ("A: ", "B: ") if len(variants) > 1 else ("",)
    names = [f"{letter}{many}{variant.base}" for letter, variant in zip(letters, variants, strict=True)]
    pairs = {name: (result.forecast, gpu_of(machine)) for name, (result, machine, _) in zip(names, shown, strict=True)}
    made = {name: forecast for name, (forecast, _) in pairs.items()}
    ghost = _ghost(load, variants)
    pictures = [
        *(forecasts.pictures(made) if load.is_job else ()),
        plots.families(made, {name: forecast for name, (forecast, _) in ghost.items()}),
        plots.elasticities({name: result for name, (result, *_) in zip(names, shown, strict=True)}),
        plots.roofline(pairs, ghost),
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
                "sentence": forecasts.sentence(result.forecast),
                "cards": forecasts.cards(result.forecast),
                "helps": helps(result),
                "checkpoint": checkpoint,
                "figures": _figures(machine),
                "notes": result.notes,
            }
            for result, machine, checkpoint in shown
        ],
        "differences": _differences(*((result.forecast, machine) for result, machine, _ in shown)),
        **copies(load, variants[-1], live.forecast.gpu, machine, checkpoint),
        "sequence_length": usual_length(load.model),
        "plots": [_drawn(picture) for picture in pictures],
    }


def _ghost(load: Workload, variants: Sequence[Variant]) -> dict[str, tuple[Forecast, GPU]]:
    """The base as nobody has changed it, drawn faintly behind the only machine that is shown; none where it is that."""
    (variant, *others) = variants
    if others or not variant.figures:
        return {}
    machine = machine_of(load, Variant(variant.base))[1]
    work = work_of(load)
    return {"the base": (predict(predictor_of(default_checkpoint(work.kernels)), machine, work), gpu_of(machine))}


def _drawn(plot: Plot) -> dict[str, Any]:
    """A picture as the page draws it."""
    return {"title": plot.title, "caption": plot.caption, **plot.figure()}


def _differences(
    first: tuple[Forecast, Machine], second: tuple[Forecast, Machine] | None = None
) -> list[tuple[str, str, str, str, str]]:
    """Rows of what a second machine changes: figure, A, B, B less A, and B over A, of the time with its interval."""
    if second is None:
        return []
    (before, held), (after, live) = first, second
    bounds = ratio_interval((after.total_s, before.total_s), (after.interval_s, before.interval_s), (live, held))
    figures: list[tuple[str, Callable[[float], str], float, float]] = [
        ("Step", duration, before.total_s, after.total_s),
        ("Energy", energy_text, before.energy_j, after.energy_j),
        ("Power", lambda watts: f"{watts:,.0f} W", before.power_w, after.power_w),
        ("Throughput", lambda rate: f"{rate:,.0f} tokens/s", before.tokens_per_s, after.tokens_per_s),
    ]
    rows = []
    for name, text, old, new in figures:
        if old and new:
            interval = f" ({INTERVAL} {between(bounds, '{:.3f}'.format)})" if name == "Step" and bounds else ""
            sign = "-" if new < old else "+"
            rows.append((name, text(old), text(new), f"{sign}{text(abs(new - old))}", f"{new / old:.3f}{interval}"))
    return rows


def reported(catalog: Catalog, content: Any) -> dict[str, Any]:
    """The answer to a question that takes seconds, as its report: sentence, cards, pictures and tables."""
    load, (*_, variant), question = read(catalog, content)
    with _turn(load):
        result, about = answer_to(load, variant, question or Question())
        report = report_of(result, **about)
    tables, assumes = without_notes(report.tables)
    return {
        "sentence": report.sentence,
        "cards": report.cards,
        "plots": [_drawn(picture) for picture in report.plots],
        "tables": markup(tables),
        "assumes": assumes,
        "budgets": result.base_metrics if isinstance(result, Design) and result.shape is None else {},
    }


def report_page(catalog: Catalog, content: Any) -> str:
    """The report of the machine whose figures are moved, or of the answer to a question."""
    load, (*_, variant), question = read(catalog, content)
    if question is not None:
        answered, about = answer_to(load, variant, question)
        return page_of(answered, command="neusight-jax explore", **about)
    result, machine, checkpoint = explored(load, variant, secants=not load.is_job)
    return page_of(result, machine=gpu_of(machine), checkpoint=checkpoint, command="neusight-jax explore")
