"""Whole runs: tokens to steps to seconds, dollars and joules, failures, utilization, and the commands that say them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.job.flop import step_flop
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.runs import Run
from neusight_jax.units import count_of, duration

DAY_S = 86400.0


@pytest.fixture
def by_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    return error


def test_a_run_is_arithmetic() -> None:
    """1 J a token and a host of as many watts as its GPU: 2 J, times PUE; 8,000 tokens in 2 s on 8 GPUs."""
    plan = Run(3.6e12, dollars_per_kwh=0.1, pue=1.5, host_w=500.0, grid_g_per_kwh=400.0)
    step: dict[str, Any] = {"seconds": 2.0, "gpus": 8, "tokens": 8000.0, "energy_j": 500.0 * 8 * 2.0, "training": True}
    cost = plan.cost(**step, interval_s=(1.0, 3.0), price_per_hour=2.0)
    assert cost.interval_s == (4.5e8, 1.35e9)
    assert dataclasses.replace(cost, interval_s=None).values() == pytest.approx(
        {
            **{"steps": 4.5e8, "tokens": 3.6e12, "total_s": 9e8, "gpu_hours": 2e6, "lost_share": 0.0},
            **{"cost": 4e6, "energy_kwh": 3e6, "electricity_dollars": 3e5, "co2e_t": 1200.0},
        }
    )
    twice = dataclasses.replace(plan, epochs=2.0).cost(**step)
    assert (twice.gpu_hours, twice.cost, twice.interval_s) == (4e6, None, None)
    sequences = Run(samples=1000.0, epochs=3.0).cost(**step, samples=4)
    assert (sequences.steps, sequences.tokens) == (750.0, 6e6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0.0}, "tokens is 0.0, expected a positive number of tokens, such as 15e12"),
        ({"tokens": 1e9, "pue": 0.9}, "pue is 0.9, expected 1 or more"),
        ({"tokens": 1e9, "host_w": -1.0}, "host_w is -1.0, expected watts of the rest of a server"),
        ({"tokens": 1e9, "grid_g_per_kwh": float("nan")}, "grid_g_per_kwh is nan, expected grams of CO2e of a kWh"),
        ({"tokens": 1e9, "samples": 5.0}, "give either its tokens or its samples"),
        ({}, "give either its tokens or its samples"),
        ({"tokens": 1e9, "mtbf_hours": 5.0}, "failures take mtbf_hours and checkpoint_s"),
        ({"tokens": 1e9, "restart_s": 5.0}, "failures take mtbf_hours and checkpoint_s"),
        ({"samples": 5.0, "epochs": 0.0}, "epochs is 0.0, expected a positive number of passes"),
    ],
)
def test_runs_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        Run(**changes)


def test_steps_without_tokens() -> None:
    with pytest.raises(nj.InputError, match="no tokens that could be counted"):
        Run(1e9).cost(seconds=1.0, gpus=1, tokens=0.0)
    with pytest.raises(nj.InputError, match="epochs: of runs that train"):
        Run(1e9, epochs=2.0).cost(seconds=1.0, gpus=1, tokens=1.0)


def test_failures_cost_what_a_simulated_job_loses() -> None:
    """1,000 GPUs that fail every 10,000 h each: the job every 10 h. A job is drawn at the best interval of the form."""
    plan, gpus = Run(1e9, mtbf_hours=1e4, checkpoint_s=300.0, restart_s=900.0), 1000
    share = plan.lost_share(gpus)
    between_s = 36e3
    best = min(
        1.0 - work_s / (between_s * math.exp(900.0 / between_s) * math.expm1((work_s + 300.0) / between_s))
        for work_s in np.geomspace(60.0, 36e3, 2000)
    )
    assert share == pytest.approx(best, rel=1e-3)
    first_order = math.sqrt(2.0 * 300.0 / between_s) + 900.0 / between_s  # Young (1974): the cost of small losses
    assert share == pytest.approx(first_order, rel=0.1)
    random, work_s = np.random.default_rng(0), math.sqrt(2.0 * 300.0 * between_s)
    clock = 0.0
    for _ in range(4000):  # segments of work; a failure before the end of the checkpoint starts one again
        while (failure_s := random.exponential(between_s)) < work_s + 300.0:
            clock += failure_s
            while (again_s := random.exponential(between_s)) < 900.0:
                clock += again_s
            clock += 900.0
        clock += work_s + 300.0
    assert 1.0 - 4000 * work_s / clock == pytest.approx(share, rel=0.1)
    assert plan.lost_share(10 * gpus) > share > plan.lost_share(1) > 0.0
    assert dataclasses.replace(plan, restart_s=0.0).lost_share(gpus) < share
    with pytest.raises(nj.InputError, match="before a checkpoint is written"):
        plan.lost_share(1e9)


def test_numbers_as_people_write_them() -> None:
    values = {"2T": 2e12, "300B": 3e11, "50M": 5e7, "15e12": 15e12, "52k": 52e3, "1,000": 1e3, "1.5b": 1.5e9}
    assert {text: count_of(text) for text in values} == pytest.approx(values)
    assert [count_of(text) for text in ("", "2 tons", "T", "-5", "5MB")] == [None] * 5
    assert [duration(value) for value in (3599.0, 5400.0, 91.2 * DAY_S)] == ["3599 s", "1.5 h", "91.2 days"]


def test_flop_of_a_step_are_the_models() -> None:
    """6 FLOP a weight of a product and token, and 6·layers·width·pairs of attention, whatever the layout."""
    sizes: dict[str, Any] = {"global_batch_size": 64, "sequence_length": 4096}
    split = nj.Parallelism(tensor=8, pipeline=4, data=2, sequence_parallel=True, recompute="full")
    model, hardware = step_flop(nj.job_from_config("llama-3.1-70b", split, **sizes))
    weights, tokens = 70.55e9 - 128256 * 8192, 64 * 4096
    attention = 6.0 * 80 * 8192 * 4096 * tokens
    assert model == pytest.approx(6.0 * weights * tokens + attention, rel=1e-3)
    assert 4.0 / 3.0 * model < hardware < 1.36 * model
    one = step_flop(nj.job_from_config("llama-3.1-70b", nj.Parallelism(), **sizes))
    assert one.model == pytest.approx(model, rel=1e-6)
    assert one.hardware - one.model == pytest.approx(attention / 6.0, rel=1e-3)  # scores, again
    graph = nj.graph_from_config(TINY, 2, 256, "training", "bf16")
    alone = nj.job_from_config(
        TINY, nj.Parallelism(micro_batch_size=2), global_batch_size=2, sequence_length=256, dtype="bf16"
    )
    assert step_flop(graph) == pytest.approx(step_flop(alone))


def test_utilization_of_a_step() -> None:
    """Of what peaks allow; a search of layouts says the same as the forecast of one."""
    predictor, cluster, sizes = RooflinePredictor(), nj.load_cluster("4x H100"), {"sequence_length": 1024}
    found = nj.parallelize(predictor, cluster, TINY, global_batch_size=16, top=9, **sizes)
    for item in found.machines[0].choices[::4]:
        layout = {name: value for name, value in item.step.workload["layout"].items() if name != "gpus"}
        step = nj.predict(
            predictor, cluster, nj.job_from_config(TINY, nj.Parallelism(**layout), global_batch_size=16, **sizes)
        )
        assert step.mfu == pytest.approx(step.model_flop / (4 * step.total_s * 989.4e12), rel=1e-3)
        assert item.step.mfu == pytest.approx(step.mfu, rel=1e-3)
        assert item.step.hfu == pytest.approx(step.hfu, rel=1e-3)
        assert (step.hfu or 0.0) > (step.mfu or 1.0)
    decode = nj.predict(predictor, nj.load_gpu("H100"), nj.graph_from_config(TINY, 1, 128, "decode", "bf16"))
    assert 0.0 < (decode.mfu or 0.0) < 0.01


RUN = ("--tokens", "1B", "--electricity", "0.2", "--pue", "1.5", "--host-watts", "100", "--grid", "300")


@pytest.mark.usefixtures("by_roofline")
def test_runs_of_all_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All are of the seconds and joules of their steps, and they agree: of so many tokens on so many GPUs."""
    file, prices = tmp_path / "config.json", tmp_path / "prices.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    prices.write_text(json.dumps({"H100": 2.5, "currency": "EUR"}), encoding="utf-8")
    step = ("--gpu", "H100", "--batch-size", "4", "--sequence-length", "512", "--mode", "training")
    load = ("--gpu", "H100", "--gpus", "2", "--global-batch-size", "4", "--sequence-length", "512", "--top", "1")
    serving = ("--gpu", "H100", "--input-tokens", "256", "--output-tokens", "64", "--users", "4")
    more = (*RUN, "--prices", str(prices))
    answers = {
        "predict": asked(capsys, "predict", str(file), *step, *more),
        "compare": asked(capsys, "compare", str(file), *step, *more)["gpus"][0],
        "parallelize": asked(capsys, "parallelize", str(file), *load, *more)["machines"][0]["layouts"][0],
        "serve": asked(capsys, "serve", str(file), *serving, "--method", "estimate", "--tensor-parallel", "1", *more)[
            "choices"
        ][0],
    }
    seconds_a_token = {
        "predict": answers["predict"]["total_s"] / 2048,
        "compare": answers["compare"]["latency_s"] / 2048,
        "parallelize": answers["parallelize"]["total_s"] / 2048,
        "serve": 1.0 / answers["serve"]["tokens_per_s_gpu"],
    }
    for command, answer in answers.items():
        cost, gpus = answer["run"], 2 if command == "parallelize" else 1
        seconds = 1e9 * seconds_a_token[command]
        joules = 1e9 * 1.5 * answer["joules_per_token"] + 1.5 * 100.0 * gpus * seconds
        assert cost["total_s"] == pytest.approx(seconds, rel=1e-5), command
        assert cost["gpu_hours"] == pytest.approx(gpus * seconds / 3600.0, rel=1e-5), command
        assert cost["cost"] == pytest.approx(2.5 * cost["gpu_hours"]), command
        assert cost["energy_kwh"] == pytest.approx(joules / 3.6e6, rel=1e-5), command
        assert cost["electricity_dollars"] == pytest.approx(0.2 * cost["energy_kwh"]), command
        assert cost["co2e_t"] == pytest.approx(300e-6 * cost["energy_kwh"]), command


