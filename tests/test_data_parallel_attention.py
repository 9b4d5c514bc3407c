"""Replicas whose ranks hold requests of their own and share the experts: what a rank runs and keeps, and answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_configs import DECODERS, TINY

import neusight_jax as nj
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.graph import Node
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.serving.layouts import Ranks, capacity, layouts
from neusight_jax.serving.steps import Model, _step, axes, load_model, steps
from neusight_jax.serving.times import Engine, Options, Times, times

RANKS = 4
SHARED = Parallelism(data=RANKS, expert=RANKS)
GRID = axes(512, 256, 32)
FREE = Engine(step_s=0.0, sequence_s=0.0, request_s=0.0, first_steps=0.0, kernels=1.0, experts=1.0, wave=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(DECODERS["qwen3_moe"], "bf16")


def nodes(model: Model, layout: Parallelism, requests: int) -> dict[str, Node]:
    return {node.name: node for node in _step(model, Requests((1,) * requests, (128,) * requests), layout).nodes}


def step_times(model: Model, layout: Parallelism) -> Times:
    cluster = nj.load_cluster(f"{layout.gpus}x H100")
    return times(RooflinePredictor(), cluster, steps(model, layout, 8, tuple(cluster.gpu.paths), GRID), FREE)


def test_a_rank_attends_alone_and_its_experts_meet_the_tokens_of_all(model: Model) -> None:
    alone, shared = nodes(model, Parallelism(), 8), nodes(model, SHARED, 8)
    attention = [name for name in alone if "attention" in name]
    assert attention
    assert all(shared[name].forward == alone[name].forward for name in attention)
    (one,), (own,) = (each["layer.mlp.experts"].forward for each in (alone, shared))
    # As many rows on average: four times the tokens, a quarter of the experts.
    assert own.dims["tokens"] == RANKS * one.dims["tokens"]
    assert own.dims["rows"] == pytest.approx(one.dims["rows"])
    assert nodes(model, Parallelism(data=RANKS), 8)["layer.mlp.experts"].forward[0].dims["inner"] == 64 / RANKS


def test_tokens_are_gathered_before_experts_and_scattered_after(model: Model) -> None:
    shared = nodes(model, SHARED, 8)
    assert "tensor_parallel" not in shared
    for op in ("all_gather", "reduce_scatter"):
        (message,) = shared[f"experts.{op}"].forward
        assert (message.op, message.count, message.dims["ranks"]) == (op, 6, RANKS)  # once in each of six layers
        assert message.dims["bytes"] == RANKS * 8 * 256 * 2  # ranks, tokens of each, hidden, bytes
    both = nodes(model, Parallelism(tensor=2, data=2, expert=4), 8)
    assert both["tensor_parallel"].forward[0].count == 1 + 6  # after the embedding and attention
    assert both["experts.all_gather"].forward[0].dims["ranks"] == 4


def test_a_step_is_that_of_the_fullest_rank(model: Model) -> None:
    own = step_times(model, SHARED)
    one = Times(own.tables, FREE, own.axes)  # of one rank of them
    for batch in (RANKS, 4 * RANKS, 8 * RANKS):
        expected = one.step_s(batch / RANKS, 256.0)
        np.testing.assert_allclose(own.step_s(float(batch), 256.0), expected, rtol=1e-5)
    np.testing.assert_allclose(own.step_s(2.0, 256.0), own.step_s(float(RANKS), 256.0), rtol=1e-6)
    # Four prompts run beside each other, and their experts meet four times the tokens of one.
    alone, together = (float(own.step_s(0.0, 1.0, 256.0, prompts=count)) for count in (1.0, float(RANKS)))
    assert alone < together < 1.5 * alone
    assert float(own.step_s(0.0, 1.0, 256.0, prompts=2.0 * RANKS)) > 1.2 * together
    # A batch of requests as they are: the same as a step of so many.
    queries, held = np.array([1.0] * 8 + [0.0] * 8), np.array([255.0] * 8 + [0.0] * 8)
    np.testing.assert_allclose(own.batch_s(queries, held), own.step_s(8.0, 256.0), rtol=1e-5)


def test_each_rank_keeps_the_whole_cache_of_its_requests(model: Model) -> None:
    options = Options(chunk_tokens=256, max_batch=32)
    whole, shared = (capacity(model, layout, 80e9, options, 256) for layout in (Parallelism(), SHARED))
    assert shared.request_bytes == whole.request_bytes
    assert shared.requests == pytest.approx(RANKS * shared.cache_bytes / shared.request_bytes)
    assert shared.most(32) == RANKS * 32
    assert shared.weights < whole.weights
    assert "attention_ranks" not in shared.parts


def served(config: dict[str, Any] = DECODERS["qwen3_moe"], **changes: Any) -> Any:
    asked: dict[str, Any] = {"input_tokens": 256, "output_tokens": 128, "users": 64, "method": "estimate"}
    asked |= {"tensor_parallel": [1], "dtypes": {"dtype": "bf16"}, "options": {"max_batch": 32, "chunk_tokens": 256}}
    return nj.serve(RooflinePredictor(), ["H100"], config, **{**asked, **changes})


def test_an_answer_with_pools() -> None:
    answer = served(data_parallel=[1, RANKS], disaggregated=True)
    choices = {(choice.data, choice.expert, bool(choice.prefill)): choice for choice in answer.choices}
    assert {(1, 1, False), (RANKS, 1, False), (RANKS, RANKS, False)} <= set(choices)
    choice = choices[RANKS, RANKS, False]
    assert choice.gpus == RANKS * choice.replicas
    assert f"--data-parallel-size {RANKS} --enable-expert-parallel" in choice.command
    assert f"x TP1 DP{RANKS} EP{RANKS}" in str(served(data_parallel=[RANKS], expert_parallel=[RANKS]))
    pair = next(choice for choice in answer.choices if choice.prefill)
    assert {"gpu", "tensor", "expert", "data", "replicas", "transfer_s"} == set(pair.prefill)


def test_refusals(model: Model) -> None:
    with pytest.raises(nj.InputError, match="has no experts that ranks could share; leave it out"):
        served(TINY, data_parallel=[2])
    with pytest.raises(nj.InputError, match="has no data-parallel attention; leave data_parallel out, or method"):
        served(data_parallel=[2], method="engine")
    with pytest.raises(nj.InputError, match="expected 1 or as many as all of them"):
        layouts(model, nj.load_cluster("8x H100"), Ranks((1,), (2,), (4,)))
