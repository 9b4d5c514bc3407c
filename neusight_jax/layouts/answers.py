"""`nj.parallelize`: which layout, on which machine, on how many GPUs; does it fit, and what does it cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Unpack

import numpy as np
from jaxtyping import Float

from neusight_jax.errors import InputError
from neusight_jax.forecast import COLUMNS, Forecast
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.configs.build import reading_notes
from neusight_jax.graph.configs.config import read_config, whole
from neusight_jax.graph.configs.decoder import read_decoder
from neusight_jax.graph.graph import Footprint
from neusight_jax.graph.optimizers import state_notes
from neusight_jax.hardware.cluster import Cluster
from neusight_jax.hardware.files import gpu_in
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.prices import SECONDS_PER_HOUR, PriceList, Prices, prices_of
from neusight_jax.job.flop import step_flop
from neusight_jax.job.job import Job, check_options, job_from_config, job_of, plan_of
from neusight_jax.job.parallelism import Parallelism, Space, layouts_of
from neusight_jax.job.pieces import Ask, Pieces
from neusight_jax.job.recipe import Facts, recipe_of
from neusight_jax.job.stages import check_lora, is_split, job_config
from neusight_jax.job.step import silent
from neusight_jax.layouts.assembly import Assembly, assemble, best_of, pipelines, timed, timed_under_limits
from neusight_jax.model.power import JOULES, PowerLaw, is_limited, power_law
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.software import LAYOUT_SPREAD, Software, usual_software
from neusight_jax.prediction import (
    Shares,
    carries_intervals,
    expert_share,
    once_at,
    predict,
    step_forecast,
    step_interval,
    with_energy,
    with_flop,
)
from neusight_jax.progress import follow
from neusight_jax.records import Record, Result, ranks_with_ties
from neusight_jax.runs import Run
from neusight_jax.units import GIB, duration

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

LOSSES = {
    "compute_s": "compute",
    "bubble_s": "bubble",
    "exposed_communication_s": "exposed communication",
}
"""Parts of a step by which two layouts differ."""
NEAR_SHARE = 0.1
"""A layout that needs up to this share more than a GPU has is a near miss: about what the estimate errs by at most."""
NEAR_SHOWN = 3
"""Most near misses of a machine that are forecast."""

_Job: TypeAlias = Callable[[Parallelism], Job]
"""The job of a layout."""


@dataclass(frozen=True)
class Choice(Record):
    """One layout on one machine.

    Attributes:
      rank: 1 is the fastest on its machine; layouts that cannot be told apart share a rank. tie: whether one does.
      step: its forecast; why: what it gains and loses against the next one.
      cost_per_million_tokens: with a price.
      command, trainer: command lines of a recipe that fine-tunes (`layouts.finetune`): of `predict`, which forecasts
        the same step, and of a trainer that runs it; "" of other layouts.
    """

    rank: int
    tie: bool
    step: Forecast
    why: str
    cost_per_million_tokens: float | None = None
    command: str = ""
    trainer: str = ""

    def figures(self) -> dict[str, Any]:
        """The step in short."""
        layout = {name: value for name, value in self.step.workload["layout"].items() if name != "gpus"}
        step = {"layout": repr(Parallelism(**layout)), "total_s": self.step.total_s}
        return {"rank": self.rank, "tie": self.tie} | step | {"why": self.why, "cost": self.cost_per_million_tokens}


@dataclass(frozen=True)
class Machine(Record):
    """The layouts of one machine.

    Attributes:
      name, gpus: of the cluster; choices: the best layouts, fastest first.
      tried: layouts that divide; too_large: those of them that do not fit.
      short_bytes: by how much the smallest of them exceeds the memory, 0 where one fits.
      near: how many of the too large need at most `NEAR_SHARE` more than a GPU has; near_misses: the fastest of those.
      price_per_hour: of one GPU; tie: whether the interval of its best layout, in time or cost, reaches the first's.
      lacks: dtype that its GPU has no arithmetic path for, so that nothing was tried; "" = none.
    """

    name: str
    gpus: int
    choices: tuple[Choice, ...]
    tried: int
    too_large: int
    short_bytes: float = 0.0
    near: int = 0
    near_misses: tuple[Forecast, ...] = ()
    price_per_hour: float | None = None
    tie: bool = False
    lacks: str = ""

    def summary(self) -> str:
        """Its verdict."""
        return self.verdict

    @property
    def verdict(self) -> str:
        """One line: how many layouts there are, and why others were left out."""
        if self.lacks:
            return f"{self.name}: has no {self.lacks} path: not forecast; give another dtype"
        if not self.tried:
            return f"{self.name}: no layout divides the model and the batch over {self.gpus} GPUs"
        if not self.choices:
            short = f"the smallest needs {self.short_bytes / GIB:.1f} GiB more than a GPU has"
            return f"{self.name}: none of {self.tried:,} layouts fits; {short}"
        near = f", {self.near:,} of them by less than {NEAR_SHARE:.0%}" if self.near else ""
        return (
            f"{self.name}: {self.tried:,} layouts, {self.too_large:,} dropped because the fullest rank does not fit"
            f"{near}"
        )


@dataclass(frozen=True)
class Layouts(Result):
    """Layouts of a training job, by machine.

    Attributes:
      workload: what was asked; machines: in the order of their best layout, by cost where there are prices.
      currency: of the prices; notes: what goes for all.
    """

    kind: ClassVar[str] = "layouts"
    workload: Mapping[str, Any]
    machines: tuple[Machine, ...]
    currency: str = ""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Choice | None:
        """The first layout of the first machine; None where nothing fits."""
        return self.machines[0].choices[0] if self.machines[0].choices else None

    def to_frame(self) -> pd.DataFrame:
        """One row per layout."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    **{"machine": machine.name, "gpus": machine.gpus, "rank": item.rank, "tie": item.tie},
                    **item.step.workload["layout"],
                    **{"step_s": item.step.total_s, **item.step.parts, "tokens_per_s": item.step.tokens_per_s},
                    **{"energy_j": item.step.energy_j, "joules_per_token": item.step.joules_per_token},
                    **{"mfu": item.step.mfu, "hfu": item.step.hfu},
                    **({} if item.step.run is None else item.step.run.columns()),
                    **{"memory_bytes": item.step.memory_bytes, "cost_per_million_tokens": item.cost_per_million_tokens},
                }
                for machine in self.machines
                for item in machine.choices
            ]
        )

    def values(self) -> dict[str, Any]:
        """Workload asked for, and the layouts of every machine."""
        machines = [
            {
                **{
                    name: getattr(machine, name)
                    for name in ("name", "gpus", "tried", "too_large", "short_bytes", "near")
                },
                "near_misses": [
                    {
                        **{"layout": step.workload["layout"], "total_s": step.total_s},
                        "short_bytes": step.memory_bytes - step.mem_bytes,
                    }
                    for step in machine.near_misses
                ],
                **{"tie": machine.tie, "price_per_hour": machine.price_per_hour, "verdict": machine.verdict},
                "layouts": [
                    {
                        **{"rank": item.rank, "tie": item.tie, "why": item.why},
                        "cost_per_million_tokens": item.cost_per_million_tokens,
                        **({"command": item.command, "trainer": item.trainer} if item.command else {}),
                        **{key: value for key, value in item.step.values().items() if key not in ("model", "cluster")},
                    }
                    for item in machine.choices
                ],
            }
            for machine in self.machines
        ]
        return {**self._fields("workload", "currency"), "machines": machines, "notes": self.notes}


