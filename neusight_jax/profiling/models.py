"""Whole models measured end to end: rows as `models/end_to_end.csv` has them, with a data card.

A model is what a Python file's function returns, or a torch model made from a config. It runs forward, and forward with
gradients, compiled or operation by operation.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pandas as pd
from rich.console import Console

from neusight_jax.datasets.row_checks import END_TO_END
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing
from neusight_jax.graph.configs.config import read_config, whole
from neusight_jax.graph.traced import source_file
from neusight_jax.profiling.clock import FEWEST_REPEATS, spread
from neusight_jax.profiling.machine import Machine, Reading, Sensors, find_machine, host_facts
from neusight_jax.profiling.run import begun_card, failure, make_backend, now, write_folder

MODES: dict[str, str] = {"inference": "inf", "training": "train"}
"""Modes, and their spelling in measurement files."""
EXECUTIONS: dict[str, str] = {"eager": "", "compiled": "fusion"}
"""Ways to run a model, and the `option` of its rows."""
WARM_UPS, MOST_REPEATS = 2, 50


def profile_models(
    models: Sequence[str],
    output: Path | str,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    modes: Sequence[str] = tuple(MODES),
    executions: Sequence[str] = tuple(EXECUTIONS),
    dtype: str = "fp32",
    seconds: float = 5.0,
    gpu: str | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure whole models and write them to a folder of the measurement schema.

    Args:
      models: `path/to/file.py:function` as `predict` takes it (a JAX function or NNX module, or a torch module), or
        names and config.json files, which run as torch models of `transformers`.
      output: folder to write, new or empty; batch_size, sequence_length: of models from configs.
      modes, executions: keys of `MODES` and `EXECUTIONS`; dtype: of models from configs.
      seconds: for each model, mode and execution, warm-up aside; gpu: as for `run.profile`.
      console: for progress.
    Returns: the data card.
    Raises: `InputError` for unknown names, a model that cannot be made, or when none could be measured.
    """
    for kind, names, choices in (("mode", modes, MODES), ("execution", executions, EXECUTIONS)):
        for name in names:
            if name not in choices:
                raise unknown_name(kind, name, choices)
    refuse_existing(output)
    console = console or Console(quiet=True)
    measured: list[dict[str, Any]] = []
    benches: dict[str, tuple[Machine, Sensors]] = {}
    versions: dict[str, str] = {}
    began, host = now(), host_facts()
    # A card is of one machine, so that all models of a framework share its backend and sensors.
    for model in models:
        for mode in modes:
            # Made for each mode, as some models have other heads when they train.
            target = _target(model, batch_size, sequence_length, mode, dtype)
            if target.framework not in benches:
                backend = make_backend(target.framework)
                benches[target.framework] = find_machine(backend, gpu), Sensors(wanted=not backend.is_cpu)
                versions |= backend.versions()
            for execution in executions:
                console.print(f"{model}: {mode}, {execution}", highlight=False)
                row = _measured(target, *benches[target.framework], mode, execution, seconds)
                if "reason" in row:
                    console.print(f"skipped {model}: {row['reason']}", highlight=False)
                measured.append(row)
    rows = [row for row in measured if "reason" not in row]
    skipped = [row for row in measured if "reason" in row]
    if not rows:
        raise InputError(f"no model could be measured; the first was skipped because it {skipped[0]['reason']}")
    machine, sensors = next(iter(benches.values()))
    facts = {"timing": "whole steps, each waited for; median over repeats, warm-up aside", "models": ", ".join(models)}
    facts["made_by"] = f"neusight-jax profile-model {' '.join(models)} --output DIR"
    card = begun_card(machine, sensors, versions, **facts)
    card |= {"began": began, "host": host, "rows": {"end_to_end": len(rows)}}
    return write_folder(Path(output), card, {f"models/{END_TO_END.file}": pd.DataFrame(rows)}, skipped, machine.file)


