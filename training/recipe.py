"""Recipes: how each kind of checkpoint is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neusight_jax.kernels.families import TENSOR_FAMILIES
from neusight_jax.training.fit import MORE_STEPS, TENSOR_SETTINGS, Settings


@dataclass(frozen=True)
class Recipe:
    """Recipe of a kind of checkpoint.

    Attributes:
      kind: "mixture" or "neusight".
      members: ensemble size, one seed each.
      hidden: hidden layers.
      settings: of the optimizer, for the families and for the tile choice.
      rows_per_device: at most this many sweep rows of each GPU and family.
      in_model: whether nodes of measured models are trained on too.
      left_out_seeds, left_out_settings: fits that leave each device out, the evidence for intervals; 0 seeds = none.
      families: those to train, of those that were measured; empty = all.
      base: a checkpoint whose families are taken over where none is trained here; "" = none.
      more_steps: family -> times the steps of both settings.
      left_out_by: what is left out together, a "device" or all devices of an "architecture".
      trial: whether it only tries the path, so that every forecast made with it says so.
      network: a user's own module in place of the hidden layers, as `network.network_card` says it.
    """

    kind: str
    members: int
    hidden: tuple[int, ...]
    settings: Settings
    tile_settings: Settings = field(default_factory=lambda: Settings(steps=600))
    rows_per_device: int = 6000
    in_model: bool = True
    left_out_seeds: int = 1
    left_out_settings: Settings = field(default_factory=lambda: Settings(steps=1000))
    families: tuple[str, ...] = ()
    base: str = ""
    left_out_by: str = "device"
    more_steps: dict[str, float] = field(default_factory=dict)
    trial: bool = False
    network: dict[str, Any] | None = None


RECIPES: dict[str, Recipe] = {
    "fp32": Recipe("mixture", members=4, hidden=(32, 32), settings=Settings(steps=1500)),
    "fp32-neusight": Recipe(
        "neusight",
        members=1,
        hidden=(64, 64, 64),
        settings=Settings(steps=4000),
        in_model=False,
        left_out_seeds=0,
    ),
    "tensorcore": Recipe(
        "mixture",
        members=3,
        hidden=(32, 32),
        settings=TENSOR_SETTINGS,
        rows_per_device=8000,
        in_model=False,
        left_out_settings=TENSOR_SETTINGS,
        families=tuple(sorted(TENSOR_FAMILIES)),
        base="fp32",
        left_out_by="architecture",
        more_steps=MORE_STEPS,
    ),
    "collectives": Recipe(
        "mixture",
        members=3,
        hidden=(32, 32),
        settings=Settings(steps=400),
        in_model=False,
        left_out_settings=Settings(steps=300),
        families=("collective",),
        left_out_by="architecture",
    ),
    "tiny": Recipe(
        "mixture",
        members=1,
        hidden=(8,),
        settings=Settings(steps=60, batch_size=64),
        tile_settings=Settings(steps=20),
        left_out_settings=Settings(steps=20, batch_size=64),
        trial=True,
    ),
}
"""Recipes by name: `fp32` the default, `fp32-neusight` the paper's form, `tensorcore` for every other dtype with
attention and experts, `collectives` for messages between GPUs (to be joined to it), `tiny` a quick
trial of the whole path."""
