"""Chakra traces of jobs: every field as ASTRA-sim reads it, and a step as long as the forecast."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("google.protobuf.proto", reason="Chakra traces need the extra `chakra`")

from google.protobuf.proto import parse_length_prefixed

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.reports.chakra import GROUP_FILE, group_members, write_chakra
from neusight_jax.reports.chakra_schema import COLLECTIVES, NODE_TYPES, messages
from neusight_jax.reports.step_layers import MESSAGES, Node
from neusight_jax.reports.step_nodes import rank_nodes

TINY = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LAYOUTS = {
    "one stage": nj.Parallelism(tensor=2, data=2),
    "1f1b": nj.Parallelism(tensor=2, pipeline=2, data=2, zero=1, sequence_parallel=True),
    "interleaved": nj.Parallelism(pipeline=2, chunks=2, context=2),
    "zero-bubble": nj.Parallelism(pipeline=2, data=2, zero=3, schedule="zero-bubble"),
}
VALUES = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "pg_name": "string_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
}
"""Fields that ASTRA-sim reads attributes from."""
BY_TYPE = {
    "COMP_NODE": {"is_cpu_op", "num_ops", "tensor_size"},
    "COMM_COLL_NODE": {"is_cpu_op", "comm_type", "comm_size", "pg_name"},
    "COMM_SEND_NODE": {"is_cpu_op", "comm_size", "comm_src", "comm_dst", "comm_tag"},
    "COMM_RECV_NODE": {"is_cpu_op", "comm_size", "comm_src", "comm_dst", "comm_tag"},
}
Nodes = dict[int, list[Any]]


def read(path: Path) -> tuple[Any, list[Any]]:
    metadata, node = messages()
    with path.open("rb") as file:
        head = parse_length_prefixed(metadata, file)
        return head, list(iter(lambda: parse_length_prefixed(node, file), None))


def values(node: Any) -> dict[str, Any]:
    """Attributes by name, each from the field that ASTRA-sim reads."""
    found = {}
    for each in node.attr:
        assert each.WhichOneof("value") == VALUES[each.name]
        found[each.name] = getattr(each, VALUES[each.name])
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Nodes, Any, Any]:
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp("chakra") / "traces"
    job = nj.job_from_config(TINY, layout, global_batch_size=8, sequence_length=2048)
    cluster, predictor = nj.load_cluster(f"{layout.gpus}x H100"), RooflinePredictor()
    written = write_chakra(folder, predictor, cluster, job)
    assert len(written) == layout.gpus + 1
    nodes = {}
    for rank in range(layout.gpus):
        (file,) = folder.glob(f"*.{rank}.et")
        head, nodes[rank] = read(file)
        assert head.version == "0.0.4"
    return nj.predict(predictor, cluster, job), nodes, json.loads((folder / GROUP_FILE).read_text()), job


def test_every_field_is_what_the_simulator_reads(step: Any) -> None:
    _, nodes, numbered, job = step
    gpus = job.plan.layout.gpus
    for rank, own in nodes.items():
        assert [node.id for node in own] == list(range(len(own)))
        for node in own:
            said = values(node)
            assert said.keys() == BY_TYPE[NODE_TYPES[node.type]]
            assert said["is_cpu_op"] is False
            if "pg_name" in said:
                assert rank in numbered[said["pg_name"]]
                assert said["comm_size"] > 0
                assert COLLECTIVES[said["comm_type"]] in ("ALL_REDUCE", "ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER")
            if "comm_tag" in said:
                sends = NODE_TYPES[node.type] == "COMM_SEND_NODE"
                assert said["comm_src" if sends else "comm_dst"] == rank
                assert 0 <= said["comm_dst" if sends else "comm_src"] < gpus


def test_what_is_sent_is_received(step: Any) -> None:
    _, nodes, _, job = step
    pairs = defaultdict(list)
    for own in nodes.values():
        for node in own:
            said = values(node)
            if "comm_tag" in said:
                key = tuple(said[name] for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                pairs[key].append(NODE_TYPES[node.type])
    assert all(sorted(each) == ["COMM_RECV_NODE", "COMM_SEND_NODE"] for each in pairs.values())
    assert bool(pairs) == (job.plan.layout.pipeline > 1 or job.plan.layout.context > 1)


def test_ranks_of_a_group_run_its_collectives_in_one_order(step: Any) -> None:
    _, nodes, numbered, _ = step
    for number, ranks in numbered.items():
        orders = [
            [
                (said["comm_type"], said["comm_size"])
                for said in map(values, nodes[rank])
                if said.get("pg_name") == number
            ]
            for rank in ranks
        ]
        assert all(each == orders[0] for each in orders)


def test_the_longest_path_is_the_forecast(step: Any) -> None:
    """Nodes need earlier ones of their rank only, and what is received what was sent: no circle, and one length."""
    found, nodes, _, _ = step
    ends: dict[tuple[int, int], int] = {}
    sent = {
        tuple(said[name] for name in ("comm_src", "comm_dst", "comm_tag")): (rank, node.id)
        for rank, own in nodes.items()
        for node in own
        for said in [values(node)]
        if NODE_TYPES[node.type] == "COMM_SEND_NODE"
    }

    def needs(rank: int, node: Any) -> list[tuple[int, int]]:
        assert all(each < node.id for each in (*node.data_deps, *node.ctrl_deps))
        own = [(rank, each) for each in node.data_deps]
        if NODE_TYPES[node.type] != "COMM_RECV_NODE":
            return own
        said = values(node)
        source = sent[tuple(said[name] for name in ("comm_src", "comm_dst", "comm_tag"))]
        return [*own, *((source[0], each) for each in nodes[source[0]][source[1]].data_deps)]

    waiting = {
        (rank, node.id): (needs(rank, node), node.duration_micros) for rank, own in nodes.items() for node in own
    }
    while waiting:
        ready = [key for key, (before, _) in waiting.items() if all(each in ends for each in before)]
        assert ready, "a circle"
        for key in ready:
            before, micros = waiting.pop(key)
            ends[key] = max((ends[each] for each in before), default=0) + micros
    assert max(ends.values()) == pytest.approx(found.total_s * 1e6, rel=1e-6, abs=1)


def test_work_is_that_of_the_job(step: Any) -> None:
    """FLOP of a micro-batch's forward pass by hand: 2 a parameter of every product and token, and attention."""
    _, nodes, _, job = step
    layout = job.plan.layout
    flop = sum(
        values(node)["num_ops"]
        for own in nodes.values()
        for node in own
        if NODE_TYPES[node.type] == "COMP_NODE" and node.name.startswith("forward")
    )
    hidden, inner, width = 512, 1024, 512 + 2 * 256
    layer = 2.0 * (hidden * width + hidden * hidden + 3 * hidden * inner)
    products = 4 * layer + 2.0 * hidden * 1024
    attention = 4 * 4.0 * 2048 * hidden
    tokens = 8 * 2048
    assert products * tokens * 0.99 < flop < (products + attention) * tokens * 1.3
    assert len(nodes) == layout.gpus


