"""Disaggregated: the fewest replicas for prompts and the fewest for answers that a load needs, of each GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.prices import Prices
from neusight_jax.serving.choices import Load, ServingChoice
from neusight_jax.serving.layouts import TENSOR, Replica
from neusight_jax.serving.pools import Pair, fewest
from neusight_jax.serving.power import powered
from neusight_jax.serving.steady import PERCENTILES, Steady, demand, first_interval
from neusight_jax.serving.steps import Model, cache_bytes
from neusight_jax.serving.times import stacked

MOST_GPUS = 100_000
"""Of one type, where nobody says."""


def link_bytes_per_s(cluster: Cluster, gpus: int) -> float:
    """Rate of one GPU to one of the other pool: within a domain of fast links that holds both pools, else between."""
    topology = cluster.topology
    if gpus <= (topology.gpus_per_domain or TENSOR[-1]):
        return float(np.asarray(topology.link_bytes_per_s)) * float(np.asarray(topology.pair_share))
    return float(np.asarray(topology.crossing_bytes_per_s))


def sending(clusters: Mapping[str, Cluster], model: Model) -> Callable[[Replica, Replica, int], tuple[float, float]]:
    """A function of two replicas and all GPUs: bytes of the KV cache of a token on all ranks, and bytes/s of a prompt
    that is sent."""

    def of(prefill: Replica, decode: Replica, gpus: int) -> tuple[float, float]:
        most = max(
            (cache_bytes(model, replica.layout, [1024])[0], -replica.layout.gpus) for replica in (prefill, decode)
        )
        ranks = -most[1]
        return float(most[0]) / 1024 * ranks, ranks * link_bytes_per_s(clusters[decode.gpu], gpus)

    return of


def pair_of(prefill: Replica, decode: Replica, cluster: Cluster, model: Model, load: Load) -> Pair:
    """Replicas that prefill and others that decode, as what a load is put on.

    Every rank sends its share of a prompt's KV cache at once; the fewer ranks, the more has each.

    Args:
      prefill: a replica with step times; its options say how prompts are cut into chunks.
      decode: likewise, of the same GPU.
      cluster: whose links the KV cache goes over.
      model: whose KV cache it is.
      load: lengths, and users or requests a second.
    """
    assert prefill.times is not None
    assert decode.times is not None
    inputs = max(int(load.lengths.input_tokens), 1)
    sent = max(float(cache_bytes(model, replica.layout, [inputs])[0]) for replica in (prefill, decode))

    def transfer_s(first: int, after: int) -> float:
        rate = link_bytes_per_s(cluster, first * prefill.layout.gpus + after * decode.layout.gpus)
        return sent / rate if rate > 0.0 else math.inf

    request = demand(load.lengths, prefill.options, poisson=load.rate is not None)
    amount = float(load.users if load.users is not None else load.rate or 0.0)
    return Pair(stacked(prefill.times), stacked(decode.times), request, amount, transfer_s, decode.most)


def disaggregated(
    replicas: Sequence[Replica], clusters: Mapping[str, Cluster], model: Model, load: Load, prices: Prices | None
) -> list[ServingChoice]:
    """The best pools of every GPU, those with the fewest GPUs that carry a load within the targets.

    A GPU on which no pools do is left out.

    Args:
      replicas: that may be either pool; those without step times are left out.
      clusters: machines by the name of their GPU.
      model: as the engine loads it.
      load: what is asked.
      prices: of an hour of one GPU; None = no costs.
    """
    out = []
    for gpu, cluster in clusters.items():
        usable = [replica for replica in replicas if replica.gpu == gpu and replica.times is not None]
        pairings = []
        for prefill, decode in product(usable, usable):
            pair = pair_of(prefill, decode, cluster, model, load)
            if math.isfinite(pair.transfer_s(1, MOST_GPUS)) and (counts := _counts(prefill, decode, pair, load, 0)):
                size = _gpus(prefill, decode, counts), _first(pair, counts, load)
                pairings.append((size, prefill, decode, pair, counts))
        if pairings:
            _, prefill, decode, pair, counts = min(pairings, key=lambda pairing: pairing[0])
            out.append(_choice(prefill, decode, pair, counts, load, prices))
    return out


def _gpus(prefill: Replica, decode: Replica, counts: tuple[int, int]) -> int:
    return counts[0] * prefill.layout.gpus + counts[1] * decode.layout.gpus


def _first(pair: Pair, counts: tuple[int, int], load: Load) -> float:
    return float(pair.at(*counts).ttft(load.percentile)[0])


def _counts(prefill: Replica, decode: Replica, pair: Pair, load: Load, bound: int) -> tuple[int, int] | None:
    """The fewest replicas of each, at the middle or an end of the kernels' intervals."""
    most = min(load.max_gpus, MOST_GPUS)

    @cache
    def at(first: int, after: int) -> tuple[bool, bool]:
        return _meets(pair.at(first, after), after, pair.most, load, bound)

    # A target that one request alone misses is met by no number of replicas.
    alone = replace(pair, load=min(pair.load, 1.0 if load.users is not None else 1e-6))
    if not all(_meets(alone.at(1, 1), 1, pair.most, load, bound)):
        return None
    return fewest(
        lambda first, after: at(first, after)[0],
        lambda first, after: at(first, after)[1],
        lambda first, after: _gpus(prefill, decode, (first, after)) <= most,
    )


