"""Power curves: what caps of its power and locked clocks do to a step on one machine, and which of them to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine, gpu_of, with_gpu
from neusight_jax.job.job import Job
from neusight_jax.model.predictor import Predictor
from neusight_jax.prediction import predict
from neusight_jax.records import Record, Result
from neusight_jax.workloads import workload_dict

if TYPE_CHECKING:
    import pandas as pd

TARGETS: dict[str, str] = {"tpot": "decode", "ttft": "prefill", "step": ""}
"""Name of a target -> the mode of the steps that it is of, "" = any."""
CAPS, CLOCKS = 15, 8
"""Caps and locked clocks of a curve, unless they are given."""
SECANT = 0.01
"""Half the range that a slope by the cap is taken over."""
LOWEST_CAP, LOWEST_CLOCK = 0.4, 0.4
"""Where curves start unless they are told, of the board's power and of its boost clock."""


@dataclass(frozen=True)
class HeldBoard(Record):
    """A machine under one cap or one locked clock.

    Attributes:
      power_limit_w, clock_limit_hz: of every board, None = its own.
      latency_s: of a step; speed: of it over that of the machine that nothing holds.
      tokens_per_s: of all GPUs.
      power_w: of all GPUs; clock_hz: that they settle at.
      energy_j: of a step; joules_per_token: over its tokens.
      speed_per_w: d speed / d W of a board's cap, by the difference over ±`SECANT` of it; 0 where the cap holds nothing
        back, None of a locked clock.
      meets: whether the step is within the target.
    """

    power_limit_w: float | None
    clock_limit_hz: float | None
    latency_s: float
    speed: float
    tokens_per_s: float
    power_w: float
    clock_hz: float
    energy_j: float
    joules_per_token: float
    speed_per_w: float | None
    meets: bool = True


@dataclass(frozen=True)
class Fleet(Record):
    """The most tokens a second that so many watts of boards make.

    Attributes:
      fleet_w: of all boards together; most: machines that there are, 0 = any number.
      machines: that run, each with the GPUs of the workload; held: how.
      tokens_per_s, power_w: of all of them.
    """

    fleet_w: float
    most: int
    machines: int
    held: HeldBoard
    tokens_per_s: float
    power_w: float


@dataclass(frozen=True)
class PowerCurve(Result):
    """A step on one machine over caps of its power, then over locked clocks.

    Attributes:
      gpu: name of the machine; workload: see `workload_dict`.
      points: the caps from the highest, then the clocks from the highest; the first is the machine as it is.
      target: name of a target and its seconds, None = no target.
      fleet: see `Fleet`; None = not asked for.
      notes: what to know before trusting the numbers.
    """

    kind: ClassVar[str] = "power_curve"
    gpu: str
    workload: Mapping[str, Any]
    points: tuple[HeldBoard, ...]
    target: tuple[str, float] | None = None
    fleet: Fleet | None = None
    notes: tuple[str, ...] = ()

    @property
    def knee(self) -> HeldBoard:
        """The cap with the least joules a token: below it a percent of watts costs more than a percent of speed."""
        return min((point for point in self.points if point.clock_limit_hz is None), key=_joules)

    @property
    def best(self) -> HeldBoard | None:
        """The least joules a token within the target, by cap or by clock; None where nothing meets it."""
        return min((point for point in self.points if point.meets), key=_joules, default=None)

    def to_frame(self) -> pd.DataFrame:
        """One row per cap and per clock."""
        import pandas as pd

        return pd.DataFrame([point.figures() for point in self.points])

    def values(self) -> dict[str, Any]:
        """The curve, its knee, and what to choose."""
        return self._fields("gpu", "workload", "target", "points", "knee", "best", "fleet", "notes")


def _joules(point: HeldBoard) -> float:
    return point.joules_per_token


