"""Comparisons: one workload on many GPUs, ranked by time, throughput or cost, a tie called a tie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.forecast import predict
from neusight_jax.gpu import GPU
from neusight_jax.gpu_file import load_named_gpus
from neusight_jax.graph.graph import Graph
from neusight_jax.memory import memory_bytes
from neusight_jax.prices import SECONDS_PER_HOUR, PriceList, Prices, prices_of
from neusight_jax.printed import Record
from neusight_jax.results import Result
from neusight_jax.terms import Predictor
from neusight_jax.workloads import num_gpus, workload_dict

if TYPE_CHECKING:
    import pandas as pd

ORDERS: tuple[str, ...] = ("latency", "throughput", "cost")
"""What a comparison may be ranked by."""


@dataclass(frozen=True)
class Candidate(Record):
    """One GPU of a comparison.

    Attributes:
      gpu: its name.
      rank: 1 is best; GPUs whose intervals overlap the best of their group share its rank. 0 = cannot run it.
      tie: whether another GPU shares the rank.
      latency_s, low_s, high_s: of one step, and the interval around it where the predictor gives one (else None).
      samples_per_s, tokens_per_s: throughput, of all GPUs that the model is split over together.
      memory_bytes, fits: what the workload needs on one GPU, by estimate, and whether the GPU has it.
      price_per_hour: of one GPU, with prices, in their currency.
      cost_per_run, cost_per_1k_samples, cost_per_million_tokens: of all GPUs that the model is split over.
      notes: why it cannot run the workload or has no rank, and what to know that does not go for all.
    """

    gpu: str
    rank: int = 0
    tie: bool = False
    latency_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    memory_bytes: float = 0.0
    fits: bool = True
    price_per_hour: float | None = None
    cost_per_run: float | None = None
    cost_per_1k_samples: float | None = None
    cost_per_million_tokens: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison(Result):
    """Candidates in order, best first; those that cannot run the workload last.

    Attributes:
      workload: see `workload_dict`; by: what they are ranked by; currency: of the prices, if any.
      candidates: see `Candidate`.
      notes: what to know that goes for every GPU.
    """

    kind: ClassVar[str] = "comparison"
    workload: Mapping[str, Any]
    by: str
    candidates: tuple[Candidate, ...]
    currency: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_gpus(self) -> int:
        """GPUs of one kind that the workload is split over."""
        return int(self.workload["num_gpus"])

    @property
    def priced(self) -> bool:
        """Whether any GPU has a price."""
        return any(item.price_per_hour is not None for item in self.candidates)

    @property
    def has_intervals(self) -> bool:
        """Whether any latency has an interval."""
        return any(item.low_s is not None for item in self.candidates)

    def to_frame(self) -> pd.DataFrame:
        """One row per GPU."""
        import pandas as pd

        return pd.DataFrame([asdict(item) for item in self.candidates])

    def values(self) -> dict[str, Any]:
        """What was asked, and every GPU."""
        return {**self._fields("workload", "by", "currency", "num_gpus"), "gpus": self.candidates, "notes": self.notes}


def compare(
    predictor: Predictor,
    gpus: Sequence[str],
    graph: Graph,
    *,
    prices: PriceList = None,
    by: str = "latency",
    notes: Mapping[str, Sequence[str]] | None = None,
) -> Comparison:
    """Rank GPUs for one workload.

    Every GPU is forecast as if nobody had measured it, which is right for comparing machines. A GPU that lacks the
    arithmetic path or the memory comes last, with its reason.

    Args:
      predictor: of a checkpoint; gpus: names or files; graph: the workload.
      prices: see `read_prices`, of one GPU: a model split over several costs that many times as much.
      by: one of `ORDERS`; throughput ranks as latency does, since the batch is fixed.
      notes: what else to say of a GPU, by its name (`load_named_gpus`).
    Raises: `InputError` for an unknown order, an unknown GPU, or cost without any price.
    """
    priced = prices_of(prices)
    if by not in ORDERS:
        raise unknown_name("order", by, ORDERS)
    if by == "cost" and priced is None:
        raise InputError("ranking by cost needs prices; give a price file, GPU: price of an hour")
    needed = memory_bytes(graph)
    items = [
        _candidate(predictor, name, gpu, graph, needed, priced, (notes or {}).get(name, ()))
        for name, gpu in load_named_gpus(gpus).items()
    ]
    if by == "cost" and all(item.price_per_hour is None for item in items):
        raise InputError(f"no price for any of {', '.join(item.gpu for item in items)}; add them to the price file")
    if by == "cost":
        items = [_noted(item, "has no price: not ranked") if item.price_per_hour is None else item for item in items]
    order, shared = _shared_notes(ranked(items, by), graph.notes)
    return Comparison(workload_dict(graph), by, order, priced.currency if priced else "", shared)


def _noted(item: Candidate, note: str) -> Candidate:
    return replace(item, notes=(note, *item.notes))


def _shared_notes(items: Sequence[Candidate], notes: tuple[str, ...]) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Candidates without these notes and those that all forecast ones have; and these and those."""
    each = [item.notes for item in items if item.latency_s is not None]
    common = [note for note in each[0] if all(note in other for other in each)] if len(each) > 1 else []
    shared = tuple(dict.fromkeys((*notes, *common)))
    own = [replace(item, notes=tuple(note for note in item.notes if note not in shared)) for item in items]
    return tuple(own), shared


