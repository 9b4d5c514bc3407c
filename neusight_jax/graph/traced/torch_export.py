"""Any PyTorch module as a graph, by `torch.export` on fake tensors. Needs torch (extra `torch`); no GPU, no weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import MODES, Graph
from neusight_jax.graph.traced import aten
from neusight_jax.graph.traced.grouping import FUSABLE, Walk, assemble, kernels_of
from neusight_jax.graph.traced.memory import BACKWARD, Holding, given_footprint
from neusight_jax.graph.traced.operation import Call, Operation, TraceOptions, Value
from neusight_jax.graph.traced.torch_trace import INPUTS, LONGER_STEPS, SHORT_STEPS, WEIGHTS, aten_graph
from neusight_jax.kernels.table import PHASES, Kernel

if TYPE_CHECKING:
    import torch

UNKNOWN_SIZE = (
    "the size of a tensor depends on values (nonzero, masked_select, a boolean index); "
    "expected a module whose shapes follow from those of its inputs"
)
IN_TF32 = (
    "convolutions of fp32 run in tf32 where the GPU has it, as PyTorch's default is (torch.backends.cudnn.allow_tf32); "
    "fp32_convolutions 'fp32' (--fp32-convolutions fp32) forecasts them in fp32"
)
_VIEW_COPIES = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "detach", "alias"})
_SAME = frozenset(
    {"lift_fresh", "lift_fresh_copy", "as_strided_", "detach_", "squeeze_", "swapaxes_", "t_", "transpose_"}
    | {"unsqueeze_", "_conj", "resolve_conj", "resolve_neg"}
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
      trace_options: as for `graph_from_function`; `fused` None = False, one kernel an operator as eager torch runs, and
        `fp32_convolutions` None = "tf32".
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
    steps: dict[int, int] = {}
    inputs = (tuple(args), dict(kwargs or {}))
    short = graph = _graph(module, inputs, mode, options, name, steps)
    # A recurrence grows by the same work with every step: two short traces tell it, all steps would be slow to trace.
    for length in steps:
        longer = _graph(module, inputs, mode, options, name, {**steps, length: LONGER_STEPS})
        if [node.name for node in longer.nodes] != [node.name for node in short.nodes]:
            return _graph(module, inputs, mode, options, name, {length: length for length in steps})
        graph = _with_steps(graph, short, longer, (length - SHORT_STEPS) / (LONGER_STEPS - SHORT_STEPS))
    return graph


def _graph(
    module: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    mode: str,
    options: TraceOptions,
    name: str,
    steps: dict[int, int],
) -> Graph:
    """The graph of one trace; arguments as of `graph_from_torch` and `torch_trace.aten_graph`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, forward, notes = aten_graph(module, *inputs, mode == "training", name, steps)
    walk = _Walk(options, forward)
    results = walk.run(traced)
    holding = _holding(module, walk, results if mode == "training" else None)
    graph = assemble(name, walk.operations, results, bool(options.fused), mode, holding)
    if options.fp32_convolutions is None and "tf32" in graph.arithmetic and options.fp32_products == "fp32":
        notes = (*notes, IN_TF32)
    return replace(graph, notes=notes)


