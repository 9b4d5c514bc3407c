"""Runs: the steps of a whole run, and its hours, dollars, kilowatt-hours and carbon."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError
from neusight_jax.hardware.prices import SECONDS_PER_HOUR
from neusight_jax.records import Record

if TYPE_CHECKING:
    from neusight_jax.forecast import Forecast

J_PER_KWH = 1e3 * SECONDS_PER_HOUR
"""Joules of a kilowatt-hour."""
G_PER_T = 1e6
"""Grams of a metric ton."""
OF_TRAINING: tuple[str, ...] = ("epochs", "mtbf_hours", "restart_s")
"""Fields of `Run` that only training has a use for."""
POSITIVE: tuple[str, ...] = ("tokens", "samples", "epochs", "mtbf_hours", "checkpoint_s")
"""Fields of `Run` that may not be 0."""
MOST_EXPONENT = 50.0
"""Logarithm of the largest slowdown by failures: beyond it nobody waits for a job."""


@dataclass(frozen=True)
class RunCost(Record):
    """Cost of a whole run, all GPUs together.

    Attributes:
      steps: of the run; a served model has seconds of its load in their place.
      tokens: that it works on, all passes together; None where nobody knows those of a step.
      total_s, interval_s: seconds with what failures add, and their 80 % interval; None where a step has none.
      gpu_hours: GPUs times hours.
      lost_share: of the seconds, what checkpoints, restarts and work done twice take; 0 = no failures were asked for.
      cost: of the GPUs by the hour, in the currency of their prices; None = no price.
      energy_kwh, electricity_dollars, co2e_t: at the meter; co2e_t in metric tons; None = not known.
    """

    steps: float
    tokens: float | None
    total_s: float
    interval_s: tuple[float, float] | None
    gpu_hours: float
    lost_share: float = 0.0
    cost: float | None = None
    energy_kwh: float | None = None
    electricity_dollars: float | None = None
    co2e_t: float | None = None

    def values(self) -> dict[str, Any]:
        """Figures that are known, by name."""
        figures = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in figures.items() if value is not None}

    def columns(self) -> dict[str, Any]:
        """The same as columns of a frame."""
        return {f"run.{name}": value for name, value in self.values().items()}


@dataclass(frozen=True)
class Run(Record):
    """A whole run: its data, how often it fails, and what its electricity costs. Nothing is assumed that is not said.

    Attributes:
      tokens: of the data, or to generate where a model is served; samples: the same in sequences. One of the two.
      epochs: passes over them.
      dollars_per_kwh: price; None = not known.
      pue: what the building takes over what its servers take, 1 = nothing for cooling.
      host_w: watts of the rest of a server for each of its GPUs, whether they work or not.
      grid_g_per_kwh: grams of CO2e of a kilowatt-hour; None = not known.
      mtbf_hours: mean time between failures of one GPU; a job of N GPUs fails N times as often. None = nothing fails.
      checkpoint_s: seconds for which writing a checkpoint stops the job; None = not known.
      restart_s: seconds from a failure until the job runs on.
    Raises: `InputError` for values that cannot be.
    """

    tokens: float | None = None
    samples: float | None = None
    epochs: float = 1.0
    dollars_per_kwh: float | None = None
    pue: float = 1.0
    host_w: float = 0.0
    grid_g_per_kwh: float | None = None
    mtbf_hours: float | None = None
    checkpoint_s: float | None = None
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        # The ranges are wide: they refuse a slip of units, such as dollars of a MWh or hours given as seconds.
        for name, least, most, expected in (
            ("tokens", 0.0, math.inf, "a positive number of tokens, such as 15e12"),
            ("samples", 0.0, math.inf, "a positive number of sequences, such as 52e3"),
            ("epochs", 0.0, 1e9, "a positive number of passes over the data, such as 3"),
            ("dollars_per_kwh", 0.0, 100.0, "dollars of a kWh, such as 0.12"),
            ("pue", 1.0, 10.0, "1 or more: watts of the building over those of its servers, such as 1.2"),
            ("host_w", 0.0, 1e5, "watts of the rest of a server for each GPU, such as 150"),
            ("grid_g_per_kwh", 0.0, 1e4, "grams of CO2e of a kWh, such as 400"),
            ("mtbf_hours", 0.0, 1e12, "positive hours between failures of one GPU, such as 50e3"),
            ("checkpoint_s", 0.0, 1e7, "positive seconds that a checkpoint takes, such as 60"),
            ("restart_s", 0.0, 1e7, "seconds until a job runs again, such as 600"),
        ):
            value = getattr(self, name)
            if value is not None and not (least <= value < most and (value > 0.0 or name not in POSITIVE)):
                raise InputError(f"{name} is {value!r}, expected {expected}")
        if (self.tokens is None) == (self.samples is None):
            raise InputError("how long is the run? give either its tokens or its samples (sequences)")
        if (self.mtbf_hours is None) != (self.checkpoint_s is None) or (self.restart_s and self.mtbf_hours is None):
            raise InputError("failures take mtbf_hours and checkpoint_s, and restart_s beside them; give both")

    def of(self, forecast: Forecast, price_per_hour: float | None = None) -> Forecast:
        """A forecast with the cost of a run of such steps; price_per_hour: of one GPU."""
        return replace(
            forecast,
            run=self.cost(
                seconds=forecast.total_s,
                gpus=forecast.gpus,
                tokens=forecast.tokens,
                samples=forecast.batch_size if forecast.mode != "decode" else 0,
                energy_j=forecast.energy_j,
                interval_s=forecast.interval_s,
                price_per_hour=price_per_hour,
                training=forecast.mode == "training",
            ),
        )

    def cost(
        self,
        *,
        seconds: float,
        gpus: float,
        tokens: float,
        samples: float = 0.0,
        energy_j: float = 0.0,
        interval_s: tuple[float, float] | None = None,
        price_per_hour: float | None = None,
        training: bool = False,
    ) -> RunCost:
        """Cost of the run from that of one of its steps.

        Args:
          seconds, interval_s: of a step, and their interval.
          gpus: that it occupies.
          tokens, samples: that it works on; 0 = nobody knows.
          energy_j: joules of the boards in a step.
          price_per_hour: of one GPU, None = none is known.
          training: whether the step is one of training.
        Raises: `InputError` where nobody knows the tokens or samples of a step, and for what only training has.
        """
        wrong = [name for name in OF_TRAINING if getattr(self, name) != _DEFAULTS[name]]
        if wrong and not training:
            raise InputError(f"{', '.join(wrong)}: of runs that train; give mode training, or leave out")
        name = "samples" if self.tokens is None else "tokens"
        amount, in_step = (self.samples, samples) if self.tokens is None else (self.tokens, tokens)
        if not in_step > 0.0:
            raise InputError(f"a step of this work has no {name} that could be counted; leave {name} out")
        steps = float(amount or 0.0) * self.epochs / in_step
        lost = self.lost_share(gpus)
        times = steps / (1.0 - lost)
        hours = gpus * seconds * times / SECONDS_PER_HOUR
        joules = (energy_j + self.host_w * gpus * seconds) * self.pue * times
        energy_kwh = joules / J_PER_KWH if energy_j else None
        return RunCost(
            steps=steps,
            tokens=steps * tokens if tokens else None,
            total_s=seconds * times,
            interval_s=None if interval_s is None else (interval_s[0] * times, interval_s[1] * times),
            gpu_hours=hours,
            lost_share=lost,
            cost=None if price_per_hour is None else hours * price_per_hour,
            energy_kwh=energy_kwh,
            electricity_dollars=_times(energy_kwh, self.dollars_per_kwh),
            co2e_t=_times(energy_kwh, self.grid_g_per_kwh, 1.0 / G_PER_T),
        )

    def lost_share(self, gpus: float) -> float:
        """Share of a job's time that failures take, at the best interval between checkpoints; 0 without failures.

        With M the hours between failures of the whole job, c of a checkpoint and R of a restart, work between
        checkpoints of t takes M·exp(R/M)·(exp((t + c)/M) - 1) on average where failures come at random; the best t is
        near sqrt(2·c·M) - c (Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, "A
        higher order estimate of the optimum checkpoint interval for restart dumps", 2006).
        """
        if self.mtbf_hours is None or self.checkpoint_s is None:
            return 0.0
        between_s, write_s = self.mtbf_hours * SECONDS_PER_HOUR / gpus, self.checkpoint_s
        half = write_s / (2.0 * between_s)
        work_s = math.sqrt(2.0 * write_s * between_s) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - write_s
        work_s = work_s if half < 1.0 else between_s
        exponent = (work_s + write_s) / between_s
        if exponent + self.restart_s / between_s > MOST_EXPONENT:
            raise InputError(f"{gpus:g} GPUs fail every {between_s:.3g} s, before a checkpoint is written; none ends")
        taken_s = between_s * math.exp(self.restart_s / between_s) * math.expm1(exponent)
        return 1.0 - work_s / taken_s

    def notes(self) -> tuple[str, ...]:
        """Scope of the run, in words."""
        amount = f"{self.samples:.4g} samples" if self.tokens is None else f"{self.tokens:.4g} tokens"
        passes = f", {self.epochs:g} times" if self.epochs != 1.0 else ""
        rest = f"{self.host_w:g} W of the rest of a server for each GPU" if self.host_w else "the boards alone"
        prices = [] if self.dollars_per_kwh is None else [f"{self.dollars_per_kwh:g} $/kWh"]
        prices += [] if self.grid_g_per_kwh is None else [f"{self.grid_g_per_kwh:g} g CO2e/kWh"]
        failures = "no failures, data loading or evaluation"
        if self.mtbf_hours is not None:
            failures = (
                f"a GPU fails every {self.mtbf_hours:g} h, a checkpoint takes {self.checkpoint_s:g} s, a restart "
                f"{self.restart_s:g} s; no data loading or evaluation"
            )
        electricity = f"electricity of {', '.join([rest, f'PUE {self.pue:g}', *prices])}"
        return (f"the run: {amount}{passes}, {failures}; {electricity}",)


def _times(*factors: float | None) -> float | None:
    """A product, None where a factor is not known."""
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


_DEFAULTS = {field.name: field.default for field in fields(Run)}
