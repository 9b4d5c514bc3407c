"""The search: many gradient descents at once, then exact refinement on the grid of values a chip can have.

1. *Descent.* `starts` machines, Sobol points inside the bounds, go down together under `vmap`: optax Adam on a logistic
   parametrisation of log fields. Every point lies on the surface where the first budget binds: it is grown or shrunk
   there, all fields alike, by bisection on the cost model, and the gradient is that along the surface. Budgets that
   need a forecast are kept by an augmented Lagrangian instead. Whole waves are relaxed, fully by default; the
   relaxation can be lowered linearly to `Settings.last_relaxation`, but the slope of the SM count that a relaxation
   passes on is proportional to it, and ending at 0.5 left the descents 4 to 9 times further from the optimum
   (docs/design.md). An objective that holds costs is not better on a larger machine (`Problem.groups`): there points
   are only shrunk into the budgets, never grown. Sizes of a model go by themselves: they shrink until its loss binds.
2. *Refinement.* Exact forecasts from here on. Candidates around the best points, in log fields with a shrinking
   spread, are rounded to the fields' steps and grown or shrunk until a budget binds (bisection on the cost model,
   which needs no forecast). The best feasible exact candidate is the answer.

Every forecast of all workloads on one machine counts as one evaluation, one with its gradient as `GRADIENT_COST`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from neusight_jax.designs.model import on_divisors
from neusight_jax.designs.problem import Given, Group, Problem, arguments, metrics
from neusight_jax.errors import InputError
from neusight_jax.hardware.variant import fields_of
from neusight_jax.model.programs import one_shot

GRADIENT_COST = 4
"""Evaluations a value with its gradient counts as: an upper limit of its measured time over a value's."""
SLACK = 1e-6
"""Relative excess over a budget that counts as rounding of single precision."""
_INSIDE = 0.02
"""Starts keep this share of a range away from its ends, where the logistic function is flat."""


