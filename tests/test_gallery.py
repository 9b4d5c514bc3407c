"""The gallery: one command makes it, its numbers are those of `nj.predict`, and it works from disk."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="the gallery is made with the extra `report`")

from browser import PROGRAM, browser
from test_pages import needs_weights, tool
from test_reports import HIDDEN, READY

import neusight_jax as nj
from neusight_jax.hardware.catalog import canonical_name

FILE = Path(__file__).parents[1] / "docs" / "gallery" / "index.html"
LIMIT_BYTES = 5_000_000
CELLS = (("gpt2", "inference", "T4"), ("llama-3.2-1b", "decode", "H200"), ("bert-base", "training", "MI300X"))


def rows(text: str) -> list[dict[str, Any]]:
    """Rows of a gallery by their columns."""
    content = json.loads(re.findall(r'id="rows">(.*?)</script>', text, re.DOTALL)[0])
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def committed(model: str, mode: str) -> list[dict[str, Any]]:
    """Rows of a model in a mode that are there."""
    return [row for row in rows(FILE.read_text(encoding="utf-8")) if (row["model"], row["mode"]) == (model, mode)]


@needs_weights
@pytest.mark.parametrize(("model", "mode", "gpu"), CELLS)
def test_the_page_is_what_the_weights_give(model: str, mode: str, gpu: str) -> None:
    (row,) = [row for row in committed(model, mode) if row["GPU"] == canonical_name(gpu)]
    eager = model in tool("gallery").EAGER
    load = tool("gallery").LOADS[mode]
    graph = nj.graph_from_config(model, mode=mode, dtype="fp32" if eager else "bf16", **load)
    forecast = nj.predict(nj.load_predictor("fp32" if eager else "tensorcore"), nj.load_gpu(gpu), graph)
    # Five digits stand in the page; another machine's rounding moves the last.
    wanted = {"seconds": forecast.total_s, "joules a token": forecast.joules_per_token}
    wanted |= dict(zip(("low", "high"), forecast.interval_s or (), strict=True))
    wanted |= {"GiB": forecast.memory_bytes / 2**30}
    for name, value in wanted.items():
        assert row[name] == pytest.approx(value, rel=2e-4), f"{name}: run `python docs/tools/gallery.py`"
    assert row["fits"] is forecast.fits


def test_every_model_has_a_row_for_every_gpu() -> None:
    gallery, support = tool("gallery"), tool("support")
    found = rows(FILE.read_text(encoding="utf-8"))
    wanted = {
        (model, mode, canonical_name(gpu))
        for model in (*gallery.EAGER, *gallery.DECODERS)
        for mode in gallery.modes_of(model)
        for gpu in gallery.GPUS
    }
    assert {(row["model"], row["mode"], row["GPU"]) for row in found} == wanted
    assert len(found) == len(wanted)
    kinds = {model: support.kind_of(model) for model in ("gpt2", "llama-3.1-8b", "mixtral-8x7b")}
    for row in found:
        if row["model"] in kinds:
            assert row["letter"] == support.LETTERS[support.status(kinds[row["model"]], row["GPU"], row["dtype"])]
        assert (row["seconds"] is None) == (row["letter"] == "-")
    assert sum(len(file.read_bytes()) for file in FILE.parent.iterdir()) < LIMIT_BYTES


def test_reports_are_linked_and_share_one_script() -> None:
    """What their commands write, but for plotly.js, which stands in a file of its own."""
    gallery, index = tool("gallery"), FILE.read_text(encoding="utf-8")
    assert {file.name for file in FILE.parent.iterdir()} == {
        *("index.html", gallery.PLOTLY),
        *(f"{name}.html" for name in gallery.REPORTS),
        *(f"{name}.png" for name in gallery.PICTURED),
    }
    assert FILE.with_name(gallery.PLOTLY).read_text(encoding="utf-8").startswith("document.currentScript")
    for name in gallery.REPORTS:
        text = FILE.with_name(f"{name}.html").read_text(encoding="utf-8")
        command = f"neusight-jax {gallery.command_of(name)}"
        assert f'<a href="{name}.html">' in index
        assert all(f"<code>{command}</code>" in unescape(page) for page in (index, text))
        assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", gallery.PLOTLY]


@needs_weights
def test_a_report_is_what_its_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, made = (
        FILE.with_name("predict.html").read_text(encoding="utf-8"),
        tool("gallery").report("predict", tmp_path),
    )
    capsys.readouterr()
    sentences = [re.findall(r'class="sentence">(.*?)</p>', text) for text in (there, made)]
    assert sentences[0] == sentences[1], "run `python docs/tools/gallery.py`"


@needs_weights
def test_the_command_makes_it() -> None:
    """Of one model on two GPUs, one without the arithmetic."""
    gallery = tool("gallery")
    text = gallery.page(gallery.rows_of("llama-3.2-1b", "decode", ("T4", "H200")))
    made = rows(text)
    assert [(row["GPU"], row["letter"]) for row in made] == [("NVIDIA H200", "M"), ("Tesla T4", "-")]
    assert made[1]["seconds"] is None
    assert "2 forecasts: 1 models on 2 GPUs" in text
    (there,) = [row for row in committed("llama-3.2-1b", "decode") if row["GPU"] == "NVIDIA H200"]
    assert made[0]["seconds"] == pytest.approx(there["seconds"], rel=2e-4)


@pytest.mark.skipif(not PROGRAM, reason="no Chromium here; the parser's tests run everywhere")
def test_a_browser_sorts_and_filters_it_from_disk(tmp_path: Path) -> None:
    fill = """((name, value) => {
      const field = document.querySelector('form').elements[name];
      field.value = value;
      field.dispatchEvent(new Event('input', { bubbles: true }));
    })"""
    with browser(tmp_path / "profile") as page:
        page.open(FILE.as_uri(), "document.querySelectorAll('tbody tr').length === 200", width=390)
        assert page.run("document.documentElement.scrollWidth - window.innerWidth") <= 0
        for name, value in (("model", "gpt2-large"), ("GPU", "h100"), ("mode", "training")):
            page.run(f"{fill}('{name}', '{value}')")
        column = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[{}].textContent)"
        assert set(page.run(column.format(0))) == {"gpt2-large"}
        names = page.run(column.format(3))
        seconds = {row["GPU"]: row["seconds"] for row in committed("gpt2-large", "training") if "H100" in row["GPU"]}
        assert len(seconds) == 3
        assert names == sorted(seconds, key=seconds.__getitem__)
        page.run("document.querySelector('th[data-name=seconds] button').click()")
        assert page.run(column.format(3)) == names[::-1]
        assert page.run("document.querySelector('th[data-name=seconds]').getAttribute('aria-sort')") == "descending"
        for name in tool("gallery").REPORTS:
            page.open(FILE.with_name(f"{name}.html").as_uri(), READY, width=1280)
            assert page.run("document.querySelectorAll('figure .main-svg').length") > 0, name
            assert set(page.run(HIDDEN)) <= {0}, name
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
        assert page.errors == []
