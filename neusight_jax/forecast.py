"""Forecast: what a model costs on a GPU, kernel by kernel, and where each number comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from neusight_jax.arithmetic import DTYPES
from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, KernelTable
from neusight_jax.model.intervals import (
    LEVEL,
    Intervals,
    in_labels,
    interval_warnings,
    kernel_interval,
    total_interval,
    unlabelled_note,
)
from neusight_jax.model.latency import in_row_order, kernel_forecasts
from neusight_jax.model.power import JOULES, draw_of, power_law
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Relaxation, element_bytes, relaxation_switch
from neusight_jax.records import Result, plain

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.runs import RunCost


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
    "energy_j",
    "power_w",
)
"""Columns of `Forecast.to_frame`: one row per distinct kernel; `seconds` is one launch, total = Σ seconds · count.
`seconds_low` and `seconds_high` are its 80 % interval, NaN from a predictor that carries none (`intervals`);
`energy_j` and `power_w` are of one launch, at the clock that the whole step settles at."""


PARTS: tuple[str, ...] = ("compute_s", "bubble_s", "exposed_communication_s", "fixed_s")
"""Parts of a step that add up to it: what the busiest rank computes, launches of kernels included; what it waits for
other stages, were messages free; what messages add on top; and what a step takes beside its work."""


@dataclass(frozen=True)
class Forecast(Result):
    """Time, memory and energy of a model's step on a GPU, or on a cluster. Units: seconds, FLOP, bytes.

    Attributes:
      model, gpu: names, for people; gpu: of the machine.
      workload: the whole of what was asked (`workloads.workload_dict`).
      parts: seconds by `PARTS`; phases: of the first of them, by phase of a step.
      columns: per distinct kernel of the busiest rank, see `COLUMNS`; empty where a search forecast many layouts.
      tokens: that a step works on; a decode step makes one for each request.
      gpus: that it occupies.
      memory: what the workload needs, of the fullest rank; mem_bytes: what a GPU has.
      longest_context: tokens that every request of a served model could have in it; None where nobody knows.
      interval_s: 80 % interval of `total_s`, (low, high); None from a predictor that carries none.
      energy_j: joules of a step, of all GPUs: the boards alone; clock_hz: that they settle at.
      model_flop: products and attention of the step, of all GPUs, without what is run again; hardware_flop: with it
        (`step_flop`); peak_flop_per_s: of one GPU, in the dtype of the products.
      run: cost of a whole run of such steps (`runs.Run.of`); None = none was asked for.
      notes: what a reader should know before trusting the number.
    """

    kind: ClassVar[str] = "forecast"
    model: str
    gpu: str
    workload: Mapping[str, Any]
    parts: Mapping[str, float]
    phases: Mapping[str, float]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: int = 0
    gpus: int = 1
    memory: Footprint | None = None
    mem_bytes: float = 0.0
    longest_context: int | None = None
    interval_s: tuple[float, float] | None = None
    energy_j: float = 0.0
    clock_hz: float = 0.0
    model_flop: float = 0.0
    hardware_flop: float = 0.0
    peak_flop_per_s: float = 0.0
    run: RunCost | None = None
    notes: tuple[str, ...] = ()

    @property
    def power_w(self) -> float:
        """Mean watts of all GPUs."""
        return self.energy_j / self.total_s if self.total_s else 0.0

    @property
    def joules_per_token(self) -> float | None:
        """Joules of a step over its tokens; None where nobody knows them."""
        return self.energy_j / self.tokens if self.tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: `model_flop` over what the GPUs' peaks allow in the step; None where not known."""
        return self._utilization(self.model_flop)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilization: as `mfu`, and what is run again counts too."""
        return self._utilization(self.hardware_flop)

    def _utilization(self, flop: float) -> float | None:
        allowed = self.peak_flop_per_s * self.gpus * self.total_s
        return flop / allowed if allowed and flop else None

    @property
    def mode(self) -> str:
        """Mode of the workload."""
        return str(self.workload["mode"])

    @property
    def dtype(self) -> str:
        """Dtype of the products."""
        return str(self.workload["dtype"])

    @property
    def batch_size(self) -> int:
        """Sequences of a step."""
        return int(self.workload.get("global_batch_size", self.workload.get("batch_size", 0)))

    @property
    def sequence_length(self) -> int:
        """Tokens of each sequence."""
        return int(self.workload["sequence_length"])

    @property
    def fused(self) -> bool:
        """Whether elementwise chains are merged."""
        return bool(self.workload.get("fused", True))

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return float(sum(self.parts.values()))

    @property
    def compute_s(self) -> float:
        """Seconds that the busiest rank computes: its kernels, of all micro-batches, and the optimizer."""
        return self.parts["compute_s"]

    @property
    def bubble_s(self) -> float:
        """Seconds that the busiest rank waits for other stages, were messages free."""
        return self.parts["bubble_s"]

    @property
    def exposed_communication_s(self) -> float:
        """Seconds that messages add on top."""
        return self.parts["exposed_communication_s"]

    @property
    def fixed_s(self) -> float:
        """Seconds that a step takes beside its work (`Software.step_s`)."""
        return self.parts["fixed_s"]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all GPUs."""
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes that the workload needs, of the fullest rank; 0 where nothing is known."""
        return 0.0 if self.memory is None else self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether the workload fits into a GPU's memory; None where nothing is known."""
        return None if self.memory is None else self.memory.total <= self.mem_bytes

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass, of all micro-batches."""
        return self.phases.get("forward", 0.0)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass, weight gradients included; 0 for inference."""
        return self.phases.get("backward", 0.0) + self.weight_gradient_s

    @property
    def weight_gradient_s(self) -> float:
        """The part of `backward_s` spent on gradients of weights."""
        return self.phases.get("weight_gradient", 0.0)

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer's step; 0 where the workload has none."""
        return self.phases.get("optimizer", 0.0)

    @property
    def _cost(self) -> np.ndarray:
        return np.asarray(self.columns["seconds"] * self.columns["count"], np.float64)

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
        """One row per distinct kernel (`COLUMNS`); without kernels, one per part of the step."""
        import pandas as pd

        if self.columns:
            return pd.DataFrame(self.columns)
        frame = pd.DataFrame({"part": list(self.parts), "seconds": list(self.parts.values())})
        return frame.assign(share=frame["seconds"] / self.total_s)

    def values(self) -> dict[str, Any]:
        """Workload, total and its parts, phases, rates, memory; families, bounds, the ten most expensive kernels."""
        memory = None
        if self.memory is not None:
            sizes = {f"{name}_bytes": value for name, value in asdict(self.memory).items()}
            memory = {**sizes, "total_bytes": self.memory.total, "gpu_bytes": self.mem_bytes, "fits": self.fits}
            if self.longest_context is not None:
                memory["longest_context"] = self.longest_context
        kernels: dict[str, Any] = {}
        if self.columns:
            kernels = {
                "family_s": self.seconds_by("family"),
                "bound_s": self.seconds_by("bound"),
                "launches": float(self.columns["count"].sum()),
                "flop": self.summed("flop"),
                "bytes": self.summed("bytes"),
                "most_expensive": self.most_expensive(),
            }
        return {
            **self._fields("model", "gpu", "workload", "mode", "dtype", "batch_size", "sequence_length", "fused"),
            **self._fields("total_s", "interval_s"),
            "interval_level": LEVEL if self.interval_s else None,
            **self.parts,
            **self._fields("gpus", "tokens"),
            "tokens_per_s": self.tokens_per_s if self.total_s else None,
            "tokens_per_s_gpu": self.tokens_per_s / self.gpus if self.total_s else None,
            "time_per_output_token_s": self.total_s if self.mode == "decode" else None,
            **(self._fields("energy_j", "power_w", "joules_per_token", "clock_hz") if self.energy_j else {}),
            **(self._fields("mfu", "hfu") if self.mfu else {}),
            **({"run": self.run.values()} if self.run else {}),
            "memory": memory,
            **self._fields("forward_s", "backward_s", "weight_gradient_s"),
            **(self._fields("optimizer_s") if self.optimizer_s else {}),
            **kernels,
            "notes": self.notes,
        }