def _measured(
    target: Target, machine: Machine, sensors: Sensors, mode: str, execution: str, seconds: float
) -> dict[str, Any]:
    """A row of a model, or what it is and the reason why there is none."""
    workload: dict[str, Any] = {
        "device": machine.name,
        "model": target.model,
        "mode": MODES[mode],
        "sequence_length": target.sequence_length,
        "batch_size": target.batch_size,
        "option": EXECUTIONS[execution],
        "num_layers": target.layers,
    }
    try:
        made = torch_step if target.framework == "torch" else jax_step
        timing = _timed(made(target, mode == "training", execution == "compiled"), seconds, sensors)
    except InputError:
        raise
    except Exception as error:  # whatever a model raises when it is run
        return {**workload, "reason": failure(error)}
    finally:
        gc.collect()
    source = {"dtype": target.dtype, "backend": target.framework, "provenance": machine.provenance}
    return {**workload, **timing, **source}


def _target(model: str, batch_size: int | None, sequence_length: int | None, mode: str, dtype: str) -> Target:
    if not source_file.is_source(model):
        if sequence_length is None:
            raise InputError(f"{model}: say how many tokens with --sequence-length")
        return target_from_config(model, batch_size or 1, sequence_length, mode, dtype)
    if batch_size is not None or sequence_length is not None or dtype != "fp32":
        raise InputError(
            f"{model}: its example arguments say batch, lengths and dtypes; "
            "leave --batch-size, --sequence-length and --dtype out"
        )
    return target_from_source(model)


def _timed(step: Step, seconds: float, sensors: Sensors) -> dict[str, Any]:
    """Median seconds of a model, and how far its repeats lie apart; watts and clock of as many steps in a row."""
    for _ in range(WARM_UPS):
        step()
    steps: list[tuple[float, float | None]] = []
    while len(steps) < FEWEST_REPEATS or (
        len(steps) < MOST_REPEATS and sum(forward + (backward or 0.0) for forward, backward in steps) < seconds
    ):
        steps.append(step())
    totals = [forward + (backward or 0.0) for forward, backward in steps]
    # A step of JAX is one program: what its gradients take is what it takes beyond the forward pass.
    backward_s = None if steps[0][1] is None else statistics.median(backward or 0.0 for _, backward in steps)
    again = max(len(steps), math.ceil(sensors.window_s / statistics.median(totals)))
    reading = Reading() if sensors.source == "none" else sensors.while_running(lambda: [step() for _ in range(again)])
    return {
        "e2e_s": statistics.median(totals),
        "forward_s": statistics.median(forward for forward, _ in steps),
        "backward_s": backward_s if backward_s is not None and backward_s > 0.0 else None,
        "spread": spread(totals),
        "repeats": len(steps),
        **{name: getattr(reading, name) for name in ("power_w", "power_limit_w", "clock_hz")},
    }


# The models: what is run, and its arguments.

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
    call, args, kwargs = source_file.call_from_source(model)
    framework = "torch" if source_file.is_torch_module(call) else "jax"
    # A JAX function's first argument is its parameters, if there are others.
    inputs = args[1:] if framework == "jax" and len(args) > 1 else [*args, *kwargs.values()]
    shapes = [tuple(item.shape) for item in inputs if hasattr(item, "shape")]
    batch_size, sequence_length, *_ = (*next((shape for shape in shapes if shape), ()), 1, 1)
    return Target(
        model, framework, call, args, kwargs, batch_size=int(batch_size), sequence_length=int(sequence_length)
    )


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


# A step of a model: what is run and timed.

Step: TypeAlias = Callable[[], tuple[float, float | None]]
"""Runs a model once: seconds forward, and beyond the forward pass with gradients (None for inference)."""


