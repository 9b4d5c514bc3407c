"""Steps: the kernels of an engine's steps over a grid of batches, written down once for all machines.

A step takes new tokens of prompts (a chunk) and one token, or its guesses, of every running request. Its kernels fall
in groups that depend on few sizes each, so that a grid of steps is a sum of small tables:

    body     products, norms and collectives: tokens of the step
    experts  products of experts in a step with a prompt: likewise
    head     logits and sampling: requests that get a token
    decode   attention of the running requests: how many, and their mean length
    prefill  attention of a chunk: its tokens, and where in the prompt it begins
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Decoder
from neusight_jax.graph.configs.build import assumed_dtype, model_type, quantization_of, reading_notes
from neusight_jax.graph.configs.classes import generates
from neusight_jax.graph.configs.config import Config, language_config, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES, read_decoder, record
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.step import Precision, Step, precision
from neusight_jax.graph.graph import Node
from neusight_jax.graph.quantization.quantization import Quantization, has_quantization
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.kernels.table import Kernel, KernelBatch, KernelTable, Pool, by_family

GROUPS: tuple[str, ...] = ("decode_body", "prefill_body", "experts", "head", "decode", "prefill")
"""Groups of kernels; the body of a pure decode step apart, whose kernels may be others (state-space layers)."""
EXPERTS = "grouped_gemm"
"""Family of the products of experts."""
HEAD: tuple[str, ...] = ("head", "sampling")
"""Nodes of the head."""
_Counted: TypeAlias = list[tuple[Kernel, float]]
Points: TypeAlias = list[_Counted]
"""Kernels of every point of a grid, and how often each launches them."""


@dataclass(frozen=True)
class Model:
    """A model as an engine loads it: its config and layers, dtypes and quantization, and what was assumed.

    Attributes:
      expert_skew: of the popularity of its experts among tokens of answers (`grouped_gemm.expert_dims`).
    """

    config: Config
    decoder: Decoder
    dtypes: Precision
    quantization: Quantization | None
    notes: tuple[str, ...]
    expert_skew: float = 0.0


def load_model(
    config: str | Path | Mapping[str, Any],
    dtype: str | None = None,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """A decoder as an engine loads it.

    Args:
      config: a catalog name, the path of a config.json, or a mapping with Hugging Face keys.
      dtype: of the arithmetic of products; None = the config's, or bf16.
      weight_dtype: what weights are stored in, in place of what the config says; None = as it says.
      kv_dtype: of the KV cache; None = as `graph.configs.step.precision` has it.
    Raises: `InputError` for a model that is no decoder, or unusable dtypes.
    """
    parsed = language_config(read_config(config))
    kind = model_type(parsed)
    if kind not in MODEL_TYPES:
        raise InputError(f"{parsed.name}: engines serve decoders such as llama or qwen3; {kind!r} is none")
    dtype, notes = assumed_dtype(parsed, dtype)
    quantization = quantization_of(parsed, weight_dtype)
    decoder = read_decoder(parsed, 1)
    generates(parsed.name, decoder)
    model = Model(parsed, decoder, precision(dtype, weight_dtype, kv_dtype, quantization), quantization, ())
    step = _step(model, Requests((1,), (2,)), Parallelism())
    weights = step.weight_notes(weight_dtype, has_quantization(parsed.values))
    every = dict.fromkeys((*notes, *parsed.notes, *reading_notes(parsed, step.parameter_bytes), *weights))
    # They are the model's now, and every step that is written adds some of them again.
    parsed.notes = []
    return dataclasses.replace(model, notes=tuple(every))


def _step(model: Model, batch: Requests, layout: Parallelism) -> Step:
    """One step of a batch on one rank."""
    mode = "decode" if max(batch.queries) == 1 else "prefill"
    step = Step(batch, model.dtypes, mode, model.quantization)
    whole = layout.expert > 1
    # Of prompts, the engine's own number counts hot experts.
    step.expert_skew = model.expert_skew if mode == "decode" else 0.0
    step.attention_ranks = layout.data
    record(step, model.config, layout.tensor, layout.expert, model.decoder, whole_experts=whole)
    return step


@dataclass(frozen=True)
class Axes:
    """Sizes at which steps are written down; static.

    Attributes:
      tokens: of a step; batches: running requests; contexts: their mean length.
      chunks: tokens of a prompt in a step; starts: tokens of it before them.
    """

    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    starts: tuple[int, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each group's table."""
        tokens, batches = len(self.tokens), len(self.batches)
        pairs = (batches, len(self.contexts)), (len(self.chunks), len(self.starts))
        return dict(zip(GROUPS, ((batches,), (tokens,), (tokens,), (batches,), *pairs), strict=True))