def interval_of(
    predictor: Predictor, gpu: GPU, columns: dict[str, np.ndarray]
) -> tuple[tuple[float, float] | None, list[str]]:
    """80 % interval of the total, seconds, and what a reader should know of it."""
    intervals: Intervals | None = getattr(predictor, "intervals", None)
    if intervals is None:
        return None, []
    cost = columns["seconds"] * columns["count"]
    labelled = in_labels(intervals, columns["network"]) & (columns["unmeasured"] == 0.0)
    part = float(np.sum(cost[labelled], dtype=np.float64))
    wider = float(np.average(columns["widening"][labelled], weights=cost[labelled])) if part > 0 else 1.0
    # Messages that a predictor takes from the sheet have no interval: they count as they are.
    ends = (np.where(np.isnan(columns[name]), columns["seconds"], columns[name]) for name in BOUND_COLUMNS)
    bounds = [np.sum((end * columns["count"])[~labelled], dtype=np.float64) for end in ends]
    low, high = (float(sum(pair)) for pair in zip(total_interval(intervals, gpu, part, wider), bounds, strict=True))
    network = columns["network"]
    notes = unlabelled_note(intervals, network, cost)
    warnings = interval_warnings(intervals, gpu, network, columns["shape_widening"], cost)
    return (low, high), [*notes, *warnings]


