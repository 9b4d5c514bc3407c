"""Forecast of a job: what a training step on many GPUs takes, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.cluster import Cluster, Machine, as_cluster
from neusight_jax.job.interval import carries_intervals, expert_share, once_at, step_interval
from neusight_jax.job.job import Job, Plan
from neusight_jax.job.software import Software
from neusight_jax.job.step import check_cluster, compose, once, seconds_of_job, silent
from neusight_jax.memory import crowded_notes
from neusight_jax.model.intervals import LEVEL
from neusight_jax.model.predictor import Predictor
from neusight_jax.records import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StepForecast(Result):
    """A training step of a job on a cluster. Units: seconds, bytes.

    Attributes:
      model, cluster: names, for people; workload: the whole of what was asked.
      compute_s: of the busiest rank: its kernels, of all micro-batches, and the optimizer.
      bubble_s: what that rank waits for other stages, were messages free.
      exposed_communication_s: what messages add on top.
      fixed_s: what a step takes beside its work (`Software.step_s`).
      memory: of the fullest rank; mem_bytes: what a GPU has.
      tokens: of a step; interval_s: 80 % interval of `total_s`, None from a predictor that carries none.
    """

    kind: ClassVar[str] = "step"
    model: str
    cluster: str
    workload: Mapping[str, Any]
    compute_s: float
    bubble_s: float
    exposed_communication_s: float
    fixed_s: float
    memory: Footprint
    mem_bytes: float
    tokens: int
    gpus: int
    notes: tuple[str, ...] = field(default=())
    interval_s: tuple[float, float] | None = None

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.bubble_s + self.exposed_communication_s + self.fixed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all GPUs."""
        return self.tokens / self.total_s

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is enough."""
        return self.memory.total <= self.mem_bytes

    def parts(self) -> dict[str, float]:
        """Seconds by what they go to."""
        names = ("compute_s", "bubble_s", "exposed_communication_s", "fixed_s")
        return {name: getattr(self, name) for name in names}

    def to_frame(self) -> pd.DataFrame:
        """One row for each part of the step: seconds and share."""
        import pandas as pd

        frame = pd.DataFrame({"part": list(self.parts()), "seconds": list(self.parts().values())})
        return frame.assign(share=frame["seconds"] / self.total_s)

    def values(self) -> dict[str, Any]:
        """Workload, total and its parts, rate, memory."""
        parts = {f"{name}_bytes": value for name, value in asdict(self.memory).items()}
        memory = {**parts, "total_bytes": self.memory.total, "gpu_bytes": self.mem_bytes, "fits": self.fits}
        return {
            **self._fields("model", "cluster", "workload", "total_s", "interval_s"),
            "interval_level": LEVEL if self.interval_s else None,
            **self.parts(),
            **self._fields("tokens", "tokens_per_s", "gpus"),
            "tokens_per_s_gpu": self.tokens_per_s / self.gpus,
            "memory": memory,
            "notes": self.notes,
        }


def job_workload(plan: Plan) -> dict[str, Any]:
    """The workload of a plan as plain values."""
    names = ("model", "mode", "dtype", "optimizer", "gradient_dtype", "global_batch_size", "sequence_length")
    layout = {**asdict(plan.layout), "gpus": plan.layout.gpus}
    lora = {} if plan.lora is None else {"lora": plan.lora.values()}
    return {**{name: getattr(plan, name) for name in (*names, "micro_batches", "overlaps")}, **lora, "layout": layout}


def predict_job(
    predictor: Predictor,
    machine: Machine,
    job: Job,
    *,
    name: str = "",
    notes: Sequence[str] = (),
    relaxation: Any = 0.0,
) -> StepForecast:
    """Forecast a step of a job on a cluster; `forecast.predict` comes here with a job.

    Raises: `InputError` where the cluster has another number of GPUs, or its GPU not the arithmetic of the job.
    """
    check_cluster(machine, job)
    cluster, plan = as_cluster(machine), job.plan
    cluster.gpu.peak_flop_per_s(plan.dtype)
    own = seconds_of_job(predictor, machine, job, run=once)
    parts = (compose(each, job.software, plan, relaxation) for each in (own, silent(own)))
    (whole, tail, _), (alone, rest, busy) = (tuple(map(float, each)) for each in parts)
    shares = (busy + rest, alone - busy, whole + tail - alone - rest)
    interval = None
    if carries_intervals(predictor):
        total, share = float(whole + tail), float(expert_share(own))
        ends = (seconds_of_job(predictor, machine, job, run=once_at(side)) for side in (0, 1))
        low, high = (float(sum(compose(each, job.software, plan, relaxation)[:2])) for each in ends)
        interval = step_interval(total, (low, high), share)
    return step_forecast(shares, job.software, plan, cluster, name=name, notes=notes, interval_s=interval)


def step_forecast(
    shares: tuple[float, float, float],
    software: Software,
    plan: Plan,
    cluster: Cluster,
    *,
    name: str = "",
    notes: Sequence[str] = (),
    interval_s: tuple[float, float] | None = None,
) -> StepForecast:
    """The forecast of a step from its shares: what the busiest rank does, bubble, exposed communication, seconds.

    The last two are differences of sums, so that rounding may leave less than nothing; the first takes it.
    """
    bubble, exposed = max(shares[1], 0.0), max(shares[2], 0.0)
    busy = sum(shares) - bubble - exposed
    fixed, mem_bytes = float(np.asarray(software.step_s)), float(np.asarray(cluster.gpu.mem_bytes))
    return StepForecast(
        model=plan.model,
        cluster=name,
        workload=job_workload(plan),
        compute_s=busy - fixed,
        bubble_s=bubble,
        exposed_communication_s=exposed,
        fixed_s=fixed,
        memory=plan.memory,
        mem_bytes=mem_bytes,
        tokens=plan.tokens,
        gpus=plan.layout.gpus,
        notes=(*notes, *plan.notes, *crowded_notes(plan.memory.total, mem_bytes)),
        interval_s=interval_s,
    )
