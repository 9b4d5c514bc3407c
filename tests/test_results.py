"""Every command with --json: JSON alone, its schema first, the whole workload, checkpoint, GPU and all notes."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_pages import tool

import neusight_jax as nj
from neusight_jax.cli import compare, design, predict, run, sensitivity, sweep
from neusight_jax.cli.options import WorkloadOptions
from neusight_jax.designs.search import Settings
from neusight_jax.hardware.files import load_named_gpus, load_named_server
from neusight_jax.hardware.prices import Prices
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.records import Result, as_text, json_text, schema
from neusight_jax.workloads import workload_dict, workload_text

Capture = pytest.CaptureFixture[str]
DECODER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
SPLIT = ("--mode", "decode", "--dtype", "bf16", "--batch-size", "2", "--sequence-length", "100,300")
SPLIT = (*SPLIT, "--kv-dtype", "fp8", "--tensor-parallel", "2", "--checkpoint", "tensorcore")
WORKLOAD = {
    "model": "split",
    "mode": "decode",
    "dtype": "bf16",
    "batch_size": 2,
    "sequence_length": 300,
    "kv_length": [100, 300],
    "weight_dtype": "bf16",
    "kv_dtype": "fp8",
    "tensor_parallel": 2,
    "expert_parallel": 1,
    "num_gpus": 2,
    "fused": True,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "split.json").write_text(json.dumps(DECODER))
    return str(tmp_path / "split.json")


def published(content: dict[str, Any], command: str) -> dict[str, Any]:
    """What a command printed, all of whose keys docs/json.csv has."""
    keys = tool("json_keys")
    assert keys.broken(content, keys.published(), command) == [], "run `python docs/tools/json_keys.py`"
    return content


def strict(text: str) -> dict[str, Any]:
    """JSON alone, without NaN and Infinity, which are no JSON."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} in JSON")

    content = json.loads(text, parse_constant=refuse)
    assert isinstance(content, dict)
    return content


def asked(command: str, model: str, tmp_path: Path) -> list[str]:
    """A command that forecasts a model, with its own options."""
    field = "mem_bytes_per_s=1e12:8e12"
    own = {
        "predict": ["--gpu", "H100"],
        "compare": ["--gpu", "H100", "A100"],
        "sweep": ["--gpu", "H100", "--grid", f"{field}:2", "--output", str(tmp_path / "out.parquet")],
        "design": ["--base", "H100", "--free", field, "--starts", "1", "--steps", "1", "--rounds", "1"],
        "target": ["--base", "H100", "--free", field, "--target", "1"],
    }
    return ["design" if command == "target" else command, model, *own[command], *SPLIT]


SCHEMAS = {
    "predict": "neusight_jax.forecast/1",
    "compare": "neusight_jax.comparison/1",
    "sweep": "neusight_jax.sweep/1",
    "design": "neusight_jax.design/1",
    "target": "neusight_jax.requirement/1",
}


@pytest.mark.parametrize("command", SCHEMAS)
def test_commands_that_forecast(command: str, model: str, tmp_path: Path, capsys: Capture) -> None:
    assert run([*asked(command, model, tmp_path), "--json"]) == 0
    content = published(strict(capsys.readouterr().out), "design" if command == "target" else command)
    assert next(iter(content.items())) == ("schema", SCHEMAS[command])
    assert content["checkpoint"] == "tensorcore"
    assert "NVIDIA H100 80GB HBM3" in json.dumps(content)
    loads = content["workloads"] if "workloads" in content else [content["workload"]]
    assert [{key: load[key] for key in WORKLOAD} for load in loads] == [WORKLOAD]


