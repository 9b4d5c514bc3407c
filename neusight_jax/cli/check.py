"""`neusight-jax check`: what a file of measurements is understood to say, its first faults, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neusight_jax.cli.console import busy, show, show_json
from neusight_jax.cli.options import AsJson, GpuFiles, argument, option
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from neusight_jax.datasets.measurements import Measurements

MODELS: dict[str, str] = {"end_to_end": "measured models", "per_op": "measured nodes of models"}
"""Tables of whole models, by their field of `Measurements`."""
SIZES: dict[str, int] = {
    **{"b": 8, "m": 512, "n": 1024, "k": 2048, "h": 1024, "bytes": 1 << 20, "ranks": 8, "nodes": 1},
    **{"input_channels": 64, "output_channels": 128, "kernel_size": 3, "input_size": 56, "stride": 1, "padding": 1},
    **{"batch_size": 4, "query_length": 512, "kv_length": 512, "heads": 32, "kv_heads": 8, "head_dim": 128},
    **{"causal": 1, "tokens": 512, "experts": 64, "local_experts": 8, "top_k": 2, "hidden": 2048, "inner": 1024},
}
"""Sizes of the first example of a template; those of other columns are 64."""
EXAMPLE_GPU, EXAMPLE_NAME = "H100", "My GPU X1"
EXAMPLE_S = 1e-3
FEWEST_ROWS = 4
"""Rows of a family that `calibrate` asks for."""
LAUNCH_S, SLOW = 5e-6, 300.0
"""Seconds that the launch of a kernel may take; and times the roofline at which seconds are likely another unit."""
_TEMPLATE = "Print an example of an operator (linear, bmm, ln ...) in CSV, or of a GPU's figures in JSON (gpu)."


def check(
    measurements: Annotated[
        list[Path] | None, argument("Parquet or CSV files of kernels, or folders of them.", "FILE...")
    ] = None,
    gpu_file: GpuFiles = None,
    template: Annotated[str | None, option(_TEMPLATE, metavar="OP")] = None,
    faults: Annotated[int, option("Bad rows to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Say what measurements are understood to be, the first bad rows, and what is missing.

    Exit code 2 where rows are bad.
    """
    if template is not None:
        typer.echo(gpu_template() if template == "gpu" else op_template(template), nl=False)
        return
    if not measurements:
        raise InputError("give a file of measurements, or --template linear for an example of one")
    from neusight_jax.datasets.measurements import read_measurements
    from neusight_jax.records import schema

    with busy("checking"):
        data = read_measurements([*measurements, *(gpu_file or ())], on_invalid="list")
        kernels = understood(data)
    models = {name: len(frame) for name in MODELS if (frame := getattr(data, name)) is not None}
    content = {
        "schema": schema("check"),
        "good_rows": len(data.frame) + sum(models.values()),
        "bad_rows": len(data.problems[["file", "row"]].drop_duplicates()),
        "kernels": kernels,
        **models,
        "problems": _faults(data.problems)[:faults],
        "notes": [*data.notes, *_notes(data, kernels)],
        "missing": missing(data),
    }
    if as_json:
        show_json(content)
    else:
        _show(content)
    if content["bad_rows"]:
        raise InputError(f"{content['bad_rows']} rows are bad; mend them, or leave them out with --drop-invalid")


def understood(data: Measurements) -> list[dict[str, Any]]:
    """Good rows of kernels by GPU, operator and dtype: how many, and their seconds.

    `times_roofline` is the median of seconds over the roofline, which is taken as no shorter than a launch.
    """
    import numpy as np

    from neusight_jax.datasets.measurements import table_from_frame
    from neusight_jax.model.latency import predict_kernels
    from neusight_jax.model.predictor import RooflinePredictor

    out = []
    keys = ["device", "family", "op", "dtype"]
    for names, rows in data.frame.groupby(keys, sort=False):
        kernels = table_from_frame(rows.reset_index(drop=True))
        bound_s = predict_kernels(RooflinePredictor(), data.gpu(str(names[0])), kernels, isolated=True)
        seconds = rows["latency_s"].to_numpy(np.float64)
        entry = dict(zip(keys, names, strict=True)) | {"rows": len(rows)}
        entry |= {"shortest_s": seconds.min(), "longest_s": seconds.max()}
        out.append({**entry, "times_roofline": float(np.median(seconds / np.maximum(bound_s, LAUNCH_S)))})
    return out


