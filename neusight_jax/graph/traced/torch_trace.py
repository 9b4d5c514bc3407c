"""A PyTorch module as an aten graph: exported on fake tensors, with its backward pass where it trains.

Operators are written as a GPU would run them, where torch runs others on a CPU:

- `scaled_dot_product_attention` is one operator and one for its gradient. On a CPU torch takes it apart.
- Recurrences (`nn.LSTM`, `nn.GRU`, `nn.RNN`) of many steps run a few: the others repeat them, and are counted.
- Autocast computes more operators in fp32: those of "CUDA Ops that can autocast to float32" (PyTorch, Automatic Mixed
  Precision package).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError
from neusight_jax.graph.traced.operation import operators

if TYPE_CHECKING:
    import torch

NOT_RECOMPUTED = (
    "activation checkpointing is not followed: what the backward pass computes again is not in the time, "
    "and activations are those of a step without it"
)
VALUES_ASKED = (
    "it asks for the value of a tensor (`.item()`, `.tolist()`, `int(...)`, an `if` on it), and only shapes are there; "
    "make the number in Python before the forward pass, or use `torch.where` or `torch.cond` for the `if`"
)
_CHECKPOINTING = "_checkpoint_without_reentrant_generator"
WEIGHTS, INPUTS = "weights", "inputs"
"""Starts of the names of placeholders: parameters, and the inputs' tensors; the others are buffers."""

RECURRENCES: frozenset[str] = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
SHORT_STEPS, LONGER_STEPS, LONG_STEPS = 5, 7, 16
"""Steps that a recurrence of more than `LONG_STEPS` is traced with, twice: the first and last step differ from the
rest. Both are primes, as arrays of so many steps should not look like those of so many layers."""
AUTOCAST_FP32 = operators("aten", "autocast_fp32")


def aten_graph(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool,
    name: str,
    steps: dict[int, int],
) -> tuple[torch.fx.Graph, set[str] | None, tuple[str, ...]]:
    """The aten graph of a forward pass, or of a forward and backward pass with the names of the forward part; notes.

    Args:
      module: on any device, the meta device too.
      args: positional example inputs; only shapes and dtypes count.
      kwargs: named ones.
      training: whether gradients of all parameters that require one are traced as well.
      name: of the module, for errors.
      steps: number of steps of a recurrence -> steps it is traced with (`_shortened`).
    Raises: `InputError` where the module cannot be exported, or nothing in it requires a gradient.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.fx.traceback import preserve_node_meta
    from torch.utils import _pytree

    _register_caches()
    try:
        with torch.set_grad_enabled(training), _checkpoints() as recomputed, _shortened(steps):
            program, args, kwargs = _exported(module, args, kwargs)
        exported = program.module(check_guards=False)
        leaves, _ = _pytree.tree_flatten((args, kwargs))
        interpreted = _interpreted(exported)
        parameters = {key: _like(value, training) for key, value in interpreted.named_parameters()}
        buffers = dict(interpreted.named_buffers())
        forward: set[str] = set()

        def run(weights: Any, state: Any, inputs: Any) -> Any:
            out = torch.func.functional_call(interpreted, {**weights, **state}, tuple(inputs))
            tensors = [leaf for leaf in _pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            if not training:
                return tensors
            proxy: Any = get_proxy_mode()
            forward.update(node.name for node in proxy.tracer.graph.nodes)
            wanted = [leaf for leaf in tensors if leaf.requires_grad]
            if wanted and wanted[0].ndim == 0:
                wanted = wanted[:1]  # a loss
            learned = [leaf for leaf in weights.values() if leaf.requires_grad]
            if not wanted or not learned:
                raise InputError(f"{name}: nothing in it requires a gradient; expected parameters that do")
            ones = [torch.empty_like(leaf) for leaf in wanted]
            return torch.autograd.grad(wanted, learned, ones, allow_unused=True)

        with preserve_node_meta(), torch.set_grad_enabled(training):
            traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(parameters, buffers, leaves)
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        wanted = VALUES_ASKED if re.search("data-dependent|meta tensor", reason) else "expected the inputs it takes"
        raise InputError(
            f"{name}: torch.export cannot trace it ({type(error).__name__}: {reason}); {wanted}"
        ) from error
    notes = (NOT_RECOMPUTED,) if training and recomputed else ()
    return traced.graph, forward if training else None, notes


@contextmanager
def _checkpoints() -> Iterator[list[bool]]:
    """Note every run of `torch.utils.checkpoint` inside; the export does not keep it."""
    from torch.utils import checkpoint

    calls: list[bool] = []

    def noted(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(True)
            return run(*args, **kwargs)

        return call

    runs = {name: item for name, item in vars(checkpoint).items() if name.startswith(_CHECKPOINTING)}
    apply = checkpoint.CheckpointFunction.apply
    vars(checkpoint).update({name: noted(item) for name, item in runs.items()})
    checkpoint.CheckpointFunction.apply = noted(apply)
    try:
        yield calls
    finally:
        vars(checkpoint).update(runs)
        del checkpoint.CheckpointFunction.apply


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The exported program and the inputs it was exported with.

    Some code asks what the meta device cannot answer (autocast, in transformers before 5), and torch says so by errors
    of any type; autocast does nothing on it, and convolutions there forget how images lie. A module on that device is
    then traced as if on a CPU. What fails there is the error.
    """
    import torch

    leaves = [leaf for leaf in (*module.parameters(), *module.buffers()) if leaf.is_meta]
    on_meta, laid_out = bool(leaves), any(map(_channels_last, leaves))
    with _autocast_on_cpu() as cast:
        try:
            program = torch.export.export(module, args, kwargs, strict=False)
            if not ((cast or laid_out) and on_meta):
                return program, args, kwargs
        except Exception:
            if not on_meta:
                raise
        module, args, kwargs = _as_on_cpu(module, args, kwargs)
        return torch.export.export(module, args, kwargs, strict=False), args, kwargs


