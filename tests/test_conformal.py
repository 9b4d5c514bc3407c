"""Intervals: quantiles by hand, coverage on GPUs that had no part, widening outside what was trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import NETWORKS, random_predictor

import neusight_jax as nj
from neusight_jax.graph.memory import memory_bytes
from neusight_jax.hardware.gpu import VENDORS
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.intervals import (
    MODELS,
    Intervals,
    gpu_ratios,
    gpu_widening,
    interval_warnings,
    kernel_interval,
    range_of,
    total_interval,
)
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.intervals import (
    conformal_interval,
    coverage,
    interval_score,
    left_out_widening,
    narrowed,
    own_coverage,
    own_width,
    pooled_quantile,
)

WIDTH = np.array([-0.2, 0.3], np.float32)


def test_an_interval_score_by_hand() -> None:
    """-0.2 to 0.3 holds two of four, its ends; the others lie 0.1 and 0.3 outside: 0.5 and ten times 0.1."""
    covered, score = interval_score(np.array([-0.2, 0.3, -0.3, 0.6]), -0.2, 0.3)
    assert covered == 0.5
    assert score == pytest.approx(1.5)


def test_devices_weigh_the_same_however_many_rows_they_have() -> None:
    # A: -1 and +2 equally often; B: always 0, ten times the rows. Half of the weight at 0, a quarter each at 1 and 2.
    residuals = {"a": np.array([-1.0, 2.0]), "b": np.zeros(20)}
    assert [pooled_quantile(residuals, level) for level in (0.5, 0.6, 0.75, 0.8)] == [0.0, 1.0, 1.0, 2.0]


def test_an_odd_gpu_on_one_side_does_not_make_the_other_side_wide_alone() -> None:
    # Four GPUs within 10 %, one that is slower by 0.5 throughout: at 80 % it is the only one outside.
    near = np.linspace(-0.1, 0.1, 101)
    interval = conformal_interval({**{str(at): near for at in range(4)}, "odd": near + 0.5})
    assert 0.09 < interval.width <= 0.1
    assert interval.coverage["odd"] == 0.0
    assert interval.mean_coverage == pytest.approx(0.8, abs=0.05)


def test_coverage_of_a_gpu_comes_from_the_others() -> None:
    # a and b lie in ±0.1, c is off by 1: the interval of a and b holds none of c; those with c in them hold a and b.
    small = np.linspace(-0.1, 0.1, 101)
    held = coverage({"a": small, "b": small, "c": small + 1.0}, 0.9)
    assert held["c"] == 0.0
    assert held["a"] > 0.9
    assert held["b"] > 0.9


def test_the_held_out_coverage_is_what_was_asked_for() -> None:
    """GPUs that differ by a scalar of spread 0.2, rows by 0.1: with eight GPUs a further one is held to about 80 %."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(40):
        scalars = random.normal(0.0, 0.2, 9)
        residuals = {str(at): scalar + random.normal(0.0, 0.1, 200) for at, scalar in enumerate(scalars)}
        further = residuals.pop("8")
        interval = conformal_interval(residuals)
        assert interval.mean_coverage == pytest.approx(0.8, abs=0.06)
        found.append(np.mean(np.abs(further) <= interval.width))
    assert np.mean(found) == pytest.approx(0.8, abs=0.08)


def test_one_gpu_gives_no_coverage() -> None:
    interval = conformal_interval({"only": np.linspace(-1.0, 1.0, 101)})
    assert interval.coverage == {}
    assert interval.width == pytest.approx(0.8, abs=0.03)


def _with_intervals(gpus: tuple[str, ...] = ("V100-PCIE-32GB", "A100-PCIE-40GB")) -> MixturePredictor:
    """A predictor with intervals of −0.2 and +0.3 everywhere, trained on two GPUs and any shape."""
    predictor: Any = random_predictor("mixture", 0)
    ratios = np.stack([np.asarray(gpu_ratios(nj.load_gpu(name))) for name in gpus])
    counts = {name: parameters.network.center.shape[-1] for name, parameters in predictor.families.items()}
    pairs = {name: jnp.asarray(WIDTH) for name in NETWORKS}
    intervals = Intervals(
        kernels=pairs,
        total=jnp.asarray(WIDTH / 2),
        measured_kernels={name: jnp.asarray(WIDTH / 10) for name in NETWORKS},
        measured_total=jnp.asarray(WIDTH / 20),
        gpu_range={name: jnp.asarray(range_of(ratios), jnp.float32) for name in NETWORKS},
        shape_range={name: jnp.asarray([[-50.0] * count, [50.0] * count]) for name, count in counts.items()},
    )
    return replace(predictor, intervals=intervals)


