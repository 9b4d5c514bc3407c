"""Jobs: a training step on many GPUs as a workload of a design, so that links and network may vary too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import whole
from neusight_jax.graph.configs.decoder import read_decoder
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.prices import SECONDS_PER_HOUR
from neusight_jax.job.job import Job
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.step import compose, seconds_of_job
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.power import draw_of_step, power_law, settle
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import Relaxation
from neusight_jax.serving.choices import CLOSED_FORM
from neusight_jax.serving.layouts import TENSOR, capacity
from neusight_jax.serving.steady import PERCENTILES, Demand, Lengths, demand, steady
from neusight_jax.serving.steps import Model, Steps, axes, load_model, steps
from neusight_jax.serving.times import LEARNED, Engine, Options, engine_of, kernel_seconds, tabulated, usual_options
from neusight_jax.workloads import Workload


def job_seconds(
    job: Job, predictor: Predictor, machine: Machine, relaxation: Relaxation = 0.0
) -> tuple[Float[Array, ""], dict[str, Array], dict[str, Array]]:
    """Seconds of a step; of the kernels and messages of one micro-batch of every kind of stage by family; and of one
    launch of each of the job's kernels.

    `relaxation` is of the waves of kernels (`latency.kernel_latency`); the pipeline's path is exact.

    Args:
      job: what is trained.
      predictor, machine: as `nj.latency`.
      relaxation: of the waves of kernels.
    """
    families: dict[str, Array] = {}
    of_one: dict[str, Array] = {}

    def run(using: Predictor, where: Machine, kernels: KernelTable) -> Mapping[str, Any]:
        latencies = kernel_latency(using, where, kernels, relaxation=relaxation)
        of_one.update(latencies if kernels is job.kernels else {})
        for family, seconds in latencies.items():
            families[family] = jnp.sum(job.counts[family] * seconds if family in job.counts else seconds)
        return latencies

    pieces = seconds_of_job(predictor, machine, job, run=run)
    pipeline, tail, _ = compose(pieces, job.software, job.plan)
    return pipeline + tail, families, of_one


def step_joules(
    predictor: Predictor,
    gpu: GPU,
    seconds: Array,
    gpus: int,
    kernels: KernelTable,
    of_one: Mapping[str, Array],
    counts: Mapping[str, Array],
) -> Float[Array, ""]:
    """Joules of a step on boards alike that nothing holds back, as `job.step.energy` has them.

    Args:
      predictor: weights, with the law of power that was fitted with them.
      gpu: the board.
      seconds: of the step.
      gpus: boards.
      kernels: of one of them.
      of_one: by family, seconds of one launch of each kernel, [kernel].
      counts: by family, how often each kernel runs, [kernel].
    """
    law = power_law(predictor)
    draw = draw_of_step(law, gpu, kernels, of_one, counts, seconds)
    return gpus * settle(law, gpu, draw).power_w * seconds


# Service: a model that an engine serves within targets, as a workload of a design, in closed form.
#
# A step of this workload is one request. Its seconds are those of a replica per request, at the largest load that meets
# the targets and whose KV cache fits: what a user pays for. The load follows the machine, and so does the gradient:
# on a
# grid of loads it lies where the log of the largest time over its target is 0, between two of them in logarithms.

SERVED: tuple[str, ...] = ("cost_per_mtok", "price_per_hour", "requests_at_once", "ttft_s", "tpot_s", "slo_ratio")
"""Metrics of services: what a million tokens cost, input and output together; price of an hour of a replica; its
requests at once, seconds to the first and of each further token there; and the largest ratio to its limit of first
token, further token and memory with one request alone: above 1 no load meets the targets."""
ALONE = {"slo_ratio": 1.0}
"""Budget of every design of services."""
LOADS = 32
"""Loads of the grid, from one request at once to as many as fit, in equal ratios."""
_NEVER_S = 1e9


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Service:
    """Work that serving a model asks of one GPU of a replica, traced.

    Attributes:
      steps, asked, engine: kernels of the engine's steps, lengths of requests, numbers of the engine.
      held_bytes, request_bytes: memory that weights and the like take, and the KV cache of a request of mean length.
      memory_share, max_batch: of `times.Options`.
      ttft_s, tpot_s: targets, seconds.
      price_per_hour: of all GPUs of a replica, where each is the base; that of others follows their dollars.
      percentile: of the requests that meet the targets.
    """

    steps: Steps
    asked: Demand
    engine: Engine
    held_bytes: ArrayLike
    request_bytes: ArrayLike
    memory_share: ArrayLike
    max_batch: ArrayLike
    ttft_s: ArrayLike
    tpot_s: ArrayLike
    price_per_hour: ArrayLike
    percentile: float = dataclasses.field(default=95.0, metadata={"static": True})


def service(
    config: str | Path | Mapping[str, Any],
    base: GPU,
    input_tokens: int,
    output_tokens: int,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    percentile: float = 95.0,
    price_per_hour: float | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    dtypes: Mapping[str, str | None] | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Engine | str = LEARNED,
    weight: float = 1.0,
) -> Workload:
    """A model served by vLLM's continuous batching within targets, as a workload of `nj.design`.

    Args:
      config: a catalog name, the path of a config.json, or a mapping with Hugging Face keys, of a decoder.
      base: the machine a design starts from: its arithmetic paths, and the defaults of the engine on it.
      input_tokens, output_tokens: of a request.
      ttft_s, tpot_s: targets for the first token and for each further one, at least one of them.
      percentile: 50 or 95 of requests meet them.
      price_per_hour: of one base GPU; other machines cost as many times more as their dollars by the cost model are
        more. None: 1, so that costs are in hours of the base.
      tensor_parallel, expert_parallel: GPUs of a replica, 1 or as many for whole experts. Links are `default_topology`.
      dtypes, options, engine: as `nj.serve` has them; weight: beside other workloads.
    Raises: `InputError` for unusable input.
    """
    targets = _targets(ttft_s, tpot_s, percentile)
    _positive("price_per_hour", price_per_hour)
    _positive("weight", weight)
    lengths = Lengths(whole("input_tokens", input_tokens), whole("output_tokens", output_tokens))
    layout = Parallelism(tensor=tensor_parallel, expert=expert_parallel)
    model = load_model(config, **(dtypes or {}))
    setup = usual_options(float(np.asarray(base.mem_bytes)), **(options or {}))
    longest = int(lengths.input_tokens + lengths.output_tokens)
    written = _steps(model, layout, base, longest, setup)
    memory = capacity(model, layout, float(np.asarray(base.mem_bytes)), setup, lengths.mean_context)
    replica = Service(
        written,
        demand(lengths, setup),
        engine_of(engine),
        memory.weights + memory.activations + memory.runtime,
        memory.request_bytes,
        setup.memory_share,
        float(setup.max_batch),
        *targets,
        layout.gpus * (price_per_hour or 1.0),
        percentile,
    )
    request = {
        **{"input_tokens": input_tokens, "output_tokens": output_tokens, "ttft_s": ttft_s, "tpot_s": tpot_s},
        **{"percentile": percentile, "price_per_hour": price_per_hour},
    }
    graph = _graph(model, layout, input_tokens, longest, request, _assumed(price_per_hour))
    name = f"{graph.name} serving {input_tokens}+{output_tokens}"
    return Workload(name, graph, written.kernels, weight, replica)


def _steps(model: Model, layout: Parallelism, base: GPU, longest: int, options: Options) -> Steps:
    """Kernels of the engine's steps, for sequences of up to `longest` tokens; `InputError` for more than the model has
    positions for."""
    read_decoder(model.config, longest)
    grid = axes(longest, options.chunk_tokens, options.max_batch * (options.draft_tokens + 1))
    return steps(model, layout, TENSOR[-1], tuple(sorted(base.paths)), grid)


def _graph(
    model: Model,
    layout: Parallelism,
    input_tokens: int,
    longest: int,
    request: Mapping[str, Any],
    notes: tuple[str, ...],
) -> Graph:
    """The workload by its name and request; its kernels are those of the steps."""
    dtypes = {name: value for name, value in asdict(model.dtypes).items() if name in ("weight_dtype", "kv_dtype")}
    experts = {"expert_parallel": layout.expert} if layout.expert > 1 else {}
    return Graph(
        model.config.name,
        (),
        "serving",
        model.dtypes.products,
        1,
        input_tokens,
        True,
        tokens=longest,
        options={**dtypes, "tensor_parallel": layout.tensor, **experts, **request},
        notes=(*notes, *model.notes),
    )


def _assumed(price: float | None) -> tuple[str, ...]:
    """Notes on what a cost rests on."""
    hour = "an hour of the base GPU" if price is None else f"{price:g} an hour of the base GPU"
    return (
        f"cost_per_mtok counts {hour}{' as 1: no price was given' if price is None else ''}; another GPU costs as many "
        "times more as the dollars of its die, memory and board by the cost model",
        f"latency_s is the time of a replica per request, at the largest load within the targets: {CLOSED_FORM}",
    )


def _targets(ttft_s: float | None, tpot_s: float | None, percentile: float) -> tuple[float, float]:
    """Both targets; a missing one is never missed."""
    if ttft_s is None and tpot_s is None:
        raise InputError("a service has no target; expected ttft_s, tpot_s or both, e.g. 'ttft<=1s tpot<=50ms'")
    _positive("ttft_s", ttft_s)
    _positive("tpot_s", tpot_s)
    if percentile not in PERCENTILES:
        raise InputError(f"percentile is {percentile!r}, expected 50 or 95")
    return ttft_s or _NEVER_S, tpot_s or _NEVER_S


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"{name} is {value!r}, expected a positive number")


def served(
    replica: Service, predictor: Predictor, gpu: GPU, relaxation: Relaxation = 0.0
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Seconds of a replica per request (`seconds`) and the last four of `SERVED` on one machine; seconds of all steps
    of the grid by family.

    Differentiable in all figures of the machine, memory too.

    Args:
      replica: what serving a model asks of one GPU.
      predictor: of its kernels.
      gpu: one GPU of a replica, scalars.
      relaxation: of the waves of kernels.
    """
    kernels = kernel_seconds(predictor, gpu, replica.steps, relaxation)
    times = tabulated(replica.steps, kernels, replica.engine)
    there = jnp.asarray(gpu.mem_bytes) * replica.memory_share
    room = jnp.clip((there - replica.held_bytes) / replica.request_bytes, 1.0, replica.max_batch)
    log_loads = jnp.linspace(0.0, 1.0, LOADS) * jnp.log(room)
    states = jax.vmap(lambda log_load: steady(times, replica.asked, jnp.exp(log_load), room))(log_loads)
    first, further = states.ttft(replica.percentile), states.tpot(replica.percentile)
    over = jnp.log(jnp.maximum(first / replica.ttft_s, further / replica.tpot_s))
    at = _crossing(over)
    filled = jnp.log((replica.held_bytes + replica.request_bytes) / there)
    metrics = {
        "seconds": 1.0 / _between(states.rate, at),
        "requests_at_once": _between(jnp.exp(log_loads), at),
        "ttft_s": _between(first, at),
        "tpot_s": _between(further, at),
        "slo_ratio": jnp.exp(jnp.maximum(over[0], filled)),
    }
    families = {name: jnp.sum(jnp.asarray(replica.steps.counts[name]) @ seconds) for name, seconds in kernels.items()}
    return metrics, families


