"""A predictor as a checkpoint of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from neusight_jax.errors import InputError
from neusight_jax.model.calibrated import CalibratedPredictor
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.network import Network, network_card
from neusight_jax.model.neusight import NeuSightPredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.rivals import RIVALS, FittedBaseline

KINDS: dict[type, str] = {
    MixturePredictor: "mixture",
    CalibratedPredictor: "calibrated",
    NeuSightPredictor: "neusight",
}
"""What a card calls a predictor; a fitted baseline says so itself."""


def save_predictor(folder: str | os.PathLike[str], predictor: Predictor, card: Mapping[str, Any] | None = None) -> None:
    """Write a predictor as a checkpoint, a folder that `load_predictor` and every command take; all or nothing.

    Args:
      folder: to write, new or empty.
      predictor: of a kind of this package, e.g. a loaded one whose weights were fitted further.
      card: what to say of it: `load_card` of the checkpoint it was made from, or keys such as `trained_on`,
        `trained_dtypes` and `held_out`. Its kind and sizes are read off the predictor where the card has none.
    Raises: `InputError` for a predictor of another kind, or an output that cannot be written.
    """
    save_checkpoint(folder, predictor, {**_kind_and_sizes(predictor), **(card or {})})


def _kind_and_sizes(predictor: Any) -> dict[str, Any]:
    """`kind` and `architecture` of a card."""
    kind = predictor.kind if isinstance(predictor, FittedBaseline) else KINDS.get(type(predictor))
    if kind is None:
        kinds = ", ".join((*KINDS.values(), *RIVALS))
        raise InputError(f"a {type(predictor).__name__} cannot be saved, expected one of kind {kinds}")
    base = getattr(predictor, "base", predictor)
    parts = getattr(base, "families", None) or getattr(base, "networks", {})
    leaves = jax.tree.leaves(parts, is_leaf=lambda node: isinstance(node, Network))
    network = next((node for node in leaves if isinstance(node, Network)), None)
    layers = network.parameters.get("weights", ()) if network else ()
    sizes: dict[str, Any] = {
        "families": list(parts),
        "hidden": [layer.shape[-1] for layer in layers[:-1]],
        "members": network.members if network else 1,
        "intervals": getattr(predictor, "intervals", None) is not None,
    }
    if network and network.module is not None:
        sizes["network"] = network_card(network.module)
    if kind == "calibrated":
        sizes["points"] = {name: len(shape.points) for name, shape in predictor.shapes.items()}
    return {"kind": kind, "architecture": sizes}
