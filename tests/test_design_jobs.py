"""Designs for training jobs: clusters as the machine, links and network among the free figures."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from small_configs import TINY

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.design import _base, _load
from neusight_jax.cli.options import JobOptions, WorkloadOptions
from neusight_jax.designs.answers import answer, problem
from neusight_jax.designs.cost import costs_for
from neusight_jax.designs.search import Search, Settings
from neusight_jax.job.job import Job
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.sweeps.space import Range

BASE = nj.load_cluster("16x H100")
FREE = (Range("nic_bytes_per_s", 1e9, 2e11), Range("mem_bytes_per_s", 1e12, 8e12))
ROOFLINE = RooflinePredictor()


@cache
def job() -> Job:
    layout = nj.Parallelism(tensor=2, data=8, zero=1, sequence_parallel=True)
    software = nj.Software(launch_s=1e-7, step_s=1e-6)
    return nj.job_from_config(TINY, layout, global_batch_size=16, sequence_length=512, software=software)


@cache
def search() -> Search:
    """One program for all tests."""
    asked = problem(ROOFLINE, BASE, FREE, [job()], objective="performance_per_dollar", budgets={"power_w": 2000.0})
    return Search(asked, Settings(starts=2, steps=4, rounds=2, candidates=8))


def at(nic: float, mem: float) -> np.ndarray:
    return np.log([[nic, mem]])


def test_a_design_forecasts_what_predict_does() -> None:
    for nic, mem in ((5e10, 3.35e12), (2e9, 2e12)):
        cluster = BASE.replace(
            gpu=BASE.gpu.replace(mem_bytes_per_s=mem), topology=BASE.topology.replace(nic_bytes_per_s=nic)
        )
        found = search().metrics(at(nic, mem))
        assert found[1][0, 0] == pytest.approx(nj.predict(ROOFLINE, cluster, job()).total_s, rel=1e-4)
        assert found[0]["nic_bytes_per_s"][0] == pytest.approx(nic)
    assert found[0]["tokens_per_s"][0] == pytest.approx(16 * 512 / found[1][0, 0], rel=1e-4)
    assert {"collective", "gemm"} <= found[2].keys()


def test_slopes_are_those_of_differences() -> None:
    here = at(5e9, 2e12)[0]
    slope = search().slopes(here, 0.0)[0]
    for place, step in enumerate(0.01 * np.eye(2)):
        low, high = search().values(np.stack([here - step, here + step]))[0]
        assert slope[place] == pytest.approx((high - low) / 0.02, abs=0.02), FREE[place].field


def test_a_search_trades_the_network_for_its_price() -> None:
    found = answer(search(), search().run(0))
    assert found.feasible
    assert found.objective < float(search().values(at(5e10, 3.35e12))[0][0])
    assert found.cluster is not None
    assert found.cluster.topology.nic_bytes_per_s == pytest.approx(found.free["nic_bytes_per_s"], rel=1e-5)
    content = json.loads(found.to_json())
    assert content["topology"]["nic_bytes_per_s"] == pytest.approx(found.free["nic_bytes_per_s"], rel=1e-5)
    assert content["workloads"][0]["num_gpus"] == 16
    assert "GB/s" in str(found)


def test_a_gpu_of_a_cluster_costs_its_share_of_links_and_network() -> None:
    alone, joined = (costs_for(BASE).costs(each) for each in (BASE.gpu, BASE))
    assert joined["area_mm2"] == alone["area_mm2"]
    assert float(joined["dollars"] - alone["dollars"]) == pytest.approx(450 * 5.0 + 50 * 80.0, rel=1e-3)
    assert float(joined["power_w"] - alone["power_w"]) == pytest.approx(450 * 0.1 + 50 * 1.4, rel=1e-3)


def test_a_command_line_of_a_job() -> None:
    load = WorkloadOptions(mode="training", sequence_length="512", tensor_parallel=2)
    text = "llama-3.2-1b,weight=2,zero=1,sequence_parallel=true,recompute=full"
    asked = _load(text, load, job=JobOptions(gpus=16))
    name, cluster = _base("H100", ["nic_bytes_per_s=25GB/s", "mem_bytes_per_s=3TB/s"], [asked])
    assert name.startswith("16x ")
    assert isinstance(cluster, nj.Cluster)
    assert (cluster.topology.nic_bytes_per_s, cluster.gpu.mem_bytes_per_s) == pytest.approx((25e9, 3e12))
    assert asked.weight == 2.0
    assert isinstance(asked.step, Job)
    layout = asked.step.plan.layout
    assert (layout.tensor, layout.data, layout.zero, layout.recompute) == (2, 8, 1, "full")


CLI = ("design", "llama-3.2-1b", "--base", "H100", "--mode", "training", "--sequence-length", "512", "--free")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("nic_bytes_per_s=1e10:1e11",), "a GPU has no field 'nic_bytes_per_s'"),
        (("nic_bytes_per_s=1e3:1e11", "--gpus", "16"), "nic_bytes_per_s is 1000.0, expected bytes/s of one GPU"),
        (("num_nics=1:8", "--gpus", "16"), "no field 'num_nics'"),
        (("num_sms=60:220", "--gpus", "16", "--tensor-parallel", "3"), "--gpus 16 is no multiple"),
        (("num_sms=60:220", "--zero", "1", "--mode", "inference"), "--zero: of training jobs; give --mode training"),
        (("num_sms=60:220", "--gpus", "16", "--slo", "tpot<=9ms"), "--slo is of one replica"),
    ],
)
def test_bad_commands_are_one_line(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*CLI, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_jobs_and_models_on_one_gpu_do_not_mix() -> None:
    graph = nj.graph_from_config(TINY, batch_size=1, sequence_length=16, dtype="bf16")
    with pytest.raises(nj.InputError, match="some workloads are jobs on many GPUs and others are not"):
        problem(ROOFLINE, BASE, FREE, [job(), graph])
    with pytest.raises(nj.InputError, match="the layout takes 16 GPUs"):
        problem(ROOFLINE, nj.load_cluster("8x H100"), FREE, [job()])
