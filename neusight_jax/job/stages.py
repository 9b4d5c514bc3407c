"""Stages: the graphs of a pipeline's first, inner and last stage on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.adapters import Lora
from neusight_jax.graph.configs.blocks import Decoder, Layer
from neusight_jax.graph.configs.build import eager_graph, model_type, unquantized
from neusight_jax.graph.configs.config import Config, language_config, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES, record
from neusight_jax.graph.configs.eager_models import Respelled, record_gpt2
from neusight_jax.graph.configs.parallel import part_of
from neusight_jax.graph.configs.requests import Requests, requests
from neusight_jax.graph.configs.shard import Shard
from neusight_jax.graph.configs.step import Step, precision
from neusight_jax.graph.configs.tape import Tape
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import Saved, footprint, saved_of
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.job.recipe import Recipe
from neusight_jax.job.weights import Weights


@dataclass(frozen=True)
class Part:
    """What memory of a stage is counted by.

    Attributes:
      weights, trained: on the rank, all and those that are trained.
      saved: for the backward pass of one micro-batch; layers: how many.
      narrowed_bytes: that frozen weights take less than in the dtype of the activations.
    """

    weights: Weights
    trained: Weights
    saved: Saved
    layers: int
    narrowed_bytes: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One kind of stage.

    Attributes:
      graph: one micro-batch of it on one rank; layers: its layers.
      weights, trained, narrowed_bytes: as in `Part`.
    """

    graph: Graph
    layers: tuple[Layer, ...]
    embeds: bool
    predicts: bool
    weights: Weights
    trained: Weights
    narrowed_bytes: float = 0.0

    @property
    def part(self) -> Part:
        """What its memory is counted by."""
        saved = saved_of(self.graph.nodes)
        if not saved.layers + saved.ends:  # eager nodes say what they read instead
            saved = Saved(footprint(self.graph).activations)
        return Part(self.weights, self.trained, saved, len(self.layers), self.narrowed_bytes)


def is_split(config: str | Path | Mapping[str, Any] | Config) -> bool:
    """Whether the layers of a model are split over GPUs, as those of decoders are; others run as replicas."""
    return model_type(language_config(read_config(config))) in (*MODEL_TYPES, "gpt2")


def job_config(config: str | Path | Mapping[str, Any] | Config) -> Config:
    """The config of a decoder; GPT-2's and GPT-3's in the spelling of one whose layers are written fused.

    Raises: `InputError` for other models.
    """
    parsed = unquantized(language_config(read_config(config)))
    if parsed.values.get("model_type") == "gpt2":
        return Respelled(parsed)
    kind = model_type(parsed)
    if kind not in MODEL_TYPES:
        raise InputError(
            f"{parsed.name}: layers of decoders such as llama, qwen3 or gpt2 are split over GPUs; {kind!r} is none, it "
            "runs as replicas: predict --mode training --gpus N [--zero Z]"
        )
    return parsed


def check_lora(config: Config, model: Decoder, lora: Lora | None) -> None:
    """`InputError` for targets that no product of a model's layers has in its name."""
    if lora is not None:
        step = Step(requests(1, 1, "training"), precision("bf16"), "training", shard=Shard(), lora=lora)
        record(step, Config(config.name, config.values, config.defaults), model=model)
        lora.check(step.adapted)


FIRST, INNER, LAST, SHORT = range(4)
"""Kinds of stages: the first, an inner one, the last, and an inner one with one layer less than the others."""


def stage_kinds(layout: Parallelism, depth: int) -> tuple[int, ...]:
    """Kind of each stage of so many layers; a lone stage is the first."""
    counts = layout.layers_of(depth)
    inner = counts[1:-1]
    ends = (FIRST, LAST) if len(counts) > 1 else (FIRST,)
    return (ends[0], *(INNER if count == max(inner) else SHORT for count in inner), *ends[1:])


