"""Machines that do not exist: a base GPU or cluster with figures changed, and the figures that have to follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import (
    TRACED_FIELDS,
    AnyMachine,
    Cluster,
    Machine,
    check_link_figure,
    gpu_of,
    with_gpu,
)
from neusight_jax.hardware.gpu import FIELDS, GPU, LIMITS, REQUIRED_FIELDS, check_figure, peak_field, widened

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


def fields_of(machine: Machine) -> tuple[str, ...]:
    """Names of the figures of a machine: of a cluster also those of its links and network."""
    return tuple(dict.fromkeys((*FIELDS, *TRACED_FIELDS))) if isinstance(machine, Cluster) else FIELDS


def figure(machine: Machine, name: str) -> ArrayLike:
    """A figure of a machine by its name. Links of a cluster are those of its topology."""
    joined = isinstance(machine, Cluster) and name in TRACED_FIELDS
    value: ArrayLike = getattr(machine.topology if joined else gpu_of(machine), name)  # type: ignore[union-attr]
    return value


def require_field(name: str, machine: Machine | None = None) -> str:
    """The name of a figure of a machine, as given; `InputError` listing all if there is none of it. None: a GPU."""
    fields = FIELDS if machine is None else fields_of(machine)
    if name not in (*fields, *LIMITS):
        what = "cluster" if isinstance(machine, Cluster) else "GPU"
        raise InputError(f"a {what} has no field {name!r}; expected one of {', '.join(fields)}")
    return name


def check_field(name: str, value: float, where: str) -> None:
    """`InputError` unless a figure of a GPU or of links is of a believable size; `where` opens the message."""
    if name in TRACED_FIELDS and name not in FIELDS:
        check_link_figure(name, value, where)
    else:
        check_figure(require_field(name), value, where)


def vary(base: AnyMachine, figures: Mapping[str, ArrayLike], *, peaks_follow: bool = True) -> AnyMachine:
    """A base machine with figures replaced, traced or not, scalars or arrays [gpu].

    Args:
      base: one machine, scalars; figures of a cluster may be those of its links and network too, scalars.
      figures: field -> value in the field's unit; arrays must have equal shapes.
      peaks_follow: peaks not in `figures` keep their rate per SM and clock: times SMs · clock over the base's.
    Returns: a machine whose figures all have the shape of the values.
    Raises: `InputError` for a field there is not.
    Gradients: reach `figures` (SM count and clock through the peaks too) and `base`.
    """
    arrays = {require_field(name, base): jnp.asarray(value, float) for name, value in figures.items()}
    if isinstance(base, Cluster):
        joined = {name: value for name, value in arrays.items() if name in TRACED_FIELDS}
        gpu_figures = {name: value for name, value in arrays.items() if name in (*FIELDS, *LIMITS)}
        gpu = vary(base.gpu, gpu_figures, peaks_follow=peaks_follow)
        return cast(AnyMachine, base.replace(gpu=gpu, topology=base.topology.replace(**joined)))
    shape = jnp.broadcast_shapes(*(value.shape for value in arrays.values()))
    # A peak is a rate per SM and clock: a chip with more of them has as much more of it.
    grown: Array = jnp.ones(shape)
    for name in ("num_sms", "clock_hz"):
        if peaks_follow and name in arrays:
            grown = grown * arrays[name] / jnp.asarray(getattr(base, name), float)
    limits = {**base.limits(), **{name: arrays[name] for name in LIMITS if name in arrays}}
    machine = GPU(
        **{
            name: jnp.broadcast_to(arrays[name], shape)
            if name in arrays
            else jnp.asarray(getattr(base, name), float) * (grown if name in PEAKS else jnp.ones(shape))
            for name in FIELDS
        },
        **{name: jnp.broadcast_to(jnp.asarray(value, float), shape) for name, value in limits.items()},
    )
    return cast(AnyMachine, widened(base, machine, arrays))


def vary_plainly(base: AnyMachine, figures: Mapping[str, float]) -> AnyMachine:
    """`vary` with plain numbers in and out; figures that it leaves alone stay as they are to the digit. Host only."""

    # JAX computes in fp32, so that figures nobody changed would come back rounded.
    def kept(before: ArrayLike, after: ArrayLike) -> float:
        original, moved = float(np.asarray(before)), float(np.asarray(after))
        return original if math.isclose(original, moved, rel_tol=1e-6) else moved

    varied = vary(base, figures)
    same = gpu_of(base).limits().keys() == gpu_of(varied).limits().keys()
    machine: AnyMachine = jax.tree.map(kept, base, varied) if same else jax.tree.map(float, varied)
    return with_gpu(machine, **{name: float(value) for name, value in figures.items() if name in (*FIELDS, *LIMITS)})
