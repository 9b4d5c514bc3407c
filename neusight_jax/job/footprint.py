"""Footprint: device memory of the fullest rank of a job."""

from __future__ import annotations

from collections.abc import Mapping

from neusight_jax.graph.graph import RUNTIME_BYTES, Footprint
from neusight_jax.graph.optimizers import OPTIMIZERS
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.stages import Part, stage_kinds
from neusight_jax.units import GIB

COMMUNICATION_BYTES = 1.0 * GIB
"""Buffers of a library for collectives between many ranks."""


def in_flight(layout: Parallelism, rank: int, micro_batches: int) -> float:
    """Micro-batches of one chunk whose activations a pipeline rank holds at most."""
    ranks, chunks = layout.pipeline, layout.chunks
    if layout.schedule == "gpipe":
        return float(micro_batches)
    if chunks == 1:
        return float(min(micro_batches, ranks - rank))
    warm = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    return min(micro_batches * chunks, warm) / chunks


def fullest(
    kinds: Mapping[int, Part],
    layout: Parallelism,
    micro_batches: int,
    optimizer: str | None,
    gradient_bytes: float,
    boundary_bytes: float,
    element_bytes: float,
) -> Footprint:
    """Memory of the rank that holds most, an estimate.

    Args:
      gradient_bytes: of an element of accumulated gradients; boundary_bytes: what a layer reads, of a
        micro-batch; element_bytes: of weights.
    """
    order = stage_kinds(layout)
    ranks = {0, min(1, layout.pipeline - 1), layout.pipeline - 1}  # ends may have fewer layers than inner stages
    found = [
        _of_rank(
            [kinds[kind] for kind in order[rank :: layout.pipeline]],
            layout,
            in_flight(layout, rank, micro_batches),
            optimizer,
            gradient_bytes,
            boundary_bytes,
            element_bytes,
        )
        for rank in sorted(ranks)
    ]
    return max(found, key=lambda each: each.total)


def _of_rank(
    own: list[Part],
    layout: Parallelism,
    batches: float,
    optimizer: str | None,
    gradient_bytes: float,
    boundary_bytes: float,
    element_bytes: float,
) -> Footprint:
    parameters = sum(stage.parameters for stage in own)
    experts = sum(stage.expert_parameters for stage in own)
    size = max(element_bytes, 2.0)

    def held(each: float, since: int) -> float:
        """Bytes of so many a parameter, sharded from one of the stages of ZeRO on."""
        return each * layout.held(parameters, experts, sharded=layout.zero >= since)

    states = 0.0 if optimizer is None else OPTIMIZERS[optimizer].state_bytes + 4.0 * (size < 4.0)
    return Footprint(
        weights=held(size, 3),
        gradients=held(gradient_bytes, 2),
        optimizer=held(states, 1),
        activations=sum(_activations(stage, layout, batches, boundary_bytes) for stage in own),
        kv_cache=0.0,
        runtime=RUNTIME_BYTES + COMMUNICATION_BYTES * (layout.gpus > 1),
    )


def _activations(stage: Part, layout: Parallelism, batches: float, boundary_bytes: float) -> float:
    """What backward passes still need, of all micro-batches in flight."""
    if layout.recompute != "full":
        return stage.activations * batches
    # The input of every layer, and one layer of one micro-batch as a whole.
    layers = max(stage.layers, 1)
    return boundary_bytes * layers * batches + stage.activations / layers
