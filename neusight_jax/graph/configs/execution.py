"""Execution: a step of an engine's fused kernels as other software launches it, node by node.

PyTorch runs it operator by operator (Hugging Face's modules). With llama.cpp every matrix has a product of its own,
before which a kernel brings the activations to eight-bit integers where weights are packed. Few rows are multiplied by
a kernel that unpacks the weights on the way, gate and up projection with their activation in one; a prompt in batches
of `UBATCH` tokens. Activations are fp32 between products.

Source of llama.cpp: ggml-cuda.cu (`ggml_cuda_mul_mat`, `ggml_cuda_try_fuse`), mmvq.cu, mmq.cu, quantize.cu, as of
llama-cpp-python 0.3.36; `n_ubatch` of its common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.graph.kernel import matrix_product, rowwise
from neusight_jax.graph.memory import saved_of
from neusight_jax.kernels.family import UNPACK
from neusight_jax.kernels.gemm import FEW_ROWS
from neusight_jax.kernels.table import PHASES, Kernel

EXECUTIONS: tuple[str, ...] = ("eager", "compiled", "engine")
"""Software that runs a model: PyTorch, its own kernels one by one; a compiler, elementwise chains merged; an engine, or
a training framework, their fused kernels."""
ATTENTIONS: tuple[str, ...] = ("unfused", "flash")
"""Attention: two products and a softmax, or one kernel."""
LLAMA_CPP = "llama.cpp"
ENGINES: tuple[str, ...] = (LLAMA_CPP,)
"""Engines whose kernels a step may be written with, in place of those of a server."""
LAYER_NORMS: tuple[str, ...] = (*("vit", "cohere", "cohere2", "nemotron", "olmo", "phimoe", "stablelm", "starcoder2"),)
"""Types of models whose norms are layer norms, one kernel each; all others have root-mean-square norms."""
LEFT_OUT: tuple[str, ...] = ("sampling",)
"""Nodes of a server that a module's forward pass has not, and that llama.cpp runs on the host."""
WIDE = "fp32"
"""Dtype that PyTorch computes norms and softmax in, and that llama.cpp has activations in."""
UBATCH = 512.0
"""Tokens of a prompt that llama.cpp multiplies at a time."""
PACKED_BYTES = 36.0 / 32.0
"""Bytes of an activation in blocks of 32 eight-bit integers with a scale and a sum (`block_q8_1`)."""


@dataclass(frozen=True)
class _Heads:
    """Sizes of the attention of a section; lengths are the mean of its requests."""

    requests: float
    queries: float
    context: float
    heads: float
    kv_heads: float
    size: float

    @property
    def widths(self) -> tuple[float, float, float]:
        """Columns of the projections to queries, keys and values."""
        shared = self.kv_heads * self.size
        return self.heads * self.size, shared, shared


_Rule = Callable[[Node, "_Heads | None"], Node]
"""A node with the kernels it launches, of all phases of a training step; sizes of its section's attention, if any."""


def as_eager(graph: Graph, kind: str, *, attention: str | None) -> Graph:
    """The graph of a step as PyTorch launches it; of a training step with the kernels of its gradients.

    Gradients of weights are written, not added to those before: PyTorch sets them to None before a step.

    Args:
      graph: of fused kernels.
      kind: `model_type` of the model.
      attention: one of `ATTENTIONS`; None = unfused.
    """
    rules = {**_EAGER, "layernorm": _layer_norm if kind in LAYER_NORMS else _rms_norm}
    if attention == "flash":
        del rules["attention"]
    phases = PHASES[: 3 if "lora" not in graph.options else 2] if graph.mode == "training" else PHASES[:1]
    nodes, notes = _launched(graph.nodes, rules, phases), graph.notes
    if any("expert" in node.op or kernel.family == "grouped_gemm" for node in nodes for kernel in node.forward):
        notes = (*notes, "experts run as an engine's grouped kernels: PyTorch's loop over experts is not written here")
    footprint = graph.footprint
    if graph.mode == "training" and footprint is not None:
        footprint = replace(footprint, activations=saved_of(nodes).peak())
    return replace(graph, nodes=nodes, fused=False, launched="eager", notes=notes, footprint=footprint)


