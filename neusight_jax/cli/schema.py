"""`neusight-jax schema`: JSON Schemas of the files that people write, for editors."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Annotated, Any

import typer

from neusight_jax.cli.console import show, show_json
from neusight_jax.cli.options import AsJson, argument

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpu": (
        "hardware.files.GPUFile",
        "figures of a GPU, or what differs from one of the catalog, for --gpu",
        {"base": "H100", "mem_bytes_per_s": "5 TB/s"},
    ),
    "cluster": (
        "hardware.files.ClusterFile",
        "a GPU, how many of them and how they are joined, for --cluster",
        {"gpu": "H100", "count": 256, "topology": {"node": "DGX H100", "nic_bytes_per_s": "25 GB/s"}},
    ),
    "prices": (
        "hardware.prices.PriceFile",
        "what an hour of each GPU costs, for --prices",
        {"currency": "USD", "H100": 2.5},
    ),
    "engine": (
        "serving.times.EngineFile",
        "numbers of an inference engine's own time, which `calibrate --engine` writes, for serve --engine",
        {"engine": "vllm", "step_s": 0.0009, "request_s": 0.02},
    ),
    "card": ("model.checkpoint.Card", "card.json, which `train` writes beside the weights, for --checkpoint", {}),
}
"""Kind of file -> its model, what it is, and an example."""
_NUMBER = r"[-+]?(\d[\d,]*\.?\d*|\.\d+)([eE][-+]?\d+)?"


def _kinds(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def schema(
    name: Annotated[str | None, argument("A kind of file; without one they are listed.", "[NAME]", _kinds)] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON Schema of a kind of file (gpu, cluster, prices, engine, card), by which editors check it."""
    from neusight_jax.records import json_text
    from neusight_jax.records import schema as schema_name

    if name is not None:
        typer.echo(json_text(file_schema(name)))
        return
    rows = [{"name": kind, "about": about} for kind, (_, about, _) in KINDS.items()]
    if as_json:
        show_json({"schema": schema_name("schemas"), "schemas": rows})
        return
    from neusight_jax.reports.text import table

    show(table("", ["kind", "file"], [[*row.values()] for row in rows], text_columns=2))


def file_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind of file, draft 2020-12; figures have ranges in base units, and text with their units.

    Raises: `InputError` listing the kinds if there is none of that name.
    """
    from neusight_jax.errors import unknown_name

    if kind not in KINDS:
        raise unknown_name("kind of file", kind, KINDS)
    path, _, example = KINDS[kind]
    module, _, model = path.rpartition(".")
    content: dict[str, Any] = getattr(importlib.import_module(f"neusight_jax.{module}"), model).model_json_schema()
    for part in (content, *content.get("$defs", {}).values()):
        if module == "hardware.files":
            _describe(part)
        for entry in part["properties"].values():
            if entry.get("default", "") is None:
                del entry["default"]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": content["title"]}
    return head | content | ({"examples": [example]} if example else {})


def _describe(part: dict[str, Any]) -> None:
    """Adds what the models leave to functions: what may be said of each figure, and that a GPU needs a base or all."""
    from neusight_jax.hardware.cluster import Topology
    from neusight_jax.hardware.gpu import GPU, REQUIRED_FIELDS

    properties = part["properties"]
    if "base" in properties:
        part["anyOf"] = [{"required": ["base"]}, {"required": [*REQUIRED_FIELDS]}]
    lines = inspect.getdoc(GPU if "base" in properties else Topology) or ""
    for names, text in re.findall(r"^  (\w[\w, ]*): (.+(?:\n {4}.+)*)", lines, re.MULTILINE):
        for name in names.split(", "):
            if name in properties:
                properties[name] = _figure(name, " ".join(text.split()))


def _figure(name: str, text: str) -> dict[str, Any]:
    """Schema of a figure in a file: a number in base units, or text with a unit, or a name of one."""
    from neusight_jax.hardware import cluster, gpu
    from neusight_jax.hardware.files import example_figure
    from neusight_jax.units import _UNIT_OF, base_unit, figure_text

    unit, example = base_unit(name), example_figure(name)
    if name in (*gpu.FIELDS, *gpu.LIMITS):
        low, high = gpu._RANGES[name].low, gpu._RANGES[name].high
    else:
        low, high, _ = cluster._RANGES[name]
    forms: list[dict[str, Any]] = [{"type": "number", "minimum": low, "maximum": high}]
    if name in gpu.FIELDS and name not in gpu.REQUIRED_FIELDS:
        forms.append({"const": 0})
    examples: list[Any] = [example, *([figure_text(name, example)] if unit else [])]
    if name in gpu.NAMED:
        examples = [label for label in gpu.NAMED[name] if label]
        forms.append({"enum": examples})
    elif name == "gpus_per_domain":
        forms[0]["type"] = "integer"
    else:
        units = "|".join(symbol for symbol, (_, base) in _UNIT_OF.items() if symbol and base == unit)
        forms.append({"type": "string", "pattern": rf"^\s*{_NUMBER}\s*({units})?\s*$"})
    return {"title": f"{name} [{unit}]" if unit else name, "description": text, "anyOf": forms, "examples": examples}
