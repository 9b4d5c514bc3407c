"""Parallelism: how one job is split over GPUs."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Decoder
from neusight_jax.graph.configs.parallel import check_split, part_of
from neusight_jax.graph.memory import REBUILT
from neusight_jax.records import Record
from neusight_jax.units import is_whole

RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
"""What of the forward pass is run again in the backward pass: nothing, attention, or every layer. Also "full:4":
four layers of every stage (Megatron-LM, `--recompute-method block --recompute-num-layers 4`), and operators of
`memory.REBUILT` with commas between them: "norm,activation"."""
AGAIN: tuple[str, ...] = (*REBUILT, "full")
"""Work that is run again: operators by themselves, and whole layers."""
SCHEDULES: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
"""Orders of micro-batches on a pipeline; with several chunks 1f1b means interleaved."""
OFF: tuple[str, ...] = ("zero", "shards")
"""Numbers of a layout that are 0 where nothing of the kind is done; all others are 1."""
AXES: tuple[str, ...] = ("tensor", "context", "data", "pipeline")
"""Ways a job is split whose product is the number of GPUs, from neighbours to the farthest apart."""


@dataclass(frozen=True)
class Parallelism(Record):
    """A layout of a job: static, hashable. Its GPUs are tensor · context · data · pipeline.

    Attributes:
      tensor, pipeline, data, context: ways the layers' matrices, the layers, the batch and the sequence are split.
      expert: ranks the experts are split over; they lie inside tensor · context · data. Above 1 an expert is whole.
      chunks: stages of one pipeline rank (interleaving).
      zero: what the data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too (FSDP).
      shards: with zero 3, neighbouring ranks that share one copy of the parameters, 0 = all of them; fewer is hybrid
        sharding (HSDP), whose copies sum their gradients once a step.
      sequence_parallel: norms and residuals are split over the tensor-parallel ranks.
      micro_batch_size: sequences of one forward pass of one replica.
      recompute: as `RECOMPUTE` says; schedule: one of `SCHEDULES`.
      order: `AXES` from neighbouring ranks outwards.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    zero: int = 0
    shards: int = 0
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type != "int":
                continue
            if not is_whole(value) or value < (item.name not in OFF):
                raise InputError(f"{item.name} is {value!r}, expected a positive whole number")
            object.__setattr__(self, item.name, int(value))  # whole numbers of NumPy too
        recomputed(self.recompute)
        for name, choices in (("schedule", SCHEDULES), ("zero", (0, 1, 2, 3))):
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {listed}")
        if sorted(self.order) != sorted(AXES):
            raise InputError(f"order is {self.order!r}, expected a permutation of {', '.join(AXES)}")
        if self.replica_ranks % self.expert:
            raise InputError(
                f"expert={self.expert} does not divide tensor · context · data = {self.replica_ranks}; give a divisor"
            )
        copies = self.data * self.context
        if self.shards and (self.zero != 3 or self.expert > 1 or copies % self.shards):
            raise InputError(
                f"shards={self.shards} needs zero 3, expert 1 and to divide data · context = {copies}; leave shards "
                "at 0 for one copy of the parameters"
            )
        if self.chunks > 1 and (self.pipeline == 1 or self.schedule not in ("1f1b", "interleaved")):
            raise InputError(f"chunks={self.chunks} needs pipeline > 1 and schedule interleaved; leave chunks at 1")

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def replica_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def shard_ranks(self) -> int:
        """Ranks that share what ZeRO shards."""
        return self.shards or self.data * self.context

    @property
    def stages(self) -> int:
        """Pieces the layers are cut into: pipeline ranks times chunks."""
        return self.pipeline * self.chunks

    def micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches of one replica in a step; `InputError` where the batch does not divide."""
        at_once = self.data * self.micro_batch_size
        if global_batch_size < 1 or global_batch_size % at_once:
            raise InputError(
                f"global_batch_size {global_batch_size} is no multiple of data · micro_batch_size = {self.data} · "
                f"{self.micro_batch_size} = {at_once}; expected a multiple"
            )
        batches = global_batch_size // at_once
        if self.chunks > 1 and batches % self.pipeline:
            raise InputError(
                f"{batches} micro-batches of a replica are no multiple of pipeline = {self.pipeline}, which "
                f"interleaving (chunks={self.chunks}) needs; expected another global_batch_size, or chunks=1"
            )
        return batches

    def check(self, gpus: int, layers: int, sequence_length: int) -> None:
        """`InputError` where the layout does not fit a number of GPUs, layers or a sequence length."""
        if self.gpus != gpus:
            raise InputError(
                f"tensor · context · data · pipeline = {self.tensor} · {self.context} · {self.data} · {self.pipeline} "
                f"= {self.gpus}, but the cluster has {gpus} GPUs; expected the same"
            )
        if layers < self.stages:
            raise InputError(f"{layers} layers cannot fill pipeline · chunks = {self.stages} stages; expected fewer")
        if sequence_length % self.context:
            raise InputError(f"sequence_length {sequence_length} is no multiple of context={self.context}")

    def layers_of(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage, as even as can be; the ends, which embed and predict, have more last of all.

        Of two inner stages the earlier one, whose rank holds more micro-batches, has no more than the later.
        """
        count = self.stages
        fewer, more = divmod(layers, count)
        order = [*range(count - 2, 0, -1), 0, count - 1] if count > 2 else [*range(count)][::-1]
        longer = set(order[:more])
        return tuple(fewer + (place in longer) for place in range(count))


