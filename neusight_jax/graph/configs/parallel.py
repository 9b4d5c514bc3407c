"""One device's part of a layer under tensor and expert parallelism, the fullest device's where parts are unequal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Compressed,
    Decoder,
    DeltaNet,
    Dense,
    Experts,
    Latent,
    Layer,
    Mamba2,
)
from neusight_jax.graph.configs.step import Step
from neusight_jax.kernels.collective import collective_dims
from neusight_jax.kernels.table import Kernel

SPLIT: dict[type, dict[str, str]] = {
    Attention: {"heads": "heads"},
    Latent: {"heads": "heads"},
    Compressed: {"output_groups": "groups of the output projection", "heads": "heads"},
    DeltaNet: {"key_heads": "key heads of linear attention"},
    Mamba2: {"heads": "state-space heads"},
    Dense: {"inner": "features of the feed-forward block"},
    Experts: {
        "inner": "features of an expert",
        "shared": "features of the shared expert",
        "beside": "features of the feed-forward block",
    },
}
"""Sizes of a layer that split evenly or not at all, with their names in errors; the rest is on every device."""
SHARED: dict[type, str] = {Attention: "kv_heads", Mamba2: "groups"}
"""Heads that several of the others share: every device holds those its own need."""


def check_split(name: str, model: Decoder, expert_parallel: int) -> None:
    """`InputError` where experts do not split over devices."""
    experts = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)), None)
    if experts is None and expert_parallel > 1:
        raise InputError(f"{name} has no experts; leave expert_parallel out")
    if experts is not None and experts.count % expert_parallel:
        raise InputError(
            f"{name}: {experts.count} experts do not split over expert_parallel={expert_parallel}; expected a divisor"
        )


def part_of(name: str, layer: Layer, devices: int, whole_experts: bool = False) -> Layer:
    """One of equal parts of a layer under tensor parallelism.

    Args:
      name: of the model, for errors.
      layer: the whole layer.
      devices: parts it is cut into.
      whole_experts: whether routed experts stay as wide as they are.
    Raises: `InputError` where heads or features do not split evenly.
    """
    if devices == 1:
        return layer
    mixer, block = _part(name, layer.mixer, devices), _part(name, layer.feed_forward, devices)
    if whole_experts and isinstance(layer.feed_forward, Experts):
        block = replace(block, inner=layer.feed_forward.inner)
    return replace(layer, mixer=mixer, feed_forward=block)


def _part(name: str, part: Any, devices: int) -> Any:
    kind = type(part)
    if kind not in SPLIT:
        return part
    shares = {}
    for size, what in SPLIT[kind].items():
        count = getattr(part, size)
        if count % devices:
            raise InputError(f"{name}: {count} {what} do not split over {devices} GPUs; expected a divisor")
        shares[size] = count // devices
    if kind in SHARED:
        shares[SHARED[kind]] = _shared_heads(part.heads, getattr(part, SHARED[kind]), shares["heads"])
    if isinstance(part, DeltaNet):
        shares["value_heads"] = part.value_heads // devices
    return replace(part, **shares)


def _shared_heads(heads: int, shared: int, local: int) -> int:
    """Most shared heads that `local` neighbouring heads need."""
    group = max(heads // shared, 1)
    return max((first + local - 1) // group - first // group + 1 for first in range(0, heads, local))


CUSTOM_BYTES = 8.0 * 2**20
"""Largest all_reduce that engines run by their own kernels (vLLM, `custom_all_reduce.py`, `max_size`)."""


def write_sums(step: Step, model: Decoder, tensor_parallel: int, expert_ranks: int) -> None:
    """Write the all_reduces of a forward pass: after the embedding and every block, over the ranks that split it.

    An engine's own kernel does the residual norm that follows as well (vLLM on Hopper and later, `fuse_allreduce_rms`;
    TensorRT-LLM; SGLang, `flashinfer_allreduce_fusion`), so those norms are left out (`Step.norms_in_sums`).

    Args:
      tensor_parallel: ranks every block is split over; expert_ranks: ranks a block of routed experts is split over.
    """
    size = float(step.requests.tokens) * model.hidden * dtype_bytes(step.precision.activations)
    engine = step.serving and size <= CUSTOM_BYTES
    step.norms_in_sums = engine and tensor_parallel > 1
    routed = sum(isinstance(layer.feed_forward, Experts) * len(numbers) for layer, numbers in model.layers.items())
    blocks = sum(
        ((layer.mixer is not None) + (layer.feed_forward is not None)) * len(numbers)
        for layer, numbers in model.layers.items()
    )
    counts = {tensor_parallel: 1.0 + blocks - routed}  # one after the embedding
    counts[expert_ranks] = counts.get(expert_ranks, 0.0) + routed
    software = "engine" if engine else "library"
    sums = [
        Kernel("collective", "all_reduce", collective_dims("all_reduce", size, ranks, software=software), count, "bf16")
        for ranks, count in counts.items()
        if ranks > 1 and count
    ]
    if sums:
        step.emit("tensor_parallel", "all_reduce", sums, shape=(step.requests.tokens, model.hidden))
