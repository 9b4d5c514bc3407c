"""The whole loop on data measured seconds ago: profile this machine, train, forecast shapes left out; and models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.datasets.measurements import read_measurements, table_from_frame
from neusight_jax.training.recipes import RECIPES

OPS = {"linear": 28, "softmax": 24}


def _plan(path: Path) -> Path:
    """Shapes over two decades of work, small enough for a shared processor."""
    random = np.random.default_rng(0)
    rows = []
    for op, count in OPS.items():
        for _ in range(count):
            if op == "linear":
                m, n, k = (16 * int(2 ** random.uniform(1, 6)) for _ in range(3))
                rows.append({"op": op, "b": 1, "m": m, "n": n, "k": k})
            else:
                rows.append({"op": op, "b": int(2 ** random.uniform(4, 12)), "h": 64 * int(2 ** random.uniform(0, 5))})
    pd.DataFrame(rows).drop_duplicates().to_csv(path, index=False)
    return path


def _split(profile: Path, training: Path, left_out: Path) -> None:
    """Every fourth shape of an operator apart."""
    for folder in (training, left_out):
        (folder / "kernels").mkdir(parents=True)
        shutil.copy(profile / "gpu.json", folder)
    for file in sorted((profile / "kernels").glob("*.parquet")):
        frame = pd.read_parquet(file)
        apart = np.arange(len(frame)) % 4 == 3
        frame[~apart].to_parquet(training / "kernels" / file.name)
        frame[apart].to_parquet(left_out / "kernels" / file.name)


def test_profile_train_forecast(tmp_path: Path, capsys, record_property, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = RECIPES["tiny"]
    monkeypatch.setitem(RECIPES, "tiny", replace(tiny, settings=replace(tiny.settings, steps=400)))
    plan, out, checkpoint = _plan(tmp_path / "plan.csv"), tmp_path / "profile", tmp_path / "checkpoint"
    assert run(["profile", "--plan", str(plan), "--output", str(out), "--seconds", "0.02"]) == 0
    card = json.loads((out / "card.json").read_text())
    assert sum(card["rows"].values()) + card["skipped"] == len(pd.read_csv(plan))
    training, left_out = tmp_path / "training", tmp_path / "left-out"
    _split(out, training, left_out)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes integer step counters
        assert run(["train", "--measurements", str(training), "--recipe", "tiny", "--output", str(checkpoint)]) == 0
    assert nj.load_card(checkpoint)["trained_on"]["devices"] == [card["device"]]
    capsys.readouterr()
    assert run(["evaluate", "--measurements", str(left_out), "--checkpoint", str(checkpoint), "--json"]) == 0
    for score in json.loads(capsys.readouterr().out)["kernels"]:
        record_property(
            "shown",
            f"retraining loop, {score['family']}: median error {score['median']:.1f}% (mean {score['mean']:.1f}%) on "
            f"{score['rows']} shapes left out, {card['device']}, median spread {100 * card['median_spread']:.1f}%",
        )
    # Clearly better than the mean of what was trained on, and in the right order; a shared processor is noisy.
    data, seen = read_measurements(left_out), read_measurements(training).frame
    predictor = nj.load_predictor(checkpoint, card["device"])
    rows = data.frame
    forecast = nj.predict_kernels(predictor, data.gpu(card["device"]), table_from_frame(rows), isolated=True)
    measured = np.log(rows["latency_s"].to_numpy())
    means = np.log(seen["latency_s"]).groupby(seen["family"]).mean()
    apart = measured - means.loc[rows["family"]].to_numpy()
    assert np.mean((np.log(forecast) - measured) ** 2) < 0.6 * np.mean(apart**2)
    assert pd.Series(np.log(forecast)).corr(pd.Series(measured), method="spearman") > 0.7
    # The same folder calibrates a checkpoint, and the device's own file is the GPU to ask about.
    asked = ["--gpu", str(out / "gpu.json"), "--checkpoint", str(checkpoint)]
    calibrated = tmp_path / "calibrated"
    assert run(["calibrate", "--measurements", str(out), *asked, "--output", str(calibrated)]) == 0
    source = tmp_path / "model.py"
    source.write_text(MODELS)
    capsys.readouterr()
    assert run(["predict", f"{source}:product", *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with the effect" in said
    assert card["device"] in said


MODELS = """
import jax
import jax.numpy as jnp


