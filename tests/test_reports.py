"""Reports: one page a result, all in one file; what it says, what it loads, and what a browser shows."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("jinja2", reason="pages need the extra `report`")
pytest.importorskip("plotly", reason="pages need the extra `report`")

from browser import PROGRAM, browser
from rich.table import Table

import neusight_jax as nj
from neusight_jax.cli import (
    compare,
    console,
    design,
    parallelize,
    predict,
    run,
    scale_trace,
    sensitivity,
    serve,
    sweep,
)
from neusight_jax.comparison import Comparison
from neusight_jax.designs.answers import Design, Multipliers
from neusight_jax.errors import InputError
from neusight_jax.forecast import PARTS, Forecast
from neusight_jax.graph.graph import Footprint
from neusight_jax.hardware.prices import Prices
from neusight_jax.layouts.answers import Choice, Layouts, Machine
from neusight_jax.markup import markdown, parts_of
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.power_curves import PowerCurve
from neusight_jax.records import Result
from neusight_jax.reports import page, plots
from neusight_jax.reports.text import between, interval_text
from neusight_jax.scaling.rules import ScaledRun
from neusight_jax.sensitivities import Sensitivity
from neusight_jax.serving.choices import Serving, ServingChoice
from neusight_jax.sweeps.run import Sweep
from neusight_jax.units import base_unit, energy_text, quantity

H100 = nj.load_gpu("H100")
READY = "document.documentElement?.dataset.ready == 'yes'"
HIDDEN = "[...document.querySelectorAll('.tables div')].map(box => box.scrollWidth - box.clientWidth)"
"""Pixels of every table that are seen by scrolling alone."""
LIMIT_BYTES = 3_000_000


def designed() -> Design:
    metrics = {"latency_s": 0.9, "tokens_per_s": 1.1, "area_mm2": 600.0}
    return Design(
        gpu=H100,
        free={"num_sms": 120.0},
        metrics=metrics,
        base_metrics={name: 2.0 * value for name, value in metrics.items()},
        seconds={"a model": 0.9},
        base_seconds={"a model": 1.8},
        budgets={"area_mm2": 600.0},
        feasible=True,
        multipliers=Multipliers({"area_mm2": 0.5}, {"area_mm2": 0.0}, {}, 0.01),
        objective=0.1,
        trace=((10, float("inf")), (20, 0.2), (30, 0.1)),
    )


def stepped() -> Forecast:
    ways = ("tensor", "pipeline", "data", "context", "expert", "chunks", "micro_batch_size")
    layout = {**dict.fromkeys(ways, 1), "data": 4, "zero": 3, "shards": 0, "recompute": "none"}
    load = {
        "model": "a model",
        "mode": "training",
        "global_batch_size": 4,
        "sequence_length": 256,
        "dtype": "bf16",
        "micro_batches": 1,
    }
    memory = Footprint(2.0**30, 2.0**30, 0.0, 2.0**29, 0.0, 2.0**29)
    load |= {"layout": layout}
    parts = dict(zip(PARTS, (0.3, 0.1, 0.05, 0.01), strict=True))
    sizes: dict[str, Any] = {"tokens": 1024, "gpus": 4, "memory": memory, "mem_bytes": 80 * 2.0**30}
    return Forecast("a model", "4x H100", load, parts, {}, **sizes)


def served() -> Serving:
    memory = {"weights": 1e10, "activations": 1e9, "runtime": 1e9, "mem_bytes": 8e10}
    times = {"ttft_s": {"p50": 0.4, "p95": 0.5}, "tpot_s": {"p50": 0.02, "p95": 0.03}, "memory": memory}
    intervals = {"ttft_s": (0.4, 0.7), "tpot_s": (0.02, float("inf")), "gpus": (2.0, 4.0), "cost": (0.1, 0.3)}
    costs = {"per_hour": 4.0, "input": 0.1, "output": 0.4, "tokens": 0.2}
    best = ServingChoice("H100", 2, 1, rank=1, replicas=1, gpus=2, intervals=intervals, costs=costs, **times)
    load: dict[str, Any] = {"model": "a model", "products": "bf16", "users": 50, "request_rate": None, "ttft_s": 1.0}
    load |= {"tpot_s": 0.05, "percentile": 95, "input_tokens": 2000, "output_tokens": 500}
    return Serving(load, "cost", (best, ServingChoice("T4", 1, 1, notes=("has no bf16 path",))), "USD")


def laid_out() -> Layouts:
    step = stepped()
    load = {**step.workload["layout"], "sequence_parallel": False}
    step = replace(step, workload={**step.workload, "layout": load})
    choices = tuple(Choice(rank, False, step, "faster") for rank in (1, 2))
    asked = {
        "model": "a model",
        "mode": "training",
        "global_batch_size": 4,
        "sequence_length": 256,
        "dtype": "bf16",
        "optimizer": "adamw",
    }
    return Layouts(asked, (Machine("4x H100", 4, choices, 10, 2),))


def scaled() -> ScaledRun:
    words = {name: np.array(["a", "b"], object) for name in ("name", "operator", "kind", "dtype")}
    words["rule"] = np.array(["forecast", "none"], object)
    numbers = {"count": [2, 1], "measured_s": [2e-3, 1e-3], "ratio": [0.5, 1.0], "scaled_s": [1e-3, 1e-3]}
    return ScaledRun("run.json", "V100", "T4", words | {n: np.array(v) for n, v in numbers.items()}, 3e-3, 4e-3)


def capped(predictor: RooflinePredictor, graph: nj.Graph) -> PowerCurve:
    held: dict[str, Any] = {"caps_w": (300.0, 500.0), "clocks_hz": (1e9,), "target": ("step", 1.0)}
    return nj.power_curve(predictor, H100, graph, gpu_name="H100", **held)


def widened(found: Comparison) -> Comparison:
    """A comparison whose table is as wide as any: with intervals, and a long name."""
    first, last = found.candidates
    bounds: dict[str, Any] = {"low_s": 1.111e-3, "high_s": 1.1111, "ratio_low": 0.1111, "ratio_high": 11.11}
    name = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    return replace(found, candidates=(replace(first, gpu=name, **bounds), replace(last, **bounds)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    predictor, graph = RooflinePredictor(), nj.graph_from_config("gpt2", 1, 64)
    forecast, out = nj.predict(predictor, H100, graph, gpu_name="H100 <&>"), tmp_path_factory.mktemp("sweep") / "out"
    cost = forecast.columns["seconds"] * forecast.columns["count"]
    ones = np.ones(len(cost))
    slopes = {"mem_bytes_per_s": -0.5 * ones, "link_bytes_per_s": 0.0 * ones, "all rates": -0.9 * ones}
    secants = dict(zip(slopes, (-0.4, 0.0, -0.9), strict=True))
    frame = pd.DataFrame({"gpu": "H100", "model": "gpt2", "workload": 0, "mem_bytes_per_s": [1e12, 2e12]})
    frame.assign(seconds=[2.0, 1.0]).to_parquet(out)
    found: list[Result] = [
        forecast,
        widened(nj.compare(predictor, ["H100", "T4"], graph, prices=Prices({"Tesla T4": 0.5}, "USD"))),
        Sensitivity(forecast, slopes, cost / cost.sum(), forecast.total_s, 0.0, secants),
        Sweep(out, 2, 0, {"workloads": [forecast.workload]}),
        designed(),
        scaled(),
        laid_out(),
        served(),
        capped(predictor, graph),
    ]
    return {each.kind: each for each in found}


@pytest.fixture(scope="module")
def pages(results: dict[str, Result]) -> dict[str, str]:
    machines = {"forecast": H100, "sensitivity": H100}
    about = {kind: {"machine": machine} for kind, machine in machines.items()}
    return {
        kind: result.to_html(checkpoint="fp32", command="neusight-jax ...", **about.get(kind, {}))
        for kind, result in results.items()
    }


class Parsed(HTMLParser):
    """Tags that are opened and not closed, everything a page would load, its text."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [tag] if tag not in self.VOID else []
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_whole_and_loads_nothing(pages: dict[str, str]) -> None:
    for kind, text in pages.items():
        parsed = Parsed(text)
        assert parsed.open == [], kind
        assert parsed.loads == ["link href=data:,"]
        assert not {"iframe", "img", "object"} & set(parsed.tags)
        assert len(text.encode()) < LIMIT_BYTES
        assert text.count('id="plotly"') == 1
        for head in ("Workload", "Machine", "Checkpoint", "Version", "Date", "Command"):
            assert f"<dt>{head}</dt>" in text, (kind, head)
        assert {"table", "figure", "h1"} <= set(parsed.tags)
    assert "H100 <&>" in Parsed(pages["forecast"]).text  # escaped in the source


