"""GPU and cluster files of the user, JSON or YAML, as pydantic models; the front doors `load_gpu` and `load_cluster` to
them and to the catalog."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, ValidationInfo, create_model

from neusight_jax.errors import InputError, printable, unknown_name
from neusight_jax.hardware.catalog import architectures, canonical_name, catalog_gpu, fold_name, list_servers
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Topology, as_cluster, check_link_figure
from neusight_jax.hardware.gpu import (
    FIELDS,
    GPU,
    LIMITS,
    NAMED,
    REQUIRED_FIELDS,
    check_figure,
    named_figure,
    plain_number,
    vendor_of_name,
    with_derived,
)
from neusight_jax.hardware.reference_sheet import device_of, gpu_from_sheet, is_reference_sheet
from neusight_jax.tables import read_content, table
from neusight_jax.units import base_unit, figure_text, quantity

_SUFFIXES = (".json", ".yaml", ".yml")
_GPU_FILE = "a GPU file in JSON or YAML; `neusight-jax gpus` lists names of the catalog"
_TYPICAL = ("H100", "B300", "T4", "MI300X", "P100")
"""Between them they have every figure."""

# The models of files, and the one line that comes of what is wrong with one.

_Model = TypeVar("_Model", bound=BaseModel)


def _figure(value: Any, info: ValidationInfo) -> float:
    """A figure in base units: of a number, of text with a unit of the right kind, or of a name of one (`NAMED`)."""
    field, where = str(info.field_name), str(info.context)
    if field in NAMED and isinstance(value, str):
        return named_figure(field, value, where)
    number, unit = (quantity(value) or (None, "")) if isinstance(value, str) else (value, "")
    if isinstance(number, bool) or not isinstance(number, int | float):
        shown = "empty" if value is None else f"{value!r}"
        raise InputError(f"{where}: {field} is {shown}, expected a number in base units, e.g. {written(field)}")
    if unit not in ("", base_unit(field)):
        expected = base_unit(field) or "a number without a unit"
        raise InputError(f"{where}: {field} is {value!r}, in {unit}, expected {expected}, e.g. {written(field)}")
    if field in (*FIELDS, *LIMITS):
        check_figure(field, float(number), where)
    else:
        check_link_figure(field, number, where)
    return int(number) if field == "gpus_per_domain" else float(number)


def example_figure(field: str) -> float:
    """A figure of a GPU or of links as it may be, in base units: an H100's where it has one."""
    if field in LIMITS:
        return {"power_limit_w": 300.0, "clock_limit_hz": 1.2e9}[field]
    if field not in FIELDS:
        return float(getattr(usual_topology("H100", catalog_gpu("H100")), field))
    return next(filter(None, (float(getattr(catalog_gpu(name), field)) for name in _TYPICAL)))


def written(field: str) -> str:
    """Spelling a figure may have: in base units or, if it has one, with its unit."""
    example = example_figure(field)
    return f"{plain_number(example)}{f' or {figure_text(field, example)}' if base_unit(field) else ''}"


def _with(figures: Iterable[str], remarks: Iterable[str] = ()) -> Callable[[type[_Model]], type[_Model]]:
    """Adds fields to a model: figures by name, and remarks, which are for the reader alone."""
    fields: dict[str, Any] = dict.fromkeys(figures, (Annotated[Any, BeforeValidator(_figure)], None))
    fields |= dict.fromkeys(remarks, (Any, Field(None, description="anything: for the reader alone")))
    return lambda model: create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


class _File(BaseModel, extra="forbid", coerce_numbers_to_str=True):
    pass


class NamedFile(_File):
    """A file that may give a name."""

    name: str | None = Field(None, max_length=200, description="text of at most 200 characters, for reports")


@_with((*FIELDS, *LIMITS), ("aliases", "lanes_per_sm", "sources", "estimates", "note", "notes"))
class GPUFile(NamedFile, title="GPU file"):
    """Figures of one GPU, in base units or with units: all that are required, or those that differ from `base`."""

    base: str | None = Field(None, description="a GPU of the catalog: its figures are taken where none are given")
    architecture: str | None = Field(None, description="text such as hopper, which says whose libraries it runs")


@_with(TOPOLOGY_FIELDS)
class TopologyFile(_File, title="Topology"):
    """How the GPUs of a cluster are joined: figures that differ from those of `node`, or of the GPU's usual server."""

    node: str | None = Field(None, description="a server of the catalog: its figures are taken where none are given")


class ClusterFile(NamedFile, title="Cluster file"):
    """Equal GPUs and how they are joined."""

    gpu: GPUFile | str = Field(description="the name or file of a GPU, or a mapping of its figures")
    count: int = Field(ge=1, le=10_000_000, strict=True, description="a whole number of GPUs, 1 to 10,000,000")
    topology: TopologyFile | str | None = Field(None, description="the name of a server, or a mapping of figures")


_PARTS: dict[str, type[BaseModel]] = {"gpu": GPUFile, "topology": TopologyFile}