def parallelize(
    predictor: Predictor | Mapping[str, Predictor],
    cluster: Cluster | Mapping[str, Cluster],
    model: str | Path | Mapping[str, Any],
    *,
    global_batch_size: int,
    sequence_length: int | None = None,
    dtype: str = "bf16",
    optimizer: str | None = "adamw",
    gradient_dtype: str = "fp32",
    software: Software | None = None,
    lora: Lora | None = None,
    space: Space | None = None,
    prices: PriceList = None,
    run: Run | None = None,
    top: int = 5,
    notes: Sequence[str] = (),
    console: Console | None = None,
    **facts: Unpack[Facts],
) -> Layouts:
    """The layouts of a training job that fit, fastest first.

    All layouts of `space` that divide the model, the batch and the GPUs are tried. Those whose fullest rank exceeds the
    memory are dropped and counted; the rest is forecast together, and so are those that nearly fit. A model
    whose layers are not split, such as BERT, has replicas: micro-batches and what ZeRO shards are tried.

    Args:
      predictor, cluster: what forecasts and on which GPUs; several as mappings with the same names.
      model, sequence_length to lora, facts: as `nj.job_from_config`.
      space: which values of a layout's fields are tried; prices: of an hour of one GPU (`nj.read_prices`).
      run: also what a whole run of such steps takes and costs.
      top: layouts of every machine that are returned.
      notes: for the report; console: where progress goes.
    Raises: `InputError` for what cannot be used, and where no machine has a layout that divides.
    """
    priced = prices_of(prices)
    check_options(optimizer)
    recipe = recipe_of(**facts)
    batch, tried, shown = whole("global_batch_size", global_batch_size), space or Space(), whole("top", top)
    clusters = cluster if isinstance(cluster, Mapping) else {f"{cluster.count} GPUs": cluster}
    search: _Search | _Replicas
    if is_split(model):
        config, sequence = job_config(model), whole("sequence_length", sequence_length)
        split = read_decoder(config, sequence)
        check_lora(config, split, lora)
        ask = Ask(config, split, batch, sequence, dtype, optimizer, gradient_dtype, recipe, lora)
        search = _Search(ask, tried, shown, software or usual_software(optimizer), console)
    else:
        config, sequence = read_config(model), sequence_length or 0
        of_step: dict[str, Any] = {"dtype": dtype, "optimizer": optimizer, "gradient_dtype": gradient_dtype, **facts}
        of_step |= {"global_batch_size": batch, "sequence_length": sequence_length, "software": software, "lora": lora}
        job = functools.partial(job_from_config, model, **of_step)
        search = _Replicas(job, batch, tried, shown, console)
    machines = _machines(search, clusters, predictor, dtype, priced)
    if not any(machine.tried for machine in machines):
        raise InputError(
            f"no layout divides {config.name} (batch {batch}, sequence {sequence}) over {_numbers(machines)} GPUs; "
            "give a global batch size that is a multiple of more of their divisors"
        )
    if run:
        machines, notes = [_with_run(machine, run) for machine in machines], (*notes, *run.notes())
    order = _tied(sorted(machines, key=_order))
    workload = {"model": config.name, "mode": "training", **{"global_batch_size": batch, "sequence_length": sequence}}
    workload |= {"dtype": dtype, "optimizer": optimizer, "gradient_dtype": gradient_dtype, **recipe.values()}
    workload |= {} if lora is None else {"lora": lora.values()}
    read = (*config.notes, *reading_notes(config)) if isinstance(search, _Search) else search.notes
    told = (*read, *state_notes(dtype, gradient_dtype, optimizer))
    return Layouts(workload, tuple(order), priced.currency if priced else "", (*notes, *dict.fromkeys(told)))


