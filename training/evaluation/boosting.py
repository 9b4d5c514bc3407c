"""Fitting the `gbt` baseline with LightGBM, and its trees as arrays.

LightGBM rather than scikit-learn: it needs NumPy and SciPy only, both there with JAX, and is one wheel of a few MB.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from neusight_jax.baselines.gbt import LEAVES, MAX_DEPTH, TREES, Forest, gbt_inputs
from neusight_jax.errors import InputError
from neusight_jax.training.fit import sample_of
from neusight_jax.training.rows import Rows

SETTINGS: dict[str, Any] = {
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


def boosting_library() -> Any:
    """LightGBM.

    Raises: `InputError` when it is not installed.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # not installed, or without the libraries it links to
        raise InputError(f"the gbt baseline needs lightgbm ({error}); from the clone: `pip install '.[gbt]'`") from None
    return lightgbm


def fit_forest(rows: Rows, seed: int) -> Forest:
    """Trees for the log of the measured time, every GPU with equal weight.

    Raises: `InputError` when LightGBM is not installed.
    """
    lightgbm = boosting_library()
    sample = sample_of(rows, seen=False)
    prepared = jax.jit(lambda: gbt_inputs(rows.family, sample.gpu, sample.batch, sample.isolated))
    inputs = np.asarray(prepared(), np.float64)
    counts = np.bincount(rows.device, minlength=len(rows.devices))
    data = lightgbm.Dataset(inputs, np.log(rows.seconds), weight=1.0 / counts[rows.device])
    booster = lightgbm.train({**SETTINGS, "seed": seed}, data, num_boost_round=TREES)
    return forest_arrays(booster.dump_model()["tree_info"])


def forest_arrays(trees: list[dict[str, Any]]) -> Forest:
    """LightGBM's dumped trees as a `Forest`, padded to `TREES` trees of equal size.

    Thresholds are rounded down to float32, so that float32 inputs fall on the side they fell on in float64.
    """
    nodes = 2 * LEAVES - 1
    count = max(TREES, len(trees))
    columns = {
        name: np.zeros((count, nodes), np.float32) for name in ("feature", "threshold", "left", "right", "value")
    }
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
