"""Speed in bulk: many kernels beside the bare networks, many machines; not part of the test run.

On one core, so that figures compare:

    XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" \
        taskset -c 0 python -m pytest benchmarks -p no:xdist --benchmark-only
"""

from __future__ import annotations

from typing import Any

import pytest
from workload import bare_networks, forecast, many_machines, mixed_kernels, predictor, value, value_and_gradient


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
