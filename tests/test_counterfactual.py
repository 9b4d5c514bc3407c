"""Natural experiments: the ratio between two GPUs, on data made by hand and on real ones."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from benchmarks.counterfactual import natural_experiment, shared_shapes
from neusight_jax.datasets import aiconfigurator
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.model.predictor import RooflinePredictor
from synthetic import synthetic_rows

V100, T4 = "Tesla V100-PCIE-32GB", "Tesla T4"


def write(folder: Path, op: str, seconds: dict[str, float]) -> None:
    """The same 32 large shapes on every device, each as long as a roofline says times a factor."""
    rows = synthetic_rows(op, T4, 32)
    size = ("m", "n", "k") if op == "linear" else ("b", "h")
    for name in size:
        rows[name] = rows[name] % 512 + 4096
    parts = []
    for device, factor in seconds.items():
        gpu = nj.load_gpu(device)
        if op == "linear":
            seconds_of = 2.0 * rows["m"] * rows["n"] * rows["k"] / float(gpu.fp32_flop_per_s)
        else:
            seconds_of = 12.0 * rows["b"] * rows["h"] / float(gpu.mem_bytes_per_s)
        parts.append(rows.assign(device=device, latency_s=factor * seconds_of))
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    pd.concat(parts, ignore_index=True).to_parquet(folder / "kernels" / f"{op}.parquet", index=False)


def test_a_world_of_rooflines(tmp_path: Path) -> None:
    """Measured ratio 1.2 · roofline ratio for products, exactly the roofline's for sums."""
    write(tmp_path, "linear", {V100: 1.2, T4: 1.0})
    write(tmp_path, "add", {V100: 1.5, T4: 1.5})
    found = natural_experiment(RooflinePredictor(), read_measurements(tmp_path).frame, T4, V100).set_index("family")
    t4, v100 = nj.load_gpu(T4), nj.load_gpu(V100)
    compute = float(t4.fp32_flop_per_s) / float(v100.fp32_flop_per_s)
    memory = float(t4.mem_bytes_per_s) / float(v100.mem_bytes_per_s)
    assert list(found["kernels"]) == [32, 32, 64]
    assert found.loc["linear", "measured"] == pytest.approx(1.2 * compute, rel=1e-5)
    assert found.loc["linear", "forecast"] == pytest.approx(compute, rel=1e-5)
    assert found.loc["linear", "error"] == pytest.approx(1 - 1 / 1.2, rel=1e-4)
    assert found.loc["elementwise", "forecast"] == pytest.approx(memory, rel=1e-5)
    assert found.loc["elementwise", "error"] == pytest.approx(0.0, abs=1e-5)
    assert found.loc["elementwise", "no_change"] == pytest.approx(1 / memory - 1, rel=1e-4)
    assert (found["direction"] == 1.0).all()


def test_a_wrong_direction_is_seen(tmp_path: Path) -> None:
    """Measurements in which the faster card is slower: every direction is wrong, and noise has none."""
    write(tmp_path, "linear", {V100: 4.0, T4: 1.0})
    frame = read_measurements(tmp_path).frame
    assert natural_experiment(RooflinePredictor(), frame, T4, V100)["direction"].tolist() == [0.0, 0.0]
    level = frame.assign(latency_s=np.where(frame["device"] == T4, 1.0, 1.01))
    found = natural_experiment(RooflinePredictor(), level, T4, V100)
    assert found["clear"].tolist() == [0, 0]
    with pytest.raises(InputError, match="give a smaller least_s"):
        natural_experiment(RooflinePredictor(), level, T4, V100, least_s=10.0)
    with pytest.raises(InputError, match="no kernel was measured on both"):
        shared_shapes(frame[frame["device"] == T4], T4, V100)


def test_mi100_to_mi210(measurements: Path) -> None:
    """CDNA 1 to 2: bandwidth +33 %, clock +13 %, SMs −13 %; neither card was in training."""
    frame = read_measurements(measurements / "fp32", devices=["MI100", "MI210"], on_invalid="drop").frame
    predictor = nj.load_predictor("fp32-heldout")
    found = natural_experiment(predictor, frame, "MI100", "MI210", least_s=100e-6).set_index("family")
    print(found.round(3).to_string())  # noqa: T201 - shown with -s
    assert found.loc["all", "kernels"] > 5_000
    assert found.loc["all", "error"] < found.loc["all", "no_change"]
    for family in ("elementwise", "softmax", "norm"):
        assert found.loc[family, "faster_right"] == 1.0
    assert found.loc["elementwise", "error"] < 0.07 < 0.3 < found.loc["elementwise", "no_change"]
    assert found.loc["all", "error"] < 0.12
    # Wide rows wait for the compute units, which the model does not know: it gives them the bandwidth.
    assert found.loc["softmax", "error"] < 0.25
    # So do long products: measured +1 %, and the node's name (7 and 6 nm) must not say otherwise.
    assert abs(found.loc["linear", "forecast"] / found.loc["linear", "measured"] - 1.0) < 0.05
    assert found.loc["linear", "error"] < 0.08


def test_h100_to_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same chip with 43 % more bandwidth; neither card was in training."""
    source = os.environ.get("NEUSIGHT_AICONFIGURATOR")
    if source is None and importlib.util.find_spec("aiconfigurator_core") is None:
        pytest.skip("needs the extra `aiconfigurator`, or its wheel in NEUSIGHT_AICONFIGURATOR")
    errors = {"gemm_bf16": 0.075, "experts_bfloat16": 0.13, "prefill": 0.04, "decode": 0.06}
    folders = {"h100_sxm": "NVIDIA H100 80GB HBM3", "h200_sxm": "NVIDIA H200"}
    monkeypatch.setattr(aiconfigurator, "DEVICES", folders)
    monkeypatch.setattr(aiconfigurator, "RULES", tuple(rule for rule in aiconfigurator.RULES if rule.name in errors))
    aiconfigurator.import_aiconfigurator(source, tmp_path / "measured")
    predictor = nj.load_predictor("tensorcore-heldout-hopper")
    for name, error in errors.items():
        frame = read_measurements(tmp_path / "measured" / "kernels" / f"{name}.parquet", devices=["H100", "H200"]).frame
        found = natural_experiment(predictor, frame, "H100", "H200").set_index("family").loc["all"]
        print(name, found.round(3).to_dict())  # noqa: T201 - shown with -s
        assert found["kernels"] > 4_000
        assert found["mean_error"] < error
        assert found["faster_right"] > (0.94 if name == "decode" else 0.95)
