"""Time and memory of the whole question: eight GPU types in all layouts, the estimate and the engine.

    python -m benchmarks.serving_speed [MODEL]

Prints seconds of wall and of CPU of a first and a second answer in one process, of one load of 1,000 requests by the
engine where the extra `serving` is installed, and the most memory so far.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import neusight_jax as nj
from neusight_jax.serving import simulators
from neusight_jax.serving.choices import Serving

MACHINES = ("H100", "H200", "A100-SXM4-80GB", "L40S", "L4", "NVIDIA B200", "NVIDIA GB200", "MI300X")
LOAD = {"input_tokens": 2000, "output_tokens": 500, "users": 50, "ttft_s": 1.0, "tpot_s": 0.05}


def timed(what: str, run: Callable[[], Serving]) -> None:
    """Print what one answer took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {wall:.1f} s, {cpu:.1f} s of CPU, {len(found.choices)} layouts, {most:.2f} GiB at most", flush=True)


def main() -> None:
    """Print the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen3-32b")
    model = parser.parse_args().model
    predictor = nj.load_predictor("tensorcore")

    def ask(method: str, machines: tuple[str, ...] = MACHINES) -> Serving:
        return nj.serve(predictor, machines, model, method=method, disaggregated=True, **LOAD)

    ways = ["estimate", *(["engine"] if simulators.installed() else [])]
    for way in ways:
        timed(f"{way}, first", lambda way=way: ask(way))
        for _ in range(3):
            timed(f"{way}, again", lambda way=way: ask(way))
    if not simulators.installed():
        return
    run = simulators.run

    def one(*args: object, **kwargs: object) -> simulators.Run:
        cpu = time.thread_time()
        found = run(*args, **kwargs)  # type: ignore[arg-type]
        spent.append(time.thread_time() - cpu)
        return found

    spent: list[float] = []
    from neusight_jax.serving import under_load

    under_load.run = one  # type: ignore[assignment]
    ask("engine", MACHINES[:1])
    print(f"one run of 1,000 requests: {min(spent):.2f} to {max(spent):.2f} s of CPU")


if __name__ == "__main__":
    main()
