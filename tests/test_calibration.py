"""Few-shot calibration: what it recovers, leaves alone and keeps by construction, and the way to a file."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from predictors import NETWORKS, ON_ONE_GPU, RATES, only, random_gpus, random_kernels, random_predictor, scaled

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.calibrated import (
    CalibratedPredictor,
    ShapeEffect,
    shape_coordinates,
    shape_kernel,
    shape_points,
)
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.intervals import empty_intervals, gpu_ratios, gpu_widening, range_of
from neusight_jax.model.latency import kernel_forecasts, on_device
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import EFFECTS
from neusight_jax.training.calibration import calibrate, calibration
from neusight_jax.training.intervals import calibrated_width
from neusight_jax.training.prior import Prior, prior_of
from synthetic import synthetic_rows, write_synthetic_measurements

GPU = nj.load_gpu("T4")


@functools.cache
def mixture(seed: int = 0) -> MixturePredictor:
    predictor = random_predictor("mixture", seed, hidden=(4,))
    assert isinstance(predictor, MixturePredictor)
    zeros = {
        name: replace(each, effect=jnp.zeros_like(each.effect), log_floor_s=jnp.full_like(each.log_floor_s, -11.0))
        for name, each in predictor.families.items()
    }
    return replace(predictor, families=zeros)


def kernels(seed: int, rows: int, *families: str) -> KernelTable:
    """Families of a table, row numbers running on from family to family."""
    table = only(random_kernels(seed, rows, dtypes=1), *families)
    numbered = {
        name: replace(batch, row=np.arange(rows, dtype=np.int32) + at * rows)
        for at, (name, batch) in enumerate(table.families.items())
    }
    return KernelTable(numbered)


def error(predictor: KernelTable, table: KernelTable, seconds: np.ndarray) -> float:
    return float(np.mean(np.abs(np.log(nj.predict_kernels(predictor, GPU, table) / seconds))))


LOCAL = tuple(name for name in ON_ONE_GPU if name in NETWORKS)


@jax.jit
def all_points(table: KernelTable, stretch: float = 1.0) -> dict[str, Any]:
    """Coordinates of kernels by family, by one program."""
    return {name: shape_points(FAMILIES[name], batch, stretch) for name, batch in table.families.items()}


def random_calibrated(seed: int) -> CalibratedPredictor:
    random = np.random.default_rng(seed)
    base = random_predictor("mixture", seed, hidden=(4,))
    shapes, every = {}, all_points(only(random_kernels(seed, 6, dtypes=1), *LOCAL), 4.0)
    for name, points in every.items():
        constant, weights = random.normal(size=len(EFFECTS)), random.normal(size=(6, len(EFFECTS)))
        shapes[name] = ShapeEffect(jnp.asarray(constant, jnp.float32), points, jnp.asarray(weights, jnp.float32))
    assert isinstance(base, MixturePredictor)
    return CalibratedPredictor(base, shapes, jnp.float32(4.0))


def test_a_machine_that_is_slower_by_one_factor_is_recovered_from_ten_kernels() -> None:
    base = mixture()
    table = kernels(1, 60, "bmm")
    seconds = 1.3 * nj.predict_kernels(base, GPU, table)
    few = jax.tree.map(lambda column: column[:10], table)
    tuned = calibrate(base, GPU, few, seconds[:10])
    assert error(base, table, seconds) == pytest.approx(np.log(1.3), rel=1e-3)
    assert error(tuned, table, seconds) < 0.4 * np.log(1.3)


def test_a_deviation_that_depends_on_the_shape_needs_more_kernels_and_is_found() -> None:
    base = mixture()
    table = kernels(2, 400, "softmax")
    size = np.log(table.families["softmax"].dims["rows"])
    seconds = nj.predict_kernels(base, GPU, table) * np.exp(0.15 * (size - size.mean()) / size.std())
    before = error(base, table, seconds)
    after = [
        error(calibrate(base, GPU, jax.tree.map(lambda c, n=n: c[:n], table), seconds[:n]), table, seconds)
        for n in (8, 100)
    ]
    assert after[1] < after[0] < before
    assert after[1] < 0.35 * before


def test_kernels_that_agree_with_the_forecast_change_nothing() -> None:
    base = mixture()
    table = kernels(3, 20, "linear")
    seconds = nj.predict_kernels(base, GPU, table)
    tuned = calibrate(base, GPU, table, seconds)
    np.testing.assert_allclose(nj.predict_kernels(tuned, GPU, table), seconds, rtol=1e-3)


def test_two_odd_shapes_are_believed_less_than_fifty() -> None:
    """Shapes that are off by 0.3 either way, one by one: a fit to two of them has nothing to carry to the others."""
    base, table = mixture(), kernels(5, 100, "linear")
    plain = nj.predict_kernels(base, GPU, table)

    def left(few: float, count: int, draw: int) -> float:
        seconds = plain * np.exp(np.random.default_rng(draw).normal(0.0, 0.3, len(plain)))
        rows = jax.tree.map(lambda column: column[:count], table)
        tuned = calibrate(base, GPU, rows, seconds[:count], Prior(few=few))
        return error(tuned, table, seconds) - error(base, table, seconds)

    two = {few: np.mean([left(few, 2, draw) for draw in range(8)]) for few in (0.0, 0.28)}
    assert two[0.28] < 0.5 * two[0.0]
    assert left(0.28, 50, 0) == pytest.approx(left(0.0, 50, 0), abs=0.01)


def test_one_wild_row_counts_little() -> None:
    base = mixture()
    table = kernels(4, 40, "norm")
    seconds = np.array(nj.predict_kernels(base, GPU, table))
    few, wild = jax.tree.map(lambda column: column[:10], table), seconds[:10].copy()
    wild[3] *= 20.0
    robust = error(calibrate(base, GPU, few, wild), table, seconds)
    trusting = error(calibrate(base, GPU, few, wild, Prior(width=1e3)), table, seconds)
    assert robust < 0.85 * trusting


@pytest.mark.parametrize("family", ["bmm", "conv"])
def test_rows_in_a_slow_clock_are_not_believed_but_a_slow_gpu_is(family: str) -> None:
    """Four of ten kernels that took 1.8 times as long, or all ten of them twice as long."""
    base, slow = mixture(), prior_of(family)
    believing = replace(slow, slow=None)
    odd, all_slow = [], []
    for seed in range(6, 10):
        table = kernels(seed, 60, family)
        plain = np.asarray(nj.predict_kernels(base, GPU, table))
        few = jax.tree.map(lambda column: column[:10], table)
        clocked = plain[:10] * np.where(np.arange(10) % 5 < 2, 1.8, 1.0)
        for errors, measured, truth in ((odd, clocked, plain), (all_slow, 2.0 * plain[:10], 2.0 * plain)):
            tuned = [calibrate(base, GPU, few, measured, prior) for prior in (slow, believing)]
            errors.append([error(each, table, truth) for each in tuned])
    without, with_them = np.mean(odd, axis=0)
    assert without < 0.85 * with_them
    np.testing.assert_allclose(*np.transpose(all_slow), rtol=0.06, atol=0.04)  # not believed, it errs by 0.5


@pytest.mark.parametrize(("family", "seed"), [("linear", 6), ("conv", 5)])
def test_more_steps_change_nothing(monkeypatch: pytest.MonkeyPatch, family: str, seed: int) -> None:
    base, table = mixture(), kernels(seed, 100, family)
    scatter = np.random.default_rng(seed).normal(0.0, 0.5, 100)
    seconds = nj.predict_kernels(base, GPU, table) * np.exp(scatter)
    forecasts = [nj.predict_kernels(calibrate(base, GPU, table, seconds), GPU, table)]
    monkeypatch.setattr("neusight_jax.training.calibration.STEPS", 60)
    forecasts.append(nj.predict_kernels(calibrate(base, GPU, table, seconds), GPU, table))
    assert np.mean(np.abs(np.log(forecasts[0] / forecasts[1]))) < 0.02  # whole steps alone are off by 0.06 and 0.2


def test_families_without_rows_are_as_before() -> None:
    base = mixture()
    table = kernels(5, 12, "linear", "bmm")
    measured = only(table, "linear")
    tuned = calibrate(base, GPU, measured, 2.0 * nj.predict_kernels(base, GPU, measured))
    assert set(tuned.shapes) == {"linear"}
    other = kernels(6, 12, "bmm")
    np.testing.assert_array_equal(nj.predict_kernels(tuned, GPU, other), nj.predict_kernels(base, GPU, other))


def test_a_family_that_shares_a_network_shares_its_calibration() -> None:
    base = mixture()
    table = kernels(7, 12, "elementwise")
    tuned = calibrate(base, GPU, table, 1.5 * nj.predict_kernels(base, GPU, table))
    copies = kernels(7, 12, "memory")
    before = nj.predict_kernels(base, GPU, copies)
    ratio = nj.predict_kernels(tuned, GPU, copies) / before
    terms = kernel_forecasts(base, on_device(GPU), jax.tree.map(jnp.asarray, copies), isolated=True)["memory"]
    # A forecast that lies on the speed of light stays there until its heads are above it.
    above_light = before > 1.1 * np.asarray(terms.bounds.speed_of_light_s)[: len(before)]
    assert above_light.sum() >= 11
    assert np.all(ratio[above_light] > 1.2)
    assert np.all(ratio >= 1.0)


def test_the_error_after_is_of_rows_left_out() -> None:
    """Independent check: leave one row out by hand, keep the linearisation's shares; both must say nearly the same."""
    base, rows = mixture(), 8
    table = kernels(8, rows, "bmm")
    noise = np.exp(np.random.default_rng(0).normal(0.1, 0.05, rows))
    seconds = nj.predict_kernels(base, GPU, table) * noise
    said = calibration(base, GPU, table, seconds).summary["bmm"]
    by_hand = []
    for left in range(rows):
        keep = np.arange(rows) != left
        few = KernelTable({"bmm": jax.tree.map(lambda c, keep=keep: c[keep], table.families["bmm"])})
        few = KernelTable({"bmm": replace(few.families["bmm"], row=np.arange(rows - 1, dtype=np.int32))})
        tuned = calibrate(base, GPU, few, seconds[keep])
        by_hand.append(abs(nj.predict_kernels(tuned, GPU, table)[left] / seconds[left] - 1.0))
    assert said["after"] == pytest.approx(100.0 * np.mean(by_hand), rel=0.1)
    assert said["before"] == pytest.approx(100.0 * np.mean(np.abs(1.0 / noise - 1.0)), rel=1e-2)
    assert said["rows"] == said["given"] == rows


