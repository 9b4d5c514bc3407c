"""Whole JAX models, timed: forward, and forward with gradients, compiled or operation by operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from neusight_jax.errors import InputError
from neusight_jax.profiling.model_target import Target, is_nnx_module

_finished: Callable[[Any], Any] = jax.block_until_ready


class JaxModel:
    """A JAX function or flax NNX module with its arguments on the device.

    A training step is the forward pass and the gradients of all floating-point leaves of the first argument (of an NNX
    module: its own), of the mean of all outputs, or of the first output where that is a scalar. No optimizer step.

    Args:
      target: the model; shapes among its arguments are filled with random numbers, integers with ones.
      training: whether to take gradients; compiled: `jax.jit`, else operation by operation as plain Python runs it.
    """

    def __init__(self, target: Target, training: bool, compiled: bool) -> None:
        call, args = target.call, target.args
        if is_nnx_module(call):
            from flax import nnx

            definition, state = nnx.split(call)
            call, args = (
                (lambda state, *rest, **keywords: nnx.merge(definition, state)(*rest, **keywords)),
                (state, *args),
            )
        self._args, self._kwargs = jax.tree.map(_real, (tuple(args), dict(target.kwargs)))
        wrap: Callable[[Any], Any] = jax.jit if compiled else lambda function: function
        self._forward, self._step = wrap(call), None
        if training:
            if not args or not any(_trains(leaf) for leaf in jax.tree.leaves(self._args[0])):
                raise InputError(
                    f"{target.model}: the first argument holds no floating-point array, so there is nothing to train; "
                    "expected parameters first, or measure --mode inference"
                )
            self._step = wrap(_with_gradients(call))

    def step(self) -> tuple[float, float | None]:
        """Seconds of one forward pass, and of one training step less its forward pass (None without training)."""
        forward_s = self._timed(self._forward)
        if self._step is None:
            return forward_s, None
        return forward_s, self._timed(self._step) - forward_s

    def _timed(self, run: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        _finished(run(*self._args, **self._kwargs))
        return time.perf_counter() - begin


def _with_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
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


def _real(leaf: Any) -> Any:
    """An array as it is, a shape as random numbers (integers as ones)."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return (0.02 * jax.random.normal(jax.random.key(0), leaf.shape, jnp.float32)).astype(leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)
