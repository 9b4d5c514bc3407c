"""Recorders of models by `model_type`: eager PyTorch models, and those that run with fused kernels."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from neusight_jax.errors import InputError
from neusight_jax.graph.configs import bert, decoder, gpt2, opt, switch, vit
from neusight_jax.graph.configs.config import Config, shown
from neusight_jax.graph.configs.language import missing_layer
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.configs.tape import Tape

ARCHITECTURES: dict[str, Callable[[Tape, Config, int, int], None]] = {
    "bert": bert.record,
    "roberta": bert.record,
    "gpt2": gpt2.record,
    "opt": opt.record,
    "switch_transformers": switch.record,
}
"""Recorders of eager PyTorch models by `model_type`. A new architecture is one new file and one line here."""


class StepRecorder(Protocol):
    """Writes a step of a model as serving and training frameworks run it."""

    def __call__(self, step: Step, config: Config, tensor_parallel: int = 1, expert_parallel: int = 1) -> None:
        """Write the step."""
        ...


STEP_ARCHITECTURES: dict[str, StepRecorder] = {**dict.fromkeys(decoder.MODEL_TYPES, decoder.record), "vit": vit.record}
"""Recorders of models with fused kernels by `model_type`."""


def model_type(config: Config, known: Mapping[str, Any] | None = None) -> str:
    """The `model_type` of a config; `InputError` when it is absent or not among `known` (default: all there are)."""
    names = (*ARCHITECTURES, *STEP_ARCHITECTURES) if known is None else tuple(known)
    kind = config.values.get("model_type")
    if kind is None:
        keys = ", ".join(shown(key) for key in [*config.values][:3])
        among = f" among its keys {keys} ..." if keys else ""
        raise InputError(
            f"{config.name}: config has no 'model_type'{among}; expected Hugging Face's config.json, where it says "
            "which layers there are, e.g. llama"
        )
    if isinstance(kind, str) and kind in names:
        return kind
    missing = missing_layer(kind) if isinstance(kind, str) else None
    if missing is not None and known is None:
        raise InputError(f"{config.name}: model_type {kind!r} is not supported: it has {missing}, not written here")
    near = difflib.get_close_matches(str(kind)[:60].lower(), names, n=3, cutoff=0.6)
    others = f"nearest: {', '.join(near)}" if near else f"expected one of {len(names)} such as {', '.join(names[:4])}"
    raise InputError(f"{config.name}: model_type {shown(kind)} is not supported; {others} (docs/graphs.md lists all)")
