"""The glossary has every column header that commands print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group
from rich.table import Table
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.hardware.prices import Prices
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import PHASES
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.reports import comparison, forecast, layouts, sensitivity, serving
from neusight_jax.reports.text import INTERVAL
from neusight_jax.runs import Run
from neusight_jax.serving.choices import Serving, ServingChoice

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "glossary.md").read_text(encoding="utf-8")
TERMS = {
    term
    for line in re.findall(r"^\*\*(.+)\*\*$", PAGE.partition("## Columns of tables")[2], re.MULTILINE)
    for term in line.split(", ")
}
PRICES = Prices({"NVIDIA H100 80GB HBM3": 2.5, "NVIDIA A100-SXM4-80GB": 1.5}, "USD")
RUN = Run(tokens=1e9, dollars_per_kwh=0.1, grid_g_per_kwh=400.0)
FAILING = replace(RUN, mtbf_hours=5e4, checkpoint_s=60.0, restart_s=600.0)
PREDICTOR = RooflinePredictor()


def headers(tables: Any) -> Iterator[str]:
    """Column headers of what is printed, without percentiles, currencies and signs."""
    if isinstance(tables, Table):
        for column in tables.columns:
            yield re.sub(r" (p\d+|USD|±\d+%)$", "", str(column.header))
    for part in tables.renderables if isinstance(tables, Group) else ():
        yield from headers(part)


def graph(**changes: Any) -> nj.Graph:
    return nj.graph_from_config("bert-tiny", batch_size=2, sequence_length=32, mode="training", **changes)


def predicted() -> Any:
    job = nj.job_from_config(TINY, nj.Parallelism(data=2), global_batch_size=4, sequence_length=64)
    one, many = (
        nj.predict(PREDICTOR, nj.load_gpu("H100"), graph()),
        nj.predict(PREDICTOR, nj.load_cluster("2x H100"), job),
    )
    return Group(forecast.tables(one), forecast.tables(many))


def compared() -> Any:
    job = nj.job_from_config(TINY, nj.Parallelism(data=2), global_batch_size=4, sequence_length=64)
    asked = {"prices": PRICES, "run": FAILING}
    found = [nj.compare(PREDICTOR, ["H100", "A100"], work, **asked) for work in (graph(), job)]  # type: ignore[arg-type]
    return Group(*map(comparison.tables, found))


def served() -> Any:
    """Of an answer made by hand: its columns are those of its fields, and forecasting one compiles for long."""
    intervals = {"ttft_s": (0.1, 0.3), "tpot_s": (0.01, 0.02), "gpus": (1.0, 1.0), "cost": (0.04, 0.08)}
    choice = ServingChoice("H100", 1, 1, rank=1, replicas=1, gpus=1, ttft_s={"p95": 0.2}, tpot_s={"p95": 0.015})
    costs = {"per_hour": 2.5, "input": 0.01, "output": 0.1, "tokens": 0.05}
    run = RUN.cost(seconds=1.0, gpus=1, tokens=100.0, energy_j=500.0, price_per_hour=2.5)
    choice = replace(choice, intervals=intervals, costs=costs, run=run)
    asked: dict[str, Any] = {
        "model": "tiny",
        "products": "bf16",
        "input_tokens": 128,
        "output_tokens": 16,
        "percentile": 95.0,
    }
    asked |= {"users": 4, "request_rate": None, "ttft_s": None, "tpot_s": None}
    return serving.tables(Serving(asked, "cost", (choice,), "USD"))


def laid_out() -> Any:
    clusters = {f"2x {name}": nj.load_cluster(f"2x {name}") for name in ("H100", "A100")}
    asked: dict[str, Any] = {"global_batch_size": 4, "sequence_length": 64, "prices": PRICES}
    found = [nj.parallelize(PREDICTOR, clusters, TINY, run=run, **asked) for run in (None, FAILING)]
    return Group(*map(layouts.tables, found))


def sensed() -> Any:
    return sensitivity.tables(nj.sensitivity(PREDICTOR, nj.load_gpu("H100"), graph()))


@pytest.mark.parametrize("printed", [predicted, compared, served, laid_out, sensed], ids=lambda made: made.__name__)
def test_every_header_is_in_the_glossary(printed: Any) -> None:
    names = {*headers(printed()), INTERVAL}
    assert len(names) > 5
    # Sensitivities have a column for families and phases, by their names.
    assert sorted(names - TERMS - {*FAMILIES, *PHASES}) == []


def test_a_new_header_would_be_missed() -> None:
    table = Table("rank", "TTFT p95", "cost USD", "such a column")
    assert set(headers(Group("text", table))) - TERMS == {"such a column"}
