"""Any PyTorch module as a graph, by `torch.export` on fake tensors. Needs torch (extra `torch`); no GPU, no weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError
from neusight_jax.graph import aten
from neusight_jax.graph.assembly import assemble
from neusight_jax.graph.graph import MODES, UNMODELLED, Graph
from neusight_jax.graph.operation import Operation, Value
from neusight_jax.graph.trace_options import TraceOptions, on_path
from neusight_jax.kernels.table import PHASES

if TYPE_CHECKING:
    import torch

BACKWARD = PHASES.index("backward")
_VIEW_COPIES = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "detach", "alias"})
_SAME = frozenset(
    {"lift_fresh", "lift_fresh_copy", "detach", "alias", "as_strided_", "_conj", "resolve_conj", "resolve_neg"}
)


def graph_from_torch(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    mode: str = "inference",
    trace_options: TraceOptions | None = None,
) -> Graph:
    """Kernels of a PyTorch module; nothing is computed, and a module on the meta device needs no memory.

    Args:
      module: the module, best made under `torch.device("meta")`; it is traced in train or eval mode as it stands.
      args, kwargs: example inputs, on any device; only shapes and dtypes count.
      mode: "inference", or "training" (forward, and gradients of all parameters that require one).
      trace_options: as for `graph_from_function`; `fused` None = False, one kernel an operator as eager torch runs.
    Raises: `InputError` when torch is not installed, the module cannot be exported, or nothing requires a gradient.
    """
    options = trace_options or TraceOptions()
    if mode not in MODES:
        raise InputError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    try:
        import torch
    except ImportError:
        raise InputError(
            "torch is not installed; install it with `pip install '.[torch]'` to read torch modules"
        ) from None
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module is a {type(module).__name__}, expected a torch.nn.Module")
    name = options.name or type(module).__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, forward = _trace(module, tuple(args), dict(kwargs or {}), mode == "training", name)
    walk = _Walk(options, forward)
    results = walk.run(traced)
    return assemble(name, walk.operations, results, bool(options.fused), mode)


def _trace(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, name: str
) -> tuple[torch.fx.Graph, set[str] | None]:
    """The aten graph of a forward pass, or of a forward and backward pass with the names of the forward part."""
    import torch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
    from torch.fx.traceback import preserve_node_meta
    from torch.utils import _pytree

    try:
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
        raise InputError(
            f"{name}: torch.export cannot trace it ({type(error).__name__}: {reason}); expected a module without "
            "branches on values, with the inputs it takes"
        ) from error
    return traced.graph, forward if training else None


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The exported program and the inputs it was exported with.

    Some code asks what the meta device cannot answer (autocast, in transformers before 5), and torch says so by errors
    of any type: a module on that device is tried once more as if on a CPU. What fails then is the error.
    """
    import torch

    try:
        return torch.export.export(module, args, kwargs, strict=False), args, kwargs
    except Exception:
        if not any(leaf.is_meta for leaf in (*module.parameters(), *module.buffers())):
            raise
    module, args, kwargs = _as_on_cpu(module, args, kwargs)
    return torch.export.export(module, args, kwargs, strict=False), args, kwargs


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
            return torch.fx.Interpreter(self.exported).run(*leaves, enable_io_processing=False)

    return Interpreted()


def _like(parameter: torch.Tensor, training: bool) -> torch.Tensor:
    wanted = training and parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())
    return parameter.detach().requires_grad_(wanted)


