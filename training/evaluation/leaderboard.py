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
        lines += ["Made by `neusight-jax leaderboard` from " + ", ".join(self.sources) + "." + (note and f" {note}")]
        return "\n".join(lines) + "\n"


def _table(part: pd.DataFrame) -> list[str]:
    groups = part.groupby(["system", "family"])
    means, spread = groups["mean"].mean().unstack("family"), groups["sd"].mean().unstack("family")
    means = means[[name for name in (*NETWORKS, END_TO_END) if name in means]]
    best = means.min()

    def cell(system: Any, name: str) -> str:
        value, sd = means.loc[system, name], spread.loc[system, name]
        if pd.isna(value):
            return "-"
        text = f"{value:.1f}" + (f" ± {sd:.1f}" if sd and sd >= 0.05 else "")
        return f"**{text}**" if value == best[name] else text

    order = means.mean(axis=1).sort_values().index
    return markdown_table(
        ["system", *means.columns], [[str(system), *(cell(system, str(name)) for name in means)] for system in order]
    )


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
            seeds[content["protocol"]] = int(content["seeds"])
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
