"""docs/codesign.md runs: its Python with a tiny model and few steps, its commands have the options they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.designs.search import Settings
from neusight_jax.model.predictor import RooflinePredictor

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "codesign.md").read_text(encoding="utf-8")
FULL = 'MODEL, SETTINGS = "llama-3.1-8b", Settings()'


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the roofline, in bounds around the tiny model."""
    monkeypatch.setattr(nj, "load_predictor", lambda _: RooflinePredictor())
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert code.count(FULL) == 1
    code = code.replace(FULL, "MODEL, SETTINGS = TINY, Settings(1, 2, rounds=1, candidates=4)")
    for name, ends in (("layers", "(2, 8)"), ("hidden", "(512, 2048)"), ("d_ff", "(1024, 8192)")):
        code = re.sub(rf'"{name}": \(\d+, \d+\)', f'"{name}": {ends}', code)
    exec(compile(code, "docs/codesign.md", "exec"), {"__name__": "page", "TINY": TINY, "Settings": Settings})
    out = capsys.readouterr().out
    for part in ("1 % more changes the objective by", "loss by Besiroglu", "best loss at 10 ms a token", "head_size"):
        assert part in out


def test_its_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line for text in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in [text.replace("\\\n", " ")]
    ]
    assert run(["codesign", "--help"]) == 0
    known = capsys.readouterr().out
    for line in lines:
        words = shlex.split(line.removeprefix("$ "))[1:]
        assert words[0] == "codesign"
        for option in (word for word in words if word.startswith("--")):
            assert option in known, words
