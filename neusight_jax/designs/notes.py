"""What to know of a design before trusting it: bounds it ends on, what nobody measured, workloads that are unlike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from neusight_jax.designs.problem import Problem
from neusight_jax.hardware.catalog import catalog_gpu, list_gpus
from neusight_jax.hardware.cluster import Cluster, Machine
from neusight_jax.hardware.cluster_file import list_nodes, node_topology
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.hardware.variant import figure
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.memory import memory_bytes
from neusight_jax.model.intervals import far_note
from neusight_jax.sweeps.space import Range
from neusight_jax.units import with_unit

AT_BOUND = 1e-3
"""A field is at its bound within this distance in log."""


def ends_of(ranges: Sequence[Range], figures: Mapping[str, float]) -> dict[str, str]:
    """Fields that ended on a bound of their range: "low", "high", or "low and high" where the range is one value."""
    out = {}
    for each in ranges:
        ends = {"low": float(each.rounded(each.low)), "high": float(each.rounded(each.high))}
        met = [end for end, value in ends.items() if abs(np.log(figures[each.field] / value)) < AT_BOUND]
        if met:
            out[each.field] = " and ".join(met)
    return out


def bound_notes(ranges: Sequence[Range], figures: Mapping[str, float]) -> list[str]:
    """A sentence for every field that ended on a bound of its range, or outside all GPUs of the catalog."""
    said = []
    for field, end in ends_of(ranges, figures).items():
        wider = "" if end == "low and high" else "; a wider --free may give another answer"
        said.append(f"{field} ends on the {end} bound of its range, {with_unit(field, figures[field])}{wider}")
    for each in ranges:
        low, high = _catalog_range(each.field)
        value = figures[each.field]
        if not low <= value <= high:
            what = "GPU" if each.field in FIELDS else "server"
            span = f"{with_unit(each.field, low)} to {with_unit(each.field, high)}"
            said.append(
                f"{each.field} of {with_unit(each.field, value)} is outside every {what} of the catalog ({span})"
            )
    return said


@cache
def _catalog_range(field: str) -> tuple[float, float]:
    """Smallest and largest value of a figure among the GPUs, or servers, of the catalog that have it."""
    if field in FIELDS:
        machines: list[Machine] = [catalog_gpu(name) for name in list_gpus()]
    else:  # of links and networks: the usual servers
        gpu = catalog_gpu(list_gpus()[0])
        machines = [Cluster(gpu, node_topology(name, gpu), 1) for name in list_nodes()]
    values = [value for each in machines if (value := float(np.asarray(figure(each, field)))) > 0]
    return (min(values), max(values)) if values else (0.0, np.inf)


def workload_notes(problem: Problem) -> list[str]:
    """What the graphs assumed, and whether eager and fused ones count in one objective."""
    graphs = [load.graph for load in problem.workloads]
    said = list(dict.fromkeys(note for graph in graphs for note in graph.notes))
    names = {fused: [load.name for load in problem.workloads if load.graph.fused is fused] for fused in (True, False)}
    if names[True] and names[False]:
        said.append(
            f"one objective mixes eager and fused workloads: {', '.join(names[False])} with every elementwise kernel "
            f"by itself, {', '.join(names[True])} with them merged; --fused merges all"
        )
    return said


def machine_notes(problem: Problem, gpu: GPU, family_s: Mapping[str, Any]) -> list[str]:
    """How far a machine lies from those measured, and what does not fit into its memory.

    Args:
      family_s: seconds on it by family, of all workloads.
    """
    intervals = getattr(problem.predictor, "intervals", None)
    said = []
    if intervals is not None:
        network = np.array([FAMILIES[name].network for name in family_s])
        seconds = np.array([float(np.sum(each)) for each in family_s.values()])
        said += far_note(intervals, gpu, network, seconds, "extrapolated")
    for load in problem.workloads:
        needed, there = memory_bytes(load.graph) if load.service is None else 0.0, float(np.asarray(gpu.mem_bytes))
        if needed > there:
            said.append(
                f"{load.name} may not fit: it needs about {with_unit('mem_bytes', needed)} of memory, the machine has "
                f"{with_unit('mem_bytes', there)}"
            )
    return said


def coincidence_note(metric: str, limits: Sequence[float], binding: Sequence[str]) -> str:
    """A sentence for limits of a front that do not bind, or gave nothing better than smaller ones; `binding` does."""
    listed = ", ".join(with_unit(metric, limit) for limit in limits)
    if not binding:
        return f"{metric} up to {listed} gives no better design than less of it: there is no use for more"
    points = "points of the front coincide" if len(limits) > 1 else "a point of the front is not at its limit"
    return f"{points}, {metric} up to {listed}: what holds the design there is {', '.join(binding)}"


def infeasible_note(metric: str, limits: Sequence[float]) -> str:
    """A sentence for limits of a front that no machine keeps together with the budgets."""
    listed = ", ".join(with_unit(metric, limit) for limit in limits)
    return f"no machine in the bounds keeps every budget with {metric} up to {listed}: no point there"
