"""Which budgets bind, and what one percent more of each would buy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from neusight_jax.designs.notes import AT_BOUND
from neusight_jax.designs.search import Search

BINDING = 0.01
"""A budget binds when less than this share of it is left (steps of the fields leave some)."""
RELAXATION = 1.0
"""Of whole waves in the derivatives: exact ones do not see the SM count's waves."""


@dataclass(frozen=True)
class Multipliers:
    """First-order conditions at a machine, in logarithms.

    Attributes:
      budgets: budget -> −d log objective / d log limit: one percent more buys this many percent; 0 if it does not bind.
      left: budget -> share of it that is left.
      bounds: fields at a bound -> the same for moving that bound outwards by 1 %.
      residual: norm of what the multipliers leave of the objective's gradient, over its norm; small at an optimum.
    """

    budgets: dict[str, float]
    left: dict[str, float]
    bounds: dict[str, float]
    residual: float


def multipliers(
    search: Search, logs: Float[np.ndarray, " field"], limits: dict[str, float] | None = None
) -> Multipliers:
    """Non-negative least squares of −∇ log objective on the gradients of binding budgets and bounds.

    Reference: Karush-Kuhn-Tucker conditions; Lawson and Hanson, Solving Least Squares Problems, 1974 (scipy nnls).
    """
    from scipy.optimize import nnls

    problem = search.problem
    chosen = {**problem.budgets, **(limits or {})}
    slope, slopes = search.slopes(logs, RELAXATION)
    _, spent = search.values(logs[None])
    left = {name: 1.0 - float(np.exp(spent[name][0])) / limit for name, limit in chosen.items()}
    columns: list[tuple[str, str, np.ndarray]] = [
        ("budget", name, slopes[name]) for name in chosen if left[name] < BINDING
    ]
    for place, each in enumerate(problem.free):
        for end, sign in ((search.high, 1.0), (search.low, -1.0)):
            if abs(logs[place] - end[place]) < AT_BOUND:
                columns.append(("bound", each.field, sign * np.eye(len(logs))[place]))
    budgets, bounds = dict.fromkeys(chosen, 0.0), {}
    residual = 1.0
    if columns:
        matrix = np.stack([column for _, _, column in columns], axis=1)
        prices, rest = nnls(matrix, -slope)
        size = float(np.linalg.norm(slope))
        residual = float(rest) / size if size > 0.0 else 0.0
        for (kind, name, _), price in zip(columns, prices, strict=True):
            if kind == "budget":
                budgets[name] = float(price)
            else:
                bounds[name] = float(price)
    return Multipliers(budgets, left, bounds, residual)
