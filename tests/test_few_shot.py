"""Protocols with a calibration in them: what is measured is not scored, and the GPU left out is not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from predictors import only, random_kernels

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.training.evaluation import protocols, systems
from neusight_jax.training.evaluation.protocols import run_few_shot, run_models_protocol
from neusight_jax.training.fit import Settings, settings_for
from neusight_jax.training.left_out import LeftOut
from neusight_jax.training.whole_models import System
from synthetic import synthetic_rows, write_softmax_alone

ROWS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Softmax of two GPUs, and norms of one, which nothing can be said of where it is left out."""
    home = write_softmax_alone(tmp_path_factory.mktemp("synthetic"), rows=ROWS)
    synthetic_rows("ln", "Tesla T4", ROWS).to_parquet(home / "kernels" / "ln.parquet", index=False)
    return home


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "TILE_SETTINGS", Settings(steps=2, batch_size=8))
    monkeypatch.setattr(protocols, "settings_for", lambda family: replace(settings_for(family), steps=3, batch_size=8))
    monkeypatch.setattr(protocols, "SETTINGS", Settings(steps=3, batch_size=8))


def left_out_by(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[str, ...]]:
    """What each fit of a module leaves out, as it goes."""
    fitted: list[tuple[str, ...]] = []
    usual = module.fit_left_out

    def watched(*given: Any) -> LeftOut:
        found = usual(*given)
        fitted.extend(job.held_out for job in found.jobs)
        return found

    monkeypatch.setattr(module, "fit_left_out", watched)
    return fitted


def test_few_shot_scores_the_kernels_that_were_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = left_out_by(monkeypatch, protocols)
    with jax.numpy_dtype_promotion("standard"):
        found = run_few_shot([folder], seeds=2, counts=(2, 10, ROWS, 200))
    assert sorted(fitted) == [("Tesla T4",)] * 2 + [("Tesla V100-PCIE-32GB",)] * 2
    assert set(found.rows["family"]) == {"softmax"}
    # Every seed by itself, and both as one, each with two draws.
    assert (found.rows.groupby(["members", "device", "design", "kernels"]).size() == 2).all()
    assert set(found.rows["members"]) == {1, 2}
    # No row is left to score once all are measured.
    assert set(found.rows["kernels"]) == {2, 10}
    assert (found.rows["rows"] == ROWS - found.rows["kernels"]).all()
    assert set(found.rows["design"]) == {"random", "designed"}
    means = found.frames["by_family"]
    np.testing.assert_allclose(means["change"], 100.0 * (means["mean"] / means["before"] - 1.0))
    assert (means[means["kernels"] == 10]["change"] < -20.0).all()
    assert "| softmax |" in found.to_markdown()


def test_counts_that_leave_nothing_to_score_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="nothing to score"), jax.numpy_dtype_promotion("standard"):
        run_few_shot([folder], seeds=1, counts=(200,))


def test_whole_models_are_forecast_without_and_with_a_few_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = only(random_kernels(0, 6, dtypes=1), "softmax")

    def kernels_for_models(
        labels: pd.DataFrame, chosen: dict[str, System], gpu_of: Callable[[str], nj.GPU]
    ) -> tuple[pd.DataFrame, list[str]]:
        """Softmax alone is trained here, and no model is softmax alone."""
        return pd.DataFrame(
            [
                {"system": name, "option": "", "device": device, "forecast_s": second, "error": 1.0}
                for name, system in chosen.items()
                for device in sorted(set(labels["device"]))
                for second in nj.predict_kernels(system(device), gpu_of(device), table)
            ]
        ), []

    monkeypatch.setattr(protocols, "model_scores", kernels_for_models)
    monkeypatch.setattr(protocols, "DRAWS", 2)
    monkeypatch.setattr(protocols, "POOL", 10)  # of more rows than that: draws differ
    with jax.numpy_dtype_promotion("standard"):
        found = run_models_protocol([folder], seeds=1, counts=(8,))
    assert list(found.frames["scores"]["system"].unique()) == ["mixture", "mixture, 8 kernels", "roofline"]
    plain, first, second = (
        found.rows[(found.rows["system"] == name) & (found.rows["draw"] == draw)]["forecast_s"]
        for name, draw in (("mixture", 0), ("mixture, 8 kernels", 0), ("mixture, 8 kernels", 1))
    )
    assert not np.allclose(plain, first, rtol=1e-2)
    assert not np.allclose(first, second, rtol=1e-3)
    assert list(found.frames["scores"].groupby("system", sort=False)["draws"].first()) == [1, 2, 1]
    assert found.frames["scores"].groupby("device")["labels"].nunique().eq(1).all()


def test_whole_models_may_leave_an_architecture_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_softmax_alone(tmp_path, rows=ROWS)
    pascal = ("Tesla P100-PCIE-16GB", "Tesla P4")
    for device in pascal:
        synthetic_rows("softmax", device, ROWS).to_parquet(folder / "kernels" / f"{device}.parquet", index=False)
    fitted = left_out_by(monkeypatch, protocols)
    monkeypatch.setattr(protocols, "DRAWS", 1)
    nothing = pd.DataFrame(columns=["system"]), ["none here"]
    monkeypatch.setattr(protocols, "model_scores", lambda *given: nothing)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(InputError, match=r"architecture-models.*none here"):
        run_models_protocol([folder], "architecture-models", seeds=1, counts=(8,))
    assert sorted(fitted) == [pascal, ("Tesla T4",), ("Tesla V100-PCIE-32GB",)]
    with pytest.raises(InputError, match="architecture-models"):
        run_models_protocol([folder], "architectures")
