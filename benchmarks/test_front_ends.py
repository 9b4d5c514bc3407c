"""Speed of the front-end for JAX functions: a jaxpr of 1,000 equations, and a scan of 1,000 steps beside one step."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import neusight_jax as nj
from neusight_jax.model.checkpoint import untrained

NETWORKS = ["linear", "bmm", "conv", "elementwise", "softmax", "norm"]


@pytest.fixture(scope="module")
def predictor() -> Any:
    return untrained("mixture", {"families": NETWORKS, "hidden": [32, 32], "members": 4})


def _forecast(predictor: Any, fn: Any, *shapes: tuple[int, ...]) -> float:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return nj.predict(predictor, nj.load_gpu("H100"), nj.graph_from_function(fn, *args)).total_s


def test_thousand_equations(benchmark: Any, predictor: Any) -> None:
    def long(x: Any, w: Any) -> Any:
        for _ in range(250):
            x = jnp.tanh(x @ w) * 0.5 + x
        return x

    benchmark.pedantic(_forecast, (predictor, long, (64, 64), (64, 64)), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("steps", [1, 1000])
def test_scan(benchmark: Any, predictor: Any, steps: int) -> None:
    def loop(w: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), jnp.zeros((8, 32)), xs)

    benchmark.pedantic(_forecast, (predictor, loop, (32, 32), (steps, 8, 32)), rounds=5, warmup_rounds=1)
