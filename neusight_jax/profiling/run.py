"""A profile: every kernel of a plan measured on the device at hand, and a folder of the measurement schema written."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from neusight_jax.datasets import schema
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing
from neusight_jax.profiling.card import TIMINGS, begun_card, failure, now, row_facts, write_folder
from neusight_jax.profiling.case import Case, case_bytes, make_case, operands
from neusight_jax.profiling.clock import DISTURBED, Backend, Prepared, sample
from neusight_jax.profiling.journal import Journal
from neusight_jax.profiling.machine import Machine, find_machine, host_facts, make_backend
from neusight_jax.profiling.plans import planned
from neusight_jax.profiling.sensors import Reading, Sensors
from neusight_jax.units import GB

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
    asked = {"plan": plan, "dtypes": list(dtypes), "seconds": seconds, "device": machine.name, "backend": backend}
    asked["versions"] = clock.versions()
    if resume:
        cases, entries = journal.resume(asked)
    else:
        cases, entries = planned(plan, machine.gpu, dtypes), []
        journal.begin(asked, cases)
    facts = {"timing": timing, "plan": plan, "dtypes": ", ".join(dtypes), "backend": backend, "resumed": resume}
    facts["seconds_per_kernel"] = seconds
    facts["made_by"] = f"neusight-jax profile --plan {plan} --backend {backend} --dtype {' '.join(dtypes)} --output DIR"
    card = begun_card(machine, sensors, clock.versions(), **facts)
    _measure_all(cases, entries, clock, machine, sensors, journal, seconds, console or Console(quiet=True))
    card["host_load_average_at_end"] = host_facts()["load_average"]
    card = _write(target, card, entries, machine, timing)
    journal.discard()
    return card


def _measure_all(
    cases: Sequence[Case],
    entries: list[dict[str, Any]],
    clock: Backend,
    machine: Machine,
    sensors: Sensors,
    journal: Journal,
    seconds: float,
    console: Console,
) -> None:
    """Measure what is not among the entries yet, and add it there and to the journal."""
    done = {entry["key"] for entry in entries}
    with _progress(console, len(cases), len(done)) as step:
        for number, case in enumerate(case for case in cases if case.key not in done):
            entry = {"key": case.key, **_measured(case, clock, machine, sensors, seconds, number)}
            if "reason" in entry:
                console.print(f"skipped {case.key}: {entry['reason']}", highlight=False)
            journal.append(entry)
            entries.append(entry)
            step(case.op)
            if number % RELEASE_EVERY == RELEASE_EVERY - 1:
                clock.release()


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
        found = sample(prepared, seconds, lambda: readings.append(sensors.read()))
    except Exception as error:  # out of memory, or not there in this dtype: backends raise many kinds
        return {"kernel": kernel, "reason": failure(error)}
    finally:
        del prepared  # its memory is needed for the next kernel
        gc.collect()
    row = {
        **found.to_row(),
        "disturbed": found.loop_spread > DISTURBED,
        "sets": sets,
        "set_bytes": set_bytes,
        "beyond_cache": sets * set_bytes > cache_bytes,
        **(readings[0] if readings else Reading()).to_row(),
        "measured_at": now(),
    }
    return {"kernel": kernel, "row": row}


def _write(
    target: Path, card: dict[str, Any], entries: Sequence[dict[str, Any]], machine: Machine, timing: str
) -> dict[str, Any]:
    """Write the folder, all or nothing; rows that the reader would refuse are listed as skipped."""
    rows = [{**entry["kernel"], **_latency(entry["row"], timing)} for entry in entries if "row" in entry]
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


def _latency(row: dict[str, Any], timing: str) -> dict[str, Any]:
    return {"latency_s": row[f"{timing}_s"], "spread": row[f"{timing}_spread"], "timing": timing, **row}


def _rates(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[float, float, float]]:
    """FLOP, bytes from memory (those of sets that push each other out of the cache), and seconds of every row."""
    for row in rows:
        flop = operands(make_case(row["op"], row, row["dtype"])).flop
        yield flop, row["set_bytes"] if row["beyond_cache"] else 0.0, row["latency_s"]


def _checked(part: pd.DataFrame, machine: Machine) -> tuple[pd.DataFrame, list[dict[Any, Any]]]:
    """Rows of one operator that the reader takes, and those it would refuse (faster than light) with the reason."""
    op = str(part["op"].iloc[0])
    checked = check_rows(part, f"{op}.parquet", measured_on=(machine.name, machine.gpu))
    reasons = dict(zip(checked.problems["row"], checked.problems["detail"], strict=True))
    kernels = part[["op", "dtype", *schema.op_columns(op)]].to_dict("records")
    refused = [{**kernels[int(row)], "reason": reason} for row, reason in reasons.items()]
    return part[~checked.bad].reset_index(drop=True), refused


@contextmanager
def _progress(console: Console, total: int, done: int) -> Iterator[Any]:
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=console, speed_estimate_period=120) as bar:
        task = bar.add_task("kernels", total=total, completed=done)
        yield lambda op: bar.update(task, advance=1, description=op)
