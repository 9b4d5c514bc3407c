"""Records as tables for people: figures with their units, the parts of a record below it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import numpy as np
from rich.console import RenderableType

from neusight_jax.arithmetic import DTYPES
from neusight_jax.graph.graph import Graph
from neusight_jax.hardware.prices import Prices
from neusight_jax.job.job import Job
from neusight_jax.job.work import WORK
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES, KernelTable
from neusight_jax.records import Record, cell, is_known, number, short
from neusight_jax.reports.forecast import layout_text
from neusight_jax.reports.text import headed, table
from neusight_jax.units import GIB, MIB
from neusight_jax.workloads import workload_dict, workload_text

SHOWN, OPS = 30, 4
"""Rows of a long table and operators of a family: the first ones."""


@singledispatch
def tables(record: Record) -> RenderableType:
    """Figures of a record, then its parts; with the source of a default where its fields say one."""
    figures = record.figures()
    sources = {
        field.name: str(field.metadata["source"])
        for field in dataclasses.fields(record)  # type: ignore[arg-type]
        if "source" in field.metadata
    }
    rows, parts = [], []
    for name, value in figures.items():
        if isinstance(value, tuple) and value and all(map(_opened, value)):
            parts += ["", _listed(name, value)]
        elif _opened(value):
            parts += ["", _part(f"{name}: {type(value).__name__}", value)]
        else:
            rows.append([name, _cell(record, name, value), *([sources.get(name, "")] if sources else [])])
    header = ["figure", "value", *(["default from"] if sources else [])]
    body = [table("", header, rows, text_columns=3)] if rows else []
    per_unit = " of slopes, per unit of each figure" if record.slopes() else ""
    return headed(f"{type(record).__name__}{per_unit}", *body, *parts)


def _cell(record: Record, name: str, value: Any) -> str:
    return cell("" if record.slopes() else name, value)


def _opened(value: Any) -> bool:
    """Whether a value is a record shown as a part of another; those with tables of their own are said in a line."""
    return isinstance(value, Record) and tables.dispatch(type(value)) is tables.dispatch(Record)


def _listed(title: str, records: Sequence[Record]) -> RenderableType:
    """Records of one kind, a row each."""
    rows = [[_cell(record, name, value) for name, value in record.figures().items()] for record in records[:SHOWN]]
    more = f", the first {SHOWN} of {len(records):,}" if len(records) > SHOWN else ""
    return table(f"{title}{more}", list(records[0].figures()), rows, text_columns=1)


def _part(title: str, record: Record) -> RenderableType:
    """The figures of a part of a record, which is not opened further."""
    rows = [[name, _cell(record, name, value)] for name, value in record.figures().items()]
    return table(title, ["figure", "value"], rows, 2)


@tables.register
def _(prices: Prices) -> RenderableType:
    currency = f" {prices.currency}" if prices.currency else ""
    rows = [[name, f"{price:,.2f}"] for name, price in prices.per_hour.items()]
    return headed("Prices", table("", ["GPU", f"an hour{currency}"], rows))


@tables.register
def _(kernels: KernelTable) -> RenderableType:
    """Kernels of each family: operators, number formats, how many, launches; what is traced by its shape."""
    rows = []
    for name, batch in kernels.families.items():
        if not is_known(batch.row):
            rows.append([name, "", "", short(batch.row), ""])
        elif batch.num_rows:
            mask = np.asarray(batch.row) >= 0
            ops, dtypes = (
                [names[place] for place in np.unique(np.asarray(places)[mask])]
                for names, places in ((FAMILIES[name].ops, batch.op), (DTYPES, batch.dtype))
            )
            more = f" and {len(ops) - OPS} more" if len(ops) > OPS else ""
            launches = f"{float(np.asarray(batch.count)[mask].sum()):,.0f}" if is_known(batch.count) else "traced"
            rows.append([name, ", ".join(ops[:OPS]) + more, ", ".join(dtypes), f"{batch.num_rows:,}", launches])
    header = ["family", "operators", "dtypes", "kernels", "launches"]
    return headed("KernelTable", table("", header, rows, text_columns=3))


@tables.register
def _(graph: Graph) -> RenderableType:
    """The workload, memory where the front-end knows it, and the nodes in order."""
    parameters = f", {graph.parameters / 1e6:,.1f} million parameters" if graph.parameters is not None else ""
    summary = [f"{len(graph.nodes):,} nodes, {graph.launches():,.0f} kernel launches{parameters}"]
    rows = [
        [
            *(node.name, node.op, "x".join(map(str, node.shape))),
            *(str(node.repeat), *(_launches(phase) for phase in node.phases)),
        ]
        for node in graph.nodes[:SHOWN]
    ]
    rest = [f"and {len(graph.nodes) - SHOWN:,} more nodes"] if len(graph.nodes) > SHOWN else []
    header = ["node", "op", "output", "repeat", *(name.replace("_", " ") for name in PHASES)]
    body = table("Nodes, kernels of one execution", header, rows, text_columns=3)
    return headed(workload_text(workload_dict(graph)), *summary, "", body, *rest, notes=graph.notes)


def _launches(phase: Any) -> str:
    return f"{sum(kernel.count for kernel in phase):g}" if phase else ""


@tables.register
def _(job: Job) -> RenderableType:
    """Layout, memory, and what the first stage launches and sends."""
    plan = job.plan
    layout = layout_text(dataclasses.asdict(plan.layout))
    first = min((kind for kind, _ in plan.messages), default=min(plan.kinds))
    launched = [[name, *_launched(counts, first)] for name, counts in job.counts.items()]
    sent = [
        [message.slot.replace("_", " "), message.op, message.group, f"{message.count:g}", _size(message.payload_bytes)]
        for kind, message in plan.messages
        if kind == first
    ]
    header = ["family", *(name.replace("_", " ") for name in WORK)]
    parts = [table("Kernels of a micro-batch on the first stage, and its optimizer's of a step", header, launched)]
    if sent:
        columns = ["waited for by", "message", "group", "count", "bytes"]
        parts.append(table("Messages of the first stage", columns, sent, text_columns=3))
    return headed(
        job.summary(),
        f"layout {layout}; {plan.micro_batches} micro-batches of {plan.layout.micro_batch_size}",
        f"fullest rank: {plan.memory.total / GIB:.1f} GiB",
        *(item for part in parts for item in ("", part)),
        notes=plan.notes,
    )


def _launched(counts: Any, kind: int) -> list[str]:
    """Launches of a kind of stage by what they do."""
    if not is_known(counts):
        return [short(counts), *[""] * (len(WORK) - 1)]
    return [f"{count:,.0f}" if count else "" for count in np.asarray(counts)[kind].sum(axis=-1)]


def _size(size: Any) -> str:
    size_bytes = number(size)
    return short(size) if size_bytes is None else f"{size_bytes / MIB:,.4g} MiB"
