"""Loads run by an engine's scheduler (extra `serving`), and traces, which are read without it."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run as command
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.model import checkpoint
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving import answers, simulators, under_load
from neusight_jax.serving.choices import Load, ServingChoice
from neusight_jax.serving.layouts import Capacity, Replica
from neusight_jax.serving.simulators import Prefill, Run, read_trace, run, write_profile
from neusight_jax.serving.steady import Lengths
from neusight_jax.serving.steps import axes
from neusight_jax.serving.times import Engine, Options, Times
from neusight_jax.serving.under_load import _answered, _fewest

GRID = axes(1024, 1024, 64)
OPTIONS = Options(chunk_tokens=1024, max_batch=64)
LENGTHS = Lengths(512, 64)


@pytest.fixture(scope="module")
def own() -> Times:
    """10 ms a decode step and 0.1 ms for every request, 20 ms for a thousand tokens of a prompt."""
    shapes = GRID.shapes()
    tables = {name: jnp.full(shape, 1e-9) for name, shape in shapes.items()}
    tables["decode_body"] = 1e-2 + 1e-4 * jnp.asarray(GRID.batches, float)
    tables["prefill_body"] = 2e-5 * jnp.asarray(GRID.tokens, float)
    return Times(tables, Engine(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0), GRID)


def test_the_profile_is_dynamos(own: Times, tmp_path: Path) -> None:
    write_profile(own, tmp_path / "steps.npz")
    with np.load(tmp_path / "steps.npz") as found:
        shape = len(found["decode_active_kv_tokens"]), len(found["decode_context_length"])
        assert found["decode_itl"].shape == shape
        assert np.all(np.diff(found["prefill_ttft_ms"]) > 0)
        at = list(found["prefill_isl"]).index(512)
        assert found["prefill_ttft_ms"][at] == pytest.approx(10.24, rel=1e-3)
        assert found["decode_itl"][0, -1] == pytest.approx(10.1, rel=1e-3)


def test_another_version_is_refused(own: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, told in (("9.9", "is 9.9"), (None, "is not installed")):
        monkeypatch.setattr(simulators, "_version", lambda version=version: version)
        with pytest.raises(nj.InputError, match=f"ai-dynamo-runtime {told}, expected 1.6.1: pip install"):
            run(own, OPTIONS, 1e5, lengths=LENGTHS, users=4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 0, "input_length": 10, "output_length": 5, "user": 1}', "line 1: unknown field 'user'"),
        ('{"timestamp": -5, "input_length": 10, "output_length": 5}', "timestamp is -5, expected a number from 0"),
        ('{"timestamp": 1e300, "input_length": 10, "output_length": 5}', "timestamp is 1e.300, expected a number"),
        ('{"timestamp": true, "input_length": 10, "output_length": 5}', "timestamp is True, expected a number"),
        (
            '{"timestamp": 0, "input_length": 0, "output_length": 5}',
            "input_length is 0, expected a whole number from 1",
        ),
        ('{"timestamp": 0, "input_length": 9.5, "output_length": 5}', "input_length is 9.5, expected a whole number"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1' + 400 * "0" + "}", "output_length is inf"),
        ('{"timestamp": 0, "input_length": 10, "output_length": 5}', "hash_ids is None, expected a list"),
        ('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": []}', "has 0 ids, expected 1 or more"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [1]}', "has 1 ids, expected 2 or more"),
        ('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [-1]}', "whole numbers from 0"),
        ('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": [true]}', "whole numbers from 0"),
        ("[" * 100_000, "nested too deeply"),
        ('{"timestamp": 0, "input_length": 10}', "output_length is None"),
        ('{"timestamp": 0, "input_length": 10, "output_length": 5, "hash_ids": "a"}', "hash_ids is 'a'"),
        ("[1]", "expected an object with timestamp"),
        ("{", "not JSON"),
        ("", "is empty"),
    ],
)
def test_bad_traces(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(nj.InputError, match=message):
        read_trace(file)
    with pytest.raises(nj.InputError, match="no such file"):
        read_trace(tmp_path / "nowhere.jsonl")


def trace_file(folder: Path, count: int) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 100 * at,
            "input_length": 512,
            "output_length": 64,
            "hash_ids": [8 * at + each for each in range(8)],
        }
        for at in range(count)
    ]
    file = folder / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_trace_says_its_load(tmp_path: Path) -> None:
    found = read_trace(trace_file(tmp_path, 11))
    assert (found.lengths, found.longest, found.requests, found.rate) == (LENGTHS, 576, 11, 11.0)


def test_the_fewest_replicas_by_bisection() -> None:
    load, calls = Load(LENGTHS, 100.0, None, ttft_s=1.0), []

    def of(count: int) -> Run:
        calls.append(count)
        return Run({"p50": 0.1, "p95": 7.0 / count}, {"p50": 0.01, "p95": 0.01}, 1.0, 0.0)

    assert _fewest(of, load, 3, 1000)[0] == 7
    assert len(calls) <= 6
    assert _fewest(of, load, 9, 1000)[0] == 7
    assert _fewest(of, load, 3, 5) == (0, None)


def test_prices_and_bounds_follow_the_engine() -> None:
    choice = ServingChoice(
        "H100",
        2,
        1,
        replicas=1,
        gpus=2,
        ttft_s={"p50": 0.1, "p95": 0.2},
        tpot_s={"p50": 0.01, "p95": 0.02},
        intervals={"ttft_s": (0.1, 0.3), "tpot_s": (0.01, 0.04), "gpus": (2, 4), "cost": (1.0, 3.0)},
        costs={"per_hour": 5.0, "input": 1.0, "output": 4.0, "tokens": 2.0},
    )
    found = _answered(choice, 2, Run({"p95": 0.4}, {"p95": 0.02}, 10.0, 0.0), Load(LENGTHS, 9.0, None), whole=False)
    assert (found.gpus, found.costs["per_hour"]) == (4, 10.0)
    assert found.intervals["ttft_s"] == pytest.approx((0.2, 0.6))
    assert found.costs["tokens"] == pytest.approx(1e6 * 10.0 / 3600 / 20.0 / 576)


def test_what_an_engine_misses_is_said(own: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Run({"p95": 3.0}, {"p95": 0.02}, 10.0, 0.0)
    monkeypatch.setattr(under_load, "run", lambda *_, **__: slow)
    memory = Capacity(1e9, 1e8, 1e9, 6e10, 1e8, 8e10)
    replica = Replica("H100", Parallelism(), OPTIONS, memory, (own,) * 3, 64.0)
    choice, load = ServingChoice("H100", 1, 1, replicas=1, gpus=1), Load(LENGTHS, 9.0, None, ttft_s=1.0, max_gpus=2)
    (found,) = under_load.under_load([choice], {("H100", Parallelism()): replica}, {}, None, load, None)
    assert found.replicas is None
    assert found.notes == (
        "run by the engine, 2 replicas miss the targets: first token after 3 s, target 1 s (3 times)",
    )


needs_engine = pytest.mark.skipif(
    not simulators.installed() or importlib.metadata.version(simulators.PACKAGE) != simulators.VERSION,
    reason="ai-dynamo-runtime is not installed",
)


@needs_engine
def test_a_thousand_requests_in_two_seconds(own: Times) -> None:
    run(own, OPTIONS, 1e5, lengths=LENGTHS, users=1)
    start = time.process_time()
    found = run(own, OPTIONS, 1e5, lengths=LENGTHS, users=16)
    assert time.process_time() - start < 2.0
    assert 0.0101 <= found.tpot_s["p50"] < 0.02
    assert found.ttft_s["p95"] >= found.ttft_s["p50"] >= 0.0102


@needs_engine
def test_rates_and_traces(own: Times, tmp_path: Path) -> None:
    slow, fast = (run(own, OPTIONS, 1e5, lengths=LENGTHS, rate=rate) for rate in (2.0, 20.0))
    assert slow.rate == pytest.approx(2.0, rel=0.1)
    assert fast.ttft_s["p95"] > slow.ttft_s["p95"]
    traced = run(own, OPTIONS, 1e5, trace=trace_file(tmp_path, 50), workers=2)
    assert traced.prefix_share == 0.0
    assert traced.tpot_s["p50"] < 0.02


@needs_engine
def test_guesses_that_are_right_are_tokens(own: Times) -> None:
    def tpot(acceptance: float) -> float:
        options = Options(1024, 64, draft_tokens=2, draft_acceptance=acceptance, draft_share=0.0)
        return run(own, options, 1e5, lengths=LENGTHS, users=1).tpot_s["p50"]

    assert tpot(0.0) / tpot(1.0) == pytest.approx(3.0, rel=0.05)
    with pytest.raises(nj.InputError, match="the engine guesses at most 5 tokens, not 6"):
        run(own, Options(1024, 64, draft_tokens=6), 1e5, lengths=LENGTHS, users=1)
    with pytest.raises(nj.InputError, match="looks for new requests at every step"):
        run(own, Options(1024, 64, poll_steps=10), 1e5, lengths=LENGTHS, users=1)


@needs_engine
def test_a_prefix_that_is_held_is_not_computed(own: Times) -> None:
    plain, held = (
        run(own, Options(1024, 64, prefix_share=share), 1e5, lengths=LENGTHS, users=1) for share in (0.0, 0.5)
    )
    assert held.prefix_share == pytest.approx(0.5, abs=0.05)
    assert held.ttft_s["p50"] < 0.7 * plain.ttft_s["p50"]


@needs_engine
def test_pools_send_what_they_computed(own: Times) -> None:
    """512 tokens of 1 MB each at 1 GB/s take half a second."""
    found = run(own, OPTIONS, 1e5, lengths=LENGTHS, users=1, prefill=Prefill(own, 1e5, 1, 1e6, 1e9))
    assert found.ttft_s["p50"] == pytest.approx(0.512 + 0.0102, rel=0.05)
    assert found.tpot_s["p50"] == pytest.approx(0.0101, rel=0.02)


@needs_engine
def test_the_command_runs_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "load_predictor", lambda *_: RooflinePredictor())
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(TINY))
    trace = str(trace_file(tmp_path, 50))
    options = [
        "--gpu",
        "H100",
        "--dtype",
        "bf16",
        "--tensor-parallel",
        "1",
        "--max-batch",
        "32",
        "--chunk-tokens",
        "1024",
        "--disaggregated",
    ]
    assert command(["serve", str(config), *options, "--trace", trace, "--ttft", "1s", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert found["method"].startswith("ai-dynamo-runtime")
    assert found["workload"]["trace"] == trace
    assert [bool(each["prefill"]) for each in found["choices"]] == [False, True]
    assert all(each["replicas"] == 1 for each in found["choices"])
    assert command(["serve", str(config), *options, "--trace", trace, "--ttft", "1us"]) == 2
    assert "no layout carries this load" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        (None, {}, "ai-dynamo-runtime is not installed"),
        (simulators.VERSION, {"poll_steps": 10}, "looks for new requests at every step"),
        (simulators.VERSION, {"draft_tokens": 6}, "guesses at most 5 tokens"),
    ],
)
def test_what_the_engine_cannot_is_refused_before_any_forecast(
    version: str | None, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "_version", lambda: version)
    monkeypatch.setattr(answers, "replicas", lambda *_: pytest.fail("a forecast was made first"))
    with pytest.raises(nj.InputError, match=message):
        nj.serve(RooflinePredictor(), ["H100"], "llama-3.1-8b", trace=trace_file(tmp_path, 4), options=options)
