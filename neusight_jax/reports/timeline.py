"""Timelines: a forecast as a Chrome trace that Perfetto, TensorBoard and HolisticTraceAnalysis read, as Kineto writes.

One process a rank, one thread a stream. Kernels have the category `kernel`, and each its launch (`cuda_runtime`) by its
correlation; products and attention also an operator with shapes, so that `scale-trace` knows their work. Times in the
file are microseconds.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from neusight_jax import __version__
from neusight_jax.errors import InputError
from neusight_jax.files import atomic_folder, write_atomically
from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.hardware.cluster import Machine
from neusight_jax.hardware.files import gpu_in
from neusight_jax.job.job import Job
from neusight_jax.job.parallelism import strides
from neusight_jax.kernels.table import PHASES, Kernel
from neusight_jax.model.predictor import Predictor
from neusight_jax.records import json_text, plain, schema
from neusight_jax.reports.step_layers import MESSAGES as KINDS_OF_MESSAGES
from neusight_jax.reports.step_layers import Node as StepNode
from neusight_jax.reports.step_nodes import rank_nodes
from neusight_jax.units import US

COMPUTE, MESSAGES = 7, 20
"""Streams; those of messages are this one and the next ones."""
HOST, LAUNCHES, WAITS = 1_000_000, 1, 2
"""Process of the host of rank 0, those of others follow; its threads."""
MOST_KERNELS = 40_000
"""Of a job's timeline, about: neighbouring layers are one kernel where there would be more."""
LAUNCH_S = 1e-6
"""Drawn length of a launch, seconds: a mark, no forecast."""
_DTYPES = {"bf16": "c10::BFloat16", "fp16": "c10::Half", "fp32": "float", "int8": "signed char"}
_WORDS = {"linear": "gemm_", "grouped_gemm": "moe_", "prefill": "attention_", "decode": "attention_"}
_WORDS |= {"elementwise": "elementwise_"}
_NCCL = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
_NCCL |= {"all_to_all": "AllToAll", "send_recv": "SendRecv", "": "SendRecv"}


