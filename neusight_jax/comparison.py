"""Comparisons: one workload on many GPUs, ranked by time, throughput or cost, a tie called a tie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.cluster import Machine, gpu_of
from neusight_jax.hardware.files import load_named_gpus
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.prices import SECONDS_PER_HOUR, PriceList, Prices, prices_of
from neusight_jax.job.job import Job
from neusight_jax.model.intervals import ratio_interval
from neusight_jax.model.predictor import Predictor
from neusight_jax.prediction import predict
from neusight_jax.records import Record, Result, ranks_with_ties
from neusight_jax.runs import Run, RunCost
from neusight_jax.workloads import usual_machine, workload_dict

if TYPE_CHECKING:
    import pandas as pd


ORDERS: tuple[str, ...] = ("latency", "throughput", "cost")
"""What a comparison may be ranked by."""
Interval: TypeAlias = tuple[float, float] | None


@dataclass(frozen=True)
class Candidate(Record):
    """One GPU of a comparison.

    Attributes:
      gpu: its name.
      rank: 1 is best; GPUs that cannot be told from the best of their group share its rank. 0 = cannot run it.
      tie: whether another GPU shares the rank.
      latency_s, low_s, high_s: of one step, and the interval around it where the predictor gives one (else None).
      ratio, ratio_low, ratio_high: its time, or by cost its cost, over that of the first GPU, and the interval of this
        ratio (`intervals.ratio_interval`), which is not that of the two times: they are off alike.
      samples_per_s, tokens_per_s: throughput, of all GPUs that the work occupies together.
      energy_j, joules_per_token: of a step, of all GPUs, and over its tokens.
      mfu, hfu: FLOP utilization (`forecast.Forecast`); run: cost of a whole run (`runs.Run`), where asked for.
      memory_bytes, fits: what the workload needs on the fullest GPU, by estimate, and whether the GPU has it; None of
        a GPU that was not forecast.
      price_per_hour: of one GPU, with prices, in their currency.
      cost_per_run, cost_per_1k_samples, cost_per_million_tokens: of all GPUs that the work occupies.
      notes: why it cannot run the workload or has no rank, and what to know that does not go for all.
    """

    gpu: str
    rank: int = 0
    tie: bool = False
    latency_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    energy_j: float | None = None
    joules_per_token: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    run: RunCost | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    price_per_hour: float | None = None
    cost_per_run: float | None = None
    cost_per_1k_samples: float | None = None
    cost_per_million_tokens: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def interval_s(self) -> Interval:
        """The interval of a step, None where there is none."""
        return None if self.low_s is None or self.high_s is None else (self.low_s, self.high_s)


@dataclass(frozen=True)
class Comparison(Result):
    """Candidates in order, best first; those that cannot run the workload last.

    Attributes:
      workload: see `workload_dict`.
      by: what they are ranked by; currency, price_file: of the prices, if any.
      candidates: see `Candidate`.
      notes: what to know that goes for every GPU.
    """

    kind: ClassVar[str] = "comparison"
    workload: Mapping[str, Any]
    by: str
    candidates: tuple[Candidate, ...]
    currency: str = ""
    notes: tuple[str, ...] = ()
    price_file: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs of one kind that the workload occupies."""
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

        return pd.json_normalize([asdict(item) for item in self.candidates])

    def values(self) -> dict[str, Any]:
        """The workload that was asked for, and every GPU."""
        head = self._fields("workload", "by", "currency", "price_file", "num_gpus")
        return {**head, "gpus": self.candidates, "notes": self.notes}


def compare(
    predictor: Predictor,
    gpus: Sequence[str],
    work: Graph | Job,
    *,
    prices: PriceList = None,
    by: str = "latency",
    notes: Mapping[str, Sequence[str]] | None = None,
    limits: Mapping[str, float] | None = None,
    run: Run | None = None,
) -> Comparison:
    """Rank GPUs for one workload.

    Every GPU is forecast as if nobody had measured it, which is right for comparing machines. A GPU that lacks the
    arithmetic path or the memory comes last, with its reason. Work on several GPUs runs on as many of each kind, in
    their usual server.

    Args:
      predictor: of a checkpoint; gpus: names or files; work: the model and its workload, or a job.
      prices: see `read_prices`, of one GPU: work on several costs that many times as much.
      by: one of `ORDERS`; throughput ranks as latency does, since the batch is fixed.
      notes: what else to say of a GPU, by its name (`load_named_gpus`).
      limits: of every GPU, `power_limit_w` and `clock_limit_hz`.
      run: also what a whole run of such steps takes and costs.
    Raises: `InputError` for an unknown order, an unknown GPU, or cost without any price.
    """
    priced = prices_of(prices)
    if by not in ORDERS:
        raise unknown_name("order", by, ORDERS)
    if by == "cost" and priced is None:
        raise InputError("ranking by cost needs prices; give a price file, GPU: price of an hour")
    load, common = {**workload_dict(work), "num_gpus": work.num_gpus}, work.notes
    loaded = {name: gpu.replace(**(limits or {})) for name, gpu in load_named_gpus(gpus).items()}
    machines = {name: usual_machine(name, gpu, work) for name, gpu in loaded.items()}
    items = [
        _candidate(predictor, name, machine, work, load["num_gpus"], priced, run, (notes or {}).get(name, ()))
        for name, machine in machines.items()
    ]
    common = (*common, *run.notes()) if run else common
    if by == "cost" and all(item.price_per_hour is None for item in items):
        raise InputError(f"no price for any of {', '.join(item.gpu for item in items)}; add them to the price file")
    if by == "cost":
        items = [_noted(item, "has no price: not ranked") if item.price_per_hour is None else item for item in items]
    order, shared = _shared_notes(ranked(items, by, machines), common)
    currency, file = (priced.currency, priced.file) if priced else ("", "")
    return Comparison(load, by, order, currency, shared, file)