def _candidate(
    predictor: Predictor,
    name: str,
    gpu: GPU,
    graph: Graph,
    needed: float,
    prices: Prices | None,
    notes: Sequence[str],
) -> Candidate:
    fits = needed <= float(gpu.mem_bytes)  # type: ignore[arg-type]
    price = prices.of(name) if prices else None
    item = Candidate(name, memory_bytes=needed, fits=fits, price_per_hour=price)
    try:
        gpu.peak_flop_per_s(graph.dtype)
    except InputError:
        return _noted(item, f"has no {graph.dtype} path, only {', '.join(gpu.paths)}: not forecast")
    forecast = predict(predictor, gpu, graph, gpu_name=name, notes=notes)
    seconds, tokens = forecast.total_s, graph.step_tokens
    low, high = forecast.interval_s or (None, None)
    costs: dict[str, Any] = {}
    if price is not None:
        run = num_gpus(graph) * price * seconds / SECONDS_PER_HOUR
        costs = {
            "cost_per_run": run,
            "cost_per_1k_samples": 1e3 * run / graph.batch_size,
            "cost_per_million_tokens": 1e6 * run / tokens,
        }
    item = replace(
        item,
        latency_s=seconds,
        low_s=low,
        high_s=high,
        samples_per_s=graph.batch_size / seconds,
        tokens_per_s=tokens / seconds,
        notes=forecast.notes,
        **costs,
    )
    return item if fits else _noted(item, "may not fit in memory: not ranked")


def ranked(candidates: Sequence[Candidate], by: str) -> list[Candidate]:
    """In order of time or cost, with ranks: a GPU whose interval reaches the leader's of its group ties with it."""

    def scale(item: Candidate) -> float | None:
        if item.latency_s is None or not item.fits:
            return None
        return item.price_per_hour if by == "cost" else 1.0

    runs = [item for item in candidates if scale(item) is not None]
    rest = [item for item in candidates if scale(item) is None]
    runs.sort(key=lambda item: (scale(item) or 0.0) * (item.latency_s or 0.0))
    out: list[Candidate] = []
    leader_high, rank = -math.inf, 0
    for position, item in enumerate(runs, start=1):
        factor, seconds = scale(item) or 0.0, item.latency_s or 0.0
        low = factor * (seconds if item.low_s is None else item.low_s)
        if low > leader_high or not out:
            rank, leader_high = position, factor * (seconds if item.high_s is None else item.high_s)
        out.append(replace(item, rank=rank))
    shared = [item.rank for item in out]
    out = [replace(item, tie=shared.count(item.rank) > 1) for item in out]
    return out + sorted(rest, key=lambda item: (item.latency_s is None, item.latency_s or 0.0))
