"""What a run of the command line sets up before JAX is used. Importing the package sets nothing."""

from __future__ import annotations

import os
import sys

import typer


def prepare_jax(*, any_platform: bool = False, announce: bool = False) -> None:
    """Choose JAX's platform, keep its compiled programs between runs, and say on stderr when compiling takes long.

    Forecasts are small, so they run on the CPU, whatever else there is; what the user has set is left alone.

    Args:
      any_platform: leave the platform to JAX, which takes a GPU if it finds one.
      announce: whether to say it.
    """
    if "jax" not in sys.modules and not any_platform:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from neusight_jax.programs import announce_compiling, keep_traces, use_compile_cache

    use_compile_cache()
    keep_traces()
    if announce:
        announce_compiling(lambda: typer.echo("compiling for this model, once", err=True))
