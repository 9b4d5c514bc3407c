"""Spaces a sweep draws from: ranges of GPU fields, as a grid, random or Sobol points; any slice can be had alone."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import SIZES
from neusight_jax.hardware.cluster import TRACED_FIELDS
from neusight_jax.hardware.variant import check_field, require_field
from neusight_jax.records import Record, cell

MODEL_FIELDS: tuple[str, ...] = (*SIZES, "training_tokens")
"""Fields of a model that is designed with its machine (`designs.model`)."""
GRAINS: dict[str, float] = {
    "num_sms": 1.0,
    **dict.fromkeys(SIZES, 1.0),
    **dict.fromkeys(("hidden", "d_ff", "vocabulary"), 128.0),
    "head_size": 64.0,
}
"""Fields that come in whole numbers, and the step they have where none is given: widths are filled tiles."""
Method: TypeAlias = Literal["random", "sobol"]
METHODS: tuple[str, ...] = ("random", "sobol")
BLOCK = 4096
"""Random points drawn from one seed; a slice draws the blocks it touches."""


@dataclass(frozen=True)
class Range(Record):
    """Values a field may take, between `low` and `high` in the field's unit, spread evenly in log (or plainly).

    Attributes:
      field: a GPU field, of a cluster one of its links and network, or of a model one of `MODEL_FIELDS`.
      low, high: both included.
      count: points of a grid; not used by random and Sobol points.
      log: even in log (default) or in the value.
      step: values are rounded to multiples of it; 0 = those of `GRAINS`, any value of other fields.
    """

    field: str
    low: float
    high: float
    count: int = 0
    log: bool = True
    step: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Its ends in the field's unit."""
        ends = {name: cell(self.field, getattr(self, name)) for name in ("low", "high")}
        return super().figures() | ends

    def __post_init__(self) -> None:
        of_others = self.field in (*TRACED_FIELDS, *MODEL_FIELDS)
        where = f"range of {self.field if of_others else require_field(self.field)}"
        for value in (self.low, self.high):
            if value <= 0:
                raise InputError(f"{where}: {value:g} is not positive, expected 0 < low <= high")
            if self.field not in MODEL_FIELDS:
                check_field(self.field, value, where)
        if self.low > self.high:
            raise InputError(f"{where}: {self.low:g} to {self.high:g} is empty, expected low <= high")
        if self.step < 0 or (self.step > 0 and self.low / self.step > math.floor(self.high / self.step + 1e-9)):
            raise InputError(
                f"{where}: no multiple of the step {self.step:g} lies between {self.low:g} and {self.high:g}"
            )

    @property
    def grain(self) -> float:
        """Step values are rounded to; 0 = none."""
        return self.step or GRAINS.get(self.field, 0.0)

    def at(self, share: Float[np.ndarray, " row"]) -> Float[np.ndarray, " row"]:
        """Values at shares in [0, 1] of the way from low to high, rounded to the grain inside the range."""
        grown = self.low * (self.high / self.low) ** share
        values: np.ndarray = self.rounded(grown if self.log else self.low + (self.high - self.low) * share)
        return values

    def rounded(self, values: Any) -> Any:
        """Values at the nearest multiples of the grain that lie in the range."""
        if not self.grain:
            return np.clip(values, self.low, self.high)
        first, last = math.ceil(self.low / self.grain - 1e-9), math.floor(self.high / self.grain + 1e-9)
        return np.clip(np.round(np.asarray(values) / self.grain), first, max(first, last)) * self.grain


@dataclass(frozen=True)
class Space(Record):
    """Points over GPU fields that can be had slice by slice: a `Grid` or `Samples`."""

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not self.fields:
            raise InputError("a sweep needs at least one field that varies, e.g. mem_bytes_per_s=1e12:8e12:100")
        for field in self.fields:
            if self.fields.count(field) > 1:
                raise InputError(f"{field} has two ranges, expected one")

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that vary."""
        return tuple(axis.field for axis in self.ranges)

    @property
    def rows(self) -> int:
        """Number of points."""
        raise NotImplementedError

    def slice(self, start: int, stop: int) -> dict[str, Float[np.ndarray, " row"]]:
        """Points `start` up to `stop`; the same whatever was asked for before."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Plain values that determine every point."""
        raise NotImplementedError


@dataclass(frozen=True)
class Grid(Space):
    """Every combination of the ranges' values, the last range fastest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in self.ranges:
            if axis.count < 1:
                raise InputError(f"grid of {axis.field}: {axis.count} points, expected at least 1")

    @property
    def rows(self) -> int:
        """Product of the counts."""
        return math.prod(axis.count for axis in self.ranges)

    def slice(self, start: int, stop: int) -> dict[str, Float[np.ndarray, " row"]]:
        """Points `start` up to `stop`."""
        places = np.unravel_index(np.arange(start, stop), [axis.count for axis in self.ranges])
        return {
            axis.field: axis.at(place / max(axis.count - 1, 1)) for axis, place in zip(self.ranges, places, strict=True)
        }

    def describe(self) -> dict[str, Any]:
        """Plain values that determine every point."""
        return {"method": "grid", "ranges": [vars(axis) for axis in self.ranges]}


@dataclass(frozen=True)
class Samples(Space):
    """Random or scrambled Sobol points in the ranges, reproducible from a seed.

    Reference: Sobol' points with Owen scrambling, scipy.stats.qmc.
    """

    count: int
    method: Method = "sobol"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise InputError(f"sampling method is {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.count < 1:
            raise InputError(f"{self.count} samples asked for, expected at least 1")

    @property
    def rows(self) -> int:
        """Number of samples."""
        return self.count

    def slice(self, start: int, stop: int) -> dict[str, Float[np.ndarray, " row"]]:
        """Points `start` up to `stop`."""
        shares = self._sobol(start, stop) if self.method == "sobol" else self._random(start, stop)
        return {axis.field: axis.at(shares[:, place]) for place, axis in enumerate(self.ranges)}

    def _sobol(self, start: int, stop: int) -> Float[np.ndarray, "row field"]:
        from scipy.stats import qmc

        points = qmc.Sobol(len(self.ranges), scramble=True, rng=np.random.default_rng(self.seed))
        if start:
            points.fast_forward(start)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The balance properties of Sobol", UserWarning)
            shares: np.ndarray = points.random(stop - start)
        return shares

    def _random(self, start: int, stop: int) -> Float[np.ndarray, "row field"]:
        first, last = start // BLOCK, -(-stop // BLOCK)
        blocks = [
            np.random.default_rng([self.seed, block]).random((BLOCK, len(self.ranges))) for block in range(first, last)
        ]
        return np.concatenate(blocks)[start - first * BLOCK : stop - first * BLOCK]

    def describe(self) -> dict[str, Any]:
        """Plain values that determine every point."""
        shared = {"method": self.method, "count": self.count, "seed": self.seed}
        return {**shared, "ranges": [vars(axis) for axis in self.ranges]}
