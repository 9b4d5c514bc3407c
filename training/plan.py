"""The kernels to measure first on a GPU nobody has measured: plans of ten and of fifty, chosen by what they tell.

Candidates are kernels of the catalog's models and shapes drawn over the range such kernels come from; `design` takes
those that lower the uncertainty of all of them most, for the GPU named, or on average over a spread of GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pandas as pd

from neusight_jax.datasets import schema
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import write_atomically
from neusight_jax.graph.configs.build import graph_from_config, is_eager
from neusight_jax.graph.configs.config import list_models
from neusight_jax.hardware.catalog import catalog_gpu
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.rowwise import BINARY_OPS
from neusight_jax.kernels.table import Kernel, KernelBatch, KernelTable, table_from_kernels
from neusight_jax.model.checkpoint import load_predictor
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.training.calibration import prior_of, telling_order
from neusight_jax.units import GIB

PLANS: dict[str, dict[str, int]] = {
    "quick": {"linear": 3, "bmm": 3, "elementwise": 2, "softmax": 1, "norm": 1},
    "full": {"linear": 10, "bmm": 10, "elementwise": 10, "softmax": 10, "norm": 10},
}
"""Kernels of each family by plan."""
SPREAD: tuple[str, ...] = ("T4", "V100", "A100-PCIE-40GB", "L4", "RTX4090", "H100 PCIe")
"""GPUs a plan is averaged over when none is named."""
SYNTHETIC = 200
"""Candidates of a family drawn at random."""
MOST_MODEL_KERNELS = 200
"""Candidates of a family taken from models."""
LARGEST_BYTES = 1.0 * GIB
LARGEST_FLOP = 1e12
"""Larger kernels are not asked for: they would not fit, or take a small GPU more than a quarter of a second."""
STEP = 8
"""Drawn dims are multiples of this, as in models."""


@dataclass(frozen=True)
class Plan:
    """Kernels to measure.

    Attributes:
      gpu: it was chosen for, or None.
      frame: device, op, b, m, n, k, h in the schema's letters, latency_s (empty); the most telling first.
    """

    gpu: str | None
    frame: pd.DataFrame

    def write(self, path: Path | str) -> None:
        """Write it as .csv or .parquet, whole or not at all."""
        target = Path(path)
        if target.suffix.lower() not in (".csv", ".parquet"):
            raise InputError(f"a plan is written as .csv or .parquet, not {target.name}; give another --output")

        def write(beside: Path) -> None:
            if target.suffix.lower() == ".csv":
                self.frame.to_csv(beside, index=False)
            else:
                self.frame.to_parquet(beside, index=False)

        write_atomically(target, write)


def plan_kernels(name: str, gpu: str | None = None, checkpoint: str = "fp32") -> Plan:
    """Choose the kernels to measure first.

    Args:
      name: key of `PLANS`; gpu: the GPU to be measured (a name or a file); without it, the plan suits any.
      checkpoint: of kind `mixture`; its forecast says which limit each kernel would tell about.
    Raises: `InputError` for unknown names and checkpoints of another kind.
    """
    if name not in PLANS:
        raise unknown_name("plan", name, PLANS)
    predictor = load_predictor(checkpoint)
    if not isinstance(predictor, MixturePredictor):
        raise InputError(f"{checkpoint}: plans are chosen with a checkpoint of kind mixture, such as fp32")
    label, machines = None, [catalog_gpu(device) for device in SPREAD]
    if gpu is not None:
        label, machine = load_named_gpu(gpu)
        machines = [machine]
    records = []
    for family, count in PLANS[name].items():
        if predictor.covers(FAMILIES[family]):
            kernels = candidates(family)
            records += [_record(kernels[at]) for at in _chosen(predictor, machines, family, kernels, count)]
    columns = ("op", "b", "m", "n", "k", "h")
    frame = pd.DataFrame(records, columns=list(columns)).astype(dict.fromkeys(columns[1:], "Int64"))
    frame.insert(0, "device", label)
    return Plan(label, frame.assign(latency_s=np.nan))


def candidates(family: str) -> list[Kernel]:
    """Kernels of a family worth measuring: of the catalog's models first, then drawn; the same list every time."""
    random = np.random.default_rng(0)
    kernels: dict[tuple[float, ...], Kernel] = {}
    for batch in (table.families[family] for table in _model_tables() if family in table.families):
        for kernel in _measurable(family, batch):
            kernels.setdefault((*kernel.dims.values(),), kernel)
    of_models = list(kernels.values())
    order = random.permutation(len(of_models))[:MOST_MODEL_KERNELS]
    kept = [of_models[at] for at in sorted(order)]
    while len(kept) < len(order) + SYNTHETIC:
        kept.append(_drawn(family, random))
        if not _fits(kept[-1]):
            kept.pop()
    return kept


