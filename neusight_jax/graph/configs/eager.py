"""Eager execution: a step of fused kernels as PyTorch runs it, operator by operator (Hugging Face's modules)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.graph.kernel import matrix_product
from neusight_jax.kernels.table import Kernel

EXECUTIONS: tuple[str, ...] = ("eager", "compiled", "engine")
"""Software that runs a model: PyTorch, its own kernels one by one; a compiler, elementwise chains merged; an engine, or
a training framework, their fused kernels."""
ATTENTIONS: tuple[str, ...] = ("unfused", "flash")
"""Attention: two products and a softmax, or one kernel."""
LAYER_NORMS: tuple[str, ...] = (*("vit", "cohere", "cohere2", "nemotron", "olmo", "phimoe", "stablelm", "starcoder2"),)
"""Types of models whose norms are layer norms, one kernel each; all others have root-mean-square norms."""
LEFT_OUT: tuple[str, ...] = ("sampling",)
"""Nodes of an engine that the forward pass of a module has not."""
WIDE = "fp32"
"""Dtype that norms and softmax are computed in."""


@dataclass(frozen=True)
class _Heads:
    """Sizes of the attention that a node of projections or rotations belongs to."""

    requests: float
    queries: float
    context: float
    heads: float
    kv_heads: float
    size: float


def as_eager(graph: Graph, kind: str, *, attention: str | None) -> Graph:
    """The graph of a forward pass as PyTorch launches it.

    Args:
      graph: of fused kernels.
      kind: `model_type` of the model.
      attention: one of `ATTENTIONS`; None = unfused.
    """
    sizes, rules, nodes = (
        _heads(graph.nodes),
        {**_RULES, "layernorm": _layer_norm if kind in LAYER_NORMS else _rms_norm},
        [],
    )
    for node in graph.nodes:
        if node.name in LEFT_OUT:
            continue
        rule = rules.get(node.name.rpartition(".")[2]) or rules.get(node.op)
        if node.op == "attention" and attention == "flash":
            rule = None
        kernels = node.forward if rule is None else tuple(rule(node, sizes.get(node.section)))
        nodes.append(replace(node, forward=kernels))
    notes = graph.notes
    if any("expert" in node.op or kernel.family == "grouped_gemm" for node in nodes for kernel in node.forward):
        notes = (*notes, "experts run as an engine's grouped kernels: PyTorch's loop over experts is not written here")
    return replace(graph, nodes=tuple(nodes), fused=False, launched="eager", notes=notes)


def _heads(nodes: Sequence[Node]) -> dict[str, _Heads]:
    """Attention's sizes by section; the mean of requests of several lengths."""
    sizes = {}
    for node in nodes:
        for kernel in node.forward:
            if kernel.family in ("prefill", "decode"):
                dims = kernel.dims
                of_one = (dims["queries"] / dims["requests"], dims["context"] / dims["requests"])
                sizes[node.section] = _Heads(
                    dims["requests"], *of_one, dims["heads"], dims["kv_heads"], dims["head_size"]
                )
    return sizes


def _pass(
    family: str, op: str, rows: float, cols: float, reads: float, writes: float, dtype: str, count: float = 1.0
) -> Kernel:
    """A kernel that streams rows × cols; reads and writes in passes of its dtype."""
    return Kernel(family, op, {"rows": rows, "cols": cols, "reads": reads, "writes": writes}, count, dtype)


def _projections(node: Node, heads: _Heads | None) -> list[Kernel]:
    """Queries, keys and values by products of their own, where engines merge them into one."""
    if heads is None:
        return list(node.forward)
    query, other = heads.heads * heads.size, heads.kv_heads * heads.size
    return _split(node, (query, other, other))


def _halves(node: Node, heads: _Heads | None) -> list[Kernel]:
    """The gate and the up projection likewise."""
    del heads
    width = sum(kernel.dims["n"] for kernel in node.forward[:1])
    return _split(node, (width / 2.0, width / 2.0))


def _split(node: Node, widths: Sequence[float]) -> list[Kernel]:
    """Products of so many columns in place of one of all of them; as it is where they are not its columns."""
    kernels = []
    for kernel in node.forward:
        columns = [width for width in widths if kernel.family == "linear"]
        if abs(sum(columns) - kernel.dims.get("n", 0.0)) > 0.5:
            return list(node.forward)
        kernels += [replace(kernel, dims={**kernel.dims, "n": width}) for width in columns]
    return kernels


def _rotary(node: Node, heads: _Heads | None) -> list[Kernel]:
    """Of queries and of keys: times cosines, halves turned (one negated, both joined), times sines, and the sum."""
    if heads is None:
        return list(node.forward)
    dtype, kernels = node.forward[0].dtype, []
    for count in (heads.heads, heads.kv_heads):
        rows, cols = heads.requests * heads.queries * count, heads.size
        kernels += [
            _pass("elementwise", "mul", rows, cols, 1.0 + 1.0 / count, 1.0, dtype, 2.0),
            _pass("elementwise", "mulu", rows, cols / 2.0, 1.0, 1.0, dtype),
            _pass("memory", "copy", rows, cols, 1.0, 1.0, dtype),
            _pass("elementwise", "add", rows, cols, 2.0, 1.0, dtype),
        ]
    return kernels


