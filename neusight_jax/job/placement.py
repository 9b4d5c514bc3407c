"""Placement: which ranks form the groups of a layout, and how many NVLink domains each group spans."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from neusight_jax.job.parallelism import AXES, Parallelism


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other.

    Attributes:
      ranks: how many.
      domains: domains of fast links they lie in.
    """

    ranks: int
    domains: int


GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data", "context"),
    "expert": ("tensor", "context", "data"),
    "replica": ("tensor", "context", "data", "pipeline"),
}
"""Axes whose ranks form a group; gradients are summed over copies of a sequence's parts as well."""


def strides(layout: Parallelism) -> dict[str, int]:
    """Distance in ranks between neighbours of each axis."""
    found, step = {}, 1
    for axis in layout.order:
        found[axis] = step
        step *= getattr(layout, axis)
    return {axis: found[axis] for axis in AXES}


def groups(layout: Parallelism, gpus_per_domain: int) -> dict[str, Group]:
    """The group of each kind that rank 0 is in, and two neighbours of the pipeline ("pipeline").

    Experts take the nearest ranks of their stage; the replicas of an expert ("expert_data") the rest of it.
    """
    members = {name: _members(layout, axes) for name, axes in GROUPS.items()}
    stage = members["expert"]
    members |= {"expert": stage[: layout.expert], "expert_data": stage[:: layout.expert]}
    found = {name: _spanned(ranks, gpus_per_domain) for name, ranks in members.items()}
    # A message of the pipeline crosses domains wherever one of its neighbours does.
    step = strides(layout)["pipeline"]
    crosses = _spanned(range(0, step * layout.pipeline, step), gpus_per_domain).domains > 1
    found["pipeline"] = Group(min(layout.pipeline, 2), 1 + crosses)
    return found


def _members(layout: Parallelism, axes: tuple[str, ...]) -> range | np.ndarray:
    """Ranks of the group of rank 0 over some axes, in order: evenly spaced where no other axis lies between them."""
    step = strides(layout)
    near = sorted(axes, key=layout.order.index)
    ways = [getattr(layout, axis) for axis in near]
    first, count = step[near[0]], math.prod(ways)
    if all(step[axis] == first * math.prod(ways[:at]) for at, axis in enumerate(near)):
        return range(0, first * count, first)
    places = [step[axis] * np.arange(way) for axis, way in zip(near, ways, strict=True)]
    return np.sort(functools.reduce(np.add.outer, places).reshape(-1))


def _spanned(ranks: range | np.ndarray, gpus_per_domain: int) -> Group:
    """A group of these ranks."""
    if isinstance(ranks, range):
        # Ranks less than a domain apart leave none out between the first and the last.
        domains = len(ranks) if ranks.step >= gpus_per_domain else ranks[-1] // gpus_per_domain + 1
    else:
        domains = len(np.unique(ranks // gpus_per_domain))
    return Group(len(ranks), domains)
