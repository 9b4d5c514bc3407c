"""Chrome traces: of the PyTorch profiler (Kineto) here, of JAX's profiler in `jax_trace`. Read as a stream.

GPU kernels, copies and collectives are events of their own categories; the operator that launched one is found by its
`External id`, and with `record_shapes=True` says the shapes. A trace without GPU events is read by its innermost
operators' own time, so that it can be looked at, and says so. Times in the file are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.scaling.fields import hashable, identifier, launch_of, number, printable
from neusight_jax.scaling.jax_trace import JaxLines
from neusight_jax.scaling.json_stream import read_events
from neusight_jax.scaling.operators import dtype_from_types, operator_kernels
from neusight_jax.scaling.timeline import LONGEST_S, Account, Columns, Interned, grouped, trace_of_kernels
from neusight_jax.scaling.trace import Launch, Measured, Trace, busy_seconds, kernel_of_name
from neusight_jax.units import US

GPU_CATEGORIES: tuple[str, ...] = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
"""The last two are of PyTorch before 1.12."""
OPERATOR_CATEGORIES: tuple[str, ...] = ("cpu_op", "operator")
SPANS: tuple[str, ...] = ("gpu_user_annotation",)
"""Categories on a GPU's line that only span kernels."""
NO_OPERATOR = -1
_STEP = "ProfilerStep#"


class _Events:
    """What a PyTorch trace holds, taken in event by event."""

    def __init__(self) -> None:
        self.kernels, self.operators = Columns(), Columns()
        self.kernel_names, self.operator_names, self.lanes = Interned(), Interned(), Interned()
        self.account, self.steps = Account(), set[str]()

    def add(self, category: str, event: Mapping[str, Any]) -> None:
        """One event of a known category."""
        on_gpu = category in GPU_CATEGORIES
        form, name = event.get("ph", "X"), event.get("name")
        length, start = number(event.get("dur")), number(event.get("ts"))
        if isinstance(name, str) and name.startswith(_STEP):
            self.steps.add(name)
        if category in SPANS:
            self.account.add(f"{category} events, left out: they span kernels that are counted", (length or 0.0) * US)
        if not (on_gpu or category in OPERATOR_CATEGORIES):
            return
        if form != "X" or length is None or not 0.0 <= length * US <= LONGEST_S:
            if on_gpu:
                self.account.add("GPU events without a usable duration, left out: their time is unknown")
            return
        if start is None or abs(start) * US > 1e3 * LONGEST_S:
            if on_gpu:
                self.account.add("GPU events without a usable start, left out: they cannot be placed", length * US)
            return
        if not isinstance(name, str) or not name:
            if on_gpu:
                self.account.add("GPU events without a usable name, kept as (no name), of unknown kind", length * US)
            name = "(no name)"
        name = printable(name)
        given = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        if on_gpu:
            device = hashable(args.get("device", event.get("pid")))
            lane = self.lanes((device, hashable(args.get("stream", event.get("tid")))))
            what, correlation = self.kernel_names((name, _launch(args))), identifier(args, "correlation")
            self.kernels.add(what, _link(args), lane, start * US, length * US, correlation)
        else:
            what = self.operator_names((name, _shapes(args.get("Input Dims")), _types(args)))
            lane = self.lanes((hashable(event.get("pid")), hashable(event.get("tid"))))
            self.operators.add(what, _link(args), lane, start * US, length * US)


def read_chrome(path: Path) -> Trace:
    """Read a trace.

    Raises: `InputError` when the file is no JSON, is cut off, or holds no timed operator or kernel.
    """
    torch, jax_lines, header = _Events(), JaxLines(), dict[str, Any]()
    for event in read_events(path, header):
        category = event.get("cat")
        if isinstance(category, str) and category:
            torch.add(category.lower(), event)
        else:
            jax_lines.add(event)
    notes = ["bytes that are not UTF-8: some names may be damaged"] if header.get("not UTF-8") else []
    if torch.steps and len(torch.steps) > 1:
        notes.append(f"{len(torch.steps)} steps of the profiler's schedule: times are of all of them together")
    if len(torch.kernels):
        return _from_kernels(path, torch, notes, _gpus(header, torch))
    if jax_lines.found:
        return jax_lines.trace(path, notes, header)
    if len(torch.operators):
        return _from_operators(path, torch, notes)
    jax_lines.refuse_without_gpu(path)
    raise InputError(
        f"{path}: no GPU kernel and no operator with a duration; expected a trace of torch.profiler "
        "(export_chrome_trace), better with record_shapes=True, or of jax.profiler"
    )


def _link(args: Mapping[str, Any]) -> int:
    return identifier(args, "External id", "external id")


