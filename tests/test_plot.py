"""Pictures: what is drawn, the files, and and what they are saved as."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")

import neusight_jax as nj
from neusight_jax.baselines import load_baseline
from neusight_jax.errors import InputError
from neusight_jax.reports import figures
from neusight_jax.reports.files import require_format, save, svg
from neusight_jax.sensitivities import Sensitivity

H100 = nj.load_gpu("H100")


@pytest.fixture(scope="module")
def result() -> Sensitivity:
    graph = nj.graph_from_config("gpt2", batch_size=8, sequence_length=512)
    return nj.sensitivity(load_baseline("roofline"), H100, graph, gpu_name="H100 <&>")


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


def test_files(result: Sensitivity, tmp_path: Path) -> None:
    figure = figures.bars(result)
    save(figure, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    save(figure, tmp_path / "bars.svg")
    root = ElementTree.fromstring((tmp_path / "bars.svg").read_text(encoding="utf-8"))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # Not the figure above: drawing it twice has moved its layout by a hair.
    assert svg(figures.bars(result), "salt") == svg(figures.bars(result), "salt")
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf; for a page give --report$"):
        require_format(tmp_path / "bars.html")