def _noted(item: Candidate, note: str) -> Candidate:
    return replace(item, notes=(note, *item.notes))


def _shared_notes(items: Sequence[Candidate], notes: tuple[str, ...]) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
    """Candidates without these notes and those that all forecast ones have; and these and those."""
    noted = [item.notes for item in items if item.latency_s is not None]
    common = [note for note in noted[0] if all(note in other for other in noted)] if len(noted) > 1 else []
    shared = tuple(dict.fromkeys((*notes, *common)))
    rest = [replace(item, notes=tuple(note for note in item.notes if note not in shared)) for item in items]
    return tuple(rest), shared


def _lacking(gpu: GPU, work: Graph | Job) -> str:
    """The dtype of a workload that a GPU has no arithmetic path for, "" if there is none."""
    for dtype in work.on(gpu.paths).arithmetic:
        try:
            gpu.peak_flop_per_s(dtype)
        except InputError:
            return dtype
    return ""


def _candidate(
    predictor: Predictor,
    name: str,
    machine: Machine,
    work: Graph | Job,
    count: int,
    prices: Prices | None,
    run: Run | None,
    notes: Sequence[str],
) -> Candidate:
    gpu = gpu_of(machine)
    item = Candidate(name, price_per_hour=prices.of(name) if prices else None)
    if lacking := _lacking(gpu, work):
        return _noted(item, f"has no {lacking} path, only {', '.join(gpu.paths)}: not forecast")
    forecast = predict(predictor, machine, work, gpu_name=name, notes=notes)
    seconds, tokens, memory = forecast.total_s, forecast.tokens, forecast.memory
    low, high = forecast.interval_s or (None, None)
    samples = forecast.batch_size
    costs: dict[str, Any] = {}
    if item.price_per_hour is not None:
        step = count * item.price_per_hour * seconds / SECONDS_PER_HOUR
        costs = {
            "cost_per_run": step,
            "cost_per_1k_samples": 1e3 * step / samples,
            "cost_per_million_tokens": 1e6 * step / tokens,
        }
    forecast = run.of(forecast, item.price_per_hour) if run else forecast
    item = replace(
        item,
        latency_s=seconds,
        low_s=low,
        high_s=high,
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        energy_j=forecast.energy_j,
        joules_per_token=forecast.joules_per_token,
        mfu=forecast.mfu,
        hfu=forecast.hfu,
        run=forecast.run,
        memory_bytes=None if memory is None else memory.total,
        fits=forecast.fits is not False,
        notes=forecast.notes,
        **costs,
    )
    return item if item.fits else _noted(item, "may not fit in memory: not ranked")


def ranked(candidates: Sequence[Candidate], by: str, machines: Mapping[str, Machine]) -> list[Candidate]:
    """In order of time or cost, with ratios to the first and ranks.

    A GPU ties with the first of its group where the interval of their ratio holds 1; else it opens a group.
    """

    def scale(item: Candidate) -> float | None:
        if item.latency_s is None or not item.fits:
            return None
        return item.price_per_hour if by == "cost" else 1.0

    runs = [item for item in candidates if scale(item) is not None]
    rest = [item for item in candidates if scale(item) is None]
    runs.sort(key=lambda item: (scale(item) or 0.0) * (item.latency_s or 0.0))

    def ties(item: Candidate, leader: Candidate) -> bool:
        interval = _ratio(item, leader, scale, machines)[1]
        return interval is not None and interval[0] <= 1.0

    out: list[Candidate] = []
    for item, rank, tie in ranks_with_ties(runs, ties):
        ratio, ends = _ratio(item, runs[0], scale, machines)
        low, high = ends or (None, None)
        out.append(replace(item, rank=rank, tie=tie, ratio=ratio, ratio_low=low, ratio_high=high))
    return out + sorted(rest, key=lambda item: (item.latency_s is None, item.latency_s or 0.0))


def _ratio(
    item: Candidate, best: Candidate, scale: Callable[[Candidate], float | None], machines: Mapping[str, Machine]
) -> tuple[float, Interval]:
    """Time or cost of a GPU over that of another, and the interval of it."""
    values = (scale(item) or 0.0) * (item.latency_s or 0.0), (scale(best) or 0.0) * (best.latency_s or 0.0)
    pair = machines[item.gpu], machines[best.gpu]
    return values[0] / values[1], ratio_interval(values, (item.interval_s, best.interval_s), pair)
