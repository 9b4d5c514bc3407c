"""Compiled programs: plainly compiled where they run once, kept between processes, announced where they take long."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

_Function = TypeVar("_Function", bound=Callable[..., Any])

PLAIN: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0},
)
"""XLA's options for a program that is compiled in a fifth of the time and runs several times slower, the best first: an
XLA that does not know one of them refuses the set."""
ANNOUNCED_S = 1.0
"""Seconds of compiling after which a user is told."""


def one_shot(function: _Function) -> _Function:
    """`jax.jit` of a function that runs once or a few times in a process, on arrays of thousands at most.

    On CPUs it is compiled by `PLAIN`; elsewhere, and where it is traced as a part of another program, as `jax.jit`
    does. Values may differ from those of `jax.jit` by rounding.
    """
    usual = jax.jit(function)

    @functools.cache
    def plain() -> Callable[..., Any]:
        return jax.jit(function, compiler_options=options) if (options := _plain_options()) else usual

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        # JAX takes compiler options of outermost programs only.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
        return (usual if traced else plain())(*arguments)

    return cast(_Function, run)


@functools.cache
def _plain_options() -> dict[str, Any] | None:
    """The first of `PLAIN` that this XLA knows; None on other processors, or where it knows none."""
    if jax.default_backend() != "cpu":
        return None
    for options in PLAIN:
        try:
            jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
        except jax.errors.JaxRuntimeError:
            continue
        return options
    return None


def use_compile_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs on disk, so that the next process starts in seconds.

    `load_predictor` calls it where JAX has no cache set (`jax_compilation_cache_dir`); call it before for another
    folder. `NEUSIGHT_JAX_CACHE=0` turns the default off. XLA's messages below fatal are silenced with it, unless
    `TF_CPP_MIN_LOG_LEVEL` or `jax_logging_level` is set: XLA logs an error for every kept program of a CPU, because its
    own tuning hints are no features of the processor.

    Args:
      folder: where; default a folder of this kind of processor in `$XDG_CACHE_HOME/neusight_jax` (`~/.cache`).
    Returns: the folder in use; None where it is turned off or cannot be written, which is no error.
    """
    if folder is None:
        if jax.config.jax_compilation_cache_dir:
            return Path(jax.config.jax_compilation_cache_dir)
        if os.environ.get("NEUSIGHT_JAX_CACHE") == "0":
            return None
    try:
        shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = Path(folder) if folder is not None else shelf / "neusight_jax" / _processor()
        chosen.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(chosen, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1" and jax.config.jax_logging_level == "NOTSET":  # JAX sets 1
        from jaxlib import utils

        if hasattr(utils, "absl_set_min_log_level"):
            utils.absl_set_min_log_level(3)
    return chosen


def _processor() -> str:
    """A short name for this kind of processor: programs compiled for another may not run here."""
    features = platform.machine() + platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256(features.encode()).hexdigest()[:12]


def announce_compiling(say: Callable[[], None]) -> None:
    """Call `say` once, from another thread, when this process has compiled for `ANNOUNCED_S` in all."""
    spent = 0.0
    timer: threading.Timer | None = None
    said = threading.Event()

    def tell() -> None:
        if not said.is_set():
            said.set()
            say()

    def begins(event: str, _: float, **__: Any) -> None:
        nonlocal timer
        if event.endswith("backend_compile_duration") and not said.is_set() and timer is None:
            timer = threading.Timer(max(ANNOUNCED_S - spent, 0.0), tell)
            timer.daemon = True
            timer.start()

    def ends(event: str, seconds: float, **_: Any) -> None:
        nonlocal spent, timer
        if event.endswith("backend_compile_duration") and timer is not None:
            timer.cancel()
            timer, spent = None, spent + seconds

    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
