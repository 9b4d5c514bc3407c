"""The README: its commands and its Python run, and what it shows is what they print."""

import re
import shlex
from pathlib import Path

import pytest

import neusight_jax as nj
from neusight_jax.cli import run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"((?:<!-- \w+ -->\n)?)```(\w+)\n(.*?)```", re.DOTALL)
BLOCKS = [(mark.strip(" <>!-\n"), language, text) for mark, language, text in BLOCK.findall(README)]
CONSOLES = [text for mark, language, text in BLOCKS if language == "console" and mark == "run"]

needs_weights = pytest.mark.skipif("fp32" not in nj.list_checkpoints(), reason="no checkpoint fp32 here")


def _marked(mark: str) -> list[str]:
    return [line[2:] for found, _, text in BLOCKS if found == mark for line in text.splitlines() if line[:2] == "$ "]


@needs_weights
def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [text for _, language, text in BLOCKS if language == "python"]
    assert blocks
    names = {"__name__": "readme"}  # later blocks build on earlier ones
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert "1,000 GPUs:" in capsys.readouterr().out
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")  # the same workload, compiled by now
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "quickstart.md", "exec"), {"__name__": "quickstart"})
    assert "memory bandwidth" in capsys.readouterr().out


@needs_weights
@pytest.mark.parametrize("console", CONSOLES)
def test_commands_print_what_is_shown(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *shown = console.splitlines()
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == ".venv/bin/neusight-jax"
    assert run(arguments) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in shown:
        assert line == "..." or " ".join(line.split()) in printed


def test_ci_finds_the_test_commands() -> None:
    commands = _marked("test")
    assert len(commands) == 2
    assert commands[-1] == ".venv/bin/pytest"


def test_every_command_runs_in_ci() -> None:
    """A block of commands has a mark that `.ci/run` knows."""
    runner = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    marks = [mark for mark, language, _ in BLOCKS if language == "console"]
    assert all(mark and f"commands {mark}" in runner for mark in marks), marks


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130
    assert f"Models: {len(nj.list_models())} names" in README
    assert f"GPUs: {len(nj.list_gpus())} names" in README
