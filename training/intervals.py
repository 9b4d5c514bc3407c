"""Conformal intervals whose unit is a whole GPU: quantiles of left-out residuals, checked on yet another GPU.

An interval is as wide on one side as on the other (in logarithms): with five GPUs each tail on its own is that of a
single odd GPU, and says little of the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from neusight_jax.datasets.measurements import Measurements
from neusight_jax.datasets.row_checks import MODES
from neusight_jax.graph.configs.build import graph_from_config
from neusight_jax.model.heads import TileChoice
from neusight_jax.model.intervals import LEVEL, MODELS, WIDEST, Intervals, gpu_ratios, gpu_widening, range_of
from neusight_jax.model.predictor import Predictor
from neusight_jax.training.data import Rows
from neusight_jax.training.fit import row_features
from neusight_jax.training.left_out import LeftOut, left_out_predictor
from neusight_jax.training.whole_models import System, model_scores

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
    width = max(float(np.quantile(np.abs(left_out), LEVEL)), LEAST_WIDTH)
    return float(np.exp((len(left_out) * np.log(width) + OTHERS * np.log(before)) / (len(left_out) + OTHERS)))


def mean_error_percent(residual: np.ndarray) -> float:
    """Mean absolute percentage error of forecasts, from log(measured / forecast)."""
    return round(float(100.0 * np.mean(np.abs(np.expm1(-residual)))), 2)


def pooled_quantile(residuals: Residuals, level: float) -> float:
    """The size that this share of the residuals stays within, each device weighing the same."""
    return _quantile(residuals, {name: 1.0 / len(errors) for name, errors in residuals.items()}, level)


def _quantile(residuals: Residuals, row_weight: Mapping[str, float], level: float) -> float:
    """The size that this share of the residuals stays within, a row of each device with its weight."""
    sizes = np.abs(np.concatenate(list(residuals.values())))
    weights = np.concatenate([np.full(len(errors), row_weight[name]) for name, errors in residuals.items()])
    order = np.argsort(sizes)
    place = int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), level - 1e-9))
    return float(sizes[order][min(place, len(sizes) - 1)])


def own_width(residuals: Residuals, device: str) -> float:
    """Width of the interval of a device that was measured: of its own residuals, the few of a whole model with others'.

    `residuals`: of measured devices, forecast with their effects, the device among them. The others count as `OTHERS`.
    """
    count = len(residuals) - 1
    weight = {name: 1.0 if name == device else OTHERS / len(errors) / count for name, errors in residuals.items()}
    return _quantile(residuals, weight, LEVEL)


def own_coverage(residuals: Residuals, device: str) -> float:
    """Share of a device's residuals inside the interval made without them, one at a time; of several devices."""
    errors = residuals[device]
    widths = [own_width({**residuals, device: np.delete(errors, at)}, device) for at in range(len(errors))]
    return float(np.mean(np.abs(errors) <= widths))


def interval_score(residual: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """Coverage of an interval, and its score (Winkler's; less is better): the width, and ten times what a residual lies
    outside by, for an interval that should hold 80 %."""
    beyond = np.maximum(low - residual, 0.0) + np.maximum(residual - high, 0.0)
    return float(np.mean(beyond == 0.0)), float(high - low + 2.0 / (1.0 - LEVEL) * np.mean(beyond))


def coverage(residuals: Residuals, level: float) -> dict[str, float]:
    """For every device, the share of its residuals inside the interval of all others."""
    out = {}
    for device, errors in residuals.items():
        others = {name: logs for name, logs in residuals.items() if name != device}
        out[device] = float(np.mean(np.abs(errors) <= pooled_quantile(others, level)))
    return out


def conformal_interval(residuals: Residuals) -> Interval:
    """The interval whose mean coverage of a further GPU comes closest to `LEVEL`.

    GPUs differ by more than the rows of one GPU do, so pooled quantiles of the same level hold less than they say on a
    further GPU; the nominal level is raised (or lowered) until the held-out coverage is right.

    Args:
      residuals: at least two devices; with one, its own quantile is returned and `coverage` is empty.
    """
    if len(residuals) < 2:
        return Interval(pooled_quantile(residuals, LEVEL), LEVEL, {})
    gaps = [
        (abs(float(np.mean(list(coverage(residuals, nominal).values()))) - LEVEL), nominal) for nominal in CANDIDATES
    ]
    # Of levels that hold alike the lowest counts: its interval is the narrowest.
    nominal = float(min(gaps)[1])
    return Interval(pooled_quantile(residuals, nominal), nominal, coverage(residuals, nominal))


# From left-out and seen residuals to what a checkpoint says of its own errors.


@dataclass
class Evidence:
    """Evidence a run gathers family by family.

    Attributes:
      left_out: fits that left each device out, by family; none of a family measured on one GPU (or architecture) alone.
      seen: log(measured / forecast) of training devices forecast with their effect, by family.
      rows: what the final fits were trained on, by family; they say which shapes and GPUs are known.
    """

    left_out: dict[str, LeftOut] = field(default_factory=dict)
    seen: dict[str, Residuals] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)


