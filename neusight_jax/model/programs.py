"""Compiled programs: plainly compiled where they run once, kept between processes, announced where they take long."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import re
import stat
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable

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


def one_shot(function: _Function, closes_over: object = None, *, plainly: bool = True) -> _Function:
    """`jax.jit` of a function whose program is kept between processes (`use_compile_cache`): nothing is traced again.

    On CPUs it is compiled by `PLAIN`; elsewhere, and where it is traced as a part of another program, as `jax.jit`
    does. Values may differ from those of `jax.jit` by rounding.

    Args:
      function: of positional arguments; returns arrays in tuples, lists and dicts.
      closes_over: what it depends on beside its arguments and the package, told apart by `repr`.
      plainly: whether it runs once or a few times in a process, on arrays of thousands at most; False = as `jax.jit`
        compiles it.
    """
    usual = jax.jit(function)

    @functools.cache
    def alone() -> Callable[..., Any]:
        options = _plain_options() if plainly else None
        return jax.jit(function, compiler_options=options) if options else usual

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        # JAX takes compiler options of outermost programs only.
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return usual(*arguments)
        if _programs is None or not _on_the_first_cpu(leaves) or not _of_this_package(tree):
            return alone()(*arguments)
        name = f"{function.__module__}.{function.__qualname__}"
        values = [leaf if isinstance(leaf, (jax.Array, np.ndarray)) else np.asarray(leaf) for leaf in leaves]
        wide = _config.jax_enable_x64
        kinds = tuple((value.shape, _dtype_name(value.dtype, wide)) for value in values)
        program = _kept_program(name, repr(closes_over), tree, kinds, plainly, function)
        return program(values) if program is not None else alone()(*arguments)

    return cast(_Function, run)


@functools.cache  # a search asks for hundreds of thousands
def _dtype_name(dtype: np.dtype[Any], wide: bool) -> str:
    """Name of a dtype as a program has it, where `wide` with 64 bits."""
    return str(jax.dtypes.canonicalize_dtype(dtype))


def _on_the_first_cpu(leaves: list[Any]) -> bool:
    """Whether a kept program runs where the arrays lie."""
    first = jax.devices()[0]
    if first.platform != "cpu" or _config.jax_default_device not in (None, first):
        return False
    return all(leaf.devices() == {first} for leaf in leaves if isinstance(leaf, jax.Array))


_programs: Path | None = None
"""Where programs of `one_shot` are kept; None = nowhere."""


@functools.cache
def _kept_program(
    name: str,
    closes_over: str,
    tree: Any,
    kinds: tuple[tuple[tuple[int, ...], str], ...],
    plainly: bool,
    function: Callable[..., Any],
) -> Callable[..., Any] | None:
    """The function of a list of leaves as a kept program, made and kept if there is none; None if it cannot be told
    from another state of the package."""
    assert _programs is not None
    if (modules := _in_memory(function.__module__)) is None:
        return None
    runs_on = (jax.__version__, jaxlib.version.__version__, _processor(), jax.device_count(), _config.jax_enable_x64)
    key = "\n".join([_source(), modules, str(runs_on), name, closes_over, str(plainly), str(tree), str(kinds)])
    path = _programs / f"{hashlib.sha256(key.encode()).hexdigest()}.program"
    try:
        if not (_is_ours(path.parent) and _is_ours(path)):
            raise PermissionError
        content, given, returned = pickle.loads(path.read_bytes())
        kept: Callable[..., Any] = serialize_executable.deserialize_and_load(
            content, given, returned, execution_devices=jax.devices()[:1]
        )
        return kept
    except Exception:  # not there, not ours, cut short, or of another version: compiled again
        specs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]  # type: ignore[no-untyped-call]

        def flat(leaves: list[Any]) -> Any:
            return function(*jax.tree.unflatten(tree, leaves))

        flat.__name__ = function.__name__
        options = _plain_options() if plainly else None
        lowered = jax.jit(flat, compiler_options=options).lower(specs)
        with _compiled_here():
            made = lowered.compile()
        with contextlib.suppress(OSError, ValueError, TypeError, NotImplementedError, pickle.PicklingError):
            _keep(path, pickle.dumps(serialize_executable.serialize(made)))
        return made


@contextlib.contextmanager
def _compiled_here() -> Iterator[None]:
    """JAX's own cache holds nothing of what is compiled meanwhile: what it has read cannot be kept again, for parts of
    such a program are missing, and a second copy is of no use."""
    settings = {
        "jax_persistent_cache_min_compile_time_secs": float("inf"),
        "jax_compilation_cache_include_metadata_in_key": True,  # as of no other program
    }
    before = {name: getattr(_config, name) for name in settings}
    for name, value in settings.items():
        _config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            _config.update(name, value)


def _in_memory(module: str) -> str | None:
    """What the package's modules hold that a module is built of, so that what a session has changed is told apart; None
    where it has put functions of its own there.

    Args:
      module: name of the first of them; a module leads to those that its functions, classes and records come from.
    """
    package = __package__.partition(".")[0]
    # A kept program is wrong once a function or constant it was traced from changed, if only in this session.
    ahead, seen, lines = [module], {package, __name__}, []
    while ahead:
        name = ahead.pop()
        if name in seen or name.partition(".")[0] != package or name not in sys.modules:
            continue
        seen.add(name)
        for attribute, value in vars(sys.modules[name]).items():
            if attribute.startswith("__"):
                continue
            home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str):
                ahead.append(home)
            if (text := _text(value)) is None:
                return None
            lines.append(f"{name}.{attribute}={text}")
    return "\n".join(sorted(lines))


def _text(value: Any) -> str | None:
    """What tells a value of a module from another one; None of a function that is written in no file."""
    while "__wrapped__" in getattr(value, "__dict__", {}):
        value = value.__wrapped__
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return f"{value.__qualname__} {file} {os.stat(file).st_mtime_ns}" if os.path.exists(file) else None
    if isinstance(value, type) and value.__module__.partition(".")[0] == __package__.partition(".")[0]:
        parts = [_text(part) for name, part in vars(value).items() if not name.startswith("__")]
        return None if None in parts else f"{value.__qualname__} {parts}"
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    # The order of a set differs from process to process.
    return str(sorted(re.findall(r"\w+", text))) if isinstance(value, set) or "frozenset(" in text else text


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
    """Keep compiled programs on disk, so that the next process starts in seconds and need not trace `one_shot` either.

    `load_predictor` calls it where JAX has no cache set (`jax_compilation_cache_dir`); call it before for another
    folder. `NEUSIGHT_JAX_CACHE=0` turns the default off. XLA's messages below fatal are silenced with it, unless
    `TF_CPP_MIN_LOG_LEVEL` or `jax_logging_level` is set: XLA logs an error for every kept program of a CPU, because its
    own tuning hints are no features of the processor.

    Args:
      folder: where; default a folder of this kind of processor in `$XDG_CACHE_HOME/neusight_jax` (`~/.cache`).
    Returns: the folder in use; None where it is turned off, cannot be written, or others could have written to it (said
      on stderr), which is no error.
    """
    global _programs
    off = os.environ.get("NEUSIGHT_JAX_CACHE") == "0"
    if folder is None:
        if present := _config.jax_compilation_cache_dir:
            _programs = None if off or "://" in present else Path(present) / "programs"
            return Path(present)
        if off:
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
    _programs = None if off else chosen / "programs"
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
