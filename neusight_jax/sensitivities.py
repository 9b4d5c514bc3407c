"""Sensitivity: d log latency / d log figure of a GPU, per kernel, family, phase and in total.

An elasticity of −0.4 says: one percent more of this figure takes 0.4 percent off the time. Each is a partial
derivative, everything else fixed. Two figures bring others along on a real chip, so `KNOBS` has rows for them as well:
SMs with their share of every peak, and the clock with every peak.

Exact forecasts (relaxation 0) count whole waves, and `ceil` passes no gradient: more SMs at fixed peaks then show only
their slower blocks. `secants` are differences of the exact forecast over ±`SECANT` and say what really happens;
`relaxation` > 0 smooths the waves, and `relaxed_total_s` beside `total_s` is its bias. Where a slope and its secant
disagree (`Sensitivity.disagreements`), a note says which to trust and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.forecast import Forecast, predict, seconds_of
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Cluster, Machine, gpu_of, on_device, topology_of
from neusight_jax.hardware.gpu import FIELDS, SWITCHES
from neusight_jax.hardware.variant import ALL_RATES, KNOBS, RATES, knob
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Isolated, Relaxation, relaxation_switch
from neusight_jax.records import Result

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.job.elasticities import StepSensitivity
    from neusight_jax.job.job import Job

SECANT = 0.05
"""Half width, in log, of the differences the derivatives are shown beside."""
APART = 2.0
"""A slope and its secant disagree where one is more than so many times the other, or of the other sign."""
LEAST = 0.01
"""Elasticities that are both smaller than this are not compared: neither moves anything."""
ROWS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FIELDS if name not in SWITCHES},
    **{knob(name): fields for name, fields in KNOBS.items()},
    ALL_RATES: RATES,
}
"""What an elasticity is given for: every figure alone, `KNOBS`, and all rates together."""


@dataclass(frozen=True)
class Sensitivity(Result):
    """Elasticities of a model's latency on one GPU.

    Attributes:
      forecast: the exact forecast they belong to, kernel by kernel.
      elasticities: name of `ROWS` -> [kernel], in the forecast's row order.
      relaxed_seconds: seconds of one launch at `relaxation`, [kernel].
      relaxation: smoothing of whole waves the derivatives were taken at, 0 = exact.
      secants: name of `ROWS` -> elasticity of the exact total over ±`SECANT`; empty where not asked for.
    """

    kind: ClassVar[str] = "sensitivity"
    forecast: Forecast
    elasticities: dict[str, np.ndarray]
    relaxed_seconds: np.ndarray
    relaxation: float
    secants: dict[str, float]

    @property
    def total_s(self) -> float:
        """Exact seconds of the step."""
        return self.forecast.total_s

    @property
    def relaxed_total_s(self) -> float:
        """Seconds of the step at `relaxation`."""
        return float(self._cost.sum())

    @property
    def notes(self) -> tuple[str, ...]:
        """Of slopes that disagree with their secants, and of the forecast."""
        return (*disagreement_notes(self.disagreements, self.relaxation), *self.forecast.notes)

    @property
    def disagreements(self) -> dict[str, tuple[float, float]]:
        """Name of `ROWS` -> (slope, secant) where the two disagree (`APART`, `LEAST`)."""
        total = self.total
        pairs = {name: (total[name], secant) for name, secant in self.secants.items()}
        return {name: pair for name, pair in pairs.items() if disagree(*pair)}

    @property
    def trusted(self) -> dict[str, float]:
        """Elasticities of the total within ±`SECANT`: the secant where the slope disagrees with it."""
        return {**self.total, **{name: secant for name, (_, secant) in self.disagreements.items()}}

    @property
    def total(self) -> dict[str, float]:
        """Elasticities of the total, in the order of `ROWS`."""
        return self._mean(np.ones(len(self._cost), bool))

    @property
    def _cost(self) -> np.ndarray:
        return np.asarray(self.relaxed_seconds * self.forecast.columns["count"], np.float64)

    def _mean(self, chosen: np.ndarray) -> dict[str, float]:
        """Elasticity of a sum = mean of elasticities, weighted with time."""
        weight = self._cost[chosen] / self._cost[chosen].sum()
        return {name: float(values[chosen] @ weight) for name, values in self.elasticities.items()}

    def by(self, column: str) -> dict[str, dict[str, float]]:
        """Elasticities by the values of a forecast column (family, phase, node, op, bound), dearest first."""
        labels = self.forecast.columns[column].astype(str)
        return {label: self._mean(labels == label) for label in self.forecast.seconds_by(column)}

    def to_frame(self) -> pd.DataFrame:
        """The forecast's table with a column `d_FIELD` for every name of `ROWS`."""
        frame = self.forecast.to_frame()
        return frame.assign(**{f"d_{name}": values for name, values in self.elasticities.items()})

    def values(self) -> dict[str, Any]:
        """Totals, elasticities in total, by family and phase, secants, and which of the two to trust."""
        names = ("model", "gpu", "workload", "mode", "dtype", "batch_size", "sequence_length")
        return {
            **{name: getattr(self.forecast, name) for name in names},
            **self._fields("relaxation", "total_s", "relaxed_total_s", "total"),
            "secant": self.secants,
            "trusted": self.trusted,
            "family": self.by("family"),
            "phase": self.by("phase"),
            "notes": self.notes,
        }