def missing(data: Measurements) -> list[str]:
    """What commands that learn from measurements will not be able to do with these: sentences."""
    frame = data.frame
    out = []
    if frame["device"].nunique() == 1:
        out.append(
            "a second GPU: `train` makes intervals from GPUs left out, and --hold-out needs another to train on; "
            "`calibrate` corrects a shipped checkpoint with one GPU's rows"
        )
    for (device, family), rows in frame.groupby(["device", "family"]):
        if len(rows) < FEWEST_ROWS:
            out.append(f"rows of {family} on {device}: {len(rows)}; `calibrate` takes {FEWEST_ROWS} and more")
    return out


def _notes(data: Measurements, kernels: Iterable[dict[str, Any]]) -> list[str]:
    """How columns were taken, and times that look like another unit."""
    from neusight_jax.datasets.measurements import READ_COLUMNS, column_names

    out = ["latency_s is taken as seconds; of a product m, n, k the contraction is n"]
    for file in dict.fromkeys((*data.frame["file"], *data.problems["file"])):
        names = column_names(Path(file))
        unread = [name for name in names if name not in READ_COLUMNS] if "op" in names else []
        if unread:
            out.append(f"{file}: columns that are not read: {', '.join(unread)}")
        if "op" in names and "dtype" not in names:
            out.append(f"{file}: without a column dtype, all rows are fp32")
    for name in data.own:
        out.append(f"the figures of {name} are of its file, not of the catalog")
    for entry in kernels:
        if entry["times_roofline"] > SLOW:
            out.append(
                f"{entry['op']} on {entry['device']} takes {entry['times_roofline']:,.0f} times its roofline: "
                "is latency_s in seconds? milliseconds are to be divided by 1,000"
            )
    return out


def _faults(problems: pd.DataFrame) -> list[dict[str, Any]]:
    """Problems of rows in file order, those of equal words as one with their count."""
    faults = problems.groupby(["file", "problem", "detail"], sort=False)["row"].agg(["first", "count"]).reset_index()
    records = faults.rename(columns={"first": "row", "count": "rows"}).to_dict("records")
    return [{str(name): value for name, value in record.items()} for record in records]


def _show(content: dict[str, Any]) -> None:
    from neusight_jax.reports.text import headed, table
    from neusight_jax.units import duration

    header = ["GPU", "family", "operator", "dtype", "rows", "shortest", "longest", "over roofline"]
    rows = [
        [
            *(str(entry[name]) for name in ("device", "family", "op", "dtype")),
            *(f"{entry['rows']:,}", duration(entry["shortest_s"]), duration(entry["longest_s"])),
            f"{entry['times_roofline']:,.3g}",
        ]
        for entry in content["kernels"]
    ]
    parts: list[Any] = [table("", header, rows, text_columns=4)] if rows else []
    parts += [f"{content[name]:,} {what}" for name, what in MODELS.items() if name in content]
    for entry in content["problems"]:
        others = f" ({entry['rows'] - 1:,} more rows alike)" if entry["rows"] > 1 else ""
        parts.append(f"{entry['file']} row {entry['row']} (from 0): {entry['detail']}{others}")
    missing_lines = [f"missing: {line}" for line in content["missing"]]
    head = f"{content['good_rows']:,} good rows, {content['bad_rows']:,} bad"
    show(headed(head, *parts, *missing_lines, notes=content["notes"]))


def op_template(op: str) -> str:
    """CSV of two example rows of an operator of the schema. `InputError` for an unknown one."""
    from neusight_jax.datasets import schema
    from neusight_jax.hardware.catalog import gpu_info

    columns = schema.op_columns(op)
    first = [SIZES.get(name, 64) for name in columns]
    pair = first, [2 * first[0], *first[1:]]
    rows = [[gpu_info(EXAMPLE_GPU).name, op, "fp32", *map(str, sizes), f"{EXAMPLE_S:g}"] for sizes in pair]
    lines = [["device", "op", "dtype", *columns, "latency_s"], *rows]
    return "".join(",".join(line) + "\n" for line in lines)


def gpu_template() -> str:
    """A GPU file with every figure that one needs, of a GPU of the catalog, to be changed."""
    import json

    from neusight_jax.hardware.files import example_figure
    from neusight_jax.hardware.gpu import REQUIRED_FIELDS
    from neusight_jax.units import base_unit, figure_text

    def figure(name: str) -> int | str:
        value = example_figure(name)
        return figure_text(name, value) if base_unit(name) else int(value)

    figures = {name: figure(name) for name in REQUIRED_FIELDS}
    return json.dumps({"name": EXAMPLE_NAME, **figures}, indent=1) + "\n"
