"""Timelines: what a forecast's trace says, read back by `scale-trace` and by HolisticTraceAnalysis."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Graph
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.reports.timeline import (
    COMPUTE,
    HOST,
    MESSAGES,
    WAITS,
    forecast_timeline,
    step_timeline,
    write_timeline,
)
from neusight_jax.scaling.trace import busy_seconds

NAME = "NVIDIA H100 80GB HBM3"
Events = list[dict[str, Any]]
Step = tuple[Forecast, dict[str, Any]]


@pytest.fixture(scope="module")
def forecast() -> tuple[Forecast, Graph]:
    graph = nj.graph_from_config("bert-tiny", 8, 128, "training", optimizer="adamw")
    return nj.predict(RooflinePredictor(), nj.load_gpu(NAME), graph, gpu_name=NAME), graph


@pytest.fixture(scope="module", params=[(1, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2), (2, "zero-bubble", 1)])
def step(request: pytest.FixtureRequest) -> Step:
    pipeline, schedule, chunks = request.param
    layout = nj.Parallelism(tensor=2, pipeline=pipeline, data=2, zero=1, chunks=chunks, schedule=schedule)
    job = nj.job_from_config("llama-3.2-1b", layout, global_batch_size=8, sequence_length=512)
    cluster = nj.load_cluster(f"{layout.gpus}x H100")
    found = nj.predict(RooflinePredictor(), cluster, job, gpu_name=f"{layout.gpus}x {NAME}")
    return found, step_timeline(RooflinePredictor(), cluster, job, found)


def kernels(trace: dict[str, Any]) -> Events:
    return [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]


def spans(events: Events) -> tuple[np.ndarray, np.ndarray]:
    return np.array([each["ts"] for each in events]), np.array([each["dur"] for each in events])


def test_every_launch_is_there_in_order(forecast: tuple[Forecast, Graph]) -> None:
    found, graph = forecast
    trace = forecast_timeline(found, graph)
    drawn = kernels(trace)
    starts, lengths = spans(drawn)
    assert lengths.sum() * 1e-6 == pytest.approx(found.total_s, abs=1e-9 * len(drawn))
    np.testing.assert_allclose(starts[1:], (starts + lengths)[:-1], atol=2e-3)  # nanoseconds are rounded
    for family, seconds in found.seconds_by("family").items():
        own = sum(each["dur"] for each in drawn if each["args"]["family"] == family)
        assert own * 1e-6 == pytest.approx(seconds, rel=1e-3)
    heads = [each["name"] for each in trace["traceEvents"] if each.get("cat") == "gpu_user_annotation"]
    layers = [head for head in heads if head.startswith("layer")]
    assert layers == ["layer 0, forward", "layer 1, forward", "layer 1, backward", "layer 0, backward"]
    assert heads[-1] == "optimizer"
    assert trace["neusight_jax"]["workload"] == found.to_dict()["workload"]


def test_launches_and_operators_belong_to_kernels(forecast: tuple[Forecast, Graph]) -> None:
    trace = forecast_timeline(*forecast)
    by_category = defaultdict(dict[int, dict[str, Any]])
    for event in trace["traceEvents"]:
        if "correlation" in event.get("args", {}):
            by_category[event["cat"]][event["args"]["correlation"]] = event
    assert by_category["kernel"].keys() == by_category["cuda_runtime"].keys()
    products = {key for key, event in by_category["kernel"].items() if event["args"]["family"] in ("linear", "bmm")}
    assert by_category["cpu_op"].keys() == products


def test_our_own_reader(forecast: tuple[Forecast, Graph], tmp_path: Path) -> None:
    found, graph = forecast
    write_timeline(tmp_path / "run.json", forecast_timeline(found, graph))
    run = nj.scale_trace(tmp_path / "run.json", None, "H100", predictor=RooflinePredictor())
    assert run.origin == NAME
    assert run.measured_s == pytest.approx(found.total_s, rel=1e-3)
    assert run.scaled_s == pytest.approx(found.total_s, rel=1e-3)
    assert run.span_s == pytest.approx(found.total_s, rel=1e-3)
    shares = run.coverage()
    products = sum(found.seconds_by("family")[name] for name in ("linear", "bmm"))
    assert shares["forecast"]["share"] == pytest.approx(products / found.total_s, abs=2e-3)


def test_another_graph_is_refused(forecast: tuple[Forecast, Graph]) -> None:
    with pytest.raises(nj.InputError, match="expected its own"):
        forecast_timeline(forecast[0], nj.graph_from_config("gpt2", 1, 64))


def waits(trace: dict[str, Any], rank: int) -> float:
    """Seconds that a rank waits for other things than the pipeline."""
    events = (event for event in trace["traceEvents"] if (event["pid"], event["tid"]) == (HOST + rank, WAITS))
    return sum(event["dur"] for event in events) * 1e-6


def test_a_job_ends_when_its_step_does(step: Step, tmp_path: Path) -> None:
    found, trace = step
    end_s = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X") * 1e-6
    assert end_s == pytest.approx(found.total_s, rel=1e-6)
    drawn = kernels(trace)
    ranks = {each["pid"] for each in drawn}
    assert ranks == set(range(found.workload["layout"]["pipeline"]))
    for rank, stream in itertools.product(ranks, {each["tid"] for each in drawn}):
        own = sorted((each["ts"], each["dur"]) for each in drawn if (each["pid"], each["tid"]) == (rank, stream))
        assert own or stream != COMPUTE
        # One at a time; both ends of the pipeline send at will.
        assert stream == MESSAGES or all(ts + dur <= later + 2e-3 for (ts, dur), (later, _) in itertools.pairwise(own))
    computed = {
        rank: sum(each["dur"] for each in drawn if (each["pid"], each["tid"]) == (rank, COMPUTE)) * 1e-6
        for rank in ranks
    }
    slowest = max(computed, key=computed.__getitem__)
    assert computed[slowest] < found.compute_s < computed[slowest] + waits(trace, slowest)
    write_timeline(tmp_path / "job.json", trace)
    run = nj.scale_trace(tmp_path / "job.json", None, "H100", predictor=RooflinePredictor())
    assert run.origin == NAME


def test_what_is_beside_the_work_is_an_event(step: Step) -> None:
    found, trace = step
    listed = [event for event in trace["traceEvents"] if event["tid"] == WAITS and event["name"] == "beside the work"]
    assert [event["dur"] * 1e-6 for event in listed] == pytest.approx([found.fixed_s] * len(listed), rel=1e-3)
    assert {event["pid"] - HOST for event in listed} == set(range(found.workload["layout"]["pipeline"]))


def read_by_hta(folder: Path, files: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    return analysis.TraceAnalysis(trace_dir=str(folder), **({"trace_files": files} if files else {}))


@pytest.mark.filterwarnings("ignore")  # its own
def test_holistic_trace_analysis(
    forecast: tuple[Forecast, Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shares of busy time are those of our own intervals."""
    trace = forecast_timeline(*forecast)
    [file] = write_timeline(tmp_path / "0.json.gz", trace)
    read = read_by_hta(tmp_path, {0: str(file)}, monkeypatch)
    busy, span = busy_seconds(*spans(kernels(trace)))
    parts = read.get_temporal_breakdown(visualize=False).iloc[0]
    assert 100.0 - parts["idle_time_pctg"] == pytest.approx(100.0 * busy / span, abs=0.1)
    assert parts["compute_time_pctg"] == pytest.approx(100.0 * busy / span, abs=0.1)


