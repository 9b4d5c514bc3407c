"""What a run of the command line sets up before JAX loads. Importing the package sets nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path


def prepare_jax(*, any_platform: bool = False) -> None:
    """Choose JAX's platform and keep its compiled programs between runs; what the user has set is left alone.

    Forecasts are small, so they run on the CPU. Programs are kept in `$XDG_CACHE_HOME/neusight_jax`, by default
    `~/.cache/neusight_jax`; `NEUSIGHT_JAX_CACHE=0` turns that off, and a folder that cannot be made is no error.

    Args:
      any_platform: leave the platform to JAX, which takes a GPU if it finds one.
    """
    if "jax" in sys.modules:
        return  # JAX read its settings already
    if not any_platform:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.get("NEUSIGHT_JAX_CACHE") == "0" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = shelf / "neusight_jax" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return
    if os.access(folder, os.W_OK):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        # XLA logs an error for every kept program, because its own tuning hints are no features of the processor.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _processor() -> str:
    """A short name for this kind of processor: programs compiled for another may not run here."""
    features = platform.machine() + platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256(features.encode()).hexdigest()[:12]
