"""Devices of measurement files in the GPU catalog."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu, gpu_info
from neusight_jax.hardware.gpu import GPU

GPU_FILE = "gpu.json"
"""File in a measurement folder with the figures of its device, where the catalog does not have it."""
NONE_OWN: Mapping[str, GPU] = MappingProxyType({})


def find_device(name: str, extra_gpus: Mapping[str, GPU] = NONE_OWN) -> tuple[str, GPU]:
    """Canonical name and figures of a device as a driver spells it.

    Args:
      name: of the device; extra_gpus: devices that measurement folders bring along, by name.
    Raises: `InputError` offering the nearest names, and saying how to describe a device that the catalog lacks.
    """
    if name in extra_gpus:
        return name, extra_gpus[name]
    try:
        return gpu_info(name).name, catalog_gpu(name)
    except InputError as error:
        described = f"; described here: {', '.join(extra_gpus)}" if extra_gpus else ""
        place = f"with that name, as {GPU_FILE} beside the measurements or as --gpu-file FILE"
        raise InputError(f"{error}: {place}{described}") from None


def own_devices(roots: Iterable[Path]) -> tuple[dict[str, GPU], tuple[str, ...]]:
    """Devices that GPU files among measurements describe, or the `gpu.json` beside them, by name; notes for people.

    Args:
      roots: measurement folders, files in one (in `kernels/` of one), and GPU files.
    Raises: `InputError` for a file that cannot be read, or that takes the name of a GPU in the catalog.
    """
    from neusight_jax.hardware.files import load_named_gpu

    extra_gpus: dict[str, GPU] = {}
    notes = []
    for file in dict.fromkeys(file for root in roots for file in _gpu_files(root)):
        name, gpu = load_named_gpu(file)
        if canonical_name(name) is not None:
            raise InputError(f"{file}: {name} is in the catalog; remove the file, or give the device another name")
        if name in extra_gpus and extra_gpus[name] != gpu:
            notes.append(f"{file} describes {name} once more, with other figures; the first ones are taken")
        extra_gpus.setdefault(name, gpu)
    return extra_gpus, tuple(notes)


def measured_device(name: str, measured: Collection[str]) -> str:
    """The measured device that a name means, the catalog's other boards aside.

    "V100" is the catalog's alias of one V100; where another one was measured, and no other, it means that one.

    Args:
      name: as a user spells it; measured: canonical names.
    Raises: `InputError` listing the measured devices when none answers to the name, or several do.
    """
    canonical = name if name in measured else canonical_name(name)
    if canonical in measured:
        return str(canonical)
    model, *rest = _words(name) or [""]
    near = [board for board in sorted(measured) if _words(board)[:1] == [model] and set(rest) <= set(_words(board))]
    if len(near) == 1:
        return near[0]
    if near:
        raise InputError(f"{name!r} may be {' or '.join(near)}: these were measured; give one name in full")
    choices = f"measured here: {', '.join(sorted(measured)) or 'no named device'}"
    if canonical is None:
        raise InputError(f"unknown GPU {name!r}; {choices}")
    raise InputError(f"{canonical} ({name!r}) has no rows in the measurements; {choices}")


def _words(name: str) -> list[str]:
    """The words of a GPU's name, the model's first: brands and product lines left out."""
    words = [word for word in re.split(r"[\s_\-()]+", name.lower()) if word]
    return [word for word in words if word not in ("nvidia", "amd", "intel", "tesla", "instinct", "geforce")]


def is_gpu_file(path: Path) -> bool:
    """Whether a path among measurements is a file of a GPU's figures."""
    return path.suffix.lower() in (".json", ".yaml", ".yml")


def _gpu_files(root: Path) -> list[Path]:
    if is_gpu_file(root):
        return [root]
    folders = [root] if root.is_dir() else [root.parent, root.parent.parent]
    return [folder / GPU_FILE for folder in folders if (folder / GPU_FILE).is_file()][:1]
