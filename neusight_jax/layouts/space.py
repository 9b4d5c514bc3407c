"""Space: which layouts of a job are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Decoder
from neusight_jax.graph.configs.parallel import check_split, part_of
from neusight_jax.job.parallelism import RECOMPUTE, Parallelism
from neusight_jax.printed import Record


@dataclass(frozen=True)
class Space(Record):
    """Values that are tried of fields of `Parallelism`, where they divide. All splits over ranks are.

    Attributes:
      micro_batch_sizes, chunks, zero, sequence_parallel: as there. ZeRO-2 goes with one micro-batch: with more, each
        would reduce all gradients.
      recompute: as there; selective recompute saves nothing with FlashAttention, which keeps no scores.
      least_tokens: of a sequence on a rank, where context parallelism splits it.
    """

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[str, ...] = ("none", "full")
    least_tokens: int = 1024

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name):
                raise InputError(f"{item.name} of a space of layouts is empty; expected at least one value")
        unknown = [name for name in self.recompute if name not in RECOMPUTE]
        if unknown:
            raise InputError(f"recompute is {unknown[0]!r}, expected some of {', '.join(RECOMPUTE)}")


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def layouts_of(
    space: Space, model: Decoder, gpus: int, global_batch_size: int, sequence_length: int
) -> Iterator[Parallelism]:
    """All layouts of a model over so many GPUs."""
    for tensor in _divisors(gpus):
        if not _splits(model, tensor):
            continue
        for pipeline, context in product(_divisors(gpus // tensor), repeat=2):
            rest = gpus // tensor // pipeline
            if pipeline > model.depth or rest % context or sequence_length % context:
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
            part_of("", layer, tensor, False)
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
