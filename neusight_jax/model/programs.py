"""Compiled programs: plainly compiled where they run once, kept between processes, announced where they take long."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.export
import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.files import write_atomically

_Function = TypeVar("_Function", bound=Callable[..., Any])
_config: Any = jax.config  # its settings are made at run time, unknown to type checkers

PLAIN: tuple[dict[str, Any], ...] = (
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0},
)
"""XLA's options for a program that is compiled in a fifth of the time and runs several times slower, the best first: an
XLA that does not know one of them refuses the set."""
ANNOUNCED_S = 1.0
"""Seconds of compiling after which a user is told."""


def one_shot(function: _Function, closes_over: object = None) -> _Function:
    """`jax.jit` of a function that runs once or a few times in a process, on arrays of thousands at most.

    On CPUs it is compiled by `PLAIN`; elsewhere, and where it is traced as a part of another program, as `jax.jit`
    does. Values may differ from those of `jax.jit` by rounding. After `keep_traces` its traces are kept as well.

    Args:
      function: of positional arguments; returns arrays in tuples, lists and dicts.
      closes_over: what it depends on beside its arguments and the package, told apart by `repr`.
    """
    usual = jax.jit(function)

    @functools.cache
    def plain() -> Callable[..., Any]:
        return jax.jit(function, compiler_options=options) if (options := _plain_options()) else usual

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        # JAX takes compiler options of outermost programs only.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return usual(*arguments)
        # The backend is asked for here and not in `keep_traces`: a command may have to settle it before it starts.
        if _traces is None or jax.default_backend() != "cpu" or not _of_this_package(tree):
            return plain()(*arguments)
        name = f"{function.__module__}.{function.__qualname__}"
        values = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
        kinds = tuple((np.shape(value), str(jax.dtypes.canonicalize_dtype(value.dtype))) for value in values)
        program = _kept_program(name, repr(closes_over), tree, kinds, function)
        return program(values) if program is not None else plain()(*arguments)

    return cast(_Function, run)


_traces: Path | None = None
"""Where traces are kept; None = nowhere."""


def keep_traces() -> None:
    """Keep the traces of `one_shot` beside the compiled programs, so that the next process need not trace either.

    For a program's own command line: a trace holds what the package's modules said when it was made, and is found again
    by the files they came from, so what a session has changed in memory would be overlooked.
    """
    global _traces
    folder = _config.jax_compilation_cache_dir
    kept = folder and os.environ.get("NEUSIGHT_JAX_CACHE") != "0"
    _traces = Path(folder) / "traces" if kept else None


@functools.cache
def _kept_program(
    name: str, closes_over: str, tree: Any, kinds: tuple[tuple[tuple[int, ...], str], ...], function: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The function of a list of leaves from its kept trace, made and kept if there is none; None if it cannot be."""
    assert _traces is not None
    key = "\n".join([_source(), jax.__version__, str(_config.jax_enable_x64), name, closes_over, str(tree), str(kinds)])
    path = _traces / f"{hashlib.sha256(key.encode()).hexdigest()}.stablehlo"
    try:
        if not (_is_ours(path.parent) and _is_ours(path)):
            raise PermissionError
        exported = jax.export.deserialize(bytearray(path.read_bytes()))
    except Exception:  # not there, not ours, cut short, or of another version: traced again
        specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]  # type: ignore[no-untyped-call]
        flat = jax.jit(lambda leaves: function(*jax.tree.unflatten(tree, leaves)))
        try:
            exported = jax.export.export(flat)(specs)
            _keep(path, bytes(exported.serialize()))
        except (ImportError, ValueError, TypeError, NotImplementedError, InputError):  # cannot be, or no room
            return None
    return jax.jit(exported.call, compiler_options=_plain_options())


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have written what is at a path: it runs as a program of this user."""
    if not hasattr(os, "getuid"):  # Windows: a user's own folders are closed to others
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _keep(path: Path, content: bytes) -> None:
    def write(place: Path) -> None:
        place.touch(mode=0o600)
        place.write_bytes(content)

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, write, result=False)


@functools.cache
def _source() -> str:
    """Paths, sizes and times that tell one state of the package's files from another."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".yaml"))
    return str([(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files])


@functools.cache
def _of_this_package(tree: Any) -> bool:
    """Whether all records and networks in a tree are the package's own: others may change without `_source` knowing."""
    data = tree.node_data()
    records = () if data is None else (data[0], *map(type, data[1] if isinstance(data[1], tuple) else ()))
    packages = ("builtins", __package__.partition(".")[0], "optax")
    # A function is told apart by its address, which another process may give to another function.
    functions = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    trusted = all(record.__module__.partition(".")[0] in packages and record not in functions for record in records)
    return trusted and all(_of_this_package(child) for child in tree.children())


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
    Returns: the folder in use; None where it is turned off, cannot be written, or others could have written to it (said
      on stderr), which is no error.
    """
    if folder is None:
        if _config.jax_compilation_cache_dir:
            return Path(_config.jax_compilation_cache_dir)
        if os.environ.get("NEUSIGHT_JAX_CACHE") == "0":
            return None
    try:
        shelf = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = Path(folder) if folder is not None else shelf / "neusight_jax" / _processor()
        above = (chosen,) if folder is not None else (chosen.parent, chosen)
        for place in above:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [place for place in above if not _is_ours(place)]
    except (OSError, RuntimeError):
        return None
    if not os.access(chosen, os.W_OK):
        return None
    if others:
        sys.stderr.write(f"{others[0]}: others may write there, so no compiled programs are read from it; chmod go-w\n")
        return None
    _config.update("jax_compilation_cache_dir", str(chosen))
    _config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1" and _config.jax_logging_level == "NOTSET":  # JAX sets 1
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
    spent, kept = 0.0, False
    timer: threading.Timer | None = None
    announced = threading.Event()

    def tell() -> None:
        if not announced.is_set():
            announced.set()
            say()

    def begins(event: str, value: float, **_: Any) -> None:
        nonlocal timer
        if event.endswith("backend_compile_duration") and not announced.is_set() and timer is None:
            timer = threading.Timer(max(ANNOUNCED_S - spent, 0.0), tell)
            timer.daemon = True
            timer.start()

    def hits(event: str, **_: Any) -> None:
        nonlocal kept
        kept = kept or event.endswith("cache_hits")

    def ends(event: str, duration_secs: float, **_: Any) -> None:
        nonlocal spent, timer, kept
        if event.endswith("backend_compile_duration") and timer is not None:
            timer.cancel()
            timer, spent, kept = None, spent + (0.0 if kept else duration_secs), False

    jax.monitoring.register_event_listener(hits)
    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