def _channels_last(tensor: torch.Tensor) -> bool:
    """Whether the channels of a filter are its innermost axis, and could be another."""
    return tensor.ndim in (4, 5) and not tensor.is_contiguous() and tensor.stride(1) == 1


@contextmanager
def _autocast_on_cpu() -> Iterator[list[bool]]:
    """`torch.autocast` of any device as that of the CPU, which the fake tensors are on; notes whether there was one."""
    import torch

    entered: list[bool] = []
    plain = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        """Enter autocast of the CPU in place of that of a device.

        Args: as of `torch.autocast`.
        """
        if enabled:
            entered.append(True)
        # Without a dtype the CPU would cast to bf16.
        if dtype is None and device_type == "cuda":
            dtype = torch.float16  # what torch casts to there
        plain(self, "cpu", dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        torch.autocast.__init__ = plain  # type: ignore[method-assign]


def _as_on_cpu(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A module on the meta device and its inputs as fake tensors that say they are on a CPU; shared weights stay so."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree

    with FakeTensorMode(allow_non_fake_inputs=True):

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
                return leaf
            like = torch.empty_like(leaf, device="cpu")
            return torch.nn.Parameter(like, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else like

        copies = {id(leaf): moved(leaf) for leaf in (*module.parameters(), *module.buffers())}
        return copy.deepcopy(module, copies), *_pytree.tree_map(moved, (args, kwargs))


def _interpreted(exported: Any) -> Any:
    """A module that runs an exported program operator by operator, so that the trace keeps the names of its modules.

    The trace then has what a GPU would be given to do.
    """
    import torch

    class AsOnGpu(torch.fx.Interpreter):  # type: ignore[misc, unused-ignore]
        def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = getattr(getattr(target, "overloadpacket", target), "__name__", "")
            if name == "wrap_with_autocast":
                _, dtype, enabled, _, region, *operands = args
                with torch.autocast("cpu", dtype, enabled):
                    return AsOnGpu(region).run(*operands)
            if name == "wrap_with_set_grad_enabled":
                enabled, region, *operands = args
                with torch.set_grad_enabled(enabled):
                    return AsOnGpu(region).run(*operands)
            if name == "_assert_tensor_metadata":  # of the dtypes a CPU would compute in
                return None
            cast = torch.is_autocast_enabled("cpu")
            if name == "scaled_dot_product_attention":
                return _attention(args, kwargs, torch.get_autocast_dtype("cpu") if cast else None)
            if cast and name in AUTOCAST_FP32:
                floats = [isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in args]
                args = tuple(leaf.float() if is_float else leaf for leaf, is_float in zip(args, floats, strict=True))
            return super().call_function(target, args, kwargs)

    class Interpreted(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.exported = exported

        def forward(self, *leaves: Any) -> Any:
            return AsOnGpu(self.exported).run(*leaves, enable_io_processing=False)

    return Interpreted()


def _like(parameter: torch.Tensor, training: bool) -> torch.Tensor:
    wanted = training and parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
    return parameter.detach().requires_grad_(wanted)


def _shortened(steps: dict[int, int]) -> Any:
    """A context in which recurrences of many steps run over fewer, with results of all steps.

    `steps`: number of steps of a recurrence -> steps it is traced with; those it has not are added.
    """
    from torch.overrides import TorchFunctionMode

    class Shortened(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Packed sequences have other arguments; the last is whether the batch comes first.
            recurs = getattr(func, "__name__", "") in RECURRENCES and isinstance(args[3], bool)
            axis = 1 if recurs and args[-1] and args[0].ndim > 2 else 0
            length = args[0].shape[axis] if recurs else 0
            if length <= LONG_STEPS:
                return func(*args, **(kwargs or {}))
            resized = _resized()
            out, *states = func(resized(args[0], axis, steps.setdefault(length, SHORT_STEPS)), *args[1:])
            return (resized(out, axis, length), *states)

    return Shortened()


@cache
def _resized() -> Any:
    """A tensor with another number of steps, as an operator that launches nothing, registered with its gradient."""
    import torch

    made = torch.library.custom_op(
        "neusight_jax::resized", _shapes_only, mutates_args=(), schema="(Tensor steps, int axis, int length) -> Tensor"
    )

    def saved(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.axis, ctx.length = inputs[1], inputs[0].shape[inputs[1]]

    def empty(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
        """An array in the same order in memory."""
        order = sorted(range(x.ndim), key=lambda at: -x.stride()[at])
        like = x.new_empty([length if at == axis else x.shape[at] for at in order])
        return like.permute([order.index(at) for at in range(x.ndim)])

    made.register_fake(empty)
    made.register_autograd(lambda ctx, result: (made(result, ctx.axis, ctx.length), None, None), setup_context=saved)
    return made


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> torch.Tensor:
    """Attention with the arguments of `scaled_dot_product_attention`; `dtype`: what its operands are cast to."""
    arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    operands = [arguments[name] if dtype is None else arguments[name].to(dtype) for name in ("query", "key", "value")]
    made: torch.Tensor = _operator()(*operands, bool(arguments.get("is_causal", False)))
    return made


def _shapes_only(*_: Any) -> Any:
    raise NotImplementedError("for tensors without values")


@cache
def _operator() -> Any:
    """Attention as an operator, registered with its gradient."""
    import torch

    operands = "Tensor query, Tensor key, Tensor value, bool causal"
    forward = torch.library.custom_op(
        "neusight_jax::attention", _shapes_only, mutates_args=(), schema=f"({operands}) -> Tensor"
    )
    backward = torch.library.custom_op(
        "neusight_jax::attention_backward",
        _shapes_only,
        mutates_args=(),
        schema=f"(Tensor gradient, {operands}) -> (Tensor, Tensor, Tensor)",
    )

    def saved(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.causal = inputs[3]

    def gradient(ctx: Any, result: torch.Tensor) -> Any:
        return *backward(result, *ctx.saved_tensors, ctx.causal), None

    def empty(like: torch.Tensor, width: int) -> torch.Tensor:
        """An array as FlashAttention lays it out: all heads of a token together."""
        *outer, tokens = like.shape[:-1]
        if not outer:
            return like.new_empty((tokens, width))
        return like.new_empty((*outer[:-1], tokens, outer[-1], width)).transpose(-3, -2)

    forward.register_fake(lambda query, key, value, _: empty(query, value.shape[-1]))
    backward.register_fake(lambda _, *operands: tuple(empty(tensor, tensor.shape[-1]) for tensor in operands[:3]))
    forward.register_autograd(gradient, setup_context=saved)
    return forward


# Key-value caches of transformers as trees of tensors, so that a module that takes or returns one can be exported.


def _register_caches() -> None:
    """Tell torch how the caches of transformers are made of tensors; nothing where transformers is not in use."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return
    from torch.utils import _pytree

    wanted = tuple(vars(library)[name] for name in ("Cache", "EncoderDecoderCache") if hasattr(library, name))
    for kind in vars(library).values():
        if isinstance(kind, type) and issubclass(kind, wanted) and kind not in _pytree.SUPPORTED_NODES:
            _pytree.register_pytree_node(kind, _flat, _rebuilt, flatten_with_keys_fn=_flat_with_keys)


def _places(cache: Any) -> list[tuple[int, str]]:
    """Where a cache has tensors, or caches: (layer, attribute), layer -1 for its own attributes."""
    import torch

    owners = [(-1, cache), *enumerate(getattr(cache, "layers", ()))]
    return [
        (at, name)
        for at, owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, torch.Tensor) or name.endswith("_attention_cache")
    ]


def _flat(cache: Any) -> tuple[list[Any], tuple[Any, list[tuple[int, str]]]]:
    places = _places(cache)
    return [getattr(cache if at < 0 else cache.layers[at], name) for at, name in places], (cache, places)


def _flat_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, list[tuple[int, str]]]]:
    from torch.utils._pytree import MappingKey

    values, context = _flat(cache)
    return [(MappingKey(place), value) for place, value in zip(context[1], values, strict=True)], context


def _rebuilt(values: Any, context: tuple[Any, list[tuple[int, str]]]) -> Any:
    """A copy of the cache with these tensors; the one it was made from stays as it is."""
    cache, places = context
    made = copy.copy(cache)
    if hasattr(cache, "layers"):
        made.layers = [copy.copy(layer) for layer in cache.layers]
    for (at, name), value in zip(places, values, strict=True):
        setattr(made if at < 0 else made.layers[at], name, value)
    return made
