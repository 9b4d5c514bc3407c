"""Costs beside their floors: forecasts over bare networks, gradients over values; both should stay below 4.

XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" taskset -c 0 python benchmarks/ratios.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import workload


def best_s(run: Callable[[], Any], rounds: int = 7) -> tuple[float, float]:
    """CPU seconds of the first call (compilation included), and of the fastest of the others, all threads together."""
    times = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        run()
        times.append(time.process_time() - begin)
    return times[0], min(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=workload.ROWS)
    parser.add_argument("--gpus", type=int, default=workload.GPUS)
    chosen = parser.parse_args()
    model, table = workload.predictor(), workload.mixed_kernels(chosen.rows)
    rows = table.num_rows
    seconds = {}
    for work in (workload.bare_networks, workload.forecast, workload.value, workload.value_and_gradient):
        first, seconds[work.__name__] = best_s(work(model, table))
        fastest = seconds[work.__name__]
        print(f"{work.__name__:<20} {fastest * 1e3:9.1f} ms  {rows / fastest:12,.0f} kernels/s  first {first:5.1f} s")
    first, machines = best_s(workload.many_machines(model, chosen.gpus), rounds=3)
    rate = chosen.gpus / machines
    print(f"{'many_machines':<20} {machines * 1e3:9.1f} ms  {rate:12,.0f} GPUs/s     first {first:5.1f} s")
    print(f"forecast / bare networks    {seconds['forecast'] / seconds['bare_networks']:.2f}  (target: at most 4)")
    print(f"value and gradient / value  {seconds['value_and_gradient'] / seconds['value']:.2f}  (target: at most 4)")


if __name__ == "__main__":
    main()