def product():
    return lambda x, w: x @ w, (jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32"))


def perceptron():
    params = {"up": jax.ShapeDtypeStruct((64, 128), jnp.float32), "down": jnp.ones((128, 64))}
    x = jax.ShapeDtypeStruct((4, 16, 64), jnp.float32)
    return lambda params, x: jax.nn.gelu(x @ params["up"]) @ params["down"], (params, x)


def whole_numbers():
    return lambda x: x + 1, (jnp.arange(8),)


def broken():
    return lambda x: x @ x, (jnp.ones((2, 3)),)


def flax():
    from flax import nnx

    return nnx.Linear(8, 4, rngs=nnx.Rngs(0)), (jnp.ones((2, 8)),)


def torch():
    import torch

    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64)), (torch.zeros(16, 32),)
"""


def test_models_are_measured_end_to_end(tmp_path: Path, capsys) -> None:
    source, out = tmp_path / "model.py", tmp_path / "out"
    source.write_text(MODELS)
    models = [f"{source}:{name}" for name in ("perceptron", "broken")]
    assert run(["profile-model", *models, "--output", str(out), "--seconds", "0.01"]) == 0
    assert "4 rows" in capsys.readouterr().out
    labels = read_measurements(out).end_to_end
    assert labels is not None
    assert sorted(zip(labels["mode"], labels["option"], strict=True)) == sorted(
        (mode, option) for mode in ("inf", "train") for option in ("", "fusion")
    )
    assert set(zip(labels["batch_size"], labels["sequence_length"], strict=True)) == {(4, 16)}
    assert (labels["e2e_s"] > 0).all()
    assert labels.loc[labels["mode"] == "inf", "backward_s"].isna().all()
    skipped = pd.read_csv(out / "skipped.csv")
    assert set(skipped["model"]) == {models[1]}
    assert skipped["reason"].str.startswith("failed: TypeError").all()
    assert run(["profile-model", f"{source}:whole_numbers", "--output", str(tmp_path / "none")]) == 2
    assert "nothing to train" in capsys.readouterr().err
    assert run(["profile-model", f"{source}:product", "--batch-size", "2", "--output", str(tmp_path / "none")]) == 2
    assert "example arguments say batch" in capsys.readouterr().err
    assert run(["profile-model", f"{source}:product", "--mode", "sleeping", "--output", str(tmp_path / "none")]) == 2
    assert "unknown mode 'sleeping'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_flax_module_trains_its_own_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flax", reason="flax is not installed")
    from neusight_jax.profiling import models

    source = tmp_path / "model.py"
    source.write_text(MODELS)
    taken = []
    of = models.with_gradients
    monkeypatch.setattr(models, "with_gradients", lambda call: lambda *args: taken.append(of(call)(*args)) or taken[-1])
    step = models.jax_step(models.target_from_source(f"{source}:flax"), training=True, compiled=False)
    forward_s, backward_s = step()
    assert forward_s > 0.0
    assert backward_s is not None
    ((_, slopes),) = taken
    assert sorted(slope.shape for slope in slopes) == [(4,), (8, 4)]


def test_training_takes_the_gradients_of_the_first_argument() -> None:
    import jax.numpy as jnp

    from neusight_jax.profiling.models import with_gradients

    def call(params: dict, x: jnp.ndarray) -> jnp.ndarray:
        return params["w"] * x

    params = {"count": jnp.arange(3), "w": jnp.array([1.0, 2.0])}
    value, (slope,) = with_gradients(call)(params, jnp.array([3.0, 5.0]))
    assert float(value) == pytest.approx((3.0 + 10.0) / 2)  # mean of the output
    np.testing.assert_allclose(slope, [1.5, 2.5])


def test_torch_models_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from neusight_jax.profiling.models import target_from_source, torch_step

    source = tmp_path / "model.py"
    source.write_text(MODELS)
    target = target_from_source(f"{source}:torch")
    assert (target.framework, target.batch_size) == ("torch", 16)
    step = torch_step(target, training=True, compiled=False)
    forward_s, backward_s = step()
    assert forward_s > 0.0
    assert backward_s is not None
    weight = target.call[0].weight
    first = weight.grad.clone()
    step()
    assert weight.grad.shape == (64, 32)
    assert not bool((weight.grad == first).all())  # gradients add up
    assert torch_step(target, training=False, compiled=False)()[1] is None


def test_models_of_transformers_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = tmp_path / "small.json"
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 50}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    out = tmp_path / "out"
    asked = ["profile-model", str(config), "--batch-size", "2", "--sequence-length", "8", "--execution", "eager"]
    assert run([*asked, "--output", str(out), "--seconds", "0.01"]) == 0
    labels = read_measurements(out).end_to_end
    assert labels is not None
    assert list(labels["num_layers"]) == [2, 2]
    train = labels[labels["mode"] == "train"].iloc[0]
    assert 0 < train["backward_s"] < train["e2e_s"]
    assert run(["profile-model", str(config), "--output", str(tmp_path / "none")]) == 2
