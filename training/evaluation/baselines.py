"""How the rivals are fitted: lines (`li`), Habitat's network, and the table that wave scaling looks kernels up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import nnls

from neusight_jax.baselines.habitat_mlp import HabitatMLPPredictor, habitat_inputs
from neusight_jax.baselines.habitat_wave import MeasuredKernels, WavePredictor
from neusight_jax.baselines.li import LiLine, LiPredictor, li_work
from neusight_jax.kernels.family import Family
from neusight_jax.roofline import peak_flop_per_s
from neusight_jax.terms import Predictor
from neusight_jax.training.fit import Sample, Settings, sample_of
from neusight_jax.training.kinds import log_error_loss
from neusight_jax.training.rows import Rows
from neusight_jax.utilization import Network, init_network


def fit_li(rows: Rows, seed: int) -> Predictor:
    """The mended variant of `baselines.li`: relative errors, floors, slopes on the rate that bounds the family."""
    line = _lines(rows, relative=True)
    on_peak = rows.family.matrix
    rates = line.peaks if on_peak else line.bandwidths
    scale = rates.max()
    weight = 1.0 / line.inverse_slopes  # relative errors again
    design = np.stack([rates / scale, np.ones_like(rates)], axis=1) * weight[:, None]
    if len(rates) == 1:
        design[:, 1] = 0.0  # one GPU says nothing of the offset
    (per_rate, offset), _ = nnls(design, np.ones_like(rates))
    p, floor_s = per_rate / scale, float(np.median(np.maximum(line.intercepts, 0.0)))
    return _li(rows.family, 0.0 if on_peak else p, p if on_peak else 0.0, offset, floor_s)


def fit_published_li(rows: Rows, seed: int) -> Predictor:
    """The variant as NeuSight's authors coded it: least squares on seconds, bandwidth alone, no intercept."""
    line = _lines(rows, relative=False)
    design = np.stack([line.bandwidths, np.ones_like(line.bandwidths)], axis=1)
    if len(line.bandwidths) == 1:
        design[:, 1] = 0.0
    (p, q), *_ = np.linalg.lstsq(design / line.bandwidths.max(), line.inverse_slopes / line.bandwidths.max())
    return _li(rows.family, p, 0.0, q, 0.0)


def _li(family: Family, per_bandwidth: float, per_peak: float, offset: float, floor_s: float) -> LiPredictor:
    values = (jnp.asarray(value, jnp.float32) for value in (per_bandwidth, per_peak, offset, floor_s))
    return LiPredictor({family.network: LiLine(*values)})


@dataclass(frozen=True)
class _Lines:
    """Per known GPU [gpu]: 1 / a (work per second) and c (seconds) of its line, and its figures."""

    inverse_slopes: np.ndarray
    intercepts: np.ndarray
    bandwidths: np.ndarray
    peaks: np.ndarray


def _lines(rows: Rows, *, relative: bool) -> _Lines:
    """t = a · work + c on every GPU with isolated rows, by least squares on seconds or on relative errors.

    With relative errors a and c are kept at or above zero, as a time and a floor are.
    """
    rows = rows.take(rows.isolated > 0.5)
    sample = sample_of(rows, seen=False)
    work = np.asarray(li_work(rows.family, sample.batch), np.float64)
    peaks = np.asarray(peak_flop_per_s(sample.gpu, rows.family, sample.batch.dtype), np.float64)
    bandwidths = np.asarray(sample.gpu.mem_bytes_per_s, np.float64)
    found = []
    for position in np.unique(rows.device):
        mine = rows.device == position
        x, y = work[mine], rows.seconds[mine].astype(np.float64)
        scale = x.max()
        design = np.stack([x / scale, np.ones_like(x)], axis=1)
        if relative:
            (slope, intercept), _ = nnls(design / y[:, None], np.ones_like(y))
        else:
            slope, intercept = np.linalg.lstsq(design, y)[0]
        found.append((scale / slope, intercept, bandwidths[mine][0], peaks[mine][0]))
    return _Lines(*np.array(found).T)


@dataclass(frozen=True)
class HabitatMLPKind:
    """The `habitat-mlp` network, for the fitting loop."""

    hidden: tuple[int, ...] = (64, 64, 64, 64)

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """A network normalised to the rows, that starts at their geometric mean."""
        sample = sample_of(rows, seen=False)
        inputs = habitat_inputs(family, sample.gpu, sample.batch, sample.isolated)
        network = init_network(key, inputs, self.hidden, 1, members=1)
        start = network.biases[-1] + jnp.mean(sample.log_seconds)
        return replace(network, biases=(*network.biases[:-1], start))

    def predictor(self, parameters: Network, family: Family, sample: Sample) -> Predictor:
        """The predictor of one family."""
        return HabitatMLPPredictor({family.network: parameters})

    def loss(self, parameters: Network, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error."""
        predictor = self.predictor(parameters, family, sample)
        terms = predictor.terms(family, sample.gpu, sample.batch, isolated=sample.isolated)
        return log_error_loss(jnp.log(terms.seconds), sample, settings)


def wave_predictors(rows: Rows, *, general: bool) -> Sequence[Predictor]:
    """Wave scaling from every GPU of the rows as the origin, in their order."""
    return [
        _wave_predictor(rows.take((rows.device == position) & (rows.isolated > 0.5)), position, general)
        for position in np.unique(rows.device)
    ]


def _wave_predictor(rows: Rows, position: int, general: bool) -> Predictor:
    measured = MeasuredKernels(
        dims=jnp.stack([jnp.asarray(rows.batch.dims[name]) for name in rows.family.dims], axis=1),
        op=jnp.asarray(rows.batch.op),
        dtype=jnp.asarray(rows.batch.dtype),
        seconds=jnp.asarray(rows.seconds),
    )
    origin = jax.tree.map(lambda column: jnp.asarray(column)[position], rows.gpus)
    return WavePredictor(origin, {rows.family.name: measured}, general)
