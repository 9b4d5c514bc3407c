"""Pools: prompts on some replicas, answers on others (disaggregated prefill and decode), and how many of each.

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

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.prices import Prices
from neusight_jax.model.programs import one_shot
from neusight_jax.serving.choices import Load, ServingChoice
from neusight_jax.serving.layouts import TENSOR, Replica
from neusight_jax.serving.power import powered
from neusight_jax.serving.steady import (
    PERCENTILES,
    Z95,
    Demand,
    Steady,
    Wait,
    demand,
    first_interval,
    iterated,
    waiting,
)
from neusight_jax.serving.steps import Model, cache_bytes
from neusight_jax.serving.times import Times, stacked

ITERATIONS = 48
"""Of the life of a request; each brings it nearer by a half or more."""
FULL = 0.999
"""Most share of its time that a pool is busy."""
MOST_GPUS = 100_000
"""Of one type, where nobody says."""


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
    # The load is cut at what the pool that fills first can take: past it queues grow without end.
    first_n, next_n = jnp.asarray(prefill_replicas, float), jnp.asarray(decode_replicas, float)
    outputs, per_step = request.further, jnp.asarray(request.per_step)
    fullest = request.sharing(0.0, prefill.attention_ranks)
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

    def step(state: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], Any]:
        rate, beside, first, wait, sharing = parts(*state)
        decoding = decoding_s(1.0 + beside)
        return (first + wait.mean + decoding, decoding, sharing), (rate, beside, first, wait)

    alone = decoding_s(jnp.ones(()))
    start = before + request.prompt(prefill.step_s, 0.0) + alone, alone, jnp.ones(())
    (life, decoding, _), (rate, beside, first, wait) = iterated(step, start, ITERATIONS)
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


def link_bytes_per_s(cluster: Cluster, gpus: int) -> float:
    """Rate of one GPU to one of the other pool: within a domain of fast links that holds both pools, else between."""
    topology = cluster.topology
    if gpus <= (topology.gpus_per_domain or TENSOR[-1]):
        return float(np.asarray(topology.link_bytes_per_s)) * float(np.asarray(topology.pair_share))
    return float(np.asarray(topology.crossing_bytes_per_s))


@dataclass(frozen=True)
class Pair:
    """Replicas that prefill and others that decode, under a load.

    Every rank sends its share of a prompt's KV cache at once; the fewer ranks, the more has each.

    Attributes:
      prefill: a replica with step times; its options say how prompts are cut into chunks.
      decode: likewise, of the same type of GPU or another.
      clusters: machines by the name of their GPU, whose links the KV cache goes over; model: whose KV cache it is.
      load: lengths, targets, and users or requests a second.
    """

    prefill: Replica
    decode: Replica
    clusters: Mapping[str, Cluster]
    model: Model
    load: Load

    @property
    def mixed(self) -> bool:
        """Whether prompts and answers are on two types of GPUs."""
        return self.prefill.gpu != self.decode.gpu

    def within(self, counts: tuple[int, int]) -> bool:
        """Whether so many replicas of each take no more GPUs of a type than the load may."""
        gpus = counts[0] * self.prefill.layout.gpus, counts[1] * self.decode.layout.gpus
        return (max(gpus) if self.mixed else sum(gpus)) <= self.load.max_gpus

    def gpus(self, first: int, after: int) -> int:
        """GPUs of so many replicas of each."""
        return first * self.prefill.layout.gpus + after * self.decode.layout.gpus

    def cache(self, tokens: int) -> tuple[float, int]:
        """Bytes of the KV cache of so many tokens on the rank that has most, and how many ranks send."""
        layouts = self.prefill.layout, self.decode.layout
        held, ranks = max((cache_bytes(self.model, layout, [tokens])[0], -layout.tensor) for layout in layouts)
        return float(held), -ranks

    def link_bytes_per_s(self, first: int, after: int) -> float:
        """Rate of one rank, where there are so many replicas of each; two types are joined by the slower network."""
        if self.mixed:
            ends = (self.clusters[replica.gpu].topology for replica in (self.prefill, self.decode))
            return min(float(np.asarray(end.crossing_bytes_per_s)) for end in ends)
        return link_bytes_per_s(self.clusters[self.decode.gpu], self.gpus(first, after))

    def transfer_s(self, first: int, after: int) -> float:
        """Seconds that a prompt's KV cache takes."""
        rate, (sent, _) = self.link_bytes_per_s(first, after), self._prompt_cache
        return sent / rate if rate > 0.0 else math.inf

    @functools.cached_property
    def _prompt_cache(self) -> tuple[float, int]:
        return self.cache(max(int(self.load.lengths.input_tokens), 1))

    @functools.cached_property
    def _times(self) -> tuple[Times, Times]:
        """Times of both, stacked [middle, low, high of the kernels]."""
        assert self.prefill.times is not None
        assert self.decode.times is not None
        return stacked(self.prefill.times), stacked(self.decode.times)

    @property
    def amount(self) -> float:
        """The load: users, or requests a second."""
        return float(self.load.users if self.load.users is not None else self.load.rate or 0.0)

    def at(self, first: int, after: int, amount: float | None = None) -> Steady:
        """The steady states of so many replicas of each [bound], under the load or another amount of it."""
        request = demand(self.load.lengths, self.prefill.options, poisson=self.load.rate is not None)
        rest = tuple(map(np.float32, (self.transfer_s(first, after), self.decode.most, first, after)))
        fields = _states(*self._times, request, np.float32(self.amount if amount is None else amount), rest)
        return Steady(*map(np.asarray, fields))

    def meets(self, first: int, after: int, bound: int = 0, amount: float | None = None) -> tuple[bool, bool]:
        """Whether the first token is in time, and whether further ones are and every request finds room.

        Args:
          first, after: replicas that prefill, and that decode.
          bound: 0 = the middle of the kernels' intervals, 1 = their low ends, 2 = their high ends.
          amount: users, or requests a second, in place of the load's.
        """
        states, load = self.at(first, after, amount), self.load
        # The closed form cuts the load where a pool is full, so a full pool has no room.
        room = states.batch[bound] <= 0.999 * self.decode.most * after or states.batch[bound] <= after
        timely = states.ttft(load.percentile)[bound] <= load.ttft_s and math.isfinite(states.ttft_s[bound])
        return bool(timely), bool(room and states.tpot(load.percentile)[bound] <= load.tpot_s)

    def fewest(self, bound: int = 0) -> tuple[int, int] | None:
        """The fewest replicas of each that carry the load, at the middle or an end of the kernels' intervals."""
        meets = functools.cache(lambda first, after: self.meets(first, after, bound))
        # A target that one request alone misses is met by no number of replicas.
        alone = min(self.amount, 1.0 if self.load.users is not None else 1e-6)
        if not all(self.meets(1, 1, bound, alone)):
            return None
        return fewest(
            lambda first, after: meets(first, after)[0],
            lambda first, after: meets(first, after)[1],
            lambda first, after: self.gpus(first, after) <= MOST_GPUS,
        )

    def most(self, counts: tuple[int, int]) -> float:
        """The largest load of these replicas within the targets, to a percent."""
        low, high = self.amount, 2.0 * self.amount
        while all(self.meets(*counts, amount=high)) and high < 1e9:
            low, high = high, 2.0 * high
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if all(self.meets(*counts, amount=middle)) else (low, middle)
        return low

    def per_hour(self, counts: tuple[int, int], prices: Prices | None) -> tuple[float, float] | None:
        """What an hour of so many replicas of each costs, where both have a price."""
        own = [None if prices is None else prices.of(replica.gpu) for replica in (self.prefill, self.decode)]
        if own[0] is None or own[1] is None:
            return None
        return counts[0] * self.prefill.layout.gpus * own[0], counts[1] * self.decode.layout.gpus * own[1]

    def choice(self, counts: tuple[int, int], prices: Prices | None) -> ServingChoice:
        """An answer of so many replicas of each."""
        prefill, decode, load = self.prefill, self.decode, self.load
        states, gpus, key = self.at(*counts), self.gpus(*counts), load.percentile
        ends = [self.fewest(bound) for bound in (1, 2)]
        sizes = [self.gpus(*end) if end else math.inf for end in ends]
        first, further = first_interval(*states.ttft(key)), states.tpot(key)[1:]
        intervals: dict[str, Any] = {"ttft_s": tuple(map(float, first)), "tpot_s": tuple(map(float, further))}
        intervals["gpus"] = (min(*sizes, gpus), max(*sizes, gpus))
        rate, most = float(states.rate[0]), self.most(counts)
        life_s = float(states.ttft_s[0] + (load.lengths.output_tokens - 1.0) * states.tpot_s[0])
        costs, hours = dict[str, float](), self.per_hour(counts, prices)
        if hours is not None:
            costs = load.costs(sum(hours), rate, hours[0] / sum(hours))
            intervals["cost"] = tuple(costs["tokens"] * count / gpus for count in intervals["gpus"])
        assert decode.memory is not None
        sent = {"gpu": prefill.gpu, "replicas": counts[0], "transfer_s": self.transfer_s(*counts)}
        choice = ServingChoice(
            decode.gpu,
            decode.layout.tensor,
            decode.layout.expert,
            decode.layout.data,
            replicas=counts[1],
            gpus=gpus,
            ttft_s={f"p{percentile:g}": float(states.ttft(percentile)[0]) for percentile in PERCENTILES},
            tpot_s={f"p{percentile:g}": float(states.tpot(percentile)[0]) for percentile in PERCENTILES},
            intervals=intervals,
            max_users=int(most if load.users is not None else most * life_s),
            max_rate=most if load.rate is not None else most / life_s,
            tokens_per_s_gpu=rate * load.lengths.output_tokens / gpus,
            memory=decode.memory.parts,
            requests_at_once=decode.memory.requests,
            costs=costs,
            prefill={name: getattr(prefill.layout, name) for name in ("tensor", "expert", "data")} | sent,
        )
        return powered(choice, load, decode, prefill)


