"""Network: seconds of a job's messages, by the predictor's collectives, or from the figures of a cluster alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.arithmetic import dtype_index
from neusight_jax.hardware.cluster import Cluster
from neusight_jax.job.messages import Message
from neusight_jax.job.placement import Group
from neusight_jax.kernels.collective import COLLECTIVE, OPS, expert_bytes
from neusight_jax.kernels.table import KernelTable, batch_from_columns
from neusight_jax.model.terms import Predictor


def message_seconds(
    predictor: Predictor,
    cluster: Cluster,
    messages: Sequence[Message],
    groups: Mapping[str, Group],
    run: Callable[..., Mapping[str, Any]],
) -> Float[Array, " message"]:
    """Seconds of one of each message; `run` forecasts kernels by family, as `latency.kernel_latency` does."""
    return row_seconds(predictor, cluster, sizes(messages, groups), run)


def sizes(messages: Sequence[Message], groups: Mapping[str, Group]) -> np.ndarray:
    """Bytes, ranks, domains, operator and crossing share of every message, [message, 5]."""
    rows = [message_size(each, groups[each.group]) for each in messages]
    return np.array(rows, np.float64).reshape(-1, 5)


def message_size(message: Message, group: Group) -> tuple[float, ...]:
    """A row of `sizes`."""
    payload, share = message.payload_bytes, 1.0
    if message.top_k:
        payload, share = expert_bytes(payload, 1.0, message.top_k, group.ranks, group.domains, element_bytes=1.0)
    return payload, group.ranks, group.domains, OPS.index(message.op), share


def row_seconds(
    predictor: Predictor, cluster: Cluster, rows: np.ndarray, run: Callable[..., Mapping[str, Any]]
) -> Float[Array, " row"]:
    """Seconds of every row of `sizes`."""
    payload, ranks, domains, op, share = rows.T
    zero = np.zeros(len(rows))
    given = {"bytes": payload, "ranks": ranks, "domains": domains, "operation": 1.0 + op, "crossing_share": share}
    batch = batch_from_columns(
        COLLECTIVE,
        [OPS[int(each)] for each in op],
        given,
        dtype=zero + dtype_index("bf16"),
        count=zero + 1.0,
        phase=zero,
        node=zero,
        row=np.arange(len(rows)),
    )
    seconds = jnp.asarray(run(predictor, cluster, KernelTable({COLLECTIVE.name: batch}))[COLLECTIVE.name])
    return jnp.where(ranks > 1, seconds[: len(rows)], 0.0)
