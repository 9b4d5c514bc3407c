"""The data card of a profile: what was measured, on what, how, and how much of it to trust."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

TIMINGS: dict[str, str] = {
    "loop": "kernels run one after the other on the device, over several input sets in turn; the time of an empty "
    "loop is taken off, so launch overhead is not in latency_s",
    "call": "single calls, each waited for, so launch overhead is in latency_s",
}


def now() -> str:
    """The time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def row_facts(frame: pd.DataFrame, skipped: Sequence[object]) -> dict[str, Any]:
    """Figures of a profile's rows for its card: counts, median spread, disturbed and throttled rows."""
    facts: dict[str, Any] = {"rows": {}, "skipped": len(skipped)}
    if len(frame):
        counts = frame.groupby("op", sort=True).size()
        facts["rows"] = {str(op): int(count) for op, count in counts.items()}
        facts["median_spread"] = round(float(np.median(frame["spread"])), 4)
        facts["disturbed_rows"] = int(frame["disturbed"].sum())
        facts["beyond_cache_rows"] = int(frame["beyond_cache"].sum())
        throttled = frame.get("throttled", pd.Series(dtype=object)).dropna()
        facts["throttled_rows"] = int((throttled != "").sum()) if len(throttled) else None
    return facts


def readme(card: Mapping[str, Any]) -> str:
    """The card for people, in Markdown."""
    lines = [f"# Measured on {card['device']}", "", f"{card['provenance']}.", ""]
    table = [("method", TIMINGS.get(card["timing"], card["timing"]))]
    table += [
        (name, str(card[name]))
        for name in ("began", "ended", "backend", "plan", "models", "dtypes", "made_by")
        if name in card
    ]
    for part in ("versions", "driver", "host"):
        table += [(f"{part}: {name}", str(value)) for name, value in card.get(part, {}).items() if value != ""]
    if "median_spread" in card:
        table.append(("spread, median over rows", f"{100 * card['median_spread']:.1f} % of the median"))
        table.append(("disturbed rows", f"{card['disturbed_rows']}: quartiles more than 10 % of the median apart"))
        throttled = card["throttled_rows"]
        table.append(("throttled rows", "nothing here can say" if throttled is None else str(throttled)))
    table.append(("skipped", f"{card['skipped']}, see skipped.csv" if card["skipped"] else "nothing"))
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table), ""]
    if card.get("rows"):
        lines += [
            "| operator | rows |",
            "|---|---|",
            *(f"| {op} | {count} |" for op, count in card["rows"].items()),
            "",
        ]
    if card.get("gpu_file"):
        lines += [
            "The device is not in the catalog: `gpu.json` holds its figures, and what reads this folder takes them",
            "from there. Figures listed under `estimates` are no data sheet's.",
            "",
        ]
    return "\n".join(lines)
