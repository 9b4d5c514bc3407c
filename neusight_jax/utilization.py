"""The small networks: shape-only features in, raw outputs out. Plain pytrees, an ensemble along the first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

FEATURE_RANGE = 3.0
"""Normalised features are clipped to ± this, so that nothing is extrapolated far outside the training shapes."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Network:
    """An ensemble of multilayer perceptrons with tanh-like smooth activations, and the feature normalisation.

    Attributes:
      center, scale: feature normalisation [member, feature], from the training rows.
      weights: per layer [member, in, out].
      biases: per layer [member, out].
    """

    center: Float[Array, "member feature"]
    scale: Float[Array, "member feature"]
    weights: tuple[Float[Array, "member _input _output"], ...]
    biases: tuple[Float[Array, "member _output"], ...]

    @property
    def members(self) -> int:
        """Ensemble size."""
        return int(self.weights[0].shape[0])


def init_network(
    key: PRNGKeyArray, features: Float[Array, "row feature"], hidden: Sequence[int], outputs: int, members: int
) -> Network:
    """A network normalised to `features`; the last layer starts at zero, so that training starts from the physics."""
    sizes = [features.shape[1], *hidden, outputs]
    keys = jax.random.split(key, len(sizes))
    weights = [
        jax.random.normal(keys[layer], (members, sizes[layer], sizes[layer + 1])) / jnp.sqrt(1.0 * sizes[layer])
        for layer in range(len(sizes) - 1)
    ]
    weights[-1] = 0.0 * weights[-1]
    spread = jnp.std(features, axis=0)
    return Network(
        center=jnp.tile(jnp.mean(features, axis=0), (members, 1)),
        scale=jnp.tile(jnp.where(spread > 1e-6, spread, 1.0), (members, 1)),
        weights=tuple(weights),
        biases=tuple(jnp.zeros((members, size)) for size in sizes[1:]),
    )


def normalised(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel feature"]:
    """Features on each member's scale, clipped to ±`FEATURE_RANGE`."""
    center, scale = jax.lax.stop_gradient((network.center, network.scale))
    inputs = (features[None] - center[:, None]) / scale[:, None]
    return jnp.clip(inputs, -FEATURE_RANGE, FEATURE_RANGE)


def apply_network(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel output"]:
    """Outputs of every member for every kernel."""
    hidden = normalised(network, features)
    last = len(network.weights) - 1
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        hidden = jnp.einsum("eki,eio->eko", hidden, weight) + bias[:, None, :]
        if layer < last:
            hidden = jax.nn.silu(hidden)
    return hidden
