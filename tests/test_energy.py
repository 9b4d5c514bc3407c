"""Energy beyond steps: of servers, layouts, sweeps, traces, and what it costs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest
from small_configs import TINY
from test_job import MODEL, cluster
from trace_files import GRID, kernel, operator, write

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.hardware.gpu import GPU
from neusight_jax.job.parallelism import Parallelism, Space
from neusight_jax.model.power import POWER
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving import answers as serving
from neusight_jax.serving import under_load
from neusight_jax.serving.choices import ServingChoice
from neusight_jax.serving.simulators import Run
from neusight_jax.serving.steps import axes, load_model, steps
from neusight_jax.serving.times import Engine, Times, times
from neusight_jax.sweeps.space import Grid, Range
from neusight_jax.workloads import usual_machine

ROOFLINE = RooflinePredictor()
H100 = nj.load_gpu("H100")
FREE = Engine(step_s=0.0, sequence_s=0.0, request_s=0.0, first_steps=0.0, kernels=1.0, experts=1.0, wave=0.0)


@pytest.fixture
def by_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands forecast by roofline, whose programs compile in a tenth of the time."""
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: ROOFLINE)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def own_times(gpu: GPU) -> Times:
    model = load_model(TINY, "bf16")
    written = steps(model, Parallelism(), 8, ("bf16", "fp16", "fp32"), axes(640, 1024, 32))
    return times(ROOFLINE, nj.load_cluster("1x H100").replace(gpu=gpu), written, FREE)


@pytest.mark.parametrize("limits", [{}, {"power_limit_w": 450.0}, {"clock_limit_hz": 8e8}])
def test_a_servers_step_is_the_graphs(limits: dict[str, float]) -> None:
    """Its seconds under a cap, and its joules, are those that `nj.latency` and `nj.energy` have of the same kernels."""
    gpu = H100.replace(**limits)
    measured = jax.jit(lambda each, *sizes: (each.step_s(*sizes), each.step_j(*sizes)))
    for mode, size, sizes in (("decode", (32, 512), (32.0, 512.0)), ("prefill", (1, 512), (0.0, 1.0, 512.0))):
        kernels = nj.graph_from_config(TINY, *size, mode, "bf16").kernels
        seconds, joules = measured(own_times(gpu), *sizes)
        assert float(seconds) == pytest.approx(float(nj.latency(ROOFLINE, gpu, kernels)), rel=2e-2), mode
        assert float(joules) == pytest.approx(float(nj.energy(ROOFLINE, gpu, kernels)), rel=2e-2), mode


def served(limits: dict[str, float] | None = None, **changes: Any) -> ServingChoice:
    load = {"input_tokens": 512, "output_tokens": 128, "users": 8, "method": "estimate", "tensor_parallel": [1]}
    return nj.serve(ROOFLINE, ["H100"], "llama-3.1-8b", limits=limits, **{**load, **changes}).best


def test_watts_of_a_fleet_are_joules_of_its_tokens() -> None:
    found = [served(users=users) for users in (1, 8, 64)]
    for choice in found:
        assert choice.power_w is not None
        assert choice.joules_per_token is not None
        assert choice.gpus is not None
        idle = float(POWER.static_share) * choice.gpus * H100.tdp_w
        assert idle < choice.power_w <= choice.gpus * H100.tdp_w * (1.0 + 1e-5)
        tokens_per_s = choice.gpus * (choice.tokens_per_s_gpu or 0.0)
        assert choice.joules_per_token * tokens_per_s == pytest.approx(choice.power_w, rel=1e-6)
    joules = [choice.joules_per_token or 0.0 for choice in found]
    assert all(later < sooner for sooner, later in itertools.pairwise(joules))


def test_idle_servers_draw_static_power() -> None:
    """A request now and then: hardly more than that, and less than with a request always there."""
    idle, busy = served(users=None, request_rate=1e-3), served(users=1)
    static = float(POWER.static_share) * H100.tdp_w
    assert idle.power_w == pytest.approx(static, rel=0.01)
    assert (busy.power_w or 0.0) > 1.2 * static


def test_a_cap_lowers_the_watts_of_a_server_and_never_its_times() -> None:
    free, *capped = (served(limits, users=32) for limits in (None, {"power_limit_w": 450.0}, {"power_limit_w": 300.0}))
    for sooner, later in itertools.pairwise([free, *capped]):
        assert (later.power_w or 0.0) < (sooner.power_w or 0.0)
        assert (later.tokens_per_s_gpu or 0.0) <= (sooner.tokens_per_s_gpu or 0.0)
        assert later.tpot_s["p50"] >= sooner.tpot_s["p50"]
    assert (capped[-1].power_w or 0.0) <= 300.0 * (1.0 + 1e-5)


