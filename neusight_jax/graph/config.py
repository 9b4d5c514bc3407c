"""Model configs in Hugging Face's JSON spelling: reading them, and checks that say which key is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.catalog import load_model_config, model_names

_MISSING = object()


class Config:
    """A model config with its name; reads keys, and raises `InputError` naming the key when one is unusable."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name = name
        self.values = values

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, _MISSING)
        if value is not _MISSING and value is not None:
            return value
        if default is _MISSING:
            raise InputError(f"{self.name}: config has no {key!r}; expected a whole number, add it to the config")
        return default

    def size(self, key: str, default: Any = _MISSING) -> int:
        """A positive whole number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.name}: {key} is {value!r}, expected a positive whole number")
        return value

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A whole number, zero allowed."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{self.name}: {key} is {value!r}, expected a whole number of at least 0")
        return value

    def rate(self, key: str, default: float) -> float:
        """A dropout rate in [0, 1)."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise InputError(f"{self.name}: {key} is {value!r}, expected a rate of at least 0 and below 1")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.name}: {key} is {value!r}, expected true or false")
        return value

    def choice(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """One of a few words."""
        value = self._value(key, default)
        if value not in choices:
            raise InputError(f"{self.name}: {key} {value!r} is not supported; expected one of {', '.join(choices)}")
        return str(value)

    def head_size(self, hidden_key: str, heads_key: str) -> int:
        """Width of one attention head."""
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            raise InputError(
                f"{self.name}: {hidden_key} {hidden} is not divisible by {heads_key} {heads}; "
                "expected a multiple, change one of the two"
            )
        return hidden // heads

    def limit_sequence(self, sequence: int, key: str, reserved: int = 0, positions: int | None = None) -> int:
        """The longest sequence the model has positions for (`key`, or as given); `reserved` of them are not usable."""
        limit = (self.size(key) if positions is None else positions) - reserved
        if sequence > limit:
            raise InputError(
                f"{self.name}: sequence length {sequence} is longer than the model's limit of {limit} ({key}); "
                f"use at most {limit}"
            )
        return limit


def read_config(config: str | Path | Mapping[str, Any]) -> Config:
    """A `Config` from a model name of the catalog, a path to a JSON file, or a mapping.

    Raises `InputError` for an unknown model, a missing file, or one that is not a JSON object.
    """
    if isinstance(config, Mapping):
        return Config(str(config.get("model_type", "config")), config)
    if not isinstance(config, str | Path):
        raise InputError(
            f"config is {type(config).__name__}, expected a model name, a path to a JSON file or a mapping"
        )
    path = Path(config)
    if isinstance(config, str) and path.suffix != ".json" and (config.lower() in model_names() or not path.exists()):
        return Config(config, load_model_config(config))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path}: no such file; give a config.json, or a model name (`neusight-jax models` lists all)"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a config.json") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected a Hugging Face config.json") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds a {type(values).__name__}, expected a JSON object such as a config.json")
    beside = () if values.get("quantization_config") else _quantized_beside(path)
    return Config(path.stem, {**values, **dict(beside)})


def _quantized_beside(path: Path) -> Iterator[tuple[str, Any]]:
    """`quantization_config` from the file that modelopt writes beside config.json."""
    own = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    if path.name.endswith("config.json") and own.exists():
        try:
            yield "quantization_config", json.loads(own.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{own}: cannot be read ({error}); expected modelopt's quantization as JSON") from None


def whole(name: str, value: Any) -> int:
    """A batch size or sequence length: a positive whole number, else `InputError`."""
    is_whole = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_whole or int(value) <= 0:
        raise InputError(f"{name} is {value!r}, expected a positive whole number")
    return int(value)
