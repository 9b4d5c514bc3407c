"""Quantization: what a config's `quantization_config` says of every module, "module → storage and arithmetic".

Sources: the classes of `quantization_config` in Hugging Face `transformers` (`utils/quantization_config.py`), the
compressed-tensors and modelopt formats as vLLM reads them (`model_executor/layers/quantization`). Embeddings, norms and
routers stay as they are in every method; `lm_head` too, unless it is named or the method takes every linear layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.keys import Keys, keys_of
from neusight_jax.graph.quantization.methods import METHODS, Read, Section, brief, read_method
from neusight_jax.graph.quantization.modules import known_node, modules_of
from neusight_jax.graph.quantization.scheme import Scheme
from neusight_jax.tables import table

QUANTIZED: tuple[str, ...] = ("quantization_config", "compression_config", "quantization")
"""Keys under which configs say how weights are stored; the last is MLX's."""


@dataclass(frozen=True)
class Quantization:
    """A model's quantization.

    Attributes:
      method: e.g. "awq".
      model_type: of the config; layers: how many it has.
      read: what the method said.
    """

    method: str
    model_type: str
    layers: int
    read: Read
    _by_node: dict[Any, dict[Scheme | None, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def shares(self, node: str, layers: Sequence[int] = (), features: Sequence[int] = ()) -> dict[Scheme | None, float]:
        """Schemes of a node's weights and their shares, by its layers and the modules it runs as one.

        None = not quantized.

        Args:
          node: by its name inside a section.
          layers: those the node stands for; empty = all.
          features: outputs of each of its modules; empty = equally many.
        """
        key = (node, tuple(layers), tuple(features))
        if key not in self._by_node:
            self._by_node[key] = self._shares(node, layers, features)
        return self._by_node[key]

    def _shares(self, node: str, layers: Sequence[int], features: Sequence[int]) -> dict[Scheme | None, float]:
        counts: Counter[Scheme | None] = Counter()
        for layer in layers or range(max(self.layers, 1)):
            modules = modules_of(node, self.model_type, layer)
            sizes = features if len(features) == len(modules) else [1] * len(modules)
            for aliases, size in zip(modules, sizes, strict=True):
                counts[self._scheme(node, aliases)] += size
        total = counts.total()
        return {scheme: count / total for scheme, count in counts.items() if count}

    def _scheme(self, node: str, aliases: tuple[str, ...]) -> Scheme | None:
        for names, scheme in self.read.rules:
            if names.match(aliases):
                return scheme
        if node in ("mlp.router", "mlp.shared.gate"):
            return None
        if node == "embedding":
            return self.read.embedding
        return self.read.head if node == "head" or node.startswith("score") else self.read.otherwise

    def blind(self, node: str) -> bool:
        """Whether the modules of a node are not known, where the config goes by name."""
        return bool(self.read.rules) and not known_node(node)


def read_quantization(name: str, config: Mapping[str, Any]) -> Quantization | None:
    """Quantization that the values of a config state, None where they say nothing; `name`: of it, for errors.

    Raises: `InputError` naming the method, or the key, that cannot be read.
    """
    sections = list(_found(config))
    if not sections:
        return None
    key, values = sections[0]
    where = f"{name}: {key}"
    if not isinstance(values, Mapping):
        raise InputError(f"{where} is {brief(values)}, expected an object with quant_method")
    mlx = key == "quantization" and not {"quant_algo", "quant_method"} & set(values)
    values = Keys({**values, "quant_method": "mlx"}, values) if mlx else _flat(values)
    if config.get("expert_dtype") is not None:  # DeepSeek-V4 says it beside the rest
        values = Keys({"expert_dtype": config["expert_dtype"], **values}, values)
    method = _method(values, where)
    if values.get("dequantize") is True:  # fp8 and mxfp4: the loader widens all weights
        keys_of(config).settle(key)
        return None
    _, text = _places(config)
    layers = text.get("num_hidden_layers", config.get("num_hidden_layers", 1))
    kind = config.get("model_type") or text.get("model_type") or ""
    return Quantization(
        method=str(values.get("quant_method") or method),
        model_type=str(kind),
        layers=layers if isinstance(layers, int) and not isinstance(layers, bool) else 1,
        read=read_method(method, Section(values, where)),
    )


def has_quantization(config: Mapping[str, Any]) -> bool:
    """Whether a config says anything of quantization."""
    return any(True for _ in _found(config))


def _places(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    text = config.get("text_config")
    return config, text if isinstance(text, Mapping) else {}


def _found(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # Multimodal configs have it beside their language part or in it.
    for place in _places(config):
        sections = {key: place[key] for key in QUANTIZED if place.get(key)}
        mlx, other = sections.get("quantization"), sections.get("quantization_config")
        if mlx is not None and mlx == other:  # mlx-lm writes it twice
            keys_of(place).settle("quantization_config")
            del sections["quantization_config"]
        elif mlx is not None and other is not None:
            raise InputError(
                "config has MLX's quantization and another quantization_config; expected one, take the other out"
            )
        yield from sections.items()


def _flat(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """modelopt's `hf_quant_config.json` has all of it one level down."""
    inner = values.get("quantization")
    return (
        Keys({**values, "quant_method": "modelopt", **inner}, values, inner) if isinstance(inner, Mapping) else values
    )


def _method(values: Mapping[str, Any], where: str) -> str:
    quant_method = values.get("quant_method")
    if quant_method is None:
        if "quant_algo" in values or "kv_cache_quant_algo" in values:
            return "modelopt"
        if "config_groups" in values:
            return "compressed-tensors"
        raise InputError(f"{where} has no quant_method; expected one of {', '.join(METHODS)}")
    name = str(quant_method).lower().replace("_", "-").removeprefix("intel/").removesuffix("-marlin")
    folded = {method.replace("_", "-"): method for method in METHODS}
    if name in folded:
        return folded[name]
    if name.startswith("modelopt"):
        return "modelopt"
    needs = table("graph.quantization", "schemes")["refused"].get(name.replace("-", "_"))
    why = f" ({needs})" if needs else ""
    raise InputError(
        f"{where}: quant_method {brief(quant_method)} is not read{why}; expected one of {', '.join(METHODS)}, "
        "or give weight_dtype (--weight-dtype) to say how weights are stored"
    )
