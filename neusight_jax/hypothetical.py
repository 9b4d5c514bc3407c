"""Machines that do not exist: a base GPU with figures changed, and the figures that have to follow."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from neusight_jax.errors import InputError
from neusight_jax.gpu import FIELDS, GPU, REQUIRED_FIELDS, peak_field, widened

PEAKS: tuple[str, ...] = (
    peak_field("fp32"),
    *(name for name in FIELDS if name not in REQUIRED_FIELDS and name.endswith("_per_s")),
)
"""Peak figures: one for each arithmetic path, and the exponentials."""
RATES: tuple[str, ...] = ("clock_hz", "mem_bytes_per_s", "tdp_w", "link_bytes_per_s", *PEAKS)
"""Figures per second (a watt is a joule per second): all of them times c divide every time but the launch by c."""
KNOBS: dict[str, tuple[str, ...]] = {"num_sms": ("num_sms", *PEAKS), "clock_hz": ("clock_hz", *PEAKS)}
"""Figures that move together on a real chip: SMs bring their peaks along, and so does the clock."""

ALL_RATES = "all rates"
"""Row of the sum over `RATES` in a sensitivity: −1 less the share of the launch, which no rate buys."""


def knob(name: str) -> str:
    """Name of the row in which a figure's followers move along."""
    return f"{name} with peaks"


ALL_RATES = "all rates"
"""Row of the sum over `RATES`: −1 less the share of the launch, which no rate buys."""


def require_field(name: str) -> str:
    """The name of a GPU figure, as given; `InputError` listing all if there is none of it."""
    if name not in FIELDS:
        raise InputError(f"a GPU has no field {name!r}; expected one of {', '.join(FIELDS)}")
    return name


def vary(base: GPU, figures: Mapping[str, ArrayLike], *, peaks_follow: bool = True) -> GPU:
    """A base machine with figures replaced, traced or not, scalars or arrays [gpu].

    Args:
      base: one machine, scalars.
      figures: field -> value in the field's unit; arrays must have equal shapes.
      peaks_follow: peaks not in `figures` keep their rate per SM and clock: times SMs · clock over the base's.
    Returns: a GPU whose fields all have the shape of the values.
    Raises: `InputError` for a field there is not.
    Gradients: reach `figures` (SM count and clock through the peaks too) and `base`.
    """
    given = {require_field(name): jnp.asarray(value, float) for name, value in figures.items()}
    shape = jnp.broadcast_shapes(*(value.shape for value in given.values()))
    grown: Array = jnp.ones(shape)
    for name in ("num_sms", "clock_hz"):
        if peaks_follow and name in given:
            grown = grown * given[name] / jnp.asarray(getattr(base, name), float)
    machine = GPU(
        **{
            name: jnp.broadcast_to(given[name], shape)
            if name in given
            else jnp.asarray(getattr(base, name), float) * (grown if name in PEAKS else jnp.ones(shape))
            for name in FIELDS
        }
    )
    return widened(base, machine, given)


def vary_plainly(base: GPU, figures: Mapping[str, float]) -> GPU:
    """`vary` with plain numbers in and out. Host only."""
    machine: GPU = jax.tree.map(float, vary(base, figures))
    return machine
