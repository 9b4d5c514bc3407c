"""Operators of a trace as a GPU would run them, where torch runs others on a CPU.

- `scaled_dot_product_attention` is one operator and one for its gradient. On a CPU torch takes it apart.
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
