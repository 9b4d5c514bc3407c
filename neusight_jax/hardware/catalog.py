"""The GPU catalog: `datasets/gpus.yaml` and `datasets/boards.yaml`, by canonical name or alias."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neusight_jax.errors import unknown_name
from neusight_jax.hardware.gpu import FIELDS, GPU, MEMORY_KINDS, VENDORS, WIDTH, with_derived
from neusight_jax.tables import table

DIE_FIGURES: tuple[str, ...] = ("l2_partitions", "warp_schedulers", "l1_bytes", "resident_threads")
"""Figures that the dies of an architecture share."""


@dataclass(frozen=True)
class GPUInfo:
    """Facts of the catalog about a GPU beside its figures.

    Attributes:
      name: canonical name, the driver's where known.
      vendor: "NVIDIA", "AMD", "Intel" or "other".
      architecture: e.g. "ampere", "cdna2".
      memory: "hbm", "gddr", "lpddr", or "gddr_ecc" where the board ships with ECC on and keeps the codes in the same
        GDDR.
      aliases: other names it answers to.
      lanes_per_sm: fp32 lanes of one SM; fp32 peak = SMs × lanes × 2 × clock.
      sources: figure -> where it can be checked.
      estimates: figures that are not public, or on which sources disagree.
    """

    name: str
    vendor: str
    architecture: str
    memory: str
    aliases: tuple[str, ...]
    lanes_per_sm: float
    sources: Mapping[str, str]
    estimates: tuple[str, ...]


def fold_name(name: str) -> str:
    """A GPU name without case, spaces, dashes, underscores and leading vendor: what names are compared by."""
    folded = re.sub(r"[\s_\-()]+", "", name.lower())
    # A name that is a vendor alone stays, as nothing would be left of it.
    return re.sub(r"^(nvidia|amd|intel)(?=.)", "", folded)


@functools.cache
def _entries() -> dict[str, dict[str, Any]]:
    """The catalog files, canonical name -> entry."""
    return {**table("datasets", "gpus"), **table("datasets", "boards")}


@functools.cache
def _index() -> dict[str, str]:
    """Folded name or alias -> canonical name."""
    return {fold_name(alias): name for name, entry in _entries().items() for alias in (name, *entry["aliases"])}


def list_gpus() -> list[str]:
    """Canonical names of the GPUs in the catalog."""
    return list(_entries())


def list_servers() -> list[str]:
    """Names of the servers in the catalog that clusters are put together from."""
    return list(table("datasets", "nodes"))


def canonical_name(name: str) -> str | None:
    """The catalog's name for a GPU, whatever alias it is given; None if the catalog does not have it."""
    return _index().get(fold_name(name))


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    """Canonical name and entry of a GPU; `InputError` offering the nearest names."""
    canonical = canonical_name(name)
    if canonical is None:
        names = [alias for gpu, entry in _entries().items() for alias in (gpu, *entry["aliases"])]
        template = "`neusight-jax check --template gpu` prints one"
        hint = f"`neusight-jax gpus` lists all; or give a JSON or YAML file with its figures ({template})"
        raise unknown_name("GPU", name, names, hint)
    return canonical, _entries()[canonical]


def catalog_gpu(name: str) -> GPU:
    """A GPU of the catalog by name or alias. `InputError` if there is none of that name."""
    entry = _entry(name)[1]
    info = gpu_info(name)
    # Figures of the whole die go before what peaks of a trimmed board would say of its matrix units.
    width = of_its_memory(info, WIDTH)
    figures = with_derived(
        ({WIDTH: width} if width else {}) | {field: float(entry[field]) for field in FIELDS if field in entry}
    )
    return GPU(
        **figures,
        fp32_joule_per_flop=base_clock_energy(figures, float(entry.get("base_clock_hz", 0.0))),
        memory_kind=float(memory_kind(info)),
        **{name: of_its_memory(info, name) for name in DIE_FIGURES},
        vendor=float(VENDORS.index(info.vendor)),
    )


def gpu_info(name: str) -> GPUInfo:
    """Facts of the catalog about a GPU, by name or alias. `InputError` if there is none of that name."""
    canonical, entry = _entry(name)
    return GPUInfo(
        name=canonical,
        vendor=architectures()[entry["architecture"]]["vendor"],
        architecture=entry["architecture"],
        memory=entry["memory"],
        aliases=tuple(str(alias) for alias in entry["aliases"]),
        lanes_per_sm=float(entry["lanes_per_sm"]),
        sources=entry["sources"],
        estimates=tuple(entry["estimates"]),
    )


def architectures() -> dict[str, dict[str, Any]]:
    """Facts of every architecture: `datasets/architectures.yaml`."""
    return table("datasets", "architectures")


def generation_of(device: str, kind: str = "blas") -> str:
    """Generation of kernels a device runs: an architecture's of its vendor's BLAS ("blas") or of attention
    ("attention"), else its own architecture ("tensor").

    A device that the catalog does not have is a generation of its own.
    """
    if canonical_name(device) is None:
        return device
    architecture = gpu_info(device).architecture
    generation: str = architectures()[architecture].get(kind, architecture)
    return generation


def memory_kind(info: GPUInfo) -> int:
    """Position of a GPU's memory in `MEMORY_KINDS`; 0 = none of them."""
    return MEMORY_KINDS.index(architectures()[info.architecture].get(info.memory, info.memory))


def base_clock_energy(figures: Mapping[str, float], base_clock_hz: float) -> float:
    """The most that an fp32 FLOP takes on a board that keeps its base clock within its power, J; 0 = not listed.

    NVIDIA seems to size it for the heaviest work: long products measured alone settle at 0.38 of T4's peak and at 0.86
    of V100's, their base clocks are 0.37 and 0.89 of their boost clocks.
    """
    if not base_clock_hz:
        return 0.0
    return figures["tdp_w"] / (figures["fp32_flop_per_s"] * base_clock_hz / figures["clock_hz"])


def of_its_memory(info: GPUInfo, figure: str) -> float:
    """A figure of the dies that an architecture pairs with a GPU's memory, or else of all its dies; 0 = not said."""
    facts = architectures()[info.architecture]
    return float(facts.get(f"{info.memory}_{figure}", facts.get(figure, 0.0)))
