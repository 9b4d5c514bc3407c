"""Execution by llama.cpp: a step of an engine's fused kernels as ggml's CUDA backend launches it.

Every matrix has a product of its own, before which a kernel brings the activations to eight-bit integers where weights
are packed. Few rows are multiplied by a kernel that unpacks the weights on the way, gate and up projection with their
activation in one; a prompt in batches of `UBATCH` tokens. Activations are fp32 between products. Sampling is the
host's.

Source: ggml-cuda.cu (`ggml_cuda_mul_mat`, `ggml_cuda_try_fuse`), mmvq.cu, mmq.cu, quantize.cu of llama.cpp, as of
llama-cpp-python 0.3.36; `n_ubatch` of its common.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.kernels.family import UNPACK
from neusight_jax.kernels.gemm import FEW_ROWS
from neusight_jax.kernels.table import Kernel

LLAMA_CPP = "llama.cpp"
ENGINES: tuple[str, ...] = (LLAMA_CPP,)
"""Engines whose kernels a step may be written with, in place of those of a server."""
UBATCH = 512.0
"""Tokens of a prompt that are multiplied at a time."""
LEFT_OUT: tuple[str, ...] = ("sampling",)
"""Nodes of a server that run on the host."""
PACKED_BYTES = 36.0 / 32.0
"""Bytes of an activation in blocks of 32 eight-bit integers with a scale and a sum (`block_q8_1`)."""


def as_llama_cpp(graph: Graph) -> Graph:
    """The graph of a forward step as llama.cpp launches it."""
    widths = _projection_widths(graph.nodes)
    nodes = []
    for node in graph.nodes:
        last = node.name.rpartition(".")[2]
        if node.name in LEFT_OUT or (last == "activation" and _few(node)):
            continue
        if node.op == "linear":
            kernels = _products(node, widths.get(node.section, ()) if last == "qkv" else _halves(node, last))
        elif last == "rotary":
            kernels = _rotary(node, widths.get(node.section, ()))
        elif node.op in ("layernorm", "pointwise", "embedding"):
            kernels = [part for kernel in node.forward for part in _streams(node, kernel)]
        else:
            kernels = list(node.forward)
        nodes.append(replace(node, forward=tuple(kernels)))
    return replace(graph, nodes=tuple(nodes))


def _projection_widths(nodes: Sequence[Node]) -> dict[str, tuple[float, ...]]:
    """Outputs of the projections to queries, keys and values, by section."""
    widths: dict[str, tuple[float, ...]] = {}
    for node in nodes:
        for kernel in node.forward:
            if kernel.family in ("prefill", "decode"):
                size, heads = kernel.dims["head_size"], kernel.dims["kv_heads"]
                widths[node.section] = (kernel.dims["heads"] * size, heads * size, heads * size)
    return widths


def _few(node: Node) -> bool:
    """Whether a node works on so few rows that its product unpacks weights on the way."""
    return all(kernel.dims["rows"] <= FEW_ROWS for kernel in node.forward)


def _halves(node: Node, last: str) -> tuple[float, ...]:
    """Outputs of gate and up projection, two products but for few rows."""
    product = node.forward[0].dims
    return (product["n"] / 2.0, product["n"] / 2.0) if last == "gate_up" and product["m"] > FEW_ROWS else ()


def _products(node: Node, widths: Sequence[float]) -> list[Kernel]:
    """A product for each matrix, of a batch of tokens at a time, and the packing of its activations."""
    kernels = []
    for kernel in node.forward:
        if kernel.family != "linear":
            kernels.append(kernel)
            continue
        columns = widths if abs(sum(widths) - kernel.dims["n"]) < 0.5 else (kernel.dims["n"],)
        for width in columns:
            if UNPACK in kernel.dims:
                kernels.append(_packing(kernel))
            kernels.append(_in_batches(kernel, width))
    return kernels


def _in_batches(kernel: Kernel, width: float) -> Kernel:
    """A product of so many columns, launched for every batch of tokens."""
    rows = min(kernel.dims["m"], UBATCH)
    times = kernel.dims["m"] / rows
    instead = None if kernel.instead is None else _in_batches(kernel.instead, width)
    dims = {**kernel.dims, "m": rows, "n": width}
    return replace(kernel, dims=dims, count=kernel.count * times, instead=instead)


def _packing(kernel: Kernel) -> Kernel:
    """The kernel that brings activations to eight-bit integers before a product."""
    dtype = (kernel.instead or kernel).dtype
    size = dtype_bytes(dtype)
    passes = {"reads": dtype_bytes("fp32") / size, "writes": PACKED_BYTES / size}
    rows, cols = kernel.dims["m"], kernel.dims["k"]
    return Kernel("stream", "quantize", {"rows": rows, "cols": cols, **passes}, kernel.count, dtype)


def _rotary(node: Node, widths: Sequence[float]) -> list[Kernel]:
    """Queries and keys turned, keys and values written to the cache."""
    kernels = []
    for kernel in node.forward:
        if not widths:
            return list(node.forward)
        wide = dtype_bytes("fp32") / dtype_bytes(kernel.dtype)
        query, key, value = widths
        for cols, written in ((query, wide), (key, wide), (key, 1.0), (value, 1.0)):
            dims = {**kernel.dims, "cols": cols, "reads": wide, "writes": written}
            kernels.append(replace(kernel, dims=dims))
    return kernels


def _streams(node: Node, kernel: Kernel) -> list[Kernel]:
    """A kernel over fp32 activations; the sum with the residual is one of its own before a norm."""
    wide = dtype_bytes("fp32") / dtype_bytes(kernel.dtype)
    reads, writes = kernel.dims["reads"], kernel.dims["writes"]
    if node.op != "layernorm" or reads < 2.0:
        return [replace(kernel, dims={**kernel.dims, "reads": reads * wide, "writes": writes * wide})]
    total = replace(kernel, family="stream", op="pointwise", dims={**kernel.dims, "reads": 2 * wide, "writes": wide})
    return [total, replace(kernel, dims={**kernel.dims, "reads": wide, "writes": wide})]
