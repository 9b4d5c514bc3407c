"""Elasticities of a job's step: what one percent more of each figure of a cluster does to it, in percent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.hardware.cluster import Cluster, Machine, Topology, as_cluster, on_device
from neusight_jax.hardware.gpu import FIELDS, SWITCHES, peak_field
from neusight_jax.hardware.variant import ALL_RATES, KNOBS, RATES, knob
from neusight_jax.job.forecast import StepForecast, predict_job
from neusight_jax.job.job import Job
from neusight_jax.job.software import Software
from neusight_jax.job.step import compose, once, seconds_of_job
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.latency import kernel_terms
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.records import Result

if TYPE_CHECKING:
    import pandas as pd

TOPOLOGY: tuple[str, ...] = ("link_bytes_per_s", "nic_bytes_per_s", "link_latency_s", "nic_latency_s")
"""Figures of a topology that a step has elasticities for."""
_GPU: tuple[str, ...] = tuple(name for name in FIELDS if name not in SWITCHES and name not in TOPOLOGY)
_OWN: tuple[str, ...] = (*_GPU, *TOPOLOGY)
_RATES: dict[str, float] = {
    **{name: 1.0 for name in RATES if name in _GPU},
    **{name: -1.0 if name.endswith("latency_s") else 1.0 for name in TOPOLOGY},
}
ROWS: dict[str, dict[str, float]] = {
    **{name: {name: 1.0} for name in _OWN},
    **{knob(name): dict.fromkeys(fields, 1.0) for name, fields in KNOBS.items()},
    ALL_RATES: _RATES,
}
"""What an elasticity is given for: figures with their exponents. All rates are those of chip, links and network, and
latencies that fall with them: their row is -1 less the share of the host, and of launches in the kernels."""
HOST = "host"
"""Row of the seconds that no machine buys: launches, and what a step takes beside its work."""
_HOST: tuple[str, ...] = ("launch_s", "expert_launch_s", "step_s")


@dataclass(frozen=True)
class StepSensitivity(Result):
    """Elasticities of a job's step on one cluster.

    Attributes:
      step: its forecast; total: name of `ROWS`, or `HOST` -> d log seconds / d log figure.
    """

    kind: ClassVar[str] = "step_sensitivity"
    step: StepForecast
    total: Mapping[str, float]

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the forecast."""
        return self.step.notes

    def to_frame(self) -> pd.DataFrame:
        """One row per figure."""
        import pandas as pd

        return pd.DataFrame({"figure": list(self.total), "elasticity": list(self.total.values())})

    def values(self) -> dict[str, Any]:
        """The step and its elasticities."""
        names = ("model", "cluster", "workload", "total_s")
        return {**{name: getattr(self.step, name) for name in names}, "total": self.total, "notes": self.notes}


@one_shot
def _slopes(predictor: Predictor, cluster: Cluster, kernels: KernelTable) -> dict[str, Any]:
    """By family, d log seconds / d log figure [figure, kernel], of `_OWN`."""

    def log_seconds(logs: Float[Array, " figure"]) -> dict[str, Array]:
        factor = dict(zip(_OWN, jnp.exp(logs), strict=True))
        moved = {name: jnp.asarray(getattr(cluster.gpu, name)) * factor[name] for name in _GPU}
        joined = {name: jnp.asarray(getattr(cluster.topology, name)) * factor[name] for name in TOPOLOGY}
        machine = Cluster(cluster.gpu.replace(**moved), _with(cluster.topology, joined), cluster.count)
        terms = kernel_terms(predictor, machine, kernels)
        return {name: jnp.log(jnp.maximum(term.seconds, 1e-30)) for name, term in terms.items()}

    slopes = jax.jacfwd(log_seconds)(jnp.zeros(len(_OWN)))
    return {name: each.T for name, each in slopes.items()}


def _with(topology: Topology, figures: Mapping[str, Array]) -> Topology:
    return topology.replace(**figures)


def step_sensitivity(predictor: Predictor, machine: Machine, job: Job, name: str = "") -> StepSensitivity:
    """Elasticities of a job's step with respect to the figures of a cluster; `sensitivities.sensitivity` comes here.

    The gradient of the step by its kernels and messages, times theirs by the figures: both are exact.
    """
    calls: list[tuple[dict[str, np.ndarray], dict[str, Any]]] = []

    def noted(using: Predictor, where: Machine, kernels: KernelTable) -> dict[str, np.ndarray]:
        own = as_cluster(where)
        calls.append((once(using, where, kernels), _slopes(using, on_device(own), kernels)))
        return calls[-1][0]

    seconds_of_job(predictor, machine, job, run=noted)

    def total(scales: list[dict[str, Array]], software: Software, plain: Array) -> Array:
        left = iter(zip(calls, scales, strict=True))

        def scaled(*asked: Any) -> dict[str, Array]:
            (seconds, _), scale = next(left)
            return {family: jnp.asarray(each) * scale[family] for family, each in seconds.items()}

        own = seconds_of_job(predictor, machine, job, run=scaled)
        own = dataclasses.replace(own, plain=own.plain * plain)
        pipeline, tail, _ = compose(own, software, job.plan)
        return pipeline + tail

    ones = [{family: jnp.ones(len(each)) for family, each in seconds.items()} for seconds, _ in calls]
    software = jax.tree.map(lambda each: jnp.asarray(each, float), job.software)
    value, (kernels, numbers, plain) = jax.value_and_grad(total, argnums=(0, 1, 2))(ones, software, jnp.ones(()))
    figures = np.zeros(len(_OWN))
    for (_, slopes), weights in zip(calls, kernels, strict=True):
        for family, weight in weights.items():
            figures += np.where(np.asarray(weight) != 0.0, np.asarray(slopes[family]), 0.0) @ np.asarray(weight)
    figures[_OWN.index(peak_field("fp32"))] -= float(plain)
    by_figure = dict(zip(_OWN, (figures / float(value)).tolist(), strict=True))
    rows = {row: sum(power * by_figure[each] for each, power in parts.items()) for row, parts in ROWS.items()}
    host = sum(float(getattr(numbers, each)) * float(np.asarray(getattr(job.software, each))) for each in _HOST)
    return StepSensitivity(predict_job(predictor, machine, job, name=name), {**rows, HOST: host / float(value)})