@functools.lru_cache(maxsize=1024)
def recomputed(recompute: str, layers: int = 1) -> dict[str, float]:
    """Share of a stage's layers that run each of `AGAIN` again.

    Args:
      recompute: as `RECOMPUTE` says; layers: of the stage.
    Raises: `InputError` for what says nothing of that kind.
    """
    word, colon, number = str(recompute).partition(":")
    if word == "full" and (not colon or (number.isdecimal() and int(number) > 0)):
        return {"full": min(int(number), layers) / max(layers, 1) if colon else 1.0}
    if recompute in ("none", "selective"):
        return {"attention": 1.0} if recompute == "selective" else {}
    operators = str(recompute).split(",")
    if not set(operators) <= set(REBUILT):
        raise InputError(
            f"recompute is {recompute!r}, expected one of {', '.join(RECOMPUTE)}, full:LAYERS such as full:4, or some "
            f"of {','.join(REBUILT)}"
        )
    return dict.fromkeys(operators, 1.0)


# Placement: which ranks form the groups of a layout, and how many NVLink domains each group spans.


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other.

    Attributes:
      ranks: how many.
      domains: domains of fast links they lie in.
    """

    ranks: int
    domains: int


GROUPS: dict[str, tuple[str, ...]] = {
    "tensor": ("tensor",),
    "context": ("context",),
    "data": ("data", "context"),
    "expert": ("tensor", "context", "data"),
    "replica": ("tensor", "context", "data", "pipeline"),
}
"""Axes whose ranks form a group; gradients are summed over copies of a sequence's parts as well."""


def strides(layout: Parallelism) -> dict[str, int]:
    """Distance in ranks between neighbours of each axis."""
    found, step = {}, 1
    for axis in layout.order:
        found[axis] = step
        step *= getattr(layout, axis)
    return {axis: found[axis] for axis in AXES}


def groups(layout: Parallelism, gpus_per_domain: int) -> dict[str, Group]:
    """The group of each kind that rank 0 is in, and two neighbours of the pipeline ("pipeline").

    Experts take the nearest ranks of their stage; the replicas of an expert ("expert_data") the rest of it. Likewise
    "shards" share one copy of the parameters, and "copies" hold the same of it.
    """
    members = {name: _members(layout, axes) for name, axes in GROUPS.items()}
    stage = members["expert"]
    members |= {"expert": stage[: layout.expert], "expert_data": stage[:: layout.expert]}
    copies = members["data"]
    members |= {"shards": copies[: layout.shard_ranks], "copies": copies[:: layout.shard_ranks]}
    found = {name: _spanned(ranks, gpus_per_domain) for name, ranks in members.items()}
    # A message of the pipeline crosses domains wherever one of its neighbours does.
    step = strides(layout)["pipeline"]
    crosses = _spanned(range(0, step * layout.pipeline, step), gpus_per_domain).domains > 1
    found["pipeline"] = Group(min(layout.pipeline, 2), 1 + crosses)
    return found


def _members(layout: Parallelism, axes: tuple[str, ...]) -> range | np.ndarray:
    """Ranks of the group of rank 0 over some axes, in order: evenly spaced where no other axis lies between them."""
    step = strides(layout)
    near = sorted(axes, key=layout.order.index)
    ways = [getattr(layout, axis) for axis in near]
    first, count = step[near[0]], math.prod(ways)
    if all(step[axis] == first * math.prod(ways[:at]) for at, axis in enumerate(near)):
        return range(0, first * count, first)
    places = [step[axis] * np.arange(way) for axis, way in zip(near, ways, strict=True)]
    return np.sort(functools.reduce(np.add.outer, places).reshape(-1))


