"""From measurements to training rows: sweeps of every family, and nodes of measured models as in-model rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from neusight_jax.arithmetic import DTYPES
from neusight_jax.datasets.measurements import Measurements
from neusight_jax.hardware.catalog import generation_of
from neusight_jax.hardware.cluster import Cluster, Topology, stack_clusters
from neusight_jax.hardware.files import usual_topology
from neusight_jax.hardware.gpu import GPU, stack_gpus
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import LIBRARY, Family
from neusight_jax.kernels.table import Kernel, KernelBatch, batch_from_columns
from neusight_jax.model.residuals import other_vendor
from neusight_jax.scaling.tables import event_overhead_s, node_kernels

# Measured rows in the form the fitting loop takes.


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
        kind = self.family.generations
        return tuple(order.index(generation_of(name, kind)) for name in self.devices)

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

    def by_device(self, values: Float[np.ndarray, " row"]) -> dict[str, np.ndarray]:
        """Values of the rows apart for each device that has some."""
        parts = {name: values[self.device == position] for position, name in enumerate(self.devices)}
        return {name: part for name, part in parts.items() if len(part)}

    def of_device(self, name: str) -> Rows:
        """The rows measured on one device."""
        return self.take(self.device == self.devices.index(name))


NETWORKS: tuple[str, ...] = tuple(name for name, family in FAMILIES.items() if family.network == name)
"""Families that have a network of their own."""

MIN_NODE_S = 50e-6
"""Shortest model node used for training: below it the event overhead dominates."""
BROADCAST = 2.0**16
"""Most elements of an operand that repeats, for its node to be used: these stay in any L2."""
CONTAMINATED: dict[str, tuple[str, ...]] = {"NVIDIA A100-PCIE-40GB": ("bert_large", "gpt2_large", "opt_13/2")}
"""Models (or model/batch) whose per-node times on a device were taken in a low clock state: their sum is 1.2-1.5 times
the whole-model label of the same run. Left out."""


def contaminated(nodes: pd.DataFrame) -> pd.Series:
    """Mask of the nodes of `CONTAMINATED` runs."""
    dirty = pd.Series(False, index=nodes.index)
    for device, names in CONTAMINATED.items():
        run = nodes["model"] + "/" + nodes["batch_size"].astype(str)
        dirty |= (nodes["device"] == device) & (nodes["model"].isin(names) | run.isin(names))
    return dirty


def sweep_rows(measurements: Measurements, name: str, devices: Sequence[str]) -> Rows:
    """Sweep rows of one family on the given devices (canonical names)."""
    frame = measurements.frame
    frame = frame[(frame["family"] == name) & frame["device"].isin(devices)]
    return _rows(frame, FAMILIES[name], devices, isolated=1.0, gpu_of=measurements.gpu)


def model_rows(measurements: Measurements, name: str, devices: Sequence[str]) -> Rows:
    """Nodes of measured models that are one kernel of the family forward, event overhead taken off.

    The overhead of a device is the median time of its views, which launch nothing. Nodes shorter than `MIN_NODE_S` and
    contaminated runs are left out.
    """
    every = pd.DataFrame({"device": []}) if measurements.per_op is None else measurements.per_op
    records: list[dict[str, Any]] = []
    for device in devices:
        nodes = every[every["device"] == device]
        if nodes.empty or "fw_ops" not in nodes:
            continue
        overhead_s = event_overhead_s(nodes)
        # A node of several kernels has one time for all of them, which tells nothing of either.
        for row in nodes[~contaminated(nodes)].to_dict("records"):
            node = {str(column): value for column, value in row.items()}
            kernel = _only_kernel(node)
            seconds = node["forward_s"] - overhead_s
            if kernel is not None and kernel.family == name and seconds >= MIN_NODE_S:
                common = {"device": device, "op": kernel.op, "dtype": "fp32", "tile": None}
                records.append({**common, "latency_s": seconds, **kernel.dims})
    columns = ["device", "op", "dtype", "latency_s", "tile", *FAMILIES[name].dims]
    frame = pd.DataFrame(records, columns=columns)
    return _rows(frame, FAMILIES[name], devices, isolated=0.0, gpu_of=measurements.gpu)


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of one family joined; all parts must list the same devices."""

    def joined(attribute: str) -> Any:
        return np.concatenate([getattr(part, attribute) for part in parts])

    first = parts[0]
    batch = jax.tree.map(lambda *columns: np.concatenate(columns), *(part.batch for part in parts))
    columns = {name: joined(name) for name in ("seconds", "tile", "device", "isolated")}
    return replace(first, batch=batch, **columns)


