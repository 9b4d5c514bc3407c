"""Steady state: what requests wait for under a constant load, in closed form: an estimate, no engine is run.

A replica holds n requests. Those that decode share its steps; a prompt is prefilled in chunks, each in a step together
with the decodes, which it delays. With f the share of its life that a request decodes, D a decode step, P the steps of
a prompt, of which x is added by the prompt, E tokens of a request from a step, and n' the others a request meets:

    decoding    (O - 1) (D / E) + n' f x
    first token  request_s + D / 2 if there are others + wait + P
    wait        P u v / (u + v),   u = r / 2 (1 - r), r = n' P / life: deterministic service, random arrivals (M/D/1)
                                   v = (n' - 1 + g) / 2, where all come at once, g prompts to a step

and f follows from both by iteration. In a closed loop n' = n - 1: a user sends the next request when one is answered.
Where arrivals are random whatever the load (Poisson), n' = n. Spread: prompts met while decoding are Poisson's, waits
exponential beyond zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from neusight_jax.serving.engine import Options
from neusight_jax.serving.times import Times

ITERATIONS = 24
"""Of the share of its life that a request decodes; each brings it nearer by a half or more."""
PERCENTILES: tuple[float, ...] = (50.0, 95.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: of its prompt and of its answer; static."""

    input_tokens: int
    output_tokens: int

    @property
    def mean_context(self) -> float:
        """Mean length of a sequence while it decodes."""
        return self.input_tokens + self.output_tokens / 2.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steady:
    """A replica in steady state, arrays of one shape; seconds, or as said.

    Attributes:
      ttft_s, tpot_s: to the first token, and of each further one: mean; the median and 95th percentile follow.
      rate: requests a second; batch: requests that decode.
      prefill_share: of the busy time that is added by prompts.
    """

    ttft_s: Array
    ttft_p50_s: Array
    ttft_p95_s: Array
    tpot_s: Array
    tpot_p95_s: Array
    rate: Array
    batch: Array
    prefill_share: Array

    def ttft(self, percentile: float) -> Array:
        """Seconds to the first token at the median or the 95th percentile."""
        return self.ttft_p50_s if percentile == 50.0 else self.ttft_p95_s

    def tpot(self, percentile: float) -> Array:
        """Seconds of a further token; its median is its mean, as that of a sum of many steps."""
        return self.tpot_s if percentile == 50.0 else self.tpot_p95_s


def steady(
    times: Times, lengths: Lengths, options: Options, requests: ArrayLike, most: ArrayLike, *, poisson: bool = False
) -> Steady:
    """The steady state of a replica that holds `requests` requests, of which at most `most` run and the others wait.

    Differentiable in the times, and `jax.vmap` takes many loads.

    Args:
      poisson: arrivals are random; else each request follows an answer.
    """
    held, wave = jnp.asarray(requests, float), jnp.asarray(times.engine.wave)
    running = jnp.minimum(held, most)
    others = running if poisson else running - 1.0
    outputs, per_step = max(lengths.output_tokens - 1.0, 1.0), options.tokens_per_step
    context, guesses = lengths.mean_context, float(options.draft_tokens)
    fresh = max(lengths.input_tokens * (1.0 - options.prefix_share), 1.0)
    chunks = max(1, -(-int(fresh) // options.chunk_tokens))
    chunk = fresh / chunks
    starts = (lengths.input_tokens - fresh) + chunk * jnp.arange(chunks)
    together = jnp.minimum(max(options.chunk_tokens / fresh, 1.0), jnp.maximum(others + 1.0, 1.0))

    def decode_s(batch: Array) -> Array:
        drafted = 1.0 + options.draft_share * guesses
        return drafted * times.step_s(batch, context, guesses=guesses)

    def at(share: Array) -> tuple[Array, Array, Array, Array]:
        """Of a share: decode step, prompt, what it adds, decode step of the others."""
        beside = others * share
        step = decode_s(1.0 + beside)
        prompt = jnp.sum(jax.vmap(lambda start: times.step_s(beside, context, chunk, start, guesses))(starts))
        added = jnp.maximum(prompt - chunks * decode_s(beside), 0.0)
        return step, prompt, added, decode_s(beside)

    def parts(share: Array) -> tuple[Array, ...]:
        step, prompt, added, running_s = at(share)
        decoding = outputs * step / per_step + others * share * added
        first = jnp.asarray(times.engine.request_s) + 0.5 * running_s + prompt
        busy = jnp.clip(others * prompt / (decoding + first), 0.0, 0.999)
        random = busy / (2.0 * (1.0 - busy))
        wave_wait = jnp.maximum(others - 1.0 + together, 0.0) / 2.0 * jnp.where(others > 0, 1.0, 0.0)
        queued = random * wave_wait / jnp.maximum(random + wave_wait, 1e-9)
        return added, decoding, first, busy, prompt * queued, prompt * wave_wait

    def iterate(share: Array, _: None) -> tuple[Array, None]:
        _, decoding, first, _, random, waved = parts(share)
        wait = (1.0 - wave) * random + wave * waved
        return 0.5 * (share + decoding / (decoding + first + wait)), None

    share, _ = jax.lax.scan(iterate, jnp.ones_like(running), None, length=ITERATIONS)
    added, decoding, first, busy, random, waved = parts(share)
    wait = (1.0 - wave) * random + wave * waved
    life = first + wait + decoding
    rate = running / life
    queue = (held - running) / rate

    def quantile(level: float) -> Array:
        """Of the wait: exponential beyond its chance of being none, or even over a wave."""
        tail = random / jnp.maximum(busy, 1e-9) * jnp.maximum(jnp.log(jnp.maximum(busy, 1e-9) / (1.0 - level)), 0.0)
        return (1.0 - wave) * tail + wave * 2.0 * level * waved

    met = jnp.maximum(others * share, 0.0)
    tpot = decoding / outputs
    return Steady(
        ttft_s=first + wait + queue,
        ttft_p50_s=first + quantile(0.5) + queue,
        ttft_p95_s=first + quantile(0.95) + queue,
        tpot_s=tpot,
        tpot_p95_s=tpot + Z95 * jnp.sqrt(met + 1e-12) * added / outputs,
        rate=rate,
        batch=running * share,
        prefill_share=added
        / jnp.maximum(
            added
            + outputs * decode_s(jnp.maximum(running * share, 1.0)) / per_step / jnp.maximum(running * share, 1.0),
            1e-12,
        ),
    )


Z95 = 1.645
"""Of a normal distribution."""