def _meets(states: Steady, replicas: int, most: float, load: Load, bound: int) -> tuple[bool, bool]:
    """Whether the first token is in time, and whether further ones are and every request finds room."""
    # The closed form cuts the load where a pool is full, so a full pool has no room.
    room = states.batch[bound] <= 0.999 * most * replicas or states.batch[bound] <= replicas
    first = states.ttft(load.percentile)[bound] <= load.ttft_s and math.isfinite(states.ttft_s[bound])
    return bool(first), bool(room and states.tpot(load.percentile)[bound] <= load.tpot_s)


def _choice(
    prefill: Replica, decode: Replica, pair: Pair, counts: tuple[int, int], load: Load, prices: Prices | None
) -> ServingChoice:
    """An answer of the fewest replicas of two kinds."""
    states, gpus, key = pair.at(*counts), _gpus(prefill, decode, counts), load.percentile
    ends = [_counts(prefill, decode, pair, load, bound) for bound in (1, 2)]
    sizes = [_gpus(prefill, decode, end) if end else math.inf for end in ends]
    first, further = first_interval(*states.ttft(key)), states.tpot(key)[1:]
    intervals: dict[str, Any] = {"ttft_s": tuple(map(float, first)), "tpot_s": tuple(map(float, further))}
    intervals["gpus"] = (min(*sizes, gpus), max(*sizes, gpus))
    rate, most = float(states.rate[0]), _most(pair, counts, load)
    price = prices.of(decode.gpu) if prices is not None else None
    costs: dict[str, float] = {}
    if price is not None:
        share = counts[0] * prefill.layout.gpus / gpus
        costs = load.costs(gpus * price, rate, share)
        intervals["cost"] = tuple(costs["tokens"] * count / gpus for count in intervals["gpus"])
    parts = ("weights", "activations", "runtime", "cache_bytes", "mem_bytes")
    assert decode.memory is not None
    choice = ServingChoice(
        decode.gpu,
        decode.layout.tensor,
        decode.layout.expert,
        replicas=counts[1],
        gpus=gpus,
        ttft_s={f"p{percentile:g}": float(states.ttft(percentile)[0]) for percentile in PERCENTILES},
        tpot_s={f"p{percentile:g}": float(states.tpot(percentile)[0]) for percentile in PERCENTILES},
        intervals=intervals,
        max_users=int(most if load.users is not None else most * _life(states, load)),
        max_rate=most if load.rate is not None else most / _life(states, load),
        tokens_per_s_gpu=rate * load.lengths.output_tokens / gpus,
        memory={name: getattr(decode.memory, name) for name in parts},
        requests_at_once=decode.memory.requests,
        costs=costs,
        prefill={
            "tensor": prefill.layout.tensor,
            "expert": prefill.layout.expert,
            "replicas": counts[0],
            "transfer_s": pair.transfer_s(*counts),
        },
    )
    return powered(choice, load, decode, prefill)


def _life(states: Steady, load: Load) -> float:
    """Seconds that a request is there."""
    return float(states.ttft_s[0] + (load.lengths.output_tokens - 1.0) * states.tpot_s[0])


def _most(pair: Pair, counts: tuple[int, int], load: Load) -> float:
    """The largest load of these pools within the targets, to a percent."""

    def meets(amount: float) -> bool:
        return all(_meets(replace(pair, load=amount).at(*counts), counts[1], pair.most, load, 0))

    low, high = pair.load, 2.0 * pair.load
    while meets(high) and high < 1e9:
        low, high = high, 2.0 * high
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
