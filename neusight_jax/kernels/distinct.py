"""Tables with each distinct kernel once: what sums over many machines are taken over."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from neusight_jax.kernels.table import Kernel, KernelBatch, KernelTable, table_from_kernels


class Pool:
    """Distinct kernels, each once, in the order they came."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, kernel: Kernel) -> int:
        """Position of a kernel, whose count does not matter."""
        key = (kernel.family, kernel.op, kernel.dtype, tuple(kernel.dims.items()))
        if key not in self._places:
            self._places[key] = len(self.kernels)
            self.kernels.append(replace(kernel, count=1.0))
        return self._places[key]

    def table(self, dtype: str) -> KernelTable:
        """All of them; `dtype`: of those that do not say."""
        return table_from_kernels(self.kernels, dtype=dtype)


def distinct(table: KernelTable) -> KernelTable:
    """The same launches with equal kernels merged into one row, without padding: the sum is the same, the rows fewer.

    Nodes and phases are forgotten (`node`, `phase` and `op` are 0), so only totals make sense. Tables no longer share a
    program, which pays from some hundred machines on.
    """
    families, start = {}, 0
    for name, batch in table.families.items():
        real = np.asarray(batch.count) > 0
        if not real.any():
            continue
        sizes = (np.asarray(size)[real] for size in batch.dims.values())
        keys = np.stack([*sizes, np.asarray(batch.dtype)[real]], 1)
        rows, which = np.unique(keys.astype(np.float64), axis=0, return_inverse=True)
        count = np.bincount(which.ravel(), weights=np.asarray(batch.count, np.float64)[real], minlength=len(rows))
        zeros: Any = np.zeros(len(rows), np.int32)
        columns: Any = rows.T.astype(np.float32)
        counts: Any = count.astype(np.float32)
        position: Any = np.arange(start, start + len(rows), dtype=np.int32)
        families[name] = KernelBatch(
            dims=dict(zip(batch.dims, columns[:-1], strict=True)),
            op=zeros,
            dtype=columns[-1].astype(np.int32),
            count=counts,
            phase=zeros,
            node=zeros,
            row=position,
        )
        start += len(rows)
    return KernelTable(families)


def merged(batch: KernelBatch) -> KernelBatch:
    """The same launches with equal kernels merged into the first rows; the others follow with count 0. Traced.

    Nodes, phases and rows are forgotten (0).
    """
    columns = (batch.count <= 0, *batch.dims.values(), batch.op, batch.dtype)
    *keys, count = jax.lax.sort((*map(jnp.asarray, columns), jnp.asarray(batch.count)), num_keys=len(columns))
    differs = functools.reduce(jnp.logical_or, (key[1:] != key[:-1] for key in keys))
    place = jnp.cumsum(jnp.pad(differs, (1, 0)))

    def placed(key: Array) -> Array:
        return jnp.ones_like(key).at[place].set(key)

    _, *sizes, op, dtype = (placed(key) for key in keys)
    none = jnp.zeros_like(op)
    return KernelBatch(
        dims=dict(zip(batch.dims, sizes, strict=True)),
        op=op,
        dtype=dtype,
        count=jnp.zeros_like(count).at[place].add(count),
        phase=none,
        node=none,
        row=none,
    )


def in_chunks(batch: KernelBatch, rows: int) -> KernelBatch:
    """A batch with columns [chunk, row], so many rows each; count 0 fills the last."""
    length = len(batch.row)
    rows = min(rows, length)
    missing = -length % rows

    def cut(column: Array) -> Array:
        return jnp.pad(column, (0, missing), mode="edge").reshape(-1, rows)

    whole: KernelBatch = jax.tree.map(cut, batch)
    return replace(whole, count=jnp.pad(batch.count, (0, missing)).reshape(-1, rows))
