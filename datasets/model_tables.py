"""Measured models: the columns and checks of `models/end_to_end.csv` and `models/per_op.parquet`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from neusight_jax.datasets.devices import NONE_OWN
from neusight_jax.datasets.row_checks import SHORTEST_S, CheckedRows, Problems, device_column, need_columns, numbers
from neusight_jax.hardware.gpu import GPU

WORKLOAD: tuple[str, ...] = ("device", "model", "mode", "sequence_length", "batch_size", "option")
"""Columns both tables share."""


@dataclass(frozen=True)
class ModelTable:
    """A kind of model table: its file name, columns it must have, those that hold seconds, those that may be blank, and
    whether 0 seconds is a problem."""

    file: str
    columns: tuple[str, ...]
    seconds: tuple[str, ...]
    blank: tuple[str, ...] = ()
    positive: bool = False


END_TO_END = ModelTable(
    "end_to_end.csv",
    (*WORKLOAD, "num_layers", "e2e_s", "forward_s", "backward_s"),
    ("e2e_s", "forward_s", "backward_s"),
    blank=("forward_s", "backward_s"),
    positive=True,
)
"""One row is one measured whole-model latency."""

PER_OP = ModelTable(
    "per_op.parquet",
    (*WORKLOAD, "node_index", "name", "forward_s", "backward_s", "accumulate_s", "total_s", "layer_repeat"),
    ("forward_s", "backward_s", "accumulate_s", "total_s"),
)
"""One row is one graph node of one measured model."""

MODES: dict[str, str] = {"inf": "inference", "train": "training", "inference": "inference", "training": "training"}
"""Mode of a measured model -> mode of its graph."""
MODEL_TABLES: tuple[ModelTable, ...] = (END_TO_END, PER_OP)


def check_models(
    table: ModelTable, raw: pd.DataFrame, file: str, extra_gpus: Mapping[str, GPU] = NONE_OWN
) -> CheckedRows:
    """Check a table: all its rows (device canonical, blank option ""), and which are bad.

    Args:
      table: kind of table, which says what is checked.
      raw: as it was read.
      file: its name, for messages.
      extra_gpus: devices that the folders describe themselves, by name, beside those of the catalog.
    Raises: `InputError` for a missing column.
    """
    need_columns(raw, table.columns, file)
    problems = Problems(file, raw)
    devices, _ = device_column(raw, problems, extra_gpus=extra_gpus)
    for name in table.seconds:
        seconds = numbers(raw[name])
        fine = np.isfinite(seconds) & ((seconds > SHORTEST_S) if table.positive else (seconds >= 0.0))
        if name in table.blank:
            fine |= raw[name].isna().to_numpy()
        expected = f"seconds above {SHORTEST_S:g}" if table.positive else "seconds of at least 0"
        problems.add_values(name, fine, "bad latency", expected)
    for name in ("batch_size", "sequence_length") if table is END_TO_END else ():
        sizes = numbers(raw[name])
        problems.add_values(name, np.isfinite(sizes) & (sizes >= 1.0), "bad size", "a whole number from 1")
    if table is END_TO_END:
        problems.add_values(
            "mode", raw["mode"].isin(list(MODES)).to_numpy(), "unknown mode", f"one of {', '.join(MODES)}"
        )
    good = raw.assign(device=devices, option=raw["option"].astype(object).where(raw["option"].notna(), ""))
    return CheckedRows(good, problems.bad, problems.frame())