def _machines(
    search: _Search | _Replicas,
    clusters: Mapping[str, Cluster],
    predictor: Predictor | Mapping[str, Predictor],
    dtype: str,
    prices: Prices | None,
) -> list[Machine]:
    """The best layouts on every cluster; one that lacks the dtype says so, unless all do: that is an error."""
    machines = []
    for name, target in clusters.items():
        if dtype not in target.gpu.paths and any(dtype in other.gpu.paths for other in clusters.values()):
            machines.append(Machine(name, target.count, (), 0, 0, price_per_hour=_price(prices, name), lacks=dtype))
            continue
        target.gpu.peak_flop_per_s(dtype)
        using = predictor[name] if isinstance(predictor, Mapping) else predictor
        machines.append(search.machine(name, target, using, _price(prices, name)))
    return machines


def _with_run(machine: Machine, run: Run) -> Machine:
    """A machine whose layouts have the cost of a run."""
    choices = (replace(item, step=run.of(item.step, machine.price_per_hour)) for item in machine.choices)
    return replace(machine, choices=tuple(choices))


def _numbers(machines: Sequence[Machine]) -> str:
    return ", ".join(str(count) for count in sorted({machine.gpus for machine in machines}))


def _order(machine: Machine) -> tuple[bool, bool, float]:
    """Those with a layout first, those with a price before those without, then by cost or time."""
    if not machine.choices:
        return True, True, machine.short_bytes
    best = machine.choices[0]
    cost, lost = best.cost_per_million_tokens, best.step.run.lost_share if best.step.run else 0.0
    return False, cost is None, (best.step.total_s if cost is None else cost) / (1.0 - lost)


