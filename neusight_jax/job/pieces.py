"""Pieces: stages of layouts as sums of embedding, layers and head, each written down once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.configs.blocks import Decoder, Layer
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.graph import Footprint, Graph
from neusight_jax.graph.memory import summed_saved
from neusight_jax.graph.optimizers import optimizer_of
from neusight_jax.job.footprint import Held, fullest
from neusight_jax.job.messages import (
    SLOTS,
    Message,
    Sizes,
    hidden_bytes,
    layer_messages,
    message_size,
    parameter_messages,
)
from neusight_jax.job.parallelism import AGAIN, Group, Parallelism, groups, recomputed
from neusight_jax.job.recipe import Recipe
from neusight_jax.job.stages import Part, Stage, shard_of, stage_kinds, stage_of, stage_ranges
from neusight_jax.job.weights import summed
from neusight_jax.job.work import (
    KINDS,
    WORK,
    activation_dtype,
    added_bytes,
    parameter_kernels,
    pass_kernels,
    rank_tokens,
    recomputed_kernels,
    tensor_cored,
)
from neusight_jax.kernels.table import Pool

PIECE_WORK: int = 3 + len(AGAIN)
"""Work of a piece: the three of a pass, then what each of `AGAIN` runs again."""
_UPDATES: dict[int, str] = {WORK.index("weight_gradient"): "gradient sums", WORK.index("optimizer"): "optimizer"}
"""Names of nodes that run over parameters, by their work."""


@dataclass(frozen=True)
class Ask:
    """Job that layouts share: see `job.job_from_config`."""

    config: Config
    model: Decoder
    global_batch_size: int
    sequence_length: int
    dtype: str
    optimizer: str | None
    gradient_dtype: str
    recipe: Recipe
    lora: Lora | None = None


@dataclass(frozen=True)
class Form:
    """Pieces the stages of a layout are made of.

    Attributes:
      pieces: (kind of stage, piece, how often); parts: of each kind; layers: those of each kind.
    """

    pieces: tuple[tuple[int, int, int], ...]
    parts: Mapping[int, Part]
    layers: Mapping[int, tuple[Layer, ...]]

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each kind of stage, 1 of a kind that is not there."""
        return tuple(len(self.layers.get(kind, (0,))) for kind in range(KINDS))


class Entries:
    """Rows of a sparse sum: (row, column, factor), gathered one layout after another."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._starts: list[float] = []

    def add(self, block: np.ndarray, start: float) -> None:
        """Add entries [entry, 3], their rows counted from `start`."""
        self._blocks.append(block)
        self._starts.append(start)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, columns and factors of all."""
        if not self._blocks:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
        every = np.concatenate(self._blocks)
        every[:, 0] += np.repeat(self._starts, [len(block) for block in self._blocks])
        return _columns(every)


def block(rows: Iterable[tuple[float, float, float]]) -> np.ndarray:
    """Entries as an array [entry, 3]."""
    return np.array(list(rows), np.float64).reshape(-1, 3)


