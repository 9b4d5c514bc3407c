"""From a config and a workload to a `Graph`: the checks, the front door."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neusight_jax.arithmetic import dtype_bytes, dtype_index
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.configs import decoder, switch
from neusight_jax.graph.configs.adapters import Lora, lora_of
from neusight_jax.graph.configs.config import (
    Config,
    class_notes,
    language_config,
    load_model_config,
    positions_of,
    read_config,
    shown,
    whole,
)
from neusight_jax.graph.configs.decoder import MODEL_TYPES, read_decoder
from neusight_jax.graph.configs.eager_models import Respelled, record_bert, record_gpt2, record_opt
from neusight_jax.graph.configs.execution import (
    ATTENTIONS,
    ENGINES,
    EXECUTIONS,
    LLAMA_CPP,
    as_eager,
    as_llama_cpp,
)
from neusight_jax.graph.configs.requests import STEP_MODES, Lengths, one_or_all, requests
from neusight_jax.graph.configs.shard import EXPERTS, Shard
from neusight_jax.graph.configs.step import NARROW, Step, precision
from neusight_jax.graph.configs.tape import Tape, fuse
from neusight_jax.graph.graph import MODES, Graph
from neusight_jax.graph.kernel import FLASH
from neusight_jax.graph.keys import Keys, unread_notes
from neusight_jax.graph.optimizers import with_states
from neusight_jax.graph.quantization.gguf import mixture_of, mixture_types
from neusight_jax.graph.quantization.quantization import QUANTIZED, Quantization, has_quantization, read_quantization
from neusight_jax.graph.quantization.scheme import stored_as
from neusight_jax.tables import table
from neusight_jax.units import GIB

# Recorders of models by `model_type`: eager PyTorch models, and those that run with fused kernels.

ARCHITECTURES: dict[str, Callable[[Tape, Config, int, int], None]] = {
    "bert": record_bert,
    "roberta": record_bert,
    "gpt2": record_gpt2,
    "opt": record_opt,
    "switch_transformers": switch.record,
}
"""Recorders of eager PyTorch models by `model_type`. A new architecture is one new file and one line here."""


STEP_ARCHITECTURES: dict[str, Callable[..., None]] = {
    **dict.fromkeys(MODEL_TYPES, decoder.record),
    "vit": decoder.record_vit,
}
"""Recorders of models with fused kernels by `model_type`."""


def model_type(config: Config, supported: Mapping[str, Any] | None = None) -> str:
    """The `model_type` of a config; `InputError` when it is absent or not in `supported` (default: all there are)."""
    names = (*ARCHITECTURES, *STEP_ARCHITECTURES) if supported is None else tuple(supported)
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
    missing = table("graph.configs", "model_types")["missing"].get(str(kind))
    if missing is not None and supported is None:
        raise InputError(f"{config.name}: model_type {kind!r} is not supported: it has {missing}, not written here")
    near = difflib.get_close_matches(str(kind)[:60].lower(), names, n=3, cutoff=0.6)
    others = f"nearest: {', '.join(near)}" if near else f"expected one of {len(names)} such as {', '.join(names[:4])}"
    raise InputError(f"{config.name}: model_type {shown(kind)} is not supported; {others} (docs/graphs.md lists all)")


# Dtype and lengths of a workload where nobody says them: those of the config, and short ones.

USUAL_DTYPE = "bf16"
"""Dtype of a decoder whose config says none."""
USUAL_LENGTH = 2048
"""Tokens of a decoder's sequence, or as many as it has positions."""
EAGER_DTYPE = "fp32"
"""Dtype of all other models."""


def assumed_dtype(config: Config, dtype: str | None) -> tuple[str, list[str]]:
    """The dtype of a workload, and a note where it was assumed."""
    if dtype is not None:
        return dtype, []
    if config.values.get("model_type") not in MODEL_TYPES:
        return EAGER_DTYPE, []
    key = config.first("dtype", "torch_dtype")
    config_dtype = config.dtype(key)
    if config_dtype is None:
        return USUAL_DTYPE, [f"dtype {USUAL_DTYPE} assumed: the config says none"]
    return config_dtype, [f"dtype {config_dtype} assumed: the config's own"]


