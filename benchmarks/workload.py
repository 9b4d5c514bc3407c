"""What the benchmarks time: 100,000 mixed kernels, the one function, and the bare networks on the same rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import neusight_jax as nj
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.network import Network, apply_network
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import element_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from predictors import random_gpus, random_kernels

ROWS = 100_000
GPUS = 1000
H100 = nj.load_gpu("NVIDIA H100 80GB HBM3")


def predictor() -> Predictor:
    """The sizes of the default recipe; time does not depend on the weights."""
    families = [name for name, family in FAMILIES.items() if family.network == name]
    return untrained("mixture", {"families": families, "hidden": (32, 32), "members": 4})


def mixed_kernels(rows: int = ROWS) -> KernelTable:
    """Rows in equal parts of every family, fp32 and other common dtypes; nothing is padding."""
    table = random_kernels(0, rows // len(FAMILIES), dtypes=4)
    start = 0
    families = {}
    for name, batch in table.families.items():
        row = np.arange(start, start + len(batch.row), dtype=np.int32)
        families[name] = type(batch)(**{**vars(batch), "row": row})
        start += len(row)
    return KernelTable(families)


def networks(model: Any) -> dict[str, Network]:
    """The utilization network of every family that has one."""
    return {name: parameters.network for name, parameters in model.families.items()}


@jax.jit
def _bare(nets: dict[str, Network], features: dict[str, Any]) -> dict[str, Any]:
    return {name: apply_network(nets[FAMILIES[name].network], rows) for name, rows in features.items()}


def bare_networks(model: Any, table: KernelTable) -> Callable[[], Any]:
    """One jitted call of the bare networks on the features of the same rows."""
    features = {}
    for name, batch in table.families.items():
        dims = {key: jnp.asarray(sizes) for key, sizes in batch.dims.items()}
        features[name] = FAMILIES[name].features(dims, element_bytes(jnp.asarray(batch.dtype)))
    nets = networks(model)
    return lambda: jax.block_until_ready(_bare(nets, features))


def forecast(model: Predictor, table: KernelTable) -> Callable[[], Any]:
    """Seconds of every row, in order."""
    return lambda: nj.predict_kernels(model, H100, table)


def value(model: Predictor, table: KernelTable) -> Callable[[], Any]:
    """The sum over all kernels."""
    run = jax.jit(nj.latency)
    return lambda: jax.block_until_ready(run(model, H100, table))


def value_and_gradient(model: Predictor, table: KernelTable) -> Callable[[], Any]:
    """The sum and its gradient with respect to the GPU."""
    run = jax.jit(jax.value_and_grad(nj.latency, argnums=1))
    return lambda: jax.block_until_ready(run(model, H100, table))


def many_machines(model: Predictor, count: int = GPUS) -> Callable[[], Any]:
    """One training step of GPT-2 on many machines."""
    graph = nj.graph_from_config("gpt2", batch_size=4, sequence_length=1024, mode="training")
    gpus: GPU = jax.tree.map(jnp.asarray, random_gpus(0, count))
    run = jax.jit(jax.vmap(nj.latency, in_axes=(None, 0, None)))
    return lambda: jax.block_until_ready(run(model, gpus, graph.kernels))
