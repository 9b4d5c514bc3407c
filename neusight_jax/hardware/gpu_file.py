"""GPU files of the user, JSON or YAML, and the front door `load_gpu` that takes a catalog name or such a file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from neusight_jax.datasets.reference_gpu import gpu_from_sheet, is_reference_sheet
from neusight_jax.errors import InputError, printable
from neusight_jax.hardware.catalog import architectures, canonical_name, catalog_gpu
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
from neusight_jax.tables import read_content

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
