"""Under load: the best layouts of the estimate run by an engine's scheduler, which then decides how many are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from neusight_jax.prices import SECONDS_PER_HOUR
from neusight_jax.serving.choices import Load, ServingChoice
from neusight_jax.serving.dynamo import PACKAGE, VERSION, Run, Trace, run
from neusight_jax.serving.layouts import Replica

METHOD = f"{PACKAGE} {VERSION}: its scheduler on a virtual clock, with step times forecast here"
LAYOUTS = 2
"""Of each GPU, the best by the estimate are run."""
TRIES = 10
"""Most runs of one layout."""


def under_load(
    choices: Sequence[ServingChoice], tried: Mapping[tuple[str, int, int], Replica], load: Load, trace: Trace | None
) -> list[ServingChoice]:
    """Choices in the order of the estimate, the first of each GPU as the engine answers them."""
    seen: dict[str, int] = {}
    out = []
    for choice in choices:
        seen[choice.gpu] = seen.get(choice.gpu, 0) + bool(choice.replicas)
        if not choice.replicas:
            out.append(choice)
        elif seen[choice.gpu] > LAYOUTS:
            note = "not run: the estimate prefers other layouts of this GPU"
            out.append(replace(choice, replicas=None, gpus=None, rank=0, tie=False, notes=(note, *choice.notes)))
        else:
            out.append(_measured(choice, tried[choice.gpu, choice.tensor, choice.expert], load, trace))
    return out


def _measured(choice: ServingChoice, replica: Replica, load: Load, trace: Trace | None) -> ServingChoice:
    """A choice as the engine runs it, with the fewest replicas that meet the targets."""
    assert replica.memory is not None
    assert replica.times is not None
    memory, times = replica.memory, replica.times[0]
    held = memory.cache_bytes / memory.request_bytes * load.lengths.mean_context

    def of(count: int) -> Run:
        if trace is not None:
            return run(times, replica.options, held, workers=count, trace=trace.path)
        users = None if load.users is None else load.users / count
        rate = None if load.rate is None else load.rate / count
        return run(times, replica.options, held, lengths=load.lengths, users=users, rate=rate)

    most = min(load.max_gpus, 1e9) // replica.layout.gpus
    count, found = _fewest(of, load, choice.replicas or 1, int(most))
    if found is None:
        note = f"run by the engine, {most:g} replicas miss the targets"
        return replace(choice, replicas=None, gpus=None, notes=(note, *choice.notes))
    return _answered(choice, count, found, load, whole=trace is not None)


def _fewest(of: Callable[[int], Run], load: Load, first: int, most: int) -> tuple[int, Run | None]:
    """The fewest replicas that meet the targets, by bisection from a guess, and their run."""
    key = f"p{load.percentile:g}"
    low, high, count = 0, None, min(first, max(most, 1))
    best: Run | None = None
    for _ in range(TRIES):
        found = of(count)
        if found.ttft_s[key] <= load.ttft_s and found.tpot_s[key] <= load.tpot_s:
            high, best = count, found
        else:
            low = count
        if high is None and low >= most:
            break
        if high is not None and high - low <= 1:
            break
        count = min(2 * low, most) if high is None else (max(low, high // 2) + high) // 2 if low else high - 1
    return high or 0, best


def _answered(choice: ServingChoice, count: int, found: Run, load: Load, *, whole: bool) -> ServingChoice:
    """A choice with what the engine found; bounds keep their ratios, and so do prices of input and output."""
    key, gpus = f"p{load.percentile:g}", count * choice.tensor
    rate = found.rate if whole else found.rate * count
    tokens = load.lengths.input_tokens + load.lengths.output_tokens
    intervals: dict[str, Any] = dict(choice.intervals)
    for name, own in (("ttft_s", found.ttft_s), ("tpot_s", found.tpot_s)):
        ratio = own[key] / getattr(choice, name)[key]
        intervals[name] = tuple(each * ratio for each in intervals[name])
    ratio = gpus / (choice.gpus or 1)
    intervals["gpus"] = tuple(math.ceil(each * ratio) if each < math.inf else each for each in intervals["gpus"])
    costs = dict(choice.costs)
    if costs:
        hour = costs["per_hour"] * ratio
        changed = 1e6 * hour / SECONDS_PER_HOUR / rate / tokens / costs["tokens"]
        costs = {name: hour if name == "per_hour" else each * changed for name, each in costs.items()}
        intervals["cost"] = tuple(each * changed for each in intervals["cost"])
    return replace(
        choice,
        replicas=count,
        gpus=gpus,
        ttft_s=found.ttft_s,
        tpot_s=found.tpot_s,
        tokens_per_s_gpu=rate * load.lengths.output_tokens / gpus,
        intervals=intervals,
        costs=costs,
    )
