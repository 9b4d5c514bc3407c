"""How fast steps of jobs are forecast: value and gradient of a schedule, and layouts of a search.

Usage: python -m benchmarks.job_speed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import neusight_jax as nj
from neusight_jax.graph.configs.decoder import read_decoder
from neusight_jax.job.parallelism import layouts_of
from neusight_jax.job.pieces import Ask, Pieces
from neusight_jax.job.schedule import pipeline_seconds, schedule_table
from neusight_jax.job.stages import job_config
from neusight_jax.layouts.assembly import assemble, best_of, timed
from neusight_jax.model.software import LEARNED, USUAL_OVERLAPS

MODEL, GPUS, BATCH, LENGTH = "llama-3.1-70b", 64, 256, 4096


def fastest(run: Callable[[], Any], times: int = 10) -> float:
    """The shortest of some runs after one that compiles, seconds."""
    jax.block_until_ready(run())
    found = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    """Time and print."""
    schedule, durations = schedule_table("interleaved", 16, 384, 4), jnp.ones((64, 3), jnp.float32)
    run = jax.jit(jax.value_and_grad(lambda own: pipeline_seconds(schedule, own)))
    seconds = fastest(lambda: run(durations))
    print(f"interleaved, 16 ranks, 384 micro-batches, 4 chunks: value and gradient {1e3 * seconds:.1f} ms")

    predictor, cluster = nj.load_predictor("tensorcore"), nj.load_cluster(f"{GPUS}x H100")
    config = job_config(MODEL)
    model = read_decoder(config, LENGTH)
    pieces = Pieces(Ask(config, model, BATCH, LENGTH, "bf16", "adamw", "fp32", "flash", True, USUAL_OVERLAPS))
    every = list(layouts_of(nj.Space(), model, GPUS, BATCH, LENGTH))
    memory = [pieces.memory(each) for each in every]
    fit = [at for at, each in enumerate(memory) if each.total <= cluster.gpu.mem_bytes]
    assembly = assemble(pieces, cluster.topology.gpus_per_domain, [every[at] for at in fit], [memory[at] for at in fit])

    def ranked() -> list[int]:
        return best_of(assembly, timed(assembly, assembly.seconds(predictor, cluster), LEARNED), 5)

    seconds = fastest(ranked, 3)
    print(
        f"{MODEL} on {GPUS} GPUs: {len(fit):,} of {len(every):,} layouts fit, {assembly.table.num_rows:,} kernels, ",
        end="",
    )
    print(f"{len(assembly.messages):,} messages; ranked in {seconds:.2f} s, {len(fit) / seconds:,.0f} a second")


if __name__ == "__main__":
    main()
