"""`neusight-jax evaluate`: errors of a checkpoint on measurements, beside baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from neusight_jax.cli.console import remark, show, show_json
from neusight_jax.cli.options import Checkpoint, DropInvalid, MeasurementFolders


def evaluate(
    measurements: MeasurementFolders,
    checkpoint: Checkpoint,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="DEVICE", help="Only these GPUs; default: all measured.")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", metavar="NAME", help="Beside it, e.g. roofline.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON here; - is stdout, without tables.")
    ] = None,
    drop_invalid: DropInvalid = False,
) -> None:
    """Compare forecasts with measurements, by kernel family and GPU."""
    from neusight_jax.gpu_catalog import gpu_info

    devices = [gpu_info(name).name for name in device] if device else None
    from neusight_jax.files import write_atomically
    from neusight_jax.training.evaluation import evaluate as evaluate_checkpoint

    evaluation = evaluate_checkpoint(measurements, checkpoint, devices, list(baseline or ()), drop_invalid=drop_invalid)
    if json_file == "-":
        show_json(evaluation.to_dict())
        return
    if json_file is not None:
        text = json.dumps(evaluation.to_dict(), indent=1) + "\n"
        write_atomically(Path(json_file), lambda path: path.write_text(text, encoding="utf-8") and None)
        remark(f"wrote {json_file}")
    show(evaluation.tables())
