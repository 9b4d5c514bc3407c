"""Measured rows in the form the fitting loop takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from neusight_jax.hardware.catalog import generation_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.topology import Topology
from neusight_jax.kernels.family import LIBRARY, Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.residuals import other_vendor


def generations(family: Family, devices: Sequence[str]) -> list[str]:
    """The generations of devices in a family, each once, sorted."""
    return sorted({generation_of(name, family.generations) for name in devices})


@dataclass(frozen=True)
class Rows:
    """Measured rows of one family, of any number of devices.

    Attributes:
      family: family of the rows.
      batch: the kernels, not padded.
      seconds: measured latency [row].
      tile: measured position in the tile menu, −1 where unknown [row].
      device: index into `devices` [row].
      isolated: 1 = a sweep's row, 0 = a node of a running model [row].
      devices: canonical device names; gpus: their specifications stacked [device].
      topologies: how they are joined in their usual servers [device], of rows that send to other GPUs.
    """

    family: Family
    batch: KernelBatch
    seconds: Float[np.ndarray, " row"]
    tile: Int[np.ndarray, " row"]
    device: Int[np.ndarray, " row"]
    isolated: Float[np.ndarray, " row"]
    devices: tuple[str, ...]
    gpus: GPU
    topologies: Topology | None = None

    @property
    def generation(self) -> tuple[int, ...]:
        """Index of each device's generation among those present [device]."""
        order = generations(self.family, self.devices)
        own = self.family.generations
        return tuple(order.index(generation_of(name, own)) for name in self.devices)

    @property
    def of_minority_vendor(self) -> Bool[np.ndarray, " device"]:
        """Devices that run another vendor's libraries, where there are any that run the usual ones [device]."""
        other = np.asarray(other_vendor(self.gpus))
        return other & ~other.all()

    def take(self, where: np.ndarray | slice) -> Rows:
        """The rows at these positions (or under this mask)."""
        return replace(
            self,
            batch=jax.tree.map(lambda column: column[where], self.batch),
            seconds=self.seconds[where],
            tile=self.tile[where],
            device=self.device[where],
            isolated=self.isolated[where],
        )

    def without(self, names: Sequence[str]) -> Rows:
        """The rows of all other devices; the list of devices stays."""
        held_out = [position for position, name in enumerate(self.devices) if name in names]
        return self.take(~np.isin(self.device, held_out))

    def without_libraries(self) -> Rows:
        """The rows without what is known of the libraries that ran them."""
        dims = {name: sizes for name, sizes in self.batch.dims.items() if name != LIBRARY}
        return replace(self, batch=replace(self.batch, dims=dims))

    def of_device(self, name: str) -> Rows:
        """The rows measured on one device."""
        return self.take(self.device == self.devices.index(name))
