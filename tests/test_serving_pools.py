"""Separate replicas for prompts and answers, step times for Vidur, and slopes of loads that an engine runs."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.hardware.cluster import as_cluster
from neusight_jax.hardware.prices import Prices
from neusight_jax.job.parallelism import Parallelism
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.model.programs import one_shot
from neusight_jax.serving import slopes, under_load
from neusight_jax.serving.choices import Load
from neusight_jax.serving.layouts import Capacity, Replica
from neusight_jax.serving.pools import disaggregated, fewest, link_bytes_per_s, pools
from neusight_jax.serving.simulators import ExecutionTimePredictor, Prefill, Run
from neusight_jax.serving.steady import Demand, Lengths, Steady, demand
from neusight_jax.serving.steps import axes, load_model
from neusight_jax.serving.times import Engine, Options, Times

GRID = axes(2048, 1024, 64)
LENGTHS, OPTIONS = Lengths(1000, 101), Options(chunk_tokens=1024, max_batch=64)
RUN = one_shot(pools)


FREE = Engine(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def times(engine: Engine = FREE) -> Times:
    """10 ms a decode step and 0.1 ms for every request, 20 ms for a thousand tokens of a prompt."""
    tables = {name: jnp.full(shape, 1e-9) for name, shape in GRID.shapes().items()}
    tables["decode_body"] = 1e-2 + 1e-4 * jnp.asarray(GRID.batches, float)
    tables["prefill_body"] = 2e-5 * jnp.asarray(GRID.tokens, float)
    return Times(tables, engine, GRID)


def at(load: float, first: float = 1.0, after: float = 1.0, sent: float = 0.0, **changes: Any) -> Steady:
    asked: Demand = demand(LENGTHS, OPTIONS, poisson=changes.get("poisson", False))
    return RUN(times(), times(), asked, load, sent, 64.0, first, after)


def test_one_request_waits_for_nothing() -> None:
    found = at(1.0, sent=0.5)
    assert float(found.ttft_s) == pytest.approx(0.52, rel=1e-3)
    assert float(found.tpot_s) == pytest.approx(0.0101, rel=1e-3)
    assert float(found.rate) == pytest.approx(1.0 / (0.52 + 1.01), rel=1e-3)


def test_littles_law_and_pools_of_their_own() -> None:
    found = at(32.0)
    life = found.ttft_s + 100.0 * found.tpot_s
    assert float(found.rate * life) == pytest.approx(32.0, rel=1e-3)
    more, wider = at(32.0, first=4.0), at(32.0, after=4.0)
    assert float(more.ttft_s) < float(found.ttft_s)
    assert float(wider.tpot_s) < float(found.tpot_s)
    assert float(at(4.0, poisson=True).rate) == pytest.approx(4.0)
    assert math.isinf(float(at(400.0, poisson=True).ttft_s))


def test_more_than_decode_at_once_wait() -> None:
    full = at(640.0, first=100.0)
    assert float(full.batch) == pytest.approx(64.0)
    assert float(full.ttft_s) > 5.0


@pytest.mark.parametrize("guess", [(1, 1), (9, 2), (40, 40)])
def test_the_fewest_of_both(guess: tuple[int, int]) -> None:
    def first(prefill: int, decode: int) -> bool:
        return prefill >= 5

    def after(prefill: int, decode: int) -> bool:
        return decode >= 13

    assert fewest(first, after, lambda *each: True, guess) == (5, 13)
    assert fewest(first, after, lambda prefill, decode: prefill + decode < 18, guess) is None
    assert fewest(lambda *each: False, after, lambda prefill, decode: prefill < 99, guess) is None


def test_an_answer_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = load_model(TINY, "bf16"), nj.load_cluster("1x H100")
    memory = Capacity(1e9, 1e8, 1e9, 6e10, 1e8, 8e10)
    replica = Replica("H100", Parallelism(), OPTIONS, memory, (times(),) * 3, 64.0)
    prices = Prices({"H100": 2.0})
    load = Load(LENGTHS, 200.0, None, ttft_s=0.2, tpot_s=0.0135)
    (found,) = disaggregated([replica], {"H100": cluster}, model, load, prices)
    assert found.replicas in range(5, 9)  # 35 requests at once take 13.5 ms a step
    assert found.gpus == found.prefill["replicas"] + found.replicas
    assert found.ttft_s["p95"] <= 0.2
    assert found.tpot_s["p95"] <= 0.0135
    assert found.max_users is not None
    assert found.max_users >= 200
    assert found.costs["per_hour"] == 2.0 * found.gpus
    both = found.costs["input"] * 1000 + found.costs["output"] * 101
    assert both == pytest.approx(found.costs["tokens"] * 1101)
    sent = 4 * 2 * 8 * 64 * 2 * 1000
    assert found.prefill["transfer_s"] == pytest.approx(sent / link_bytes_per_s(cluster, 100), rel=0.01)
    # An engine that runs it is told the same transfer, and has as many replicas of each.
    runs: list[tuple[int, Prefill]] = []

    def engine_run(*_: Any, workers: int, prefill: Prefill, **__: Any) -> Run:
        runs.append((workers, prefill))
        return Run({"p50": 0.1, "p95": 0.1}, {"p50": 0.01, "p95": 0.01 if workers >= found.replicas else 1.0}, 9.0, 0.0)

    monkeypatch.setattr(under_load, "run", engine_run)
    tried = {("H100", replica.layout): replica}
    (measured,) = under_load.under_load([found], tried, {"H100": cluster}, model, load, None)
    assert (measured.replicas, measured.prefill["replicas"]) == (found.replicas, 1)
    prefill = runs[0][1]
    assert prefill.token_bytes * 1000 / prefill.bytes_per_s == pytest.approx(found.prefill["transfer_s"], rel=0.01)
    # Another type of GPU beside it: also prompts on either and answers on the other, over the slower network.
    other = dataclasses.replace(replica, gpu="L40S", times=(times(FREE.replace(kernels=2.0)),) * 3)
    clusters = {"H100": cluster, "L40S": nj.load_cluster("1x L40S")}
    prices = Prices({"H100": 2.0, "L40S": 0.5})
    loose = dataclasses.replace(load, ttft_s=0.5, tpot_s=0.04)
    answers = {each.machine: each for each in disaggregated([replica, other], clusters, model, loose, prices)}
    assert set(answers) == {"H100", "L40S", "H100 + L40S", "L40S + H100"}
    mixed = answers["H100 + L40S"]
    assert mixed.gpus == mixed.prefill["replicas"] + mixed.replicas
    assert mixed.costs["per_hour"] == 2.0 * mixed.prefill["replicas"] + 0.5 * mixed.replicas
    network = min(float(np.asarray(each.topology.crossing_bytes_per_s)) for each in clusters.values())
    assert mixed.prefill["transfer_s"] == pytest.approx(sent / network, rel=0.01)
    # Answers that take longer ask for prompts less often.
    assert mixed.prefill["replicas"] <= answers["H100"].prefill["replicas"]
    few = dataclasses.replace(loose, max_gpus=mixed.replicas)  # of one type
    assert "H100 + L40S" in [each.machine for each in disaggregated([replica, other], clusters, model, few, prices)]
    tried = {(each.gpu, each.layout): each for each in (replica, other)}
    (measured,) = under_load.under_load([mixed], tried, clusters, model, loose, None, prices)
    counts = measured.prefill["replicas"], measured.replicas
    assert measured.costs["per_hour"] == 2.0 * counts[0] + 0.5 * counts[1]
    none = dataclasses.replace(load, ttft_s=0.01)
    assert disaggregated([replica], {"H100": cluster}, model, none, prices) == []


def test_links_within_and_between_servers() -> None:
    cluster = nj.load_cluster("16x H100")
    assert link_bytes_per_s(cluster, 8) == float(np.asarray(cluster.topology.link_bytes_per_s))
    assert link_bytes_per_s(cluster, 9) == pytest.approx(float(np.asarray(cluster.topology.nic_bytes_per_s)))


def test_a_batch_as_it_is() -> None:
    """Against the step of so many requests and one chunk; the first row is two requests that decode."""
    own = times(Engine(1e-3, 1e-4, 0.0, 0.0, 1.0, 1.0, 0.0))
    queries = np.array([[1, 1, 0], [1, 512, 0], [300, 212, 0]])
    held = np.array([[500, 500, 0], [500, 128, 0], [0, 0, 0]])
    steps = np.array([[2, 501, 0, 0], [1, 501, 512, 128], [0, 1, 512, 0]], np.float32)
    found = jax.jit(jax.vmap(own.batch_s))(queries, held)
    expected = jax.jit(jax.vmap(own.step_s))(*steps.T)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_step_times_for_vidur() -> None:
    predictor = ExecutionTimePredictor(times())
    assert predictor.step_s([1] * 20, [100] * 20) == pytest.approx(0.012, rel=0.02)
    for queries, context in (([1, 2], [1]), ([0], [1]), ([5], [3])):
        with pytest.raises(nj.InputError, match="queries and context"):
            predictor.step_s(queries, context)
    with pytest.raises(nj.InputError, match="expected 0"):
        predictor.get_execution_time(SimpleNamespace(), 1)
    pytest.importorskip("vidur._native.entities", reason="vidur is not installed")
    batch = SimpleNamespace(num_q_tokens=[1, 512], num_kv_tokens=[501, 640])
    found = predictor.get_execution_time(batch, 0)
    assert found.total_time == pytest.approx(predictor.step_s([1, 512], [501, 640]))


def test_slopes_of_what_an_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine whose times go as the memory's to the power -1 and the link's to the power -1/2."""
    monkeypatch.setattr(slopes, "bounded_times", lambda predictor, machine, steps, engine: (machine,))

    def run(machine: Any) -> Run:
        memory, link = float(machine.gpu.mem_bytes_per_s), float(machine.topology.link_bytes_per_s)
        return Run({"p50": 1.0 / memory}, {"p50": link**-0.5}, 1.0, 0.0)

    args: Any = RooflinePredictor(), as_cluster(nj.load_gpu("H100")), None, Engine(), run
    found = slopes.run_elasticities(*args, ["mem_bytes_per_s", "link_bytes_per_s"])
    assert found["mem_bytes_per_s"] == pytest.approx({"ttft_s": -1.0, "tpot_s": 0.0})
    assert found["link_bytes_per_s"] == pytest.approx({"ttft_s": 0.0, "tpot_s": -0.5})
    with pytest.raises(nj.InputError, match="wings is no figure of this machine"):
        slopes.run_elasticities(*args, ["wings"])
