"""GPU files of the user, JSON or YAML, and the front door `load_gpu` that takes a catalog name or such a file."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from neusight_jax.datasets.reference_gpu import gpu_from_sheet, is_reference_sheet
from neusight_jax.errors import InputError, printable, unknown_name
from neusight_jax.hardware.catalog import architectures, canonical_name, catalog_gpu, fold_name
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Topology, as_cluster, check_link_figure
from neusight_jax.hardware.gpu import (
    FIELDS,
    GPU,
    NAMED,
    REQUIRED_FIELDS,
    check_figure,
    named_figure,
    plain_number,
    vendor_of_name,
    with_derived,
)
from neusight_jax.tables import read_content, table

_SUFFIXES = (".json", ".yaml", ".yml")
_NOTES = ("name", "base", "architecture", "aliases", "lanes_per_sm", "sources", "estimates", "note", "notes")
"""Keys of a GPU file that are not figures; all but `name`, `base` and `architecture` are for the reader only."""
_GPU_FILE = "a GPU file in JSON or YAML; `neusight-jax gpus` lists names of the catalog"
MOST_NAMED = 200
"""Characters of a name in a file."""


def load_gpu(name_or_path: str | os.PathLike[str]) -> GPU:
    """A GPU by catalog name or alias, or from a JSON or YAML file.

    A file holds the fields of `GPU` in base units, with `base: <catalog GPU>` if it lists only what differs. Its
    `vendor` is a name of `VENDORS`; one that gives none is of the vendor of its `architecture`, of its `base`, of the
    one that its `name` begins with, or of the first vendor. A device file of the NeuSight repository is read as well.

    Raises: `InputError` naming the nearest GPUs, or what in the file is wrong.
    """
    return load_named_gpu(name_or_path)[1]


def load_named_gpu(name_or_path: str | os.PathLike[str]) -> tuple[str, GPU]:
    """As `load_gpu`, with a name for reports: the catalog's, or the file's `name`, or the file's own name."""
    given = os.fspath(name_or_path)
    canonical = canonical_name(given)
    if canonical is not None and not isinstance(name_or_path, os.PathLike):
        return canonical, catalog_gpu(canonical)
    separators = [mark for mark in (os.sep, os.altsep, "/") if mark]
    is_path = given.lower().endswith(_SUFFIXES) or any(mark in given for mark in separators)
    if is_path or isinstance(name_or_path, os.PathLike):
        return _read_gpu(Path(given).expanduser())
    return given, catalog_gpu(given)


def load_named_gpus(names: Iterable[str | os.PathLike[str]]) -> dict[str, GPU]:
    """Several GPUs by name, each once. Raises: `InputError` as `load_gpu`, and for two of one name that differ."""
    found: dict[str, GPU] = {}
    for given in names:
        name, gpu = load_named_gpu(given)
        if found.setdefault(name, gpu) != gpu:
            raise InputError(f"two GPUs are called {name} and differ; give one of the files another `name`")
    return found


def read_mapping(path: Path, expected: str = _GPU_FILE) -> dict[str, Any]:
    """The mapping in a JSON or YAML file. `InputError` if there is no such file, or it holds something else."""
    content = read_content(path, expected)
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: holds {kind}, expected a mapping of names to figures: {expected}")
    return {str(key): value for key, value in content.items()}


def _read_gpu(path: Path) -> tuple[str, GPU]:
    """Name and GPU from a file in either layout."""
    content = read_mapping(path)
    name, gpu = gpu_from_sheet(content, path) if is_reference_sheet(content) else gpu_from_fields(content, path)
    return checked_name(name, path.name), gpu


def gpu_from_fields(content: Mapping[str, Any], path: Path) -> tuple[str, GPU]:
    """Name and GPU from a mapping of GPU fields.

    Args:
      content: figures in base units, `name` and `base` if wanted.
      path: the file it is from, for messages and as the name if it gives none.
    """
    where = path.name
    for key in content:
        if key not in FIELDS and key not in _NOTES:
            near = difflib.get_close_matches(key.lower(), FIELDS + _NOTES[:2], n=1, cutoff=0.3)
            hint = f"nearest: {near[0]}" if near else f"expected one of {', '.join(FIELDS)}"
            raise InputError(f"{where}: unknown field {key!r}; {hint}")
    figures = {key: _number(key, value, where) for key, value in content.items() if key in FIELDS}
    architecture = architectures().get(str(content.get("architecture", "")).lower())
    if architecture is not None:
        figures.setdefault("vendor", named_figure("vendor", architecture["vendor"], where))
    base, name = content.get("base"), checked_name(content.get("name") or path.stem, where)
    if base is not None:
        try:
            start = catalog_gpu(str(base))
        except InputError as error:
            raise InputError(f"{where}: base: {error}") from None
        gpu = start.replace(**figures)
    else:
        missing = [field for field in REQUIRED_FIELDS if field not in figures]
        if missing:
            hint = "add the figures, or `base` with the name of a GPU to take them from"
            raise InputError(f"{where}: missing {', '.join(missing)}; {hint}")
        gpu = GPU(**with_derived(vendor_of_name(name) | figures))
    return name, gpu


def checked_name(name: object, where: str) -> str:
    """The name that a file gives, made printable; `InputError` for one that no table could show."""
    if not isinstance(name, str | int | float) or len(str(name)) > MOST_NAMED:
        raise InputError(f"{where}: name is {name!r}, expected text of at most {MOST_NAMED} characters")
    return printable(str(name))


def _number(field: str, value: object, where: str) -> float:
    """A checked figure; `InputError` if it is not a believable number, or a name of one (`NAMED`)."""
    if field in NAMED and isinstance(value, str):
        return named_figure(field, value, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = "empty" if value is None else f"{value!r}"
        raise InputError(f"{where}: {field} is {shown}, expected a number in base units, e.g. {_example(field)}")
    check_figure(field, float(value), where)
    return float(value)


def _example(field: str) -> str:
    """A figure as it should be written: that of an H100."""
    return plain_number(getattr(catalog_gpu("H100"), field) or 1e12)


# Clusters by name or file: the catalog of usual nodes, files of the user, and the door `load_cluster` to both.

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
