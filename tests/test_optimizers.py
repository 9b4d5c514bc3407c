"""Optimizer steps: what they add to a training graph, and that nothing changes without one."""

from __future__ import annotations

import pytest

from neusight_jax import (
    InputError,
    Parallelism,
    graph_from_config,
    job_from_config,
    load_cluster,
    load_gpu,
    load_predictor,
    predict,
)
from neusight_jax.graph.optimizers import OPTIMIZERS, optimizer_kernels
from neusight_jax.kernels.table import table_from_kernels
from neusight_jax.model.latency import predict_kernels

SIZES = {"batch_size": 1, "sequence_length": 512, "mode": "training", "dtype": "bf16"}


def test_an_optimizer_adds_one_phase_and_nothing_else() -> None:
    plain, full = (graph_from_config("llama-3.2-1b", **SIZES, optimizer=name) for name in (None, "adamw"))
    assert full.nodes[:-1] == plain.nodes
    assert full.nodes[-1].optimizer
    predictor, gpu = load_predictor("tensorcore"), load_gpu("NVIDIA H200")
    before, after = predict(predictor, gpu, plain), predict(predictor, gpu, full)
    assert before.optimizer_s == 0.0
    assert "optimizer_s" not in before.to_dict()
    assert after.total_s == pytest.approx(before.total_s + after.optimizer_s + after.fixed_s, rel=1e-5)
    assert after.to_dict()["workload"]["optimizer"] == "adamw"


def test_fused_adamw_updates_as_many_parameters_a_second_as_measured() -> None:
    """Measured with PyTorch on an H200: 105e9 parameters a second in fp32 and bf16."""
    kernels = optimizer_kernels("adamw", 8e9, tensor_cores=True)
    seconds = predict_kernels(load_predictor("tensorcore"), load_gpu("NVIDIA H200"), table_from_kernels(kernels))
    assert 8e9 / (kernels[0].count * float(seconds[0])) == pytest.approx(105e9, rel=0.05)


def test_states_are_in_the_memory() -> None:
    held = {name: graph_from_config("llama-3.2-1b", **SIZES, optimizer=name) for name in OPTIMIZERS}
    bytes_of = {name: graph.footprint.optimizer / graph.parameters for name, graph in held.items()}  # type: ignore
    assert bytes_of["adamw"] == 12.0
    assert bytes_of["sgd"] == 4.0
    assert bytes_of["adamw-8bit"] == 6.0
    assert bytes_of["lion"] == bytes_of["muon"] == 8.0
    assert bytes_of["adafactor"] == 4.0  # its row and its column are nothing beside the copy of the weights


def test_updates_take_what_they_move() -> None:
    """Lion moves what SGD with momentum does, in as many kernels as tensors; Adafactor passes over all six times."""
    predictor, gpu = load_predictor("tensorcore"), load_gpu("NVIDIA H200")

    def seconds(name: str) -> float:
        kernels = optimizer_kernels(name, 8e9, tensor_cores=True)
        return kernels[0].count * float(predict_kernels(predictor, gpu, table_from_kernels(kernels))[0])

    assert seconds("lion") == pytest.approx(seconds("sgd-momentum"), rel=0.2)
    assert 1.5 < seconds("adafactor") / seconds("adamw") < 2.5


def test_muon_orthogonalizes_every_matrix() -> None:
    """Five steps of 4 m² n + 2 m³ FLOP of each matrix as it is stored, of all 16 layers; the tables are AdamW's."""
    plain, full = (graph_from_config("llama-3.2-1b", **SIZES, optimizer=name) for name in ("sgd-momentum", "muon"))
    matrices = [(2048, 3072), (2048, 2048), (2048, 16384), (2048, 8192)]  # QKV, output, gate and up, down
    wanted = 16 * sum(5 * (4 * m**2 * n + 2 * m**3) for m, n in matrices)
    products = [kernel for kernel in full.nodes[-1].optimizer if kernel.family in ("linear", "bmm")]
    found = sum(
        2 * kernel.count * kernel.dims["batch"] * kernel.dims["m"] * kernel.dims["n"] * kernel.dims["k"]
        for kernel in products
    )
    assert found == pytest.approx(wanted)
    predictor, gpu = load_predictor("tensorcore"), load_gpu("NVIDIA H200")
    added = predict(predictor, gpu, full).optimizer_s - predict(predictor, gpu, plain).optimizer_s
    assert added > found / float(gpu.bf16_flop_per_s)


def test_ranks_share_the_matrices_that_muon_orthogonalizes() -> None:
    """Ranks that share states share the products; experts are shared by those that hold the same ones."""
    predictor, cluster = load_predictor("tensorcore"), load_cluster("8x H200")
    sizes = {"global_batch_size": 8, "sequence_length": 1024, "optimizer": "muon"}

    def seconds(**split: int) -> float:
        step = predict(predictor, cluster, job_from_config("qwen3-30b-a3b", Parallelism(data=8, **split), **sizes))
        return float(step.optimizer_s)

    every = seconds(zero=0)
    assert seconds(zero=1) == pytest.approx(every / 8, rel=0.1)
    assert seconds(zero=0, expert=8) < every / 4
    assert seconds(zero=1, expert=8) == pytest.approx(every / 8, rel=0.1)


def test_bad_optimizers_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown optimizer 'adam2'.*adamw"):
        graph_from_config("gpt2", mode="training", optimizer="adam2")
    with pytest.raises(InputError, match="mode is inference; an optimizer goes with mode training"):
        graph_from_config("gpt2", optimizer="adamw")