def assumed_length(
    config: Config, length: Lengths | None, mode: str, kv_length: Lengths | None
) -> tuple[Lengths, list[str]]:
    """The sequence length of a workload, and a note where it was assumed.

    Args:
      config: of the language model (`language_config`).
      length: as the caller states it, tokens; None = assume one.
      mode: one of `STEP_MODES`.
      kv_length: keys the last new token of a request sees, if stated; what is assumed for a prefill is no longer than
        the shortest of them.
    Raises: `InputError` for a model without a longest sequence whose length nobody states.
    """
    if length is not None:
        return length, []
    if config.values.get("model_type") not in MODEL_TYPES:
        longest = longest_of(config)
        if longest is None:
            raise InputError(f"{config.name} takes sequences of any length; say which with --sequence-length")
        return longest, []
    usual = min(USUAL_LENGTH, positions_of(config))
    if kv_length is not None and mode == "decode":
        return usual, []  # a decode reads its kv_length only
    if isinstance(kv_length, int) and not isinstance(kv_length, bool):
        usual = max(min(usual, kv_length), 1)
    elif isinstance(kv_length, Sequence):
        usual = max(min([usual, *(count for count in kv_length if isinstance(count, int))]), 1)
    return usual, [f"sequence length {usual:,} assumed"]


def longest_sequence(config: str | Path | Mapping[str, Any]) -> int | None:
    """Positions a model has, or None if it has no limit; `InputError` for an unusable config."""
    return longest_of(language_config(read_config(config)))


def longest_of(config: Config) -> int | None:
    """`longest_sequence` of a config that was read."""
    kind = model_type(config)
    if kind in MODEL_TYPES:
        read_decoder(config, 1)
        return positions_of(config)
    probe = config.like(config.values)  # its recorder knows the limit, and checks it
    if kind in STEP_ARCHITECTURES:
        STEP_ARCHITECTURES[kind](Step(requests(1, 1, "inference"), precision("fp32")), probe)
    else:
        ARCHITECTURES[kind](Tape(False, "fp32"), probe, 1, 1)
    return probe.longest


def is_eager(model: str) -> bool:
    """Whether a model of the catalog is recorded as eager PyTorch runs it, in fp32."""
    return load_model_config(model)["model_type"] in ARCHITECTURES