@pytest.mark.usefixtures("by_roofline")
def test_runs_on_paper(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The table, the page, and what is refused."""
    file, page = tmp_path / "config.json", tmp_path / "page.html"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    step = ("predict", str(file), "--gpu", "H100", "--sequence-length", "512")
    train, failures = (*step, "--mode", "training"), ("--mtbf-hours", "1e4", "--checkpoint-s", "60")
    assert run([*train, *failures, "--samples", "52k", "--epochs", "3", "--report", str(page)]) == 0
    out = capsys.readouterr().out
    assert "the whole run: 156,000 steps, " in out
    assert "lost to failures" in out
    assert "the run: 5.2e+04 samples, 3 times, a GPU fails every 10000 h, a checkpoint takes 60 s" in out
    assert "The whole run" in page.read_text(encoding="utf-8")
    for words, message in (
        ((*train, "--electricity", "0.1"), "--electricity: of how long a run? give --tokens, such as --tokens 2T"),
        ((*train, "--prices", "docs/prices.yaml"), "--prices: of how long a run? give --tokens"),
        ((*train, "--tokens", "many"), "--tokens is 'many', expected a number such as 2T, 300B, 50M or 15e12"),
        ((*train, "--tokens", "1e9", "--pue", "0.5"), "pue is 0.5, expected 1 or more"),
        ((*train, "--tokens", "1e9", "--samples", "5"), "give either its tokens or its samples"),
        ((*step, "--mode", "prefill", "--tokens", "1B", "--epochs", "2"), "epochs: of runs that train"),
        ((*step, "--mode", "decode", "--samples", "5"), "a step of this work has no samples that could be counted"),
    ):
        assert message in refused(capsys, *words)
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"A100": 1.0}), encoding="utf-8")
    message = refused(capsys, *train, "--tokens", "1B", "--prices", str(prices))
    assert "no price for NVIDIA H100 80GB HBM3; add a line" in message


def test_more_gpus_fail_more_often() -> None:
    """Where failures are asked for, machines are ordered by the time with them."""
    clusters = {f"{count}x H100": nj.load_cluster(f"{count}x H100") for count in (1, 8)}
    fragile = Run(1e9, mtbf_hours=1.0, checkpoint_s=300.0)
    sizes: dict[str, Any] = {"global_batch_size": 8, "sequence_length": 512, "run": fragile}
    predictors = dict.fromkeys(clusters, RooflinePredictor())
    found = nj.parallelize(predictors, clusters, TINY, **sizes)
    runs = [machine.choices[0].step.run for machine in found.machines]
    assert [cost.total_s for cost in runs if cost] == sorted(cost.total_s for cost in runs if cost)
    assert {"run.total_s", "run.lost_share", "mfu"} <= set(found.to_frame().columns)
