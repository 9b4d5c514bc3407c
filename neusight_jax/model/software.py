"""Software: what a framework decides beside the kernels, as numbers with priors, one value for all jobs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import jax
from jaxtyping import Array, ArrayLike

from neusight_jax.model.physics import fitted
from neusight_jax.records import Record

OVERLAPS: tuple[str, ...] = ("tensor", "context", "expert", "shards", "gradients")
"""Classes of communication a recipe may run beside compute."""
USUAL_OVERLAPS: tuple[str, ...] = ("context", "shards", "gradients")
"""Those it does unless it says otherwise."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Software(Record):
    """Numbers of the software, traced; each with the width of its prior, in logarithms.

    Attributes:
      tensor, context, expert, shards, gradients: what communication that runs beside compute still adds, over the
        shorter of the two: it takes SMs and memory bandwidth away.
      launch_s: host time of one kernel of a graph, seconds: an eager step takes no less.
      expert_launch_s: likewise of a product of one expert, seconds: casts of what it reads included.
      messages: seconds of a message in a step over those of one by itself.
      kernels: seconds of a kernel of tensor cores in a long step over those of one by itself, power and clocks
        included.
      experts: likewise of the products of experts, their uneven loads included.
      flash2: time of FlashAttention-2 over what kernels of inference engines take.
      flash2_wide: and where those use wider matrix units than Ampere's, with instructions that it lacks.
      eight_bits: time of eight-bit products in training over that of inference, where they accumulate in registers.
      plain: what products reach of the fp32 peak where tensor cores do not take them (`streams.plain_seconds`).
      wait: what a rank waits for the slowest of n others, over a stage's seconds and ln n.
      step_s: what a step takes beside its work: data, logs, checks of gradients, seconds; without an optimizer there is
        no step.
    """

    tensor: ArrayLike = field(default=0.2, metadata=fitted(1.0, "estimate"))
    context: ArrayLike = field(default=0.2, metadata=fitted(1.0, "estimate"))
    expert: ArrayLike = field(default=0.2, metadata=fitted(1.0, "estimate"))
    shards: ArrayLike = field(default=0.2, metadata=fitted(1.0, "estimate"))
    gradients: ArrayLike = field(default=0.2, metadata=fitted(1.0, "estimate"))
    launch_s: ArrayLike = field(
        default=15e-6, metadata=fitted(0.7, "eager PyTorch launches 2e5 kernels a second, about three for one here")
    )
    expert_launch_s: ArrayLike = field(
        default=3e-5, metadata=fitted(1.0, "estimate: casts of both operands, the product, its share of the routing")
    )
    messages: ArrayLike = field(default=1.0, metadata=fitted(0.2, "estimate"))
    kernels: ArrayLike = field(default=1.05, metadata=fitted(0.1, "estimate"))
    experts: ArrayLike = field(default=1.2, metadata=fitted(0.3, "estimate"))
    flash2: ArrayLike = field(default=1.3, metadata=fitted(0.3, "estimate"))
    flash2_wide: ArrayLike = field(
        default=1.75,
        metadata=fitted(0.2, "1.5 to 2.0 forward, 1.5 to 1.75 backward: Shah et al., FlashAttention-3, 2024"),
    )
    eight_bits: ArrayLike = field(default=1.2, metadata=fitted(0.2, "estimate: gradients keep split accumulators"))
    plain: ArrayLike = field(default=0.8, metadata=fitted(0.3, "what libraries reach in fp32 on large products"))
    wait: ArrayLike = field(default=0.003, metadata=fitted(1.0, "estimate"))
    step_s: ArrayLike = field(default=0.01, metadata=fitted(1.0, "estimate"))

    def overlap(self, name: str) -> Array:
        """Share that a class of `OVERLAPS` still adds when it overlaps."""
        value: Array = getattr(self, name)
        return value


LEARNED = Software(
    tensor=0.362,
    context=0.2,
    expert=0.2,
    shards=0.485,
    gradients=0.355,
    launch_s=1.5e-05,
    expert_launch_s=7.9e-05,
    kernels=1.109,
    experts=1.389,
    flash2=1.438,
    flash2_wide=2.031,
    eight_bits=1.259,
    plain=0.609,
    wait=0.0058,
    step_s=0.0264,
)
"""Fitted on 344 measured steps of public sources under those priors (`benchmarks.job_steps`)."""
BARE = dataclasses.replace(LEARNED, step_s=0.0)
"""Those of forward and backward passes that no optimizer follows."""
STEP_SPREAD = 0.085
"""Half-width of the 80 % interval of a dense step beside those of its kernels, in logarithms: the least that holds 80 %
of measured steps of sources left out, each source by the root of its rows (`benchmarks.job_spread`)."""
EXPERT_SPREAD = 1.29
"""The same by the share of time in experts; of the one source that measured any, so it was not left out."""
LAYOUT_SPREAD = 0.174
"""What the forecast ratio of two layouts of one job is off by at most, for 80 % of measured pairs."""
NAMES: tuple[str, ...] = tuple(number.name for number in dataclasses.fields(Software))
"""Names of the numbers."""
FITTED: tuple[str, ...] = tuple(name for name in NAMES if name != "messages")
"""Those that are fitted to all sources. Messages are as they were measured: fitted they come to 1.08, and steps of
sources left out are forecast no better."""
STEP_NOISE = 0.1
"""Spread of measured steps of one source around forecasts with its own software, in logarithms."""
WIDTHS: dict[str, float] = {number.name: number.metadata["width"] for number in dataclasses.fields(Software)}
"""Width of each prior, in its logarithm."""


def usual_software(optimizer: str | None) -> Software:
    """Numbers of a job that nobody says any of."""
    return BARE if optimizer is None else LEARNED