def graph_from_config(
    config: str | Path | Mapping[str, Any] | Config,
    batch_size: int = 1,
    sequence_length: Lengths | None = None,
    mode: str = "inference",
    dtype: str | None = None,
    fused: bool | None = None,
    *,
    kv_length: Lengths | None = None,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    optimizer: str | None = None,
    gradient_dtype: str = "fp32",
    lora: Lora | None = None,
    experts: str | None = None,
    execution: str | None = None,
    attention: str | None = None,
    engine: str | None = None,
) -> Graph:
    """Operator graph of a model from its config.

    Args:
      config: a catalog name (`list_models()`), the path of a config.json, or a mapping with Hugging Face keys; of
        other sizes `ModelShape.graph`.
      batch_size: sequences, or requests.
      sequence_length: of the input: one number, or for decoders one for each request. In mode "decode" each request has
        one new token, and this is the length of its sequence. If None, 2,048 for decoders, or as many positions as they
        have, and the longest of all other models.
      mode: "inference" (forward, all logits), "training" (forward and backward, gradients accumulated, no optimizer
        step); decoders also "prefill" and "decode", one step of a serving engine.
      dtype: of the arithmetic of matrix products, and of all tensors that nothing else is said of; if None, that of a
        decoder's config (bf16 if it says none), and fp32 of all other models. With fp8, fp4 or int8 products,
        activations are bf16; see `step.precision`.
      fused: merge elementwise chains as a compiler would (True), or run eager kernels (False); if None, eager kernels,
        but for a training step of GPT-2 in 16 bits, which runs the fused kernels of a training framework. Decoders and
        ViT run the fused kernels of their frameworks. An older way to say `execution`, for models recorded operator by
        operator.
      kv_length: keys the last new token of a request sees, itself included, where not `sequence_length`: one number or
        one for each request; modes "prefill" and "decode".
      weight_dtype: what weights of matrix products are stored in (`scheme.WEIGHT_DTYPES`, or a mixture of GGUF such as
        Q4_K_M), where not as the config's `quantization_config`, or else `dtype`, has it. Where narrower than `dtype`
        products widen them (weight-only).
      kv_dtype: of the KV cache, likewise.
      tensor_parallel, expert_parallel: devices the layers, and the experts, are split over; the graph is one device's
        part, with the sums over all of them. A training step that is split is a job (`nj.job_from_config`).
      optimizer: mode "training": the optimizer whose step follows (`optimizers.OPTIMIZERS`); None = there is none.
      gradient_dtype: mode "training": what gradients are kept in, for the memory; see `memory.training_bytes`.
      lora: mode "training", decoders: adapters that alone are trained (with a quantized model QLoRA); None = all
        weights are.
      experts: mode "training": how products of experts are launched, one of `shard.EXPERTS`; None = looped.
      execution: what runs the model, one of `execution.EXECUTIONS`; None = "engine" for decoders and ViT, and for all
        others PyTorch's kernels one by one, whose host takes no time. "eager" also counts the host: a step takes no
        less than launching its kernels.
      attention: one of `execution.ATTENTIONS`; None = "unfused" where `execution` is "eager", else "flash" in 16 bits.
      engine: of a decoder's forward step, one of `execution.ENGINES`; None = that of a server, llama.cpp for weights of
        GGUF.
    Raises: InputError for an unusable config or workload.
    """
    fused = _fused(fused, execution, attention)
    weight_dtype = weight_dtype or (lora.weight_dtype if lora else None)
    attention = attention or ("unfused" if execution == "eager" else None)
    options = {"kv_length": kv_length, "weight_dtype": weight_dtype, "kv_dtype": kv_dtype, "experts": experts}
    parsed = language_config(read_config(config))
    kind = model_type(parsed)
    if dtype is not None and not has_quantization(parsed.values) and dtype != _stored_dtype(parsed):
        parsed.stored_bytes = None  # other weights are asked for than the files have
    engine, dtype, engine_notes = _engine(parsed, engine, execution, mode, dtype, weight_dtype)
    dtype, notes = assumed_dtype(parsed, dtype)
    notes = [*engine_notes, *notes]
    sequence_length, more = assumed_length(parsed, sequence_length, mode, kv_length)
    parsed.notes = [*notes, *more, *parsed.notes]
    # Training frameworks run GPT-2 in 16 bits with the fused kernels of a decoder.
    trained_fused = mode == "training" and fused is None and (dtype != EAGER_DTYPE or lora)
    if kind == "gpt2" and (trained_fused or execution == "engine"):
        parsed = Respelled(parsed)
        kind = model_type(parsed)
    if kind in STEP_ARCHITECTURES:
        lora = _adapters(parsed, kind, mode, lora)
        devices = (whole("tensor_parallel", tensor_parallel), whole("expert_parallel", expert_parallel))
        graph = _step_graph(parsed, kind, batch_size, sequence_length, mode, dtype, options, devices, lora)
        graph = _as_executed(graph, kind, engine, execution, attention)
    else:
        split = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
        split = {name: devices for name, devices in split.items() if devices != 1}
        refused = {**options, "lora": lora, **split}
        graph = _recorded(parsed, kind, batch_size, sequence_length, mode, dtype, fused, execution, attention, refused)
    return with_states(graph, optimizer, gradient_dtype)


def _as_executed(graph: Graph, kind: str, engine: str | None, execution: str | None, attention: str | None) -> Graph:
    """A step of a server's fused kernels as llama.cpp or eager PyTorch runs it, where one of them is asked for."""
    if engine == LLAMA_CPP:
        return as_llama_cpp(graph)
    if execution != "eager":
        return graph
    if graph.mode == "training" and graph.dtype in NARROW:
        raise InputError(
            f"{graph.name}: PyTorch by itself trains in 16 bits or wider, not {graph.dtype}; leave execution "
            "out, for the kernels of a training framework"
        )
    return as_eager(graph, kind, attention=attention)