def test_metadata_of_a_sweep(model: str, tmp_path: Path, capsys: Capture) -> None:
    """Mixed lengths share a longest one: rows say which workload they are of."""
    import pyarrow.parquet as pq

    command = asked("sweep", model, tmp_path)
    place = command.index("100,300")
    assert run([*command[: place + 1], "300", *command[place + 1 :], "--json"]) == 0
    content = strict(capsys.readouterr().out)
    found = pq.read_table(tmp_path / "out.parquet")
    kept = strict(found.schema.metadata[b"neusight_jax.sweep"].decode())
    assert kept == {key: value for key, value in content.items() if key in kept}
    assert next(iter(kept)) == "schema"
    assert found["workload"].to_pylist() == [0, 0, 1, 1]
    assert found["sequence_length"].to_pylist() == [300] * 4
    assert [load["kv_length"] for load in kept["workloads"]] == [[100, 300], 300]


def test_sensitivity(checkpoint: Path, capsys: Capture) -> None:
    sizes = ("--batch-size", "2", "--sequence-length", "16", "--checkpoint", str(checkpoint), "--json")
    assert run(["sensitivity", "bert-tiny", "--gpu", "L20", *sizes]) == 0
    content = published(strict(capsys.readouterr().out), "sensitivity")
    assert next(iter(content.items())) == ("schema", "neusight_jax.sensitivity/1")
    assert (content["checkpoint"], content["gpu"]) == (str(checkpoint), "NVIDIA L20")
    assert content["workload"] == workload_dict(nj.graph_from_config("bert-tiny", 2, 16))
    assert any("that are estimates" in note for note in content["notes"])


@pytest.mark.parametrize("command", ["gpus", "models", "checkpoints"])
def test_lists(command: str, capsys: Capture) -> None:
    assert run([command, "--json"]) == 0
    content = published(strict(capsys.readouterr().out), command)
    assert list(content) == ["schema", command]
    assert content["schema"] == schema(command)


def test_a_key_that_is_not_published_is_seen() -> None:
    keys = tool("json_keys")
    known = keys.published()
    assert keys.broken({"schema": "neusight_jax.gpus/1", "gpus": [], "more": 1}, known) == ["more (number)"]
    assert keys.broken({"schema": "neusight_jax.gpus/1", "gpus": {}}, known) == ["gpus (mapping)"]
    assert keys.broken({"schema": "neusight_jax.gpus/1"}, known) == ["no gpus"]
    assert keys.broken({"schema": "neusight_jax.gpus/2", "gpus": []}, known) == ["schema (text)", "gpus (list)"]


@pytest.mark.parametrize("command", [predict, compare, sensitivity, design, sweep])
def test_no_command_lacks_an_option_of_another(command: Any) -> None:
    function: Callable[..., None] = getattr(command, command.__name__.rsplit(".", 1)[-1])
    assert {each.name for each in fields(WorkloadOptions)} <= set(inspect.signature(function).parameters)


def test_every_result_is_a_table_a_frame_and_json(tmp_path: Path) -> None:
    """One base: kind and schema, notes last, a report found by its kind, HTML without a page of its own."""
    predictor, gpu, graph = RooflinePredictor(), nj.load_gpu("H100"), nj.graph_from_config("gpt2", 1, 64)
    free, trace = (
        nj.Range("mem_bytes_per_s", 1e12, 8e12, count=2),
        Path(__file__).parent / "data" / "torch_cpu_trace.json",
    )
    results: list[Result] = [
        nj.predict(predictor, gpu, graph, notes=["[a] note"]),
        nj.compare(predictor, ["H100", "T4"], graph),
        nj.sensitivity(predictor, gpu, graph),
        nj.sweep(predictor, {"H100": gpu}, [graph], nj.Grid((free,)), tmp_path / "out.parquet"),
        nj.design(predictor, gpu, [free], [graph], settings=Settings(1, 1, rounds=1, candidates=4)),
        nj.scale_trace(trace, "V100", "T4", predictor=predictor),
    ]
    for each in results:
        content = each.to_dict()
        assert strict(each.to_json()).keys() == content.keys()
        assert next(iter(content.items())) == ("schema", schema(each.kind))
        assert list(content)[-1] == "notes"
        assert len(each.to_frame()) > 0
        assert "\n" in str(each)
        assert repr(each).startswith(f"<{type(each).__name__}: ")
        assert "\n" not in repr(each)
        assert each._repr_html_().startswith("<p><strong>")
        assert "<table" in each._repr_html_() or each.kind == "sweep"
    assert "note: [a] note" in str(results[0])
    assert "note: [a] note" in results[0]._repr_html_()


