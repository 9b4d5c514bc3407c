"""Footprint: device memory of the fullest rank of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from neusight_jax.graph.graph import RUNTIME_BYTES, Footprint
from neusight_jax.graph.memory import REBUILT, training_bytes
from neusight_jax.graph.optimizers import OPTIMIZERS
from neusight_jax.job.parallelism import Parallelism, recomputed
from neusight_jax.job.stages import Part
from neusight_jax.job.weights import Weights, summed
from neusight_jax.units import GIB

COMMUNICATION_BYTES = 1.0 * GIB
"""Buffers of a library for collectives between many ranks."""
SHARDED_SINCE: dict[str, int] = {"optimizer": 1, "gradients": 2, "weights": 3}
"""Stage of ZeRO from which replicas share what memory holds, by the names of `Footprint`."""
BUCKET_BYTES = 18.0
"""Of an element of DeepSpeed's ZeRO buckets: 5e8 elements take 9 GB, 2 bytes x 2 buckets x 4.5 (Hugging Face,
"DeepSpeed ZeRO", allgather_bucket_size and reduce_bucket_size)."""


@dataclass(frozen=True)
class Held:
    """What of a job memory depends on, beside its stages and layout.

    Attributes:
      optimizer: its name; None = no step of it is forecast, and a run needs the states of AdamW.
      element_bytes: of weights; gradient_bytes: of accumulated gradients.
      boundary_bytes: what a layer reads, of a micro-batch.
      added: whether gradients are written first and then added to their sum.
      bucket_elements: of DeepSpeed's ZeRO.
      gathered_bytes: of an element as shards are gathered, None = as it is stored.
    """

    optimizer: str | None
    element_bytes: float
    gradient_bytes: float
    boundary_bytes: float
    added: bool = False
    bucket_elements: float = 0.0
    gathered_bytes: float | None = None


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
    parts: Mapping[int, Part], kinds: Sequence[int], layout: Parallelism, micro_batches: int, held: Held
) -> Footprint:
    """Memory of the rank that holds most, an estimate.

    Args:
      parts: of each kind of stage.
      kinds: of each stage.
      layout: how the job is split.
      micro_batches: of one replica.
      held: what memory depends on beside.
    """
    ranks = layout.pipeline
    # Of ranks with equal stages the first holds most micro-batches.
    earliest = {tuple(kinds[rank::ranks]): rank for rank in reversed(range(ranks))}
    footprints = [
        _of_rank([parts[kind] for kind in of_rank], layout, in_flight(layout, rank, micro_batches), held)
        for of_rank, rank in earliest.items()
    ]
    return max(footprints, key=lambda each: each.total)


def _of_rank(own: list[Part], layout: Parallelism, batches: float, held: Held) -> Footprint:
    every, trained = (summed([getattr(stage, name) for stage in own]) for name in ("weights", "trained"))
    size = max(held.element_bytes, 2.0)

    def kept(weights: Weights, each: float, name: str) -> float:
        """Bytes of so many a parameter, sharded from a stage of ZeRO on."""
        return each * weights.held(layout, sharded=layout.zero >= SHARDED_SINCE[name])

    of_optimizer = OPTIMIZERS[held.optimizer or "adamw"].state_bytes
    states = training_bytes(1.0, size, held.gradient_bytes, of_optimizer)["optimizer"]
    twice = held.added and held.gradient_bytes > size  # in the dtype of the weights, until they are added to wider sums
    stored = max(size - sum(stage.narrowed_bytes for stage in own) / max(every.total, 1.0), 0.0)
    buckets = BUCKET_BYTES * held.bucket_elements * (layout.zero > 0)
    if layout.zero == 3:  # weights of one layer and of the next, gathered, and the gradients of one
        layers = max(sum(stage.layers for stage in own), 1)
        gathered = min(held.gathered_bytes or stored, stored)
        buckets += (2.0 * gathered * every.total + held.gradient_bytes * trained.total) / layers
    in_flight = [_in_flight(stage, layout, held.boundary_bytes) for stage in own]
    activations = sum(kept for kept, _ in in_flight) * batches + max(moment for _, moment in in_flight)
    if layout.pipeline > 1:  # a stage's output stays until its backward pass
        activations += held.boundary_bytes * batches * len(own)
    return Footprint(
        weights=kept(every, stored, "weights"),
        gradients=kept(trained, held.gradient_bytes + size * twice * (layout.zero < 3), "gradients"),
        optimizer=kept(trained, states, "optimizer"),
        activations=activations,
        kv_cache=0.0,
        runtime=RUNTIME_BYTES + COMMUNICATION_BYTES * (layout.gpus > 1),
        buffers=buckets,
    )


def _in_flight(stage: Part, layout: Parallelism, boundary_bytes: float) -> tuple[float, float]:
    """Bytes that every micro-batch in flight keeps of a stage, and those that only the one at work has.

    The latter are at their most after the loss, or where the backward pass has run a layer again and has its gradients.
    """
    saved, shares = stage.saved, recomputed(layout.recompute, stage.layers)
    full, layers = shares.get("full", 0.0), max(stage.layers, 1)
    again = sum(shares.get(name, 0.0) * part for name, part in zip(REBUILT, saved.rebuilt, strict=True))
    kept = (1.0 - full) * (saved.layers - again) + full * boundary_bytes * stage.layers
    return kept, max(saved.ends, (full > 0.0) * saved.layers / layers + saved.widest)
