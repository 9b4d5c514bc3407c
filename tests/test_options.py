"""Every option of every command that forecasts: giving it changes the answer, or the workload that is told, or is
refused in one line. Nothing is ignored in silence."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from trace_files import GRID, kernel, operator, write

from neusight_jax.cli import run
from neusight_jax.cli.app import _program
from neusight_jax.model.checkpoint import checkpoint_folder
from neusight_jax.model.predictor import RooflinePredictor

Capture = pytest.CaptureFixture[str]
TINY = {
    **{"model_type": "mixtral", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"vocab_size": 512, "max_position_embeddings": 4096, "dtype": "bfloat16"},
}
PROGRAM = """
import jax, jax.numpy as jnp

def loop(n, w, x):
    return jax.lax.fori_loop(0, n, lambda _, y: y @ w, x)

def program():
    def run(n, p, w, x):
        image, filter = x.reshape(8, 1, 8, 8), w[:3, :3].reshape(1, 1, 3, 3)
        x = jax.lax.conv(image, filter, (1, 1), "SAME").reshape(8, 64)
        return jax.lax.cond(p, lambda y: y @ w, lambda y: y, loop(n, w, x))
    return run, (jnp.int32(3), True, jnp.ones((64, 64)), jnp.ones((8, 64)))
"""
CLUSTER = "gpu: H100\ncount: 4\ntopology:\n  node: HGX H100 4-GPU\n  pair_share: 0.25\n"
SLOW = "base: A100\nname: slow\nmem_bytes_per_s: 8e11\nmem_bytes: 9e10\n"
DECODER = {"--batch-size": "1", "--sequence-length": "128", "--checkpoint": "tensorcore"}
FIXED = {"--starts": "1", "--steps": "1", "--rounds": "1"}
RUN = {"--tokens": "1B", "--mtbf-hours": "1e4", "--checkpoint-s": "60"}
FREE = {"--free": "mem_bytes_per_s=1e12:8e12"}

CONTEXTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "encoder": ("predict", "bert-tiny", {"--gpu": "H100", "--sequence-length": "32"}),
    "encoder trained": ("predict", "bert-tiny", {"--gpu": "H100", "--sequence-length": "32", "--mode": "training"}),
    "inference": ("predict", "tiny.json", {"--gpu": "H100", **DECODER}),
    "prefill": ("predict", "tiny.json", {"--gpu": "H100", **DECODER, "--mode": "prefill"}),
    "decode": ("predict", "tiny.json", {"--gpu": "H100", **DECODER, "--mode": "decode"}),
    "training": ("predict", "tiny.json", {"--gpu": "H100", **DECODER, "--mode": "training", **RUN}),
    "job": ("predict", "tiny.json", {"--gpu": "H100", **DECODER, "--mode": "training", "--gpus": "8"}),
    "program": ("predict", "program.py:program", {"--gpu": "H100", "--trip-count": "3"}),
    "compared": ("compare", "tiny.json", {"--gpu": "H100 A100", **DECODER, "--mode": "decode"}),
    "jobs compared": (
        *("compare", "tiny.json"),
        {"--gpu": "H100 A100", **DECODER, "--mode": "training", "--gpus": "8", **RUN},
    ),
    "sensitivity": ("sensitivity", "tiny.json", {"--gpu": "H100", **DECODER, "--mode": "decode"}),
    "power curve": (
        *("powercap", "tiny.json"),
        {"--gpu": "H100", **DECODER, "--mode": "decode", "--caps": "300W:700W:2", "--clocks": "1GHz:1.9GHz:2"},
    ),
    "sensitivity of a job": (
        *("sensitivity", "tiny.json"),
        {"--gpu": "H100", **DECODER, "--mode": "training", "--gpus": "8"},
    ),
    "sweep": (
        *("sweep", "tiny.json"),
        {"--gpu": "H100", **DECODER, "--mode": "decode", "--grid": "mem_bytes_per_s=1e12:4e12:3", "--output": "out"},
    ),
    "design": ("design", "tiny.json", {"--base": "H100", **FREE, **FIXED, **DECODER, "--mode": "decode"}),
    "design of a job": (
        *("design", "tiny.json"),
        {"--base": "H100", **FREE, **FIXED, **DECODER, "--mode": "training", "--gpus": "8"},
    ),
    "design of a service": (
        *("design", "tiny.json"),
        {
            **{"--base": "H100", **FREE, **FIXED, "--slo": "tpot<=50ms", "--input-tokens": "128"},
            **{"--output-tokens": "16", "--checkpoint": "tensorcore"},
        },
    ),
    "parallelize": (
        *("parallelize", "tiny.json"),
        {"--gpu": "H100", "--gpus": "4", "--global-batch-size": "8", "--sequence-length": "128", "--top": "2"},
    ),
    "codesign": (
        *("codesign", "tiny.json"),
        {
            **{"--base": "H100", "--free": "d_ff=128:512", **FIXED, "--input-tokens": "128", "--output-tokens": "16"},
            **{"--objective": "total_cost", "--served-tokens": "1e9"},
        },
    ),
    "finetune": (
        *("finetune", "tiny.json"),
        {"--gpu": "H100", "--gpus": "2", "--sequence-length": "128", "--global-batch-size": "4", **RUN},
    ),
    "serve": (
        *("serve", "tiny.json"),
        {
            **{"--gpu": "H100", "--input-tokens": "128", "--output-tokens": "16", "--users": "4"},
            **{"--tpot": "50ms", "--method": "estimate"},
        },
    ),
    "trace": ("scale-trace", "trace.json", {"--from": "A100", "--to": "H100"}),
}
"""Commands that forecast, each in the situations it answers otherwise in: command, model, options."""

FITTED = ("encoder", "inference", "job", "trace")
"""Contexts that run the weights they name. The others ask the roofline, whose programs compile in a tenth of the time:
what an option reaches does not depend on the weights."""

FILES: dict[str, str] = {
    **{"--report": "page.html", "--plot": "plot.html", "--timeline": "line.json", "--chakra": "chakra"},
    "--write": "vllm=vllm.yaml",
}
"""Options that write a file of the answer, and what they are given."""
VALUES: dict[str, tuple[str, ...]] = {
    **{"--gpu": ("slow.yaml",), "--base": ("A100",), "--batch-size": ("2",), "--sequence-length": ("64",)},
    **{"--mode": ("prefill", "training"), "--dtype": ("fp16",), "--fused": ("",), "--kv-length": ("100",)},
    **{"--weight-dtype": ("fp8",), "--kv-dtype": ("fp8",), "--tensor-parallel": ("2",), "--expert-parallel": ("2",)},
    **{"--optimizer": ("sgd",), "--gradient-dtype": ("bf16",), "--lora-rank": ("4",), "--lora-targets": ("mlp",)},
    **{
        "--trip-count": ("5",),
        "--branch": ("0",),
        "--fp32-products": ("tf32",),
        "--fp32-convolutions": ("tf32",),
        "--parameters": ("n",),
    },
    **{"--gpus": ("4", "2"), "--cluster": ("cluster.yaml",), "--pipeline-parallel": ("2",), "--data-parallel": ("2",)},
    **{
        "--context-parallel": ("2",),
        "--chunks": ("2",),
        "--zero": ("1",),
        "--shards": ("2",),
        "--micro-batch-size": ("2",),
    },
    **{
        "--document-tokens": ("32",),
        "--global-batch-size": ("16",),
        "--recompute": ("full",),
        "--sequence-parallel": ("",),
    },
    **{"--checkpoint": ("other",), "--relaxation": ("1",), "--top": ("1",), "--prices": ("prices.json",)},
    **{
        "--by": ("throughput",),
        "--free": ("num_sms=60:200",),
        "--budget": ("area_mm2<=500",),
        "--objective": ("cost",),
    },
    **{"--set": ("num_sms=100",), "--costs": ("costs.json",), "--pareto": ("area_mm2=300:900:2",), "--target": ("1",)},
    **{"--starts": ("2",), "--steps": ("2",), "--rounds": ("2",), "--seed": ("1",), "--slo": ("tpot<=1ms",)},
    **{"--input-tokens": ("256",), "--output-tokens": ("32",), "--percentile": ("50",), "--gpu-price": ("3",)},
    **{
        "--grid": ("num_sms=60:200:3",),
        "--range": ("num_sms=60:200",),
        "--samples": ("4",),
        "--method": ("random", "full"),
    },
    **{"--chunk": ("2",), "--resume": ("",), "--coordinator": ("localhost:1",), "--num-processes": ("2",)},
    **{"--process-id": ("1",), "--max-gpus": ("1",), "--users": ("8",), "--request-rate": ("3",)},
    **{"--trace": ("load.jsonl",), "--ttft": ("5s",), "--tpot": ("5s",), "--disaggregated": ("",)},
    **{"--chunk-tokens": ("64",), "--max-batch": ("2",), "--memory-share": ("0.5",), "--prefix-share": ("0.5",)},
    **{
        "--expert-skew": ("1.0",),
        "--draft-tokens": ("2", "best"),
        "--draft-acceptance": ("0.5",),
        "--draft-share": ("0.5",),
        "--poll-steps": ("8",),
    },
    **{"--power-limit": ("150W",), "--clock": ("1GHz",), "--caps": ("400W",), "--clocks": ("1.5GHz",)},
    **{"--fleet-power": ("100kW",), "--most": ("3",), "--execution": ("eager",), "--attention": ("unfused",)},
    **{"--framework": ("torchtitan",), "--experts": ("grouped",), "--cuda-graphs": ("",), "--gather-dtype": ("fp8",)},
    **{"--rollouts": ("4",), "--response-tokens": ("64",), "--kw": ("100",)},
    **{"--loss": ("hoffmann",), "--training-tokens": ("1e7",), "--served-tokens": ("1e10",)},
    **{"--training-gpus": ("4",)},
    **{"--energy": ("",), "--gradients": ("",), "--tokens": ("2B",), "--epochs": ("3",)},
    **{"--mtbf-hours": ("2e4",), "--checkpoint-s": ("30",), "--restart-s": ("600",)},
    **{"--electricity": ("0.12",), "--pue": ("1.2",), "--host-watts": ("150",)},
    **{"--engine": ("sglang",), "--to": ("L40S",), "--from": ("L40S",), "--select": ("zero",), "--plain": ("",)},
}
"""Other values of options than those of the contexts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the options name."""
    place = tmp_path_factory.mktemp("options")
    (place / "tiny.json").write_text(json.dumps(TINY))
    (place / "program.py").write_text(PROGRAM)
    (place / "cluster.yaml").write_text(CLUSTER)
    (place / "slow.yaml").write_text(SLOW)
    (place / "prices.json").write_text(json.dumps({"H100": 3.0, "A100": 1.5}))
    (place / "costs.json").write_text(json.dumps({"base_area_mm2": 10.0}))
    (place / "load.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 64, "output_length": 8}) + "\n")
    events = [
        operator("aten::mm", 1, [[512, 4096], [4096, 512]], ["c10::BFloat16"] * 2, 0),
        kernel("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 20.0, 100.0, 1, **GRID),
        kernel("elementwise", 200.0, 9.0),
    ]
    write(place / "trace.json", {"traceEvents": events})
    for name in ("fp32", "tensorcore"):
        shutil.copytree(checkpoint_folder(name), place / f"other-{name}")
    return place


def words(options: Mapping[str, str]) -> list[str]:
    """Options as they are typed."""
    return [part for name, value in options.items() for part in (name, *value.split(" ")) if part]


class Answers:
    """What command lines print, with `--json`."""

    def __init__(self, folder: Path, capsys: Capture) -> None:
        self.folder, self.capsys, self.runs = folder, capsys, 0

    def ask(self, command: str, model: str, options: Mapping[str, str]) -> dict[str, Any] | str:
        """The JSON of an answer, with the rows of a file it wrote; or the one line of a refusal."""
        self.runs += 1
        written = {} if command != "sweep" else {"--output": f"{self.runs}.parquet"}
        line = [command, model, *words({**options, **written}), "--json"]
        code = run(line)
        out, err = self.capsys.readouterr()
        if code:
            assert code == 2, (line, err)
            assert len(err.splitlines()) == 1, (line, err)
            return err
        content: dict[str, Any] = json.loads(out)
        if command == "sweep":
            rows = pq.read_table(content.pop("output")).to_pydict()
            content["seconds"] = rows["seconds"]
        return content


TOLD = ("workload", "workloads", "notes", "checkpoint", "space", "chunk", "relaxation", "load", "options", "objective")
"""Parts of an answer that say what was asked."""


def kind_of_change(before: dict[str, Any], after: dict[str, Any] | str) -> str:
    """What an option does: changes the answer, or what is told of the question, or nothing; or it is refused."""
    if isinstance(after, str):
        return "refused"

    def answer(content: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in content.items() if key not in TOLD}

    if answer(before) != answer(after):
        return "changes the answer"
    return "recorded" if before != after else "ignored"


def changed(command: str, options: Mapping[str, str], name: str, value: str, folder: Path) -> dict[str, str]:
    """Options of a context with one of them given another value."""
    if name == "--cluster" and "--gpu" in options and command in ("predict", "sensitivity"):
        options = {key: own for key, own in options.items() if key not in ("--gpu", "--gpus")}
    if name == "--fused" and "--trip-count" in options:  # a JAX function is fused unless it is said
        name = "--eager"
    if name == "--range":
        options = {**{key: own for key, own in options.items() if key != "--grid"}, "--samples": "4"}
    if name in ("--request-rate", "--trace"):
        left = ("--users", "--input-tokens", "--output-tokens") if name == "--trace" else ("--users",)
        options = {key: own for key, own in options.items() if key not in left}
    if name == "--checkpoint":
        usual = options.get("--checkpoint", "fp32" if command == "predict" else "tensorcore")
        value = str(folder / f"other-{usual}")
    if name in FILES:
        value = FILES[name]
    return {**options, name: value}


def cases() -> Iterator[tuple[str, str]]:
    for context, (command, _, _) in CONTEXTS.items():
        for parameter in _program().commands[command].params:
            name = parameter.opts[0]
            if name.startswith("--") and name not in ("--json", "--output", "--help", "--strict"):  # refuses
                yield context, name


@pytest.mark.parametrize("context", CONTEXTS)
def test_no_option_is_ignored(
    context: str,
    folder: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.chdir(folder)
    if context not in FITTED:
        monkeypatch.setattr("neusight_jax.model.checkpoint.load_predictor", lambda *_: RooflinePredictor())
    command, model, options = CONTEXTS[context]
    answers, found = Answers(folder, capsys), defaultdict[str, list[str]](list)
    before = answers.ask(command, model, options)
    assert isinstance(before, dict), before
    for name in (name for own, name in cases() if own == context):
        [value, *_] = [each for each in VALUES.get(name, ("",)) if each != options.get(name)]
        asked = changed(command, options, name, value, folder)
        kind = kind_of_change(before, answers.ask(command, model, asked))
        if name in FILES and kind != "refused":
            kind = "writes a file" if (folder / asked[name].rpartition("=")[2]).exists() else "ignored"
        found[kind].append(name)
    assert not found["ignored"]
    record_property(
        "shown", f"options of {command}, {context}: { {kind: len(names) for kind, names in found.items()} }"
    )


def test_every_forecasting_command_is_walked() -> None:
    walked = {command for command, _, _ in CONTEXTS.values()}
    others = {"gpus", "models", "checkpoints", "schema", "train", "evaluate", "calibrate", "profile", "profile-model"}
    assert walked | others | {"leaderboard", "explore", "import", "check", "doctor"} == set(_program().commands)


def test_an_ignored_option_would_be_caught() -> None:
    same = {"total_s": 1.0, "notes": [], "workload": {"mode": "inference"}}
    assert kind_of_change(same, dict(same)) == "ignored"
    assert kind_of_change(same, {**same, "notes": ["full"]}) == "recorded"
    assert kind_of_change(same, {**same, "total_s": 2.0}) == "changes the answer"
    assert kind_of_change(same, "error: no") == "refused"
