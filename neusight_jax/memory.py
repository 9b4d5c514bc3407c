"""Device memory a workload needs, estimated from its graph."""

from __future__ import annotations

import math

from neusight_jax.arithmetic import DTYPES, ELEMENT_BYTES
from neusight_jax.graph.graph import Graph
from neusight_jax.units import GIB

RUNTIME_BYTES = 0.75 * GIB
"""What the driver, libraries and their workspaces hold beside the tensors."""
OPTIMIZER_BYTES = 8.0
"""Two fp32 moments of Adam for each parameter; a training run needs them, though no step is forecast."""


def parameter_count(graph: Graph) -> float:
    """Weights of all matrix products with parameters, layers repeated; a table shared with the head counts there."""
    return float(
        sum(
            kernel.dims["n"] * kernel.dims["k"] * kernel.count * node.repeat
            for node in graph.nodes
            for kernel in node.forward
            if kernel.family == "linear"
        )
    )


def memory_bytes(graph: Graph) -> float:
    """Bytes a workload needs: an estimate, right to perhaps a fifth.

    Inference holds the weights and the largest node's operands and output. Training holds weights, gradients, Adam's
    moments and every node's output for the backward pass, nothing recomputed.
    """
    size = ELEMENT_BYTES[DTYPES.index(graph.dtype)]
    parameters = parameter_count(graph)
    outputs = [math.prod(node.shape) for node in graph.nodes]
    if graph.mode == "training":
        kept = sum(output * node.repeat for output, node in zip(outputs, graph.nodes, strict=True))
        return parameters * (2.0 * size + OPTIMIZER_BYTES) + kept * size + RUNTIME_BYTES
    widest = max(
        output + sum(operand.elements for operand in node.operands)
        for output, node in zip(outputs, graph.nodes, strict=True)
    )
    return (parameters + widest) * size + RUNTIME_BYTES
