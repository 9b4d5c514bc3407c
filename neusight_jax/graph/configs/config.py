"""Model configs in Hugging Face's JSON spelling: reading them, and checks that say which key is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.keys import Keys, keys_of
from neusight_jax.graph.quantization import gguf
from neusight_jax.tables import parse_content, read_text, table
from neusight_jax.units import is_whole

if TYPE_CHECKING:
    from neusight_jax.graph.configs.shape import ModelShape

# The model catalog: configs of well-known models by name, kept in models.yaml.


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
    canonical = names.get(name.lower())
    if canonical is None:
        raise unknown_name("model", name, names, "`neusight-jax models` lists all, or give the path of a config.json")
    return {key: value for key, value in _catalog()[canonical].items() if key != "aliases"}


def hub_name(name: str) -> str:
    """Repository of a catalog model on Hugging Face's hub, which engines load it by; any other name as it stands."""
    aliases = _catalog().get(model_names().get(name.lower(), ""), {}).get("aliases", ())
    hubs: dict[str, str] = {alias.lower(): alias for alias in aliases if "/" in alias}
    return hubs.get(name.lower(), next(iter(hubs.values()), name))


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
      shape: sizes the model has in place of the config's; None = those.
      longest: the limit a sequence was checked against last, tokens; None = there was none.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        origin: Keys | None = None,
        *,
        catalog: bool = False,
        stored_bytes: float | None = None,
        shape: ModelShape | None = None,
    ) -> None:
        self.name = name
        self.values: Keys = keys_of(values)
        self.defaults: Mapping[str, Any] = {} if defaults is None else defaults
        self.assumed: dict[str, Any] = {}
        self.notes = list(notes)
        self.origin = self.values if origin is None else origin
        self.catalog, self.stored_bytes, self.shape = catalog, stored_bytes, shape
        self.longest: int | None = None

    def like(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
    ) -> Config:
        """The same config with other values, defaults (None = the same), and further notes."""
        return Config(
            self.name,
            values,
            self.defaults if defaults is None else defaults,
            (*self.notes, *notes),
            self.origin,
            catalog=self.catalog,
            stored_bytes=self.stored_bytes,
            shape=self.shape,
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, _MISSING)
        if value is not _MISSING and value is not None:
            return value
        # A null turns something off; only a key that is not there has the default of its class.
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
        present = [key for key in keys if self.values.get(key) is not None]
        return (present or [key for key in keys if key in self.defaults] or list(keys))[0]

    def _checked(self, key: str, default: Any, right: Callable[[Any], bool], expected: str) -> Any:
        value = self._value(key, default)
        if not right(value):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected {expected}")
        return value

    def _whole(self, key: str, default: Any, least: int, most: int, expected: str) -> int:
        value: int = self._checked(key, default, lambda number: type(number) is int and number >= least, expected)
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
        return float(
            self._checked(key, default, lambda number: _real(number) and 0 < number <= LARGEST, "a positive number")
        )

    def rate(self, key: str, default: float) -> float:
        """A dropout rate in [0, 1)."""
        expected = "a rate of at least 0 and below 1"
        return float(self._checked(key, default, lambda number: _real(number) and 0 <= number < 1, expected))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._checked(key, default, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """One of a few words."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in choices:
            words = ", ".join(choices)
            raise InputError(f"{self.name}: {key} {shown(value)} is not supported; expected one of {words}")
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
        letters = isinstance(value, list) and all(isinstance(entry, str) and len(entry) == 1 for entry in value)
        if isinstance(value, str) or (letters and value and not set(value) <= set(choices)):
            return self._spelled(key, "".join(value), layers, extra, choices)
        if not isinstance(value, list | tuple):
            raise InputError(f"{self.name}: {key} is {shown(value)}, expected a list with an entry for each layer")
        if len(value) not in (layers, layers + extra):
            raise InputError(
                f"{self.name}: {key} has {len(value)} entries, expected one for each of the {layers} layers; "
                "add the missing ones or change num_hidden_layers"
            )
        # Types are compared too, as JSON's true equals 1 in Python.
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
        words = {
            letter: [choice for choice in choices if str(choice) in (letter, *may)] for letter, may in LETTERS.items()
        }
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
        """Number of layers."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def labels(self) -> int:
        """Classes of a classifier: `num_labels`, or as many as have a name, or the two of the class's default."""
        classes = self.values.get("id2label")
        return self.size("num_labels", len(classes) if isinstance(classes, Mapping) and classes else 2)

    def require(self, key: str, default: Any, only: Any) -> None:
        """`InputError` where a key has another value than the one that is written here."""
        value = self._value(key, default)
        if type(value) is not type(only) or value != only:
            actual, wanted = (
                str(setting).lower() if isinstance(setting, bool) else shown(setting) for setting in (value, only)
            )
            raise InputError(f"{self.name}: {key} {actual} is not supported; expected {wanted}")

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
        """Check a sequence against the positions a model has; returns the longest it can take, tokens.

        Args:
          sequence: tokens.
          key: of the config, under which the number of positions stands; error messages name it.
          reserved: positions that no token can take.
          positions: their number, where it does not stand under `key` as it is; None = read it there.
        Raises: `InputError` for a longer sequence.
        """
        self.longest = limit = (self.size(key) if positions is None else positions) - reserved
        if sequence > limit:
            whose = f"{key}, the default of its class" if key in self.assumed else key
            raise InputError(
                f"{self.name}: sequence length {sequence} is longer than the model's limit of {limit} ({whose}); "
                f"use at most {limit}"
            )
        return limit


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


def read_config(config: str | Path | Mapping[str, Any] | Config) -> Config:
    """A `Config` from a model name of the catalog, a path to a JSON file, or a mapping; one that was read is itself.

    Raises `InputError` for an unknown model, a missing file, or one that is not a JSON object.
    """
    if isinstance(config, Mapping):
        return Config(str(config.get("model_type", "config"))[:60], config)
    if isinstance(config, Config):
        return config
    if not isinstance(config, str | Path):
        raise InputError(
            f"config is {type(config).__name__}, expected a model name, a path to a JSON file or a mapping"
        )
    path = Path(config)
    # A name of the catalog goes before a file called so, which `./name` still means.
    place = path.exists() or path.is_absolute() or str(config).startswith((".", "~")) or path.suffix in (".json", GGUF)
    if isinstance(config, str) and (config.lower() in model_names() or not place):
        return Config(config, load_model_config(config), catalog=True)
    return _read_files(path)


# A model as a folder or a config.json in one: the config, and what lies beside it. That is how weights are stored, as
# older quantizers write it, adapters, whether it is an embedding model, and how many bytes the files of weights have.

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


def _read_files(path: Path) -> Config:
    """A config from a folder, a config.json with its neighbours, or the header of a GGUF file.

    Raises: `InputError` for a folder without config.json and adapters, for files that are no JSON objects, and for a
      damaged GGUF file or one that is not read.
    """
    if path.suffix == GGUF:
        if not path.is_file():
            raise InputError(f"{path}: no such file; expected a GGUF file, or a model name (`neusight-jax models`)")
        stored_bytes = float(sum(part.stat().st_size for part in gguf.parts_of(path)))
        return Config(path.stem, gguf.config_values(path), stored_bytes=stored_bytes)
    if not path.is_dir():
        return _beside(path.parent, path.stem, path.name, _json_object(path, "a config.json"))
    name = path.resolve().name or "model"
    if (path / "config.json").is_file():
        return _beside(path, name, "config.json", _json_object(path / "config.json", "a Hugging Face config.json"))
    if (path / ADAPTERS).is_file():
        return _with_adapters(path, name, _json_object(path / ADAPTERS, "adapters of PEFT"))
    raise InputError(f"{path}: holds no config.json; give the folder of a model of Hugging Face, or a config.json")


def _with_adapters(path: Path, name: str, adapters: dict[str, Any]) -> Config:
    """The model that a folder's adapters belong to, from the catalog or another folder, with them."""
    model = adapters.get("base_model_name_or_path")
    if not isinstance(model, str) or not model:
        raise InputError(f"{path / ADAPTERS}: no base_model_name_or_path; put the model's config.json beside it")
    near = path.parent / Path(model).name
    local = next((place for place in (Path(model), near) if place.is_dir()), None)
    if local is None and model.lower() not in model_names():
        raise InputError(
            f"{path}: its adapters are of {shown(model)}, which is neither in the catalog nor a folder here; put "
            "that model's config.json beside adapter_config.json"
        )
    base = read_config(model if local is None else local)
    if "adapter_config" in base.values and not base.catalog:
        raise InputError(f"{path}: the model its adapters are of, {shown(model)}, has adapters too; expected none")
    values, notes = {**base.values, "adapter_config": adapters}, (*base.notes, f"adapters of {base.name}")
    return Config(name, values, notes=notes, catalog=base.catalog, stored_bytes=base.stored_bytes)


def _beside(folder: Path, name: str, file: str, values: dict[str, Any]) -> Config:
    """A config with what lies beside it; files of quantizers may share the letters before `config.json`."""
    notes: list[str] = []
    prefix = file.removesuffix("config.json")
    for other, method in QUANTIZERS.items() if file.endswith("config.json") else ():
        beside = folder / f"{prefix}{other}"
        if not values.get("quantization_config") and beside.is_file():
            section = _json_object(beside, "a quantizer's settings")
            values["quantization_config"] = {"quant_method": method, **section}
            notes.append(f"how weights are stored is read from {beside.name}")
    if file == "config.json" and (folder / ADAPTERS).is_file():
        values["adapter_config"] = _json_object(folder / ADAPTERS, "adapters of PEFT")
    if file == "config.json" and (folder / SENTENCES).is_file():
        # Some are named after the class they were trained as, such as Qwen3ForCausalLM; their head is not loaded.
        architectures = values.get("architectures")
        classes = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
        values["architectures"] = [
            re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)?$", "Model", name, count=1) for name in classes
        ]
        notes.append(f"{SENTENCES} beside the config: an embedding model, without head")
    return Config(name, values, notes=notes, stored_bytes=_stored_bytes(folder) if file == "config.json" else None)