def stage_ranges(layout: Parallelism, depth: int) -> dict[int, tuple[int, int]]:
    """First layer and the one after the last, by kind of stage: of the stage in the middle of those alike."""
    counts, order, found = layout.layers_of(depth), stage_kinds(layout, depth), {}
    for kind in sorted(set(order)):
        alike = [at for at, each in enumerate(order) if each == kind]
        place = alike[len(alike) // 2]
        first = sum(counts[:place])
        found[kind] = (first, first + counts[place])
    return found


def shard_of(layout: Parallelism, first: int, last: int, *, embeds: bool, predicts: bool, recipe: Recipe) -> Shard:
    """The part of some layers on one rank.

    Args:
      layout: how the job is split.
      first: layer of the stage.
      last: layer after its last one.
      embeds: whether it has the embedding.
      predicts: whether it has the head and the loss.
      recipe: which kernels compute attention and experts.
    """
    return Shard(
        first=first,
        last=last,
        embeds=embeds,
        predicts=predicts,
        context=layout.context,
        sequence=layout.tensor if layout.sequence_parallel else 1,
        expert_ranks=layout.expert,
        tensor=layout.tensor,
        flash=recipe.attention != "unfused",
        grouped_experts=recipe.experts == "grouped",
    )


def stage_of(
    config: Config,
    model: Decoder,
    layout: Parallelism,
    shard: Shard,
    sequence_length: int,
    documents: int,
    dtype: str,
    layers: tuple[Layer, ...],
    lora: Lora | None = None,
) -> Stage:
    """One micro-batch of a shard with these layers; GPT-2 in fp32 runs as eager PyTorch runs it.

    Args:
      config, model: as they were read.
      layout: how the job is split.
      shard: what one rank has.
      sequence_length: tokens of a sequence; documents: that it holds, of one length, which attention stays inside of.
      dtype: of products.
      layers: of the shard.
      lora: adapters that alone are trained, None = all weights are.
    """
    if isinstance(config, Respelled) and dtype == "fp32" and lora is None:
        if documents > 1:
            raise InputError("document_tokens goes with attention that is one kernel; gpt2 in fp32 runs without")
        return _eager_stage(config, model, layout, shard, sequence_length, layers)
    tokens = sequence_length // layout.context
    count = min(documents, tokens)
    lengths = tuple((tokens + at) // count for at in range(count)) * layout.micro_batch_size  # nearly equal parts
    stored = precision(dtype, lora.weight_dtype if lora else None)
    step = Step(Requests(lengths, lengths), stored, "training", shard=shard, lora=lora)
    record(step, config, layout.tensor, layout.expert, model)
    graph = Graph(
        name=config.name,
        nodes=tuple(step.nodes),
        mode="training",
        dtype=step.precision.products,
        batch_size=layout.micro_batch_size,
        sequence_length=sequence_length,
        fused=True,
        tokens=sum(lengths),
        footprint=step.footprint(),
        parameters=step.parameters,
    )
    every = Weights(step.parameters - step.expert_parameters, step.expert_parameters)
    trained = Weights(step.trained, 0.0) if lora else every
    full = step.parameters * dtype_bytes(step.precision.activations)
    saved = full - step.parameter_bytes if lora and lora.weight_dtype else 0.0
    return Stage(graph, layers, shard.embeds, shard.predicts, every, trained, saved)


def _eager_stage(
    config: Respelled,
    model: Decoder,
    layout: Parallelism,
    shard: Shard,
    sequence_length: int,
    layers: tuple[Layer, ...],
) -> Stage:
    """`stage_of` of eager PyTorch."""
    for layer in model.layers:
        part_of(config.name, layer, layout.tensor)
    tape = Tape(True, "fp32")
    record_gpt2(tape, config.eager, layout.micro_batch_size, sequence_length // layout.context, shard)
    graph = eager_graph(config.eager, tape, layout.micro_batch_size, sequence_length)
    weights = Weights(tape.parameters, 0.0)
    return Stage(graph, layers, shard.embeds, shard.predicts, weights, weights)