@functools.cache
def _model_tables() -> tuple[KernelTable, ...]:
    """Kernels of the catalog's models in training, forward pass included, with one sequence and with eight."""
    workloads = [(model, batch_size) for model in list_models() if is_eager(model) for batch_size in (1, 8)]
    return tuple(graph_from_config(model, batch_size, 512, "training").kernels for model, batch_size in workloads)


def _measurable(family: str, batch: KernelBatch) -> list[Kernel]:
    """Kernels that the measurement schema can name, with whole dims."""
    ops = {schema.family_op(op)[1] for op in schema.OPS if op not in schema.CONV_OPS}
    out = []
    for at in np.flatnonzero(np.asarray(batch.row) >= 0):
        op = FAMILIES[family].ops[int(batch.op[at])]
        dims = {name: float(column[at]) for name, column in batch.dims.items()}
        if op in ops and all(value == int(value) for value in dims.values()):
            kernel = Kernel(family, op, {**dims, **_passes(family, op)})
            out += [kernel] if _fits(kernel) else []
    return out


def _passes(family: str, op: str) -> dict[str, float]:
    return {} if FAMILIES[family].matrix else {"reads": 2.0 if op in BINARY_OPS else 1.0, "writes": 1.0}


def _drawn(family: str, random: np.random.Generator) -> Kernel:
    def size(low: float, high: float) -> float:
        return float(max(round(np.exp(random.uniform(np.log(low), np.log(high))) / STEP), 1) * STEP)

    if family == "linear":
        return Kernel(
            family, "linear", {"batch": 1.0, "m": size(32, 16384), "n": size(64, 32768), "k": size(64, 16384)}
        )
    if family == "bmm":
        sizes = {name: size(16, 2048) for name in ("m", "n", "k")}
        return Kernel(family, "bmm", {"batch": size(4, 1024), **sizes})
    op = str(random.choice(["add", "mul", "gelu", "tanh"])) if family == "elementwise" else FAMILIES[family].ops[0]
    return Kernel(family, op, {"rows": size(64, 65536), "cols": size(64, 8192), **_passes(family, op)})


def _fits(kernel: Kernel) -> bool:
    if FAMILIES[kernel.family].matrix:
        batch, m, n, k = (kernel.dims[name] for name in ("batch", "m", "n", "k"))
        return 2.0 * batch * m * n * k <= LARGEST_FLOP and 4.0 * batch * (m * k + k * n + m * n) <= LARGEST_BYTES
    return 12.0 * kernel.dims["rows"] * kernel.dims["cols"] <= LARGEST_BYTES


def _chosen(
    predictor: MixturePredictor, machines: Sequence[GPU], family: str, kernels: Sequence[Kernel], count: int
) -> list[int]:
    prior = prior_of(FAMILIES[family].network)
    batch: KernelBatch = jax.tree.map(
        lambda column: column[: len(kernels)], table_from_kernels(kernels).families[family]
    )
    return telling_order(predictor, machines, family, batch, count, prior)


def _record(kernel: Kernel) -> dict[str, object]:
    names = {schema.family_op(op): op for op in schema.OPS if op not in schema.CONV_OPS}
    op = names[kernel.family, kernel.op]
    return {"op": op, **schema.schema_dims(op, kernel.dims)}