def disaggregated(
    replicas: Sequence[Replica], clusters: Mapping[str, Cluster], model: Model, load: Load, prices: Prices | None
) -> list[ServingChoice]:
    """The best pools of every GPU, and of every two types of them: the cheapest that carry a load within the
    targets, or without prices those with the fewest GPUs.

    A GPU on which no pools do is left out. Of two types, prompts are tried in the layout that takes them best on their
    own type, and answers likewise.

    Args:
      replicas: that may be either pool; those without step times are left out.
      clusters: machines by the name of their GPU.
      model: as the engine loads it.
      load: what is asked.
      prices: of an hour of one GPU; None = no costs.
    """
    usable = [replica for replica in replicas if replica.times is not None]

    def best(pairs: Iterable[tuple[Replica, Replica]]) -> tuple[Pair, tuple[int, int]] | None:
        answers = []
        for prefill, decode in pairs:
            pair = Pair(prefill, decode, clusters, model, load)
            if math.isfinite(pair.transfer_s(1, MOST_GPUS)) and (counts := pair.fewest()):
                hours = pair.per_hour(counts, prices)
                value = float(pair.gpus(*counts)) if hours is None else sum(hours)
                size = value, float(pair.at(*counts).ttft(load.percentile)[0])
                answers.append((size, pair, counts))
        return min(answers, key=lambda answer: answer[0])[1:] if answers else None

    alike = {gpu: best(product(*([each for each in usable if each.gpu == gpu],) * 2)) for gpu in clusters}
    firsts = {gpu: answer[0] for gpu, answer in alike.items() if answer is not None}
    two = [best([(one.prefill, other.decode)]) for one, other in permutations(firsts.values(), 2)]
    found = filter(None, (*alike.values(), *two))
    return [pair.choice(counts, prices) for pair, counts in found if pair.within(counts)]


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
    # Growth by a quarter finds the order of magnitude in few states; what was too much is taken back below.
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