def test_what_is_not_finite_is_null_and_said() -> None:
    text = json_text({"a": [1.0, math.nan], "b": {"c": math.inf}, "d": (2, None), "notes": ["first"]})
    said = "null where there is no finite number: a[], b.c"
    assert strict(text) == {"a": [1.0, None], "b": {"c": None}, "d": [2, None], "notes": ["first", said]}
    assert strict(json_text({"a": 1.0})) == {"a": 1.0}


def test_workloads_in_words() -> None:
    mixed = nj.graph_from_config(
        "mixtral-8x7b", 2, [64, 128], "prefill", "bf16", kv_length=[100, 200], tensor_parallel=2, expert_parallel=4
    )
    assert mixed.num_gpus == 8
    load = workload_dict(mixed)
    assert (load["new_tokens"], load["kv_length"], load["tokens"]) == ([64, 128], [100, 200], 192)
    assert workload_text(load, "H100") == (
        "mixtral-8x7b on H100: prefill, batch 2, sequence 200, new tokens 64, 128, KV length 100, 200, bf16, fused "
        "(one of 8 GPUs: 2-way tensor parallel, 4-way expert parallel)"
    )
    plain = nj.graph_from_config("gpt2", 1, 128)
    assert workload_text(workload_dict(plain)) == "gpt2: inference, batch 1, sequence 128, fp32"
    assert workload_dict(plain)["num_gpus"] == 1


def test_a_model_that_is_not_split_is_not_called_split() -> None:
    for model in ("vit-large", "bert-large"):
        with pytest.raises(nj.InputError, match="for decoders; leave"):
            nj.graph_from_config(model, 1, 128, tensor_parallel=2)


def test_two_gpus_of_one_name_are_refused(tmp_path: Path) -> None:
    for place, bandwidth in enumerate((1e12, 1e12, 2e12)):
        (tmp_path / f"{place}.yaml").write_text(f"name: mine\nbase: A100\nmem_bytes_per_s: {bandwidth:.0f}\n")
    first, same, other = (tmp_path / f"{place}.yaml" for place in range(3))
    assert list(load_named_gpus([first, same, "T4"])) == ["mine", "Tesla T4"]
    with pytest.raises(nj.InputError, match="two GPUs are called mine and differ"):
        load_named_gpus([first, other])


def test_a_split_model_costs_all_its_gpus() -> None:
    """Price of an hour x GPUs x hours of a step, by hand; tokens come from all GPUs together."""
    prices = Prices({"NVIDIA H100 80GB HBM3": 3.6}, "USD")
    split = nj.graph_from_config("llama-3.2-1b", 8, 256, "decode", "bf16", tensor_parallel=4)
    found = nj.compare(RooflinePredictor(), ["H100"], split, prices=prices)
    best = found.candidates[0]
    seconds = nj.predict(RooflinePredictor(), load_named_server("H100")[1], split).total_s
    assert best.cost_per_run == pytest.approx(4 * 3.6 / 3600 * seconds)
    assert best.cost_per_million_tokens == pytest.approx(1e6 / 8 * 4 * 3.6 / 3600 * seconds)
    assert best.tokens_per_s == pytest.approx(8 / seconds)
    assert best.price_per_hour == 3.6
    text = as_text(found, width=250)
    assert "one of 4 GPUs: 4-way tensor parallel" in text
    assert "per GPU hour USD" in text
    assert "throughput, costs and latency are of 4 GPUs at once, memory is of one" in text


def test_eager_decoders_are_said_to_be_fused(model: str, tmp_path: Path, capsys: Capture) -> None:
    assert run([*asked("predict", model, tmp_path), "--eager"]) == 0
    assert "note: split is forecast with its framework's fused kernels: --eager changes nothing" in (
        capsys.readouterr().out
    )