def disagree(slope: float, secant: float) -> bool:
    """Whether a slope and its secant say different things of a figure that matters."""
    small, large = sorted((abs(slope), abs(secant)))
    return large > LEAST and (slope * secant <= 0.0 or large > APART * small)


def disagreement_notes(pairs: Mapping[str, tuple[float, float]], relaxation: float) -> list[str]:
    """A sentence for figures whose slope and secant disagree: which to trust, and why; counts of SMs and others apart.

    Args:
      pairs: figure -> (slope, secant); relaxation: of the slopes.
    """
    near = f"trust the exact difference over ±{SECANT:.0%} for a chip one would build"
    waves = f"{near}: whole waves are steps, which pass no gradient; --relaxation 1 has a slope without them"
    if relaxation > 0.0:
        waves = f"trust the difference within ±{SECANT:.0%}, where whole waves count, and the slope over a wider range"
    kink = f"{near}: another limit takes over within ±{SECANT:.0%}, and a slope sees one side of the bend"
    notes = []
    for verdict, of_sms in ((waves, True), (kink, False)):
        listed = [
            f"{name} (slope {slope:+.3f}, difference {secant:+.3f})"
            for name, (slope, secant) in pairs.items()
            if name.startswith("num_sms") is of_sms
        ]
        notes += [f"{', '.join(listed)}: {verdict}"] if listed else []
    return notes


def elasticities(
    predictor: Predictor,
    machine: Machine,
    kernels: KernelTable,
    *,
    isolated: Isolated = False,
    relaxation: Relaxation = 0.0,
) -> tuple[dict[str, Float[Array, " kernel"]], dict[str, dict[str, Float[Array, " kernel"]]]]:
    """Seconds of every kernel and their elasticities, by family.

    Args: as `latency.kernel_latency`; a GPU of arrays [kernel] gives every kernel a machine of its own.
    Returns: family -> seconds [kernel]; name of `ROWS` -> family -> d log seconds / d log figure [kernel].
    """
    switches = (jnp.asarray(isolated, float), relaxation_switch(relaxation))
    seconds, slopes = _elasticities(predictor, on_device(machine), kernels, *switches)
    return seconds, dict(zip(ROWS, slopes, strict=True))


LINK = "link_bytes_per_s"
"""The figure of a GPU that is one of a cluster's links."""


def _figures(machine: Machine) -> dict[str, Any]:
    """Figures of a machine's GPU; in a cluster messages go over the links of its topology."""
    own = {name: getattr(gpu_of(machine), name) for name in FIELDS}
    return own | ({LINK: machine.topology.link_bytes_per_s} if isinstance(machine, Cluster) else {})