def test_the_first_screen_answers_in_a_sentence(results: dict[str, Result], pages: dict[str, str]) -> None:
    """With its interval and what it costs, before any picture; then what it assumes, once; two pictures; tables."""
    forecast, found = results["forecast"], results["comparison"]
    assert isinstance(forecast, Forecast)
    assert isinstance(found, Comparison)
    said = {kind: page.report_of(result).sentence for kind, result in results.items()}
    assert all(said.values())
    assert said["forecast"].startswith("gpt2 on H100 <&>: inference of a batch takes ")
    assert energy_text(forecast.energy_j) in said["forecast"]
    assert "80% interval 1.111 ms to 1.111 s" in said["comparison"]
    assert said["serving"].startswith("The load takes 2 (2 to 4) H100 (1 x TP2)")
    assert "4.00 USD an hour, 0.20 (0.10 to 0.30) USD per million tokens" in said["serving"]
    assert said["design"].startswith("A GPU with multiprocessors 120 SMs: 900 ms in place of 1.8 s")
    for kind, text in pages.items():
        places = [text.index(part) for part in ('class="sentence"', "<figure>", 'class="tables"')]
        assert places == sorted(places), kind
        assert text[: places[2]].count("<figure>") <= 2
        assert Parsed(text).text.count(said[kind]) == 1
        assert "note: " not in Parsed(text).text
    noted = replace(forecast, notes=tuple(f"caveat {number}" for number in range(5)))
    shown = Parsed(noted.to_html(machine=H100)).text
    assert [shown.count(note) for note in noted.notes] == [1] * 5
    assert "and 2 more" in shown


