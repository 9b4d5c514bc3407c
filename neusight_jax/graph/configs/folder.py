"""A model as a folder or a config.json in one: the config, and what lies beside it.

That is how weights are stored, as older quantizers write it, adapters, whether it is an embedding model, and how many
bytes the files of weights have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.quantization import gguf
from neusight_jax.tables import parse_content, read_text

QUANTIZERS: dict[str, str] = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of quantizers beside a config.json, and their method where they do not say it."""
INDICES: tuple[str, ...] = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that say how many bytes the weights have."""
SENTENCES = "modules.json"
"""File that makes an embedding model of sentence-transformers of a model."""
GGUF = ".gguf"
"""Ending of files that hold a model and its config in one; only the header is read."""
ADAPTERS = "adapter_config.json"
"""PEFT's file of adapters; without a config.json beside it, it names the model they belong to."""


@dataclass(frozen=True)
class Files:
    """Content of a model's files.

    Attributes:
      name: of the folder, or of the file without its ending.
      values: of config.json, with `quantization_config` and `adapter_config` from files beside it.
      base: the model that adapters without a config.json belong to, "" where there is one.
      stored_bytes: of the weights' files, where they are there.
      notes: which files were read beside the config.
    """

    name: str
    values: dict[str, Any]
    base: str = ""
    stored_bytes: float | None = None
    notes: list[str] = field(default_factory=list)


def read_files(path: Path) -> Files:
    """Read a folder, a config.json with its neighbours, or the header of a GGUF file.

    Raises: `InputError` for a folder without config.json and adapters, for files that are no JSON objects, and for a
      damaged GGUF file or one that is not read.
    """
    if path.suffix == GGUF:
        if not path.is_file():
            raise InputError(f"{path}: no such file; expected a GGUF file, or a model name (`neusight-jax models`)")
        stored = sum(part.stat().st_size for part in gguf.parts_of(path))
        return Files(path.stem, gguf.config_values(path), stored_bytes=float(stored))
    if not path.is_dir():
        return _beside(path.parent, path.stem, path.name, json_object(path, "a config.json"))
    name = path.resolve().name or "model"
    if (path / "config.json").is_file():
        return _beside(path, name, "config.json", json_object(path / "config.json", "a Hugging Face config.json"))
    if (path / ADAPTERS).is_file():
        values = json_object(path / ADAPTERS, "adapters of PEFT")
        base = values.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise InputError(f"{path / ADAPTERS}: no base_model_name_or_path; put the model's config.json beside it")
        return Files(name, {"adapter_config": values}, base)
    raise InputError(f"{path}: holds no config.json; give the folder of a model of Hugging Face, or a config.json")


def _beside(folder: Path, name: str, file: str, values: dict[str, Any]) -> Files:
    """A config with what lies beside it; files of quantizers may share the letters before `config.json`."""
    files = Files(name, values, stored_bytes=_stored_bytes(folder) if file == "config.json" else None)
    prefix = file.removesuffix("config.json")
    for other, method in QUANTIZERS.items() if file.endswith("config.json") else ():
        beside = folder / f"{prefix}{other}"
        if not values.get("quantization_config") and beside.is_file():
            section = json_object(beside, "a quantizer's settings")
            values["quantization_config"] = {"quant_method": method, **section}
            files.notes.append(f"how weights are stored is read from {beside.name}")
    if file == "config.json" and (folder / ADAPTERS).is_file():
        values["adapter_config"] = json_object(folder / ADAPTERS, "adapters of PEFT")
    if file == "config.json" and (folder / SENTENCES).is_file():
        # Some are named after the class they were trained as, such as Qwen3ForCausalLM; their head is not loaded.
        architectures = values.get("architectures")
        classes = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
        values["architectures"] = [
            re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)?$", "Model", name, count=1) for name in classes
        ]
        files.notes.append(f"{SENTENCES} beside the config: an embedding model, without head")
    return files


def _stored_bytes(folder: Path) -> float | None:
    """Bytes of a model's weights as its files say, None where they do not."""
    for name in INDICES:
        if (folder / name).is_file():
            metadata = json_object(folder / name, "an index of weights").get("metadata")
            size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
            return float(size) if isinstance(size, int | float) and not isinstance(size, bool) and size > 0 else None
    lone = folder / "model.safetensors"
    return float(lone.stat().st_size) if lone.is_file() else None


def json_object(path: Path, expected: str) -> dict[str, Any]:
    """A JSON object from a file; `InputError` naming the file for anything else."""
    expected = f"{expected}, or a model name (`neusight-jax models` lists all)"
    values = parse_content(read_text(path, expected), str(path), expected)
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds a {type(values).__name__}, expected a JSON object such as a config.json")
    return values
