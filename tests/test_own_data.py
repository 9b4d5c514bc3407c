"""One's own CSV of a new GPU, from the first try to a score and a forecast: the example of docs/retraining.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from refusals import Fails

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.datasets import schema

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "retraining.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(
    r"^\$ (.*)$", PAGE.partition("<!-- run in their folder -->")[2].partition("```\n")[0], re.MULTILINE
)
NAME = "My GPU X1"

needs_weights = pytest.mark.skipif("fp32" not in nj.list_checkpoints(), reason="no checkpoint fp32 here")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ten rows of the page, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(FILES["mine.csv"])
    return Path("mine.csv")


@needs_weights
def test_the_example_runs(mine: Path, capsys: Capture) -> None:
    Path("gpu.json").write_text(FILES["gpu.json"])
    printed = []
    for command in COMMANDS:
        assert run(shlex.split(command)[1:]) == 0, capsys.readouterr().err
        printed.append(capsys.readouterr().out)
    checked, scored, calibrated, forecast = printed
    assert "10 good rows, 0 bad" in checked
    assert re.search(rf"{NAME} +linear +linear +fp32 +10 +50 us +7.1 ms", checked)
    assert "missing: a second GPU" in checked
    assert re.search(rf"fp32 +{NAME} +linear +10 ", scored)  # no fit has seen this GPU: a score held out
    assert "linear: 10 kernels" in calibrated
    assert f"on {NAME}: " in forecast
    assert "calibrated with 10 kernels measured on this GPU (linear)" in forecast


def test_an_unknown_gpu_says_which_file_is_missing(mine: Path, fails: Fails) -> None:
    for command in ("evaluate", "train --recipe tiny --output w"):
        line = fails(*command.split(), "--measurements", "mine.csv")
        assert f"unknown GPU '{NAME}'" in line
        assert "(`neusight-jax check --template gpu` prints one)" in line
        assert "as gpu.json beside the measurements or as --gpu-file FILE" in line
    Path("x2.json").write_text(json.dumps({"name": "My GPU X2", "base": "T4"}))
    line = fails("evaluate", "--measurements", "mine.csv", "--gpu-file", "x2.json")
    assert "described here: My GPU X2" in line
    line = fails("calibrate", "--measurements", "mine.csv", "--gpu", "x2.json", "--output", "w")
    assert f"no measurements of device 'My GPU X2'; measured here: {NAME}" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("latency_s", "latency_ms"),
            "column 'latency_s' is missing; it has device, op, m, n, k, latency_ms; expected",
        ),
        (("linear", "lineer"), "unknown op 'lineer'; nearest: linear"),
        ((",64,", ",,"), "m of linear is nan, expected a whole number of at least 1"),
        (("0.00710", "0.00000710"), "latency_s is 7.1e-06 on My GPU X1, expected at least its speed of light"),
    ],
)
def test_faults_are_listed_with_what_was_expected(
    mine: Path, change: tuple[str, str], message: str, capsys: Capture
) -> None:
    Path("gpu.json").write_text(FILES["gpu.json"])
    mine.write_text(FILES["mine.csv"].replace(*change))
    assert run(["check", "mine.csv"]) == 2
    assert message in " ".join("".join(capsys.readouterr()).split())


def test_milliseconds_are_noticed(mine: Path, capsys: Capture) -> None:
    Path("gpu.json").write_text(FILES["gpu.json"])
    mine.write_text(re.sub(r"(0\.\d+)$", lambda text: str(1e3 * float(text[1])), FILES["mine.csv"], flags=re.MULTILINE))
    assert run(["check", "mine.csv", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "neusight_jax.check/1"
    assert any("is latency_s in seconds? milliseconds are to be divided by 1,000" in note for note in content["notes"])


@pytest.mark.parametrize("op", ["linear", "conv", "decode", "experts", "all_reduce", "ln"])
def test_a_template_is_accepted(op: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(["check", "--template", op]) == 0
    file = tmp_path / "template.csv"
    file.write_text(capsys.readouterr().out)
    assert run(["check", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["good_rows"], content["bad_rows"], content["kernels"][0]["op"]) == (2, 0, schema.family_op(op)[1])
    assert not any("is latency_s in seconds?" in note for note in content["notes"])


def test_the_template_of_a_gpu_is_one(tmp_path: Path, capsys: Capture) -> None:
    assert run(["check", "--template", "gpu"]) == 0
    file = tmp_path / "gpu.json"
    file.write_text(capsys.readouterr().out)
    assert float(nj.load_gpu(file).mem_bytes_per_s) == pytest.approx(3.35e12)


def test_check_asks_for_a_file(fails: Fails) -> None:
    assert "give a file of measurements, or --template linear" in fails("check")
    assert "unknown op 'lineer'; nearest: linear" in fails("check", "--template", "lineer")
