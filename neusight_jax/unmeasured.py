"""Unmeasured: what of a forecast's time nothing like it was measured for, in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from neusight_jax.graph.graph import UNMODELLED, Graph
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import UNPACK, WEIGHT_SHARE
from neusight_jax.kernels.gemm import GEMM, GEMM_FP8
from neusight_jax.kernels.grouped_gemm import GROUPED_GEMM
from neusight_jax.model.latency import in_row_order
from neusight_jax.model.residuals import other_vendor

VENDOR_PRODUCTS: tuple[str, ...] = (GEMM.name, GEMM_FP8.name)
"""Families of tensor cores that were measured on another vendor's GPUs than the first of `gpu.VENDORS`."""
UNLIKE: tuple[str, ...] = ("never measured", "not modelled", "no GPU of the architecture")
"""Beginnings of notes that nothing like what is forecast was measured."""


def unmodelled_shares(graph: Graph, columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Share of the time of every operator nobody has modelled, by name; its time is that of the memory it moves."""
    cost = np.asarray(columns["seconds"] * columns["count"], np.float64)
    shares: dict[str, float] = {}
    for position, node in enumerate(graph.nodes):
        if node.op.startswith(UNMODELLED):
            name = node.op.removeprefix(UNMODELLED).strip()
            share = float(cost[columns["node"] == position].sum() / max(cost.sum(), 1e-30))
            shares[name] = shares.get(name, 0.0) + share
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def unmeasured_notes(graph: Graph, columns: Mapping[str, np.ndarray], gpu: GPU) -> list[str]:
    """Notes of time that nothing like it was measured for: unmodelled operators, weights widened by the kernel, and
    families that were measured on another vendor's GPUs alone."""
    notes, shares = _vendor_notes(columns, gpu), unmodelled_shares(graph, columns)
    if shares:
        operators = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        opened = ", and the interval is open upwards" if np.any(columns["unmeasured"] > 0.0) else ""
        notes.append(
            "not modelled, charged as memory traffic (inputs and outputs once) and by the FLOP that a textbook counts: "
            f"{operators} of the time; that is the least they take{opened}"
        )
    notes += _modelled_notes(graph, columns)
    widths = {
        name: np.asarray(batch.dims.get(WEIGHT_SHARE, np.ones(batch.row.shape)))
        for name, batch in graph.kernels.families.items()
    }
    if GROUPED_GEMM.name in widths:  # experts were measured so
        widths[GROUPED_GEMM.name] = np.ones_like(widths[GROUPED_GEMM.name])
    counted = _unpacking(graph)
    narrow = (in_row_order(graph.kernels, widths) < 1.0) & ~counted
    cost = np.asarray(columns["seconds"] * columns["count"], np.float64)
    if share := float(cost[narrow].sum() / max(cost.sum(), 1e-30)):
        notes.append(
            f"weight-only products ({share:.0%} of the time) were never measured: forecast as plain ones that read "
            "fewer bytes, without what widening the weights costs"
        )
    if share := float(cost[counted].sum() / max(cost.sum(), 1e-30)):
        notes.append(
            f"products of packed weights ({share:.0%} of the time) were never measured: bytes as stored, unpacking by "
            "counted instructions; the interval allows another factor of three either way"
        )
    return notes


def _vendor_notes(columns: Mapping[str, np.ndarray], gpu: GPU) -> list[str]:
    """A note of families of tensor cores that were measured on another vendor's GPUs alone, and their share of time."""
    reasoned = [
        name
        for name in dict.fromkeys(columns["network"])
        if FAMILIES[name].tensor_core and not FAMILIES[name].linked and name not in VENDOR_PRODUCTS
    ]
    if not reasoned or not bool(other_vendor(gpu)):
        return []
    cost = np.asarray(columns["seconds"] * columns["count"], np.float64)
    share = float(cost[np.isin(columns["network"], reasoned)].sum() / max(cost.sum(), 1e-30))
    half = ", fp4 from those in 8 by half the width" if "gemm_fp4" in reasoned else ""
    return [
        f"never measured on this vendor's GPUs: {', '.join(sorted(reasoned))} ({share:.0%} of the time); reasoned from "
        f"its products in 16 and 8 bits{half}, with a wide interval"
    ]


def _unpacking(graph: Graph) -> np.ndarray:
    """Mask of the kernels that unpack weights by counted instructions, in the order of the table."""
    slots = {
        name: np.asarray(batch.dims.get(UNPACK, np.zeros(batch.row.shape)))
        for name, batch in graph.kernels.families.items()
    }
    mask: np.ndarray = in_row_order(graph.kernels, slots) > 0.0
    return mask


def _modelled_notes(graph: Graph, columns: Mapping[str, np.ndarray]) -> list[str]:
    """A note of kernels that are modelled and were never measured, by dtype or operator, and their share of time."""
    cost = np.asarray(columns["seconds"] * columns["count"], np.float64)
    modelled = np.array([not node.op.startswith(UNMODELLED) for node in graph.nodes], bool)[columns["node"].astype(int)]
    rows = (columns["unmeasured"] > 0.0) & modelled & ~_unpacking(graph)
    if not rows.any():
        return []
    pairs = zip(columns["op"][rows], columns["dtype"][rows], strict=True)
    names = dict.fromkeys(op if op in FAMILIES["counted"].ops else f"products in {dtype}" for op, dtype in pairs)
    share = float(cost[rows].sum() / max(cost.sum(), 1e-30))
    return [
        f"never measured: {', '.join(names)} ({share:.0%} of the time); the interval allows another factor of three "
        "either way"
    ]
