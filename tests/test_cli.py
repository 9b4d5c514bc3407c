"""The command line: what it prints where, its exit codes, and what it loads."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from predictors import level_effect

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.app import _spread
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.training.data import NETWORKS
from synthetic import synthetic_rows

HOME = Path(nj.__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HOME)}
TINY = ("bert-tiny", "--batch-size", "2", "--sequence-length", "16")

Capture = pytest.CaptureFixture[str]


def _ok(capsys: Capture, *arguments: str) -> str:
    assert run(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_predict_prints_a_table(capsys: Capture, checkpoint: Path) -> None:
    out = _ok(capsys, "predict", *TINY, "--gpu", "T4", "--mode", "training", "--checkpoint", str(checkpoint))
    assert "bert-tiny on Tesla T4: training, batch 2, sequence 16, fp32" in out
    assert "weight_gradient" in out
    assert "note:" not in out


def test_predict_json_is_alone_and_agrees_with_python(capsys: Capture, checkpoint: Path) -> None:
    out = _ok(capsys, "predict", *TINY, "--gpu", "T4", "--checkpoint", str(checkpoint), "--json")
    content = json.loads(out)
    graph = nj.graph_from_config("bert-tiny", 2, 16)
    forecast = nj.predict(nj.load_predictor(checkpoint, device="T4"), nj.load_gpu("T4"), graph)
    assert content["total_s"] == forecast.total_s
    assert content["gpu"] == "Tesla T4"
    assert content["checkpoint"] == str(checkpoint)


def test_predict_defaults(capsys: Capture, checkpoint: Path) -> None:
    content = json.loads(
        _ok(capsys, "predict", "roberta-base", "--gpu", "T4", "--checkpoint", str(checkpoint), "--json")
    )
    assert (content["batch_size"], content["sequence_length"], content["mode"]) == (1, 512, "inference")


def test_predict_reads_a_config_and_a_gpu_file(capsys: Capture, checkpoint: Path, tmp_path: Path) -> None:
    config, gpu = tmp_path / "mine.json", tmp_path / "wide.yaml"
    config.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99})
    )
    gpu.write_text("base: T4\nmem_bytes_per_s: 6.4e+11\n")
    out = _ok(capsys, "predict", str(config), "--gpu", str(gpu), "--checkpoint", str(checkpoint))
    assert "mine on wide: inference, batch 1, sequence 32" in out
    assert "this GPU was not in training" in out


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (("--gpu", "V100-PCIE-32GB"), "held Tesla V100-PCIE-32GB out"),
        (("--gpu", "H100"), "this GPU was not in training"),
        (("--gpu", "B300"), "that are estimates"),
    ],
)
def test_predict_says_what_to_know(capsys: Capture, checkpoint: Path, arguments: tuple[str, ...], note: str) -> None:
    out = _ok(capsys, "predict", *TINY, *arguments, "--checkpoint", str(checkpoint))
    assert any(line.startswith("note:") and note in line for line in out.splitlines()), out


def test_products_of_another_dtype_need_their_families(capsys: Capture, checkpoint: Path) -> None:
    assert run(["predict", *TINY, "--gpu", "T4", "--dtype", "fp16", "--checkpoint", str(checkpoint)]) == 2
    assert "such as tensorcore" in capsys.readouterr().err


def test_predict_uses_the_measured_effect_of_a_gpu(
    capsys: Capture, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    effect = {name: level_effect(name, 0.5) for name in NETWORKS}
    own = make_checkpoint(tmp_path / "own", device_effects={"Tesla T4": effect})
    (tmp_path / "file.yaml").write_text("base: T4\n")

    def total_s(gpu: str) -> float:
        size = ("--batch-size", "256", "--sequence-length", "512")  # kernels longer than their launches
        out = _ok(capsys, "predict", "bert-tiny", *size, "--gpu", gpu, "--checkpoint", str(own), "--json")
        return float(json.loads(out)["total_s"])

    graph = nj.graph_from_config("bert-tiny", 256, 512)
    for gpu, device in (("T4", "Tesla T4"), (str(tmp_path / "file.yaml"), None)):
        expected = nj.predict(nj.load_predictor(own, device), nj.load_gpu("T4"), graph).total_s
        assert total_s(gpu) == pytest.approx(expected)
    assert total_s("T4") > 1.1 * total_s(str(tmp_path / "file.yaml"))


def test_predict_says_for_which_kernels_a_gpu_was_measured(
    capsys: Capture, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """All of a model's, all but some, or none of them: then the GPU was not in training, for this model."""
    measured = {
        "all": (NETWORKS, "with the effect {} measured on this GPU; other GPUs are forecast from figures alone"),
        "some": (("linear", "bmm"), "measured on this GPU, but for elementwise, norm, softmax; other GPUs"),
        "none": (("conv",), "this GPU was not in training: {} forecasts Tesla T4 from its figures alone"),
    }
    for name, (families, words) in measured.items():
        own = make_checkpoint(
            tmp_path / name,
            device_effects={"Tesla T4": {family: level_effect(family, 0.1) for family in families}},
            trained_on={"devices": ["Tesla T4"]},
            held_out=[],
        )
        out = _ok(capsys, "predict", *TINY, "--gpu", "T4", "--checkpoint", str(own), "--json")
        notes = " ".join(json.loads(out)["notes"])
        assert words.format(own) in notes
        assert ("not in training" in notes) == (name == "none")
        assert ("with the effect" in notes) == (name != "none")