@dataclass(frozen=True)
class Settings:
    """Effort of a search.

    Attributes:
      starts: descents at once.
      steps: of each descent.
      learning_rate: of Adam, in logistic units.
      relaxation, last_relaxation: of whole waves at the first and last step.
      rounds, candidates: of the refinement, and per round.
      spread, last_spread: standard deviation of candidates in log fields, first and last round; rounds that gain much
        widen it instead.
    """

    starts: int = 3
    steps: int = 15
    learning_rate: float = 1.0
    relaxation: float = 1.0
    last_relaxation: float = 1.0
    rounds: int = 16
    candidates: int = 64
    spread: float = 0.1
    last_spread: float = 0.004

    def __post_init__(self) -> None:
        for name in ("starts", "steps", "rounds", "candidates"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def evaluations(self) -> int:
        """Evaluations of one search, gradients at `GRADIENT_COST`."""
        return self.starts * self.steps * GRADIENT_COST + self.starts + self.rounds * self.candidates


@dataclass(frozen=True)
class Found:
    """The best machine a search found.

    Attributes:
      logs: logarithms of the free fields, on their steps.
      objective: log objective, exact.
      feasible: whether it keeps every budget.
      evaluations: spent, gradients at `GRADIENT_COST`.
      trace: evaluations so far, best feasible log objective so far, after each descent and each round; infinite while
        there is none.
      ends: where the descents ended, off the steps.
    """

    logs: Float[np.ndarray, " field"]
    objective: float
    feasible: bool
    evaluations: int
    trace: tuple[tuple[int, float], ...]
    ends: tuple[Float[np.ndarray, "start field"], ...] = ()


class _Descents(NamedTuple):
    """Descents under way, arrays [start, ...]: logistic units, prices of the timed budgets, moments of Adam."""

    raw: Array
    prices: Array
    moments: Any


class _Slopes(NamedTuple):
    """Gradients that a step goes by, arrays [start, ...]: slope of the log objective by log field, log excess over each
    timed budget, and the slopes of that."""

    objective: Array
    excess: Array
    spent: Array


def _farthest(fits: Callable[[Array], Array]) -> Array:
    """The farthest amount within `_REACH` that fits, by bisection: all that is less fits too."""

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (ends[0] + ends[1])
        good = fits(middle)
        return jnp.where(good, middle, ends[0]), jnp.where(good, ends[1], middle)

    reach = jnp.asarray(_REACH, float)
    amount: Array = jax.lax.fori_loop(0, _HALVINGS, halve, (-reach, reach))[0]
    return amount


def _within(group: Group, edge: Callable[[tuple[str, ...], float], Array]) -> Array:
    """How far a group is moved to keep its budgets: until they bind where larger, or smaller, is never worse; else no
    farther than it must. `edge`: the amount at which budgets bind that rise along a way, 1 or −1."""
    reach = jnp.asarray(_REACH, float)
    most = edge(group.ceilings, 1.0) if group.ceilings else reach
    least = edge(group.floors, -1.0) if group.floors else -reach
    if group.larger_is_better:
        return most
    return jnp.minimum(least if group.smaller_is_better and group.floors else jnp.maximum(least, 0.0), most)


class Search:
    """A problem compiled: reuse it for other seeds and budgets without compiling again."""

    def __init__(self, problem: Problem, settings: Settings | None = None) -> None:
        self.problem = problem
        self.settings = settings or Settings()
        self.low, self.high = problem.bounds
        self.arguments = arguments(problem)
        self.timed = tuple(name for name in problem.budgets if name not in problem.cheap)
        # One program with a forecast in it, for values and slopes, exact and relaxed: it is what takes long to compile,
        # so it knows neither ranges nor what is asked of the metrics. Figures of the machine are many: those not asked
        # for are left out.
        fields = [axis.field for axis in problem.free]
        self._left = {*fields_of(problem.base)} - {*problem.exponents, *problem.budgets}
        self._known = one_shot(jax.vmap(self._pushed, in_axes=(None, 0, 0, None, None)), (fields, sorted(self._left)))
        # Bisections ask for costs in many places, and to trace the sizes of a model takes a while.
        self._cheap = jax.jit(lambda given, logs: given.cheap(problem.figures(logs)))
        constants = (problem.free, problem.groups)
        self._move = one_shot(self._moved, constants)
        self._fill = one_shot(jax.vmap(self._filled, in_axes=(None, 0, 0, None)), constants)

    def limits(self, limits: dict[str, float] | None = None) -> dict[str, Array]:
        """Limits by budget, those of the problem where none are given."""
        chosen = {**self.problem.budgets, **(limits or {})}
        return {name: jnp.asarray(chosen[name], float) for name in self.problem.budgets}

    def _value(self, problem: Given, logs: Array, relaxation: Any, whole: Any) -> tuple[Any, Any]:
        """Logs of the metrics and of the seconds of the workloads on one machine; metrics, seconds, seconds by family.

        `whole` rounds figures that are whole numbers, as an exact forecast needs.
        """
        measures, seconds, parts = metrics(problem, self.problem.figures(logs, whole=whole), relaxation)
        amounts = {name: jnp.asarray(amount, float) for name, amount in measures.items() if name not in self._left}
        of_metrics = jax.tree.map(jnp.log, amounts)
        return (of_metrics, jnp.log(seconds)), (measures, seconds, parts)

    def _pushed(self, problem: Given, logs: Array, way: Array, relaxation: Any, whole: Any) -> tuple[Any, Any, Any]:
        """`_value` of one machine, and the derivatives of its first part along `way`, a direction in log fields."""
        values, slopes, outputs = jax.jvp(
            lambda point: self._value(problem, point, relaxation, whole), (logs,), (way,), has_aux=True
        )
        return values, slopes, outputs

    def _asked(
        self, of_metrics: dict[str, np.ndarray], of_seconds: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The log objective and the logs of the budgeted metrics, from the first part of `_value` or from slopes of it.

        Args:
          of_metrics: by metric, [...].
          of_seconds: of the workloads, [..., workload].
        """
        of = {**of_metrics, **{load.name: of_seconds[..., at] for at, load in enumerate(self.problem.workloads)}}
        objective = sum(power * of[name] for name, power in self.problem.exponents.items())
        return np.asarray(objective), {name: of[name] for name in self.problem.budgets}

    def _logs(self, raw: Array) -> Array:
        """Log fields inside their bounds from logistic units."""
        low, high = jnp.asarray(self.low, float), jnp.asarray(self.high, float)
        return low + (high - low) * jax.nn.sigmoid(raw)

    def _grown(self, problem: Given, raw: Array, limits: dict[str, Array]) -> Array:
        """The point with all logistic units of a group moved alike until its cheap budgets bind; see the module.

        Gradient: that of the surface the budgets bound (implicit function theorem), corners rounded by `_SHARPNESS`.
        """
        for group in self.problem.groups:
            if not (group.ceilings or group.floors):
                continue
            # The machine and the model have budgets of their own: how far one grows takes nothing from the other.
            along = jnp.array(group.fields, float)

            def edge(names: tuple[str, ...], way: float, raw: Array = raw, along: Array = along) -> Array:
                """How far a point is moved until budgets bind, which rise that way."""

                def excess(point: Array, far: Array) -> Array:
                    costs = self._cheap(problem, self._logs(point + way * far * along))
                    over = jnp.stack([jnp.log(costs[name]) - jnp.log(limits[name]) for name in names])
                    return jax.nn.logsumexp(over * _SHARPNESS) / _SHARPNESS

                fixed = jax.lax.stop_gradient(raw)
                far = jax.lax.stop_gradient(_farthest(lambda far: excess(fixed, far) <= 0.0))
                left, slope = jax.value_and_grad(excess, argnums=1)(raw, far)
                slope = jax.lax.stop_gradient(slope)
                return way * (far - jnp.where(slope > _FLAT, left / jnp.maximum(slope, _FLAT), 0.0))

            raw = raw + _within(group, edge) * along
        return raw

    def _moved(
        self, problem: Given, state: _Descents, gradients: _Slopes, limits: dict[str, Array], pace: Array
    ) -> Any:
        """One step of every descent: down the slope along the surface where the cheap budgets bind."""

        def downhill(raw: Array, prices: Array, at: _Slopes) -> tuple[Array, Array]:
            push = jax.nn.relu(prices + _STIFFNESS * at.excess)
            _, pull = jax.vjp(lambda point: self._logs(self._grown(problem, point, limits)), raw)
            return pull(at.objective + push @ at.spent)[0], push

        slope, push = jax.vmap(downhill)(state.raw, state.prices, gradients)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its step count into floats
            change, moments = optax.scale_by_adam().update(slope, state.moments)
        raw = jax.vmap(lambda point: self._grown(problem, point, limits))(state.raw - pace * change)
        raw = jnp.clip(raw, -_FAR, _FAR)
        moved = _Descents(raw, state.prices + _PRICE_RATE * (push - state.prices), moments)
        return jax.tree.leaves(moved), self._logs(raw)

    def _filled(self, problem: Given, logs: Array, ways: Array, limits: dict[str, Array]) -> Array:
        """The point moved along `ways` (log field per step, ≥ 0), group by group, until its cheap budgets bind or all
        are at a bound."""
        low, high = jnp.asarray(self.low, float), jnp.asarray(self.high, float)
        for group in self.problem.groups:
            # As in `_grown`, group by group: no budget is of both.
            along = ways * jnp.array(group.fields, float)

            def at(amount: Array, logs: Array = logs, along: Array = along) -> Array:
                return jnp.clip(logs + amount * along, low, high)

            def edge(names: tuple[str, ...], way: float, at: Callable[[Array], Array] = at) -> Array:
                """How far a point may be moved within budgets, which rise that way."""

                def fits(far: Array) -> Array:
                    return self.cheap_fit(problem, at(way * far), limits, names)

                reach = jnp.asarray(_REACH, float)
                return way * jnp.where(fits(reach), reach, _farthest(fits))

            logs = at(_within(group, edge))
        return logs

    def cheap_fit(
        self, problem: Given, logs: Array, limits: dict[str, Array], names: tuple[str, ...] | None = None
    ) -> Array:
        """Whether a point keeps the budgets that need no forecast.

        Args:
          problem: the design problem, traced.
          logs: of the free fields, [field].
          limits: of metrics, by name, each in the metric's unit.
          names: budgets that count, None = all that need no forecast.
        """
        costs = self._cheap(problem, logs)
        names = self.problem.cheap if names is None else names
        kept = [jnp.log(costs[name]) <= jnp.log(limits[name]) + SLACK for name in names]
        return jnp.all(jnp.stack(kept)) if kept else jnp.asarray(True)

    def on_steps(self, logs: np.ndarray) -> np.ndarray:
        """Log fields rounded to the fields' steps, heads of a model to those that divide."""
        values = {axis.field: axis.rounded(np.exp(logs[:, at])) for at, axis in enumerate(self.problem.free)}
        if self.problem.model is not None:
            values = on_divisors(values, self.problem.model)
        stepped: np.ndarray = np.log(np.stack([values[axis.field] for axis in self.problem.free], axis=1))
        return stepped

    def repaired(
        self, logs: np.ndarray, ways: np.ndarray, limits: dict[str, float] | None = None
    ) -> Float[np.ndarray, "point field"]:
        """Points on the steps, grown or shrunk to the budgets: all fields along `ways`, then those without a step.

        Asks the cost model only. `ways` [point, field] are log fields per unit of growth, ≥ 0.
        """
        chosen = self.limits(limits)

        def fill(points: np.ndarray, along: np.ndarray) -> np.ndarray:
            filled = self._fill(self.arguments, jnp.asarray(points, float), jnp.asarray(along, float), chosen)
            return np.asarray(filled, np.float64)

        stepped = self.on_steps(fill(logs, ways))
        plain = np.array([axis.grain == 0 for axis in self.problem.free])
        if plain.any():
            stepped = self.on_steps(fill(stepped, 1.0 * plain[None] * np.ones_like(ways)))
        return stepped

    def _ends(self, starts: np.ndarray, limits: dict[str, Array]) -> np.ndarray:
        """Where the descents from `starts` [start, field] end; other steps and rates compile nothing anew."""
        settings, budgeted = self.settings, np.array([float(jnp.log(limits[name])) for name in self.timed])
        share = np.clip((starts - self.low) / np.maximum(self.high - self.low, 1e-9), _INSIDE, 1.0 - _INSIDE)
        raw = jnp.asarray(np.log(share / (1.0 - share)), float)
        state = _Descents(raw, jnp.zeros((len(starts), len(self.timed))), optax.scale_by_adam().init(raw))
        nowhere = _Slopes(
            jnp.zeros(raw.shape), -jnp.ones(state.prices.shape), jnp.zeros((*state.prices.shape, raw.shape[1]))
        )
        # A step of no length grows the starts to the budgets.
        leaves, logs = self._move(self.arguments, state, nowhere, limits, jnp.zeros(()))
        state = state._replace(raw=leaves[0])
        # Steps get shorter by a cosine, so that the descents settle.
        for number in range(settings.steps):
            part = number / max(settings.steps - 1, 1)
            relaxation = settings.relaxation + (settings.last_relaxation - settings.relaxation) * part
            (_, spent), (slope, slopes) = self._sloped(np.asarray(logs, np.float64), relaxation)
            timed = np.zeros((len(starts), len(self.timed)))
            ways = np.zeros((*timed.shape, starts.shape[1]))
            for place, name in enumerate(self.timed):
                timed[:, place], ways[:, place] = spent[name] - budgeted[place], slopes[name]
            pace = settings.learning_rate * (_LAST_PACE + (1.0 - _LAST_PACE) * 0.5 * (1.0 + np.cos(np.pi * part)))
            gradients = _Slopes(*(jnp.asarray(array, float) for array in (slope, timed, ways)))
            leaves, logs = self._move(self.arguments, state, gradients, limits, jnp.asarray(pace, float))
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
        return np.asarray(logs, np.float64)

    def _sloped(self, logs: np.ndarray, relaxation: float) -> tuple[Any, Any]:
        """Log objectives and logs of the budgeted metrics of points [point, field], and their gradients."""
        points, fields = logs.shape
        ways = np.tile(np.eye(fields), (points, 1))
        values, slopes, _ = self._padded(np.repeat(logs, fields, axis=0), ways, relaxation)
        judged = jax.tree.map(lambda leaf: leaf[::fields], self._asked(*values))
        return judged, jax.tree.map(lambda leaf: leaf.reshape(points, fields), self._asked(*slopes))

    def values(self, logs: np.ndarray) -> tuple[Float[np.ndarray, " point"], dict[str, np.ndarray]]:
        """Exact log objectives of points [point, field], and logs of the budgeted metrics [point]."""
        return self._asked(*self._padded(logs)[0])

    def metrics(
        self, logs: np.ndarray
    ) -> tuple[dict[str, np.ndarray], Float[np.ndarray, "point workload"], dict[str, np.ndarray]]:
        """Exact metrics of points [point, field], seconds of their workloads, and the same by family."""
        measures, seconds, parts = self._padded(logs)[2]
        return measures, seconds, parts

    def _padded(self, logs: np.ndarray, ways: np.ndarray | None = None, relaxation: float | None = None) -> Any:
        """`_pushed` of points, exact without a relaxation; filled up to one batch size, so that all share a program."""
        least = max(self.settings.candidates, self.settings.starts * len(self.problem.free))
        count, width = len(logs), max(len(logs), least)
        ways = np.zeros_like(logs) if ways is None else ways
        padded = [np.concatenate([array, np.repeat(array[-1:], width - count, axis=0)]) for array in (logs, ways)]
        points, along = (jnp.asarray(array, float) for array in padded)
        exact = jnp.asarray(relaxation is None)
        outputs = self._known(self.arguments, points, along, jnp.asarray(relaxation or 0.0, float), exact)
        return jax.tree.map(lambda values: np.asarray(values, np.float64)[:count], outputs)

    def slopes(self, logs: np.ndarray, relaxation: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Gradients of the log objective and of the log budgeted metrics with respect to log fields, at one point."""
        objective, spent = self._sloped(np.asarray(logs)[None], relaxation)[1]
        return objective[0], {name: slope[0] for name, slope in spent.items()}

    def rounding(self, point: Found, limits: dict[str, float] | None = None) -> float:
        """Objective of a point over the least without steps, whole tiles and waves: of itself and where descents that
        keep the budgets ended."""
        values, _, _ = self._padded(np.concatenate([point.logs[None], *point.ends]), relaxation=1.0)
        objective, spent = self._asked(*values)
        over = [spent[name] - float(jnp.log(limit)) for name, limit in self.limits(limits).items()]
        kept = np.max([np.zeros(len(objective)), *over], axis=0) < _KEPT
        return float(np.exp(point.objective - objective[kept].min(initial=objective[0])))

    def _base(self) -> Float[np.ndarray, "_base field"]:
        """Log fields of the base, where they lie within the ranges; none elsewhere."""
        logs = np.log([[float(np.asarray(self.problem.figure(axis.field))) for axis in self.problem.free]])
        within = (self.low <= logs + SLACK) & (logs - SLACK <= self.high)
        return logs[within.all(axis=1)]

    def evaluate(self, logs: np.ndarray, limits: dict[str, float] | None = None) -> np.ndarray:
        """Exact log objective of points [point, field]; infinite where a budget is broken."""
        objective, excess = self._judge(np.asarray(logs), self.limits(limits))
        return np.where(excess == 0.0, objective, np.inf)

    def _judge(self, logs: np.ndarray, limits: dict[str, Array]) -> tuple[np.ndarray, np.ndarray]:
        """Exact log objectives, and log excesses summed over the budgets: 0 where all are kept."""
        objective, spent = self.values(logs)
        excess = np.zeros(len(logs))
        for name, limit in limits.items():
            over = spent[name] - float(jnp.log(limit))
            excess += np.where(over > 3.0 * SLACK, over, 0.0)
        return objective, excess

    def run(self, seed: int = 0, limits: dict[str, float] | None = None) -> Found:
        """Search once.

        Args:
          seed: of starts and candidates.
          limits: budgets to use instead of the problem's, same names.
        """
        from neusight_jax.sweeps.space import Samples

        settings, chosen = self.settings, self.limits(limits)
        random = np.random.default_rng([seed, 17])
        space = Samples(self.problem.free, settings.starts, "sobol", seed)
        points = space.slice(0, settings.starts)
        starts = np.log(np.stack([points[axis.field] for axis in self.problem.free], axis=1))
        ends = self._ends(starts, chosen)
        spent, of_descent = 0, settings.steps * GRADIENT_COST + 1
        best, best_value, trace = ends[0], np.inf, []
        center, center_merit = ends[0], np.inf
        pool = self.repaired(ends, np.ones_like(ends), limits)
        parents, spread = pool, settings.spread
        narrow = (settings.last_spread / settings.spread) ** (1.0 / max(settings.rounds - 1, 1))
        for number in range(settings.rounds + 1):
            objective, excess = self._judge(pool, chosen)
            value = np.where(excess == 0.0, objective, np.inf)
            if number == 0:  # Descents do not depend on each other, and are counted one after another.
                trace = [(place * of_descent, float(value[:place].min())) for place in range(1, len(pool))]
            spent += len(pool) * (of_descent if number == 0 else 1)
            if value.min() < best_value:
                best, best_value = pool[int(value.argmin())], float(value.min())
            merit = objective + _PENALTY * excess
            if number > 0:
                spread *= _WIDEN if center_merit - merit.min() > _FAST else narrow
            if merit.min() < center_merit:
                center, center_merit = pool[int(merit.argmin())], float(merit.min())
            trace.append((spent, best_value))
            if number == 0:
                parents = pool[np.argsort(merit)[: max(1, settings.starts // 2)]]
            if number == settings.rounds:
                break
            around = parents[random.integers(len(parents), size=settings.candidates)] if number < 2 else center
            # A field with steps moves by one now and then, however narrow the spread.
            steps = np.log1p(np.array([axis.grain for axis in self.problem.free]) / np.exp(center))
            shift = np.maximum(spread, _OF_STEP * steps) * random.normal(size=(settings.candidates, len(steps)))
            ways = random.dirichlet(np.ones(len(self.problem.free)), settings.candidates) + 1e-3
            moved = np.clip(around + shift, self.low, self.high)
            pool = self.repaired(moved, ways, limits)
        # The last candidate is the base, which is forecast beside every answer anyway: none is worse than it.
        for base in self._base():
            of_base = float(self.evaluate(base[None], limits)[0])
            if of_base < best_value:
                best, best_value = base, of_base
        kept = np.isfinite(best_value)
        if not kept:
            best = center
            best_value = float(self._judge(best[None], chosen)[0][0])
        return Found(best, best_value, bool(kept), spent, tuple(trace), (ends,))


_FAST, _WIDEN = 0.02, 1.6
"""A round that gains more than this in log merit widens the spread by this factor; others narrow it."""
_OF_STEP = 0.5
"""Least spread of candidates over the step of a field."""
_PENALTY = 10.0
"""Of the log excess over budgets, where candidates are compared; more than any multiplier met."""
_SHARPNESS = 50.0
"""Rounding of the corner where two budgets bind: both are kept, log(2)/50 = 1.4 % is left there for the refinement."""
_KEPT = 1e-4
"""Log excess over budgets of an end of a descent that still counts as keeping them."""
_FLAT = 1e-4
"""Slope of the budgets below which all fields are at their bounds."""
_FAR = 6.0
"""Largest logistic unit: 0.25 % of a range from its end."""
_STIFFNESS = 20.0
"""Of the augmented Lagrangian's quadratic term, in logs."""
_LAST_PACE = 0.05
"""Learning rate of the last step over the first; a cosine in between."""
_PRICE_RATE = 0.3
"""How fast its multipliers follow."""
_REACH = 20.0
"""Farthest a point is grown or shrunk, in logs along its way."""
_HALVINGS = 40
"""Bisections of that distance."""
