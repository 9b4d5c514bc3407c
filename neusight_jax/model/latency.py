"""The one function: seconds of kernels on a machine, for forecasts, sweeps, gradients and training alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, KernelBatch, KernelTable, in_chunks, merged
from neusight_jax.model.power import (
    Draw,
    PowerLaw,
    Settled,
    at_clock,
    draw_of,
    draw_of_step,
    is_limited,
    power_law,
    settle,
    with_gaps,
)
from neusight_jax.model.predictor import KernelTerms, Predictor, RooflinePredictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Isolated, Relaxation, relaxation_switch
from neusight_jax.model.software import LEARNED
from neusight_jax.model.streams import by_phase, host_seconds, step_seconds, stream_seconds


def kernel_terms(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> dict[str, KernelTerms]:
    """Latency, bounds and launch share of every kernel, by family; pure and not jitted itself.

    Kernels of a family the predictor does not cover get NaN seconds; collectives those of the sheet's rates.

    Args:
      predictor: weights.
      machine: GPU or cluster; figures are scalars, or arrays [kernel].
      kernels: a table, padding rows included.
      isolated: as of `kernel_latency`.
      relaxation: as of `kernel_latency`.
    """
    terms = {}
    for name, batch in kernels.families.items():
        family = FAMILIES[name]
        device = machine if family.linked else gpu_of(machine)
        if predictor.covers(family):
            terms[name] = predictor.terms(family, device, batch, isolated=isolated, relaxation=relaxation)
        else:
            bound = RooflinePredictor().terms(family, device, batch, isolated=isolated)
            nothing = replace(bound, seconds=jnp.full_like(bound.seconds, jnp.nan))
            terms[name] = bound if family.linked else nothing
        if kernels.launched == "host":
            waited_s = jnp.where(jnp.asarray(isolated, bool), 0.0, LEARNED.launch_s)
            terms[name] = terms[name].at_least(waited_s)
    return terms


def uncovered(predictor: Predictor, kernels: KernelTable) -> dict[str, int]:
    """Families a predictor does not cover, and how many kernels of them a table holds; traced tables and collectives,
    which go by the rates of the sheet, pass."""
    batches = {name: batch for name, batch in kernels.families.items() if not isinstance(batch.row, jax.core.Tracer)}
    return {
        name: batch.num_rows
        for name, batch in batches.items()
        if not (predictor.covers(FAMILIES[name]) or FAMILIES[name].linked) and batch.num_rows
    }


def require_covered(predictor: Predictor, kernels: KernelTable) -> None:
    """`InputError` when a table holds kernels of a family the predictor does not cover; traced tables pass."""
    for name, number in uncovered(predictor, kernels).items():
        raise InputError(
            f"the predictor was not trained on {name}, and the table holds {number} kernels of it; "
            "leave them out or take a checkpoint that has all families, such as tensorcore"
        )


_Machine = TypeVar("_Machine", bound=GPU | Cluster)
BLOCK = 4096
"""Rows of a family at a time: what lies between two steps of a forecast then stays in the caches of a core."""
MACHINES = 1024
"""Machines at a time, for the same reason."""
ROWS = 4
"""Rows at a time where there are that many machines; as many times more as there are fewer of them."""


def _all_kernels(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> dict[str, Float[Array, " kernel"]]:
    def seconds(machine: Machine, block: KernelTable, isolated: Isolated) -> Array:
        (term,) = kernel_terms(predictor, machine, block, isolated=isolated, relaxation=relaxation).values()
        return term.seconds

    return {
        name: _in_blocks(
            seconds, len(batch.row), BLOCK, machine, KernelTable({name: batch}, kernels.launched), isolated
        )
        for name, batch in kernels.families.items()
    }


def _in_blocks(run: Callable[..., Array], rows: int, most: int, *arguments: Any) -> Array:
    """`run(*arguments)` [rows], at most so many rows at a time; leaves that are arrays [rows] are cut.

    Every block takes its rows from all over, so that rows that lie on several devices keep all of them busy.
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

    def of_block(block: list[Array]) -> Array:
        slices = iter(block)
        merged = [next(slices) if is_cut else leaf for leaf, is_cut in zip(leaves, cut, strict=True)]
        return run(*jax.tree.unflatten(tree, merged))

    seconds: Array = jnp.moveaxis(jax.lax.map(of_block, parts), 0, 1)
    return seconds.reshape(-1, *seconds.shape[2:])[:rows]


