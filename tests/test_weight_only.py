"""Weights narrower than their products: dtypes beside a config, GPUs without a path, bytes and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from predictors import random_predictor
from quantized import (
    AWQ,
    DENSE,
    LAYERS,
    LINEAR,
    SECTIONS,
    graph,
    grouped,
    products,
    told,
)

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.forecast import Forecast
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.kernel import matrix_product
from neusight_jax.graph.memory import footprint
from neusight_jax.kernels.family import WEIGHT_SHARE
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.latency import in_row_order, kernel_forecasts, on_device
from neusight_jax.model.predictor import load_baseline

EXPLAINED = jax.jit(lambda predictor, gpu, table: kernel_forecasts(predictor, gpu, table, isolated=False))


def test_weight_dtype_replaces_the_config() -> None:
    wide = graph(DENSE, AWQ, weight_dtype="bf16")
    assert footprint(wide).weights == footprint(graph(DENSE)).weights
    [said] = told(wide)
    assert said.startswith("weights bf16 (as asked for, in place of the config's quantization), products in bf16; ")
    eight = graph(DENSE, AWQ, weight_dtype="fp8")
    assert products(eight, "mlp.down") == [("bf16", LAYERS, 0.5)]
    assert told(graph(DENSE)) == []


@pytest.mark.parametrize(
    ("section", "dtype", "expected"),
    [
        (AWQ, "fp8", ("fp8", 4.15625 / 8)),  # four-bit weights, eight-bit activations
        (AWQ, "fp16", ("fp16", 4.15625 / 16)),
        (SECTIONS["fp8 blocks"], "fp8", ("fp8", 1.0)),
        (SECTIONS["fp8 blocks"], "fp4", ("fp8", 1.0)),  # weights are wider than fp4: as the config has it
        (SECTIONS["fp8 blocks"], "fp32", ("fp8", 1.0)),
    ],
)
def test_dtype_beside_a_config(section: dict[str, Any], dtype: str, expected: tuple[str, float]) -> None:
    [(own, _, share)] = products(graph(DENSE, section, dtype), "mlp.down")
    assert (own, share) == expected


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "own", "share"),
    [
        ("bf16", "int4", "bf16", 4.15625 / 16),
        ("bf16", "fp4", "bf16", 4.5 / 16),
        ("bf16", "int8", "bf16", 0.5),
        ("fp16", "fp8", "fp16", 0.5),
        ("fp8", "int4", "fp8", 4.15625 / 8),
        ("fp8", None, "fp8", 1.0),
        ("fp4", None, "fp4", 1.0),
        ("fp8", "bf16", "bf16", 1.0),
        ("bf16", "fp32", "fp32", 1.0),
        ("fp32", "int4", "fp32", 4.15625 / 32),
    ],
)
def test_weight_dtype_is_storage_and_dtype_arithmetic(
    dtype: str, weight_dtype: str | None, own: str, share: float
) -> None:
    work = graph(DENSE, None, dtype, weight_dtype=weight_dtype)
    assert products(work, "mlp.down") == [(own, LAYERS, round(share, 9))]
    assert work.dtype == own
    weight_only = share < 1.0
    assert bool(told(work)) == weight_only
    if weight_only:
        assert work.options["weight_dtype"] == weight_dtype


def forecast(work: Graph, gpu: str = "A100-SXM4-80GB") -> Forecast:
    return nj.predict(load_baseline("roofline"), nj.load_gpu(gpu), work)


def test_weight_only_products_read_fewer_bytes_and_do_the_same_arithmetic() -> None:
    plain_, narrow = forecast(graph(DENSE)), forecast(graph(DENSE, None, weight_dtype="int4"))
    assert narrow.to_dict()["flop"] == plain_.to_dict()["flop"]
    saved = LAYERS * sum(n * k * 2 - grouped(4, 128, 20)(n, k) for n, k in LINEAR)
    assert plain_.to_dict()["bytes"] - narrow.to_dict()["bytes"] == pytest.approx(saved, rel=1e-5)
    assert narrow.total_s < plain_.total_s
    assert not any("never measured" in note for note in plain_.notes)
    assert any("weight-only products" in note and "never measured" in note for note in narrow.notes)


@pytest.mark.parametrize("section", [SECTIONS["fp8 blocks"], SECTIONS["ct w8a8 int"]], ids=["fp8", "int8"])
def test_a_gpu_without_the_path_widens_the_weights(section: dict[str, Any]) -> None:
    work = graph(DENSE, section)
    there = forecast(work, "H100")
    assert not any("arithmetic on this GPU" in note for note in there.notes)
    lacking = nj.load_gpu("A100-SXM4-80GB").replace(int8_flop_per_s=0.0)
    other = nj.predict(load_baseline("roofline"), lacking, work)
    assert any("weight-only" in note and "arithmetic on this GPU" in note for note in other.notes)
    assert "gemm_fp8" not in set(other.columns["family"])
    assert work.on(nj.load_gpu("H100").paths) is work
    assert products(work.on(lacking.paths), "mlp.down")[0][2] == pytest.approx(0.5, rel=2e-2)


def test_arithmetic_asked_for_is_not_replaced() -> None:
    for section in (None, AWQ, SECTIONS["fp8 blocks"]):
        with pytest.raises(InputError, match="no arithmetic path 'fp8'"):
            forecast(graph(DENSE, section, "fp8"))


SHARES = (1.0, 0.5, 0.28125, 0.259765625, 0.1)
SHAPES = 60


def products_of_every_share(seed: int) -> KernelTable:
    """Products and experts of random shapes, each with all of `SHARES`."""
    random = np.random.default_rng(seed)
    kernels: list[Kernel] = []
    for _ in range(SHAPES):
        m, n, k = (round(float(np.exp(random.uniform(0, 10)))) for _ in range(3))
        experts = expert_dims(m, experts=32, local_experts=16, top_k=4, hidden=n, inner=k)
        sizes = {name: float(value) for name, value in experts.items()}
        for share in SHARES:
            kernels.append(Kernel("grouped_gemm", "experts", {**sizes, WEIGHT_SHARE: share}, 1.0, "bf16"))
            kernels.append(matrix_product(1, m, n, k, "bf16", weight_share=share))
    table = table_from_kernels(kernels)
    return KernelTable({name: batch for name, batch in table.families.items() if batch.num_rows})


@pytest.mark.parametrize("seed", range(3))
def test_fewer_bits_are_never_slower_nor_below_light(seed: int) -> None:
    table = products_of_every_share(seed)
    terms = EXPLAINED(random_predictor("mixture", seed), on_device(nj.load_gpu("H100")), table)
    seconds = in_row_order(table, {name: np.asarray(term.seconds) for name, term in terms.items()})
    light = in_row_order(table, {name: np.asarray(term.bounds.speed_of_light_s) for name, term in terms.items()})
    assert (seconds >= light * (1 - 1e-4)).all()
    for times in (seconds, light):
        by_share = times.reshape(SHAPES, len(SHARES), 2)
        if times is seconds:
            by_share = by_share[:, :, 1:]  # how long experts take to widen their weights was measured
        assert (by_share[:, 1:] <= by_share[:, :-1] * (1 + 1e-4)).all()
        assert (by_share[:, -1] < 0.9 * by_share[:, 0]).any()


def test_rows_of_a_forecast_know_their_layers() -> None:
    """A node whose layers differ is two rows, and their counts are those of the layers."""
    work = graph(DENSE, {**AWQ, "modules_to_not_convert": ["model.layers.0", "model.layers.2"]})
    rows = forecast(work).to_frame()
    counts: Sequence[float] = rows[rows["node"] == "layer.mlp.down"]["count"].tolist()
    assert sorted(np.round(counts, 5)) == [1.0, 2.0]
