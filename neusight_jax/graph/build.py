"""From a config and a workload to a `Graph`: the architectures, the checks, the front door."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neusight_jax.arithmetic import ELEMENT_BYTES, dtype_index
from neusight_jax.errors import InputError
from neusight_jax.graph import bert, gpt2, opt, switch
from neusight_jax.graph.config import Config, read_config, whole
from neusight_jax.graph.fusion import fuse
from neusight_jax.graph.graph import MODES, Graph, Node
from neusight_jax.graph.tape import Tape

ARCHITECTURES: dict[str, Callable[[Tape, Config, int, int], None]] = {
    "bert": bert.record,
    "roberta": bert.record,
    "gpt2": gpt2.record,
    "opt": opt.record,
    "switch_transformers": switch.record,
}
"""Recorders by `model_type`. A new architecture is one new file and one line here."""


def trace(
    config: str | Path | Mapping[str, Any],
    batch_size: int,
    sequence_length: int,
    mode: str = "inference",
    dtype: str = "fp32",
) -> tuple[Config, tuple[Node, ...]]:
    """The config and its nodes, those included that launch nothing but are charged by the reference."""
    batch, sequence = whole("batch_size", batch_size), whole("sequence_length", sequence_length)
    if mode not in MODES:
        raise InputError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    element_bytes = ELEMENT_BYTES[dtype_index(dtype)]
    parsed = read_config(config)
    supported = f"expected one of {', '.join(ARCHITECTURES)}"
    kind = parsed.values.get("model_type")
    if kind is None:
        raise InputError(f"{parsed.name}: config has no 'model_type'; {supported}")
    recorder = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if recorder is None:
        raise InputError(f"{parsed.name}: model_type {kind!r} is not supported; {supported}")
    tape = Tape(mode == "training", element_bytes)
    recorder(tape, parsed, batch, sequence)
    return parsed, tuple(tape.nodes)


def graph_from_config(
    config: str | Path | Mapping[str, Any],
    batch_size: int,
    sequence_length: int,
    mode: str = "inference",
    dtype: str = "fp32",
    fused: bool = False,
) -> Graph:
    """Operator graph of a model from its config.

    Args:
      config: a catalog name (`list_models()`), the path of a config.json, or a mapping with Hugging Face keys.
      batch_size, sequence_length: of the input.
      mode: "inference" (forward) or "training" (forward and backward, gradients accumulated, no optimizer step).
      dtype: of all tensors.
      fused: merge elementwise chains as a compiler would, instead of eager kernels.
    Raises: InputError for an unusable config or workload.
    """
    parsed, traced = trace(config, batch_size, sequence_length, mode, dtype)
    nodes = fuse(traced) if fused else traced
    return Graph(
        name=parsed.name,
        nodes=tuple(node for node in nodes if any(node.phases)),
        mode=mode,
        dtype=dtype,
        batch_size=int(batch_size),
        sequence_length=int(sequence_length),
        fused=bool(fused),
    )