def test_a_calibration_is_trusted_as_far_as_its_kernels_forecast_each_other() -> None:
    """Narrow where the measured kernels agree, wide where they do not; other families as before; whole models too."""
    base, rows = mixture(), 40
    counts = {name: each.network.center.shape[-1] for name, each in base.families.items()}
    pairs = {name: jnp.array([-0.3, 0.3]) for name in NETWORKS}
    intervals = replace(empty_intervals(counts), kernels=pairs, other_vendor={"bmm": jnp.array([-0.9, 0.9])})
    ranges = {"inside": range_of(np.asarray(gpu_ratios(GPU))[None])}
    ranges["outside"] = ranges["inside"] - 1.0
    table = kernels(8, rows, "bmm")
    found = {}
    for spread in (0.01, 0.5):
        noise = np.exp(np.random.default_rng(0).normal(0.1, spread, rows))
        for name, trained in ranges.items():
            start = replace(base, intervals=replace(intervals, gpu_range=dict.fromkeys(NETWORKS, jnp.asarray(trained))))
            seconds = nj.predict_kernels(base, GPU, table) * noise
            done = calibration(start, GPU, table, seconds)
            after = done.predictor.intervals
            assert after is not None
            assert after.other_vendor == {}
            np.testing.assert_array_equal(after.kernels["linear"], pairs["linear"])
            np.testing.assert_array_equal(after.total, intervals.total)
            found[spread, name] = float(after.kernels["bmm"][1] * gpu_widening(gpu_ratios(GPU), after.gpu_range["bmm"]))
            assert done.summary["bmm"]["log_half_width"] == pytest.approx(found[spread, name], rel=1e-2)
    assert found[0.01, "inside"] < 0.06
    assert found[0.5, "inside"] > 0.4
    # A GPU outside those trained on starts from a wider interval, of the weight of three kernels among forty-three.
    for spread in (0.01, 0.5):
        wider = (1.0 + 0.5 * 2.0) ** (3 / 43)
        assert found[spread, "outside"] == pytest.approx(found[spread, "inside"] * wider, rel=1e-3)
    assert calibrate(base, GPU, table, nj.predict_kernels(base, GPU, table)).intervals is None


