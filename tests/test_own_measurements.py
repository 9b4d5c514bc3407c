"""The measurements of this repository are whole, and the scripts that made them still make the same."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import read_measurements, table_from_frame
from neusight_jax.model.predictor import RooflinePredictor

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "measurements"
DEVICES = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
ROWS = {"bmm": 650, "conv": 696, "copy": 40, "decode": 70, "linear": 813, "ln": 240, "prefill": 70, "softmax": 240}
ROWS |= dict.fromkeys(("add", "addu", "div", "divu", "gelu", "mul", "mulu", "pow", "powu", "relu", "tanh"), 20)
SIZES = [*schema.DIM_COLUMNS, "vocab", "sequence_length", "channels_last", "parameters", "tensors"]

on_both = pytest.mark.parametrize("folder", DEVICES)


def _script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@functools.cache
def _raw(folder: str) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(file) for file in sorted((FOLDER / folder / "kernels").glob("*.parquet"))])


def _dims(row: dict[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((name, int(row[name])) for name in SIZES if name in row and not pd.isna(row[name]))


@on_both
def test_every_row_is_read_and_none_is_faster_than_light(folder: str) -> None:
    found = read_measurements(FOLDER / folder)
    assert found.problems.empty
    assert len(found.frame) == 3039
    assert set(found.frame["device"]) == {DEVICES[folder]}
    bound = nj.predict_kernels(RooflinePredictor(), nj.load_gpu(folder.upper()), table_from_frame(found.frame))
    share = np.asarray(bound) / found.frame["latency_s"].to_numpy()
    winograd = ((found.frame["op"] == "conv") & (found.frame["dtype"] == "fp32")).to_numpy()
    assert share[~winograd].max() < 1.0
    assert share[winograd].max() < 4.0  # a tile of 4 by 4 results needs a quarter of the FLOP
    assert (share[winograd] > 1.0).sum() == 4


@on_both
def test_the_card_says_what_is_there(folder: str) -> None:
    text = (FOLDER / folder / "card.json").read_text(encoding="utf-8")
    card, raw = json.loads(text), _raw(folder)
    assert card["rows"] == ROWS == raw.groupby("op").size().to_dict()
    assert card["device"] == DEVICES[folder]
    assert card["plan"] == "plan.parquet"
    assert card["host"]["system"] == "Linux x86_64"
    assert card["disturbed_rows"] == raw["disturbed"].sum()
    assert card["throttled_rows"] == (raw["throttled"] != "").sum()
    assert card["beyond_cache_rows"] == raw["beyond_cache"].sum()
    assert np.isclose(card["median_spread"], raw["spread"].median(), atol=1e-4)
    page = (FOLDER / folder / "README.md").read_text(encoding="utf-8")
    assert "/plan.parquet" not in page + text
    assert (raw["latency_s"] == raw["loop_s"]).all()
    assert (raw["call_s"] > 0.9 * raw["loop_s"]).mean() > 0.99


def test_both_gpus_have_the_kernels_of_the_plan() -> None:
    plan = pd.read_parquet(FOLDER / "plan.parquet")
    key = [name for name in plan if name != "latency_s"]
    wanted = plan[key].sort_values(key, ignore_index=True)
    for folder in DEVICES:
        measured = _raw(folder)[key].astype(wanted.dtypes.to_dict()).sort_values(key, ignore_index=True)
        pd.testing.assert_frame_equal(measured, wanted)


def test_memory_is_faster_on_one_and_products_are_not() -> None:
    one, two = _raw("h100"), _raw("h200")
    both = one.merge(two, on=["op", "dtype", *(name for name in schema.DIM_COLUMNS if name in one)])
    both = both[both["latency_s_x"] > 100e-6]
    ratio = (both["latency_s_y"] / both["latency_s_x"]).groupby([both["op"], both["dtype"]]).median()
    assert 0.97 < ratio["linear", "fp32"] < 1.03
    assert 0.68 < ratio["mul", "fp32"] < 0.75  # 3.35 TB/s over 4.8 are 0.70


@on_both
def test_backward_passes_are_those_of_the_script(folder: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    frame = pd.read_parquet(FOLDER / folder / "training/backward.parquet")
    assert len(frame) == {"h100": 377, "h200": 149}[folder]
    assert set(frame["device"]) == {DEVICES[folder]}
    asked = {(op, dtype, frozenset(dims.items())) for op, dtype, dims in _script("backward_kernels").cases()}
    for row in frame.to_dict("records"):
        assert (row["op"], row["dtype"], _dims(row)) in asked
    steps = frame["step_s"].notna()
    assert (frame.loc[steps, "backward_s"].isna() & frame.loc[steps, "op"].str.contains("adamw|sgd")).all()
    assert (frame.loc[~steps, ["forward_s", "backward_s"]] > 1e-6).all(axis=None)
    long = frame[(frame["op"] == "linear") & (frame["forward_s"] > 200e-6)]
    ratio = (long["backward_s"] / long["forward_s"]).median()
    assert 1.9 < ratio < 2.6  # two products of the same FLOP, and the sum of the bias


@on_both
def test_steps_are_those_of_the_script(folder: str) -> None:
    frame = pd.read_csv(FOLDER / folder / "training/training_steps.csv")
    kernels = pd.read_parquet(FOLDER / folder / "training/training_step_kernels.parquet")
    assert len(frame) == {"h100": 126, "h200": 95}[folder]
    assert len(kernels) == {"h100": 6806, "h200": 4692}[folder]
    assert set(frame["device"]) == {DEVICES[folder]}
    key = [*list(frame)[:11]]
    assert list(kernels)[:11] == key
    assert not frame.duplicated(key).any()
    phases = frame[["forward_s", "backward_s", "optimizer_s"]].sum(axis=1)
    calm = frame["spread"] < 0.05
    assert (phases[calm] / frame.loc[calm, "step_s"]).between(0.85, 1.5).mean() > 0.95
    texts = dict.fromkeys(("attention", "optimizer"), "")
    found = kernels.fillna(texts).fillna(0).groupby(key)["total_s"].sum()
    known = frame.fillna(texts).fillna(0).set_index(key)["gpu_busy_s"]
    assert (found / known).between(0.98, 1.001).all()
    pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    script = _script("training_steps")
    steps = (*script.steps(), *script.other_steps())
    asked = {tuple(script._facts(step, DEVICES[folder]).values()) for step in steps}
    for row in frame[key].astype(object).to_dict("records"):
        assert tuple(None if pd.isna(value) else value for value in row.values()) in asked


def test_jax_steps_are_those_of_the_script() -> None:
    frame, cases = pd.read_csv(FOLDER / "h100/training/jax_steps.csv"), _script("jax_steps").CASES
    assert [tuple(row) for row in frame[["model", "precision", "mode"]].to_numpy()] == cases[: len(frame)]
    exact = frame[frame["precision"] == "fp32"].set_index(["model", "mode"])["step_s"]
    default = frame[frame["precision"] == "tf32"].set_index(["model", "mode"])["step_s"]
    assert (exact / default.reindex(exact.index) > 2.0).all()


def test_whole_steps_are_forecast() -> None:
    """Of one language model on the H100, in every precision and mode; no fit has seen them."""
    for name in ("torch", "transformers", "torchvision"):
        pytest.importorskip(name)
    script = _script("step_forecasts")
    frame = pd.DataFrame(list(script.forecasts(FOLDER / "h100", ["bert-large"])))
    error = (frame["forecast_s"] / frame["gpu_busy_s"] - 1).abs()
    assert len(frame) == 7
    assert error.mean() < 0.08
    assert error.max() < 0.20


def test_kernels_are_timed_on_the_processor() -> None:
    pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    script = _script("backward_kernels")
    bench = script.Bench("cpu")
    for op, dtype, dims in script.small_cases():
        if op in ("attention", "linear", "conv", "cross_entropy"):
            found = bench.measure(op, dtype, dims)
            assert found["forward_s"] > 0.0
            assert found["backward_s"] > 0.0


@pytest.mark.slow
def test_scripts_run_on_the_processor(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "torchvision"):
        pytest.importorskip(name)
    _script("backward_kernels").main([str(tmp_path / "backward.parquet"), "--small"])
    assert len(pd.read_parquet(tmp_path / "backward.parquet")) == len(_script("backward_kernels").small_cases())
    _script("training_steps").main([str(tmp_path), "--small"])
    assert len(pd.read_csv(tmp_path / "training_steps.csv")) == 2


def test_errors_of_forecasts_are_tabled() -> None:
    script = _script("own_measurements")
    frame = script.load(FOLDER / "h100")
    assert frame.groupby("shape").size().to_dict().keys() == {
        *("", "all are", "m alone is not", "n, k or channels are not")
    }
    some = frame.iloc[:10].assign(**{"alone": 0.5, "in a model": -0.25, "group": "add", "dtype": "fp32", "shape": ""})
    key, names = ("group", "dtype", "shape"), ("alone", "in a model")
    assert script.error_rows(some, key, names) == [["add", "fp32", "", 10, 50.0, 50.0, 25.0, -25.0]]


def test_measurements_are_not_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert not any("measurements" in name for name in (*project["packages"], *project["package-dir"].values()))
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 2e6


def test_watts_of_an_h200_are_whole() -> None:
    folder = FOLDER / "h200-watts"
    found = read_measurements(folder)
    assert found.problems.empty
    frame = found.frame
    assert len(frame) == 290
    assert set(frame["device"]) == {"NVIDIA H200"}
    assert frame["power_w"].between(400.0, 1.2 * 700.0).all()
    assert (frame["power_w"] < 1.01 * frame["power_limit_w"]).mean() > 0.95
    assert frame["clock_hz"].le(1.98e9).all()
    steps = pd.read_csv(folder / "models/end_to_end.csv", dtype={"mode": str})
    assert len(steps) == 24
    assert steps["power_w"].between(400.0, 700.0).all()


def test_watts_of_kernels_are_forecast_as_docs_say() -> None:
    """Of all but attention over a cache, which engines run otherwise: 9 % in the mean, as docs/power.md says."""
    frame, gpu = read_measurements(FOLDER / "h200-watts").frame, nj.load_gpu("H200")
    missed = []
    for name, rows in (("fp32", frame.dtype == "fp32"), ("tensorcore", frame.dtype != "fp32")):
        part = frame[rows & (frame.family != "decode")].reset_index(drop=True)
        watts = nj.predict_kernels_power(nj.load_predictor(name), gpu, table_from_frame(part))
        missed += list(abs(np.asarray(watts) / part["power_w"] - 1.0))
    assert np.mean(missed) < 0.095


def test_eager_steps_and_their_watts_are_forecast_as_docs_say() -> None:
    """Of models as PyTorch runs them, by the weights that ship; these have seen engines' kernels on an H200."""
    steps = pd.read_csv(FOLDER / "h200-watts/models/end_to_end.csv", dtype={"mode": str})
    predictor, gpu, ratios = nj.load_predictor("tensorcore"), nj.load_gpu("H200"), []
    for row in steps[(steps["dtype"] == "bf16") & steps["option"].isna() & (steps["batch_size"] == 8)].itertuples():
        mode = {"inf": "inference", "train": "training"}[row.mode]
        graph = nj.graph_from_config(row.model, row.batch_size, row.sequence_length, mode, "bf16", execution="eager")
        step = nj.predict(predictor, gpu, graph)
        ratios.append((step.total_s / row.e2e_s, step.power_w / row.power_w))
    seconds, watts = abs(np.array(ratios) - 1.0).mean(axis=0)
    assert len(ratios) == 12
    assert seconds < 0.08
    assert watts < 0.07
