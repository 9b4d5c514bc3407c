"""Capacity: which layouts of a model fit a GPU, and how many requests their KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass

from neusight_jax.graph.graph import RUNTIME_BYTES
from neusight_jax.job.footprint import COMMUNICATION_BYTES
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.serving.steps import Model, activation_bytes, cache_bytes, weight_bytes
from neusight_jax.serving.times import Options


@dataclass(frozen=True)
class Capacity:
    """Device memory of one rank, bytes; an estimate.

    Attributes:
      weights, activations, runtime: what an engine holds before any request.
      cache_bytes: what is left for the KV cache; request_bytes: of a request of mean length; mem_bytes: of the GPU.
    """

    weights: float
    activations: float
    runtime: float
    cache_bytes: float
    request_bytes: float
    mem_bytes: float

    @property
    def requests(self) -> float:
        """Requests of mean length that fit at once."""
        return max(self.cache_bytes, 0.0) / self.request_bytes

    @property
    def fits(self) -> bool:
        """Whether one request fits."""
        return self.requests >= 1.0


def capacity(model: Model, layout: Parallelism, mem_bytes: float, options: Options, context: float) -> Capacity:
    """Memory of one rank of a layout.

    Args:
      context: mean length of a sequence while it runs; longer ones borrow what shorter ones do not need.
    """
    weights = weight_bytes(model, layout)
    activations = activation_bytes(model, layout, options.chunk_tokens)
    runtime = RUNTIME_BYTES + COMMUNICATION_BYTES * (layout.gpus > 1)
    left = mem_bytes * options.memory_share - weights - activations - runtime
    (request,) = cache_bytes(model, layout, [max(int(context), 1)])
    return Capacity(weights, activations, runtime, left, float(max(request, 1.0)), mem_bytes)
