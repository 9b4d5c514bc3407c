"""One step has one answer by whichever door, and every command takes every workload, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.model.predictor import RooflinePredictor

SIZES = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096},
}
DENSE = {"model_type": "llama", **SIZES}
EXPERTS = {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 1024, "n_positions": 512}
ALONE = nj.Space(micro_batch_sizes=(2,), chunks=(1,), zero=(0,), sequence_parallel=(False,), recompute=("none",))
STEPS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "dense in fp32": (DENSE, "fp32", {"optimizer": "adamw"}),
    "dense in bf16": (DENSE, "bf16", {"optimizer": "adamw"}),
    "dense in fp8": (DENSE, "fp8", {"optimizer": "sgd"}),
    "without an optimizer": (DENSE, "bf16", {"optimizer": None}),
    "adapters": (DENSE, "bf16", {"optimizer": "adamw", "lora": nj.Lora(8)}),
    "QLoRA": (DENSE, "bf16", {"optimizer": "adamw", "lora": nj.Lora(8, weight_dtype="int4")}),
    "experts": (EXPERTS, "bf16", {"optimizer": "adamw"}),
    "experts together": (EXPERTS, "bf16", {"optimizer": "adamw", "experts": "grouped"}),
    "Muon": (DENSE, "bf16", {"optimizer": "muon"}),
    "Muon of experts": (EXPERTS, "bf16", {"optimizer": "muon"}),
    "GPT-2 in fp32": (GPT2, "fp32", {"optimizer": "adamw"}),
    "GPT-2 in bf16": (GPT2, "bf16", {"optimizer": "adamw"}),
}


@pytest.fixture(scope="module")
def shipped() -> Any:
    return nj.load_predictor("tensorcore")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("weights", ["roofline", "tensorcore"])
def test_a_graph_on_one_gpu_is_a_job_of_one_rank_and_the_row_of_a_search(name: str, weights: str, shipped: Any) -> None:
    config, dtype, recipe = STEPS[name]
    predictor = RooflinePredictor() if weights == "roofline" else shipped
    gpu, cluster = nj.load_gpu("H100"), nj.load_cluster("1x H100")
    graph = nj.graph_from_config(config, 2, 128, "training", dtype, **recipe)
    sizes = {"global_batch_size": 2, "sequence_length": 128, "dtype": dtype, **recipe}
    job = nj.job_from_config(config, nj.Parallelism(micro_batch_size=2), **sizes)
    forecast, step = nj.predict(predictor, gpu, graph), nj.predict(predictor, cluster, job)
    row = nj.parallelize(predictor, cluster, config, space=ALONE, **sizes).machines[0].choices[0].step
    for other in (step.total_s, row.total_s, float(nj.latency(predictor, gpu, graph.kernels))):
        assert other == pytest.approx(forecast.total_s, rel=1e-6)
    many = jax.vmap(nj.latency, in_axes=(None, 0, None))(predictor, nj.stack_gpus([gpu, gpu]), graph.kernels)
    assert many.tolist() == pytest.approx([forecast.total_s] * 2, rel=1e-5)
    assert step.phases == pytest.approx(forecast.phases, rel=1e-4)
    assert forecast.memory is not None
    assert step.memory_bytes == pytest.approx(forecast.memory.total, rel=1e-6)
    assert row.memory_bytes == pytest.approx(forecast.memory.total, rel=1e-6)


REPLICATED: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder in fp32": ("bert-tiny", {"batch_size": 2, "sequence_length": 32, "dtype": "fp32"}),
    "encoder in bf16": ("bert-tiny", {"batch_size": 2, "sequence_length": 32, "dtype": "bf16"}),
    "ViT": ("vit-base", {"batch_size": 2, "dtype": "bf16"}),
    "T5-like": ("switch-base-8", {"batch_size": 1, "sequence_length": 32, "dtype": "fp32"}),
}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_of_any_graph(name: str) -> None:
    """One replica takes what the graph takes; many only wait for each other's gradients, and share what ZeRO says."""
    model, load = REPLICATED[name]
    predictor = RooflinePredictor()
    graph = nj.graph_from_config(model, mode="training", optimizer="adamw", **load)
    alone = nj.predict(predictor, nj.load_gpu("H100"), graph)
    one = nj.predict(predictor, nj.load_cluster("1x H100"), nj.job_from_graph(graph))
    assert one.total_s == pytest.approx(alone.total_s, rel=1e-6)
    assert one.phases == pytest.approx(alone.phases, rel=1e-5)
    assert one.memory_bytes == alone.memory_bytes
    steps = [
        nj.predict(predictor, nj.load_cluster("16x H100"), nj.job_from_graph(graph, nj.Parallelism(data=16, zero=zero)))
        for zero in range(4)
    ]
    plain = steps[0]
    assert plain.exposed_communication_s > 0.0
    assert plain.total_s > alone.total_s
    assert plain.tokens == 16 * alone.tokens
    for name, since in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        for zero, step in enumerate(steps):
            shards = 16 if zero >= since else 1
            assert getattr(step.memory, name) == pytest.approx(getattr(alone.memory, name) / shards)
    assert steps[1].phases["optimizer"] == pytest.approx(alone.phases["optimizer"] / 16, rel=1e-3)
    twice = nj.predict(
        predictor,
        nj.load_cluster("16x H100"),
        nj.job_from_graph(graph, nj.Parallelism(data=16), global_batch_size=32 * graph.batch_size),
    )
    assert twice.phases["forward"] == pytest.approx(2.0 * plain.phases["forward"], rel=1e-5)
    assert twice.phases["optimizer"] == pytest.approx(plain.phases["optimizer"], rel=1e-5)


