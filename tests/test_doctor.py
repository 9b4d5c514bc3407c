"""`neusight-jax doctor`: what there is, exit code 0 when all is well, and one line where it is not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from neusight_jax.cli import doctor as module
from neusight_jax.cli import run

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory to spare, whatever else runs on this one."""
    monkeypatch.setattr(module, "_free_bytes", lambda: 8 << 30)
    monkeypatch.setenv("NEUSIGHT_JAX_CACHE", "0")


@pytest.mark.usefixtures("roomy")
def test_all_is_well(capsys: Capture) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("versions", "devices", "compile cache", "checkpoints", "free memory", "extra report"):
        assert part in text
    assert run(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == "neusight_jax.doctor/1"
    assert all(entry["fault"] is None for entry in content["checks"])
    assert set(content["extras"]) <= set(PROJECT["optional-dependencies"])


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("_free_bytes", lambda: 1 << 30, "1.1 GB of memory are free, expected 2.1; end other programs"),
        ("_version", lambda package: "0.10.2", "jax 0.10.2 computes wrong numbers on CPUs; pip install 'jax!=0.10.2'"),
        ("_version", lambda package: "", "optax, numpy, pandas, pyarrow not installed; pip install . again"),
    ],
)
def test_a_fault_is_a_line(
    name: str, value: object, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(module, name, value)
    assert run(["doctor"]) == 2
    assert line in capsys.readouterr().err
