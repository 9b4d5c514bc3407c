"""Batches: a sum over a table, of many machines or of many tables, in blocks that stay in the caches of a core.

Two cases of one rule (`fast_on_many`). Of one table on many machines each distinct kernel is forecast once. Many tables
of equal padded lengths are one long table [table × row], whose rows that launch anything are forecast block by block
and summed by table; of equal kernels in several tables each is forecast.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool

from neusight_jax.hardware.cluster import Machine
from neusight_jax.kernels.table import KernelBatch, KernelTable, in_chunks, merged, plain
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot

BLOCK = 4096
"""Rows of a family at a time: what lies between two steps of a forecast then stays in the caches of a core."""
TABLE_ROWS = 512
"""Rows of a family at a time where they are of many tables: fewer, as the last block is filled up."""
MACHINES = 1024
"""Machines at a time, for the reason of `BLOCK`."""
FEW = 2048
"""Machines, or tables, up to which all together take less time than compiling for speed."""
ROWS = 1
"""Rows at a time where there are that many machines; as many times more as there are fewer of them."""


def in_blocks(run: Callable[..., Any], rows: int, most: int, *arguments: Any) -> Any:
    """`run(*arguments)` [rows], at most so many rows at a time; leaves that are arrays [rows] are cut.

    Every block takes its rows from all over, so that rows that lie on several devices keep all of them busy.

    Args:
      run: of the arguments, cut or whole.
      rows: there are in all.
      most: of a block.
      *arguments: records of arrays.
    """
    blocks = -(-rows // most)
    if blocks <= 1:
        return run(*arguments)
    size = -(-rows // blocks)
    leaves, tree = jax.tree.flatten(arguments)
    cut = [jnp.ndim(leaf) > 0 and jnp.shape(leaf)[0] == rows for leaf in leaves]
    parts = [
        jnp.pad(leaf, (0, blocks * size - rows), mode="edge").reshape(size, blocks).T
        for leaf, is_cut in zip(leaves, cut, strict=True)
        if is_cut
    ]

    def of_block(block: list[Array]) -> Any:
        slices = iter(block)
        merged = [next(slices) if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
        return run(*jax.tree.unflatten(tree, merged))

    def joined(of_blocks: Array) -> Array:
        return jnp.moveaxis(of_blocks, 0, 1).reshape(-1, *of_blocks.shape[2:])[:rows]

    return jax.tree.map(joined, jax.lax.map(of_block, parts))


def over_chunks(
    of_table: Callable[..., Any], predictor: Predictor, machine: Machine, chunks: KernelTable, *how: Any
) -> Any:
    """A sum over a table from columns [chunk, row], of the chunks that launch anything; those come first.

    Args:
      of_table: as of `fast_on_many`, or of a batch of machines.
      predictor: weights.
      machine: as of `of_table`.
      chunks: a table cut by `table.in_chunks`.
      *how: relaxation and isolated, likewise.
    """
    # A loop with as many turns as there are chunks in use: one program serves tables of any length.
    total = of_table(predictor, machine, replace(chunks, families={}), *how)
    for name, batch in chunks.families.items():

        def add(place: Array, total: Any, name: str = name, batch: KernelBatch = batch) -> Any:
            """Add one chunk.

            Args:
              place: of the chunk.
              total: sum so far.
              name: family; bound here, as the loop changes it.
              batch: its chunks, likewise.
            """
            chunk = replace(chunks, families={name: jax.tree.map(lambda column: column[place], batch)})
            return jax.tree.map(jnp.add, total, of_table(predictor, machine, chunk, *how))

        total = jax.lax.fori_loop(0, jnp.sum(jnp.any(batch.count > 0, axis=1)), add, total)
    return total


def _over_tables(of_table: Callable[..., Any], size: int, batched: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """A sum over each of many tables [table], in blocks of rows that launch anything.

    Args:
      of_table: as of `fast_on_many`.
      size: how many tables.
      batched: which leaves of the arguments have a leading axis [table].
      arguments: of `of_table`; all but the predictor may have that axis.
    """
    predictor, machine, kernels, *how = arguments
    nothing = of_table(predictor, machine, replace(kernels, families={}), *how)
    totals = jax.tree.map(lambda zero: jnp.zeros((size, *zero.shape), zero.dtype), nothing)
    one, marks = (machine, *how), (batched[1], *batched[3:])
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, marks)
    for name, batch in kernels.families.items():
        # Rows of all tables stand in one column, so that a table with few kernels does not pay for the longest.
        lanes: KernelBatch = batched[2].families[name]
        rows = jnp.shape(batch.row)[-1]
        long: KernelBatch = jax.tree.map(
            lambda column, is_batched: jnp.ravel(column) if is_batched else jnp.tile(column, size), batch, lanes
        )

        def of_rows(machine: Machine, row: KernelBatch, *how: Any, name: str = name) -> Any:
            return of_table(predictor, machine, replace(kernels, families={name: row}), *how)

        def sums(place: Array, on: Array, long: KernelBatch = long, rows: int = rows, of_rows: Any = of_rows) -> Any:
            """Tables, and what some rows add to them; each row is a table of its own.

            Args:
              place: of the rows among all [row].
              on: 1 of those to count, 0 of others [row].
              long: all rows; bound here, as the loop changes it.
              rows: of one table, likewise.
              of_rows: sum over one row, likewise.
            """
            table = place // rows
            row: KernelBatch = jax.tree.map(lambda column: column[place][:, None], long)
            row = replace(row, count=row.count * on[:, None])
            on_each = jax.tree.map(lambda leaf, is_batched: leaf[table] if is_batched else leaf, one, marks)
            return table, jax.vmap(of_rows, in_axes=(axes[0], 0, *axes[1:]))(on_each[0], row, *on_each[1:])

        totals = _by_blocks(sums, totals, long.count > 0)
    return totals


def _by_blocks(sums: Callable[[Array, Array], tuple[Array, Any]], totals: Any, launches: Bool[Array, " row"]) -> Any:
    """Totals of tables with what their rows add, a block of rows at a time; of rows that launch nothing none is asked.

    Args:
      sums: of places of rows, and whether each counts, tables and what is added to them [row].
      totals: so far [table].
      launches: which rows launch anything.
    """
    # Padding is most of a stack of small tables.
    length, number = len(launches), jnp.sum(launches)
    block = min(TABLE_ROWS, length)
    places = jnp.pad(jnp.nonzero(launches, size=length, fill_value=0)[0], (0, -length % block))

    def add(at: Array, totals: Any) -> Any:
        start = at * block
        place = jax.lax.dynamic_slice(places, (start,), (block,))
        table, parts = sums(place, jnp.asarray(start + jnp.arange(block) < number, float))
        return jax.tree.map(lambda total, part: total.at[table].add(part), totals, parts)

    return jax.lax.fori_loop(0, -(-number // block), add, totals)


def fast_on_many(of_table: Callable[..., Any]) -> Callable[..., Any]:
    """A sum over a table that takes many machines, and many tables, in blocks. Other batches as they come.

    A primitive of JAX: where all arguments are known, a batch of them runs as a program of `programs.one_shot`.

    Args:
      of_table: of predictor, machine, kernels, relaxation, isolated; additive over the rows of the table. Returns
        arrays in tuples and lists.
    """
    primitive: Any = Primitive(of_table.__name__)
    primitive.multiple_results = True
    asked: Counter[tuple[Any, ...]] = Counter()

    def flat(whole: Callable[..., Any]) -> Callable[..., list[Array]]:
        return lambda *leaves, tree: jax.tree.leaves(whole(*jax.tree.unflatten(tree, leaves)))

    def batched(leaves: Sequence[Any], axes: Sequence[Any], *, tree: Any) -> tuple[list[Array], list[int]]:
        moved = [jnp.moveaxis(leaf, axis, 0) if axis else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        marks = tuple(axis is not None for axis in axes)
        known = not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if known:
            asked[tree, marks] += next(len(leaf) for leaf, mark in zip(moved, marks, strict=True) if mark)
        sums = _of_many(of_table, tree, marks, known and asked[tree, marks] <= FEW)
        out = jax.tree.leaves(sums(*jax.tree.unflatten(tree, moved)))
        return out, [0] * len(out)

    primitive.def_impl(flat(one_shot(of_table)))
    primitive.def_abstract_eval(
        lambda *leaves, tree: [
            jax.core.ShapedArray(out.shape, out.dtype)
            for out in jax.tree.leaves(_nothing(of_table, jax.tree.unflatten(tree, leaves)))
        ]
    )
    mlir.register_lowering(primitive, mlir.lower_fun(flat(jax.jit(of_table)), multiple_results=True))
    batching.primitive_batchers[primitive] = batched
    structures: dict[Any, Any] = {}

    def run(predictor: Predictor, machine: Machine, kernels: KernelTable, *how: Any) -> Any:
        arguments = predictor, machine, plain(kernels), *how
        leaves, tree = jax.tree.flatten(arguments)
        if tree not in structures:
            structures[tree] = jax.tree.structure(_nothing(of_table, arguments))
        return jax.tree.unflatten(structures[tree], primitive.bind(*leaves, tree=tree))

    return run


def _nothing(of_table: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Shapes of the sum over a table, which are those of no kernels.

    Args:
      of_table: as of `fast_on_many`; arguments: its own.
    """
    predictor, machine, kernels, *how = arguments
    return jax.eval_shape(of_table, predictor, machine, replace(kernels, families={}), *how)


