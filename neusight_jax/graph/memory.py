"""Device memory a workload needs, estimated from its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import OPTIMIZER_BYTES, RUNTIME_BYTES, Footprint, Graph, Node
from neusight_jax.kernels.family import is_traced, largest

INPUT_NOT_SAVED: frozenset[str] = frozenset(
    {"add", "addu", "mulu", "divu", "where", "copy", "dropout", "softmax", "tanh", "relu", "embedding", "gradient_sum"}
)
"""Operators whose gradient does not need what they read."""
OUTPUT_SAVED: frozenset[str] = frozenset({"softmax", "tanh", "relu"})
"""Operators whose gradient needs what they wrote."""
NO_OUTPUT: frozenset[str] = frozenset({"small", "views", "gradient_sum"})
"""Nodes that stand for no tensor of the forward pass."""

CROWDED_SHARE = 0.85
"""A training step that needs more than this share of the memory, by estimate, is crowded: the estimate is right to a
fifth."""


REBUILT: dict[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "norm": ("layernorm",),
    "activation": ("pointwise", "experts"),
}
"""Operators of fused layers that can be run again by themselves (Megatron-Core, `--recompute-modules`: core_attn,
layernorm, moe_act), with the `op` of their nodes."""


class Saved(NamedTuple):
    """What a forward pass keeps for its backward pass, bytes of one micro-batch.

    Attributes:
      layers: of all layers; ends: of embedding, head and loss.
      widest: of the operator of a layer that keeps most, about what the gradients inside a layer take.
      rebuilt: the part of `layers` that goes where one of `REBUILT` is run again, by operator.
    """

    layers: float
    ends: float = 0.0
    widest: float = 0.0
    rebuilt: tuple[float, ...] = (0.0,) * len(REBUILT)

    def peak(self) -> float:
        """Most of one micro-batch with nothing run again: after the loss, or in a layer's backward pass."""
        peak: float = self.layers + largest(self.ends, self.widest)
        return peak


def summed_saved(parts: Sequence[tuple[Saved, int]]) -> Saved:
    """`Saved` of several pieces of a stage, each so many times."""
    return Saved(
        layers=sum(saved.layers * times for saved, times in parts),
        ends=sum(saved.ends * times for saved, times in parts),
        widest=max((saved.widest for saved, _ in parts), default=0.0),
        rebuilt=tuple(sum(saved.rebuilt[at] * times for saved, times in parts) for at in range(len(REBUILT))),
    )


def is_rebuilt(node: Node, operator: str) -> bool:
    """Whether a node is run again where an operator of `REBUILT` is; attention always, others where they keep less."""
    rebuilt = operator == "attention" or is_traced(node.rebuilt_bytes) or node.rebuilt_bytes > 0
    return bool(node.section) and node.op in REBUILT[operator] and rebuilt


def saved_of(nodes: Sequence[Node]) -> Saved:
    """`Saved` of fused steps, whose nodes say what they keep."""
    inner, ends = [node for node in nodes if node.section], [node for node in nodes if not node.section]
    return Saved(
        layers=sum(node.saved_bytes * node.repeat for node in inner),
        ends=sum(node.saved_bytes for node in ends),
        widest=largest(*(node.saved_bytes for node in inner)),
        rebuilt=tuple(
            sum(node.rebuilt_bytes * node.repeat for node in inner if is_rebuilt(node, operator))
            for operator in REBUILT
        ),
    )


