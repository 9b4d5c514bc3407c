"""codesign: shapes of a model, and its chip, against every shape of a grid; laws of the loss; sizes on their steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.designs.answers import answer, problem
from neusight_jax.designs.model import LOSS_LAWS, model_use, on_divisors
from neusight_jax.designs.search import Search, Settings
from neusight_jax.errors import InputError
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.sweeps.space import Grid, Range

FEW = Settings(starts=2, steps=10, rounds=6, candidates=24)
FREE = (
    Range("layers", 2, 8, count=7),
    Range("hidden", 512, 2048, count=13),
    Range("d_ff", 1024, 6144, count=21),
    Range("heads", 8, 32, count=7),
)


def search_of(free: tuple[Range, ...] = FREE, objective: Any = "latency", **more: Any) -> Search:
    """The tiny decoder on an L4 by the roofline."""
    use = {name: more.pop(name) for name in ("served_tokens", "training_tokens", "loss") if name in more}
    base = nj.load_gpu("L4")
    load = model_use(TINY, base, input_tokens=64, output_tokens=16, **use)
    return Search(problem(RooflinePredictor(), base, free, [load], objective=objective, **more), FEW)


@pytest.fixture(scope="module")
def tiny() -> Search:
    return search_of()


def test_it_beats_a_grid(tiny: Search) -> None:
    grid = Grid(FREE)
    logs = tiny.on_steps(np.log(np.stack(list(grid.slice(0, grid.rows).values()), axis=1)))
    best = np.inf
    for part in np.array_split(np.unique(logs, axis=0), 8):
        best = min(best, float(tiny.evaluate(part).min()))
    assert np.isfinite(best)
    for seed in range(3):
        found = tiny.run(seed)
        assert found.feasible
        assert found.objective < best + 0.01, seed


def test_an_answer_is_on_its_steps_and_keeps_the_loss(tiny: Search) -> None:
    design = answer(tiny, tiny.run(0))
    shape = design.shape
    assert shape is not None
    sizes = {
        name: float(np.asarray(getattr(shape, name))) for name in ("layers", "hidden", "d_ff", "heads", "kv_heads")
    }
    assert sizes["hidden"] % 128 == sizes["d_ff"] % 128 == 0
    assert sizes["heads"] % sizes["kv_heads"] == 0
    assert design.metrics["loss"] <= design.base_metrics["loss"] * (1.0 + 1e-5)
    assert design.metrics["latency_s"] < design.base_metrics["latency_s"]
    assert 0.999 < design.rounding < 1.2
    # What it says of the shape is what a forecast of that shape says.
    step = shape.graph(mode="decode", dtype="bf16", kv_length=64 + 8)
    seconds = float(nj.latency(RooflinePredictor(), nj.load_gpu("L4"), step.kernels))
    assert design.metrics["tpot_s"] == pytest.approx(seconds, rel=1e-4)
    assert design.metrics["parameters"] == pytest.approx(step.parameters, rel=1e-5)
    assert json.loads(design.to_json())["shape"]["hidden"] == sizes["hidden"]
    assert any(note.startswith("loss by Besiroglu") for note in design.notes)


def test_chip_and_model_in_one_search() -> None:
    free = (Range("hidden", 512, 2048), Range("d_ff", 1024, 6144), Range("mem_bytes_per_s", 1e11, 2e12))
    search = search_of(free, budgets={"area_mm2": 300.0})
    design = answer(search, search.run(0))
    assert design.feasible
    assert design.metrics["area_mm2"] == pytest.approx(300.0, rel=0.01)
    assert design.metrics["loss"] == pytest.approx(design.budgets["loss"], rel=1e-3)
    # Both budgets bind, so both have a price.
    assert min(design.multipliers.budgets[name] for name in ("loss", "area_mm2")) > 0.0
    assert float(np.asarray(design.gpu.mem_bytes_per_s)) == pytest.approx(design.free["mem_bytes_per_s"])


def test_the_cheapest_model_is_smaller_when_it_serves_more() -> None:
    """Sardana et al. 2024: less on training and more on serving calls for fewer parameters and more tokens."""
    free = (Range("hidden", 512, 4096), Range("d_ff", 1024, 12288), Range("training_tokens", 1e8, 1e11))
    search, sizes = search_of(free, "total_cost", training_tokens=2e9, served_tokens=1.0), []
    use = search.arguments.model
    assert use is not None
    for served in (1e6, 1e12):
        search.arguments = search.arguments._replace(steps=(replace(use, served_tokens=np.float32(served)),))
        sizes.append(search.metrics(search.run(0).logs[None])[0]["parameters"][0])
    assert sizes[1] < 0.8 * sizes[0]


def test_laws_of_the_loss() -> None:
    """Chinchilla, 70 billion parameters on 1.4 trillion tokens: 1.937 (Hoffmann et al. 2022, equation 10)."""
    assert float(LOSS_LAWS["hoffmann"](7e10, 1.4e12)) == pytest.approx(1.69 + 406.4 / 7e10**0.34 + 410.7 / 1.4e12**0.28)
    assert float(LOSS_LAWS["hoffmann"](7e10, 1.4e12)) == pytest.approx(1.937, abs=5e-4)
    (note,) = LOSS_LAWS["besiroglu"].notes(8e9, 1.5e13)
    assert "8e+09 parameters are inside its 7e+07 to 1.6e+10" in note
    assert "1.5e+13 tokens are 30 times outside its 5e+09 to 5e+11" in note


def test_a_law_of_ones_own_and_none() -> None:
    own = search_of(loss=lambda parameters, tokens, shape: 1.0 + 1e6 / parameters)
    size = float(own.arguments.model.sized(1e9)["parameters"])  # type: ignore[union-attr]
    assert own.problem.budgets["loss"] == pytest.approx(1.0 + 1e6 / size, rel=1e-5)
    assert "loss" not in search_of(loss=None).problem.budgets


def test_sizes_that_divide() -> None:
    use = search_of().problem.model
    assert use is not None  # 16 heads, 8 KV heads
    assert on_divisors({"heads": np.array([9.0, 13.0, 27.0])}, use)["heads"].tolist() == [8.0, 16.0, 24.0]
    assert on_divisors({"kv_heads": np.array([3.0, 5.0, 7.0])}, use)["kv_heads"].tolist() == [4.0, 4.0, 8.0]
    both = on_divisors({"heads": np.array([10.0, 10.0]), "kv_heads": np.array([3.0, 8.0])}, use)
    assert both["heads"].tolist() == [9.0, 8.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "kaplan"}, "unknown loss law 'kaplan'"),
        ({"training_tokens": -1.0}, "training_tokens is -1.0, expected a positive number"),
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"budgets": {"energy": 3.0}}, "unknown metric 'energy'"),
    ],
)
def test_bad_problems(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search_of(**change)


CLI = ("codesign", "llama-3.2-1b", "--base", "L4", "--free", "hidden=1024:4096")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--loss", "kaplan"), "unknown loss law 'kaplan'"),
        (("--free", "width=1:2"), "a GPU has no field 'width'"),
        (("--budget", "loss=2"), "expected METRIC<=X"),
        (("--batch-size", "0"), "batch_size is 0, expected a positive whole number"),
        (("--set", "tdp=3"), "a GPU has no field 'tdp'"),
    ],
)
def test_bad_commands_are_one_line(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CLI, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.skipif("tensorcore" not in nj.list_checkpoints(), reason="no checkpoint tensorcore here")
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda _: RooflinePredictor())
    quick = ("--starts", "1", "--steps", "2", "--rounds", "1", "--json")
    assert run([*CLI, "d_ff=2048:12288", *quick]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"].startswith("neusight_jax.design/")
    assert content["shape"]["hidden"] % 128 == 0
    assert content["workloads"][0]["input_tokens"] == 1024


def test_no_answer_is_worse_than_its_base(tiny: Search) -> None:
    """One step and one round find little; the base keeps its budgets and is among the candidates."""
    hurried = Search(tiny.problem, replace(FEW, steps=1, rounds=1, candidates=1))
    base = np.log([[float(np.asarray(tiny.problem.figure(axis.field))) for axis in FREE]])
    for seed in range(3):
        assert hurried.run(seed).objective <= float(tiny.evaluate(base)[0]) + 1e-6