def _launch(args: Mapping[str, Any]) -> Launch | None:
    return launch_of(args.get("grid"), args.get("block"), args.get("registers per thread"), args.get("shared memory"))


def _shapes(dims: Any) -> tuple[tuple[int, ...], ...]:
    """Operand shapes; an operand that is no list of whole numbers (a scalar, a list of tensors) is ()."""
    if not isinstance(dims, list) or not all(isinstance(shape, list) for shape in dims):
        return ()
    return tuple(tuple(int(size) for size in shape) if all(_is_size(size) for size in shape) else () for shape in dims)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e12 and value == int(value)


def _types(args: Mapping[str, Any]) -> tuple[str, ...]:
    types = args.get("Input type")
    return tuple(str(kind) for kind in types) if isinstance(types, list) else ()


def _gpus(header: Mapping[str, Any], torch: _Events) -> tuple[str, ...]:
    """Names of `deviceProperties`: of the GPUs that ran kernels, or all where those are not told apart."""
    listed = header.get("deviceProperties")
    devices = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    named = {hashable(each.get("id")): str(each["name"]) for each in devices if each.get("name")}
    lanes = torch.lanes.values
    ran = {lanes[lane][0] for lane in set(torch.kernels.lane)}
    used = {name for device, name in named.items() if device in ran}
    return tuple(printable(name) for name in dict.fromkeys(used or named.values()))


def _from_kernels(path: Path, torch: _Events, notes: list[str], gpus: tuple[str, ...]) -> Trace:
    names, operator_names, columns = torch.kernel_names.values, torch.operator_names.values, torch.kernels.arrays()
    columns["link"] = _operators_of(columns["link"], torch.operators)
    unknown = int((columns["link"] == NO_OPERATOR).sum())
    if unknown:
        total = len(columns["link"])
        notes = [*notes, f"{unknown} of {total} GPU events name no operator with shapes: scaled by kernel name"]

    def item(pair: tuple[int, int], measured_s: float, count: int) -> Measured:
        name, launch = names[pair[0]]
        operator, shapes, types = operator_names[pair[1]] if pair[1] != NO_OPERATOR else ("", (), ())
        work = operator_kernels(operator, shapes)
        dtype = dtype_from_types(types) if work else None
        return kernel_of_name(name, measured_s, count, launch, operator=operator, work=work, operand_dtype=dtype)

    devices = [f"device {device}" for device, _ in torch.lanes.values]
    return trace_of_kernels(path, columns, devices, item, torch.account, notes, gpus)


def _from_operators(path: Path, torch: _Events, notes: list[str]) -> Trace:
    names, columns = torch.operator_names.values, torch.operators.arrays()
    seconds = _own_seconds(columns)
    notes = [
        *torch.account.notes(),
        *notes,
        "no GPU kernel in this trace: the own time of its operators stands in, so `--from` must describe the machine "
        "it was recorded on",
    ]
    busy_s, span_s = busy_seconds(columns["start_s"], columns["seconds"])

    def item(pair: tuple[int, int], measured_s: float, count: int) -> Measured:
        name, shapes, types = names[pair[0]]
        work = operator_kernels(name, shapes)
        return Measured(name, "host", measured_s, count, work, dtype_from_types(types), operator=name)

    alone = np.full(len(seconds), NO_OPERATOR)
    return Trace(path.name, grouped(columns["what"], alone, seconds, item), busy_s, span_s, tuple(notes))


def _operators_of(link: np.ndarray, operators: Columns) -> np.ndarray:
    """Number of the operator that launched each kernel: the innermost with its id; `NO_OPERATOR` without one."""
    ids, what = np.frombuffer(operators.link, np.int64), np.frombuffer(operators.what, np.int64)
    if not len(ids):
        return np.full(len(link), NO_OPERATOR)
    shortest = np.lexsort((np.frombuffer(operators.seconds), ids))
    known, first = np.unique(ids[shortest], return_index=True)
    at = np.minimum(np.searchsorted(known, link), len(known) - 1)
    found = (known[at] == link) & (link != NO_OPERATOR)
    return np.where(found, what[shortest][first[at]], NO_OPERATOR)


def _own_seconds(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Duration of every operator less that of the operators directly inside it, per thread."""
    lane, start, seconds = columns["lane"], columns["start_s"], columns["seconds"]
    own: np.ndarray = seconds.copy()
    stack: list[int] = []
    for at in np.lexsort((-seconds, start, lane)):
        while stack and (lane[stack[-1]] != lane[at] or start[stack[-1]] + seconds[stack[-1]] <= start[at]):
            stack.pop()
        if stack:
            own[stack[-1]] -= seconds[at]
        stack.append(int(at))
    positive: np.ndarray = np.maximum(own, 0.0)
    return positive
