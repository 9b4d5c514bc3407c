"""One Ctrl-C ends the program at once, wherever it is, with one line, and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import neusight_jax as nj
from neusight_jax import files

HOME = Path(nj.__file__).resolve().parents[1]
STUCK = """
import ctypes, sys
from pathlib import Path
from neusight_jax.cli import app, interrupts, main
from neusight_jax.files import atomic_folder, write_text_atomically

C = ctypes.CDLL(None)

def stuck(arguments, **options):
    {work}

app.run = stuck
main()
"""
# A lock taken twice waits for ever, in C and without the GIL, as a compilation does: no Python handler runs.
NATIVE = (
    "lock = ctypes.create_string_buffer(256); print('here', flush=True); [C.pthread_mutex_lock(lock) for _ in '12']"
)
IN_PYTHON = "print('here', flush=True)\nwhile True: sum(range(100))"


def _interrupted(work: str, folder: Path, number: int = signal.SIGINT) -> tuple[int, str]:
    """Exit code and stderr of a command that does this work in a folder, interrupted as soon as it says so."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    code = STUCK.format(work=textwrap.indent(work, "    ").lstrip())
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stdout=-1, stderr=-1, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        begin = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert time.monotonic() - begin < 5.0
    return process.returncode, said


@pytest.mark.parametrize("doing", [NATIVE, IN_PYTHON], ids=["native", "python"])
def test_at_once_and_nothing_left(tmp_path: Path, doing: str) -> None:
    work = (
        f"with atomic_folder('out') as folder:\n    (folder / 'half').write_text('x')\n{textwrap.indent(doing, '    ')}"
    )
    assert _interrupted(work, tmp_path) == (130, "interrupted; nothing written\n")
    assert not list(tmp_path.iterdir())


def test_it_says_what_is_there(tmp_path: Path) -> None:
    work = f"write_text_atomically('one.txt', 'x')\n{NATIVE}"
    assert _interrupted(work, tmp_path) == (130, "interrupted; written before: one.txt\n")
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    work = f"with interrupts.kept_as(lambda: 'rows are kept: --resume goes on'):\n    {NATIVE}"
    assert _interrupted(work, tmp_path) == (130, "interrupted; rows are kept: --resume goes on\n")


def test_terminated(tmp_path: Path) -> None:
    assert _interrupted(NATIVE, tmp_path, signal.SIGTERM) == (143, "terminated; nothing written\n")


def test_nothing_is_unwound(tmp_path: Path) -> None:
    """What catches everything does not see it: an exception in a module's import, say, may crash the interpreter."""
    doing = textwrap.indent(IN_PYTHON, "    ")
    work = f"try:\n{doing}\nexcept BaseException:\n    print('seen', file=sys.stderr)"
    assert _interrupted(work, tmp_path) == (130, "interrupted; nothing written\n")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
def test_children_end_too(tmp_path: Path) -> None:
    work = f"import subprocess; Path('child').write_text(str(subprocess.Popen(['sleep', '60']).pid))\n{NATIVE}"
    code, _ = _interrupted(work, tmp_path)
    assert code == 130
    deadline = time.monotonic() + 5.0
    while Path(f"/proc/{(tmp_path / 'child').read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_real_command_while_it_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neusight_jax", "predict", "gpt2-large", "--gpu", "T4"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(HOME)}, stdout=-1, stderr=-1, text=True)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted; nothing written\n")


def test_the_library_installs_nothing() -> None:
    # A run that was started in the background ignores the signal from the start.
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)
    assert all(thread.name != "interrupts" for thread in threading.enumerate())


def test_what_is_being_written_can_be_abandoned(tmp_path: Path) -> None:
    files.forget_written()
    files.write_text_atomically(tmp_path / "whole.txt", "x")
    writing = files.atomic_folder(tmp_path / "out")
    folder = writing.__enter__()
    (folder / "half").write_text("x")
    assert files.abandon() == [tmp_path / "whole.txt"]
    assert not folder.exists()
    with pytest.raises(nj.InputError):
        writing.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.txt"]
    files.forget_written()
    assert files.abandon() == []
