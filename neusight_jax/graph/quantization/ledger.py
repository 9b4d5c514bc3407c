"""Ledger: what a step stored its weights in, and the sentence that says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from neusight_jax.graph.quantization.scheme import Scheme, Stored

_WORDS: tuple[tuple[str, str], ...] = (
    *(("head", "head"), ("attention", "attention"), ("mlp.router", "router"), ("mlp.experts", "experts")),
    *(("mlp.shared", "shared experts"), ("mlp", "feed-forward")),
)
"""What people call the nodes whose names start so."""


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
        self._seen[_word(node)].add(part.plain)
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
        """How weights are stored, in one line; `plain_dtype`: of what is left as it is."""
        parts = []
        for scheme, dtype in self._sorted():
            means = ", ".join(word for word in (method, scheme.grouping) if word)
            share = self._narrow[scheme, dtype] / self._elements
            some = f" in {share:.0%} of the layers' weights" if len(self._narrow) > 1 else ""
            parts.append(f"{scheme.name} ({means}), products in {dtype}{some}")
        plain = [word for word, seen in self._seen.items() if seen == {True}]
        partly = [f"part of {word}" for word, seen in self._seen.items() if len(seen) > 1]
        left = f"{_listed(['embeddings', *plain, *partly])} {plain_dtype}"
        return f"weights {'; '.join(parts)}; {left}" if parts else f"{method} leaves all weights {plain_dtype}"


def _word(node: str) -> str:
    return next((word for start, word in _WORDS if node.startswith(start)), node.split(".")[0].replace("_", " "))


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
