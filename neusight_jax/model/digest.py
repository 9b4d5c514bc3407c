"""Digests of a checkpoint, kept in its card: a damaged or mixed copy is refused, not forecast with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError

KEY = "sha256"
"""Key of a card that holds `digests`."""


def digests(card: Mapping[str, Any], weights: bytes) -> dict[str, str]:
    """SHA-256 of the weights file, byte for byte, and of the card's content without these digests, in hex.

    The content is what JSON says, keys sorted: its layout may change.
    """
    content = json.dumps({key: value for key, value in card.items() if key != KEY}, sort_keys=True)
    return {"weights": _sha256(weights), "card": _sha256(content.encode())}


def check_card(card: Mapping[str, Any], path: Path) -> None:
    """`InputError` unless the card's content has its digest; a card without digests passes (`card_notes` says so)."""
    if KEY in card and _kept(card, "card", path) != digests(card, b"")["card"]:
        raise InputError(f"{path}: its content does not match its own digest; copy the checkpoint again")


def check_weights(card: Mapping[str, Any], weights: bytes, path: Path) -> None:
    """`InputError` unless the weights have the card's digest; a card without digests passes."""
    if KEY in card and _kept(card, "weights", path) != _sha256(weights):
        raise InputError(f"{path}: weights do not match the card's digest; copy the checkpoint again")


def _kept(card: Mapping[str, Any], part: str, path: Path) -> str:
    known = card[KEY]
    if not isinstance(known, dict) or not isinstance(known.get(part), str):
        raise InputError(f"{path}: the card's digest is unreadable; copy the checkpoint again")
    return str(known[part])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
