"""Graphs of functions, and what tests count in graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.table import Kernel

F32 = jnp.float32


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(fn: Callable[..., Any], *args: Any, **options: Any) -> Graph:
    return nj.graph_from_function(fn, *args, trace_options=nj.TraceOptions(**options))


def kernels(graph: Graph) -> list[tuple[Kernel, float]]:
    """Every kernel of a graph with its launches."""
    return [(kernel, kernel.count * node.repeat) for node in graph.nodes for phase in node.phases for kernel in phase]


def products(graph: Graph) -> Counter[tuple[int, int, int, int]]:
    """Launches of matrix products by (batch, smaller and larger of M and N, K).

    A product and its transpose are one kernel: whether a weight is stored as (inputs, outputs), as flax and GPT-2 do,
    or the other way round turns M into N.
    """
    found: Counter[tuple[int, int, int, int]] = Counter()
    for kernel, count in kernels(graph):
        if kernel.family in ("linear", "bmm"):
            batch, m, n, k = (round(kernel.dims[name]) for name in ("batch", "m", "n", "k"))
            found[(batch, min(m, n), max(m, n), k)] += round(count)
    return found


def kernel_flop(kernel: Kernel) -> float:
    """FLOP of a product or convolution, 0 for all else."""
    dims = kernel.dims
    if kernel.family not in ("linear", "bmm", "conv"):
        return 0.0
    return 2.0 * dims.get("batch", dims.get("groups", 1.0)) * dims["m"] * dims["n"] * dims["k"]


def product_flop(graph: Graph, phase: int | None = None) -> float:
    """FLOP of the products and convolutions of a graph, or of one phase."""
    return sum(
        kernel_flop(kernel) * kernel.count * node.repeat
        for node in graph.nodes
        for position, found in enumerate(node.phases)
        if phase in (None, position)
        for kernel in found
    )


def conv_kernels(graph: Graph) -> dict[str, float]:
    """FLOP of convolutions by pass."""
    found: dict[str, float] = {}
    for kernel, count in kernels(graph):
        if kernel.family == "conv" or kernel.op.startswith("depthwise"):
            op, dims = kernel.op.removeprefix("depthwise_"), kernel.dims
            flop = 2.0 * dims["taps"] * dims["rows"] * dims["cols"] if "taps" in dims else kernel_flop(kernel)
            found[op] = found.get(op, 0.0) + flop * count
    return found
