"""Times: seconds of an engine's steps on one machine, from a few tables, for any batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float
from pydantic import BaseModel, Field

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.hardware.files import checked
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.step import kernel_joules
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.intervals import has_intervals, kernel_interval
from neusight_jax.model.latency import kernel_forecasts, kernel_latency, require_covered
from neusight_jax.model.physics import fitted
from neusight_jax.model.power import (
    CLOCKS,
    POWER,
    Draw,
    PowerLaw,
    at_clock,
    drawn_in,
    is_limited,
    power_law,
    settle,
    slower_by,
)
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.programs import one_shot
from neusight_jax.model.roofline import Relaxation
from neusight_jax.records import Record
from neusight_jax.serving.steps import Axes, Steps
from neusight_jax.tables import read_content

_Positive: TypeAlias = Annotated[float | None, Field(gt=0, lt=1e4)]

# Engine: what an inference engine decides beside the kernels, its options and its own time, as numbers.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Engine(Record):
    """Numbers of an engine, traced; each with the width of its prior, in logarithms.

    Attributes:
      step_s: host time of a step that the GPU waits for: scheduling, inputs, sampled tokens, seconds.
      sequence_s: likewise of each running request.
      request_s: of a request before its first step: HTTP, tokens, admission, seconds.
      first_steps: decode steps of others between a request and its first token: the one that runs when it comes, and
        those by which an engine that works ahead of the GPU, or sends tokens several at a time, tells later.
      kernels: seconds of a step's kernels over their sum.
      experts: seconds of the products of experts in a step with a prompt over those of tokens that spread evenly.
      wave: share of arrivals that come all at once, as where a load generator starts its requests together and their
        outputs have nearly one length; of users who do not know of each other 0.
    """

    step_s: ArrayLike = field(default=1e-3, metadata=fitted(1.0, "estimate: engines overlap most of 2 to 10 ms"))
    sequence_s: ArrayLike = field(default=1e-5, metadata=fitted(1.0, "estimate"))
    request_s: ArrayLike = field(default=1e-2, metadata=fitted(1.0, "estimate"))
    first_steps: ArrayLike = field(default=1.0, metadata=fitted(0.5, "estimate: the step that runs, and one ahead"))
    kernels: ArrayLike = field(default=1.05, metadata=fitted(0.1, "estimate"))
    experts: ArrayLike = field(default=1.35, metadata=fitted(0.3, "aiconfigurator: a power law over an even spread"))
    wave: ArrayLike = field(default=0.05, metadata=fitted(1.0, "estimate"))

    def replace(self, **changes: Any) -> Engine:
        """These numbers with some replaced."""
        return dataclasses.replace(self, **changes)


ENGINES: dict[str, Engine] = {
    "vllm": Engine(6.73e-4, 9.24e-6, request_s=0.0156, first_steps=1.073, kernels=1.076, experts=1.79, wave=0.0),
    "trtllm": Engine(8.36e-4, 1.058e-5, request_s=0.0916, first_steps=1.14, kernels=1.031, experts=1.458, wave=0.0),
    "sglang": Engine(1.406e-3, 2.21e-5, request_s=0.1466, first_steps=1.031, kernels=1.054, experts=1.451, wave=0.0),
}
"""Fitted under those priors on public measurements of whole servers on H100 and H200 (`benchmarks.serving_sample`), for
users who do not know of each other."""
LEARNED = ENGINES["vllm"]


MEASURED: dict[str, str] = {"vllm": "0.12 to 0.18", "trtllm": "1.0.0rc3 to 1.1.0rc2", "sglang": "0.5.1 to 0.5.9"}
"""Versions of the engines that the numbers were fitted on."""


class EngineFile(BaseModel, extra="forbid", title="Engine file"):
    """Numbers of an engine, as `neusight-jax calibrate --engine` writes them; those left out are the engine's."""

    engine: Literal["vllm", "trtllm", "sglang"] = Field(
        "vllm", description="vllm, trtllm or sglang, whose numbers the others are"
    )
    step_s: _Positive = Field(None, description="host time of a step that the GPU waits for, seconds")
    sequence_s: _Positive = Field(None, description="likewise of each running request, seconds")
    request_s: _Positive = Field(None, description="of a request before its first step, seconds")
    first_steps: _Positive = Field(None, description="decode steps between a request and its first token")
    kernels: _Positive = Field(None, description="seconds of a step's kernels over their sum")
    experts: _Positive = Field(None, description="products of experts beside prompts, over those of an even spread")


