"""Networks of a user's own, as a user writes them."""

from __future__ import annotations

import jax
from flax import linen


class Gated(linen.Module):
    """One gated layer; its outputs start at zero, so that training starts from the physics."""

    width: int = 8
    outputs: int = 0

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        hidden = linen.tanh(linen.Dense(self.width)(inputs)) * linen.sigmoid(linen.Dense(self.width)(inputs))
        return linen.Dense(self.outputs, kernel_init=linen.initializers.zeros)(hidden)


class Narrow(linen.Module):
    """Says its outputs itself, and they are too few."""

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return linen.Dense(3)(inputs)


class Taken(linen.Module):
    """Calls a parameter as the package calls one."""

    outputs: int = 0

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return linen.Dense(self.outputs, name="scale")(inputs)


class Remembering(linen.Module):
    """Has a state beside its parameters."""

    outputs: int = 0

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=True)(linen.Dense(self.outputs)(inputs))


class Needing(linen.Module):
    """Cannot be made without an argument."""

    width: int

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return inputs