def _recorded(
    parsed: Config,
    kind: str,
    batch_size: int,
    sequence_length: Any,
    mode: str,
    dtype: str,
    fused: bool | None,
    execution: str | None,
    attention: str | None,
    refused: Mapping[str, Any],
) -> Graph:
    """The graph of a model that is recorded operator by operator, as PyTorch runs it.

    Args:
      parsed, kind, batch_size, sequence_length, mode, dtype, fused, execution, attention: as of `graph_from_config`.
      refused: options that these models do not have; any but None is an error.
    """
    if execution == "engine":
        raise InputError(f"{parsed.name}: engines run decoders; for {kind} expected execution eager or compiled")
    _refuse_for_eager(parsed, kind, mode, refused)
    batch, sequence = whole("batch_size", batch_size), whole("sequence_length", sequence_length)
    if mode not in MODES:
        raise InputError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    tape = Tape(mode == "training", dtype, attention)
    ARCHITECTURES[kind](tape, parsed, batch, sequence)
    graph = eager_graph(parsed, tape, batch, sequence, fused=bool(fused))
    trained = kind == "gpt2" and mode == "training" and dtype == EAGER_DTYPE
    return replace(graph, launched="eager" if trained or execution == "eager" else "host")


def _fused(fused: bool | None, execution: str | None, attention: str | None) -> bool | None:
    """`fused` as `execution` has it; `InputError` for names nobody knows, and for both at once."""
    for what, name, names in (("execution", execution, EXECUTIONS), ("attention", attention, ATTENTIONS)):
        if name is not None and name not in names:
            raise unknown_name(what, name, names)
    if attention is not None and execution != "eager":
        raise InputError(f"attention {attention} is a choice of eager execution; give execution eager too")
    if execution is None:
        return fused
    if fused is not None:
        raise InputError(f"execution is {execution} and fused is {fused}: both say how it runs; leave fused out")
    return None if execution == "engine" else execution == "compiled"


def _engine(
    config: Config, engine: str | None, execution: str | None, mode: str, dtype: str | None, weight_dtype: str | None
) -> tuple[str | None, str | None, list[str]]:
    """Engine and dtype of a step, and notes on both; `InputError` for an engine that does not run it.

    llama.cpp runs weights of GGUF, in fp16 beside them.
    """
    stated = config.values.get("quantization_config")
    in_file = weight_dtype is None and isinstance(stated, Mapping) and stated.get("quant_method") == "gguf"
    packed = mixture_of(weight_dtype) is not None or in_file
    if engine is not None and engine not in ENGINES:
        raise InputError(f"engine is {engine!r}, expected {LLAMA_CPP}, or none for that of a server")
    if not packed and engine is None:
        return None, dtype, []
    if execution not in (None, "engine") or mode == "training" or config.values.get("model_type") not in MODEL_TYPES:
        raise InputError(f"{config.name}: {LLAMA_CPP} runs forward steps of decoders; leave engine and execution out")
    notes = [] if engine else [f"engine {LLAMA_CPP} assumed: weights of GGUF"]
    if dtype is None and not in_file:
        notes.append(f"dtype fp16 assumed: {LLAMA_CPP}'s beside packed weights")
    return LLAMA_CPP, dtype or "fp16", notes


def _stored_dtype(config: Config) -> str | None:
    """Dtype of the weights' files, as the config says."""
    return config.dtype(config.first("dtype", "torch_dtype"))


def _adapters(config: Config, kind: str, mode: str, lora: Lora | None) -> Lora | None:
    """Adapters that are asked for, or those beside the config where it is trained; with a note."""
    if not config.has("adapter_config"):
        return lora
    part, name = config.part("adapter_config"), "adapter_config.json"
    part.values.settle("peft_type", "target_modules", "r")
    if lora is not None:
        config.notes.append(f"adapters as asked for, in place of those of {name}")
        return lora
    if mode != "training":
        config.notes.append(f"adapters of {name} are taken as merged into the weights: no time, no memory of their own")
        return None
    # The names of products are known only once a step is written.
    probe = Step(requests(1, 1, mode), precision("bf16"), mode, lora=Lora(1))
    STEP_ARCHITECTURES[kind](probe, config.like(config.values))
    lora = lora_of(part, kind, dict.fromkeys(probe.adapted))
    config.notes.append(f"adapters of rank {lora.rank} on {', '.join(lora.targets) or 'all products'}, as {name} says")
    return lora