def checked(model: type[_Model], content: Any, where: str) -> _Model:
    """The record of a file's content. `InputError` opened by `where`: unknown keys first, then values, missing keys."""
    if not isinstance(content, Mapping):
        keys = ", ".join(model.model_fields)
        raise InputError(f"{where}: expected fields with values, some of {keys}; found {type(content).__name__}")
    try:
        return model.model_validate(dict(content), context=where)
    except ValidationError as error:
        # A misspelt key is also a missing one: the misspelling is what to mend.
        order = {"extra_forbidden": 0, "invalid_key": 0, "missing": 2}
        first = min(error.errors(include_url=False), key=lambda problem: order.get(problem["type"], 1))
    kind = first["type"]
    if kind == "value_error":
        raise first["ctx"]["error"]  # an `InputError` of this file
    outer, *inner = (str(part) for part in first["loc"])  # inner: the model of a part, and the key in it
    key, fields = (inner[1], _PARTS[outer].model_fields) if inner[1:] else (outer, model.model_fields)
    if kind in ("extra_forbidden", "invalid_key"):
        near = difflib.get_close_matches(key.lower(), fields, n=1, cutoff=0.5)
        hint = f"nearest: {near[0]}" if near else f"expected one of {', '.join(fields)}"
        raise InputError(f"{where}: unknown field {f'of {outer} ' if inner else ''}{key!r}; {hint}")
    value = "missing" if kind == "missing" else f"{first['input']!r}"
    raise InputError(f"{where}: {key} is {value}, expected {fields[key].description}")


# GPUs by name or file.


def load_gpu(name_or_path: str | os.PathLike[str]) -> GPU:
    """A GPU by catalog name or alias, or from a JSON or YAML file.

    A file (`GPUFile`) holds the fields of `GPU` in base units or with units (3.35e12 or "3.35 TB/s"), with
    `base: <catalog GPU>` if it lists only what differs. Its `vendor` is a name of `VENDORS`; one that gives none is of
    the vendor of its `architecture`, of its `base`, of the one that its `name` begins with, or of the first vendor. A
    device file of the NeuSight repository is read as well.

    Raises: `InputError` naming the nearest GPUs, or what in the file is wrong.
    """
    return load_named_gpu(name_or_path)[1]


def load_named_gpu(name_or_path: str | os.PathLike[str]) -> tuple[str, GPU]:
    """Load a GPU, with a name for reports: the catalog's, or the file's `name`, or the file's own name."""
    text = os.fspath(name_or_path)
    # The catalog is asked first, as its names may look like files; a `Path` is always a file.
    canonical = canonical_name(text)
    if canonical is not None and not isinstance(name_or_path, os.PathLike):
        return canonical, catalog_gpu(canonical)
    separators = [mark for mark in (os.sep, os.altsep, "/") if mark]
    is_path = text.lower().endswith(_SUFFIXES) or any(mark in text for mark in separators)
    if is_path or isinstance(name_or_path, os.PathLike):
        return _read_gpu(Path(text).expanduser())
    return text, catalog_gpu(text)


def load_named_gpus(names: Iterable[str | os.PathLike[str]]) -> dict[str, GPU]:
    """Several GPUs by name, each once. Raises: `InputError` as `load_gpu`, and for two of one name that differ."""
    gpus: dict[str, GPU] = {}
    for name_or_path in names:
        name, gpu = load_named_gpu(name_or_path)
        if gpus.setdefault(name, gpu) != gpu:
            raise InputError(f"two GPUs are called {name} and differ; give one of the files another `name`")
    return gpus


def read_mapping(path: Path, expected: str = _GPU_FILE) -> dict[str, Any]:
    """The mapping in a JSON or YAML file. `InputError` if there is no such file, or it holds something else."""
    content = read_content(path, expected)
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: holds {kind}, expected a mapping of names to figures: {expected}")
    return {str(key): value for key, value in content.items()}


def _read_gpu(path: Path) -> tuple[str, GPU]:
    """Name and GPU from a file in either layout."""
    content = device_of(read_mapping(path), path.name)
    if not is_reference_sheet(content):
        return gpu_from_fields(content, path)
    name, gpu = gpu_from_sheet(content, path)
    checked(NamedFile, {"name": name}, path.name)
    return name, gpu


def gpu_from_fields(content: Mapping[str, Any], path: Path) -> tuple[str, GPU]:
    """Name and GPU from a mapping of GPU fields.

    Args:
      content: figures in base units or with units, `name` and `base` if wanted.
      path: the file it is from, for messages and as the name if it gives none.
    Raises: `InputError` naming the field that is unknown, wrong or missing.
    """
    return _gpu_of(checked(GPUFile, content, path.name), path)


