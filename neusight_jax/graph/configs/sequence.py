"""The longest sequence a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.graph.configs.architectures import ARCHITECTURES, STEP_ARCHITECTURES, model_type
from neusight_jax.graph.configs.config import Config, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES, read_decoder
from neusight_jax.graph.configs.language import language_config
from neusight_jax.graph.configs.positions import positions_of
from neusight_jax.graph.configs.requests import requests
from neusight_jax.graph.configs.step import Step, precision
from neusight_jax.graph.configs.tape import Tape


class _Limit(Config):
    """A config that remembers the limit its recorder asks it to check."""

    longest: int | None = None

    def limit_sequence(self, sequence: int, key: str, reserved: int = 0, positions: int | None = None) -> int:
        self.longest = super().limit_sequence(sequence, key, reserved, positions)
        return self.longest


def longest_sequence(config: str | Path | Mapping[str, Any]) -> int | None:
    """Positions a model has, or None if it has no limit; `InputError` for an unusable config."""
    return longest_of(language_config(read_config(config)))


def longest_of(config: Config) -> int | None:
    """`longest_sequence` of a config that was read."""
    kind = model_type(config)
    if kind in MODEL_TYPES:
        read_decoder(config, 1)
        return positions_of(config)
    limit = _Limit(config.name, config.values, config.defaults)
    if kind in STEP_ARCHITECTURES:
        STEP_ARCHITECTURES[kind](Step(requests(1, 1, "inference"), precision("fp32")), limit, "inference")
    else:
        ARCHITECTURES[kind](Tape(False, 4.0), limit, 1, 1)
    return limit.longest
