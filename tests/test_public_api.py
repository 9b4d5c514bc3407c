"""The public names: complete, lazy, and what their documentation says."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.predictor import RooflinePredictor
from synthetic import synthetic_rows

HOME = Path(nj.__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HOME), "JAX_PLATFORMS": "cpu"}


def _python(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_loads() -> None:
    for name in nj.__all__:
        assert getattr(nj, name) is not None
    assert set(nj.__all__) <= set(dir(nj))


CONTRACT = (
    *("list_checkpoints", "list_gpus", "list_models", "load_predictor", "load_gpu", "load_cluster", "read_kernels"),
    *("predict_kernels", "predict_kernel_intervals", "graph_from_config", "predict", "latency", "Parallelism"),
    *(
        "job_from_config",
        "job_from_graph",
        "parallelize",
        "serve",
        "graph_from_function",
        "graph_from_torch",
        "scale_trace",
        "calibrate",
    ),
    *("sensitivity", "design", "sweep", "compare", "train", "evaluate", "save_predictor", "suggest"),
    *("energy", "predict_kernels_power", "finetune", "Run", "ModelShape", "kernels_of", "codesign", "identify"),
)
"""What tools outside the repository call."""


def test_the_front_page_is_short_and_has_the_contract() -> None:
    assert set(CONTRACT) <= set(nj.__all__)
    assert len(set(nj.__all__) - set(CONTRACT)) <= 19


@pytest.mark.parametrize("name", sorted(nj._MOVED))
def test_a_moved_name_works_and_says_where_it_is(name: str) -> None:
    path = f"neusight_jax.{nj._MOVED[name]}"
    with pytest.warns(DeprecationWarning, match=rf"^neusight_jax\.{name} is {re.escape(path)} now$"):
        value = getattr(nj, name)
    home, _, new = path.rpartition(".")
    assert value is getattr(importlib.import_module(home), new)
    assert name not in {*nj.__all__, *dir(nj)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'forecats'"):
        nj.forecats  # noqa: B018


def test_importing_the_package_loads_nothing(tmp_path: Path) -> None:
    heavy = {"jax", "numpy", "pandas", "rich", "typer", "yaml"}
    code = f"import sys, neusight_jax; print(sorted({heavy!r} & set(sys.modules)))"
    assert _python(code, tmp_path).strip() == "[]"


def test_no_public_name_is_that_of_a_module() -> None:
    folders = (HOME / "neusight_jax", HOME)
    modules = {path.stem for folder in folders for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {"comparison", "designs", "sweeps", "training"} <= modules
    assert not modules & set(nj.__all__)


def test_works_from_the_folder_of_the_package(tmp_path: Path) -> None:
    code = "import neusight_jax as nj; print(float(nj.load_gpu('H100').num_sms))"
    assert float(_python(code, HOME)) == float(_python(code, tmp_path)) > 100


def test_the_contract(checkpoint: Path, tmp_path: Path) -> None:
    predictor, gpu = nj.load_predictor(checkpoint), nj.load_gpu("NVIDIA H100 80GB HBM3")
    rows = synthetic_rows("linear", "Tesla T4", 8)
    rows.to_parquet(tmp_path / "linear.parquet", index=False)
    table = nj.read_kernels(tmp_path / "linear.parquet")
    seconds = nj.predict_kernels(predictor, gpu, table, isolated=True)
    assert seconds.shape == (8,)
    assert (seconds > 0).all()

    graph = nj.graph_from_config("bert-tiny", batch_size=2, sequence_length=16, mode="training", dtype="fp32")
    forecast = nj.predict(predictor, gpu, graph)
    assert forecast.total_s == pytest.approx(forecast.forward_s + forecast.backward_s)
    assert json.loads(forecast.to_json())["total_s"] == forecast.total_s
    frame = forecast.to_frame()
    assert (frame["seconds"] * frame["count"]).sum() == pytest.approx(forecast.total_s)
    assert float(nj.latency(predictor, gpu, graph.kernels)) == pytest.approx(forecast.total_s, rel=1e-4)

    slopes = jax.grad(nj.latency, argnums=1)(predictor, gpu, graph.kernels)
    assert isinstance(slopes, nj.GPU)
    assert float(slopes.mem_bytes_per_s) < 0.0
    gpus = nj.stack_gpus([gpu, gpu.replace(mem_bytes_per_s=jnp.asarray(4.8e12))])
    many = np.asarray(jax.vmap(nj.latency, in_axes=(None, 0, None))(predictor, gpus, graph.kernels))
    assert many.shape == (2,)
    assert many[1] < many[0]


def test_training_and_scores(checkpoint: Path, tmp_path: Path) -> None:
    """`train` itself is in test_retraining: the command calls it."""
    synthetic_rows("linear", "Tesla T4", 8).to_parquet(tmp_path / "linear.parquet", index=False)
    with pytest.raises(nj.InputError, match="unknown recipe 'best'"):
        nj.train([tmp_path], "best", tmp_path / "out")
    scores = nj.evaluate([tmp_path], str(checkpoint)).frames["kernels"]
    assert list(scores["family"]) == ["linear"]
    assert scores["rows"].sum() == 8


def test_a_changed_predictor_is_saved_and_loaded(checkpoint: Path, tmp_path: Path) -> None:
    changed = jax.tree.map(lambda leaf: leaf + 0.01, nj.load_predictor(checkpoint))
    nj.save_predictor(tmp_path / "bare", changed)
    nj.save_predictor(tmp_path / "whole", changed, nj.load_card(checkpoint))
    for name in ("bare", "whole"):
        again = nj.load_predictor(tmp_path / name)
        assert jax.tree.structure(again) == jax.tree.structure(changed)
        assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(changed)))
    assert "held_out" not in nj.load_card(tmp_path / "bare")
    assert nj.load_card(tmp_path / "whole")["held_out"] == nj.load_card(checkpoint)["held_out"]


@pytest.mark.parametrize("kind", ["neusight", "habitat-mlp", "li", "roofline3", "gbt"])
def test_every_kind_is_saved(kind: str, tmp_path: Path) -> None:
    predictor = untrained(kind, {"families": ["linear"], "hidden": [4], "members": 1})
    nj.save_predictor(tmp_path / "saved", predictor)
    again = nj.load_predictor(tmp_path / "saved")
    assert jax.tree.structure(again) == jax.tree.structure(predictor)
    with pytest.raises(nj.InputError, match="a RooflinePredictor cannot be saved"):
        nj.save_predictor(tmp_path / "other", RooflinePredictor())


@pytest.mark.parametrize("name", nj.list_checkpoints())
def test_shipped_checkpoints_forecast(name: str) -> None:
    predictor, card = nj.load_predictor(name), nj.load_card(name)
    graph = nj.graph_from_config("gpt2", batch_size=1, sequence_length=128)
    assert 0.0 < nj.predict(predictor, nj.load_gpu("H100"), graph).total_s < 1.0
    assert card["kind"] in ("mixture", "neusight")