def _gpu_of(file: GPUFile, path: Path) -> tuple[str, GPU]:
    """Name and GPU that a file describes."""
    figures, name = file.model_dump(include={*FIELDS, *LIMITS}, exclude_unset=True), printable(file.name or path.stem)
    missing = [field for field in REQUIRED_FIELDS if field not in figures]
    if file.base is None and missing:
        hint = "add the figures, or `base` with the name of a GPU to take them from"
        raise InputError(f"{path.name}: missing {', '.join(missing)}; {hint}")
    # The architecture says whose libraries run, also where all figures are those of another `base`.
    architecture = architectures().get((file.architecture or "").lower())
    if architecture is not None:
        figures.setdefault("vendor", named_figure("vendor", architecture["vendor"], path.name))
    if file.base is None:
        return name, GPU(**with_derived(vendor_of_name(name) | figures))
    try:
        return name, catalog_gpu(file.base).replace(**figures)
    except InputError as error:
        raise InputError(f"{path.name}: base: {error}") from None


# Clusters by name or file: the catalog of usual nodes, files of the user, and the door `load_cluster` to both.

_COUNTED = re.compile(r"^\s*(\d{1,9})\s*[xX×*]\s*(\S.*)$")
_CLUSTER = re.compile(r"^\d+x (.+?)(?: in .+)?$")


def node_topology(node: str, gpu: GPU) -> Topology:
    """Topology of GPUs in a server of the catalog, by name or alias. `InputError` for an unknown one."""
    entries = table("datasets", "nodes")
    name_of = {fold_name(alias): name for name, entry in entries.items() for alias in (name, *entry["aliases"])}
    if fold_name(node) not in name_of:
        raise unknown_name("node", node, [alias for name in entries for alias in (name, *entries[name]["aliases"])])
    entry = entries[name_of[fold_name(node)]]
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
    """Topology of so many GPUs of the catalog in their usual server, by the GPU's name.

    Raises: `InputError` where the catalog knows none.
    """
    node = usual_node(name, count)
    if node is not None:
        return node_topology(node, gpu)
    raise InputError(
        f"no usual server of {name} is known; give a YAML file with gpu, count and topology, one of "
        f"{', '.join(list_servers())} or a mapping of {', '.join(TOPOLOGY_FIELDS[:3])}"
    )


def cluster_name(gpu_name: str, count: int) -> str:
    """Name of so many GPUs in their usual server, the server said where it is not that of other counts."""
    node = usual_node(gpu_name, count)
    return f"{count}x {gpu_name}" + (f" in {node}" if node != usual_node(gpu_name) else "")


def gpu_in(name: str) -> str:
    """The GPU of a `cluster_name`; other names as they are."""
    match = _CLUSTER.match(name)
    return match[1] if match else name


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
    """Load a cluster, with a name for reports."""
    text = os.fspath(name_or_path)
    counted = _COUNTED.match(text)
    if counted is None and (isinstance(name_or_path, os.PathLike) or text.lower().endswith(_SUFFIXES)):
        return _read_cluster(Path(text).expanduser())
    if counted is None:
        raise InputError(f'cluster {text!r}: expected a count and a GPU such as "64x H100", or a YAML file')
    label = counted[2].strip()
    count = checked(ClusterFile, {"gpu": label, "count": int(counted[1])}, f"cluster {text!r}").count
    gpu_name, gpu, topology = _named(label, count)
    name = cluster_name(gpu_name, count) if canonical_name(label) else f"{count}x {gpu_name}"
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


def _named(label: str, count: int) -> tuple[str, GPU, Topology]:
    """Name, GPU and topology of so many GPUs, by the name of a GPU or of a server of the catalog."""
    entries = table("datasets", "nodes")
    # "64x DGX A100" counts GPUs too, by the name of the server they are in.
    if canonical_name(label) is None:
        for name, entry in entries.items():
            if fold_name(label) in map(fold_name, (name, *entry["aliases"])) and entry["gpus"]:
                gpu_name, gpu = load_named_gpu(entry["gpus"][0])
                return gpu_name, gpu, node_topology(name, gpu)
    gpu_name, gpu = load_named_gpu(label)
    return gpu_name, gpu, usual_topology(gpu_name, gpu, count)


def _read_cluster(path: Path) -> tuple[str, Cluster]:
    file = checked(ClusterFile, read_mapping(path, "a cluster file in JSON or YAML with gpu and count"), path.name)
    gpu_name, gpu = load_named_gpu(file.gpu) if isinstance(file.gpu, str) else _gpu_of(file.gpu, path)
    topology = _topology(file.topology, gpu_name, gpu, file.count)
    usual = cluster_name(gpu_name, file.count) if file.topology is None else f"{file.count}x {gpu_name}"
    return file.name or usual, Cluster(gpu, topology, file.count)


def _topology(stated: str | TopologyFile | None, gpu_name: str, gpu: GPU, count: int) -> Topology:
    """The topology that a cluster file speaks of."""
    if isinstance(stated, str):
        return node_topology(stated, gpu)
    figures = {} if stated is None else stated.model_dump(exclude={"node"}, exclude_unset=True)
    if stated is not None and stated.node is not None:
        return node_topology(stated.node, gpu).replace(**figures)
    if {"gpus_per_domain", "nic_bytes_per_s"} <= figures.keys():
        return Topology(**{"link_bytes_per_s": gpu.link_bytes_per_s, **figures})
    return usual_topology(gpu_name, gpu, count).replace(**figures)
