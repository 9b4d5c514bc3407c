"""Steady state: what requests wait for under a constant load, in closed form: an estimate, no engine is run.

A replica holds n requests. Those that decode share its steps; a prompt is prefilled in chunks, each in a step together
with the decodes, which it delays; short prompts share a chunk. With f the share of its life that a request decodes, D a
decode step, E tokens of a request from a step, n' the others a request meets, c the chunks of a prompt, P(g) the steps
of g prompts that share them, of which they add g x, and G the most that a step has room for:

    decoding    (O - 1) (D / E) + n' f x
    sharing     g = 1 + a, at most G, where a others come in the steps of a prompt: n' f c E / (O - 1), as a user's next
                request follows a last token, whatever steps take; of random arrivals n' f P(g) / decoding
    first token  request_s + (first_steps + (k - 1) / 2) D + wait + P(g), looked for every k steps
    wait        P(g) u v / (u + v),   u = a / 2 g (1 - a / G): deterministic service, random arrivals (M/D/1 if G = 1)
                                   v = (n / G + 1) / 2 P(G) / P(g) - 1: where all come at once

and f and g follow by iteration. In a closed loop n' = n - 1: a user sends the next request when one is answered.
Where arrivals are random whatever the load (Poisson), n' = n. Spread: prompts met while decoding are Poisson's, waits
exponential beyond zero. A load generator that starts all its users at once has them meet in the first of its rounds:
`Engine.wave` is the share of those requests, whose waits are the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from neusight_jax.serving.times import Options, Times

ITERATIONS = 24
"""Of the share of its life that a request decodes; each brings it nearer by a half or more."""
PERCENTILES: tuple[float, ...] = (50.0, 95.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: of its prompt and of its answer."""

    input_tokens: float
    output_tokens: float

    @property
    def mean_context(self) -> float:
        """Mean length of a sequence while it decodes."""
        return self.input_tokens + self.output_tokens / 2.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Demand:
    """Work that requests ask of a replica, traced, so that all loads share a program.

    Attributes:
      inputs, outputs: tokens; fresh: of the input, those the prefix cache has not.
      chunk_tokens: most of a step; places: 0, 1, ... of as many chunks as a prompt may have.
      per_step: tokens a request gets from a step; guesses: tokens guessed for it; drafting: its factor on a step.
      polls: decode steps from one look for new requests to the next.
      poisson: 1 = arrivals are random, 0 = each follows an answer.
    """

    inputs: Any
    outputs: Any
    fresh: Any
    chunk_tokens: Any
    per_step: Any
    guesses: Any
    drafting: Any
    polls: Any
    poisson: Any
    places: Any

    @property
    def context(self) -> Any:
        """Mean length of a sequence while it decodes."""
        return self.inputs + self.outputs / 2.0

    @property
    def further(self) -> Array:
        """Tokens after the first."""
        return jnp.maximum(jnp.asarray(self.outputs) - 1.0, 1.0)

    @property
    def chunks(self) -> Array:
        """Chunks of a prompt."""
        return jnp.ceil(jnp.asarray(self.fresh) / self.chunk_tokens)

    def decode(self, step: Callable[..., Array], batch: Array) -> Array:
        """Seconds or joules of a decode step of so many requests, as `step` measures: `Times.step_s` or `step_j`."""
        return jnp.asarray(self.drafting) * step(batch, self.context, guesses=self.guesses)

    def prompt(
        self, step: Callable[..., Array], beside: ArrayLike, guesses: Any = 0.0, prompts: ArrayLike = 1.0
    ) -> Array:
        """Seconds or joules of the steps that read a prompt, chunk by chunk.

        Args:
          step: measures a step: `Times.step_s` or `step_j`.
          beside: requests that decode in the same steps.
          guesses: tokens guessed ahead for each of them.
          prompts: that share the steps.
        """
        chunk, there = self.fresh / self.chunks, jnp.asarray(self.places) < self.chunks
        starts = self.inputs - self.fresh + chunk * self.places
        return jnp.sum(jnp.where(there, step(beside, self.context, chunk, starts, guesses, prompts), 0.0))

    def sharing(self, beside: ArrayLike, ranks: ArrayLike = 1.0) -> Array:
        """Most prompts that share a step of so many ranks, whose tokens those that decode beside them take too."""
        room = jnp.asarray(self.chunk_tokens) * ranks
        left = room - jnp.asarray(beside) * (1.0 + jnp.asarray(self.guesses))
        return jnp.maximum(left / self.fresh, 1.0)


