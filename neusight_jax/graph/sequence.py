"""The longest sequence a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.graph.build import ARCHITECTURES, STEP_ARCHITECTURES, model_type
from neusight_jax.graph.config import Config, read_config
from neusight_jax.graph.requests import requests
from neusight_jax.graph.step import Step, precision
from neusight_jax.graph.tape import Tape


class _Limit(Config):
    """A config that remembers the limit its recorder asks it to check."""

    longest: int | None = None

    def limit_sequence(self, sequence: int, key: str, reserved: int = 0, positions: int | None = None) -> int:
        self.longest = super().limit_sequence(sequence, key, reserved, positions)
        return self.longest


def longest_sequence(config: str | Path | Mapping[str, Any]) -> int | None:
    """Positions a model has, or None if it has no limit; `InputError` for an unusable config."""
    parsed = read_config(config)
    kind = model_type(parsed)
    limit = _Limit(parsed.name, parsed.values)
    if kind in STEP_ARCHITECTURES:
        STEP_ARCHITECTURES[kind](Step(requests(1, 1, "inference"), precision("bf16")), limit, "inference")
    else:
        ARCHITECTURES[kind](Tape(False, 4.0), limit, 1, 1)
    return limit.longest
