"""The device that is measured, by name and figures, and the host around it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neusight_jax.errors import InputError, unknown_name
from neusight_jax.hardware.catalog import canonical_name, catalog_gpu
from neusight_jax.hardware.gpu import FIELDS, GPU
from neusight_jax.hardware.gpu_file import gpu_from_fields, load_named_gpu
from neusight_jax.profiling.clock import Backend
from neusight_jax.profiling.processor import processor_figures

BACKENDS: tuple[str, ...] = ("jax", "torch")


def make_backend(name: str) -> Backend:
    """A backend on the first device of this machine; `InputError` for an unknown name or a missing package."""
    if name == "jax":
        from neusight_jax.profiling.jax_backend import JaxBackend

        return JaxBackend()
    if name != "torch":
        raise unknown_name("backend", name, BACKENDS)
    try:
        from neusight_jax.profiling.torch_backend import TorchBackend
    except ImportError as error:
        raise InputError(f"torch cannot be imported ({error}); `pip install '.[torch]'`") from None
    return TorchBackend()


@dataclass(frozen=True)
class Machine:
    """The device that is measured.

    Attributes:
      name: for the column `device`; gpu: its figures.
      file: the content of a GPU file that makes it known where the catalog does not have it, else None.
      estimated: whether the figures are raised to what is measured (a processor nobody gave figures of).
      provenance: what the rows are, in words.
    """

    name: str
    gpu: GPU
    file: dict[str, Any] | None
    estimated: bool
    provenance: str

    def settled(self, rates: Iterable[tuple[float, float, float]]) -> Machine:
        """The machine once everything is measured; `rates` as for `processor.processor_figures`."""
        if not self.estimated:
            return self
        content = processor_figures(rates)
        return Machine(self.name, gpu_from_fields(content, Path("gpu.json"))[1], content, True, self.provenance)


def find_machine(backend: Backend, given: str | None) -> Machine:
    """The machine a backend measures.

    Args:
      backend: says which device it is; given: name or file of the GPU if its figures are not in the catalog.
    Raises: `InputError` when the catalog does not know the device and nothing is given, or another GPU is given.
    """
    provenance = (
        f"measured with {backend.name} on a CPU that stands in for a GPU"
        if backend.is_cpu
        else f"measured with {backend.name} on this GPU"
    )
    known = None if backend.is_cpu else canonical_name(backend.device)
    if given is None:
        if backend.is_cpu:
            content = processor_figures()
            name, gpu = gpu_from_fields(content, Path("gpu.json"))
            return Machine(name, gpu, content, True, provenance)
        if known is None:
            raise InputError(
                f"{backend.device} is not in the catalog; write its figures into a file (`base` and what differs is "
                "enough) and give it with --gpu FILE"
            )
        return Machine(known, catalog_gpu(known), None, False, provenance)
    name, gpu = load_named_gpu(given)
    if canonical_name(name) is not None and (backend.is_cpu or canonical_name(name) != known):
        raise InputError(f"--gpu is {name}, but {backend.name} runs on {backend.device} here; leave --gpu out")
    figures = {field: float(np.asarray(getattr(gpu, field))) for field in FIELDS}
    own = None if canonical_name(name) is not None else {"name": name, **figures}
    return Machine(name, gpu, own, False, provenance)


def host_facts() -> dict[str, Any]:
    """Of the host: system, Python, cores, and how busy it is (a busy host makes rows noisy)."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else (float("nan"),)
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(load[0], 2),
    }
