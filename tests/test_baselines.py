"""Rivals: their equations by hand, their fits on data whose answer is known, and one door for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import random_gpus, random_kernels

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelBatch, table_from_kernels
from neusight_jax.model.checkpoint import save_checkpoint, untrained
from neusight_jax.model.predictor import bounded
from neusight_jax.model.rivals import (
    RIVALS,
    FittedBaseline,
    LiLine,
    gbt_inputs,
    memory_boundedness,
    walk,
    wave_ratio,
)
from neusight_jax.training.data import Rows
from neusight_jax.training.evaluation.systems import fit_li, fit_published_li, wave_predictors
from synthetic import write_synthetic_measurements

V100 = "Tesla V100-PCIE-32GB"


def _leaf(value: float) -> dict[str, Any]:
    return {"leaf_value": value}


def _split(feature: int, threshold: float, left: Any, right: Any) -> dict[str, Any]:
    return {"split_feature": feature, "threshold": threshold, "left_child": left, "right_child": right}


def test_a_forest_walks_as_drawn() -> None:
    from neusight_jax.training.evaluation.systems import forest_arrays

    trees = [
        _split(1, 0.5, _leaf(1.0), _split(0, -2.0, _leaf(10.0), _leaf(100.0))),
        _split(0, 3.0, _leaf(0.25), _leaf(0.5)),
    ]
    forest = forest_arrays([{"tree_structure": tree} for tree in trees])
    rows = jnp.array([[0.0, 0.5], [0.0, 0.6], [-2.0, 9.0], [4.0, 0.0]], jnp.float32)
    # At or below the threshold goes left.
    np.testing.assert_allclose(walk(forest, rows), [1.25, 100.25, 10.25, 1.5])


def test_trees_as_arrays_say_what_lightgbm_says() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    from neusight_jax.model.rivals import MAX_DEPTH
    from neusight_jax.training.evaluation.systems import GBT_SETTINGS, forest_arrays

    random = np.random.default_rng(0)
    inputs = random.normal(size=(2000, 5)).astype(np.float32).round(2)  # ties, so that thresholds are met exactly
    target = np.sin(3 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]
    data = lightgbm.Dataset(inputs, target)
    booster = lightgbm.train({**GBT_SETTINGS, "num_threads": 1}, data, num_boost_round=40)
    trees = booster.dump_model()["tree_info"]
    found = walk(forest_arrays(trees), jnp.asarray(inputs))
    np.testing.assert_allclose(found, booster.predict(inputs), atol=1e-5)
    assert booster.trees_to_dataframe()["node_depth"].max() <= MAX_DEPTH + 1


def test_gbt_forecasts_through_the_one_function() -> None:
    from neusight_jax.training.evaluation.systems import forest_arrays

    forest = forest_arrays([{"tree_structure": _leaf(float(np.log(0.25)))}])
    kernels = table_from_kernels([Kernel("linear", "linear", {"batch": 1, "m": 64, "n": 64, "k": 64}, count=2)])
    predictor = FittedBaseline("gbt", {"linear": forest})
    gpu = nj.load_gpu(V100)
    assert float(nj.latency(predictor, gpu, kernels)) == pytest.approx(0.5, rel=1e-6)
    assert nj.predict_kernels(predictor, gpu, kernels) == pytest.approx([0.25], rel=1e-6)
    batch = kernels.families["linear"]
    linear = FAMILIES["linear"]
    inputs = jax.jit(lambda gpu, batch: gbt_inputs(linear, bounded(linear, gpu, batch), batch, True))(gpu, batch)
    assert inputs.shape[0] == len(batch.row)
    assert np.all(np.isfinite(inputs))


@pytest.mark.parametrize("kind", ["mixture", "neusight", *RIVALS])
def test_a_family_that_borrows_a_network_is_forecast_by_every_kind(kind: str) -> None:
    """Families of other dims among them: `strided` has two more than elementwise, whose network it uses."""
    networks = [name for name, family in FAMILIES.items() if family.network == name]
    predictor = jax.jit(lambda: untrained(kind, {"families": networks, "hidden": [8], "members": 1}))()
    borrowing = [family for family in FAMILIES.values() if family.network != family.name]
    assert any(set(family.dims) != set(FAMILIES[family.network].dims) for family in borrowing)
    kernels = random_kernels(0, 5, dtypes=1)
    batches = {family.name: kernels.families[family.name] for family in borrowing}

    @jax.jit
    def forecasts(gpus: nj.GPU, batches: Any) -> Any:
        return {
            name: predictor.forecast_kernels(FAMILIES[name], gpus, batch, isolated=False).seconds
            for name, batch in batches.items()
        }

    for name, seconds in forecasts(random_gpus(0, 5), batches).items():
        assert seconds.shape == (5,), name
        assert np.all(np.asarray(seconds) > 0), name


def _machine(**figures: float) -> nj.GPU:
    return nj.load_gpu(V100).replace(**figures)


def test_gamma_by_hand() -> None:
    # Intensity 10 FLOP/B: half of γ is lost at the ridge point, and it falls on beyond.
    assert float(memory_boundedness(jnp.array(10.0), jnp.array(40.0))) == pytest.approx(1 - 0.5 * 0.25)
    assert float(memory_boundedness(jnp.array(40.0), jnp.array(40.0))) == pytest.approx(0.5)
    assert float(memory_boundedness(jnp.array(160.0), jnp.array(40.0))) == pytest.approx(0.125)
    assert float(memory_boundedness(jnp.array(0.0), jnp.array(40.0))) == 1.0


ORIGIN = {"num_sms": 56.0, "clock_hz": 1.2e9, "mem_bytes_per_s": 720e9}
TARGET = {"num_sms": 80.0, "clock_hz": 1.5e9, "mem_bytes_per_s": 900e9}


@pytest.mark.parametrize(
    ("gamma", "blocks", "resident", "expected"),
    [
        # General: ⌈1000 / 160⌉ = 7 and ⌈1000 / 112⌉ = 9 waves; D ratio 0.8, W ratio 160 / 112 = 10 / 7, C ratio 0.8.
        (1.0, 1000.0, (2.0, 2.0), 7 / 9 * 0.8 * 10 / 7),
        (0.0, 1000.0, (2.0, 2.0), 7 / 9 * 0.8),
        (0.5, 1000.0, (2.0, 2.0), 7 / 9 * (0.8 * 10 / 7 * 0.8) ** 0.5),
        # Half the occupancy on the target: W = 80, 13 waves, W ratio 5 / 7.
        (1.0, 1000.0, (2.0, 1.0), 13 / 9 * 0.8 * 5 / 7),
        # One wave on either: a kernel bound by compute goes with the clock alone.
        (0.0, 20.0, (2.0, 2.0), 0.8),
        # Simplified: (D ratio)^γ · (W_o / W_d · C ratio)^(1 − γ) = 0.8^γ · (0.7 · 0.8)^(1 − γ).
        (1.0, None, (2.0, 2.0), 0.8),
        (0.0, None, (2.0, 2.0), 0.56),
        (0.5, None, (2.0, 2.0), (0.8 * 0.56) ** 0.5),
    ],
)
def test_wave_scaling_by_hand(
    gamma: float, blocks: float | None, resident: tuple[float, float], expected: float
) -> None:
    ratio = wave_ratio(_machine(**ORIGIN), _machine(**TARGET), jnp.array(gamma), blocks, *resident)
    assert float(ratio) == pytest.approx(expected, rel=1e-5)


def test_both_equations_agree_on_many_whole_waves() -> None:
    origin, target = _machine(**ORIGIN), _machine(**TARGET)
    for gamma in (0.0, 0.3, 1.0):
        general = wave_ratio(origin, target, jnp.array(gamma), 56.0 * 80.0 * 8.0 * 100)
        assert float(general) == pytest.approx(float(wave_ratio(origin, target, jnp.array(gamma))), rel=1e-5)


def _rows(work_s: Any, devices: tuple[str, ...], family: str = "linear", count: int = 12) -> Rows:
    """Rows of one family; `work_s(gpu, work)` gives the seconds of an amount of work."""
    random = np.random.default_rng(5)
    parts = []
    for position, device in enumerate(devices):
        if family == "linear":
            dims = {name: random.integers(64, 4096, count).astype(np.float32) for name in ("m", "n", "k")}
            dims["batch"] = np.ones(count, np.float32)
            work = 2 * dims["m"].astype(float) * dims["n"] * dims["k"]
        else:
            dims = {name: random.integers(512, 4096, count).astype(np.float32) for name in ("rows", "cols")}
            dims |= {"reads": np.ones(count, np.float32), "writes": np.ones(count, np.float32)}
            work = 8 * dims["rows"].astype(float) * dims["cols"]
        gpu = nj.load_gpu(device)
        parts.append((dims, work_s(gpu, work), np.full(count, position)))
    total = count * len(devices)
    columns = {name: np.concatenate([part[0][name] for part in parts]) for name in parts[0][0]}
    whole = np.zeros(total, np.int32)
    batch = KernelBatch(columns, whole, whole, np.ones(total, np.float32), whole, whole, np.arange(total))
    return Rows(
        family=FAMILIES[family],
        batch=batch,
        seconds=np.concatenate([part[1] for part in parts]).astype(np.float32),
        tile=np.full(total, -1),
        device=np.concatenate([part[2] for part in parts]),
        isolated=np.ones(total, np.float32),
        devices=devices,
        gpus=nj.stack_gpus([nj.load_gpu(device) for device in devices]),
    )


KNOWN = ("Tesla P4", "Tesla T4", "Tesla P100-PCIE-16GB", V100)


def test_li_recovers_its_slopes() -> None:
    """1 / a = 0.6 · peak + 2e11 on the known GPUs, floors of 10, 20, 30 and 40 us: the median is 25 us."""
    floors = {float(nj.load_gpu(name).fp32_flop_per_s): 1e-5 * (i + 1) for i, name in enumerate(KNOWN)}
    rows = _rows(lambda gpu, work: work / (0.6 * gpu.fp32_flop_per_s + 2e11) + floors[gpu.fp32_flop_per_s], KNOWN)
    line = fit_li(rows, 0).families["linear"]  # type: ignore[attr-defined]
    assert float(line.per_peak) == pytest.approx(0.6, rel=1e-4)
    assert float(line.offset) == pytest.approx(2e11, rel=1e-3)
    assert float(line.floor_s) == pytest.approx(25e-6, rel=1e-4)
    assert float(line.per_bandwidth) == 0.0


def test_li_of_streaming_kernels_is_on_bandwidth() -> None:
    rows = _rows(lambda gpu, work: work / (0.5 * gpu.mem_bytes_per_s) + 1e-5, KNOWN, "softmax")
    predictor = fit_li(rows, 0)
    line = predictor.families["softmax"]  # type: ignore[attr-defined]
    assert float(line.per_bandwidth) == pytest.approx(0.5, rel=1e-4)
    assert float(line.per_peak) == 0.0
    gpu = nj.load_gpu("H100")
    table = table_from_kernels([Kernel("softmax", "softmax", {"rows": 8192, "cols": 8192, "reads": 1, "writes": 1})])
    body_s = 8 * 8192**2 / (0.5 * float(gpu.mem_bytes_per_s))
    assert nj.predict_kernels(predictor, gpu, table) == pytest.approx([body_s + 1e-5], rel=1e-4)
    assert nj.predict_kernels(predictor, gpu, table, isolated=False) == pytest.approx([body_s], rel=1e-4)


def test_published_li_sees_bandwidth_alone_and_drops_the_intercept() -> None:
    """1 / a = 9 · bandwidth + 3e11, with an intercept that a new GPU does not get."""
    rows = _rows(lambda gpu, work: work / (9.0 * gpu.mem_bytes_per_s + 3e11) + 5e-5, KNOWN)
    line = fit_published_li(rows, 0).families["linear"]  # type: ignore[attr-defined]
    assert float(line.per_bandwidth) == pytest.approx(9.0, rel=1e-3)
    assert float(line.offset) == pytest.approx(3e11, rel=1e-2)
    assert (float(line.per_peak), float(line.floor_s)) == (0.0, 0.0)


def test_a_line_that_goes_negative_forecasts_the_speed_of_light() -> None:
    line = LiLine(*(jnp.asarray(value) for value in (0.0, 0.0, -1e9, 0.0)))
    gpu = nj.load_gpu(V100)
    table = table_from_kernels([Kernel("linear", "linear", {"batch": 1, "m": 4096, "n": 4096, "k": 4096})])
    found = nj.predict_kernels(FittedBaseline("li", {"linear": line}), gpu, table)
    assert found == pytest.approx([2 * 4096**3 / float(gpu.fp32_flop_per_s)], rel=1e-5)


def test_wave_predictor_scales_what_was_measured_and_roofs_the_rest() -> None:
    rows = _rows(lambda gpu, work: work / (0.5 * gpu.mem_bytes_per_s), (V100,), "softmax")
    (predictor,) = wave_predictors(rows, general=False)
    dims = {name: float(column[3]) for name, column in rows.batch.dims.items()}
    unmeasured = {**dims, "rows": dims["rows"] + 1}
    table = table_from_kernels([Kernel("softmax", "softmax", each) for each in (dims, unmeasured)])
    gpu = nj.load_gpu("T4")
    found = nj.predict_kernels(predictor, gpu, table)
    origin = nj.load_gpu(V100)
    gamma = 1 - 0.5 * (5 / 8) / float(gpu.fp32_flop_per_s / gpu.mem_bytes_per_s)  # 5 FLOP and 8 bytes an element
    bandwidth = float(origin.mem_bytes_per_s / gpu.mem_bytes_per_s)
    per_sm = float(origin.num_sms * origin.clock_hz / (gpu.num_sms * gpu.clock_hz))
    expected = float(rows.seconds[3]) * bandwidth**gamma * per_sm ** (1 - gamma)
    roof_s = 8 * unmeasured["rows"] * unmeasured["cols"] / float(gpu.mem_bytes_per_s)
    assert found == pytest.approx([expected, roof_s], rel=1e-4)


@pytest.mark.parametrize("kind", sorted(RIVALS))
def test_baselines_are_checkpoints(kind: str, tmp_path: Path) -> None:
    architecture = {"families": ["linear", "softmax"], "hidden": [8] if kind == "habitat-mlp" else [], "members": 1}
    random = np.random.default_rng(1)
    shapes = untrained(kind, architecture)
    predictor = jax.tree.map(lambda leaf: jnp.asarray(random.uniform(0.01, 0.02, leaf.shape), jnp.float32), shapes)
    save_checkpoint(tmp_path / kind, predictor, {"kind": kind, "architecture": architecture})
    table = table_from_kernels([Kernel("linear", "linear", {"batch": 1, "m": 512, "n": 512, "k": 512})])
    gpu = nj.load_gpu(V100)
    read = nj.predict_kernels(nj.load_predictor(tmp_path / kind), gpu, table)
    np.testing.assert_array_equal(read, nj.predict_kernels(predictor, gpu, table))
    assert np.isfinite(read).all()


def test_a_baseline_is_trained_and_used_like_any_checkpoint(tmp_path: Path) -> None:
    """The synthetic law: 20 us + max(FLOP / 0.7 peak, bytes / 0.75 bandwidth), with 3 % of noise."""
    folder = write_synthetic_measurements(tmp_path / "measured", rows=64)
    home = tmp_path / "li"
    assert run(["train", "--measurements", str(folder), "--recipe", "li", "--output", str(home)]) == 0
    predictor = nj.load_predictor(home)
    gpu = nj.load_gpu("H100")
    dims = {"rows": 65536, "cols": 4096, "reads": 1, "writes": 1}
    found = nj.predict_kernels(predictor, gpu, table_from_kernels([Kernel("softmax", "softmax", dims)]))
    assert found == pytest.approx([20e-6 + 8 * 65536 * 4096 / (0.75 * float(gpu.mem_bytes_per_s))], rel=0.1)
    graph = nj.graph_from_config("bert-large", batch_size=2, sequence_length=128, mode="training")
    assert nj.predict(predictor, gpu, graph).total_s > 0
    assert run(["train", "--measurements", str(folder), "--recipe", "roofline", "--output", str(tmp_path / "r")]) == 2
    assert run(["train", "--measurements", str(folder), "--recipe", "li", "--resume", "--output", str(home)]) == 2
