"""Power: what must hold of clocks, watts and joules, and the contract of caps and locked clocks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.designs.search import Settings
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.power import POWER, Draw, PowerLaw, is_limited, settle
from neusight_jax.model.predictor import RooflinePredictor

ROOFLINE = RooflinePredictor()
H100 = nj.load_gpu("H100")
DECODER = {
    **{"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096},
}
CAPS = (700.0, 500.0, 350.0, 250.0)
CLOCKS = (1.98e9, 1.5e9, 1e9, 5e8)


def table(mode: str = "prefill") -> KernelTable:
    return nj.graph_from_config(DECODER, 4, 1024, mode, "bf16").kernels


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_fewer_watts_or_a_lower_clock_is_never_faster(mode: str) -> None:
    kernels, free = table(mode), float(nj.latency(ROOFLINE, H100, table(mode)))
    for name, values in (("power_limit_w", CAPS), ("clock_limit_hz", CLOCKS)):
        seconds = [float(nj.latency(ROOFLINE, H100.replace(**{name: value}), kernels)) for value in values]
        assert seconds[0] == pytest.approx(free, rel=1e-4), name
        assert all(later >= sooner * (1.0 - 1e-5) for sooner, later in itertools.pairwise(seconds)), name
        assert seconds[-1] > free * (1.0 + 1e-3) or (mode, name) != ("prefill", "clock_limit_hz")


def test_watts_lie_between_those_of_an_idle_board_and_its_limit() -> None:
    for cap in (None, *CAPS):
        gpu = H100 if cap is None else H100.replace(power_limit_w=cap)
        watts = nj.predict_kernels_power(ROOFLINE, gpu, table())
        assert np.all(watts >= float(POWER.static_share) * H100.tdp_w - 1e-3)
        assert np.all(watts <= (cap or H100.tdp_w) * (1.0 + 1e-3))
    joules = [float(nj.energy(ROOFLINE, H100.replace(clock_limit_hz=clock), table())) for clock in CLOCKS]
    assert min(joules) > 0.0


def test_kernels_alone_are_held_back_too() -> None:
    """A kernel that runs again and again settles at a clock of its own, in seconds as in watts."""
    predictor, kernels = nj.load_predictor("tensorcore"), table()
    free, held = (nj.predict_kernels(predictor, gpu, kernels) for gpu in (H100, H100.replace(clock_limit_hz=5e8)))
    assert np.all(held >= free * (1.0 - 1e-5))
    assert np.max(held / free) > 1.5


def test_slopes_by_cap_and_clock_are_those_of_differences() -> None:
    """Of a step function's root there would be none: it is differentiated implicitly."""
    kernels = nj.graph_from_config("gpt2", 8, 512, "inference", "bf16").kernels
    predictor = nj.load_predictor("tensorcore")
    for name, value in (("power_limit_w", 350.0), ("clock_limit_hz", 1.2e9)):
        for measure in (nj.latency, nj.energy):
            gpu = H100.replace(**{name: value})
            slope = float(getattr(jax.grad(measure, argnums=1)(predictor, gpu, kernels), name)) * value
            ends = (gpu.replace(**{name: value * (1.0 + step)}) for step in (0.02, -0.02))
            high, low = (float(measure(predictor, each, kernels)) for each in ends)
            assert slope == pytest.approx((high - low) / 0.04, rel=0.05), (name, measure)