def as_llama_cpp(graph: Graph) -> Graph:
    """The graph of a forward step as llama.cpp launches it."""
    return replace(
        graph, nodes=_launched(graph.nodes, _GGML, PHASES[:1]), options={**graph.options, "engine": LLAMA_CPP}
    )


def _launched(nodes: Sequence[Node], rules: Mapping[str, _Rule], phases: Sequence[str]) -> tuple[Node, ...]:
    """Nodes with the kernels of the rule for the last part of their name, else for their operator.

    Nodes without a rule are one kernel either way; those left without kernels are part of another.

    Args:
      nodes: of fused kernels.
      rules: by name or operator.
      phases: that a node has: no gradients in a forward pass, and of weights none where they are frozen.
    """
    sizes, launched = _sizes(nodes), []
    # Rules write a whole training step: a forward pass launches no gradients and keeps nothing for them.
    absent: dict[str, Any] = {phase: () for phase in PHASES[:3] if phase not in phases}
    absent |= {"saved_bytes": 0.0} if "backward" in absent else {}
    for node in nodes:
        rule = rules.get(node.name.rpartition(".")[2]) or rules.get(node.op)
        if rule is not None:
            node = replace(rule(node, sizes.get(node.section)), **absent)
        if node.forward and node.name not in LEFT_OUT:
            launched.append(node)
    return tuple(launched)


def _with_kernels(
    node: Node,
    forward: Iterable[Kernel],
    backward: Iterable[Kernel],
    weight_gradient: Iterable[Kernel] = (),
    kept_bytes: float = 0.0,
) -> Node:
    """A node with other kernels in all phases.

    Args:
      node: of fused kernels.
      forward: kernels of one execution.
      backward: kernels of the gradient of the activations.
      weight_gradient: kernels of the gradient of the weights.
      kept_bytes: what it keeps for its gradients beside what it kept.
    """
    return replace(
        node,
        forward=tuple(forward),
        backward=tuple(backward),
        weight_gradient=tuple(weight_gradient),
        saved_bytes=node.saved_bytes + kept_bytes,
    )


def _sizes(nodes: Sequence[Node]) -> dict[str, _Heads]:
    """Attention's sizes by section."""
    sizes = {}
    for node in nodes:
        for kernel in node.forward:
            if kernel.family in ("prefill", "decode"):
                dims = kernel.dims
                of_one = (dims["queries"] / dims["requests"], dims["context"] / dims["requests"])
                heads = (dims["heads"], dims["kv_heads"], dims["head_size"])
                sizes[node.section] = _Heads(dims["requests"], *of_one, *heads)
    return sizes


def _columns(kernel: Kernel, widths: Sequence[float]) -> tuple[float, ...]:
    """Columns of the products that one of all of them stands for; its own where they are not as many."""
    columns = kernel.dims["n"]
    return tuple(widths) if abs(sum(widths) - columns) < 0.5 else (columns,)


def _product(node: Node) -> Kernel:
    """The first product of a node, before which another kernel may widen its weights."""
    return next(kernel for kernel in node.forward if kernel.family == "linear")


def _widening(dtype: str) -> float:
    """Bytes of an element in `WIDE` over those in its dtype."""
    return dtype_bytes(WIDE) / dtype_bytes(dtype)


# PyTorch.


def _split(node: Node, widths: Sequence[float]) -> Node:
    """Products of so many columns in place of one of all of them; as it is where they are not its columns."""
    products = [kernel for kernel in node.forward if kernel.family == "linear"]
    if any(_columns(kernel, widths) != tuple(widths) for kernel in products):
        return node
    forward, backward, learned = ([item for item in phase if item.family != "linear"] for phase in node.phases[:3])
    for kernel in products:
        rows, inner, dtype = kernel.dims["m"], kernel.dims["k"], kernel.dtype
        for width in widths:
            forward.append(replace(kernel, dims={**kernel.dims, "n": width}))
            backward.append(matrix_product(1, rows, inner, width, dtype, kernel.count))
            learned.append(matrix_product(1, width, inner, rows, dtype, kernel.count, upright=False))
        # What all of them read has a gradient from each.
        backward.append(rowwise("add", rows, inner, 2.0, 1.0, dtype, kernel.count * (len(widths) - 1.0)))
    return _with_kernels(node, forward, backward, learned)


