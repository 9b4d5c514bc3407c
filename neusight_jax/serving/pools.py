"""Pools: prompts on some replicas, answers on others (disaggregated prefill and decode), in steady state.

Prompts queue at n_p replicas that do nothing else; the KV cache of each is sent whole to one of n_d replicas that only
decode. With P(g) the steps of g prompts that share them, at most G, K the seconds of the transfer, D(b) a decode step
of b requests, E tokens of a request from a step, and a rate of r requests a second:

    first token  request_s + first_steps D(b) + wait + P(g) + K
    sharing      g = 1 + a, at most G, where a = r P(g) / n_p others come in the steps of a prompt
    wait         P(g) u v / (u + v),  u and v as in `steady`
    decoding     (O - 1) D(b) / E,  b = 1 + r decoding / n_d of those before
    life         first token + decoding;  r = users / life, or as asked

No prompt delays a decode step, which is what the second pool is for.
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

from neusight_jax.model.programs import one_shot
from neusight_jax.serving.steady import Z95, Demand, Steady, Wait, waiting
from neusight_jax.serving.times import Times

ITERATIONS = 48
"""Of the life of a request; each brings it nearer by a half or more."""
FULL = 0.999
"""Most share of its time that a pool is busy."""


def pools(
    prefill: Times,
    decode: Times,
    request: Demand,
    load: ArrayLike,
    transfer_s: ArrayLike,
    most: ArrayLike,
    prefill_replicas: ArrayLike,
    decode_replicas: ArrayLike,
) -> Steady:
    """The steady state of two pools.

    Args:
      load: users, or where arrivals are random, requests a second.
      transfer_s: of the KV cache of a prompt; most: requests that decode at once on one replica.
    """
    load, poisson = jnp.asarray(load, float), jnp.asarray(request.poisson)
    first_n, next_n = jnp.asarray(prefill_replicas, float), jnp.asarray(decode_replicas, float)
    outputs, per_step = request.further, jnp.asarray(request.per_step)
    fullest = request.sharing(0.0)
    full_s = request.prompt(prefill.step_s, 0.0, prompts=fullest)
    before = jnp.asarray(prefill.engine.request_s) + jnp.asarray(transfer_s)

    def decoding_s(batch: Array) -> Array:
        return outputs * request.decode(decode.step_s, batch) / per_step

    most_rate = next_n * most / decoding_s(jnp.asarray(most, float))  # requests a second

    def parts(life: Array, decoding: Array, together: Array) -> tuple[Array, Array, Array, Wait, Array]:
        """Rate, requests that decode beside one, first token without waiting, the wait, and how many prompts share
        their steps, of a life, its decoding and so many that share."""
        limit = jnp.minimum(FULL * first_n * fullest / full_s, most_rate)
        rate = jnp.minimum(jnp.where(poisson > 0, load, load / life), limit)
        others = jnp.maximum(jnp.where(poisson > 0, rate * life, load - 1.0), 0.0)
        beside = jnp.minimum(others * decoding / life / next_n, most - 1.0)
        prompt = request.prompt(prefill.step_s, 0.0, prompts=together)
        arrived = rate * prompt / first_n * others / jnp.maximum(others + 1.0 - poisson, 1.0)
        queued = others / first_n + 1.0
        shared = jnp.minimum(fullest, queued)
        burst = 0.5 * (queued / shared + 1.0) * request.prompt(prefill.step_s, 0.0, prompts=shared)
        wave = (1.0 - poisson) * prefill.engine.wave
        wait = waiting(prompt, arrived / together, arrived / fullest, burst, wave)
        told = prefill.engine.first_steps * request.decode(decode.step_s, beside)
        return rate, beside, before + told + prompt, wait, jnp.clip(1.0 + arrived, 1.0, shared)

    # Half a step each time keeps the iteration from swinging.
    def iterate(state: tuple[Array, Array, Array], __: None) -> tuple[tuple[Array, Array, Array], None]:
        _, beside, first, wait, sharing = parts(*state)
        decoding = decoding_s(1.0 + beside)
        found = first + wait.mean + decoding, decoding, sharing
        life, decoding, together = (0.5 * (old + new) for old, new in zip(state, found, strict=True))
        return (life, decoding, together), None

    alone = decoding_s(jnp.ones(()))
    start = before + request.prompt(prefill.step_s, 0.0) + alone, alone, jnp.ones(())
    state, __ = jax.lax.scan(iterate, start, None, length=ITERATIONS)
    (life, decoding, _), (rate, beside, first, wait, _) = state, parts(*state)
    over = jnp.where(poisson > 0, jnp.where(load > 1.001 * rate, jnp.inf, 0.0), jnp.maximum(load / rate - life, 0.0))
    spread = jnp.sqrt(beside * (1.0 - (1.0 - poisson) * decoding / life) + 1e-12)
    fuller = 1.0 + jnp.minimum(beside + Z95 * spread, most - 1.0)
    return Steady(
        ttft_s=first + wait.mean + over,
        ttft_p50_s=first + wait.quantile(0.5) + over,
        ttft_p95_s=first + wait.quantile(0.95) + over,
        tpot_s=decoding / outputs,
        tpot_p95_s=request.decode(decode.step_s, fuller) / per_step,
        rate=rate,
        batch=(1.0 + beside) * next_n,
        prefill_share=jnp.zeros(()),
    )


@one_shot
def _states(prefill: Any, decode: Any, request: Demand, load: Any, rest: Any) -> list[Any]:
    """Fields of the states of stacked times [bound]."""

    def one(prefill: Times, decode: Times) -> Steady:
        return pools(prefill, decode, request, load, *rest)

    return jax.tree.leaves(jax.vmap(one)(prefill, decode))


@dataclass(frozen=True)
class Pair:
    """Two kinds of replicas as what a load is put on.

    Attributes:
      prefill, decode: their times, stacked [middle, low, high of the kernels].
      asked: a demand; load: users, or requests a second.
      transfer_s: of a prompt's KV cache, by how many replicas there are of each.
      most: requests that decode at once on one replica.
    """

    prefill: Times
    decode: Times
    asked: Demand
    load: float
    transfer_s: Callable[[int, int], float]
    most: float

    def at(self, prefill: int, decode: int) -> Steady:
        """The steady states of so many replicas [bound]."""
        rest = tuple(map(np.float32, (self.transfer_s(prefill, decode), self.most, prefill, decode)))
        fields = _states(self.prefill, self.decode, self.asked, np.float32(self.load), rest)
        return Steady(*map(np.asarray, fields))


def fewest(
    first_meets: Callable[[int, int], bool],
    next_meets: Callable[[int, int], bool],
    most: Callable[[int, int], bool],
    guess: tuple[int, int] = (1, 1),
) -> tuple[int, int] | None:
    """The fewest replicas of each pool that meet both targets; None where there are none.

    From a guess, each pool grows while its own target is missed, then shrinks while both are met.

    Args:
      first_meets: whether so many replicas (prefill, decode) meet the target of the first token.
      next_meets: whether they meet that of further tokens.
      most: whether so many may be had.
      guess: replicas (prefill, decode) to begin with.
    """
    prefill, decode = guess
    for _ in range(400):
        wanted = first_meets(prefill, decode), next_meets(prefill, decode)
        if all(wanted):
            break
        if not most(prefill, decode):
            return None
        prefill = prefill if wanted[0] else max(prefill + 1, math.ceil(1.25 * prefill))
        decode = decode if wanted[1] else max(decode + 1, math.ceil(1.25 * decode))
    else:
        return None

    def meets(prefill: int, decode: int) -> bool:
        return first_meets(prefill, decode) and next_meets(prefill, decode)

    decode = _least(lambda count: meets(prefill, count), decode)
    prefill = _least(lambda count: meets(count, decode), prefill)
    return (prefill, decode) if most(prefill, decode) else None


def _least(meets: Callable[[int], bool], high: int) -> int:
    """The least count from 1 to `high`, which does, that meets, by bisection."""
    low, step = high, 1
    while low == high and low > 0:  # mostly the count is near
        low = max(high - step, 0)
        if low > 0 and meets(low):
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
