"""The command line: one file per command, wired together in `app`."""

from neusight_jax.cli.app import main, run

__all__ = ["main", "run"]
