"""The longest sequence a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.graph.build import ARCHITECTURES, trace
from neusight_jax.graph.config import Config
from neusight_jax.graph.tape import Tape


class _Limit(Config):
    """A config that remembers the limit its recorder asks it to check."""

    longest: int | None = None

    def limit_sequence(self, sequence: int, key: str, reserved: int = 0) -> int:
        self.longest = super().limit_sequence(sequence, key, reserved)
        return self.longest


def longest_sequence(config: str | Path | Mapping[str, Any]) -> int | None:
    """Positions a model has, or None if it has no limit; `InputError` for an unusable config."""
    parsed, _ = trace(config, 1, 1)
    limit = _Limit(parsed.name, parsed.values)
    ARCHITECTURES[parsed.values["model_type"]](Tape(False, 4.0), limit, 1, 1)
    return limit.longest