def test_a_calibrated_width_by_hand() -> None:
    sizes = np.array([0.1, -0.2, 0.3, -0.4, 0.5, 0.6])
    assert calibrated_width(sizes, 0.3) == pytest.approx(np.exp((6 * np.log(0.5) + 3 * np.log(0.3)) / 9))
    assert calibrated_width(np.zeros(9), 0.1) == pytest.approx(np.exp((9 * np.log(0.001) + 3 * np.log(0.1)) / 12))


def test_far_from_every_measured_shape_only_constants_are_left() -> None:
    points = jnp.array([[0.0, 0.0], [1.0, 0.0]])
    effect = ShapeEffect(jnp.full(len(EFFECTS), 0.3), points, jnp.ones((2, len(EFFECTS))))
    np.testing.assert_allclose(effect.at(jnp.array([[40.0, 40.0]])), 0.3, atol=1e-6)
    # Matérn 3/2 at distance 1, by hand: (1 + √3) exp(−√3) = 0.48335.
    np.testing.assert_allclose(shape_kernel(points, points), [[1.0, 0.48335], [0.48335, 1.0]], atol=1e-5)
    np.testing.assert_allclose(effect.at(points[:1]), 0.3 + 1.48335, atol=1e-5)


@pytest.mark.parametrize("name", ["bmm", "softmax"])
def test_slopes_and_speed_of_light_hold_for_any_calibration(name: str) -> None:
    gpus, table = random_gpus(11, 200), only(random_kernels(11, 200, dtypes=1), name)
    predictor = random_calibrated(11)
    family, batch = FAMILIES[name], jax.tree.map(jnp.asarray, table.families[name])
    terms = jax.jit(lambda gpu: predictor.forecast_kernels(family, gpu, batch, isolated=True))
    gpus = jax.tree.map(jnp.asarray, gpus)
    start = terms(gpus)
    assert np.all(start.seconds >= start.bounds.speed_of_light_s * (1 - 1e-5))
    for field in ("mem_bytes_per_s", "l2_bytes", "clock_hz", "fp32_flop_per_s", "fp32_matrix_flop_per_s"):
        assert np.all(terms(scaled(gpus, (field,), 1.7)).seconds <= start.seconds * (1 + 1e-4)), field
    # Inside a model twice every rate halves all but the floor, which is what is left at rates beyond measure.
    inside = jax.jit(lambda gpu: predictor.forecast_kernels(family, gpu, batch, isolated=False))
    floors = inside(scaled(gpus, RATES, 1e9)).seconds
    assert np.all(floors > 1e-8)
    fast = inside(scaled(gpus, RATES, 2.0))
    np.testing.assert_allclose(fast.seconds, 0.5 * (inside(gpus).seconds + floors), rtol=1e-3)


