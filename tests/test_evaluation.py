"""Evaluation: percentiles by hand, baselines on the same rows, whole models, effects only where measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from predictors import NETWORKS, level_effect, random_predictor
from refusals import Fails

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.datasets.measurements import read_measurements, table_from_frame
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.intervals import empty_intervals
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import load_baseline
from neusight_jax.records import as_text
from neusight_jax.training.evaluation.scores import Evaluation, evaluate, percentiles, score
from neusight_jax.training.evaluation.systems import fit_baseline
from neusight_jax.training.whole_models import model_scores

T4, V100 = "Tesla T4", "Tesla V100-PCIE-32GB"
ROWS = ((8192, 1024), (16384, 2048), (32768, 512), (65536, 1024))
"""Rows × columns of the measured softmax kernels."""
OFF = (1.10, 0.80, 1.50, 2.00)
"""What was measured over what the roofline says."""


def _roof_s(device: str, rows: int, cols: int) -> float:
    return 2 * 4 * rows * cols / float(nj.load_gpu(device).mem_bytes_per_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four softmax kernels on two devices whose roofline errors are known, and four whole-model labels."""
    home = tmp_path_factory.mktemp("measured")
    (home / "kernels").mkdir(parents=True)
    (home / "models").mkdir()
    kernels = [
        {"device": device, "op": "softmax", "b": rows, "h": cols, "latency_s": _roof_s(device, rows, cols) * off}
        for device in (T4, V100)
        for (rows, cols), off in zip(ROWS, OFF, strict=True)
    ]
    # A measurement faster than light would be refused: the second kernel's 0.8 is raised for a cache it fits into.
    frame = pd.DataFrame(kernels)
    frame["latency_s"] = np.maximum(frame["latency_s"], [_roof_s(k["device"], k["b"], k["h"]) for k in kernels])
    frame.to_parquet(home / "kernels" / "softmax.parquet", index=False)
    label = {"model": "bert_large", "sequence_length": 128, "batch_size": 2, "num_layers": 24}
    labels = [
        {**label, "device": T4, "mode": "inf", "option": "", "e2e_s": 0.02},
        {**label, "device": T4, "mode": "train", "option": "", "e2e_s": 0.06},
        {**label, "device": V100, "mode": "inf", "option": "fusion", "e2e_s": 0.01},
        {**label, "device": V100, "mode": "train", "option": "dp4", "e2e_s": 0.01},
    ]
    blank = {"forward_s": None, "backward_s": None}
    pd.DataFrame([{**row, **blank} for row in labels]).to_csv(home / "models" / "end_to_end.csv", index=False)
    return home


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arbitrary weights; the T4 was measured."""
    home = tmp_path_factory.mktemp("checkpoints") / "weights"
    predictor = random_predictor("mixture", 0)
    card = {
        "kind": "mixture",
        "architecture": {"families": list(NETWORKS), "hidden": [8], "members": 1},
        "trained_on": {"devices": [T4]},
        "trained_dtypes": ["fp32"],
        "held_out": [V100],
        "device_effects": {T4: {name: level_effect(name, 0.4) for name in NETWORKS}},
    }
    save_checkpoint(home, predictor, card)
    return home


@pytest.fixture(scope="module")
def evaluated(folder: Path, checkpoint: Path) -> Evaluation:
    """All that was measured, by the checkpoint and by the roofline."""
    return evaluate([folder], str(checkpoint), baselines=["roofline"])


def test_percentiles_by_hand() -> None:
    found = percentiles(np.array([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 200.0]))
    assert found == {"mean": pytest.approx(650 / 11), "median": 50.0, "p90": 90.0}


def test_roofline_errors_by_hand(folder: Path) -> None:
    data = read_measurements(folder)
    roofline = load_baseline("roofline")
    frame = score(data, {"roofline": lambda device: roofline}).frames["kernels"]
    assert len(frame) == 2
    # |1 / 1.1 − 1|, 0, |1 / 1.5 − 1| and |1 / 2 − 1|, in percent.
    errors = np.array([100 / 11, 0.0, 100 / 3, 50.0])
    for row in frame.to_dict("records"):
        assert (row["system"], row["family"], row["rows"]) == ("roofline", "softmax", 4)
        assert row["mean"] == pytest.approx(errors.mean(), abs=1e-2)
        assert row["median"] == pytest.approx((100 / 11 + 100 / 3) / 2, abs=1e-2)
        assert row["p90"] == pytest.approx(np.percentile(errors, 90), abs=1e-2)


def _softmax_error(predictor: object, device: str) -> float:
    kernels = table_from_kernels(
        [Kernel("softmax", "softmax", {"rows": r, "cols": c, "reads": 1, "writes": 1}) for r, c in ROWS]
    )
    measured = np.array([_roof_s(device, *size) * max(off, 1.0) for size, off in zip(ROWS, OFF, strict=True)])
    forecast = nj.predict_kernels(predictor, nj.load_gpu(device), kernels)  # type: ignore[arg-type]
    return float(100 * np.abs(forecast / measured - 1).mean())


def test_only_a_measured_gpu_uses_its_effect(evaluated: Evaluation, checkpoint: Path) -> None:
    frame = evaluated.frames["kernels"].set_index(["system", "device"])["mean"]
    plain, tuned = nj.load_predictor(checkpoint), nj.load_predictor(checkpoint, T4)
    assert frame[str(checkpoint), T4] == pytest.approx(_softmax_error(tuned, T4), rel=1e-4)
    assert frame[str(checkpoint), T4] != pytest.approx(_softmax_error(plain, T4), rel=1e-3)
    assert frame[str(checkpoint), V100] == pytest.approx(_softmax_error(plain, V100), rel=1e-4)
    assert frame["roofline", T4] == pytest.approx(_softmax_error(load_baseline("roofline"), T4), rel=1e-4)
    assert list(frame.index.get_level_values(0).unique()) == [str(checkpoint), "roofline"]


def test_fitted_baselines_are_fitted_to_the_checkpoints_gpus(folder: Path, checkpoint: Path) -> None:
    """Li's line over one GPU: the checkpoint saw the T4 only, so the V100 gets the T4's share of its bandwidth."""
    found = evaluate([folder / "kernels"], str(checkpoint), devices=[V100], baselines=["li"])
    line = fit_baseline("li", read_measurements(folder), [T4]).families["softmax"]  # type: ignore[attr-defined]
    assert 0.4 < float(line.per_bandwidth) < 1.0  # measured at 1 to 2 times the roofline
    seconds = [_roof_s(V100, *size) / float(line.per_bandwidth) + float(line.floor_s) for size in ROWS]
    measured = np.array([_roof_s(V100, *size) * max(off, 1.0) for size, off in zip(ROWS, OFF, strict=True)])
    expected = 100 * np.abs(np.array(seconds) / measured - 1).mean()
    assert found.frames["kernels"].set_index("system")["mean"]["li"] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(nj.InputError, match="habitat-wave scales a time measured on another GPU"):
        evaluate([folder], str(checkpoint), baselines=["habitat-wave"])


def test_models_of_families_nobody_trained_are_left_out_and_counted(folder: Path) -> None:
    labels = read_measurements(folder).end_to_end
    whole: Any = random_predictor("mixture", 0)
    some = replace(whole, families={name: each for name, each in whole.families.items() if name != "norm"})
    found, notes = model_scores(labels, {"whole": lambda _: whole, "some": lambda _: some})
    assert found.empty
    assert "3 labels left out: some was not trained on norm" in notes
    found, notes = model_scores(labels, {"whole": lambda _: whole})
    assert len(found) == 3
    assert not any("not trained" in note for note in notes)


def test_whole_models_are_forecast_as_the_user_would(evaluated: Evaluation, checkpoint: Path) -> None:
    frames = {
        name: frame[frame["system"] == str(checkpoint)].reset_index(drop=True)
        for name, frame in evaluated.frames.items()
    }
    models = frames["models"]
    assert list(models["option"]) == ["eager", "eager", "fusion"]
    assert list(models["measured_s"]) == [0.02, 0.06, 0.01]
    cases = ((T4, "inference", False), (T4, "training", False), (V100, "inference", True))
    for (device, mode, fused), forecast, error, measured in zip(
        cases, models["forecast_s"], models["error"], models["measured_s"], strict=True
    ):
        predictor = nj.load_predictor(checkpoint, device if device == T4 else None)
        graph = nj.graph_from_config("bert_large", batch_size=2, sequence_length=128, mode=mode, fused=fused)
        expected = nj.predict(predictor, nj.load_gpu(device), graph).total_s
        assert forecast == pytest.approx(expected, rel=1e-4)
        assert error == pytest.approx(100 * (expected / measured - 1), rel=1e-3)
    total = frames["models_total"].set_index("option")
    assert total.loc["eager", "labels"] == 2
    assert total.loc["eager", "mean"] == pytest.approx(models["error"][:2].abs().mean())
    assert set(frames["models_by_device"]["device"]) == {T4, V100}


def test_notes_name_the_labels_left_out(evaluated: Evaluation) -> None:
    assert "1 labels of option 'dp4' left out: several GPUs" in evaluated.notes
    text = as_text(evaluated, width=200)
    assert "note: 1 labels of option 'dp4' left out: several GPUs" in text
    assert "Kernels measured alone" in text
    assert "Whole models" in text
    named = replace(evaluated, notes=("from the clone: `pip install '.[gbt]'`",))
    assert "note: from the clone: `pip install '.[gbt]'`" in as_text(named, width=200)


def test_devices_can_be_chosen_and_results_are_plain(folder: Path, checkpoint: Path) -> None:
    found = evaluate([folder], str(checkpoint), devices=[V100])
    assert set(found.frames["kernels"]["device"]) == {V100}
    assert set(found.frames["models"]["device"]) == {V100}
    read = json.loads(json.dumps(found.to_dict()))
    assert set(read) == {"kernels", "models", "models_by_device", "models_total", "notes"}
    assert read["kernels"][0]["rows"] == 4


def test_json_of_the_command(folder: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "--measurements", str(folder), "--checkpoint", str(checkpoint), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert next(iter(read.items())) == ("schema", "neusight_jax.evaluation/1")
    assert read["checkpoint"] == str(checkpoint)
    assert "1 labels of option 'dp4' left out: several GPUs" in read["notes"]
    assert {"model", "mode", "batch_size", "sequence_length", "option"} <= set(read["models"][0])


def test_kernels_alone_are_enough(folder: Path, checkpoint: Path) -> None:
    found = evaluate([folder / "kernels"], str(checkpoint))
    assert found.frames["models"].empty
    assert found.frames["models_total"].empty
    assert "Whole models" not in as_text(found)


def test_bad_names_are_refused(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(nj.InputError, match="unknown baseline 'habitat'"):
        evaluate([folder], str(checkpoint), baselines=["habitat"])
    with pytest.raises(nj.InputError, match="does not exist"):
        evaluate([tmp_path / "nowhere"], str(checkpoint))
    with pytest.raises(nj.InputError, match="unknown checkpoint 'fp31'"):
        evaluate([folder], "fp31")


def test_coverage_and_width_of_intervals(folder: Path) -> None:
    """Of kernels and whole models; a system without intervals has none, in JSON null."""
    plain, wide = random_predictor("mixture", 0), jnp.array([-0.5, 0.5])
    assert isinstance(plain, MixturePredictor)
    intervals = empty_intervals({name: each.network.center.shape[-1] for name, each in plain.families.items()})
    inside = {name: jnp.array([[-1e9], [1e9]]) * jnp.ones_like(part) for name, part in intervals.gpu_range.items()}
    shapes = {name: jnp.array([[-1e9], [1e9]]) * jnp.ones_like(part) for name, part in intervals.shape_range.items()}
    kernels = dict.fromkeys(intervals.kernels, wide)
    own = replace(
        plain, intervals=replace(intervals, kernels=kernels, total=wide, gpu_range=inside, shape_range=shapes)
    )
    data = read_measurements(folder)
    found = score(data, {"own": lambda device: own, "roofline": lambda device: load_baseline("roofline")})
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for row in content["kernels"]:
        if row["system"] == "roofline":
            assert (row["coverage"], row["width"], row["interval_score"]) == (None, None, None)
            continue
        rows = data.frame[data.frame["device"] == row["device"]].reset_index(drop=True)
        low, high = nj.predict_kernel_intervals(own, nj.load_gpu(row["device"]), table_from_frame(rows))
        measured = rows["latency_s"].to_numpy()
        assert row["coverage"] == pytest.approx(100 * np.mean((low <= measured) & (measured <= high)))
        forecast = nj.predict_kernels(own, nj.load_gpu(row["device"]), table_from_frame(rows))
        assert row["width"] == pytest.approx(100 * np.mean((high - low) / forecast), rel=1e-6)
        outside = np.where(measured < low, low - measured, np.where(measured > high, measured - high, 0.0))
        assert row["interval_score"] == pytest.approx(100 * np.mean((high - low + 10 * outside) / forecast), rel=1e-6)
    labels = [row for row in content["models"] if row["system"] == "own"]
    for row in labels:
        mode = {"inf": "inference", "train": "training"}[row["mode"]]
        graph = nj.graph_from_config("bert_large", 2, 128, mode, fused=row["option"] == "fusion")
        forecast_s = nj.predict(own, nj.load_gpu(row["device"]), graph)
        assert (row["low_s"], row["high_s"]) == pytest.approx(forecast_s.interval_s)
        assert row["forecast_s"] == pytest.approx(forecast_s.total_s)
    held = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in labels if row["option"] == "eager"]
    (total,) = (row for row in content["models_total"] if (row["system"], row["option"]) == ("own", "eager"))
    assert total["coverage"] == pytest.approx(100 * np.mean(held))
    text = as_text(found, 160)
    assert "in 80 %" in text
    assert any(line.split()[:1] == ["roofline"] and line.split()[-2:] == ["-", "-"] for line in text.splitlines())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seeds", "2"), "--seeds belongs to --protocol"),
        (("--protocol", "logo", "--checkpoint", "fp32"), "--protocol logo fits its own predictors; leave --checkpoint"),
        (("--protocol", "few-shot", "--baseline", "li"), "--protocol few-shot has no baselines to choose"),
        (("--output", "x"), "--output belongs to --protocol"),
    ],
)
def test_options_that_would_not_be_heeded_are_refused(
    fails: Fails, folder: Path, options: tuple[str, ...], words: str
) -> None:
    assert words in fails("evaluate", "--measurements", str(folder), *options)
