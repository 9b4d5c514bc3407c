"""A profile: every kernel of a plan measured on the device at hand, and a folder of the measurement schema written."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

import neusight_jax
from neusight_jax.datasets import schema
from neusight_jax.datasets.devices import GPU_FILE
from neusight_jax.datasets.imported import write_measurements
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing, remove_folder, write_text_atomically
from neusight_jax.profiling.case import Case, case_bytes, make_case, operands
from neusight_jax.profiling.clock import DISTURBED, Backend, Prepared, sample
from neusight_jax.profiling.machine import Machine, Reading, Sensors, find_machine, host_facts
from neusight_jax.profiling.plans import planned
from neusight_jax.progress import working
from neusight_jax.units import GB

BACKENDS: tuple[str, ...] = ("jax", "torch")


def make_backend(name: str) -> Backend:
    """A backend on the first device of this machine; `InputError` for an unknown name or a missing package."""
    if name == "jax":
        from neusight_jax.profiling.jax_backend import JaxBackend

        return JaxBackend()
    if name != "torch":
        raise unknown_name("backend", name, BACKENDS)
    try:
        from neusight_jax.profiling.torch_backend import TorchBackend
    except ImportError as error:
        raise InputError(f"torch cannot be imported ({error}); `pip install '.[torch]'`") from None
    return TorchBackend()


# The data card of a profile: what was measured, on what, how, how much of it to trust; and the folder around it.

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
    """A card of what is known before anything is measured.

    Args:
      machine: the device that is measured.
      sensors: its driver and power limit.
      versions: of the libraries that run the kernels.
      facts: further keys of the card, such as `timing` and `plan`.
    """
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
    write_measurements(target, {**tables, SKIPPED: pd.DataFrame(skipped)}, texts)
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


# What a run has done so far, one line per kernel, so that it can be killed at any moment and go on.

_ASKED, _LINES = "run.json", "rows.jsonl"


def kept_kernels(output: Path) -> str:
    """Note on what an interrupted run left to go on with; "" for nothing."""
    if not (_folder(output) / _LINES).is_file():
        return ""
    return "what was measured is kept: the same command with --resume goes on"


def _folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.profile")


class Journal:
    """A folder `.NAME.profile` beside the output: what was asked, the plan, and a line of JSON for every kernel done.

    A line is appended in one write and is on disk before the next kernel starts; the end of a line that was cut off is
    dropped when the run goes on, so that kernel is measured again.
    """

    def __init__(self, output: Path) -> None:
        self.folder = _folder(output)
        self._asked, self._lines = self.folder / _ASKED, self.folder / _LINES
        self._begun = ""

    def begin(self, request: Mapping[str, Any], cases: Sequence[Case]) -> None:
        """Forget an earlier run; what this one is to do is kept with its first kernel."""
        self.discard()
        self._begun = json.dumps({"asked": dict(request), "plan": [vars(case) for case in cases]})

    def resume(self, request: Mapping[str, Any]) -> tuple[list[Case], list[dict[str, Any]]]:
        """The plan, and what is done of it.

        Raises: `InputError` when there is nothing to go on with, or it was another run.
        """
        if not self._asked.is_file():
            raise InputError(f"nothing to resume: {self.folder} is missing; run without --resume")
        kept = json.loads(self._asked.read_text(encoding="utf-8"))
        for name, value in json.loads(json.dumps(dict(request))).items():
            if kept["asked"].get(name) != value:
                raise InputError(
                    f"{self.folder} is of a run with {name} {kept['asked'].get(name)!r}, this one has {value!r}; "
                    "repeat what was asked then, or start afresh without --resume"
                )
        plan = kept["plan"]
        return [
            Case(record["op"], tuple((name, size) for name, size in record["dims"]), record["dtype"]) for record in plan
        ], self._entries()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one kernel; `entry` needs `key`."""
        if not self._asked.is_file():
            write_text_atomically(self._asked, self._begun)
        with self._lines.open("ab", buffering=0) as lines:
            lines.write((json.dumps(dict(entry)) + "\n").encode())
            os.fsync(lines)

    def discard(self) -> None:
        """Forget the run."""
        remove_folder(self.folder)

    def _entries(self) -> list[dict[str, Any]]:
        if not self._lines.is_file():
            return []
        content = self._lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._lines, len(whole))
        entries: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(whole.splitlines()):
            try:
                entry = json.loads(line)
                entries.setdefault(entry["key"], entry)
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{self._lines}: line {number + 1} is damaged; remove that line to measure its kernel again"
                ) from None
        return list(entries.values())