@pytest.fixture(scope="module")
def graph() -> Any:
    return nj.graph_from_config("gpt2", batch_size=1, sequence_length=128, mode="inference")


def test_a_forecast_carries_its_interval(graph: Any) -> None:
    forecast = nj.predict(_with_intervals(), nj.load_gpu("V100-PCIE-32GB"), graph)
    low, high = forecast.interval_s or (0.0, 0.0)
    assert (low, high) == (
        pytest.approx(forecast.total_s * np.exp(-0.1), rel=1e-5),
        pytest.approx(forecast.total_s * np.exp(0.15), rel=1e-5),
    )
    frame = forecast.to_frame()
    np.testing.assert_allclose(frame["seconds_high"], frame["seconds"] * np.exp(0.3), rtol=1e-5)
    assert (frame["seconds_low"] <= frame["seconds"]).all()
    assert (frame["seconds_low"] >= frame["seconds"] * np.exp(-0.2) * (1 - 1e-5)).all()
    assert forecast.notes == ()
    assert "80% interval" in str(forecast)
    assert forecast.to_dict()["interval_s"] == [low, high] or forecast.to_dict()["interval_s"] == (low, high)


def test_a_predictor_without_evidence_gives_none(graph: Any) -> None:
    forecast = nj.predict(random_predictor("mixture", 0), nj.load_gpu("V100-PCIE-32GB"), graph)
    assert forecast.interval_s is None
    assert forecast.to_frame()["seconds_high"].isna().all()
    assert "interval" not in str(forecast)


def test_a_gpu_outside_the_trained_range_is_wider_and_said(graph: Any) -> None:
    inside = nj.load_gpu("V100-PCIE-32GB")
    outside = inside.replace(num_sms=80 * 8, l2_bytes=float(inside.l2_bytes) * 8)
    near, far = (nj.predict(_with_intervals(), gpu, graph) for gpu in (inside, outside))
    assert near.interval_s
    assert far.interval_s
    # A100 has 108 SMs: 640 of them lie log(640 / 108) outside; L2 per SM is unchanged.
    factor = 1.0 + np.log(640 / 108) / 2
    assert np.log(far.interval_s[1] / far.total_s) == pytest.approx(0.15 * factor, rel=1e-4)
    assert len(far.notes) == 1
    assert "SMs 640 against 80 to 108" in far.notes[0]


def test_a_gpu_is_as_far_as_it_is_from_those_that_measured_the_family() -> None:
    """Products measured on another GPU than the rest: theirs alone are wider, and the note says so."""
    v100, wide = nj.load_gpu("V100-PCIE-32GB"), _with_intervals()
    assert wide.intervals is not None
    elsewhere = jnp.asarray(range_of(np.asarray(gpu_ratios(v100.replace(num_sms=20)))[None]), jnp.float32)
    apart = replace(wide.intervals, gpu_range={**wide.intervals.gpu_range, "linear": elsewhere})
    with jax.default_matmul_precision("float32"):
        step = nj.graph_from_function(lambda x, w: (jnp.exp(x), w @ w), jnp.ones((8192, 8192)), jnp.ones((1024, 1024)))
    forecast = nj.predict(replace(wide, intervals=apart), v100, step)
    frame = forecast.to_frame()
    above = np.log(frame["seconds_high"] / frame["seconds"])
    products = frame["op"] == "linear"
    assert products.any()
    np.testing.assert_allclose(above[~products], 0.3, rtol=1e-4)
    assert above[products].min() > 0.3 * 1.5
    assert len(forecast.notes) == 1
    assert "outside those trained on for linear (SMs 80 against 20 to 20;" in forecast.notes[0]
    copies = nj.graph_from_function(jnp.exp, jnp.ones((1024, 1024)))
    assert nj.predict(replace(wide, intervals=apart), v100, copies).notes == ()