def eager_scores(data: Measurements, devices: Sequence[str], system: System) -> pd.DataFrame:
    """The eager whole-model labels of devices (`model_scores`), with `log`, of measured / forecast; may be empty."""
    labels = data.end_to_end
    if labels is not None:
        labels = labels[labels["device"].isin(devices) & (labels["option"] == "")]
    models, _ = model_scores(labels, {"": system}, data.gpu)
    return models if models.empty else models.assign(log=np.log(models["measured_s"] / models["forecast_s"]))


def by_device(models: pd.DataFrame) -> dict[str, np.ndarray]:
    """log(measured / forecast) of each device that has labels."""
    return {} if models.empty else {str(name): part["log"].to_numpy() for name, part in models.groupby("device")}


def labelled_networks(models: pd.DataFrame) -> tuple[str, ...]:
    """Networks of the kernels in the labels of `eager_scores`."""
    networks: set[str] = set()
    keys = ["model", "batch_size", "sequence_length", "mode"]
    for model, batch_size, sequence_length, mode in [] if models.empty else models[keys].drop_duplicates().to_numpy():
        networks |= graph_from_config(model, int(batch_size), int(sequence_length), MODES[mode]).kernels.networks
    return tuple(sorted(networks))


def make_intervals(
    evidence: Evidence,
    data: Measurements,
    devices: tuple[str, ...],
    tiles: Mapping[str, TileChoice],
    with_effect: System,
) -> tuple[Intervals, dict[str, Any]]:
    """The intervals record of a predictor, and what its card says of the evidence.

    A family without left-out fits gets bounds of `WIDEST` on a GPU nobody has measured: nobody knows.

    Args:
      evidence: of every family; data: the measurements, for whole-model labels.
      devices: trained on; tiles: tile choices.
      with_effect: device -> the final predictor with that device's effect.
    """
    widening = {name: left_out_widenings(part) for name, part in evidence.left_out.items()}

    @functools.cache
    def unseen(device: str) -> Predictor:
        return left_out_predictor(evidence.left_out, tiles, device)

    left_out = {name: part.residuals() for name, part in evidence.left_out.items()}
    seen = dict(evidence.seen)
    unseen_models, seen_models = (eager_scores(data, devices, system) for system in (unseen, with_effect))
    for residuals, models in ((left_out, unseen_models), (seen, seen_models)):
        if len(models):
            residuals[MODELS] = by_device(models)
    labelled = labelled_networks(seen_models)
    widening[MODELS] = {  # a total has the widening of its kernels: families measured on the same GPUs
        device: max(
            (factors[device] for name, factors in widening.items() if name in labelled and device in factors),
            default=1.0,
        )
        for device in left_out.get(MODELS, {})
    }
    inside = {name: narrowed(residuals, widening[name]) for name, residuals in left_out.items()}
    usual, others = _by_vendor(evidence, inside)
    measured = {name: conformal_interval(residuals) for name, residuals in seen.items()}
    none, nobody_knows = Interval(0.0, float("nan"), {}), Interval(WIDEST, 1.0, {})
    intervals = Intervals(
        kernels={name: _pair(usual.get(name, nobody_knows)) for name in evidence.seen},
        total=_pair(usual.get(MODELS, none)),
        other_vendor={name: _pair(item) for name, item in others.items()},
        measured_kernels={name: _pair(measured[name]) for name in evidence.seen},
        measured_total=_pair(measured.get(MODELS, none)),
        labelled=labelled,
        gpu_range={name: _range(gpu_ratios(rows.gpus)) for name, rows in evidence.rows.items()},
        shape_range={name: _range(row_features(rows)) for name, rows in evidence.rows.items()},
    )
    return intervals, _card(devices, left_out, seen, usual, others, measured)


