"""`neusight-jax evaluate`: errors of a checkpoint on measurements, beside baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from neusight_jax.cli.console import progress_console, remark, show, show_json
from neusight_jax.cli.measured import measured_devices
from neusight_jax.cli.options import DropInvalid, MeasurementFolders
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import atomic_folder, refuse_existing, write_text_atomically

PROTOCOLS = ("logo", "logo-size", "architecture", "seen", "logo-models", "few-shot")


def evaluate(
    measurements: MeasurementFolders,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            help="A name of `neusight-jax checkpoints`, or a folder written by `train`.",
            show_default="fp32",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            "--protocol",
            help="logo, logo-size, architecture, seen, logo-models or few-shot: own fits, not a checkpoint.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="With --protocol: fits per GPU left out.", show_default="5")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="With --protocol: a new folder for table.md, scores.json and rows.csv."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option("--device", metavar="DEVICE", help="Only these GPUs; default: all measured.")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="NAME", help="Beside it, e.g. roofline; all = those that can run here."),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write JSON here; - is stdout, without tables.")
    ] = None,
    drop_invalid: DropInvalid = False,
) -> None:
    """Compare forecasts with measurements, by kernel family and GPU.

    Of a checkpoint, with how many measurements lie in its 80 % intervals and how wide these are; or, with --protocol,
    of predictors fitted without the GPU they are scored on.
    """
    from neusight_jax.results import json_text, schema

    _check_options(protocol, checkpoint, seeds, baseline)
    devices = measured_devices(device, measurements) if device else None
    if output is not None:
        if protocol is None:
            raise InputError("--output belongs to --protocol; use --json FILE to write the scores of a checkpoint")
        refuse_existing(output)
    common: dict[str, Any] = {"devices": devices, "drop_invalid": drop_invalid, "console": progress_console()}
    if protocol is None:
        from neusight_jax.training.evaluation.scores import evaluate as evaluate_checkpoint

        evaluation = evaluate_checkpoint(measurements, checkpoint or "fp32", baselines=list(baseline or ()), **common)
    else:
        common["seeds"] = 5 if seeds is None else seeds
        if protocol == "few-shot":
            from neusight_jax.training.evaluation.few_shot import run_few_shot

            evaluation = run_few_shot(measurements, **common)
        elif protocol == "logo-models":
            from neusight_jax.training.evaluation.models_protocol import run_models_protocol

            evaluation = run_models_protocol(measurements, **common)
        else:
            from neusight_jax.training.evaluation.protocol import run_protocol
            from neusight_jax.training.evaluation.systems import chosen_systems

            systems, notes = chosen_systems(baseline or (), protocol)
            evaluation = run_protocol(measurements, protocol, systems=systems, notes=notes, **common)
    named = {"checkpoint": None if protocol else checkpoint or "fp32"}
    content = {"schema": schema("evaluation"), **named, "notes": [], **evaluation.to_dict()}
    text = json_text(content) + "\n"
    if output is not None:
        with atomic_folder(output) as folder:
            (folder / "table.md").write_text(evaluation.to_markdown(), encoding="utf-8")
            (folder / "scores.json").write_text(text, encoding="utf-8")
            evaluation.rows.to_csv(folder / "rows.csv", index=False)
        remark(f"wrote {output}")
    if json_file == "-":
        show_json(content)
        return
    if json_file is not None:
        write_text_atomically(json_file, text)
        remark(f"wrote {json_file}")
    show(evaluation.tables())


def _check_options(protocol: str | None, checkpoint: str | None, seeds: int | None, baseline: list[str] | None) -> None:
    """`InputError` for options that the kind of evaluation asked for would not heed."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise unknown_name("protocol", protocol, PROTOCOLS)
    if protocol is None and seeds is not None:
        raise InputError("--seeds belongs to --protocol: a checkpoint is scored as it is; leave it out")
    if protocol is not None and checkpoint is not None:
        raise InputError(f"--protocol {protocol} fits its own predictors; leave --checkpoint out")
    if protocol in ("few-shot", "logo-models") and baseline:
        raise InputError(f"--protocol {protocol} has no baselines to choose; leave --baseline out")