SECONDS = 0.2
"""Time for each kernel, compilation aside."""
FEWEST_SETS, MOST_SETS = 2, 8
"""Input sets of a kernel that take turns: more than the last-level cache together, within these limits."""
MEMORY_SHARE = 0.6
"""Share of the free memory a kernel may take."""
RELEASE_EVERY = 40
"""Kernels after which compiled programs are forgotten."""


def profile(
    output: Path | str,
    *,
    plan: str = "quick",
    backend: str = "jax",
    dtypes: Sequence[str] = ("fp32",),
    seconds: float = SECONDS,
    timing: str = "loop",
    gpu: str | None = None,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure kernels on this machine and write them to a folder that `train` and `calibrate` take.

    Args:
      output: folder to write, new or empty; plan: "quick", "full", "collectives" or a file of kernels.
      backend: "jax" or "torch"; collectives take "jax", which runs them over the devices of this machine.
      dtypes: each kernel is measured in all of them; seconds: for each kernel, compilation aside.
      timing: what `latency_s` holds: "loop" (without launch overhead) or "call" (with it); both are measured.
      gpu: name or file of the device's figures, if the catalog does not have it.
      resume: go on with a run that was stopped; console: for progress (none = quiet).
    Returns: the data card.
    Raises: `InputError` for unknown names, a device nobody knows, an output that cannot be written.
    """
    if timing not in TIMINGS:
        raise unknown_name("timing", timing, TIMINGS)
    if not 0.0 < seconds < math.inf:
        raise InputError(f"seconds for each kernel is {seconds}, expected a number above 0, such as {SECONDS}")
    refuse_existing(output)
    target, clock = Path(output), make_backend(backend)
    machine, sensors, journal = find_machine(clock, gpu), Sensors(wanted=not clock.is_cpu), Journal(target)
    request = {"plan": plan, "dtypes": list(dtypes), "seconds": seconds, "device": machine.name, "backend": backend}
    request["versions"] = clock.versions()
    if resume:
        cases, entries = journal.resume(request)
    else:
        cases, entries = planned(plan, machine.gpu, dtypes), []
        journal.begin(request, cases)
    facts = {"timing": timing, "plan": plan, "dtypes": ", ".join(dtypes), "backend": backend, "resumed": resume}
    facts["seconds_per_kernel"] = seconds
    facts["made_by"] = f"neusight-jax profile --plan {plan} --backend {backend} --dtype {' '.join(dtypes)} --output DIR"
    card = begun_card(machine, sensors, clock.versions(), **facts)
    console, done = console or Console(quiet=True), {entry["key"] for entry in entries}
    # Every kernel is in the journal before the next one starts: a run that is killed loses one at most.
    with working("kernels", console, len(cases), len(done)) as advance:
        for number, case in enumerate(case for case in cases if case.key not in done):
            entry = {"key": case.key, **_measured(case, clock, machine, sensors, seconds, number)}
            if "reason" in entry:
                console.print(f"skipped {case.key}: {entry['reason']}", highlight=False)
            journal.append(entry)
            entries.append(entry)
            advance(what=case.op)
            # A backend keeps every program it compiled, until the process has no memory maps left.
            if number % RELEASE_EVERY == RELEASE_EVERY - 1:
                clock.release()
    card["host_load_average_at_end"] = host_facts()["load_average"]
    card = _write(target, card, entries, machine, timing)
    journal.discard()
    return card


def _measured(
    case: Case, clock: Backend, machine: Machine, sensors: Sensors, seconds: float, seed: int
) -> dict[str, Any]:
    """A row, or the reason there is none."""
    kernel = case.to_row()
    reason = clock.supports(case)
    if reason:
        return {"kernel": kernel, "reason": reason}
    set_bytes, scratch_bytes = case_bytes(case)
    cache_bytes = float(np.asarray(machine.gpu.l2_bytes))
    # Sets larger than the last-level cache together push each other out, so that a kernel reads from memory.
    room = MEMORY_SHARE * clock.free_bytes() - scratch_bytes
    sets = int(min(max(math.ceil(2.0 * cache_bytes / set_bytes), FEWEST_SETS), MOST_SETS, max(room // set_bytes, 0)))
    if sets < FEWEST_SETS:
        need = (FEWEST_SETS * set_bytes + scratch_bytes) / GB
        share = f"{MEMORY_SHARE:.0%} of what is free is {MEMORY_SHARE * clock.free_bytes() / GB:.2f} GB"
        return {"kernel": kernel, "reason": f"does not fit: needs {need:.2f} GB, {share}"}
    readings: list[Reading] = []
    prepared: Prepared | None = None
    try:
        prepared = clock.prepare(case, sets, seed)
        watched = None if sensors.source == "none" else lambda run: readings.append(sensors.while_running(run))
        timings = sample(prepared, seconds, watched, sensors.window_s)
    except Exception as error:  # out of memory, or not there in this dtype: backends raise many kinds
        return {"kernel": kernel, "reason": failure(error)}
    finally:
        del prepared  # its memory is needed for the next kernel
        gc.collect()
    row = {
        **vars(timings),
        "disturbed": timings.loop_spread > DISTURBED,
        "sets": sets,
        "set_bytes": set_bytes,
        "beyond_cache": sets * set_bytes > cache_bytes,
        **vars(readings[0] if readings else Reading()),
        "measured_at": now(),
    }
    return {"kernel": kernel, "row": row}


def _write(
    target: Path, card: dict[str, Any], entries: Sequence[dict[str, Any]], machine: Machine, timing: str
) -> dict[str, Any]:
    """Write the folder, all or nothing; rows that the reader would refuse are listed as skipped."""
    timed = {"latency_s": f"{timing}_s", "spread": f"{timing}_spread"}
    rows = [
        {**entry["kernel"], **{name: entry["row"][of] for name, of in timed.items()}, "timing": timing, **entry["row"]}
        for entry in entries
        if "row" in entry
    ]
    skipped = [{**entry["kernel"], "reason": entry["reason"]} for entry in entries if "reason" in entry]
    if not rows:
        first = skipped[0]["reason"] if skipped else "the plan is empty"
        raise InputError(f"no kernel could be measured; the first was skipped because: {first}")
    settled = machine.settled(_rates(rows))
    columns = {"device": machine.name, "backend": card["backend"], "provenance": machine.provenance}
    frame = pd.DataFrame(rows).assign(**columns)
    tables: dict[str, pd.DataFrame] = {}
    for op, part in frame.groupby("op", sort=True):
        kept, refused = _checked(part.dropna(axis=1, how="all").reset_index(drop=True), settled)
        tables[f"kernels/{op}.parquet"] = kept
        skipped += refused
    card = {**card, **row_facts(pd.concat(tables.values(), ignore_index=True))}
    return write_folder(target, card, tables, skipped, settled.file)


def _rates(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """FLOP, bytes from memory (those of sets that push each other out of the cache), and seconds of every row."""
    for row in rows:
        flop = operands(make_case(row["op"], row, row["dtype"])).flop
        yield flop, row["set_bytes"] if row["beyond_cache"] else 0.0, row["latency_s"]


def _checked(part: pd.DataFrame, machine: Machine) -> tuple[pd.DataFrame, list[dict[Any, Any]]]:
    """Rows of one operator that the reader takes, and those it would refuse (faster than light) with the reason."""
    op = str(part["op"].iloc[0])
    problems = check_rows(part, f"{op}.parquet", measured_on=(machine.name, machine.gpu))[1]
    reasons = {int(problem["row"]): problem["detail"] for problem in problems.records}
    kernels = part[["op", "dtype", *schema.op_columns(op)]].to_dict("records")
    refused = [{**kernels[row], "reason": reason} for row, reason in reasons.items()]
    return part[~problems.bad].reset_index(drop=True), refused
