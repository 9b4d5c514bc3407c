"""Tables that are kept as YAML, beside the code or in a user's files."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

import yaml


class Yaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML that also reads `3.35e12` as a number, which YAML 1.1 takes for text."""


Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """What `name.yaml` of a package below `neusight_jax` (such as "datasets") holds; not to be changed."""
    text = resources.files(f"neusight_jax.{package}").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=Yaml)
    return found
