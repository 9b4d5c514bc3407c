"""A step of reinforcement learning is an update, the scoring of its responses, and a server that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.forecast import Forecast
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving.rollouts import Rollout, rollout_step

ROOFLINE = RooflinePredictor()
CLUSTER = nj.load_cluster("4x H100")
JOB = nj.job_from_config(
    TINY, nj.Parallelism(data=2, tensor=2, micro_batch_size=4), global_batch_size=64, sequence_length=768
)
UPDATE = nj.predict(ROOFLINE, CLUSTER, JOB)


def step(responses: int = 8, response_tokens: int = 512, **changes: Any) -> Forecast:
    return rollout_step(ROOFLINE, CLUSTER, JOB, UPDATE, Rollout(responses, response_tokens, **changes), TINY)


def test_a_step_is_serve_and_train() -> None:
    """Two replicas of two GPUs write 32 responses; a response takes a server its first token and all others."""
    forecast = step()
    served = nj.serve(
        *(ROOFLINE, {"four": CLUSTER}, TINY),
        **{"input_tokens": 256, "output_tokens": 512, "users": 32, "method": "estimate", "tensor_parallel": [2]},
        options={"prefix_share": 7 / 8},
    ).best
    assert served.replicas == 1
    response_s = served.ttft_s["p50"] + 512 * served.tpot_s["p50"]
    assert forecast.parts["rollout_s"] == pytest.approx(response_s, rel=2e-2)
    assert forecast.parts["scoring_s"] == pytest.approx(2 * UPDATE.forward_s)
    assert forecast.total_s == pytest.approx(UPDATE.total_s + sum(list(forecast.parts.values())[-2:]))
    drawn = 2 * (served.power_w or 0.0) * forecast.parts["rollout_s"]
    scored = UPDATE.power_w * forecast.parts["scoring_s"]
    assert forecast.energy_j == pytest.approx(UPDATE.energy_j + drawn + scored, rel=1e-6)
    assert (forecast.mfu or 1.0) < (UPDATE.mfu or 0.0)
    assert step(response_tokens=256).parts["rollout_s"] < 0.6 * forecast.parts["rollout_s"]
    assert step(responses=64).parts["rollout_s"] <= forecast.parts["rollout_s"]
    assert step(scoring=0).parts["scoring_s"] == 0.0


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"response_tokens": 768}, "holds a response of 768 tokens and no prompt"),
        ({"responses": 7}, "global_batch_size 64 is no multiple of 7 responses"),
        ({"responses": 0}, "responses is 0, expected a positive whole number"),
    ],
)
def test_rollouts_that_cannot_be(rollout: dict[str, int], message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        step(**rollout)


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: ROOFLINE)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY, "dtype": "bfloat16"}))
    words = ["predict", str(file), "--gpu", "H100", "--gpus", "4", "--tensor-parallel", "2", "--mode", "training"]
    words += ["--sequence-length", "768", "--global-batch-size", "64", "--micro-batch-size", "4"]
    rollout = ["--rollouts", "8", "--response-tokens", "512"]
    assert run([*words, *rollout, "--samples", "64k", "--report", str(tmp_path / "page.html"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rollout_s"] == pytest.approx(step().parts["rollout_s"], rel=1e-4)
    assert answer["run"]["total_s"] == pytest.approx(1000 * answer["total_s"])
    assert answer["workload"]["response_tokens"] == 512
    for line, message in (
        ([*words, *rollout[:2]], "--rollouts and --response-tokens say one thing together; give both"),
        (["predict", str(file), "--gpu", "H100", "--mode", "prefill", *rollout], "--rollouts: of training jobs"),
    ):
        assert run(line) == 2
        assert message in capsys.readouterr().err