def _turned(node: Node, heads: _Heads | None) -> Node:
    """Of queries and of keys: times cosines, halves turned (one negated, both joined), times sines, and the sum.

    Backwards each half is written into a tensor of zeros, and three gradients are added.
    """
    if heads is None:
        return node
    dtype = node.forward[0].dtype
    forward: list[Kernel] = []
    backward: list[Kernel] = []
    # Queries and keys are turned one after the other (transformers, `apply_rotary_pos_emb`).
    for count in (heads.heads, heads.kv_heads):
        rows, cols = heads.requests * heads.queries * count, heads.size
        scaled = rowwise("mul", rows, cols, 1.0 + 1.0 / count, 1.0, dtype, 2.0)
        negated = rowwise("mulu", rows, cols / 2.0, 1.0, 1.0, dtype)
        forward += (
            *(scaled, negated),
            rowwise("copy", rows, cols, 1.0, 1.0, dtype),
            rowwise("add", rows, cols, 2.0, 1.0, dtype),
        )
        backward += (
            *(scaled, negated),
            rowwise("fill", rows, cols, 0.0, 1.0, dtype, 2.0),
            rowwise("copy", rows, cols / 2.0, 1.0, 1.0, dtype, 2.0),
            rowwise("add", rows, cols, 2.0, 1.0, dtype, 2.0),
        )
    return _with_kernels(node, forward, backward)


def _layer_norm(node: Node, _: _Heads | None) -> Node:
    """The sum with the residual, then one kernel."""
    (norm,) = node.forward
    rows, cols, dtype = norm.dims["rows"], norm.dims["cols"], norm.dtype
    return _with_kernels(
        node,
        [*_residual_sum(norm), rowwise("layernorm", rows, cols, 1.0, 1.0, dtype)],
        [*_residual_sum(norm), rowwise("layernorm_backward", rows, cols, 2.0, 1.0, dtype)],
        [rowwise("layernorm_weight_gradient", rows, cols, 2.0, 2.0 / rows, dtype)],
    )


def _rms_norm(node: Node, _: _Heads | None) -> Node:
    """The sum with the residual, then the chain of a root-mean-square norm in fp32, and its gradient.

    It keeps the rows in fp32, and as they are before the weight.
    """
    (norm,) = node.forward
    rows, cols, dtype = norm.dims["rows"], norm.dims["cols"], norm.dtype
    weighted = rowwise("mul", rows, cols, 1.0 + 1.0 / rows, 1.0, dtype)
    scaled = rowwise("mul", rows, cols, 1.0 + 1.0 / cols, 1.0, WIDE)
    product = rowwise("mul", rows, cols, 2.0, 1.0, WIDE)
    mean = rowwise("reduce", rows, cols, 1.0, 1.0 / cols, WIDE)
    power = rowwise("powu", rows, cols, 1.0, 1.0, WIDE)
    forward = [
        *_residual_sum(norm),
        *_copied(rows, cols, dtype, to=WIDE),
        power,
        mean,
        rowwise("addu", rows, 1.0, 1.0, 1.0, WIDE, 2.0),
        scaled,
        *_copied(rows, cols, dtype, to=dtype),
        weighted,
    ]
    backward = [
        *_residual_sum(norm),
        weighted,
        *_copied(rows, cols, dtype, to=WIDE),
        *(scaled, product, mean),  # of the product with the root, by both
        rowwise("addu", rows, 1.0, 1.0, 1.0, WIDE, 3.0),
        rowwise("divu", rows, cols, 1.0 / cols, 1.0, WIDE),
        *(power, rowwise("mulu", rows, cols, 1.0, 1.0, WIDE), product),  # of the square
        rowwise("add", rows, cols, 2.0, 1.0, WIDE),
        *_copied(rows, cols, dtype, to=dtype),
    ]
    learned = [
        rowwise("mul", rows, cols, 2.0, 1.0, dtype),
        rowwise("reduce", rows, cols, 1.0, 1.0 / rows, dtype),
    ]
    return _with_kernels(node, forward, backward, learned, rows * cols * (dtype_bytes(WIDE) + dtype_bytes(dtype)))


