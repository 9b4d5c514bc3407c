"""One Ctrl-C ends a command at once: one line on stderr, exit code 130, nothing half-written.

Python runs a signal's handler in the main thread, between two bytecodes: not while XLA compiles, which takes seconds.
So a thread of this module hears of the signal, through the descriptor that the C handler writes to; it removes what is
half-written and ends the process. The handler only holds the main thread still. Nothing is unwound: an exception in the
middle of a module's import, or of a compilation, crashes the interpreter, and so does its shutdown. Only the program
`neusight-jax` listens; importing the package changes nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    _WORDS[signal.SIGHUP] = "hung up"
_STILL_S = 0.05
"""By then the main thread is held still, unless it is in native code."""
_CACHE_S = 2.0
"""JAX does not write its kept programs atomically: those as young as this may be half-written."""

_kept: Callable[[], str] | None = None


def listen() -> None:
    """End this process at once when it is interrupted, terminated or hung up; in the main thread only.

    A script's background commands start with Ctrl-C ignored; this one listens all the same, so that the script and what
    it started end together. A hang-up that is ignored (`nohup`) stays so.
    """
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        return
    heard, written = os.pipe()
    os.set_blocking(written, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WORDS)  # a signal from now on waits for all of this
    threading.Thread(target=_watch, args=(heard,), name="interrupts", daemon=True).start()
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    for number in _WORDS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _hold)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WORDS)


@contextmanager
def kept_as(words: Callable[[], str]) -> Iterator[None]:
    """While the block runs, what an interruption keeps: `words()` is said in place of "nothing written", unless ""."""
    global _kept
    _kept = words
    try:
        yield
    except KeyboardInterrupt:
        raise  # the words are still to be said
    except BaseException:
        _kept = None
        raise
    _kept = None


def line(number: int = signal.SIGINT) -> str:
    """The line of a command that this signal ended; removes what is half-written."""
    global _kept
    abandon = getattr(sys.modules.get("neusight_jax.files"), "abandon", list)  # not loaded: nothing was written
    written: list[object] = abandon()
    words, _kept = _kept() if _kept is not None else "", None
    if not words:
        words = f"written before: {', '.join(map(str, written))}" if written else "nothing written"
    return f"{_WORDS[signal.Signals(number)]}; {words}"


def finish() -> None:
    """Listen no more: the command has ended and its output is out."""
    for number in _WORDS:
        signal.signal(number, signal.SIG_IGN)


def _hold(number: int, frame: Any) -> None:
    time.sleep(60.0)  # `_watch` ends the process meanwhile


def _watch(heard: int) -> NoReturn:
    number = 0
    while number not in _WORDS:  # other signals that have a handler are heard as well
        number = os.read(heard, 1)[0]
    try:
        time.sleep(_STILL_S)
        message = line(number)
        clear = "\n\x1b[?25h" if os.isatty(2) else ""  # a progress bar hides the cursor
        if select.select([], [2], [], 0.5)[1]:  # a reader that waits does not keep the command
            os.write(2, f"{clear}{message}\n".encode(errors="replace"))
        _end_children()
        _drop_young_programs()
    finally:
        os._exit(128 + number)


def _forget() -> None:
    """A forked child answers signals as programs do: it shares the descriptor with this process."""
    signal.set_wakeup_fd(-1)
    for number in _WORDS:
        if signal.getsignal(number) is _hold:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _end_children() -> None:
    """Kill the processes this one has started, and theirs (Linux; elsewhere the terminal interrupts them too)."""
    todo, descendants = [os.getpid()], []
    while todo:
        try:
            with open(f"/proc/{todo[0]}/task/{todo.pop(0)}/children", "rb") as listing:
                children = [int(number) for number in listing.read().split()]
        except OSError:
            continue
        todo += children
        descendants += children
    for number in descendants:
        try:
            os.kill(number, signal.SIGKILL)
        except OSError:
            continue


def _drop_young_programs() -> None:
    """Remove the compiled programs that JAX may have been writing: it keeps a broken one, and warns of it each time."""
    config = getattr(sys.modules.get("jax"), "config", None)
    folder = getattr(config, "jax_compilation_cache_dir", None)
    if not folder or "://" in str(folder):
        return
    since = time.time() - _CACHE_S
    try:
        for entry in os.scandir(folder):
            if entry.name.endswith("-cache") and entry.stat().st_mtime > since:
                os.unlink(entry.path)
    except OSError:
        return
