"""Schemes: how the weights of a layer are stored and multiplied, the bytes of that, and the sentence that says so."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.errors import unknown_name
from neusight_jax.kernels.family import is_traced, stair
from neusight_jax.kernels.gemm import FEW_ROWS
from neusight_jax.kernels.table import Kernel
from neusight_jax.tables import table


@dataclass(frozen=True)
class Scheme:
    """Storage of a weight matrix of features × width, width the contraction, and the dtype of its products.

    Attributes:
      name: of the element, e.g. "int4".
      bits: of an element.
      group: rows and columns that share a scale; 0 = all there are of them.
      scale_bits: of a group: its scale, and its zero point where there is one.
      arithmetic: dtype of products where activations are quantized too; "" = weights alone are, and are widened to the
        dtype of the activations on the way to the arithmetic.
      path: the arithmetic path that takes, where it is not that of `arithmetic`.
      unpack: instructions of a lane for every element that is unpacked, where they were counted.
    """

    name: str
    bits: float
    group: tuple[int, int] = (0, 0)
    scale_bits: float = 0.0
    arithmetic: str = ""
    path: str = ""
    unpack: float = 0.0

    def weight_bytes(self, features: float, width: float) -> float:
        """Bytes of a matrix, scales and zero points included."""
        parts = (size / (of or size) for size, of in zip((features, width), self.group, strict=True))
        # Whole groups, of a traced size too.
        groups: list[Any] = [stair(part) if is_traced(part) else math.ceil(part) for part in parts]
        stored: float = (features * width * self.bits + math.prod(groups) * self.scale_bits) / 8.0
        return stored

    @property
    def grouping(self) -> str:
        """Elements that share a scale, for people, e.g. "group 128"; "" where scales are not counted."""
        rows, cols = self.group
        if not self.scale_bits:
            return ""
        if rows > 1:
            return f"block {rows}x{cols}"
        return f"group {cols}" if cols else "per channel" if rows else "per tensor"


NVFP4 = Scheme("fp4", 4.0, (1, 16), 8.0)
"""NVIDIA's nvfp4: an fp8 scale for 16 elements, 4.5 bits each (NVIDIA, "Introducing NVFP4", 2025)."""
MXFP4 = Scheme("fp4", 4.0, (1, 32), 8.0)
"""OCP Microscaling Formats 1.0: a power of two in 8 bits for 32 elements, 4.25 bits each."""
MXFP4_EXPERTS = replace(MXFP4, arithmetic="fp8", path="fp4")
"""gpt-oss: multiplied in mxfp8 where matrix units take scales themselves, as those that have fp4 do; widened elsewhere
(vLLM's and TensorRT-LLM's recipes for gpt-oss)."""
INT4 = Scheme("int4", 4.0, (1, 128), 20.0)
"""Scheme AWQ and GPTQ write by default: groups of 128 with a 16-bit scale and a zero point as wide as an element."""

_NARROW: dict[str, Scheme] = {"int4": INT4, "fp4": NVFP4}
WEIGHT_DTYPES: tuple[str, ...] = (*DTYPES, "int4")
"""Dtypes that weights may be stored in; no product has int4 arithmetic."""


def stored_as(dtype: str) -> Scheme:
    """Weights of one of `WEIGHT_DTYPES`, all alike; `InputError` for another.

    int4 and fp4 as `INT4` and `NVFP4` have it. Scales of eight-bit weights, one for a channel or a tensor, are not
    counted.
    """
    if dtype not in WEIGHT_DTYPES:
        mixtures = table("graph.quantization", "schemes")["gguf_mixtures"]
        raise unknown_name("weight dtype", dtype, (*WEIGHT_DTYPES, *mixtures))
    return _NARROW.get(dtype) or Scheme(dtype, 8.0 * dtype_bytes(dtype))


@dataclass(frozen=True)
class Stored:
    """Storage of a weight in some layers of a node, and the dtype that multiplies it.

    Attributes:
      share: of the node's layers.
      scheme: storage; dtype: of the products.
      instead: their dtype where a GPU lacks the path of `dtype`: the weights are then widened; "" = there is none.
      plain: whether these weights are left as they are.
    """

    share: float
    scheme: Scheme
    dtype: str
    instead: str = ""
    plain: bool = False

    def of_rows(self, rows: float) -> Stored:
        """The same for a product of so many rows: those of weights that are unpacked multiply few of them in place."""
        few = self.scheme.unpack > 0.0 and rows <= FEW_ROWS and bool(self.instead)
        return replace(self, dtype=self.instead, instead="") if few else self

    def either(self, kernel: Callable[[str], Kernel]) -> Kernel:
        """The kernel in the dtype of the products, and what runs where a GPU lacks its path."""
        product = kernel(self.dtype)
        return replace(product, path=self.scheme.path, instead=kernel(self.instead)) if self.instead else product

    def weight_share(self, features: float, width: float, dtype: str) -> float:
        """Bytes of a weight as stored over those in the dtype it is multiplied in.

        1 where it is multiplied as it is stored: scales were in those measurements.
        """
        full = 8.0 * dtype_bytes(dtype)
        if self.scheme.bits == full:
            return 1.0
        return self.scheme.weight_bytes(features, width) * 8.0 / (features * width * full)


_WORDS: dict[str, str] = {
    **{"embedding": "embeddings", "head": "head", "score": "head", "attention": "attention"},
    **{"mlp.router": "router", "mlp.experts": "experts", "mlp.shared": "shared experts", "mlp": "feed-forward"},
}
"""Name for people of the nodes whose names start so, the first that fits."""


class Ledger:
    """Weights by how they are stored."""

    def __init__(self) -> None:
        self._narrow: defaultdict[tuple[Scheme, str], float] = defaultdict(float)
        self._seen: defaultdict[str, set[bool]] = defaultdict(set)
        self._elements = 0.0
        self.nodes: dict[str, None] = {}

    def add(self, node: str, part: Stored, elements: float) -> None:
        """Write down the `elements` of a node, `part.share` of which are stored so."""
        self.nodes[node] = None
        spelled = node.split(".")[0].replace("_", " ")
        word = next((word for start, word in _WORDS.items() if node.startswith(start)), spelled)
        self._seen[word].add(part.plain)
        if node == "embedding" and part.plain:
            return  # shares are of the layers' weights
        self._elements += elements * part.share
        if not part.plain:
            self._narrow[part.scheme, part.dtype] += elements * part.share

    @property
    def schemes(self) -> list[Scheme]:
        """Schemes of what is quantized, the most common first."""
        return list(dict.fromkeys(scheme for scheme, _ in self._sorted()))

    def _sorted(self) -> list[tuple[Scheme, str]]:
        return sorted(self._narrow, key=lambda key: -self._narrow[key])

    def sentence(self, method: str, plain_dtype: str) -> str:
        """Storage of the weights, in one line; `plain_dtype`: of what is left as it is."""
        parts = []
        for scheme, dtype in self._sorted():
            means = ", ".join(word for word in (method, scheme.grouping) if word)
            share = self._narrow[scheme, dtype] / self._elements
            some = f" in {share:.0%} of the layers' weights" if len(self._narrow) > 1 else ""
            parts.append(f"{scheme.name} ({means}), products in {dtype}{some}")
        plain = [word for word, seen in self._seen.items() if seen == {True}]
        partly = [f"part of {word}" for word, seen in self._seen.items() if len(seen) > 1]
        left = f"; {_enumerated([*plain, *partly])} {plain_dtype}" if plain or partly else ""
        return f"weights {'; '.join(parts)}{left}" if parts else f"{method} leaves all weights {plain_dtype}"


def _enumerated(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
