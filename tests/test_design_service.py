"""Design for what a million tokens cost: services as workloads, their slopes, budgets and bad input."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.design import _load, _targets
from neusight_jax.cli.options import ServiceOptions, WorkloadOptions
from neusight_jax.designs.answers import answer, problem
from neusight_jax.designs.loads import Service, service
from neusight_jax.designs.search import Search, Settings
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.sweeps.space import Range

BASE = nj.load_gpu("H100").replace(mem_bytes=4e9)
FREE = (Range("mem_bytes_per_s", 1e12, 8e12), Range("mem_bytes", 2e9, 40e9))
LOAD: dict[str, Any] = {"ttft_s": 0.1, "tpot_s": 0.004, "price_per_hour": 2.0}
LOAD |= {"dtypes": {"dtype": "bf16"}, "options": {"max_batch": 64, "chunk_tokens": 1024}}


@cache
def search() -> Search:
    """One program for all tests."""
    load = service(TINY, BASE, 512, 128, **LOAD)
    asked = problem(RooflinePredictor(), BASE, FREE, [load], objective="cost_per_mtok", budgets={"dollars": 4000.0})
    return Search(asked, Settings(starts=2, steps=4, rounds=2, candidates=8))


def at(**figures: float) -> np.ndarray:
    values = {"mem_bytes_per_s": BASE.mem_bytes_per_s, "mem_bytes": BASE.mem_bytes} | figures
    return np.log([[float(np.asarray(values[each.field])) for each in FREE]])


def known(**figures: float) -> dict[str, float]:
    return {name: float(values[0]) for name, values in search().metrics(at(**figures))[0].items()}


def test_the_base_costs_what_serving_says() -> None:
    found = known(mem_bytes=20e9)
    own = {name: LOAD[name] for name in ("ttft_s", "tpot_s", "dtypes", "options")}
    machine = {"own": BASE.replace(mem_bytes=20e9)}
    asked = {"input_tokens": 512, "output_tokens": 128, "users": 10, "tensor_parallel": [1], "method": "estimate"}
    best = nj.serve(RooflinePredictor(), machine, TINY, **asked, **own).best
    assert best.max_users == pytest.approx(found["requests_at_once"], abs=1.0)
    assert best.max_rate == pytest.approx(1.0 / found["latency_s"], rel=0.03)
    cost = found["price_per_hour"] / 3600 / best.max_rate / 640 * 1e6  # type: ignore[operator]
    assert found["cost_per_mtok"] == pytest.approx(cost, rel=0.03)


def test_prices_follow_dollars_and_loads_follow_targets_and_memory() -> None:
    base, small = known(), known(mem_bytes=2e9)
    assert base["price_per_hour"] == pytest.approx(2.0)
    assert small["price_per_hour"] == pytest.approx(2.0 * small["dollars"] / base["dollars"])
    asked: Any = search().problem.workloads[0].step
    for figures in ({"mem_bytes": 40e9}, {"mem_bytes": 40e9, "mem_bytes_per_s": 1e12}, {"mem_bytes": 2e9}):
        found = known(**figures)
        room = (figures["mem_bytes"] * asked.memory_share - asked.held_bytes) / asked.request_bytes
        room = np.clip(room, 1.0, asked.max_batch)
        times = max(found["ttft_s"] / asked.ttft_s, found["tpot_s"] / asked.tpot_s)
        assert max(times, found["requests_at_once"] / room) == pytest.approx(1.0, abs=1e-3) or found["slo_ratio"] > 1.0


@pytest.mark.parametrize("memory", [3e9, 40e9])
def test_slopes_are_those_of_differences(memory: float) -> None:
    """Where memory holds the load, and where a target or the engine's batch does."""
    here = at(mem_bytes=memory, mem_bytes_per_s=2e12)[0]
    slope = search().slopes(here, 0.0)[0]
    for place, step in enumerate(0.01 * np.eye(2)):
        low, high = search().values(np.stack([here - step, here + step]))[0]
        assert slope[place] == pytest.approx((high - low) / 0.02, abs=0.05), FREE[place].field


def test_a_search_finds_a_cheaper_machine() -> None:
    found = answer(search(), search().run(0))
    assert found.feasible
    assert found.metrics["cost_per_mtok"] < found.base_metrics["cost_per_mtok"]
    assert found.budgets == {"slo_ratio": 1.0, "dollars": 4000.0}
    assert found.metrics["slo_ratio"] <= 1.0
    assert found.workloads[0]["output_tokens"] == 128
    assert json.loads(found.to_json())["metrics"]["price_per_hour"] == found.metrics["price_per_hour"]
    assert "per million tokens" in str(found)
    assert "2 an hour of the base GPU; another GPU costs as many times more as the dollars" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttft_s": None, "tpot_s": None}, "a service has no target"),
        ({"ttft_s": -1.0}, "ttft_s is -1.0, expected a positive number"),
        ({"price_per_hour": 0.0}, "price_per_hour is 0.0, expected a positive number"),
        ({"percentile": 90.0}, "percentile is 90.0, expected 50 or 95"),
        ({"tensor_parallel": 3}, "do not split over 3"),
    ],
)
def test_bad_services(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        service(TINY, BASE, 512, 128, **{**LOAD, **changes})


def test_a_command_line_of_a_service() -> None:
    assert _targets("ttft<=1s tpot <= 50ms") == {"ttft_s": 1.0, "tpot_s": 0.05}
    serving = ServiceOptions("tpot<=50ms", 64, 16, 50, 2.5)
    load = _load("llama-3.2-1b,weight=2", WorkloadOptions(), serving, nj.load_gpu("H100"))
    assert load.weight == 2.0
    assert isinstance(load.step, Service)
    assert (load.step.tpot_s, load.step.percentile, load.step.price_per_hour) == (0.05, 50.0, 2.5)
    assert load.tokens == 80


CLI = ("design", "llama-3.2-1b", "--base", "H100", "--free", "num_sms=60:220", "--objective", "cost_per_mtok")
SLO, LENGTHS = ("--slo", "tpot<=50ms"), ("--input-tokens", "64", "--output-tokens", "16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "cost_per_mtok is of models that are served; give targets: --slo"),
        (LENGTHS, "go with --slo; give targets"),
        (SLO, "--slo needs the lengths of requests; give --input-tokens and --output-tokens"),
        (("--slo", "speed<=3", *LENGTHS), "expected ttft<=TIME, tpot<=TIME or both"),
        (("--slo", "ttft<=soon", *LENGTHS), "--slo ttft is 'soon', expected a time"),
        ((*SLO, *LENGTHS, "--batch-size", "4"), "leave --batch-size out"),
        ((*SLO, *LENGTHS, "--target", "1"), "no --budget and no --slo"),
    ],
)
def test_bad_commands_are_one_line(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CLI, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
