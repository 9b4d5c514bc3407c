"""Speed in bulk: many kernels beside the bare networks, many machines; not part of the test run.

On one core, so that figures compare:

    XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" \
        taskset -c 0 python -m pytest benchmarks -p no:xdist --benchmark-only
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from ratios import best_s
from workload import H100, bare_networks, forecast, many_machines, mixed_kernels, predictor, value, value_and_gradient

import neusight_jax as nj
from neusight_jax.model.latency import on_device, plain_sum


@pytest.fixture(scope="module")
def model() -> Any:
    return predictor()


@pytest.fixture(scope="module")
def table() -> Any:
    return mixed_kernels()


@pytest.mark.parametrize("work", [bare_networks, forecast, value, value_and_gradient])
def test_a_hundred_thousand_kernels(benchmark: Any, work: Any, model: Any, table: Any) -> None:
    run = work(model, table)
    run()
    benchmark.pedantic(run, rounds=5, iterations=1)


def test_a_thousand_machines(benchmark: Any, model: Any) -> None:
    run = many_machines(model)
    run()
    benchmark.pedantic(run, rounds=3, iterations=1)


def test_many_machines_share_rows_and_blocks(model: Any) -> None:
    """One step of GPT-3 XL on 2,000 machines, CPU time over that of every row, padding too, on all at once."""
    kernels = nj.graph_from_config("gpt3-xl", batch_size=2, sequence_length=2048, mode="training").kernels
    gpus = nj.stack_gpus([H100.replace(mem_bytes_per_s=rate) for rate in np.linspace(2e12, 8e12, 2000)])
    many = jax.vmap(nj.latency, in_axes=(None, 0, None))
    plain = jax.jit(jax.vmap(plain_sum, in_axes=(None, 0, None, None, None)))
    runs = (
        lambda: jax.block_until_ready(many(model, gpus, kernels)),
        lambda: jax.block_until_ready(plain(model, on_device(gpus), kernels, 0.0, 0.0)),
    )
    (_, shared), (_, whole) = (best_s(run, rounds=3) for run in runs)
    assert shared < 0.45 * whole, (shared, whole)