def eager_graph(config: Config, tape: Tape, batch_size: int, sequence_length: int, *, fused: bool = False) -> Graph:
    """The graph of what a tape holds.

    Args:
      config: the one the tape was recorded from: its name, and notes on keys that were not read.
      tape: a recorded pass.
      batch_size: sequences, for the graph's description; the nodes have it in their shapes.
      sequence_length: tokens of a sequence, likewise.
      fused: whether elementwise chains are merged as a compiler would.
    """
    nodes = fuse(tape.nodes) if fused else tape.nodes
    return Graph(
        name=config.name,
        nodes=tuple(node for node in nodes if any(node.phases)),
        mode="training" if tape.training else "inference",
        dtype=tape.dtype,
        batch_size=batch_size,
        sequence_length=sequence_length,
        fused=fused,
        notes=(*config.notes, *reading_notes(config, float(tape.parameters) * dtype_bytes(tape.dtype))),
        parameters=tape.parameters,
    )


def _refuse_for_eager(config: Config, kind: str, mode: str, options: Mapping[str, Any]) -> None:
    """`InputError` for what only decoders have."""
    if mode in STEP_MODES and mode not in MODES:
        raise InputError(
            f"{config.name}: mode {mode} is for decoders such as llama or qwen3; {kind} has inference and training"
        )
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{config.name}: {name} is for decoders; leave it out for {kind}")
    if has_quantization(config.values):
        raise InputError(f"{config.name}: its quantization_config is read for decoders only; take it out for {kind}")


def _check_step(
    config: Config, kind: str, mode: str, dtype: str, options: Mapping[str, Any], split: tuple[int, int]
) -> None:
    """`InputError` for a step of a model with fused kernels that it does not have."""
    weight_dtype, experts = options["weight_dtype"], options["experts"]
    allowed = MODES if kind == "vit" else STEP_MODES
    if mode not in allowed:
        raise InputError(f"mode is {mode!r}, expected one of {', '.join(allowed)}")
    if kind == "vit" and split != (1, 1):
        raise InputError(f"{config.name}: tensor_parallel and expert_parallel are for decoders; leave them out for vit")
    if mode == "training" and split != (1, 1):
        raise InputError(
            f"{config.name}: a training step over several GPUs is a job; expected job_from_config with a layout such "
            "as Parallelism(tensor=8)"
        )
    if experts is not None and (mode != "training" or experts not in EXPERTS):
        raise InputError(f"experts is {experts!r}, expected {' or '.join(EXPERTS)}, with mode training")
    for name in (dtype, options["kv_dtype"]):
        if name is not None:
            dtype_index(name)
    if weight_dtype is not None and mixture_of(weight_dtype) is None:
        stored_as(weight_dtype)


def _step_graph(
    config: Config,
    kind: str,
    batch_size: int,
    sequence_length: Lengths,
    mode: str,
    dtype: str,
    options: Mapping[str, Any],
    split: tuple[int, int],
    lora: Lora | None,
) -> Graph:
    """The graph of a step with fused kernels; `options`: arguments of `graph_from_config` that decoders alone have."""
    _check_step(config, kind, mode, dtype, options, split)
    weight_dtype, experts = options["weight_dtype"], options["experts"]
    batch = requests(batch_size, sequence_length, mode, options["kv_length"])
    # The catalog has models as they are published, some of them quantized after training.
    if mode == "training" and config.catalog and weight_dtype is None:
        config = unquantized(config)
    quantization = quantization_of(config, weight_dtype)
    dtypes = precision(dtype, weight_dtype, options["kv_dtype"], quantization)
    unwritten = quantization or lora or split != (1, 1) or dtypes.activations not in FLASH
    if config.shape is not None and config.shape.is_traced and unwritten:
        raise InputError(
            f"{config.name}: traced sizes are of activations in 16 bits on one GPU, without adapters, and of weights "
            "stored all alike; expected dtype bf16, say, and weight_dtype where the config is quantized"
        )
    trained = mode == "training" and kind in MODEL_TYPES
    shard = Shard(grouped_experts=experts == "grouped") if trained else None
    step = Step(batch, dtypes, mode, quantization, shard=shard, lora=lora)
    STEP_ARCHITECTURES[kind](step, config, *split)
    if lora is not None:
        lora.check(step.adapted)
    footprint = step.footprint()
    if trained and weight_dtype is None and quantization is None:  # two bytes at least, whatever its products run in
        footprint = replace(footprint, weights=max(dtype_bytes(step.precision.products), 2.0) * step.parameters)
    figures = {
        "new_tokens": one_or_all(batch.queries),
        "kv_length": one_or_all(batch.context),
        "weight_dtype": "/".join(scheme.name for scheme in step.ledger.schemes) or step.precision.weights,
        "quantization": None if quantization is None else quantization.method,
        "kv_dtype": step.precision.kv_cache,
        "tensor_parallel": split[0],
        "expert_parallel": split[1],
        **{key: value for key, value in (("lora", lora and lora.values()), ("experts", experts)) if value is not None},
    }
    return Graph(
        name=config.name,
        nodes=tuple(step.nodes),
        mode=mode,
        dtype=step.precision.products,
        batch_size=len(batch.queries),
        sequence_length=max(batch.context),
        fused=True,
        tokens=batch.tokens,
        footprint=footprint,
        options=figures,
        notes=(
            *config.notes,
            *reading_notes(config, step.parameter_bytes if split == (1, 1) and weight_dtype is None else None),
            *step.weight_notes(weight_dtype, has_quantization(config.values)),
        ),
        parameters=step.parameters,
        trained=step.trained,
        context_bytes=step.context_bytes if step.serving else 0.0,
        launched="eager" if trained else "graph",
    )


