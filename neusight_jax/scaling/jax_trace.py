"""Traces of JAX's profiler (`jax.profiler.trace`, XProf): Chrome events without categories, told apart by their lines.

A process `/device:GPU:0` has a thread for each stream (`Stream #14(Compute)`), whose events are kernels and copies,
and others such as `XLA Ops` and `XLA Modules` that show the same time again by operator and program. Kernels say their
HLO operator and program (`hlo_op`, `hlo_module`) and, where it was recorded, grid and block (`kernel_details`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.scaling.fields import hashable, identifier, launch_of, number, printable
from neusight_jax.scaling.timeline import LONGEST_S, Account, Columns, Interned, trace_of_kernels
from neusight_jax.scaling.trace import Launch, Measured, Trace, kernel_of_name
from neusight_jax.units import US

Line = tuple[Hashable, Hashable]

UNUSABLE = -1.0
"""Stands for a duration that is not there."""

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


class JaxLines:
    """Events of a trace of JAX's profiler, taken in one by one; which lines are GPU streams is known at the end."""

    def __init__(self) -> None:
        self.events, self.kernels, self.operators, self.lanes = Columns(), Interned(), Interned(), Interned()
        self.processes: dict[Hashable, str] = {}
        self.threads: dict[Line, str] = {}
        self.gpus: dict[str, None] = {}
        self.account = Account()

    @property
    def found(self) -> bool:
        """Whether any event lies on a GPU."""
        return any(self._on_gpu(line) for line in self.lanes.values)

    def add(self, event: Mapping[str, Any]) -> None:
        """One event: a name of a process or thread, or something timed."""
        given = event.get("args")
        args: dict[str, Any] = given if isinstance(given, dict) else {}
        process, thread, name = hashable(event.get("pid")), hashable(event.get("tid")), event.get("name")
        if event.get("ph") == "M":
            if name == "process_name":
                self.processes[process] = str(args.get("name", ""))
            elif name == "thread_name":
                self.threads[process, thread] = str(args.get("name", ""))
            self.gpus.update(dict.fromkeys(_gpu_names(args)))
            return
        if event.get("ph", "X") != "X" or not isinstance(name, str):
            return
        length, start = number(event.get("dur")), number(event.get("ts"))
        at, seconds = 0.0, UNUSABLE
        if length is not None and start is not None and 0.0 <= length * US <= LONGEST_S > abs(start) * US / 1e3:
            at, seconds = start * US, length * US
        lane = self.lanes((process, thread))
        what = self.kernels((printable(name), _launch(args)))
        operator = self.operators(printable(str(args.get("hlo_op", ""))))
        self.events.add(what, operator, lane, at, seconds, identifier(args, "correlation_id"))

    def trace(self, path: Path, notes: list[str], header: Mapping[str, Any]) -> Trace:
        """The kernels of all GPU streams. `InputError` when no event on them has a duration."""
        lanes, columns, account = self.lanes.values, self.events.arrays(), self.account
        streams = self._streams()
        chosen = [line in streams for line in lanes]
        on_gpu = [self._on_gpu(line) for line in lanes]
        keep = [False] * len(self.events)
        for at, (lane, seconds) in enumerate(zip(columns["lane"], columns["seconds"], strict=True)):
            if on_gpu[lane] and not chosen[lane]:
                name = self.threads.get(lanes[lane], "unnamed")
                account.add(f"events of the line {name!r}, left out: they repeat the kernels' time", max(seconds, 0.0))
            elif chosen[lane] and seconds == UNUSABLE:
                account.add("GPU events without a usable start or duration, left out: their time is unknown")
            else:
                keep[at] = chosen[lane]
        if not any(keep):
            raise InputError(f"{path}: its GPU streams hold no event with a duration; record the run again")
        names, operators = self.kernels.values, self.operators.values

        def item(pair: tuple[int, int], measured_s: float, count: int) -> Measured:
            name, launch = names[pair[0]]
            return kernel_of_name(name, measured_s, count, launch, operator=operators[pair[1]])

        devices = [self._device(line) for line in lanes]
        gpus = tuple(dict.fromkeys([*self.gpus, *_gpu_names(header.get("metadata"))]))
        kept = {name: values[keep] for name, values in columns.items()}
        return trace_of_kernels(path, kept, devices, item, account, [*notes, _READ_AS], gpus)

    def refuse_without_gpu(self, path: Path) -> None:
        """`InputError` that says what the trace is of, when it is one of JAX's without a GPU."""
        names = list(self.processes.values())
        other = next((found[1] for name in names if (found := _OTHER_DEVICE.search(name))), None)
        if other is not None:
            raise InputError(f"{path}: a trace of a {other}, expected one of a GPU")
        if "/host:CPU" in names:
            raise InputError(
                f"{path}: a trace of jax.profiler without a GPU (no process /device:GPU:N); record it where JAX runs "
                "on a GPU"
            )

    def _device(self, line: Line) -> str:
        found = _DEVICE.search(self.processes.get(line[0], ""))
        return found[0] if found else "host"

    def _on_gpu(self, line: Line) -> bool:
        return self._device(line) != "host"

    def _streams(self) -> set[Line]:
        """Lines of kernels: a GPU's streams; where it has none, its operators."""
        lines = [line for line in self.lanes.values if self._on_gpu(line)]
        streams = {line for line in lines if not _DERIVED.match(self.threads.get(line, ""))}
        with_streams = {process for process, _ in streams}
        return streams | {
            line for line in lines if line[0] not in with_streams and self.threads.get(line, "") == _OPERATORS
        }


_READ_AS = "a trace of jax.profiler: kernels of GPU streams with their HLO operator; it says no shapes"


def _gpu_names(args: Any) -> list[str]:
    """Names of GPUs under the keys that say them."""
    if not isinstance(args, dict):
        return []
    return [printable(str(args[key])) for key in _GPU_NAME_KEYS if isinstance(args.get(key), str) and args[key]]


def _launch(args: Mapping[str, Any]) -> Launch | None:
    """A launch from `kernel_details`: `regs:32 static_shared:0 dynamic_shared:0 grid:400,1,1 block:256,1,1 ...`."""
    details = dict(part.split(":", 1) for part in str(args.get("kernel_details", "")).split() if ":" in part)
    if "grid" not in details:
        return None
    shared = sum(number(details.get(key)) or 0.0 for key in ("static_shared", "dynamic_shared"))
    return launch_of(details["grid"].split(","), details.get("block", "").split(","), details.get("regs"), shared)


def session_file(folder: Path) -> tuple[Path, list[str]]:
    """The trace of a folder that `jax.profiler.trace` wrote, and notes: of the last session, if it has several.

    Raises: `InputError` without a trace, or with those of several hosts.
    """
    found = [file for suffix in SUFFIXES for file in folder.rglob(f"*{suffix}") if file.is_file()]
    sessions = sorted({file.parent for file in found}, key=lambda each: each.name)
    if not found:
        raise InputError(f"{folder}: a folder without a trace; expected *.trace.json.gz, as jax.profiler.trace writes")
    last = [file for file in found if file.parent == sessions[-1]]
    hosts = [file for file in last if not file.name.startswith("perfetto_trace")]
    if len(hosts) > 1:
        raise InputError(
            f"{folder}: traces of {len(hosts)} hosts ({', '.join(each.name for each in hosts[:4])}); give one"
        )
    notes = (
        [f"{len(sessions)} sessions in this folder: read the last, {sessions[-1].name}"] if len(sessions) > 1 else []
    )
    return (hosts or last)[0], notes