def training_bytes(
    trained: float, weight_bytes: float, gradient_bytes: float, state_bytes: float = OPTIMIZER_BYTES
) -> dict[str, float]:
    """Bytes of gradients and of an optimizer's states, by the names of `Footprint`.

    Weights of fewer than four bytes have a copy in fp32 among the states. With AdamW a 16-bit weight takes 18 bytes
    (Megatron-LM, distributed optimizer: gradients in fp32), or 16 with gradients in 16 bits (ZeRO, Rajbhandari et al.).

    Args:
      trained: elements of the parameters that are trained.
      weight_bytes: of an element as the model computes with it.
      gradient_bytes: of an element's gradient.
      state_bytes: of an element's optimizer states, without the copy; Adam's unless others are given.
    """
    copy = 4.0 if weight_bytes < 4.0 else 0.0
    return {"gradients": trained * gradient_bytes, "optimizer": trained * (state_bytes + copy)}


def parameter_count(graph: Graph) -> float:
    """Elements of all parameters, each once, as the front-end says; else those of all products, layers repeated."""
    if graph.parameters is not None:
        return graph.parameters
    return float(
        sum(
            kernel.dims["n"] * kernel.dims["k"] * kernel.count * node.repeat
            for node in graph.nodes
            for kernel in node.forward
            if kernel.family == "linear"
        )
    )


def _saved_bytes(graph: Graph) -> float:
    """Bytes of what the backward pass needs: outputs that a gradient reads or keeps, and a byte of each mask."""
    needed = {operand.name for node in graph.nodes if node.op not in INPUT_NOT_SAVED for operand in node.operands}
    read = {operand.name for node in graph.nodes for operand in node.operands}
    elements = masks = 0.0
    for node in graph.nodes:
        output = math.prod(node.shape) * node.repeat
        unread = node.name not in read and node.op not in NO_OUTPUT
        elements += output * (node.op in OUTPUT_SAVED or node.name in needed or unread)
        masks += output * (node.op == "dropout")
    return float(elements * dtype_bytes(graph.dtype) + masks)


def footprint(graph: Graph) -> Footprint:
    """Memory of a workload by what holds it: an estimate, right to perhaps a fifth.

    Inference holds the weights and the largest node's operands and output. Training holds weights, gradients, Adam's
    states (`training_bytes`) and what the backward pass needs of the forward one, nothing recomputed. Traced programs
    and decoders say it themselves, those with what is alive at each operation (`graph.traced.memory`), these with their
    KV cache.
    """
    if graph.footprint is not None:
        return graph.footprint
    size, parameters, training = dtype_bytes(graph.dtype), parameter_count(graph), graph.mode == "training"
    states = training_bytes(parameters * training, size, dtype_bytes("fp32"))
    widest = max(math.prod(node.shape) + sum(operand.elements for operand in node.operands) for node in graph.nodes)
    return Footprint(
        weights=parameters * size,
        **states,
        activations=_saved_bytes(graph) if training else widest * size,
        runtime=RUNTIME_BYTES,
    )


def memory_bytes(graph: Graph) -> float:
    """Bytes a workload needs, `footprint` in one number."""
    return footprint(graph).total


def longest_context(graph: Graph, mem_bytes: float) -> int | None:
    """Tokens that the sequence of every request could have in a memory, 0 = none; None where the graph does not say."""
    if not graph.context_bytes:
        return None
    return max(graph.sequence_length + math.floor((mem_bytes - memory_bytes(graph)) / graph.context_bytes), 0)


def offload_notes(graph: Graph, mem_bytes: float) -> tuple[str, ...]:
    """A note where an engine would leave layers to the CPU; none elsewhere."""
    if "engine" not in graph.options or memory_bytes(graph) <= mem_bytes:
        return ()
    return ("does not fit: llama.cpp would run some layers on the CPU (partial offload), which is not modelled here",)


def crowded_notes(needed_bytes: float, mem_bytes: float) -> tuple[str, ...]:
    """Notes on a training step that nearly fills the memory, or exceeds it; none of any other."""
    share = needed_bytes / mem_bytes if mem_bytes > 0 else 0.0
    if share <= CROWDED_SHARE:
        return ()
    return (
        f"this step needs about {share:.0%} of the memory: it may not fit, and where it just does, the framework's "
        "allocator may cost time that is not in this forecast",
    )
