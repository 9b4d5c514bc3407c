"""Scenes of the explorer, at two widths and in two themes: nothing fails, nothing leaves, no number is an old one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest

pytest.importorskip("jinja2", reason="the page needs the extra `explore`")
pytest.importorskip("plotly", reason="the page needs the extra `explore`")

from browser import PROGRAM, Page, browser
from test_explore import MOVE
from test_reports import designed, served

import neusight_jax as nj
from neusight_jax.explorer import answers, questions
from neusight_jax.explorer.asked import QUESTIONS, Question, Variant, Workload, work_of
from neusight_jax.explorer.server import Explorer
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.reports.page import report_of
from neusight_jax.units import duration

SMALL = {"model": "llama-3.2-1b", "batch_size": 8, "sequence_length": 64, "dtype": "bf16"}
TINY = {"model": "bert-tiny", "batch_size": 2, "sequence_length": 16}
HELD = json.dumps({"base": "H100", "figures": {"mem_bytes_per_s": 2e12}})
SCENES: dict[str, dict[str, Any]] = {
    "one GPU": {"tab": "one", **TINY},
    "another GPU": {"tab": "one", **TINY, "gpu": "T4"},
    "a decode": {"tab": "one", **SMALL, "mode": "decode"},
    "a moved GPU": {"tab": "one", **TINY, "mode": "training", "figure.num_sms": 66},
    "a cap": {"tab": "one", **TINY, "figure.power_limit_w": 300},
    "two machines": {"tab": "one", **TINY, "A": HELD},
    "a job": {"tab": "cluster", **SMALL, "mode": "training", "gpus": 8},
    "a forward pass of many": {"tab": "cluster", **SMALL, "mode": "prefill", "gpus": 8, "tensor": 8},
    "serving": {"tab": "serving", "model": "llama-3.2-1b", "users": 8, "price_per_hour": 2},
    "power": {"tab": "power", **TINY},
    "design": {"tab": "design", **TINY, "area_mm2": 700},
    "codesign": {"tab": "codesign", "model": "llama-3.2-1b", "batch_size": 4},
}
"""Name -> what the address of the page says."""
THEMES, WIDTHS = ("light", "dark"), (1280, 390)
FRESH = "!document.querySelector('main.stale') && document.querySelector('.card .value, #sentence').textContent"
ANSWERED = "document.getElementById('status').textContent === 'answered'"


@pytest.fixture(scope="module")
def server() -> Iterator[Explorer]:
    """A server without weights, whose questions are answered at once; the answers depend on the machine asked about."""

    def searched(predictor: Any, base: nj.GPU, *asked: Any, **options: Any) -> Any:
        metrics = {**designed().metrics, "power_w": 300.0, "latency_s": 1e-12 * float(base.mem_bytes_per_s)}
        return replace(designed(), metrics=metrics, base_metrics=metrics, seconds={}, base_seconds={})

    def counted(predictor: Any, servers: dict[str, nj.Cluster], *asked: Any, **options: Any) -> Any:
        (name,) = servers  # it says what was moved
        return replace(served(), choices=tuple(replace(choice, gpu=name) for choice in served().choices))

    with pytest.MonkeyPatch.context() as patch:
        for module in (answers, questions):
            patch.setattr(module, "predictor_of", lambda checkpoint: RooflinePredictor())
        for question, quick in {"design": searched, "codesign": searched, "serve": counted}.items():
            patch.setattr(questions, question, quick)
        patch.setattr(questions, "power_curve", partial(nj.power_curve, caps_w=(300.0,), clocks_hz=(1e9,)))
        explorer = Explorer(0, {"model": "bert-tiny", "gpu": "H100"})
        threading.Thread(target=explorer.serve_forever, daemon=True).start()
        yield explorer
        explorer.shutdown()
        explorer.server_close()
        questions._designed.cache_clear()


def asked(address: str) -> tuple[Workload, Variant, Question | None]:
    """Workload, machine and question that an address says."""
    state = dict(parse_qsl(address.partition("#")[2]))
    numbers = {
        record: {
            field.name: state[field.name] if field.type == "str" else float(state[field.name])
            for field in fields(record)
            if state.get(field.name)
        }
        for record in (Workload, Question)
    }
    whole = {name: int(value) if isinstance(value, float) else value for name, value in numbers[Workload].items()}
    prices = {"price_per_hour", "area_mm2", "power_w"}
    told = {name: value if name in prices else int(value) for name, value in numbers[Question].items()}
    figures = {name[7:]: float(value) for name, value in state.items() if name.startswith("figure.")}
    question = Question(state["tab"], **told) if state["tab"] in QUESTIONS else None
    return Workload(**whole), Variant(state["gpu"], figures), question


def wanted(address: str) -> str:
    """What the page of an address has to show, by the library."""
    load, variant, question = asked(address)
    if question is not None:
        result, about = questions.answer_to(load, variant, question)
        return report_of(result, **about).sentence
    machine = (variant.named() if load.gpus == 1 else variant.cluster(load.gpus, serves=not load.is_job))[1]
    return duration(nj.predict(RooflinePredictor(), machine, work_of(load)).total_s)


def shown(page: Page, tab: str) -> str:
    """What the page shows: the time of a step, or the sentence of a question, when it stands for the address."""
    if tab in QUESTIONS:
        page.run("document.querySelector('button[type=submit]').click()")
        page.wait(ANSWERED)
    page.wait(FRESH)
    place = "#sentence" if tab in QUESTIONS else ".card .value"
    return str(page.run(f"document.querySelector('{place}').textContent"))


def moved(page: Page, tab: str, place: float) -> None:
    """Move a slider; the answer to a question is then marked as one of before."""
    if tab not in QUESTIONS:
        page.run(f"{MOVE}('mem_bytes_per_s', {place})")
        return
    move = f"(input => {{ input.value = {place}; input.dispatchEvent(new Event('input', {{ bubbles: true }})); }})"
    page.run(f"{move}(document.querySelector('input[name=mem_bytes_per_s]'))")
    page.wait("document.querySelector('main.stale.renamed')")
    assert page.run("document.getElementById('status').textContent") == "press Answer"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the server's tests run everywhere")
@pytest.mark.parametrize("name", SCENES)
def test_a_scene_shows_no_old_number(name: str, server: Explorer, page: Page) -> None:
    tab = str(SCENES[name]["tab"])
    ready = "document.querySelectorAll('.slider').length > 5"
    page.open("about:blank", "true")  # a change of the fragment alone loads nothing
    address = f"{server.url}#{urlencode({'gpu': 'H100', **SCENES[name]})}"
    page.open(address, ready if tab in QUESTIONS else f"{ready} && {FRESH}")
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        for theme in THEMES:
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            moved(page, tab, 0.2 + 0.1 * THEMES.index(theme) + 0.3 * WIDTHS.index(width))
            assert shown(page, tab) == wanted(page.run("location.href")), (width, theme)
            wide = page.run("document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, f"wider than {width} by {wide}"
    own = (server.url.partition("?")[0], "data:", "blob:", "about:")
    assert [url for url in page.requests if not url.startswith(own)] == []
    assert page.errors == []
