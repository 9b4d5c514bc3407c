"""The one function: seconds of kernels on a machine, for forecasts, sweeps, gradients and training alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import AnyMachine, Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import RELAXATION
from neusight_jax.kernels.table import PHASES, KernelBatch, KernelTable, in_chunks, merged
from neusight_jax.model.batching import BLOCK, ROWS, fast_on_many, in_blocks
from neusight_jax.model.power import (
    CLOCKS,
    Draw,
    PowerLaw,
    Settled,
    at_clock,
    draw_of,
    draw_of_step,
    is_limited,
    power_law,
    settle,
    slower_by,
    with_gaps,
)
from neusight_jax.model.predictor import KernelForecast, Predictor, RooflinePredictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Isolated, Relaxation, relaxation_switch
from neusight_jax.model.software import LEARNED
from neusight_jax.model.streams import by_phase, host_seconds, step_seconds, stream_seconds


def kernel_forecasts(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> dict[str, KernelForecast]:
    """Latency, bounds and launch share of every kernel, by family; pure and not jitted itself.

    Kernels of a family the predictor does not cover get NaN seconds; collectives those of the sheet's rates.

    Args:
      predictor: weights.
      machine: GPU or cluster; figures are scalars, or arrays [kernel].
      kernels: a table, padding rows included.
      isolated: as of `kernel_latency`.
      relaxation: as of `kernel_latency`.
    """
    forecasts = {}
    for name, batch in kernels.families.items():
        family = FAMILIES[name]
        device, batch = machine if family.linked else gpu_of(machine), _relaxed(batch, relaxation)
        if predictor.covers(family):
            forecasts[name] = predictor.forecast_kernels(
                family, device, batch, isolated=isolated, relaxation=relaxation
            )
        else:
            bound = RooflinePredictor().forecast_kernels(family, device, batch, isolated=isolated)
            nothing = replace(bound, seconds=jnp.full_like(bound.seconds, jnp.nan))
            forecasts[name] = bound if family.linked else nothing
        if kernels.launched == "host" and not family.tensor_core:
            waited_s = jnp.where(jnp.asarray(isolated, bool), 0.0, LEARNED.launch_s)
            forecasts[name] = forecasts[name].at_least(waited_s)
    return forecasts


def _relaxed(batch: KernelBatch, relaxation: Relaxation) -> KernelBatch:
    """Kernels whose tiles, blocks, splits and padding are relaxed as waves are (`kernels.family.whole`)."""
    relaxation = relaxation_switch(relaxation)
    if relaxation is None:
        return batch
    count = jnp.asarray(batch.count)
    share = jnp.broadcast_to(jnp.asarray(relaxation, count.dtype), count.shape)
    return replace(batch, dims={**batch.dims, RELAXATION: share})


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


def _all_kernels(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> dict[str, Float[Array, " kernel"]]:
    def seconds(machine: Machine, block: KernelTable, isolated: Isolated) -> Array:
        (term,) = kernel_forecasts(predictor, machine, block, isolated=isolated, relaxation=relaxation).values()
        return term.seconds

    return {
        name: in_blocks(seconds, len(batch.row), BLOCK, machine, KernelTable({name: batch}, kernels.launched), isolated)
        for name, batch in kernels.families.items()
    }


_kernel_latency = jax.jit(_all_kernels)
_kernel_latency_once = one_shot(_all_kernels)


def _step_rows(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> dict[str, Float[Array, " kernel"]]:
    """Seconds that one launch of every kernel adds to a step, by family.

    Args: as of `plain_sum`, or a machine of arrays [kernel].
    """
    # Not the compiled function: a program within a program is traced once more for slopes, or a batch, than its parts.
    rows: dict[str, Array] = _all_kernels(predictor, machine, kernels, relaxation, isolated)
    if kernels.launched == "eager":
        return step_seconds(gpu_of(machine), kernels, rows, LEARNED)
    return rows


def _launched(kernels: KernelTable, name: str, rows: Float[Array, "kernel ..."]) -> Array:
    """Sum over the launches of a family; where a host launches them one by one that of each phase [phase, ...]."""
    batch = kernels.families[name]
    count = jnp.asarray(batch.count).reshape(-1, *(1,) * (rows.ndim - 1))
    # Padding may be a kernel that takes forever, whose slopes are no numbers.
    rows = jnp.where(count > 0, rows, 0.0)
    return by_phase(batch) @ rows if kernels.launched == "eager" else jnp.sum(rows * count, axis=0)


def _nothing(kernels: KernelTable) -> Array:
    """The sum of no kernels: one number, or one a phase."""
    return jnp.zeros(len(PHASES) if kernels.launched == "eager" else ())


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
    for name, rows in _step_rows(predictor, machine, kernels, relaxation, isolated).items():
        total = total + _launched(kernels, name, rows)
    return total


def _plain_slopes(
    predictor: Predictor, machine: Machine, kernels: KernelTable, relaxation: Relaxation, isolated: Isolated
) -> tuple[Array, Array]:
    """`plain_sum`, and its slopes by every leaf of the machine [..., leaf], by one pass backwards.

    Args: as of `plain_sum`.
    """
    total, slopes = _nothing(kernels), _nothing(kernels)[..., None] * jnp.ones(len(jax.tree.leaves(machine)))
    for name, batch in kernels.families.items():
        # With a machine of its own for every kernel, one pass has the slopes of all phases.
        machines = jax.tree.map(lambda figure, rows=batch.count.shape: jnp.broadcast_to(figure, rows), machine)

        def seconds(machines: Machine, name: str = name) -> Array:
            part = replace(kernels, families={name: kernels.families[name]})
            return _step_rows(predictor, machines, part, relaxation, isolated)[name]

        rows, backwards = jax.vjp(seconds, machines)
        (of_rows,) = backwards(jnp.ones_like(rows))
        total = total + _launched(kernels, name, rows)
        slopes = slopes + _launched(kernels, name, jnp.stack(jax.tree.leaves(of_rows), axis=1))
    return total, slopes


_sum_alone, _slopes_alone = jax.jit(plain_sum), jax.jit(_plain_slopes)
_sum, _slopes = (jax.custom_jvp(fast_on_many(of_table)) for of_table in (plain_sum, _plain_slopes))


def _along(of_table: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """A sum over a table and its derivative along what moves, row by row."""
    leaves, tree = jax.tree.flatten(primals)
    steps = jax.tree.leaves(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    place = [at for at, step in enumerate(steps) if not isinstance(step, SymbolicZero)]

    def along(*moving: Array) -> Any:
        changed = dict(zip(place, moving, strict=True))
        return of_table(*jax.tree.unflatten(tree, [changed.get(at, leaf) for at, leaf in enumerate(leaves)]))

    return jax.jvp(along, tuple(leaves[at] for at in place), tuple(steps[at] for at in place))


def _step_of_machine(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Machine | None:
    """The step of one machine, 0 where a figure stays; None where more moves, or kernels have machines each."""
    moves = jax.tree.map(
        lambda step: not isinstance(step, SymbolicZero), tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero)
    )
    machine = primals[1]
    if any(jax.tree.leaves((moves[0], *moves[2:]))) or any(map(jnp.ndim, jax.tree.leaves(machine))):
        return None
    step: Machine = jax.tree.map(
        lambda figure, step, moved: step if moved else jnp.zeros_like(figure), machine, tangents[1], moves[1]
    )
    return step


@functools.partial(_sum.defjvp, symbolic_zeros=True)
def _derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """Where only a machine moves, its slopes times its step: a pass backwards serves all directions, and many machines
    are as fast as their sums."""
    step = _step_of_machine(primals, tangents)
    if step is None:
        return _along(_sum_alone, primals, tangents)
    total, slopes = _slopes(*primals)
    parts = [slopes[..., leaf] * moved for leaf, moved in enumerate(jax.tree.leaves(step))]
    return total, sum(parts, jnp.zeros_like(total))


@functools.partial(_slopes.defjvp, symbolic_zeros=True)
def _second_derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """That of the slopes; where only a machine moves, of each distinct kernel once."""
    step = _step_of_machine(primals, tangents)
    if step is None:
        return _along(_slopes_alone, primals, tangents)
    predictor, machine, kernels, *how = primals

    def bend(table: KernelTable) -> Any:
        _, bends = jax.jvp(lambda moved: _slopes_alone(predictor, moved, table, *how), (machine,), (step,))
        return bends

    total = bend(replace(kernels, families={}))
    # A scan, and not `batching.over_chunks`: second derivatives are also taken backwards, which its loop is not.
    for name, batch in kernels.families.items():

        def add(total: Any, chunk: KernelBatch, name: str = name) -> tuple[Any, None]:
            def more() -> Any:
                return jax.tree.map(jnp.add, total, bend(replace(kernels, families={name: chunk})))

            return jax.lax.cond(jnp.any(chunk.count > 0), more, lambda: total), None

        total, _ = jax.lax.scan(add, total, in_chunks(merged(batch, kernels.launched == "eager"), ROWS))
    return _slopes(*primals), total


@one_shot
def _launches(kernels: KernelTable) -> Float[Array, " phase"]:
    """Host time of launching all kernels of a table; by itself, as it moves with no machine."""
    return host_seconds(kernels, LEARNED)


@one_shot
def _with_host(total: Float[Array, " phase"], host_s: Float[Array, " phase"]) -> Array:
    """Seconds of a step from those of its kernels and of their launches."""
    return stream_seconds(total, host_s, LEARNED)


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
      relaxation: 0 = exact; > 0 smooths whole waves (`roofline.whole_waves` states the bias), and whole tiles, blocks,
        splits and padding (`kernels.family.whole`): at 1 nothing is rounded.
    Returns: family -> seconds [kernel]. A GPU without the kernel's arithmetic path gives infinity.
    Gradients: reach predictor, machine, and sizes and counts of kernels. By sizes, stairs have the slope of their ramps
      at any relaxation: that of a difference over many tiles, not over one. By the SM count, whole waves have none at
      relaxation 0, and all of their ramp's at 1.
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
    machines with one program, `in_axes=(None, None, 0)` many stacked tables of the same families and padded lengths.
    Such tables share a program one by one too.

    Args: as of `kernel_latency`; its gradients too.
    """
    require_covered(predictor, kernels)
    machine, switches = on_device(machine), _switches(relaxation, isolated)
    if is_limited(machine):
        machine = at_clock(
            machine, settled(predictor, machine, kernels, isolated=isolated, relaxation=relaxation).clock
        )
    total: Array = _sum(predictor, machine, kernels, *switches)
    return _with_host(total, _launches(kernels)) if kernels.launched == "eager" else total


# Power: where a board settles under a cap or a locked clock, and what it draws (`model.power`).


def _unlimited(machine: AnyMachine) -> AnyMachine:
    """The machine without cap or lock."""
    return at_clock(machine, 1.0) if is_limited(machine) else machine


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
