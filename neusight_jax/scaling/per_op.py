"""Per-operator tables: one row per graph node of a model cut to one layer, timed on its own (`models/per_op.parquet`).

Every time holds what passes between its first event and the start of a kernel; a view takes as long without a kernel,
so the median time of the run's views is taken off. Nodes count as often as their layer repeats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import gpu_info
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.rowwise import BINARY_OPS
from neusight_jax.kernels.table import Kernel
from neusight_jax.scaling.trace import Measured, Trace

WORKLOAD: tuple[str, ...] = ("model", "mode", "sequence_length", "batch_size")
"""Columns that tell one run from another on the same device."""
PHASES: tuple[tuple[str, str], ...] = (("forward_s", "fw_ops"), ("backward_s", "bw_ops"), ("accumulate_s", "acc_ops"))
"""Column of seconds, and the column that lists what ran in them."""
VIEWS: tuple[str, ...] = ("expand", "permute", "transpose", "unsqueeze", "view")
"""Calls that the framework dispatches as it does every other, and that launch nothing."""


def read_per_op(path: Path, device: str | None, select: Mapping[str, str] | None = None) -> Trace:
    """Read one run of a table.

    Args:
      path: the file; device: whose rows; None when the file holds one device only.
      select: column -> value, to choose one workload where a device ran several.
    Raises: `InputError` for bad rows, an unknown column or value, or when more or less than one run is left.
    """
    table = read_measurements(path).per_op
    if table is None:
        raise InputError(f"{path}: no table of model nodes; expected the columns of models/per_op.parquet")
    if device is not None:
        table = table[table["device"] == gpu_info(device).name]
    for column, value in (select or {}).items():
        if column not in table:
            raise InputError(f"{path}: no column {column!r} to select by; expected one of {', '.join(WORKLOAD)}")
        table = table[table[column].astype(str) == value]
    runs = table.groupby(["device", *WORKLOAD], sort=False).size().index.tolist()
    if len(runs) != 1:
        shown = "; ".join(" ".join(map(str, run)) for run in runs[:4])
        found = f"{len(runs)} runs ({shown}{' ...' if len(runs) > 4 else ''})" if runs else "no run"
        raise InputError(f"{path}: {found} of this device and selection; choose one with --select COLUMN=VALUE")
    return trace_of_nodes(table, path.name)


def trace_of_nodes(nodes: pd.DataFrame, source: str) -> Trace:
    """The rows of one run as a trace."""
    overhead_s = event_overhead_s(nodes)
    items: list[Measured] = []
    nothing = 0
    for row in nodes.to_dict("records"):
        node: dict[str, Any] = {str(name): value for name, value in row.items()}
        repeat = float(node.get("layer_repeat", 1))
        for column, listed in PHASES:
            measured_s = float(node[column])
            if not measured_s > 0.0:
                continue
            kernels = node_kernels(node.get(listed), node)
            seconds = max(measured_s - overhead_s, 0.0)
            if not kernels and seconds < overhead_s:
                nothing += 1
                continue
            kind = "unknown" if not kernels else "gemm" if FAMILIES[kernels[0].family].matrix else "elementwise"
            phase = column.removesuffix("_s")
            items.append(Measured(f"{node['name']} {phase}", kind, seconds * repeat, repeat, kernels))
    total = sum(item.seconds for item in items)
    note = f"{overhead_s * 1e6:.1f} us of event overhead taken off every node; {nothing} nodes launch nothing"
    return Trace(source, tuple(items), total, total, (note,), tuple(nodes["device"].astype(str).unique()))


def event_overhead_s(nodes: pd.DataFrame) -> float:
    """Median forward time of a view: what a timed node takes before its kernel starts. 0 without a measured view.

    Views are known by the column `fx_target`, or in a table without it by the node's name (`view_3`).
    """
    named = nodes["name"].astype(str).str.replace(r"_\d+$", "", regex=True)
    called = nodes.get("fx_target", named)
    views = nodes["forward_s"][called.isin(VIEWS) & (nodes["forward_s"] > 0.0)]
    return float(views.median()) if len(views) else 0.0


def node_kernels(listed: Any, node: Mapping[str, Any]) -> tuple[Kernel, ...]:
    """Kernels of one phase of a node, from the table's own list (JSON: [kind, sizes] each); empty if it has none.

    Raises: `InputError` when the list, or the node's `input_shapes`, is something else.
    """
    if not isinstance(listed, str):
        return ()
    try:
        found = (_kernel(kind, sizes, node) for kind, sizes in json.loads(listed))
        kernels = tuple(kernel for kernel in found if kernel is not None)
        good = all(0.0 <= size < 1e18 for kernel in kernels for size in kernel.dims.values())
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        good = False
    if not good:
        raise InputError(
            f"node {node.get('name')!r} lists the kernels {listed[:60]!r}, expected JSON with [kind, sizes] of each, "
            'such as [["Linear", [512, 256, 1024]]]; make the table again'
        )
    return kernels


def _kernel(kind: str, sizes: Sequence[Any], node: Mapping[str, Any]) -> Kernel | None:
    if kind == "Linear":
        m, k, n = sizes  # the source's (M, N, K) has N as the contraction
        return Kernel("linear", "linear", {"batch": 1, "m": m, "n": n, "k": k})
    if kind == "BMM":
        batch, m, k, n = sizes
        return Kernel("bmm", "bmm", {"batch": batch, "m": m, "n": n, "k": k})
    if kind == "MEM":
        return _memory([shape for shape in sizes if shape])
    if not kind.startswith("VEC"):
        return None
    op, (rows, cols) = kind[3:], sizes
    if rows * cols <= 1:
        return None
    family, name = {"softmax": ("softmax", "softmax"), "ln": ("norm", "layernorm")}.get(op, ("elementwise", op))
    reads = 1.0
    if op in BINARY_OPS:  # a broadcast or one-element operand is read in part
        inputs = node.get("input_shapes")
        operands = [math.prod(shape) for shape in json.loads(inputs)] if isinstance(inputs, str) else []
        reads = min(max(sum(operands) / (rows * cols), 1.0), 2.0) if isinstance(inputs, str) else 2.0
        if len(operands) == 2 and min(operands) == 1:
            name, reads = f"{op}u", 1.0  # an operator of its own in graphs and sweeps
    if family == "elementwise" and name not in FAMILIES["elementwise"].ops:
        return None
    return Kernel(family, name, {"rows": rows, "cols": cols, "reads": reads, "writes": 1})


def _memory(shapes: Sequence[Sequence[int]]) -> Kernel | None:
    largest = max(shapes, key=math.prod, default=())
    if math.prod(largest) <= 1:
        return None
    passes = sum(math.prod(shape) for shape in shapes) / math.prod(largest)
    dims = {"rows": math.prod(largest[:-1]), "cols": largest[-1], "reads": passes - 1.0, "writes": 1}
    return Kernel("memory", "copy", dims)
