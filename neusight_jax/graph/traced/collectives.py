"""Collectives of a program under `shard_map`: operator, bytes and group of each, from the axes of its mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.kernel import collective_kernel
from neusight_jax.graph.traced.call import Call, Kernels
from neusight_jax.graph.traced.operation import Value, main_dtype

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
    named = params.get("axes", params.get("axis_name"))
    axes = [str(name) for name in (named if isinstance(named, tuple | list) else (named,)) if not isinstance(name, int)]
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
    payload = _bytes(call.outputs if op == "all_gather" else call.inputs)
    return (collective_kernel(op, payload, ranks, domains, dtype=main_dtype(call.inputs)),)


def _bytes(values: Sequence[Value]) -> float:
    return sum(value.elements * value.element_bytes for value in values)
