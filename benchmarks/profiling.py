"""The profiler's timing method: loop against single calls, repeatability, and a run ten times shorter.

    python benchmarks/profiling.py [--backend jax|torch] [--seconds 0.2] [--rounds 3] [--clock wall|cpu]

Runs on the GPU where there is one, else on the CPU. The runs to compare take turns, so that a busy spell of the machine
meets all of them; the load average is printed before and after. `again` and `short` are the median distance of a long
run from the next one and from the short one after it, the machine's drift between them included; `medians` compares
medians over all rounds, and `paired` takes the median ratio of a short run to the long one before it, in which most of
the drift cancels. `--clock cpu` (jax, CPU) counts processor time, one thread.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time

import numpy as np

from neusight_jax.profiling import jax_backend
from neusight_jax.profiling.case import Case, case_bytes, make_case
from neusight_jax.profiling.clock import Sample, sample
from neusight_jax.profiling.machine import find_machine
from neusight_jax.profiling.run import make_backend

CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("linear", {"m": 64, "n": 64, "k": 64}),
    ("linear", {"m": 256, "n": 512, "k": 512}),
    ("linear", {"m": 1024, "n": 1024, "k": 1024}),
    ("bmm", {"b": 16, "m": 128, "n": 64, "k": 128}),
    ("add", {"b": 64, "h": 1024}),
    ("add", {"b": 2048, "h": 2048}),
    ("gelu", {"b": 512, "h": 1024}),
    ("softmax", {"b": 512, "h": 512}),
    ("ln", {"b": 2048, "h": 1024}),
    ("copy", {"b": 2048, "h": 1024}),
)


def percent_apart(first: float, second: float) -> float:
    """Distance of two times over their mean, %."""
    return 200.0 * abs(first - second) / (first + second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3, help="of every kind of run, taking turns")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    given = parser.parse_args()
    if given.clock == "cpu":
        # One thread, and the processor's time instead of the wall's: what others take of the machine does not count.
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        jax_backend.timer = time.process_time
    backend = make_backend(given.backend)
    cache_bytes = float(np.asarray(find_machine(backend, None).gpu.l2_bytes))
    print(f"{backend.device}, {given.backend}, {given.seconds} s a kernel, {given.clock} clock")
    print(f"load {os.getloadavg()[0]:.1f}")
    columns: dict[str, list[float]] = {"spread": [], "again": [], "short": [], "medians": [], "paired": []}
    print(f"{'kernel':<38} {'loop us':>9} {'call us':>9} " + " ".join(f"{name:>7}" for name in columns))
    for case in (make_case(op, dims) for op, dims in CASES):
        long, short = _runs(case, backend, cache_bytes, given.seconds, given.rounds)
        loop_s = statistics.median(run.loop_s for run in long)
        row = {
            "spread": 100.0 * statistics.median(run.loop_spread for run in long),
            "again": statistics.median(percent_apart(one.loop_s, two.loop_s) for one, two in itertools.pairwise(long)),
            "short": statistics.median(
                percent_apart(one.loop_s, two.loop_s) for one, two in zip(long, short, strict=True)
            ),
            "medians": percent_apart(loop_s, statistics.median(run.loop_s for run in short)),
            "paired": percent_apart(
                1.0, statistics.median(two.loop_s / one.loop_s for one, two in zip(long, short, strict=True))
            ),
        }
        call_s = statistics.median(run.call_s for run in long)
        shown = " ".join(f"{value:6.1f}%" for value in row.values())
        print(f"{case.key:<38} {1e6 * loop_s:9.1f} {1e6 * call_s:9.1f} {shown}", flush=True)
        for name, value in row.items():
            columns[name].append(value)
    for name, values in columns.items():
        within = sum(value <= 10.0 for value in values)
        print(f"{name}: median {statistics.median(values):.1f} %, {within} of {len(values)} within 10 %")
    print(f"load {os.getloadavg()[0]:.1f}")


def _runs(case: Case, backend: object, cache_bytes: float, seconds: float, rounds: int) -> tuple[list[Sample], ...]:
    sets = int(min(max(-(-2.0 * cache_bytes // case_bytes(case)[0]), 2), 8))
    prepared = backend.prepare(case, sets, 0)  # type: ignore[attr-defined]
    long, short = [], []
    for _ in range(rounds):
        long.append(sample(prepared, seconds))
        short.append(sample(prepared, seconds / 10.0))
    return long, short


if __name__ == "__main__":
    main()
