"""GPUs of another vendor beside NVIDIA's in one fit: they learn what is theirs and move nothing that all share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import jax
import numpy as np
import pandas as pd
import pytest

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.mixture import FamilyMixture
from neusight_jax.shifts import EFFECTS
from neusight_jax.tiles import init_tile_choice
from neusight_jax.training.data import sweep_rows
from neusight_jax.training.fit import Job, Settings, fit, row_features, sample_of
from neusight_jax.training.kinds import MixtureKind, effect_penalties, forecast
from neusight_jax.training.rows import Rows
from synthetic import DEVICES, synthetic_rows

V100, T4 = DEVICES
MI100, MI210 = "AMD Instinct MI100", "AMD Instinct MI210"
SETTINGS = Settings(steps=60, batch_size=64, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("vendors")
    devices = (*DEVICES, MI100, MI210)
    pd.concat([synthetic_rows("softmax", name, 64) for name in devices]).to_parquet(folder / "softmax.parquet")
    return sweep_rows(read_measurements(folder), "softmax", sorted(devices))


def _kind(rows: Rows) -> MixtureKind:
    tile = init_tile_choice(jax.random.key(0), rows.family, row_features(rows))
    return MixtureKind(tile, (8,), effect_penalties(rows))


def _fitted(rows: Rows, *held_out: str) -> FamilyMixture:
    found = fit(_kind(rows), rows, [Job(0, held_out)], SETTINGS)
    best: FamilyMixture = jax.tree.map(lambda leaf: leaf[0], found.best)
    return best


def _slower(rows: Rows, *devices: str, times: float = 3.0) -> Rows:
    slow = np.isin(rows.device, [rows.devices.index(name) for name in devices])
    return replace(rows, seconds=np.where(slow, times * rows.seconds, rows.seconds).astype(np.float32))


def _ratio(fitted: FamilyMixture, rows: Rows, device: str) -> float:
    """Median forecast over measured, by a fit that gives the device no effect of its own."""
    own = rows.of_device(device)
    kind = _kind(rows)
    seconds = jax.jit(lambda sample: forecast(kind, fitted, rows.family, sample))(sample_of(own, seen=False))
    return float(np.median(np.asarray(seconds) / own.seconds))


def test_guests_move_nothing_that_all_share(rows: Rows) -> None:
    plain, twisted = _fitted(rows), _fitted(_slower(rows, MI100, MI210))
    for field in fields(FamilyMixture):
        if field.name not in ("stack", "stack_network", "effect"):
            leaves = (jax.tree.leaves(getattr(fitted, field.name)) for fitted in (plain, twisted))
            for one, other in zip(*leaves, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=field.name)
    one, other = (
        np.delete(np.asarray(fitted.effect), np.flatnonzero(rows.guests), axis=0) for fitted in (plain, twisted)
    )
    np.testing.assert_array_equal(one, other)
    assert not np.allclose(plain.stack, twisted.stack, atol=0.01)


def test_what_one_guest_says_of_its_vendor_is_believed_of_the_next(rows: Rows) -> None:
    """All of AMD three times as slow: MI210, which the fit never saw, is forecast slower too, T4 as before."""
    slow = _slower(rows, MI100, MI210)
    plain, twisted = _fitted(rows, MI210), _fitted(slow, MI210)
    assert _ratio(twisted, rows, MI210) > 1.3 * _ratio(plain, rows, MI210)
    assert _ratio(twisted, rows, T4) == _ratio(plain, rows, T4)


def test_what_a_vendors_libraries_do_with_a_shape_is_believed_of_the_next(rows: Rows) -> None:
    """AMD's wide rows take four times as long: those of MI210, which the fit never saw, are forecast so, narrow ones
    and T4's are not."""
    wide = np.asarray(rows.batch.dims["cols"]) > 500.0
    slow = np.where(wide & rows.guests[rows.device], 4.0 * rows.seconds, rows.seconds).astype(np.float32)
    plain, twisted = _fitted(rows, MI210), _fitted(replace(rows, seconds=slow), MI210)
    moved = {}
    for tag, chosen in (("wide", wide), ("narrow", ~wide)):
        part = rows.take(chosen)
        moved[tag] = _ratio(twisted, part, MI210) / _ratio(plain, part, MI210)
        assert _ratio(twisted, part, T4) == _ratio(plain, part, T4)
    assert moved["wide"] > 1.3 * moved["narrow"]


def test_a_guest_that_is_left_out_is_not_seen(rows: Rows) -> None:
    for held_out in ((MI100,), (MI100, MI210)):
        one, other = _fitted(rows, *held_out), _fitted(_slower(rows, *held_out), *held_out)
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(left, right)
    np.testing.assert_allclose(one.stack, np.zeros((1, len(EFFECTS))), atol=1e-3)


@pytest.mark.parametrize("alone", [True, False])
def test_without_hosts_a_vendor_is_its_own_host(rows: Rows, alone: bool) -> None:
    """Measured alone, or left alone by a job that leaves all others out."""
    measured, held_out = (_amd_alone(rows), ()) if alone else (rows, DEVICES)
    plain, twisted = _fitted(measured, *held_out), _fitted(_slower(measured, MI100, MI210), *held_out)
    assert not np.allclose(plain.network.weights[0], twisted.network.weights[0], atol=1e-3)
    assert _ratio(twisted, measured, MI100) > 1.5 * _ratio(plain, measured, MI100)


def _amd_alone(rows: Rows) -> Rows:
    """AMD's rows as if nothing else were listed."""
    kept = np.flatnonzero(rows.guests)
    part = rows.take(np.isin(rows.device, kept))
    names = tuple(rows.devices[at] for at in kept)
    gpus = jax.tree.map(lambda column: column[kept], rows.gpus)
    return replace(part, device=np.searchsorted(kept, part.device), devices=names, gpus=gpus)
