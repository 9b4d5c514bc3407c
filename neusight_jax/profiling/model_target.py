"""Whole models to be measured: what a Python file's function returns, or a torch model made from a config."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.config import read_config, whole
from neusight_jax.graph.traced import source_file

LAYER_KEYS: tuple[str, ...] = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Target:
    """A model and the arguments it is run on.

    Attributes:
      model: as given; framework: "jax" or "torch".
      call: a JAX function, or a torch module; args, kwargs: what it is called with, arrays or their shapes.
      layers: transformer layers, where a config says; dtype: of a config's model, or "" (the arguments say).
      batch_size, sequence_length: of the input, as far as its shape tells (batch, tokens, ...).
    """

    model: str
    framework: str
    call: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    layers: int | None = None
    dtype: str = ""
    batch_size: int = 1
    sequence_length: int = 1


def target_from_source(model: str) -> Target:
    """Target from what `path/to/file.py:function` returns for `predict`: (callable, arguments[, keyword arguments])."""
    path, _, function = model.rpartition(":")
    made = source_file._call(Path(path), function)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise InputError(f"{model} returned {source_file._described(made)}, {source_file.WANTED}")
    call, args, kwargs = made[0], made[1], made[2] if len(made) == 3 else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        raise InputError(f"{model} returned {source_file._described(made)}, {source_file.WANTED}")
    framework = "torch" if source_file._is_torch_module(call) else "jax"
    # A JAX function's first argument is its parameters, if there are others.
    inputs = args[1:] if framework == "jax" and len(args) > 1 else [*args, *kwargs.values()]
    batch_size, sequence_length = _sizes(inputs)
    return Target(
        model, framework, call, tuple(args), dict(kwargs), batch_size=batch_size, sequence_length=sequence_length
    )


def _sizes(inputs: Any) -> tuple[int, int]:
    shapes = [tuple(item.shape) for item in inputs if hasattr(item, "shape")]
    first = next((shape for shape in shapes if shape), (1,))
    return int(first[0]), int(first[1]) if len(first) > 1 else 1


def target_from_config(model: str, batch_size: int, sequence_length: int, mode: str, dtype: str = "fp32") -> Target:
    """A torch model of `transformers` with random weights.

    Heads as in the measurements of whole models that are published: BERT classifies in inference and is pre-trained in
    training; the others model language. Attention is eager, nothing is kept for later tokens.

    Args:
      model: a catalog name, or the path of a config.json.
      batch_size: sequences.
      sequence_length: tokens of a sequence.
      mode: "inference" or "training"; it decides the heads of BERT and RoBERTa.
      dtype: of weights and activations: fp32, bf16 or fp16.
    Raises: `InputError` for an unknown model, or when torch or transformers is not installed.
    """
    batch, tokens = whole("batch_size", batch_size), whole("sequence_length", sequence_length)
    config = read_config(model)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(f"{model} needs torch and transformers to run ({error}); or give file.py:function") from None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in dtypes:
        raise InputError(f"{model}: dtype {dtype!r} cannot be run as a whole model; expected {', '.join(dtypes)}")
    kind = str(config.values.get("model_type"))
    heads = {
        "bert": "BertForSequenceClassification" if mode == "inference" else "BertForPreTraining",
        "roberta": "RobertaForSequenceClassification" if mode == "inference" else "RobertaForMaskedLM",
        "switch_transformers": "SwitchTransformersForConditionalGeneration",
    }
    made: Any = transformers
    try:
        values = {key: value for key, value in config.values.items() if key != "model_type"}
        settings = made.AutoConfig.for_model(kind, **values)
        settings.use_cache, settings._attn_implementation = False, "eager"
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            head = getattr(made, heads[kind]) if kind in heads else None
            module = head(settings) if head else made.AutoModelForCausalLM.from_config(settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{model}: transformers cannot build it ({str(error).splitlines()[0][:200]})") from None
    ids = torch.ones((batch, tokens), dtype=torch.long, device="meta")
    kwargs = {"input_ids": ids, **({"decoder_input_ids": ids} if kind == "switch_transformers" else {})}
    layers = next((int(config.values[key]) for key in LAYER_KEYS if key in config.values), None)
    return Target(model, "torch", module.to(dtypes[dtype]), (), kwargs, layers, dtype, batch, tokens)


def is_nnx_module(call: Any) -> bool:
    """Whether a callable is a flax NNX module, which holds its parameters itself."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(call, nnx.Module)
