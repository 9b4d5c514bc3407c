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


def part_of(name: str, layer: Layer, devices: int, expert_parts: int | None = None) -> Layer:
    """One of equal parts of a layer under tensor parallelism.

    Args:
      name: of the model, for errors.
      layer: the whole layer.
      devices: parts it is cut into.
      expert_parts: parts that each routed expert is cut into, 1 = it stays as wide as it is; None = `devices`.
    Raises: `InputError` where heads or features do not split evenly.
    """
    parts = expert_parts or devices
    if devices == parts == 1:
        return layer
    mixer, block = _part(name, layer.mixer, devices), _part(name, layer.feed_forward, devices)
    if parts != devices and isinstance(layer.feed_forward, Experts):
        inner = _part(name, replace(layer.feed_forward, shared=0, beside=0), parts).inner
        block = replace(block, inner=inner)
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
    # Devices that have a part of a group each need its shared head, so that is copied, not cut.
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
    """Write the messages of a forward pass: all_reduces after the embedding and every block, over ranks that split it.

    Where ranks hold requests of their own (`Step.attention_ranks`), tokens are gathered before routed experts, and
    what those make of them is summed and scattered after (vLLM, `--all2all-backend allgather_reducescatter`;
    TensorRT-LLM's attention data parallelism).

    An engine's own kernel does the residual norm that follows as well (vLLM on Hopper and later, `fuse_allreduce_rms`;
    TensorRT-LLM; SGLang, `flashinfer_allreduce_fusion`), so those norms are left out (`Step.norms_in_sums`).

    Args:
      step: takes the nodes.
      model: whose blocks are counted.
      tensor_parallel: ranks every block is split over.
      expert_ranks: ranks a block of routed experts is split over.
    """
    size = float(step.requests.tokens) * model.hidden * dtype_bytes(step.precision.activations)
    engine, shared = step.serving and size <= CUSTOM_BYTES, step.attention_ranks > 1
    step.norms_in_sums = engine and tensor_parallel > 1 and not shared
    routed = sum(isinstance(layer.feed_forward, Experts) * len(numbers) for layer, numbers in model.layers.items())
    blocks = sum(
        ((layer.mixer is not None) + (layer.feed_forward is not None)) * len(numbers)
        for layer, numbers in model.layers.items()
    )

    def message(op: str, bytes_: float, ranks: int, count: float, software: str) -> list[Kernel]:
        dims = collective_dims(op, bytes_, ranks, software=software)
        return [Kernel("collective", op, dims, count, "bf16")] if ranks > 1 and count else []

    software, dense = "engine" if engine else "library", 1.0 + blocks - routed  # one after the embedding
    counts = {tensor_parallel: dense}
    if not shared:
        counts[expert_ranks] = counts.get(expert_ranks, 0.0) + routed
    sums = [kernel for ranks, count in counts.items() for kernel in message("all_reduce", size, ranks, count, software)]
    if sums:
        step.emit("tensor_parallel", "all_reduce", sums, shape=(step.requests.tokens, model.hidden))
    if shared:
        for op in ("all_gather", "reduce_scatter"):
            sent = message(op, size * step.attention_ranks, expert_ranks, routed, "library")
            step.emit(f"experts.{op}", op, sent, shape=(step.requests.tokens, model.hidden))
