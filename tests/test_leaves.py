"""Slopes by every leaf of tables, machines, weights, jobs and services against central differences, waves and tiles
relaxed; and slopes of exact forecasts by sizes against their differences over many tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import ON_ONE_GPU, as_float64, random_gpus, random_kernels, random_predictor
from small_configs import TINY
from test_gradients import _double

import neusight_jax as nj
from neusight_jax.designs.loads import served, service
from neusight_jax.hardware.cluster import Cluster, Topology
from neusight_jax.job.job import job_from_config
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.kernels.collective import OPS, collective_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.predictor import RooflinePredictor

H100 = nj.load_gpu("H100")
STEP = 1e-6
"""Relative step of the differences, in float64."""
SMOOTH = 1e-3
"""Most that a slope may be off, of d log seconds / d log leaf."""
KERNELS = 13
"""Not the length of any other leaf."""
DATA = (".center", ".scale")
"""Leaves of a network that are no weights: means and spreads of the shapes it was trained on, without slope."""


def walk(seconds: Callable[..., Any], *records: Any) -> dict[str, float]:
    """Worst error of the slope by each leaf of some records, in d log seconds / d log leaf.

    A leaf that has an element for each element of the seconds is compared element by element, any other along a random
    direction.

    Args:
      seconds: of the records, a number or [kernel] where each depends on its element of the leaves only.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(as_float64(records))
    leaves = [np.asarray(leaf) for _, leaf in paths]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    moving = [
        at for at, leaf in enumerate(leaves) if leaf.dtype == np.float64 and leaf.size and not names[at].endswith(DATA)
    ]
    random = np.random.default_rng(0)
    shape = jax.eval_shape(seconds, *jax.tree.unflatten(tree, leaves)).shape
    single = [leaves[at].shape == shape for at in moving]
    steps = [
        leaves[at] * (1.0 if of_one else random.normal(size=leaves[at].shape))
        for at, of_one in zip(moving, single, strict=True)
    ]

    def at(values: list[Any]) -> Any:
        changed = dict(zip(moving, values, strict=True))
        return seconds(*jax.tree.unflatten(tree, [changed.get(place, leaf) for place, leaf in enumerate(leaves)]))

    @jax.jit
    def sides(values: list[Any], steps: list[Any]) -> Any:
        ways = STEP * jnp.concatenate([jnp.eye(len(values)), -jnp.eye(len(values))])
        moved = jax.vmap(lambda way: at([v + w * s for v, w, s in zip(values, way, steps, strict=True)]))(ways)
        value, backwards = jax.vjp(at, values)
        return value, *backwards(jnp.ones_like(value)), moved

    value, slopes, moved = jax.tree.map(np.asarray, sides([leaves[place] for place in moving], steps))
    assert np.all(np.isfinite(value) & (value >= 0.0))  # padding takes no time
    differences = (moved[: len(moving)] - moved[len(moving) :]) / (2.0 * STEP)
    errors = {}
    for number, place in enumerate(moving):
        along, difference = slopes[number] * steps[number], differences[number]
        if not single[number]:
            along, difference = np.sum(along), np.sum(difference)
        scale = np.maximum(value, 1e-30) if single[number] else np.sum(value)
        error = np.max(np.abs(along - difference) / scale)
        errors[names[place]] = float(error) if np.all(np.isfinite(along)) else np.inf
    return errors


def told(name: str, errors: dict[str, float]) -> str:
    """Number of leaves, the worst error, and slopes that are no numbers."""
    none = sum(error == np.inf for error in errors.values())
    return f"{name}: {len(errors)} leaves, worst {max(errors.values()):.1e}, {none} not finite"


def off_steps(table: KernelTable, seed: int = 0) -> KernelTable:
    """Kernels with sizes off every whole number, where no minimum or maximum has two equal sides."""
    random = np.random.default_rng(seed)
    switches = ("operation", "software", "windowed")

    def moved(name: str, size: Any) -> Any:
        size = np.asarray(size, np.float64)
        return size if name in switches else size * np.exp(0.01 * random.uniform(0.1, 1.0, size.shape))

    families = {
        family: replace(batch, dims={name: moved(name, size) for name, size in batch.dims.items()})
        for family, batch in table.families.items()
    }
    return replace(table, families=families)


def messages() -> KernelTable:
    """Collectives between domains."""
    # A group in one domain has no slope by their number: the next domain brings in the network.
    sizes = ((4e8, 16.3, 2.0), (3e6, 32.6, 4.1))
    return table_from_kernels(
        [Kernel("collective", op, collective_dims(op, *size)) for op in OPS for size in sizes], dtype="bf16"
    )


