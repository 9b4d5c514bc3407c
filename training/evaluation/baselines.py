"""Fits of the baselines: lines (`li`), Habitat's network, the table of wave scaling, and boosted trees (`gbt`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray
from scipy.optimize import nnls

from neusight_jax.baselines.rivals import (
    LEAVES,
    MAX_DEPTH,
    TREES,
    FittedBaseline,
    Forest,
    LiLine,
    MeasuredKernels,
    ThreeNumbers,
    WavePredictor,
    gbt_inputs,
    habitat_inputs,
    li_work,
)
from neusight_jax.errors import InputError
from neusight_jax.kernels.family import Family
from neusight_jax.model.network import Network, init_network
from neusight_jax.model.predictor import Predictor, bounded
from neusight_jax.model.roofline import peak_flop_per_s
from neusight_jax.training.data import Rows
from neusight_jax.training.fit import sample_of

HABITAT_HIDDEN: tuple[int, ...] = (64, 64, 64, 64)
"""Hidden layers of Habitat's network."""
GBT_SETTINGS: dict[str, Any] = {
    "objective": "l1",  # the log error's absolute value, as the other systems are fitted
    "num_leaves": LEAVES,
    "max_depth": MAX_DEPTH,
    "learning_rate": 0.05,
    "min_data_in_leaf": 40,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "verbosity": -1,
    "deterministic": True,
    "num_threads": 2,
}


def fit_li(rows: Rows, seed: int) -> Predictor:
    """The mended variant of `baselines.li`: relative errors, floors, slopes on the rate that bounds the family."""
    line = _lines(rows, relative=True)
    on_peak = rows.family.matrix
    rates = (line["peak"] if on_peak else line["bandwidth"]).to_numpy()
    scale = rates.max()
    weight = 1.0 / line["inverse_slope"].to_numpy()  # relative errors again
    design = np.stack([rates / scale, np.ones_like(rates)], axis=1) * weight[:, None]
    if len(rates) == 1:
        design[:, 1] = 0.0  # one GPU says nothing of the offset
    (per_rate, offset), _ = nnls(design, np.ones_like(rates))
    p, floor_s = per_rate / scale, float(line["intercept"].clip(lower=0.0).median())
    return _li(rows.family, 0.0 if on_peak else p, p if on_peak else 0.0, offset, floor_s)


def fit_published_li(rows: Rows, seed: int) -> Predictor:
    """The variant as NeuSight's authors coded it: least squares on seconds, bandwidth alone, no intercept."""
    line = _lines(rows, relative=False)
    bandwidths, inverse_slopes = line["bandwidth"].to_numpy(), line["inverse_slope"].to_numpy()
    design = np.stack([bandwidths, np.ones_like(bandwidths)], axis=1)
    if len(bandwidths) == 1:
        design[:, 1] = 0.0
    (p, q), *_ = np.linalg.lstsq(design / bandwidths.max(), inverse_slopes / bandwidths.max())
    return _li(rows.family, p, 0.0, q, 0.0)


def _li(family: Family, per_bandwidth: float, per_peak: float, offset: float, floor_s: float) -> Predictor:
    values = (jnp.asarray(value, jnp.float32) for value in (per_bandwidth, per_peak, offset, floor_s))
    return FittedBaseline("li", {family.network: LiLine(*values)})


def _lines(rows: Rows, *, relative: bool) -> pd.DataFrame:
    """t = a · work + c on every GPU with isolated rows, by least squares on seconds or on relative errors.

    With relative errors a and c are kept at or above zero, as a time and a floor are.
    Returns: one row a GPU: inverse_slope (1 / a, work per second), intercept (c, seconds), bandwidth and peak.
    """
    rows = rows.take(rows.isolated > 0.5)
    sample = sample_of(rows, seen=False)
    work = np.asarray(li_work(rows.family, sample.batch), np.float64)
    peaks = np.asarray(peak_flop_per_s(sample.gpu, rows.family, sample.batch.dtype), np.float64)
    bandwidths = np.asarray(sample.gpu.mem_bytes_per_s, np.float64)
    lines = []
    for position in np.unique(rows.device):
        mine = rows.device == position
        x, y = work[mine], rows.seconds[mine].astype(np.float64)
        scale = x.max()
        design = np.stack([x / scale, np.ones_like(x)], axis=1)
        if relative:
            (slope, intercept), _ = nnls(design / y[:, None], np.ones_like(y))
        else:
            slope, intercept = np.linalg.lstsq(design, y)[0]
        lines.append((scale / slope, intercept, bandwidths[mine][0], peaks[mine][0]))
    return pd.DataFrame(lines, columns=["inverse_slope", "intercept", "bandwidth", "peak"])