def _spanned(ranks: range | np.ndarray, gpus_per_domain: int) -> Group:
    """A group of these ranks."""
    if isinstance(ranks, range):
        # Ranks less than a domain apart leave none out between the first and the last.
        domains = len(ranks) if ranks.step >= gpus_per_domain else ranks[-1] // gpus_per_domain + 1
    else:
        domains = len(np.unique(ranks // gpus_per_domain))
    return Group(len(ranks), domains)


# Space: which layouts of a job are tried.


@dataclass(frozen=True)
class Space(Record):
    """Values that are tried of fields of `Parallelism`, where they divide. All splits over ranks are.

    Attributes:
      micro_batch_sizes, chunks, zero, sequence_parallel: as there. ZeRO-2 goes with one micro-batch: with more, each
        would reduce all gradients.
      recompute: as there; selective recompute saves nothing with FlashAttention, which keeps no scores.
      least_tokens: of a sequence on a rank, where context parallelism splits it.
      axes: of `AXES`, ways a job is split; the others stay 1.
    """

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[str, ...] = ("none", "full")
    least_tokens: int = 1024
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name):
                raise InputError(f"{item.name} of a space of layouts is empty; expected at least one value")
        for choice in self.recompute:
            recomputed(choice)
        unknown = [name for name in self.axes if name not in AXES]
        if unknown:
            raise InputError(f"axes is {unknown[0]!r}, expected some of {', '.join(AXES)}")

    def splits(self, **ways: int) -> bool:
        """Whether these ways to split a job are tried."""
        return all(count == 1 or axis in self.axes for axis, count in ways.items())


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def layouts_of(
    space: Space, model: Decoder, gpus: int, global_batch_size: int, sequence_length: int
) -> Iterator[Parallelism]:
    """All layouts of a model over so many GPUs.

    Args:
      space: values that are tried.
      model: whose heads, experts and layers must divide.
      gpus: of the layout.
      global_batch_size: sequences of a step.
      sequence_length: tokens of each.
    """
    # Tensor ways first: they must divide heads and widths, which rules out most layouts before the rest is tried.
    for tensor in _divisors(gpus):
        if not space.splits(tensor=tensor) or not _splits(model, tensor):
            continue
        for pipeline, context in product(_divisors(gpus // tensor), repeat=2):
            rest = gpus // tensor // pipeline
            if pipeline > model.depth or rest % context or sequence_length % context:
                continue
            if not space.splits(pipeline=pipeline, context=context, data=rest // context):
                continue
            if context > 1 and sequence_length // context < space.least_tokens:
                continue
            ways = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": rest // context}
            for expert in _expert_ways(model, tensor * rest):
                yield from _layouts(space, model.depth, {**ways, "expert": expert}, global_batch_size)


def _layouts(space: Space, depth: int, ways: dict[str, Any], global_batch_size: int) -> Iterator[Parallelism]:
    """Layouts with these ways to split over ranks."""
    copies, pipeline = ways["data"] * ways["context"], ways["pipeline"]
    for size in space.micro_batch_sizes:
        # Interleaving takes whole groups of micro-batches; ZeRO-2 would send gradients after each, so it has one.
        batches, left = divmod(global_batch_size, ways["data"] * size)
        if left or not batches:
            continue
        chunks = [
            each
            for each in space.chunks
            if each == 1 or (pipeline > 1 and depth % (pipeline * each) == 0 and batches % pipeline == 0)
        ]
        zeros = [each for each in space.zero if (copies > 1 or each == 0) and (each != 2 or batches == 1)]
        sequence = [each for each in space.sequence_parallel if ways["tensor"] > 1 or not each]
        for each, zero, split, recompute in product(chunks, zeros, sequence, space.recompute):
            yield Parallelism(
                **ways,
                chunks=each,
                zero=zero,
                sequence_parallel=split,
                micro_batch_size=size,
                recompute=recompute,
            )


def _splits(model: Decoder, tensor: int) -> bool:
    """Whether the layers split over so many ranks."""
    try:
        for layer in model.layers:
            part_of("", layer, tensor)
    except InputError:
        return False
    return True


def _expert_ways(model: Decoder, ranks: int) -> list[int]:
    """Ways the experts of a model can be split over the ranks of a stage, 1 where there are none."""
    found = []
    for ways in _divisors(ranks):
        try:
            check_split("", model, ways)
        except InputError:
            continue
        found.append(ways)
    return found