def power_curve(
    predictor: Predictor,
    machine: Machine,
    work: Graph | Job,
    *,
    caps_w: Sequence[float] = (),
    clocks_hz: Sequence[float] = (),
    target: tuple[str, float] | None = None,
    fleet_w: float | None = None,
    most: int = 0,
    gpu_name: str = "",
    notes: Sequence[str] = (),
) -> PowerCurve:
    """Effect of caps and locked clocks on a step.

    Args:
      predictor: of a checkpoint.
      machine: a GPU or a cluster, without cap and lock.
      work: the model and its workload, or a job.
      caps_w: of a board, W; none = `CAPS` from `LOWEST_CAP` of its power up to it.
      clocks_hz: locked, Hz; none = `CLOCKS` from `LOWEST_CLOCK` of the boost clock up to it.
      target: name of `TARGETS` and the most seconds of it.
      fleet_w: watts of a fleet of such machines, to find the most tokens a second within them.
      most: machines that the fleet has, 0 = any number.
      gpu_name, notes: for the report only.
    Raises: `InputError` for a target of another mode, a cap or a clock above the board's own, a fleet that not one
      machine can run in.
    """
    gpu = gpu_of(machine)
    tdp_w, boost_hz = (float(np.asarray(figure)) for figure in (gpu.tdp_w, gpu.clock_hz))
    _check_target(target, work)
    caps = _points("cap", caps_w, LOWEST_CAP, tdp_w, CAPS, "W")
    clocks = _points("clock", clocks_hz, LOWEST_CLOCK, boost_hz, CLOCKS, "Hz")
    free = predict(predictor, machine, work, gpu_name=gpu_name, notes=notes)
    points = [
        _held(predictor, machine, work, free, name, value, target)
        for name, values in (("power_limit_w", caps), ("clock_limit_hz", clocks))
        for value in values
    ]
    curve = PowerCurve(gpu_name or free.gpu, workload_dict(work), tuple(points), target, None, free.notes)
    return curve if fleet_w is None else replace(curve, fleet=_fleet(curve, fleet_w, most))


def _check_target(target: tuple[str, float] | None, work: Graph | Job) -> None:
    if target is None:
        return
    mode = work.mode if isinstance(work, Graph) else "training"
    if TARGETS[target[0]] not in ("", mode):
        raise InputError(
            f"{target[0]} is of {TARGETS[target[0]]} steps, the workload is {mode}; "
            f"ask for mode {TARGETS[target[0]]}, or give a target of step"
        )


def _points(what: str, values: Sequence[float], lowest: float, highest: float, count: int, unit: str) -> list[float]:
    """Caps or clocks from the highest, the board's own first; `InputError` for one that is not below it."""
    for value in values:
        if not 0.0 < value <= highest * (1.0 + 1e-6):
            raise InputError(
                f"a {what} is {value:g} {unit}, expected above 0 and at most the board's, {highest:g} {unit}"
            )
    points = values or np.linspace(lowest, 1.0, count) * highest
    return sorted({float(f"{value:.4g}") for value in points} | ({highest} if what == "cap" else set()), reverse=True)


def _held(
    predictor: Predictor,
    machine: Machine,
    work: Graph | Job,
    free: Forecast,
    name: str,
    value: float,
    target: tuple[str, float] | None,
) -> HeldBoard:
    """A point of a curve.

    Args:
      free: the forecast of the machine that nothing holds.
      name, value: figure of the board that is limited, and where.
    """

    def step(limit: float) -> Forecast:
        return predict(predictor, with_gpu(machine, **{name: limit}), work)

    capped, held = name == "power_limit_w", step(value)
    ends = [free.total_s / step(value * (1.0 + change)).total_s for change in (SECANT, -SECANT)] if capped else []
    return HeldBoard(
        power_limit_w=value if capped else None,
        clock_limit_hz=None if capped else value,
        latency_s=held.total_s,
        speed=free.total_s / held.total_s,
        tokens_per_s=free.tokens / held.total_s,
        power_w=held.power_w,
        clock_hz=held.clock_hz,
        energy_j=held.energy_j,
        joules_per_token=held.energy_j / max(free.tokens, 1),
        speed_per_w=(ends[0] - ends[1]) / (2.0 * SECANT * value) if capped else None,
        meets=target is None or held.total_s <= target[1],
    )


def _fleet(curve: PowerCurve, fleet_w: float, most: int) -> Fleet:
    """The point of a curve at which a fleet of so many watts makes the most tokens a second, within the target."""
    fleets = []
    for point in curve.points:
        machines = int(fleet_w // point.power_w)
        machines = min(machines, most) if most else machines
        if machines and point.meets:
            total = machines * point.tokens_per_s
            fleets.append(Fleet(fleet_w, most, machines, point, total, machines * point.power_w))
    if not fleets:
        least = min(point.power_w for point in curve.points)
        raise InputError(
            f"a fleet of {fleet_w:g} W runs no machine within the target; expected at least {least:.0f} W, or a "
            "target that some cap meets"
        )
    return max(fleets, key=lambda fleet: fleet.tokens_per_s)
