"""Operators of a trace as a GPU would run them, where torch runs others on a CPU.

- `scaled_dot_product_attention` is one operator and one for its gradient. On a CPU torch takes it apart.
- Recurrences (`nn.LSTM`, `nn.GRU`, `nn.RNN`) of many steps run a few: the others repeat them, and are counted.
- Autocast computes more operators in fp32: those of "CUDA Ops that can autocast to float32" (PyTorch, Automatic Mixed
  Precision package).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from neusight_jax.graph.traced.operation import operators

if TYPE_CHECKING:
    import torch

RECURRENCES: frozenset[str] = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
SHORT_STEPS, LONGER_STEPS, LONG_STEPS = 5, 7, 16
"""Steps that a recurrence of more than `LONG_STEPS` is traced with, twice: the first and last step differ from the
rest. Both are primes, as arrays of so many steps should not look like those of so many layers."""
AUTOCAST_FP32 = operators("aten", "autocast_fp32")


def as_on_gpu(program: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Run an exported program operator by operator; the trace then has what a GPU would be given to do."""
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
                args = tuple(leaf.float() if _is_float(leaf) else leaf for leaf in args)
            return super().call_function(target, args, kwargs)

    return AsOnGpu(program).run(*inputs, enable_io_processing=False)


def shortened(steps: dict[int, int]) -> Any:
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


def _is_float(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


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