def _engine_file(path: str) -> EngineFile:
    if Path(path).suffix not in (".json", ".yaml", ".yml"):
        raise unknown_name("engine", path, ENGINES, "or a file that `calibrate --engine` wrote")
    return checked(EngineFile, read_content(Path(path), "an engine file, such as {step_s: 0.001}"), path)


def engine_name(engine: str) -> str:
    """The name of an engine, of a file the one whose numbers it changes."""
    return engine if engine in ENGINES else _engine_file(engine).engine


def engine_of(engine: Engine | str) -> Engine:
    """Numbers of an engine, of one of `ENGINES` by its name, or of an `EngineFile` (JSON or YAML).

    Raises: `InputError` for an unknown name, or what is no such file.
    """
    if isinstance(engine, Engine):
        return engine
    if engine in ENGINES:
        return ENGINES[engine]
    file = _engine_file(engine)
    return ENGINES[file.engine].replace(**file.model_dump(exclude={"engine"}, exclude_none=True))


WIDTHS: dict[str, float] = {constant.name: constant.metadata["width"] for constant in dataclasses.fields(Engine)}
"""Width of each prior, in its logarithm."""


@dataclass(frozen=True)
class Options(Record):
    """Setup of an engine; static. Defaults are vLLM's as a server (0.11, `engine/arg_utils.py` and
    `config/cache.py`), on GPUs of 70 GiB and more, but A100: `usual_options` has those of the others.

    Attributes:
      chunk_tokens: most tokens of a step (`max_num_batched_tokens`): longer prompts are prefilled in chunks.
      max_batch: most running requests (`max_num_seqs`).
      memory_share: of the device memory that the engine takes (`gpu_memory_utilization`).
      prefix_share: of input tokens that the prefix cache holds already.
      draft_tokens: tokens guessed ahead of every step, 0 = no speculative decoding.
      draft_acceptance: chance that a guessed token is right, given those before it.
      draft_share: time of guessing a token over that of a decode step.
      poll_steps: decode steps from one look for new requests to the next (SGLang's `--scheduler-recv-interval`).
    """

    chunk_tokens: int = 8192
    max_batch: int = 1024
    memory_share: float = 0.9
    prefix_share: float = 0.0
    draft_tokens: int = 0
    draft_acceptance: float = 0.7
    draft_share: float = 0.05
    poll_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_batch", "poll_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}, expected a whole number from 1")
        if type(self.draft_tokens) is not int or not 0 <= self.draft_tokens <= 64:
            raise InputError(f"draft_tokens is {self.draft_tokens!r}, expected a whole number from 0 to 64")
        shares = (("memory_share", 0.05, 1.0), ("prefix_share", 0.0, 0.999), ("draft_acceptance", 0.0, 1.0))
        for name, low, high in (*shares, ("draft_share", 0.0, 10.0)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected {low:g} to {high:g}")

    @property
    def tokens_per_step(self) -> float:
        """Tokens a request gets from a decode step: 1, and as many guesses as are right in a row.

        Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding, 2023, equation 1.
        """
        return sum(self.draft_acceptance**place for place in range(self.draft_tokens + 1))

    @property
    def drafting(self) -> float:
        """Time of a decode step with its guesses over that of checking them alone."""
        return 1.0 + self.draft_share * self.draft_tokens


LARGE_MEMORY_BYTES = 70 * 2**30
"""From this memory on vLLM takes larger batches (`arg_utils.get_batch_defaults`)."""


def usual_options(mem_bytes: float, gpu_name: str = "", **changes: Any) -> Options:
    """vLLM's defaults on a GPU, with changes; None leaves a default. `InputError` for values that cannot be."""
    large = mem_bytes >= LARGE_MEMORY_BYTES and "a100" not in gpu_name.lower()
    usual = {"chunk_tokens": 8192, "max_batch": 1024} if large else {"chunk_tokens": 2048, "max_batch": 256}
    return Options(**{**usual, **{name: value for name, value in changes.items() if value is not None}})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Energy that the groups of kernels of a step take from a board.

    Attributes:
      law: of its power.
      gpu: the board, with its cap and its lock.
      joules: `busy_w` times seconds, `flop_j` and `dram_j` of `power.Draw`, tables like those of `Times` but for the
        first axis.
      slower: likewise seconds at the clocks of `power.CLOCKS` below the stock one; {} without a cap or a lock.
    """

    law: PowerLaw
    gpu: GPU
    joules: dict[str, Float[Array, "part ..."]]
    slower: dict[str, Float[Array, "clock ..."]]


_Drawing: TypeAlias = Callable[[], tuple[Draw, Callable[[Array], Array]]]
"""What `power.settle` asks of a step, made where it is needed: the draw, and how much longer other clocks take."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Times:
    """Seconds of the groups of kernels of a step (`steps.GROUPS`), arrays over `axes`, and what they draw where known.

    Every step settles at a clock of its own under the cap and the lock of its board, its kernels at one.

    Attributes:
      axes: sizes of one rank's steps.
      attention_ranks: ranks among which requests are dealt (data-parallel attention); sizes that are asked for are of
        all of them. They step together: one that has no request waits for the others.
    """

    tables: dict[str, Float[Array, "..."]]
    engine: Engine
    axes: Axes = dataclasses.field(metadata={"static": True})
    drawn: Drawn | None = None
    attention_ranks: ArrayLike = 1.0

    def step_s(
        self,
        decode: ArrayLike,
        context: ArrayLike,
        chunk: ArrayLike = 0.0,
        start: ArrayLike = 0.0,
        guesses: ArrayLike = 0.0,
        prompts: ArrayLike = 1.0,
    ) -> Array:
        """Seconds of a step of running requests and of one chunk of a prompt, or of several that share the step.

        Between the points of the grid it goes as a power of each size; less than one request counts in proportion.

        Args:
          decode: running requests.
          context: their mean length, tokens.
          chunk: tokens of a prompt in the step, 0 = none.
          start: tokens of that prompt before them.
          guesses: tokens guessed ahead for each running request, which the step checks.
          prompts: that have a chunk in the step, all alike.
        """
        step = self._step(decode, context, chunk, start, guesses, prompts)
        return self._settled(*step)[0] if self.held else step[0]

    def step_j(self, *sizes: ArrayLike, **more: ArrayLike) -> Array:
        """Joules of one GPU of the step that `step_s` has the seconds of, the host's time within it included.

        Args: as `step_s`; needs `drawn`.
        """
        return self._settled(*self._step(*sizes, **more))[1]

    @property
    def held(self) -> bool:
        """Whether the board has a cap or a lock."""
        return self.drawn is not None and bool(self.drawn.slower)

    def _step(
        self,
        decode: ArrayLike,
        context: ArrayLike,
        chunk: ArrayLike = 0.0,
        start: ArrayLike = 0.0,
        guesses: ArrayLike = 0.0,
        prompts: ArrayLike = 1.0,
    ) -> tuple[Array, _Drawing]:
        decode, chunk = jnp.asarray(decode, float), jnp.asarray(chunk, float)

        def attention(table: Array) -> Array:
            return _between(table, (self.axes.chunks, chunk), (self.axes.starts, start))

        return self._sum(decode, jnp.asarray(guesses), context, chunk, jnp.asarray(prompts), attention)

    def _fullest(self, requests: Array) -> Array:
        """Requests of the rank that has most of so many."""
        return jnp.maximum(requests / jnp.asarray(self.attention_ranks), jnp.minimum(requests, 1.0))

    def batch_s(self, queries: ArrayLike, held: ArrayLike) -> Array:
        """Seconds of one step of requests as they are, arrays [request]: `queries` new tokens each, 1 = it decodes,
        more = a chunk of its prompt, 0 = no request; after `held` tokens of its own."""
        queries, held = jnp.asarray(queries, float), jnp.asarray(held, float)
        runs, prefills = jnp.where(queries == 1.0, 1.0, 0.0), jnp.where(queries > 1.0, 1.0, 0.0)
        decode, prompts = jnp.sum(runs), jnp.sum(prefills)
        context = jnp.sum(runs * (held + 1.0)) / jnp.maximum(decode, 1.0)

        def attention(table: Array) -> Array:
            each = jax.vmap(lambda chunk, start: _between(table, (self.axes.chunks, chunk), (self.axes.starts, start)))(
                queries, held
            )
            return jnp.sum(prefills * each) / jnp.maximum(prompts, 1.0)

        chunk = jnp.sum(prefills * queries) / jnp.maximum(prompts, 1.0)
        step = self._sum(decode, jnp.zeros(()), context, chunk, prompts, attention)
        return self._settled(*step)[0] if self.held else step[0]

    def _sum(
        self,
        decode: Array,
        guesses: Array,
        context: ArrayLike,
        chunk: Array,
        prompts: Array,
        attention: Callable[[Array], Array],
    ) -> tuple[Array, _Drawing]:
        """Seconds of a step at the stock clock, and what `power.settle` asks of it.

        Args:
          decode: running requests; guesses: tokens guessed for each; context: their mean length.
          chunk: tokens of each prompt; prompts: how many; attention: what one of them takes for it, from its table.
        """
        # Kernels of the fullest rank set the step: with attention dealt out over ranks, all wait for it.
        axes, engine, some = self.axes, self.engine, jnp.minimum(decode, 1.0)
        prompts = jnp.minimum(chunk, 1.0) * prompts
        mean = (decode * (1.0 + guesses) + chunk * prompts) / jnp.asarray(self.attention_ranks)
        decode, prompts = self._fullest(decode), self._fullest(prompts)
        rows, chunk = decode * (1.0 + guesses), chunk * prompts

        def kernels(tables: Mapping[str, Array]) -> Array:
            alone = _between(tables["decode_body"], (axes.batches, rows))
            mixed = _between(tables["prefill_body"], (axes.tokens, rows + chunk))
            experts = _between(tables["experts"], (axes.tokens, mean))
            head = _between(tables["head"], (axes.batches, rows + prompts))
            running = _between(tables["decode"], (axes.batches, rows), (axes.contexts, context))
            body = jnp.where(chunk > 0, mixed + jnp.asarray(engine.experts) * experts, alone)
            return body + head + some * running + prompts * attention(tables["prefill"])

        # The scheduler and the sampler run on the host between steps, and longer for more sequences.
        host = jnp.asarray(engine.step_s) + jnp.asarray(engine.sequence_s) * decode
        any_work = jnp.maximum(some, jnp.minimum(prompts, 1.0))

        def seconds_of(tables: Mapping[str, Array]) -> Array:
            return any_work * (jnp.asarray(engine.kernels) * kernels(tables) + host)

        seconds, draws = seconds_of(self.tables), self.drawn

        def drawing() -> tuple[Draw, Callable[[Array], Array]]:
            assert draws is not None
            joules = jax.vmap(lambda tables: any_work * kernels(tables))(draws.joules)
            slower: Callable[[Array], Array] = jnp.ones_like  # without a cap or a lock nothing asks
            if draws.slower:
                slower = slower_by(jnp.concatenate([jax.vmap(seconds_of)(draws.slower), seconds[None]]))
            return drawn_in(seconds, joules), slower

        return seconds, drawing

    def _settled(self, seconds: Array, drawing: _Drawing) -> tuple[Array, Array]:
        """Seconds and joules of a step where the board settles."""
        assert self.drawn is not None
        draw, slower = drawing()
        state = settle(self.drawn.law, self.drawn.gpu, draw, slower)
        seconds = seconds * slower(state.clock)
        return seconds, seconds * state.power_w


MOST_DRAFTED = 5
"""Tokens guessed ahead at most where the best number is looked for, and that ai-dynamo's mock engine takes
(`aic_nextn`)."""


def best_drafts(times: Times, options: Options, batches: Sequence[float], contexts: Sequence[float]) -> np.ndarray:
    """Tokens to guess ahead with which running requests get most tokens a second, [batch, context].

    Args:
      times: of a layout on a machine.
      options: of the engine, whose `draft_acceptance` and `draft_share` count.
      batches: running requests.
      contexts: their mean lengths, tokens.
    """
    ways = [dataclasses.replace(options, draft_tokens=count) for count in range(MOST_DRAFTED + 1)]
    gained = jnp.array([way.tokens_per_step / way.drafting for way in ways])
    guesses, running, held = jnp.meshgrid(
        *map(jnp.asarray, (range(MOST_DRAFTED + 1), batches, contexts)), indexing="ij"
    )
    sizes = (each.astype(float).reshape(-1) for each in (running, held, guesses))
    seconds = jax.vmap(lambda batch, context, count: times.step_s(batch, context, guesses=count))(*sizes)
    best: np.ndarray = np.argmax(np.asarray(gained[:, None, None] / seconds.reshape(guesses.shape)), axis=0)
    return best


def _between(table: Array, *places: tuple[tuple[int, ...], ArrayLike]) -> Array:
    """A table between its points: linear in the logarithms of value and sizes (of 1 + the size, from 0 on)."""
    sizes = tuple(jnp.asarray(at, float) for _, at in places)
    value: Array = _between_points(table, sizes, tuple(points for points, _ in places))
    return value


# A program of its own, so that a step, which reads a dozen tables, is traced in a fraction of the time.
@functools.partial(jax.jit, static_argnums=2)
def _between_points(table: Array, sizes: tuple[Array, ...], axes: tuple[tuple[int, ...], ...]) -> Array:
    """`_between` of sizes, by the points of their axes."""
    log, sides = jnp.log(jnp.maximum(table, 1e-12)), []
    for points, at in zip(axes, sizes, strict=True):
        offset = 1.0 if points[0] == 0 else 0.0
        ends = np.log(np.asarray(points, np.float32) + offset)
        size = jnp.log(jnp.maximum(at + offset, 1e-3))
        # Compared with every point: a search for the one below takes several times as long to compile.
        low = jnp.sum(size[..., None] >= ends[1:-1], axis=-1)
        high = jnp.minimum(low + 1, len(points) - 1)
        # At a point the slope is that of the interval above, at the last that of the one below; `clip` would halve it.
        size = jnp.where(size < ends[0], ends[0], jnp.where(size > ends[-1], ends[-1], size))
        widths = np.diff(ends, append=np.float32(np.inf))
        share = (size - jnp.asarray(ends)[low]) / jnp.asarray(widths)[low]
        sides.append(((low, 1.0 - share), (high, share)))
    total = jnp.zeros(())
    for corner in product(*sides):
        weight = math.prod((share for _, share in corner), start=jnp.ones(()))
        total = total + weight * log[tuple(at for at, _ in corner)]
    return jnp.exp(total)


def tabulated(
    steps: Steps,
    seconds: Mapping[str, Array],
    engine: Engine,
    gpu: GPU | None = None,
    slower: Sequence[Mapping[str, Array]] = (),
    law: PowerLaw = POWER,
) -> Times:
    """Times from the seconds of every kernel, by family.

    Args:
      gpu: the board, for what it draws; None = that is not asked.
      slower: seconds at the clocks of `power.CLOCKS` below the stock one, of a board with a cap or a lock.
      law: of what it draws.
    """
    times = Times(_tables(steps, seconds), engine, steps.axes, attention_ranks=float(steps.attention_ranks))
    if gpu is None:
        return times
    joules: dict[str, Array] = {}
    for name, batch in steps.kernels.families.items():  # one at a time, so that models share programs
        joules |= kernel_joules(law, gpu, KernelTable({name: batch}), {name: seconds[name]})
    clocks = {name: jnp.stack([held_s[name] for held_s in slower]) for name in seconds} if slower else {}
    held = _tables(steps, clocks) if clocks else {}
    return dataclasses.replace(times, drawn=Drawn(law, gpu, _tables(steps, joules), held))


def _tables(steps: Steps, amounts: Mapping[str, Float[Array, "... kernel"]]) -> dict[str, Array]:
    """Tables of the groups from an amount of every kernel, or several, by family."""
    # A kernel that no point launches may take for ever, and 0 times infinity is NaN.
    sums = sum(
        (
            jnp.asarray(count) @ jnp.where(jnp.sum(jnp.asarray(count), 0) > 0, amounts[name], 0.0).T
            for name, count in steps.counts.items()
        ),
        jnp.zeros(()),
    )
    tables, first = {}, 0
    for name, shape in steps.axes.shapes().items():
        size = int(np.prod(shape))
        block = jnp.asarray(sums)[first : first + size].T
        tables[name] = block.reshape(*block.shape[:-1], *shape)
        first += size
    return tables


def stacked(ends: Sequence[Times]) -> Times:
    """Times of several ends as one record, arrays [end, ...], without what they draw where it changes no seconds."""
    held = ends[0].held
    records = (end if held else dataclasses.replace(end, drawn=None) for end in ends)
    record: Times = jax.tree.map(lambda *leaves: np.stack([np.asarray(one) for one in leaves]), *records)
    return record


def times(predictor: Predictor, machine: Machine, steps: Steps, engine: Engine) -> Times:
    """Times of steps on a machine; pure, so that gradients reach the machine and `jax.vmap` many of them.

    Args:
      predictor: forecasts the kernels.
      machine: GPU or cluster, scalars.
      steps: of one rank of a layout.
      engine: numbers of the engine's own time.
    """
    seconds, *slower = (kernel_seconds(predictor, held, steps) for held in _at_clocks(machine))
    return tabulated(steps, seconds, engine, gpu_of(machine), slower, power_law(predictor))


def _at_clocks(machine: Machine) -> list[Machine]:
    """The machine at its stock clock, and at the others of `power.CLOCKS` where it has a cap or a lock."""
    if not is_limited(machine):
        return [machine]
    return [at_clock(machine, clock) for clock in (CLOCKS[-1], *CLOCKS[:-1])]


def kernel_seconds(
    predictor: Predictor, machine: Machine, steps: Steps, relaxation: Relaxation = 0.0
) -> dict[str, Float[Array, " kernel"]]:
    """Seconds of every kernel of steps on a machine, by family.

    Args:
      predictor: forecasts the kernels.
      machine: GPU or cluster, scalars.
      steps: of one rank of a layout.
      relaxation: as of `latency.kernel_latency`.
    Raises: `InputError` for a family the predictor does not cover.
    """
    require_covered(predictor, steps.kernels)
    return kernel_latency(predictor, machine, steps.kernels, relaxation=relaxation)


def bounded_times(predictor: Predictor, machine: Machine, steps: Steps, engine: Engine) -> tuple[Times, Times, Times]:
    """Times, and those of all kernels at the low and the high end of their 80 % intervals.

    That is wider than a sum whose errors cancel; without intervals all three are equal. By a program that is compiled
    fast; no gradients.

    Args:
      predictor: forecasts the kernels.
      machine: GPU or cluster, scalars.
      steps: of one rank of a layout.
      engine: numbers of the engine's own time.
    Returns: what they draw is known of the first, and of all under a cap or a lock.
    Raises: `InputError` for a family the predictor does not cover.
    """
    require_covered(predictor, steps.kernels)
    clocks = [
        {  # one family at a time, so that models share programs
            name: np.asarray(_bounded(predictor, on_device(held), KernelTable({name: batch})))
            for name, batch in steps.kernels.families.items()
        }
        for held in _at_clocks(machine)
    ]

    def at(end: int) -> Times:
        seconds, *slower = (
            {name: jnp.asarray(bounds[end]) for name, bounds in families.items()} for families in clocks
        )
        drawn = slower or end == 0
        board = on_device(gpu_of(machine)) if drawn else None
        return tabulated(steps, seconds, engine, board, slower, power_law(predictor))

    return at(0), at(1), at(2)


@one_shot
def _bounded(predictor: Predictor, machine: Machine, kernels: KernelTable) -> Array:
    """Seconds of every kernel of one family with its bounds, [3, kernel]."""
    ((name, term),) = kernel_forecasts(predictor, machine, kernels, isolated=False).items()
    low = high = term.seconds
    if has_intervals(predictor, FAMILIES[name]):
        interval = kernel_interval(predictor, FAMILIES[name], gpu_of(machine), kernels.families[name])
        low = jnp.clip(term.seconds * jnp.exp(interval.log_low), term.bounds.speed_of_light_s, term.seconds)
        high = jnp.maximum(term.seconds * jnp.exp(interval.log_high), term.seconds)
    return jnp.stack([term.seconds, low, high])
