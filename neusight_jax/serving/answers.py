"""Answers: for a load and targets, how many of which GPU in which layout, how fast, and for what price."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from neusight_jax import runs
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Experts
from neusight_jax.graph.configs.config import whole
from neusight_jax.hardware.cluster import Cluster, Machine, with_gpu
from neusight_jax.hardware.prices import PriceList, Prices, prices_of
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.records import ranks_with_ties
from neusight_jax.serving.choices import CLOSED_FORM, Load, Serving, ServingChoice
from neusight_jax.serving.deployment import vllm_command, vllm_flags
from neusight_jax.serving.layouts import Ranks, Replica, named_machines, replicas
from neusight_jax.serving.pools import disaggregated as pooled
from neusight_jax.serving.power import powered
from neusight_jax.serving.simulators import PACKAGE, Trace, installed, read_trace, require_engine
from neusight_jax.serving.steady import PERCENTILES, Demand, Lengths, Steady, demand, first_interval, steady
from neusight_jax.serving.steps import Model, load_model
from neusight_jax.serving.times import (
    ENGINES,
    LEARNED,
    MEASURED,
    MOST_DRAFTED,
    Engine,
    Options,
    Times,
    best_drafts,
    engine_of,
    stacked,
    usual_options,
)
from neusight_jax.serving.under_load import METHOD, Tried, under_load
from neusight_jax.units import counted

BEST_DRAFT = "best"
HOT_EXPERTS = "experts are as popular in answers as i^-{:g}, dealt to ranks in turn; prompts by the engine's number"
EXPERTS = "tokens spread over experts at random; hot experts cost more: prompts by the engine's number, answers unknown"


def serve(
    predictor: Predictor,
    machines: str | Machine | Sequence[str | os.PathLike[str]] | Mapping[str, Machine],
    config: str | Path | Mapping[str, Any],
    *,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    users: float | None = None,
    request_rate: float | None = None,
    trace: str | os.PathLike[str] | None = None,
    method: str = "auto",
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    percentile: float = 95.0,
    prices: PriceList = None,
    run: runs.Run | None = None,
    max_gpus: int | None = None,
    max_kw: float | None = None,
    dtypes: Mapping[str, str | None] | None = None,
    options: Mapping[str, Any] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    expert_parallel: Sequence[int] | None = None,
    data_parallel: Sequence[int] | None = None,
    disaggregated: bool = False,
    engine: Engine | str = LEARNED,
    limits: Mapping[str, float] | None = None,
    expert_skew: float = 0.0,
    notes: Sequence[str] = (),
) -> Serving:
    """GPUs that serve a load within targets, how many of each, ranked by cost, or without prices by their number.

    An estimate in closed form (`steady`): continuous batching with chunked prefill, in steady state, no failures. Where
    the extra `serving` is installed, the best layouts are then run by an engine's scheduler (`dynamo`), which decides.

    Args:
      predictor: of a checkpoint; machines: names, files, or machines by name.
      config: a catalog name, the path of a config.json, or a mapping with Hugging Face keys.
      input_tokens, output_tokens: of a request.
      users: requests at once, each following an answer; request_rate: requests a second, at random; one of them, or
        trace: a file of requests in Mooncake's JSONL, which says lengths and times itself and needs the engine.
      method: "estimate", "engine", or "auto": the engine where it is installed.
      ttft_s, tpot_s: targets for the first token and for each further one, seconds; percentile: 50 or 95 of requests.
      prices: of an hour of one GPU; max_gpus: most of one type; max_kw: most kilowatts that all boards draw on average.
      dtypes: `dtype`, `weight_dtype`, `kv_dtype`, as `graph_from_config`; run: also what so many output tokens cost.
      options: fields of `times.Options` that are not vLLM's defaults; draft_tokens may be "best" (`drafted`).
      tensor_parallel, expert_parallel, data_parallel: ranks of a replica to try, as of `layouts.Ranks`.
      disaggregated: also try replicas that only prefill beside others that only decode, of each GPU and of each two.
      engine: numbers of the engine's own time, or "vllm", "trtllm", "sglang"; notes: what else to say.
      expert_skew: exponent of Zipf's law of how popular experts are in answers, 0 = all alike (`expert_dims`).
      limits: of every GPU, `power_limit_w` and `clock_limit_hz`: each step settles at a clock of its own under them.
    Raises: `InputError` for unusable input, targets below one step's time, or a load that no layout carries.
    """
    ranks, constants = Ranks(tensor_parallel, expert_parallel, data_parallel), engine_of(engine)
    priced, engine_runs = prices_of(prices), _method(method, trace is not None, ranks)
    targets: dict[str, Any] = {"ttft_s": ttft_s, "tpot_s": tpot_s, "percentile": percentile}
    targets |= {"max_gpus": max_gpus, "max_kw": max_kw}
    load, requests = _load(trace, input_tokens, output_tokens, users, request_rate, **targets)
    clusters = {name: with_gpu(each, **(limits or {})) for name, each in named_machines(machines).items()}
    setups, model = _options(clusters, options or {}, engine_runs), _model(config, dtypes or {}, expert_skew)
    served = _Served(clusters, setups, model, load, requests, (options or {}).get("draft_tokens") == BEST_DRAFT)
    tried = served.replicas(predictor, constants, ranks)
    served, choices = served.with_drafts(served.choices(tried, priced, disaggregated, engine_runs), tried)
    if run:
        choices, notes = [_with_run(choice, run) for choice in choices], (*notes, *run.notes())
    request = {"trace": trace and os.fspath(trace), **targets, "percentile": load.percentile}
    request |= {"disaggregated": disaggregated, **({"limits": dict(limits)} if limits else {})}
    workload = served.workload(constants, request | ({"expert_skew": expert_skew} if expert_skew else {}))
    notes = (*served.notes(choices, engine_runs), *_version_notes(engine), *notes)
    currency = priced.currency if priced else ""
    return Serving(workload, _by(priced), tuple(choices), currency, METHOD if engine_runs else CLOSED_FORM, notes)


def drafted(replica: Replica, load: Load) -> Replica:
    """A replica that guesses as many tokens ahead as serve a load best, from none to `MOST_DRAFTED`."""
    ways = [replace(replica, options=replace(replica.options, draft_tokens=count)) for count in range(MOST_DRAFTED + 1)]
    if replica.times is None:
        return ways[0]

    def cost(way: Replica) -> tuple[float, float]:
        choice = answer(way, load, None)
        return float(choice.gpus or math.inf), choice.tpot_s[f"p{load.percentile:g}"]

    return min(ways, key=cost)


def _with_draft(choice: ServingChoice, tried: Tried, context: float) -> ServingChoice:
    """A choice with how many tokens are guessed ahead, and would be of other numbers of running requests.

    Args:
      tried: replicas by GPU and layout; context: mean length of their sequences.
    """
    replica = tried.get((choice.gpu, choice.layout))
    if replica is None or replica.times is None:
        return choice
    batches = [1 << place for place in range(int(max(replica.most, 1.0)).bit_length())]
    best = best_drafts(replica.times[0], replica.options, batches, [context])[:, 0]
    # Runs of batches with one best number, by the last of each.
    last = {int(count): batch for batch, count in zip(batches, best, strict=True)}
    ranges = ", ".join(f"{count} up to {batch}" for count, batch in last.items())
    note = f"guesses {replica.options.draft_tokens} tokens ahead; fastest by running requests: {ranges}"
    return replace(choice, notes=(*choice.notes, note))


def _with_run(choice: ServingChoice, run: runs.Run) -> ServingChoice:
    """A choice with what its output tokens take, by a second of its load."""
    if choice.gpus is None or choice.tokens_per_s_gpu is None:
        return choice
    price = choice.costs["per_hour"] / choice.gpus if choice.costs else None
    tokens, joules = choice.gpus * choice.tokens_per_s_gpu, choice.power_w or 0.0
    cost = run.cost(seconds=1.0, gpus=choice.gpus, tokens=tokens, energy_j=joules, price_per_hour=price)
    return replace(choice, run=cost)


def _version_notes(engine: Engine | str) -> list[str]:
    """Which versions of an engine its numbers are of, where its name was given or assumed."""
    name = next((name for name, numbers in ENGINES.items() if engine is numbers), engine)
    if not isinstance(name, str) or name not in MEASURED:
        return []
    return [
        f"{name}'s own time is that of {MEASURED[name]} on H100 and H200; `calibrate --engine` fits a server of yours"
    ]


def _model(config: str | Path | Mapping[str, Any], dtypes: Mapping[str, str | None], expert_skew: float) -> Model:
    """The model with its experts as popular as stated. `InputError` for a skew without experts, or that cannot be."""
    model = load_model(config, **dtypes)
    if not (isinstance(expert_skew, int | float) and 0.0 <= expert_skew <= 5.0):
        raise InputError(f"expert_skew is {expert_skew!r}, expected 0 (all alike) to 5")
    if expert_skew and not any(isinstance(layer.feed_forward, Experts) for layer in model.decoder.layers):
        raise InputError(f"expert_skew is {expert_skew:g}, but {model.config.name} has no experts; leave it out")
    return replace(model, expert_skew=float(expert_skew))


def _options(clusters: Mapping[str, Cluster], changes: Mapping[str, Any], engine_runs: bool) -> dict[str, Options]:
    """Options of the engine on each cluster. `InputError` for those that an engine that is run does not have."""
    best = changes.get("draft_tokens") == BEST_DRAFT
    changes = {**changes, "draft_tokens": MOST_DRAFTED} if best else changes
    setups = {
        name: usual_options(float(np.asarray(cluster.gpu.mem_bytes)), name, **changes)
        for name, cluster in clusters.items()
    }
    if engine_runs:
        require_engine(setups.values())
    return setups


def _by(prices: Prices | None) -> str:
    """Measure that choices are ranked by."""
    return "gpus" if prices is None else "cost"


@dataclass(frozen=True)
class _Served:
    """A model under a load, and the machines and engines it may be served by.

    Attributes:
      requests: of a trace; drafting: whether the best number of guessed tokens is looked for.
    """

    clusters: Mapping[str, Cluster]
    options: Mapping[str, Options]
    model: Model
    load: Load
    requests: Trace | None
    drafting: bool = False

    def replicas(self, predictor: Predictor, engine: Engine, ranks: Ranks) -> Tried:
        """Replicas to try, by GPU and layout: what `layouts.replicas` makes of the same arguments."""
        lengths = self.load.lengths
        longest = sum(asdict(lengths).values()) if self.requests is None else self.requests.longest
        candidates = replicas(predictor, self.clusters, self.model, lengths, longest, self.options, engine, ranks)
        found = (drafted(replica, self.load) if self.drafting else replica for replica in candidates)
        return {(replica.gpu, replica.layout): replica for replica in found}

    def with_drafts(self, choices: list[ServingChoice], tried: Tried) -> tuple[_Served, list[ServingChoice]]:
        """The options of each GPU's best choice, and choices that say how many tokens are guessed ahead."""
        if not self.drafting:
            return self, choices
        best = {choice.gpu: (choice.gpu, choice.layout) for choice in reversed(choices)}
        setups = {name: tried[place].options for name, place in best.items() if place in tried}
        told = [_with_draft(choice, tried, self.load.lengths.mean_context) for choice in choices]
        return replace(self, options={**self.options, **setups}), told

    def choices(
        self,
        tried: Tried,
        prices: Prices | None,
        disaggregated: bool,
        engine_runs: bool,
    ) -> list[ServingChoice]:
        """Choices of replicas and what they do with the load, ranked.

        Args:
          tried: replicas by GPU and layout.
          prices: what choices are ranked by; None = by GPUs.
          disaggregated: whether replicas that only prefill are tried beside others that only decode.
          engine_runs: whether the best are run by an engine's scheduler, which then decides.
        Raises: `InputError` where none carries the load, or none has a price.
        """
        answers = [
            replace(
                answer(replica, self.load, prices),
                command=vllm_command(self.model.config.name, self._flags(replica)),
            )
            for replica in tried.values()
        ]
        if disaggregated:
            answers += pooled(list(tried.values()), self.clusters, self.model, self.load, prices)
        answers = [self.load.within_power(choice) for choice in answers]
        if prices is not None and all(prices.of(name) is None for name in self.clusters):
            raise InputError(f"no price for any of {', '.join(self.clusters)}; add them to the price file")
        _require_answer(answers, self.load)
        answers = ranked(answers, _by(prices))
        if engine_runs:
            answers = under_load(answers, tried, self.clusters, self.model, self.load, self.requests, prices)
            answers = ranked([self.load.within_power(choice) for choice in answers], _by(prices))
            _require_answer(answers, self.load)
        return answers

    def _flags(self, replica: Replica) -> dict[str, Any]:
        """Options of vLLM for a replica."""
        return vllm_flags(replica.layout, replica.options, self.model.dtypes)

    def workload(self, engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
        """The workload that was asked for, as results have it."""
        return {
            "model": self.model.config.name,
            **asdict(self.model.dtypes),
            **asdict(self.load.lengths),
            "users": self.load.users,
            "request_rate": self.load.rate,
            **request,
            "options": {name: asdict(setup) for name, setup in self.options.items()},
            "engine": {name: float(np.asarray(value)) for name, value in vars(engine).items()},
        }

    def notes(self, choices: Sequence[ServingChoice], engine_runs: bool) -> list[str]:
        """Notes to read before trusting the choices."""
        skew = self.model.expert_skew
        told = EXPERTS if not skew else HOT_EXPERTS.format(skew)
        experts = [told] if skew or any(choice.expert > 1 for choice in choices) else []
        return [*([] if engine_runs else [CLOSED_FORM]), *experts, *self.model.notes]


def _load(
    trace: str | os.PathLike[str] | None,
    input_tokens: int | None,
    output_tokens: int | None,
    users: float | None,
    request_rate: float | None,
    *,
    ttft_s: float | None,
    tpot_s: float | None,
    percentile: float,
    max_gpus: int | None,
    max_kw: float | None,
) -> tuple[Load, Trace | None]:
    """The load, and the trace that says it, if one does. `InputError` for both or neither."""
    requests = None
    if trace is not None:
        if any(figure is not None for figure in (input_tokens, output_tokens, users, request_rate)):
            raise InputError("a trace says lengths and times itself; leave tokens, users and request_rate out")
        requests = read_trace(trace)
        lengths = requests.lengths
    elif input_tokens is None or output_tokens is None:
        raise InputError("input_tokens and output_tokens are missing; give both, or a trace")
    else:
        lengths = Lengths(whole("input_tokens", input_tokens), whole("output_tokens", output_tokens))
    load = Load(
        lengths,
        users,
        request_rate if requests is None else requests.rate,
        math.inf if ttft_s is None else ttft_s,
        math.inf if tpot_s is None else tpot_s,
        float(percentile),
        math.inf if max_gpus is None else whole("max_gpus", max_gpus),
        math.inf if max_kw is None else max_kw,
    )
    return load, requests


def _method(method: str, needed: bool, ranks: Ranks) -> bool:
    """Whether an engine runs the load: one whose replicas have requests of all their ranks together."""
    if method not in ("auto", "estimate", "engine"):
        raise InputError(f"method is {method!r}, expected auto, estimate or engine")
    if method == "estimate" and needed:
        raise InputError("a trace is run by an engine: leave --method estimate out, and pip install '.[serving]'")
    runs_it = method == "engine" or needed or (method == "auto" and installed())
    if runs_it and set(ranks.data or (1,)) != {1}:
        if method == "engine" or needed:
            raise InputError(f"{PACKAGE} has no data-parallel attention; leave data_parallel out, or method estimate")
        return False
    return runs_it


@functools.cache
def _loads(most: float) -> np.ndarray:
    """Requests at once to try: every number at first, then steps of a twentieth."""
    loads, at = [], 1.0
    while at < most:
        loads.append(at)
        at = max(at + 1.0, math.floor(1.05 * at))
    return np.array([*loads, max(most, 1.0)])


@one_shot
def _states(times: Times, request: Demand, requests: Any, most: Any) -> list[Any]:
    """Fields of the steady states [bound, load] of stacked times."""

    def one(times: Times) -> Steady:
        return jax.vmap(lambda held: steady(times, request, held, most))(requests)

    return jax.tree.leaves(jax.vmap(one)(times))


def curve(replica: Replica, load: Load) -> tuple[np.ndarray, Steady]:
    """Loads of a replica, and its steady states there [middle, low, high of the kernels; load]."""
    assert replica.times is not None
    requests = _loads(replica.most)
    # Few lengths, so that replicas share a compiled program.
    padded = np.pad(requests, (0, -len(requests) % 64), mode="edge")
    request = demand(load.lengths, replica.options, poisson=load.rate is not None)
    fields = _states(stacked(replica.times), request, padded, replica.most)
    return requests, Steady(*(np.asarray(field)[:, : len(requests)] for field in fields))


def answer(replica: Replica, load: Load, prices: Prices | None) -> ServingChoice:
    """Choice of so many of a replica, with what they do with a load."""
    layout = replica.layout
    choice = ServingChoice(replica.gpu, layout.tensor, layout.expert, layout.data)
    if replica.memory is not None:
        choice = replace(choice, memory=replica.memory.parts, requests_at_once=replica.memory.requests)
    if replica.times is None:
        return replace(choice, notes=(replica.reason,))
    requests, states = curve(replica, load)
    meets = (states.ttft(load.percentile) <= load.ttft_s) & (states.tpot(load.percentile) <= load.tpot_s)
    within = [int(np.argmin(np.append(row, False))) for row in meets]  # loads from the least on that meet them
    if not within[0]:
        return replace(choice, **_at(states, 0, 0, load), notes=(_missed(states, load),))
    fleets = [_fleet(requests, states, bound, count, load) for bound, count in enumerate(within)]
    replicas_, at = fleets[0]
    gpus = replicas_ * layout.gpus
    choice = replace(
        choice,
        **_at(states, 0, at, load),
        max_users=int(requests[within[0] - 1]),
        max_rate=float(states.rate[0, within[0] - 1]),
    )
    if gpus > load.max_gpus:
        share = load.max_gpus // layout.gpus / replicas_
        return replace(choice, notes=(f"{load.max_gpus:g} GPUs carry {share:.0%} of the load; it takes {gpus}",))
    rate = _of(states.rate, 0, at) if load.users is not None else (load.rate or 0.0) / replicas_
    output = rate * load.lengths.output_tokens
    choice = replace(choice, replicas=replicas_, gpus=gpus, tokens_per_s_gpu=output / layout.gpus)
    choice = powered(choice, load, replica)
    price = prices.of(replica.gpu) if prices is not None else None
    intervals = dict(choice.intervals)
    ends = [fleets[bound][0] * layout.gpus if within[bound] else math.inf for bound in (1, 2)]
    intervals["gpus"] = (min(*ends, gpus), max(*ends, gpus))
    if price is None:
        return replace(choice, intervals=intervals)
    costs = [
        _costs(states, bound, *fleet, load, layout.gpus, price) for bound, fleet in enumerate(fleets) if within[bound]
    ]
    tokens = [cost["tokens"] for cost in costs] + [math.inf] * (3 - len(costs))
    intervals["cost"] = (min(tokens), max(tokens))
    return replace(choice, intervals=intervals, costs=costs[0])


def _of(values: Any, bound: int, at: float) -> float:
    """A value between two loads."""
    return float(np.interp(at, np.arange(values.shape[1]), values[bound]))


def _fleet(requests: np.ndarray, states: Steady, bound: int, within: int, load: Load) -> tuple[int, float]:
    """Replicas that carry a load, and where on the curve each lies (a position, between two loads)."""
    if not within:
        return 0, 0.0
    places = np.arange(len(requests))
    if load.users is not None:
        # Rounding must not add a replica where the load is a whole multiple.
        count = math.ceil(load.users / requests[within - 1] - 1e-9)
        return count, float(np.interp(load.users / count, requests, places))
    assert load.rate is not None
    # A rate is looked up between two loads, which needs rates that never fall.
    rates = np.maximum.accumulate(np.asarray(states.rate[bound]))
    count = math.ceil(load.rate / rates[within - 1] - 1e-9)
    return count, float(np.interp(load.rate / count, rates, places))


def _at(states: Steady, bound: int, at: float, load: Load) -> dict[str, Any]:
    """Times at a load, with their intervals."""

    def ends(values: Any) -> tuple[float, float, float]:
        central, low, high = (_of(values, end, at) for end in (bound, 1, 2))
        # Under a cap slower kernels draw less and hold a higher clock.
        return central, min(central, low), max(central, high)

    first = first_interval(*ends(states.ttft(load.percentile)))
    _, *further = ends(states.tpot(load.percentile))
    return {
        "ttft_s": {f"p{percentile:g}": _of(states.ttft(percentile), bound, at) for percentile in PERCENTILES},
        "tpot_s": {f"p{percentile:g}": _of(states.tpot(percentile), bound, at) for percentile in PERCENTILES},
        "intervals": {"ttft_s": tuple(map(float, first)), "tpot_s": tuple(further)},
    }


def _costs(states: Steady, bound: int, count: int, at: float, load: Load, gpus: int, price: float) -> dict[str, float]:
    """Costs of an hour, and of a million tokens; prompts bear the share of the time that they add."""
    rate = count * _of(states.rate, bound, at) if load.users is not None else float(load.rate or 0.0)
    return load.costs(count * gpus * price, rate, _of(states.prefill_share, bound, at))


def _missed(states: Steady, load: Load) -> str:
    """Targets that one request alone misses, and by how much."""
    times = (_of(latency(load.percentile), 0, 0) for latency in (states.ttft, states.tpot))
    return f"one request alone misses: {load.missed(*times)}"


def _require_answer(choices: Sequence[ServingChoice], load: Load) -> None:
    """`InputError` where no choice answers, with the nearest."""
    if any(choice.replicas for choice in choices):
        return
    run = [choice for choice in choices if choice.ttft_s]
    if not run:
        raise InputError(f"no layout can run it: {'; '.join(dict.fromkeys(c.notes[0] for c in choices))[:300]}")

    def excess(choice: ServingChoice) -> float:
        key = f"p{load.percentile:g}"
        over = max(choice.ttft_s[key] / load.ttft_s, choice.tpot_s[key] / load.tpot_s)
        return over if over > 1.0 else 1e-6 * (1.0 / (choice.max_rate or 1e-9))

    best = min(run, key=excess)
    raise InputError(
        f"no layout carries this load; nearest is {best.gpu} with {counted(best.layout.gpus, 'GPU')} a "
        f"replica: {best.notes[0]}; expected looser targets, more GPUs or other ones"
    )


def ranked(choices: Sequence[ServingChoice], by: str) -> list[ServingChoice]:
    """In order of cost or of GPUs, with ranks: one whose interval reaches the leader's of its group ties with it."""

    def value(choice: ServingChoice) -> float:
        if not choice.replicas or (by == "cost" and not choice.costs):
            return math.inf
        return choice.costs["tokens"] if by == "cost" else float(choice.gpus or 0)

    def order(choice: ServingChoice) -> tuple[float, float]:
        return value(choice), -(choice.tokens_per_s_gpu or 0.0)

    runs = sorted((candidate for candidate in choices if value(candidate) < math.inf), key=order)
    ranks = ranks_with_ties(runs, lambda choice, leader: choice.intervals[by][0] <= leader.intervals[by][1])
    out = [replace(choice, rank=rank, tie=tie) for choice, rank, tie in ranks]
    return out + [
        replace(candidate, notes=("has no price: not ranked", *candidate.notes)) if candidate.replicas else candidate
        for candidate in choices
        if value(candidate) == math.inf
    ]
