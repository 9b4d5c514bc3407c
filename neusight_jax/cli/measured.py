"""Devices of measurements, as a command names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neusight_jax.cli.console import remark


def measured_devices(names: Sequence[str], measurements: Sequence[Path]) -> list[str]:
    """Canonical names of the measured devices meant, with a remark where the catalog means another board.

    Raises: `InputError` for a device without rows, listing those that have some.
    """
    from neusight_jax.datasets.measurements import find_measured
    from neusight_jax.gpu_catalog import canonical_name

    found: list[str] = find_measured(names, measurements)
    for name, device in zip(names, found, strict=True):
        if canonical_name(name) not in (None, device):
            remark(f"note: {name} is taken for {device}, which was measured; {canonical_name(name)} was not")
    return found
