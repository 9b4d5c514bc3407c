"""Checkpoints: bit-exact round trips, one line for each way a file can be wrong, and every shipped one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from predictors import KINDS, NETWORKS, level_effect, random_kernels, random_predictor
from safetensors.numpy import load_file, save_file

import neusight_jax as nj
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.checkpoint import CARD, KEY, WEIGHTS, card_notes, save_checkpoint, tree_to_arrays, untrained
from neusight_jax.model.intervals import MODELS, empty_intervals
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import effect_width

SHIPPED = nj.list_checkpoints()
EFFECT_DEVICE = "Tesla T4"


def _architecture(members: int = 2) -> dict[str, Any]:
    return {"families": list(NETWORKS), "hidden": [8], "members": members}


def _save(folder: Path, kind: str = "mixture", **card: Any) -> Any:
    predictor = random_predictor(kind, 0, members=2)
    save_checkpoint(folder, predictor, {"kind": kind, "architecture": _architecture(), **card})
    return predictor


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_exact(tmp_path: Path, kind: str) -> None:
    predictor = _save(tmp_path / "kept", kind)
    for place in (tmp_path / "kept", tmp_path / "kept" / WEIGHTS, str(tmp_path / "kept" / CARD)):
        read = nj.load_predictor(place)
        assert jax.tree.structure(read) == jax.tree.structure(predictor)
        for old, new in zip(jax.tree.leaves(predictor), jax.tree.leaves(read), strict=True):
            np.testing.assert_array_equal(np.asarray(old), np.asarray(new))
            assert np.asarray(new).dtype == np.float32


def test_what_a_record_of_intervals_lists_is_kept(tmp_path: Path) -> None:
    """Families with intervals of another vendor, and those in labels; a measured GPU's own are the card's."""
    predictor = random_predictor("mixture", 0, members=2)
    assert isinstance(predictor, MixturePredictor)
    counts = {name: each.network.center.shape[-1] for name, each in predictor.families.items()}
    intervals = empty_intervals(counts, ("bmm", MODELS), ("bmm", "linear"))
    card = {
        "kind": "mixture",
        "architecture": {**_architecture(), "intervals": True},
        "device_effects": {"Tesla T4": {"bmm": level_effect("bmm", 0.0), "linear": level_effect("linear", 0.0)}},
        "device_intervals": {"Tesla T4": {"bmm": 0.07, MODELS: 0.05}},
    }
    save_checkpoint(tmp_path / "kept", replace(predictor, intervals=intervals), card)
    read: Any = nj.load_predictor(tmp_path / "kept")
    assert jax.tree.structure(read.intervals) == jax.tree.structure(intervals)
    assert read.intervals.labelled == ("bmm", "linear")
    own: Any = nj.load_predictor(tmp_path / "kept", "T4")
    np.testing.assert_allclose(own.intervals.kernels["bmm"], [-0.07, 0.07])
    np.testing.assert_allclose(own.intervals.total, [-0.05, 0.05])
    assert own.intervals.other_vendor == {}
    save_checkpoint(tmp_path / "bare", replace(predictor, intervals=None), card)
    assert set(nj.load_card(tmp_path / "bare")["architecture"]) == {*_architecture(), "intervals"}


def test_saving_again_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _save(tmp_path / name)
    for name in (WEIGHTS, CARD):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_members_change_the_forecast_that_is_read(tmp_path: Path) -> None:
    predictor = _save(tmp_path / "kept")
    graph, gpu = nj.graph_from_config("bert-tiny", batch_size=1, sequence_length=16), nj.load_gpu("Tesla T4")
    expected = nj.predict(predictor, gpu, graph).total_s
    assert nj.predict(nj.load_predictor(tmp_path / "kept"), gpu, graph).total_s == expected


def _truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def _flip_header_bit(folder: Path) -> None:
    path = folder / WEIGHTS
    data = bytearray(path.read_bytes())
    data[9] ^= 0x40
    path.write_bytes(bytes(data))


def _empty(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def _edit_weights(change: Callable[[dict[str, np.ndarray], str], None], suffix: str = "weights/0") -> Any:
    def edit(folder: Path) -> None:
        flat = dict(load_file(folder / WEIGHTS))
        change(flat, next(name for name in sorted(flat) if name.endswith(suffix)))
        save_file(flat, folder / WEIGHTS)
        _edit_card()(folder)

    return edit


def _edit_card(**changes: Any) -> Any:
    """A card without digests: as one of a version that wrote none."""

    def edit(folder: Path) -> None:
        card = json.loads((folder / CARD).read_text())
        card.pop(KEY, None)
        (folder / CARD).write_text(json.dumps({**card, **changes}))

    return edit


def _drop(flat: dict[str, np.ndarray], name: str) -> None:
    del flat[name]


def _add(flat: dict[str, np.ndarray], name: str) -> None:
    flat["stranger"] = np.zeros(3, np.float32)


def _reshape(flat: dict[str, np.ndarray], name: str) -> None:
    flat[name] = np.ascontiguousarray(flat[name][:, :-1])


def _poison(flat: dict[str, np.ndarray], name: str) -> None:
    flat[name].reshape(-1)[3] = np.nan


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, [WEIGHTS, "not a whole safetensors file", "copy the checkpoint again"]),
        (_flip_header_bit, [WEIGHTS, "not a whole safetensors file"]),
        (_empty, [WEIGHTS, "not a whole safetensors file"]),
        (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS, "no such file"]),
        (lambda folder: (folder / CARD).unlink(), [CARD]),
        (lambda folder: (folder / CARD).write_text("{"), [CARD]),
        (lambda folder: (folder / CARD).write_text("[]"), [CARD]),
        (_edit_card(format=999), [CARD, "999"]),
        (_edit_card(kind="mixtur"), ["mixtur", "mixture"]),
        (_edit_card(architecture={}), [CARD, "architecture"]),
        (_edit_card(architecture={**_architecture(), "families": ["linear", "pool"]}), [CARD]),
        (_edit_card(architecture=_architecture(3)), [WEIGHTS, "has shape", "expected"]),
        (_edit_weights(_drop), [WEIGHTS, "weights/0", "missing"]),
        (_edit_weights(_add), [WEIGHTS, "unexpected leaf stranger"]),
        (_edit_weights(_reshape), [WEIGHTS, "weights/0", "has shape"]),
        (_edit_weights(_poison), [WEIGHTS, "weights/0", "not finite"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, damage: Any, words: list[str]) -> None:
    folder = tmp_path / "kept"
    _save(folder)
    damage(folder)
    with pytest.raises(nj.InputError) as caught:
        nj.load_predictor(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_missing_folder_and_an_unknown_name_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(nj.InputError, match="no such folder"):
        nj.load_predictor(tmp_path / "nowhere")
    with pytest.raises(nj.InputError, match="unknown checkpoint 'nowhere'"):
        nj.load_predictor("nowhere")


def test_a_measured_device_gets_its_effect(tmp_path: Path) -> None:
    plain = random_predictor("mixture", 0, members=2)
    effects = {name: list(np.linspace(-0.2, 0.3, plain.families[name].effect.shape[-1])) for name in NETWORKS}  # type: ignore[attr-defined]
    _save(tmp_path / "kept", device_effects={EFFECT_DEVICE: effects})
    tuned = nj.load_predictor(tmp_path / "kept", device="t4")
    for name, values in effects.items():
        np.testing.assert_allclose(tuned.families[name].effect, values, rtol=1e-6)  # type: ignore[attr-defined]
        before = replace(plain.families[name], effect=tuned.families[name].effect)  # type: ignore[attr-defined]
        after = replace(tuned.families[name], library=None)  # type: ignore[attr-defined]
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old, new)
    with pytest.raises(nj.InputError, match="unknown GPU 'no such chip'"):
        nj.load_predictor(tmp_path / "kept", device="no such chip")


def test_an_unmeasured_device_gets_what_its_generation_shares(tmp_path: Path) -> None:
    """A T4 runs volta's kernels, an H100 ampere's; a P100 has neither."""
    of_blas = [name for name in NETWORKS if FAMILIES[name].generations == "blas"]
    volta = {name: list(np.linspace(-0.1, 0.1, effect_width(FAMILIES[name]))) for name in of_blas}
    _save(tmp_path / "kept", generation_effects={"volta": volta})
    plain = nj.load_predictor(tmp_path / "kept")
    for device, shared in (("T4", True), ("H100", False), ("P100", False)):
        tuned = nj.load_predictor(tmp_path / "kept", device=device)
        for name, values in volta.items():
            expected = values if shared else plain.families[name].effect  # type: ignore[attr-defined]
            np.testing.assert_allclose(tuned.families[name].effect, expected, rtol=1e-6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("checkpoint", ["fp32", "fp32-heldout"])
@pytest.mark.parametrize("gpu", ["H100", "L4", "A100 80GB PCIe"])
def test_an_unmeasured_gpu_is_forecast_alike_with_and_without_its_name(checkpoint: str, gpu: str) -> None:
    kernels = random_kernels(0, 64, dtypes=1).families
    table = KernelTable({name: kernels[name] for name in ("linear", "bmm", "elementwise", "softmax", "norm")})
    with_name, without = (
        nj.predict_kernels(nj.load_predictor(checkpoint, device), nj.load_gpu(gpu), table) for device in (gpu, None)
    )
    np.testing.assert_allclose(without, with_name, rtol=1e-5)


def test_effects_of_another_shape_are_refused(tmp_path: Path) -> None:
    _save(tmp_path / "kept", device_effects={EFFECT_DEVICE: {key: [0.1, 0.2] for key in NETWORKS}})
    with pytest.raises(nj.InputError, match=r"effect of \w+ has 2 numbers"):
        nj.load_predictor(tmp_path / "kept", device="t4")


def test_saving_over_a_checkpoint_is_refused(tmp_path: Path) -> None:
    _save(tmp_path / "kept")
    before = (tmp_path / "kept" / WEIGHTS).read_bytes()
    with pytest.raises(nj.InputError, match="not empty"):
        _save(tmp_path / "kept")
    assert (tmp_path / "kept" / WEIGHTS).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_leaves_are_named_by_family() -> None:
    names = tree_to_arrays(untrained("mixture", _architecture()))
    assert all("/" in name for name in names)
    assert {name.split("/")[1] for name in names} == set(NETWORKS)


@pytest.mark.skipif(not SHIPPED, reason="no checkpoint ships yet")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_checkpoint_is_whole(name: str) -> None:
    card = nj.load_card(name)
    for key in ("kind", "architecture", "trained_on", "trained_dtypes", "held_out", "recipe", "seed", "made_by"):
        assert key in card, key
    assert card_notes(card, name) == []
    trained, held_out = set(card["trained_on"]["devices"]), set(card["held_out"])
    assert trained
    assert not trained & held_out
    assert trained | held_out <= set(nj.list_gpus())
    assert set(card["errors_percent"]) == set(card["architecture"]["families"]) <= set(NETWORKS)
    for family in card["errors_percent"].values():
        assert set(family["training"]) <= trained
        assert all(0 < error < 100 for error in family["training"].values())
    assert "neusight-jax train" in card["made_by"]
    graph = nj.graph_from_config("gpt2", batch_size=1, sequence_length=64, mode="training")
    predictor, gpu = nj.load_predictor(name), nj.load_gpu("NVIDIA H100 80GB HBM3")
    assert 1e-4 < nj.predict(predictor, gpu, graph).total_s < 1.0
    for device in card.get("device_effects", {}):
        tuned = nj.predict(nj.load_predictor(name, device), nj.load_gpu(device), graph).total_s
        assert tuned == pytest.approx(nj.predict(predictor, nj.load_gpu(device), graph).total_s, rel=1.0)
