"""`compare`: one workload on many GPUs, ranked by time, throughput or cost, a tie called a tie."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.forecast import predict
from neusight_jax.gpu_catalog import Yaml, canonical_name
from neusight_jax.gpu_file import load_named_gpu
from neusight_jax.graph.graph import Graph
from neusight_jax.memory import memory_bytes
from neusight_jax.terms import Predictor

if TYPE_CHECKING:
    import pandas as pd

ORDERS: tuple[str, ...] = ("latency", "throughput", "cost")
"""What a comparison may be ranked by."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Candidate:
    """One GPU of a comparison.

    Attributes:
      gpu: its name.
      rank: 1 is best; GPUs whose intervals overlap the best of their group share its rank. 0 = cannot run it.
      tie: whether another GPU shares the rank.
      latency_s, low_s, high_s: of one step, and the interval around it where the predictor gives one (else None).
      samples_per_s, tokens_per_s: throughput.
      memory_bytes, fits: what the workload needs, by estimate, and whether the GPU has it.
      price_per_hour, cost_per_run, cost_per_1k_samples, cost_per_million_tokens: with prices, in their currency.
      note: why it cannot run the workload, or what to know.
    """

    gpu: str
    rank: int
    tie: bool
    latency_s: float | None
    low_s: float | None
    high_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    memory_bytes: float
    fits: bool
    price_per_hour: float | None = None
    cost_per_run: float | None = None
    cost_per_1k_samples: float | None = None
    cost_per_million_tokens: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """Candidates in order, best first; those that cannot run the workload last.

    Attributes:
      workload: for people; by: what they are ranked by; currency: of the prices, if any.
      candidates: see `Candidate`.
    """

    workload: str
    by: str
    candidates: tuple[Candidate, ...]
    currency: str = ""

    def to_frame(self) -> pd.DataFrame:
        """One row per GPU."""
        import pandas as pd

        return pd.DataFrame([asdict(item) for item in self.candidates])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "workload": self.workload,
            "by": self.by,
            "currency": self.currency,
            "gpus": [asdict(item) for item in self.candidates],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1)


@dataclass(frozen=True)
class Prices:
    """Price of an hour by GPU name (canonical where the catalog knows it), in one currency."""

    per_hour: Mapping[str, float]
    currency: str = ""


def compare(
    predictor: Predictor,
    gpus: Sequence[str],
    graph: Graph,
    *,
    prices: Prices | None = None,
    by: str = "latency",
) -> Comparison:
    """Rank GPUs for one workload.

    Every GPU is forecast as if nobody had measured it, which is right for comparing machines. A GPU that lacks the
    arithmetic path or the memory comes last, with its reason.

    Args:
      predictor: of a checkpoint; gpus: names or files; graph: the workload.
      prices: see `read_prices`; by: one of `ORDERS`; throughput ranks as latency does, since the batch is fixed.
    Raises: `InputError` for an unknown order, an unknown GPU, or cost without any price.
    """
    if by not in ORDERS:
        raise unknown_name("order", by, ORDERS)
    if by == "cost" and prices is None:
        raise InputError("ranking by cost needs prices; give a price file, GPU: price of an hour")
    needed = memory_bytes(graph)
    found = [_candidate(predictor, name, graph, needed, prices) for name in dict.fromkeys(gpus)]
    if by == "cost" and all(item.price_per_hour is None for item in found):
        raise InputError(f"no price for any of {', '.join(item.gpu for item in found)}; add them to the price file")
    workload = (
        f"{graph.name}: {graph.mode}, batch {graph.batch_size}, sequence {graph.sequence_length}, {graph.dtype}"
        f"{', fused' if graph.fused else ''}"
    )
    return Comparison(workload, by, tuple(ranked(found, by)), prices.currency if prices else "")


def _candidate(predictor: Predictor, given: str, graph: Graph, needed: float, prices: Prices | None) -> Candidate:
    name, gpu = load_named_gpu(given)
    fits = needed <= float(gpu.mem_bytes)  # type: ignore[arg-type]
    price = prices.per_hour.get(name) if prices else None
    try:
        gpu.peak_flop_per_s(graph.dtype)
    except InputError:
        none = None
        reason = f"has no {graph.dtype} path"
        return Candidate(name, 0, False, none, none, none, none, none, needed, fits, price, note=reason)
    forecast = predict(predictor, gpu, graph, gpu_name=name)
    seconds = forecast.total_s
    interval = getattr(forecast, "interval_s", None)
    low, high = (None, None) if interval is None else (float(interval[0]), float(interval[1]))
    tokens = graph.step_tokens
    run = None if price is None else price * seconds / SECONDS_PER_HOUR
    return Candidate(
        gpu=name,
        rank=0,
        tie=False,
        latency_s=seconds,
        low_s=low,
        high_s=high,
        samples_per_s=graph.batch_size / seconds,
        tokens_per_s=tokens / seconds,
        memory_bytes=needed,
        fits=fits,
        price_per_hour=price,
        cost_per_run=run,
        cost_per_1k_samples=None if run is None else 1e3 * run / graph.batch_size,
        cost_per_million_tokens=None if run is None else 1e6 * run / tokens,
        note="" if fits else "may not fit in memory",
    )


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


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Prices from a JSON or YAML file: GPU name -> price of an hour, and `currency` if wanted.

    Raises: `InputError` when the file is not there, is no such mapping, or a price is no positive number.
    """
    file = Path(path)
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=Yaml)  # JSON is YAML
    except FileNotFoundError:
        raise InputError(f"{file}: no such price file; expected JSON or YAML, GPU: price of an hour") from None
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(f"{file}: not readable as JSON or YAML ({reason}); mend the syntax") from None
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: expected a mapping of GPU: price of an hour, e.g. H100: 2.49")
    currency = str(content.pop("currency", ""))
    per_hour = {}
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"{file}: price of {name} is {value!r}, expected a positive number per hour, e.g. 2.49")
        per_hour[canonical_name(str(name)) or str(name)] = float(value)
    return Prices(per_hour, currency)