def test_the_distance_of_a_gpu_is_euclidean_and_has_a_slope_everywhere() -> None:
    trained = jnp.asarray([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    far = jnp.asarray([1.0 + 3.0, 0.5, 0.0 - 4.0, 1.0])
    assert float(gpu_widening(far, trained)) == pytest.approx(1.0 + 5.0 / 2)
    inside = jnp.full(4, 0.5)
    assert float(gpu_widening(inside, trained)) == 1.0
    assert np.asarray(jax.grad(gpu_widening)(inside, trained)).tolist() == [0.0] * 4
    np.testing.assert_allclose(jax.grad(gpu_widening)(far, trained), [0.3, 0.0, -0.4, 0.0], rtol=1e-6)


def test_errors_of_a_far_gpu_do_not_widen_the_interval_of_a_near_one() -> None:
    """Three GPUs alike but for their distance: errors grow with the widening, so what is said of a near GPU is what
    it has, and every GPU is covered by the interval that it is shown."""
    draws = np.random.default_rng(0).normal(0.0, 0.1, 20_000)
    widening = {"near": 1.0, "odd": 1.5, "far": 3.0}
    residuals = {name: factor * draws for name, factor in widening.items()}
    interval = conformal_interval(narrowed(residuals, widening))
    assert interval.width == pytest.approx(0.128, abs=0.005)
    for name, factor in widening.items():
        held = np.abs(residuals[name]) <= interval.width * factor
        assert np.mean(held) == pytest.approx(0.8, abs=0.02)
    assert conformal_interval(residuals).width > 1.5 * interval.width


def test_a_gpu_left_out_is_as_far_as_it_is_from_the_others_alone() -> None:
    ratios = np.array([[0.0] * 4, [1.0] * 4, [3.0, 1.0, 1.0, 1.0], [4.0, 1.0, 1.0, 1.0]])
    devices = ("a", "b", "c", "d")
    assert left_out_widening(devices, ratios, "d", ("d",)) == pytest.approx(1.5)  # 4 against 0 to 3
    assert left_out_widening(devices, ratios, "d", ("c", "d")) == pytest.approx(2.5)  # 4 against 0 to 1
    assert left_out_widening(devices, ratios, "c", ("c",)) == 1.0


def test_shapes_outside_the_trained_range_are_wider_and_said(graph: Any) -> None:
    predictor = _with_intervals()
    assert predictor.intervals is not None
    ranges = predictor.intervals.shape_range
    narrow = {name: jnp.asarray([[0.0], [0.01]]) * jnp.ones_like(low) for name, low in ranges.items()}
    strict = replace(predictor, intervals=replace(predictor.intervals, shape_range=narrow))
    forecast = nj.predict(strict, nj.load_gpu("V100-PCIE-32GB"), graph)
    wide = nj.predict(predictor, nj.load_gpu("V100-PCIE-32GB"), graph)
    assert forecast.total_s == wide.total_s
    assert forecast.interval_s
    assert wide.interval_s
    assert forecast.interval_s[1] > 2 * wide.interval_s[1]
    assert any("100% of the time is in kernels of shapes outside" in note for note in forecast.notes)


def test_a_kind_of_shape_never_seen_is_wide_and_finite() -> None:
    """A depthwise convolution of 64 groups, where training had one group only, by hand; and 2^40 of anything."""
    predictor = _with_intervals()
    assert predictor.intervals is not None
    features = predictor.intervals.shape_range["conv"].shape[-1]
    wide = jnp.stack([jnp.full(features, -100.0), jnp.full(features, 100.0)])
    one_group = wide.at[:, 3].set(0.0)  # log of the groups
    intervals = replace(predictor.intervals, shape_range={**predictor.intervals.shape_range, "conv": one_group})
    strict = replace(predictor, intervals=intervals)
    sizes = {"in_size": (32, 32), "out_size": (32, 32), "window": (3, 3), "stride": (1, 1)}
    dims = conv_dims("conv", batch=8, in_channels=64, out_channels=64, groups=64, **sizes)
    batch = table_from_kernels([Kernel("conv", "conv", dims)]).families["conv"]
    found = kernel_interval(strict, FAMILIES["conv"], nj.load_gpu("V100-PCIE-32GB"), jax.tree.map(jnp.asarray, batch))
    assert float(found.shape_widening[0]) == pytest.approx(1.0 + np.log(64) / 0.25 / 2.0, rel=1e-5)
    low, high = total_interval(intervals, nj.load_gpu("V100-PCIE-32GB"), 1.0, 2.0**40)
    assert (low, high) == (pytest.approx(1e-3), pytest.approx(1e3))


def test_a_step_that_nearly_fills_the_memory_is_said_and_bounds_nothing(graph: Any) -> None:
    step = nj.graph_from_config("gpt2", batch_size=1, sequence_length=128, mode="training")
    v100 = nj.load_gpu("V100-PCIE-32GB")
    needed = memory_bytes(step)
    roomy, full = (nj.predict(_with_intervals(), v100.replace(mem_bytes=needed * times), step) for times in (1.3, 1.1))
    assert roomy.interval_s
    assert full.interval_s
    assert roomy.notes == ()
    assert roomy.total_s == full.total_s
    assert full.interval_s == roomy.interval_s
    assert len(full.notes) == 1
    assert "needs about 91% of the memory: it may not fit" in full.notes[0]
    beyond = nj.predict(_with_intervals(), v100.replace(mem_bytes=needed / 1.25), step)
    assert beyond.interval_s == roomy.interval_s
    assert "needs about 125% of the memory" in beyond.notes[0]
    plain = nj.predict(replace(_with_intervals(), intervals=None), v100.replace(mem_bytes=needed * 1.1), step)
    assert plain.interval_s is None
    assert "needs about 91% of the memory" in plain.notes[0]
    assert (
        nj.predict(_with_intervals(), v100.replace(mem_bytes=1e6), graph).notes == ()
    )  # nothing is kept for a gradient


def test_measured_intervals_take_over() -> None:
    """Those of the GPU itself where it has some, in the families that were measured on it."""
    intervals, v100 = _with_intervals().intervals, nj.load_gpu("V100-PCIE-32GB")
    assert intervals is not None
    pooled = intervals.measured(["linear", "norm"], {})
    assert total_interval(pooled, v100, 1.0, 1.0)[1] == pytest.approx(np.exp(0.015), rel=1e-6)
    own = intervals.measured(["linear", "norm"], {"linear": 0.07, MODELS: 0.04})
    assert total_interval(own, v100, 1.0, 1.0) == pytest.approx((np.exp(-0.04), np.exp(0.04)), rel=1e-6)
    bounds = {name: np.asarray(own.kernels[name]).tolist() for name in ("linear", "norm", "bmm")}
    assert bounds == {
        "linear": pytest.approx([-0.07, 0.07]),
        "norm": pytest.approx([-0.02, 0.03]),
        "bmm": pytest.approx([-0.2, 0.3]),
    }
    assert interval_warnings(intervals, v100, np.array(["linear"] * 3), np.ones(3), np.ones(3)) == []


def test_another_vendor_has_intervals_of_its_own(graph: Any) -> None:
    """For its GPUs, until one of them has been measured; nobody else's change."""
    wide = _with_intervals()
    assert wide.intervals is not None
    apart = replace(wide.intervals, other_vendor={"linear": jnp.array([-0.5, 0.5]), MODELS: jnp.array([-0.6, 0.6])})
    v100 = nj.load_gpu("V100-PCIE-32GB")
    amd = v100.replace(vendor=VENDORS.index("AMD"))

    def spread(intervals: Intervals, gpu: nj.GPU) -> dict[str, float]:
        forecast = nj.predict(replace(wide, intervals=intervals), gpu, graph)
        assert forecast.interval_s
        columns = forecast.columns
        over = np.log(columns["seconds_high"] / columns["seconds"])
        by_family = {name: float(over[columns["family"] == name].mean()) for name in ("linear", "softmax")}
        return {MODELS: float(np.log(forecast.interval_s[1] / forecast.total_s)), **by_family}

    assert spread(apart, amd) == pytest.approx({MODELS: 0.6, "linear": 0.5, "softmax": 0.3}, rel=1e-4)
    assert spread(apart, v100) == spread(wide.intervals, v100)
    assert spread(apart.measured(NETWORKS, {"linear": 0.1}), amd)["linear"] == pytest.approx(0.1, rel=1e-4)


def test_kernels_that_no_measured_model_had_add_their_own_bounds() -> None:
    """Labels of transformers do not say how far a convolution may be off."""
    wide, v100 = _with_intervals(), nj.load_gpu("V100-PCIE-32GB").replace(fp32_joule_per_flop=0.0)
    assert wide.intervals is not None

    def two(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv(x, w, (1, 1), "SAME") @ jnp.ones((64, 64))

    with jax.default_matmul_precision("float32"):
        graph = nj.graph_from_function(two, jnp.ones((32, 64, 64, 64)), jnp.ones((64, 64, 3, 3)))
    for labelled, notes in ((("linear", "bmm", "elementwise"), 1), (None, 0), ((*NETWORKS,), 0)):
        intervals = replace(wide.intervals, labelled=labelled)
        forecast = nj.predict(replace(wide, intervals=intervals), v100, graph)
        assert forecast.interval_s
        columns = forecast.columns
        cost = columns["seconds"] * columns["count"]
        apart = (columns["network"] == "conv") & (notes == 1)
        assert (columns["network"] == "conv").any()
        expected = cost[~apart].sum() * np.exp(0.15) + (columns["seconds_high"] * columns["count"])[apart].sum()
        assert forecast.interval_s[1] == pytest.approx(expected, rel=1e-5)
        assert forecast.interval_s[0] < forecast.total_s
        assert len(forecast.notes) == notes
        assert all("no whole model with conv was measured" in note for note in forecast.notes)


def test_a_measured_gpu_answers_for_itself() -> None:
    """Thousands of rows stand for themselves, three lean on what the others are off by, all counting as three more."""
    random = np.random.default_rng(1)
    quiet, loud = random.normal(0.0, 0.01, 5000), random.normal(0.0, 0.5, 5000)
    by_device = {"quiet": quiet, "loud": loud}
    for name, own in by_device.items():
        assert own_width(by_device, name) == pytest.approx(np.quantile(np.abs(own), 0.8), rel=0.02)
    three = {"few": np.array([0.1, -0.2, 0.3]), "b": np.full(50, 0.05), "c": np.full(2, 0.25)}
    assert own_width(three, "few") == 0.25  # of weight 6: 1.5 at 0.05, 1 at 0.1, 1 at 0.2 and 1.5 at 0.25 reach 0.8
    assert own_width({"only": np.arange(1.0, 11.0)}, "only") == 8.0


def test_coverage_of_measured_gpus_leaves_each_row_out() -> None:
    random = np.random.default_rng(2)
    by_device = {str(at): random.normal(0.0, 0.02 * 3.0**at, 12) for at in range(6)}
    held = [own_coverage(by_device, name) for name in by_device]
    assert np.mean(held) == pytest.approx(0.8, abs=0.08)
    pooled = conformal_interval(by_device).width
    assert np.std(held) < np.std([np.mean(np.abs(own) <= pooled) for own in by_device.values()])


def test_the_template_of_a_checkpoint_has_room_for_trust() -> None:
    sizes = {"families": NETWORKS, "hidden": (8,), "members": 1}
    assert untrained("mixture", sizes).intervals is None  # type: ignore[attr-defined]
    intervals = untrained("mixture", {**sizes, "intervals": True}).intervals  # type: ignore[attr-defined]
    assert set(intervals.kernels) == set(intervals.shape_range) == set(NETWORKS)
    assert intervals.other_vendor == {}
    assert intervals.labelled is None
    vendors = untrained("mixture", {**sizes, "intervals": True, "vendor_intervals": ["bmm", MODELS]}).intervals  # type: ignore[attr-defined]
    assert set(vendors.other_vendor) == {"bmm", MODELS}
