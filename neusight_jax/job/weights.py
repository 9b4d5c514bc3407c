"""Weights: parameters on one rank, those of routed experts apart, for they are split and copied over other ranks."""

from __future__ import annotations

from typing import NamedTuple

from neusight_jax.job.parallelism import Parallelism


class Weights(NamedTuple):
    """Elements on a rank.

    Attributes:
      dense: of all but routed experts; experts: of those.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts

    def times(self, factor: float) -> Weights:
        """So many of it."""
        return Weights(self.dense * factor, self.experts * factor)

    def by_group(self, layout: Parallelism) -> dict[str, float]:
        """Elements by the group of `parallelism.groups` whose ranks hold copies of them."""
        return {"data": self.total} if layout.expert == 1 else {"data": self.dense, "expert_data": self.experts}

    def held(self, layout: Parallelism, sharded: bool) -> float:
        """How many a rank keeps: its shard of them, or all."""
        if not sharded:
            return self.total
        copies = {"data": layout.shard_ranks, "expert_data": layout.replica_ranks / layout.expert}
        return sum(elements / copies[group] for group, elements in self.by_group(layout).items())


def summed(each: list[Weights]) -> Weights:
    """Weights of several stages."""
    return Weights(sum(own.dense for own in each), sum(own.experts for own in each))