def axes(length: int, chunk_tokens: int, max_batch: int, draft_tokens: int = 0) -> Axes:
    """Sizes at which the steps of an engine are written down: powers of two and, for tokens, halfway between them.

    Args:
      length: tokens of the longest sequence.
      chunk_tokens: most tokens of a step.
      max_batch: most running requests.
      draft_tokens: tokens guessed ahead for each of them.
    """
    top = max(chunk_tokens, 1) + max_batch * (draft_tokens + 1)
    length = _powers(1, length)[-1]  # so that questions of other lengths share a compiled program
    halves = sorted({*_powers(1, top), *(3 * size // 2 for size in _powers(2, top))})
    return Axes(
        tuple(halves),
        _powers(1, max_batch * (draft_tokens + 1)),
        _powers(min(128, length), length),
        _powers(min(16, length), min(chunk_tokens, length)),
        (0, *_powers(min(512, length), length)),
    )


def _powers(low: int, high: int) -> tuple[int, ...]:
    """Powers of two times `low` up to the first that is no less than `high`."""
    powers = [low]
    while powers[-1] < high:
        powers.append(2 * powers[-1])
    return tuple(powers)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Steps:
    """Kernels of a grid of steps of one rank.

    Attributes:
      kernels: distinct ones, collectives among them; counts: of each family, how often each point launches a kernel.
      axes: where the points lie, group after group in the order of `GROUPS`; static.
      attention_ranks: ranks that hold requests of their own and share the experts; the sizes are of one; static.
    """

    kernels: KernelTable
    counts: dict[str, Float[Array, "point kernel"]]
    axes: Axes = dataclasses.field(metadata={"static": True})
    attention_ranks: int = dataclasses.field(default=1, metadata={"static": True})


def steps(model: Model, layout: Parallelism, domain: int, paths: Collection[str], grid: Axes) -> Steps:
    """The steps of a model on one rank of a layout: `tabled` of `points`.

    Args:
      model: as the engine loads it.
      layout: tensor ranks, data ranks of attention, and `expert` equal to all of them where experts stay whole.
      domain: GPUs in a domain of fast links; 0 = all in one.
      paths: arithmetic paths of the GPU (`GPU.paths`).
      grid: sizes at which steps are written down.
    """
    return tabled(points(model, layout, grid), layout, paths, domain, grid, model.dtypes.products)


def points(model: Model, layout: Parallelism, grid: Axes) -> Points:
    """Kernels that each point of the grid launches on one rank of a layout, group after group, for whatever GPU.

    Args:
      layout: tensor ranks, data ranks of attention, and `expert` equal to all of them where experts stay whole.
    Raises: `InputError` for a layout that does not divide the model.
    """
    _check(layout)

    def nodes(*pairs: tuple[int, int], repeat: int = 1) -> list[Node]:
        queries, context = zip(*pairs, strict=True)
        return _step(model, Requests(queries * repeat, context * repeat), layout).nodes

    long, short = grid.contexts[-1], grid.contexts[0]
    moving = _differ(nodes((1, long)), nodes((1, max(long // 2, 1))))
    # A prefill may have nodes that a decode has not, so it is compared too.
    moving |= _differ(nodes((2, max(long, 2))), nodes((2, max(long // 2, 3))))

    def of(step: Iterable[Node], wanted: Callable[[Node], bool]) -> _Counted:
        return [(kernel, node.repeat) for node in step if wanted(node) for kernel in node.forward]

    def body(step: list[Node]) -> _Counted:
        return of(step, lambda node: node.name not in moving and node.name not in HEAD)

    launches = [body(nodes((1, short), repeat=batch)) for batch in grid.batches]
    prompts = [body(nodes((count, count))) for count in grid.tokens]
    for experts in (False, True):
        launches += [[pair for pair in prompt if (pair[0].family == EXPERTS) == experts] for prompt in prompts]
    launches += [of(nodes((1, short), repeat=batch), lambda node: node.name in HEAD) for batch in grid.batches]

    def inside(node: Node) -> bool:
        return node.name in moving

    launches += [of(nodes((1, context), repeat=batch), inside) for batch in grid.batches for context in grid.contexts]
    return launches + [of(nodes((chunk, start + chunk)), inside) for chunk in grid.chunks for start in grid.starts]


def needed_paths(written: Points, paths: Collection[str]) -> tuple[str, ...]:
    """Those of a GPU's arithmetic paths that decide which kernels run: GPUs alike in them share steps."""
    preferred = {kernel.path or kernel.dtype for point in written for kernel, _ in point if kernel.instead is not None}
    return tuple(sorted(preferred & set(paths)))


def tabled(written: Points, layout: Parallelism, paths: Collection[str], domain: int, grid: Axes, dtype: str) -> Steps:
    """Points of a grid as steps on one kind of GPU.

    Args:
      written: what each point launches, for whatever GPU; layout: of which they are.
      paths: arithmetic paths of the GPU; without the one it needs, a product runs as `Kernel.instead` has it.
      domain: GPUs in a domain of fast links; 0 = all in one.
      grid: where the points lie.
      dtype: of kernels that do not say.
    """
    run = [[(kernel.on(paths, domain), count) for kernel, count in point] for point in written]
    counted = [[(kernel, kernel.count * count) for kernel, count in point] for point in run]
    return Steps(*_table(counted, dtype), grid, layout.data)


def _check(layout: Parallelism) -> None:
    """`InputError` for layouts an engine's replica does not have here."""
    if layout.gpus != layout.tensor * layout.data or layout.expert not in (1, layout.gpus):
        raise InputError(
            "a replica is split over tensor and data ranks, experts whole over all of them or split likewise; expected "
            f"expert 1 or {layout.gpus}, nothing else"
        )


def _differ(one: Sequence[Node], other: Sequence[Node]) -> set[str]:
    """Names of nodes whose kernels differ, or that one of the steps lacks."""
    left, right = ({node.name: node.forward for node in nodes} for nodes in (one, other))
    return {name for name in {**left, **right} if left.get(name) != right.get(name)}


def _table(points: Sequence[_Counted], dtype: str) -> tuple[KernelTable, dict[str, Any]]:
    """Distinct kernels, and how often each point launches them."""
    pool = Pool()
    entries = [(at, pool.place(kernel), count) for at, point in enumerate(points) for kernel, count in point]
    dense = np.zeros((len(points), len(pool.kernels)), np.float32)
    for at, place, count in entries:
        dense[at, place] += count
    table = KernelTable({name: _padded(batch) for name, batch in pool.table(dtype).families.items()})
    return table, by_family(table, dense)


def _padded(batch: KernelBatch) -> KernelBatch:
    """A batch of `ROWS` rows at least, so that models share programs."""
    added = max(ROWS - len(batch.row), 0)

    def pad(column: Any) -> Any:
        return np.pad(np.asarray(column), (0, added), mode="edge")

    if not added:
        return batch
    padded: KernelBatch = jax.tree.map(pad, batch)
    empty = np.arange(len(padded.row)) >= len(batch.row)
    changed: dict[str, Any] = {"count": np.where(empty, 0, padded.count), "row": np.where(empty, -1, padded.row)}
    return dataclasses.replace(padded, **changed)


ROWS = 256
"""Rows a batch is padded to."""


def cache_bytes(model: Model, layout: Parallelism, contexts: Sequence[int]) -> Float[np.ndarray, " context"]:
    """KV cache of one request of each length on one rank, bytes."""
    return np.array([_step(model, Requests((1,), (length,)), layout).cache_bytes for length in contexts])


def weight_bytes(model: Model, layout: Parallelism) -> float:
    """Weights on one rank, bytes."""
    return _step(model, Requests((1,), (2,)), layout).parameter_bytes


def activation_bytes(model: Model, layout: Parallelism, tokens: int) -> float:
    """Largest activations of a step of so many tokens on one rank, bytes."""
    return _step(model, Requests((tokens,), (tokens,)), layout).footprint().activations
