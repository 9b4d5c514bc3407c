"""The kernels to measure first on a GPU nobody has measured, chosen by what they tell before any is measured.

Candidates are kernels of the catalog's models and shapes drawn over the range such kernels come from. A plan takes
those that lower the uncertainty of all of them most, for the GPU named, or on average over a spread of GPUs. A
suggestion takes those that narrow the totals of some models most, or the ratio of those of two machines: the slope of a
total by the logarithm of a kernel is its share of the time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Float

from neusight_jax.datasets import schema
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import write_atomically
from neusight_jax.graph.configs.build import graph_from_config, is_eager
from neusight_jax.graph.configs.config import list_models
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.catalog import catalog_gpu
from neusight_jax.hardware.cluster import Cluster, Machine, on_device
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.rowwise import BINARY_OPS
from neusight_jax.kernels.table import Kernel, KernelBatch, KernelTable, distinct, table_from_kernels
from neusight_jax.model.checkpoint import load_predictor
from neusight_jax.model.intervals import error_correlation, machine_distance
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor
from neusight_jax.training.calibration import calibratable
from neusight_jax.training.prior import error_covariance, most_telling, prior_of, telling_order
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

        write: Any = self.frame.to_csv if target.suffix.lower() == ".csv" else self.frame.to_parquet
        write_atomically(target, lambda beside: write(beside, index=False))


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
            batch, prior = real_rows(table_from_kernels(kernels).families[family]), prior_of(FAMILIES[family].network)
            order = telling_order(predictor, machines, family, batch, count, prior)
            records += [_record(kernels[at]) for at in order]
    return _plan(label, records)


def suggest(
    predictor: Predictor,
    machine: Machine | Sequence[Machine],
    works: Sequence[Graph | KernelTable],
    count: int = 10,
    *,
    gpu_name: str | Sequence[str] | None = None,
) -> Plan:
    """Choose the kernels whose measurement, and `calibrate` with it, narrows what is to be decided most.

    Args:
      predictor: of kind `mixture`.
      machine: a GPU nobody has measured, whose totals are narrowed; or several to rank, of the best two of which the
        ratio is narrowed.
      works: models that are decided upon; their totals count alike.
      count: kernels to choose.
      gpu_name: device of the plan; of several machines one each.
    Raises: `InputError` for a predictor of another kind, no model, or more kernels than there are candidates.
    """
    mixture = calibratable(predictor)
    families = [family for family in PLANS["quick"] if mixture.covers(FAMILIES[family])]
    kernels = [kernel for family in families for kernel in candidates(family)]
    if not 1 <= count <= len(kernels):
        raise InputError(f"{count} kernels to suggest, expected 1 to {len(kernels)}, the candidates of this checkpoint")
    order = narrowing_rows(mixture, machine, table_from_kernels(kernels), count, works)
    names: list[str | None] = [gpu_name] if gpu_name is None or isinstance(gpu_name, str) else [*gpu_name]
    if len(names) != len(_several(machine)):
        raise InputError(f"{len(names)} names for {len(_several(machine))} GPUs, expected one each")
    devices = [names[at // len(kernels)] for at in order]
    chosen = list(dict.fromkeys(name for name in devices if name is not None))
    plan = _plan(None, [_record(kernels[at % len(kernels)]) for at in order])
    return Plan(" and ".join(chosen) or None, plan.frame.assign(device=np.array(devices, object)))


def _several(machine: Machine | Sequence[Machine]) -> list[Machine]:
    return [machine] if isinstance(machine, GPU | Cluster) else list(machine)


def narrowing_rows(
    predictor: MixturePredictor,
    machine: Machine | Sequence[Machine],
    among: KernelTable,
    count: int,
    works: Sequence[Graph | KernelTable],
) -> list[int]:
    """Rows of a table whose measurement narrows what is decided upon most, the most telling first.

    Args:
      predictor: what forecasts.
      machine: a GPU nobody has measured, or several to rank.
      among: kernels that may be measured, each by itself.
      count: rows to choose.
      works: models that are decided upon.
    Returns: rows; of several machines numbered on, those of the second after all of the first.
    """
    which, covariance, noise, aims = undecided(predictor, machine, among, works)
    rows, candidates_of_one = len(noise) // len(which), among.num_rows
    alone = np.arange(len(noise)) % rows < candidates_of_one
    order = most_telling([covariance], count, np.sqrt(noise), aims, alone)
    return [which[at // rows] * candidates_of_one + at % rows for at in order]


def undecided(
    predictor: MixturePredictor,
    machine: Machine | Sequence[Machine],
    among: KernelTable,
    works: Sequence[Graph | KernelTable],
) -> tuple[list[int], Float[np.ndarray, "row row"], Float[np.ndarray, " row"], Float[np.ndarray, "work row"]]:
    """Log errors of candidates and of models before anything is measured, and the decision as slopes by them.

    Errors of two machines go together as those of the ratio of their forecasts do (`intervals.error_correlation`).

    Args: as of `narrowing_rows`.
    Returns: places of the machines decided between, one or two; of the rows of `among` and then the kernels of every
      model, on one machine after the other, covariance and variance of measurements; slopes of the log total of each
      model, or of its log ratio on the two.
    """
    machines = _several(machine)
    if not works or not machines:
        raise InputError("no model to decide upon, or no GPU; give at least one, whose forecast is to be narrowed")
    tables = [distinct(work.kernels if isinstance(work, Graph) else work) for work in works]
    table = _joined([among, *tables], predictor)
    lengths = [among.num_rows, *(part.num_rows for part in tables)]
    logs, slopes = zip(*(_totals(predictor, machine, table, lengths) for machine in machines), strict=True)
    which = np.argsort(np.sum(logs, axis=1), kind="stable")[:2].tolist()
    chosen = [machines[place] for place in which]
    both = _joined([table] * len(which), predictor)
    on_each: Machine = jax.tree.map(
        lambda *figures: np.repeat(np.asarray(figures, np.float32), table.num_rows), *map(on_device, chosen)
    )
    alone = np.tile(np.arange(table.num_rows) < among.num_rows, len(which))
    covariance, noise = error_covariance(predictor, on_each, both, alone, tied=False)
    alike = [[error_correlation(machine_distance(one, other)) for other in chosen] for one in chosen]
    covariance *= np.kron(alike, np.ones((table.num_rows, table.num_rows)))
    aims = [sign * slopes[place] for sign, place in zip((1.0, -1.0), which, strict=False)]
    return which, covariance, noise, np.concatenate(aims, axis=1)


def _joined(tables: Sequence[KernelTable], predictor: Predictor) -> KernelTable:
    """Tables below each other, of the families that a predictor covers; rows run on."""
    # Rows run on from table to table, so that a place says which table a kernel is of.
    starts = np.cumsum([0, *(table.num_rows for table in tables)])
    families = {}
    for name in FAMILIES:
        batches = [
            replace(batch, row=batch.row + start)
            for start, table in zip(starts, tables, strict=False)
            for batch in (real_rows(table.families[name]) for _ in range(name in table.families))
        ]
        if batches and predictor.covers(FAMILIES[name]):
            dims = set.intersection(*(set(batch.dims) for batch in batches))  # libraries are known of some
            same = [replace(batch, dims={dim: batch.dims[dim] for dim in dims}) for batch in batches]
            families[name] = jax.tree.map(lambda *columns: np.concatenate(columns), *same)
    return KernelTable(families)


def real_rows(batch: KernelBatch) -> KernelBatch:
    """Kernels of a family without padding."""
    real = np.flatnonzero(np.asarray(batch.row) >= 0)
    kept: KernelBatch = jax.tree.map(lambda column: np.asarray(column)[real], batch)
    return kept


def _totals(
    predictor: MixturePredictor, machine: Machine, table: KernelTable, lengths: Sequence[int]
) -> tuple[Float[np.ndarray, " work"], Float[np.ndarray, "work row"]]:
    """Log totals of models, and their slopes by log seconds of kernels: shares of the time.

    Args:
      predictor: what forecasts.
      machine: scalars.
      table: candidates, and then the kernels of every model.
      lengths: rows of each.
    """
    seconds = kernel_latency(predictor, machine, table)
    cost = in_row_order(table, {name: np.asarray(rows) * table.families[name].count for name, rows in seconds.items()})
    ends = np.cumsum(lengths)
    slopes, logs = np.zeros((len(lengths) - 1, ends[-1])), np.zeros(len(lengths) - 1)
    for work, (start, end) in enumerate(itertools.pairwise(ends)):
        total = cost[start:end].sum()
        logs[work], slopes[work, start:end] = np.log(total), cost[start:end] / total
    return logs, slopes


def candidates(family: str) -> list[Kernel]:
    """Kernels of a family worth measuring: of the catalog's models first, then drawn; the same list every time."""
    random = np.random.default_rng(0)
    kernels: dict[tuple[float, ...], Kernel] = {}
    for batch in (table.families[family] for table in _model_tables() if family in table.families):
        for kernel in _measurable(family, batch):
            kernels.setdefault((*kernel.dims.values(),), kernel)
    of_models = list(kernels.values())
    # Drawn, as the first ones would all be of a few models.
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


def _plan(gpu: str | None, records: Sequence[dict[str, object]]) -> Plan:
    columns = ("op", "b", "m", "n", "k", "h")
    frame = pd.DataFrame(records, columns=list(columns)).astype(dict.fromkeys(columns[1:], "Int64"))
    frame.insert(0, "device", gpu)
    return Plan(gpu, frame.assign(latency_s=np.nan))


def _record(kernel: Kernel) -> dict[str, object]:
    names = {schema.family_op(op): op for op in schema.OPS if op not in schema.CONV_OPS}
    op = names[kernel.family, kernel.op]
    return {"op": op, **schema.schema_dims(op, kernel.dims)}
