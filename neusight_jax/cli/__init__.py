"""The command line: one file per command, wired together in `app`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from neusight_jax.cli import interrupts

__all__ = ["main", "run"]


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; errors are one line on stderr."""
    from neusight_jax.cli.app import run as run_app

    return run_app(arguments)


def main() -> None:
    """The `neusight-jax` program. It listens for Ctrl-C before the commands are loaded."""
    interrupts.listen()
    code = run(sys.argv[1:])
    interrupts.finish()
    sys.exit(code)
