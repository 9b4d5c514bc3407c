"""Tables that are kept as YAML beside the code."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def table(room: str, name: str) -> dict[str, Any]:
    """What `name.yaml` of a room of graphs ("configs", "quantization", "traced") holds."""
    text = resources.files(f"neusight_jax.graph.{room}").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return found