def _stored_bytes(folder: Path) -> float | None:
    """Bytes of a model's weights as its files say, None where they do not."""
    for name in INDICES:
        if (folder / name).is_file():
            metadata = _json_object(folder / name, "an index of weights").get("metadata")
            size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
            return float(size) if isinstance(size, int | float) and not isinstance(size, bool) and size > 0 else None
    lone = folder / "model.safetensors"
    return float(lone.stat().st_size) if lone.is_file() else None


def _json_object(path: Path, expected: str) -> dict[str, Any]:
    """A JSON object from a file; `InputError` naming the file for anything else."""
    expected = f"{expected}, or a model name (`neusight-jax models` lists all)"
    values = parse_content(read_text(path, expected), str(path), expected)
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds a {type(values).__name__}, expected a JSON object such as a config.json")
    return values


def whole(name: str, value: Any) -> int:
    """A batch size or sequence length: a positive whole number, else `InputError`."""
    if not is_whole(value) or int(value) <= 0:
        raise InputError(f"{name} is {value!r}, expected a positive whole number")
    return int(value)


# The language model in a config: out of a multimodal one, called by its class's name, with the class's defaults.
#
# The tables are in model_types.yaml.

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
    # A bare config without a size is a mistake; a part of a larger one has those of its class.
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


# Positions of a decoder: what its config says, stretched as its rotary embedding is scaled.
#
# Source: `modeling_rope_utils` of Hugging Face `transformers` 5.24; limits as vLLM 0.24 derives them.

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


def class_notes(config: Config) -> tuple[str, ...]:
    """A note on what a config left to its class."""
    sizes = {key: config.assumed[key] for key in config.defaults if config.assumed.get(key)}
    sizes = {key: value for key, value in sizes.items() if not isinstance(value, str)}
    told = [f"{key} {str(value).lower()}" for key, value in sizes.items()]
    if not told:
        return ()
    return (f"not in the config, defaults of {config.values['model_type']}: {', '.join(told)}",)