def _tied(order: Sequence[Machine]) -> list[Machine]:
    """Machines in order, with their ties to the first."""

    def ends(machine: Machine) -> tuple[float, float] | None:
        best = machine.choices[0].step if machine.choices else None
        if best is None or best.interval_s is None or _order(machine)[1] != _order(order[0])[1]:
            return None
        low, high = (end / best.total_s * _order(machine)[2] for end in best.interval_s)
        return low, high

    first = ends(order[0])
    reached = [interval is not None and first is not None and interval[0] <= first[1] for interval in map(ends, order)]
    return [replace(machine, tie=tie and sum(reached) > 1) for machine, tie in zip(order, reached, strict=True)]


def _price(prices: Prices | None, name: str) -> float | None:
    """The price of one GPU of a cluster, which is named after it: COUNTx GPU."""
    return None if prices is None else prices.of(gpu_in(name))


class _Search:
    """One job on several machines; machines with equally many GPUs share their layouts."""

    def __init__(
        self,
        ask: Ask,
        space: Space,
        top: int,
        software: Software,
        console: Console | None,
    ) -> None:
        self.space, self.top, self.software, self.console = space, top, software, console
        self.pieces = Pieces(ask)
        self.job = functools.partial(job_of, self.pieces, software=software)
        self._layouts: dict[int, tuple[list[Parallelism], list[Footprint]]] = {}
        self._jobs: dict[str, Job] = {}

    def layouts(self, gpus: int) -> tuple[list[Parallelism], list[Footprint]]:
        """All layouts over so many GPUs, and the memory of their fullest ranks."""
        if gpus not in self._layouts:
            ask = self.pieces.ask
            layouts = list(layouts_of(self.space, ask.model, gpus, ask.global_batch_size, ask.sequence_length))
            steps = follow(layouts, f"layouts of {gpus} GPUs", self.console)
            self._layouts[gpus] = layouts, [self.pieces.memory(layout) for layout in steps]
        return self._layouts[gpus]

    def machine(self, name: str, cluster: Cluster, predictor: Predictor, price: float | None) -> Machine:
        """The best layouts on one machine.

        Args:
          name: of the cluster.
          cluster: its figures and count.
          predictor: of its kernels.
          price: of one GPU for an hour, None = none is known.
        """
        layouts, memory = self.layouts(cluster.count)

        def fastest(places: list[int]) -> list[Forecast]:
            of = [layouts[at] for at in places], [memory[at] for at in places]
            return self._steps(assemble(self.pieces, cluster.topology.gpus_per_domain, *of), predictor, cluster, name)

        return _ranked(name, cluster, [item.total for item in memory], fastest, self.top, price)

    def _steps(self, assembly: Assembly, predictor: Predictor, cluster: Cluster, name: str) -> list[Forecast]:
        """Forecasts of the fastest layouts, one more than are asked for."""
        if is_limited(cluster):
            return self._limited_steps(assembly, predictor, cluster, name)
        by_family = assembly.of_one(predictor, cluster)
        seconds = assembly.seconds(predictor, cluster, by_family=by_family)
        times, alone = (timed(assembly, record, self.software) for record in (seconds, silent(seconds)))
        best = np.array(best_of(assembly, times, self.top + 1))
        total = pipelines(assembly, times, best)[0] + times.tail[best]
        quiet, busy = pipelines(assembly, alone, best)
        rest = alone.tail[best]
        ends = self._ends(assembly, predictor, cluster, best) if carries_intervals(predictor) else None
        law = power_law(predictor)
        experts, joules, forecasts = expert_share(seconds), assembly.joules(law, cluster.gpu, by_family), []
        of_rank = np.einsum("lrk,lkw->lr", np.asarray(assembly.facts.chunks, float), alone.durations)
        # Exposed is what a step loses to messages, and a bubble what it loses to waiting once messages are silent.
        for place, at in enumerate(best):
            bubble, exposed = quiet[place] - busy[place], total[place] - quiet[place] - rest[place]
            shares = Shares(busy[place] + rest[place], bubble, exposed)
            interval = None if ends is None else step_interval(total[place], tuple(ends[:, place]), experts[at])
            plan = plan_of(self.pieces, assembly.layouts[at])
            step = step_forecast(
                shares, self.software, plan, cluster, name=name, notes=self.pieces.ask.config.notes, interval_s=interval
            )
            step = _with_energy(law, step, cluster.gpu, joules[np.argmax(of_rank[at]), at])
            job = self._alone(assembly.layouts[at])
            forecasts.append(with_flop(step, step_flop(job), cluster.gpu, job))
        return forecasts

    def _limited_steps(self, assembly: Assembly, predictor: Predictor, cluster: Cluster, name: str) -> list[Forecast]:
        """Forecasts of the fastest layouts on boards with a cap or a lock, each at a clock of its own."""
        times, _ = timed_under_limits(assembly, predictor, cluster, self.software)
        steps = []
        for at in best_of(assembly, times, self.top + 1):
            job = self.job(assembly.layouts[at])
            steps.append(replace(predict(predictor, cluster, job, gpu_name=name), columns={}))
        return sorted(steps, key=lambda step: step.total_s)

    def _alone(self, layout: Parallelism) -> Job:
        """The job on one GPU: layouts split its FLOP, and change nothing of them but what is run again."""
        recompute, colon, most = layout.recompute.partition(":")
        if colon:
            recompute += f":{sum(min(int(most), count) for count in layout.layers_of(self.pieces.ask.model.depth))}"
        if recompute not in self._jobs:
            self._jobs[recompute] = self.job(Parallelism(recompute=recompute))
        return self._jobs[recompute]

    def _ends(self, assembly: Assembly, predictor: Predictor, cluster: Cluster, chosen: np.ndarray) -> np.ndarray:
        """Seconds of some layouts with all kernels at the low and the high ends of their intervals, [end, layout]."""
        sides = (assembly.seconds(predictor, cluster, once_at(side)) for side in (0, 1))
        times = (timed(assembly, seconds, self.software) for seconds in sides)
        return np.stack([pipelines(assembly, end, chosen)[0] + end.tail[chosen] for end in times])


