"""The pages: their tables are those of the scores, they are short, links and commands exist, Python runs."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import neusight_jax as nj
from neusight_jax.cli import run

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "docs" / "tools"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
TABLED = [page for page in PAGES if "<!-- table " in page.read_text(encoding="utf-8")]
SHORT_EXAMPLES = ("renting.md", "runs.md")
"""Pages whose Python runs as it stands; others have tests of their own."""

needs_weights = pytest.mark.skipif("fp32" not in nj.list_checkpoints(), reason="no checkpoint fp32 here")


@functools.cache
def tool(name: str) -> ModuleType:
    """A script of `docs/tools`."""
    sys.path.insert(0, str(TOOLS))
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_weights
@pytest.mark.parametrize("page", TABLED, ids=lambda page: page.name)
def test_tables_are_those_of_the_scores(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tool("tables").filled(text) == text, "run `python docs/tools/tables.py`"


def test_a_changed_number_is_seen() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    changed = re.sub(r"(\| linear \| )(\d+)\.", r"\g<1>9\g<2>.", text, count=1)
    assert changed != text
    assert tool("tables").filled(changed) == text


def test_the_leaderboard_is_that_of_its_csv() -> None:
    import pandas as pd

    from neusight_jax.training.evaluation.leaderboard import ENTER, HOW, Leaderboard

    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    board = Leaderboard(pd.read_csv(ROOT / "docs" / "leaderboard.csv"), ())
    rows = [line for line in board.to_markdown("leaderboard.csv").splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert [row for row in rows if row not in page] == []
    assert ENTER in page
    listed = set(board.scores["system"])
    assert [name for name in HOW if (f"- `{name}`: {HOW[name]}." in page) != (name in listed)] == []


def test_scores_of_ours_on_the_leaderboard_are_of_the_shipped_weights() -> None:
    """A row of weights that nobody can get is worse than none: the page says whose they are."""
    import pandas as pd

    import neusight_jax as nj

    page = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    systems = set(pd.read_csv(ROOT / "docs" / "leaderboard.csv")["system"])
    assert "mixture" not in systems, "fits of the form are of no shipped weights; accuracy.md has the cards' folds"
    for name in systems & set(nj.list_checkpoints()):
        assert f"`{name}` has the weights `{nj.load_card(name)['sha256'][:12]}`" in page


def test_pages_are_short_and_plain() -> None:
    check = tool("check")
    for name, (words, sentence) in check.measured().items():
        assert words <= check.MOST_WORDS, name
        assert sentence <= check.MEDIAN_SENTENCE, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert tool("check").dead_links(page) == []


def test_spelling() -> None:
    pytest.importorskip("codespell_lib", reason="codespell is not installed; it comes with '.[dev]'")
    assert tool("check").misspelt() == []


@functools.cache
def known_options(command: str) -> str | None:
    """The help of a command, None where there is no such command."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = run([*command.split(), "--help"])
    return out.getvalue() if code == 0 else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    consoles = [block.replace("\\\n", " ") for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)]
    lines = [line for block in consoles for line in block.splitlines() if line.startswith("$ ")]
    lines += [
        each.replace("\n", " ") for each in re.findall(r"`((?:neusight-jax|python3 -m neusight_jax) [^`]+)`", text)
    ]
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        start = next((at for at, word in enumerate(words) if word.endswith(("neusight-jax", "neusight_jax"))), None)
        if start is None or len(words) == start + 1 or words[start + 1].startswith("-"):
            continue
        words = words[start + 1 :]
        command = " ".join(words[: 2 if words[0] == "import" and len(words) > 1 else 1])
        known = known_options(command)
        assert known is not None, line
        for option in (word.split("=")[0] for word in words if word.startswith("--")):
            assert option in known, line


@pytest.mark.parametrize("page", [page for page in PAGES if "docs/prices.yaml" in page.read_text("utf-8")], ids=str)
def test_prices_are_those_of_the_example(page: Path) -> None:
    """Every GPU of a command with the example's prices has one, and what a page shows of them is in the file."""
    file, text = ROOT / "docs" / "prices.yaml", page.read_text(encoding="utf-8")
    prices = nj.read_prices(file)
    commands = re.findall(r"^\$ (.*docs/prices\.yaml.*)$", text.replace("\\\n", " "), re.MULTILINE)
    assert commands
    for command in commands:
        named = re.findall(r"--gpu ((?:[A-Z0-9]+ )+)", command + " ")
        assert named
        assert all(prices.of(gpu) is not None for gpu in named[0].split()), command
    for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
        shown = [line for line in block.splitlines() if re.fullmatch(r"[A-Z0-9]+: [0-9.]+", line)]
        assert set(shown) <= set(file.read_text(encoding="utf-8").splitlines())


@needs_weights
@pytest.mark.parametrize("name", SHORT_EXAMPLES)
def test_python_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


@pytest.mark.skipif("tensorcore" not in nj.list_checkpoints(), reason="no checkpoint tensorcore here")
def test_what_commands_of_runs_print() -> None:
    """The run reported by others is forecast as the page says, and its row of the benchmark's table with it."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    number = re.compile(r"\d[\d,]*\.?\d*")
    made = tool("tables").printed(page)
    assert number.sub("#", made) == number.sub("#", page), "run docs/tools/tables.py and benchmarks.model_cards"
    numbers = [[float(text.replace(",", "")) for text in number.findall(text)] for text in (made, page)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-3)
    hours = re.findall(r"([\d,]+) GPU-hours", page)
    assert f"| llama-2-7b | 1, 1, 1024, 1, 1, 1 | {hours[0]} | 184,320 |" in page


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", text, re.MULTILINE)
    assert released[0] == nj.__version__
    heads = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert heads <= {"Added", "Changed", "Fixed"}


def test_metadata_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]
    assert "Environment :: GPU :: NVIDIA CUDA" in project["classifiers"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= set(project["classifiers"])
    assert all((ROOT / name).is_file() for name in project["license-files"])
    assert "include CHANGELOG.md" in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
