"""Speed: a forecast, a gradient and a sweep, compiled; and what compiling costs."""

from typing import Any

import jax
import pytest

import neusight_jax as nj
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.checkpoint import untrained

NETWORKS = ["linear", "bmm", "elementwise", "softmax", "norm"]
Case = tuple[Any, nj.GPU, KernelTable]


@pytest.fixture(scope="module")
def case() -> Case:
    predictor = untrained("mixture", {"families": NETWORKS, "hidden": [32, 32], "members": 4})
    graph = nj.graph_from_config("gpt2-large", batch_size=4, sequence_length=1024, mode="training")
    return predictor, nj.load_gpu("H100"), graph.kernels


def _ready(function: Any, *arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def test_compile(benchmark: Any, case: Case) -> None:
    benchmark.pedantic(
        lambda: jax.jit(lambda gpu: nj.latency(case[0], gpu, case[2])).lower(case[1]).compile(), rounds=2
    )


def test_forecast(benchmark: Any, case: Case) -> None:
    benchmark(_ready, nj.latency, *case)


def test_gradient(benchmark: Any, case: Case) -> None:
    benchmark(_ready, jax.jit(jax.grad(nj.latency, argnums=1)), *case)


def test_sweep_of_1000_gpus(benchmark: Any, case: Case) -> None:
    predictor, gpu, kernels = case
    gpus = nj.stack_gpus([gpu.replace(mem_bytes_per_s=1e12 + 1e9 * step) for step in range(1000)])
    benchmark.pedantic(
        _ready,
        (jax.jit(jax.vmap(nj.latency, in_axes=(None, 0, None))), predictor, gpus, kernels),
        rounds=3,
        warmup_rounds=1,
    )
