"""Chrome traces of PyTorch's profiler (Kineto) and of JAX's (XProf), read as a stream. Times in them are microseconds.

PyTorch: GPU kernels, copies and collectives are events of their own categories; the operator that launched one is found
by its `External id`, and with `record_shapes=True` says the shapes. A trace without GPU events is read by its innermost
operators' own time, so that it can be looked at, and says so.

JAX: events without categories. A process `/device:GPU:0` has a thread for each stream (`Stream #14(Compute)`), whose
events are kernels and copies, and others such as `XLA Ops` and `XLA Modules` that show the same time again by operator
and program. Kernels say their HLO operator (`hlo_op`) and, where it was recorded, grid and block (`kernel_details`).
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from neusight_jax.errors import InputError
from neusight_jax.graph.kernel import fused_attention
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.trace import (
    LONGEST_S,
    Account,
    Events,
    Launch,
    Measured,
    Trace,
    busy_seconds,
    encodable,
    encoding_of,
    grouped,
    hashable,
    identifier,
    kernel_of_name,
    launch_of,
    number,
    opened,
    trace_of_kernels,
)
from neusight_jax.tables import table
from neusight_jax.units import US

# Chrome traces read as a stream: one event at a time, whatever the size of the file.
#
# The values are decoded by the standard library, so any JSON is taken that Python takes: whole numbers of any size, NaN
# and Infinity, lone surrogates; and `nan` and `inf` as C++ prints them.

CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n\ufeff]*")
_PRINTED_BY_C = re.compile(r"-?(?:nan|inf(?:inity)?)(?:\([^)]*\))?(?![\w.])")
_DECODE = json.JSONDecoder(strict=False).raw_decode
_DECODE_LONG = json.JSONDecoder(strict=False, parse_int=float).raw_decode
"""For whole numbers of more digits than Python turns into an `int` (4300)."""


class _NotJson(Exception):
    """Reason why a text is no JSON, in a few words."""


class _Values:
    """JSON values of a stream, one after another; holds what is not yet decoded of the text."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.text, self.at, self.ended = stream, "", 0, False
        self.damaged = False
        first = stream.read(CHUNK)
        self.decoder = codecs.getincrementaldecoder(encoding_of(first[:4]))("replace")
        self._take(first)

    def _take(self, chunk: bytes) -> None:
        self.ended = not chunk
        text = self.decoder.decode(chunk, final=self.ended)
        self.damaged |= "\ufffd" in text and "\ufffd".encode() not in chunk
        self.text, self.at = self.text[self.at :] + text, 0

    def more(self) -> bool:
        """Read on; False at the end of the file. Doubles what is held, so that long values cost no square."""
        if not self.ended:
            self._take(self.stream.read(max(CHUNK, len(self.text) - self.at)))
        return not self.ended

    def next(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def skip(self, expected: str) -> str:
        """The next character, passed over; it has to be one of those expected."""
        character = self.next()
        if not character:
            raise _NotJson("cut off")
        if character not in expected:
            raise _NotJson(f"expected {' or '.join(expected)}, found {character!r}")
        self.at += 1
        return character

    def value(self) -> Any:
        """The next value, whole."""
        self.next()
        # The library decodes whole values alone: one that is cut off is decoded again with more text.
        while True:
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                printed = _PRINTED_BY_C.match(self.text, error.pos)
                if printed:
                    self.text = f"{self.text[: error.pos]}NaN{self.text[printed.end() :]}"
                elif not (self._cut(error) and self.more()):
                    cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text.rstrip())
                    raise _NotJson("cut off" if cut else error.msg) from None
                continue
            if end == len(self.text) and self.more():  # a number may go on
                continue
            self.at = end
            return value

    def _decoded(self) -> tuple[Any, int]:
        try:
            return _DECODE(self.text, self.at)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return _DECODE_LONG(self.text, self.at)
        except RecursionError:
            raise _NotJson("nested too deep") from None

    def _cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the text held ends within the value: in a string, or so near its end that a word may go on."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 16


