"""The fitting loop and its rows: every job sees its own devices and no others, and what is learned is in the data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from neusight_jax.datasets.measurements import Measurements, read_measurements
from neusight_jax.errors import InputError
from neusight_jax.model.heads import init_tile_choice
from neusight_jax.scaling.tables import event_overhead_s
from neusight_jax.training.data import Rows, join_rows, model_rows, sweep_rows, thin
from neusight_jax.training.fit import FitState, Job, Settings, fit, row_features, sample_of
from neusight_jax.training.left_out import LeftOut, left_out_predictor
from neusight_jax.training.objectives import MixtureObjective, TileObjective, effect_penalties, forecast
from synthetic import DEVICES, synthetic_rows, write_softmax_alone

V100, T4 = DEVICES


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Promotion is not strict here: optax raises a float to an integer step count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = write_softmax_alone(tmp_path_factory.mktemp("synthetic"), rows=48)
    return sweep_rows(read_measurements(folder), "softmax", DEVICES)


def _kind(rows: Rows) -> MixtureObjective:
    return MixtureObjective(init_tile_choice(jax.random.key(0), rows.family, row_features(rows)), (8,))


def test_the_loss_falls_and_a_fit_can_be_stopped(softmax: Rows) -> None:
    losses: list[float] = []

    def progress(state: FitState, loss: np.ndarray) -> bool:
        losses.append(float(loss[0]))
        return state.done < 60

    settings = Settings(steps=100, batch_size=32, learning_rate=1e-2)
    state = fit(_kind(softmax), softmax, [Job(0), Job(1, (T4,))], settings, progress, chunk=20)
    assert state.done == 60
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    assert state.best_loss.shape == (2,)
    assert state.best_loss[0] == pytest.approx(min(losses))


@pytest.mark.parametrize("left", [V100, T4])
def test_a_job_never_draws_a_row_of_a_gpu_it_leaves_out(softmax: Rows, left: str) -> None:
    """Not even where that GPU alone was measured inside models: those rows twist everything they are drawn into."""
    own = softmax.of_device(left)
    inside = replace(own, isolated=np.zeros_like(own.isolated))
    settings = Settings(steps=10, batch_size=32, in_model_share=0.5)

    def fitted(inside: Rows) -> np.ndarray:
        rows = join_rows([softmax, inside])
        every = fit(_kind(softmax), rows, [Job(0, (left,)), Job(0)], settings).best.network.parameters["biases"][-1]
        return np.asarray(every)

    plain, twisted = fitted(inside), fitted(replace(inside, seconds=0.01 * inside.seconds))
    np.testing.assert_array_equal(plain[0], twisted[0])
    assert not np.allclose(plain[1], twisted[1], rtol=1e-3)


def test_a_job_that_leaves_out_everything_is_refused(softmax: Rows) -> None:
    with pytest.raises(InputError, match=f"nothing is left to fit to without {V100}, {T4}"):
        fit(_kind(softmax), softmax, [Job(0), Job(0, (V100, T4))], Settings(steps=1, batch_size=8))


def test_memory_of_a_kind_reaches_the_same_share(tmp_path: Path) -> None:
    """HBM at 0.95 of its bandwidth, GDDR at 0.65: a GPU left out is forecast by its own kind, not by the middle."""
    shares = {T4: 0.65, "Tesla P4": 0.65, V100: 0.95, "NVIDIA A100-PCIE-40GB": 0.95}
    parts = [synthetic_rows("add", name, 256) for name in shares]
    pd.concat(parts).assign(latency_s=1.0).to_parquet(tmp_path / "add.parquet")
    data = read_measurements(tmp_path)
    rows = sweep_rows(data, "elementwise", sorted(shares))
    moved = np.asarray(4.0 * 3.0 * rows.batch.dims["rows"] * rows.batch.dims["cols"])
    reached = np.array([shares[name] for name in rows.devices]) * np.asarray(rows.gpus.mem_bytes_per_s)
    alone_s = 10e-6 + moved / reached[rows.device]
    rows = replace(rows, seconds=alone_s.astype(np.float32))
    kind = replace(_kind(rows), penalties=effect_penalties(rows))
    jobs = tuple(Job(0, (device,)) for device in rows.devices)
    found = LeftOut(kind, rows, jobs, fit(kind, rows, jobs, Settings(steps=300, batch_size=64)).best)
    every, seconds = (
        sample_of(rows, seen=False),
        jax.jit(lambda own, sample: forecast(rows.family, kind.predictor(own, rows.family, sample), sample)),
    )
    for position, device in enumerate(rows.devices):
        alone = jax.tree.map(lambda leaf: leaf[0], found.members(device))
        ratio = np.asarray(seconds(alone, every)) / rows.seconds
        long = (rows.device == position) & (rows.seconds > 100e-6)
        assert np.median(ratio[long]) == pytest.approx(1.0, abs=0.1), device


def test_a_family_not_measured_on_the_gpu_left_out_is_left_out(tmp_path: Path) -> None:
    """A recipe forecasts the models of every GPU without it; not every family was measured everywhere."""
    parts, tiles = {}, {}
    for op, devices in (("softmax", ("T4", "V100")), ("ln", ("T4", "P100"))):
        folder = tmp_path / op
        folder.mkdir()
        pd.concat([synthetic_rows(op, name, 16) for name in devices]).to_parquet(folder / f"{op}.parquet")
        data = read_measurements(folder)
        (name,) = set(data.frame["family"])
        rows = sweep_rows(data, name, sorted(set(data.frame["device"])))
        tiles[name] = init_tile_choice(jax.random.key(0), rows.family, row_features(rows))
        jobs = tuple(Job(0, (device,)) for device in rows.devices)
        kind = MixtureObjective(tiles[name])
        each = [kind.init(jax.random.key(0), rows.family, row_features(rows), rows) for _ in jobs]
        parts[name] = LeftOut(kind, rows, jobs, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
    assert set(left_out_predictor(parts, tiles, "Tesla T4").families) == {"softmax", "norm"}
    (apart,) = set(parts["softmax"].rows.devices) - {"Tesla T4"}
    found = left_out_predictor(parts, tiles, apart)
    assert set(found.families) == set(found.tiles) == {"softmax"}


def test_measured_tiles_are_learned(tmp_path: Path) -> None:
    """Every synthetic product runs on blocks of 64 rows × 128 columns: the choice becomes that."""
    pd.concat([synthetic_rows("linear", name, 48) for name in DEVICES]).to_parquet(tmp_path / "linear.parquet")
    rows = sweep_rows(read_measurements(tmp_path), "linear", DEVICES)
    assert set(rows.tile) == {rows.family.tiles.index("64x128")}
    settings = Settings(steps=60, batch_size=32, learning_rate=3e-2)
    losses: list[float] = []

    def progress(state: FitState, loss: np.ndarray) -> bool:
        losses.append(float(loss[0]))
        return True

    fit(TileObjective(), rows, [Job(0)], settings, progress, chunk=20)
    assert losses[-1] < 0.3 * losses[0]


def test_rows_are_thinned_joined_and_chosen_by_device(softmax: Rows) -> None:
    rows = softmax
    assert len(rows.seconds) == 96
    few = thin(rows, 10)
    assert [int((few.device == index).sum()) for index in range(2)] == [10, 10]
    np.testing.assert_array_equal(few.seconds, thin(rows, 10).seconds)
    assert set(rows.of_device(T4).device) == {1}
    both = join_rows([few, rows])
    assert len(both.seconds) == len(both.batch.dims["rows"]) == 116


def test_nodes_of_models_become_rows_inside_a_model() -> None:
    """What a view takes is taken off, not what a call without a tensor does; its letters are turned to ours."""
    nodes = [
        {"name": "size", "fw_ops": "[]", "forward_s": 6e-6, "output_shape": "[1]", "input_shapes": "[[64, 256]]"},
        {"name": "view", "fw_ops": "[]", "forward_s": 1e-5, "output_shape": "[8]", "input_shapes": "[]"},
        {
            "name": "linear",
            "fw_ops": json.dumps([["Linear", [64, 256, 128]]]),
            "forward_s": 2e-3,
            "output_shape": "[64, 128]",
            "input_shapes": "[[64, 256]]",
        },
        {
            "name": "linear_short",
            "fw_ops": json.dumps([["Linear", [8, 8, 8]]]),
            "forward_s": 2e-5,
            "output_shape": "[8, 8]",
            "input_shapes": "[[8, 8]]",
        },
        {
            "name": "softmax",
            "fw_ops": json.dumps([["VECsoftmax", [512, 64]]]),
            "forward_s": 3e-3,
            "output_shape": "[512, 64]",
            "input_shapes": "[[512, 64]]",
        },
    ]
    per_op = pd.DataFrame([{"device": T4, "model": "some_model", "batch_size": 1, **node} for node in nodes])
    data = Measurements(pd.DataFrame(), pd.DataFrame(), per_op=per_op)
    linear = model_rows(data, "linear", [V100, T4])
    np.testing.assert_allclose(linear.seconds, [2e-3 - 1e-5], rtol=1e-5)
    assert {name: float(size[0]) for name, size in linear.batch.dims.items()} == {
        "weight_share": 1.0,
        "unpack": 0.0,
        "batch": 1.0,
        "m": 64.0,
        "n": 128.0,
        "k": 256.0,
    }
    assert linear.isolated.tolist() == [0.0]
    assert linear.device.tolist() == [1]
    softmax = model_rows(data, "softmax", [T4])
    np.testing.assert_allclose(softmax.seconds, [3e-3 - 1e-5], rtol=1e-5)
    assert len(model_rows(data, "bmm", [T4]).seconds) == 0


def test_what_a_sum_reads_is_known_or_it_is_left_out() -> None:
    """A row that repeats stays in L2; a mask of 4M elements that 32 heads read may be read 32 times, or once."""

    def node(op: str, *shapes: tuple[int, ...]) -> dict[str, Any]:
        kernel = [f"VEC{op}", [int(np.prod(shapes[0][:-1])), shapes[0][-1]]]
        shape = json.dumps(shapes[0])
        return {"name": op, "fw_ops": json.dumps([kernel]), "output_shape": shape, "input_shapes": json.dumps(shapes)}

    scores = (1, 32, 2048, 2048)
    nodes = [
        node("add", scores, scores),
        node("add", scores, (1, 1, 2048, 2048)),
        node("add", scores, (1, 1, 1, 2048)),
        node("div", scores, (1,)),
    ]
    per_op = pd.DataFrame([{"device": T4, "model": "m", "batch_size": 1, "forward_s": 3e-3, **each} for each in nodes])
    rows = model_rows(Measurements(pd.DataFrame(), pd.DataFrame(), per_op=per_op), "elementwise", [T4])
    assert [rows.family.ops[op] for op in np.asarray(rows.batch.op)] == ["add", "add", "divu"]
    np.testing.assert_allclose(rows.batch.dims["reads"], [2.0, 1.0, 1.0], rtol=1e-4)


def test_views_of_measured_models_say_what_a_node_takes_before_its_kernel(measurements: Path) -> None:
    """5 to 20 us on every GPU, by column or by name; more, but not by much, than a call without a tensor takes."""
    nodes = read_measurements(measurements / "fp32").per_op
    assert nodes is not None
    for device, own in nodes.groupby("device"):
        overhead_s = event_overhead_s(own)
        assert 5e-6 < overhead_s < 20e-6, device
        assert event_overhead_s(own.drop(columns="fx_target")) == pytest.approx(overhead_s, abs=3e-6)
        nothing_s = own["forward_s"][own["fx_target"].isin(["size", "getattr"])].median()
        assert nothing_s < overhead_s < nothing_s + 6e-6, device