def thin(rows: Rows, per_device: int) -> Rows:
    """At most this many rows of each device, drawn at random."""
    generator = np.random.default_rng(0)
    chosen = [
        generator.permutation(np.flatnonzero(rows.device == index))[:per_device] for index in range(len(rows.devices))
    ]
    return rows.take(np.sort(np.concatenate(chosen)))


def measured_devices(measurements: Measurements) -> list[str]:
    """Canonical names of the devices with sweep rows, sorted."""
    return sorted(measurements.frame["device"].unique())


def devices_with(measurements: Measurements, name: str, among: Sequence[str]) -> tuple[str, ...]:
    """Those of the devices that have sweep rows of a family: others would only be effects without evidence."""
    frame = measurements.frame
    having = set(frame.loc[frame["family"] == name, "device"])
    return tuple(device for device in among if device in having)


def _rows(
    frame: pd.DataFrame, family: Family, devices: Sequence[str], isolated: float, gpu_of: Callable[[str], GPU]
) -> Rows:
    count = len(frame)
    index = {name: position for position, name in enumerate(devices)}
    dtypes = {name: position for position, name in enumerate(DTYPES)}
    batch: KernelBatch = batch_from_columns(
        family,
        frame["op"],
        {name: frame[name].to_numpy(np.float32) for name in family.columns if name in frame},
        dtype=frame["dtype"].map(dtypes).to_numpy(np.int32),
        count=np.ones(count),
        phase=np.zeros(count),
        node=np.arange(count),
        row=np.arange(count),
    )
    batch = jax.tree.map(lambda column: column[:count], batch)
    if family.known_libraries:
        libraries = {name: family.library_of(generation_of(name, family.generations)) for name in devices}
        library: Any = frame["device"].map(libraries).to_numpy(np.float32)
        batch = replace(batch, dims={**batch.dims, LIBRARY: library})
    gpus = {name: gpu_of(name) for name in devices}
    clusters = [Cluster(gpu, usual_topology(name, gpu), 0) for name, gpu in gpus.items()] if family.linked else []
    return Rows(
        family=family,
        batch=batch,
        seconds=frame["latency_s"].to_numpy(np.float32),
        tile=_tile_labels(frame, family),
        device=frame["device"].map(index).to_numpy(np.int32),
        isolated=np.full(count, isolated, np.float32),
        devices=tuple(devices),
        gpus=stack_gpus([*gpus.values()]),
        topologies=stack_clusters(clusters).topology if clusters else None,
    )


def _tile_labels(frame: pd.DataFrame, family: Family) -> np.ndarray:
    """Measured position in the tile menu: by name for matrix products, by elements or rows per block otherwise."""
    if family.linked:
        return np.full(len(frame), -1, np.int32)
    if family.matrix:
        menu = {name: position for position, name in enumerate(family.tiles)}
        return np.asarray(frame["tile"].map(menu).fillna(-1).to_numpy(np.int32))
    if "blocks" not in frame:
        return np.full(len(frame), -1, np.int32)
    sizes = np.array([float(name.split()[0]) for name in family.tiles])
    units = frame["rows"] if family.tiles[0].endswith("rows") else frame["rows"] * frame["cols"]
    per_block = (units / frame["blocks"]).to_numpy(np.float64)
    measured = np.isfinite(per_block) & (per_block > 0)
    distance = np.abs(np.log(np.where(measured, per_block, 1.0))[:, None] - np.log(sizes)[None, :])
    # Further off than half a unit of the logarithm, the size is none of the menu.
    return np.where(measured & (distance.min(axis=1) < 0.5), distance.argmin(axis=1), -1).astype(np.int32)


def _only_kernel(node: Mapping[str, Any]) -> Kernel | None:
    """The kernel of a node that is one forward, and of a family that is measured alone; None for all others.

    Matrix products of permuted operands (`matmul`) hide copies and are left out; `bmm` nodes are plain. So are sums
    with an operand that repeats along an outer axis and is no small row: how much of it is read again depends on L2.
    """
    kernels = node_kernels(node["fw_ops"], node)
    if len(kernels) != 1 or len(json.loads(node["fw_ops"])) != 1:
        return None
    kernel = kernels[0]
    if kernel.family == "bmm":
        return kernel if node["name"].startswith("bmm") else None
    if FAMILIES[kernel.family].matrix:
        return kernel
    elements = kernel.dims["rows"] * kernel.dims["cols"]
    if kernel.family not in NETWORKS or math.prod(json.loads(node["output_shape"])) != elements:
        return None
    repeats = any(BROADCAST < math.prod(shape) < elements for shape in json.loads(node["input_shapes"]))
    return None if repeats else kernel