def _with_steps(graph: Graph, short: Graph, longer: Graph, share: float) -> Graph:
    """A graph with more steps of a recurrence: repeats, sizes and memory grow by a multiple of a difference.

    Args:
      graph: to grow, of the nodes of the other two.
      short, longer: the program with two numbers of steps.
      share: steps to add, over those that `longer` has more than `short`.
    """

    def grown(value: Any, less: Any, more: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: grown(item, less[key], more[key]) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(grown(*items) for items in zip(value, less, more, strict=True))
        if isinstance(value, Kernel):
            count, dims = (grown(*(getattr(item, part) for item in (value, less, more))) for part in ("count", "dims"))
            return replace(value, count=count, dims=dims)
        return type(value)(value + (more - less) * share)

    def changed(record: Any, less: Any, more: Any, parts: Iterable[str]) -> Any:
        return replace(record, **{part: grown(*(getattr(at, part) for at in (record, less, more))) for part in parts})

    parts = ("repeat", "shape", *PHASES)
    nodes = (changed(*nodes, parts) for nodes in zip(graph.nodes, short.nodes, longer.nodes, strict=True))
    held = changed(graph.footprint, short.footprint, longer.footprint, vars(graph.footprint))
    return replace(graph, nodes=tuple(nodes), footprint=held)


def _holding(module: torch.nn.Module, walk: _Walk, gradients: Sequence[int] | None) -> Holding:
    """Memory a module holds: parameters and buffers once each, however often they are used, and its inputs.

    `gradients`: ids of what a training step returns.
    """
    parameters = list(module.parameters())
    learned = [
        (float(item.numel()), _bytes(item)) for item in parameters if item.requires_grad and gradients is not None
    ]
    inputs = sum(value.bytes for name, value in walk.sources.items() if name.startswith(INPUTS))
    buffers = sum(value.bytes for name, value in walk.sources.items() if not name.startswith((INPUTS, WEIGHTS)))
    return Holding(
        footprint=given_footprint(sum(map(_bytes, parameters)), inputs, buffers, learned),
        parameters=float(sum(item.numel() for item in parameters)),
        trained=sum(elements for elements, _ in learned),
        counted=frozenset((*(gradients or ()), *(value.id for value in walk.sources.values()))),
        memory=walk.memory,
    )


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


class _Walk(Walk):
    """Writes the operations of an aten graph down; `forward` names the nodes of the forward pass, None = all.

    What is written in place keeps its memory and gets a new id, its version: whoever reads the array after that, by
    whatever view, reads that version, and so depends on the write.
    """

    def __init__(self, options: TraceOptions, forward: set[str] | None) -> None:
        super().__init__(options)
        self.forward = forward
        self.values: dict[str, Any] = {}
        self.sources: dict[str, Value] = {}  # arguments, parameters, buffers and constants, by the name of their node
        # Dropout on fake tensors is drawn, scaled and multiplied; on a GPU it is one kernel.
        self.masks: set[int] = set()
        self._latest: dict[int, int] = {}
        self._size: dict[int, int] = {}
        self._count = 0

    def run(self, graph: Any) -> list[int]:
        """Walk the graph; ids of the arrays it returns, and of those it was sources and has written to."""
        results: list[int] = []
        # In order of the graph, so that what a node reads has a value.
        for node in graph.nodes:
            branch: Any = getattr(graph.owning_module, node.target, None) if node.op == "get_attr" else None
            if hasattr(branch, "graph"):
                self.values[node.name] = branch.graph
            elif node.op in ("placeholder", "get_attr"):
                made = self._fresh(node.meta.get("val", node.meta.get("tensor_meta")))
                self.values[node.name] = made
                if isinstance(made, Value):
                    self.sources[node.name] = made
            elif node.op == "output":
                results = [value.id for value in _values(self._now(self._read(node.args)))]
            elif node.op == "call_function":
                self.values[node.name] = self._call(node)
        return results + [self._latest[value.id] for value in self.sources.values() if value.id in self._latest]

    def _fresh(self, tensor: Any) -> Any:
        if isinstance(tensor, list | tuple):
            return [self._fresh(item) for item in tensor]
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            return None
        self._count += 1
        try:
            shape = tuple(int(size) for size in tensor.shape)
        except Exception as error:  # torch has an error of its own for sizes it does not know
            raise InputError(UNKNOWN_SIZE) from error
        dtype = str(tensor.dtype).removeprefix("torch.")
        strides = _strides(tensor)
        # An axis of stride 0 is one element in memory.
        stored = prod(shape) if strides is None else prod(n for n, step in zip(shape, strides, strict=True) if step)
        self._size[self._count] = stored
        return Value(self._count, shape, float(min(stored, prod(shape))), float(tensor.dtype.itemsize), dtype, strides)

    def _read(self, argument: Any) -> Any:
        """An argument with nodes as their values, whatever was written to them since."""
        if isinstance(argument, list | tuple):
            return type(argument)(self._read(item) for item in argument)
        name = getattr(argument, "name", None)
        return self.values[name] if isinstance(name, str) and hasattr(argument, "meta") else argument

    def _now(self, tree: Any) -> Any:
        """Values by their latest version."""
        if isinstance(tree, list | tuple):
            return type(tree)(self._now(item) for item in tree)
        return replace(tree, id=self._latest.get(tree.id, tree.id)) if isinstance(tree, Value) else tree

    def _call(self, node: Any) -> Any:
        target = node.target
        args = self._read(tuple(node.args))
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]] if isinstance(args[0], list) else args[0]
        keywords = {key: self._read(value) for key, value in node.kwargs.items()}
        op = getattr(getattr(target, "overloadpacket", None), "__name__", getattr(target, "__name__", str(target)))
        if op == "cond":
            _, true, false, operands = args
            return self._cond(node, true, false, operands)
        made = self._fresh(node.meta.get("val"))
        viewed = self._view(target, op, tuple(_values((args, tuple(keywords.values())))), made)
        if viewed is not None:
            return viewed
        written = _written(target, args, keywords)
        before = self._now(written)
        args = self._now(args)
        inputs = tuple(_values((args, tuple(self._now(value) for value in keywords.values()))))
        in_place = op.endswith("_") and not op.endswith("__")
        returned, outputs = made, tuple(_values(made))
        # Forms in place, and those with an `out`, make nothing new.
        if written and all(_is_written(item) for item in target._schema.returns):
            returned, outputs = (list(written) if isinstance(made, list) else written[0]), ()
        plain = op[:-1] if in_place else op
        # On fake tensors autograd adds to its zeros out of place; on real ones it does so in place.
        in_place = in_place or (plain in aten.ACCUMULATING and self._phase(node) == BACKWARD)
        params = {"fp32_convolutions": self.options.fp32_convolutions or "tf32"}
        call = Call(plain, args, inputs, outputs + self._rewritten(written), in_place, params, self._phase(node))
        parts = [value for value, root in zip(before, written, strict=True) if value.elements < self._size[root.id]]
        self._write(node, self._without_masks(call), len(written), parts)
        return returned

    def _cond(self, node: Any, true: Any, false: Any, operands: Sequence[Any]) -> list[Any]:
        """Results of a condition; its branch 0 is that of False."""
        return self.branch([partial(self._inside, node, branch, operands) for branch in (false, true)])

    def _inside(self, node: Any, branch: Any, operands: Sequence[Any]) -> list[Any]:
        """Results of a graph inside the graph; all of it is in the phase of its node."""
        outside, self.values = self.values, dict(zip((n.name for n in branch.nodes), operands, strict=False))
        forward, self.forward = self.forward, None if not self._phase(node) else set()
        results: list[Any] = []
        for inner in branch.nodes:
            if inner.op == "call_function":
                self.values[inner.name] = self._call(inner)
            elif inner.op == "output":
                results = list(self._read(inner.args[0]))
        self.values, self.forward = outside, forward
        return results

    def _rewritten(self, written: Sequence[Value]) -> tuple[Value, ...]:
        """New versions of what an operator writes to, as it sees them."""
        made = []
        for value in written:
            self._count += 1
            self.memory[self._count] = value.id
            self._latest[value.id] = self._count
            made.append(replace(value, id=self._count, stored=float(value.elements)))
        return tuple(made)

    def _without_masks(self, call: Call) -> Call:
        """Dropout as one kernel: its mask is drawn and scaled by none."""
        masked = any(value.id in self.masks for value in call.inputs)
        if call.op == "bernoulli" or (masked and call.op == "div"):
            self.masks.update(value.id for value in call.outputs)
            return replace(call, op="empty")
        if masked and call.op == "mul":
            return replace(call, op="dropout_backward" if call.phase else "dropout")
        return call

    def _phase(self, node: Any) -> int:
        return BACKWARD if self.forward is not None and node.name not in self.forward else 0

    def _view(self, target: Any, op: str, inputs: tuple[Value, ...], made: Any) -> Any:
        """Values a view returns: parts of its input; None for all others."""
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

    def _write(self, node: Any, call: Call, written: int, parts: Sequence[Value]) -> None:
        if not call.outputs:
            return
        kind = aten.kind_of(call)
        kernels, modelled = ((), True) if kind != "opaque" else aten.kernels_of_call(call)
        operation = self.operation(
            call,
            "free" if kind == "opaque" and not kernels else kind,
            kernels,
            modelled=modelled,
            axes=aten.reduced_axes(call) if kind in ("row", "column") else (),
            scope=_module(node),
            full_name=str(node.target),
        )
        self.operations.append(_in_place(operation, call, written, parts) if written else operation)


