"""Job: a model's training step on many GPUs, as kernels with their counts and messages between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.configs.blocks import Layer
from neusight_jax.graph.configs.build import graph_from_config, reading_notes
from neusight_jax.graph.configs.config import read_config, whole
from neusight_jax.graph.configs.decoder import read_decoder
from neusight_jax.graph.graph import Footprint, Graph
from neusight_jax.graph.memory import footprint, parameter_count
from neusight_jax.graph.optimizers import optimizer_of, state_notes
from neusight_jax.job.footprint import COMMUNICATION_BYTES, SHARDED_SINCE
from neusight_jax.job.messages import Message, Sizes, parameter_messages
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.pieces import Ask, Pieces
from neusight_jax.job.recipe import Facts, Recipe, recipe_of
from neusight_jax.job.stages import check_lora, is_split, job_config
from neusight_jax.job.weights import Weights
from neusight_jax.job.work import KINDS, WORK, activation_dtype
from neusight_jax.kernels.table import PHASES, KernelTable, by_family, table_from_kernels
from neusight_jax.model.software import Software, usual_software
from neusight_jax.records import Record


@dataclass(frozen=True)
class Plan:
    """What of a job is fixed before any machine is known; static.

    Attributes:
      model: its name; layout: how it is split; dtype: of its products; mode: its workload.
      global_batch_size, sequence_length: of a step; micro_batches: of one replica.
      layers: of each kind of stage; kinds: of each stage (`stages.stage_kinds`); messages: (kind of stage, message).
      message_bytes: of activations between stages, one rank's.
      optimizer, gradient_dtype: of a step, and what gradients are kept and sent in; lora: adapters that alone are
        trained.
      memory: of the fullest rank; recipe: what the framework does.
      nodes: names that `KernelBatch.node` counts from.
    """

    model: str
    layout: Parallelism
    dtype: str
    global_batch_size: int
    sequence_length: int
    micro_batches: int
    layers: tuple[int, ...]
    kinds: tuple[int, ...]
    messages: tuple[tuple[int, Message], ...]
    message_bytes: float
    memory: Footprint
    mode: str = "training"
    optimizer: str | None = None
    gradient_dtype: str = "fp32"
    lora: Lora | None = None
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    notes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.sequence_length


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Job(Record):
    """A step of a model on many GPUs.

    Attributes:
      kernels: distinct kernels of all kinds of stages; counts: of each family, how often each kind of stage launches a
        kernel for each of `WORK`.
      software: what the framework decides, as numbers.
      plan: the rest, static.
    """

    kernels: KernelTable
    counts: dict[str, Float[Array, "kind work kernel"]]
    software: Software
    plan: Plan = dataclasses.field(metadata={"static": True})

    @property
    def name(self) -> str:
        """Of the model."""
        return self.plan.model

    @property
    def mode(self) -> str:
        """Of the workload."""
        return self.plan.mode

    @property
    def dtype(self) -> str:
        """Of its products."""
        return self.plan.dtype

    @property
    def num_gpus(self) -> int:
        """GPUs a step occupies."""
        return self.plan.layout.gpus

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.plan.tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or left out, one line each."""
        return self.plan.notes

    def on(self, paths: Collection[str], gpus_per_domain: int = 0) -> Job:
        """The job as it runs on such GPUs: training has no kernels that stand in for others (`Graph.on`)."""
        return self

    def launches(self) -> float:
        """Kernels of one micro-batch of every kind of stage, and of the optimizer."""
        return float(sum(np.sum(counts) for counts in self.counts.values()))

    def summary(self) -> str:
        """The model, its layout and load."""
        plan = self.plan
        load = f"{plan.global_batch_size} x {plan.sequence_length} tokens, " if plan.tokens else ""
        return f"{plan.model} on {plan.layout.gpus} GPUs: {plan.mode}, {load}{plan.dtype}"

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Dtypes of its products: the arithmetic paths a GPU must have."""
        return (self.plan.dtype,)

    def replace(self, **changes: Any) -> Job:
        """This job with fields replaced, such as `software`."""
        return dataclasses.replace(self, **changes)


def job_from_config(
    config: str | Path | Mapping[str, Any],
    layout: Parallelism,
    *,
    global_batch_size: int,
    sequence_length: int | None = None,
    mode: str = "training",
    dtype: str = "bf16",
    optimizer: str | None = "adamw",
    gradient_dtype: str = "fp32",
    software: Software | None = None,
    lora: Lora | None = None,
    **facts: Unpack[Facts],
) -> Job:
    """One training step of a model on `layout.gpus` GPUs: decoders split in all ways, others as replicas.

    Args:
      config: a catalog name, the path of a config.json, or a mapping with Hugging Face keys.
      layout: how it is split; global_batch_size: sequences of a step; sequence_length: tokens of each, None = as
        many as a model whose layers are not split has places for.
      dtype: of matrix products; optimizer: of `graph.optimizers.OPTIMIZERS`, None = no step of it.
      gradient_dtype: in which gradients are accumulated and sent.
      software: numbers of the framework; None = those learned from measured steps.
      lora: adapters that alone are trained, None = all weights are.
      facts: of the recipe, by the names of `recipe.Facts`, such as framework="megatron" or attention="flash2".
    Raises: `InputError` for a layout, batch or model that cannot be used.
    """
    check_options(optimizer, mode)
    recipe = recipe_of(**facts)
    read = read_config(config)
    if not is_split(read):
        load = (read, layout.micro_batch_size, sequence_length, mode, dtype)
        graph = graph_from_config(*load, optimizer=optimizer, gradient_dtype=gradient_dtype, lora=lora)
        return job_from_graph(graph, layout, global_batch_size=global_batch_size, software=software, **facts)
    parsed, sequence = job_config(read), whole("sequence_length", sequence_length)
    batch = whole("global_batch_size", global_batch_size)
    model = read_decoder(parsed, sequence)
    layout.check(layout.gpus, model.depth, sequence)
    check_lora(parsed, model, lora)
    pieces = Pieces(Ask(parsed, model, batch, sequence, dtype, optimizer, gradient_dtype, recipe, lora))
    return job_of(pieces, layout, software or usual_software(optimizer))


def job_of(pieces: Pieces, layout: Parallelism, software: Software) -> Job:
    """The job of one layout, made of pieces that others may share."""
    launches = pieces.counts(layout)
    # Of a search's pieces those of other layouts are left out.
    used = np.flatnonzero(launches.any(axis=(0, 1)))
    table = table_from_kernels([pieces.pool.kernels[at] for at in used], dtype=pieces.ask.dtype, launched="eager")
    plan = plan_of(pieces, layout, tuple(pieces.pool.nodes[at] for at in used))
    counts: Any = by_family(table, launches[..., used])
    return Job(table, counts, software, plan)


def plan_of(pieces: Pieces, layout: Parallelism, nodes: tuple[str, ...] = ()) -> Plan:
    """The plan of one layout; nodes: that launch its kernels."""
    ask, form = pieces.ask, pieces.form(layout)
    states = state_notes(ask.dtype, ask.gradient_dtype, ask.optimizer)
    return Plan(
        model=ask.config.name,
        layout=layout,
        dtype=ask.dtype,
        optimizer=ask.optimizer,
        gradient_dtype=ask.gradient_dtype,
        lora=ask.lora,
        global_batch_size=ask.global_batch_size,
        sequence_length=ask.sequence_length,
        micro_batches=layout.micro_batches(ask.global_batch_size),
        layers=form.layer_counts,
        kinds=pieces.kinds(layout),
        messages=pieces.messages(layout),
        message_bytes=pieces.between_bytes(layout),
        memory=pieces.memory(layout),
        recipe=ask.recipe,
        notes=tuple(dict.fromkeys((*ask.config.notes, *reading_notes(ask.config), *states))),
        nodes=nodes,
    )


def check_options(optimizer: str | None, mode: str = "training") -> None:
    """`InputError` for options of a job there are not.

    Args:
      optimizer: of `optimizers.OPTIMIZERS`, None = no step.
      mode: only training is a job.
    """
    if mode != "training":
        raise InputError(f"mode is {mode!r}; jobs are training steps, expected 'training'")
    if optimizer is not None:
        optimizer_of(optimizer)


def job_from_graph(
    graph: Graph,
    layout: Parallelism | None = None,
    *,
    global_batch_size: int | None = None,
    software: Software | None = None,
    **facts: Unpack[Facts],
) -> Job:
    """One training step of any graph on `layout.data` replicas, whose gradients are summed; of one rank by default.

    Its kernels are the graph's, row by row. `zero` shards optimizer states, gradients and parameters over the replicas.
    A graph whose kernels a host launches one by one runs slower than its kernels by themselves (`streams`), as decoders
    do by `job_from_config`; any other takes what it takes on one GPU, and its messages.

    Args:
      graph: one micro-batch, as `graph_from_config`, `graph_from_function` or `graph_from_torch` reads it.
      layout: replicas and what they shard; a model that is read as a graph is not split in another way.
      global_batch_size: sequences of a step; None = one micro-batch of each replica. Of a graph that does not know its
        batch, micro-batches.
      software: numbers of the framework, None = those learned from measured steps.
      facts: of the recipe, as `job_from_config`.
    Raises: `InputError` for a graph that is not trained, or a layout that splits it.
    """
    layout = _replicas(graph, layout)
    size = layout.data * layout.micro_batch_size if global_batch_size is None else global_batch_size
    optimizer, table = graph.options.get("optimizer"), graph.kernels
    stated: Facts = {"experts": graph.options.get("experts"), **facts}
    recipe, depth = recipe_of(**stated), _depth(graph)
    if recipe.document_tokens is not None:
        raise InputError(
            f"document_tokens is for decoders whose layers are split; {graph.name} is a graph, its attention is written"
        )
    memory = footprint(graph) if layout.gpus == 1 else _sharded_footprint(graph, layout, recipe.gathered_bytes)
    gradient_dtype = graph.options.get("gradient_dtype", "fp32")
    return Job(
        table,
        _counts_of(graph, 1.0 / layout.shard_ranks if layout.zero else 1.0),
        software or usual_software(optimizer if graph.launched == "eager" else None),
        Plan(
            model=graph.name,
            layout=layout,
            dtype=graph.dtype,
            mode=graph.mode,
            optimizer=optimizer,
            gradient_dtype=gradient_dtype,
            global_batch_size=size if graph.batch_size else 0,
            sequence_length=graph.sequence_length,
            micro_batches=layout.micro_batches(size),
            layers=(depth,) * KINDS,
            kinds=(0,),
            messages=tuple((0, message) for message in _messages_of(graph, layout, depth, recipe.gathered_bytes)),
            message_bytes=0.0,
            memory=memory,
            recipe=recipe,
            notes=graph.notes,
            nodes=tuple(node.name for node in graph.nodes),
        ),
    )


def _replicas(graph: Graph, layout: Parallelism | None) -> Parallelism:
    """The layout of a graph's replicas; a layout that does not say the size of a micro-batch has the graph's."""
    batch = max(graph.batch_size, 1)
    if layout is None:
        return Parallelism(micro_batch_size=batch)
    layout = dataclasses.replace(layout, micro_batch_size=batch) if layout.micro_batch_size == 1 else layout
    plain = Parallelism(data=layout.data, zero=layout.zero, shards=layout.shards, micro_batch_size=batch)
    for field in dataclasses.fields(Parallelism):
        stated, usual = (getattr(each, field.name) for each in (layout, plain))
        if stated != usual:
            raise InputError(
                f"{graph.name} runs as replicas, its layers are not split: {field.name} is {stated}, expected {usual}"
            )
    if layout.gpus > 1 and graph.mode != "training":
        raise InputError(f"{graph.name} is read for {graph.mode}; replicas train, expected mode training")
    if layout.gpus > 1 and graph.num_gpus > 1:
        raise InputError(
            f"{graph.name} is split over {graph.num_gpus} GPUs already; only what runs on one has replicas"
        )
    return layout


def graph_launches(graph: Graph) -> dict[str, Float[np.ndarray, "work kernel"]]:
    """Launches of a graph's kernels by family and work."""
    works = np.array([WORK.index(phase) for phase in PHASES])
    return {
        name: np.where(works[np.asarray(batch.phase)] == np.arange(len(WORK))[:, None], np.asarray(batch.count), 0.0)
        for name, batch in graph.kernels.families.items()
    }