class Pieces:
    """Pieces and their distinct kernels, written down as layouts ask for them."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.pool = ask, Pool("eager")
        self.stages: list[Stage] = []
        self.work = Entries()
        self._pieces: dict[Any, int] = {}
        self._forms: dict[Any, Form] = {}
        self._kinds: dict[int, tuple[int, ...]] = {}
        self._order = {at: layer for layer, numbers in ask.model.layers.items() for at in numbers}
        self._updates: dict[Any, np.ndarray] = {}
        self._tensor_cores: bool | None = None

    def form(self, layout: Parallelism) -> Form:
        """The stages of a layout."""
        key = (*_shard_key(layout), layout.stages)
        if key not in self._forms:
            self._forms[key] = self._form(layout)
        return self._forms[key]

    def _form(self, layout: Parallelism) -> Form:
        pieces, parts, layers = [], {}, {}
        # Equal layers of a stage are one piece counted so often, so that a search builds few graphs.
        for kind, (first, last) in stage_ranges(layout, self.ask.model.depth).items():
            stage_layers = [self._order[at] for at in range(first, last)]
            ends = (kind == 0, last == self.ask.model.depth)
            # Layers first: a kernel that a layer and an end share is named after the layer.
            piece_counts = [
                (self._piece(layout, layer), stage_layers.count(layer)) for layer in dict.fromkeys(stage_layers)
            ]
            piece_counts += [(self._piece(layout, ends), 1)] if any(ends) else []
            pieces += [(kind, piece, times) for piece, times in piece_counts]
            part_counts = [(self.stages[piece].part, times) for piece, times in piece_counts]
            parts[kind] = Part(
                weights=summed([part.weights.times(times) for part, times in part_counts]),
                trained=summed([part.trained.times(times) for part, times in part_counts]),
                saved=summed_saved([(part.saved, times) for part, times in part_counts]),
                layers=len(stage_layers),
                narrowed_bytes=sum(part.narrowed_bytes * times for part, times in part_counts),
            )
            layers[kind] = tuple(stage_layers)
        return Form(tuple(pieces), parts, layers)

    def _piece(self, layout: Parallelism, what: Layer | tuple[bool, bool]) -> int:
        """A layer, or what is at the ends of the model: (embedding, head)."""
        key = (*_shard_key(layout), what)
        if key in self._pieces:
            return self._pieces[key]
        ask, ends = self.ask, isinstance(what, tuple)
        at = 0 if isinstance(what, tuple) else ask.model.layers[what][0]
        embeds, predicts = what if isinstance(what, tuple) else (False, False)
        shard = shard_of(layout, at, at + (not ends), embeds=embeds, predicts=predicts, recipe=ask.recipe)
        layers = () if isinstance(what, tuple) else (what,)
        documents = ask.recipe.documents(ask.sequence_length)
        options = (ask.sequence_length, documents, ask.dtype, layers, ask.lora)
        stage = stage_of(ask.config, ask.model, layout, shard, *options)
        place = self._pieces[key] = len(self.stages)
        self.stages.append(stage)
        kernels = [*pass_kernels(stage.graph)]
        for at, name in enumerate(AGAIN, start=3):
            kernels += [(at, *again) for again in recomputed_kernels(stage.graph, {name: 1.0})]
        placed = ((work, self.pool.place(kernel, node), kernel.count * times) for work, times, kernel, node in kernels)
        self.work.add(block(placed), place * PIECE_WORK)
        return place

    @property
    def tensor_cores(self) -> bool:
        """Whether layers run on tensor cores: `job.tensor_cored` of those there are."""
        if self._tensor_cores is None:
            self._tensor_cores = any(tensor_cored(stage.graph) for stage in self.stages[:4])
        return self._tensor_cores

    def memory(self, layout: Parallelism) -> Footprint:
        """Memory of the fullest rank."""
        ask = self.ask
        batches, gradient = layout.micro_batches(ask.global_batch_size), dtype_bytes(ask.gradient_dtype)
        added = added_bytes(batches, gradient, ask.recipe.fused_accumulation) > 0.0
        buckets, gathered = ask.recipe.bucket_elements, ask.recipe.gathered_bytes
        held = Held(
            ask.optimizer, dtype_bytes(ask.dtype), gradient, self.between_bytes(layout), added, buckets, gathered
        )
        return fullest(self.form(layout).parts, self.kinds(layout), layout, batches, held)

    def kinds(self, layout: Parallelism) -> tuple[int, ...]:
        """Kind of each stage."""
        if layout.stages not in self._kinds:
            self._kinds[layout.stages] = stage_kinds(layout, self.ask.model.depth)
        return self._kinds[layout.stages]

    def between_bytes(self, layout: Parallelism) -> float:
        """Activations between two stages, bytes of one rank."""
        tokens = rank_tokens(layout, self.ask.sequence_length)
        return hidden_bytes(self.ask.model, layout, tokens, activation_dtype(self.ask.dtype))

    def updates(self, layout: Parallelism) -> np.ndarray:
        """Entries (kind and work, kernel, count) of what runs over parameters."""
        ask, form = self.ask, self.form(layout)
        gradient = dtype_bytes(ask.gradient_dtype)
        added = added_bytes(layout.micro_batches(ask.global_batch_size), gradient, ask.recipe.fused_accumulation)
        copies = (layout.data, layout.context, layout.tensor, layout.expert, layout.stages, layout.zero)
        # Of experts, those that tokens meet are orthogonalized.
        matrices = ask.optimizer is not None and optimizer_of(ask.optimizer).orthogonalizes
        key = (*copies, added, layout.micro_batch_size * matrices)
        if key not in self._updates:
            self._updates[key] = block(
                (kind * len(WORK) + work, self.pool.place(kernel, _UPDATES[work]), kernel.count)
                for kind, part in form.parts.items()
                for work, kernel in parameter_kernels(
                    part.trained, layout, ask.optimizer, added, self.tensor_cores, self._matrices(form, kind)
                )
            )
        return self._updates[key]

    def _matrices(self, form: Form, kind: int) -> list[tuple[Graph, float]]:
        """Graphs of a kind of stage whose matrices are trained, and how often each is in it."""
        pieces = [(self.stages[piece], float(times)) for own, piece, times in form.pieces if own == kind]
        return [(stage.graph, times) for stage, times in pieces if stage.trained == stage.weights]

    def passes(self, layout: Parallelism) -> np.ndarray:
        """Entries (kind and work, piece and work, how often) of what kinds of stages do with a micro-batch."""
        form, again = self.form(layout), WORK.index("recomputed")
        entries: list[tuple[int, int, float]] = []
        for kind, piece, times in form.pieces:
            row, column = kind * len(WORK), piece * PIECE_WORK
            entries += [(row + work, column + work, times) for work in range(3)]
            for name, share in recomputed(layout.recompute, len(form.layers[kind])).items():
                entries.append((row + again, column + 3 + AGAIN.index(name), times * share))
        return block(entries)

    def counts(self, layout: Parallelism) -> np.ndarray:
        """How often each kind of stage launches each kernel of the pool for each of `WORK`, [kind, work, kernel]."""
        passes, updates = _columns(self.passes(layout)), _columns(self.updates(layout))
        kernels, rows = len(self.pool.kernels), KINDS * len(WORK)
        # Only the work of this layout's pieces: a search has hundreds of them.
        work, place = np.unique(passes[1], return_inverse=True)
        of_pieces = _dense(_of_rows(self.work.arrays(), work), (len(work), kernels))
        launches = _dense((passes[0], place, passes[2]), (rows, len(work))) @ of_pieces
        launches += _dense(updates, (rows, kernels))
        counts: np.ndarray = launches.reshape(KINDS, len(WORK), kernels)
        return counts

    def layer_messages(self, layout: Parallelism) -> Iterator[tuple[int, Message]]:
        """Messages of layers, embeddings and heads, piece by piece, with their kinds of stages."""
        form = self.form(layout)
        for kind, piece, times in form.pieces:
            stage = self.stages[piece]
            rerun = recomputed(layout.recompute, len(form.layers[kind])).get("full", 0.0)
            sizes = self._sizes(layout, stage.layers, stage.embeds, stage.predicts, stage, rerun)
            for message in layer_messages(self.ask.model, layout, sizes):
                yield kind, replace(message, count=times * message.count)

    def parameter_messages(self, layout: Parallelism) -> Iterator[tuple[int, Message]]:
        """Messages of parameters and their gradients, with their kinds of stages."""
        form, order = self.form(layout), self.kinds(layout)
        for kind, part in form.parts.items():
            sizes = self._sizes(layout, form.layers[kind], kind == order[0], kind == order[-1], part)
            for message in parameter_messages(layout, sizes, self.ask.model):
                yield kind, message

    def messages(self, layout: Parallelism) -> tuple[tuple[int, Message], ...]:
        """All messages of each kind of stage, equal ones as one."""
        counts: dict[tuple[int, Message], float] = {}
        for kind, message in (*self.layer_messages(layout), *self.parameter_messages(layout)):
            one = kind, replace(message, count=1.0)
            counts[one] = counts.get(one, 0.0) + message.count
        sent = [(kind, replace(message, count=count)) for (kind, message), count in counts.items()]
        return tuple(sorted(sent, key=lambda pair: pair[0]))

    def _sizes(
        self,
        layout: Parallelism,
        layers: tuple[Layer, ...],
        embeds: bool,
        predicts: bool,
        part: Part | Stage,
        rerun: float = 0.0,
    ) -> Sizes:
        """Sizes of some layers of a stage; `rerun`: the share of them that is run again."""
        ask = self.ask
        tokens, gradient = rank_tokens(layout, ask.sequence_length), dtype_bytes(ask.gradient_dtype)
        sizes = (layers, tokens, embeds, predicts, part.weights, part.trained)
        return Sizes(
            *sizes, activation_dtype(ask.dtype), gradient, part.narrowed_bytes, rerun, ask.recipe.gathered_bytes
        )


def _columns(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and factors of entries [entry, 3]."""
    return entries[:, 0].astype(np.int64), entries[:, 1].astype(np.int64), entries[:, 2]


