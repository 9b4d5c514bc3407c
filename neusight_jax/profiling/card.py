"""The data card of a profile: what was measured, on what, how, how much of it to trust; and the folder around it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import neusight_jax
from neusight_jax.datasets.devices import GPU_FILE
from neusight_jax.files import atomic_folder
from neusight_jax.profiling.machine import Machine, host_facts
from neusight_jax.profiling.sensors import Sensors

TIMINGS: dict[str, str] = {
    "loop": "kernels run one after the other on the device, over several input sets in turn; the time of an empty "
    "loop is taken off, so launch overhead is not in latency_s",
    "call": "single calls, each waited for, so launch overhead is in latency_s",
}
SKIPPED = "skipped.csv"


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def failure(error: Exception) -> str:
    """Why something was skipped: the kind of error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"failed: {type(error).__name__}: {lines[0][:200]}"


def begun_card(machine: Machine, sensors: Sensors, versions: Mapping[str, str], **facts: Any) -> dict[str, Any]:
    """A card of what is known before anything is measured; `facts` are added to it."""
    return {
        "device": machine.name,
        "provenance": machine.provenance,
        **facts,
        "began": now(),
        "versions": dict(versions),
        "driver": {**sensors.facts(), "sensors": sensors.source},
        "host": host_facts(),
        "version": neusight_jax.__version__,
    }


def row_facts(frame: pd.DataFrame) -> dict[str, Any]:
    """Figures of a profile's rows for its card: counts, median spread, disturbed and throttled rows."""
    if frame.empty:
        return {"rows": {}}
    throttled = frame.get("throttled", pd.Series(dtype=object)).dropna()
    return {
        "rows": {str(op): int(count) for op, count in frame.groupby("op", sort=True).size().items()},
        "median_spread": round(float(np.median(frame["spread"])), 4),
        "disturbed_rows": int(frame["disturbed"].sum()),
        "beyond_cache_rows": int(frame["beyond_cache"].sum()),
        "throttled_rows": int((throttled != "").sum()) if len(throttled) else None,
    }


def write_folder(
    target: Path,
    card: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    skipped: Sequence[Mapping[Any, Any]],
    gpu_file: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write a profile, all or nothing, and return its card.

    Args:
      card: as begun; tables: path in the folder, .csv or .parquet, and its rows; skipped: with the reason of each.
      gpu_file: figures of a device that the catalog does not have.
    """
    whole = {**card, "ended": now(), "skipped": len(skipped), "gpu_file": gpu_file is not None}
    texts = {"card.json": json.dumps(whole, indent=1) + "\n", "README.md": readme(whole)}
    if gpu_file is not None:
        texts[GPU_FILE] = json.dumps(gpu_file, indent=1) + "\n"
    with atomic_folder(target) as folder:
        for path, table in {**tables, SKIPPED: pd.DataFrame(skipped)}.items():
            if len(table):
                (folder / path).parent.mkdir(exist_ok=True)
                write: Any = table.to_csv if path.endswith(".csv") else table.to_parquet
                write(folder / path, index=False)
        for path, text in texts.items():
            (folder / path).write_text(text, encoding="utf-8")
    return whole


def readme(card: Mapping[str, Any]) -> str:
    """The card for people, in Markdown."""
    names = ("began", "ended", "backend", "plan", "models", "dtypes", "made_by")
    facts: dict[str, Any] = {
        "method": TIMINGS.get(card["timing"], card["timing"]),
        **{name: card[name] for name in names if name in card},
    }
    for part in ("versions", "driver", "host"):
        facts |= {f"{part}: {name}": value for name, value in card.get(part, {}).items() if value != ""}
    if "median_spread" in card:
        facts["spread, median over rows"] = f"{100 * card['median_spread']:.1f} % of the median"
        facts["disturbed rows"] = f"{card['disturbed_rows']}: quartiles more than 10 % of the median apart"
        facts["throttled rows"] = "nothing here can say" if card["throttled_rows"] is None else card["throttled_rows"]
    facts["skipped"] = f"{card['skipped']}, see {SKIPPED}" if card["skipped"] else "nothing"
    lines = [f"# Measured on {card['device']}", "", f"{card['provenance']}.", "", *_table("", "", facts)]
    if card.get("rows"):
        lines += _table("operator", "rows", card["rows"])
    if card.get("gpu_file"):
        lines += [
            "The device is not in the catalog: `gpu.json` holds its figures, and what reads this folder takes them",
            "from there. Figures listed under `estimates` are no data sheet's.",
            "",
        ]
    return "\n".join(lines)


def _table(left: str, right: str, rows: Mapping[str, Any]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
