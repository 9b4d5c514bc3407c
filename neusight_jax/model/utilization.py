"""The small networks: shape-only features in, raw outputs out. Plain pytrees, an ensemble along the first axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, PRNGKeyArray

from neusight_jax.model.own_network import started

FEATURE_RANGE = 3.0
"""Normalised features are clipped to ± this, so that nothing is extrapolated far outside the training shapes."""


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Network:
    """An ensemble of networks of one form, and the feature normalisation. Every leaf has a leading axis [member].

    Attributes:
      center, scale: feature normalisation [member, feature], from the training rows.
      parameters: of the form, by name. In a checkpoint they stand beside `center` and `scale`.
      module: flax module of the form: normalised features [kernel, feature] -> outputs [kernel, output]. None =
        `perceptron`, so that forecasts need no flax.
    """

    center: Float[Array, "member feature"]
    scale: Float[Array, "member feature"]
    parameters: Mapping[str, Any]
    module: Any = None

    @property
    def members(self) -> int:
        """Ensemble size."""
        return int(self.center.shape[0])

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
        """Normalisation and parameters as fields of one record; the form is static."""
        named = [("center", self.center), ("scale", self.scale), *self.parameters.items()]
        return [(GetAttrKey(name), leaf) for name, leaf in named], (tuple(self.parameters), self.module)

    @classmethod
    def tree_unflatten(cls, form: tuple[Any, ...], leaves: Sequence[Any]) -> Network:
        """The network of these leaves."""
        center, scale, *parameters = leaves
        return cls(center, scale, dict(zip(form[0], parameters, strict=True)), form[1])


def init_network(
    key: PRNGKeyArray,
    features: Float[Array, "row feature"],
    hidden: Sequence[int],
    outputs: int,
    members: int,
    module: Any = None,
) -> Network:
    """A network normalised to `features`, its members alike: a perceptron of these hidden layers, or `module`."""
    spread = jnp.std(features, axis=0)
    if module is None:
        start = init_perceptron(key, (features.shape[1], *hidden, outputs))
    else:
        module, start = started(module, key, features.shape[1], outputs)

    def ensemble(leaf: Array) -> Array:
        return jnp.tile(leaf, (members, *[1] * leaf.ndim))

    center, scale = jnp.mean(features, axis=0), jnp.where(spread > 1e-6, spread, 1.0)
    parameters = {name: jax.tree.map(ensemble, each) for name, each in start.items()}
    return Network(ensemble(center), ensemble(scale), parameters, module)


def normalised(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel feature"]:
    """Features on each member's scale, clipped to ±`FEATURE_RANGE`."""
    center, scale = jax.lax.stop_gradient((network.center, network.scale))
    inputs = (features[None] - center[:, None]) / scale[:, None]
    return jnp.clip(inputs, -FEATURE_RANGE, FEATURE_RANGE)


def apply_network(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel output"]:
    """Outputs of every member for every kernel."""
    module = network.module
    member = perceptron if module is None else lambda own, inputs: module.apply({"params": own}, inputs)
    outputs: Array = jax.vmap(member)(dict(network.parameters), normalised(network, features))
    return outputs


def init_perceptron(key: PRNGKeyArray, sizes: Sequence[int]) -> dict[str, tuple[Array, ...]]:
    """Weights [in, out] and biases [out] of every layer, `sizes` from the inputs to the outputs.

    The last layer starts at zero, so that training starts from the physics.
    """
    keys = jax.random.split(key, len(sizes))
    weights = [
        jax.random.normal(keys[layer], (sizes[layer], sizes[layer + 1])) / jnp.sqrt(1.0 * sizes[layer])
        for layer in range(len(sizes) - 1)
    ]
    weights[-1] = 0.0 * weights[-1]
    return {"weights": tuple(weights), "biases": tuple(jnp.zeros(size) for size in sizes[1:])}


def perceptron(
    parameters: Mapping[str, Sequence[Array]], inputs: Float[Array, "kernel feature"]
) -> Float[Array, "kernel output"]:
    """A multilayer perceptron: x ← silu(x W + b) for every layer, the last without silu."""
    hidden, last = inputs, len(parameters["weights"]) - 1
    for layer, (weight, bias) in enumerate(zip(parameters["weights"], parameters["biases"], strict=True)):
        hidden = hidden @ weight + bias
        if layer < last:
            hidden = jax.nn.silu(hidden)
    return hidden
