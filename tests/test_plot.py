"""Pictures: what is drawn, the files, and a report that needs nothing but a browser."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")

import neusight_jax as nj
from neusight_jax.baselines import load_baseline
from neusight_jax.designs.answers import Design
from neusight_jax.designs.multipliers import Multipliers
from neusight_jax.errors import InputError
from neusight_jax.reports import figures, html
from neusight_jax.reports.files import require_format, save, svg
from neusight_jax.sensitivities import Sensitivity

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
H100 = nj.load_gpu("H100")


def design(area: float, latency: float) -> Design:
    metrics = {"latency_s": latency, "tokens_per_s": 1 / latency, "area_mm2": area}
    prices = Multipliers({"area_mm2": 0.5}, {"area_mm2": 0.0}, {}, 0.01)
    trace = ((10, float("inf")), (20, 0.2), (30, 0.1))
    return Design(
        gpu=H100.replace(num_sms=area),
        free={"num_sms": area},
        metrics=metrics,
        base_metrics={"latency_s": 0.5, "tokens_per_s": 2.0, "area_mm2": 800.0},
        seconds={"a model": latency},
        base_seconds={"a model": 0.5},
        budgets={"area_mm2": area},
        feasible=True,
        multipliers=prices,
        objective=0.1,
        evaluations=30,
        seed=0,
        trace=trace,
    )


DESIGNS = [design(400.0, 0.9), design(600.0, 0.6)]


@pytest.fixture(scope="module")
def result() -> Sensitivity:
    graph = nj.graph_from_config("gpt2", batch_size=8, sequence_length=512)
    return nj.sensitivity(load_baseline("roofline"), H100, graph, gpu_name="H100 <&>")


class Page(HTMLParser):
    """Tags, text and everything a page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster") and not value.startswith("#"):
                self.loads.append(f"{tag} {name}={value}")

    def handle_data(self, text: str) -> None:
        self.text += text


def test_the_roofline_shows_every_kernel_with_arithmetic(result: Sensitivity) -> None:
    axes = figures.roofline(result.forecast, H100).axes[0]
    points = np.concatenate([each.get_offsets() for each in axes.collections])
    columns = result.forecast.columns
    real = columns["flop"] > 0
    assert len(points) == real.sum()
    np.testing.assert_allclose(
        sorted(points[:, 1]), sorted(columns["flop"][real] / columns["seconds"][real] / 1e12), rtol=1e-6
    )
    vector = axes.lines[0].get_ydata()
    assert vector.max() == pytest.approx(float(H100.fp32_flop_per_s) / 1e12)
    assert vector[0] / axes.lines[0].get_xdata()[0] == pytest.approx(float(H100.mem_bytes_per_s) / 1e12)


def test_bars_are_the_elasticities(result: Sensitivity) -> None:
    axes = figures.bars(result).axes[0]
    drawn = {label.get_text(): bar.get_width() for label, bar in zip(axes.get_yticklabels(), axes.patches, strict=True)}
    assert drawn["mem_bytes_per_s"] == pytest.approx(result.total["mem_bytes_per_s"])
    assert "link_bytes_per_s" not in drawn


def test_a_heat_map_is_the_sweep() -> None:
    rows = [(sms, rate, sms * rate) for sms in (10.0, 20.0) for rate in (1e12, 2e12, 4e12)]
    frame = pd.DataFrame(rows, columns=["num_sms", "mem_bytes_per_s", "seconds"])
    mesh = figures.heat_map(frame, "num_sms", "mem_bytes_per_s").axes[0].collections[0]
    np.testing.assert_allclose(
        np.asarray(mesh.get_array()).ravel(), [1e13, 2e13, 2e13, 4e13, 4e13, 8e13]
    )  # rows: bandwidth, columns: SMs
    with pytest.raises(InputError, match="at least two values"):
        figures.heat_map(frame[frame["num_sms"] == 10.0], "num_sms", "mem_bytes_per_s")
    with pytest.raises(InputError, match="unknown column 'sms'"):
        figures.heat_map(frame, "sms", "mem_bytes_per_s")


def test_the_front_is_the_designs() -> None:
    axes = figures.front(DESIGNS, "area_mm2").axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[400, 0.9], [600, 0.6]])
    np.testing.assert_allclose(axes.lines[1].get_xydata(), [[800, 0.5]])
    with pytest.raises(InputError, match="no design on the front"):
        figures.front([], "area_mm2")


def test_files(result: Sensitivity, tmp_path: Path) -> None:
    figure = figures.bars(result)
    save(figure, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    save(figure, tmp_path / "bars.svg")
    root = ElementTree.fromstring((tmp_path / "bars.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # Not the figure above: drawing it twice has moved its layout by a hair.
    assert svg(figures.bars(result), "salt") == svg(figures.bars(result), "salt")
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf$"):
        require_format(tmp_path / "bars.html")


@pytest.fixture(scope="module")
def pages(result: Sensitivity) -> dict[str, str]:
    return {
        "sensitivity": html.sensitivity_page(result, H100),
        "design": html.design_page(DESIGNS[1], DESIGNS, "area_mm2"),
    }


@pytest.mark.parametrize(("name", "pictures"), [("sensitivity", 2), ("design", 2)])
def test_pages_load_nothing(pages: dict[str, str], name: str, pictures: int) -> None:
    page = Page(pages[name])
    assert page.loads == []
    assert page.tags.count("svg") == pictures
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert "@import" not in pages[name]
    assert "url(http" not in pages[name]
    if name == "sensitivity":
        assert "H100 <&>" in page.text  # escaped in the source


@pytest.mark.skipif(not BROWSER, reason="no Chromium here; the parser's test runs everywhere")
@pytest.mark.parametrize("name", ["sensitivity", "design"])
def test_a_browser_shows_the_page(pages: dict[str, str], name: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(pages[name], encoding="utf-8")
    shot = tmp_path / "page.png"
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
    size = ["--hide-scrollbars", "--window-size=1000,3000"]
    address = (tmp_path / "page.html").as_uri()
    subprocess.run(
        [BROWSER, *quiet, *size, f"--screenshot={shot}", address], check=True, capture_output=True, timeout=120
    )
    from matplotlib.image import imread

    pixels = imread(shot)[..., :3]
    assert pixels.shape[:2] == (3000, 1000)
    inked = (pixels.min(axis=2) < 0.9).mean()
    assert 0.005 < inked < 0.9
    coloured = ((pixels.max(axis=2) - pixels.min(axis=2)) > 0.3).mean()
    assert coloured > 1e-4  # bars, points or lines
