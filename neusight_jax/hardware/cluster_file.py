"""Clusters by name or file: the catalog of usual nodes, files of the user, and the door `load_cluster` to both."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.catalog import canonical_name, fold_name
from neusight_jax.hardware.cluster import Cluster, as_cluster
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.gpu_file import checked_name, gpu_from_fields, load_named_gpu, read_mapping
from neusight_jax.hardware.topology import TOPOLOGY_FIELDS, Topology, check_link_figure
from neusight_jax.tables import table

_SUFFIXES = (".json", ".yaml", ".yml")
_COUNTED = re.compile(r"^\s*(\d+)\s*[xX×*]\s*(\S.*)$")
_CLUSTER = re.compile(r"^\d+x (.+?)(?: in .+)?$")
_LARGEST = 10_000_000
_EXAMPLE = '"64x H100"'


def list_nodes() -> list[str]:
    """Names of the servers in the catalog of usual nodes."""
    return list(table("datasets", "nodes"))


def node_topology(node: str, gpu: GPU) -> Topology:
    """How GPUs are joined in a server of the catalog, by name or alias. `InputError` for an unknown one."""
    entries = table("datasets", "nodes")
    known = {fold_name(each): name for name, entry in entries.items() for each in (name, *entry["aliases"])}
    if fold_name(node) not in known:
        raise unknown_name("node", node, [each for name in entries for each in (name, *entries[name]["aliases"])])
    entry = entries[known[fold_name(node)]]
    figures = {name: entry[name] for name in TOPOLOGY_FIELDS if name in entry}
    return Topology(**{"link_bytes_per_s": gpu.link_bytes_per_s, **figures})


def usual_node(name: str, count: int = 0) -> str | None:
    """The server that so many GPUs of a name usually are in: a board of exactly as many where there is one, such as
    HGX H100 4-GPU; None where the catalog knows none."""
    canonical, entries = canonical_name(name), table("datasets", "nodes")
    boards = (node for node, entry in entries.items() if canonical in entry.get("boards_of", ()))
    board = next((node for node in boards if entries[node]["gpus_per_domain"] == count), None)
    return board or next((node for node, entry in entries.items() if canonical in entry["gpus"]), None)


def usual_topology(name: str, gpu: GPU, count: int = 0) -> Topology:
    """How so many GPUs of the catalog are joined in their usual server, by the GPU's name.

    Raises: `InputError` where the catalog knows none.
    """
    node = usual_node(name, count)
    if node is not None:
        return node_topology(node, gpu)
    raise InputError(
        f"no usual server of {name} is known; give a YAML file with gpu, count and topology, one of "
        f"{', '.join(list_nodes())} or a mapping of {', '.join(TOPOLOGY_FIELDS[:3])}"
    )


def cluster_name(gpu_name: str, count: int) -> str:
    """What so many GPUs in their usual server are called, the server said where it is not that of other counts."""
    node = usual_node(gpu_name, count)
    return f"{count}x {gpu_name}" + (f" in {node}" if node != usual_node(gpu_name) else "")


def gpu_in(name: str) -> str:
    """The GPU of a `cluster_name`; other names as they are."""
    found = _CLUSTER.match(name)
    return found[1] if found else name


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A cluster: so many GPUs in their usual servers, or a JSON or YAML file.

    Args:
      name_or_path: a count and a GPU or a server of the catalog, such as "64x H100" or "64x DGX A100" (GPUs are
        counted, not servers); or a file with `gpu` (name, file or fields), `count` and, unless the GPU's usual server
        will do, `topology` (a server, or fields of `Topology`, with `node` for a server to take the rest from).
    Raises: `InputError` saying what is wrong.
    """
    return load_named_cluster(name_or_path)[1]


def load_named_cluster(name_or_path: str | os.PathLike[str]) -> tuple[str, Cluster]:
    """As `load_cluster`, with a name for reports."""
    given = os.fspath(name_or_path)
    counted = _COUNTED.match(given)
    if counted is None and (isinstance(name_or_path, os.PathLike) or given.lower().endswith(_SUFFIXES)):
        return _read_cluster(Path(given).expanduser())
    if counted is None:
        raise InputError(f"cluster {given!r}: expected a count and a GPU such as {_EXAMPLE}, or a YAML file")
    count, named = _count(int(counted[1]), f"cluster {given!r}"), counted[2].strip()
    gpu_name, gpu, topology = _named(named, count)
    name = cluster_name(gpu_name, count) if canonical_name(named) else f"{count}x {gpu_name}"
    return name, Cluster(gpu, topology, count)