def test_pools_draw_on_all_their_gpus() -> None:
    load: dict[str, Any] = {"users": None, "request_rate": 20.0, "ttft_s": 0.2, "tpot_s": 0.05}
    found = nj.serve(
        *(ROOFLINE, ["H100"], "llama-3.1-8b"),
        **{"input_tokens": 512, "output_tokens": 128, "method": "estimate", "tensor_parallel": [1]},
        **{**load, "disaggregated": True},
    )
    (pools,) = (choice for choice in found.choices if choice.prefill)
    static = float(POWER.static_share) * (pools.gpus or 0) * H100.tdp_w
    assert static < (pools.power_w or 0.0) < (pools.gpus or 0) * H100.tdp_w
    assert pools.joules_per_token == pytest.approx((pools.power_w or 0.0) / (20.0 * 128), rel=1e-4)


def test_watts_of_what_an_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its rate and its batch; at the rate and the times of the closed form they are the same."""
    free = served()
    rate = (free.tokens_per_s_gpu or 0.0) / 128

    def engine(share: float) -> ServingChoice:
        met = {"p50": free.tpot_s["p50"], "p95": free.tpot_s["p95"]}
        found = Run(free.ttft_s, met, share * rate, 0.0)
        monkeypatch.setattr(under_load, "run", lambda *_, **__: found)
        return served(method="engine")

    monkeypatch.setattr(serving, "require_engine", lambda _: None)
    same, half = engine(1.0), engine(0.5)
    assert same.power_w == pytest.approx(free.power_w, rel=1e-4)
    assert (half.power_w or 0.0) < (same.power_w or 0.0)
    assert (half.joules_per_token or 0.0) > (same.joules_per_token or 0.0)


@pytest.mark.usefixtures("by_roofline")
def test_serve_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--gpu", "H100", "--input-tokens", "512", "--output-tokens", "64", "--users", "4", "--method", "estimate")
    words = ("serve", "llama-3.2-1b", *load, "--tensor-parallel", "1")
    free, capped = (asked(capsys, *words, *more) for more in ((), ("--power-limit", "200W")))
    assert free["choices"][0]["power_w"] > capped["choices"][0]["power_w"] > 0.0
    assert capped["workload"]["limits"] == {"power_limit_w": 200.0}
    assert run([*words, "--power-limit", "200W"]) == 0
    assert "J/tok" in capsys.readouterr().out


@pytest.mark.parametrize("limits", [{}, {"power_limit_w": 400.0}, {"clock_limit_hz": 9e8}])
def test_layouts_draw_what_their_jobs_do(limits: dict[str, float]) -> None:
    """Layers that pipelines do not divide, so that ranks differ."""
    machine = cluster(8, 4)
    machine = machine.replace(gpu=machine.gpu.replace(**limits))
    config, sizes = {**MODEL, "num_hidden_layers": 6}, {"global_batch_size": 16, "sequence_length": 1024}
    space = Space(micro_batch_sizes=(1,), chunks=(1,), zero=(0,), sequence_parallel=(False,), recompute=("none",))
    steps = [
        item.step
        for item in nj.parallelize(ROOFLINE, machine, config, space=space, top=40, **sizes).machines[0].choices
    ]
    assert {dict(step.workload["layout"])["pipeline"] for step in steps} >= {1, 4}
    for step in steps[::5]:
        layout = {name: value for name, value in step.workload["layout"].items() if name != "gpus"}
        own = nj.predict(ROOFLINE, machine, nj.job_from_config(config, Parallelism(**layout), **sizes))
        assert step.energy_j == pytest.approx(own.energy_j, rel=1e-5)
        assert step.power_w == pytest.approx(own.power_w, rel=1e-5)
        assert step.clock_hz == pytest.approx(own.clock_hz, rel=1e-4)
        assert step.joules_per_token == pytest.approx(own.energy_j / (16 * 1024), rel=1e-5)
    seconds = [step.total_s for step in steps]
    assert seconds == sorted(seconds)
    free = nj.parallelize(ROOFLINE, cluster(8, 4), config, space=space, **sizes).best
    assert free is not None
    assert seconds[0] >= free.step.total_s * (1.0 - 1e-5)


@pytest.mark.usefixtures("by_roofline")
def test_parallelize_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    load = (
        "--gpu",
        "H100",
        "--gpus",
        "4",
        "--global-batch-size",
        "16",
        "--sequence-length",
        "1024",
        "--recompute",
        "none",
    )
    words = ("parallelize", str(file), *load)
    free, locked = (asked(capsys, *words, *more)["machines"][0] for more in ((), ("--clock", "700MHz")))
    for found in (free, locked):
        best = found["layouts"][0]
        assert best["power_w"] == pytest.approx(best["energy_j"] / best["total_s"])
        assert best["joules_per_token"] == pytest.approx(best["energy_j"] / (16 * 1024))
    assert locked["layouts"][0]["total_s"] > free["layouts"][0]["total_s"]
    assert locked["layouts"][0]["clock_hz"] <= 7e8 * (1.0 + 1e-4)
    assert run(list(words)) == 0
    assert "J/token" in capsys.readouterr().out


@pytest.mark.usefixtures("by_roofline")
def test_rows_of_a_sweep_draw_what_their_machines_do(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = nj.job_from_config(TINY, Parallelism(data=2), global_batch_size=2, sequence_length=512)
    works = [nj.graph_from_config(TINY, 4, 512, "prefill", "bf16"), job]
    space, gpus = Grid((Range("power_limit_w", 250.0, 700.0, count=3),)), {"H100": H100}
    output = tmp_path / "caps.parquet"
    frame = nj.sweep(ROOFLINE, gpus, works, space, output, energy=True).to_frame()
    plain = nj.sweep(ROOFLINE, gpus, works, space, tmp_path / "plain.parquet").to_frame()
    np.testing.assert_allclose(frame["seconds"], plain["seconds"], rtol=1e-6)
    assert "energy_j" not in plain
    np.testing.assert_allclose(frame["power_w"] * frame["seconds"], frame["energy_j"], rtol=1e-5)
    for row in frame.to_dict("records")[1::3]:
        work = works[row["workload"]]
        machine = usual_machine("H100", H100.replace(power_limit_w=float(row["power_limit_w"])), work)
        joules = float(nj.energy(ROOFLINE, machine, work if work is job else works[0].kernels))
        assert row["energy_j"] == pytest.approx(joules, rel=1e-4)
    with pytest.raises(nj.InputError, match="exists; remove it"):
        nj.sweep(ROOFLINE, gpus, works, space, tmp_path / "plain.parquet", resume=True, energy=True)
    words = ("sweep", "bert-tiny", "--gpu", "T4", "--grid", "num_sms=20:40:2", "--output", str(tmp_path / "t.parquet"))
    assert asked(capsys, *words, "--energy")["energy"] is True


def test_a_scaled_run_draws_what_its_kernels_do(tmp_path: Any) -> None:
    """A product and softmaxes by the law; what nobody knows at their mean, idle boards below it."""
    known = [
        operator("aten::mm", 1, [[512, 4096], [4096, 512]], ["float"] * 2, 0),
        kernel("volta_sgemm_128x64_nn", 20.0, 900.0, 1, **GRID),
        operator("aten::_softmax", 3, [[8, 128, 128], [], []], ["float", "Scalar", "Scalar"], 40),
        *(kernel("softmax_warp_forward", 1100.0 + 10.0 * at, 9.0, 3, **GRID) for at in range(5)),
    ]
    more = [*known, kernel("something_nobody_knows", 1300.0, 400.0, None, **GRID)]
    files = [write(tmp_path / f"{at}.json", {"traceEvents": each}) for at, each in enumerate((known, more))]
    runs = [nj.scale_trace(file, "V100-PCIE-32GB", "A100", predictor=ROOFLINE) for file in files]
    gpu = nj.load_gpu("A100")
    for run_ in runs:
        assert float(POWER.static_share) * gpu.tdp_w < run_.power_w <= gpu.tdp_w * (1.0 + 1e-5)
        assert run_.energy_j == pytest.approx(run_.power_w * run_.scaled_s)
        assert run_.to_dict()["energy_j"] == run_.energy_j
    assert runs[0].power_w == pytest.approx(runs[1].power_w, rel=1e-5)
    assert runs[1].energy_j > runs[0].energy_j
    assert [any("mean draw" in note for note in each.notes) for each in runs] == [False, True]
    held = nj.scale_trace(files[0], "V100-PCIE-32GB", gpu.replace(power_limit_w=100.0), predictor=ROOFLINE)
    assert held.power_w <= 100.0 * (1.0 + 1e-5)
