"""`neusight-jax evaluate | leaderboard`: errors of predictors on measurements, and the leaderboard of all systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from neusight_jax.cli.console import progress_console, remark, report_to, show, show_json
from neusight_jax.cli.options import AsJson, DropInvalid, GpuFiles, MeasurementFolders, ReportFile, argument, option
from neusight_jax.cli.train import measured_devices
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import atomic_folder, refuse_existing, write_text_atomically

_OF_MODELS = ("logo-models", "architecture-models")
PROTOCOLS = ("logo", "logo-size", "architecture", "seen", *_OF_MODELS, "few-shot")
_PROTOCOL = f"Own fits, not a checkpoint: {', '.join(PROTOCOLS)}."
_EVALUATION = "With --protocol: a new folder for table.md, scores.json and rows.csv."
_ENTRY = "Score these predictions: a filled --template."
_BOARD = Path("docs/leaderboard.csv")
_BASELINE = "Beside it, e.g. roofline; all = those that can run here."


def evaluate(
    measurements: MeasurementFolders,
    checkpoint: Annotated[
        str | None,
        option("A name of `neusight-jax checkpoints`, or a folder written by `train`.", default="fp32"),
    ] = None,
    protocol: Annotated[str | None, option(_PROTOCOL)] = None,
    seeds: Annotated[int | None, option("With --protocol: fits per GPU left out.", default="5")] = None,
    output: Annotated[Path | None, option(_EVALUATION)] = None,
    device: Annotated[list[str] | None, option("Only these GPUs; default: all measured.", metavar="DEVICE")] = None,
    baseline: Annotated[list[str] | None, option(_BASELINE, metavar="NAME")] = None,
    drop_invalid: DropInvalid = False,
    gpu_file: GpuFiles = None,
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare forecasts with measurements, by kernel family and GPU.

    Of a checkpoint, with how many measurements lie in its 80 % intervals and how wide these are; or, with --protocol,
    of predictors fitted without the GPU they are scored on.
    """
    from neusight_jax.records import json_text, schema

    _check_options(protocol, checkpoint, seeds, baseline)
    measurements = [*measurements, *(gpu_file or ())]
    devices = measured_devices(device, measurements) if device else None
    if output is not None:
        if protocol is None:
            raise InputError("--output belongs to --protocol; for the scores of a checkpoint give --json")
        refuse_existing(output)
    common: dict[str, Any] = {"devices": devices, "drop_invalid": drop_invalid, "console": progress_console()}
    if protocol is None:
        from neusight_jax.training.evaluation.scores import evaluate as evaluate_checkpoint

        evaluation = evaluate_checkpoint(measurements, checkpoint or "fp32", baselines=list(baseline or ()), **common)
    else:
        evaluation = _by_protocol(protocol, baseline or (), measurements, seeds=5 if seeds is None else seeds, **common)
    header = {"checkpoint": None if protocol else checkpoint or "fp32"}
    content = {"schema": schema("evaluation"), **header, "notes": [], **evaluation.to_dict()}
    text = json_text(content) + "\n"
    if output is not None:
        with atomic_folder(output) as folder:
            (folder / "table.md").write_text(evaluation.to_markdown(), encoding="utf-8")
            (folder / "scores.json").write_text(text, encoding="utf-8")
            evaluation.rows.to_csv(folder / "rows.csv", index=False)
        remark(f"wrote {output}")
    report_to(report, evaluation, checkpoint=header["checkpoint"])
    if as_json:
        show_json(content)
    else:
        show(evaluation)


def _by_protocol(protocol: str, baseline: Sequence[str], measurements: list[Path], **options: Any) -> Any:
    if protocol == "few-shot":
        from neusight_jax.training.evaluation.protocols import run_few_shot

        return run_few_shot(measurements, **options)
    if protocol in _OF_MODELS:
        from neusight_jax.training.evaluation.protocols import run_models_protocol

        return run_models_protocol(measurements, protocol, **options)
    from neusight_jax.training.evaluation.protocols import run_protocol
    from neusight_jax.training.evaluation.systems import chosen_systems

    systems, notes = chosen_systems(baseline, protocol)
    return run_protocol(measurements, protocol, systems=systems, notes=notes, **options)


