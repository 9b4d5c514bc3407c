"""Positions of a decoder: what its config says, stretched as its rotary embedding is scaled.

Source: `modeling_rope_utils` of Hugging Face `transformers` 5.24; limits as vLLM 0.24 derives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import Config, shown

STRETCHED: tuple[str, ...] = ("linear", "dynamic", "ntk")
"""Scalings whose config says the positions before scaling."""
FINAL: tuple[str, ...] = ("default", "llama3", "longrope", "su", "mrope", "proportional", "axial")
"""Scalings whose config says the positions after scaling."""
SCALED_ALREADY: tuple[str, ...] = ("gemma3_text", "gemma4_text")
"""Types whose configs say the positions after any scaling."""


def positions_of(config: Config) -> int:
    """The longest sequence a decoder has positions for."""
    limit = config.size(config.first("max_position_embeddings", "model_max_length"))
    scaling = _scaling(config)
    if scaling is None or config.values["model_type"] in SCALED_ALREADY:
        return limit
    word = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if not isinstance(word, str):
        raise InputError(f"{scaling.name}: rope_type is {shown(word)}, expected a word such as yarn")
    if word in FINAL:
        return limit
    if word != "yarn" and word not in STRETCHED:
        config.notes.append(f"rotary scaling {word!r} is not known: {limit} positions as max_position_embeddings says")
        return limit
    factor = scaling.number("factor", 1.0)
    if factor < 1.0:
        raise InputError(f"{scaling.name}: factor is {factor:g}, expected at least 1")
    before = scaling.size("original_max_position_embeddings", limit) if word == "yarn" else limit
    return max(limit, int(before * factor))


def _scaling(config: Config) -> Config | None:
    """`rope_scaling` or `rope_parameters`; those of full attention where each kind of layer has its own."""
    key = config.first("rope_scaling", "rope_parameters")
    if not config.values.get(key):
        return None
    part = config.part(key)
    kinds: dict[str, Mapping[str, Any]] = {
        name: value for name, value in part.values.items() if isinstance(value, Mapping)
    }
    if not kinds or "rope_type" in part.values or "type" in part.values:
        return part
    name = next((name for name in ("full_attention", "main") if name in kinds), next(iter(kinds)))
    return Config(f"{part.name}.{name}", kinds[name])
