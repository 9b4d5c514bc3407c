"""Records print as tables with units and have a `repr` of one line, also while they are traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.comparison import Candidate
from neusight_jax.datasets.measurements import Measurements
from neusight_jax.hardware.prices import Prices
from neusight_jax.model.checkpoint import untrained
from neusight_jax.records import LINE, Printed, Record
from neusight_jax.serving.times import Engine
from neusight_jax.training.evaluation.scores import Evaluation, View
from neusight_jax.workloads import workload

LAYOUT = nj.Parallelism(tensor=2, pipeline=2, data=2)


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    graph = nj.graph_from_config("bert-tiny", 1, 32, "training")
    job = nj.job_from_config("llama-3.2-1b", LAYOUT, global_batch_size=4, sequence_length=1024)
    free = nj.Range("mem_bytes_per_s", 1e12, 4e12, count=3)
    frame = pd.DataFrame({"device": ["a", "b"], "family": ["linear"] * 2, "dtype": ["fp32"] * 2})
    return {
        "gpu": nj.load_gpu("H100"),
        "cluster": nj.load_cluster("64x H100"),
        "topology": nj.load_cluster("64x H100").topology,
        "layout": LAYOUT,
        "graph": graph,
        "node": graph.nodes[2],
        "kernels": graph.kernels,
        "batch": graph.kernels.families["linear"],
        "job": job,
        "memory": job.plan.memory,
        "software": nj.Software(),
        "prices": Prices({"H100": 2.5, "A100": 1.25}, "USD"),
        "workload": workload(graph),
        "range": free,
        "grid": nj.Grid((free,)),
        "samples": nj.Samples((free,), 8),
        "space": nj.Space(),
        "options": nj.TraceOptions(fused=True),
        "measurements": Measurements(frame, frame[:0]),
        "evaluation": Evaluation({}, [View(frame, {"GPU": "{device}"}, "Errors")]),
    }


def test_every_record_is_a_table_and_a_line(records: dict[str, Any]) -> None:
    for name, each in records.items():
        assert isinstance(each, Printed), name
        text, line = str(each), repr(each)
        assert len(text.splitlines()) > 2, name
        assert "\n" not in line, name
        assert len(line) <= 2 * LINE, name
        assert type(each).__name__ in line or "<" in line
        assert "<table" in each._repr_html_(), name


def test_figures_have_the_units_people_use(records: dict[str, Any]) -> None:
    text = str(records["gpu"])
    for said in ("132 SMs", "1.98 GHz", "3350 GB/s", "50 MiB", "700 W", "494.7 TFLOP/s", "hbm", "NVIDIA"):
        assert said in text
    assert "fp4_flop_per_s" not in text  # it has none
    assert repr(records["gpu"]) == "<GPU: 132 SMs, 1.98 GHz, 3350 GB/s, 85.899 GB, 66.91 TFLOP/s>"
    assert "nic_bytes_per_s   50 GB/s" in str(records["cluster"])
    assert "1000 GB/s" in str(records["grid"])
    assert "an hour USD" in str(records["prices"])
    assert "default from" in str(records["software"])
    assert "linear" in str(records["kernels"])
    assert "tensor 2, pipeline 2, data 2" in str(records["job"])
    assert "1 ms" in str(Engine())


def test_static_records_are_told_apart_by_their_line(records: dict[str, Any]) -> None:
    """Kept programs go by it (`programs.one_shot`), so it is the whole call, and makes the record again."""
    assert repr(LAYOUT) == "Parallelism(tensor=2, pipeline=2, data=2)"
    names = {"Parallelism": nj.Parallelism, "Range": nj.Range, "Grid": nj.Grid, "Samples": nj.Samples}
    names |= {"Space": nj.Space, "TraceOptions": nj.TraceOptions}
    static = [records[name] for name in ("layout", "range", "grid", "samples", "options")]
    long = nj.Space(micro_batch_sizes=tuple(range(1, 80)))
    for each in (*static, long, dataclasses.replace(records["range"], low=1.0000000001e12)):
        assert eval(repr(each), names) == each


def test_traced_records_print(records: dict[str, Any]) -> None:
    said: list[str] = []

    def run(*given: Record) -> Any:
        said.extend(part for each in given for part in (str(each), repr(each), each._repr_html_()))
        return given[0].clock_hz  # type: ignore[attr-defined]

    given = [records[name] for name in ("gpu", "cluster", "job", "kernels", "software")]
    jax.eval_shape(run, *given)
    jax.grad(lambda gpu: jnp.asarray(run(gpu), float))(given[0])
    jax.vmap(run)(nj.stack_gpus([given[0], nj.load_gpu("T4")]))
    assert len(said) == 3 * (len(given) + 2)
    assert all("traced float" in each or "traced int" in each for each in said[: 3 * 4 : 3])
    assert "2 values" in str(nj.stack_gpus([given[0], nj.load_gpu("T4")]))
    assert "num_sms" in str(jax.tree.map(lambda value: object(), given[0]))  # as JAX itself makes them


def test_slopes_have_no_units(records: dict[str, Any]) -> None:
    slopes = jax.tree.map(lambda value: -1e-13, records["gpu"])
    assert str(slopes).startswith("GPU of slopes, per unit of each figure")
    assert "GB/s" not in str(slopes)


def test_parts_of_results_are_tables_too() -> None:
    best = Candidate("H100", 1, latency_s=1.5e-3, samples_per_s=20.0)
    assert repr(best) == "Candidate(gpu='H100', rank=1, latency_s=0.0015, samples_per_s=20.0)"
    assert "1.5 ms" in str(best)
    assert "20 1/s" in str(best)


def test_predictors_say_what_they_cover() -> None:
    predictor = untrained("mixture", {"families": ["linear", "bmm"], "hidden": [8], "members": 1})
    assert repr(predictor) == "<MixturePredictor: linear, bmm>"