@one_shot
def _elasticities(predictor: Predictor, machine: Machine, kernels: KernelTable, isolated: Any, relaxation: Any) -> Any:
    value, slopes = {}, {}
    for name, batch in kernels.families.items():

        def seconds(machine: Machine, name: str = name) -> Array:
            part = KernelTable({name: kernels.families[name]})
            return kernel_latency(predictor, machine, part, isolated=isolated, relaxation=relaxation)[name]

        # With a machine of its own for every kernel, one pass backwards has all derivatives of all kernels.
        own = jax.tree.map(lambda figure, rows=batch.row.shape: jnp.broadcast_to(figure, rows), machine)
        value[name], backwards = jax.vjp(seconds, own)
        (slope,) = backwards(1.0 / value[name])
        slopes[name] = {field: each * _figures(own)[field] for field, each in _figures(slope).items()}
    return value, [{name: sum(slopes[name][field] for field in fields) for name in value} for fields in ROWS.values()]


def _secants(predictor: Predictor, machine: Machine, kernels: KernelTable, count: np.ndarray) -> dict[str, float]:
    """Elasticity of the exact total by differences over ±`SECANT`, for every name of `ROWS`."""
    figures = {name: float(np.asarray(value)) for name, value in _figures(machine).items()}

    def log_total(fields: tuple[str, ...], change: float) -> float:
        changed = {name: figures[name] * math.exp(change) for name in fields}
        moved: Machine = gpu_of(machine).replace(**changed)
        if isinstance(machine, Cluster):
            links = {name: value for name, value in changed.items() if name == LINK}
            moved = machine.replace(gpu=moved, topology=machine.topology.replace(**links))
        return math.log(float(np.sum(seconds_of(predictor, moved, kernels) * count, dtype=np.float64)))

    return {
        name: (log_total(fields, SECANT) - log_total(fields, -SECANT)) / (2.0 * SECANT) for name, fields in ROWS.items()
    }


@overload
def sensitivity(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph,
    *,
    relaxation: float = 0.0,
    gpu_name: str = "",
    notes: tuple[str, ...] | list[str] = (),
    secants: bool = True,
) -> Sensitivity: ...


@overload
def sensitivity(predictor: Predictor, gpu: Machine, graph: Job, *, gpu_name: str = "") -> StepSensitivity: ...


def sensitivity(
    predictor: Predictor,
    gpu: Machine,
    graph: Graph | Job,
    *,
    relaxation: float = 0.0,
    gpu_name: str = "",
    notes: tuple[str, ...] | list[str] = (),
    secants: bool = True,
) -> Sensitivity | StepSensitivity:
    """Elasticities of a model's latency with respect to every figure of a GPU, or of a job's step to a cluster's
    (`job.elasticities`).

    Args:
      predictor, gpu, graph: as `nj.predict`.
      relaxation: 0 = exact; 1 = no whole waves (module docstring).
      gpu_name, notes: for the report only.
      secants: whether to take them too, which is most of the work.
    Raises: `InputError` when the GPU lacks the arithmetic path of the graph's dtype.
    """
    if not isinstance(graph, Graph):
        from neusight_jax.job.elasticities import step_sensitivity

        return step_sensitivity(predictor, gpu, graph, gpu_name)
    graph = graph.on(gpu_of(gpu).paths, topology_of(gpu).gpus_per_domain)
    forecast = predict(predictor, gpu, graph, gpu_name=gpu_name, notes=notes)
    table = graph.kernels
    seconds, slopes = elasticities(predictor, gpu, table, relaxation=relaxation)
    return Sensitivity(
        forecast=forecast,
        elasticities={name: _rows(table, values) for name, values in slopes.items()},
        relaxed_seconds=_rows(table, seconds),
        relaxation=float(relaxation),
        secants=_secants(predictor, gpu, table, forecast.columns["count"]) if secants else {},
    )


def _rows(table: KernelTable, values: Mapping[str, Array]) -> np.ndarray:
    return in_row_order(table, {name: np.asarray(each, np.float64) for name, each in values.items()})
