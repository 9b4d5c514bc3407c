"""Dtype and lengths of a workload where nobody says them: those of the config, and short ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.architectures import ARCHITECTURES, STEP_ARCHITECTURES, model_type
from neusight_jax.graph.configs.config import Config, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES, read_decoder
from neusight_jax.graph.configs.language import language_config
from neusight_jax.graph.configs.positions import positions_of
from neusight_jax.graph.configs.requests import Lengths, requests
from neusight_jax.graph.configs.step import Step, precision
from neusight_jax.graph.configs.tape import Tape

USUAL_DTYPE = "bf16"
"""Dtype of a decoder whose config says none."""
USUAL_LENGTH = 2048
"""Tokens of a decoder's sequence, or as many as it has positions."""
EAGER_DTYPE = "fp32"
"""Dtype of all other models."""


def assumed_dtype(config: Config, dtype: str | None) -> tuple[str, list[str]]:
    """The dtype of a workload, and a note where it was assumed."""
    if dtype is not None:
        return dtype, []
    if config.values.get("model_type") not in MODEL_TYPES:
        return EAGER_DTYPE, []
    key = config.first("dtype", "torch_dtype")
    own = config.dtype(key)
    if own is None:
        return USUAL_DTYPE, [f"dtype {USUAL_DTYPE} assumed: the config says none"]
    return own, [f"dtype {own} assumed: the config's own"]


def assumed_length(
    config: Config, length: Lengths | None, mode: str, kv_length: Lengths | None
) -> tuple[Lengths, list[str]]:
    """The sequence length of a workload, and a note where it was assumed."""
    if length is not None:
        return length, []
    if config.values.get("model_type") not in MODEL_TYPES:
        longest = longest_of(config)
        if longest is None:
            raise InputError(f"{config.name} takes sequences of any length; say which with --sequence-length")
        return longest, []
    usual = min(USUAL_LENGTH, positions_of(config))
    if kv_length is not None and mode == "decode":
        return usual, []  # a decode reads its kv_length only
    if isinstance(kv_length, int) and not isinstance(kv_length, bool):
        usual = max(min(usual, kv_length), 1)
    elif isinstance(kv_length, Sequence):
        usual = max(min([usual, *(each for each in kv_length if isinstance(each, int))]), 1)
    return usual, [f"sequence length {usual:,} assumed"]


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
        STEP_ARCHITECTURES[kind](Step(requests(1, 1, "inference"), precision("fp32")), limit)
    else:
        ARCHITECTURES[kind](Tape(False, "fp32"), limit, 1, 1)
    return limit.longest
