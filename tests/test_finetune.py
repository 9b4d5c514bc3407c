"""Fine-tuning: the recipe of every machine is the best there is, its command forecasts it, and what lacks memory is
said; frozen weights in four bits."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.layouts.answers import Layouts
from neusight_jax.layouts.finetune import ZERO
from neusight_jax.model.predictor import RooflinePredictor

SMALL: dict[str, Any] = {**TINY, "num_hidden_layers": 4}
H100 = "NVIDIA H100 80GB HBM3"


def recipes(method: str = "lora", **changes: Any) -> Layouts:
    usual: dict[str, Any] = {"sequence_length": 512, "counts": (1, 2), "run": nj.Run(tokens=1e6)}
    return nj.finetune(RooflinePredictor(), ["H100", "A100"], SMALL, method=method, **{**usual, **changes})


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_recipes_are_the_best_layouts_of_replicas(method: str) -> None:
    layouts = recipes(method, prices={"H100": 2.0, "A100": 1.0})
    lora = None if method == "full" else nj.Lora(16, (), "int4" if method == "qlora" else None)
    for machine in layouts.machines:
        [choice] = machine.choices
        cluster, layout = nj.load_cluster(machine.name), choice.step.workload["layout"]
        assert (layout["data"], layout["tensor"], layout["pipeline"], layout["context"]) == (machine.gpus, 1, 1, 1)
        found = nj.parallelize(
            *(RooflinePredictor(), cluster, SMALL),
            **{"global_batch_size": 16, "sequence_length": 512, "lora": lora, "top": 50},
            space=nj.Space(chunks=(1,), zero=ZERO[method], sequence_parallel=(False,)),
        )
        replicas = [
            item.step.total_s
            for item in found.machines[0].choices
            if item.step.workload["layout"]["data"] == machine.gpus
        ]
        assert choice.step.total_s == pytest.approx(min(replicas), rel=1e-6)
        assert choice.step.run is not None
        assert choice.step.run.gpu_hours == pytest.approx(machine.gpus * choice.step.run.total_s / 3600.0)
    costs = [machine.choices[0].cost_per_million_tokens for machine in layouts.machines]
    assert costs == sorted(costs, key=lambda cost: cost or 0.0)


def test_its_command_forecasts_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both command lines, as they are printed and in JSON; a GPU that is too small says what it lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())
    Path("deep.json").write_text(json.dumps({**SMALL, "num_hidden_layers": 5000}))
    words = ["deep.json", "--sequence-length", "512", "--method", "qlora", "--lora-targets", "qkv,mlp"]
    words += ["--tokens", "1M", "--gpus"]
    machines = []
    for more in (("1", "--gpu", "H100", "L4"), ("2", "--gpu", "H100")):
        assert run(["finetune", *words, *more, "--json"]) == 0
        machines += json.loads(capsys.readouterr().out)["machines"]
    fits = [machine for machine in machines if machine["layouts"]]
    assert [machine["name"] for machine in fits] == [f"1x {H100}", f"2x {H100}"]
    for machine in fits:
        [choice] = machine["layouts"]
        assert run([*shlex.split(choice["command"])[1:], "--tokens", "1M", "--json"]) == 0
        step = json.loads(capsys.readouterr().out)
        assert step["total_s"] == pytest.approx(choice["total_s"], rel=1e-6)
        assert step["run"]["energy_kwh"] == pytest.approx(choice["run"]["energy_kwh"], rel=1e-5)
        assert step["memory"]["total_bytes"] == pytest.approx(choice["memory"]["total_bytes"], rel=1e-6)
        assert step["mfu"] == pytest.approx(choice["mfu"], rel=1e-3)
        trainer = choice["trainer"]
        micro, batches, count = (
            int(re.findall(rf"--{name} (\d+)", trainer)[0])
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
        )
        assert (micro * batches * count, count) == (16, machine["gpus"])
        assert "--load_in_4bit" in trainer
    [lacking] = [machine["verdict"] for machine in machines if not machine["layouts"]]
    assert re.search(r"L4: none of \d+ layouts fits; the smallest needs [\d.]+ GiB more", lacking)
    assert run(["finetune", *words, "1", "--gpu", "H100", "L4", "--report", "page.html"]) == 0
    out = capsys.readouterr().out
    assert lacking in out
    printed = out[out.index("$ neusight-jax predict") + 2 : out.index("$ trl")].replace("\\\n", " ")
    assert shlex.split(printed) == shlex.split(fits[0]["layouts"][0]["command"])
    assert "LoRA of rank 16, frozen weights in int4" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "dora"), "unknown method 'dora'"),
        (("--method", "full", "--lora-rank", "8"), "--lora-rank, --lora-targets: of adapters"),
        (("--lora-targets", "nothing"), "lora target 'nothing' is in no product's name"),
        (("--gpus", "3"), "no layout divides"),
        (("--epochs", "2"), "--epochs: of how long a run? give --tokens"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL))
    assert run(["finetune", str(file), "--gpu", "H100", "--sequence-length", "512", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_gpu_without_the_dtype_is_said() -> None:
    """It comes with those that fit; alone it is refused."""
    layouts = nj.finetune(RooflinePredictor(), ["T4", "H100"], SMALL, counts=(1,), sequence_length=512)
    assert [machine.name for machine in layouts.machines] == [f"1x {H100}", "1x Tesla T4"]
    assert layouts.machines[1].verdict in str(layouts)
    assert layouts.machines[1].verdict == "1x Tesla T4: has no bf16 path: not forecast; give another dtype"
    with pytest.raises(nj.InputError, match="has no arithmetic path 'bf16'"):
        nj.finetune(RooflinePredictor(), ["T4"], SMALL, counts=(1,), sequence_length=512)


def test_frozen_weights_in_four_bits() -> None:
    """Less memory and traffic of FSDP, by the bits; more time, by a kernel that widens each weight twice a pass."""
    cluster, sizes = nj.load_cluster("2x H100"), {"global_batch_size": 4, "sequence_length": 512}
    layout = nj.Parallelism(data=2, zero=3, micro_batch_size=2)
    plain, narrow = (
        nj.job_from_config(SMALL, layout, lora=nj.Lora(16, (), stored), **sizes) for stored in (None, "int4")
    )
    hidden, inner, cache = SMALL["hidden_size"], SMALL["intermediate_size"], 8 * SMALL["hidden_size"] // 16
    products = SMALL["num_hidden_layers"] * hidden * (2 * hidden + 2 * cache + 3 * inner)
    saved = (plain.plan.memory.weights - narrow.plan.memory.weights) * 2  # of two shards
    assert saved == pytest.approx(products * (16.0 - 4.0 - 20.0 / 128.0) / 8.0, rel=1e-6)
    gathers = [
        sum(message.payload_bytes * message.count for _, message in job.plan.messages if message.slot == "gather")
        for job in (plain, narrow)
    ]
    assert gathers[0] - gathers[1] == pytest.approx(saved, rel=1e-6)
    steps = [nj.predict(RooflinePredictor(), cluster, job) for job in (plain, narrow)]
    assert steps[1].compute_s > steps[0].compute_s
    assert steps[1].model_flop == steps[0].model_flop
    with pytest.raises(nj.InputError, match="int4 weights"):
        nj.graph_from_config(SMALL, 1, 128, "training", weight_dtype="int4")