class _Walk:
    """Writes the operations of an aten graph down; `forward` names the nodes of the forward pass, None = all."""

    def __init__(self, options: TraceOptions, forward: set[str] | None) -> None:
        self.options, self.forward = options, forward
        self.operations: list[Operation] = []
        self.values: dict[str, Any] = {}
        # Dropout on fake tensors is drawn, scaled and multiplied; on a GPU it is one kernel.
        self.masks: set[int] = set()
        self._count = 0

    def run(self, graph: Any) -> list[int]:
        """Walk the graph; ids of the arrays it returns."""
        results: list[int] = []
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.values[node.name] = self._fresh(node.meta.get("val", node.meta.get("tensor_meta")))
            elif node.op == "output":
                results = [value.id for value in _values(self._read(node.args))]
            elif node.op == "call_function":
                self.values[node.name] = self._call(node)
        return results

    def _fresh(self, tensor: Any) -> Any:
        if isinstance(tensor, list | tuple):
            return [self._fresh(item) for item in tensor]
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            return None
        self._count += 1
        shape = tuple(int(size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Value(self._count, shape, float(prod(shape)), float(tensor.dtype.itemsize), dtype, _strides(tensor))

    def _read(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(self._read(item) for item in argument)
        name = getattr(argument, "name", None)
        return self.values[name] if isinstance(name, str) and hasattr(argument, "meta") else argument

    def _call(self, node: Any) -> Any:
        target = node.target
        args = self._read(tuple(node.args))
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]] if isinstance(args[0], list) else args[0]
        named = {key: self._read(value) for key, value in node.kwargs.items()}
        op = getattr(getattr(target, "overloadpacket", None), "__name__", getattr(target, "__name__", str(target)))
        inputs = tuple(_values((args, tuple(named.values()))))
        made = self._fresh(node.meta.get("val"))
        viewed = self._view(target, op, inputs, made)
        if viewed is not None:
            return viewed
        plain = op[:-1] if op.endswith("_") and not op.endswith("__") else op
        call = aten.Call(plain, args, inputs, tuple(_values(made)))
        masked = any(value.id in self.masks for value in inputs)
        if plain == "bernoulli" or (masked and plain == "div"):
            self.masks.update(value.id for value in call.outputs)
            call = aten.Call("empty", args, inputs, call.outputs)
        elif masked and plain == "mul":
            call = aten.Call("dropout_backward" if self._phase(node) else "dropout", args, inputs, call.outputs)
        self._write(node, call)
        return made

    def _phase(self, node: Any) -> int:
        return BACKWARD if self.forward is not None and node.name not in self.forward else 0

    def _view(self, target: Any, op: str, inputs: tuple[Value, ...], made: Any) -> Any:
        """What a view returns: parts of its input; None for all others."""
        if not inputs or not (getattr(target, "is_view", False) or op in _VIEW_COPIES or op in _SAME):
            return None
        source = inputs[0]

        def seen(value: Any) -> Any:
            if isinstance(value, list):
                return [seen(item) for item in value]
            if value is None:
                return None
            return source.view(value.shape, min(source.stored, float(value.elements)), value.strides)

        return seen(made)

    def _write(self, node: Any, call: aten.Call) -> None:
        if not call.outputs and call.op not in aten.SCATTERS:
            return
        kind = aten.kind_of(call)
        kernels, known = ((), True) if kind != "opaque" else aten.kernels_of_call(call)
        if kind == "opaque" and not kernels:
            kind = "free"
        if self.options.fp32_products != "fp32":
            kernels = tuple(on_path(kernel, self.options.fp32_products) for kernel in kernels)
        loop, reduced = call.outputs[0].shape if call.outputs else (), 1
        if kind in ("row", "column"):
            loop = call.inputs[0].shape
            reduced = prod(loop[axis] for axis in aten.reduced_axes(call))
        self.operations.append(
            Operation(
                name=".".join((*_module(node), call.op)),
                op=call.op if known else f"{UNMODELLED} {node.target}",
                kind=kind,
                inputs=call.inputs,
                outputs=call.outputs,
                loop=loop,
                kernels=kernels,
                phase=self._phase(node),
                reduced=reduced,
            )
        )


def _strides(tensor: Any) -> tuple[int, ...] | None:
    """Strides of a tensor, None for one without (sparse, nested)."""
    try:
        return tuple(int(stride) for stride in tensor.stride())
    except (AttributeError, RuntimeError, TypeError):
        return None


def _values(tree: Any) -> list[Value]:
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, list | tuple):
        return [value for item in tree for value in _values(item)]
    return []


def _module(node: Any) -> tuple[str, ...]:
    """Path of the module a node stands in, where the trace says."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values() if isinstance(entry, tuple) and isinstance(entry[0], str)]
    return (paths[-1].removeprefix("L['self']").strip("."),) if paths and paths[-1].strip(".") else ()
