"""Time and memory of the whole question: eight GPU types in all layouts, the estimate and the engine.

    python -m benchmarks.serving_speed [MODEL]

Prints seconds of wall and of CPU of a first and a second answer in one process, of one load of 1,000 requests by the
engine where the extra `serving` is installed, and the most memory so far. There also tokens a second at most load, of
the closed form over the engine's, for short and long prompts and answers (alone with `--loads`).
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from unittest.mock import patch

import jax
import numpy as np

import neusight_jax as nj
from neusight_jax.model.predictor import Predictor
from neusight_jax.serving import simulators
from neusight_jax.serving.choices import Serving
from neusight_jax.serving.layouts import named_machines, replicas
from neusight_jax.serving.steady import Lengths, demand, steady
from neusight_jax.serving.steps import load_model
from neusight_jax.serving.times import LEARNED, usual_options

MACHINES = ("H100", "H200", "A100-SXM4-80GB", "L40S", "L4", "NVIDIA B200", "NVIDIA GB200", "MI300X")
LOAD = {"input_tokens": 2000, "output_tokens": 500, "users": 50, "ttft_s": 1.0, "tpot_s": 0.05}


def timed(what: str, run: Callable[[], Serving]) -> None:
    """Print what one answer took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {wall:.1f} s, {cpu:.1f} s of CPU, {len(found.choices)} layouts, {most:.2f} GiB at most", flush=True)


SHAPES = ((128, 128), (2048, 128), (128, 2048))
"""Tokens of a prompt and of an answer."""


def loads(predictor: Predictor, name: str) -> None:
    """Print tokens a second of the closed form and of the engine, of replicas of two GPUs as full as they can be."""
    machines, model = named_machines(("H100", "H200", "NVIDIA B200")), load_model(name)
    options = {gpu: usual_options(float(np.asarray(each.gpu.mem_bytes)), gpu) for gpu, each in machines.items()}
    for shape in SHAPES:
        lengths = Lengths(*shape)
        for replica in replicas(predictor, machines, model, lengths, sum(shape), options, LEARNED, [2]):
            assert replica.times is not None
            assert replica.memory is not None
            times, setup, users = replica.times[0], replica.options, float(replica.most)
            state = jax.jit(steady)(times, demand(lengths, setup), users, users)
            held = replica.memory.requests * lengths.mean_context
            engine = simulators.run(times, setup, held, lengths=lengths, users=users)
            rates = [rate * lengths.output_tokens for rate in (float(state.rate), engine.rate)]
            told = f"{replica.gpu}, {shape[0]} in, {shape[1]} out, {users:g} users"
            print(
                f"{told}: {rates[0]:,.0f} tokens/s, engine {rates[1]:,.0f}, ratio {rates[0] / rates[1]:.2f}", flush=True
            )


def main() -> None:
    """Print the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen3-32b")
    parser.add_argument("--loads", action="store_true", help="only tokens a second at most load, against the engine")
    options = parser.parse_args()
    model = options.model
    predictor = nj.load_predictor("tensorcore")
    if options.loads:
        return loads(predictor, model)

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

    with patch.object(under_load, "run", one):
        ask("engine", MACHINES[:1])
    print(f"one run of 1,000 requests: {min(spent):.2f} to {max(spent):.2f} s of CPU")
    loads(predictor, model)


if __name__ == "__main__":
    main()