@pytest.mark.parametrize("seed", range(4))
def test_the_law_holds_for_any_constants(seed: int) -> None:
    """All rates and watts times c: the same shares of the clock, and c times the watts."""
    random = np.random.default_rng(seed)
    names = [each.name for each in dataclasses.fields(PowerLaw)]
    law = PowerLaw(**{name: float(getattr(POWER, name)) * np.exp(random.normal(0.0, 0.3)) for name in names})
    draw = Draw(*(jnp.asarray(each) for each in (300.0, 100.0, 60.0, 0.4)))
    slower = lambda clock: clock**-0.7  # noqa: E731
    caps = (600.0, 450.0, 350.0, 250.0)
    found = [settle(law, dataclasses.replace(H100, power_limit_w=watts), draw, slower) for watts in caps]
    clocks, drawn = (np.array([float(getattr(each, name)) for each in found]) for name in ("clock", "power_w"))
    assert np.all(np.diff(clocks) <= 1e-6)
    assert np.all(drawn <= np.array(caps) * (1.0 + 1e-4) + law.static_share * H100.tdp_w)
    twice = Draw(2.0 * draw.busy_w, draw.flop_j, draw.dram_j, draw.seconds / 2.0)
    scaled = dataclasses.replace(H100, tdp_w=2.0 * H100.tdp_w, power_limit_w=900.0)
    other = settle(law, scaled, twice, slower)
    assert float(other.clock) == pytest.approx(clocks[1], rel=1e-4)
    assert float(other.power_w) == pytest.approx(2.0 * drawn[1], rel=1e-4)


def test_doors_of_energy_agree() -> None:
    graph = nj.graph_from_config(DECODER, 4, 1024, "prefill", "bf16")
    for gpu in (H100, H100.replace(power_limit_w=300.0), H100.replace(clock_limit_hz=1e9)):
        forecast = nj.predict(ROOFLINE, gpu, graph)
        assert forecast.energy_j == pytest.approx(float(nj.energy(ROOFLINE, gpu, graph.kernels)), rel=1e-3)
        assert forecast.total_s == pytest.approx(float(nj.latency(ROOFLINE, gpu, graph.kernels)), rel=1e-5)
        frame = forecast.to_frame()
        assert float((frame["energy_j"] * frame["count"]).sum()) == pytest.approx(forecast.energy_j, rel=1e-3)
        content = json.loads(forecast.to_json())
        assert content["power_w"] == pytest.approx(forecast.energy_j / forecast.total_s)
        assert content["joules_per_token"] == pytest.approx(forecast.energy_j / 4096)
        assert content["clock_hz"] <= 1.98e9
    many = nj.stack_gpus([H100, H100.replace(power_limit_w=300.0)])
    joules = jax.vmap(nj.energy, in_axes=(None, 0, None))(ROOFLINE, many, graph.kernels)
    assert float(joules[1]) == pytest.approx(
        float(nj.energy(ROOFLINE, H100.replace(power_limit_w=300.0), graph.kernels)), rel=1e-4
    )


def test_a_job_draws_on_all_its_gpus() -> None:
    cluster = nj.load_cluster("4x H100")
    job = nj.job_from_config(DECODER, nj.Parallelism(data=4), global_batch_size=4, sequence_length=512)
    step = nj.predict(ROOFLINE, cluster, job)
    assert step.energy_j == pytest.approx(float(nj.energy(ROOFLINE, cluster, job)), rel=0.02)
    assert step.power_w <= 4 * 700.0 * (1.0 + 1e-3)
    slow = cluster.replace(gpu=cluster.gpu.replace(clock_limit_hz=5e8))
    assert nj.predict(ROOFLINE, slow, job).total_s > step.total_s


def test_limits_are_figures_of_a_gpu() -> None:
    capped = H100.replace(power_limit_w=300)
    assert isinstance(capped, GPU)
    assert is_limited(capped)
    assert not is_limited(H100)
    assert capped.limits() == {"power_limit_w": 300.0}
    assert "power_limit_w" in str(capped)
    assert "power_limit_w" not in str(H100)