def _check_options(protocol: str | None, checkpoint: str | None, seeds: int | None, baseline: list[str] | None) -> None:
    """`InputError` for options that the kind of evaluation asked for would not heed."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise unknown_name("protocol", protocol, PROTOCOLS)
    if protocol is None and seeds is not None:
        raise InputError("--seeds belongs to --protocol: a checkpoint is scored as it is; leave it out")
    if protocol is not None and checkpoint is not None:
        raise InputError(f"--protocol {protocol} fits its own predictors; leave --checkpoint out")
    if protocol in ("few-shot", *_OF_MODELS) and baseline:
        raise InputError(f"--protocol {protocol} has no baselines to choose; leave --baseline out")


def leaderboard(
    evaluations: Annotated[
        list[Path] | None,
        argument("Folders of `evaluate --output`, or what its or --entry's --json printed.", "EVALUATION..."),
    ] = None,
    output: Annotated[Path | None, option("The page; a CSV is written beside it.", metavar="FILE.md")] = None,
    note: Annotated[str, option("A sentence for its end, e.g. the commit and the measurements.")] = "",
    entry: Annotated[Path | None, option(_ENTRY, metavar="FILE.csv", group="Enter")] = None,
    template: Annotated[
        Path | None, option("Write the rows to be predicted there.", metavar="FILE.csv", group="Enter")
    ] = None,
    measurements: Annotated[
        list[Path] | None, option("Parquet or CSV files of measured kernels, or folders of them.", group="Enter")
    ] = None,
    split: Annotated[str, option("logo, logo-size or checkpoint (GPUs in training).", group="Enter")] = "logo",
    name: Annotated[str | None, option("Of the system.", default="that of the file", group="Enter")] = None,
    device: Annotated[
        list[str] | None,
        option("Only these GPUs; default: those of the board.", metavar="DEVICE", group="Enter"),
    ] = None,
    board: Annotated[Path, option("Scores to compare with, if the file is there.", group="Enter")] = _BOARD,
    drop_invalid: Annotated[bool, option("Leave bad rows out instead of refusing them.", group="Enter")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the leaderboard page and its CSV; or score predictions of your own on its rows.

    First --template, which lists the rows; fill its column predicted_s; then --entry.
    """
    if entry is None and template is None:
        _write_page(evaluations or [], output, note)
        return
    if evaluations or output or note or (entry and template):
        raise InputError("give one of --entry, --template, or EVALUATION... with --output; not two of them")
    if not measurements:
        raise InputError("--entry and --template need --measurements DIR, the folder whose rows are predicted")
    from neusight_jax.training.evaluation import leaderboard as entries

    others = entries.read_board(board) if board.exists() or board != _BOARD else None
    devices = measured_devices(device, measurements) if device else None
    rows = entries.public_rows(measurements, split, devices, board=others, drop_invalid=drop_invalid)
    if template is not None:
        write_text_atomically(template, entries.template(rows).to_csv(index=False))
        remark(f"wrote {template}: {len(rows):,} rows of {rows['device'].nunique()} GPUs; fill predicted_s, seconds")
        return
    assert entry is not None
    _show_scores(entries.score_entry(entry, rows, split, others, name), as_json)


def _show_scores(evaluation: Any, as_json: bool) -> None:
    from neusight_jax.records import schema

    if as_json:
        show_json({"schema": schema("evaluation"), **evaluation.to_dict()})
    else:
        show(evaluation)


def _write_page(evaluations: list[Path], output: Path | None, note: str) -> None:
    """The page and its CSV."""
    if not evaluations or output is None:
        raise InputError("expected EVALUATION... and --output FILE.md, or --template, or --entry; see --help")
    if output.suffix != ".md":
        raise InputError(f"--output {output}: expected a Markdown file, e.g. docs/leaderboard.md")
    from neusight_jax.training.evaluation.leaderboard import read_leaderboard

    standings, beside = read_leaderboard(evaluations), output.with_suffix(".csv")
    write_text_atomically(beside, standings.scores.round(3).to_csv(index=False))
    write_text_atomically(output, standings.to_markdown(beside.name, note))
    remark(f"wrote {output} and {beside}")