def _in_place(operation: Operation, call: Call, written: int, parts: Sequence[Value]) -> Operation:
    """The operation with what a write in place does not read, and with what it depends on beside.

    It does not read what it only overwrites: the first `written` inputs. Where it writes `parts` of arrays, the rest is
    that of the version before, and its kernel stays apart, as it makes no whole array.
    """
    inputs = call.inputs[written:] if call.in_place and call.op in aten.OVERWRITES else call.inputs
    operation = replace(operation, inputs=inputs)
    if parts and operation.kind in FUSABLE:
        kernels = kernels_of([operation], lambda _: True, {})
        operation = replace(operation, kind="opaque" if kernels else "free", kernels=kernels)
    ids = {value.id for value in inputs}
    rest = tuple(replace(value, stored=0.0) for value in parts if value.id not in ids)
    return replace(operation, inputs=(*inputs, *rest))


def _written(target: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Value, ...]:
    """The tensors an operator writes to, as its schema says."""
    schema = getattr(target, "_schema", None)
    tensors = []
    for at, argument in enumerate(schema.arguments if schema is not None else ()):
        if _is_written(argument):
            tensors += _values(args[at] if at < len(args) else keywords.get(argument.name))
    return tuple(tensors)


def _is_written(item: Any) -> bool:
    """Whether an operator writes to what its schema has here."""
    return item.alias_info is not None and item.alias_info.is_write


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
