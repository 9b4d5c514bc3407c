"""Parallelism: how one job is split over GPUs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from neusight_jax.errors import InputError
from neusight_jax.printed import Record
from neusight_jax.units import is_whole

RECOMPUTE: tuple[str, ...] = ("none", "selective", "full")
"""What of the forward pass is run again in the backward pass: nothing, attention, or every layer."""
SCHEDULES: tuple[str, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
"""Orders of micro-batches on a pipeline; with several chunks 1f1b means interleaved."""
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
      sequence_parallel: norms and residuals are split over the tensor-parallel ranks.
      micro_batch_size: sequences of one forward pass of one replica.
      recompute: one of `RECOMPUTE`; schedule: one of `SCHEDULES`.
      order: `AXES` from neighbouring ranks outwards.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    chunks: int = 1
    zero: int = 0
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
            if not is_whole(value) or value < (item.name != "zero"):
                raise InputError(f"{item.name} is {value!r}, expected a positive whole number")
            object.__setattr__(self, item.name, int(value))  # whole numbers of NumPy too
        for name, choices in (("recompute", RECOMPUTE), ("schedule", SCHEDULES), ("zero", (0, 1, 2, 3))):
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {listed}")
        if sorted(self.order) != sorted(AXES):
            raise InputError(f"order is {self.order!r}, expected a permutation of {', '.join(AXES)}")
        if self.replica_ranks % self.expert:
            raise InputError(
                f"expert={self.expert} does not divide tensor · context · data = {self.replica_ranks}; give a divisor"
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
