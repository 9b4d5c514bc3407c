"""The small networks: shape-only features in, raw outputs out. Plain pytrees, an ensemble along the first axis."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, PRNGKeyArray

from neusight_jax.errors import InputError

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
        leaves = [("center", self.center), ("scale", self.scale), *self.parameters.items()]
        return [(GetAttrKey(name), leaf) for name, leaf in leaves], (tuple(self.parameters), self.module)

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
    """A network normalised to features, its members alike.

    Args:
      key: of the first weights.
      features: of the training rows; the normalisation is theirs.
      hidden: sizes of the hidden layers of a perceptron.
      outputs: numbers the network returns for a kernel.
      members: ensemble size.
      module: flax module in place of the perceptron; None = the perceptron.
    Raises: `InputError` for a module that does not fit.
    """
    spread = jnp.std(features, axis=0)
    if module is None:
        start = init_perceptron(key, (features.shape[1], *hidden, outputs))
    else:
        module, start = started(module, key, features.shape[1], outputs)

    def ensemble(leaf: Array) -> Array:
        return jnp.tile(leaf, (members, *[1] * leaf.ndim))

    # A feature that never varied has no scale to divide by.
    center, scale = jnp.mean(features, axis=0), jnp.where(spread > 1e-6, spread, 1.0)
    parameters = {name: jax.tree.map(ensemble, subtree) for name, subtree in start.items()}
    return Network(ensemble(center), ensemble(scale), parameters, module)


def normalised(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel feature"]:
    """Features on each member's scale, clipped to ±`FEATURE_RANGE`."""
    # Facts of the training rows, not weights: no fit may move them.
    center, scale = jax.lax.stop_gradient((network.center, network.scale))
    inputs = (features[None] - center[:, None]) / scale[:, None]
    return jnp.clip(inputs, -FEATURE_RANGE, FEATURE_RANGE)


def apply_network(network: Network, features: Float[Array, "kernel feature"]) -> Float[Array, "member kernel output"]:
    """Outputs of every member for every kernel."""
    module = network.module
    member = perceptron if module is None else lambda weights, inputs: module.apply({"params": weights}, inputs)
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


# Networks of a user's own: flax modules, started for a family, and as a card names them. Imports flax only for them.
#
# A module is any `flax.linen.Module` whose `__call__` maps normalised features [kernel, feature] to outputs
# [kernel, output], every kernel by itself, and whose variables are all parameters. Its field `outputs`, if it has
# one, is set for each family.

_NOT_ARGUMENTS = ("outputs", "parent", "name")
_TAKEN = {"center", "scale"}


def started(module: Any, key: PRNGKeyArray, features: int, outputs: int) -> tuple[Any, dict[str, Any]]:
    """A flax module with its number of outputs set, and its first parameters.

    Args:
      module: a `flax.linen.Module`; its field `outputs` is set, if it has one.
      key: of the first parameters.
      features: inputs of a kernel.
      outputs: numbers it has to return for a kernel.
    Raises: `InputError` where it fails on such inputs, returns another shape, or has variables that are no parameters.
    """
    if any(field.name == "outputs" for field in fields(module)):
        module = module.clone(outputs=outputs)
    try:
        output, variables = module.init_with_output(key, jnp.zeros((2, features)))
    except Exception as error:  # whatever a user's code raises
        raise InputError(f"network {_path(module)} fails on {features} features: {error}") from error
    if jnp.shape(output) != (2, outputs):
        raise InputError(
            f"network {_path(module)} gives {jnp.shape(output)} for 2 kernels, expected (2, {outputs}); give it a "
            "field `outputs: int = 0`, which is set for every family, and return as many numbers"
        )
    other, taken = sorted(set(variables) - {"params"}), sorted(_TAKEN & set(variables.get("params", {})))
    if other or taken:
        raise InputError(
            f"network {_path(module)} has variables {', '.join(other)} beside its parameters; expected parameters only"
            if other
            else f"network {_path(module)} calls a parameter {taken[0]}, the name of its normalisation; rename it"
        )
    return module, dict(variables["params"])


def network_card(module: Any) -> dict[str, Any]:
    """Where a module is imported from, and the arguments in which it differs from its defaults.

    Raises: `InputError` where a card could not bring it back.
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        raise InputError(f"network {module!r} is no flax.linen.Module; expected an instance of one")
    path, values = _path(module), {field: getattr(module, field.name) for field in fields(module)}
    if path.startswith("__main__:") or imported(path) is not type(module):
        raise InputError(f"network {path} cannot be imported again; define it in a module of its own")
    arguments = {
        field.name: value
        for field, value in values.items()
        if field.name not in _NOT_ARGUMENTS and value != _default(field)
    }
    try:
        card: dict[str, Any] = json.loads(json.dumps({"module": path, "arguments": arguments}))
        hash(load_network(card))
    except TypeError as error:
        raise InputError(
            f"network {path}: {error}; a card holds numbers, text and lists of them: make the rest defaults"
        ) from None
    return card


def load_network(card: Mapping[str, Any]) -> Any:
    """The module that a card names, imported; `InputError` if it is not there or is no flax module."""
    from flax import linen

    path, arguments = str(card["module"]), dict(card["arguments"])
    module = imported(path)
    if not (isinstance(module, type) and issubclass(module, linen.Module)):  # nothing else a card names is ever called
        raise InputError(f"network {path} is not a class of flax.linen.Module; expected PACKAGE.MODULE:CLASS")
    if "outputs" in module.__dataclass_fields__:
        arguments["outputs"] = 0
    try:
        return module(**{name: _hashable(value) for name, value in arguments.items()})
    except TypeError as error:
        raise InputError(f"network {path} cannot be made of {card['arguments']}: {error}") from None


def imported(path: str) -> Any:
    """The object that PACKAGE.MODULE:NAME names; `InputError` if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a module's own code may raise whatever it likes
        raise InputError(
            f"network {path} cannot be imported ({error}); expected PACKAGE.MODULE:CLASS on the Python path, "
            "e.g. with PYTHONPATH set to its folder"
        ) from None


def _path(module: Any) -> str:
    return f"{type(module).__module__}:{type(module).__qualname__}"


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _hashable(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