def replayed(ranks: list[list[Node]], scale: float) -> float:
    """When a step ends whose messages take so many times as long, and wait for nothing but what they depend on."""
    ends: dict[tuple[int, int], float] = {}
    sent: dict[tuple[int, int, int], float] = {}
    at = [0] * len(ranks)
    while any(place < len(nodes) for place, nodes in zip(at, ranks, strict=True)):
        before = list(at)
        for rank, nodes in enumerate(ranks):
            for number, node in enumerate(nodes[at[rank] :], at[rank]):
                start_s = max((ends[rank, dep] for dep in node.deps), default=0.0)
                if node.peer >= 0 and node.kind == "receive":
                    if (node.peer, rank, node.tag) not in sent:
                        break
                    start_s = sent[node.peer, rank, node.tag]
                elif node.peer >= 0:
                    sent[rank, node.peer, node.tag] = start_s
                seconds = node.end_s - node.start_s
                ends[rank, number] = start_s + seconds * (scale if node.kind in MESSAGES else 1.0)
                at[rank] = number + 1
        assert at != before, "a circle"
    return max(ends.values())


OTHER_LINKS: dict[str, tuple[str, nj.Parallelism, int]] = {
    "FSDP": ("llama-3.1-8b", nj.Parallelism(data=8, zero=3), 8),
    "1f1b": ("llama-3.1-8b", nj.Parallelism(tensor=4, pipeline=2, data=2, zero=1, sequence_parallel=True), 16),
    "interleaved": ("llama-3.1-8b", nj.Parallelism(pipeline=2, chunks=2, data=4, zero=1), 32),
    "context": ("llama-3.1-8b", nj.Parallelism(context=4, data=2, zero=3), 8),
    "experts": ("mixtral-8x7b", nj.Parallelism(expert=4, data=4, pipeline=2, zero=1), 16),
}


