"""A PyTorch module as an aten graph: exported on fake tensors, with its backward pass where it trains."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError
from neusight_jax.graph.traced.torch_caches import register_caches
from neusight_jax.graph.traced.torch_operators import as_on_gpu, shortened

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
      steps: as of `torch_operators.shortened`.
    Raises: `InputError` where the module cannot be exported, or nothing in it requires a gradient.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.fx.traceback import preserve_node_meta
    from torch.utils import _pytree

    register_caches()
    try:
        with torch.set_grad_enabled(training), _checkpoints() as recomputed, shortened(steps):
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
    """A module that runs an exported graph node by node, so that the trace keeps the names of its modules."""
    import torch

    class Interpreted(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.exported = exported

        def forward(self, *leaves: Any) -> Any:
            return as_on_gpu(self.exported, leaves)

    return Interpreted()


def _like(parameter: torch.Tensor, training: bool) -> torch.Tensor:
    wanted = training and parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
    return parameter.detach().requires_grad_(wanted)
