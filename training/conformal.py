"""Conformal intervals whose unit is a whole GPU: quantiles of left-out residuals, checked on yet another GPU.

An interval is as wide on one side as on the other (in logarithms): with five GPUs each tail on its own is that of a
single odd GPU, and says little of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from neusight_jax.model.intervals import LEVEL

Residuals = Mapping[str, np.ndarray]
"""log(measured / forecast) by device, each forecast by a fit that did not see the device."""
CANDIDATES: np.ndarray = np.round(np.arange(0.60, 0.996, 0.01), 3)
"""Nominal levels tried."""
OTHERS = 3.0
"""Rows that the other devices count as, together, beside a measured device's own (docs/accuracy.md, intervals)."""
LEAST_WIDTH = 0.001
"""No kernels are forecast nearer than this."""


@dataclass(frozen=True)
class Interval:
    """A pooled interval and how it held on GPUs that had no part in it.

    Attributes:
      width: of |log(measured / forecast)|, on either side.
      nominal: the quantile level used, at least what was asked for where few GPUs demand it.
      coverage: share of each device's residuals inside the interval made of the other devices, and nothing else.
    """

    width: float
    nominal: float
    coverage: dict[str, float]

    @property
    def mean_coverage(self) -> float:
        """Mean over devices, the devices being the units."""
        return float(np.mean(list(self.coverage.values()))) if self.coverage else float("nan")


def calibrated_width(left_out: Float[np.ndarray, " row"], before: float) -> float:
    """Width of the interval of a GPU that was calibrated: of its measured kernels, each forecast from the others, and
    of the interval it had before, which counts as `OTHERS` kernels more (logarithms averaged).

    Args:
      left_out: log(measured / forecast) of the measured kernels; before: width without them.
    """
    own = max(float(np.quantile(np.abs(left_out), LEVEL)), LEAST_WIDTH)
    return float(np.exp((len(left_out) * np.log(own) + OTHERS * np.log(before)) / (len(left_out) + OTHERS)))


def mean_error_percent(residual: np.ndarray) -> float:
    """Mean absolute percentage error of forecasts, from log(measured / forecast)."""
    return round(float(100.0 * np.mean(np.abs(np.expm1(-residual)))), 2)


def pooled_quantile(residuals: Residuals, level: float) -> float:
    """The size that this share of the residuals stays within, each device weighing the same."""
    return _quantile(residuals, {name: 1.0 / len(each) for name, each in residuals.items()}, level)


def _quantile(residuals: Residuals, row_weight: Mapping[str, float], level: float) -> float:
    """The size that this share of the residuals stays within, a row of each device with its weight."""
    sizes = np.abs(np.concatenate(list(residuals.values())))
    weights = np.concatenate([np.full(len(each), row_weight[name]) for name, each in residuals.items()])
    order = np.argsort(sizes)
    place = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), level - 1e-9))
    return float(sizes[order][min(place, len(sizes) - 1)])


def own_width(residuals: Residuals, device: str, level: float = LEVEL, others: float = OTHERS) -> float:
    """Width of the interval of a device that was measured: of its own residuals, the few of a whole model with others'.

    Args:
      residuals: log(measured / forecast) of measured devices, forecast with their effects; the device is among them.
      others: rows that all other devices count as, together.
    """
    count = len(residuals) - 1
    weight = {name: 1.0 if name == device else others / len(each) / count for name, each in residuals.items()}
    return _quantile(residuals, weight, level)


def own_coverage(residuals: Residuals, device: str, level: float = LEVEL) -> float:
    """Share of a device's residuals inside the interval made without them, one at a time; of several devices."""
    own = residuals[device]
    widths = [own_width({**residuals, device: np.delete(own, at)}, device, level) for at in range(len(own))]
    return float(np.mean(np.abs(own) <= widths))


def interval_score(residual: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Coverage of an interval, and its score (Winkler's; less is better): the width, and ten times what a residual lies
    outside by, for an interval that should hold 80 %."""
    beyond = np.maximum(low - residual, 0.0) + np.maximum(residual - high, 0.0)
    return float(np.mean(beyond == 0.0)), float(high - low + 2.0 / (1.0 - LEVEL) * np.mean(beyond))


def coverage(residuals: Residuals, level: float) -> dict[str, float]:
    """For every device, the share of its residuals inside the interval of all others."""
    out = {}
    for device, own in residuals.items():
        others = {name: each for name, each in residuals.items() if name != device}
        out[device] = float(np.mean(np.abs(own) <= pooled_quantile(others, level)))
    return out


def conformal_interval(residuals: Residuals, level: float = LEVEL) -> Interval:
    """The interval whose mean coverage of a further GPU comes closest to `level`.

    GPUs differ by more than the rows of one GPU do, so pooled quantiles of the same level hold less than they say on a
    further GPU; the nominal level is raised (or lowered) until the held-out coverage is right.

    Args:
      residuals: at least two devices; with one, its own quantile is returned and `coverage` is empty.
    """
    if len(residuals) < 2:
        return Interval(pooled_quantile(residuals, level), level, {})
    found = [
        (abs(float(np.mean(list(coverage(residuals, nominal).values()))) - level), nominal) for nominal in CANDIDATES
    ]
    nominal = float(min(found)[1])
    return Interval(pooled_quantile(residuals, nominal), nominal, coverage(residuals, nominal))
