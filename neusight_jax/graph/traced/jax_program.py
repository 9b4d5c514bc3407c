"""Any JAX function as a graph, by its jaxpr. Nothing is computed: arguments may be shapes alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.kernel import collective_kernel
from neusight_jax.graph.traced.grouping import Walk, assemble
from neusight_jax.graph.traced.memory import BACKWARD, UPDATES, Leaf, Path, argument_names, holding_of
from neusight_jax.graph.traced.operation import (
    PRODUCT_FAMILIES,
    Call,
    Kernels,
    Operation,
    TraceOptions,
    Value,
    main_dtype,
    operators,
)
from neusight_jax.graph.traced.primitives import REDUCTIONS, kernels_of_primitive, kind_of, reduced_axes
from neusight_jax.kernels.table import PHASES

# Collectives of a program under `shard_map`: operator, bytes and group of each, from the axes of its mesh.

COLLECTIVES: dict[str, str] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all_reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all_gather"),
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "send_recv",
}
"""Primitives of JAX and the operators of `kernels.collective` they are."""
MESH = "mesh_axes"
"""Parameter of a call with the axes of the mesh it runs on: name -> size, neighbouring devices along the last one."""

SHARDINGS: tuple[str, ...] = ("sharding", "dst_sharding", "out_sharding", "devices", "in_shardings", "out_shardings")
"""Parameters of equations that say how arrays are spread over a mesh and leave the rest to the compiler (GSPMD)."""


def partitioned(sharding: Any) -> dict[str, int]:
    """Axes of the mesh that a sharding cuts an array over several devices of, with their sizes; none of all others."""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is not None and spec is not None:
        axes = {str(name): int(size) for name, size in mesh.shape.items()}
        names = [name for part in spec if part for name in (part if isinstance(part, tuple) else (part,))]
        return axes if any(axes.get(str(name), 1) > 1 for name in names) else {}
    several = len(getattr(sharding, "device_set", ())) > 1 and not sharding.is_fully_replicated
    return {"devices": len(sharding.device_set)} if several else {}


def unread_shardings(mesh: Mapping[str, int]) -> str:
    """The note on a program whose shardings are not read."""
    shape, devices = ", ".join(f"{name} {size}" for name, size in mesh.items()), prod(mesh.values())
    return (
        f"shardings are not read: the program is for {devices} devices (mesh: {shape}), and the whole of it "
        "is forecast on one GPU, without collectives; write it under jax.shard_map for the part of one device"
    )


def axes_of(params: Mapping[str, Any]) -> dict[str, int]:
    """Axes a `shard_map` or `pmap` runs its inner program over, with their sizes; none of other equations."""
    if "mesh" in params:
        return {str(name): int(size) for name, size in params["mesh"].shape.items()}
    return {params["axis_name"]: int(params["axis_size"])} if "axis_size" in params and "call_jaxpr" in params else {}


def members(params: Mapping[str, Any], mesh: Mapping[str, int]) -> list[int]:
    """Devices of the group that device 0 is in, counted along the last axis first.

    Raises: `InputError` for an axis whose size is unknown.
    """
    axis_names = params.get("axes", params.get("axis_name"))
    axes = [
        str(name)
        for name in (axis_names if isinstance(axis_names, tuple | list) else (axis_names,))
        if not isinstance(name, int)
    ]
    unknown = [name for name in axes if name not in mesh]
    if unknown:
        raise unknown_axis("the function", unknown[0])
    order = list(mesh)
    step = {name: prod(mesh[inner] for inner in order[place + 1 :]) for place, name in enumerate(order)}
    ranks = [sum(place) for place in product(*(range(0, step[name] * mesh[name], step[name]) for name in axes))]
    groups = params.get("axis_index_groups")
    return [ranks[at] for at in groups[0]] if groups else ranks


def unknown_axis(name: str, axis: str) -> InputError:
    """The error for a collective over an axis that no mesh has."""
    return InputError(
        f"{name}: the size of the axis {axis!r} is unknown; call it under jax.shard_map with a mesh that has it"
    )


def collective(call: Call, gpus_per_domain: int = 0) -> Kernels:
    """The kernel of a collective over a group of several devices.

    Args:
      gpus_per_domain: neighbouring devices that share fast links; 0 = all of the mesh.
    """
    group, op = members(call.params, call.params[MESH]), COLLECTIVES[call.op]
    domains = len({rank // gpus_per_domain for rank in group}) if gpus_per_domain else 1
    pair = op == "send_recv"
    ranks, domains = (2, min(domains, 2)) if pair else (len(group), domains)
    arrays = call.outputs if op == "all_gather" else call.inputs
    payload = sum(value.elements * value.element_bytes for value in arrays)
    return (collective_kernel(op, payload, ranks, domains, dtype=main_dtype(call.inputs)),)


AFTER = PHASES.index("weight_gradient")

DEFAULT_PRECISION = (
    "products in fp32: unless jax_default_matmul_precision says otherwise, JAX computes them in tf32 on NVIDIA GPUs "
    "since Ampere; fp32_products 'tf32' (--fp32-products tf32) forecasts that"
)
_INLINED: tuple[str, ...] = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = operators("jax", "calls")
_VIEWS = operators("jax", "views")
_GENERATED = operators("jax", "generated")
_UNBOUND = re.compile(r"unbound axis name:? (\w+)")
_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")


def graph_from_function(
    fn: Callable[..., Any], *args: Any, trace_options: TraceOptions | None = None, **kwargs: Any
) -> Graph:
    """Kernels of any function JAX can trace: a forward pass, `jax.grad` of a loss, a whole training step.

    Of a program under `jax.shard_map` it is the part of one device, with the collectives of its mesh (an `AbstractMesh`
    will do); what stands outside counts as a whole, and so does a program whose shardings are left to the compiler
    (`with_sharding_constraint`, sharded arguments), with a note. Forecast it on a cluster:
    `nj.predict_kernels(predictor, nj.load_cluster("8x H100"), graph.kernels)`.

    Args:
      fn: the function. It is traced, never run.
      args, kwargs: its arguments: arrays, `jax.ShapeDtypeStruct`, or pytrees of them; anything else is passed as it is.
      trace_options: how to read it (`TraceOptions`); a name of its own, as every other keyword goes to `fn`.
    Returns: a graph for `predict`. Its phases: what stands in a transposed (backward) computation is `backward`, what
      is computed from that afterwards, such as an optimizer's update, `weight_gradient`, the rest `forward`.
    Raises: `InputError` when `fn` is not callable, cannot be traced with these arguments, or holds a while loop whose
      trip count is not stated, or a collective over an axis that no mesh has.
    """
    options = trace_options or TraceOptions()
    if not callable(fn):
        raise InputError(f"{fn!r} is a {type(fn).__name__}, expected a function and its arguments")
    name = options.name or getattr(fn, "__name__", type(fn).__name__)
    closed, arguments, returned = _trace(fn, name, args, kwargs)
    walk = _Walk(options)
    values = [walk.fresh(var.aval) for var in closed.jaxpr.invars]
    for leaf in jax.tree.leaves((args, kwargs)):
        walk.meshes.update(partitioned(getattr(leaf, "sharding", None)))
    results = walk.closed(closed, values, _Place())
    fused = True if options.fused is None else options.fused
    mode = "training" if any(item.phase for item in walk.operations) else "inference"
    names = argument_names(fn, len(args))
    leaves = [Leaf(names.get(at, at), path, value) for (at, path), value in zip(arguments, values, strict=True)]
    leaves += [Leaf("", (), value) for value in walk.constants.values()]
    chosen = None if options.parameters is None else [names.get(name, name) for name in options.parameters]
    made = list(zip(returned, results, strict=True))
    holding, notes = holding_of(leaves, walk.operations, made, walk.carried, walk.late, walk.memory, chosen)
    ids = [value.id for value in results]
    if walk.default_precision and options.fp32_products == "fp32":
        notes = (*notes, DEFAULT_PRECISION)
    if walk.meshes:
        notes = (unread_shardings(walk.meshes), *notes)
    return replace(assemble(name, walk.operations, ids, fused, mode, holding), notes=notes)


def _trace(
    fn: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[tuple[str, Path]], list[Path]]:
    """The closed jaxpr, where its arguments come from, and where its results go.

    Leaves that are no arrays stay as they are.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves, paths = [leaf for _, leaf in pairs], [_keys(path) for path, _ in pairs]
    returned: list[Path] = []
    traced = [at for at, leaf in enumerate(leaves) if _is_array(leaf)]

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for at, array in zip(traced, arrays, strict=True):
            filled[at] = array
        positional, keywords = jax.tree_util.tree_unflatten(treedef, filled)
        out = fn(*positional, **keywords)
        made = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(out) if _is_array(leaf)]
        returned[:] = [_keys(path) for path, _ in made]
        return [leaf for _, leaf in made]

    try:
        closed = jax.make_jaxpr(call)(*[_shape(leaves[at]) for at in traced])
    except InputError:
        raise
    except Exception as error:
        if unbound := _UNBOUND.search(str(error)):
            raise unknown_axis(name, unbound[1]) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise InputError(
            f"{name}: cannot be traced ({type(error).__name__}: {reason}); expected a function JAX can trace, "
            "with the arguments it takes"
        ) from error
    # A path begins with 0 or 1, positional or named, then the argument.
    return closed, [(paths[at][1], paths[at][2:]) for at in traced], returned


