"""Elasticities: signs and sums over random machines and kernels, agreement with exact differences, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from predictors import DRAWS, ON_ONE_GPU, SEEDS, Backwards, only, random_gpus, random_kernels, random_predictor, scaled

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.hardware.gpu import FIELDS, SWITCHES
from neusight_jax.hardware.variant import PEAKS, RATES
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.predictor import Predictor, RooflinePredictor
from neusight_jax.sensitivities import (
    ALL_RATES,
    ROWS,
    Sensitivity,
    disagree,
    disagreement_notes,
    elasticities,
    knob,
)

FALLING = ("mem_bytes_per_s", "l2_bytes", "clock_hz", "tdp_w", knob("num_sms"), knob("clock_hz"), *PEAKS)


def wrong_signs(
    predictor: Predictor, seed: int, isolated: bool, relaxation: float, families: tuple[str, ...] = ON_ONE_GPU
) -> dict[str, int]:
    """Elasticities above rounding that should not be, by row; `benchmarks/physics.py` does 1e5 pairs."""
    kernels, gpus = only(random_kernels(seed, DRAWS), *families), random_gpus(seed, DRAWS, absent=0.5)
    _, slopes = elasticities(predictor, gpus, kernels, isolated=isolated, relaxation=relaxation)
    counts = {name: sum(int(np.sum(~(np.asarray(e) <= 1e-4))) for e in slopes[name].values()) for name in FALLING}
    return {name: count for name, count in counts.items() if count}


def test_no_elasticity_has_the_wrong_sign() -> None:
    for seed in SEEDS:
        predictor = random_predictor("mixture", seed)
        for isolated, relaxation in ((False, 0.0), (True, 0.5)):
            assert not wrong_signs(predictor, seed, isolated, relaxation)


def test_a_backwards_bandwidth_is_caught() -> None:
    found = wrong_signs(Backwards(random_predictor("mixture", 0)), 0, False, 0.0, ("linear", "elementwise", "decode"))
    assert set(found) == {"mem_bytes_per_s"}
    assert found["mem_bytes_per_s"] > 0.1 * DRAWS


def test_rate_elasticities_sum_to_minus_one_less_the_launch_share() -> None:
    """In single precision; the launch share is the time of an infinitely fast machine over the time."""
    for seed in SEEDS:
        predictor, kernels = random_predictor("mixture", seed), random_kernels(seed, DRAWS)
        gpus = random_gpus(seed, DRAWS)
        now, slopes = elasticities(predictor, gpus, kernels)
        floor = kernel_latency(predictor, scaled(gpus, RATES, 1e10), kernels)
        for name in ON_ONE_GPU:
            share = np.asarray(floor[name]) / np.asarray(now[name])
            np.testing.assert_allclose(slopes[ALL_RATES][name], share - 1.0, atol=1e-3, err_msg=name)


def test_rows_are_sums_of_their_fields() -> None:
    kernels, gpu = only(random_kernels(0, 32), "linear"), nj.load_gpu("H100")
    _, slopes = elasticities(random_predictor("mixture", 0), gpu, kernels, relaxation=1.0)
    for row, names in ROWS.items():
        total = sum(np.asarray(slopes[name]["linear"]) for name in names)
        np.testing.assert_allclose(slopes[row]["linear"], total, atol=1e-6)


def test_roofline_by_hand() -> None:
    """A large product follows its peak alone, a large sum the bandwidth alone, in proportion."""
    kernels = table_from_kernels(
        [
            Kernel("linear", "linear", {"batch": 1, "m": 8192, "n": 8192, "k": 8192}),
            Kernel("elementwise", "add", {"rows": 65536, "cols": 4096, "reads": 2, "writes": 1}),
        ]
    )
    _, slopes = elasticities(RooflinePredictor(), nj.load_gpu("H100"), kernels)
    for name in (field for field in FIELDS if field not in SWITCHES):
        product, addition = (float(slopes[name][family][0]) for family in ("linear", "elementwise"))
        assert product == pytest.approx(-1.0 if name == "fp32_flop_per_s" else 0.0, abs=1e-5), name
        assert addition == pytest.approx(-1.0 if name == "mem_bytes_per_s" else 0.0, abs=1e-5), name


@pytest.fixture(scope="module")
def results() -> dict[float, Sensitivity]:
    graph = nj.graph_from_config("bert-tiny", batch_size=64, sequence_length=128, mode="training", fused=True)
    predictor, gpu = random_predictor("mixture", 2), nj.load_gpu("H100")
    return {each: nj.sensitivity(predictor, gpu, graph, relaxation=each, gpu_name="H100") for each in (0.0, 1.0)}


def test_sums_and_differences_agree(results: dict[float, Sensitivity]) -> None:
    exact = results[0.0]
    assert exact.total_s == pytest.approx(exact.relaxed_total_s, rel=1e-5)
    cost = exact.forecast.columns["seconds"] * exact.forecast.columns["count"]
    for name, value in exact.total.items():
        assert value == pytest.approx(float(exact.elasticities[name] @ cost / cost.sum()), abs=1e-5)
        if "num_sms" not in name:
            assert value == pytest.approx(exact.secants[name], abs=0.02), name
    for column in ("family", "phase"):
        parts, seconds = exact.by(column), exact.forecast.seconds_by(column)
        joined = sum(parts[label]["mem_bytes_per_s"] * seconds[label] for label in seconds) / exact.total_s
        assert joined == pytest.approx(exact.total["mem_bytes_per_s"], abs=1e-5)


def test_relaxed_waves_are_biased_low_and_show_the_sms(results: dict[float, Sensitivity]) -> None:
    exact, relaxed = results[0.0], results[1.0]
    assert relaxed.total_s == exact.total_s
    assert 0.7 * exact.total_s < relaxed.relaxed_total_s <= exact.total_s
    assert relaxed.total[knob("num_sms")] <= exact.total[knob("num_sms")]


def test_disagreements_say_which_to_trust(results: dict[float, Sensitivity]) -> None:
    """A step function passes no gradient: more SMs look free, or dear, and the difference says what they buy."""
    exact, relaxed = results[0.0], results[1.0]
    for found in (exact, relaxed):
        made = replace(found, secants={**found.total, "num_sms": found.total["num_sms"] - 0.3})
        assert set(made.disagreements) == {"num_sms"}
        assert made.trusted["num_sms"] == made.secants["num_sms"]
        assert json.loads(made.to_json())["trusted"]["num_sms"] == pytest.approx(made.secants["num_sms"])
        assert made.notes[0].startswith(f"num_sms (slope {found.total['num_sms']:+.3f}, difference ")
        assert f"note: {made.notes[0][:40]}" in str(made)
    same = replace(exact, secants=dict(exact.total))
    assert (same.disagreements, same.notes) == ({}, exact.forecast.notes)
    assert same.trusted == exact.total


def test_what_disagrees_and_why() -> None:
    for apart in ((0.044, -0.196), (0.0, -0.2), (-0.1, -0.201), (-0.3, -0.14)):
        assert disagree(*apart), apart
    for alike in ((-0.1, -0.19), (0.004, -0.009), (0.0, 0.0), (-0.3, -0.16)):
        assert not disagree(*alike), alike
    waves, bend = disagreement_notes({"num_sms": (0.044, -0.196), "tdp_w": (0.0, -0.05)}, 0.0)
    assert waves.startswith("num_sms (slope +0.044, difference -0.196): trust the exact difference over ±5%")
    assert "--relaxation 1" in waves
    assert bend.startswith("tdp_w (slope +0.000, difference -0.050): trust the exact difference")
    assert "another limit takes over" in bend
    (relaxed,) = disagreement_notes({"num_sms": (-0.1, -0.4)}, 1.0)
    assert "the slope over a wider range" in relaxed


def test_plain_values_and_tables(results: dict[float, Sensitivity]) -> None:
    content = json.loads(results[1.0].to_json())
    assert set(content["total"]) == set(ROWS)
    assert set(content["family"]) == set(results[1.0].forecast.seconds_by("family"))
    frame = results[0.0].to_frame()
    assert len(frame) == len(results[0.0].weights)
    assert "d_mem_bytes_per_s" in frame
    text = str(results[1.0])
    assert "waves relaxed by 1" in text
    assert "bias" in text
    assert "whole waves" in str(results[0.0])
    assert "bf16_flop_per_s" not in text


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sensitivity", "bert-tiny", "--gpu", "T4", "--batch-size", "64", "--sequence-length", "256"]
    arguments += ["--checkpoint", str(checkpoint)]
    assert run([*arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["total"]["mem_bytes_per_s"] < 0
    assert content["checkpoint"] == str(checkpoint)
    for bad, message in (
        (("--relaxation", "-1"), "--relaxation is -1"),
        (("--dtype", "bf16"), "Tesla T4: this GPU has no arithmetic path 'bf16'"),
        (("--plot", str(tmp_path / "x.gif")), "expected a name that ends in .html"),
        (("--sequence-length", "0"), "sequence_length"),
    ):
        assert run([*arguments, *bad]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_absent_paths_have_no_elasticity() -> None:
    gpu = nj.load_gpu("T4")
    assert float(gpu.bf16_flop_per_s) == 0.0
    _, slopes = elasticities(random_predictor("mixture", 0), gpu, only(random_kernels(0, 32, dtypes=1), "linear"))
    assert not np.any(np.asarray(slopes["bf16_flop_per_s"]["linear"]))
    assert jnp.all(jnp.isfinite(slopes[ALL_RATES]["linear"]))
