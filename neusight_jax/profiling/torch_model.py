"""Whole torch modules, timed: forward, and backward of all parameters, eager or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from neusight_jax.profiling.model_target import Target


class TorchModel:
    """A torch module with its arguments on the device.

    Backward is of the mean of all floating-point outputs, or of the first output where that is a scalar; gradients add
    up from step to step, as in the published whole-model measurements. No optimizer step.

    Args:
      target: the model; parameters and arguments on the meta device are filled: random numbers, integers with ones.
      training: dropout on and gradients taken; compiled: `torch.compile`.
    """

    def __init__(self, target: Target, training: bool, compiled: bool) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        module = target.call
        if any(parameter.is_meta for parameter in (*module.parameters(), *module.buffers())):
            module = _filled_module(module.to_empty(device=self._device))
        module = module.to(self._device).train(training)
        self._args, self._kwargs = _pytree.tree_map(self._real, (tuple(target.args), dict(target.kwargs)))
        self._training = training
        self._call: Callable[..., Any] = torch.compile(module) if compiled else module

    def step(self) -> tuple[float, float | None]:
        """Seconds of one forward pass, and of its backward pass (None without training)."""
        if not self._training:
            with torch.no_grad():
                return self._timed(self._forward)[0], None
        forward_s, outputs = self._timed(self._forward)
        floats = [out for out in _pytree.tree_leaves(outputs) if _trains(out)]
        loss = floats[0] if floats[0].ndim == 0 else sum(out.float().mean() for out in floats)
        return forward_s, self._timed(loss.backward)[0]

    def _forward(self) -> Any:
        return self._call(*self._args, **self._kwargs)

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        begin = time.perf_counter()
        out = run()
        self._wait()
        return time.perf_counter() - begin, out

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _real(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_meta:
            return leaf.to(self._device)
        made = torch.randn if leaf.is_floating_point() else torch.ones
        return made(leaf.shape, dtype=leaf.dtype, device=self._device)


def _filled_module(module: Any) -> Any:
    """Random parameters; buffers are ones, whole-number ones (positions, kinds of tokens) zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)
        for buffer in module.buffers():
            buffer.fill_(1 if buffer.is_floating_point() or buffer.dtype == torch.bool else 0)
    return module


def _trains(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
