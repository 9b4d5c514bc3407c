"""Cluster: many GPUs and how they are joined."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.errors import InputError, require_fields
from neusight_jax.hardware.gpu import GPU, stack_gpus
from neusight_jax.records import Record, cell, number

# Topology: how the GPUs of a cluster are joined, as numbers; the rates are traced, so that gradients reach them.

LINK_LATENCY_S = 0.6e-6
"""Latency of one hop over NVLink, seconds; NCCL 2.18, src/graph/tuning.cc, `hwLat`, low-latency protocol."""
NIC_LATENCY_S = 2.7e-6
"""Latency of one hop over the network, seconds; the same source."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Topology(Record):
    """Links between GPUs. Rates are those of the sheet, per GPU and direction; what a library reaches is learned.

    Attributes:
      gpus_per_domain: GPUs that share fast links: those of a server, or of an NVL72 rack. Static.
      link_bytes_per_s: rate inside a domain, bytes/s.
      nic_bytes_per_s: rate between domains, bytes/s.
      link_latency_s, nic_latency_s: of one hop inside a domain and between domains, seconds.
      pair_share: part of the link rate that one pair of GPUs reaches, 1 = behind a switch, less where links lead from
        point to point.
      switch_reduction: 1 = the switch adds up and copies (NVLink SHARP), 0 = it does not.
      oversubscription: of the network between domains, 1 = none.
    """

    gpus_per_domain: int = dataclasses.field(metadata={"static": True})
    link_bytes_per_s: ArrayLike
    nic_bytes_per_s: ArrayLike
    link_latency_s: ArrayLike = LINK_LATENCY_S
    nic_latency_s: ArrayLike = NIC_LATENCY_S
    pair_share: ArrayLike = 1.0
    switch_reduction: ArrayLike = 0.0
    oversubscription: ArrayLike = 1.0

    def slopes(self) -> bool:
        """No link takes more than a second for a byte."""
        rate = number(self.link_bytes_per_s)
        return rate is not None and rate < 1.0

    def summary(self) -> str:
        """Its rates."""
        rates = (cell(name, getattr(self, name)) for name in ("link_bytes_per_s", "nic_bytes_per_s"))
        return f"domains of {self.gpus_per_domain}, {' inside, '.join(rates)} between"

    def group_bytes_per_s(self, ranks: Float[Array, " kernel"]) -> Float[Array, " kernel"]:
        """Link rate of one GPU in a group of so many inside a domain, bytes/s."""
        # Where links lead from point to point, a GPU has only those to its own group to send by.
        reached = jnp.minimum((jnp.maximum(ranks, 2.0) - 1.0) * self.pair_share, 1.0)
        return jnp.asarray(self.link_bytes_per_s) * reached

    @property
    def crossing_bytes_per_s(self) -> Array:
        """Rate of one GPU between domains, bytes/s."""
        return jnp.asarray(self.nic_bytes_per_s) / jnp.asarray(self.oversubscription)

    def replace(self, **changes: ArrayLike) -> Topology:
        """This topology with fields replaced. `InputError` for a field there is not."""
        require_fields("a topology", TOPOLOGY_FIELDS, changes)
        changed: Topology = dataclasses.replace(self, **changes)  # type: ignore[arg-type]
        return changed


TOPOLOGY_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Topology))
"""Names of the figures of a topology."""
TRACED_FIELDS: tuple[str, ...] = TOPOLOGY_FIELDS[1:]
"""Those that gradients and sweeps reach."""
_RANGES: dict[str, tuple[float, float, str]] = {
    "gpus_per_domain": (1, 1e6, "a whole number of GPUs"),
    "link_bytes_per_s": (1e8, 1e14, "bytes/s of one GPU in one direction, such as 4.5e11"),
    "nic_bytes_per_s": (1e7, 1e14, "bytes/s of one GPU in one direction, such as 5e10"),
    "link_latency_s": (1e-9, 1e-3, "seconds, such as 6e-7"),
    "nic_latency_s": (1e-8, 1e-1, "seconds, such as 2.7e-6"),
    "pair_share": (1e-4, 1, "a share of the link rate up to 1"),
    "switch_reduction": (0, 1, "1 or 0"),
    "oversubscription": (1, 1e3, "a factor from 1"),
}