def test_a_report_for_a_pull_request(
    results: dict[str, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Markdown of every kind of result: the sentence, the notes, and every cell of the tables; needs no extra."""
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    for kind, result in results.items():
        page.write_report(tmp_path / "x.md", result, checkpoint="fp32", command="neusight-jax ...")
        text = (tmp_path / "x.md").read_text(encoding="utf-8")
        report = page.report_of(result)
        assert text.startswith(f"# {report.title}\n\n{report.sentence}\n\n")
        assert "- Command: neusight-jax ..." in text
        for part in parts_of(report.tables):
            if isinstance(part, Table):
                for column in part.columns:
                    assert all(str(cell).replace("|", "\\|") in text for cell in column.cells), kind
                widths = {line.count(" | ") for line in markdown(part).splitlines() if line.startswith("| ")}
                assert widths == {len(part.columns) - 1}
    assert run(["predict", "gpt2", "--gpu", "H100", "--report", str(tmp_path / "y.md")]) == 0
    capsys.readouterr()
    assert (tmp_path / "y.md").read_text(encoding="utf-8").startswith("# gpt2 on NVIDIA H100 80GB HBM3\n")


def test_layouts_and_servers_are_drawn_by_what_they_trade(results: dict[str, Result]) -> None:
    serving, layouts = results["serving"], results["layouts"]
    caps, *_ = page.report_of(results["power_curve"]).plots
    assert [trace["name"] for trace in caps.traces[1::2]] == ["caps", "locked clocks", "knee"]
    front, *_ = page.report_of(serving).plots
    _, points, target = front.traces
    assert (points["x"], points["y"]) == ((1.0 / 0.03,), (0.0,))
    assert target["x"] == [1.0 / 0.05] * 2
    memory, *_ = page.report_of(layouts).plots
    step = stepped()
    assert memory.traces[1]["x"] == (step.memory_bytes / 2**30,) * 2
    assert memory.traces[1]["y"] == pytest.approx((1e3 * step.total_s,) * 2)
    assert memory.traces[2]["x"] == [80.0] * 2
    points = [(1.0, 5.0, "a"), (2.0, 6.0, "b"), (3.0, 2.0, "c"), (4.0, 3.0, "d")]
    for better, front in (((-1, -1), "ac"), ((1, 1), "db"), ((1, -1), "dc"), ((-1, 1), "ab")):
        line, *_ = plots.scatter("", {"": points}, "", "", better=better).traces
        assert "".join(line["text"]) == front


def test_a_bar_that_dwarfs_the_rest_makes_the_axis_logarithmic() -> None:
    even = plots.bars_with_interval("", ["a", "b", "c"], [1.0, 2.0, 19.0], None, "ms")
    uneven = plots.bars_with_interval("", ["a", "b", "c"], [1.0, 2.0, 41.0], None, "ms")
    zero = plots.bars_with_interval("", ["a", "b", "c"], [0.0, 2.0, 41.0], None, "ms")
    assert [plot.layout["xaxis"].get("type") for plot in (even, uneven, zero)] == [None, "log", None]
    assert uneven.layout["xaxis"]["title"]["text"] == "ms, logarithmic"


def test_a_page_says_what_the_result_says(results: dict[str, Result], pages: dict[str, str]) -> None:
    forecast = results["forecast"]
    assert isinstance(forecast, Forecast)
    drawn = json.loads(re.findall(r'id="plots">(.*?)</script>', pages["forecast"], re.DOTALL)[0])
    assert len(drawn) == 4
    power, limit = drawn[3]["data"]
    joules = 1e-3 * sum(np.diff(power["x"]) * power["y"][:-1])
    assert joules == pytest.approx(forecast.energy_j, rel=1e-3)
    assert power["x"][-1] == pytest.approx(1e3 * forecast.total_s, rel=1e-3)
    assert limit["y"] == [float(H100.tdp_w)] * 2
    areas = dict(zip(drawn[0]["data"][0]["ids"], drawn[0]["data"][0]["values"], strict=True))
    assert areas["step"] == pytest.approx(forecast.total_s)
    assert areas["forward/linear"] == pytest.approx(forecast.seconds_by("family")["linear"])
    assert "arithmetic intensity" not in pages["sweep"].split("<summary>Glossary")[-1]  # only terms that it uses
    assert "<dt>roofline</dt>" in pages["forecast"]


def test_the_roofline_has_every_kernel_with_arithmetic(results: dict[str, Result]) -> None:
    forecast = results["forecast"]
    assert isinstance(forecast, Forecast)
    traces = plots.roofline({"": (forecast, H100)}).traces
    points = [each for each in traces if each["mode"] == "markers"]
    real, columns = forecast.columns["flop"] > 0, forecast.columns
    rates = np.concatenate([each["y"] for each in points])
    np.testing.assert_allclose(np.sort(rates), np.sort(columns["flop"][real] / columns["seconds"][real] / 1e12))
    vector = next(each for each in traces if each["mode"] == "lines")
    assert max(vector["y"]) == pytest.approx(float(H100.fp32_flop_per_s) / 1e12)
    assert vector["y"][0] / vector["x"][0] == pytest.approx(float(H100.mem_bytes_per_s) / 1e12)


def test_elasticities_are_the_result(results: dict[str, Result]) -> None:
    found = results["sensitivity"]
    assert isinstance(found, Sensitivity)
    bars, marks = plots.elasticities({"H100": found}).traces
    drawn = dict(zip(bars["y"], bars["x"], strict=True))
    assert drawn["memory bandwidth"] == pytest.approx(found.total["mem_bytes_per_s"])
    assert "link to other GPUs" not in drawn
    assert dict(zip(marks["y"], marks["x"], strict=True))["memory bandwidth"] == -0.4


@pytest.mark.parametrize("up", ["mem_bytes_per_s", "nic_bytes_per_s"])
def test_a_heat_map_is_the_sweep(up: str, tmp_path: Path) -> None:
    rows = [(sms, rate, sms * rate) for sms in (10.0, 20.0) for rate in (1e12, 2e12, 4e12)]
    frame = pd.DataFrame(rows, columns=["num_sms", up, "seconds"])
    frame.assign(gpu="H100", model="gpt2", workload=0).to_parquet(tmp_path / "out")
    (plot,) = page.report_of(Sweep(tmp_path / "out", 6, 0, {})).plots
    (drawn,) = plot.traces
    assert (drawn["type"], drawn["x"], drawn["y"]) == ("heatmap", ["10", "20"], ["1000", "2000", "4000"])
    np.testing.assert_allclose(drawn["z"], np.log10([[1e13, 2e13], [2e13, 4e13], [4e13, 8e13]]))


def test_a_page_of_a_picture_alone(
    results: dict[str, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out = results["sensitivity"], tmp_path / "bars.html"
    assert isinstance(found, Sensitivity)
    bars = plots.elasticities({"H100": found})
    console.plot_to(None, found, bars)
    console.plot_to(out, found, bars)
    assert capsys.readouterr().err == f"wrote {out}\n"
    text = out.read_text(encoding="utf-8")
    (drawn,) = json.loads(re.findall(r'id="plots">(.*?)</script>', text, re.DOTALL)[0])
    assert [each["x"] for each in drawn["data"]] == [each["x"] for each in bars.traces]
    parsed = Parsed(text)
    assert (parsed.open, parsed.loads, parsed.tags.count("figure")) == ([], ["link href=data:,"], 1)
    assert not {"table", "section"} & set(parsed.tags)
    assert "H100 <&>" in parsed.text
    assert len(text.encode()) < LIMIT_BYTES
    page.write_plots(out, results["comparison"])
    drawn = json.loads(re.findall(r'id="plots">(.*?)</script>', out.read_text(encoding="utf-8"), re.DOTALL)[0])
    assert len(drawn) == len(page.report_of(results["comparison"]).plots)


def test_one_notation_for_intervals(results: dict[str, Result]) -> None:
    """A unit that both ends have stands once, in tables and in sentences."""
    assert between((0.5334, 0.6977)) == "533.4 to 697.7 ms"
    assert between((0.00098, 0.0012)) == "980 us to 1.2 ms"
    assert between((1.2, 3.0), "{:g}".format) == "1.2 to 3"
    assert between((0.69, 0.8), lambda ratio: f"{ratio - 1.0:+.1%}") == "-31.0% to -20.0%"
    assert (interval_text((1.0, 2.0)), interval_text(None)) == ("80% interval 1 to 2 s", "")
    step, found = stepped(), results["comparison"]
    assert isinstance(found, Comparison)
    assert "total 460 ms, 80% interval 400 to 500 ms  (" in str(replace(step, interval_s=(0.4, 0.5)))
    bounded = replace(found.candidates[0], low_s=0.4, high_s=0.5)
    assert "400 to 500 ms" in str(replace(found, candidates=(bounded,)))
    assert "500 ms (400 to 700 ms)" in str(results["serving"])
    assert "2 (2 to 4)" in str(results["serving"])


def test_lines_of_intervals_are_seen_on_their_bars() -> None:
    """By the contrast that WCAG 2.1 asks of graphics, 3 to 1."""
    (bars,) = plots.bars_with_interval("", ["a"], [1.0], [(0.5, 2.0)], "ms").traces
    assert (bars["error_x"]["arrayminus"], bars["error_x"]["array"]) == ([0.5], [1.0])
    for colours in THEMES.values():
        whisker, bar = (colours[part["color"]] for part in (bars["error_x"], bars["marker"]))
        assert contrast(whisker, bar) > 3.0
        assert contrast(whisker, colours["var(--panel)"]) > 3.0


def themes() -> dict[str, dict[str, str]]:
    """Colours of pages by their custom properties, light and dark."""
    first, second = re.findall(r":root[^{]*\{(.*?)\}", page.text_of("page.css"), re.DOTALL)
    light, dark = (dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in (first, second))
    assert light.keys() == dark.keys()
    named = {"light": light, "dark": dark}
    return {theme: {f"var({name})": value for name, value in colours.items()} for theme, colours in named.items()}


THEMES = themes()
AREAS = ("back", "panel", "hover", "bar")
DECORATION = ("line", "grid")
"""Frames of boxes and lines behind a picture, which say nothing."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_and_line_stands_out(theme: str) -> None:
    """By the contrast that WCAG 2.1 asks of text, 4.5 to 1, on every ground that it may stand on."""
    colours = THEMES[theme]
    marks = [name for name in colours if name[6:-1] not in (*AREAS, *DECORATION)]
    assert len(marks) == 13
    for name in marks:
        for ground in ("back", "panel", "hover"):
            least = 4.5 if ground != "hover" or name in ("var(--ink)", "var(--soft)") else 0.0
            assert contrast(colours[name], colours[f"var(--{ground})"]) >= least, (name, ground)


def test_pages_have_no_other_colours(results: dict[str, Result]) -> None:
    for name in ("page.css", "explore.css", "plots.js", "explore.js"):
        rules = re.sub(r":root[^{]*\{.*?\}|@media print \{.*", "", page.text_of(name), flags=re.DOTALL)
        assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?!\w)", rules) == [], name
    for kind, result in results.items():
        traces = json.dumps(page.plain([plot.traces for plot in page.report_of(result).plots]), default=str)
        assert re.findall(r"#[0-9a-fA-F]{6}", traces) == [], kind
        assert set(re.findall(r"var\([^)]*\)", traces)) <= set(THEMES["light"]), kind


def contrast(*colours: str) -> float:
    """WCAG 2.1 contrast of two colours, #rrggbb."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255.0 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def test_prices_are_stated(results: dict[str, Result], tmp_path: Path) -> None:
    """What an hour of a GPU costs, in which currency, and by which file."""
    file = tmp_path / "prices.yaml"
    file.write_text("currency: USD\nT4: 0.5\nH100: 2.5\n")
    graph = nj.graph_from_config("gpt2", 1, 64)
    found = nj.compare(RooflinePredictor(), ["H100", "T4"], graph, prices=file)
    stated = page.report_of(found).facts["Prices"]
    assert stated == f"an hour of one GPU, USD: NVIDIA H100 80GB HBM3 2.5, Tesla T4 0.5 ({file})"
    assert page.report_of(results["serving"]).facts["Prices"] == "an hour of one GPU, USD: H100 2"
    layouts = results["layouts"]
    assert isinstance(layouts, Layouts)
    priced = replace(layouts, machines=(replace(layouts.machines[0], price_per_hour=2.5),), currency="EUR")
    assert page.report_of(priced).facts["Prices"] == "an hour of one GPU, EUR: H100 2.5"
    assert "Prices" not in page.report_of(layouts).facts


def test_a_headline_says_a_tie_where_the_table_does(results: dict[str, Result]) -> None:
    found, layouts, serving = results["comparison"], results["layouts"], results["serving"]
    assert isinstance(found, Comparison)
    assert isinstance(layouts, Layouts)
    assert isinstance(serving, Serving)
    first, last = found.candidates
    assert page.report_of(found).sentence.startswith(f"{first.gpu} is the fastest: ")
    assert "a tie" not in page.report_of(found).sentence
    tied = replace(found, candidates=(replace(first, tie=True), replace(last, rank=1, tie=True)))
    assert f"a tie with {last.gpu}" in page.report_of(tied).sentence
    second = replace(serving.choices[0], gpu="H200", tie=True)
    tied_servers = replace(serving, choices=(replace(serving.choices[0], tie=True), second))
    assert "a tie" not in page.report_of(serving).sentence
    assert "; a tie with H200; " in page.report_of(tied_servers).sentence
    machine = layouts.machines[0]
    choices = tuple(replace(item, rank=1, tie=True) for item in machine.choices)
    machines = (replace(machine, choices=choices, tie=True), replace(machine, name="8x T4", tie=True))
    sentence = page.report_of(replace(layouts, machines=machines)).sentence
    assert sentence.startswith("4x H100, a tie with 8x T4: 460 ms a step")
    assert "a tie with 1 more" in sentence


def test_cells_carry_their_values() -> None:
    assert quantity("1.5 ms") == (0.0015, "s")
    assert quantity("16MiB") == (16 * 2**20, "B")
    assert quantity("3.35TB/s") == (3.35e12, "B/s")
    assert quantity("12,345") == (12345.0, "")
    assert quantity("+12.5%") == (0.125, "")
    assert quantity("1e12") == (1e12, "")
    assert quantity("64x64") is None
    assert quantity("4 rows") is None
    assert [base_unit(name) for name in ("mem_bytes_per_s", "clock_hz", "num_sms", "latency_s")] == [
        "B/s",
        "Hz",
        "",
        "s",
    ]


def test_what_a_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["predict", "gpt2", "--gpu", "H100", "--report"]
    drawn = ["sensitivity", "gpt2", "--gpu", "H100", "--plot"]
    for asked in (command, drawn):
        assert run([*asked, str(tmp_path / "x.pdf")]) == 2
        error = capsys.readouterr().err
        either = ".html, or .md for a pull request; for a PDF" if asked[-1] == "--report" else ".html; for a PDF"
        assert f"{asked[-1]} {tmp_path / 'x.pdf'}: this is a page, expected a name that ends in {either}" in error
        assert len(error.splitlines()) == 1
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    for asked in (command, drawn):
        assert run([*asked, str(tmp_path / "x.html")]) == 2
        assert "pages need jinja2 and plotly; install them with `pip install '.[report]'`" in capsys.readouterr().err
    with pytest.raises(InputError, match="pages need"):
        page.require_report("x.html")


def test_a_command_writes_its_page(
    results: dict[str, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert run(["gpus", "--json"]) == 0  # sets the command line that a page says
    capsys.readouterr()
    console.answer(results["forecast"], True, out, {"machine": H100}, checkpoint="tensorcore")
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "neusight_jax.forecast/1"
    assert captured.err == f"wrote {out}\n"
    text = Parsed(out.read_text(encoding="utf-8")).text
    assert "neusight-jax gpus --json" in text
    assert "tensorcore" in text
    for command in (predict, compare, sensitivity, design, sweep, scale_trace, parallelize, serve):
        function = getattr(command, command.__name__.rsplit(".", 1)[-1])
        assert "report" in inspect.signature(function).parameters


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the parser's tests run everywhere")
def test_a_browser_shows_the_pages(pages: dict[str, str], tmp_path: Path) -> None:
    with browser(tmp_path / "profile") as shown:
        for kind in ("forecast", "sweep", "design", "comparison"):
            (tmp_path / f"{kind}.html").write_text(pages[kind], encoding="utf-8")
            shown.requests.clear()
            shown.open((tmp_path / f"{kind}.html").as_uri(), READY, width=390 if kind == "design" else 1000)
            wide = shown.run("document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, f"{kind} is wider than the window by {wide}"
            assert shown.run("document.querySelectorAll('figure .main-svg').length") > 0
            assert [url for url in shown.requests if not url.startswith(("file:", "data:", "blob:"))] == []
            assert shown.errors == []
        shown.open((tmp_path / "comparison.html").as_uri(), READY, width=1280)
        assert shown.run(HIDDEN) == [0]  # all columns, cost too, without scrolling
        shown.open((tmp_path / "forecast.html").as_uri(), READY)
        column = "[...document.querySelectorAll('.tables table')][1].querySelectorAll('tbody tr td:nth-child(2)')"
        before = shown.run(f"[...{column}].map(cell => Number(cell.dataset.value))")
        assert before == sorted(before, reverse=True)
        shown.run("[1, 2].forEach(() => document.querySelectorAll('.tables table')[1].tHead.rows[0].cells[1].click())")
        assert shown.run(f"[...{column}].map(cell => Number(cell.dataset.value))") == sorted(before)


CONTRASTS = """
(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const out = [];
  const note = (what, colour, behind) => {
    const [low, high] = [light(colour), light(behind)].sort((a, b) => a - b);
    out.push([(high + 0.05) / (low + 0.05), what]);
  };
  const shown = (node) => node.getClientRects().length && getComputedStyle(node).visibility === "visible";
  for (const node of document.querySelectorAll("body *:not(script):not(style)")) {
    const words = [...node.childNodes].some((part) => part.nodeType === 3 && part.textContent.trim());
    const svg = node.closest("svg"), style = getComputedStyle(node);
    if (!shown(node) || node.closest(".modebar, .treemaplayer, .heatmaplayer, .hoverlayer")) continue;
    if (words && !svg) note(node.textContent.trim().slice(0, 30), rgb(style.color), ground(node));
    if (words && svg) note(`svg ${node.textContent.trim().slice(0, 30)}`, rgb(style.fill), ground(svg.parentElement));
    if (node.matches(".js-line, path.zerolinelayer, path.xlines-above, path.ylines-above") && style.stroke !== "none")
      note("line", rgb(style.stroke), ground(svg.parentElement));
  }
  return out.filter(([value]) => value < 4.5);
})()
"""


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the tests of custom properties run everywhere")
def test_a_browser_fits_tables_and_reads_both_themes(pages: dict[str, str], tmp_path: Path) -> None:
    """At 1280 pixels no table scrolls, and every text and line that is drawn stands out, light and dark."""
    with browser(tmp_path / "profile") as shown:
        for kind, text in pages.items():
            (tmp_path / f"{kind}.html").write_text(text, encoding="utf-8")
            for theme in THEMES:
                feature = {"name": "prefers-color-scheme", "value": theme}
                shown.call("Emulation.setEmulatedMedia", features=[feature])
                shown.open((tmp_path / f"{kind}.html").as_uri(), READY, width=1280)
                back = shown.run("getComputedStyle(document.documentElement).getPropertyValue('--back').trim()")
                assert back == THEMES[theme]["var(--back)"]
                assert set(shown.run(HIDDEN)) <= {0}, kind
                assert shown.run(CONTRASTS) == [], (kind, theme)
