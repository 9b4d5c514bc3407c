"""The command line: one file per command, wired together in `app`."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not of `typing`: see `main`
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "run"]


def run(arguments: Sequence[str], *, announce: bool = False) -> int:
    """Run a command line and return its exit code; see `app.run`."""
    from neusight_jax.cli.app import run as run_app

    return run_app(arguments, announce=announce)


def main() -> None:
    """The `neusight-jax` program. An interruption waits from here on until `interrupts` listens, before all imports."""
    if hasattr(_signal := __import__("_signal"), "pthread_sigmask"):  # `signal` itself takes a third of the start
        _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT, _signal.SIGTERM})
    from neusight_jax.cli import interrupts

    interrupts.listen()
    code = run(sys.argv[1:], announce=True)
    interrupts.finish()
    sys.exit(code)
