"""Placement: which ranks form the groups of a layout, and how many NVLink domains each group spans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

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
    step = strides(layout)

    def spanned(members: list[int]) -> Group:
        return Group(len(members), len({rank // gpus_per_domain for rank in members}))

    def of(axes: tuple[str, ...]) -> list[int]:
        near = sorted(axes, key=layout.order.index, reverse=True)
        places = product(*(range(getattr(layout, axis)) for axis in near))
        return sorted(sum(step[axis] * at for axis, at in zip(near, place, strict=True)) for place in places)

    found = {name: spanned(of(axes)) for name, axes in GROUPS.items() if name != "expert"}
    stage = of(GROUPS["expert"])
    found["expert"] = spanned(stage[: layout.expert])
    found["expert_data"] = spanned(stage[:: layout.expert])
    found["pipeline"] = spanned([0, step["pipeline"]] if layout.pipeline > 1 else [0])
    # A message of the pipeline crosses domains wherever one of its neighbours does.
    edges = [step["pipeline"] * at for at in range(layout.pipeline)]
    if len({rank // gpus_per_domain for rank in edges}) > 1:
        found["pipeline"] = Group(2, 2)
    return found
