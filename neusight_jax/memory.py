"""Device memory a workload needs, estimated from its graph."""

from __future__ import annotations

import math

from neusight_jax.arithmetic import DTYPES, ELEMENT_BYTES
from neusight_jax.graph.graph import OPTIMIZER_BYTES, RUNTIME_BYTES, Footprint, Graph


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


def footprint(graph: Graph) -> Footprint:
    """Memory of a workload by what holds it: an estimate, right to perhaps a fifth.

    Inference holds the weights and the largest node's operands and output. Training holds weights, gradients, Adam's
    moments and every node's output for the backward pass, nothing recomputed. Decoders say it themselves, KV cache
    included.
    """
    if graph.footprint is not None:
        return graph.footprint
    size = ELEMENT_BYTES[DTYPES.index(graph.dtype)]
    parameters = parameter_count(graph)
    outputs = [math.prod(node.shape) for node in graph.nodes]
    training = graph.mode == "training"
    if training:
        held = sum(output * node.repeat for output, node in zip(outputs, graph.nodes, strict=True))
    else:
        held = max(
            output + sum(operand.elements for operand in node.operands)
            for output, node in zip(outputs, graph.nodes, strict=True)
        )
    return Footprint(
        weights=parameters * size,
        gradients=parameters * size * training,
        optimizer=parameters * OPTIMIZER_BYTES * training,
        activations=held * size,
        kv_cache=0.0,
        runtime=RUNTIME_BYTES,
    )


def memory_bytes(graph: Graph) -> float:
    """Bytes a workload needs, `footprint` in one number."""
    return footprint(graph).total