def _with_energy(law: PowerLaw, step: Forecast, gpu: GPU, joules: Float[np.ndarray, " part"]) -> Forecast:
    """A step with its joules, from those of the kernels of its busiest rank as if they were one."""
    one = {**dict.fromkeys((*COLUMNS, "seconds"), np.zeros(1)), "count": np.ones(1)}
    one |= dict(zip(JOULES, joules[:, None], strict=True))
    return replace(with_energy(law, replace(step, columns=one), gpu, None), columns={})


class _Replicas:
    """One job of a model whose layers are not split: few layouts, each forecast by itself."""

    def __init__(self, job: _Job, batch: int, space: Space, top: int, console: Console | None) -> None:
        self.job, self.batch, self.space, self.top, self.console = job, batch, space, top, console
        self.notes: tuple[str, ...] = ()

    def layouts(self, gpus: int) -> list[Parallelism]:
        """Micro-batches that divide the batch, and what ZeRO shards; ZeRO-2 goes with one micro-batch."""
        if not self.space.splits(data=gpus):
            return []
        sizes = [size for size in self.space.micro_batch_sizes if self.batch % (gpus * size) == 0]
        return [
            Parallelism(data=gpus, micro_batch_size=size, zero=level)
            for size in sizes
            for level in (self.space.zero if gpus > 1 else (0,))
            if level != 2 or gpus * size == self.batch
        ]

    def machine(self, name: str, cluster: Cluster, predictor: Predictor, price: float | None) -> Machine:
        """The best layouts on one machine.

        Args: as of `_Search.machine`.
        """
        jobs = [self.job(layout) for layout in follow(self.layouts(cluster.count), f"layouts of {name}", self.console)]
        self.notes = tuple(dict.fromkeys(note for job in jobs for note in job.plan.notes))

        def fastest(places: list[int]) -> list[Forecast]:
            steps = (predict(predictor, cluster, jobs[at], gpu_name=name) for at in places)
            return sorted((replace(step, columns={}) for step in steps), key=lambda step: step.total_s)

        return _ranked(name, cluster, [job.plan.memory.total for job in jobs], fastest, self.top, price)


