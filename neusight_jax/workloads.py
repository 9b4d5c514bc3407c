"""Workloads: what a graph works on as plain values, and what a sweep or a design makes of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import SPLITS, Graph
from neusight_jax.hardware.cluster import Cluster, Machine
from neusight_jax.hardware.files import usual_server, usual_topology
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.table import KernelTable, distinct
from neusight_jax.records import Record

if TYPE_CHECKING:
    from neusight_jax.designs.loads import Service
    from neusight_jax.designs.model import ModelUse
    from neusight_jax.job.job import Job, Plan


def workload_dict(work: Graph | Job) -> dict[str, Any]:
    """The whole workload as plain values: what every result says it is of.

    Keys of a graph: model, mode, dtype, batch_size, sequence_length, fused, tokens (of one step), num_gpus, and
    `Graph.options`; those that a front-end does not know have the value of a model that is not split.
    Keys of a job: of its `Plan`, with the layout's fields and `gpus` as `layout`, and num_gpus.
    """
    return _graph_dict(work) if isinstance(work, Graph) else plan_dict(work.plan)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The workload of a job's plan as plain values."""
    names = ("model", "mode", "dtype", "optimizer", "gradient_dtype", "global_batch_size", "sequence_length")
    layout = {**asdict(plan.layout), "gpus": plan.layout.gpus}
    lora = {} if plan.lora is None else {"lora": plan.lora.values()}
    stated = {name: getattr(plan, name) for name in (*names, "micro_batches")}
    return {**stated, **plan.recipe.values(), **lora, "layout": layout, "num_gpus": plan.layout.gpus}


def _graph_dict(graph: Graph) -> dict[str, Any]:
    names = ("mode", "dtype", "batch_size", "sequence_length", "fused")
    return {
        "model": graph.name,
        **{name: getattr(graph, name) for name in names},
        "tokens": graph.step_tokens,
        "kv_length": None,
        "weight_dtype": graph.dtype,
        "kv_dtype": None,
        **dict.fromkeys(SPLITS, 1),
        **graph.options,
        "num_gpus": graph.num_gpus,
    }


def usual_machine(name: str, gpu: GPU, work: Graph | Job) -> Machine:
    """A GPU, or as many of it as work occupies in their usual servers; name: of the GPU."""
    if work.num_gpus == 1:
        return gpu
    if isinstance(work, Graph):
        return usual_server(name, gpu)
    return Cluster(gpu, usual_topology(name, gpu, work.num_gpus), work.num_gpus)


def workload_text(load: Mapping[str, Any], gpu: str = "") -> str:
    """A `workload_dict` in one line: model (on a GPU), mode, sizes, dtypes, how it is split; or the load of a job."""
    where = f" on {gpu}" if gpu else ""
    if "global_batch_size" in load:
        sizes = f"{load['global_batch_size']} x {load['sequence_length']} tokens, " if load["sequence_length"] else ""
        return f"{load['model']}{where}: {load['mode']}, {sizes}{load['dtype']}"
    parts = [str(load["mode"])]
    if load["sequence_length"]:
        parts += [f"batch {load['batch_size']}", f"sequence {load['sequence_length']}"]
    if load["mode"] == "prefill" and load.get("new_tokens") not in (None, load["sequence_length"]):
        parts.append(f"new tokens {_lengths(load['new_tokens'])}")
    if load["kv_length"] not in (None, load["sequence_length"]):
        parts.append(f"KV length {_lengths(load['kv_length'])}")
    parts.append(str(load["dtype"]))
    if load["weight_dtype"] not in (None, load["dtype"]):
        parts.append(f"weights {load['weight_dtype']}")
    if load.get("engine"):
        parts.append(str(load["engine"]))
    if load["kv_dtype"] not in (None, load["dtype"]) and load["mode"] in ("prefill", "decode"):
        parts.append(f"KV cache {load['kv_dtype']}")
    if load.get("lora"):
        parts.append(f"LoRA of rank {load['lora']['rank']}")
    if load["fused"]:
        parts.append("fused")
    split = [f"{load[name]}-way {name.split('_')[0]} parallel" for name in SPLITS if load[name] != 1]
    whose = f" (one of {load['num_gpus']} GPUs: {', '.join(split)})" if split else ""
    return f"{load['model']}{where}: {', '.join(parts)}{whose}"


