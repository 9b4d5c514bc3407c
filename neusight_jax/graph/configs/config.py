"""Model configs in Hugging Face's JSON spelling: reading them, and checks that say which key is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.catalog import load_model_config, model_names
from neusight_jax.graph.configs.folder import Files, read_files
from neusight_jax.graph.keys import Keys, keys_of
from neusight_jax.units import is_whole

_MISSING = object()
LARGEST = 10**9
"""No size of a model is larger."""
MOST_LAYERS = 10_000
"""No model has more layers."""
LETTERS: dict[str, tuple[str, ...]] = {
    "L": ("sliding_attention", "chunked_attention", "linear_attention"),
    "S": ("sliding_attention", "shared", "sparse"),
    "W": ("sliding_attention",),
    "G": ("full_attention",),
    "F": ("full_attention", "full"),
    "D": ("dense",),
    "M": ("mamba",),
    "A": ("attention", "full_attention"),
    "*": ("attention", "full_attention"),
    **{str(digit): (str(digit),) for digit in range(10)},
}
"""Letters of a pattern, and the words they may stand for."""
TORCH_DTYPES: dict[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""Dtypes as configs spell them, and their names here."""


class Config:
    """A model config with its name; reads keys, and raises `InputError` naming the key when one is unusable.

    Attributes:
      values: what the config says; they remember which keys were read.
      defaults: what its class says of keys the config has not.
      assumed: those of them that were used; notes: what else was assumed or left out, one line each.
      origin: the values as they were given, where `values` is a part or another spelling of them.
      catalog: whether they are the catalog's, which has weights as they are published.
      stored_bytes: of the files of weights beside the config, None where there are none.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        origin: Keys | None = None,
    ) -> None:
        self.name = name
        self.values: Keys = keys_of(values)
        self.defaults: Mapping[str, Any] = {} if defaults is None else defaults
        self.assumed: dict[str, Any] = {}
        self.notes = list(notes)
        self.origin = self.values if origin is None else origin
        self.catalog = False
        self.stored_bytes: float | None = None

    def like(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> Config:
        """The same config with other values, defaults (None = the same), and further notes."""
        other = Config(
            self.name, values, self.defaults if defaults is None else defaults, (*self.notes, *notes), self.origin
        )
        other.catalog, other.stored_bytes = self.catalog, self.stored_bytes
        return other

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, _MISSING)
        if value is not _MISSING and value is not None:
            return value
        if value is _MISSING and self.defaults.get(key) is not None:
            self.assumed[key] = self.defaults[key]
            return self.defaults[key]
        if default is _MISSING:
            raise InputError(f"{self.name}: config has no {key!r}; expected a whole number, add it to the config")
        return default

    def has(self, key: str) -> bool:
        """Whether the config says a key, or its class does."""
        return self.values.get(key, self.defaults.get(key) if key not in self.values else None) is not None

    def first(self, *keys: str) -> str:
        """The first of several spellings of a key that the config has; the first of all if it has none."""
        said = [key for key in keys if self.values.get(key) is not None]
        return (said or [key for key in keys if key in self.defaults] or list(keys))[0]

    def _checked(self, key: str, default: Any, right: Callable[[Any], bool], expected: str) -> Any:
        value = self._value(key, default)
        if not right(value):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected {expected}")
        return value

    def _whole(self, key: str, default: Any, least: int, most: int, expected: str) -> int:
        value: int = self._checked(key, default, lambda each: type(each) is int and each >= least, expected)
        if value > most:
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected at most {most:,}")
        return value

    def size(self, key: str, default: Any = _MISSING, most: int = LARGEST) -> int:
        """A positive whole number."""
        return self._whole(key, default, 1, most, "a positive whole number")

    def count(self, key: str, default: Any = _MISSING) -> int:
        """A whole number, zero allowed."""
        return self._whole(key, default, 0, LARGEST, "a whole number of at least 0")

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A positive number."""
        return float(self._checked(key, default, lambda each: _real(each) and 0 < each <= LARGEST, "a positive number"))

    def rate(self, key: str, default: float) -> float:
        """A dropout rate in [0, 1)."""
        expected = "a rate of at least 0 and below 1"
        return float(self._checked(key, default, lambda each: _real(each) and 0 <= each < 1, expected))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._checked(key, default, lambda each: isinstance(each, bool), "true or false"))

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of a few words."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(choices)
            raise InputError(f"{self.name}: {key} {shown(value)} is not supported; expected one of {listed}")
        return value

    def part(self, key: str) -> Config:
        """A JSON object inside the config, {} where there is none, as a config of its own."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected a JSON object")
        return Config(f"{self.name}: {key}", value)

    def listed(self, key: str, layers: int, choices: Sequence[Any]) -> list[Any] | None:
        """A list with one of `choices` for each layer, None where the config has none.

        Layers of multi-token prediction (`num_nextn_predict_layers`) may stand at its end; they are cut off. A pattern
        of `LETTERS` repeats to the last layer.
        """
        value = self._value(key, None)
        if value is None:
            return None
        extra = self.count(self.first("num_nextn_predict_layers", "num_mtp_layers"), 0)
        if isinstance(value, str) or (_letters(value) and not set(value) <= set(choices)):
            return self._spelled(key, "".join(value), layers, extra, choices)
        if not isinstance(value, list | tuple):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected a list with an entry for each layer")
        if len(value) not in (layers, layers + extra):
            raise InputError(
                f"{self.name}: {key} has {len(value)} entries, expected one for each of the {layers} layers; "
                "add the missing ones or change num_hidden_layers"
            )
        for at, entry in enumerate(value):
            if not any(type(entry) is type(choice) and entry == choice for choice in choices):
                words = ", ".join(str(choice) for choice in choices)
                raise InputError(
                    f"{self.name}: {key} of layer {at} is {shown(entry)}, which is not supported here; "
                    f"expected one of {words}"
                )
        return list(value[:layers])

    def _spelled(self, key: str, pattern: str, layers: int, extra: int, choices: Sequence[Any]) -> list[Any]:
        """A pattern of letters such as "LLLG", repeated to the last layer, as the choices it stands for."""
        words = {letter: [each for each in choices if str(each) in (letter, *may)] for letter, may in LETTERS.items()}
        meanings = {letter: meant[0] for letter, meant in words.items() if meant}
        if not pattern or len(pattern) > layers + extra or set(pattern.upper()) - set(meanings):
            raise InputError(
                f"{self.name}: {key} is {shown(pattern)}, expected a list with an entry for each layer, or at most "
                f"{layers} letters of {', '.join(f'{letter} ({word})' for letter, word in meanings.items())}"
            )
        return [meanings[pattern[at % len(pattern)].upper()] for at in range(layers)]

    def indices(self, key: str) -> set[int]:
        """A list of layers by number, empty where the config has none."""
        value = self._value(key, ())
        if not isinstance(value, list | tuple) or not all(type(entry) is int and entry >= 0 for entry in value):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected a list of layer numbers")
        return set(value)

    def dtype(self, key: str) -> str | None:
        """A dtype by PyTorch's name, None where the config says none."""
        word = self.values.get(key)
        if word is None or word == "auto":
            return None
        if not isinstance(word, str) or word.removeprefix("torch.") not in TORCH_DTYPES:
            raise InputError(f"{self.name}: {key} is {shown(word)}, expected one of {', '.join(TORCH_DTYPES)}")
        return TORCH_DTYPES[word.removeprefix("torch.")]

    def layers(self) -> int:
        """How many layers it has."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def labels(self) -> int:
        """Classes of a classifier: `num_labels`, or as many as have a name, or the two of the class's default."""
        named = self.values.get("id2label")
        return self.size("num_labels", len(named) if isinstance(named, Mapping) and named else 2)

    def require(self, key: str, default: Any, only: Any) -> None:
        """`InputError` where a key has another value than the one that is written here."""
        value = self._value(key, default)
        if type(value) is not type(only) or value != only:
            given, wanted = (str(each).lower() if isinstance(each, bool) else shown(each) for each in (value, only))
            raise InputError(f"{self.name}: {key} {given} is not supported; expected {wanted}")

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
            whose = f"{key}, the default of its class" if key in self.assumed else key
            raise InputError(
                f"{self.name}: sequence length {sequence} is longer than the model's limit of {limit} ({whose}); "
                f"use at most {limit}"
            )
        return limit