def _range(figures: Any) -> Float[Array, "end figure"]:
    return jnp.asarray(range_of(np.asarray(figures)), jnp.float32)


def _by_vendor(
    evidence: Evidence, inside: Mapping[str, dict[str, np.ndarray]]
) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """Intervals of GPUs left out, by family: of the vendor of most of them, and of the others where there are any."""
    minority = {
        device
        for part in evidence.left_out.values()
        for device in np.asarray(part.rows.devices)[part.rows.of_minority_vendor]
    }
    usual, others = {}, {}
    for name, residuals in inside.items():
        main = {device: errors for device, errors in residuals.items() if device not in minority}
        other = {device: errors for device, errors in residuals.items() if device in minority}
        usual[name] = conformal_interval(main or residuals)
        if other:
            # A single device cannot say how the next one differs from it.
            others[name] = conformal_interval(other if len(other) > 1 else residuals)
    return usual, others


def _card(
    devices: tuple[str, ...],
    left_out: Mapping[str, Residuals],
    seen: Mapping[str, Residuals],
    usual: Mapping[str, Interval],
    others: Mapping[str, Interval],
    measured: Mapping[str, Interval],
) -> dict[str, Any]:
    """Entries of the card on the evidence: intervals, how wide each device's own are, errors of GPUs left out."""
    models = seen.get(MODELS, {})
    held = {device: round(own_coverage(models, device), 3) for device in models if len(models) > 1}
    return {
        "intervals": {
            "left out": {name: _said(item) for name, item in usual.items()},
            **({"left out, another vendor": {name: _said(item) for name, item in others.items()}} if others else {}),
            "seen": {name: _said(item) for name, item in measured.items()},
            "own": {"coverage of models": held},
        },
        "device_intervals": {
            device: {name: round(own_width(errors, device), 4) for name, errors in seen.items() if device in errors}
            for device in devices
        },
        "left_out_errors_percent": {
            name: {device: mean_error_percent(errors) for device, errors in residuals.items()}
            for name, residuals in left_out.items()
        },
    }


def narrowed(residuals: Residuals, widening: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Left-out residuals over what the interval of their GPU is widened by: on the scale of a GPU inside the range."""
    return {device: residual / widening[device] for device, residual in residuals.items()}


def left_out_widenings(part: LeftOut) -> dict[str, float]:
    """Factors that intervals of each device of a family are widened by where it is left out."""
    devices, ratios = part.rows.devices, np.asarray(gpu_ratios(part.rows.gpus))
    return {device: left_out_widening(devices, ratios, device, part.held_out_with(device)) for device in devices}


def left_out_widening(devices: Sequence[str], ratios: np.ndarray, device: str, held_out: Sequence[str]) -> float:
    """Factor that intervals of a device are widened by when these devices are not trained on.

    Args:
      devices: of the family, in the order of the ratios.
      ratios: of the GPUs' figures, logarithms (`gpu_ratios`) [device, ratio].
      device: the one whose interval it is.
      held_out: devices left out together with it, itself included.
    """
    others = np.array([name not in held_out for name in devices])
    device_ratios = ratios[devices.index(device)]
    return float(gpu_widening(jnp.asarray(device_ratios), jnp.asarray(range_of(ratios[others]))))


def _pair(interval: Interval) -> Any:
    return jnp.array([-interval.width, interval.width], jnp.float32)


def _said(interval: Interval) -> dict[str, Any]:
    return {
        "log_low": round(-interval.width, 4),
        "log_high": round(interval.width, 4),
        "nominal": interval.nominal,
        "coverage": {name: round(value, 3) for name, value in interval.coverage.items()},
        "mean_coverage": round(interval.mean_coverage, 3),
    }
