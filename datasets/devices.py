"""Devices of measurement files in the GPU catalog."""

from __future__ import annotations

import functools

from neusight_jax.gpu import GPU
from neusight_jax.gpu_catalog import catalog_gpu, gpu_info


@functools.lru_cache(maxsize=256)
def find_device(name: str) -> tuple[str, GPU]:
    """Canonical name and figures of a device as a driver spells it. `InputError` offering the nearest names."""
    return gpu_info(name).name, catalog_gpu(name)


def is_amd(name: str) -> bool:
    """Whether a device of the catalog is AMD's, whose sweeps have a folder of their own."""
    return gpu_info(name).vendor == "AMD"
