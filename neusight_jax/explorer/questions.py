"""Questions of the page that take seconds: each is one call of the package, and its answer one result."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from neusight_jax.designs.answers import Design, codesign, design, non_dominated
from neusight_jax.designs.cost import costs_for
from neusight_jax.designs.search import Settings
from neusight_jax.explorer.asked import Question, Variant, Workload, machine_of, work_of
from neusight_jax.graph.configs.shape import ModelShape
from neusight_jax.hardware.gpu import LIMITS
from neusight_jax.hardware.prices import Prices
from neusight_jax.model.checkpoint import default_checkpoint, load_predictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.power_curves import power_curve
from neusight_jax.records import Result
from neusight_jax.serving.answers import serve
from neusight_jax.sweeps.space import Range
from neusight_jax.units import MS

SERVER = 8
"""GPUs of a server that a replica may take."""
FREE: tuple[str, ...] = ("num_sms", "clock_hz", "mem_bytes_per_s", "l2_bytes")
"""Figures that a design may choose, from a quarter to four times those of the base."""
SIZES: tuple[str, ...] = ("layers", "hidden", "d_ff")
"""Sizes that a codesign may choose, from half to twice those of the model."""
EFFORT = Settings(starts=1, steps=8, rounds=4)
"""Effort of a codesign on the page; the command searches longer."""


@functools.lru_cache(maxsize=8)
def predictor_of(checkpoint: str) -> Predictor:
    """A checkpoint's predictor, loaded once."""
    return load_predictor(checkpoint)


def answer_to(load: Workload, variant: Variant, question: Question) -> tuple[Result, dict[str, Any]]:
    """The answer to a question about a model and a machine, and what its report takes beside it.

    Args:
      load: the model and its workload; of serving and a codesign the model alone counts.
      variant: the machine; question: what is asked of it.
    """
    if question.kind == "serving":
        return _served(load, variant, question), {}
    free = replace(variant, figures={name: value for name, value in variant.figures.items() if name not in LIMITS})
    if question.kind == "codesign":
        return _codesigned(load, free, question), {"base": free.named()[0]}
    if question.kind == "power":
        work = work_of(load)
        name, machine = machine_of(load, free)
        predictor = predictor_of(default_checkpoint(work.kernels))
        return power_curve(predictor, machine, work, gpu_name=name), {}
    alone, figures = replace(load, gpus=1, tensor=1), tuple(free.figures.items())
    designs = [
        _designed(alone, free.base, figures, question.area_mm2, watts)
        for watts in dict.fromkeys((question.power_w, *question.front_w))
    ]
    front = non_dominated([one for one in designs if one.feasible], "power_w")
    return designs[0], {"base": free.named()[0], **({"front": front, "metric": "power_w"} if designs[1:] else {})}


@functools.lru_cache(maxsize=64)
def _designed(
    load: Workload, base: str, changed: tuple[tuple[str, float], ...], area_mm2: float, power_w: float
) -> Design:
    """The best chip for a workload of one GPU, kept, so that a front grows by one design at a time.

    Args:
      load: of one GPU.
      base, changed: the machine to start from, and figures of it that differ.
      area_mm2, power_w: budgets, 0 = as much as the base has.
    """
    machine = Variant(base, dict(changed)).named()[1]
    spent = {name: float(np.asarray(cost)) for name, cost in costs_for(machine).costs(machine).items()}
    limits = {"area_mm2": area_mm2 or spent["area_mm2"], "power_w": power_w or spent["power_w"]}
    figures = {name: float(np.asarray(getattr(machine, name))) for name in FREE}
    ranges = [Range(name, value / 4.0, value * 4.0) for name, value in figures.items()]
    work = work_of(load)
    return design(predictor_of(default_checkpoint(work.kernels)), machine, ranges, [work], budgets=limits)


def _codesigned(load: Workload, variant: Variant, question: Question) -> Design:
    """The sizes of a model that answer fastest on a machine at the loss of the model as it is."""
    sizes = ModelShape.from_config(load.model)
    return codesign(
        predictor_of("tensorcore"),
        variant.named()[1],
        sizes,
        {name: (getattr(sizes, name) / 2, getattr(sizes, name) * 2) for name in SIZES},
        input_tokens=question.input_tokens,
        output_tokens=question.output_tokens,
        batch_size=load.batch_size,
        dtype=load.dtype or "bf16",
        settings=EFFORT,
    )


def _served(load: Workload, variant: Variant, question: Question) -> Result:
    name, server = variant.cluster(SERVER, serves=True)
    prices = Prices({name: question.price_per_hour}, "USD") if question.price_per_hour else None
    return serve(
        predictor_of("tensorcore"),
        {name: server},
        load.model,
        input_tokens=question.input_tokens,
        output_tokens=question.output_tokens,
        users=question.users,
        ttft_s=question.ttft_ms * MS,
        tpot_s=question.tpot_ms * MS,
        prices=prices,
        method="estimate",
        dtypes={"dtype": load.dtype or None},
    )
