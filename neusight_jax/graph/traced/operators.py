"""Operators by what they do, from operators.yaml."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("neusight_jax.graph.traced").joinpath("operators.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return table


def operators(section: str, kind: str) -> frozenset[str]:
    """Names of the operators of a section ("jax", "aten" or "fusion") that are of a kind."""
    return frozenset(_table()[section][kind])
