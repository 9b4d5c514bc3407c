"""Cluster: many GPUs and how they are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.errors import InputError, require_fields
from neusight_jax.hardware.gpu import FIELDS, GPU, stack_gpus
from neusight_jax.hardware.topology import TRACED_FIELDS, Topology, default_topology
from neusight_jax.kernels.family import Family
from neusight_jax.printed import Record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cluster(Record):
    """Equal GPUs that are joined.

    Attributes:
      gpu: one of them; topology: how they are joined; both traced.
      count: how many. Static, as `topology.gpus_per_domain` is.
    """

    gpu: GPU
    topology: Topology
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def domains(self) -> int:
        """Domains of fast links it spans."""
        return -(-self.count // max(self.topology.gpus_per_domain, 1))

    def summary(self) -> str:
        """How many GPUs of what size."""
        return f"{self.count} GPUs in domains of {self.topology.gpus_per_domain}, each {self.gpu.summary()}"

    def replace(self, **changes: Any) -> Cluster:
        """This cluster with `gpu`, `topology` or `count` replaced. `InputError` for a field there is not."""
        require_fields("a cluster", [field.name for field in dataclasses.fields(self)], changes)
        return dataclasses.replace(self, **changes)


Machine: TypeAlias = GPU | Cluster
"""What a forecast is for."""
_Machine = TypeVar("_Machine", bound=GPU | Cluster)


def gpu_of(machine: Machine) -> GPU:
    """One GPU of a machine."""
    return machine.gpu if isinstance(machine, Cluster) else machine


def topology_of(machine: Machine) -> Topology:
    """How the GPUs of a machine are joined; a plain GPU stands for `default_topology`."""
    return machine.topology if isinstance(machine, Cluster) else default_topology(machine)


def linked_topology(family: Family, machine: Machine) -> Topology | None:
    """The topology of a machine where kernels of the family send to other GPUs, else None."""
    return topology_of(machine) if family.linked else None


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
        name: jnp.stack([jnp.asarray(getattr(each, name), float) for each in topologies]) for name in TRACED_FIELDS
    }
    sizes, counts = {each.gpus_per_domain for each in topologies}, {each.count for each in clusters}
    topology = Topology(sizes.pop() if len(sizes) == 1 else 0, **figures)
    return Cluster(stack_gpus([each.gpu for each in clusters]), topology, counts.pop() if len(counts) == 1 else 0)


def _inexact(value: Any) -> Any:
    """A figure as an array of JAX's default width; on the host, where it is no array of JAX."""
    if isinstance(value, jax.Array):
        return jnp.asarray(value, dtype=float)
    return np.asarray(value, jax.dtypes.canonicalize_dtype(float))


def on_device(machine: _Machine) -> _Machine:
    """Every figure as an inexact array of JAX's default width, and no counts, so that all GPUs share one program, and
    so do all clusters."""
    if isinstance(machine, Cluster):
        joined = machine.topology
        figures = {name: _inexact(getattr(joined, name)) for name in TRACED_FIELDS}
        return cast(_Machine, Cluster(on_device(machine.gpu), Topology(0, **figures), 0))
    return cast(_Machine, GPU(**{name: _inexact(getattr(machine, name)) for name in FIELDS}))