def _of_rows(
    entries: tuple[np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries of some rows, in rising order, with these rows counted from 0."""
    there = np.isin(entries[0], rows)
    row, column, factor = (part[there] for part in entries)
    return np.searchsorted(rows, row), column, factor


def _dense(entries: tuple[np.ndarray, np.ndarray, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """A sparse sum as a matrix; entries of one place add up."""
    rows, columns, factors = entries
    matrix = np.zeros(shape)
    np.add.at(matrix, (rows, columns), factors)
    return matrix


class Messages:
    """Messages of layouts over domains of one size, each distinct one once."""

    def __init__(self, pieces: Pieces, gpus_per_domain: int) -> None:
        self.pieces, self.gpus_per_domain = pieces, gpus_per_domain
        self._rows: dict[tuple[float, ...], int] = {}
        self._layers: dict[Any, np.ndarray] = {}
        self._parameters: dict[Any, np.ndarray] = {}
        self._groups: dict[Any, dict[str, Group]] = {}

    @property
    def rows(self) -> np.ndarray:
        """Rows of `messages.sizes`."""
        return np.array(list(self._rows), np.float64).reshape(-1, 5)

    def _place(self, message: Message, group: Group) -> int:
        return self._rows.setdefault(message_size(message, group), len(self._rows))

    def of(self, layout: Parallelism) -> tuple[list[np.ndarray], int]:
        """Entries (kind and slot, message, count) of a layout, and the message between its stages."""
        key = (layout.tensor, layout.context, layout.data, layout.pipeline, layout.expert)
        if key not in self._groups:
            self._groups[key] = groups(layout, self.gpus_per_domain or layout.gpus)
        placed = self._groups[key]
        near = tuple(placed[name] for name in ("tensor", "context", "expert"))
        layer_key = (*_shard_key(layout), layout.stages, layout.recompute, near)
        if layer_key not in self._layers:
            self._layers[layer_key] = self._entries(self.pieces.layer_messages(layout), placed)
        own_parameters = (*key, layout.chunks, layout.zero)
        if own_parameters not in self._parameters:
            self._parameters[own_parameters] = self._entries(self.pieces.parameter_messages(layout), placed)
        between = Message("send_recv", self.pieces.between_bytes(layout), "pipeline", "")
        return [self._layers[layer_key], self._parameters[own_parameters]], self._place(between, placed["pipeline"])

    def _entries(self, sent: Iterable[tuple[int, Message]], placed: Mapping[str, Group]) -> np.ndarray:
        return block(
            (
                kind * len(SLOTS) + SLOTS.index(message.slot),
                self._place(message, placed[message.group]),
                message.count,
            )
            for kind, message in sent
        )


def _shard_key(layout: Parallelism) -> tuple[Any, ...]:
    return layout.tensor, layout.context, layout.expert, layout.sequence_parallel, layout.micro_batch_size
