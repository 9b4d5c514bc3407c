"""Collectives: messages between the GPUs of a group, as one kernel each.

A group has `ranks` GPUs in `domains` domains of fast links, equally many in each. `bytes` is, by operator:

    all_reduce      the tensor on every rank
    all_gather      the gathered output, all shards together
    reduce_scatter  the whole input of one rank
    all_to_all      what one rank holds to send, its own part included
    send_recv       the message

What links carry, by algorithm, in and out of one GPU (n ranks, r = ranks / domains, V bytes): an all_reduce moves
2 (n-1)/n V in a ring of 2 (n-1) steps or a tree of 2 log2 n, V where the switch adds up, and (n-1) V in one step where
every rank reads all others; all_gather, reduce_scatter and all_to_all move (n-1)/n V.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.errors import unknown_name
from neusight_jax.kernels.family import Dims, Family, Wire, Work

OPS: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
"""Operators; the dim `operation` is a position here, from 1."""
SOFTWARE: tuple[str, ...] = ("library", "engine", "low_latency")
"""Who runs it, the dim `software` is a position here: NCCL or its like; a serving engine's own kernels (one-shot
all_reduce, exchange of experts at full throughput); exchange of experts in few steps."""
DIMS: tuple[str, ...] = ("bytes", "ranks", "domains", "operation")
OPTIONS: tuple[tuple[str, float], ...] = (("software", 0.0), ("crossing_share", 1.0))
"""`crossing_share`: of an exchange, how much of what goes to another domain crosses the network: below 1 where one copy
serves several ranks there."""
ALGORITHMS: tuple[str, ...] = ("ring", "tree", "switch", "direct")
"""The tile menu: a collective chooses among algorithms as a product does among tiles."""


def collective_dims(
    op: str,
    payload_bytes: ArrayLike,
    ranks: ArrayLike,
    domains: ArrayLike = 1.0,
    *,
    software: str = "library",
    crossing_share: ArrayLike = 1.0,
) -> dict[str, Any]:
    """Dims of a collective (module docstring), numbers or arrays [kernel].

    Args:
      op: one of `OPS`.
      payload_bytes: by operator as in the module docstring, bytes.
      ranks: GPUs of the group.
      domains: domains of fast links it spans, equally many ranks in each.
      software: one of `SOFTWARE`.
      crossing_share: of an all_to_all, as in `OPTIONS`, in (0, 1].
    Raises: `InputError` for an unknown operator or software.
    """
    if op not in OPS:
        raise unknown_name("collective", op, OPS)
    if software not in SOFTWARE:
        raise unknown_name("software of a collective", software, SOFTWARE)
    sizes = {"bytes": payload_bytes, "ranks": ranks, "domains": domains, "operation": 1.0 + OPS.index(op)}
    return {**sizes, "software": float(SOFTWARE.index(software)), "crossing_share": crossing_share}


def expert_copies(top_k: float, ranks: float, domains: float = 1.0) -> tuple[float, float]:
    """Copies of a token that reach its experts, and the share of them that crosses between domains.

    A token goes once to every rank that has one of its experts, and crosses once to every domain; its experts lie on
    ranks drawn at random.

    Args:
      top_k: experts of a token.
      ranks: GPUs that hold the experts.
      domains: domains of fast links they lie in.
    Returns: `bytes` of an all_to_all over those of the tokens, and its `crossing_share`.
    """
    reached = ranks * -np.expm1(top_k * np.log1p(-1.0 / max(ranks, 1.0 + 1e-9)))
    across = domains * -np.expm1(top_k * np.log1p(-1.0 / max(domains, 1.0 + 1e-9))) if domains > 1 else 1.0
    return float(reached), float(min(across / reached, 1.0))


def _at(dims: Dims, op: str) -> Array:
    return jnp.round(dims["operation"]) == 1 + OPS.index(op)


def _option(dims: Mapping[str, Array], name: str) -> Array | float:
    return dims.get(name, dict(OPTIONS)[name])


def _work(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Work:
    payload, ranks, domains = dims["bytes"], jnp.maximum(dims["ranks"], 1.0), jnp.maximum(dims["domains"], 1.0)
    reduce, exchange, message = (_at(dims, op) for op in ("all_reduce", "all_to_all", "send_recv"))
    here = jnp.maximum(ranks / domains, 1.0)
    others, inside, crossing = (ranks - 1.0) / ranks, (here - 1.0) / here, (domains - 1.0) / domains
    passes = jnp.where(reduce, 2.0, 1.0)
    share, far = _option(dims, "crossing_share"), jnp.where(domains > 1.0, 1.0, 0.0)
    exchanged = ((here - 1.0) + (1.0 - share) * (ranks - here) * inside) / ranks  # copies are made where they arrive
    inside_bytes = jnp.where(exchange, exchanged, passes * inside) * payload
    inside_bytes = jnp.where(message, jnp.where(domains > 1.0, 0.0, payload), inside_bytes)
    # Every rank reads all others: more bytes than a ring, but a single step, which wins where messages are short.
    one_shot = jnp.where(reduce, (here - 1.0) * payload, inside_bytes)
    # The switch adds up (NVLink SHARP), so that each byte leaves a GPU once.
    switch = jnp.where(reduce, payload * jnp.where(here > 1.0, 1.0, 0.0), inside_bytes)
    shared = jnp.where(exchange, (ranks - here) / ranks * share, passes * crossing / here)
    shared = jnp.where(message, jnp.where(domains > 1.0, 1.0, 0.0), shared)
    # A ring over all ranks takes every byte around the domains; by levels each crosses once.
    ringed = jnp.where(exchange | message, shared, passes * jnp.where(domains > 1.0, others, 0.0) / here)
    once = jnp.where(here > 1.0, 1.0, 0.0)
    rings = jnp.where(message, once, passes * (here - 1.0))
    trees = jnp.where(message, once, passes * jnp.log2(here))
    around, rounds = passes * (domains - 1.0), passes * jnp.log2(domains)
    wire = Wire(
        link_bytes=jnp.stack([inside_bytes, inside_bytes, switch, one_shot], axis=1),
        link_steps=jnp.stack([rings, trees, passes * once, once], axis=1),
        nic_bytes=jnp.stack([ringed, shared], axis=1) * payload[:, None],
        nic_steps=jnp.stack([jnp.where(exchange | message, far, steps) for steps in (around, rounds)], axis=1),
        ranks=here,
    )
    moved = payload * jnp.where(reduce | exchange | message, 2.0, 1.0)
    one = jnp.ones((payload.shape[0], len(ALGORITHMS), 1))
    return Work(
        flop=jnp.where(reduce | _at(dims, "reduce_scatter"), payload * others / element_bytes, 0.0),
        bytes_moved=moved,
        blocks=one,
        block_flop=jnp.maximum(payload, 1.0)[:, None, None] * one,
        block_bytes=jnp.maximum(payload, 1.0)[:, None, None] * one,
        block_steps=one,
        wire=wire,
    )


def _features(dims: Dims, element_bytes: Float[Array, " kernel"]) -> Float[Array, "kernel feature"]:
    """Sizes within a domain, the operator and who runs it. A message inside a domain reaches the rate of two ranks that
    sum a tensor of its size, each of which sends it whole; one between domains is its half of an exchange of two. How
    many domains a group spans is left to the physical times: few rows cross any, and a network could only guess."""
    here = jnp.maximum(dims["ranks"] / jnp.maximum(dims["domains"], 1.0), 1.0)
    message = _at(dims, "send_recv")
    near = message & (dims["domains"] <= 1.0)
    half = jnp.where(message & ~near, 2.0, 1.0)
    sizes = [jnp.log(dims["bytes"] * half), jnp.log(jnp.where(message, 2.0, here))]
    kinds = [jnp.where(_at(dims, op) | (near & (op == "all_reduce")), 1.0, 0.0) for op in OPS[:3]]
    software = jnp.round(jnp.broadcast_to(jnp.asarray(_option(dims, "software"), jnp.float32), here.shape))
    who = [jnp.where(software == number, 1.0, 0.0) for number in range(1, len(SOFTWARE))]
    narrow = jnp.where(_at(dims, "all_to_all"), jnp.log(element_bytes / 2.0), 0.0)  # dispatched narrow, combined wide
    return jnp.stack([*sizes, *kinds, *who, narrow], axis=-1)


COLLECTIVE = Family(
    name="collective",
    ops=OPS,
    dims=DIMS,
    options=OPTIONS,
    tiles=ALGORITHMS,
    matrix=False,
    network="collective",
    work=_work,
    features=_features,
    tensor_core=True,
    generations="tensor",
    linked=True,
)
