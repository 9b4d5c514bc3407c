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


@needs_weights
@pytest.mark.parametrize("console", CONSOLES)
def test_commands_print_what_is_shown(console: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *shown = console.splitlines()
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "neusight-jax"
    assert run(arguments) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in shown:
        assert line == "..." or " ".join(line.split()) in printed


def test_every_command_exists(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [text.replace("\\\n", " ") for _, _, text in BLOCKS]
    lines = [line for text in whole for line in text.splitlines() if line.startswith("$ neusight-jax ")]
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line)[2:]
        command = words[: 2 if words[0] == "import" else 1]
        assert run([*command, "--help"]) == 0
        known = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in known, line


def test_ci_finds_the_test_commands() -> None:
    commands = _marked("test")
    assert len(commands) == 2
    assert commands[-1] == ".venv/bin/pytest"


def test_files_it_points_to_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page}: {target}"
