"""Under load: the best layouts of the estimate run by an engine's scheduler, which then decides how many are needed."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.prices import SECONDS_PER_HOUR, Prices
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.serving.choices import Load, ServingChoice, layout_of
from neusight_jax.serving.layouts import Replica
from neusight_jax.serving.pools import Pair, fewest
from neusight_jax.serving.power import powered
from neusight_jax.serving.simulators import PACKAGE, VERSION, Prefill, Run, Trace, run
from neusight_jax.serving.steps import Model

METHOD = f"{PACKAGE} {VERSION}: its scheduler on a virtual clock, with step times forecast here"
LAYOUTS = 2
"""Of each GPU, the best by the estimate are run."""
MOST_GROWTH = 4
"""Times the GPUs of the estimate that pools may grow to."""
TRIES = 10
"""Most runs of one layout."""
Tried: TypeAlias = Mapping[tuple[str, Parallelism], Replica]
"""Replicas by GPU and layout."""


def under_load(
    choices: Sequence[ServingChoice],
    tried: Tried,
    clusters: Mapping[str, Cluster],
    model: Model,
    load: Load,
    trace: Trace | None,
    prices: Prices | None = None,
) -> list[ServingChoice]:
    """Choices in the order of the estimate, the first of each GPU as the engine answers them, several at a time.

    Args:
      choices: of the estimate.
      tried: replicas by GPU and layout.
      clusters: machines by the name of their GPU.
      model: as the engine loads it.
      load: what is asked; trace: the requests, where they are not drawn; prices: of an hour of one GPU.
    """
    seen: dict[str, int] = {}

    def of(choice: ServingChoice) -> Callable[[], ServingChoice]:
        seen[choice.machine] = seen.get(choice.machine, 0) + bool(choice.replicas)
        if not choice.replicas:
            return lambda: choice
        if seen[choice.machine] > LAYOUTS:
            note = "not run: the estimate prefers other layouts of this GPU"
            return lambda: replace(choice, replicas=None, gpus=None, rank=0, tie=False, notes=(note, *choice.notes))
        replica = tried[choice.gpu, choice.layout]
        if not choice.prefill:
            return lambda: _measured(choice, replica, load, trace)
        prefill = tried[choice.prefill["gpu"], layout_of(choice.prefill)]
        return lambda: _pools(choice, Pair(prefill, replica, clusters, model, load), trace, prices)

    threads = ThreadPoolExecutor(os.cpu_count())  # the engine runs outside Python
    try:
        return [future.result() for future in [threads.submit(of(choice)) for choice in choices]]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _held(replica: Replica, load: Load) -> float:
    """Tokens that the KV cache of a replica holds."""
    assert replica.memory is not None
    return replica.memory.cache_bytes / replica.memory.request_bytes * load.lengths.mean_context


def _measured(choice: ServingChoice, replica: Replica, load: Load, trace: Trace | None) -> ServingChoice:
    """A choice as the engine runs it, with the fewest replicas that meet the targets."""
    assert replica.times is not None
    times, held = replica.times[0], _held(replica, load)

    runs: dict[int, Run] = {}

    def of(count: int) -> Run:
        if trace is not None:
            runs[count] = run(times, replica.options, held, workers=count, trace=trace.path)
        else:
            users = None if load.users is None else load.users / count
            rate = None if load.rate is None else load.rate / count
            runs[count] = run(times, replica.options, held, lengths=load.lengths, users=users, rate=rate)
        return runs[count]

    most = min(load.max_gpus, 1e9) // replica.layout.gpus
    count, best = _fewest(of, load, choice.replicas or 1, int(most))
    if best is None:
        return _none(choice, f"{max(runs):g} replicas", runs[max(runs)], load)
    return powered(_answered(choice, count, best, load, whole=trace is not None), load, replica)


def _none(choice: ServingChoice, what: str, outcome: Run, load: Load) -> ServingChoice:
    """A choice that answers nothing, with what a run missed."""
    key = f"p{load.percentile:g}"
    note = f"run by the engine, {what} miss the targets: {load.missed(outcome.ttft_s[key], outcome.tpot_s[key])}"
    return replace(choice, replicas=None, gpus=None, notes=(note, *choice.notes))


def _pools(choice: ServingChoice, pair: Pair, trace: Trace | None, prices: Prices | None) -> ServingChoice:
    """A choice of two pools as the engine runs it, each with the fewest replicas that meet its target."""
    prefill, decode, load = pair.prefill, pair.decode, pair.load
    assert prefill.times is not None
    assert decode.times is not None
    first_times, times, key = prefill.times[0], decode.times[0], f"p{load.percentile:g}"
    held, ranks = pair.cache(1024)

    @functools.cache
    def of(first: int, after: int) -> Run:
        rate = ranks * pair.link_bytes_per_s(first, after)
        pool = Prefill(first_times, _held(prefill, load), first, held / 1024 * ranks, rate)
        pools: dict[str, Any] = {"workers": after, "prefill": pool}
        traffic: dict[str, Any] = {"lengths": load.lengths, "users": load.users, "rate": load.rate}
        traffic = {"trace": trace.path} if trace is not None else traffic
        return run(times, decode.options, _held(decode, load), **pools, **traffic)

    counts = int(choice.prefill["replicas"]), choice.replicas or 1
    fleet = fewest(
        lambda *tried: of(*tried).ttft_s[key] <= load.ttft_s,
        lambda *tried: of(*tried).tpot_s[key] <= load.tpot_s,
        lambda first, after: (
            pair.within((first, after)) and pair.gpus(first, after) <= MOST_GROWTH * pair.gpus(*counts)
        ),
        counts,
    )
    if fleet is None:
        return _none(choice, f"up to {MOST_GROWTH} times as many replicas", of(*counts), load)
    sent = {**choice.prefill, "replicas": fleet[0]}
    changed = replace(choice, prefill=sent, replicas=fleet[1])
    gpus, hours = pair.gpus(*fleet), pair.per_hour(fleet, prices)
    hour = None if hours is None else sum(hours)
    answered = _answered(changed, fleet[1], of(*fleet), load, whole=True, gpus=gpus, per_hour=hour)
    return powered(answered, load, decode, prefill)


def _fewest(of: Callable[[int], Run], load: Load, first: int, most: int) -> tuple[int, Run | None]:
    """The fewest replicas that meet the targets, by bisection from a guess, and their run."""
    key = f"p{load.percentile:g}"
    # A run of the engine takes seconds, and more replicas never hurt: doubling, then halving, needs few runs.
    low, high, count = 0, None, min(first, max(most, 1))
    best: Run | None = None
    for _ in range(TRIES):
        outcome = of(count)
        if outcome.ttft_s[key] <= load.ttft_s and outcome.tpot_s[key] <= load.tpot_s:
            high, best = count, outcome
        else:
            low = count
        if high is None and low >= most:
            break
        if high is not None and high - low <= 1:
            break
        count = min(2 * low, most) if high is None else (max(low, high // 2) + high) // 2 if low else high - 1
    return high or 0, best


def _answered(
    choice: ServingChoice,
    count: int,
    outcome: Run,
    load: Load,
    *,
    whole: bool,
    gpus: int = 0,
    per_hour: float | None = None,
) -> ServingChoice:
    """A choice with what the engine found; bounds keep their ratios, and so do prices of input and output.

    Args:
      whole: the run is of all replicas, else of one; gpus, per_hour: of all and their price, where replicas are of two
        kinds.
    """
    key, gpus = f"p{load.percentile:g}", gpus or count * choice.layout.gpus
    rate = outcome.rate if whole else outcome.rate * count
    tokens = load.lengths.input_tokens + load.lengths.output_tokens
    intervals: dict[str, Any] = dict(choice.intervals)
    for name, times in (("ttft_s", outcome.ttft_s), ("tpot_s", outcome.tpot_s)):
        ratio = times[key] / getattr(choice, name)[key]
        intervals[name] = tuple(bound * ratio for bound in intervals[name])
    ratio = gpus / (choice.gpus or 1)
    intervals["gpus"] = tuple(math.ceil(bound * ratio) if bound < math.inf else bound for bound in intervals["gpus"])
    costs = dict(choice.costs)
    if costs:
        hour = costs["per_hour"] * ratio if per_hour is None else per_hour
        changed = 1e6 * hour / SECONDS_PER_HOUR / rate / tokens / costs["tokens"]
        costs = {name: hour if name == "per_hour" else cost * changed for name, cost in costs.items()}
        intervals["cost"] = tuple(bound * changed for bound in intervals["cost"])
    return replace(
        choice,
        replicas=count,
        gpus=gpus,
        ttft_s=outcome.ttft_s,
        tpot_s=outcome.tpot_s,
        tokens_per_s_gpu=rate * load.lengths.output_tokens / gpus,
        intervals=intervals,
        costs=costs,
    )