def test_shape_points_have_as_many_coordinates_as_a_checkpoint_is_read_with() -> None:
    every = all_points(random_kernels(0, 4))
    assert set(every) == {*ON_ONE_GPU}
    for name, points in every.items():
        assert points.shape == (4, shape_coordinates(FAMILIES[name])), name
        assert shape_coordinates(FAMILIES[name]) == shape_coordinates(FAMILIES[FAMILIES[name].network]), name
        assert np.all(np.isfinite(points)), name


def test_a_permuted_operand_is_calibrated_as_the_sum_it_is() -> None:
    """Families of one network share its measured kernels: `strided` lies where the plain sum of its size does."""
    sizes = {"rows": 512.0, "cols": 512.0, "reads": 2.0, "writes": 1.0}
    table = table_from_kernels(
        [Kernel("elementwise", "add", sizes), Kernel("strided", "add_permuted", {**sizes, "scattered": 1, "window": 9})]
    )
    plain, permuted = (
        shape_points(FAMILIES[name], jax.tree.map(jnp.asarray, table.families[name]))[0]
        for name in ("elementwise", "strided")
    )
    np.testing.assert_array_equal(plain, permuted)


@pytest.mark.parametrize(
    ("predictor", "seconds", "words"),
    [
        (lambda: random_predictor("neusight", 0), [1e-3] * 4, "only predictors of kind mixture"),
        (lambda: CalibratedPredictor(mixture()), [1e-3] * 4, "calibrated already"),
        (mixture, None, "holds no latencies"),
        (mixture, [1e-3] * 3, "expected one for each of the 4 kernels"),
        (mixture, [1e-3, -1.0, 1e-3, 1e-3], "row 1 is -1.0"),
        (mixture, [1e-3, 1e-3, 1e-3, float("nan")], "row 3 is nan"),
    ],
)
def test_what_cannot_be_calibrated_is_said(predictor, seconds, words: str) -> None:
    with pytest.raises(nj.InputError, match=words):
        calibrate(predictor(), GPU, kernels(9, 4, "linear"), seconds)


MEASURED = ("linear", "bmm", "conv", "elementwise", "softmax", "norm")
"""Networks of what `synthetic` measures."""


