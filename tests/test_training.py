"""Training: it learns what the data hold, sees nothing it should not, repeats exactly and can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest
from predictors import only
from safetensors.numpy import load_file

import neusight_jax as nj
from neusight_jax.datasets.measurements import read_measurements, table_from_frame
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import WEIGHTS
from neusight_jax.model.intervals import WIDEST, kernel_interval
from neusight_jax.training import recipes
from neusight_jax.training.fit import FitState, Saved, Settings, kept_steps
from neusight_jax.training.recipes import RECIPES, Recipe, train
from synthetic import synthetic_rows

T4, V100, P100, A100 = "Tesla T4", "Tesla V100-PCIE-32GB", "Tesla P100-PCIE-16GB", "NVIDIA A100-PCIE-40GB"
QUICK = "quick"


@pytest.fixture(autouse=True, scope="module")
def _quick_recipes() -> Iterator[None]:
    """Recipes small enough for a test; three chunks of steps, so that a run can stop in the middle.

    Promotion is not strict here: optax raises a float to an integer step count.
    """
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        tiles = Settings(steps=5, batch_size=32)
        quick = Settings(steps=250, batch_size=64)
        learn = Settings(steps=800, batch_size=128)
        patch.setitem(RECIPES, QUICK, Recipe("mixture", 1, (8,), quick, tiles, left_out_seeds=0))
        patch.setitem(RECIPES, "quick-neusight", Recipe("neusight", 1, (8,), quick, tiles, in_model=False))
        patch.setitem(RECIPES, "learn", Recipe("mixture", 1, (16,), learn, tiles, left_out_seeds=0))
        yield


Change = Callable[[pd.DataFrame], pd.DataFrame]


def _measured(
    folder: Path,
    ops: tuple[str, ...],
    devices: tuple[str, ...] = (V100, T4),
    rows: int = 48,
    change: Change | None = None,
) -> Path:
    folder.mkdir(parents=True)
    for op in ops:
        frame = pd.concat([synthetic_rows(op, device, rows) for device in devices], ignore_index=True)
        frame = frame if change is None else change(frame)
        frame.to_parquet(folder / f"{op}.parquet", index=False)
    return folder


def _weights(folder: Path) -> dict[str, np.ndarray]:
    return dict(load_file(folder / WEIGHTS))


def _same(one: Path, two: Path) -> bool:
    first, second = _weights(one), _weights(two)
    assert set(first) == set(second)
    return all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, _quick_recipes: None) -> tuple[Path, Path]:
    """Measurements of two families, and an uninterrupted run on them with the T4 held out."""
    home = tmp_path_factory.mktemp("whole")
    measured = _measured(home / "measured", ("softmax", "ln"))
    train([measured], QUICK, home / "out", hold_out=["T4"])
    return measured, home / "out"


def test_the_card_says_what_was_done(whole: tuple[Path, Path]) -> None:
    measured, out = whole
    card = nj.load_card(out)
    assert card["trained_on"] == {"devices": [V100], "rows": {"softmax": 48, "norm": 48}}
    assert card["held_out"] == [T4]
    assert card["recipe"] == QUICK
    assert (card["trial"], RECIPES["tiny"].trial) == (False, True)
    assert card["seed"] == 0
    assert card["trained_dtypes"] == ["fp32"]
    assert set(card["device_effects"]) == {V100}
    for family in ("softmax", "norm"):
        splits = card["errors_percent"][family]
        assert set(splits) == {"training", "training, as if unseen", "held out"}
        assert set(splits["training"]) == {V100}
        assert set(splits["held out"]) == {T4}
    assert f'--recipe {QUICK} --hold-out "Tesla T4" --seed 0' in card["made_by"]
    assert [path.name for path in out.parent.iterdir() if "partial" in path.name] == []
    # The errors in the card are those of the forecast a user gets.
    frame = read_measurements(measured, devices=[T4]).frame
    rows = frame[frame["family"] == "softmax"].reset_index(drop=True)
    forecast = nj.predict_kernels(nj.load_predictor(out), nj.load_gpu(T4), only(table_from_frame(rows), "softmax"))
    error = 100 * np.abs(forecast / rows["latency_s"].to_numpy() - 1).mean()
    assert card["errors_percent"]["softmax"]["held out"][T4] == pytest.approx(error, abs=0.02)


@pytest.mark.slow
def test_held_out_rows_never_reach_the_weights(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """The same weights to the bit when the held-out GPU's latencies are scrambled; also: same seed, same weights."""

    def scramble(frame: pd.DataFrame) -> pd.DataFrame:
        random = np.random.default_rng(5)
        factor = np.where(frame["device"] == T4, np.exp(random.uniform(0, 3, len(frame))), 1.0)
        return frame.assign(latency_s=frame["latency_s"] * factor)

    measured = _measured(tmp_path / "measured", ("softmax", "ln"), change=scramble)
    train([measured], QUICK, tmp_path / "out", hold_out=[T4])
    assert _same(whole[1], tmp_path / "out")
    errors = [nj.load_card(out)["errors_percent"]["softmax"]["held out"][T4] for out in (whole[1], tmp_path / "out")]
    assert errors[0] != errors[1]
    # The control: the same change to a GPU that is trained on does change the weights.
    frame = pd.read_parquet(measured / "softmax.parquet")
    frame["latency_s"] *= np.where(frame["device"] == V100, 1.5, 1.0)
    (tmp_path / "other").mkdir()
    frame.to_parquet(tmp_path / "other" / "softmax.parquet", index=False)
    train([tmp_path / "other"], QUICK, tmp_path / "changed", hold_out=[T4])
    changed, kept = _weights(tmp_path / "changed"), _weights(whole[1])
    assert any(not np.array_equal(values, kept[name]) for name, values in changed.items())


