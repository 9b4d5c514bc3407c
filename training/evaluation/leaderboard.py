"""The leaderboard page: systems × families and whole models, one table for each split, from what `evaluate` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from neusight_jax.errors import InputError
from neusight_jax.training.data import NETWORKS
from neusight_jax.training.evaluation.protocol import PROTOCOLS
from neusight_jax.training.evaluation.result import markdown_table

END_TO_END = "end to end"
COLUMNS: tuple[str, ...] = ("split", "system", "family", "device", "rows", "mean", "median", "p90", "sd")
"""Columns of the CSV: one row per split, system, family (or whole models) and GPU; errors in percent."""
SPLITS: dict[str, str] = {
    "logo": "A GPU nobody has measured: trained without it",
    "logo-size": "A GPU nobody has measured, and larger kernels than in training",
    "checkpoint": "GPUs in training",
}
HOW: dict[str, str] = {
    "mixture": "this package's form, fitted to the same rows of the other GPUs",
    "fp32-heldout": "the shipped weights, with each GPU's own correction",
    "neusight": "the equations of the paper, fitted to the same rows",
    "gbt": "LightGBM on the inputs of `mixture`, its physical times included",
    "habitat-mlp": "Habitat's network for each family, on sizes and four figures of the GPU",
    "habitat-wave": "Habitat's wave scaling; told the measured time of the very kernel on another GPU",
    "habitat-wave-simplified": "the same in its form for many waves",
    "li": "a line in the work, fitted to relative errors; its slope on a new GPU from a line over the others",
    "li-published": "the same by least squares on seconds, as NeuSight's authors coded it",
    "roofline3": "a roofline with two efficiencies and a launch time, fitted for each family",
    "roofline": "peak FLOP/s or peak bandwidth, the longer time; nothing fitted",
}
"""Settings each system was run with."""
ENTER = """## Enter a system