def _counts_of(graph: Graph, owned: float) -> dict[str, Any]:
    """Launches of a graph's kernels by family, [kind, work, kernel]; owned: share of the optimizer's on a rank."""
    counts = {}
    for name, launches in graph_launches(graph).items():
        counts[name] = np.zeros((KINDS, *launches.shape), np.float32)
        counts[name][0] = launches
        counts[name][0, WORK.index("optimizer")] *= owned
    return counts


def _depth(graph: Graph) -> int:
    """Pieces whose gradients are sent one after another: layers that repeat, else all nodes with parameters."""
    repeats = max((float(node.repeat) for node in graph.nodes), default=1.0)
    trained = sum(bool(node.weight_gradient) for node in graph.nodes)
    return max(int(repeats if repeats > 1.0 else trained), 1)


def _elements(graph: Graph) -> Weights:
    """Parameters of a graph."""
    held = graph.footprint
    if graph.parameters is None and held is not None:
        return Weights(held.weights / dtype_bytes(graph.dtype), 0.0)
    return Weights(parameter_count(graph), 0.0)


def _messages_of(graph: Graph, layout: Parallelism, depth: int, gathered_bytes: float | None) -> tuple[Message, ...]:
    """Messages of a graph's parameters and gradients."""
    if layout.gpus == 1:
        return ()
    every = _elements(graph)
    trained = every if graph.trained is None else Weights(graph.trained, 0.0)
    sizes = Sizes(
        layers=(Layer(None, None),) * depth,
        tokens=0.0,
        embeds=True,
        predicts=True,
        weights=every,
        trained=trained,
        dtype=activation_dtype(graph.dtype),
        gradient_bytes=dtype_bytes(graph.options.get("gradient_dtype", "fp32")),
        gathered_bytes=gathered_bytes,
    )
    return parameter_messages(layout, sizes)


def _sharded_footprint(graph: Graph, layout: Parallelism, gathered_bytes: float | None) -> Footprint:
    """Memory of one of a graph's replicas, which shard what ZeRO says; of parameters two layers are gathered."""
    whole, stored = footprint(graph), dtype_bytes(graph.dtype)
    narrower = min(gathered_bytes or stored, stored) / stored
    shards = {name: layout.shard_ranks if layout.zero >= since else 1 for name, since in SHARDED_SINCE.items()}
    gathered = (2.0 * narrower * whole.weights + whole.gradients) / _depth(graph) if layout.zero == 3 else 0.0
    return dataclasses.replace(
        whole,
        **{name: getattr(whole, name) / ranks for name, ranks in shards.items()},
        runtime=whole.runtime + COMMUNICATION_BYTES,
        buffers=whole.buffers + gathered,
    )