def test_a_power_curve_is_what_predict_says_of_each_cap() -> None:
    graph = nj.graph_from_config(DECODER, 4, 1024, "decode", "bf16")
    caps = [700.0, 500.0, 300.0, 250.0, 220.0]
    curve = nj.power_curve(ROOFLINE, H100, graph, caps_w=caps, clocks_hz=[1e9, 5e8], target=("tpot", 1.0))
    assert [point.power_limit_w for point in curve.points] == [*caps, None, None]
    for point in curve.points:
        limit = {name: getattr(point, name) for name in ("power_limit_w", "clock_limit_hz") if getattr(point, name)}
        step = nj.predict(ROOFLINE, H100.replace(**limit), graph)
        assert point.latency_s == pytest.approx(step.total_s)
        assert point.joules_per_token == pytest.approx(step.joules_per_token)
    speeds = [point.speed for point in curve.points[:5]]
    assert speeds == sorted(speeds, reverse=True)
    assert curve.knee.joules_per_token == min(point.joules_per_token for point in curve.points[:5])
    assert curve.best is min(curve.points, key=lambda point: point.joules_per_token)
    low = curve.points[4]
    assert low.speed_per_w is not None
    around = [nj.predict(ROOFLINE, H100.replace(power_limit_w=watts), graph).total_s for watts in (221.0, 219.0)]
    ends = [curve.points[0].latency_s / seconds for seconds in around]
    assert low.speed_per_w == pytest.approx((ends[0] - ends[1]) / 2.0, rel=0.1)


