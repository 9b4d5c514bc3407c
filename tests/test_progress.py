"""Progress of long work: on a terminal what is done and for how long, elsewhere nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from neusight_jax.cli import console as cli_console
from neusight_jax.cli import run
from neusight_jax.progress import MOST_TIMES, follow, past_seconds, timed, working


def _console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_sees_what_is_done_and_an_estimate() -> None:
    console = _console(True)
    with working("differentiating", console, usual_s=40.0):
        pass
    assert "differentiating" in _shown(console)
    assert "0:00:00" in _shown(console)
    assert "of about 40 s, as before" in _shown(console)
    console = _console(True)
    assert list(follow([1, 2, 3], "layouts", console)) == [1, 2, 3]
    assert "3/3" in _shown(console)
    assert "left" in _shown(console)
    console = _console(True)
    with working("kernels", console, 4, 2) as advance:
        advance(what="linear")
    assert "linear" in _shown(console)
    assert "3/4" in _shown(console)


def test_elsewhere_nothing_is_shown() -> None:
    console = _console(False)
    with working("differentiating", console, usual_s=40.0) as advance:
        advance(what="linear")
    assert list(follow([1, 2], "layouts", console)) == [1, 2]
    assert list(follow([1, 2], "layouts", None)) == [1, 2]
    assert _shown(console) == ""


def test_times_of_past_runs(tmp_path: Path) -> None:
    file = tmp_path / "below" / "seconds.json"
    assert past_seconds(file, "neusight-jax serve a") is None
    for line in ("serve a", "serve b", "sweep c"):
        with timed(file, f"neusight-jax {line}"):
            pass
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"neusight-jax serve a": 7.0, "neusight-jax serve b": 9.0})
    )
    assert past_seconds(file, "neusight-jax serve a --users 2") == 9.0  # the last of its command
    assert past_seconds(file, "neusight-jax serve a") == 7.0
    assert past_seconds(file, "neusight-jax design a") is None
    with pytest.raises(KeyError), timed(file, "neusight-jax design a"):
        raise KeyError
    assert past_seconds(file, "neusight-jax design a") is None  # a failure tells nothing
    for number in range(MOST_TIMES):
        with timed(file, f"neusight-jax compare {number}"):
            pass
    assert len(json.loads(file.read_text())) == MOST_TIMES
    file.write_text("{damaged")
    assert past_seconds(file, "neusight-jax serve a") is None


def test_commands_show_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = _console(True)
    monkeypatch.setattr(cli_console, "progress_console", lambda: console)
    command = ["compare", "bert-tiny", "--sequence-length", "16", "--gpu", "T4", "P4", "--checkpoint", str(checkpoint)]
    assert run(command) == 0
    assert "comparing" in _shown(console)
    assert "comparing" not in "".join(capsys.readouterr())
