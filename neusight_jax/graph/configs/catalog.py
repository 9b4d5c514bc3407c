"""The model catalog: configs of well-known models by name, kept in models.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from neusight_jax.errors import unknown_name
from neusight_jax.tables import table


@cache
def _catalog() -> dict[str, dict[str, Any]]:
    shared = table("graph.configs", "models")
    return {name: {**shared["defaults"][entry["model_type"]], **entry} for name, entry in shared["models"].items()}


@cache
def model_names() -> Mapping[str, str]:
    """Every accepted name, lower case, with the catalog name it stands for."""
    names: dict[str, str] = {}
    for name, entry in _catalog().items():
        for alias in (name, *entry.get("aliases", ())):
            names[alias.lower()] = name
            names.setdefault(alias.lower().replace("-", "_"), name)
    return names


def list_models() -> list[str]:
    """Names of the models in the catalog, aliases left out."""
    return list(_catalog())


def load_model_config(name: str) -> dict[str, Any]:
    """Config of a catalog model, in Hugging Face's spelling; `InputError` for an unknown name."""
    names = model_names()
    found = names.get(name.lower())
    if found is None:
        raise unknown_name("model", name, names, "`neusight-jax models` lists all, or give the path of a config.json")
    return {key: value for key, value in _catalog()[found].items() if key != "aliases"}