def test_a_fleet_makes_the_most_tokens_within_its_watts() -> None:
    graph = nj.graph_from_config(DECODER, 4, 1024, "decode", "bf16")
    options = {"caps_w": [700.0, 400.0, 300.0, 220.0], "clocks_hz": [1e9]}
    any_number = nj.power_curve(ROOFLINE, H100, graph, fleet_w=10e3, **options).fleet
    few = nj.power_curve(ROOFLINE, H100, graph, fleet_w=10e3, most=3, **options).fleet
    assert any_number is not None
    assert few is not None
    assert any_number.power_w <= 10e3
    assert any_number.machines == int(10e3 // any_number.held.power_w)
    assert few.machines == 3
    assert few.held.speed == pytest.approx(1.0)  # watts are no limit of three
    for options_, message in (
        ({"fleet_w": 100.0}, "runs no machine"),
        ({"target": ("ttft", 1.0)}, "ttft is of prefill steps"),
        ({"caps_w": [900.0]}, "a cap is 900 W, expected above 0 and at most the board's, 700 W"),
    ):
        with pytest.raises(nj.InputError, match=message):
            nj.power_curve(ROOFLINE, H100, graph, **options_)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    words = ("predict", "gpt2", "--gpu", "H100", "--dtype", "bf16", "--batch-size", "8")
    free, capped, locked = (
        asked(capsys, *words, *more) for more in ((), ("--power-limit", "300W"), ("--clock", "1GHz"))
    )
    assert free["total_s"] < capped["total_s"]
    assert capped["power_w"] <= 300.0 * (1.0 + 1e-3)
    assert locked["clock_hz"] == pytest.approx(1e9, rel=1e-3)
    curve = asked(capsys, "powercap", *words[1:], "--caps", "300W:700W:3", "--slo", "step<=1s", "--fleet-power", "5kW")
    assert [point["power_limit_w"] for point in curve["points"][:3]] == [700.0, 500.0, 300.0]
    assert curve["knee"]["joules_per_token"] <= curve["points"][0]["joules_per_token"]
    assert curve["fleet"]["power_w"] <= 5e3
    out = tmp_path / "caps.parquet"
    grid = ("--grid", "power_limit_w=200:700:4", "--output", str(out))
    assert asked(capsys, "sweep", "gpt2", "--gpu", "H100", "--dtype", "bf16", *grid)["rows"] == 4
    for words_, message in (
        (("--power-limit", "300GB"), "300GB is in B, expected W"),
        (("--clock", "3"), "clock_limit_hz is 3, expected"),
    ):
        assert run([*words, *words_]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_the_law_is_fitted_to_watts(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Watts made by known constants give a checkpoint that forecasts them, and keeps its seconds."""
    law = dataclasses.replace(POWER, static_share=0.2, product_pj=12.0, flop16_pj=0.15, gap_us=10.0)
    base = nj.load_predictor("tensorcore")
    random, parts = np.random.default_rng(0), []
    for device, board in (("NVIDIA H100 80GB HBM3", H100), ("NVIDIA A100-SXM4-40GB", nj.load_gpu("A100-SXM4-40GB"))):
        sizes = {name: 2.0 ** random.integers(9, 14, 60) for name in ("m", "n", "k")}
        frame = pd.DataFrame({"device": device, "op": "linear", "dtype": "bf16", "latency_s": 1.0, **sizes})
        frame.to_parquet(tmp_path / "rows.parquet")
        kernels = nj.read_kernels(tmp_path / "rows.parquet")
        seconds = nj.predict_kernels(base, board, kernels)
        watts = nj.predict_kernels_power(dataclasses.replace(base, power=law), board, kernels)
        parts.append(frame.assign(latency_s=seconds, power_w=watts)[seconds > 5e-5])
    (tmp_path / "watts").mkdir()
    pd.concat(parts).to_parquet(tmp_path / "watts" / "linear.parquet")
    words = ("train", "--measurements", str(tmp_path / "watts"), "--recipe", "power", "--hold-out", "H100")
    assert run([*words, "--output", str(tmp_path / "fitted")]) == 0
    assert "held out" in capsys.readouterr().out
    fitted = nj.load_predictor(str(tmp_path / "fitted"))
    held = parts[1].iloc[:30]
    held.to_parquet(tmp_path / "held.parquet")
    kernels, board = nj.read_kernels(tmp_path / "held.parquet"), nj.load_gpu("A100-SXM4-40GB")
    watts = nj.predict_kernels_power(fitted, board, kernels)
    before = nj.predict_kernels_power(base, board, kernels)
    missed, missed_before = (np.abs(each / held.power_w - 1.0).mean() for each in (watts, before))
    assert missed < 0.05 < missed_before
    np.testing.assert_array_equal(nj.predict_kernels(fitted, board, kernels), nj.predict_kernels(base, board, kernels))


def test_watts_that_are_none_are_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    dims = {"m": [4096.0], "n": [4096.0], "k": [4096.0]}
    sizes = {"device": "NVIDIA H100 80GB HBM3", "op": "linear", "dtype": "bf16", "latency_s": 1.0}
    frame = pd.DataFrame({**sizes, **dims})
    words = ("train", "--measurements", str(tmp_path), "--recipe", "power", "--output", str(tmp_path / "out"))
    for column, message in (({"power_w": [-3.0]}, "power_w is -3.0, expected"), ({}, "has watts in column power_w")):
        frame.assign(**column).to_parquet(tmp_path / "linear.parquet")
        assert run([*words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("gpus", [1, 4])
def test_designs_spend_the_joules_of_the_law(gpus: int) -> None:
    """The energy of a design is `energy` of its machine; by energy alone it is no faster than by time alone."""
    free = (nj.Range("num_sms", 60, 160), nj.Range("clock_hz", 0.8e9, 1.9e9))
    if gpus == 1:
        work, machine = nj.graph_from_config(DECODER, 4, 1024, "decode", "bf16"), H100
    else:
        layout = nj.Parallelism(data=gpus)
        work = nj.job_from_config(DECODER, layout, global_batch_size=4, sequence_length=512)
        machine = nj.load_cluster("4x H100")
    settings = Settings(starts=2, steps=12, rounds=4)
    best = {
        name: nj.design(ROOFLINE, machine, free, [work], objective=name, settings=settings)
        for name in ("energy", "latency")
    }
    for design in best.values():
        chip = design.gpu if design.cluster is None else design.cluster
        joules = float(nj.energy(ROOFLINE, chip, work.kernels if gpus == 1 else work))
        assert design.metrics["energy_j"] == pytest.approx(joules, rel=2e-3)
    assert best["energy"].metrics["energy_j"] < best["latency"].metrics["energy_j"]
    assert best["energy"].metrics["latency_s"] >= best["latency"].metrics["latency_s"] * (1.0 - 1e-4)
    if gpus == 1:
        with pytest.raises(nj.InputError, match="boards that nothing holds back"):
            nj.design(ROOFLINE, H100.replace(power_limit_w=300.0), free, [work], objective="energy")