def _residual_sum(norm: Kernel) -> list[Kernel]:
    """The sum that an engine's norm takes in, where it does; backwards that of the gradients of its result."""
    sizes = norm.dims["rows"], norm.dims["cols"]
    return [rowwise("add", *sizes, 2.0, 1.0, norm.dtype)] if norm.dims["reads"] >= 2.0 else []


def _activation(node: Node, _: _Heads | None) -> Node:
    """A gated activation as the function and the product, which keeps both of its operands."""
    (kernel,) = node.forward
    rows, cols, dtype = kernel.dims["rows"], kernel.dims["cols"], kernel.dtype
    forward, backward = [rowwise("gelu", rows, cols, 1.0, 1.0, dtype)], [rowwise("gelu", rows, cols, 2.0, 1.0, dtype)]
    if kernel.dims["reads"] < 2.0:
        return _with_kernels(node, forward, backward)
    product = rowwise("mul", rows, cols, 2.0, 1.0, dtype)
    return _with_kernels(
        node, [*forward, product], [*backward, product, product], kept_bytes=rows * cols * dtype_bytes(dtype)
    )


def _attention(node: Node, heads: _Heads | None) -> Node:
    """Keys and values repeated for every head, scores, their scale and mask, softmax in fp32, context, heads merged.

    It keeps the probabilities in fp32 and in the dtype of the products, and what it repeated.
    """
    if heads is None or node.forward[0].family not in ("prefill", "decode"):
        return node
    dtype, groups = node.forward[0].dtype, heads.heads / heads.kv_heads
    batch = round(heads.requests * heads.heads)
    rows, seen, size = batch * heads.queries, heads.context, heads.size
    scale = rowwise("mulu", rows, seen, 1.0, 1.0, dtype)
    merged = rowwise("copy", rows, size, 1.0, 1.0, dtype)
    forward = [
        matrix_product(batch, heads.queries, seen, size, dtype),
        scale,
        *widened_softmax(rows, seen, dtype),
        matrix_product(batch, heads.queries, size, seen, dtype),
        merged,
    ]
    backward = [
        merged,
        matrix_product(batch, heads.queries, seen, size, dtype),
        matrix_product(batch, seen, size, heads.queries, dtype),
        *_copied(rows, seen, dtype, to=WIDE),
        rowwise("mul", rows, seen, 2.0, 1.0, WIDE),
        rowwise("softmax_backward", rows, seen, 2.0, 1.0, WIDE),
        *_copied(rows, seen, dtype, to=dtype),
        scale,
        matrix_product(batch, heads.queries, size, seen, dtype),
        matrix_product(batch, seen, size, heads.queries, dtype),
    ]
    kept = rows * seen * (dtype_bytes(WIDE) + dtype_bytes(dtype))
    # A mask is there only where a key is hidden, and is one for all heads.
    if node.forward[0].dims["pairs"] < heads.requests * heads.queries * seen:
        forward.insert(2, rowwise("add", rows, seen, 1.0 + 1.0 / heads.heads, 1.0, dtype))
    if groups > 1.0:
        forward.insert(0, rowwise("copy", batch * seen, size, 1.0 / groups, 1.0, dtype, 2.0))
        backward.append(rowwise("reduce", batch * seen, size, 1.0, 1.0 / groups, dtype, 2.0))
        kept += 2.0 * batch * seen * size * dtype_bytes(dtype)
    if heads.queries < seen:  # the cache is joined with the new keys and values
        of_cache = heads.requests * heads.kv_heads * seen
        forward.insert(0, rowwise("copy", of_cache, size, 1.0, 1.0, dtype, 2.0))
    return _with_kernels(node, forward, backward, kept_bytes=kept)


def widened_softmax(rows: float, cols: float, dtype: str) -> list[Kernel]:
    """Softmax in fp32 of scores in any dtype, brought there and back.

    Args:
      rows: of scores.
      cols: scores of a row.
      dtype: that they come in.
    """
    softmax = rowwise("softmax", rows, cols, 1.0, 1.0, WIDE)
    return [*_copied(rows, cols, dtype, to=WIDE), softmax, *_copied(rows, cols, dtype, to=dtype)]


