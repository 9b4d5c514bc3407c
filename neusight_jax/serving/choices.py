"""Loads of a service, and the choices that answer them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from neusight_jax.errors import InputError
from neusight_jax.hardware.prices import SECONDS_PER_HOUR
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.records import Record, Result
from neusight_jax.runs import RunCost
from neusight_jax.serving.steady import PERCENTILES, Lengths
from neusight_jax.units import duration

if TYPE_CHECKING:
    import pandas as pd

CLOSED_FORM = "an estimate in closed form: continuous batching in steady state, no engine was run"


@dataclass(frozen=True)
class ServingChoice(Record):
    """One GPU type and layout, with as many replicas as the load needs. Units: seconds, bytes, tokens, as named.

    Attributes:
      gpu, tensor, expert: GPU type, and ranks of a replica that layers are split over, and experts.
      data: ranks of a replica that hold requests of their own and share the experts (data-parallel attention).
      prefill: where other replicas take the prompts (disaggregated): their `gpu`, `tensor`, `expert`, `data` and
        `replicas`, and `transfer_s` of a prompt's KV cache; then those of the choice are of replicas that decode, and
        users and rate of all together.
      rank, tie: 1 is best; those whose interval reaches the best of their group share its rank. 0 = does not answer.
      replicas, gpus: smallest number that carries the load within the targets; None = none does.
      ttft_s, tpot_s: at the load of each replica, by percentile: {"p50": ..., "p95": ...}.
      intervals: low and high, by what they are of: `ttft_s`, `tpot_s` (at the targets' percentile), `gpus`, `cost`.
      max_users, max_rate: of one replica within the targets: requests at once, and a second.
      tokens_per_s_gpu: output tokens a second, at the load.
      power_w: mean watts of all GPUs at the load, idle time included; joules_per_token: over the output tokens that
        they generate, prompts included in the joules. Of the boards alone.
      run: cost of so many output tokens (`runs.Run`), where asked for.
      memory: of a rank by what holds it; requests_at_once: whose KV cache fits.
      costs: in the currency of the prices, `per_hour` and per million tokens: `input`, `output`, `tokens`.
      notes: why it does not answer.
      command: line that starts one replica of vLLM in this layout; "" of two kinds of replicas.
    """

    gpu: str
    tensor: int
    expert: int
    data: int = 1
    rank: int = 0
    tie: bool = False
    replicas: int | None = None
    gpus: int | None = None
    ttft_s: Mapping[str, float] = field(default_factory=dict)
    tpot_s: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    max_users: int | None = None
    max_rate: float | None = None
    tokens_per_s_gpu: float | None = None
    power_w: float | None = None
    joules_per_token: float | None = None
    run: RunCost | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    requests_at_once: float = 0.0
    costs: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prefill: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def layout(self) -> Parallelism:
        """How a replica is split."""
        return layout_of(vars(self))

    @property
    def machine(self) -> str:
        """The type of its GPUs, or both: of those that take prompts first."""
        gpus = (self.prefill.get("gpu", self.gpu), self.gpu)
        return " + ".join(dict.fromkeys(gpus))


def layout_of(split: Mapping[str, Any]) -> Parallelism:
    """The layout of replicas by their `tensor`, `expert` and `data` ranks, 1 where they do not say."""
    tensor, expert, data = (int(split.get(name, 1)) for name in ("tensor", "expert", "data"))
    return Parallelism(tensor=tensor, expert=expert, data=data)


@dataclass(frozen=True)
class Serving(Result):
    """Choices in order, best first.

    Attributes:
      workload: the whole of what was asked; by: what they are ranked by; currency: of the prices, if any.
      choices: see `ServingChoice`; method: what forecast the load.
    """

    kind: ClassVar[str] = "serving"
    workload: Mapping[str, Any]
    by: str
    choices: tuple[ServingChoice, ...]
    currency: str = ""
    method: str = CLOSED_FORM
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ServingChoice:
        """The first choice."""
        return self.choices[0]

    def to_frame(self) -> pd.DataFrame:
        """One row per choice; what has parts as one column each."""
        import pandas as pd

        return pd.json_normalize([asdict(item) for item in self.choices])

    def values(self) -> dict[str, Any]:
        """The workload that was asked for, and every choice."""
        return {**self._fields("workload", "by", "currency", "method", "choices", "notes")}


@dataclass(frozen=True)
class Load:
    """Load and targets of a service; static.

    Attributes:
      lengths: of a request; users: requests at once, each user sending the next when one is answered; rate: requests a
        second that arrive at random. One of the two, the other None.
      ttft_s, tpot_s: targets, seconds, infinity = none; percentile: of the requests that have to meet them.
      max_gpus: most GPUs of one type; max_kw: most that all boards draw, mean kilowatts.
    """

    lengths: Lengths
    users: float | None
    rate: float | None
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    percentile: float = 95.0
    max_gpus: float = math.inf
    max_kw: float = math.inf

    def __post_init__(self) -> None:
        if (self.users is None) == (self.rate is None):
            raise InputError("give either users (requests at once) or request_rate (requests a second)")
        for name, value in (("users", self.users), ("request_rate", self.rate)):
            if value is not None and not 0.0 < value < math.inf:
                raise InputError(f"{name} is {value!r}, expected a positive number")
        for name in ("ttft_s", "tpot_s", "max_gpus", "max_kw"):
            if not getattr(self, name) > 0.0:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected a positive number")
        if self.percentile not in PERCENTILES:
            raise InputError(f"percentile is {self.percentile!r}, expected 50 or 95")

    def missed(self, ttft_s: float, tpot_s: float) -> str:
        """Targets that these times miss, and by how much; empty if none."""
        pairs = (("first token", self.ttft_s, ttft_s), ("token", self.tpot_s, tpot_s))
        return ", ".join(
            f"{name} after {duration(value)}, target {duration(target)} ({value / target:.2g} times)"
            for name, target, value in pairs
            if value > target
        )

    def within_power(self, choice: ServingChoice) -> ServingChoice:
        """A choice whose boards draw no more than they may; one that draws more does not answer, and says so."""
        if choice.power_w is None or choice.power_w <= 1e3 * self.max_kw:
            return choice
        note = f"its boards draw {choice.power_w / 1e3:.3g} kW, {self.max_kw:g} kW are allowed"
        return replace(choice, replicas=None, gpus=None, notes=(note, *choice.notes))

    def costs(self, per_hour: float, rate: float, share: float) -> dict[str, float]:
        """Costs of an hour, and of a million tokens at a rate of requests a second; prompts bear their share."""
        million, lengths = 1e6 * per_hour / SECONDS_PER_HOUR / rate, self.lengths
        return {
            "per_hour": per_hour,
            "input": share * million / lengths.input_tokens,
            "output": (1.0 - share) * million / lengths.output_tokens,
            "tokens": million / (lengths.input_tokens + lengths.output_tokens),
        }
