"""Tables with each distinct kernel once: what sums over many machines are taken over."""

from __future__ import annotations

from typing import Any

import numpy as np

from neusight_jax.kernels.table import KernelBatch, KernelTable


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