def test_measurements_of_one_gpu_are_taken_whole(tmp_path: Path) -> None:
    folder = write_synthetic_measurements(tmp_path, rows=6)
    with pytest.raises(nj.InputError, match="measured on 2"):
        nj.calibrate(mixture(), GPU, read_measurements(folder))
    assert set(nj.calibrate(mixture(), GPU, read_measurements(folder, devices=["T4"])).shapes) == set(MEASURED)


def test_a_calibrated_checkpoint_is_written_read_and_used(tmp_path: Path, checkpoint: Path, capsys) -> None:
    synthetic_rows("linear", "Tesla T4", rows=30).to_parquet(tmp_path / "linear.parquet", index=False)
    pd.concat([synthetic_rows("ln", "Tesla T4", 20), synthetic_rows("ln", "Tesla V100-PCIE-32GB", 20)]).to_parquet(
        tmp_path / "ln.parquet", index=False
    )
    out = tmp_path / "calibrated"
    arguments = ["calibrate", "--checkpoint", str(checkpoint), "--measurements", str(tmp_path)]
    assert run([*arguments, "--gpu", "T4", "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "linear: 30 kernels" in printed
    card = nj.load_card(out)
    assert card["calibrated"]["gpu"] == "Tesla T4"
    assert card["calibrated"]["rows"] == {"linear": 30, "norm": 20}
    assert card["calibrated"]["summary"]["linear"]["after"] < card["calibrated"]["summary"]["linear"]["before"]
    table = nj.read_kernels(tmp_path / "linear.parquet")
    data = read_measurements(tmp_path, devices=["T4"])
    again = nj.calibrate(nj.load_predictor(checkpoint, device="T4"), GPU, data)
    loaded = nj.load_predictor(out)
    np.testing.assert_allclose(nj.predict_kernels(loaded, GPU, table), nj.predict_kernels(again, GPU, table), rtol=1e-5)
    measured = pd.read_parquet(tmp_path / "linear.parquet")["latency_s"].to_numpy()
    assert error(loaded, table, measured) < 0.5 * error(nj.load_predictor(checkpoint), table, measured)
    predict = ["predict", "bert-large", "--sequence-length", "64", "--checkpoint", str(out), "--json"]
    for gpu, words in (("T4", "calibrated with 50 kernels measured on this GPU"), ("H100", "calibrated on Tesla T4")):
        assert run([*predict, "--gpu", gpu]) == 0
        assert words in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert run([*arguments, "--gpu", "T4", "--output", str(out)]) == 2
    assert "is not empty" in capsys.readouterr().err
    arguments[2] = str(out)
    assert run([*arguments, "--gpu", "T4", "--output", str(tmp_path / "twice")]) == 2
    assert "calibrated already" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()


def test_a_filled_plan_calibrates_a_gpu_of_ones_own(tmp_path: Path, checkpoint: Path, capsys) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"base": "A10", "name": "bench card", "num_sms": 64}))
    plan = tmp_path / "plan.csv"
    asked = ["profile", "--plan", "quick", "--gpu", str(own), "--checkpoint", str(checkpoint), "--output", str(plan)]
    assert run(asked) == 0
    assert "10 kernels" in capsys.readouterr().err
    frame = pd.read_csv(plan)
    assert set(frame["device"]) == {"bench card"}
    assert frame["latency_s"].isna().all()
    calibrated = ["calibrate", "--checkpoint", str(checkpoint), "--measurements", str(plan), "--gpu", str(own)]
    calibrated += ["--output", str(tmp_path / "out")]
    assert run(calibrated) == 2
    assert "10 bad latency" in capsys.readouterr().err
    frame.assign(latency_s=0.05).to_csv(plan, index=False)
    assert run(calibrated) == 0
    assert sum(nj.load_card(tmp_path / "out")["calibrated"]["rows"].values()) == 10
    frame.assign(latency_s=1e-12).to_csv(plan, index=False)
    assert run([*calibrated[:-1], str(tmp_path / "other")]) == 2
    assert "too fast" in capsys.readouterr().err


def test_saving_needs_no_mixture_only_card(tmp_path: Path) -> None:
    predictor = random_calibrated(3)
    sizes = dict.fromkeys(LOCAL, 6)
    card = {
        "kind": "calibrated",
        "architecture": {"families": list(NETWORKS), "hidden": [4], "members": 1, "points": sizes},
    }
    save_checkpoint(tmp_path / "saved", predictor, card)
    loaded = nj.load_predictor(tmp_path / "saved")
    for left, right in zip(jax.tree.leaves(predictor), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(left, right)
