"""Engine: what an inference engine decides beside the kernels, its options and its own time, as numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import ArrayLike

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.model.physics import fitted
from neusight_jax.printed import Record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Engine(Record):
    """Numbers of an engine, traced; each with the width of its prior, in logarithms.

    Attributes:
      step_s: host time of a step that the GPU waits for: scheduling, inputs, sampled tokens, seconds.
      sequence_s: likewise of each running request.
      request_s: of a request before its first step: HTTP, tokens, admission, seconds.
      kernels: seconds of a step's kernels over their sum.
      wave: share of arrivals that come all at once, as where a load generator starts its requests together and their
        outputs have nearly one length; of users who do not know of each other 0.
    """

    step_s: ArrayLike = field(default=1e-3, metadata=fitted(1.0, "estimate: engines overlap most of 2 to 10 ms"))
    sequence_s: ArrayLike = field(default=1e-5, metadata=fitted(1.0, "estimate"))
    request_s: ArrayLike = field(default=1e-2, metadata=fitted(1.0, "estimate"))
    kernels: ArrayLike = field(default=1.05, metadata=fitted(0.1, "estimate"))
    wave: ArrayLike = field(default=0.05, metadata=fitted(1.0, "estimate"))

    def replace(self, **changes: Any) -> Engine:
        """These numbers with some replaced."""
        return dataclasses.replace(self, **changes)


ENGINES: dict[str, Engine] = {
    "vllm": Engine(step_s=9.25e-4, sequence_s=1.29e-5, request_s=0.0223, kernels=1.078, wave=0.0),
    "trtllm": Engine(step_s=9.29e-4, sequence_s=1.13e-5, request_s=0.0943, kernels=1.042, wave=0.0),
    "sglang": Engine(step_s=1.013e-3, sequence_s=1.05e-5, request_s=0.1616, kernels=1.081, wave=0.0),
}
"""Fitted under those priors on public measurements of whole servers on H100 and H200 (`benchmarks.serving_sample`), for
users who do not know of each other."""
LEARNED = ENGINES["vllm"]


def engine_of(engine: Engine | str) -> Engine:
    """Numbers of an engine, or those of one of `ENGINES` by its name; `InputError` listing them for an unknown one."""
    if isinstance(engine, Engine):
        return engine
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    return ENGINES[engine]


WIDTHS: dict[str, float] = {each.name: each.metadata["width"] for each in dataclasses.fields(Engine)}
"""Width of each prior, in its logarithm."""


@dataclass(frozen=True)
class Options(Record):
    """How an engine is set up; static. Defaults are vLLM's as a server (0.11, `engine/arg_utils.py` and
    `config/cache.py`), on GPUs of 70 GiB and more, but A100: `usual_options` has those of the others.

    Attributes:
      chunk_tokens: most tokens of a step (`max_num_batched_tokens`): longer prompts are prefilled in chunks.
      max_batch: most running requests (`max_num_seqs`).
      memory_share: of the device memory that the engine takes (`gpu_memory_utilization`).
      prefix_share: of input tokens that the prefix cache holds already.
      draft_tokens: tokens guessed ahead of every step, 0 = no speculative decoding.
      draft_acceptance: chance that a guessed token is right, given those before it.
      draft_share: time of guessing a token over that of a decode step.
      poll_steps: decode steps from one look for new requests to the next (SGLang's `--scheduler-recv-interval`).
    """

    chunk_tokens: int = 8192
    max_batch: int = 1024
    memory_share: float = 0.9
    prefix_share: float = 0.0
    draft_tokens: int = 0
    draft_acceptance: float = 0.7
    draft_share: float = 0.05
    poll_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_batch", "poll_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number from 1")
        if type(self.draft_tokens) is not int or not 0 <= self.draft_tokens <= 64:
            raise InputError(f"draft_tokens is {self.draft_tokens!r}, expected a whole number from 0 to 64")
        shares = (("memory_share", 0.05, 1.0), ("prefix_share", 0.0, 0.999), ("draft_acceptance", 0.0, 1.0))
        for name, low, high in (*shares, ("draft_share", 0.0, 10.0)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected {low:g} to {high:g}")

    @property
    def tokens_per_step(self) -> float:
        """Tokens a request gets from a decode step: 1, and as many guesses as are right in a row.

        Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding, 2023, equation 1.
        """
        return sum(self.draft_acceptance**place for place in range(self.draft_tokens + 1))

    @property
    def drafting(self) -> float:
        """Time of a decode step with its guesses over that of checking them alone."""
        return 1.0 + self.draft_share * self.draft_tokens


LARGE_MEMORY_BYTES = 70 * 2**30
"""From this memory on vLLM takes larger batches (`arg_utils.get_batch_defaults`)."""


def usual_options(mem_bytes: float, gpu_name: str = "", **changes: Any) -> Options:
    """vLLM's defaults on a GPU, with changes; None leaves a default. `InputError` for values that cannot be."""
    large = mem_bytes >= LARGE_MEMORY_BYTES and "a100" not in gpu_name.lower()
    usual = {"chunk_tokens": 8192, "max_batch": 1024} if large else {"chunk_tokens": 2048, "max_batch": 256}
    return Options(**{**usual, **{name: value for name, value in changes.items() if value is not None}})
