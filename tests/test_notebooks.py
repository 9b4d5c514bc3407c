"""The notebooks run: their cells raise nothing, and what they print is kept beside them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

import neusight_jax as nj

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_six() -> None:
    names = ["clusters", "codesign", "design", "forecast", "retrain", "serving"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.skipif(
    not {"fp32", "tensorcore"} <= {*nj.list_checkpoints()}, reason="no checkpoints fp32 and tensorcore here"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed; it comes with '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "tools" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    book = tool.run(path)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code[-1].outputs