def test_replicas_that_cannot_be() -> None:
    graph = nj.graph_from_config(DENSE, 1, 64, "training", "bf16")
    with pytest.raises(nj.InputError, match="llama runs as replicas, its layers are not split: pipeline is 2"):
        nj.job_from_graph(graph, nj.Parallelism(pipeline=2))
    with pytest.raises(nj.InputError, match="read for prefill; replicas train"):
        nj.job_from_graph(nj.graph_from_config(DENSE, 1, 64, "prefill", "bf16"), nj.Parallelism(data=2))


def test_rows_of_a_step_sum_to_its_compute() -> None:
    """Launches of a small model take longer than its kernels: rows hold their share of that."""
    graph = nj.graph_from_config(DENSE, 1, 64, "training", "bf16", optimizer="adamw")
    forecast = nj.predict(RooflinePredictor(), nj.load_gpu("H100"), graph)
    frame = forecast.to_frame()
    assert float((frame["seconds"] * frame["count"]).sum()) == pytest.approx(forecast.compute_s, rel=1e-5)
    assert forecast.total_s == pytest.approx(forecast.compute_s + forecast.fixed_s)
    assert (frame["bound"] == "launch").mean() > 0.9


MODEL = ("tiny.json", "--batch-size", "1", "--sequence-length", "128", "--dtype", "bf16")
WORKLOADS = {
    "graph": (*MODEL, "--mode", "prefill"),
    "training": (*MODEL, "--mode", "training", "--optimizer", "adamw"),
    "program": ("program.py:program",),
    "job": (*MODEL, "--mode", "training", "--gpus", "4", "--zero", "1"),
}
FIXED = ("--starts", "1", "--steps", "1", "--rounds", "1")
COMMANDS = {
    "predict": ("--gpu", "H100"),
    "compare": ("--gpu", "H100", "A100"),
    "sensitivity": ("--gpu", "H100"),
    "powercap": ("--gpu", "H100", "--caps", "400W", "--clocks", "1GHz"),
    "sweep": ("--gpu", "H100", "--grid", "mem_bytes_per_s=1e12:4e12:2", "--output", "out.parquet"),
    "design": ("--base", "H100", "--free", "mem_bytes_per_s=1e12:8e12", *FIXED),
    "parallelize": ("--gpu", "H100"),
    "finetune": ("--gpu", "H100", "--gpus", "1", "--sequence-length", "128"),
    "serve": ("--gpu", "H100", "--input-tokens", "64", "--output-tokens", "8", "--users", "2", "--tpot", "50ms"),
}
WHOLE_RUNS = ("predict", "compare", "parallelize", "finetune", "serve")
"""Commands that say what a whole run takes."""
LAYOUTS = ("--gpus", "2", "--global-batch-size", "4", "--sequence-length", "128")
ELSEWHERE: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("parallelize", "graph"): (("tiny.json", *LAYOUTS), ""),
    ("parallelize", "program"): (("program.py:program", *LAYOUTS), "jobs are of models by name or config.json"),
    ("finetune", "graph"): (("tiny.json",), ""),
    ("finetune", "program"): (("program.py:program",), "jobs are of decoders by name or config.json"),
    ("serve", "graph"): (("tiny.json",), ""),
    ("serve", "program"): (("program.py:program",), "engines serve decoders by name or config.json"),
}
"""Commands that ask for a workload in words of their own: searches of layouts are of training jobs, and serving of a
model; and what is said of a program, that has neither."""
PROGRAM = """
import jax.numpy as jnp

def program():
    return (lambda w, x: x @ w), (jnp.ones((64, 64)), jnp.ones((8, 64)))
"""


@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_workload(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in ("parallelize", "finetune", "serve") and kind not in ("graph", "program"):
        return  # asked once
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(DENSE))
    Path("program.py").write_text(PROGRAM)
    monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())
    words, reason = ELSEWHERE.get((command, kind), (WORKLOADS[kind], ""))
    code = run([command, *words, *COMMANDS[command], "--json"])
    said = capsys.readouterr()
    if reason:
        assert code == 2
        assert reason in said.err
        assert len(said.err.splitlines()) == 1
        return
    assert code == 0, said.err
    assert json.loads(said.out)["schema"].startswith("neusight_jax.")
    if command not in WHOLE_RUNS:
        return
    code = run([command, *words, *COMMANDS[command], "--tokens", "1B", "--json"])
    said = capsys.readouterr()
    if kind == "program":  # its arguments have no tokens
        assert code == 2
        assert "no tokens that could be counted" in said.err
        return
    assert code == 0, said.err
    assert '"gpu_hours"' in said.out