def _letters(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(entry, str) and len(entry) == 1 for entry in value)
    )


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as an error message shows it: not too long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a whole number of over 18 digits"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value[:3] if isinstance(value, str | list | tuple) and len(value) > 60 else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_config(config: str | Path | Mapping[str, Any]) -> Config:
    """A `Config` from a model name of the catalog, a path to a JSON file, or a mapping.

    Raises `InputError` for an unknown model, a missing file, or one that is not a JSON object.
    """
    if isinstance(config, Mapping):
        return Config(str(config.get("model_type", "config"))[:60], config)
    if not isinstance(config, str | Path):
        raise InputError(
            f"config is {type(config).__name__}, expected a model name, a path to a JSON file or a mapping"
        )
    path = Path(config)
    place = path.exists() or path.is_absolute() or str(config).startswith((".", "~")) or path.suffix == ".json"
    if isinstance(config, str) and (config.lower() in model_names() or not place):
        named = Config(config, load_model_config(config))
        named.catalog = True
        return named
    files = read_files(path)
    if files.base:
        return _with_adapters(path, files)
    parsed = Config(files.name, files.values, notes=files.notes)
    parsed.stored_bytes = files.stored_bytes
    return parsed


def _with_adapters(path: Path, files: Files) -> Config:
    """The model that a folder's adapters belong to, from the catalog or another folder, with them."""
    near = path.parent / Path(files.base).name
    local = next((place for place in (Path(files.base), near) if place.is_dir()), None)
    if local is None and files.base.lower() not in model_names():
        raise InputError(
            f"{path}: its adapters are of {shown(files.base)}, which is neither in the catalog nor a folder here; put "
            "that model's config.json beside adapter_config.json"
        )
    base = read_config(files.base if local is None else local)
    if "adapter_config" in base.values and not base.catalog:
        raise InputError(f"{path}: the model its adapters are of, {shown(files.base)}, has adapters too; expected none")
    adapted = Config(files.name, {**base.values, **files.values}, notes=[*base.notes, f"adapters of {base.name}"])
    adapted.catalog, adapted.stored_bytes = base.catalog, base.stored_bytes
    return adapted


def whole(name: str, value: Any) -> int:
    """A batch size or sequence length: a positive whole number, else `InputError`."""
    if not is_whole(value) or int(value) <= 0:
        raise InputError(f"{name} is {value!r}, expected a positive whole number")
    return int(value)
