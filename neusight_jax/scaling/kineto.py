"""Chrome traces of the PyTorch profiler (Kineto), `.json` or `.json.gz`, read as a stream.

GPU kernels, copies and collectives are events of their own categories; the operator that launched one is found by its
`External id`, and with `record_shapes=True` says the shapes. A trace without GPU events is read by its innermost
operators' own time, so that it can be looked at, and says so. Times in the file are microseconds.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.scaling.names import dtype_of, kind_of
from neusight_jax.scaling.operators import dtype_from_types, operator_kernels
from neusight_jax.scaling.trace import Launch, Measured, Trace, busy_seconds
from neusight_jax.units import US

GPU_CATEGORIES: tuple[str, ...] = ("kernel", "gpu_memcpy", "gpu_memset")
OPERATOR_CATEGORIES: tuple[str, ...] = ("cpu_op", "operator")
NO_OPERATOR = -1


class _Interned:
    """Values numbered in order of first sight, so that millions of alike events cost a number each."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    @property
    def values(self) -> list[Any]:
        return list(self.numbers)


class _Columns:
    """Events as compact columns."""

    def __init__(self) -> None:
        self.what, self.link, self.lane = array("q"), array("q"), array("q")
        self.start_s, self.seconds = array("d"), array("d")

    def add(self, what: int, link: int, lane: int, start_s: float, seconds: float) -> None:
        self.what.append(what)
        self.link.append(link)
        self.lane.append(lane)
        self.start_s.append(start_s)
        self.seconds.append(seconds)


def read_kineto(path: Path) -> Trace:
    """Read a trace.

    Raises: `InputError` when the file is no JSON, is cut off, or holds no timed operator or kernel.
    """
    kernels, operators = _Columns(), _Columns()
    kernel_names, operator_names, lanes = _Interned(), _Interned(), _Interned()
    lacking = {"duration": 0, "name": 0, "start": 0}
    for event in events(path):
        category = str(event.get("cat", "")).lower()
        on_gpu = category in GPU_CATEGORIES
        if event.get("ph", "X") != "X" or not (on_gpu or category in OPERATOR_CATEGORIES):
            continue
        start, length, name = _number(event.get("ts")), _number(event.get("dur")), event.get("name")
        if length is None or length < 0.0:
            lacking["duration"] += on_gpu
            continue
        if start is None:
            lacking["start"] += on_gpu
            continue
        if not isinstance(name, str) or not name:
            lacking["name"] += on_gpu
            name = "(no name)"
        given = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        link = _link(args)
        if on_gpu:
            lane = lanes((event.get("pid"), args.get("stream", event.get("tid"))))
            kernels.add(kernel_names((name, _launch(args))), link, lane, start * US, length * US)
        else:
            what = operator_names((name, _shapes(args.get("Input Dims")), _types(args)))
            operators.add(what, link, lanes((event.get("pid"), event.get("tid"))), start * US, length * US)
    notes = [
        f"{count} GPU events without a usable {what}, {_TREATED[what]}" for what, count in lacking.items() if count
    ]
    names = operator_names.values
    if len(kernels.what):
        return _from_kernels(path, kernels, kernel_names.values, operators, names, notes)
    if len(operators.what):
        return _from_operators(path, operators, names, notes)
    raise InputError(
        f"{path}: no GPU kernel and no operator with a duration; expected a trace of torch.profiler "
        "(export_chrome_trace), better with record_shapes=True"
    )


_TREATED = {
    "duration": "left out: their time is unknown",
    "start": "left out: they cannot be placed",
    "name": "kept as (no name), scaled as unknown kernels",
}


def events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace one by one, from an object with `traceEvents` or a bare list.

    Raises: `InputError` for a file that is not there, no JSON, cut off, or without events.
    """
    import ijson

    try:
        with _opened(path) as stream:
            prefix = _prefix(path, stream)
            found = False
            for event in ijson.items(stream, prefix, use_float=True):
                found = True
                if isinstance(event, dict):
                    yield event
            if not found:
                raise InputError(f"{path}: holds no events; expected a Chrome trace with a list `traceEvents`")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a trace, .json or .json.gz") from None
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is cut off or damaged ({error}); copy or export it again") from None
    except gzip.BadGzipFile:
        raise InputError(f"{path}: named .gz but not a gzip file; rename it or compress it") from None
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(f"{path}: not whole JSON ({reason}); export the trace again") from None


def _opened(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)  # type: ignore[arg-type]
    return open(path, "rb", buffering=1 << 20)


def _prefix(path: Path, stream: Any) -> str:
    """Where the events are: decided by the first character that is not blank."""
    for byte in stream.peek(4096)[:4096].decode("utf-8", "replace"):
        if byte == "[":
            return "item"
        if byte == "{":
            return "traceEvents.item"
        if not byte.isspace() and byte != "\ufeff":
            break
    raise InputError(f"{path}: not JSON: expected an object or a list of events; export the trace again")


def _number(value: Any) -> float | None:
    """A finite number, or None; old exporters write numbers as text."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _link(args: dict[str, Any]) -> int:
    value = _number(args.get("External id", args.get("external id")))
    return NO_OPERATOR if value is None else int(value)


