"""Shifts of the mixture's logarithms: what a device, a vendor, a memory or a running model does otherwise.

Every one is a switch or a function of the shape only, so that no gradient reaches the GPU through it and slopes,
scaling and bounds stay as the physical times give them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from neusight_jax.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.roofline import Isolated
from neusight_jax.utilization import Network, normalised

HEADS: tuple[str, ...] = ("compute", "dram", "reread", "onchip", "issue", "power", "overhead")
"""Heads of the mixture, in the order of `PhysicalTimes`."""
COMPUTE = HEADS.index("compute")
DRAM = HEADS.index("dram")
REREAD = HEADS.index("reread")
ISSUE = HEADS.index("issue")
"""The heads before this one overlap; issue rate and power are limits that only bind when reached."""
POWER = HEADS.index("power")
OVERHEAD = HEADS.index("overhead")
EFFECTS: tuple[str, ...] = (*HEADS, "floor")
"""What a device effect shifts (as logarithms); all zero for a GPU nobody has measured."""
FLOOR = EFFECTS.index("floor")


def effect_width(family: Family) -> int:
    """Numbers of a device effect: `EFFECTS`, then the tilt of each along every one of the family's directions."""
    return len(EFFECTS) * (1 + len(family.directions))


def add_shift(effect: Float[Array, "*kernel effect"], shift: Float[Array, "*row head"]) -> Float[Array, "*row effect"]:
    """A device effect with the shifts of `EFFECTS` moved, its tilts as they are."""
    tilt = effect[..., len(EFFECTS) :]
    return jnp.concatenate(
        [effect[..., : len(EFFECTS)] + shift, jnp.broadcast_to(tilt, (*shift.shape[:-1], tilt.shape[-1]))], -1
    )


def device_shift(
    effect: Float[Array, "*kernel effect"], network: Network, family: Family, features: Float[Array, "kernel feature"]
) -> Float[Array, "#member #kernel effect"]:
    """Log shift of each head and the floor for the device of an effect; a function of the shape only."""
    constant = effect[..., : len(EFFECTS)]
    if not family.directions:
        return jnp.atleast_2d(constant)[None]
    tilt = effect[..., len(EFFECTS) :].reshape(*constant.shape, len(family.directions))
    along = normalised(network, features)[..., jnp.array(family.directions)]
    return constant + jnp.sum(tilt * along[:, :, None, :], axis=-1)


def other_vendor(gpu: GPU) -> Bool[Array, "*gpu"]:
    """Whether a GPU runs another vendor's libraries: those with an fp32 matrix path of its own do."""
    return jnp.asarray(gpu.fp32_matrix_flop_per_s) > 0


def stack_shift(stack: Float[Array, "member effect"], gpu: GPU) -> Float[Array, "member _kernel effect"]:
    """Log shift of each head and the floor for the vendor's libraries; a switch, without gradient to the GPU."""
    other = jnp.atleast_1d(other_vendor(gpu))[None, :, None]
    return jnp.where(other, stack[:, None, :], 0.0)


def memory_shift(memory: Float[Array, "member kind"], gpu: GPU) -> Float[Array, "member _kernel effect"]:
    """Log shift of the DRAM head for the kind of the GPU's memory; a switch, without gradient to the GPU."""
    kind = jnp.atleast_1d(jnp.round(jnp.asarray(gpu.memory_kind))).astype(int)
    return jnp.where(jnp.arange(len(EFFECTS)) == DRAM, memory[:, kind][..., None], 0.0)


def inside_shift(in_model: Float[Array, "member head"], isolated: Isolated) -> Float[Array, "member _kernel effect"]:
    """Log shift of each head inside a running model; none of the floor."""
    every = jnp.pad(in_model, ((0, 0), (0, len(EFFECTS) - len(HEADS))))
    return every[:, None, :] * jnp.atleast_1d(1.0 - jnp.asarray(isolated, dtype=float))[:, None]
