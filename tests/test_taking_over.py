"""Checkpoints that take families over from another one hold them as they are there now."""

from __future__ import annotations

import filecmp
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import neusight_jax as nj
from benchmarks.cross_gpu import main as cross_gpu
from benchmarks.node_sums import main as node_sums
from neusight_jax.errors import InputError, run_script
from neusight_jax.model.checkpoint import checkpoint_folder, load_card, save_checkpoint
from neusight_jax.model.intervals import gpu_ratios, gpu_widening
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.taking_over import joined, taken_again
from neusight_jax.training.taking_over import main as taking_over


@pytest.mark.parametrize(("name", "base"), [("tensorcore", "fp32"), ("tensorcore-heldout-hopper", "fp32-heldout")])
def test_shipped_checkpoints_hold_the_shipped_base(name: str, base: str, tmp_path: Path) -> None:
    """Made again from their base they come out byte by byte: nobody retrained one and forgot the other."""
    again = tmp_path / name
    save_checkpoint(again, *taken_again(name, base))
    shipped = checkpoint_folder(name)
    for part in ("weights.safetensors", "card.json"):
        assert filecmp.cmp(again / part, shipped / part, shallow=False), part


def test_only_what_was_taken_over_changes(tmp_path: Path) -> None:
    """From another base the foreign families are that one's, its own stay."""
    again, card = taken_again("tensorcore", "fp32-heldout")
    before, base = nj.load_predictor("tensorcore"), nj.load_predictor("fp32-heldout")
    members = card["architecture"]["members"]
    for family, part in again.families.items():
        source = base if family in card["taken_over"]["families"] else before
        for new, old in zip(
            jax.tree.leaves(part.network), jax.tree.leaves(source.families[family].network), strict=True
        ):
            np.testing.assert_array_equal(new, old[:members])
    assert card["errors_percent"]["linear"] == load_card("fp32-heldout")["errors_percent"]["linear"]
    assert card["errors_percent"]["gemm"] == load_card("tensorcore")["errors_percent"]["gemm"]


def test_each_family_keeps_the_gpus_it_was_measured_on() -> None:
    """Half precision was measured on nothing like T4, single precision on nothing like B200: each is wider there."""
    predictor = nj.load_predictor("tensorcore")
    assert isinstance(predictor, MixturePredictor)
    assert predictor.intervals is not None
    wider = {
        (name, gpu): float(gpu_widening(gpu_ratios(nj.load_gpu(gpu)), predictor.intervals.gpu_range[name]))
        for name in ("gemm", "linear")
        for gpu in ("T4", "B200")
    }
    assert wider["gemm", "B200"] == wider["linear", "T4"] == 1.0
    assert wider["gemm", "T4"] > 1.5
    assert wider["linear", "B200"] > 1.3


def test_nothing_to_take_again() -> None:
    """A checkpoint that stands by itself is refused in one line."""
    with pytest.raises(InputError, match="fp32 took no families over; expected a checkpoint of a recipe with a base"):
        taken_again("fp32", "fp32-heldout")


@pytest.mark.parametrize(
    ("main", "arguments", "said"),
    [
        (taking_over, ["fp32", "--base", "fp32", "--output", "never"], "error: fp32 took no families over"),
        (node_sums, ["never"], "error: never does not exist"),
        (cross_gpu, ["never", "never"], "error: never does not exist"),
    ],
)
def test_modules_run_as_programs_end_in_one_line(
    main: Callable[[], None],
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What `python -m` runs says what was wrong and leaves with 2, as the command line does."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as left:
        run_script(main)
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.startswith(said)
    assert error.count("\n") == 1
    assert not Path("never").exists()


def test_families_are_joined_to_a_checkpoint() -> None:
    """Its own families stay as they are to the bit; those of the other that it lacks come along."""
    name = "tensorcore-heldout-hopper"
    before, other = nj.load_predictor(name), nj.load_predictor("tensorcore")
    both, card = joined(name, "tensorcore")
    assert card["joined"] == {"tensorcore": ["collective"]}
    assert card["taken_over"] == load_card(name)["taken_over"]
    assert isinstance(before, MixturePredictor)
    assert isinstance(other, MixturePredictor)
    assert both.families.keys() == {*before.families, "collective"}
    for family, own in both.families.items():
        source = other if family == "collective" else before
        leaves = zip(jax.tree.leaves(own), jax.tree.leaves(source.families[family]), strict=True)
        assert all(np.array_equal(ours, theirs) for ours, theirs in leaves)