@pytest.mark.filterwarnings("ignore")  # its own
def test_holistic_trace_analysis_sees_the_bubble(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file a rank: to HTA the step is as long as the forecast, and idle for the bubble and what is beside the work.

    Of messages, it knows what computation hides.
    """
    found, trace = step
    layout = found.workload["layout"]
    distance = found.gpus // layout["pipeline"]
    written = write_timeline(tmp_path / "traces", trace)
    assert {file.name for file in written} == {f"rank{at * distance}.json.gz" for at in range(layout["pipeline"])}
    read = read_by_hta(tmp_path / "traces", {}, monkeypatch)
    parts = read.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = read.get_comm_comp_overlap(visualize=False).set_index("rank")["comp_comm_overlap_pctg"]
    for place in range(layout["pipeline"]):
        drawn = [each for each in kernels(trace) if each["pid"] == place]
        sent = [each for each in drawn if each["name"].startswith("nccl")]
        busy, computed, messages = (
            busy_seconds(*spans(listed))[0] * 1e-6
            for listed in (drawn, [each for each in drawn if each not in sent], sent)
        )
        of_rank = parts.loc[place * distance]
        assert of_rank["kernel_time(us)"] * 1e-6 == pytest.approx(found.total_s, rel=1e-6)
        idle_s = of_rank["idle_time(us)"] * 1e-6
        assert idle_s == pytest.approx(found.total_s - busy, rel=1e-3)
        beside = [each for each in trace["traceEvents"] if (each["pid"], each["tid"]) == (HOST + place, WAITS)]
        bubble_s = found.total_s - busy_seconds(*spans([*drawn, *beside]))[0] * 1e-6
        assert bubble_s <= idle_s
        if layout["pipeline"] == 1:
            assert bubble_s == pytest.approx(0.0, abs=1e-6 * found.total_s)
        else:  # what messages between stages and those of gradients take of it
            assert 0.5 * found.bubble_s < bubble_s < 2.0 * found.bubble_s
        hidden = 100.0 * (computed + messages - busy) / messages
        assert overlap[place * distance] == pytest.approx(hidden, abs=0.1)
