"""Residuals: what a running model, a vendor's libraries, a kind of memory or a device does otherwise than the physics.

One table [row, effect] of each family, added to the logarithms of the heads and the floor. Rows are switches, and a
device's tilts a function of the shape only, so that no gradient reaches the GPU through them and slopes, scaling and
bounds stay as the physical times give them.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from neusight_jax.hardware.gpu import GPU, MEMORY_KINDS
from neusight_jax.kernels.family import Family
from neusight_jax.model.heads import HEADS
from neusight_jax.model.network import Network, normalised
from neusight_jax.model.roofline import Isolated

EFFECTS: tuple[str, ...] = (*HEADS, "floor")
"""Columns of the table, logarithms; all zero for a GPU nobody has measured."""
FLOOR = EFFECTS.index("floor")
ROWS: tuple[str, ...] = ("in_model", "other_vendor", *(f"memory {kind}".strip() for kind in MEMORY_KINDS))
"""Rows of the table: inside a running model; with the libraries of another vendor; for each kind of memory."""
IN_MODEL, OTHER_VENDOR, MEMORY = 0, 1, 2
FREE: Bool[np.ndarray, "row effect"] = np.array(
    [[not row.startswith("memory") or column == "dram" for column in EFFECTS] for row in ROWS]
)
"""Entries there are: a kind of memory moves the DRAM head only."""


def effect_width(family: Family) -> int:
    """Numbers of a device effect: `EFFECTS`, then the tilt of each along every one of the family's directions."""
    return len(EFFECTS) * (1 + len(family.directions))


def add_to_effect(
    effect: Float[Array, "*kernel tilted"], shift: Float[Array, "*row effect"]
) -> Float[Array, "*row tilted"]:
    """A device effect with its `EFFECTS` moved by `shift`, its tilts as they are."""
    tilt = effect[..., len(EFFECTS) :]
    return jnp.concatenate(
        [effect[..., : len(EFFECTS)] + shift, jnp.broadcast_to(tilt, (*shift.shape[:-1], tilt.shape[-1]))], -1
    )


def device_residual(
    effect: Float[Array, "*kernel tilted"], network: Network, family: Family, features: Float[Array, "kernel feature"]
) -> Float[Array, "#member #kernel effect"]:
    """Residual of one device, for kernels of these shapes.

    Args:
      effect: of the device: `EFFECTS`, then their tilts [tilted] or, in training, [kernel, tilted].
      network: whose normalisation the features are taken by.
      family: whose directions the tilts go along.
      features: shape-only inputs of the kernels.
    """
    constant = effect[..., : len(EFFECTS)]
    if not family.directions:
        return jnp.atleast_2d(constant)[None]
    tilt = effect[..., len(EFFECTS) :].reshape(*constant.shape, len(family.directions))
    along = normalised(network, features)[..., jnp.array(family.directions)]
    return constant + jnp.sum(tilt * along[:, :, None, :], axis=-1)


def other_vendor(gpu: GPU) -> Bool[Array, "*gpu"]:
    """Whether a GPU runs another vendor's libraries than the first of `gpu.VENDORS`."""
    return jnp.round(jnp.asarray(gpu.vendor, dtype=float)) > 0


def switches(gpu: GPU, isolated: Isolated) -> Float[Array, "row _kernel"]:
    """Mask of the rows of the table that hold for kernels on a machine: 0 or 1, without gradient to the GPU."""
    inside = jnp.atleast_1d(1.0 - jnp.asarray(isolated, dtype=float))
    kind = jnp.round(jnp.atleast_1d(jnp.asarray(gpu.memory_kind, dtype=float)))
    kinds = [jnp.where(kind == number, 1.0, 0.0) for number in range(len(MEMORY_KINDS))]
    rows = (inside, jnp.where(jnp.atleast_1d(other_vendor(gpu)), 1.0, 0.0), *kinds)
    return jnp.stack(jnp.broadcast_arrays(*rows))


def table_residual(
    table: Float[Array, "member row effect"], gpu: GPU, isolated: Isolated
) -> Float[Array, "member _kernel effect"]:
    """Sum of the rows that hold."""
    # Entries that there are not stay out, whatever a fit made of them.
    return jnp.einsum("mre,rk->mke", jnp.where(FREE, table, 0.0), switches(gpu, isolated))
