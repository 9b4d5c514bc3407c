"""Events and files of traces, written by hand, for tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

GRID = {"grid": [400, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}
SUM_HEADER = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name"


def operator(name: str, number: int, dims: list[list[int]], types: list[str], start: float) -> dict[str, Any]:
    """A host operator of a PyTorch trace."""
    args = {"External id": number, "Input Dims": dims, "Input type": types}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 5, "args": args}


def kernel(name: str, start: float, length: float | None, link: int | None = None, **args: Any) -> dict[str, Any]:
    """A GPU event of a PyTorch trace, in microseconds."""
    cat = args.pop("cat", "kernel")
    event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "args": {"stream": 7, **args}}
    if length is not None:
        event["dur"] = length
    if link is not None:
        event["args"]["External id"] = link
    return event


def write(path: Path, content: Any) -> Path:
    """Text, or anything else as JSON; packed where the name says so."""
    text = content if isinstance(content, str) else json.dumps(content)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def sums(*rows: tuple[str, int, int]) -> str:
    """`cuda_gpu_kern_sum` of names, nanoseconds and launches, as CSV without a preamble."""
    total = sum(nanoseconds for _, nanoseconds, _ in rows)
    lines = [f'{100 * each / total:.1f},{each},{count},1,1,1,1,1,"{name}"' for name, each, count in rows]
    return "\n".join([SUM_HEADER, *lines]) + "\n"


def jax_events(*lines: tuple[int, int, str, list[tuple[str, float, float, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Events of JAX's profiler: of lines given as GPU, thread, name of the thread, (name, start, duration, args)."""
    events: list[dict[str, Any]] = []
    for gpu, thread, label, inside in lines:
        process = {"ph": "M", "pid": gpu + 1, "name": "process_name", "args": {"name": f"/device:GPU:{gpu}"}}
        events += [process, {"ph": "M", "pid": gpu + 1, "tid": thread, "name": "thread_name", "args": {"name": label}}]
        for name, start, length, args in inside:
            timed = {"ph": "X", "pid": gpu + 1, "tid": thread, "ts": start, "dur": length}
            events.append({**timed, "name": name, "args": args})
    return [*events, {}]
