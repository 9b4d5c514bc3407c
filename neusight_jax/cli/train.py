"""`neusight-jax train | calibrate`: a predictor fitted to measurements, or a checkpoint or a machine to a handful."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from neusight_jax.cli import interrupts
from neusight_jax.cli.console import answer, busy, progress_console, remark
from neusight_jax.cli.options import (
    AsJson,
    Checkpoint,
    DropInvalid,
    Gpu,
    GpuFiles,
    MeasurementFolders,
    OutputFolder,
    ReportFile,
    Resume,
    option,
)
from neusight_jax.errors import InputError, unknown_name


def train(
    measurements: MeasurementFolders,
    recipe: Annotated[str, option("fp32, tensorcore, power, vendor, tiny (a trial), or a baseline.")],
    output: OutputFolder,
    hold_out: Annotated[list[str] | None, option("GPUs whose rows are left out.", metavar="DEVICE")] = None,
    seed: Annotated[int, option("Of the random numbers.")] = 0,
    resume: Resume = False,
    drop_invalid: DropInvalid = False,
    network: Annotated[str | None, option("A flax module of your own.", metavar="PACKAGE.MODULE:CLASS")] = None,
    checkpoint: Annotated[str, option("Which recipes power and vendor start from.")] = "tensorcore",
    gpu_file: GpuFiles = None,
) -> None:
    """Train a predictor on measurements and write a checkpoint."""
    measurements = [*measurements, *(gpu_file or ())]
    held_out = measured_devices(hold_out or (), measurements)
    from neusight_jax.model.network import load_network
    from neusight_jax.training.evaluation.systems import BASELINES, train_baseline
    from neusight_jax.training.fit import kept_steps
    from neusight_jax.training.power import RECIPE as POWER
    from neusight_jax.training.power import train_power
    from neusight_jax.training.recipes import RECIPES
    from neusight_jax.training.recipes import train as train_recipe
    from neusight_jax.training.vendor import RECIPE as VENDOR
    from neusight_jax.training.vendor import train_vendor

    if recipe in RECIPES:
        if not resume and kept_steps(output):
            remark(f"note: an unfinished run beside {output} is forgotten; --resume would go on with it")
        with interrupts.kept_as(lambda: kept_steps(output)):
            card = train_recipe(
                measurements=measurements,
                recipe=recipe,
                output=output,
                hold_out=held_out,
                seed=seed,
                resume=resume,
                drop_invalid=drop_invalid,
                console=progress_console(),
                network=load_network({"module": network, "arguments": {}}) if network else None,
            )
    elif recipe not in (POWER, VENDOR, *BASELINES):
        raise unknown_name("recipe", recipe, (*RECIPES, POWER, VENDOR, *BASELINES))
    elif network:
        raise InputError(f"--network is not for {recipe}, which has no network; leave it out")
    elif resume:
        raise InputError(f"--resume is not for {recipe}, which is fitted in one go; leave it out")
    elif recipe == POWER:
        card = train_power(measurements, output, checkpoint, held_out, drop_invalid=drop_invalid)
        for device, percent in card["power"]["errors_percent"].items():
            role = "held out" if device in card["power"]["held_out"] else "fitted"
            typer.echo(f"{device}: watts off by {percent} % in the mean, {role}")
    elif recipe == VENDOR:
        card = train_vendor(measurements, output, checkpoint, held_out, drop_invalid=drop_invalid)
        for role, families in card["vendor"]["errors_percent"].items():
            for name, percents in families.items():
                for device, percent in percents.items():
                    typer.echo(f"{name} on {device}, {role}: off by {percent} % in the mean")
    else:
        card = train_baseline(measurements, recipe, output, held_out, seed, drop_invalid=drop_invalid)
    _remarks(card, output)
    devices = ", ".join(card.get("trained_on", {}).get("devices", ()))
    typer.echo(f"{output}: {card['kind']} checkpoint, trained on {devices}")


def calibrate(
    gpu: Gpu,
    measurements: Annotated[
        list[Path] | None, option("Parquet or CSV files of measured kernels, or folders of them.")
    ] = None,
    output: Annotated[
        Path | None, option("The folder to write, new or empty; a .csv or .parquet of --suggest.")
    ] = None,
    checkpoint: Checkpoint = "fp32",
    drop_invalid: DropInvalid = False,
    identify: Annotated[bool, option("Which figures of the machine explain the kernels? Writes nothing.")] = False,
    figures: Annotated[
        list[str] | None,
        option("To look for: fields of a GPU, or launch_s.", default="clock, memory, L2, watts and launch"),
    ] = None,
    suggest: Annotated[int | None, option("Choose so many kernels to measure.", metavar="COUNT")] = None,
    engine: Annotated[
        str | None, option("Fit vllm, trtllm or sglang to measured loads of --model, a CSV file.", metavar="ENGINE")
    ] = None,
    model: Annotated[
        list[str] | None, option("Of --suggest: models that are decided upon; of --engine: the one that was served.")
    ] = None,
    batch_size: Annotated[int, option("Of --model.")] = 1,
    mode: Annotated[str, option("Of --model: inference or training.")] = "inference",
    report: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Calibrate a checkpoint with measured kernels of one GPU, 4 to 200 of each family.

    Measurements of other GPUs are left out. A filled plan of `neusight-jax profile --plan` will do.

    With --identify, figures of the machine are fitted in place of the checkpoint: the clock it settles at, watts,
    bandwidth, L2, the launch. It says how sure they are and what cannot be told apart.

    With --suggest, the kernels are chosen whose measurement narrows the forecast of each --model most.

    With --engine, an engine's own time is fitted to loads of a server: rows of input_tokens, output_tokens, users,
    ttft_s, tpot_s and, where it has several GPUs, tensor_parallel. `serve --engine` takes the file of --output.
    """
    asked = {"--identify": identify, "--suggest": suggest is not None, "--engine": engine is not None}
    given = {"--measurements": measurements, "--model": model, "--figures": figures, "--report": report}
    _refuse_idle([name for name, wanted in asked.items() if wanted], {**given, "--json": as_json})
    if engine is not None:
        _engine(gpu, checkpoint, engine, measurements, model or (), output)
        return
    if suggest is not None:
        _suggest(gpu, checkpoint, suggest, model or (), batch_size, mode, output)
        return
    if measurements is None:
        raise InputError("--measurements is missing; give files of measured kernels, or --suggest COUNT")
    if identify:
        _identify(measurements, gpu, checkpoint, figures, report, drop_invalid=drop_invalid, as_json=as_json)
        return
    if output is None:
        raise InputError("--output is missing; give a folder for the checkpoint, or --identify to write none")
    from neusight_jax.training.calibration import calibrate_checkpoint, summary_lines

    with busy("calibrating"):
        card = calibrate_checkpoint(measurements, gpu, output, checkpoint, drop_invalid=drop_invalid)
    _remarks(card, output)
    for line in summary_lines(card["calibrated"]["summary"]):
        typer.echo(line)
    typer.echo(f"{output}: {checkpoint}, calibrated on {card['calibrated']['gpu']}")