def demand(lengths: Lengths, options: Options, *, poisson: bool = False, most_chunks: int = 0) -> Demand:
    """A demand from lengths and options.

    Args:
      lengths: mean tokens of a request.
      options: how the engine is set up: chunks, prefix cache, guesses.
      poisson: whether requests arrive at random, and not each after an answer.
      most_chunks: room for chunks of other demands of one program.
    """
    fresh = max(lengths.input_tokens * (1.0 - options.prefix_share), 1.0)
    chunks = max(math.ceil(fresh / options.chunk_tokens), most_chunks)
    return Demand(
        float(lengths.input_tokens),
        float(lengths.output_tokens),
        fresh,
        float(options.chunk_tokens),
        options.tokens_per_step,
        float(options.draft_tokens),
        options.drafting,
        float(options.poll_steps),
        float(poisson),
        np.arange(chunks, dtype=np.float32),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steady:
    """A replica in steady state, arrays of one shape; seconds, or as said.

    Attributes:
      ttft_s, tpot_s: to the first token, and of each further one: mean; the median and 95th percentile follow.
      rate: requests a second; batch: requests that decode.
      prefill_share: of the busy time that is added by prompts.
    """

    ttft_s: Any
    ttft_p50_s: Any
    ttft_p95_s: Any
    tpot_s: Any
    tpot_p95_s: Any
    rate: Any
    batch: Any
    prefill_share: Any

    def ttft(self, percentile: float) -> Any:
        """Seconds to the first token at the median or the 95th percentile."""
        return self.ttft_p50_s if percentile == 50.0 else self.ttft_p95_s

    def tpot(self, percentile: float) -> Any:
        """Seconds of a further token; its median is its mean, as that of a sum of many steps."""
        return self.tpot_s if percentile == 50.0 else self.tpot_p95_s


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Wait:
    """Seconds that a prompt waits for others.

    Attributes:
      busy: chance of having to wait; random, waved: mean wait where others come at random, and where all come at once.
      wave: share of the second.
    """

    busy: Array
    random: Array
    waved: Array
    wave: Array

    @property
    def mean(self) -> Array:
        """The mean wait."""
        return (1.0 - self.wave) * self.random + self.wave * self.waved

    def quantile(self, level: float) -> Array:
        """The wait at a level: exponential beyond its chance of being none, and even over a wave, which is later."""
        busy = jnp.maximum(self.busy, 1e-9)
        before = jnp.minimum(level / jnp.maximum(1.0 - self.wave, level), 0.995)
        tail = self.random / busy * jnp.maximum(jnp.log(busy / (1.0 - before)), 0.0)
        within = jnp.maximum(level - 1.0 + self.wave, 0.0) / jnp.maximum(self.wave, 1e-9)
        return jnp.maximum(tail, 2.0 * within * self.waved)


def waiting(prompt_s: Array, busy: Array, full: Array, burst_s: Array, wave: ArrayLike) -> Wait:
    """Wait of a prompt for the prompts of others.

    Args:
      prompt_s: seconds of the steps of a prompt and of those that share them.
      busy: chance that others come before it; full: prompts that come in a step over those it may take.
      burst_s: mean seconds to the first token where all prompts come at once.
      wave: share of arrivals that come all at once (`Engine.wave`).
    """
    busy, full = jnp.clip(busy, 0.0, 0.999), jnp.clip(full, 0.0, 0.999)
    random = prompt_s * busy / (2.0 * (1.0 - full))
    waved = jnp.maximum(burst_s - prompt_s, 0.0)
    queued = random * waved / jnp.maximum(random + waved, 1e-9)
    return Wait(busy, queued, waved, jnp.asarray(wave))


def iterated(step: Callable[[Any], tuple[Any, Any]], start: Any, iterations: int) -> tuple[Any, Any]:
    """The state after so many iterations, and what a step says of it.

    Args:
      step: the next state by a state, a tree of arrays, and anything else that it works out on the way.
      start: the first state.
      iterations: of half a step each, which keeps them from swinging.
    """

    def halfway(state: Any, _: None) -> tuple[Any, Any]:
        after, told = step(state)
        return jax.tree.map(lambda old, new: 0.5 * (old + new), state, after), (state, told)

    # One more than asked for, whose own state is the answer: a step after the loop would be compiled once more.
    _, every = jax.lax.scan(halfway, start, None, length=iterations + 1)
    last: tuple[Any, Any] = jax.tree.map(lambda each: each[-1], every)
    return last


def steady(times: Times, request: Demand, requests: ArrayLike, most: ArrayLike) -> Steady:
    """The steady state of a replica.

    Differentiable in the times, and `jax.vmap` takes many loads.

    Args:
      times: step times of the replica, and its engine.
      request: demand of the requests.
      requests: that the replica holds, scalar.
      most: of them that run at once, scalar; the others wait.
    """
    held = jnp.asarray(requests, float)
    # Requests past the most that run wait outside of the engine, and stretch the first token alone.
    running = jnp.minimum(held, most)
    others = running - 1.0 + jnp.asarray(request.poisson)
    outputs, per_step = request.further, request.per_step

    def parts(share: Array, together: Array) -> tuple[Array, Array, Array, Array, Wait, Array]:
        """Times at a share, and at so many prompts that share their steps: what a prompt adds to others, decoding, the
        look for it, first token without waiting for others, that wait, and how many share."""
        beside = others * share
        step, alone = request.decode(times.step_s, jnp.stack([1.0 + beside, beside]))
        fullest = jnp.minimum(request.sharing(beside, times.attention_ranks), jnp.maximum(others + 1.0, 1.0))
        prompt = request.prompt(times.step_s, beside, request.guesses, together)
        added = jnp.maximum(prompt - request.chunks * alone, 0.0) / together
        decoding = outputs * step / per_step + others * share * added
        looked = 0.5 * (request.polls - 1.0) * alone
        first = jnp.asarray(times.engine.request_s) + times.engine.first_steps * alone + looked + prompt
        rate = others * share / decoding
        steps_s = jnp.where(request.poisson > 0, prompt, request.chunks * decoding * per_step / outputs)
        arrived = rate * steps_s
        burst = 0.5 * (running / fullest + 1.0) * request.prompt(times.step_s, beside, request.guesses, fullest)
        wave = (1.0 - jnp.asarray(request.poisson)) * times.engine.wave
        wait = waiting(prompt, arrived / together, arrived / fullest, burst, wave)
        return added, decoding, looked, first, wait, jnp.clip(1.0 + arrived, 1.0, fullest)

    def step(state: tuple[Array, Array]) -> tuple[tuple[Array, Array], Any]:
        added, decoding, looked, first, wait, sharing = parts(*state)
        return (decoding / (decoding + first + wait.mean), sharing), (added, decoding, looked, first, wait)

    alone = jnp.ones_like(running), jnp.ones_like(running)
    (share, _), (added, decoding, looked, first, wait) = iterated(step, alone, ITERATIONS)
    rate = running / (first + wait.mean + decoding)
    queue = (held - running) / rate
    met, batch, tpot = jnp.maximum(others * share, 0.0), running * share, decoding / outputs
    answering = outputs / per_step * request.decode(times.step_s, jnp.maximum(batch, 1.0)) / jnp.maximum(batch, 1.0)
    return Steady(
        ttft_s=first + wait.mean + queue,
        ttft_p50_s=first + wait.quantile(0.5) + queue,
        ttft_p95_s=first + 0.9 * (1.0 - 1.0 / request.polls) * looked + wait.quantile(0.95) + queue,
        tpot_s=tpot,
        # A square root has an infinite slope at 0.
        tpot_p95_s=tpot + Z95 * jnp.sqrt(met + 1e-12) * added / outputs,
        rate=rate,
        batch=batch,
        prefill_share=added / jnp.maximum(added + answering, 1e-12),
    )


Z95 = 1.645
"""Of a normal distribution."""
FIRST_SPREAD = 0.36
"""Half width of the 80 % interval of a time to the first token in logarithms, beside that of the kernels: engines and
load generators differ. Fitted on the rows that `times.ENGINES` are."""


def first_interval(central: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The 80 % interval of the time to the first token, arrays of one shape.

    Args:
      central: the forecast, seconds.
      low, high: by kernels at the ends of their intervals, seconds.
    """
    ends = np.minimum(low, central), np.maximum(high, central)
    below, above = (np.hypot(FIRST_SPREAD, np.log(end / central)) for end in ends)
    return central * np.exp(-below), central * np.exp(above)
