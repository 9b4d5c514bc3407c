"""KernelTable: kernels as arrays, one batch per family, in the form the one function takes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neusight_jax.arithmetic import dtype_index
from neusight_jax.errors import InputError
from neusight_jax.kernels.families import FAMILIES, family_of
from neusight_jax.kernels.family import UNPACK, Family, is_traced
from neusight_jax.records import Record, is_known, short

PHASES: tuple[str, ...] = ("forward", "backward", "weight_gradient", "optimizer")
"""Phases of a training step, in the order of `KernelBatch.phase`."""

Launched: TypeAlias = Literal["graph", "host", "eager"]
"""Ways kernels are launched: back to back, as a CUDA graph or an engine does, so that the host takes no time; one after
another by a host, so that none of fp32's families takes less than its launch (`Software.launch_s`); or by the host of a
training framework, with a step's work around them (`model.streams`)."""

MIN_BATCH = 32
"""Smallest padded length of a batch. Up to `FINE_BATCH` lengths are powers of two, so that models share programs."""
FINE_BATCH = 4096
"""Above this, lengths go in eighths of a power of two: at most an eighth of a large table is padding."""


@dataclass(frozen=True)
class Kernel(Record):
    """One kernel launch on the host: a family, an operator of it, and its dims.

    Attributes:
      family: key of `FAMILIES`.
      op: one of the family's operators.
      dims: the family's dims by name; its options may be left out.
      count: how many such launches.
      dtype: of its tensors; "" = that of the table it goes into.
      instead: what runs in its place on a GPU without the arithmetic path it needs; None = nothing does.
      path: that path, where it is not the one of `dtype`.
    """

    family: str
    op: str
    dims: Mapping[str, float]
    count: float = 1.0
    dtype: str = ""
    instead: Kernel | None = None
    path: str = ""

    def on(self, paths: Collection[str], gpus_per_domain: int = 0) -> Kernel:
        """The kernel on a GPU with these arithmetic paths, in domains of so many GPUs with fast links (0 = all in one).

        A message to more ranks than a domain has crosses domains.
        """
        if gpus_per_domain and FAMILIES[self.family].linked:
            domains = -(-self.dims["ranks"] // gpus_per_domain)
            return self if domains <= self.dims["domains"] else replace(self, dims={**self.dims, "domains": domains})
        lacking = self.instead is not None and (self.path or self.dtype) not in paths
        return self.instead if lacking and self.instead is not None else self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelBatch(Record):
    """Kernels of one family as arrays of equal length, NumPy's until they are traced; `count` 0 marks padding.

    Attributes:
      dims: family dims by name, each [kernel].
      op: index into the family's operators.
      dtype: index into `arithmetic.DTYPES`.
      count: launches of this kernel, the repeat of its layer included.
      phase: index into `PHASES`.
      node: position of the graph node, or of the row.
      row: position in the order given by the caller.
    """

    dims: dict[str, Float[Array, " kernel"]]
    op: Int[Array, " kernel"]
    dtype: Int[Array, " kernel"]
    count: Float[Array, " kernel"]
    phase: Int[Array, " kernel"]
    node: Int[Array, " kernel"]
    row: Int[Array, " kernel"]

    def summary(self) -> str:
        """Rows and dims."""
        return f"{self.rows_text()} with {', '.join(self.dims)}"

    def rows_text(self) -> str:
        """Rows that are not padding, in words where they are traced."""
        return f"{self.num_rows:,}" if is_known(self.row) else short(self.row)

    @property
    def num_rows(self) -> int:
        """Rows that are not padding. Host only."""
        return int(np.sum(np.asarray(self.row) >= 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelTable(Record):
    """Kernels of each family there are any of, in the order of `FAMILIES`. Tables of the same families and padded
    lengths share one program.

    Attributes:
      families: a batch for each.
      launched: how its kernels are launched; static.
    """

    families: dict[str, KernelBatch] = field(default_factory=dict)
    launched: Launched = field(default="graph", metadata={"static": True})

    def summary(self) -> str:
        """Kernels of each family."""
        return ", ".join(f"{name} {batch.rows_text()}" for name, batch in self.families.items()) or "no kernels"

    @property
    def num_rows(self) -> int:
        """Rows that are not padding."""
        return sum(batch.num_rows for batch in self.families.values())

    @property
    def networks(self) -> set[str]:
        """Networks that forecast its kernels (`Family.network`)."""
        return {FAMILIES[name].network for name, batch in self.families.items() if batch.num_rows}


def padded_length(rows: int) -> int:
    """Length a batch of `rows` kernels is padded to."""
    power = 1 << max(rows - 1, 0).bit_length()
    if power <= FINE_BATCH:
        return max(MIN_BATCH, power)
    step = power // 16
    return -(-rows // step) * step


def batch_from_columns(
    family: Family,
    ops: Iterable[str],
    dims: Mapping[str, np.ndarray],
    *,
    dtype: np.ndarray,
    count: np.ndarray,
    phase: np.ndarray,
    node: np.ndarray,
    row: np.ndarray,
) -> KernelBatch:
    """A padded batch from host columns of equal length.

    Args:
      family: of all the kernels.
      ops: operator of each kernel, by name.
      dims: columns by dim [kernel]; those of the family's options may be absent.
      dtype: index into `arithmetic.DTYPES` [kernel].
      count: launches [kernel].
      phase: index into `PHASES` [kernel].
      node: position of the graph node, or of the row [kernel].
      row: position in the order given by the caller [kernel].
    Raises: `InputError` for an operator the family has not.
    """
    names = list(ops)
    rows = len(names)
    length = padded_length(rows)
    index = {name: position for position, name in enumerate(family.ops)}
    missing = sorted({name for name in names if name not in index})
    if missing:
        raise InputError(f"family {family.name} has no op {missing[0]!r}; expected one of {', '.join(family.ops)}")

    def pad(values: Any, fill: float, kind: type) -> Any:
        if is_traced(values):
            return jnp.pad(values, (0, length - rows), constant_values=fill)
        out: np.ndarray = np.full(length, fill, kind)
        out[:rows] = values
        return out

    options = {name: dims.get(name, np.full(rows, usual)) for name, usual in family.options}
    sizes = {**{name: dims[name] for name in family.dims}, **options}
    # Padding has sizes of 1: features take logarithms, and a NaN would reach every gradient.
    return KernelBatch(
        dims={name: pad(size, 1.0, np.float32) for name, size in sizes.items()},
        op=pad(np.array([index[name] for name in names], np.int32), 0, np.int32),
        dtype=pad(dtype, 0, np.int32),
        count=pad(count, 0.0, np.float32),
        phase=pad(phase, 0, np.int32),
        node=pad(node, -1, np.int32),
        row=pad(row, -1, np.int32),
    )


def table_from_kernels(
    kernels: Iterable[Kernel],
    *,
    dtype: str = "fp32",
    phase: Iterable[int] | None = None,
    node: Iterable[int] | None = None,
    launched: Launched = "graph",
) -> KernelTable:
    """A `KernelTable` from kernels written down one by one, in order; their sizes and counts may be traced.

    Args:
      kernels: the kernels; `Kernel.count` becomes `KernelBatch.count`.
      dtype: dtype of those that do not say.
      phase, node: per-kernel phase index and node position (default: forward; the kernel's own position).
      launched: how they are launched.
    """
    items = list(kernels)
    dtype_index(dtype)
    phases = np.zeros(len(items), np.int32) if phase is None else np.array(list(phase), np.int32)
    nodes = np.arange(len(items)) if node is None else np.array(list(node), np.int32)
    places: dict[str, list[int]] = {}
    for position, item in enumerate(items):
        if item.family not in FAMILIES:
            raise InputError(f"unknown kernel family {item.family!r}; expected one of {', '.join(FAMILIES)}")
        absent = [dim for dim in FAMILIES[item.family].dims if dim not in item.dims]
        if absent:
            raise InputError(f"kernel {position} of family {item.family} lacks the dim {absent[0]!r}")
        places.setdefault(family_of(item.family, item.dtype or dtype), []).append(position)
    families = {}
    # Families have other dims, so each is a batch of its own, which remembers the places of its kernels in the table.
    for name, family in FAMILIES.items():
        if name not in places:
            continue
        where = places[name]
        usual = dict(family.options)
        families[name] = batch_from_columns(
            family,
            [items[i].op for i in where],
            {dim: _column([items[i].dims.get(dim, usual.get(dim)) for i in where]) for dim in (*family.dims, *usual)},
            dtype=np.array([dtype_index(items[i].dtype or dtype) for i in where], np.int32),
            count=_column([items[i].count for i in where]),
            phase=phases[where],
            node=nodes[where],
            row=np.array(where, np.int32),
        )
    return KernelTable(families, launched)


def _column(sizes: Sequence[Any]) -> Any:
    """Sizes of kernels as one array [kernel]; numbers, or scalars some of which are traced."""
    return jnp.stack([jnp.asarray(size, float) for size in sizes]) if is_traced(*sizes) else np.array(sizes, np.float32)


# Tables with each distinct kernel once: what sums over many machines are taken over.


class Pool:
    """Distinct kernels, each once, in the order they came, with the name of the first node that launches it.

    `launched`: how they are launched.
    """

    def __init__(self, launched: Launched = "graph") -> None:
        self.launched = launched
        self.kernels: list[Kernel] = []
        self.nodes: list[str] = []
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, kernel: Kernel, node: str = "") -> int:
        """Position of a kernel, whose count does not matter."""
        key = (kernel.family, kernel.op, kernel.dtype, tuple(kernel.dims.items()))
        if key not in self._places:
            self._places[key] = len(self.kernels)
            self.kernels.append(replace(kernel, count=1.0))
            self.nodes.append(node)
        return self._places[key]

    def table(self, dtype: str) -> KernelTable:
        """All of them; `dtype`: of those that do not say."""
        return table_from_kernels(self.kernels, dtype=dtype, launched=self.launched)


def by_family(
    table: KernelTable, counts: Float[np.ndarray, "*axes kernel"]
) -> dict[str, Float[np.ndarray, "*axes kernel"]]:
    """Counts in the order of a table's rows as those of its batches, 0 of padding."""
    batches = {}
    for name, batch in table.families.items():
        row = np.asarray(batch.row)
        # Padding has row -1, which would read the last kernel.
        batches[name] = np.where(row >= 0, counts[..., np.maximum(row, 0)], 0.0).astype(np.float32)
    return batches


def plain(table: KernelTable) -> KernelTable:
    """The same kernels without the dim `UNPACK` in families of which it is known that none unpacks: less arithmetic."""

    def of(batch: KernelBatch) -> KernelBatch:
        unpacked = batch.dims.get(UNPACK)
        if not isinstance(unpacked, np.ndarray) or np.any(unpacked[np.asarray(batch.row) >= 0]):
            return batch
        return replace(batch, dims={name: size for name, size in batch.dims.items() if name != UNPACK})

    return replace(table, families={name: of(batch) for name, batch in table.families.items()})


def distinct(table: KernelTable) -> KernelTable:
    """The same launches with equal kernels merged into one row, without padding: the sum is the same, the rows fewer.

    Nodes are forgotten, and phases and operators where the host takes no time (all 0), so only totals make sense.
    Tables no longer share a program, which pays from some hundred machines on.
    """
    # Families have other dims, so equal kernels are looked for in each by itself.
    families, start, kept = {}, 0, table.launched == "eager"
    for name, batch in table.families.items():
        real = np.asarray(batch.count) > 0
        if not real.any():
            continue
        sizes = (np.asarray(size)[real] for size in batch.dims.values())
        marks = (np.asarray(mark)[real] * kept for mark in (batch.op, batch.phase))
        # The host's time goes with phase and operator, so that rows merge across them only where it takes none.
        keys = np.stack([*sizes, *marks, np.asarray(batch.dtype)[real]], 1)
        rows, which = np.unique(keys.astype(np.float64), axis=0, return_inverse=True)
        count = np.bincount(which.ravel(), weights=np.asarray(batch.count, np.float64)[real], minlength=len(rows))
        zeros: Any = np.zeros(len(rows), np.int32)
        columns: Any = rows.T.astype(np.float32)
        counts: Any = count.astype(np.float32)
        position: Any = np.arange(start, start + len(rows), dtype=np.int32)
        families[name] = KernelBatch(
            dims=dict(zip(batch.dims, columns[:-3], strict=True)),
            op=columns[-3].astype(np.int32),
            dtype=columns[-1].astype(np.int32),
            count=counts,
            phase=columns[-2].astype(np.int32),
            node=zeros,
            row=position,
        )
        start += len(rows)
    return KernelTable(families, table.launched)


def merged(batch: KernelBatch, phases: bool = False) -> KernelBatch:
    """The same launches with equal kernels merged into the first rows; the others follow with count 0. Traced.

    Nodes and rows are forgotten (0), and phases unless they are to be kept.
    """
    phase = jnp.asarray(batch.phase) if phases else jnp.zeros_like(batch.phase)
    columns = (batch.count <= 0, *batch.dims.values(), phase, batch.op, batch.dtype)
    # Sorted, as shapes are fixed under `jit`: equal rows lie together, and padding comes last.
    *keys, count = jax.lax.sort((*map(jnp.asarray, columns), jnp.asarray(batch.count)), num_keys=len(columns))
    differs = functools.reduce(jnp.logical_or, (key[1:] != key[:-1] for key in keys))
    place = jnp.cumsum(jnp.pad(differs, (1, 0)))

    def placed(key: Array) -> Array:
        return jnp.ones_like(key).at[place].set(key)

    _, *sizes, phase, op, dtype = (placed(key) for key in keys)
    none = jnp.zeros_like(op)
    return KernelBatch(
        dims=dict(zip(batch.dims, sizes, strict=True)),
        op=op,
        dtype=dtype,
        count=jnp.zeros_like(count).at[place].add(count),
        phase=phase,
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
