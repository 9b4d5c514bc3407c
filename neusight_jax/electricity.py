"""Electricity: what the joules of a run cost at the meter, in kilowatt-hours, dollars and carbon."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.forecast import Forecast
from neusight_jax.hardware.prices import SECONDS_PER_HOUR
from neusight_jax.records import Record

J_PER_KWH = 1e3 * SECONDS_PER_HOUR
"""Joules of a kilowatt-hour."""
G_PER_T = 1e6
"""Grams of a metric ton."""


@dataclass(frozen=True)
class Electricity(Record):
    """Electricity that a run of so many tokens takes from the grid. Nothing but the default PUE is assumed.

    Attributes:
      tokens: to train, or to generate where a model is served.
      dollars_per_kwh: price; None = not known.
      pue: what the building takes over what its servers take, 1 = nothing for cooling.
      host_w: watts of the rest of a server for each of its GPUs, whether they work or not.
      grid_g_per_kwh: grams of CO2e of a kilowatt-hour; None = not known.
    Raises: `InputError` for values that cannot be.
    """

    tokens: float
    dollars_per_kwh: float | None = None
    pue: float = 1.0
    host_w: float = 0.0
    grid_g_per_kwh: float | None = None

    def __post_init__(self) -> None:
        for name, least, most, expected in (
            ("tokens", 0.0, math.inf, "a positive number of tokens, such as 15e12"),
            ("dollars_per_kwh", 0.0, 100.0, "dollars of a kWh, such as 0.12"),
            ("pue", 1.0, 10.0, "1 or more: watts of the building over those of its servers, such as 1.2"),
            ("host_w", 0.0, 1e5, "watts of the rest of a server for each GPU, such as 150"),
            ("grid_g_per_kwh", 0.0, 1e4, "grams of CO2e of a kWh, such as 400"),
        ):
            value = getattr(self, name)
            if value is not None and not (least <= value < most and (name != "tokens" or value > 0.0)):
                raise InputError(f"{name} is {value!r}, expected {expected}")

    def bill(self, energy_j: float, gpu_seconds: float, tokens: float) -> dict[str, float]:
        """`energy_kwh` of all tokens at the meter, `electricity_dollars` and `co2e_t` (metric tons) where known.

        Args:
          energy_j: joules of the boards for so many `tokens`; gpu_seconds: GPUs times seconds that these take.
        Raises: `InputError` where nobody knows the tokens of a step.
        """
        if not tokens > 0.0:
            raise InputError("a step of this work has no tokens that could be counted; leave tokens out")
        joules = (energy_j + self.host_w * gpu_seconds) * self.pue * self.tokens / tokens
        amounts = {"energy_kwh": joules / J_PER_KWH}
        if self.dollars_per_kwh is not None:
            amounts["electricity_dollars"] = amounts["energy_kwh"] * self.dollars_per_kwh
        if self.grid_g_per_kwh is not None:
            amounts["co2e_t"] = amounts["energy_kwh"] * self.grid_g_per_kwh / G_PER_T
        return amounts

    def note(self) -> str:
        """Scope of the bill, in words."""
        rest = f"{self.host_w:g} W of the rest of a server for each GPU" if self.host_w else "the boards alone"
        prices = [] if self.dollars_per_kwh is None else [f"{self.dollars_per_kwh:g} $/kWh"]
        prices += [] if self.grid_g_per_kwh is None else [f"{self.grid_g_per_kwh:g} g CO2e/kWh"]
        return f"electricity of {self.tokens:.4g} tokens: {', '.join([rest, f'PUE {self.pue:g}', *prices])}"

    def of(self, forecast: Forecast) -> Forecast:
        """A forecast with the bill of a run of such steps."""
        bill: Any = self.bill(forecast.energy_j, forecast.gpus * forecast.total_s, forecast.tokens)
        return replace(forecast, **bill)