def _launch(args: dict[str, Any]) -> Launch | None:
    grid, block = args.get("grid"), args.get("block")
    try:
        blocks, threads = (float(np.prod([float(size) for size in sizes])) for sizes in (grid or [0], block or [0]))
    except (TypeError, ValueError):
        return None
    if not (blocks > 0 and threads > 0):
        return None
    registers, shared = _number(args.get("registers per thread")), _number(args.get("shared memory"))
    return Launch(blocks, threads, registers or 0.0, shared or 0.0)


def _shapes(dims: Any) -> tuple[tuple[int, ...], ...]:
    """Operand shapes; an operand that is no list of whole numbers (a scalar, a list of tensors) is ()."""
    if not isinstance(dims, list):
        return ()
    plain = all(isinstance(shape, list) for shape in dims)
    return tuple(
        tuple(int(size) for size in shape) if all(isinstance(size, int | float) for size in shape) else ()
        for shape in (dims if plain else ())
    )


def _types(args: dict[str, Any]) -> tuple[str, ...]:
    types = args.get("Input type")
    return tuple(str(kind) for kind in types) if isinstance(types, list) else ()


def _from_kernels(
    path: Path, kernels: _Columns, names: list[Any], operators: _Columns, operator_names: list[Any], notes: list[str]
) -> Trace:
    what, link = np.frombuffer(kernels.what, np.int64), np.frombuffer(kernels.link, np.int64)
    start_s, seconds = np.frombuffer(kernels.start_s), np.frombuffer(kernels.seconds)
    launched_by = _operators_of(link, operators)
    zero = int((seconds == 0.0).sum())
    if zero:
        notes.append(f"{zero} GPU events of no duration: kept, they add nothing")
    unknown = int((launched_by == NO_OPERATOR).sum())
    if unknown:
        notes.append(f"{unknown} of {len(what)} GPU events name no operator with shapes: scaled by kernel name")
    busy_s, span_s = busy_seconds(start_s, seconds)
    total = float(seconds.sum())
    if total > 1.001 * busy_s:
        notes.append(f"streams overlap: {total:.4g} s of kernels in {busy_s:.4g} s; the overlap is kept as a share")

    def item(pair: tuple[int, int], measured_s: float, count: int) -> Measured:
        name, launch = names[pair[0]]
        operator = operator_names[pair[1]] if pair[1] != NO_OPERATOR else ("", (), ())
        work = operator_kernels(operator[0], operator[1]) if kind_of(name) not in _MOVES else ()
        dtype = dtype_from_types(operator[2]) if work else dtype_of(name)
        return Measured(name, kind_of(name), measured_s, count, work, dtype, launch)

    return Trace(path.name, _grouped(what, launched_by, seconds, item), busy_s, span_s, tuple(notes))


_MOVES = ("collective", "transfer", "copy")


def _from_operators(path: Path, operators: _Columns, names: list[Any], notes: list[str]) -> Trace:
    what = np.frombuffer(operators.what, np.int64)
    seconds = _own_seconds(operators)
    notes.append(
        "no GPU kernel in this trace: the own time of its operators stands in, so `--from` must describe the machine "
        "it was recorded on"
    )
    busy_s, span_s = busy_seconds(np.frombuffer(operators.start_s), np.frombuffer(operators.seconds))

    def item(pair: tuple[int, int], measured_s: float, count: int) -> Measured:
        name, shapes, types = names[pair[0]]
        work = operator_kernels(name, shapes)
        return Measured(name, "host", measured_s, count, work, dtype_from_types(types))

    alone = np.full(len(what), NO_OPERATOR)
    return Trace(path.name, _grouped(what, alone, seconds, item), busy_s, span_s, tuple(notes))


def _operators_of(link: np.ndarray, operators: _Columns) -> np.ndarray:
    """Number of the operator that launched each kernel: the innermost with its id; `NO_OPERATOR` without one."""
    ids, what = np.frombuffer(operators.link, np.int64), np.frombuffer(operators.what, np.int64)
    if not len(ids):
        return np.full(len(link), NO_OPERATOR)
    shortest = np.lexsort((np.frombuffer(operators.seconds), ids))
    known, first = np.unique(ids[shortest], return_index=True)
    at = np.minimum(np.searchsorted(known, link), len(known) - 1)
    found = (known[at] == link) & (link != NO_OPERATOR)
    return np.where(found, what[shortest][first[at]], NO_OPERATOR)


def _own_seconds(operators: _Columns) -> np.ndarray:
    """Duration of every operator less that of the operators directly inside it, per thread."""
    lane, start = np.frombuffer(operators.lane, np.int64), np.frombuffer(operators.start_s)
    seconds = np.frombuffer(operators.seconds)
    own = seconds.copy()
    stack: list[int] = []
    for at in np.lexsort((-seconds, start, lane)):
        while stack and (lane[stack[-1]] != lane[at] or start[stack[-1]] + seconds[stack[-1]] <= start[at]):
            stack.pop()
        if stack:
            own[stack[-1]] -= seconds[at]
        stack.append(int(at))
    return np.maximum(own, 0.0)


def _grouped(
    what: np.ndarray, other: np.ndarray, seconds: np.ndarray, item: Callable[[tuple[int, int], float, int], Measured]
) -> tuple[Measured, ...]:
    pairs, where = np.unique(np.stack([what, other], axis=1), axis=0, return_inverse=True)
    where = where.ravel()
    sums = np.bincount(where, weights=seconds, minlength=len(pairs))
    counts = np.bincount(where, minlength=len(pairs))
    return tuple(item((int(pair[0]), int(pair[1])), float(sums[at]), int(counts[at])) for at, pair in enumerate(pairs))
