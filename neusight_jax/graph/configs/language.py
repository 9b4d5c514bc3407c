"""The language model in a config: out of a multimodal one, called by its class's name, with the class's defaults.

The tables are in model_types.yaml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import Config, shown
from neusight_jax.graph.keys import Keys
from neusight_jax.tables import table

DRAFT = "transformer_layer_config"
"""Key under which the library `speculators` keeps the layers of a draft."""
NESTED: tuple[str, ...] = ("text_config", "llm_config", "language_config", "thinker_config", DRAFT)
"""Keys under which configs keep their language part."""
OUTER: tuple[str, ...] = (
    *("quantization_config", "quantization", "expert_dtype", "dtype", "torch_dtype"),
    *("adapter_config", "is_causal", "num_labels", "id2label"),
)
"""Keys of the whole model that hold for the language part where it does not say them itself."""
OWN_SIZES: tuple[str, ...] = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
)
"""Sizes a config must say itself; only a language part inside another config may leave them to its class."""


def language_config(config: Config) -> Config:
    """The config of the language model in a config, its `model_type` the one its layers are read by."""
    values, notes = config.values, list[str]()
    kind = values.get("model_type")
    nested = next((key for key in NESTED if values.get(key) is not None), None)
    inside = nested is not None
    towers = f"the language part of {str(kind)[:60]}; its other towers are left out, time and parameters"
    if nested is not None:
        part = values[nested]
        if not isinstance(part, Mapping):
            raise InputError(f"{config.name}: {nested} is {shown(part)}, expected a JSON object")
        if nested == "thinker_config" and isinstance(part.get("text_config"), Mapping):
            part = part["text_config"]
        draft = nested == DRAFT
        values = _joined(values, part, [key for key in values if key != nested] if draft else OUTER)
        kind = part.get("model_type") if draft else kind
        notes += [towers] * (not draft)
    elif isinstance(kind, str) and kind in table("graph.configs", "model_types")["wrappers"]:
        notes.append(towers)
    if isinstance(kind, str):
        values = Keys({**values, "model_type": _text_type(kind, values, inside)}, values)
    name = values.get("model_type")
    defaults = dict(table("graph.configs", "model_types")["defaults"].get(name, {})) if isinstance(name, str) else {}
    if not inside:
        defaults = {key: value for key, value in defaults.items() if key not in OWN_SIZES}
    return config.like(values, defaults, notes)


def _joined(outer: Mapping[str, Any], part: Mapping[str, Any], keys: Iterable[str]) -> Keys:
    joined = {key: outer[key] for key in keys if outer.get(key) is not None}
    joined |= {key: value for key, value in part.items() if value is not None or key not in joined}
    # The head belongs to the whole model: what that says of it counts.
    joined |= {key: outer[key] for key in ("tie_word_embeddings", "architectures") if outer.get(key) is not None}
    return Keys(joined, outer, part)


def _text_type(outer: str, values: Mapping[str, Any], inside: bool) -> Any:
    """The type of the language part: its own, else the usual one of a multimodal type, by the name of its class."""
    tables = table("graph.configs", "model_types")
    kind = values.get("model_type") if inside else outer
    if kind is None:
        kind = outer
    if not isinstance(kind, str):
        return kind
    # A multimodal type whose language part says no type, or whose sizes stand beside its vision_config.
    kind = tables["wrappers"].get(kind, kind)
    return tables["renames"].get(kind, kind)


def missing_layer(kind: str) -> str | None:
    """The layer that keeps a known `model_type` from being written; None for one that is not known."""
    layer = table("graph.configs", "model_types")["missing"].get(kind)
    return None if layer is None else str(layer)