@functools.cache
def _of_many(of_table: Callable[..., Any], tree: Any, marks: tuple[bool, ...], few: bool) -> Callable[..., Any]:
    """The program of a sum over a table on a batch.

    Args:
      of_table: as of `fast_on_many`.
      tree: of its arguments.
      marks: which leaves have a leading axis of the batch.
      few: whether it compiles fast, or runs fast.
    """
    batched = jax.tree.unflatten(tree, marks)
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)

    def many(*arguments: Any) -> Any:
        predictor, machine, kernels, relaxation, isolated = arguments
        size = next(len(leaf) for leaf, mark in zip(jax.tree.leaves(arguments), marks, strict=True) if mark)
        machines = (machine, relaxation, isolated)
        flags = jax.tree.leaves((batched[1], *batched[3:]))
        scalars = all(jnp.ndim(leaf) <= mark for leaf, mark in zip(jax.tree.leaves(machines), flags, strict=True))
        if not scalars or any(jax.tree.leaves(batched[0])):
            return jax.vmap(of_table, in_axes=axes)(*arguments)
        if any(jax.tree.leaves(batched[2])):
            return _over_tables(of_table, size, batched, arguments)
        blocks = -(-size // MACHINES)
        rows = ROWS * MACHINES // -(-size // blocks)
        batches = {name: batch for name, batch in kernels.families.items() if len(batch.row)}
        phases = kernels.launched == "eager"
        chunks = {name: in_chunks(merged(batch, phases), rows) for name, batch in batches.items()}

        on_each = jax.vmap(of_table, in_axes=(None, axes[1], None, *axes[3:]))

        def block(machine: Machine, *how: Any) -> Any:
            return over_chunks(on_each, predictor, machine, replace(kernels, families=chunks), *how)

        return in_blocks(block, size, MACHINES, *machines)

    return one_shot(many, (of_table.__name__, marks), plainly=few)
