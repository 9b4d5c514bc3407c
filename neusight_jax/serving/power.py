"""Power: what the GPUs of replicas draw under a load, their steps and the idle time between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from neusight_jax.model.programs import one_shot
from neusight_jax.serving.choices import Load, ServingChoice
from neusight_jax.serving.layouts import Replica
from neusight_jax.serving.steady import Demand, demand
from neusight_jax.serving.times import Times


def mean_w(
    times: Times,
    request: Demand,
    rate: ArrayLike,
    batch: ArrayLike,
    prefills: ArrayLike = 1.0,
    decodes: ArrayLike = 1.0,
) -> Array:
    """Mean watts of one GPU of a replica that answers requests: its steps, and idle time between them.

    A request takes its share of the decode steps of its batch, and what its prompt adds to those it is prefilled with.
    Differentiable as `steady` is.

    Args:
      times: step times of the replica, with what they draw.
      request: demand of the requests.
      rate: requests a second of the replica; batch: of them that decode.
      prefills, decodes: 1 = it takes prompts, and answers; 0 = another pool does.
    """
    rate, batch = jnp.asarray(rate, float), jnp.asarray(batch, float)
    prefills, decodes = jnp.asarray(prefills, float), jnp.asarray(decodes, float)
    full, beside = jnp.maximum(batch, 1.0), decodes * batch

    def of_request(step: Callable[..., Array]) -> Array:
        answer = request.further / request.per_step * request.decode(step, full) / full
        added = request.prompt(step, beside, request.guesses) - request.chunks * request.decode(step, beside)
        total: Array = decodes * answer + prefills * jnp.maximum(added, 0.0)
        return total

    assert times.drawn is not None
    gpu, seconds = times.drawn.gpu, of_request(times.step_s)
    idle_w = jnp.asarray(times.drawn.law.static_share * gpu.tdp_w)
    at_work_w = of_request(times.step_j) / jnp.maximum(seconds, 1e-30)
    # What prompts add is a difference of steps, whose watts may exceed those of either.
    limit_w = jnp.maximum(gpu.tdp_w if gpu.power_limit_w is None else gpu.power_limit_w, idle_w)
    return idle_w + (jnp.minimum(at_work_w, limit_w) - idle_w) * jnp.minimum(rate * seconds, 1.0)


_mean_w = one_shot(mean_w)


def powered(choice: ServingChoice, load: Load, decode: Replica, prefill: Replica | None = None) -> ServingChoice:
    """A choice with the watts of all its GPUs, and joules over the output tokens that they generate.

    The requests that decode at once are as many as arrive in the time that one decodes (Little's law).

    Args:
      choice: with its replicas, its rate and its times.
      load: what is asked.
      decode: the replica that it has so many of, which takes prompts too where nothing else does.
      prefill: that which takes the prompts.
    """
    if decode.times is None or decode.times[0].drawn is None or not (choice.gpus and choice.tokens_per_s_gpu):
        return choice
    tokens_per_s = choice.tokens_per_s_gpu * choice.gpus
    rate, request = tokens_per_s / load.lengths.output_tokens, demand(load.lengths, decode.options)
    batch, total_w = rate * float(request.further) * choice.tpot_s["p50"], 0.0
    pools = [(decode, choice.replicas or 1, 1.0, 0.0 if prefill else 1.0)]
    pools += [(prefill, int(choice.prefill["replicas"]), 0.0, 1.0)] if prefill else []
    for replica, count, decodes, prefills in pools:
        assert replica.times is not None
        request = demand(load.lengths, replica.options)
        each_w = _mean_w(replica.times[0], request, rate / count, decodes * batch / count, prefills, decodes)
        total_w += count * replica.layout.gpus * float(each_w)
    return replace(choice, power_w=total_w, joules_per_token=total_w / tokens_per_s)