def start_roofline3(key: PRNGKeyArray, family: Family, rows: Rows) -> ThreeNumbers:
    """Efficiencies 0.73 and a floor of 25 us."""
    return ThreeNumbers(jnp.ones(()), jnp.ones(()), jnp.log(25e-6))


def start_habitat_mlp(key: PRNGKeyArray, family: Family, rows: Rows) -> Network:
    """A network normalised to the rows, that starts at their geometric mean."""
    sample = sample_of(rows, seen=False)
    inputs = habitat_inputs(family, sample.gpu, sample.batch, sample.isolated)
    network = init_network(key, inputs, HABITAT_HIDDEN, 1, members=1)
    *biases, last = network.parameters["biases"]
    start = (*biases, last + jnp.mean(sample.log_seconds))
    return replace(network, parameters={**network.parameters, "biases": start})


def wave_predictors(rows: Rows, *, general: bool) -> Sequence[Predictor]:
    """Wave scaling from every GPU of the rows as the origin, in their order."""
    isolated = rows.take(rows.isolated > 0.5)
    return [_wave_predictor(isolated, position, general) for position in np.unique(rows.device)]


def _wave_predictor(rows: Rows, position: int, general: bool) -> Predictor:
    device_rows = rows.take(rows.device == position)
    measured = MeasuredKernels(
        dims=jnp.stack([jnp.asarray(device_rows.batch.dims[name]) for name in rows.family.dims], axis=1),
        op=jnp.asarray(device_rows.batch.op),
        dtype=jnp.asarray(device_rows.batch.dtype),
        seconds=jnp.asarray(device_rows.seconds),
    )
    origin = jax.tree.map(lambda column: jnp.asarray(column)[position], rows.gpus)
    return WavePredictor(origin, {rows.family.name: measured}, general)


def fit_gbt(rows: Rows, seed: int) -> Predictor:
    """Trees for the log of the measured time, every GPU with equal weight, by LightGBM.

    (Not scikit-learn: LightGBM needs NumPy and SciPy only, both there with JAX, and is one wheel of a few MB.)

    Raises: `InputError` when LightGBM is not installed.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # not installed, or without the libraries it links to
        raise InputError(f"the gbt baseline needs lightgbm ({error}); from the clone: `pip install '.[gbt]'`") from None
    sample = sample_of(rows, seen=False)
    prepared = jax.jit(
        lambda: gbt_inputs(rows.family, bounded(rows.family, sample.gpu, sample.batch), sample.batch, sample.isolated)
    )
    inputs = np.asarray(prepared(), np.float64)
    counts = np.bincount(rows.device, minlength=len(rows.devices))
    data = lightgbm.Dataset(inputs, np.log(rows.seconds), weight=1.0 / counts[rows.device])
    booster = lightgbm.train({**GBT_SETTINGS, "seed": seed}, data, num_boost_round=TREES)
    return FittedBaseline("gbt", {rows.family.network: forest_arrays(booster.dump_model()["tree_info"])})


def forest_arrays(trees: list[dict[str, Any]]) -> Forest:
    """LightGBM's dumped trees as a `Forest`, padded to `TREES` trees of equal size.

    Thresholds are rounded down to float32, so that float32 inputs fall on the side they fell on in float64.
    """
    nodes, count = 2 * LEAVES - 1, max(TREES, len(trees))
    columns = {
        name: np.zeros((count, nodes), np.float32) for name in ("feature", "threshold", "left", "right", "value")
    }
    # A leaf is its own child, so that all trees can be walked as many steps down, past the leaf that is reached.
    for position, tree in enumerate(trees):
        free = iter(range(1, nodes))
        queue = [(0, tree["tree_structure"])]
        while queue:
            at, node = queue.pop()
            if "leaf_value" in node:
                children, cells = (at, at), {"value": node["leaf_value"]}
            else:
                children = (next(free), next(free))
                cells = {"feature": node["split_feature"], "threshold": _rounded_down(node["threshold"])}
                queue += list(zip(children, (node["left_child"], node["right_child"]), strict=True))
            for name, cell in {**cells, "left": children[0], "right": children[1]}.items():
                columns[name][position, at] = cell
    return Forest(**{name: jnp.asarray(cells) for name, cells in columns.items()})


def _rounded_down(value: float) -> np.float32:
    near = np.float32(value)
    return near if near <= value else np.nextafter(near, np.float32(-np.inf))
