"""Requests of one step of a language model: how many new tokens each brings, and how long its sequence is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import whole
from neusight_jax.graph.graph import MODES

Lengths: TypeAlias = int | Sequence[int]
"""One length for all requests, or one for each."""

STEP_MODES: tuple[str, ...] = (*MODES, "prefill", "decode")
"""Workloads of a decoder."""


@dataclass(frozen=True)
class Requests:
    """A batch of requests.

    Attributes:
      queries: new tokens of each request; context: length of each sequence, the new tokens included.
    """

    queries: tuple[int, ...]
    context: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.queries)


def requests(batch_size: int, sequence_length: Lengths, mode: str, kv_length: Lengths | None = None) -> Requests:
    """The requests of a workload.

    Args:
      batch_size: requests.
      sequence_length: new tokens of a request; in mode "decode", where each has one, the length of its sequence.
      mode: one of `STEP_MODES`.
      kv_length: keys the last new token sees, itself included, where that is not the sequence length: a prefill that
        goes on from a cache, or a decode.
    Raises: `InputError` for lengths that are no whole numbers, lists of another length than the batch, or a sequence
      shorter than its new tokens.
    """
    count = whole("batch_size", batch_size)
    sequence = _each("sequence_length", sequence_length, count)
    context = sequence if kv_length is None else _each("kv_length", kv_length, count)
    if mode == "decode":
        return Requests((1,) * count, context)
    if kv_length is not None and mode != "prefill":
        raise InputError(f"kv_length goes with mode prefill or decode, not {mode}; leave it out")
    for position, (new, length) in enumerate(zip(sequence, context, strict=True)):
        if length < new:
            raise InputError(
                f"kv_length of request {position} is {length}, expected at least its sequence_length, {new}: it counts "
                "the new tokens too"
            )
    return Requests(sequence, context)


def _each(name: str, lengths: Lengths, count: int) -> tuple[int, ...]:
    if isinstance(lengths, Sequence | np.ndarray) and not isinstance(lengths, str):
        if len(lengths) != count:
            raise InputError(f"{name} has {len(lengths)} entries, expected one for each of the {count} requests")
        return tuple(whole(name, length) for length in lengths)
    return (whole(name, lengths),) * count


def one_or_all(lengths: tuple[int, ...]) -> int | list[int]:
    """One number where all requests have it."""
    return lengths[0] if len(set(lengths)) == 1 else list(lengths)
