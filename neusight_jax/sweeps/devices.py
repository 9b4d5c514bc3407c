"""Rows over all devices: of this process, or of all processes that joined through `jax.distributed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

AXIS = "gpu"
"""Name of the mesh axis that hypothetical machines are spread over."""


def join_processes(coordinator: str | None, num_processes: int, process_id: int) -> None:
    """Join the other processes of a sweep (`jax.distributed`); call it before anything else of JAX.

    Args:
      coordinator: HOST:PORT of process 0; None = on its own.
      num_processes, process_id: as `jax.distributed.initialize`.
    """
    if coordinator is not None:
        jax.distributed.initialize(coordinator, num_processes, process_id)


def barrier(name: str) -> None:
    """Wait for all processes; nothing on its own."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


@dataclass(frozen=True)
class Spread:
    """How a chunk's rows lie on the devices: equal runs in device order, the last one padded.

    Attributes:
      sharding: of the first axis.
      rows: padded rows of a chunk, a multiple of the device count.
      start, stop: padded rows of this process.
    """

    sharding: NamedSharding
    rows: int
    start: int
    stop: int

    def put(self, columns: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's columns [stop − start] as global arrays [rows], single precision."""
        make: Any = jax.make_array_from_process_local_data
        return {name: make(self.sharding, values.astype(np.float32), (self.rows,)) for name, values in columns.items()}

    def get(self, values: jax.Array) -> Float[np.ndarray, " row"]:
        """This process's rows of a global array."""
        shards = sorted(values.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])


def spread_rows(chunk: int) -> Spread:
    """Spread chunks of so many rows over all devices of all processes."""
    devices = jax.devices()
    each = -(-chunk // len(devices))
    own = [position for position, device in enumerate(devices) if device.process_index == jax.process_index()]
    spec: Any = PartitionSpec
    sharding = NamedSharding(Mesh(np.array(devices), (AXIS,)), spec(AXIS))
    return Spread(sharding, each * len(devices), each * own[0], each * (own[-1] + 1))


def on_host(tree: Any) -> Any:
    """Leaves as NumPy arrays, which every process may pass to one program."""
    return jax.tree.map(np.asarray, tree)