def _operator(kernel: Kernel) -> tuple[str, list[list[int]]] | None:
    """PyTorch's operator of a kernel and the shapes of its operands; None of what a reader would go by name."""
    size = {name: int(value) for name, value in kernel.dims.items()}
    if kernel.family == "linear":
        return "aten::mm", [[size["m"], size["k"]], [size["k"], size["n"]]]
    if kernel.family == "bmm":
        many = size["batch"]
        return "aten::bmm", [[many, size["m"], size["k"]], [many, size["k"], size["n"]]]
    if kernel.family in ("prefill", "decode"):
        requests = size["requests"]
        query = [requests, size["queries"] // requests, size["heads"], size["head_size"]]
        kept = [requests, size["context"] // requests, size["kv_heads"], size["head_size"]]
        return "aten::_flash_attention_forward", [query, kept, kept]
    return None


@dataclass
class _Events:
    """Events of one rank; seconds in, microseconds out."""

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    launched: int = 0

    def span(self, name: str, start_s: float, seconds: float) -> None:
        """Add a range that groups computation, such as a layer; it starts on the clock of the trace."""
        self._add("gpu_user_annotation", name, start_s, seconds, self.rank, COMPUTE)

    def kernel(
        self,
        name: str,
        start_s: float,
        seconds: float,
        stream: int = COMPUTE,
        kernel: Kernel | None = None,
        **args: Any,
    ) -> None:
        """Add a kernel, its launch on the host, and the PyTorch operator that called it where one is known.

        Args:
          start_s: on the clock of the trace, seconds.
          stream: `COMPUTE` or `MESSAGES`.
          kernel: what ran, for the operator and its shapes; None = no operator is named.
          args: further values that a viewer shows with the kernel.
        """
        self.launched += 1
        link = {"correlation": self.launched + self.rank * 10_000_000, "External id": self.launched}
        args |= {"device": self.rank, "context": 1, "stream": stream, **link}
        self._add("kernel", name, start_s, seconds, self.rank, stream, args)
        # No launch outlasts its kernel, lest it overlap the next one on the host's thread.
        length = min(LAUNCH_S, seconds)
        self._add("cuda_runtime", "cudaLaunchKernel", start_s, length, HOST + self.rank, LAUNCHES, link)
        if kernel is not None and (called := _operator(kernel)):
            name, shapes = called
            types = [_DTYPES.get(kernel.dtype, "float")] * len(shapes)
            details = {"Input Dims": shapes, "Input type": types, **link}
            self._add("cpu_op", name, start_s, length, HOST + self.rank, LAUNCHES, details)

    def _add(
        self,
        cat: str,
        name: str,
        start_s: float,
        seconds: float,
        pid: int,
        tid: int,
        args: dict[str, Any] | None = None,
    ) -> None:
        start, end = round(start_s / US, 3), round((start_s + seconds) / US, 3)
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3)}
        self.events.append({**event, "args": args or {}})

    def wait(self, name: str, start_s: float, seconds: float) -> None:
        """Add what a rank does beside its kernels."""
        self._add("user_annotation", name, start_s, seconds, HOST + self.rank, WAITS)

    def mark(self, at_s: float) -> None:
        """Add a mark on the GPU, without length."""
        details = {"device": self.rank, "context": 1, "stream": COMPUTE, "bytes": 0}
        self._add("gpu_memset", "Memset (Device)", at_s, 0.0, self.rank, COMPUTE, details)

    def step(self) -> None:
        """The span of the whole step, as the profiler's schedule marks it."""
        end_s = max((event["ts"] + event["dur"] for event in self.events), default=0.0) * US
        self._add("user_annotation", "ProfilerStep#0", 0.0, end_s, HOST + self.rank, LAUNCHES)

    def names(self, about: str) -> list[dict[str, Any]]:
        """Names of the rank's processes and threads."""
        labels = [("process_name", self.rank, 0, about), ("process_name", HOST + self.rank, 0, f"host of {about}")]
        labels += [("thread_name", self.rank, COMPUTE, f"stream {COMPUTE} (compute)")]
        streams = {event["tid"]: event["args"]["group"] for event in self.events if "group" in event["args"]}
        labels += [("thread_name", self.rank, at, f"stream {at} (messages, {group})") for at, group in streams.items()]
        return [
            {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": text}} for name, pid, tid, text in labels
        ]


def forecast_timeline(forecast: Forecast, graph: Graph) -> dict[str, Any]:
    """A forecast as a trace of one rank: kernels in the order of the graph, layer by layer.

    Args:
      graph: the one that was forecast, on the arithmetic paths of its GPU (`Graph.on`).
    Raises: `InputError` for another graph.
    """
    rows = _rows(graph)
    if len(rows) != len(forecast.columns["seconds"]):
        raise InputError(
            f"the forecast has {len(forecast.columns['seconds'])} kernels, the graph {len(rows)}; expected its own"
        )
    events, at = _Events(0), 0.0
    # Kernels come one after another, as a forecast adds their times up.
    for head, section in _sections(graph):
        begin = at
        for node, phase in section:
            for kernel in node.phases[PHASES.index(phase)]:
                row = rows[_key(graph, node, phase, kernel)]
                launches, seconds = max(round(kernel.count), 1), float(forecast.columns["seconds"][row])
                details: dict[str, Any] = {
                    "phase": phase,
                    "family": kernel.family,
                    "dtype": kernel.dtype or graph.dtype,
                }
                for _ in range(launches):
                    length = seconds * kernel.count / launches
                    events.kernel(_name(kernel, node.name), at, length, kernel=kernel, node=node.name, **details)
                    at += length
        events.span(head, begin, at - begin)
    return _trace([events], [forecast.gpu or "GPU"], forecast.gpu, 1, forecast.values())


def _name(kernel: Kernel, node: str) -> str:
    return f"{_WORDS.get(kernel.family, '')}{kernel.op}({node})"


def _key(graph: Graph, node: Node, phase: str, kernel: Kernel) -> tuple[Any, ...]:
    return node.name, phase, kernel.family, kernel.op, kernel.dtype, tuple(kernel.dims.items())


def _rows(graph: Graph) -> dict[tuple[Any, ...], int]:
    """Row of every distinct kernel in the graph's table (`Graph.kernels`)."""
    every = (
        _key(graph, node, phase, kernel)
        for node in graph.nodes
        for phase, kernels in zip(PHASES, node.phases, strict=True)
        for kernel in kernels
    )
    return {key: row for row, key in enumerate(dict.fromkeys(every))}


def _sections(graph: Graph) -> Iterator[tuple[str, list[tuple[Node, str]]]]:
    """Nodes that run, in order, under the heads that a timeline shows: forward, then backward, then the optimizer."""
    blocks = [(key, list(nodes)) for key, nodes in groupby(graph.nodes, key=lambda node: (node.section, node.repeat))]
    for (section, repeat), nodes in blocks:
        for time in range(repeat):
            yield _head(section, repeat, time, nodes, "forward"), [(node, "forward") for node in nodes]
    if graph.mode == "training":
        # Gradients arrive from the last layer to the first.
        for (section, repeat), nodes in reversed(blocks):
            back = [(node, phase) for node in reversed(nodes) for phase in ("backward", "weight_gradient")]
            for time in reversed(range(repeat)):
                yield _head(section, repeat, time, nodes, "backward"), back
    last = [node for node in graph.nodes if node.optimizer]
    if last:
        yield "optimizer", [(node, "optimizer") for node in last for _ in range(int(node.repeat))]


def _head(section: str, repeat: int, time: int, nodes: Sequence[Node], phase: str) -> str:
    return f"{section or nodes[0].name}{f' {time}' if repeat > 1 else ''}, {phase}"


def step_timeline(predictor: Predictor, machine: Machine, job: Job, step: Forecast) -> dict[str, Any]:
    """Trace of a step of a job, one process a rank of the pipeline; ranks of the other groups run alike.

    Computation of a layer is one kernel, and messages are others on streams of their group (`step_nodes`). What a rank
    waits for beside them is an event of its host. A mark without length is where the step begins and where it ends, so
    that readers that count from the first kernel to the last see the bubble on every rank.

    Args:
      machine: what each rank runs on, a cluster where ranks talk to each other.
      job: the training step, its kernels and messages planned.
      step: its forecast, which names the GPU and whose values the trace carries along.
    """
    ranks = rank_nodes(predictor, machine, job, MOST_KERNELS / job.plan.layout.pipeline)
    tracks, distance = [_Events(rank) for rank in range(len(ranks))], strides(job.plan.layout)["pipeline"]
    groups = dict.fromkeys(_group(node) for nodes in ranks for node in nodes if node.kind in KINDS_OF_MESSAGES)
    streams = {group: MESSAGES + at for at, group in enumerate(groups)}
    end_s = max(node.end_s for nodes in ranks for node in nodes)
    for track, nodes in zip(tracks, ranks, strict=True):
        track.mark(0.0)
        for node in nodes:
            _draw(track, node, streams)
        for name, work in groupby((node for node in nodes if node.kind == "compute"), key=_work):
            first, *_, last = itertools.chain(*(itertools.repeat(node, 2) for node in work))
            track.span(name, first.start_s, last.end_s - first.start_s)
        track.mark(end_s)
    names = [f"{step.gpu or 'GPU'}, pipeline rank {rank}" for rank in range(len(ranks))]
    trace = _trace(tracks, names, gpu_in(step.gpu), step.gpus, step.values())
    return trace | {"distributedInfo": {**trace["distributedInfo"], "pipeline_stride": distance}}


def _draw(track: _Events, node: StepNode, streams: Mapping[str, int]) -> None:
    """Draw a node: computation and messages as kernels, what else a rank waits for as an event of its host."""
    seconds = node.end_s - node.start_s
    if node.kind == "compute":
        track.kernel(node.name.partition(" of ")[0].replace(" ", "_"), node.start_s, seconds, work=node.name)
    elif node.kind not in KINDS_OF_MESSAGES:
        track.wait(node.name, node.start_s, seconds)
    elif node.kind != "receive" or not node.group:  # of a ring, both are one kernel
        more: dict[str, Any] = {"group": node.group or "pipeline", "bytes": round(node.bytes), "work": node.name}
        track.kernel(f"ncclDevKernel_{_NCCL[node.op]}", node.start_s, seconds, streams[_group(node)], **more)


def _group(node: StepNode) -> str:
    """What the stream of a message is there for."""
    return node.group or node.kind


def _work(node: StepNode) -> str:
    """The piece of work that a node is of."""
    return node.name.rpartition(", layer ")[0] or node.name.rpartition(", part ")[0] or node.name


def _trace(
    tracks: Sequence[_Events], names: Sequence[str], gpu: str, world: int, content: dict[str, Any]
) -> dict[str, Any]:
    for track in tracks:
        track.step()
    events = [event for track, name in zip(tracks, names, strict=True) for event in (*track.names(name), *track.events)]
    devices = [{"id": track.rank, "name": gpu} for track in tracks] if gpu else []
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "deviceProperties": devices,
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": world},
        "neusight_jax": plain({"schema": schema("timeline"), "version": __version__, **content}),
        "traceEvents": events,
    }


