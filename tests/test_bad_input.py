"""Bad input: exit code 2, one line that says what was wrong, nothing half-written."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from refusals import Fails

import neusight_jax as nj
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.hardware.gpu import REQUIRED_FIELDS
from neusight_jax.model.checkpoint import save_checkpoint
from synthetic import synthetic_rows

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99}


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# What is asked for


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predikt",), "No such command 'predikt'"),
        (("predict", "gpt2"), "which machine? give either --gpu NAME"),
        (("predict", "--gpu", "T4"), "Missing argument 'MODEL'"),
        (("predict", "gpt2", "--gpu", "T4", "--batchsize", "2"), "No such option: --batchsize"),
        (("predict", "gpt2", "--gpu", "T4", "--batch-size", "two"), "Invalid value for '--batch-size'"),
        (("train", "--recipe", "fp32", "--output", "o"), "Missing option '--measurements'"),
        (("train", "--measurements", "m", "--output", "o"), "Missing option '--recipe'"),
        (("train", "--measurements", "m", "--recipe", "fp32"), "Missing option '--output'"),
        (("evaluate", "--checkpoint", "fp32"), "Missing option '--measurements'"),
        (
            ("evaluate", "--measurements", "m", "--output", "o"),
            "--output belongs to --protocol; for the scores of a checkpoint give --json",
        ),
        (("import", "neusight", "tree"), "Missing option '--output'"),
    ],
)
def test_usage(fails: Fails, arguments: tuple[str, ...], message: str) -> None:
    assert message in fails(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "H1000"}, "unknown GPU 'H1000'; nearest: H100"),
        ({"gpu": "nowhere.json"}, "nowhere.json: no such file; expected a GPU file"),
        ({"model": "gpt2-larg"}, "unknown model 'gpt2-larg'; nearest: gpt2-large"),
        ({"model": "nowhere.json"}, "nowhere.json: no such file"),
        ({"checkpoint": "fp23"}, "unknown checkpoint 'fp23'"),
        ({"checkpoint": "nowhere/fp32"}, "checkpoint nowhere/fp32: no such folder"),
        ({"mode": "sleeping"}, "mode is 'sleeping', expected one of inference, training"),
        ({"dtype": "fp33"}, "unknown dtype 'fp33'; nearest: fp32"),
        ({"gpu": "V100", "dtype": "fp8"}, "has no arithmetic path 'fp8'; expected one of fp32, fp16"),
        ({"batch_size": "0"}, "batch_size is 0, expected a positive whole number"),
        ({"batch_size": "-1"}, "batch_size is -1, expected a positive whole number"),
        ({"sequence_length": "0"}, "sequence_length is 0, expected a positive whole number"),
        ({"sequence_length": "-1"}, "sequence_length is -1, expected a positive whole number"),
        ({"sequence_length": "513"}, "sequence length 513 is longer than the model's limit of 512"),
        ({"model": "switch-base-8"}, "takes sequences of any length; say which with --sequence-length"),
    ],
)
def test_unknown_or_impossible(predict_fails: Fails, options: dict[str, str], message: str) -> None:
    assert message in predict_fails(**options)


@pytest.mark.parametrize("option", ["--hold-out", "--device"])
def test_unknown_devices(fails: Fails, option: str, checkpoint: Path, tmp_path: Path) -> None:
    command = {
        "--hold-out": ("train", "--recipe", "fp32", "--output", str(tmp_path / "out")),
        "--device": ("evaluate", "--checkpoint", str(checkpoint)),
    }[option]
    synthetic_rows("softmax", "Tesla T4", 4).to_parquet(tmp_path / "softmax.parquet", index=False)
    before = listing(tmp_path)
    words = "unknown GPU 'T44'; measured here: Tesla T4"
    assert words in fails(*command, "--measurements", str(tmp_path), option, "T44")
    assert listing(tmp_path) == before


# Files that describe GPUs and models


def _gpu(**changes: Any) -> dict[str, Any]:
    gpu = nj.load_gpu("H100")
    figures = {field: getattr(gpu, field) for field in REQUIRED_FIELDS}
    return {name: value for name, value in {**figures, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sms": ...}, "mine.json: missing num_sms"),
        ({"clock_hz": -1.0}, "mine.json: clock_hz is -1, expected a positive number"),
        ({"tdp_w": float("nan")}, "mine.json: tdp_w is nan, expected a finite number"),
        (
            {"mem_bytes_per_s": 3350},
            "mem_bytes_per_s is 3350, expected 1e10 to 1e14; this looks like GB/s, multiply by 1e9",
        ),
        ({"clock_hz": 1980}, "clock_hz is 1980, expected 1e8 to 1e10; this looks like MHz, multiply by 1e6"),
        ({"l2_bytes": "big"}, "mine.json: l2_bytes is 'big', expected a number"),
        ({"num_smss": 4}, "mine.json: unknown field 'num_smss'; nearest: num_sms"),
    ],
)
def test_gpu_files(predict_fails: Fails, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(_gpu(**changes)))
    assert message in predict_fails(gpu=str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"num_sms": 4', "mine.json: not JSON"),
        ("[1, 2]", "holds a list, expected a mapping of names to figures"),
    ],
)
def test_gpu_files_that_are_something_else(predict_fails: Fails, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert message in predict_fails(gpu=str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": None}, "mine: config has no 'n_embd'; expected a whole number"),
        ({"model_type": None}, "mine: config has no 'model_type' among its keys"),
        ({"model_type": "resnet"}, "mine: model_type 'resnet' is not supported; expected one of"),
        ({"n_layer": -2}, "mine: n_layer is -2, expected a positive whole number"),
        ({"n_head": 5}, "n_embd 64 is not divisible by n_head 5"),
    ],
)
def test_configs(predict_fails: Fails, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    assert message in predict_fails(str(path))
    assert message in predict_fails(str(path), sequence_length="16")


# Measurements


def _linear(**columns: Any) -> pd.DataFrame:
    return synthetic_rows("linear", "Tesla T4", 8).assign(**columns)


def _refused(path: Path) -> str:
    with pytest.raises(nj.InputError) as caught:
        read_measurements(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_truncated_parquet(fails: Fails, tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "linear.parquet"
    _linear().to_parquet(path)
    path.write_bytes(path.read_bytes()[:-100])
    message = "is not a readable Parquet file"
    assert message in _refused(path)
    assert message in fails("evaluate", "--measurements", str(tmp_path), "--checkpoint", str(checkpoint))


def test_foreign_parquet(fails: Fails, tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "sales.parquet"
    pd.DataFrame({"customer": ["a"], "price": [3.0]}).to_parquet(path)
    message = "column 'device' is missing; it has customer, price; expected the measurement schema"
    assert message in _refused(path)
    assert message in fails("evaluate", "--measurements", str(tmp_path), "--checkpoint", str(checkpoint))


def test_rows_faster_than_light(fails: Fails, tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "linear.parquet"
    _linear(m=4096, n=4096, k=4096, latency_s=1e-6).to_parquet(path)
    refused = fails("evaluate", "--measurements", str(path), "--checkpoint", str(checkpoint))
    assert "8 of 8 measurement rows are bad (8 too fast)" in refused
    assert "--drop-invalid" in refused
    command = ("train", "--measurements", str(path), "--recipe", "tiny", "--output", str(tmp_path / "out"))
    assert "8 too fast" in fails(*command)
    assert listing(tmp_path) == ["linear.parquet"]


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_no_measurements(fails: Fails, tmp_path: Path, checkpoint: Path, command: str) -> None:
    rest = {
        "train": ("--recipe", "tiny", "--output", str(tmp_path / "out")),
        "evaluate": ("--checkpoint", str(checkpoint)),
    }[command]
    assert "does not exist" in fails(command, "--measurements", str(tmp_path / "nowhere"), *rest)
    (tmp_path / "empty").mkdir()
    assert "holds no measurements" in fails(command, "--measurements", str(tmp_path / "empty"), *rest)
    assert listing(tmp_path) == ["empty"]


def test_unknown_recipe_and_baseline(fails: Fails, tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "linear.parquet"
    _linear().to_parquet(path)
    command = ("train", "--measurements", str(path), "--recipe", "tinny", "--output", str(tmp_path / "out"))
    assert "unknown recipe 'tinny'; nearest: tiny" in fails(*command)
    command = ("evaluate", "--measurements", str(path), "--checkpoint", str(checkpoint), "--baseline", "rooflin")
    assert "unknown baseline 'rooflin'; nearest: roofline" in fails(*command)
    assert listing(tmp_path) == ["linear.parquet"]


# Writing


def _checkout(folder: Path) -> Path:
    folder.mkdir()
    rows = synthetic_rows("linear", "Tesla T4", 8)
    rows["latency"] = rows.pop("latency_s") * 1e3
    rows.to_csv(folder / "linear.csv", index=False)
    return folder


def test_output_below_a_file(fails: Fails, tmp_path: Path) -> None:
    source = _checkout(tmp_path / "checkout")
    (tmp_path / "file").touch()
    before = listing(tmp_path)
    assert "cannot write" in fails("import", "neusight", str(source), "--output", str(tmp_path / "file" / "out"))
    assert "is a file, expected a folder" in fails(
        "import", "neusight", str(source), "--output", str(tmp_path / "file")
    )
    assert "is not empty" in fails("import", "neusight", str(source), "--output", str(source))
    assert listing(tmp_path) == before


def test_train_to_a_bad_output(fails: Fails, tmp_path: Path) -> None:
    _linear().to_parquet(tmp_path / "linear.parquet")
    (tmp_path / "file").touch()
    before = listing(tmp_path)
    command = ("train", "--measurements", str(tmp_path / "linear.parquet"), "--recipe", "tiny", "--output")
    assert "is a file, expected a folder" in fails(*command, str(tmp_path / "file"))
    assert "is not empty" in fails(*command, str(tmp_path))
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "No space left on device; nothing was written"),
        (KeyboardInterrupt(), 130, "interrupted; nothing written"),
    ],
)
@pytest.mark.parametrize("target", ["pandas.DataFrame.to_parquet", "os.replace"])
def test_stopped_while_writing(
    fails: Fails,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    failure: BaseException,
    code: int,
    message: str,
) -> None:
    source = _checkout(tmp_path / "checkout")
    before = listing(tmp_path)

    def stop(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(target, stop)
    assert message in fails("import", "neusight", str(source), "--output", str(tmp_path / "out"), code=code)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_checkpoint_is_whole_or_absent(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    predictor, before = nj.load_predictor(own), listing(tmp_path)

    def stop(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises((nj.InputError, KeyboardInterrupt)):
        save_checkpoint(tmp_path / "new", predictor, nj.load_card(own))
    assert listing(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_standard_output_on_a_full_disk() -> None:
    home = Path(nj.__file__).resolve().parents[1]
    command = [sys.executable, "-m", "neusight_jax", "gpus", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(home)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_interrupted_while_computing(fails: Fails, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("neusight_jax.prediction.predict", stop)
    command = ("predict", "bert-tiny", "--gpu", "T4", "--checkpoint", str(checkpoint))
    assert fails(*command, code=130) == "interrupted; nothing written"
