"""Checkpoints that are torn, of another version or not checkpoints at all: one line that says which file and what."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import Fails
from safetensors.numpy import load_file, save_file

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.model.checkpoint import CARD, KEY, WEIGHTS, card_notes


def _rewrite_card(folder: Path, **changes: Any) -> None:
    """Change a card, which then has no digests: as one of a version that wrote none."""
    card = json.loads((folder / CARD).read_text())
    card.pop(KEY, None)
    (folder / CARD).write_text(json.dumps({**card, **changes}))


def _rewrite_weights(folder: Path, change: Callable[[dict[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
    _rewrite_card(folder)
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
    assert f"{own / name}: no such file; expected a checkpoint, a folder with" in predict_fails(checkpoint=str(own))


def test_card_of_another_format(predict_fails: Fails, own: Path) -> None:
    _rewrite_card(own, format=99)
    assert "card.json: format 99, this version reads format" in predict_fails(checkpoint=str(own))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "oracle"}, "unknown predictor kind 'oracle'"),
        ({"architecture": {}}, "kind or architecture unreadable"),
        ({"architecture": None}, "kind or architecture unreadable"),
        ({"trained_on": 3.0}, "trained_on unreadable (trained_on: Input should be"),
        ({"device_effects": {"Tesla T4": 3}}, "device_effects unreadable (device_effects.Tesla T4: Input should be"),
    ],
)
def test_card_that_says_nothing(predict_fails: Fails, own: Path, changes: dict[str, Any], message: str) -> None:
    _rewrite_card(own, **changes)
    assert message in predict_fails(checkpoint=str(own))


def test_card_that_is_no_card(predict_fails: Fails, own: Path) -> None:
    (own / CARD).write_text("{}")
    assert "not a checkpoint card" in predict_fails(checkpoint=str(own))
    (own / CARD).write_text("{")
    assert "card.json: not JSON: Expecting property name" in predict_fails(checkpoint=str(own))


def test_leaf_of_another_shape(predict_fails: Fails, own: Path) -> None:
    leaf = sorted(load_file(own / WEIGHTS))[0]
    _rewrite_weights(own, lambda flat: {**flat, leaf: np.zeros((3, 1, 4), np.float32)})
    assert f"{leaf} has shape (3, 1, 4), expected" in predict_fails(checkpoint=str(own))


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


def _flip(path: Path, bits: int, random: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    for place in random.choice(8 * len(content), bits, replace=False):
        content[place // 8] ^= 1 << (place % 8)
    path.write_bytes(content)


@pytest.mark.parametrize("name", [CARD, WEIGHTS])
@pytest.mark.parametrize("bits", [1, 20])
def test_flipped_bits(own: Path, name: str, bits: int) -> None:
    """Of any copy that is not the one written, not even one loads."""
    whole, random = (own / name).read_bytes(), np.random.default_rng(bits)
    for _ in range(25):
        _flip(own / name, bits, random)
        with pytest.raises(nj.InputError, match=r"copy the checkpoint again|this version reads format|no `format`"):
            nj.load_predictor(own)
        (own / name).write_bytes(whole)
    nj.load_predictor(own)


def test_weights_of_another_checkpoint(own: Path, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Of the very sizes: only the digest tells."""
    other = make_checkpoint(tmp_path / "other")
    flat = load_file(other / WEIGHTS)
    leaf = sorted(flat)[0]
    save_file({**flat, leaf: flat[leaf] + 1.0}, own / WEIGHTS)
    with pytest.raises(nj.InputError, match="weights do not match the card's digest; copy the checkpoint again"):
        nj.load_predictor(own)


def test_a_card_may_be_laid_out_anew(own: Path) -> None:
    card = json.loads((own / CARD).read_text())
    (own / CARD).write_text(json.dumps(dict(reversed(card.items()))))
    nj.load_predictor(own)
    (own / CARD).write_text(json.dumps({**card, KEY: {"weights": 1}}))
    with pytest.raises(nj.InputError, match="digest is unreadable"):
        nj.load_predictor(own)


def test_old_and_unfinished_checkpoints_say_so_in_every_forecast(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("bert-tiny", "--sequence-length", "16", "--gpu", "T4", "--checkpoint", str(own))
    words = "was interrupted (linear at step 200): its weights are unfinished"
    assert run(["predict", *command]) == 0
    assert words not in capsys.readouterr().out
    _rewrite_card(own, interrupted={"linear": 200}, recipe="tiny", trial=True)
    notes = card_notes(nj.load_card(own), "mine")
    assert notes == [
        f"the training of mine {words}",
        "mine is a trial: its recipe, tiny, takes few steps, to try the path; forecasts made with it say little, train "
        "by the recipe fp32",
        "mine: its weights carry no digest, so that damage to them would not be noticed",
    ]
    for name in ("predict", "sensitivity"):
        assert run([name, *command, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)["notes"]
        assert any(words in note for note in said)
        assert any("carry no digest" in note for note in said)


def test_saving_an_old_checkpoint_adds_digests(own: Path, tmp_path: Path) -> None:
    whole = nj.load_card(own)
    _rewrite_card(own)
    nj.save_predictor(tmp_path / "again", nj.load_predictor(own), nj.load_card(own))
    assert nj.load_card(tmp_path / "again") == whole
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()
