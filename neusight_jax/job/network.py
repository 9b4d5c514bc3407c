"""Network: seconds of a job's messages, by the predictor's collectives, or from the figures of a cluster alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.baselines.roofline import RooflinePredictor
from neusight_jax.cluster import Cluster
from neusight_jax.job.messages import Message
from neusight_jax.job.placement import Group
from neusight_jax.kernels.collective import COLLECTIVE, OPS, collective_dims, expert_bytes
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.terms import Predictor


def message_seconds(
    predictor: Predictor,
    cluster: Cluster,
    messages: Sequence[Message],
    groups: Mapping[str, Group],
    run: Callable[..., Mapping[str, Any]],
) -> Float[Array, " message"]:
    """Seconds of one of each message; `run` forecasts kernels by family, as `latencies.kernel_latency` does.

    A predictor without collectives leaves them to `ring_seconds`.
    """
    rows = sizes(messages, groups)
    if not predictor.covers(COLLECTIVE) or isinstance(predictor, RooflinePredictor):
        return ring_seconds(cluster, rows)
    kernels = [
        Kernel("collective", OPS[int(op)], collective_dims(OPS[int(op)], size, ranks, domains, crossing_share=share))
        for size, ranks, domains, op, share in rows
    ]
    table = table_from_kernels(kernels, dtype="bf16")
    only = KernelTable({"collective": table.families["collective"]})
    seconds = jnp.asarray(run(predictor, cluster, only)["collective"])[: len(rows)]
    return jnp.where(rows[:, 1] > 1, seconds, 0.0)


def sizes(messages: Sequence[Message], groups: Mapping[str, Group]) -> np.ndarray:
    """Bytes, ranks, domains, operator and crossing share of every message, [message, 5]."""
    rows = []
    for each in messages:
        group, payload, share = groups[each.group], each.payload_bytes, 1.0
        if each.top_k:
            payload, share = expert_bytes(payload, 1.0, each.top_k, group.ranks, group.domains, element_bytes=1.0)
        rows.append((payload, group.ranks, group.domains, OPS.index(each.op), share))
    return np.array(rows, np.float64).reshape(-1, 5)


def ring_seconds(cluster: Cluster, rows: np.ndarray) -> Float[Array, " message"]:
    """Seconds of `sizes` as rings inside domains and over them: wire bytes over rates, plus steps."""
    topology = cluster.topology
    size, ranks, domains, op, crossing = rows.T
    passes = np.where(op == OPS.index("all_reduce"), 2.0, 1.0)
    here = np.maximum(ranks / domains, 1.0)
    single = op == OPS.index("send_recv")
    inside = np.where(single, domains == 1, passes * (here - 1) / here) * size
    across = np.where(single, domains > 1, passes * (domains - 1) / domains / here) * size
    exchange = op == OPS.index("all_to_all")
    inside = np.where(exchange, (here - 1) / np.maximum(ranks, 1) * size, inside)
    across = np.where(exchange, (ranks - here) / np.maximum(ranks, 1) * size * crossing, across)
    steps = np.where(single | exchange, 1.0, passes * np.minimum(here - 1, 2 * np.log2(np.maximum(here, 2))))
    far = np.where(domains > 1, np.where(single | exchange, 1.0, passes * np.log2(np.maximum(domains, 2))), 0.0)
    link = topology.group_bytes_per_s(jnp.asarray(here, jnp.float32))
    wire = (
        jnp.maximum(
            jnp.asarray(inside, jnp.float32) / link, jnp.asarray(across, jnp.float32) / topology.crossing_bytes_per_s
        )
        / REACHED
    )
    return jnp.where(ranks > 1, wire + steps * jnp.asarray(topology.link_latency_s) + far * topology.nic_latency_s, 0.0)


REACHED = 0.8
"""Share of a link's rate that a large message reaches."""