def seconds_of(
    predictor: Predictor, machine: Machine, table: KernelTable, relaxation: Relaxation = 0.0
) -> Float[np.ndarray, " row"]:
    """Seconds of one launch of each kernel inside a model, by the program that `predict` has compiled already.

    Args:
      predictor, machine, table: as `latency.kernel_latency`.
      relaxation: of whole waves, 0 = exact.
    """
    families = explained(predictor, machine, table, relaxation)
    return in_row_order(table, {name: np.asarray(columns["seconds"]) for name, columns in families.items()})


def explained(
    predictor: Predictor, machine: Machine, table: KernelTable, relaxation: Relaxation = 0.0
) -> dict[str, dict[str, Any]]:
    """By family, seconds of kernels inside a model and where they come from [kernel], in one program.

    `_EXPLAINED`, and the logarithms of the bounds over the seconds (`log_low`, `log_high`).

    Args:
      predictor, machine, table: as `latency.kernel_latency`.
      relaxation: of whole waves, 0 = exact.
    """
    families: dict[str, dict[str, Any]] = _explained(
        predictor, on_device(machine), table, relaxation_switch(relaxation)
    )
    return families


_EXPLAINED = (
    *("seconds", "seconds_low", "seconds_high", "widening", "shape_widening", "unmeasured"),
    *("flop", "bytes", "tile", "waves", "utilization", "bound"),
    *JOULES,
)
"""Columns of `explained`."""


@one_shot
def _explained(
    predictor: Predictor, machine: Machine, table: KernelTable, relaxation: Relaxation
) -> dict[str, dict[str, Any]]:
    out = {}
    # All columns come of one program: bounds, joules and intervals asked for later would each compile another.
    for name, term in kernel_forecasts(predictor, machine, table, isolated=False, relaxation=relaxation).items():
        batch = table.families[name]
        work = FAMILIES[name].work(batch.dims, element_bytes(batch.dtype))
        interval = kernel_interval(predictor, FAMILIES[name], gpu_of(machine), batch)
        body = jnp.where(term.compute_s >= term.memory_s, BOUNDS.index("compute"), BOUNDS.index("memory"))
        draw = draw_of(power_law(predictor), gpu_of(machine), name, batch, term.seconds)
        out[name] = {
            "seconds": term.seconds,
            **dict(zip(JOULES, draw.joules, strict=True)),
            "log_low": interval.log_low,
            "log_high": interval.log_high,
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


def columns_of(table: KernelTable, families: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """`COLUMNS` of an `explained` table in row order, nodes by their position, and the widenings of the intervals."""
    batches = table.families

    def rows(of: Callable[[str], Any]) -> np.ndarray:
        return in_row_order(table, {name: np.asarray(of(name)) for name in batches})

    def words(names: Sequence[str], places: Any) -> np.ndarray:
        chosen: np.ndarray = np.array(names, object)[np.asarray(places, int)]
        return chosen

    def explained_by(key: str) -> np.ndarray:
        return rows(lambda name: families[name][key])

    def of_batches(key: str) -> np.ndarray:
        return rows(lambda name: getattr(batches[name], key))

    columns = {key: explained_by(key) for key in _EXPLAINED}
    launches = {key: of_batches(key) for key in ("count", "node", "phase", "dtype")}
    return {
        **columns,
        **launches,
        "phase": words(PHASES, launches["phase"]),
        "dtype": words(DTYPES, launches["dtype"]),
        "bound": words(BOUNDS, columns["bound"]),
        "op": rows(lambda name: words(FAMILIES[name].ops, batches[name].op)),
        "tile": rows(lambda name: words(FAMILIES[name].tiles, families[name]["tile"])),
        "family": rows(lambda name: np.full(batches[name].row.shape, name, object)),
        "network": rows(lambda name: np.full(batches[name].row.shape, FAMILIES[name].network, object)),
    }


def with_nodes(rows: dict[str, np.ndarray], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows with the names of nodes in place of their positions."""
    return {**rows, "node": np.array(names, object)[rows["node"].astype(int)]}
