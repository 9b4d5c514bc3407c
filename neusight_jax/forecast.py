"""Forecast: what a model costs on a GPU, kernel by kernel, and where each number comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from neusight_jax.arithmetic import DTYPES
from neusight_jax.graph.graph import Footprint, Graph
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device, topology_of
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, KernelTable
from neusight_jax.memory import crowded_notes, footprint
from neusight_jax.model.intervals import (
    LEVEL,
    Intervals,
    in_labels,
    interval_warnings,
    kernel_interval,
    total_interval,
    unlabelled_note,
)
from neusight_jax.model.latency import in_row_order, kernel_terms, require_covered
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Relaxation, element_bytes, relaxation_switch
from neusight_jax.records import Result, plain
from neusight_jax.unmeasured import unmeasured_notes
from neusight_jax.workloads import workload_dict

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.job.forecast import StepForecast
    from neusight_jax.job.job import Job

BOUNDS: tuple[str, ...] = ("compute", "memory", "launch")
BOUND_COLUMNS: tuple[str, ...] = ("seconds_low", "seconds_high")
COLUMNS: tuple[str, ...] = (
    "node",
    "op",
    "family",
    "phase",
    "dtype",
    "count",
    "flop",
    "bytes",
    "tile",
    "waves",
    "utilization",
    "bound",
    "seconds",
    "seconds_low",
    "seconds_high",
    "network",
)
"""Columns of `Forecast.to_frame`: one row per distinct kernel; `seconds` is one launch, total = Σ seconds · count.
`seconds_low` and `seconds_high` are its 80 % interval, NaN from a predictor that carries none (`intervals`)."""


@dataclass(frozen=True)
class Forecast(Result):
    """A model's latency on a GPU. Units: seconds, FLOP, bytes.

    Attributes:
      model, gpu: names, for people.
      mode, dtype, batch_size, sequence_length, fused: of the workload; workload: the whole of it (`workload_dict`).
      columns: per distinct kernel, see `COLUMNS`.
      tokens: that a step works on; a decode step makes one for each request.
      memory: what the workload needs on the device; mem_bytes: what the GPU has.
      interval_s: 80 % interval of `total_s`, (low, high); None from a predictor that carries none.
      notes: what a reader should know before trusting the number.
    """

    kind: ClassVar[str] = "forecast"
    model: str
    gpu: str
    mode: str
    dtype: str
    batch_size: int
    sequence_length: int
    fused: bool
    columns: dict[str, np.ndarray]
    tokens: int = 0
    memory: Footprint | None = None
    mem_bytes: float = 0.0
    interval_s: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return float(np.sum(self._cost))

    @property
    def fits(self) -> bool | None:
        """Whether the workload fits into the GPU's memory; None where nothing is known."""
        return None if self.memory is None else self.memory.total <= self.mem_bytes

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return self._phase_s("forward")

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass, weight gradients included; 0 for inference."""
        return self._phase_s("backward") + self._phase_s("weight_gradient")

    @property
    def weight_gradient_s(self) -> float:
        """The part of `backward_s` spent on gradients of weights."""
        return self._phase_s("weight_gradient")

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer's step; 0 where the workload has none."""
        return self._phase_s("optimizer")

    @property
    def _cost(self) -> np.ndarray:
        return np.asarray(self.columns["seconds"] * self.columns["count"], np.float64)

    def _phase_s(self, phase: str) -> float:
        return float(self._cost[self.columns["phase"] == phase].sum())

    def seconds_by(self, column: str) -> dict[str, float]:
        """Seconds by the values of a column (node, op, family, phase, bound ...), the most expensive first."""
        labels, where = np.unique(self.columns[column].astype(str), return_inverse=True)
        sums = np.bincount(where, weights=self._cost, minlength=len(labels))
        return {str(labels[place]): float(sums[place]) for place in np.argsort(-sums)}

    def summed(self, column: str) -> float:
        """Sum of a column (flop, bytes) over all launches."""
        return float(np.sum(self.columns[column] * self.columns["count"], dtype=np.float64))

    def most_expensive(self, count: int = 10) -> list[dict[str, Any]]:
        """The kernels with the largest seconds × count, as plain values."""
        rows = np.argsort(-self._cost)[:count]
        columns = {**self.columns, "total_s": self._cost}
        return [plain({name: values[row] for name, values in columns.items()}) for row in rows]

    def to_frame(self) -> pd.DataFrame:
        """One row per distinct kernel (`COLUMNS`)."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    def values(self) -> dict[str, Any]:
        """Workload, totals, phases, families, bounds, the ten most expensive kernels."""
        memory = None
        if self.memory is not None:
            parts = {f"{name}_bytes": value for name, value in asdict(self.memory).items()}
            memory = {**parts, "total_bytes": self.memory.total, "gpu_bytes": self.mem_bytes, "fits": self.fits}
        return {
            **self._fields("model", "gpu", "workload", "mode", "dtype", "batch_size", "sequence_length", "fused"),
            **self._fields("total_s", "interval_s"),
            "interval_level": LEVEL if self.interval_s else None,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / self.total_s if self.total_s else None,
            "time_per_output_token_s": self.total_s if self.mode == "decode" else None,
            "memory": memory,
            **self._fields("forward_s", "backward_s", "weight_gradient_s"),
            **(self._fields("optimizer_s") if self.optimizer_s else {}),
            "family_s": self.seconds_by("family"),
            "bound_s": self.seconds_by("bound"),
            "launches": float(self.columns["count"].sum()),
            "flop": self.summed("flop"),
            "bytes": self.summed("bytes"),
            "most_expensive": self.most_expensive(),
            "notes": self.notes,
        }


@overload
def predict(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph,
    *,
    gpu_name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> Forecast: ...


@overload
def predict(
    predictor: Predictor,
    gpu: Machine,
    graph: Job,
    *,
    gpu_name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> StepForecast: ...


@overload
def predict(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph | Job,
    *,
    gpu_name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> Forecast | StepForecast: ...


def predict(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph | Job,
    *,
    gpu_name: str = "",
    notes: Sequence[str] = (),
    relaxation: Relaxation = 0.0,
) -> Forecast | StepForecast:
    """Forecast a model on a GPU, kernels as they run inside the model; or a job on a cluster (`job.forecast`).

    Args:
      predictor, gpu: what forecasts, and for which machine: a GPU, or the cluster that a model is split over.
      graph: the model and its workload.
      gpu_name, notes: for the report only.
      relaxation: see `latency.kernel_latency`; 0 = exact.
    Raises: `InputError` when the GPU lacks the arithmetic path of the graph's dtype.
    """
    if not isinstance(graph, Graph):
        from neusight_jax.job.forecast import predict_job

        return predict_job(predictor, gpu, graph, name=gpu_name, notes=notes, relaxation=relaxation)
    machine, gpu = gpu, gpu_of(gpu)
    graph = graph.on(gpu.paths, topology_of(machine).gpus_per_domain)
    for dtype in graph.arithmetic:
        gpu.peak_flop_per_s(dtype)
    require_covered(predictor, graph.kernels)
    columns = _columns(
        graph.kernels, _explained(predictor, on_device(machine), graph.kernels, relaxation_switch(relaxation))
    )
    notes = (*notes, *graph.notes, *unmeasured_notes(graph, columns))
    columns["node"] = np.array([node.name for node in graph.nodes], object)[columns["node"].astype(int)]
    memory = footprint(graph) if graph.nodes else None
    mem_bytes = float(np.asarray(gpu.mem_bytes))
    interval, warnings = _interval_of(predictor, gpu, columns)
    crowded = crowded_notes(memory.total, mem_bytes) if memory and graph.mode == "training" else ()
    return Forecast(
        model=graph.name,
        gpu=gpu_name,
        mode=graph.mode,
        dtype=graph.dtype,
        batch_size=graph.batch_size,
        sequence_length=graph.sequence_length,
        fused=graph.fused,
        columns={name: columns[name] for name in COLUMNS},
        tokens=graph.step_tokens,
        memory=memory,
        mem_bytes=mem_bytes,
        interval_s=interval,
        notes=(*notes, *crowded, *warnings),
        workload=workload_dict(graph),
    )


def _interval_of(
    predictor: Predictor, gpu: GPU, columns: dict[str, np.ndarray]
) -> tuple[tuple[float, float] | None, list[str]]:
    """80 % interval of the total, seconds, and what a reader should know of it."""
    intervals: Intervals | None = getattr(predictor, "intervals", None)
    if intervals is None:
        return None, []
    cost = columns["seconds"] * columns["count"]
    known = in_labels(intervals, columns["network"]) & (columns["unmeasured"] == 0.0)
    part = float(np.sum(cost[known], dtype=np.float64))
    wider = float(np.average(columns["widening"][known], weights=cost[known])) if part > 0 else 1.0
    # Messages that a predictor takes from the sheet have no interval: they count as they are.
    ends = (np.where(np.isnan(columns[name]), columns["seconds"], columns[name]) for name in BOUND_COLUMNS)
    bounds = [np.sum((end * columns["count"])[~known], dtype=np.float64) for end in ends]
    low, high = (float(sum(pair)) for pair in zip(total_interval(intervals, gpu, part, wider), bounds, strict=True))
    network = columns["network"]
    said = unlabelled_note(intervals, network, cost)
    warnings = interval_warnings(intervals, gpu, network, columns["shape_widening"], cost)
    return (low, high), [*said, *warnings]


def seconds_of(
    predictor: Predictor, machine: Machine, table: KernelTable, relaxation: Relaxation = 0.0
) -> Float[np.ndarray, " row"]:
    """Seconds of one launch of each kernel inside a model, by the program that `predict` has compiled already."""
    explained = _explained(predictor, on_device(machine), table, relaxation_switch(relaxation))
    return in_row_order(table, {name: np.asarray(each["seconds"]) for name, each in explained.items()})


_EXPLAINED = (
    *("seconds", "seconds_low", "seconds_high", "widening", "shape_widening", "unmeasured"),
    *("flop", "bytes", "tile", "waves", "utilization", "bound"),
)
"""Columns of `_explained`."""


@one_shot
def _explained(
    predictor: Predictor, machine: Machine, table: KernelTable, relaxation: Relaxation
) -> dict[str, dict[str, Any]]:
    out = {}
    for name, term in kernel_terms(predictor, machine, table, isolated=False, relaxation=relaxation).items():
        batch = table.families[name]
        work = FAMILIES[name].work(batch.dims, element_bytes(batch.dtype))
        interval = kernel_interval(predictor, FAMILIES[name], gpu_of(machine), batch)
        body = jnp.where(term.compute_s >= term.memory_s, BOUNDS.index("compute"), BOUNDS.index("memory"))
        out[name] = {
            "seconds": term.seconds,
            "seconds_low": jnp.maximum(term.seconds * jnp.exp(interval.log_low), term.bounds.speed_of_light_s),
            "seconds_high": term.seconds * jnp.exp(interval.log_high),
            "widening": interval.widening,
            "shape_widening": interval.shape_widening,
            "unmeasured": interval.unmeasured,
            "flop": work.flop,
            "bytes": work.bytes_moved,
            "tile": term.tile.index,
            "waves": term.tile.waves,
            "utilization": term.utilization,
            "bound": jnp.where(term.launch_s > term.seconds - term.launch_s, BOUNDS.index("launch"), body),
        }
    return out


def _columns(table: KernelTable, explained: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """`COLUMNS` in row order, nodes by their position, and the widenings of the intervals."""
    batches = table.families

    def rows(of: Callable[[str], Any]) -> np.ndarray:
        return in_row_order(table, {name: np.asarray(of(name)) for name in batches})

    def words(listed: Sequence[str], places: Any) -> np.ndarray:
        chosen: np.ndarray = np.array(listed, object)[np.asarray(places, int)]
        return chosen

    def explained_by(key: str) -> np.ndarray:
        return rows(lambda name: explained[name][key])

    def of_batches(key: str) -> np.ndarray:
        return rows(lambda name: getattr(batches[name], key))

    found = {key: explained_by(key) for key in _EXPLAINED}
    given = {key: of_batches(key) for key in ("count", "node", "phase", "dtype")}
    return {
        **found,
        **given,
        "phase": words(PHASES, given["phase"]),
        "dtype": words(DTYPES, given["dtype"]),
        "bound": words(BOUNDS, found["bound"]),
        "op": rows(lambda name: words(FAMILIES[name].ops, batches[name].op)),
        "tile": rows(lambda name: words(FAMILIES[name].tiles, explained[name]["tile"])),
        "family": rows(lambda name: np.full(batches[name].row.shape, name, object)),
        "network": rows(lambda name: np.full(batches[name].row.shape, FAMILIES[name].network, object)),
    }
