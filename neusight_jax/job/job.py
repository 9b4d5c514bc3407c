"""Job: a model's training step on many GPUs, as kernels with their counts and messages between ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from neusight_jax.graph.graph import Footprint, Graph
from neusight_jax.graph.memory import footprint, is_rebuilt, parameter_count
from neusight_jax.graph.optimizers import (
    flat_stream,
    optimizer_of,
    orthogonalizing_kernels,
    state_notes,
    step_kernels,
)
from neusight_jax.job.footprint import COMMUNICATION_BYTES, SHARDED_SINCE, Held, fullest
from neusight_jax.job.messages import Message, Sizes, hidden_bytes, parameter_messages, stage_messages
from neusight_jax.job.parallelism import Parallelism, recomputed
from neusight_jax.job.recipe import Facts, Recipe, recipe_of
from neusight_jax.job.stages import Stage, is_split, job_config, stage_kinds, stages
from neusight_jax.job.weights import Weights
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, Kernel, KernelTable, Pool, by_family
from neusight_jax.model.software import Software, usual_software
from neusight_jax.records import Record

WORK: tuple[str, ...] = ("forward", "backward", "weight_gradient", "recomputed", "optimizer")
"""Work of a stage: phases of a micro-batch, what of the forward pass is run again, and once a step the optimizer."""
KINDS = 4
"""Kinds of stages (`stages.stage_kinds`)."""


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
    batches = layout.micro_batches(whole("global_batch_size", global_batch_size))
    model, kinds = stages(parsed, layout, sequence, dtype, recipe, lora=lora)
    size, own = dtype_bytes(gradient_dtype), activation_dtype(dtype)
    gathered = recipe.gathered_bytes
    sizes = {kind: sizes_of(layout, stage, sequence, own, size, gathered) for kind, stage in kinds.items()}
    added = added_bytes(batches, size, recipe.fused_accumulation)
    order = stage_kinds(layout, model.depth)
    kernels, counts, nodes = _table(kinds, layout, optimizer, added, dtype)
    between = hidden_bytes(model, layout, rank_tokens(layout, sequence), own)
    held = Held(optimizer, dtype_bytes(dtype), size, between, added > 0.0, recipe.bucket_elements, gathered)
    plan = Plan(
        model=parsed.name,
        layout=layout,
        dtype=dtype,
        mode=mode,
        optimizer=optimizer,
        gradient_dtype=gradient_dtype,
        lora=lora,
        global_batch_size=int(global_batch_size),
        sequence_length=sequence,
        micro_batches=batches,
        layers=tuple(len(kinds[kind].layers) if kind in kinds else 1 for kind in range(KINDS)),
        kinds=order,
        messages=tuple((kind, each) for kind, of in sizes.items() for each in stage_messages(model, layout, of)),
        message_bytes=between,
        memory=fullest({kind: stage.part for kind, stage in kinds.items()}, order, layout, batches, held),
        recipe=recipe,
        notes=tuple(
            dict.fromkeys((*parsed.notes, *reading_notes(parsed), *state_notes(dtype, gradient_dtype, optimizer)))
        ),
        nodes=nodes,
    )
    return Job(kernels, counts, software or usual_software(optimizer), plan)


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


def activation_dtype(dtype: str) -> str:
    """Dtype of activations beside products in `dtype`."""
    return "bf16" if dtype_bytes(dtype) < 2.0 else dtype


def rank_tokens(layout: Parallelism, sequence_length: int) -> float:
    """Tokens of a micro-batch on one rank."""
    return float(layout.micro_batch_size * sequence_length // layout.context)


def added_bytes(micro_batches: int, gradient_bytes: float, fused_accumulation: bool) -> float:
    """Bytes of a gradient that a kernel of its own adds to a sum, 0 = there is none."""
    return 0.0 if micro_batches == 1 or fused_accumulation else gradient_bytes


def sizes_of(
    layout: Parallelism,
    stage: Stage,
    sequence_length: int,
    dtype: str,
    gradient_bytes: float,
    gathered_bytes: float | None = None,
) -> Sizes:
    """Sizes that messages of a stage go by.

    Args:
      layout: how the job is split.
      stage: whose messages they are.
      sequence_length: tokens of a sequence.
      dtype: of activations.
      gradient_bytes: of an element of the accumulated gradients.
      gathered_bytes: of an element as shards are gathered, None = as it is stored.
    """
    return Sizes(
        stage.layers,
        rank_tokens(layout, sequence_length),
        stage.embeds,
        stage.predicts,
        stage.weights,
        stage.trained,
        dtype,
        gradient_bytes,
        stage.narrowed_bytes,
        recomputed(layout.recompute, len(stage.layers)).get("full", 0.0),
        gathered_bytes,
    )


def recomputed_kernels(graph: Graph, shares: Mapping[str, float]) -> Iterable[tuple[float, Kernel, str]]:
    """Kernels of the forward pass that the backward pass runs again, with their repeats and nodes.

    Args:
      graph: of a stage.
      shares: of its layers that run each of `AGAIN` again.
    """
    for work, share in shares.items():
        for node in graph.nodes:
            if not (node.section if work == "full" else is_rebuilt(node, work)):
                continue
            for kernel in node.forward:
                if work == "full" or node.op != "experts" or kernel.op == "pointwise":  # not the products of experts
                    yield node.repeat * share, kernel, node.name


def pass_kernels(graph: Graph) -> Iterable[tuple[int, float, Kernel, str]]:
    """Kernels of one micro-batch with their work, repeats and nodes."""
    for node in graph.nodes:
        for work, kernels in enumerate((node.forward, node.backward, node.weight_gradient)):
            yield from ((work, node.repeat, kernel, node.name) for kernel in kernels)


def parameter_kernels(
    trained: Weights,
    layout: Parallelism,
    optimizer: str | None,
    added_bytes: float,
    tensor_cores: bool,
    graphs: Sequence[tuple[Graph, float]] = (),
) -> Iterable[tuple[int, Kernel]]:
    """Kernels that run over the parameters of a stage that are trained, with their work.

    Args:
      trained: on the rank.
      layout: how the job is split.
      optimizer: of `optimizers.OPTIMIZERS`, None = no step.
      added_bytes: of a gradient that is added to a sum, 0 = none.
      tensor_cores: as in `optimizers.flat_stream`.
      graphs: whose matrices are trained, and how often each is in the stage.
    """
    if added_bytes:  # read the gradient and the sum, write the sum; of FSDP after shards were summed
        shards = layout.shard_ranks if layout.zero == 3 else 1
        moved = 2.0 + 2.0 * added_bytes
        yield WORK.index("weight_gradient"), flat_stream(trained.total / shards, moved, tensor_cores)
    if optimizer is not None:
        owned = trained.held(layout, sharded=layout.zero > 0)
        for kernel in step_kernels(optimizer, owned, tensor_cores):
            yield WORK.index("optimizer"), kernel
        if optimizer_of(optimizer).orthogonalizes:  # each of the ranks that share states has whole matrices of its own
            of = {"linear": Weights(1.0, 0.0), "experts": Weights(0.0, 1.0)}
            shares = {op: one.held(layout, sharded=layout.zero > 0) for op, one in of.items()}
            for graph, times in graphs:
                for op, kernel in orthogonalizing_kernels(graph):
                    yield WORK.index("optimizer"), dataclasses.replace(kernel, count=kernel.count * times * shares[op])


def tensor_cored(graph: Graph) -> bool:
    """Whether kernels of a graph run between those of tensor cores."""
    return any(FAMILIES[name].tensor_core for name in graph.kernels.families)


def _works(
    stage: Stage, layout: Parallelism, optimizer: str | None, added_bytes: float
) -> Iterable[tuple[int, float, Kernel, str]]:
    """Kernels of one stage with their work, repeats and nodes."""
    yield from pass_kernels(stage.graph)
    for repeat, kernel, node in recomputed_kernels(stage.graph, recomputed(layout.recompute, len(stage.layers))):
        yield WORK.index("recomputed"), repeat, kernel, node
    matrices = [(stage.graph, 1.0)] if stage.trained == stage.weights else []
    own = (stage.trained, layout, optimizer, added_bytes, tensor_cored(stage.graph), matrices)
    for work, kernel in parameter_kernels(*own):
        yield work, 1.0, kernel, "optimizer" if work == WORK.index("optimizer") else "gradient sums"


def _table(
    kinds: Mapping[int, Stage], layout: Parallelism, optimizer: str | None, added_bytes: float, dtype: str
) -> tuple[KernelTable, dict[str, Any], tuple[str, ...]]:
    """Distinct kernels, how often each kind of stage launches them for each work, and the first node of each."""
    pool = Pool("eager")
    entries = [
        (kind, work, pool.place(kernel, node), kernel.count * repeat)
        for kind, stage in kinds.items()
        for work, repeat, kernel, node in _works(stage, layout, optimizer, added_bytes)
    ]
    dense = np.zeros((KINDS, len(WORK), len(pool.kernels)))
    for kind, work, place, count in entries:
        dense[kind, work, place] += count
    table = pool.table(dtype)
    return table, by_family(table, dense), tuple(pool.nodes)


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