def load_named_server(name_or_path: str | os.PathLike[str]) -> tuple[str, Cluster]:
    """The `usual_server` of a GPU by its name or file, and the GPU's name."""
    gpu_name, gpu = load_named_gpu(name_or_path)
    return gpu_name, usual_server(gpu_name, gpu)


def usual_server(name: str, gpu: GPU) -> Cluster:
    """A GPU in its usual server, of which nobody says how many there are; one of an unknown server is behind a switch,
    over its own links."""
    try:
        return Cluster(gpu, usual_topology(name, gpu), 0)
    except InputError:
        return as_cluster(gpu)


def _named(named: str, count: int) -> tuple[str, GPU, Topology]:
    """Name, GPU and topology of so many GPUs, by the name of a GPU or of a server of the catalog."""
    entries = table("datasets", "nodes")
    if canonical_name(named) is None:
        for name, entry in entries.items():
            if fold_name(named) in map(fold_name, (name, *entry["aliases"])) and entry["gpus"]:
                gpu_name, gpu = load_named_gpu(entry["gpus"][0])
                return gpu_name, gpu, node_topology(name, gpu)
    gpu_name, gpu = load_named_gpu(named)
    return gpu_name, gpu, usual_topology(gpu_name, gpu, count)


def _read_cluster(path: Path) -> tuple[str, Cluster]:
    content = read_mapping(path, "a cluster file in JSON or YAML with gpu and count")
    where = path.name
    for key in content:
        if key not in ("name", "gpu", "count", "topology"):
            raise InputError(f"{where}: unknown field {key!r}; expected gpu, count, topology and name")
    for key in ("gpu", "count"):
        if key not in content:
            raise InputError(f"{where}: {key} is missing; expected gpu, count and, if wanted, topology")
    count, said = _count(content["count"], where), content["gpu"]
    if isinstance(said, Mapping):
        gpu_name, gpu = gpu_from_fields({str(key): value for key, value in said.items()}, path)
    else:
        gpu_name, gpu = load_named_gpu(str(said))
    topology = _topology(content.get("topology"), gpu_name, gpu, count, where)
    usual = cluster_name(gpu_name, count) if content.get("topology") is None else f"{count}x {gpu_name}"
    return checked_name(content.get("name") or usual, where), Cluster(gpu, topology, count)


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise InputError(f"{where}: the count is {value!r}, expected a whole number of GPUs from 1, such as {_EXAMPLE}")
    return value


def _topology(said: object, gpu_name: str, gpu: GPU, count: int, where: str) -> Topology:
    """The topology that a cluster file speaks of."""
    if said is None:
        return usual_topology(gpu_name, gpu, count)
    if isinstance(said, str):
        return node_topology(said, gpu)
    if not isinstance(said, Mapping):
        raise InputError(f"{where}: topology is {said!r}, expected the name of a server or a mapping of its figures")
    figures: dict[str, Any] = {str(key): value for key, value in said.items() if key != "node"}
    check_topology(figures, where)
    if "gpus_per_domain" in figures:
        figures["gpus_per_domain"] = int(figures["gpus_per_domain"])
    if "node" in said:
        return node_topology(str(said["node"]), gpu).replace(**figures)
    if {"gpus_per_domain", "nic_bytes_per_s"} <= figures.keys():
        return Topology(**{"link_bytes_per_s": gpu.link_bytes_per_s, **figures})
    return usual_topology(gpu_name, gpu, count).replace(**figures)


def check_topology(figures: Mapping[str, Any], where: str) -> None:
    """`InputError` for the first figure of a topology that there is not, or that no network has; `where` opens it."""
    for name, value in figures.items():
        if name not in TOPOLOGY_FIELDS:
            raise unknown_name(f"field of topology in {where}", name, (*TOPOLOGY_FIELDS, "node"))
        check_link_figure(name, value, where)
