"""`scale_trace`: a run measured on one GPU, forecast on others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from neusight_jax.hardware.catalog import canonical_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.gpu_file import load_named_gpu
from neusight_jax.model.checkpoint import default_checkpoint, load_card, load_predictor
from neusight_jax.model.terms import Predictor
from neusight_jax.results import Result
from neusight_jax.scaling.assumptions import assumed, origin_notes, origin_of
from neusight_jax.scaling.occupancy import limits_of
from neusight_jax.scaling.reading import read_trace
from neusight_jax.scaling.rules import RULES, Machine, scaling, work_of
from neusight_jax.scaling.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ScaledRun(Result):
    """A measured run and its forecast on another GPU. Seconds.

    Attributes:
      source, origin, target: names, for people.
      columns: per kind of launch: name, operator, kind, dtype, rule, count, measured_s, ratio, scaled_s; times of all
        its launches together.
      busy_s, span_s: of the measured run, see `Trace`.
      notes: what was odd in the trace, left out or assumed.
      checkpoint: what forecast it; "" for a predictor given as such.
    """

    kind: ClassVar[str] = "scaled_run"
    source: str
    origin: str
    target: str
    columns: dict[str, np.ndarray]
    busy_s: float
    span_s: float
    notes: tuple[str, ...] = ()
    checkpoint: str = ""

    @property
    def measured_s(self) -> float:
        """Seconds of all kernels on the origin."""
        return float(np.sum(self.columns["measured_s"]))

    @property
    def scaled_s(self) -> float:
        """Seconds of all kernels on the target."""
        return float(np.sum(self.columns["scaled_s"]))

    @property
    def scaled_span_s(self) -> float:
        """The whole run on the target: kernels overlap in the same share, time without kernels is unchanged."""
        share = self.scaled_s / self.measured_s if self.measured_s > 0 else 1.0
        return self.busy_s * share + (self.span_s - self.busy_s)

    def coverage(self) -> dict[str, dict[str, float]]:
        """Per rule that was used: kinds of launches, seconds measured and scaled, share of the measured time."""
        total, frame = self.measured_s, self.to_frame()
        sums = frame.groupby("rule").agg({"name": "size", "measured_s": "sum", "scaled_s": "sum"})
        found = sums.rename(columns={"name": "kernels"}).reindex([rule for rule in RULES if rule in sums.index])
        shares: Any = found.assign(share=found["measured_s"] / (total or 1.0)).to_dict("index")
        return dict(shares)

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of launch."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    def most_expensive(self, count: int = 10) -> list[dict[str, Any]]:
        """The kinds of launches with the most measured time, as plain values."""
        rows: list[Any] = self.to_frame().nlargest(count, "measured_s").to_dict("records")
        return rows

    def values(self) -> dict[str, Any]:
        """Totals, coverage by rule, the ten kinds of launches with the most measured time, all notes."""
        return {
            **self._fields("source", "origin", "target", "checkpoint", "measured_s", "scaled_s"),
            "measured_span_s": self.span_s,
            "scaled_span_s": self.scaled_span_s,
            "coverage": self.coverage(),
            "most_expensive": self.most_expensive(),
            "notes": self.notes,
        }


def scale_trace(
    trace: str | os.PathLike[str] | Trace,
    origin: str | GPU | None,
    target: str | GPU,
    *,
    predictor: str | Predictor | None = None,
    select: Mapping[str, str] | None = None,
    plain: bool = False,
) -> ScaledRun:
    """Forecast a run measured on one GPU on another, real or hypothetical.

    Every kernel's measured time is multiplied by the forecast on the target over the forecast on the origin where its
    work is known, and scaled by a simpler rule where it is not (`rules`); `ScaledRun.coverage` says how much of the
    time each rule carries. A GPU the checkpoint measured is forecast with its own effect, so that what is odd about the
    origin alone is not carried to the target; and of what still sets a kernel apart from its forecast only a part is,
    the smaller the less the two GPUs are alike (`rules.carried`).

    Args:
      trace: a Chrome trace of the PyTorch profiler or of JAX's (.json, .json.gz, or JAX's folder), a CSV of Nsight
        Systems or rocprof, a per-operator Parquet table, or a `Trace` already read.
      origin, target: names, files or records of GPUs; origin None = the GPU that the trace names.
      predictor: a checkpoint name or path, or a predictor (used as it is for both GPUs); None = `tensorcore` when any
        product of the run computes in another dtype than fp32, else `fp32`.
      select: for per-operator tables with several runs: column -> value.
      plain: measured time times forecast over forecast, all deviations carried.
    Raises: `InputError` for an unreadable trace, one that names no GPU where origin is None, or a target that lacks an
      arithmetic path of the run.
    """
    asked = load_named_gpu(origin)[0] if isinstance(origin, str) else ""
    read = trace if isinstance(trace, Trace) else read_trace(trace, asked, select)
    measured_on = origin_of(read) if origin is None else origin
    origin_name, origin_gpu = _named(measured_on)
    checkpoint = predictor if predictor is not None else default_checkpoint(work_of(read.items, origin_gpu))
    here, there = (_machine(gpu, checkpoint) for gpu in (measured_on, target))
    target_name = _named(target)[0]
    rules, ratios = scaling(read.items, here, there, plain=plain)
    names = ("name", "operator", "kind", "dtype")
    columns = {name: np.array([getattr(item, name) for item in read.items], object) for name in names}
    measured = np.array([item.seconds for item in read.items])
    columns |= {"rule": np.array(rules, object), "count": np.array([item.count for item in read.items])}
    columns |= {"measured_s": measured, "ratio": ratios, "scaled_s": measured * ratios}
    named = checkpoint if isinstance(checkpoint, str) else ""
    notes = [
        *origin_notes(read, origin, origin_name),
        *read.notes,
        *assumed(read.items, rules, (origin_name, here.gpu), (target_name, there.gpu), named, chosen=predictor is None),
    ]
    spans = (read.busy_s, read.span_s)
    return ScaledRun(read.source, origin_name, target_name, columns, *spans, tuple(notes), named)


def _named(gpu: str | GPU) -> tuple[str, GPU]:
    return ("the given GPU", gpu) if isinstance(gpu, GPU) else load_named_gpu(gpu)


def _machine(gpu: str | GPU, predictor: str | Predictor) -> Machine:
    """A machine; a catalog name the checkpoint measured is forecast with its effect, a file or record is not."""
    name, record = _named(gpu)
    chosen = predictor
    if isinstance(chosen, str):
        measured = not isinstance(gpu, GPU) and canonical_name(gpu) in load_card(chosen).get("device_effects", {})
        chosen = load_predictor(chosen, name if measured else None)
    return Machine(record, limits_of(name), chosen)