def read_events(path: Path, header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace one by one, from an object with `traceEvents` or a bare list.

    Args:
      header: filled with what else the object holds, as it is met; `"not UTF-8"` is added where bytes were replaced.
    Raises: `InputError` for a file that is not there, no JSON, cut off, or without events.
    """
    with opened(path) as stream:
        values = _Values(stream)
        first, has_events = values.next(), False
        if first not in ("{", "["):
            raise InputError(f"{path}: not JSON: expected an object or a list of events; export the trace again")
        try:
            for event in _entries(values, header):
                has_events = True
                if isinstance(event, dict):
                    yield event
            if values.next():
                raise _NotJson("more text after its end: several traces in one file?")
        except _NotJson as error:
            raise InputError(f"{path}: not whole JSON ({error}); export the trace again") from None
    if values.damaged:
        header["not UTF-8"] = True
    if not has_events:
        raise InputError(f"{path}: holds no events; expected a Chrome trace with a list `traceEvents`")


def _entries(values: _Values, header: dict[str, Any]) -> Iterator[Any]:
    """Items of the list that comes next, or of `traceEvents` of an object, whose other members go to `header`.

    A comma before the end is passed over, as trace viewers do.
    """
    end = "]" if values.skip("[{") == "[" else "}"
    # One by one, so that a trace of gigabytes is never in memory as a whole.
    while values.next() != end:
        key = values.value()
        if end == "]":
            yield key
        elif values.skip(":") and key == "traceEvents" and values.next() == "[":
            yield from _entries(values, header)
        else:
            header[str(key)] = values.value()
        if values.next() != end:
            values.skip(f",{end}")
    values.skip(end)


GPU_CATEGORIES: tuple[str, ...] = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
"""The last two are of PyTorch before 1.12."""
OPERATOR_CATEGORIES: tuple[str, ...] = ("cpu_op", "operator")
SPANS: tuple[str, ...] = ("gpu_user_annotation",)
"""Categories on a GPU's line that only span kernels."""
NO_OPERATOR = -1
UNUSABLE = -1.0
"""Stands for a duration that is not there."""
_STEP = "ProfilerStep#"
_DEVICE = re.compile(r"/device:(?:GPU|ROCM|CUDA):\d+", re.IGNORECASE)
_OTHER_DEVICE = re.compile(r"/device:(?!GPU|ROCM|CUDA|CPU)([A-Za-z_]+):\d+", re.IGNORECASE)
_OPERATORS = "XLA Ops"
_DERIVED = re.compile(
    r"^(?:XLA (?:Ops|Modules|TraceMe)|Async XLA Ops|Steps|(?:Framework|TensorFlow) (?:Ops|Name Scope)|Source code|"
    r"Launch Stats.*|.*Counters?.*)$",
    re.IGNORECASE,
)
"""Lines that XProf derives from the streams: their events repeat the kernels' time."""
_GPU_NAME_KEYS = ("device_name", "gpu_name", "device_type", "gpu", "device_type_string", "device_kind")
SUFFIXES: tuple[str, ...] = (".trace.json.gz", ".trace.json", "perfetto_trace.json.gz")


def read_chrome(path: Path) -> Trace:
    """Read a trace; of JAX, also the folder that `jax.profiler.trace` wrote.

    Raises: `InputError` when the file is no JSON, is cut off, or holds no timed operator or kernel.
    """
    notes: list[str] = []
    if path.is_dir():
        path, notes = _session_file(path)
    torch, jax_lines, header = _TorchEvents(), _JaxEvents(), dict[str, Any]()
    for event in read_events(path, header):
        category = event.get("cat")
        if isinstance(category, str) and category:
            torch.add(category.lower(), event)
        else:
            jax_lines.add(event)
    if header.get("not UTF-8"):
        notes.append("bytes that are not UTF-8: some names may be damaged")
    if len(torch.steps) > 1:
        notes.append(f"{len(torch.steps)} steps of the profiler's schedule: times are of all of them together")
    if len(torch.kernels):
        return torch.trace(path, notes, header)
    if jax_lines.found:
        return jax_lines.trace(path, notes, header)
    if len(torch.operators):
        return torch.operator_trace(path, notes)
    jax_lines.refuse_without_gpu(path)
    raise InputError(
        f"{path}: no GPU kernel and no operator with a duration; expected a trace of torch.profiler "
        "(export_chrome_trace), better with record_shapes=True, or of jax.profiler"
    )


def _arguments(event: Mapping[str, Any]) -> dict[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


class _TorchEvents:
    """Content of a PyTorch trace, taken in event by event."""

    def __init__(self) -> None:
        self.kernels, self.operators, self.account, self.steps = Events(), Events(), Account(), set[str]()

    def add(self, category: str, event: Mapping[str, Any]) -> None:
        """One event of a known category."""
        name, args = event.get("name"), _arguments(event)
        length, start = number(event.get("dur")), number(event.get("ts"))
        if isinstance(name, str) and name.startswith(_STEP):
            self.steps.add(name)
        if category in SPANS:
            self.account.add(f"{category} events, left out: they span kernels that are counted", (length or 0.0) * US)
        if category not in (*GPU_CATEGORIES, *OPERATOR_CATEGORIES):
            return
        on_gpu = category in GPU_CATEGORIES
        # What is wrong with operators of the host takes no time of the GPU: nobody has to be told.
        account = self.account if on_gpu else Account()
        if event.get("ph", "X") != "X" or length is None or not 0.0 <= length * US <= LONGEST_S:
            account.add("GPU events without a usable duration, left out: their time is unknown")
            return
        if start is None or abs(start) * US > 1e3 * LONGEST_S:
            account.add("GPU events without a usable start, left out: they cannot be placed", length * US)
            return
        if not isinstance(name, str) or not name:
            account.add("GPU events without a usable name, kept as (no name), of unknown kind", length * US)
            name = "(no name)"
        times, link = (start * US, length * US), identifier(args, "External id", "external id")
        lane: tuple[Hashable, Hashable]
        what: tuple[Hashable, ...]
        if on_gpu:
            sizes = (args.get(key) for key in ("grid", "block", "registers per thread", "shared memory"))
            lane = hashable(args.get("device", event.get("pid"))), hashable(args.get("stream", event.get("tid")))
            what = (encodable(name), launch_of(*sizes))
            self.kernels.add(what, lane, *times, link, identifier(args, "correlation"))
        else:
            lane = hashable(event.get("pid")), hashable(event.get("tid"))
            what = (encodable(name), _shapes(args.get("Input Dims")), _types(args.get("Input type")))
            self.operators.add(what, lane, *times, link, -1)

    def trace(self, path: Path, notes: list[str], header: Mapping[str, Any]) -> Trace:
        """The GPU events, each with the operator that launched it: the innermost with its id."""
        names, operator_names, lanes = list(self.kernels.names), list(self.operators.names), list(self.kernels.lanes)
        events, operators = self.kernels.frame(), self.operators.frame()
        # Operators that call others have the same id as these: the shortest is the innermost.
        operators = operators[operators["link"] != NO_OPERATOR].sort_values("seconds", kind="stable")
        launched_by = operators.drop_duplicates("link").set_index("link")["what"]
        events["link"] = events["link"].map(launched_by).fillna(NO_OPERATOR).astype(np.int64)
        if unknown := int((events["link"] == NO_OPERATOR).sum()):
            notes.append(f"{unknown} of {len(events)} GPU events name no operator with shapes: scaled by kernel name")

        def item(what: int, link: int, measured_s: float, count: int) -> Measured:
            name, launch = names[what]
            operator, shapes, types = operator_names[link] if link != NO_OPERATOR else ("", (), ())
            work = operator_kernels(operator, shapes)
            dtype = dtype_from_types(types) if work else None
            return kernel_of_name(name, measured_s, count, launch, operator=operator, work=work, operand_dtype=dtype)

        devices = [f"device {device}" for device, _ in lanes]
        return trace_of_kernels(path, events, devices, item, self.account, notes, self._gpus(header))

    def operator_trace(self, path: Path, notes: list[str]) -> Trace:
        """The own time of every operator, where there are no GPU events."""
        names, events = list(self.operators.names), self.operators.frame()
        busy_s, span_s = busy_seconds(events["start_s"].to_numpy(), events["seconds"].to_numpy())

        def item(what: int, link: int, measured_s: float, count: int) -> Measured:
            name, shapes, types = names[what]
            work = operator_kernels(name, shapes)
            return Measured(name, "host", measured_s, count, work, dtype_from_types(types), operator=name)

        items = grouped(events.assign(seconds=_own_seconds(events), link=NO_OPERATOR), item)
        alone = (
            "no GPU kernel in this trace: the own time of its operators stands in, so `--from` must describe the "
            "machine it was recorded on"
        )
        return Trace(path.name, items, busy_s, span_s, (*self.account.notes(), *notes, alone))

    def _gpus(self, header: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of `deviceProperties`: of the GPUs that ran kernels, or all where those are not told apart."""
        properties = header.get("deviceProperties")
        devices = [gpu for gpu in properties if isinstance(gpu, dict)] if isinstance(properties, list) else []
        names = {hashable(gpu.get("id")): str(gpu["name"]) for gpu in devices if gpu.get("name")}
        ran = {device for device, _ in self.kernels.lanes}
        used = {name for device, name in names.items() if device in ran}
        return tuple(encodable(name) for name in dict.fromkeys(used or names.values()))


class _JaxEvents:
    """Events of a trace of JAX's profiler, taken in one by one; which lines are GPU streams is known at the end."""

    def __init__(self) -> None:
        self.events, self.account = Events(), Account()
        self.processes: dict[Hashable, str] = {}
        self.threads: dict[Hashable, str] = {}
        self.gpus: dict[str, None] = {}

    @property
    def found(self) -> bool:
        """Whether any event lies on a GPU."""
        return any(self._device(line) for line in self.events.lanes)

    def add(self, event: Mapping[str, Any]) -> None:
        """One event: a name of a process or thread, or something timed."""
        args, name = _arguments(event), event.get("name")
        line = hashable(event.get("pid")), hashable(event.get("tid"))
        if event.get("ph") == "M":
            if name == "process_name":
                self.processes[line[0]] = str(args.get("name", ""))
            elif name == "thread_name":
                self.threads[line] = str(args.get("name", ""))
            self.gpus.update(dict.fromkeys(_gpu_names(args)))
            return
        if event.get("ph", "X") != "X" or not isinstance(name, str):
            return
        length, start = number(event.get("dur")), number(event.get("ts"))
        times = (0.0, UNUSABLE)
        if length is not None and start is not None and 0.0 <= length * US <= LONGEST_S > abs(start) * US / 1e3:
            times = (start * US, length * US)
        what = (encodable(name), _detailed_launch(args), encodable(str(args.get("hlo_op", ""))))
        self.events.add(what, line, *times, -1, identifier(args, "correlation_id"))

    def trace(self, path: Path, notes: list[str], header: Mapping[str, Any]) -> Trace:
        """The kernels of all GPU streams. `InputError` when no event on them has a duration."""
        events, names, lanes = self.events.frame(), list(self.events.names), list(self.events.lanes)
        streams = self._streams()
        # XProf shows the kernels' time again by operator and program: added up, a run would take several times as long.
        for lane, line in enumerate(lanes):
            if self._device(line) and line not in streams:
                repeated_s = events["seconds"][events["lane"] == lane].clip(lower=0.0)
                called = f"events of the line {self.threads.get(line, 'unnamed')!r}"
                self.account.add(
                    f"{called}, left out: they repeat the kernels' time", float(repeated_s.sum()), len(repeated_s)
                )
        events = events[events["lane"].map(lambda lane: lanes[lane] in streams)]
        usable = events["seconds"] != UNUSABLE
        lost = int((~usable).sum())
        self.account.add("GPU events without a usable start or duration, left out: their time is unknown", count=lost)
        if not usable.any():
            raise InputError(f"{path}: its GPU streams hold no event with a duration; record the run again")

        def item(what: int, link: int, measured_s: float, count: int) -> Measured:
            name, launch, operator = names[what]
            return kernel_of_name(name, measured_s, count, launch, operator=operator)

        notes.append("a trace of jax.profiler: kernels of GPU streams with their HLO operator; it says no shapes")
        gpus = tuple(dict.fromkeys([*self.gpus, *_gpu_names(header.get("metadata"))]))
        devices = [self._device(line) for line in lanes]
        return trace_of_kernels(path, events[usable], devices, item, self.account, notes, gpus)

    def refuse_without_gpu(self, path: Path) -> None:
        """`InputError` that says what the trace is of, when it is one of JAX's without a GPU."""
        names = list(self.processes.values())
        if other := next((match[1] for name in names if (match := _OTHER_DEVICE.search(name))), None):
            raise InputError(f"{path}: a trace of a {other}, expected one of a GPU")
        if "/host:CPU" in names:
            raise InputError(
                f"{path}: a trace of jax.profiler without a GPU (no process /device:GPU:N); record it where JAX runs "
                "on a GPU"
            )

    def _device(self, line: Any) -> str:
        """GPU of a line; "" for the host."""
        match = _DEVICE.search(self.processes.get(line[0], ""))
        return match[0] if match else ""

    def _streams(self) -> set[Any]:
        """Lines of kernels: a GPU's streams; where it has none, its operators."""
        lines = [line for line in self.events.lanes if self._device(line)]
        streams = {line for line in lines if not _DERIVED.match(self.threads.get(line, ""))}
        with_streams = {process for process, _ in streams}
        operators = (line for line in lines if self.threads.get(line, "") == _OPERATORS)
        return streams | {line for line in operators if line[0] not in with_streams}


def _shapes(dims: Any) -> tuple[tuple[int, ...], ...]:
    """Operand shapes; an operand that is no list of whole numbers (a scalar, a list of tensors) is ()."""
    if not isinstance(dims, list) or not all(isinstance(shape, list) for shape in dims):
        return ()

    def whole(size: Any) -> bool:
        return isinstance(size, int | float) and 0 <= size < 1e12 and size == int(size)

    return tuple(tuple(map(int, shape)) if all(map(whole, shape)) else () for shape in dims)


def _types(types: Any) -> tuple[str, ...]:
    return tuple(str(kind) for kind in types) if isinstance(types, list) else ()


def _own_seconds(events: pd.DataFrame) -> np.ndarray:
    """Duration of every operator less that of the operators directly inside it, per thread."""
    lane, start, seconds = (events[name].to_numpy() for name in ("lane", "start_s", "seconds"))
    self_seconds, stack = seconds.copy(), list[int]()
    # Of those that start together the longest goes first: it encloses the others.
    for at in np.lexsort((-seconds, start, lane)):
        while stack and (lane[stack[-1]] != lane[at] or start[stack[-1]] + seconds[stack[-1]] <= start[at]):
            stack.pop()
        if stack:
            self_seconds[stack[-1]] -= seconds[at]
        stack.append(int(at))
    positive: np.ndarray = np.maximum(self_seconds, 0.0)
    return positive


def _gpu_names(args: Any) -> list[str]:
    """Names of GPUs under the keys that say them."""
    if not isinstance(args, dict):
        return []
    return [encodable(str(args[key])) for key in _GPU_NAME_KEYS if isinstance(args.get(key), str) and args[key]]


def _detailed_launch(args: Mapping[str, Any]) -> Launch | None:
    """A launch from `kernel_details`: `regs:32 static_shared:0 dynamic_shared:0 grid:400,1,1 block:256,1,1 ...`."""
    details = dict(part.split(":", 1) for part in str(args.get("kernel_details", "")).split() if ":" in part)
    if "grid" not in details:
        return None
    shared = sum(number(details.get(key)) or 0.0 for key in ("static_shared", "dynamic_shared"))
    return launch_of(details["grid"].split(","), details.get("block", "").split(","), details.get("regs"), shared)


def _session_file(folder: Path) -> tuple[Path, list[str]]:
    """The trace of a folder that `jax.profiler.trace` wrote, and notes: of the last session, if it has several.

    Raises: `InputError` without a trace, or with those of several hosts.
    """
    files = [file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if file.is_file()]
    sessions = sorted({file.parent for file in files}, key=lambda session: session.name)
    if not files:
        raise InputError(f"{folder}: a folder without a trace; expected *.trace.json.gz, as jax.profiler.trace writes")
    last = [file for file in files if file.parent == sessions[-1]]
    hosts = [file for file in last if not file.name.startswith("perfetto_trace")]
    if len(hosts) > 1:
        names = ", ".join(host.name for host in hosts[:4])
        raise InputError(f"{folder}: traces of {len(hosts)} hosts ({names}); give one")
    several = f"{len(sessions)} sessions in this folder: read the last, {sessions[-1].name}"
    return (hosts or last)[0], [several] if len(sessions) > 1 else []


# PyTorch operators with recorded shapes, as kernels this package forecasts.

_TORCH = table("scaling", "operators")
_ROWWISE = {name: kernels for names, *kernels in _TORCH["rowwise"] for name in names}


def dtype_from_types(types: Sequence[str]) -> str:
    """Dtype of an operator: that of its first floating operand, fp32 if none is known."""
    dtypes: dict[str, str] = _TORCH["dtypes"]
    return next((dtypes[kind.lower()] for kind in types if kind.lower() in dtypes), "fp32")


def operator_kernels(name: str, shapes: Sequence[Sequence[int]]) -> tuple[Kernel, ...]:
    """Kernels of one call of an operator (`aten::mm`) on operands of these shapes; empty if it is not understood.

    Args:
      name: with or without `aten::`; in-place variants (`add_`) are the same.
      shapes: of the operands in order; `[]` stands for a scalar or an operand that is no tensor.
    """
    op = name.removeprefix("aten::")
    tensors = [tuple(int(size) for size in shape) for shape in shapes if len(shape)]
    if not tensors or any(size <= 0 for shape in tensors for size in shape):
        return ()
    if op in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_mm"):
        return _product(op, tensors)
    if attention := _attention(op, tensors):
        return attention
    if op == "embedding" and len(tensors) >= 2:
        return (_rowwise((*tensors[1], tensors[0][-1]), "memory", "embedding", 1, 1),)
    base, largest = op.removesuffix("_"), max(tensors, key=math.prod)
    if kernels := _ROWWISE.get(op) or (_ROWWISE.get(base) if base.endswith("_backward") else None):
        return tuple(_rowwise(tensors[0], *kernel) for kernel in kernels)
    if base in _TORCH["unary"]:
        return (_rowwise(largest, "elementwise", _TORCH["unary"][base], 1, 1),)
    if ours := _TORCH["binary"].get(base):
        passes = min(sum(math.prod(shape) for shape in tensors) / math.prod(largest), 3.0)
        return (_rowwise(largest, "elementwise", ours if len(tensors) > 1 else f"{ours}u", passes, 1),)
    return ()


def _attention(op: str, tensors: Sequence[tuple[int, ...]]) -> tuple[Kernel, ...]:
    """Fused attention, or its gradient by the same sizes. As in decoders, tokens see none after them."""
    base = op.removesuffix("_forward").removesuffix("_backward")
    operands = tensors[op.endswith("_backward") :][:3]
    tokens_first = base in _TORCH["tokens_first"]
    if not (tokens_first or base in _TORCH["heads_first"]) or [*map(len, operands)] != [4, 4, 4]:
        return ()
    tokens, heads = (1, 2) if tokens_first else (2, 1)
    query, key, _ = operands
    sizes = {"heads": query[heads], "kv_heads": key[heads], "head_size": query[3]}
    return (fused_attention(query[tokens], key[tokens], "", repeat=query[0], **sizes)[0],)


def _product(op: str, tensors: Sequence[tuple[int, ...]]) -> tuple[Kernel, ...]:
    """Matrix products: (…, M, K) × (K, N) or batches of them."""
    if len(tensors) < 2:
        return ()
    # What follows the two operands are biases and the scales of narrow formats.
    left, right = tensors[1:3] if op in ("addmm", "baddbmm") and len(tensors) >= 3 else tensors[:2]
    if op == "linear":
        right = right[::-1]
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        return ()
    m, k, n = left[-2], left[-1], right[-1]
    if len(right) == 2:
        return (Kernel("linear", "linear", {"batch": 1, "m": math.prod(left[:-1]), "n": n, "k": k}),)
    return (Kernel("bmm", "bmm", {"batch": math.prod(right[:-2]), "m": m, "n": n, "k": k}),)


def _rowwise(shape: Sequence[int], family: str, op: str, reads: float, writes: float) -> Kernel:
    return Kernel(family, op, {"rows": math.prod(shape[:-1]), "cols": shape[-1], "reads": reads, "writes": writes})