TAKES: dict[str, tuple[str, ...]] = {
    "": ("--measurements",),
    "--identify": ("--measurements", "--figures", "--report", "--json"),
    "--suggest": ("--model",),
    "--engine": ("--measurements", "--model"),
}
"""Questions of `calibrate`, "" for a checkpoint that is calibrated, and the options that each of them takes."""


def _refuse_idle(questions: Sequence[str], given: Mapping[str, Any]) -> None:
    """`InputError` for two questions at once, or options that the question does not take."""
    if len(questions) > 1:
        raise InputError(f"{' and '.join(questions)} are questions of their own; ask one at a time")
    takes = TAKES[questions[0] if questions else ""]
    if idle := [name for name, value in given.items() if value and name not in takes]:
        raise InputError(
            f"{', '.join(idle)}: nothing asks for it here; --figures goes with --identify, --model with --suggest "
            "and --engine"
        )


def _identify(
    measurements: Sequence[Path],
    gpu: str,
    checkpoint: str,
    figures: Sequence[str] | None,
    report: Path | None,
    *,
    drop_invalid: bool,
    as_json: bool,
) -> None:
    from neusight_jax.hardware.catalog import canonical_name
    from neusight_jax.model.checkpoint import load_predictor
    from neusight_jax.training.calibration import measured_on
    from neusight_jax.training.identification import FIGURES, identify

    name, machine, data = measured_on(measurements, gpu, drop_invalid=drop_invalid)
    predictor = load_predictor(checkpoint, canonical_name(name))
    with busy("identifying"):
        answered = identify(predictor, machine, data, figures=tuple(figures or FIGURES), gpu_name=name)
    for note in data.notes:
        remark(f"note: {note}")
    answer(answered, as_json, report, checkpoint=checkpoint)


