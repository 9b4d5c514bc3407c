"""docs/design.md runs: its Python with a tiny model and few steps, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import neusight_jax as nj
from neusight_jax.cli import run

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FULL = 'MODEL, BATCH, SEQUENCE, SETTINGS, SAMPLES = "gpt2-large", 4, 1024, Settings(), 20_000'
TINY = 'MODEL, BATCH, SEQUENCE, SETTINGS, SAMPLES = "bert-tiny", 1, 16, Settings(2, 2, rounds=1, candidates=4), 50'


@pytest.mark.skipif("fp32" not in nj.list_checkpoints(), reason="no checkpoint fp32 here")
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert code.count(FULL) == 1
    exec(compile(code.replace(FULL, TINY), "docs/design.md", "exec"), {"__name__": "tutorial"})
    out = capsys.readouterr().out
    for part in ("elasticities with whole waves", "waves relaxed by 1", "50 forecasts in", "1 % more buys"):
        assert part in out


def test_its_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    consoles = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for text in consoles for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(neusight-jax [^`]*)`", PAGE)
    commands = [shlex.split(line.removeprefix("$ "))[1:] for line in lines]
    assert {words[0] for words in commands} == {"sensitivity", "sweep", "design", "serve"}
    for words in commands:
        assert run([words[0], "--help"]) == 0
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, words


def test_files_it_names_exist() -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.py)", PAGE):
        assert (ROOT / name).exists() or (ROOT / "neusight_jax" / name).exists(), name