def jax_step(target: Target, training: bool, compiled: bool) -> Step:
    """A step of a JAX function or flax NNX module.

    A training step is the forward pass and the gradients of all floating-point leaves of the first argument (of an NNX
    module: its own), of the mean of all outputs, or of the first output where that is a scalar. No optimizer step.

    Args:
      target: the model; shapes among its arguments are filled with random numbers, integers with ones.
      training: whether to take gradients; compiled: `jax.jit`, else operation by operation as plain Python runs it.
    """
    call, args = target.call, tuple(target.args)
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(call, nnx.Module):  # it holds its parameters itself
        definition, state = nnx.split(call)
        call, args = lambda state, *rest, **keywords: nnx.merge(definition, state)(*rest, **keywords), (state, *args)
    args, kwargs = jax.tree.map(_filled, (args, dict(target.kwargs)))

    def timed(run: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(*args, **kwargs))  # type: ignore[no-untyped-call]
        return time.perf_counter() - begin

    wrap: Callable[[Any], Any] = jax.jit if compiled else lambda function: function
    forward, both = wrap(call), wrap(with_gradients(call))
    if not training:
        return lambda: (timed(forward), None)
    if not args or not any(_trains(leaf) for leaf in jax.tree.leaves(args[0])):
        raise InputError(
            f"{target.model}: the first argument holds no floating-point array, so there is nothing to train; "
            "expected parameters first, or measure --mode inference"
        )

    def step() -> tuple[float, float]:
        forward_s = timed(forward)
        return forward_s, timed(both) - forward_s

    return step


def with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function's loss, and its slopes by the floating-point leaves of the first argument."""

    def step(first: Any, *rest: Any, **keywords: Any) -> Any:
        leaves, treedef = jax.tree.flatten(first)
        trained = [index for index, leaf in enumerate(leaves) if _trains(leaf)]

        def loss(values: list[Any]) -> Any:
            filled = list(leaves)
            for index, value in zip(trained, values, strict=True):
                filled[index] = value
            outputs = jax.tree.leaves(call(jax.tree.unflatten(treedef, filled), *rest, **keywords))
            if outputs and jnp.ndim(outputs[0]) == 0:
                return outputs[0]
            return sum(jnp.mean(out.astype(jnp.float32)) for out in outputs if _trains(out))

        return jax.value_and_grad(loss)([leaves[index] for index in trained])

    return step


def _trains(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _filled(leaf: Any) -> Any:
    """An array as it is, a shape as random numbers (integers as ones)."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return (0.02 * jax.random.normal(jax.random.key(0), leaf.shape, jnp.float32)).astype(leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)


def torch_step(target: Target, training: bool, compiled: bool) -> Step:
    """A step of a torch module: forward, and backward of all its parameters.

    Backward is of the mean of all floating-point outputs, or of the first output where that is a scalar; gradients add
    up from step to step, as in the published whole-model measurements. No optimizer step.

    Args:
      target: the model; parameters and arguments on the meta device are filled: random numbers, integers with ones.
      training: dropout on and gradients taken; compiled: `torch.compile`.
    """
    import torch
    from torch.utils import _pytree

    device, module = "cuda" if torch.cuda.is_available() else "cpu", target.call
    if any(parameter.is_meta for parameter in (*module.parameters(), *module.buffers())):
        module = _filled_module(module.to_empty(device=device))
    module = module.to(device).train(training)
    call: Callable[..., Any] = torch.compile(module) if compiled else module

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
        made = torch.randn if leaf.is_floating_point() else torch.ones
        return made(leaf.shape, dtype=leaf.dtype, device=device)

    args, kwargs = _pytree.tree_map(filled, (tuple(target.args), dict(target.kwargs)))

    def timed(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[float, Any]:
        # CUDA returns before a kernel has run: without waiting these were the seconds of its launch.
        wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        begin = time.perf_counter()
        out = run(*args, **kwargs)
        wait()
        return time.perf_counter() - begin, out

    def step() -> tuple[float, float | None]:
        with torch.set_grad_enabled(training):
            forward_s, outputs = timed(call, *args, **kwargs)
        if not training:
            return forward_s, None
        tensors = [out for out in _pytree.tree_leaves(outputs) if isinstance(out, torch.Tensor)]
        floats = [out for out in tensors if out.is_floating_point() and out.requires_grad]
        loss = floats[0] if floats[0].ndim == 0 else sum(out.float().mean() for out in floats)
        return forward_s, timed(loss.backward)[0]

    return step


def _filled_module(module: Any) -> Any:
    """Random parameters; buffers are ones, whole-number ones (positions, kinds of tokens) zeros."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)
        for buffer in module.buffers():
            buffer.fill_(1 if buffer.is_floating_point() or buffer.dtype == torch.bool else 0)
    return module
