"""What `make_plain.py` pinned, and today's code with the same weights and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import neusight_jax as nj
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import tree_from_arrays, untrained
from neusight_jax.model.physics import FITTED
from neusight_jax.model.residuals import EFFECTS, FLOOR, IN_MODEL, OTHER_VENDOR, ROWS

FILE = Path(__file__).with_name("plain_fp32.npz")
ARCHITECTURE = {
    **{"families": ["conv", "elementwise", "softmax", "norm"], "hidden": [32, 32], "members": 4},
    "intervals": False,
}


def read() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of the file."""
    with np.load(FILE) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(str(arrays.pop("header"))), arrays


def predictor(arrays: dict[str, np.ndarray]) -> Any:
    """The pinned weights in today's predictor; what came later is zero, and no row of a
    reduction is read again or waited for. Without products, of another form now."""
    flat = {name.removeprefix("weights/"): values for name, values in arrays.items() if name.startswith("weights/")}
    left = ("trust/", *(f"{part}/{name}/" for part in ("families", "tiles") for name in ("linear", "bmm")))
    flat = {name: values for name, values in flat.items() if not name.startswith(left)}
    for name in ARCHITECTURE["families"]:
        inside, gap, vendor = (flat.pop(f"families/{name}/{leaf}") for leaf in ("in_model", "log_gap_s", "stack"))
        table = np.zeros((4, len(ROWS), len(EFFECTS)), np.float32)
        table[:, IN_MODEL, :FLOOR], table[:, OTHER_VENDOR] = inside, vendor
        table[:, IN_MODEL, FLOOR] = gap - flat[f"families/{name}/log_floor_s"]
        flat[f"families/{name}/residual"] = table
        physics = np.zeros(len(FITTED), np.float32)
        physics[[FITTED.index(constant) for constant in ("row_start", "trip_cycles")]] = 40.0, -40.0
        flat[f"families/{name}/physics"] = physics
    return tree_from_arrays(untrained("mixture", ARCHITECTURE), flat, FILE)


def kernels(arrays: dict[str, np.ndarray], name: str) -> Any:
    """The pinned kernels of one family as a table."""
    dims = [dict(zip(FAMILIES[name].dims, map(float, row), strict=True)) for row in arrays[f"dims/{name}"]]
    return table_from_kernels([Kernel(name, FAMILIES[name].ops[0], each) for each in dims])


def gpus(header: dict[str, Any]) -> dict[int, nj.GPU]:
    """GPUs of the file by position, of the figures that it gives. Left out: silicon of 6 nm, whose energy a FLOP is
    that of 7 nm since."""
    return {
        place: nj.GPU(**figures)
        for place, figures in enumerate(header["figures"])
        if not 5.0 < figures["process_nm"] < 7.0
    }