def check_link_figure(name: str, value: object, where: str) -> None:
    """`InputError` unless a figure of a topology is a number of a believable size; `where` opens the message."""
    low, high, expected = _RANGES[name]
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or (name == "gpus_per_domain" and number != int(number)):
        raise InputError(f"{where}: {name} is {value!r}, expected {expected}")


def default_topology(gpu: GPU) -> Topology:
    """One domain behind a switch over the GPU's own links: what a plain GPU stands for. Works under `jit`, `grad` and
    `vmap`; the gradient goes to the GPU's `link_bytes_per_s`."""
    link = gpu.link_bytes_per_s
    return Topology(0, link_bytes_per_s=link, nic_bytes_per_s=link)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cluster(Record):
    """Equal GPUs that are joined.

    Attributes:
      gpu: one of them; topology: how they are joined; both traced.
      count: how many. Static, as `Topology.gpus_per_domain` is.
    """

    gpu: GPU
    topology: Topology
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def domains(self) -> int:
        """Domains of fast links it spans."""
        return -(-self.count // max(self.topology.gpus_per_domain, 1))

    def summary(self) -> str:
        """Number of GPUs and their size."""
        return f"{self.count} GPUs in domains of {self.topology.gpus_per_domain}, each {self.gpu.summary()}"

    def replace(self, **changes: Any) -> Cluster:
        """This cluster with `gpu`, `topology` or `count` replaced. `InputError` for a field there is not."""
        require_fields("a cluster", [field.name for field in dataclasses.fields(self)], changes)
        return dataclasses.replace(self, **changes)


Machine: TypeAlias = GPU | Cluster
"""Machine a forecast is for."""
AnyMachine = TypeVar("AnyMachine", bound=GPU | Cluster)


def gpu_of(machine: Machine) -> GPU:
    """One GPU of a machine."""
    return machine.gpu if isinstance(machine, Cluster) else machine


def with_gpu(machine: AnyMachine, **figures: Any) -> AnyMachine:
    """A machine with figures of its GPU replaced."""
    if isinstance(machine, Cluster):
        return cast(AnyMachine, machine.replace(gpu=machine.gpu.replace(**figures)))
    return cast(AnyMachine, machine.replace(**figures))


def topology_of(machine: Machine) -> Topology:
    """Topology of the GPUs of a machine; a plain GPU stands for `default_topology`."""
    return machine.topology if isinstance(machine, Cluster) else default_topology(machine)


def as_cluster(machine: Machine) -> Cluster:
    """A machine as a cluster: a plain GPU is one of many in a single domain, of which nobody said how many."""
    return machine if isinstance(machine, Cluster) else Cluster(machine, default_topology(machine), 1)


def stack_clusters(clusters: Sequence[Cluster]) -> Cluster:
    """Several clusters as one record with arrays [cluster], to `vmap` over; its counts are 0 where they differ.

    Raises: `InputError` for an empty list.
    """
    if not clusters:
        raise InputError("no cluster to stack; expected at least one")
    topologies = [cluster.topology for cluster in clusters]
    figures = {
        name: jnp.stack([jnp.asarray(getattr(links, name), float) for links in topologies]) for name in TRACED_FIELDS
    }
    sizes, counts = {links.gpus_per_domain for links in topologies}, {cluster.count for cluster in clusters}
    topology = Topology(sizes.pop() if len(sizes) == 1 else 0, **figures)
    return Cluster(stack_gpus([cluster.gpu for cluster in clusters]), topology, counts.pop() if len(counts) == 1 else 0)


def _inexact(value: Any) -> Any:
    """A figure as an array of JAX's default width; on the host, where it is no array of JAX."""
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype=float)
    return np.asarray(value, jax.dtypes.canonicalize_dtype(float))


def on_device(machine: AnyMachine) -> AnyMachine:
    """Every figure as an inexact array of JAX's default width, and no counts, so that all GPUs share one program, and
    so do all clusters."""
    if isinstance(machine, Cluster):
        joined = machine.topology
        figures = {name: _inexact(getattr(joined, name)) for name in TRACED_FIELDS}
        return cast(AnyMachine, Cluster(on_device(machine.gpu), Topology(0, **figures), 0))
    return cast(AnyMachine, GPU(**{name: _inexact(value) for name, value in machine.known().items()}))