def test_a_checkpoint_of_some_families_forecasts_their_kernels(whole: tuple[Path, Path]) -> None:
    frame = read_measurements(whole[0]).frame
    rows = frame[frame["family"] == "softmax"].reset_index(drop=True)
    predictor, gpu = nj.load_predictor(whole[1]), nj.load_gpu(T4)
    assert np.all(nj.predict_kernels(predictor, gpu, table_from_frame(rows)) > 0)
    dims = {"batch": 1.0, "m": 64.0, "n": 64.0, "k": 64.0}
    with pytest.raises(nj.InputError, match="not trained on bmm, and the table holds 1 kernels of it"):
        nj.latency(predictor, gpu, table_from_kernels([Kernel("bmm", "bmm", dims)]))
    with pytest.raises(nj.InputError, match="kernel 0 of family bmm lacks the dim 'k'"):
        table_from_kernels([Kernel("bmm", "bmm", {"batch": 1.0, "m": 64.0, "n": 64.0})])


def _interrupt_after(patch: pytest.MonkeyPatch, saves: int) -> None:
    """Ctrl-C as soon as so many chunks are saved."""
    save, done = Saved.save, [0]

    def interrupted(self: Saved, name: str, state: FitState) -> None:
        save(self, name, state)
        done[0] += 1
        if done[0] == saves:
            raise KeyboardInterrupt

    patch.setattr(Saved, "save", interrupted)


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_checkpoint_and_goes_on(whole: tuple[Path, Path], tmp_path: Path) -> None:
    measured, straight = whole
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, saves=2)  # two of the three chunks of the first family, which has no measured tile
        with pytest.raises(KeyboardInterrupt):
            train([measured], QUICK, out, hold_out=[T4])
    assert not out.exists()
    assert "--resume goes on" in kept_steps(out)

    others: tuple[dict[str, Any], ...] = ({"seed": 1}, {"hold_out": []})
    for other in others:
        asked: dict[str, Any] = {"hold_out": [T4], **other}
        with pytest.raises(nj.InputError, match="recipe, hold-out or seed differ"):
            train([measured], QUICK, out, resume=True, **asked)

    def full(*_: Any) -> None:
        raise nj.InputError("disk full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("neusight_jax.training.recipes.save_checkpoint", full)
        with pytest.raises(nj.InputError, match="disk full"):
            train([measured], QUICK, out, hold_out=["T4"], resume=True)
    assert kept_steps(out)  # what was there still is
    train([measured], QUICK, out, hold_out=[T4], resume=True)
    assert _same(straight, out)
    assert not kept_steps(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_state_is_refused_in_one_line(whole: tuple[Path, Path], tmp_path: Path) -> None:
    measured, _ = whole
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, saves=1)
        with pytest.raises(KeyboardInterrupt):
            train([measured], QUICK, tmp_path / "out", hold_out=[T4])
    kept = next((tmp_path / ".out.partial").glob("*.safetensors"))
    kept.write_bytes(kept.read_bytes()[:50])
    with pytest.raises(nj.InputError) as caught:
        train([measured], QUICK, tmp_path / "out", hold_out=[T4], resume=True)
    assert kept.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_resume_is_refused(whole: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(nj.InputError, match="nothing to resume"):
        train([whole[0]], QUICK, tmp_path / "new", resume=True)


def test_an_output_that_holds_something_is_refused_before_work(whole: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")
    with pytest.raises(nj.InputError, match="not empty"):
        train([whole[0]], QUICK, tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "the only copy"
    with pytest.raises(nj.InputError, match="is a file"):
        train([whole[0]], QUICK, tmp_path / "out" / "thesis.txt")


def test_bad_names_are_refused(whole: tuple[Path, Path], tmp_path: Path) -> None:
    measured, out = whole[0], tmp_path / "out"
    with pytest.raises(nj.InputError, match="unknown recipe 'fp33'; nearest: fp32"):
        train([measured], "fp33", out)
    with pytest.raises(nj.InputError, match=r"unknown GPU 'Tesla T5'; measured here: .*Tesla T4"):
        train([measured], QUICK, out, hold_out=["Tesla T5"])
    with pytest.raises(nj.InputError, match="no GPU is left to train on"):
        train([measured], QUICK, out, hold_out=[T4, V100])
    with pytest.raises(nj.InputError, match="does not exist"):
        train([tmp_path / "nowhere"], QUICK, out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_law_behind_the_data_is_recovered(tmp_path: Path) -> None:
    """Left-out shapes to a few percent (the noise is 3 %); the one machine that is 1.3 times slower is found out."""

    def slower(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(latency_s=frame["latency_s"] * np.where(frame["device"] == V100, 1.3, 1.0))

    devices = (V100, T4, P100, A100)
    measured = _measured(tmp_path / "measured", ("softmax",), devices, rows=300, change=slower)
    card = train([measured], "learn", tmp_path / "out")
    assert max(card["errors_percent"]["softmax"]["training"].values()) < 8
    plain = nj.load_predictor(tmp_path / "out")
    effects = {}
    for device in devices:
        new = synthetic_rows("softmax", device, 200, seed=9)
        new.to_parquet(tmp_path / "new.parquet", index=False)
        table, gpu = only(nj.read_kernels(tmp_path / "new.parquet"), "softmax"), nj.load_gpu(device)
        truth = new["latency_s"].to_numpy() * (1.3 if device == V100 else 1.0)
        tuned = nj.predict_kernels(nj.load_predictor(tmp_path / "out", device), gpu, table)
        assert 100 * np.abs(tuned / truth - 1).mean() < 10, device
        effects[device] = float(np.median(np.log(tuned / nj.predict_kernels(plain, gpu, table))))
    assert effects[V100] == pytest.approx(np.log(1.3), abs=0.12)
    assert all(abs(effects[device]) < 0.12 for device in devices if device != V100), effects


def test_a_family_of_one_gpu_is_trusted_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second GPU there is no fit that left it out: the other family keeps its interval, this one has none."""
    few = Settings(steps=100, batch_size=64)
    quick = replace(RECIPES[QUICK], left_out_seeds=1, settings=few, left_out_settings=few)
    monkeypatch.setitem(RECIPES, QUICK, quick)
    _measured(tmp_path / "both", ("softmax",))
    _measured(tmp_path / "one", ("ln",), devices=(T4,))
    card = train([tmp_path / "both", tmp_path / "one"], QUICK, tmp_path / "out")
    assert set(card["intervals"]["left out"]) == {"softmax"}
    assert set(card["intervals"]["seen"]) == {"softmax", "norm"}
    bounds = {}
    for device in (None, T4):  # a GPU nobody measured, and one with the effect that was measured
        predictor: Any = nj.load_predictor(tmp_path / "out", device=device)
        bounds[device] = {name: np.abs(np.asarray(pair)) for name, pair in predictor.intervals.kernels.items()}
        assert bounds[device]["softmax"].max() < 1.0
    np.testing.assert_allclose(bounds[None]["norm"], WIDEST)
    assert bounds[T4]["norm"].max() < 1.0


def test_intervals_are_a_vendors_and_a_measured_gpus_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the other vendor are noisy: what is said of the rest, and of a quiet GPU in training, stays narrow."""
    quick = replace(RECIPES[QUICK], left_out_seeds=1, left_out_settings=Settings(steps=250, batch_size=64))
    monkeypatch.setitem(RECIPES, QUICK, quick)
    noise = np.random.default_rng(3)

    def noisy(frame: pd.DataFrame) -> pd.DataFrame:
        loud = frame["device"].str.startswith("AMD")
        factor = np.where(loud, np.exp(noise.uniform(0.0, 3.0, len(frame))), 1.0)
        return frame.assign(latency_s=frame["latency_s"] * factor)

    devices = (V100, T4, "AMD Instinct MI100", "AMD Instinct MI210")
    card = train(_measured(tmp_path / "measured", ("softmax",), devices, change=noisy), QUICK, tmp_path / "out")
    assert set(card["intervals"]["left out"]["softmax"]["coverage"]) == {V100, T4}
    assert set(card["intervals"]["left out, another vendor"]["softmax"]["coverage"]) == set(devices[2:])

    def widths(device: str | None) -> tuple[float, float]:
        """Of a GPU of the hosts' vendor, and of the other."""
        predictor: Any = nj.load_predictor(tmp_path / "out", device)
        kernel = Kernel("softmax", "softmax", {"rows": 512.0, "cols": 512.0, "reads": 1.0, "writes": 1.0})
        batch = jax.tree.map(jax.numpy.asarray, table_from_kernels([kernel]).families["softmax"])
        found = [
            kernel_interval(predictor, FAMILIES["softmax"], nj.load_gpu(name), batch) for name in (V100, devices[2])
        ]
        return float(found[0].log_high[0]), float(found[1].log_high[0])

    unmeasured = widths(None)
    assert unmeasured[1] > 1.0
    assert unmeasured[0] < 0.6 * unmeasured[1]
    for device in (V100, devices[2]):
        own = card["device_intervals"][device]["softmax"]
        assert widths(device) == pytest.approx((own, own), rel=1e-3)
    assert card["device_intervals"][V100]["softmax"] < 0.3 * card["device_intervals"][devices[2]]["softmax"]


def test_the_neusight_kind_trains_too(tmp_path: Path) -> None:
    measured = _measured(tmp_path / "measured", ("softmax",))
    card = train([measured], "quick-neusight", tmp_path / "out")
    assert card["kind"] == "neusight"
    assert card["device_effects"] == {}
    assert card["errors_percent"]["softmax"]["training"][V100] < 60
    assert type(nj.load_predictor(tmp_path / "out")).__name__ == "NeuSightPredictor"


def test_saved_names_are_the_recipe_asked_for(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "out", {"seed": 1})
    with pytest.raises(nj.InputError, match="nothing to resume"):
        saved.check()
    saved.discard()
    assert recipes.RECIPES["fp32"].kind == "mixture"
    assert recipes.RECIPES["fp32-neusight"].kind == "neusight"