def quantization_of(config: Config, weight_dtype: str | None) -> Quantization | None:
    """Quantization that a config states, or a mixture of GGUF that a `weight_dtype` names; None where there is none."""
    if weight_dtype is None:
        return read_quantization(config.name, config.values)
    config.values.settle(*QUANTIZED)
    mixture = mixture_of(weight_dtype)
    if mixture is None:
        return None
    kind = str(config.values.get("model_type"))
    types = mixture_types(mixture, _mixed_sizes(config), config.flag("tie_word_embeddings", kind.startswith("gemma")))
    kept = {key: config.values.get(key) for key in ("model_type", "num_hidden_layers")}
    section = {"quant_method": "gguf", "tensors": list(types.items())}
    quantization = read_quantization(config.name, {**kept, "quantization_config": section})
    return quantization and replace(quantization, method=mixture)


def _mixed_sizes(config: Config) -> dict[str, int]:
    """Sizes of a decoder that decide the types of its tensors (`gguf.mixture_types`)."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads", 1)
    experts = config.first("num_experts", "num_local_experts", "n_routed_experts")
    inner = config.first("moe_intermediate_size", "intermediate_size")
    return {
        "layers": config.layers(),
        "hidden": hidden,
        "inner": config.size(inner, hidden),
        "attended": heads * config.size("head_dim", max(hidden // heads, 1)),
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads", heads),
        "experts": config.size(experts, 1),
    }


def unquantized(config: Config) -> Config:
    """A config as its model is trained: before its weights were quantized, with a note; itself where they are not."""
    if not has_quantization(config.values):
        return config
    config.values.settle(*QUANTIZED)
    plain = Keys({key: value for key, value in config.values.items() if key not in QUANTIZED}, config.values)
    note = "quantized as published, for inference; training is of the weights before quantization"
    return config.like(plain, notes=(note,))


def reading_notes(config: Config, weight_bytes: float | None = None) -> tuple[str, ...]:
    """Notes on what a config left to its class, keys that were not read, and weights not as large as their files.

    Args:
      config: all of which was read; weight_bytes: of the whole model in the dtype of its files, if they were counted.
    """
    return (*class_notes(config), *unread_notes(config.origin), *_stored_notes(config, weight_bytes))


STORED_WITHIN = 0.02
"""Weights counted may differ so much from those stored, relatively, before a note says so."""


def _stored_notes(config: Config, counted: float | None) -> tuple[str, ...]:
    stored = config.stored_bytes
    if stored is None or counted is None:
        return ()
    # Some files hold a tied head beside the embedding.
    sizes = [config.values.get(key) for key in ("vocab_size", "hidden_size")]
    table = math.prod(size for size in sizes if isinstance(size, int)) * dtype_bytes(_stored_dtype(config) or "fp32")
    if any(abs(have / stored - 1.0) <= STORED_WITHIN for have in (counted, counted + table)):
        return ()
    return (
        f"the files beside the config hold {stored / GIB:.2f} GiB of weights, counted are {counted / GIB:.2f} "
        f"({counted / stored - 1.0:+.1%}): something is in one and not in the other",
    )
