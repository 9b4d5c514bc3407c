"""Physical times by hand: what a FLOP costs in energy, when the power limit binds, what is read again from DRAM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import random_predictor

import neusight_jax as nj
from neusight_jax.hardware.gpu import GPU, MEMORY_KINDS
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import TILE
from neusight_jax.kernels.gemm import TILES
from neusight_jax.kernels.table import Kernel, KernelBatch, KernelTable, table_from_kernels
from neusight_jax.model.heads import launched, most_times, physical_times
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import MEMORY
from neusight_jax.model.roofline import element_bytes, joule_per_flop, peak_flop_per_s


def product_of(size: int, family: str = "linear", dtype: str = "fp32") -> KernelBatch:
    """One square product."""
    kernel = Kernel(family, "linear", {"batch": 1, "m": size, "n": size, "k": size}, dtype=dtype)
    return jax.tree.map(jnp.asarray, table_from_kernels([kernel]).families[family])


def times_of(gpu: GPU, batch: KernelBatch, family: str = "linear") -> dict[str, Any]:
    """What a kernel could be bound by on a machine."""
    home = FAMILIES[family]
    work = home.work(batch.dims, element_bytes(batch.dtype))
    at = launched(gpu, home, work, peak_flop_per_s(gpu, home, batch.dtype), batch.dtype)
    return {**physical_times(at), **{f"most {head}": times for head, times in most_times(at).items()}}


def test_energy_by_node() -> None:
    """pJ by hand: 20 at 16 nm, times (7/16)^0.75 at 7 and at 6 nm, (5/16)^0.75 at 5; finer never takes more."""
    assert np.all(np.diff(np.asarray(joule_per_flop(jnp.linspace(2.0, 40.0, 4001)))) >= 0)
    nodes = (16.0, 7.0, 6.5, 6.0, 5.0)
    assert [1e12 * float(joule_per_flop(nm)) for nm in nodes] == pytest.approx(
        [20, 10.76, 10.76, 10.76, 8.36], rel=1e-3
    )
    for nm in (5.0, 6.0, 7.0):
        assert float(joule_per_flop(nm - 1e-3)) == pytest.approx(float(joule_per_flop(nm + 1e-3)), rel=1e-3)
    assert all(float(jax.grad(joule_per_flop)(nm)) > 0 for nm in (5.0, 6.0, 7.0, 16.0))


def test_a_board_that_keeps_its_base_clock_says_what_a_flop_costs() -> None:
    """L4 does arithmetic at 795 of 2040 MHz in its 72 W, which is 6.1 pJ a FLOP, by hand. A board without a base clock
    says nothing that could bind; beside tensor cores none does."""
    l4, product = nj.load_gpu("L4"), product_of(8192)
    most_j = 72.0 / (58 * 128 * 2 * 795e6)
    assert float(l4.fp32_joule_per_flop) == pytest.approx(most_j, rel=1e-3)
    traffic_j, flop = 50e-12 * 3 * 4 * 8192**2, 2 * 8192**3
    times = times_of(l4, product)
    assert float(times["most power"][0, 0]) == pytest.approx((most_j * flop + traffic_j) / 72, rel=1e-3)
    assert float(times["power"][0, 0]) == pytest.approx((20e-12 * (4 / 16) ** 0.75 * flop + traffic_j) / 72, rel=1e-3)
    assert nj.load_gpu("P4").fp32_joule_per_flop == nj.load_gpu("MI210").fp32_joule_per_flop == 0.0
    none = times_of(nj.load_gpu("P4"), product)
    assert float(jnp.min(none["most power"] / none["power"])) > 1e3
    assert "most power" not in times_of(l4, product_of(8192, "gemm", "fp16"), "gemm")


@pytest.mark.parametrize("checkpoint", ["fp32", "fp32-heldout"])
def test_a_base_clock_is_kept_by_long_products(checkpoint: str) -> None:
    """Long products of L4 run near its base clock, 0.39 of its peak; without it slower. A cheaper FLOP never
    makes them slower, and nothing changes where power does not bind."""
    predictor, l4 = nj.load_predictor(checkpoint), nj.load_gpu("L4")

    def share(gpu: nj.GPU, size: int = 8192) -> float:
        seconds = predictor.forecast_kernels(FAMILIES["linear"], gpu, product_of(size), isolated=True).seconds[0]
        return 2 * size**3 / float(seconds) / float(gpu.fp32_flop_per_s)

    energies = [0.0, *(scale * float(l4.fp32_joule_per_flop) for scale in (1.5, 1.0, 0.7))]
    shares = [share(l4.replace(fp32_joule_per_flop=energy)) for energy in energies]
    assert shares == sorted(shares)
    assert shares[0] < 0.95 * shares[2]
    assert 0.34 < shares[2] < 0.42
    assert share(l4.replace(tdp_w=36.0)) < 0.6 * shares[2]  # it says an energy and not a clock: fewer watts slow it
    roomy = l4.replace(tdp_w=1000.0)
    assert share(roomy) == pytest.approx(share(roomy.replace(fp32_joule_per_flop=0.0)), rel=1e-3)


def test_one_block_more_than_a_wave_takes_a_second_wave() -> None:
    """108 tiles of 128×128 fill an A100's 108 SMs once; the 109th runs alone (NVIDIA, Matrix Multiplication Background
    User's Guide: "wave quantization"). A library free to choose takes smaller tiles then."""
    predictor = nj.load_predictor("fp32-heldout", device="A100-PCIE-40GB")
    tiles = (107, 108, 109, 216)
    table = table_from_kernels([Kernel("bmm", "bmm", {"batch": b, "m": 128, "n": 128, "k": 4096}) for b in tiles])
    batch = table.families["bmm"]
    own = {**batch.dims, TILE: np.full(len(batch.row), TILES.index((128, 128)) + 1.0, np.float32)}
    known = KernelTable({"bmm": replace(batch, dims=own)})
    free, seconds = (nj.predict_kernels(predictor, nj.load_gpu("A100-PCIE-40GB"), each) for each in (table, known))
    assert np.all(free <= seconds * (1 + 1e-5))
    assert seconds[1] / seconds[0] < 1.02
    assert seconds[2] / seconds[1] > 1.3
    assert seconds[3] / seconds[2] < 1.4  # 107 more cost less than that one did
    assert seconds[3] / seconds[2] < seconds[2] / seconds[1]


def test_a_kind_of_memory_moves_dram_alone() -> None:
    """A large sum by weights whose HBM is slower by e^0.2: that much on a V100, nothing on a T4."""
    predictor = random_predictor("mixture", 1)
    assert isinstance(predictor, MixturePredictor)
    own = predictor.families["elementwise"]
    slower = replace(own, residual=own.residual.at[:, MEMORY + MEMORY_KINDS.index("hbm")].add(0.2))
    other = replace(predictor, families={**predictor.families, "elementwise": slower})
    dims = {"rows": 2.0**17, "cols": 4096.0, "reads": 2.0, "writes": 1.0}
    table = table_from_kernels([Kernel("elementwise", "add", dims)])
    for name, moved in (("V100", True), ("T4", False)):
        then, now = (float(nj.predict_kernels(each, nj.load_gpu(name), table)[0]) for each in (other, predictor))
        assert (0.0 < np.log(then / now) <= 0.2 + 1e-4) if moved else then == now