def write_timeline(path: Path | str, trace: dict[str, Any]) -> list[Path]:
    """Write a trace, whole or not at all: as FILE.json or FILE.json.gz, else as a folder of one rank a file.

    Raises: `InputError` where the folder holds something.
    """
    path, head = Path(path), {name: value for name, value in trace.items() if name != "traceEvents"}
    if path.suffix in (".json", ".gz"):
        write_atomically(path, lambda target: _write(target, head, trace["traceEvents"], path.suffix == ".gz"))
        return [path]
    info, stride = dict(trace["distributedInfo"]), trace["distributedInfo"].get("pipeline_stride", 1)
    events = {
        device: list[dict[str, Any]]() for device in sorted({event["pid"] % HOST for event in trace["traceEvents"]})
    }
    for event in trace["traceEvents"]:
        events[event["pid"] % HOST].append(event)
    with atomic_folder(path) as target:
        for device, of_device in events.items():
            rank = {"distributedInfo": {**info, "rank": device * stride}}
            _write(target / f"rank{device * stride}.json.gz", head | rank, of_device, True)
    return sorted(path.iterdir())


def _write(path: Path, head: dict[str, Any], events: Sequence[dict[str, Any]], packed: bool) -> None:
    """Write a trace as JSON, one line."""
    text = json.dumps(
        {**json.loads(json_text(head)), "traceEvents": events}, separators=(",", ": ")
    ).encode()  # readers look for "rank": 0
    path.write_bytes(gzip.compress(text, mtime=0) if packed else text)
