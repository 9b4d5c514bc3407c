"""Ranking GPUs: order, ties, prices and memory by hand."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import neusight_jax as nj
from neusight_jax import prediction as forecasts
from neusight_jax.cli.app import run
from neusight_jax.comparison import Candidate, ranked
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.memory import RUNTIME_BYTES, memory_bytes, parameter_count
from neusight_jax.hardware.prices import Prices
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.records import as_text

GPUS = ("T4", "V100-PCIE-32GB", "H100")
H100, V100, T4 = "NVIDIA H100 80GB HBM3", "Tesla V100-PCIE-32GB", "Tesla T4"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return nj.graph_from_config("gpt2-large", batch_size=4, sequence_length=512, mode="inference")


def test_order_throughput_and_cost(graph: Graph) -> None:
    prices = Prices({H100: 3.6, V100: 0.36, T4: 0.036}, "USD")
    found = nj.compare(RooflinePredictor(), GPUS, graph, prices=prices)
    assert [item.gpu for item in found.candidates] == [H100, V100, T4]
    assert [item.rank for item in found.candidates] == [1, 2, 3]
    for item in found.candidates:
        seconds = nj.predict(RooflinePredictor(), nj.load_gpu(item.gpu), graph).total_s
        assert item.latency_s == pytest.approx(seconds)
        assert item.samples_per_s == pytest.approx(4 / seconds)
        assert item.tokens_per_s == pytest.approx(2048 / seconds)
        run_cost = prices.per_hour[item.gpu] / 3600 * seconds
        assert item.cost_per_run == pytest.approx(run_cost)
        assert item.cost_per_1k_samples == pytest.approx(250 * run_cost)
        assert item.cost_per_million_tokens == pytest.approx(1e6 / 2048 * run_cost)
    cheapest = nj.compare(RooflinePredictor(), GPUS, graph, prices=prices, by="cost")
    # Ten times the price each, for less than ten times the speed.
    assert [item.gpu for item in cheapest.candidates] == [T4, V100, H100]
    assert json.loads(cheapest.to_json())["currency"] == "USD"
    assert list(cheapest.to_frame()["gpu"]) == [T4, V100, H100]


def _candidate(gpu: str, seconds: float, spread: float = 0.0, **more: Any) -> Candidate:
    low, high = (seconds / (1 + spread), seconds * (1 + spread)) if spread else (None, None)
    return Candidate(gpu, latency_s=seconds, low_s=low, high_s=high, **{"fits": True, **more})


def _machines(*names: str) -> dict[str, nj.GPU]:
    """Machines of two architectures, whose errors share nothing."""
    return {name: nj.load_gpu(gpu) for name, gpu in zip(names, ("A100", "H100", "T4"), strict=True)}


def test_a_tie_is_called_a_tie() -> None:
    """b is told from a by less than their ratio errs; c is not, so it opens a group of its own."""
    items = [_candidate("c", 1.4, 0.1), _candidate("a", 1.0, 0.1), _candidate("b", 1.1, 0.1)]
    found = ranked(items, "latency", _machines("a", "b", "c"))
    assert [(item.gpu, item.rank, item.tie) for item in found] == [("a", 1, True), ("b", 1, True), ("c", 3, False)]
    half = 1.1 ** math.sqrt(2.0)  # of a ratio of two that share nothing
    assert (found[1].ratio, found[1].ratio_low, found[1].ratio_high) == pytest.approx((1.1, 1.1 / half, 1.1 * half))
    assert (found[0].ratio, found[0].ratio_low, found[0].ratio_high) == (1.0, 1.0, 1.0)
    plain = ranked([replace(item, low_s=None, high_s=None) for item in items], "latency", _machines("a", "b", "c"))
    assert [(item.gpu, item.rank, item.tie) for item in plain] == [("a", 1, False), ("b", 2, False), ("c", 3, False)]
    assert (plain[1].ratio, plain[1].ratio_low) == (pytest.approx(1.1), None)


def test_one_figure_of_a_gpu_is_no_tie(graph: Graph, tmp_path: Path) -> None:
    """Twice the bandwidth is not told from half of it by two intervals, which overlap, but by that of their ratio."""
    file = tmp_path / "wide.yaml"
    file.write_text("name: wide\nbase: H100\nmem_bytes_per_s: 6.7e12\n")
    wide, plain = nj.compare(nj.load_predictor("fp32"), ["H100", str(file)], graph).candidates
    assert (wide.gpu, wide.rank, plain.rank) == ("wide", 1, 2)
    assert plain.low_s is not None
    assert wide.high_s is not None
    assert plain.low_s < wide.high_s
    assert plain.ratio_low is not None
    assert 1.0 < plain.ratio_low < plain.ratio < plain.ratio_high  # type: ignore[operator]


def test_a_job_runs_on_as_many_of_each_gpu() -> None:
    """Two GPUs of each kind, in their usual server; what it costs and makes is of both."""
    layout = nj.Parallelism(data=2)
    job = nj.job_from_config("gpt2", layout, global_batch_size=4, sequence_length=64, mode="training", dtype="fp32")
    found = nj.compare(RooflinePredictor(), ["T4", "H100"], job, prices={"H100": 3.6}, notes={T4: ["a slow one"]})
    first, last = found.candidates
    step = nj.predict(RooflinePredictor(), nj.load_cluster("2x H100"), job)
    assert (first.gpu, last.gpu, found.num_gpus) == (H100, T4, 2)
    assert first.latency_s == pytest.approx(step.total_s)
    assert (first.samples_per_s, first.tokens_per_s) == pytest.approx((4 / step.total_s, step.tokens_per_s))
    assert first.cost_per_run == pytest.approx(2 * 3.6 / 3600 * step.total_s)
    assert (first.memory_bytes, first.fits) == (step.memory.total, True)
    assert last.notes == ("a slow one",)
    assert json.loads(found.to_json())["workload"]["layout"]["data"] == 2
    assert str(found).startswith("gpt2: training, 4 x 64 tokens, fp32, by latency\n")
    assert "of 2 GPUs at once" in str(found)
    lacking = nj.job_from_config("gpt2", layout, global_batch_size=4, sequence_length=64, mode="training", dtype="bf16")
    assert nj.compare(RooflinePredictor(), ["T4"], lacking).candidates[0].notes[0].startswith("has no bf16 path")


def test_a_split_model_runs_on_gpus_of_an_unknown_server(tmp_path: Path) -> None:
    graph = nj.graph_from_config(
        "llama-3.2-1b", batch_size=1, sequence_length=64, mode="prefill", dtype="fp16", tensor_parallel=2
    )
    file = tmp_path / "chip.yaml"
    file.write_text("name: chip\nbase: H100\n")
    found = nj.compare(RooflinePredictor(), ["H100", str(file)], graph)
    assert [item.rank for item in found.candidates] == [1, 2]
    assert found.num_gpus == 2
    layout = nj.Parallelism(data=2)
    job = nj.job_from_config("gpt2", layout, global_batch_size=4, sequence_length=64, mode="training", dtype="fp32")
    with pytest.raises(nj.InputError, match="no usual server of chip is known"):
        nj.compare(RooflinePredictor(), [str(file)], job)


def test_cost_scales_the_ratio() -> None:
    items = [
        _candidate("fast", 1.0, 0.1, price_per_hour=4.0),
        _candidate("slow", 2.0, 0.1, price_per_hour=1.9),
        _candidate("unpriced", 0.1),
    ]
    found = ranked(items, "cost", _machines("fast", "slow", "unpriced"))
    assert found[1].ratio == pytest.approx(4.0 / 3.8)
    assert [(item.gpu, item.rank, item.tie) for item in found] == [
        ("slow", 1, True),
        ("fast", 1, True),
        ("unpriced", 0, False),
    ]


def test_intervals_of_a_forecast_are_taken(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*arguments: Any, **options: Any) -> forecasts.Forecast:
        forecast = forecasts.predict(*arguments, **options)
        return replace(forecast, interval_s=(0.1 * forecast.total_s, 20 * forecast.total_s))

    monkeypatch.setattr(sys.modules["neusight_jax.comparison"], "predict", predict)
    found = nj.compare(RooflinePredictor(), GPUS, graph)
    assert [item.rank for item in found.candidates] == [1, 1, 1]
    assert all(item.tie for item in found.candidates)
    first = found.candidates[0]
    assert (first.low_s, first.high_s) == (
        pytest.approx(0.1 * (first.latency_s or 0)),
        pytest.approx(20 * (first.latency_s or 0)),
    )


def test_parameters_and_memory(graph: Graph) -> None:
    """GPT-2 large has 774 million parameters (Radford et al. 2019); biases, norms and positions are not counted."""
    assert parameter_count(graph) == pytest.approx(774e6, rel=0.01)
    inference = memory_bytes(graph)
    # The widest node is the head: 2048 rows in of 1280, out 50257.
    assert inference == pytest.approx(4 * (parameter_count(graph) + 2048 * (1280 + 50257)) + RUNTIME_BYTES, rel=1e-6)
    training = memory_bytes(nj.graph_from_config("gpt2-large", batch_size=4, sequence_length=512, mode="training"))
    assert training > 16 * parameter_count(graph) + RUNTIME_BYTES


def test_what_does_not_fit_or_run_comes_last() -> None:
    graph = nj.graph_from_config("gpt3-2.7b", batch_size=1, sequence_length=512, mode="training")
    found = nj.compare(RooflinePredictor(), [*GPUS], graph)
    assert (found.candidates[0].gpu, found.candidates[0].fits) == (H100, True)
    assert [item.rank for item in found.candidates if not item.fits] == [0, 0]
    assert {item.notes[0] for item in found.candidates if not item.fits} == {"may not fit in memory: not ranked"}
    bf16 = nj.graph_from_config("gpt2-large", batch_size=1, sequence_length=128, mode="inference", dtype="bf16")
    last = nj.compare(RooflinePredictor(), ["V100-PCIE-32GB", "H100"], bf16).candidates[-1]
    assert (last.gpu, last.rank, last.latency_s) == (V100, 0, None)
    assert last.notes == ("has no bf16 path, only fp32, fp16, fp64: not forecast",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected a mapping of GPU: price"),
        ("{}", "expected a mapping of GPU: price"),
        ("H100: cheap", "price of H100 is 'cheap', expected a positive number"),
        ("H100: -1", "price of H100 is -1"),
        ("currency: [1]\nH100: 2", r"prices.yaml: currency is \[1\], expected text of at most 20 characters"),
        ("{", "not YAML"),
    ],
)
def test_bad_price_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(nj.InputError, match=message):
        nj.read_prices(file)
    with pytest.raises(nj.InputError, match="no such file; expected a price file"):
        nj.read_prices(tmp_path / "nowhere.yaml")


def test_prices_know_aliases(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text('{"currency": "EUR", "H100": 2.5, "my-card": 1}')
    prices = nj.read_prices(file)
    assert (prices.currency, dict(prices.per_hour)) == ("EUR", {H100: 2.5, "my-card": 1.0})


def test_prices_of_a_csv(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("gpu,usd\nH100,2.5\nmy-card,1\ncurrency,USD\n")
    prices = nj.read_prices(file)
    assert (prices.currency, prices.of("H100"), prices.of("my-card"), prices.of("T4")) == ("USD", 2.5, 1.0, None)
    for text, message in (
        ("H100,2,3", "row 'H100,2,3' is no GPU,price"),
        ("H100,1\nT4,cheap", "price of T4 is 'cheap'"),
    ):
        file.write_text(text)
        with pytest.raises(nj.InputError, match=message):
            nj.read_prices(file)


def test_bad_orders(graph: Graph) -> None:
    with pytest.raises(nj.InputError, match="unknown order 'price'"):
        nj.compare(RooflinePredictor(), GPUS, graph, by="price")
    with pytest.raises(nj.InputError, match="ranking by cost needs prices"):
        nj.compare(RooflinePredictor(), GPUS, graph, by="cost")
    with pytest.raises(nj.InputError, match="no price for any of"):
        nj.compare(RooflinePredictor(), GPUS, graph, prices=Prices({"A100": 1.0}), by="cost")


def test_command_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: USD\nT4: 0.35\nH100: 2.5\n")
    common = [
        "compare",
        "bert-large",
        "--gpu",
        "T4",
        "H100",
        "--sequence-length",
        "64",
        "--checkpoint",
        str(checkpoint),
    ]
    assert run([*common, "--prices", str(prices)]) == 0
    shown = capsys.readouterr().out
    assert "per 1M tokens" in shown
    assert shown.index(H100) < shown.index(T4)
    assert run([*common, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [item["gpu"] for item in read["gpus"]] == [H100, T4]
    assert run([*common, "--by", "price"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown order 'price'")
    assert run([*common, "--plot", str(tmp_path / "x.svg")]) == 2
    assert "x.svg: this is a page, expected a name that ends in .html" in capsys.readouterr().err


def test_all_gpus_of_the_catalog(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "bert-tiny", "--sequence-length", "16", "--gpu", "all", "--checkpoint", str(checkpoint)]
    assert run([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert sorted(item["gpu"] for item in content["gpus"]) == sorted(nj.list_gpus())
    assert run(command) == 0
    assert re.search(r"^note: (?:[^,]+, ){5}[^,]+ and \d+ others: ", capsys.readouterr().out, re.MULTILINE)


def test_scale_trace_on_the_command_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).resolve().parent / "data" / "torch_cpu_trace.json"
    common = ["scale-trace", str(trace), "--from", "V100-PCIE-32GB", "--checkpoint", str(checkpoint)]
    assert run([*common, "--to", "T4", "H100"]) == 0
    shown = capsys.readouterr().out
    assert "Rules" in shown
    assert "note: no GPU kernel in this trace" in shown
    assert run([*common, "--to", "T4", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert list(read)[:2] == ["schema", "checkpoint"]
    assert read["runs"][0]["target"] == T4
    assert sum(part["share"] for part in read["runs"][0]["coverage"].values()) == pytest.approx(1.0)
    assert run([*common, "--to", "T4", "--select", "mode"]) == 2
    assert "expected COLUMN=VALUE" in capsys.readouterr().err


def test_plot(graph: Graph, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    from neusight_jax.reports.page import write_plots

    found = nj.compare(RooflinePredictor(), GPUS, graph, prices=Prices({H100: 2.5}))
    write_plots(tmp_path / "gpus.html", found)
    text = (tmp_path / "gpus.html").read_text()
    times, costs = json.loads(re.findall(r'id="plots">(.*?)</script>', text, re.DOTALL)[0])
    assert times["data"][0]["y"] == [item.gpu for item in found.candidates]
    assert times["data"][0]["x"] == pytest.approx([1e3 * (item.latency_s or 0.0) for item in found.candidates])
    assert costs["data"][0]["x"] == [found.candidates[0].cost_per_million_tokens, None, None]
    assert "per run" in as_text(found, width=200)