def _ranked(
    name: str,
    cluster: Cluster,
    memory: Sequence[float],
    fastest: Callable[[list[int]], list[Forecast]],
    top: int,
    price: float | None,
) -> Machine:
    """The best layouts on one machine.

    Args:
      name: of the cluster.
      cluster: its figures and count.
      memory: bytes of the fullest rank of every layout.
      fastest: forecasts of some of them by their places, fastest first.
      top: most layouts.
      price: of one GPU for an hour, None = none is known.
    """
    room = float(np.asarray(cluster.gpu.mem_bytes))
    kept = [at for at, total in enumerate(memory) if total <= room]
    near = [at for at, total in enumerate(memory) if room < total <= (1.0 + NEAR_SHARE) * room]
    return Machine(
        name,
        cluster.count,
        choices=_choices(fastest(kept) if kept else [], top, price),
        tried=len(memory),
        too_large=len(memory) - len(kept),
        short_bytes=max(min(memory, default=room) - room, 0.0),
        near=len(near),
        near_misses=tuple(fastest(near)[: min(top, NEAR_SHOWN)] if near else ()),
        price_per_hour=price,
    )


def _choices(steps: Sequence[Forecast], top: int, price: float | None) -> tuple[Choice, ...]:
    """Forecasts in order as choices with ranks, ties and reasons."""

    def ties(step: Forecast, leader: Forecast) -> bool:
        return step.total_s <= leader.total_s * (1.0 + LAYOUT_SPREAD)

    choices = []
    for at, (step, rank, tie) in enumerate(ranks_with_ties(steps[:top], ties)):
        cost = None
        if price is not None:
            cost = step.gpus * price / SECONDS_PER_HOUR / step.tokens_per_s * 1e6
        why = _why(step, steps[at + 1]) if at + 1 < len(steps) else "no other layout fits"
        choices.append(Choice(rank, tie, step, why, cost))
    return tuple(choices)


def _why(step: Forecast, following: Forecast) -> str:
    """Gains and losses of a layout against the next one, largest first."""
    gains = {word: getattr(following, part) - getattr(step, part) for part, word in LOSSES.items()}
    phrases = [
        f"{duration(abs(gain))} {'less' if gain > 0 else 'more'} {word}"
        for word, gain in sorted(gains.items(), key=lambda pair: -abs(pair[1]))
        if abs(gain) > 1e-4 * step.total_s
    ]
    least = f"{following.total_s / step.total_s - 1.0:.1%} faster than the next"
    return f"{least}: {', '.join(phrases)}" if phrases else least