_kernel_latency = jax.jit(_all_kernels)
_kernel_latency_once = one_shot(_all_kernels)


def plain_sum(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> Array:
    """Σ count · latency of a table row by row, on one machine; what `latency` sums faster on many.

    Args:
      predictor: weights; it covers all families of the table.
      machine: GPU or cluster, scalars.
      kernels: a table; rows of count 0 add nothing.
      relaxation: as of `kernel_latency`, None for 0.
      isolated: as of `kernel_latency`.
    Returns: seconds; of kernels that a host launches one by one the sum of each phase [phase], with what software adds.
    """
    total = _nothing(kernels)
    for name, seconds in _kernel_latency(predictor, machine, kernels, relaxation, isolated).items():
        batch = kernels.families[name]
        seconds = jnp.where(batch.count > 0, seconds, 0.0)
        if kernels.launched == "eager":
            total = total + by_phase(batch) @ step_seconds(gpu_of(machine), name, batch, seconds, LEARNED)
        else:
            total = total + jnp.sum(seconds * batch.count)
    return total


def _nothing(kernels: KernelTable) -> Array:
    """The sum of no kernels: one number, or one a phase."""
    return jnp.zeros(len(PHASES) if kernels.launched == "eager" else ())


def _sum_of_chunks(
    predictor: Predictor, machine: Machine, chunks: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> Array:
    """`plain_sum` over columns [chunk, row], of the chunks that launch anything; those come first."""
    total = _nothing(chunks)
    for name, batch in chunks.families.items():

        def add(place: Array, total: Array, name: str = name, batch: KernelBatch = batch) -> Array:
            """Add the seconds of one chunk.

            Args:
              place: of the chunk.
              total: sum so far.
              name: family; bound here, as the loop changes it.
              batch: its chunks, likewise.
            """
            chunk = KernelTable({name: jax.tree.map(lambda column: column[place], batch)}, chunks.launched)
            return total + plain_sum(predictor, machine, chunk, relaxation, isolated)

        total = jax.lax.fori_loop(0, jnp.sum(jnp.any(batch.count > 0, axis=1)), add, total)
    return total


_batching_sum = jax.custom_batching.custom_vmap(plain_sum)
_differentiable_sum = jax.custom_jvp(_batching_sum)


@_batching_sum.def_vmap
def _many_sums(size: int, batched: Sequence[Any], *arguments: Any) -> tuple[Array, bool]:
    """Sums of one table on many machines: each distinct kernel once, machines in blocks. Other batches as they come."""
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
    predictor, machine, kernels, relaxation, isolated = arguments
    machines = (machine, relaxation, isolated)
    scalars = all(
        jnp.ndim(leaf) <= is_batched
        for leaf, is_batched in zip(jax.tree.leaves(machines), jax.tree.leaves((batched[1], *batched[3:])), strict=True)
    )
    if not scalars or any(jax.tree.leaves((batched[0], batched[2]))):
        return jax.vmap(plain_sum, in_axes=axes)(*arguments), True
    blocks = -(-size // MACHINES)
    rows = ROWS * MACHINES // -(-size // blocks)
    batches = {name: batch for name, batch in kernels.families.items() if len(batch.row)}
    phases = kernels.launched == "eager"
    chunks = KernelTable(
        {name: in_chunks(merged(batch, phases), rows) for name, batch in batches.items()}, kernels.launched
    )

    def block(machine: Machine, relaxation: Any, isolated: Any) -> Array:
        return jax.vmap(_sum_of_chunks, in_axes=(None, axes[1], None, *axes[3:]))(
            predictor, machine, chunks, relaxation, isolated
        )

    return _in_blocks(block, size, MACHINES, *machines), True


@functools.partial(_differentiable_sum.defjvp, symbolic_zeros=True)
def _slope(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Derivatives of the plain sum, along what moves."""
    leaves, tree = jax.tree.flatten(primals)
    steps = jax.tree.leaves(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    place = [at for at, step in enumerate(steps) if not isinstance(step, SymbolicZero)]

    def along(*moving: Array) -> Array:
        changed = dict(zip(place, moving, strict=True))
        return plain_sum(*jax.tree.unflatten(tree, [changed.get(at, leaf) for at, leaf in enumerate(leaves)]))

    value, slope = jax.jvp(along, tuple(leaves[at] for at in place), tuple(steps[at] for at in place))
    return value, slope


@jax.jit
def _latency(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> Array:
    total: Array = _differentiable_sum(predictor, machine, kernels, relaxation, isolated)
    if kernels.launched == "eager":
        return stream_seconds(total, host_seconds(kernels, LEARNED), LEARNED)
    return total


def _switches(relaxation: Relaxation, isolated: Isolated) -> tuple[Relaxation, Array]:
    """Both as programs take them (`roofline.relaxation_switch`)."""
    return relaxation_switch(relaxation), jnp.asarray(isolated, dtype=float)


def kernel_latency(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> dict[str, Float[Array, " kernel"]]:
    """Seconds of one launch of every kernel, by family (padding rows included).

    Args:
      predictor: weights.
      machine: GPU or cluster; scalars (`jax.vmap` for many machines), or arrays [kernel].
      kernels: a table.
      isolated: True = as a sweep measures a kernel alone, launch floor included; False = inside a running model.
      relaxation: 0 = exact; > 0 smooths `ceil` in the wave count (`roofline.whole_waves` states the bias).
    Returns: family -> seconds [kernel]. A GPU without the kernel's arithmetic path gives infinity.
    Gradients: reach predictor and GPU; at relaxation 0 the wave count is a step function of the SM count.
    """
    require_covered(predictor, kernels)
    machine, switches = on_device(machine), _switches(relaxation, isolated)
    if is_limited(machine):
        clocks = {name: state.clock for name, state in _settled_kernels(predictor, machine, kernels, *switches).items()}
        return {
            name: _kernel_latency(
                predictor,
                at_clock(machine, clock),
                KernelTable({name: kernels.families[name]}, kernels.launched),
                *switches,
            )[name]
            for name, clock in clocks.items()
        }
    seconds: dict[str, Array] = _kernel_latency(predictor, machine, kernels, *switches)
    return seconds


def latency(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> Float[Array, ""]:
    """Seconds of all kernels one after another: Σ count · latency.

    Kernels that a host launches one by one (`KernelTable.launched`, the training steps of decoders) take no less than
    their launches, and what software adds to them (`streams`).

    `jax.grad(latency, argnums=1)` is a GPU of derivatives; `jax.vmap(latency, in_axes=(None, 0, None))` forecasts many
    machines with one program. Tables of the same families and padded lengths share a program too.

    Args: as of `kernel_latency`; its gradients too.
    """
    require_covered(predictor, kernels)
    machine, switches = on_device(machine), _switches(relaxation, isolated)
    if is_limited(machine):
        machine = at_clock(
            machine, settled(predictor, machine, kernels, isolated=isolated, relaxation=relaxation).clock
        )
    seconds: Array = _latency(predictor, machine, kernels, *switches)
    return seconds


# Power: where a board settles under a cap or a locked clock, and what it draws (`model.power`).

CLOCKS: tuple[float, ...] = (0.1, 0.25, 0.45, 0.7, 1.0)
"""Clocks, over the stock one, that work is forecast at; between them seconds are powers of the clock."""


def _unlimited(machine: _Machine) -> _Machine:
    """The machine without cap or lock."""
    return at_clock(machine, 1.0) if is_limited(machine) else machine


def slower_by(seconds: Float[Array, "clock ..."]) -> Callable[[Array], Array]:
    """Slowdown of work at a clock over the stock one, from its seconds at `CLOCKS`."""
    at, logs = jnp.log(jnp.array(CLOCKS)), jnp.log(jnp.maximum(seconds, 1e-30))
    logs = logs - logs[-1]

    def slower(clock: Array) -> Array:
        place = jnp.log(clock)
        pieces = [
            logs[knot] + (logs[knot + 1] - logs[knot]) * (place - at[knot]) / (at[knot + 1] - at[knot])
            for knot in range(len(CLOCKS) - 1)
        ]
        log_ratio = pieces[0]
        for knot, piece in enumerate(pieces[1:], 1):
            log_ratio = jnp.where(place > at[knot], piece, log_ratio)
        return jnp.exp(log_ratio)

    return slower


def _settled_kernels(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> dict[str, Settled]:
    """Where a board settles that runs one kernel again and again, by family [kernel]."""
    gpu, law, states = gpu_of(machine), power_law(predictor), {}
    every = [_kernel_latency(predictor, at_clock(machine, clock), kernels, relaxation, isolated) for clock in CLOCKS]
    for name, batch in kernels.families.items():
        seconds = jnp.stack([times[name] for times in every])
        draw = with_gaps(law, draw_of(law, gpu, name, batch, seconds[-1]), isolated)
        states[name] = settle(law, gpu, draw, slower_by(seconds))
    return states


_settled_kernels_once = jax.jit(_settled_kernels)


def step_draw(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    seconds: Array,
    counts: Mapping[str, Float[Array, " kernel"]] | None = None,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> Draw:
    """Draw of all kernels of a step together, of one GPU.

    Args:
      seconds: of the step; counts: how often each kernel runs, None = as the table says.
    """
    machine = _unlimited(on_device(machine))
    of_one = _kernel_latency(predictor, machine, kernels, *_switches(relaxation, isolated))
    of_table = {name: jnp.asarray(batch.count) for name, batch in kernels.families.items()}
    drawn: Draw = _draw_of_step_once(
        power_law(predictor), gpu_of(machine), kernels, of_one, of_table if counts is None else counts, seconds
    )
    return drawn


_draw_of_step_once = jax.jit(draw_of_step)


def settled(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> Settled:
    """Where a board settles that runs a table's kernels one after another: they share one clock.

    Args: as `kernel_latency`.
    """
    options: dict[str, Any] = {"isolated": isolated, "relaxation": relaxation}
    machine = on_device(machine)
    return settled_step(
        power_law(predictor),
        lambda held: latency(predictor, held, kernels, **options),
        lambda seconds: step_draw(predictor, machine, kernels, seconds, **options),
        machine,
    )


def settled_step(
    law: PowerLaw, seconds_of: Callable[[Machine], Array], draw_in: Callable[[Array], Draw], machine: Machine
) -> Settled:
    """Where the boards of a step settle.

    Args:
      law: of their power.
      seconds_of: seconds of the step on a machine without cap or lock; draw_in: what it takes in so many seconds.
    """
    clocks = CLOCKS if is_limited(machine) else CLOCKS[-1:]
    seconds = jnp.stack([seconds_of(at_clock(machine, clock)) for clock in clocks])
    state: Settled = _settled_of_step(law, gpu_of(machine), draw_in(seconds[-1]), seconds)
    return state


@jax.jit
def _settled_of_step(law: PowerLaw, gpu: GPU, draw: Draw, seconds: Float[Array, " clock"]) -> Settled:
    return settle(law, gpu, draw, slower_by(seconds))


def predict_kernels_power(
    predictor: Predictor,
    machine: Machine,
    table: KernelTable,
    *,
    isolated: Isolated = True,
    relaxation: Relaxation = 0.0,
) -> Float[np.ndarray, " row"]:
    """Mean watts of a board that runs one kernel of a table again and again, in the order of its file.

    Args: as `predict_kernels`.
    Returns: float32 [rows], between static power and the limit of the board.
    """
    require_covered(predictor, table)
    states = _settled_kernels_once(predictor, on_device(machine), table, *_switches(relaxation, isolated))
    return in_row_order(table, {name: np.asarray(state.power_w) for name, state in states.items()})


def predict_kernels(
    predictor: Predictor,
    machine: Machine,
    table: KernelTable,
    *,
    isolated: Isolated = True,
    relaxation: Relaxation = 0.0,
) -> Float[np.ndarray, " row"]:
    """Seconds of one launch per row of a table, in the order of its file.

    Args: as `kernel_latency`; `isolated` defaults to True, as a kernel sweep measures.
    Returns: float32 [rows].
    """
    require_covered(predictor, table)
    if is_limited(machine):
        held = kernel_latency(predictor, machine, table, isolated=isolated, relaxation=relaxation)
        return in_row_order(table, {name: np.asarray(values) for name, values in held.items()})
    # Of a small table compiling takes longer than running, so its program is compiled plainly.
    short = all(len(batch.row) <= BLOCK for batch in table.families.values())
    run = _kernel_latency_once if short else _kernel_latency
    seconds = run(predictor, on_device(machine), table, *_switches(relaxation, isolated))
    return in_row_order(table, {name: np.asarray(values) for name, values in seconds.items()})


def in_row_order(table: KernelTable, values: Mapping[str, np.ndarray]) -> np.ndarray[Any, np.dtype[Any]]:
    """Per-family arrays as one array in the caller's row order, padding dropped."""
    rows = [np.asarray(batch.row) for batch in table.families.values()]
    out = np.zeros(table.num_rows, np.result_type(*values.values()) if values else np.float32)
    for row, name in zip(rows, table.families, strict=True):
        real = row >= 0
        out[row[real]] = values[name][: len(row)][real]
    return out
