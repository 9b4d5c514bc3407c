"""The card of a checkpoint as a typed record: what is read from it, checked once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neusight_jax.errors import InputError

Effects = dict[str, dict[str, list[float]]]
"""Effects by device or generation, then by family; missing where there are none."""


class Digests(BaseModel):
    """SHA-256 of the weights file and of the card's content, hex (`digest.digests`)."""

    weights: str
    card: str


class Architecture(BaseModel):
    """Sizes of a predictor; see `checkpoint.untrained`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    families: list[str]
    hidden: list[int]
    members: int = Field(ge=1)
    intervals: bool = False
    vendor_intervals: list[str] = []
    labelled: list[str] | None = None
    points: dict[str, int] = {}


class Card(BaseModel):
    """What a card says that a predictor is read by; more keys (errors, recipe, notes ...) are for people and reports.

    Attributes:
      format: version of the layout; kind: of predictor; architecture: its sizes.
      trained_dtypes, held_out: what it was trained on, and which GPUs it was not.
      device_effects, generation_effects: what was measured of devices and of generations of kernels.
      device_intervals: half-widths by device and family; libraries: number of the known one by family.
      sha256: digests, None in a card that was changed by hand.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: int
    kind: str
    architecture: Architecture
    trained_dtypes: list[str] = []
    held_out: list[str] = []
    device_effects: Effects = {}
    generation_effects: Effects = {}
    device_intervals: dict[str, dict[str, float]] = {}
    libraries: dict[str, float | list[float]] = {}
    sha256: Digests | None = None


def typed_card(content: dict[str, Any], path: Path) -> Card:
    """The record of a card. `InputError` naming the first key that is not as expected."""
    try:
        return Card.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        what = "kind or architecture" if first["loc"][0] in ("kind", "architecture") else str(first["loc"][0])
        raise InputError(f"{path}: {what} unreadable ({key}: {first['msg']}); copy it again") from None
