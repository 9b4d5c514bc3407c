"""Protocols: every system sees the rows it may see and no others, and is scored on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.kernels.family import Family
from neusight_jax.model.predictor import Predictor, RooflinePredictor
from neusight_jax.training.data import Rows
from neusight_jax.training.evaluation import systems
from neusight_jax.training.evaluation.protocols import run_protocol
from neusight_jax.training.evaluation.scores import Evaluation, family_means
from neusight_jax.training.evaluation.systems import (
    DEFAULT_SYSTEMS,
    OURS,
    SYSTEMS,
    GradientSystem,
    JobSystem,
    chosen_baselines,
    chosen_systems,
)
from neusight_jax.training.fit import Settings
from synthetic import synthetic_rows, write_softmax_alone

V100, T4 = "Tesla V100-PCIE-32GB", "Tesla T4"


@dataclass
class Witness:
    """A system that writes down what it was shown."""

    seen: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def __call__(self, rows: Rows, seed: int) -> Predictor:
        self.seen.append((seed, tuple(sorted({rows.devices[position] for position in rows.device}))))
        return RooflinePredictor()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_softmax_alone(tmp_path_factory.mktemp("synthetic"), rows=24)


def _three_steps(usual: Callable[[Family], Settings]) -> Callable[[Family], Settings]:
    return lambda family: replace(usual(family), steps=3, batch_size=8)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Few steps; promotion is not strict inside the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(systems, "TILE_SETTINGS", Settings(steps=2, batch_size=8))
        for name, system in SYSTEMS.items():
            if isinstance(system, GradientSystem):
                patch.setitem(SYSTEMS, name, replace(system, settings=_three_steps(system.settings)))
        yield


def _run(folder: Path, names: Sequence[str], seeds: int = 2) -> Evaluation:
    with jax.numpy_dtype_promotion("standard"):
        return run_protocol([folder], "logo", seeds=seeds, systems=names)


@pytest.fixture(scope="module")
def baselines(folder: Path, _quick: None) -> Evaluation:
    """Every baseline that can run here, once; ours and `neusight` are slow to compile, and trained in other tests."""
    names, _ = chosen_systems(["all"])
    return _run(folder, sorted({*names} - {"mixture", "neusight"}))


def test_no_system_sees_the_gpu_it_is_scored_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, fixed = Witness(), Witness()
    monkeypatch.setitem(SYSTEMS, "drawn", JobSystem(drawn, random=True))
    monkeypatch.setitem(SYSTEMS, "fixed", JobSystem(fixed))
    found = _run(folder, ["drawn", "fixed"])
    # Two GPUs × two seeds, or two GPUs; with two GPUs the other one is all there is to see.
    assert sorted(drawn.seen) == sorted((seed, (name,)) for seed in (0, 1) for name in (V100, T4))
    assert sorted(fixed.seen) == sorted((0, (name,)) for name in (V100, T4))
    assert set(found.frames["scores"]["system"]) == {"drawn", "fixed"}


def test_scores_are_of_the_rows_left_out(baselines: Evaluation) -> None:
    found = baselines
    assert set(found.frames["scores"]["family"]) == {"softmax"}
    assert set(found.rows.columns) >= {"family", "device", "measured_s", "roofline_s", "roofline3_s"}
    for row in found.frames["scores"][found.frames["scores"]["system"] == "roofline"].to_dict("records"):
        part = found.rows[(found.rows["family"] == row["family"]) & (found.rows["device"] == row["device"])]
        errors = 100 * np.abs(part["roofline_s"] / part["measured_s"] - 1)
        assert row["rows"] == len(part) == 24
        assert row["mean"] == pytest.approx(errors.mean(), rel=1e-5)
        assert row["sd"] == 0.0


def test_every_baseline_runs(baselines: Evaluation) -> None:
    pytest.importorskip("lightgbm")
    scores = baselines.frames["scores"]
    assert set(scores["system"]) == set(SYSTEMS) - {"mixture", "neusight"}
    assert np.isfinite(scores["mean"]).all()
    assert list(family_means(scores).columns) == ["softmax"]


def test_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert chosen_systems([]) == (DEFAULT_SYSTEMS, [])
    assert chosen_systems(["gbt", "roofline", "gbt"]) == ((OURS, "gbt", "roofline"), [])
    assert chosen_systems(["all"]) == (tuple(SYSTEMS), [])
    names, notes = chosen_systems(["all"], "seen")
    assert set(SYSTEMS) - set(names) == {"habitat-wave", "habitat-wave-simplified"}
    assert notes == ["left out: habitat-wave, habitat-wave-simplified: wave scaling needs a GPU left out to scale to"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names, notes = chosen_systems(["all"])
    assert set(SYSTEMS) - set(names) == {"gbt"}
    assert notes == ["left out: the gbt baseline needs lightgbm; from the clone: `pip install '.[gbt]'`"]
    assert chosen_baselines(["all"])[1] == notes
    for choose in (chosen_systems, chosen_baselines):
        with pytest.raises(InputError, match=r"gbt baseline needs lightgbm; from the clone: `pip install '\.\[gbt\]'"):
            choose(["roofline", "gbt"])
    with pytest.raises(nj.InputError, match="unknown system 'habitats'"):
        run_protocol([folder], "logo", systems=["habitats"])


def test_gpus_of_one_architecture_cannot_leave_it_out(tmp_path: Path) -> None:
    both = [synthetic_rows("softmax", name, 8) for name in (V100, "Tesla V100-SXM2-32GB")]
    pd.concat(both).to_parquet(tmp_path / "softmax.parquet", index=False)
    with pytest.raises(InputError, match="one architecture after the other; no family was measured on two"):
        run_protocol([tmp_path], "architecture", seeds=1, systems=["roofline"])
