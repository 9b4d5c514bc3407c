"""One device's part of a layer under tensor and expert parallelism, the fullest device's where parts are unequal."""

from __future__ import annotations

from dataclasses import replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Compressed,
    Decoder,
    DeltaNet,
    Dense,
    Experts,
    FeedForward,
    Latent,
    Layer,
    Mamba2,
    Mixer,
)


def check_split(name: str, model: Decoder, expert_parallel: int) -> None:
    """`InputError` where experts do not split over devices."""
    experts = next((layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, Experts)), None)
    if experts is None and expert_parallel > 1:
        raise InputError(f"{name} has no experts; leave expert_parallel out")
    if experts is not None and experts.count % expert_parallel:
        raise InputError(
            f"{name}: {experts.count} experts do not split over expert_parallel={expert_parallel}; expected a divisor"
        )


def part_of(name: str, layer: Layer, devices: int) -> Layer:
    """One of `devices` parts of a layer.

    Heads and widths split evenly or not at all. KV heads that do not are held by every device whose query heads need
    them: the fullest counts.
    """
    if devices == 1:
        return layer
    return replace(
        layer, mixer=_mixer(name, layer.mixer, devices), feed_forward=_feed_forward(name, layer.feed_forward, devices)
    )


def _even(name: str, what: str, count: int, devices: int) -> int:
    if count % devices:
        raise InputError(f"{name}: {count} {what} do not split over {devices} GPUs; expected a divisor")
    return count // devices


def _mixer(name: str, mixer: Mixer | None, devices: int) -> Mixer | None:
    if isinstance(mixer, Attention):
        heads = _even(name, "heads", mixer.heads, devices)
        return replace(mixer, heads=heads, kv_heads=_kv_heads(mixer.heads, mixer.kv_heads, heads))
    if isinstance(mixer, Latent):
        return replace(mixer, heads=_even(name, "heads", mixer.heads, devices))
    if isinstance(mixer, Compressed):
        groups = _even(name, "groups of the output projection", mixer.output_groups, devices)
        return replace(mixer, heads=_even(name, "heads", mixer.heads, devices), output_groups=groups)
    if isinstance(mixer, DeltaNet):
        keys = _even(name, "key heads of linear attention", mixer.key_heads, devices)
        return replace(mixer, key_heads=keys, value_heads=mixer.value_heads // devices)
    if isinstance(mixer, Mamba2):
        heads = _even(name, "state-space heads", mixer.heads, devices)
        return replace(mixer, heads=heads, groups=_kv_heads(mixer.heads, mixer.groups, heads))
    return mixer


def _kv_heads(heads: int, kv_heads: int, local: int) -> int:
    """Most KV heads that `local` neighbouring query heads need."""
    group = max(heads // kv_heads, 1)
    return max((first + local - 1) // group - first // group + 1 for first in range(0, heads, local))


def _feed_forward(name: str, block: FeedForward | None, devices: int) -> FeedForward | None:
    if isinstance(block, Dense):
        return replace(block, inner=_even(name, "features of the feed-forward block", block.inner, devices))
    if isinstance(block, Experts):
        return replace(
            block,
            inner=_even(name, "features of an expert", block.inner, devices),
            shared=_even(name, "features of the shared expert", block.shared, devices),
            beside=_even(name, "features of the feed-forward block", block.beside, devices),
        )
    return block
