"""Networks of a user's own: flax modules, started for a family, and as a card names them. Imports flax only for them.

A module is any `flax.linen.Module` whose `__call__` maps normalised features [kernel, feature] to outputs
[kernel, output], every kernel by itself, and whose variables are all parameters. Its field `outputs`, if it has one, is
set for each family.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from neusight_jax.errors import InputError

_NOT_ARGUMENTS = ("outputs", "parent", "name")
_TAKEN = {"center", "scale"}


def started(module: Any, key: PRNGKeyArray, features: int, outputs: int) -> tuple[Any, dict[str, Any]]:
    """The module with its number of outputs, and its first parameters; `InputError` if it does not fit."""
    if any(field.name == "outputs" for field in fields(module)):
        module = module.clone(outputs=outputs)
    try:
        found, variables = module.init_with_output(key, jnp.zeros((2, features)))
    except Exception as error:  # whatever a user's code raises
        raise InputError(f"network {_path(module)} fails on {features} features: {error}") from error
    if jnp.shape(found) != (2, outputs):
        raise InputError(
            f"network {_path(module)} gives {jnp.shape(found)} for 2 kernels, expected (2, {outputs}); give it a field "
            "`outputs: int = 0`, which is set for every family, and return as many numbers"
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
        field.name: own for field, own in values.items() if field.name not in _NOT_ARGUMENTS and own != _default(field)
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
    found = imported(path)
    if not (isinstance(found, type) and issubclass(found, linen.Module)):  # nothing else a card names is ever called
        raise InputError(f"network {path} is not a class of flax.linen.Module; expected PACKAGE.MODULE:CLASS")
    if "outputs" in found.__dataclass_fields__:
        arguments["outputs"] = 0
    try:
        return found(**{name: _hashable(value) for name, value in arguments.items()})
    except TypeError as error:
        raise InputError(f"network {path} cannot be made of {card['arguments']}: {error}") from None


def imported(path: str) -> Any:
    """What PACKAGE.MODULE:NAME names; `InputError` if it cannot be imported."""
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
