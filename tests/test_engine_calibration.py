"""An engine's numbers from measured loads: planted ones are found again, and files of both say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.schema import file_schema
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving.calibration import MeasuredLoad, calibrate_engine, read_loads, write_engine
from neusight_jax.serving.times import ENGINES, Engine, engine_of

LOADS = ((256, 64, 1), (256, 64, 16), (1024, 32, 4))


def measured_with(engine: Engine) -> list[MeasuredLoad]:
    """Loads as a server with such an engine would show them."""
    rows = []
    for input_tokens, output_tokens, users in LOADS:
        answer = nj.serve(
            RooflinePredictor(),
            "H100",
            TINY,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            users=users,
            tensor_parallel=[1],
            method="estimate",
            percentile=50.0,
            engine=engine,
        ).choices[0]
        times = {"ttft_s": answer.ttft_s["p50"], "tpot_s": answer.tpot_s["p50"]}
        rows.append(MeasuredLoad(input_tokens=input_tokens, output_tokens=output_tokens, users=users, **times))
    return rows


def test_planted_numbers_are_found_again() -> None:
    planted = ENGINES["vllm"].replace(step_s=3e-3, request_s=0.05)
    loads = measured_with(planted)
    fitted = calibrate_engine(RooflinePredictor(), nj.load_gpu("H100"), TINY, loads, gpu_name="H100", noise=0.02)
    for name in ("step_s", "request_s"):
        shipped, truth, value = (float(np.asarray(getattr(each, name))) for each in (ENGINES["vllm"], planted, fitted))
        assert abs(np.log(value / truth)) < 0.25 * abs(np.log(shipped / truth)), name
    again = measured_with(fitted)
    for load, other in zip(loads, again, strict=True):
        assert other.tpot_s == pytest.approx(load.tpot_s, rel=0.1)
        assert other.ttft_s == pytest.approx(load.ttft_s, rel=0.1)


def test_loads_as_forecast_move_nothing() -> None:
    fitted = calibrate_engine(
        RooflinePredictor(), nj.load_gpu("H100"), TINY, measured_with(ENGINES["vllm"]), gpu_name="H100"
    )
    assert fitted.step_s == pytest.approx(ENGINES["vllm"].step_s, rel=0.1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    write_engine(file, ENGINES["sglang"].replace(step_s=5e-3), "sglang")
    assert vars(engine_of(str(file))) == vars(ENGINES["sglang"].replace(step_s=5e-3))
    assert set(json.loads(file.read_text())) <= set(file_schema("engine")["properties"])
    file.write_text('{"step_s": 0.004}')
    assert engine_of(str(file)) == ENGINES["vllm"].replace(step_s=0.004)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"steps": 1}', "unknown field 'steps'; nearest: step_s"),
        ('{"step_s": -1}', "step_s is -1"),
        ('{"engine": "tgi"}', "engine is 'tgi'"),
        ("[1]", "expected fields with values, some of engine, step_s, .*; found list"),
    ],
)
def test_what_is_no_engine_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "engine.json"
    file.write_text(text)
    with pytest.raises(nj.InputError, match=message):
        engine_of(str(file))


HEAD = "input_tokens,output_tokens,users,ttft_s,tpot_s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "no measured load"),
        (f"{HEAD}\n1000,200,1,0.04,fast", "row 1: tpot_s is 'fast'"),
        (f"{HEAD}\n1000,200,1,0.04,0.01\n1000,200,1,-4,0.01", "row 2: ttft_s is '-4'"),
        (
            "input_tokens,output_tokens,users,ttft_s\n1000,200,1,0.04",
            "row 1: tpot_s is missing, expected mean time of each further token",
        ),
        (f"{HEAD},gpus\n1000,200,1,0.04,0.01,8", "unknown field 'gpus'"),
    ],
)
def test_what_are_no_loads(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "loads.csv"
    file.write_text(text)
    with pytest.raises(nj.InputError, match=message):
        read_loads(file)


def test_more_users_than_a_replica_runs() -> None:
    load = MeasuredLoad(input_tokens=256, output_tokens=64, users=5000, ttft_s=1.0, tpot_s=0.01)
    with pytest.raises(nj.InputError, match="5000 users at once: at most"):
        calibrate_engine(RooflinePredictor(), nj.load_gpu("H100"), TINY, [load], gpu_name="H100")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, loads, output = tmp_path / "config.json", tmp_path / "loads.csv", tmp_path / "engine.json"
    model.write_text(json.dumps(TINY))
    loads.write_text(f"{HEAD}\n256,64,1,0.03,0.004\n256,64,8,0.04,0.005\n")
    command = ["calibrate", "--engine", "vllm", "--model", str(model), "--gpu", "H100", "--measurements", str(loads)]
    assert run([*command, "--output", str(output)]) == 0
    assert "calibrated with 2 loads" in capsys.readouterr().out
    assert json.loads(output.read_text())["engine"] == "vllm"
    assert run(command) == 2
    assert "--output FILE.json" in capsys.readouterr().err
    for more, words in (
        ("--identify", "--identify and --engine are questions of their own"),
        ("--json", "--json: nothing"),
    ):
        assert run([*command, more]) == 2
        assert words in capsys.readouterr().err