@pytest.mark.parametrize("name", OTHER_LINKS)
def test_what_hides_on_other_links(name: str) -> None:
    """Messages twice or half as long, replayed, take the step as long as its own forecast says: what hides does so
    because nothing waits for it. With one node a kind of message and piece it was up to 8 % off."""
    model, layout, batch = OTHER_LINKS[name]
    job = nj.job_from_config(model, layout, global_batch_size=batch, sequence_length=4096)
    cluster, predictor = nj.load_cluster(f"{layout.gpus}x H100"), RooflinePredictor()
    total_s = nj.predict(predictor, cluster, job).total_s
    for most in (1e6, 40.0):
        ranks = rank_nodes(predictor, cluster, job, most)
        assert replayed(ranks, 1.0) == pytest.approx(total_s, rel=1e-6)
        for scale in (0.5, 2.0):
            slower = dataclasses.replace(job.software, messages=float(np.asarray(job.software.messages)) * scale)
            other_s = nj.predict(predictor, cluster, job.replace(software=slower)).total_s
            assert replayed(ranks, scale) == pytest.approx(other_s, rel=0.03)
            assert abs(other_s / total_s - 1.0) > 0.003


def test_messages_are_sent_layer_by_layer() -> None:
    """FSDP gathers layer by layer, one ahead of what needs it; tensor parallelism sums twice a layer, each way."""
    cluster, predictor = nj.load_cluster("4x H100"), RooflinePredictor()
    job = nj.job_from_config(TINY, nj.Parallelism(data=4, zero=3), global_batch_size=4, sequence_length=2048)
    [nodes] = rank_nodes(predictor, cluster, job, 1e6)
    gathers = [at for at, node in enumerate(nodes) if node.name.startswith("forward") and "gather" in node.name]
    bytes_sent = sum(nodes[at].bytes for at in gathers)
    payload = next(each.payload_bytes for _, each in job.plan.messages if each.slot == "gather")
    assert bytes_sent == pytest.approx(4 * payload / 4)  # of four layers, what one of four ranks brings along
    layers = {nodes[at].name.rpartition("layer ")[2] for at in gathers}
    assert layers == {"0", "1", "2"}
    first = next(at for at, node in enumerate(nodes) if node.kind == "compute")
    assert gathers[:2] == [0, 1]
    assert (nodes[1].deps, nodes[first].deps) == ((0,), (1,))
    assert any(nodes[at].deps == (first,) for at in gathers)  # the next layer's, beside this one
    split = nj.job_from_config(TINY, nj.Parallelism(tensor=4), global_batch_size=1, sequence_length=2048)
    [nodes] = rank_nodes(predictor, cluster, split, 1e6)
    sums = [node for node in nodes if node.kind == "collective" and node.bytes == 2 * 2048 * 512]
    assert len(sums) == 2 * (2 * 4 + 1)


def test_a_capped_machine_is_exported_as_it_runs() -> None:
    job = nj.job_from_config(TINY, nj.Parallelism(data=4), global_batch_size=16, sequence_length=2048)
    cluster, predictor = nj.load_cluster("4x H100"), nj.load_predictor("tensorcore")
    capped = cluster.replace(gpu=cluster.gpu.replace(clock_limit_hz=1.0e9))
    total_s = nj.predict(predictor, capped, job).total_s
    assert total_s > 1.02 * nj.predict(predictor, cluster, job).total_s
    [nodes] = rank_nodes(predictor, capped, job, 1e6)
    assert max(node.end_s for node in nodes) == pytest.approx(total_s, rel=1e-6)


def test_large_jobs_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring layers are together where there would be more nodes than `MOST_NODES`; the step takes as long."""
    layout = nj.Parallelism(tensor=2, pipeline=2, data=2, zero=1)
    job = nj.job_from_config("llama-3.1-8b", layout, global_batch_size=16, sequence_length=512)
    cluster, predictor = nj.load_cluster("8x H100"), RooflinePredictor()
    sizes = []
    for most in (1_000_000, 800):
        monkeypatch.setattr("neusight_jax.reports.chakra.MOST_NODES", most)
        files = write_chakra(tmp_path / str(most), predictor, cluster, job)
        sizes.append(sum(file.stat().st_size for file in files))
    assert sizes[1] < 0.2 * sizes[0]


def test_groups() -> None:
    layout = nj.Parallelism(tensor=2, data=4, pipeline=2, expert=4)
    found = group_members(layout)
    assert found["tensor"][0] == [0, 1]
    assert found["data"][0] == [0, 2, 4, 6]
    assert found["expert"][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found["expert_data"][0] == [0, 4]
    assert found["pipeline"][0] == [0, 8]
    assert "context" in found
    assert found["context"] == []


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert run(["predict", "bert-tiny", "--gpu", "H100", "--chakra", str(tmp_path / "out")]) == 2
    assert "--chakra writes training jobs; give --mode training" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    messages.cache_clear()
    with pytest.raises(nj.InputError, match=r"pip install '\.\[chakra\]'"):
        messages()
