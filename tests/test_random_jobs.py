"""Physics of whole jobs on 20,000 random clusters with random software, by one program: no violations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.hardware.cluster import Topology
from neusight_jax.hardware.variant import RATES
from neusight_jax.job.job import job_from_config
from neusight_jax.job.step import seconds_of_job
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.model.software import NAMES

CLUSTERS = 20_000
SLACK = 1e-4
SLOWER: dict[str, tuple[str, ...]] = {
    "memory": ("mem_bytes_per_s",),
    "clock": tuple(name for name in RATES if name not in ("mem_bytes_per_s", "tdp_w", "link_bytes_per_s")),
    "link": ("link_bytes_per_s",),
    "network": ("nic_bytes_per_s",),
    "hops": ("link_latency_s", "nic_latency_s"),
}
"""Figures that fall together; latencies rise."""
OF_LINKS = ("link_bytes_per_s", "nic_bytes_per_s", "link_latency_s", "nic_latency_s")
HOST = ("launch_s", "expert_launch_s", "step_s")
FIGURES = (*dict.fromkeys((*RATES, *OF_LINKS)), *HOST)
TIMES = np.array([-1.0 if name.endswith("_s") and not name.endswith("_per_s") else 1.0 for name in FIGURES])
LAYOUT = nj.Parallelism(tensor=2, pipeline=2, data=4, expert=2, zero=1, sequence_parallel=True)
EXPERTS = {**TINY, "model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 64}
EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def test_no_job_beats_its_kernels_or_is_faster_on_a_slower_cluster() -> None:
    predictor, gpu, random = RooflinePredictor(), nj.load_gpu("H100"), np.random.default_rng(7)
    own = job_from_config(EXPERTS, LAYOUT, global_batch_size=8, sequence_length=512, overlaps=["shards", "gradients"])

    def step(logs: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """ln of a step, and the seconds of its kernels on the busiest rank, where figures are so many times H100's."""
        factor = dict(zip(FIGURES, jnp.exp(logs), strict=True))
        chip = gpu.replace(**{name: getattr(gpu, name) * factor[name] for name in RATES})
        links = (gpu.link_bytes_per_s, 5e10, 6e-7, 2.7e-6)
        joined = {name: value * factor[name] for name, value in zip(OF_LINKS, links, strict=True)}
        given = {name: getattr(own.software, name) * each for name, each in zip(NAMES, numbers, strict=True)}
        software = nj.Software(**{**given, **{name: given[name] * factor[name] for name in HOST}})
        machine = nj.Cluster(chip, Topology(4, **joined), LAYOUT.gpus)
        kernels = jnp.sum(seconds_of_job(predictor, machine, own).kernels, axis=0)
        least = jnp.max(jnp.sum(kernels[:, :3], axis=1)) * own.plan.micro_batches
        return jnp.log(nj.latency(predictor, machine, own.replace(software=software))), least

    def judged(asked: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        logs, numbers = asked
        value, slope, least = jax.jvp(lambda at: step(at, numbers), (logs,), (jnp.asarray(TIMES, float),), has_aux=True)
        return value, slope, least

    logs = random.uniform(-2.0, 2.0, (CLUSTERS, len(FIGURES)))
    numbers = np.exp(random.normal(0.0, 0.3, (CLUSTERS, len(NAMES))))
    numbers[:, NAMES.index("kernels")] = 1.0 + random.exponential(0.1, CLUSTERS)
    numbers[:, NAMES.index("experts")] = 1.0
    which = random.integers(len(SLOWER), size=CLUSTERS)  # of the figures falls on each cluster
    moves = np.stack([-TIMES * np.isin(FIGURES, names) for names in SLOWER.values()])
    slower = logs + random.exponential(1.0, (CLUSTERS, 1)) * moves[which]
    asked = (jnp.asarray(np.concatenate([logs, slower]), float), jnp.asarray(np.tile(numbers, (2, 1)), float))
    run = jax.jit(lambda each: jax.lax.map(judged, each, batch_size=1000))
    value, slope, least = (np.asarray(each).reshape(2, CLUSTERS) for each in run(asked))
    assert np.isfinite(value).all()
    assert np.sum(value < np.log(least) - SLACK) == 0
    longer = value[1] - value[0]
    assert np.sum(longer < -SLACK) == 0
    for place, name in enumerate(SLOWER):
        assert np.mean(longer[which == place] > 1e-3) > 0.1 or name == "hops", name  # but by roofline each matters
    assert np.max(np.abs(slope + 1.0)) < 1e-3