def _engine(
    gpu: str,
    checkpoint: str,
    engine: str,
    loads: Sequence[Path] | None,
    models: Sequence[str],
    output: Path | None,
) -> None:
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.model.checkpoint import load_predictor
    from neusight_jax.serving.calibration import calibrate_engine, read_loads, write_engine
    from neusight_jax.serving.times import engine_name

    if not loads or len(models) != 1 or output is None:
        raise InputError("--engine needs --measurements LOADS.csv, one --model and --output FILE.json")
    if output.suffix != ".json":
        raise InputError(f"--output is {output}, expected a file that ends in .json")
    name, machine = load_named_gpu(gpu)
    # Engines run decoders in formats that fp32's checkpoint has no kernels of.
    predictor = load_predictor("tensorcore" if checkpoint == "fp32" else checkpoint)
    measured = [load for path in loads for load in read_loads(path)]
    with busy("calibrating"):
        fitted = calibrate_engine(predictor, machine, models[0], measured, engine=engine, gpu_name=name)
    write_engine(output, fitted, engine_name(engine))
    typer.echo(f"{fitted}\n{output}: {engine}, calibrated with {len(measured)} loads; serve --engine {output}")


def _suggest(
    gpu: str,
    checkpoint: str,
    count: int,
    models: Sequence[str],
    batch_size: int,
    mode: str,
    output: Path | None,
) -> None:
    from neusight_jax.cli.options import WorkloadOptions
    from neusight_jax.cli.profile import publish_plan
    from neusight_jax.cli.workloads import graph_of
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.model.checkpoint import load_predictor
    from neusight_jax.training.plan import suggest

    name, machine = load_named_gpu(gpu)
    works = [graph_of(model, WorkloadOptions(batch_size=batch_size, mode=mode)) for model in models]
    with busy("choosing"):
        chosen = suggest(load_predictor(checkpoint), machine, works, count, gpu_name=name)
    publish_plan(chosen, f"for {', '.join(models)}", output)


def measured_devices(names: Sequence[str], measurements: Sequence[Path]) -> list[str]:
    """Canonical names of the measured devices meant, with a remark where the catalog means another board.

    Raises: `InputError` for a device without rows, listing those that have some.
    """
    from neusight_jax.datasets.measurements import find_measured
    from neusight_jax.hardware.catalog import canonical_name

    devices: list[str] = find_measured(names, measurements)
    for name, device in zip(names, devices, strict=True):
        if canonical_name(name) not in (None, device):
            remark(f"note: {name} is taken for {device}, which was measured; {canonical_name(name)} was not")
    return devices


def _remarks(card: dict[str, Any], output: Path) -> None:
    """What to know of the checkpoint that was written, as every forecast made with it says."""
    from neusight_jax.model.checkpoint import card_notes, load_card

    for note in (*card.get("notes", ()), *card_notes(load_card(output), str(output))):
        remark(f"note: {note}")
