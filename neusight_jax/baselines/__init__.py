"""Baselines: predictors of others' methods, forecast and scored by the same functions as ours."""

from __future__ import annotations

from neusight_jax.errors import unknown_name
from neusight_jax.model.predictor import Predictor, RooflinePredictor

BASELINES: dict[str, Predictor] = {"roofline": RooflinePredictor()}
"""Baselines that need no fitting, by name."""


def load_baseline(name: str) -> Predictor:
    """A baseline by name; `InputError` for an unknown one."""
    if name not in BASELINES:
        raise unknown_name("baseline", name, BASELINES)
    return BASELINES[name]
