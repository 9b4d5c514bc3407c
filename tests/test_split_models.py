"""Models split over GPUs by tensor and expert parallelism: their sums cost time, in every command that forecasts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.hardware.files import load_named_server
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.kernels.table import Kernel
from neusight_jax.serving.steps import HEAD, axes, load_model, points

LAYERS, HIDDEN = 3, 512
DENSE = {
    **{"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096},
}
ROUTED = {**DENSE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DECODE = ("--mode", "decode", "--batch-size", "4", "--sequence-length", "256", "--tensor-parallel", "4")


def sums(graph: Graph) -> dict[tuple[float, float], float]:
    """How many tensors are summed, by bytes and ranks."""
    [node] = [node for node in graph.nodes if node.op == "all_reduce"]
    return {(kernel.dims["bytes"], kernel.dims["ranks"]): kernel.count for kernel in node.forward}


def test_every_block_and_the_embedding_are_summed() -> None:
    size = 4 * HIDDEN * 2.0
    assert sums(nj.graph_from_config(DENSE, 4, 256, "decode", tensor_parallel=4)) == {(size, 4.0): 2 * LAYERS + 1}
    routed = nj.graph_from_config(ROUTED, 4, 256, "decode", tensor_parallel=2, expert_parallel=4)
    assert sums(routed) == {(size, 2.0): LAYERS + 1, (size, 8.0): LAYERS}
    experts = nj.graph_from_config(ROUTED, 4, 256, "decode", expert_parallel=4)
    assert sums(experts) == {(size, 4.0): LAYERS}
    whole = nj.graph_from_config(DENSE, 4, 256, "decode")
    assert not any(node.op == "all_reduce" for node in whole.nodes)


def test_ranks_beyond_a_domain_cross_it() -> None:
    graph = nj.graph_from_config(DENSE, 4, 256, "decode", tensor_parallel=4)

    def domains(gpus_per_domain: int) -> float:
        [node] = [node for node in graph.on((), gpus_per_domain).nodes if node.op == "all_reduce"]
        return node.forward[0].dims["domains"]

    assert [domains(size) for size in (0, 2, 3, 4, 8)] == [1, 2, 2, 1, 1]


def test_training_over_several_gpus_is_a_job() -> None:
    with pytest.raises(nj.InputError, match=r"is a job; expected job_from_config"):
        nj.graph_from_config(DENSE, 4, 256, "training", tensor_parallel=4)


@pytest.mark.parametrize("config", [DENSE, ROUTED])
def test_a_split_step_launches_what_a_server_does(config: dict[str, Any]) -> None:
    """A decode step of 4 requests at 512 tokens: as `serve` writes it, and as `predict` does."""
    grid = axes(1024, 64, 8)
    written = points(load_model(config, "bf16"), Parallelism(tensor=4), grid)
    batch, context = grid.batches.index(4), grid.contexts.index(512)
    bodies, heads = len(grid.batches) + 2 * len(grid.tokens), len(grid.batches)
    decode = bodies + heads + batch * len(grid.contexts) + context
    served = [each for at in (batch, bodies + batch, decode) for each in written[at]]
    graph = nj.graph_from_config(config, 4, 512, "decode", "bf16", tensor_parallel=4)

    def launches(kernels: Iterable[tuple[Kernel, float]]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for kernel, times in kernels:
            found[kernel.family, kernel.op, tuple(sorted(kernel.dims.items()))] += kernel.count * times
        return found

    own = launches((kernel, node.repeat) for node in graph.nodes for kernel in node.forward)
    assert {key: pytest.approx(count) for key, count in launches(served).items()} == dict(own)
    assert any(node.name in HEAD for node in graph.nodes if isinstance(node, Node))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A decoder, and clusters whose links are one and two times those of an H100."""
    monkeypatch.chdir(tmp_path)
    Path("dense.json").write_text(json.dumps(DENSE))
    for name, rate in (("usual", 4.5e11), ("twice", 9e11)):
        topology = {"node": "DGX H100", "link_bytes_per_s": rate, "switch_reduction": 0}
        Path(f"{name}.json").write_text(json.dumps({"gpu": "H100", "count": 8, "topology": topology}))
    return "dense.json"


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([*words, "--checkpoint", "tensorcore", "--json"]) == 0, capsys.readouterr().err
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_faster_links_are_worth_something_everywhere(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    wide = ("--mode", "prefill", "--batch-size", "8", "--sequence-length", "2048", "--tensor-parallel", "4")
    times = [asked(capsys, "predict", model, "--cluster", f"{name}.json", *wide) for name in ("usual", "twice")]
    assert times[1]["total_s"] < 0.95 * times[0]["total_s"]
    assert times[0]["family_s"]["collective"] > 0.05 * times[0]["total_s"]
    slopes = asked(capsys, "sensitivity", model, "--gpu", "H100", *wide)
    assert slopes["total"]["link_bytes_per_s"] < -0.03
    free = ("--free", "link_bytes_per_s=4e11:9e11", "--starts", "1", "--steps", "1", "--rounds", "2")
    best = asked(capsys, "design", model, "--base", "H100", *free, *wide)
    assert best["gpu"]["link_bytes_per_s"] == pytest.approx(9e11, rel=1e-3)
    swept = ("--gpu", "H100", "--grid", "link_bytes_per_s=2e11:8e11:2", "--output", "o.parquet")
    asked(capsys, "sweep", model, *swept, *wide)
    slow, fast = pq.read_table("o.parquet").to_pydict()["seconds"]
    assert fast < 0.95 * slow


def test_all_commands_agree_on_a_split_step(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` and a sweep take a GPU by its figures alone; `predict` and `sensitivity` by what was measured of it."""
    compared = asked(capsys, "compare", model, "--gpu", "H100", "A100", *DECODE)
    [h100] = [item["latency_s"] for item in compared["gpus"] if "H100" in item["gpu"]]
    grid = ("--gpu", "H100", "--grid", "mem_bytes_per_s=3.35e12:3.36e12:2", "--output", "o.parquet")
    asked(capsys, "sweep", model, *grid, *DECODE)
    assert pq.read_table("o.parquet").to_pydict()["seconds"][0] == pytest.approx(h100, rel=1e-5)
    measured = asked(capsys, "predict", model, "--gpu", "H100", *DECODE)["total_s"]
    assert asked(capsys, "sensitivity", model, "--gpu", "H100", *DECODE)["total_s"] == pytest.approx(measured, rel=1e-5)


def test_a_gradient_reaches_the_link() -> None:
    predictor = nj.load_predictor("tensorcore")
    graph = nj.graph_from_config(DENSE, 8, 2048, "prefill", "bf16", tensor_parallel=4)
    _, server = load_named_server("H100")
    slopes = jax.grad(nj.latency, argnums=1)(predictor, server, graph.kernels)
    assert float(np.asarray(slopes.topology.link_bytes_per_s)) < 0.0
    assert nj.predict(predictor, server, graph).total_s == pytest.approx(
        float(nj.latency(predictor, server, graph.kernels)), rel=1e-5
    )
