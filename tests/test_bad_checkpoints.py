"""Checkpoints that are torn, of another version or not checkpoints at all: one line that says which file and what."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import Fails
from safetensors.numpy import load_file, save_file

from neusight_jax.checkpoint import CARD, WEIGHTS


def _rewrite_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**card, **changes}))


def _rewrite_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
    save_file(dict(change(load_file(folder / WEIGHTS))), folder / WEIGHTS)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_weights(predict_fails: Fails, own: Path, share: float) -> None:
    content = (own / WEIGHTS).read_bytes()
    (own / WEIGHTS).write_bytes(content[: int(share * len(content))])
    assert f"{own / WEIGHTS}: not a whole safetensors file" in predict_fails(checkpoint=str(own))


def test_weights_of_another_kind_of_file(predict_fails: Fails, own: Path) -> None:
    (own / WEIGHTS).write_bytes(b"\x80\x04 a pickle, perhaps " * 50)
    assert "not a whole safetensors file" in predict_fails(checkpoint=str(own))


@pytest.mark.parametrize("name", [CARD, WEIGHTS])
def test_missing_half(predict_fails: Fails, own: Path, name: str) -> None:
    (own / name).unlink()
    assert f"{own / name}: missing; a checkpoint is a folder with" in predict_fails(checkpoint=str(own))


def test_card_of_another_format(predict_fails: Fails, own: Path) -> None:
    _rewrite_card(own, format=99)
    assert "card.json: format 99, this version reads format" in predict_fails(checkpoint=str(own))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "oracle"}, "unknown predictor kind 'oracle'"),
        ({"architecture": {}}, "kind or architecture unreadable"),
        ({"architecture": None}, "kind or architecture unreadable"),
    ],
)
def test_card_that_says_nothing(predict_fails: Fails, own: Path, changes: dict[str, Any], message: str) -> None:
    _rewrite_card(own, **changes)
    assert message in predict_fails(checkpoint=str(own))


def test_card_that_is_no_card(predict_fails: Fails, own: Path) -> None:
    (own / CARD).write_text("{}")
    assert "not a checkpoint card" in predict_fails(checkpoint=str(own))
    (own / CARD).write_text("{")
    assert "not readable as JSON" in predict_fails(checkpoint=str(own))


def test_leaf_of_another_shape(predict_fails: Fails, own: Path) -> None:
    leaf = sorted(load_file(own / WEIGHTS))[0]
    _rewrite_weights(own, lambda flat: {**flat, leaf: np.zeros((3, 1, 4), np.float32)})
    assert f"leaf {leaf} has shape (3, 1, 4), the card says" in predict_fails(checkpoint=str(own))


def test_leaf_missing_or_strange(predict_fails: Fails, own: Path) -> None:
    leaf = sorted(load_file(own / WEIGHTS))[0]
    _rewrite_weights(own, lambda flat: {**flat, "surplus": np.zeros(1, np.float32)})
    assert "unexpected leaf surplus" in predict_fails(checkpoint=str(own))
    _rewrite_weights(own, lambda flat: {k: v for k, v in flat.items() if k not in (leaf, "surplus")})
    assert f"leaf {leaf} is missing" in predict_fails(checkpoint=str(own))


def test_leaf_not_finite(predict_fails: Fails, own: Path) -> None:
    leaf = sorted(load_file(own / WEIGHTS))[0]
    _rewrite_weights(own, lambda flat: {**flat, leaf: np.full_like(flat[leaf], np.nan)})
    assert f"leaf {leaf} holds values that are not finite" in predict_fails(checkpoint=str(own))