_SHOWN = 8
"""Most lengths of requests that are listed."""


def _lengths(value: int | Sequence[int]) -> str:
    """Lengths of requests, many of them by their range."""
    if isinstance(value, int):
        return str(value)
    lengths = ", ".join(map(str, value))
    return lengths if len(value) <= _SHOWN else f"{min(value)} to {max(value)}, {sum(value)} in all"


@dataclass(frozen=True)
class Workload(Record):
    """A model at work.

    Attributes:
      name: unique among the workloads it is used with.
      graph: the model and its workload.
      kernels: its distinct kernels.
      weight: how much it counts beside others, > 0.
      step: what a step is where it is more than the kernels of the graph one after another: that of a job, on many
        GPUs or on one; a request to a model served within targets (`designs.loads`); a batch of requests to a model
        whose sizes may vary (`designs.model`).
    """

    name: str
    graph: Graph
    kernels: KernelTable
    weight: float = 1.0
    step: Job | Service | ModelUse | None = None

    def summary(self) -> str:
        """Its name and weight."""
        return f"{self.name}, weight {self.weight:g}"

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.graph.step_tokens


def workload(work: Graph | Job, weight: float = 1.0, name: str = "") -> Workload:
    """A workload from a graph or a job.

    It is called "MODEL MODE batch×sequence", or of a job "MODEL training on N GPUs", unless it is given a name.
    """
    if not weight > 0:
        raise InputError(f"weight of {work.name} is {weight:g}, expected a positive number")
    if isinstance(work, Graph):
        graph, step, called = work, None, f"{work.name} {work.mode} {work.batch_size}x{work.sequence_length}"
        if work.launched == "eager":
            from neusight_jax.job.job import job_from_graph

            step = job_from_graph(work)
    else:
        graph, step, called = _described(work.plan), work, f"{work.name} {work.mode} on {work.num_gpus} GPUs"
    kernels = distinct(graph.kernels) if step is None else step.kernels
    return Workload(name or called, graph, kernels, float(weight), step)


def _described(plan: Plan) -> Graph:
    """The workload of a job, as a graph without nodes."""
    fields = ("model", "mode", "dtype")
    options = {key: value for key, value in plan_dict(plan).items() if key not in fields}
    return Graph(
        plan.model,
        (),
        plan.mode,
        plan.dtype,
        plan.global_batch_size,
        plan.sequence_length,
        True,
        tokens=plan.tokens,
        footprint=plan.memory,
        options={**options, "gpus": plan.layout.gpus},
        notes=plan.notes,
    )


def combined(loads: Sequence[Workload]) -> tuple[KernelTable, dict[str, Float[np.ndarray, "workload kernel"]]]:
    """One table of all workloads' kernels, and how often each workload launches each: one program for all of them."""
    families, counts = {}, {}
    for name in dict.fromkeys(name for load in loads for name in load.kernels.families):
        batches = {
            place: load.kernels.families[name] for place, load in enumerate(loads) if name in load.kernels.families
        }
        columns: Any = jax.tree.map(lambda *parts: np.concatenate(parts), *batches.values())
        families[name] = columns
        owner = np.repeat(list(batches), [len(batch.row) for batch in batches.values()])
        counts[name] = np.where(owner == np.arange(len(loads))[:, None], columns.count, 0.0).astype(np.float32)
    # Loads of engines have none of the families that a host's launches bind.
    by_host = any(load.kernels.launched == "host" for load in loads)
    return KernelTable(families, "host" if by_host else "graph"), counts
