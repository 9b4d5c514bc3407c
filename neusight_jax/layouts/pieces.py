"""Pieces: stages of many layouts as sums of embedding, layers and head, each written down once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from neusight_jax.job.job import (
    WORK,
    activation_dtype,
    added_bytes,
    parameter_kernels,
    pass_kernels,
    rank_tokens,
    recomputed_kernels,
    tensor_cored,
)
from neusight_jax.job.messages import SLOTS, Message, Sizes, hidden_bytes, layer_messages, parameter_messages
from neusight_jax.job.parallelism import AGAIN, Group, Parallelism, groups, recomputed
from neusight_jax.job.recipe import Recipe
from neusight_jax.job.stages import Part, Stage, shard_of, stage_kinds, stage_of, stage_ranges
from neusight_jax.job.step import message_size
from neusight_jax.job.weights import summed
from neusight_jax.kernels.table import Pool

PIECE_WORK: int = 3 + len(AGAIN)
"""Work of a piece: the three of a pass, then what each of `AGAIN` runs again."""


@dataclass(frozen=True)
class Ask:
    """Job that all layouts of a search share: see `job.job_from_config`."""

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
        starts = np.repeat(self._starts, [len(block) for block in self._blocks])
        return (every[:, 0] + starts).astype(np.int64), every[:, 1].astype(np.int64), every[:, 2]


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
            piece_counts: list[tuple[int, int]] = [(self._piece(layout, ends), 1)] if any(ends) else []
            piece_counts += [
                (self._piece(layout, layer), stage_layers.count(layer)) for layer in dict.fromkeys(stage_layers)
            ]
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
        kernels = [(work, repeat, kernel) for work, repeat, kernel, _ in pass_kernels(stage.graph)]
        kernels += [
            (3 + at, repeat, kernel)
            for at, name in enumerate(AGAIN)
            for repeat, kernel, _ in recomputed_kernels(stage.graph, {name: 1.0})
        ]
        placed = ((work, self.pool.place(kernel), kernel.count * repeat) for work, repeat, kernel in kernels)
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
        return stage_kinds(layout, self.ask.model.depth)

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
                (kind * len(WORK) + work, self.pool.place(kernel), kernel.count)
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
        """Rows of `step.sizes`."""
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
            self._layers[layer_key] = self._of_layers(layout, placed)
        own_parameters = (*key, layout.chunks, layout.zero)
        if own_parameters not in self._parameters:
            self._parameters[own_parameters] = self._of_parameters(layout, placed)
        between = Message("send_recv", self.pieces.between_bytes(layout), "pipeline", "")
        return [self._layers[layer_key], self._parameters[own_parameters]], self._place(between, placed["pipeline"])

    def _sizes(
        self,
        layout: Parallelism,
        layers: tuple[Layer, ...],
        embeds: bool,
        predicts: bool,
        part: Part,
        rerun: float = 0.0,
    ) -> Sizes:
        """Sizes of some layers of a stage; `rerun`: the share of them that is run again."""
        ask = self.pieces.ask
        tokens, gradient = rank_tokens(layout, ask.sequence_length), dtype_bytes(ask.gradient_dtype)
        sizes = (layers, tokens, embeds, predicts, part.weights, part.trained)
        return Sizes(
            *sizes, activation_dtype(ask.dtype), gradient, part.narrowed_bytes, rerun, ask.recipe.gathered_bytes
        )

    def _of_layers(self, layout: Parallelism, placed: Mapping[str, Group]) -> np.ndarray:
        entries = []
        form = self.pieces.form(layout)
        for kind, piece, times in form.pieces:
            stage = self.pieces.stages[piece]
            rerun = recomputed(layout.recompute, len(form.layers[kind])).get("full", 0.0)
            sizes = self._sizes(layout, stage.layers, stage.embeds, stage.predicts, stage.part, rerun)
            entries += [
                (
                    kind * len(SLOTS) + SLOTS.index(message.slot),
                    self._place(message, placed[message.group]),
                    times * message.count,
                )
                for message in layer_messages(self.pieces.ask.model, layout, sizes)
            ]
        return block(entries)

    def _of_parameters(self, layout: Parallelism, placed: Mapping[str, Group]) -> np.ndarray:
        form, order, entries = self.pieces.form(layout), self.pieces.kinds(layout), []
        for kind, part in form.parts.items():
            sizes = self._sizes(layout, form.layers[kind], kind == order[0], kind == order[-1], part)
            entries += [
                (
                    kind * len(SLOTS) + SLOTS.index(message.slot),
                    self._place(message, placed[message.group]),
                    message.count,
                )
                for message in parameter_messages(layout, sizes, self.pieces.ask.model)
            ]
        return block(entries)


def _shard_key(layout: Parallelism) -> tuple[Any, ...]:
    return layout.tensor, layout.context, layout.expert, layout.sequence_parallel, layout.micro_batch_size