def _copied(rows: float, cols: float, dtype: str, *, to: str) -> list[Kernel]:
    """A tensor of a dtype brought to `WIDE`, or back to its own; nothing where that is as wide."""
    wide = _widening(dtype)
    passes = (1.0, wide) if to == WIDE else (wide, 1.0)
    return [rowwise("copy", rows, cols, *passes, dtype)] if wide > 1.0 else []


_EAGER: dict[str, _Rule] = {
    # Engines merge these products into one; a framework launches each by itself.
    "qkv": lambda node, heads: node if heads is None else _split(node, heads.widths),
    "gate_up": lambda node, _: _split(node, (_product(node).dims["n"] / 2.0,) * 2),
    **{"rotary": _turned, "activation": _activation, "attention": _attention},
}


# llama.cpp.


def _products(node: Node, heads: _Heads | None) -> Node:
    """A product for each matrix, of a batch of tokens at a time, and the packing of its activations."""
    last, kernels = node.name.rpartition(".")[2], []
    widths: tuple[float, ...] = ()
    if last == "qkv" and heads is not None:
        widths = heads.widths
    elif last == "gate_up" and _product(node).dims["m"] > FEW_ROWS:  # one product of few rows
        widths = (_product(node).dims["n"] / 2.0,) * 2
    # A node has a product for every way that its layers store the weight.
    for kernel in node.forward:
        if kernel.family != "linear":
            kernels.append(kernel)
            continue
        for width in _columns(kernel, widths):
            if UNPACK in kernel.dims:
                # Packed weights are multiplied by integers, so activations become such before each product.
                dtype = (kernel.instead or kernel).dtype
                sizes, packed = (kernel.dims["m"], kernel.dims["k"]), PACKED_BYTES / dtype_bytes(dtype)
                count = kernel.count
                kernels.append(rowwise("quantize", *sizes, _widening(dtype), packed, dtype, count, graphed=True))
            kernels.append(_in_batches(kernel, width))
    return replace(node, forward=tuple(kernels))


def _in_batches(kernel: Kernel, width: float) -> Kernel:
    """A product of so many columns, launched for every batch of tokens."""
    rows = min(kernel.dims["m"], UBATCH)
    times = kernel.dims["m"] / rows
    instead = None if kernel.instead is None else _in_batches(kernel.instead, width)
    dims = {**kernel.dims, "m": rows, "n": width}
    return replace(kernel, dims=dims, count=kernel.count * times, instead=instead)


def _turned_and_kept(node: Node, heads: _Heads | None) -> Node:
    """Queries and keys turned, keys and values written to the cache."""
    if heads is None:
        return node
    (kernel,), (query, key, value) = node.forward, heads.widths
    wide = _widening(kernel.dtype)
    passes = ((query, wide), (key, wide), (key, 1.0), (value, 1.0))
    dims = ({**kernel.dims, "cols": cols, "reads": wide, "writes": written} for cols, written in passes)
    return replace(node, forward=tuple(replace(kernel, dims=sizes) for sizes in dims))


def _gated(node: Node, heads: _Heads | None) -> Node:
    """An activation; of few rows, the product before it has it."""
    return replace(node, forward=()) if node.forward[0].dims["rows"] <= FEW_ROWS else _streams(node, heads)


def _streams(node: Node, _: _Heads | None) -> Node:
    """A kernel over fp32 activations; the sum with the residual is one of its own before a norm."""
    (kernel,), added = node.forward, []
    wide, reads, writes = _widening(kernel.dtype), kernel.dims["reads"], kernel.dims["writes"]
    if node.op == "layernorm" and reads >= 2.0:
        dims = {**kernel.dims, "reads": 2 * wide, "writes": wide}
        added = [replace(kernel, family="stream", op="pointwise", dims=dims)]
        reads = writes = 1.0
    kernel = replace(kernel, dims={**kernel.dims, "reads": reads * wide, "writes": writes * wide})
    return replace(node, forward=(*added, kernel))


_GGML: dict[str, _Rule] = {
    **{"linear": _products, "rotary": _turned_and_kept, "activation": _gated},
    **dict.fromkeys(("layernorm", "pointwise", "embedding"), _streams),
}