def _crossing(over: Float[Array, " load"]) -> tuple[Array, Array]:
    """The last load before the first at which `over` exceeds 0, and the share of the way to that one where it is 0; the
    first load where all exceed it, the last where none does."""
    before = jnp.argmax(jnp.append(over[1:] > 0.0, True))
    low, high = over[before], over[jnp.minimum(before + 1, LOADS - 1)]
    return before, jnp.clip(-low / jnp.maximum(high - low, 1e-6), 0.0, 1.0)


def _between(values: Float[Array, " load"], at: tuple[Array, Array]) -> Array:
    """A positive value at a crossing, linear in logarithms."""
    log, (before, share) = jnp.log(values), at
    return jnp.exp((1.0 - share) * log[before] + share * log[jnp.minimum(before + 1, LOADS - 1)])


def served_metrics(
    replicas: Sequence[Service], shares: Array, predictor: Predictor, gpu: GPU, dearer: Array, relaxation: Relaxation
) -> tuple[dict[str, Any], Float[Array, " workload"], dict[str, Any]]:
    """`SERVED`, seconds per request of every service, and seconds of its steps by family [workload].

    Of several services: the geometric mean of their costs, and the worst of each other metric.

    Args:
      shares: of the services in that mean.
      dearer: dollars of the machine over those of the base.
    """
    results = [served(one, predictor, gpu, relaxation) for one in replicas]
    of = {name: jnp.stack([metrics[name] for metrics, _ in results]) for name in results[0][0]}
    by_family = by_workload([parts for _, parts in results])
    worst = {name: jnp.max(of[name]) for name in ("ttft_s", "tpot_s", "slo_ratio")}
    worst |= {"requests_at_once": jnp.min(of["requests_at_once"])}
    prices = dearer * jnp.stack([jnp.asarray(one.price_per_hour, float) for one in replicas])
    tokens = jnp.stack([jnp.asarray(one.asked.inputs + one.asked.outputs, float) for one in replicas])
    costs = 1e6 / SECONDS_PER_HOUR * prices * of["seconds"] / tokens
    cost = {"cost_per_mtok": jnp.exp(jnp.sum(shares * jnp.log(costs))), "price_per_hour": jnp.max(prices)}
    return {**cost, **worst}, of["seconds"], by_family


def by_workload(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Seconds by family [workload] from those of each workload; 0 where it has none of a family."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: jnp.stack([part.get(name, jnp.zeros(())) for part in parts]) for name in names}
