"""Work: the kernels of a stage, by what of a training step they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import is_rebuilt
from neusight_jax.graph.optimizers import flat_stream, optimizer_of, orthogonalizing_kernels, step_kernels
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.weights import Weights
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel

WORK: tuple[str, ...] = ("forward", "backward", "weight_gradient", "recomputed", "optimizer")
"""Work of a stage: phases of a micro-batch, what of the forward pass is run again, and once a step the optimizer."""
KINDS = 4
"""Kinds of stages (`stages.stage_kinds`)."""


def activation_dtype(dtype: str) -> str:
    """Dtype of activations beside products in `dtype`."""
    return "bf16" if dtype_bytes(dtype) < 2.0 else dtype


def rank_tokens(layout: Parallelism, sequence_length: int) -> float:
    """Tokens of a micro-batch on one rank."""
    return float(layout.micro_batch_size * sequence_length // layout.context)


def added_bytes(micro_batches: int, gradient_bytes: float, fused_accumulation: bool) -> float:
    """Bytes of a gradient that a kernel of its own adds to a sum, 0 = there is none."""
    return 0.0 if micro_batches == 1 or fused_accumulation else gradient_bytes


def pass_kernels(graph: Graph) -> Iterable[tuple[int, float, Kernel, str]]:
    """Kernels of one micro-batch with their work, repeats and nodes."""
    for node in graph.nodes:
        for work, kernels in enumerate((node.forward, node.backward, node.weight_gradient)):
            yield from ((work, node.repeat, kernel, node.name) for kernel in kernels)


def recomputed_kernels(graph: Graph, shares: Mapping[str, float]) -> Iterable[tuple[float, Kernel, str]]:
    """Kernels of the forward pass that the backward pass runs again, with their repeats and nodes.

    Args:
      graph: of a stage.
      shares: of its layers that run each of `AGAIN` again.
    """
    for work, share in shares.items():
        for node in graph.nodes:
            if not (node.section if work == "full" else is_rebuilt(node, work)):
                continue
            for kernel in node.forward:
                if work == "full" or node.op != "experts" or kernel.op == "pointwise":  # not the products of experts
                    yield node.repeat * share, kernel, node.name


def parameter_kernels(
    trained: Weights,
    layout: Parallelism,
    optimizer: str | None,
    added_bytes: float,
    tensor_cores: bool,
    graphs: Sequence[tuple[Graph, float]] = (),
) -> Iterable[tuple[int, Kernel]]:
    """Kernels that run over the parameters of a stage that are trained, with their work.

    Args:
      trained: on the rank.
      layout: how the job is split.
      optimizer: of `optimizers.OPTIMIZERS`, None = no step.
      added_bytes: of a gradient that is added to a sum, 0 = none.
      tensor_cores: as in `optimizers.flat_stream`.
      graphs: whose matrices are trained, and how often each is in the stage.
    """
    if added_bytes:  # read the gradient and the sum, write the sum; of FSDP after shards were summed
        shards = layout.shard_ranks if layout.zero == 3 else 1
        moved = 2.0 + 2.0 * added_bytes
        yield WORK.index("weight_gradient"), flat_stream(trained.total / shards, moved, tensor_cores)
    if optimizer is not None:
        owned = trained.held(layout, sharded=layout.zero > 0)
        for kernel in step_kernels(optimizer, owned, tensor_cores):
            yield WORK.index("optimizer"), kernel
        if optimizer_of(optimizer).orthogonalizes:  # each of the ranks that share states has whole matrices of its own
            of = {"linear": Weights(1.0, 0.0), "experts": Weights(0.0, 1.0)}
            shares = {op: one.held(layout, sharded=layout.zero > 0) for op, one in of.items()}
            for graph, times in graphs:
                for op, kernel in orthogonalizing_kernels(graph):
                    yield WORK.index("optimizer"), dataclasses.replace(kernel, count=kernel.count * times * shares[op])


def tensor_cored(graph: Graph) -> bool:
    """Whether kernels of a graph run between those of tensor cores."""
    return any(FAMILIES[name].tensor_core for name in graph.kernels.families)
