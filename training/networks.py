"""The networks as flax modules. Training runs these; forecasts run the same functions without flax."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import linen
from jaxtyping import Array, Float

from neusight_jax.model.utilization import Network, init_perceptron, perceptron


class Perceptron(linen.Module):
    """The standard network: normalised features [kernel, feature] to outputs [kernel, output].

    A module of one's own has the same signature (`train(..., network=...)`), and `outputs` set for it.
    """

    hidden: tuple[int, ...] = (32, 32)
    outputs: int = 0

    @linen.compact
    def __call__(self, inputs: Float[Array, "kernel feature"]) -> Float[Array, "kernel output"]:
        """Outputs of every kernel."""
        start = partial(init_perceptron, sizes=(inputs.shape[-1], *self.hidden, self.outputs))
        names = ("weights", "biases")
        return perceptron({name: self.param(name, lambda key, name: start(key)[name], name) for name in names}, inputs)


def as_modules(parameters: Any) -> Any:
    """Parameters with the flax module of every network said; what has one keeps it."""

    def said(node: Any) -> Any:
        if not isinstance(node, Network) or node.module is not None:
            return node
        *hidden, outputs = (layer.shape[-1] for layer in node.parameters["weights"])
        return replace(node, module=Perceptron(tuple(hidden), outputs))

    return jax.tree.map(said, parameters, is_leaf=lambda node: isinstance(node, Network))