def test_lists(capsys: Capture) -> None:
    gpus = json.loads(_ok(capsys, "gpus", "--json"))["gpus"]
    assert [row["name"] for row in gpus] == nj.list_gpus()
    assert all(row["figures"]["num_sms"] > 0 for row in gpus)
    models = json.loads(_ok(capsys, "models", "--json"))["models"]
    assert {row["name"]: row["longest_sequence"] for row in models}["gpt2-large"] == 1024
    assert {row["name"]: row["longest_sequence"] for row in models}["switch-base-8"] is None
    shipped = json.loads(_ok(capsys, "checkpoints", "--json"))["checkpoints"]
    assert [row["name"] for row in shipped] == nj.list_checkpoints()
    for command, names in (
        ("gpus", nj.list_gpus()),
        ("models", nj.list_models()),
        ("checkpoints", nj.list_checkpoints()),
    ):
        out = _ok(capsys, command)
        assert all(name in out for name in names)
        assert not any(line.endswith(" ") for line in out.splitlines())


def test_import_neusight(capsys: Capture, tmp_path: Path) -> None:
    source, output = tmp_path / "checkout", tmp_path / "out"
    source.mkdir()
    rows = synthetic_rows("linear", "Tesla T4", 8)
    rows["latency"] = rows.pop("latency_s") * 1e3
    rows.to_csv(source / "linear.csv", index=False)
    assert run(["import", "neusight", str(source), "--output", str(output)]) == 0
    assert "8 rows from 1 files" in capsys.readouterr().out
    assert read_measurements(output).frame.shape[0] == 8


def test_help_and_version_are_quick(capsys: Capture) -> None:
    assert _ok(capsys, "--version").strip() == f"neusight-jax {nj.__version__}"
    assert "predict" in _ok(capsys, "--help")
    code = "import sys; from neusight_jax.cli import run; run(['--help']); print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not {"jax", "pandas", "numpy", "pydantic", "yaml", "rich"} & set(done.stdout.split("LOADED")[1].split())


def test_predict_loads_no_more_than_it_needs(checkpoint: Path) -> None:
    arguments = ["predict", *TINY, "--gpu", "T4", "--checkpoint", str(checkpoint)]
    code = (
        f"import sys; from neusight_jax.cli import run; code = run({arguments!r}); print('LOADED', code, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split("LOADED")[1].split()
    assert loaded[0] == "0", done.stderr
    assert not {"pandas", "optax", "plotly", "jinja2", "pyarrow"} & set(loaded)
    assert done.stderr == ""


def test_several_values_after_one_option() -> None:
    given = [
        "train",
        "--measurements",
        "a",
        "b",
        "--recipe",
        "r",
        "--hold-out=T4",
        "--hold-out",
        "V100",
        "P4",
        "--seed",
        "1",
    ]
    want = "train --measurements a --measurements b --recipe r --hold-out=T4 --hold-out V100 --hold-out P4 --seed 1"
    assert _spread(given) == want.split()


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "neusight_jax", "gpus", "--json"]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_second_run_uses_kept_programs_quietly(checkpoint: Path, tmp_path: Path) -> None:
    unset = "TF_CPP_MIN_LOG_LEVEL"  # importing JAX, as the tests do, sets it
    environment = {name: value for name, value in ENVIRONMENT.items() if name != unset}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "neusight_jax", "predict", *TINY, "--gpu", "T4", "--checkpoint", str(checkpoint)]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert runs[1].stderr == ""
    assert any(path.is_file() for path in (tmp_path / "neusight_jax").rglob("*"))
