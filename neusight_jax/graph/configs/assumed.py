"""Dtype and lengths of a workload where nobody says them: those of the config for decoders, and short ones."""

from __future__ import annotations

from collections.abc import Sequence

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.decoder import MODEL_TYPES
from neusight_jax.graph.configs.positions import positions_of
from neusight_jax.graph.configs.requests import Lengths
from neusight_jax.graph.configs.sequence import longest_of

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
