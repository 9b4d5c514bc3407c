"""Time and memory of the whole question: eight GPU types in all layouts, the estimate and the engine.

    python -m benchmarks.serving_speed [MODEL]
    python -m benchmarks.serving_speed llama-3.1-8b --steps

Prints seconds of wall and of CPU of a first and a second answer in one process, of one load of 1,000 requests by the
engine where the extra `serving` is installed, and the most memory so far. There also tokens a second at most load, of
the closed form over the engine's, for short and long prompts and answers (alone with `--loads`).

With --steps, CPU microseconds of a decode step of a model that is asked for by itself, and of many in one call, each
with its own batch and context; and with the gradient by the machine.
"""

from __future__ import annotations

import argparse
import functools
import resource
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

import neusight_jax as nj
from neusight_jax.hardware.cluster import on_device
from neusight_jax.model.predictor import Predictor
from neusight_jax.serving import simulators
from neusight_jax.serving.choices import Serving
from neusight_jax.serving.layouts import Ranks, named_machines, replicas
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


DISTINCT = 64
"""Steps of different batches and contexts."""
SHAPES = ((128, 128), (2048, 128), (128, 2048))
"""Tokens of a prompt and of an answer."""


def loads(predictor: Predictor, name: str) -> None:
    """Print tokens a second of the closed form and of the engine, of replicas of two GPUs as full as they can be."""
    machines, model = named_machines(("H100", "H200", "NVIDIA B200")), load_model(name)
    options = {gpu: usual_options(float(np.asarray(each.gpu.mem_bytes)), gpu) for gpu, each in machines.items()}
    for shape in SHAPES:
        lengths = Lengths(*shape)
        for replica in replicas(predictor, machines, model, lengths, sum(shape), options, LEARNED, Ranks([2])):
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


def single_steps(predictor: Predictor, name: str) -> None:
    """Print what a step takes: a call, a compiled call, and a call of many tables."""
    gpu, random = nj.load_gpu(MACHINES[0]), np.random.default_rng(0)
    sizes = zip(random.integers(1, 257, DISTINCT), random.integers(128, 16_384, DISTINCT), strict=True)
    tables = [
        nj.graph_from_config(name, batch_size=int(batch), kv_length=int(context), mode="decode", dtype="bf16").kernels
        for batch, context in sizes
    ]
    one = jax.jit(lambda table: nj.latency(predictor, gpu, table))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "nj.latency": (1, lambda: nj.latency(predictor, gpu, tables[0])),
        "jax.jit(nj.latency)": (1, functools.partial(jax.jit(nj.latency), predictor, gpu, tables[0])),
        "jax.jit of the table alone": (1, lambda: one(tables[0])),
    }
    both = jax.value_and_grad(lambda machine, table: nj.latency(predictor, machine, table))
    of_many = {
        "value": jax.jit(jax.vmap(lambda table: nj.latency(predictor, gpu, table))),
        "value and gradient": jax.jit(jax.vmap(lambda table: both(on_device(gpu), table))),
    }
    for count in (64, 1024):
        stack = jax.tree.map(lambda *columns: np.stack(columns), *(tables * (count // DISTINCT)))
        calls |= {f"{count} tables, {what}": (count, lambda f=f, s=stack: f(s)) for what, f in of_many.items()}
    for what, (count, run) in calls.items():
        times = []
        for _ in range(200 if count == 1 else 8):
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(run())
            times.append((time.process_time() - cpu, time.perf_counter() - wall))
        cpu, wall = (min(each[1:]) / count * 1e6 for each in zip(*times, strict=True))
        print(f"{what}: {cpu:.0f} us of CPU a step, {wall:.0f} of wall, first call {times[0][0]:.1f} s", flush=True)


def main() -> None:
    """Print the timings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen3-32b")
    parser.add_argument("--loads", action="store_true", help="only tokens a second at most load, against the engine")
    parser.add_argument("--steps", action="store_true", help="only single steps, asked for one by one and many at once")
    options = parser.parse_args()
    model = options.model
    predictor = nj.load_predictor("tensorcore")
    if options.steps:
        return single_steps(predictor, model)
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
