"""A calibrated checkpoint: measured kernels of one GPU and a checkpoint in, a complete checkpoint and its card out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

import neusight_jax
from neusight_jax.datasets.devices import measured_device
from neusight_jax.datasets.measurements import measured_names, read_measured_on, table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.files import refuse_existing
from neusight_jax.hardware.catalog import canonical_name
from neusight_jax.hardware.gpu import GPU
from neusight_jax.hardware.gpu_file import load_named_gpu
from neusight_jax.model.checkpoint import load_card, load_predictor, save_checkpoint
from neusight_jax.training.calibration import calibration, prior_of


def calibrate_checkpoint(
    measurements: Sequence[Path | str],
    gpu: str,
    output: Path | str,
    checkpoint: str = "fp32",
    *,
    drop_invalid: bool = False,
) -> dict[str, Any]:
    """Calibrate a checkpoint on one GPU and write the result to a folder.

    A GPU the checkpoint was trained on starts from its measured effect.

    Args:
      measurements: files or folders of the schema, or a filled plan in CSV; rows of other GPUs are left out.
      gpu: name (of a board that was measured, `measured_device`), or file of figures; output: folder to write, new or
        empty; checkpoint: name or path.
      drop_invalid: leave bad rows out instead of refusing.
    Returns: the card.
    Raises: `InputError` for bad measurements, unknown names, a checkpoint that cannot be calibrated.
    """
    refuse_existing(output)
    gpu = _as_measured(gpu, measurements)
    name, machine = load_named_gpu(gpu)
    card = load_card(checkpoint)
    if "calibrated" in card:
        raise InputError(
            f"{checkpoint} is calibrated already, on {card['calibrated']['gpu']}; start from "
            f"{card['calibrated']['checkpoint']} with all measured kernels together"
        )
    known = canonical_name(gpu) in card.get("device_effects", {})
    predictor = load_predictor(checkpoint, canonical_name(name))
    data = read_measured_on(measurements, name, machine, on_invalid="drop" if drop_invalid else "refuse")
    frame = data.frame
    done = calibration(predictor, machine, table_from_frame(frame), frame["latency_s"].to_numpy(np.float64))
    rows = {family: int(item["rows"]) for family, item in done.summary.items()}
    kept = {key: value for key, value in card.items() if key not in ("format", "seconds")}
    out = {
        **kept,
        "kind": "calibrated",
        "architecture": {**card["architecture"], "points": rows},
        "trained_dtypes": sorted({*card.get("trained_dtypes", ()), *frame["dtype"].unique()}),
        "held_out": [device for device in card.get("held_out", ()) if device != name],
        "device_effects": {},
        "device_intervals": {},
        "notes": list(data.notes),
        "version": neusight_jax.__version__,
        "made_by": f'neusight-jax calibrate --checkpoint {checkpoint} --measurements DIR --gpu "{gpu}" --output DIR',
        "calibrated": {
            "gpu": name,
            "figures": {item.name: float(np.asarray(getattr(machine, item.name))) for item in fields(GPU)},
            "checkpoint": checkpoint,
            "from_measured_effect": known,
            "rows": rows,
            "summary": done.summary,
            "prior": {family: asdict(prior_of(family)) for family in rows},
        },
    }
    save_checkpoint(output, done.predictor, out)
    return out


def _as_measured(gpu: str, measurements: Sequence[Path | str]) -> str:
    """The measured device that the name of a GPU means; the name itself where none does, or it is a file."""
    if canonical_name(gpu) is None:
        return gpu
    try:
        return measured_device(gpu, measured_names(measurements))
    except InputError:
        return gpu  # rows need not name their device; if these do, reading them says so