def _keys(path: Sequence[Any]) -> Path:
    """Keys of a path in a pytree as text."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _shape(leaf: Any) -> Any:
    shaped: Any = jax.ShapeDtypeStruct
    if isinstance(leaf, np.ndarray | np.generic):
        return shaped(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    weak = bool(getattr(leaf, "weak_type", False))
    return shaped(leaf.shape, leaf.dtype, weak_type=weak)


@dataclass(frozen=True)
class _Place:
    """Where in the program the walk is: names, executions, loop body, phase, axes of the mesh with their sizes."""

    scope: tuple[str, ...] = ()
    repeat: float = 1.0
    body: int = 0
    phase: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)


class _Walk(Walk):
    """Writes the operations of a jaxpr down."""

    def __init__(self, options: TraceOptions) -> None:
        super().__init__(options)
        self.late: set[int] = set()  # arrays computed from gradients
        self.meshes: dict[str, int] = {}  # axes of meshes that arrays are spread over by shardings, with their sizes
        self.default_precision = False  # whether products in fp32 do not say how exact they are
        self.constants: dict[int, Value] = {}  # arrays the function closes over, by the id of the object
        self.carried: set[tuple[int, int]] = set()  # (loop body, array) of what comes from the step before
        self._values = 0
        self._bodies = 0

    def fresh(self, aval: Any) -> Value:
        """An array of its own."""
        self._values += 1
        shape = tuple(int(size) for size in getattr(aval, "shape", ()))
        dtype = getattr(aval, "dtype", None)
        size = float(getattr(dtype, "itemsize", 4)) if dtype is not None else 0.0
        name = str(dtype) if dtype is not None else "token"
        if name.startswith(("float4", "int4", "uint4")):
            size = 0.5
        return Value(self._values, shape, float(prod(shape)), size, name)

    def closed(self, closed: Any, inputs: Sequence[Value], place: _Place) -> list[Value]:
        """Walk a closed jaxpr (or an open one, without constants)."""
        jaxpr = getattr(closed, "jaxpr", closed)
        env: dict[Any, Value] = {}
        for var, constant in zip(jaxpr.constvars, getattr(closed, "consts", None) or jaxpr.constvars, strict=True):
            env[var] = self._constant(constant, var.aval)
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return self._constant(atom.val, atom.aval) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            outputs = self._equation(eqn, [read(atom) for atom in eqn.invars], place)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _constant(self, constant: Any, aval: Any) -> Value:
        """An array the function closes over, the same however often it is met; a number is no array."""
        value = self.fresh(aval)
        return value.view(value.shape, 0.0) if value.elements <= 1 else self.constants.setdefault(id(constant), value)

    def _equation(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        name = eqn.primitive.name
        stack = str(eqn.source_info.name_stack)
        # JAX writes `transpose(...)` into the names of what it transposes: the backward pass.
        phase = BACKWARD if "transpose(" in stack else place.phase
        here = replace(place, scope=place.scope + _scope(stack), phase=phase)
        if name in ("scan", "while", "cond"):
            return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](eqn, inputs, here)
        for key in SHARDINGS:
            for sharding in jax.tree.leaves(eqn.params.get(key), is_leaf=lambda leaf: leaf is None):
                self.meshes.update(partitioned(sharding))
        if name == "custom_linear_solve":  # its other programs are for gradients
            skipped = sum(eqn.params["const_lengths"][:2])
            solve, right = eqn.params["const_lengths"].solve, sum(eqn.params["const_lengths"])
            return self.closed(eqn.params["jaxprs"].solve, [*inputs[skipped : skipped + solve], *inputs[right:]], here)
        if name in _CALLS:
            for key in _INLINED:
                if key in eqn.params:
                    inner = eqn.params[key]
                    label = eqn.params.get("name")
                    scope = here.scope + ((str(label),) if name in ("jit", "pjit") and _telling(label) else ())
                    axes = axes_of(eqn.params)
                    if not axes:
                        return self.closed(inner, inputs, replace(here, scope=scope))
                    return self._of_device(eqn, inner, inputs, replace(here, scope=scope, axes={**here.axes, **axes}))
        # A group of one device sends nothing: what it receives is what it has.
        if name in COLLECTIVES and len(members(eqn.params, here.axes)) == 1:
            return [value.view(tuple(var.aval.shape)) for value, var in zip(inputs, eqn.outvars, strict=True)]
        view = self._view(name, eqn, inputs)
        if view is not None:
            return view
        return self._operation(name, eqn, inputs, here)

    def _of_device(self, eqn: Any, inner: Any, inputs: list[Value], place: _Place) -> list[Value]:
        """A program over a mesh: one device reads its shards, and its results are shards of whole arrays."""
        invars = getattr(inner, "jaxpr", inner).invars
        shards = [value.part(var.aval.shape) for value, var in zip(inputs, invars, strict=True)]
        results = self.closed(inner, shards, place)
        return [value.view(tuple(var.aval.shape)) for value, var in zip(results, eqn.outvars, strict=True)]

    def _view(self, name: str, eqn: Any, inputs: list[Value]) -> list[Value] | None:
        """Outputs of a primitive that moves nothing; None for all others."""
        shapes = [tuple(var.aval.shape) if hasattr(var.aval, "shape") else () for var in eqn.outvars]
        if name in _VIEWS and len(inputs) >= len(eqn.outvars):
            return [value.view(shape) for value, shape in zip(inputs, shapes, strict=False)]
        if name == "broadcast_in_dim":
            return [inputs[0].view(shapes[0])]
        if name in _GENERATED:
            return [self.fresh(var.aval).view(shape, 0.0) for var, shape in zip(eqn.outvars, shapes, strict=True)]
        if (
            name in REDUCTIONS
            and len(shapes) == 1
            and not name.startswith("arg")
            and inputs[0].elements == prod(shapes[0])
        ):
            return [inputs[0].view(shape) for shape in shapes]
        if name in ("slice", "split", "unstack"):
            return [inputs[0].part(shape) for shape in shapes]
        return None

    def _operation(self, name: str, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        outputs = [self.fresh(var.aval) for var in eqn.outvars]
        late = any(value.id in self.late for value in inputs)
        phase = place.phase if place.phase or not late else AFTER
        if phase:
            self.late.update(value.id for value in outputs)
        params = {**eqn.params, MESH: place.axes} if name in COLLECTIVES else eqn.params
        call = Call(name, (), tuple(inputs), tuple(outputs), params=params, phase=phase)
        kind = kind_of(call)
        if name in COLLECTIVES:
            kernels, modelled = collective(call, self.options.gpus_per_domain), True
        else:
            kernels, modelled = kernels_of_primitive(call) if kind == "opaque" else ((), True)
        if any(kernel.family in PRODUCT_FAMILIES and kernel.dtype == "fp32" for kernel in kernels):
            self.default_precision |= eqn.params.get("precision") is None
        if name.startswith(UPDATES):
            self.memory[outputs[0].id] = inputs[0].id  # updates are in place
        self.operations.append(
            self.operation(
                call,
                kind,
                kernels,
                modelled=modelled,
                axes=reduced_axes(call),
                scope=place.scope,
                full_name=_full_name(eqn),
                repeat=place.repeat,
                body=place.body,
            )
        )
        return outputs

    def _link(self, inputs: Sequence[Value], aval: Any, body: int) -> Value:
        """An array that comes out of a loop: made by nothing, but what it comes from is needed for it.

        It is the first of its inputs, or many of these stacked.
        """
        out = self.fresh(aval)
        if any(value.id in self.late for value in inputs):
            self.late.add(out.id)
        if out.elements == inputs[0].elements and inputs[0].stored:
            self.memory[out.id] = inputs[0].id
        link = Operation("loop", "loop", "free", tuple(inputs), (out,), out.shape, repeat=0.0, looped=body)
        self.operations.append(link)
        return out

    def _body(self, place: _Place, trips: float) -> _Place:
        self._bodies += 1
        return replace(place, repeat=place.repeat * trips, body=self._bodies)

    def _scan(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        params = eqn.params
        length, consts, carried = params["length"], params["num_consts"], params["num_carry"]
        inner = params["jaxpr"].jaxpr.invars
        shapes = [tuple(var.aval.shape) if hasattr(var.aval, "shape") else () for var in inner]
        # Constants and what is carried enter the body whole, of the other arrays a slice for each step.
        values = [
            value.view(shape) if at < consts + carried else value.part(shape)
            for at, (value, shape) in enumerate(zip(inputs, shapes, strict=True))
        ]
        body = self._body(place, float(length))
        results = self.closed(params["jaxpr"], values, body)
        carry = results[:carried]
        self._carries(values[consts : consts + carried], carry, body.body)
        # What is carried out is carried in again: a result may need every value carried.
        outs = zip(results, eqn.outvars, strict=True)
        return [self._link((value, *carry), var.aval, body.body) for value, var in outs]

    def _carries(self, before: Sequence[Value], after: Sequence[Value], body: int) -> None:
        """Note what a loop body changes of what it carries."""
        self.carried |= {(body, one.id) for one, other in zip(before, after, strict=True) if one.id != other.id}

    def _while(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        trips = self.options.while_trips
        if trips is None:
            raise InputError(
                "the function holds a while loop, whose trip count no shape tells; say how often its body runs with "
                "--trip-count N, or trace_options=TraceOptions(while_trips=N) in Python"
            )
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carried = inputs[tests + consts :]
        body = self._body(place, float(trips))
        test = self.closed(params["cond_jaxpr"], [*inputs[:tests], *carried], body)
        results = self.closed(params["body_jaxpr"], inputs[tests:], body)
        self._carries(carried, results, body.body)
        outs = zip(results, eqn.outvars, strict=True)
        return [self._link((value, *results, *test), var.aval, body.body) for value, var in outs]

    def _cond(self, eqn: Any, inputs: list[Value], place: _Place) -> list[Value]:
        return self.branch([partial(self._branch, branch, inputs, eqn, place) for branch in eqn.params["branches"]])

    def _branch(self, branch: Any, inputs: list[Value], eqn: Any, place: _Place) -> list[Value]:
        results = self.closed(branch, inputs[1:], place)
        return [self._link((value,), var.aval, 0) for value, var in zip(results, eqn.outvars, strict=True)]


def _telling(label: Any) -> bool:
    """Whether the name of a jitted function says something."""
    return isinstance(label, str) and not label.startswith(("_", "<")) and label not in ("wrapped", "fn", "call")


def _scope(stack: str) -> tuple[str, ...]:
    """Names of a name stack, transformations taken off: `transpose(jvp(Model))/layer_0` -> Model, layer_0."""
    parts = []
    for part in stack.split("/"):
        name = part
        while match := _WRAPPER.match(name):
            name = match[2]
        if name and name not in ("jvp", "rematted_computation", "checkpoint", "while", "body", "cond", "closed_call"):
            parts.append(name)
    return tuple(parts)


def _full_name(eqn: Any) -> str:
    """A primitive's name with what it calls, where it says."""
    for key in ("name", "call_target_name", "target_name", "name_and_src_info"):
        target = eqn.params.get(key)
        if isinstance(target, str) and target:
            return f"{eqn.primitive.name}:{target}"
        if target is not None and isinstance(getattr(target, "name", None), str):
            return f"{eqn.primitive.name}:{target.name}"
    return str(eqn.primitive.name)