@pytest.mark.parametrize("family", [*ON_ONE_GPU, "collective"])
def test_slopes_by_every_leaf_of_a_family(family: str, record_property: Callable[..., None]) -> None:
    """Of the weights of its network, a machine for each kernel, and its dims and counts, without any whole number."""
    linked = FAMILIES[family].linked
    table = messages() if linked else random_kernels(12, KERNELS, dtypes=5)
    table = off_steps(KernelTable({family: table.families[family]}))
    rows = len(table.families[family].row)
    machine: Any = random_gpus(3, rows).replace(num_sms=np.full(rows, 131.37))
    if linked:
        ones = np.ones(rows)
        machine = Cluster(machine, Topology(0, 3e11 * ones, 4e10 * ones, 6e-7 * ones, 3e-6 * ones, 0.3 * ones), 0)
    network = FAMILIES[family].network
    whole: Any = random_predictor("mixture", 6, members=1)
    predictor = replace(whole, families={network: whole.families[network]}, tiles={network: whole.tiles[network]})

    def seconds(predictor: Any, machine: Any, table: KernelTable) -> Any:
        return kernel_latency(predictor, machine, table, relaxation=1.0)[family] * table.families[family].count

    with _double():
        errors = walk(seconds, predictor, machine, table)
    record_property("shown", told(family, errors))
    assert max(errors.values()) < SMOOTH, {name: error for name, error in errors.items() if not error < SMOOTH}


def test_slopes_by_every_leaf_of_a_job_and_a_service(record_property: Callable[..., None]) -> None:
    """Of the cluster, the software and the kernels of a job; of the GPU, the engine and the requests of a service."""
    layout = Parallelism(tensor=2, pipeline=2, data=2, sequence_parallel=True, zero=1)
    config = {**TINY, "num_hidden_layers": 4}
    job = job_from_config(config, layout, global_batch_size=16, sequence_length=128, dtype="bf16")
    job = replace(job, kernels=off_steps(job.kernels))
    gpu = H100.replace(mem_bytes=4e9)
    cluster = Cluster(gpu, Topology(4, 4.4e11, 4.6e10), 8)
    targets: dict[str, Any] = {"ttft_s": 0.1, "tpot_s": 0.004, "dtypes": {"dtype": "bf16"}}
    replica: Any = service(
        TINY, gpu, 500, 130, options={"max_batch": 64, "chunk_tokens": 1024, "prefix_share": 0.1}, **targets
    ).step
    replica = replace(replica, steps=replace(replica.steps, kernels=off_steps(replica.steps.kernels)))
    predictor = RooflinePredictor()
    with _double():
        errors = {
            "job": walk(lambda cluster, job: nj.latency(predictor, cluster, job, relaxation=0.01), cluster, job),
            "service": walk(lambda replica, gpu: served(replica, predictor, gpu, 1.0)[0]["seconds"], replica, gpu),
        }
    for name, each in errors.items():
        record_property("shown", told(name, each))
        assert max(each.values()) < SMOOTH, {leaf: error for leaf, error in each.items() if not error < SMOOTH}


LARGE: dict[str, dict[str, float]] = {
    "linear": {"batch": 1, "m": 8192, "n": 4096, "k": 4096},
    "gemm": {"batch": 1, "m": 8192, "n": 8192, "k": 8192},
    "norm": {"rows": 65536, "cols": 4096, "reads": 1, "writes": 1},
    "elementwise": {"rows": 65536, "cols": 4096, "reads": 2, "writes": 1},
    "grouped_gemm": {"tokens": 16384, "rows": 32768, "active": 8, "hidden": 4096, "inner": 8192},
    "prefill": {
        **{"requests": 8, "queries": 32768, "keys": 32768, "pairs": 6.7e7, "context": 32768},
        **{"heads": 32, "kv_heads": 8, "head_size": 128, "kv_share": 1, "windowed": 0},
    },
}
"""Kernels of many tiles and waves."""


@pytest.mark.parametrize("family", LARGE)
def test_exact_forecasts_have_the_slopes_of_their_wide_differences(family: str) -> None:
    """Tiles and waves are stairs; by its sizes a forecast has the slope of their ramps."""
    kernel = Kernel(family, FAMILIES[family].ops[0], LARGE[family])
    predictor, gpu = untrained("mixture", {"families": [FAMILIES[family].network], "hidden": [8], "members": 1}), H100
    table = table_from_kernels([kernel], dtype="bf16" if FAMILIES[family].tensor_core else "fp32")
    batch = table.families[family]
    widths = {name: size / 4.0 for name, size in LARGE[family].items() if size > 8 and name != "head_size"}

    def seconds(dims: dict[str, Any]) -> Any:
        return nj.latency(predictor, gpu, replace(table, families={family: replace(batch, dims=dims)}))

    ways = [(name, sign * width) for name, width in widths.items() for sign in (1.0, -1.0)]
    moved = {name: np.stack([size + step * (name == way) for way, step in ways]) for name, size in batch.dims.items()}
    (value, slopes), beside = jax.jit(
        lambda dims, moved: (jax.value_and_grad(seconds)(dims), jax.vmap(seconds)(moved))
    )(batch.dims, moved)
    for place, (name, width) in enumerate(widths.items()):
        share = LARGE[family][name] / float(value)
        difference = float(beside[2 * place] - beside[2 * place + 1]) / (2.0 * width) * share
        assert float(slopes[name][0]) * share == pytest.approx(difference, rel=0.1, abs=0.02), name
