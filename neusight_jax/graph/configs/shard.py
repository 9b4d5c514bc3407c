"""Shard: what one rank of a training job has of a model's step, beside its part of the matrices."""

from __future__ import annotations

from dataclasses import dataclass

EXPERTS: tuple[str, ...] = ("grouped", "looped")
"""Ways the products of a layer's experts are launched: all of them by one kernel, or one after another by the host."""


@dataclass(frozen=True)
class Shard:
    """One pipeline stage on one rank; the defaults are a whole model on one GPU.

    Attributes:
      first, last: layers of the stage, `last` not included; None = to the end.
      embeds, predicts: whether it holds the embedding, and the head with its loss.
      context: ranks a sequence is split over; attention then has that part of the heads over whole sequences.
      sequence: ranks the tokens of norms and residuals are split over.
      expert_ranks: ranks that whole experts are split over, 1 = every expert is split as other matrices are.
      tensor: ranks that hold the same tokens.
      flash: whether attention is one kernel.
      grouped_experts: whether the products of a layer's experts are one kernel.
    """

    first: int = 0
    last: int | None = None
    embeds: bool = True
    predicts: bool = True
    context: int = 1
    sequence: int = 1
    expert_ranks: int = 1
    tensor: int = 1
    flash: bool = True
    grouped_experts: bool = False

    def own(self, layers: list[int]) -> list[int]:
        """Those of some layers that the stage has."""
        return [at for at in layers if self.first <= at and (self.last is None or at < self.last)]

    @property
    def gathered(self) -> float:
        """Tokens that meet a rank's experts over those of the rank: all ranks send theirs, each token once."""
        return self.expert_ranks / self.tensor if self.expert_ranks > 1 else 1.0
