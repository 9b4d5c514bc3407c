"""Rivals: their equations by hand, their fits on data whose answer is known, and one door for all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.baselines.gbt import GBTPredictor, gbt_inputs, walk
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels

V100 = "Tesla V100-PCIE-32GB"


def _leaf(value: float) -> dict[str, Any]:
    return {"leaf_value": value}


def _split(feature: int, threshold: float, left: Any, right: Any) -> dict[str, Any]:
    return {"split_feature": feature, "threshold": threshold, "left_child": left, "right_child": right}


def test_a_forest_walks_as_drawn() -> None:
    from neusight_jax.training.boosting import forest_arrays

    trees = [
        _split(1, 0.5, _leaf(1.0), _split(0, -2.0, _leaf(10.0), _leaf(100.0))),
        _split(0, 3.0, _leaf(0.25), _leaf(0.5)),
    ]
    forest = forest_arrays([{"tree_structure": tree} for tree in trees])
    rows = jnp.array([[0.0, 0.5], [0.0, 0.6], [-2.0, 9.0], [4.0, 0.0]], jnp.float32)
    # At or below the threshold goes left.
    np.testing.assert_allclose(walk(forest, rows), [1.25, 100.25, 10.25, 1.5])


def test_trees_as_arrays_say_what_lightgbm_says() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    from neusight_jax.training.boosting import MAX_DEPTH, SETTINGS, forest_arrays

    random = np.random.default_rng(0)
    inputs = random.normal(size=(2000, 5)).astype(np.float32).round(2)  # ties, so that thresholds are met exactly
    target = np.sin(3 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]
    data = lightgbm.Dataset(inputs, target)
    booster = lightgbm.train({**SETTINGS, "num_threads": 1}, data, num_boost_round=40)
    trees = booster.dump_model()["tree_info"]
    found = walk(forest_arrays(trees), jnp.asarray(inputs))
    np.testing.assert_allclose(found, booster.predict(inputs), atol=1e-5)
    assert booster.trees_to_dataframe()["node_depth"].max() <= MAX_DEPTH + 1


def test_gbt_forecasts_through_the_one_function() -> None:
    from neusight_jax.training.boosting import forest_arrays

    forest = forest_arrays([{"tree_structure": _leaf(float(np.log(0.25)))}])
    kernels = table_from_kernels([Kernel("linear", "linear", {"batch": 1, "m": 64, "n": 64, "k": 64}, count=2)])
    predictor = GBTPredictor({"linear": forest})
    gpu = nj.load_gpu(V100)
    assert float(nj.latency(predictor, gpu, kernels)) == pytest.approx(0.5, rel=1e-6)
    assert nj.predict_kernels(predictor, gpu, kernels) == pytest.approx([0.25], rel=1e-6)
    batch = kernels.families["linear"]
    inputs = gbt_inputs(FAMILIES["linear"], gpu, jax.tree.map(jnp.asarray, batch), True)
    assert inputs.shape[0] == len(batch.row)
    assert bool(jnp.all(jnp.isfinite(inputs)))
