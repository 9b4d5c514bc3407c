"""Questions of the page that take seconds: each is one call of the package, and its answer one result."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from neusight_jax.designs.answers import design
from neusight_jax.designs.cost import costs_for
from neusight_jax.explorer.asked import Question, Variant, Workload, work_of
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


@functools.lru_cache(maxsize=8)
def predictor_of(checkpoint: str) -> Predictor:
    """A checkpoint's predictor, loaded once."""
    return load_predictor(checkpoint)


def asked_of(load: Workload, variant: Variant, question: Question) -> Result:
    """The answer to a question about a model and a machine.

    Args:
      load: the model and its workload; of serving the model alone counts.
      variant: the machine; question: what is asked of it.
    """
    if question.kind == "serving":
        return _served(load, variant, question)
    work = work_of(load)
    predictor = predictor_of(default_checkpoint(work.kernels))
    free = replace(variant, figures={name: value for name, value in variant.figures.items() if name not in LIMITS})
    if question.kind == "power":
        name, machine = free.named() if load.gpus == 1 else free.cluster(load.gpus, serves=not load.is_job)
        return power_curve(predictor, machine, work, gpu_name=name)
    base = free.named()[1]
    spent = {name: float(np.asarray(cost)) for name, cost in costs_for(base).costs(base).items()}
    limits: dict[str, float] = {
        name: getattr(question, name) or spent[name] for name in ("area_mm2", "power_w") if name in spent
    }
    figures = {name: float(np.asarray(getattr(base, name))) for name in FREE}
    ranges = [Range(name, value / 4.0, value * 4.0) for name, value in figures.items()]
    return design(predictor, base, ranges, [work_of(replace(load, gpus=1, tensor=1))], budgets=limits)


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