You need the public measurements ([retrain](retraining.md#or-bring-measurements) says how to get them). Run this from
a clone, so that our scores are there:

```console
$ neusight-jax leaderboard --measurements profiles --drop-invalid --template rows.csv
$ neusight-jax leaderboard --measurements profiles --drop-invalid --entry rows.csv --name mine
```

The first command writes the rows of the split without their times: up to 3,000 of each GPU and family, always the same
ones. Fill in the column `predicted_s`. The second prints your errors beside ours on these rows. `--json` prints them as
JSON. That file may stand among those that make this page: `neusight-jax leaderboard logo mine.json --output board.md`.

| column | what it holds |
|---|---|
| `row` | file and place of the measurement, such as `kernels/linear.parquet:17`; needed |
| `predicted_s` | your time of the kernel, seconds above 0; needed |
| `device`, `family`, `op`, `dtype` | GPU, column of the tables above, operator, number format; may be left out |
| sizes | as in the measurements: `m, n, k` is an m×n matrix times an n×k one; may be left out |

- Enter whole families: every row of each, on all GPUs. A family left blank is not scored.
- An unknown row, a row twice, a missing row or a time that is not above 0 is refused in one line. So is a row whose
  sizes are not those of the measurements.
- `--split logo` is the default. Each GPU must be predicted without any measurement of it: no weight, no constant, no
  choice. Nobody can check that from a file, so say how it was done.
- `--split checkpoint` has every row, and whole models with family `end to end`: for systems that have seen these GPUs.
- An error is `|predicted / measured - 1|`. It is averaged over the rows of a GPU, then over GPUs.
"""
"""Instructions for an entry."""


@dataclass(frozen=True)
class Leaderboard:
    """Scores of all splits, see `COLUMNS`, what they were read from, and the seeds of each split that has some."""

    scores: pd.DataFrame
    sources: tuple[str, ...]
    seeds: Mapping[str, int] = field(default_factory=dict)

    def to_markdown(self, csv_name: str, note: str = "") -> str:
        """The page: one table for each split, best system first; the note says what no file knows, e.g. the commit."""
        about = (
            "Mean absolute percentage error; GPUs count equally. Every system forecasts the same rows of a split. Best "
            f"of a column in bold. [{csv_name}]({csv_name}) has every GPU apart, with medians and 90th percentiles."
        )
        lines = ["# Leaderboard", "", about, ""]
        for split in dict.fromkeys(self.scores["split"]):
            part = self.scores[self.scores["split"] == split]
            counts = f"GPUs: {part['device'].nunique()}."
            if split in self.seeds:
                counts += (
                    f" Seeds, where something is random: {self.seeds[split]}; ± is the standard deviation over them."
                )
            lines += [f"## {SPLITS.get(split, split)}", "", counts, "", *_table(part), ""]
        how = [f"- `{name}`: {HOW[name]}." for name in HOW if name in set(self.scores["system"])]
        lines += ["## How each was run", "", *how, ""] if how else []
        lines += [ENTER]
        lines += ["Made by `neusight-jax leaderboard` from " + ", ".join(self.sources) + "." + (note and f" {note}")]
        return "\n".join(lines) + "\n"


def family_means(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean error of systems (rows, best first) in families and whole models, GPUs counted equally."""
    means = scores.groupby(["system", "family"])["mean"].mean().unstack("family")
    means = means[[name for name in (*NETWORKS, END_TO_END) if name in means]]
    return means.loc[means.mean(axis=1).sort_values().index]


def _table(part: pd.DataFrame) -> list[str]:
    means, spread = family_means(part), part.groupby(["system", "family"])["sd"].mean().unstack("family")
    best = means.min()

    def cell(system: Any, name: str) -> str:
        value, sd = means.loc[system, name], spread.loc[system, name]
        if pd.isna(value):
            return "-"
        text = f"{value:.1f}" + (f" ± {sd:.1f}" if sd and sd >= 0.05 else "")
        return f"**{text}**" if value == best[name] else text

    cells = [[str(system), *(cell(system, str(name)) for name in means)] for system in means.index]
    return markdown_table(["system", *means.columns], cells)


def read_csv(file: Path | str, columns: Sequence[str], what: str, **options: Any) -> pd.DataFrame:
    """Read a CSV file that has these columns.

    Args:
      columns: that it must have; others stay.
      what: file or table it should be, for messages.
      options: of `pandas.read_csv`.
    Raises: `InputError` for a file that is not readable as CSV, or without one of the columns.
    """
    try:
        frame: pd.DataFrame = pd.read_csv(file, **options)
    except (OSError, ValueError) as error:  # parser and decoding errors are ValueErrors
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{file}: not readable as CSV ({reason}); expected {what}") from None
    for name in columns:
        if name not in frame:
            raise InputError(f"{file}: no column {name}; expected {', '.join(columns)}, as in {what}")
    return frame


def read_board(file: Path | str) -> pd.DataFrame:
    """The scores of a leaderboard's CSV (`COLUMNS`). Raises: `InputError` for anything else."""
    return read_csv(file, COLUMNS, "the CSV beside a leaderboard page")[list(COLUMNS)]


def read_leaderboard(paths: Sequence[Path | str]) -> Leaderboard:
    """Scores from outputs of `evaluate`: folders of `--protocol ... --output`, or files of `--json`.

    Raises: `InputError` for anything else.
    """
    records: list[Any] = []
    seeds: dict[str, int] = {}
    for path in map(Path, paths):
        file = path / "scores.json" if path.is_dir() else path
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; expected what `evaluate --output` or `--json` wrote") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{file}: not readable as JSON ({error}); run `evaluate` again") from None
        present = set(content) if isinstance(content, dict) else set()
        if {"protocol", "scores"} <= present:
            records += [_of_split(row, content["protocol"]) for row in content["scores"]]
            seeds |= {content["protocol"]: int(content["seeds"])} if "seeds" in content else {}
        elif {"kernels", "models_by_device"} <= present:
            records += [_of_split(row, "checkpoint", sd=0.0) for row in content["kernels"]]
            eager = [row for row in content["models_by_device"] if row["option"] == "eager"]
            records += [_of_split(row, "checkpoint", family=END_TO_END, sd=0.0, rows=row["labels"]) for row in eager]
        else:
            raise InputError(f"{file}: no scores in it; expected what `evaluate --output` or `--json` wrote")
    for row in records:
        if not isinstance(row, Mapping) or not set(COLUMNS) <= set(row):
            raise InputError(
                "scores without system, family, device and errors; the leaderboard takes those of `evaluate` with "
                f"--protocol {', '.join(PROTOCOLS)}, or of a checkpoint"
            )
    if not records:
        raise InputError("no scores were found; run `neusight-jax evaluate` with --output or --json first")
    return Leaderboard(pd.DataFrame(records)[list(COLUMNS)], tuple(Path(path).name for path in paths), seeds)


def _of_split(row: Any, split: str, **more: Any) -> Any:
    return {"split": split, **more, **row} if isinstance(row, Mapping) else row