def _layer_norm(node: Node, heads: _Heads | None) -> list[Kernel]:
    """The sum with the residual, then one kernel."""
    del heads
    kernels = []
    for kernel in node.forward:
        rows, cols, dtype = kernel.dims["rows"], kernel.dims["cols"], kernel.dtype
        kernels += _residual(kernel)
        kernels.append(_pass("norm", "layernorm", rows, cols, 1.0, 1.0, dtype, kernel.count))
    return kernels


def _rms_norm(node: Node, heads: _Heads | None) -> list[Kernel]:
    """The sum with the residual, then the chain of a root-mean-square norm in fp32."""
    del heads
    kernels = []
    for kernel in node.forward:
        rows, cols, dtype = kernel.dims["rows"], kernel.dims["cols"], kernel.dtype
        wide = dtype_bytes(WIDE) / dtype_bytes(dtype)
        kernels += [
            *_residual(kernel),
            *([_pass("memory", "copy", rows, cols, 1.0, wide, dtype)] if wide > 1.0 else []),
            _pass("elementwise", "powu", rows, cols, 1.0, 1.0, WIDE),
            _pass("memory", "reduce", rows, cols, 1.0, 1.0 / cols, WIDE),
            _pass("elementwise", "addu", rows, 1.0, 1.0, 1.0, WIDE, 2.0),
            _pass("elementwise", "mul", rows, cols, 1.0 + 1.0 / cols, 1.0, WIDE),
            *([_pass("memory", "copy", rows, cols, wide, 1.0, dtype)] if wide > 1.0 else []),
            _pass("elementwise", "mul", rows, cols, 1.0 + 1.0 / rows, 1.0, dtype),
        ]
    return kernels


def _residual(norm: Kernel) -> list[Kernel]:
    """The sum that an engine's norm takes in, where it does."""
    if norm.dims["reads"] < 2.0:
        return []
    return [_pass("elementwise", "add", norm.dims["rows"], norm.dims["cols"], 2.0, 1.0, norm.dtype, norm.count)]


def _activation(node: Node, heads: _Heads | None) -> list[Kernel]:
    """A gated activation as the function and the product."""
    del heads
    kernels = []
    for kernel in node.forward:
        sizes = kernel.dims["rows"], kernel.dims["cols"]
        kernels.append(_pass("elementwise", "gelu", *sizes, 1.0, 1.0, kernel.dtype, kernel.count))
        if kernel.dims["reads"] >= 2.0:
            kernels.append(_pass("elementwise", "mul", *sizes, 2.0, 1.0, kernel.dtype, kernel.count))
    return kernels


def _attention(node: Node, heads: _Heads | None) -> list[Kernel]:
    """Keys and values repeated for every head, scores, their scale and mask, softmax in fp32, context, heads merged."""
    if heads is None or node.forward[0].family not in ("prefill", "decode"):
        return list(node.forward)
    dtype, groups = node.forward[0].dtype, heads.heads / heads.kv_heads
    batch = round(heads.requests * heads.heads)
    rows, seen = batch * heads.queries, heads.context
    kernels = [
        matrix_product(batch, heads.queries, seen, heads.size, dtype),
        _pass("elementwise", "mulu", rows, seen, 1.0, 1.0, dtype),
        *widened_softmax(rows, seen, dtype),
        matrix_product(batch, heads.queries, heads.size, seen, dtype),
        _pass("memory", "copy", rows, heads.size, 1.0, 1.0, dtype),
    ]
    if node.forward[0].dims["pairs"] < heads.requests * heads.queries * seen:
        kernels.insert(2, _pass("elementwise", "add", rows, seen, 1.0 + 1.0 / heads.heads, 1.0, dtype))
    if groups > 1.0:
        repeated = _pass("memory", "copy", batch * seen, heads.size, 1.0 / groups, 1.0, dtype, 2.0)
        kernels.insert(0, repeated)
    if heads.queries < seen:  # the cache is joined with the new keys and values
        of_cache = heads.requests * heads.kv_heads * seen
        kernels.insert(0, _pass("memory", "copy", of_cache, heads.size, 1.0, 1.0, dtype, 2.0))
    return kernels


def widened_softmax(rows: float, cols: float, dtype: str) -> list[Kernel]:
    """Softmax in fp32 of scores in any dtype, brought there and back.

    Args:
      rows: of scores.
      cols: scores of a row.
      dtype: that they come in.
    """
    wide = dtype_bytes(WIDE) / dtype_bytes(dtype)
    softmax = _pass("softmax", "softmax", rows, cols, 1.0, 1.0, WIDE)
    if wide <= 1.0:
        return [softmax]
    to, fro = ((1.0, wide), (wide, 1.0))
    return [
        _pass("memory", "copy", rows, cols, *to, dtype),
        softmax,
        _pass("memory", "copy", rows, cols, *fro, dtype),
    ]


_Rule = Callable[[Node, "_Heads | None"], list[Kernel]]
_RULES: dict[str, _Rule] = {
    **{"qkv": _projections, "gate_up": _halves, "rotary": _rotary, "activation": _activation},
    "attention": _attention,
}
"""Rules by the last part of a node's name, else by its operator, norms apart; other nodes are one kernel either way."""
