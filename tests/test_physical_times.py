"""Physical times by hand: what a FLOP costs in energy, when the power limit binds, what is read again from DRAM."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import RATES, random_gpus, random_kernels, random_predictor, scaled

import neusight_jax as nj
from neusight_jax.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelBatch, table_from_kernels
from neusight_jax.mixture import MixturePredictor
from neusight_jax.roofline import (
    PhysicalTimes,
    arithmetic_w,
    element_bytes,
    joule_per_flop,
    peak_flop_per_s,
    physical_times,
    power_share,
)


def product_of(size: int, family: str = "linear", dtype: str = "fp32") -> KernelBatch:
    """One square product."""
    kernel = Kernel(family, "linear", {"batch": 1, "m": size, "n": size, "k": size}, dtype=dtype)
    return jax.tree.map(jnp.asarray, table_from_kernels([kernel]).families[family])


def times_of(gpu: GPU, batch: KernelBatch, family: str = "linear") -> PhysicalTimes:
    """What a kernel could be bound by on a machine."""
    home = FAMILIES[family]
    work = home.work(batch.dims, element_bytes(batch.dtype))
    return physical_times(gpu, home, work, peak_flop_per_s(gpu, home, batch.dtype), batch.dtype)


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


def test_energy_of_a_matrix_path() -> None:
    """A long fp32 product on MI210 and MI100 meets the power limit at the same FLOP/s: the same 290 W, 0.71 · 10.76
    pJ; without the matrix path it takes the whole 10.76 pJ."""
    product = product_of(8192)
    seconds = {}
    for name, gpu in {
        "MI100": nj.load_gpu("MI100"),
        "MI210": nj.load_gpu("MI210"),
        "vector": nj.load_gpu("MI210").replace(fp32_matrix_flop_per_s=0.0),
    }.items():
        seconds[name] = float(times_of(gpu, product).power[0, 0])
    traffic_j = 50e-12 * 3 * 4 * 8192**2
    flop_j = 10.759e-12 * 2 * 8192**3
    assert seconds["MI100"] == pytest.approx((0.71 * flop_j + traffic_j) / 290, rel=1e-3)
    assert seconds["MI210"] == pytest.approx(seconds["MI100"], rel=1e-6)
    assert seconds["vector"] == pytest.approx((flop_j + traffic_j) / 290, rel=1e-3)


def test_a_board_keeps_ten_watts_for_itself() -> None:
    """T4 does arithmetic on 60 of its 70 W; beside tensor cores energies were fitted to the whole board."""
    t4 = nj.load_gpu("T4")
    assert float(t4.idle_share) == pytest.approx(10 / 70)
    assert float(arithmetic_w(t4, FAMILIES["linear"])) == pytest.approx(60.0)
    assert float(arithmetic_w(t4, FAMILIES["gemm"])) == pytest.approx(70.0)
    assert float(arithmetic_w(t4.replace(tdp_w=140.0), FAMILIES["linear"])) == pytest.approx(120.0)  # homogeneous
    assert float(arithmetic_w(replace(t4, idle_share=0.0), FAMILIES["linear"])) == pytest.approx(70.0)


def test_a_board_that_keeps_its_base_clock_says_what_a_flop_costs() -> None:
    """L4 does 62 of its 72 W of arithmetic at 795 of 2040 MHz, which is 5.25 pJ a FLOP, by hand. A board without a base
    clock promises nothing that could bind; beside tensor cores none does."""
    l4, product = nj.load_gpu("L4"), product_of(8192)
    promised_j = 62.0 / (58 * 128 * 2 * 795e6)
    assert float(l4.fp32_joule_per_flop) == pytest.approx(promised_j, rel=1e-3)
    traffic_j, flop = 50e-12 * 3 * 4 * 8192**2, 2 * 8192**3
    times = times_of(l4, product)
    assert times.promised is not None
    assert float(times.promised[0, 0]) == pytest.approx((promised_j * flop + traffic_j) / 62, rel=1e-3)
    assert float(times.power[0, 0]) == pytest.approx((20e-12 * (4 / 16) ** 0.75 * flop + traffic_j) / 62, rel=1e-3)
    assert nj.load_gpu("P4").fp32_joule_per_flop == nj.load_gpu("MI210").fp32_joule_per_flop == 0.0
    none = times_of(nj.load_gpu("P4"), product)
    assert none.promised is not None
    assert float(jnp.min(none.promised / none.power)) > 1e3
    assert times_of(l4, product_of(8192, "gemm", "fp16"), "gemm").promised is None


@pytest.mark.parametrize("checkpoint", ["fp32", "fp32-heldout"])
def test_a_promise_is_kept_by_long_products_alone(checkpoint: str) -> None:
    """Long products of L4 run near its base clock, 0.39 of its peak; without the promise slower. A cheaper FLOP never
    makes them slower, and nothing changes where power does not bind."""
    predictor, l4 = nj.load_predictor(checkpoint), nj.load_gpu("L4")

    def share(gpu: nj.GPU, size: int = 8192) -> float:
        seconds = predictor.terms(FAMILIES["linear"], gpu, product_of(size), isolated=True).seconds[0]
        return 2 * size**3 / float(seconds) / float(gpu.fp32_flop_per_s)

    promises = [0.0, *(scale * float(l4.fp32_joule_per_flop) for scale in (1.5, 1.0, 0.7))]
    shares = [share(l4.replace(fp32_joule_per_flop=promise)) for promise in promises]
    assert shares == sorted(shares)
    assert shares[0] < 0.3
    assert 0.34 < shares[2] < 0.42
    assert share(l4.replace(tdp_w=36.0)) < 0.6 * shares[2]  # an energy is promised, not a clock: fewer watts slow it
    roomy = l4.replace(tdp_w=1000.0)
    assert share(roomy) == pytest.approx(share(roomy.replace(fp32_joule_per_flop=0.0)), rel=1e-3)


def test_a_short_kernel_alone_is_over_before_the_power_limit_sets_in() -> None:
    """Energy over energy plus 0.05 J by hand, on 12 nm; no rate enters it. Beside tensor cores all of it."""
    t4 = nj.load_gpu("T4")
    for size in (256, 1024, 8192):
        energy_j = 20e-12 * (12 / 16) ** 0.75 * 2 * size**3 + 50e-12 * 3 * 4 * size**2
        share, faster = (
            power_share(gpu, FAMILIES["linear"], times_of(gpu, product_of(size)))
            for gpu in (t4, scaled(t4, RATES, 7.0))
        )
        assert share is not None
        assert faster is not None
        assert float(share[0]) == pytest.approx(energy_j / (energy_j + 0.05), rel=1e-3)
        assert float(faster[0]) == pytest.approx(float(share[0]), rel=1e-6)
    assert power_share(t4, FAMILIES["gemm"], times_of(t4, product_of(1024, "gemm", "fp16"), "gemm")) is None


def test_more_watts_mean_less_to_a_short_kernel_alone() -> None:
    """On T4 at `fp32`: percent of time saved for a percent of power, of a product of 70 mJ and of one of 18 J, alone
    and inside a model, where the limit has long set in."""
    predictor, t4 = nj.load_predictor("fp32", "T4"), nj.load_gpu("T4")

    def slope(size: int, isolated: bool) -> float:
        def log_s(log_w: jax.Array) -> jax.Array:
            batch, warmer = product_of(size), t4.replace(tdp_w=jnp.exp(log_w))
            return jnp.log(predictor.terms(FAMILIES["linear"], warmer, batch, isolated=isolated).seconds[0])

        return float(jax.grad(log_s)(jnp.log(70.0)))

    assert -1.0 <= slope(8192, isolated=False) < -0.9
    assert slope(8192, isolated=True) == pytest.approx(slope(8192, isolated=False), abs=0.02)
    assert slope(1280, isolated=False) < slope(1280, isolated=True) - 0.05


def test_operands_that_fit_in_l2_are_not_read_again() -> None:
    """A product of 12.6 MB: on T4 (4 MB of L2) every tile reads its operands anew, on L4 (48 MB) DRAM is read once."""
    product = product_of(1024)

    def traffic(gpu: GPU) -> np.ndarray:
        return np.asarray(times_of(gpu, product).reread[0]) * float(gpu.mem_bytes_per_s)

    moved = 3 * 4 * 1024**2
    tile = 4 * (1024 / 128) ** 2 * (256 * 1024 + 128 * 128)  # 64 blocks of 128 × 128, the last of the menu
    assert traffic(nj.load_gpu("T4"))[-1] == pytest.approx(tile, rel=1e-3)
    assert traffic(nj.load_gpu("L4")) == pytest.approx(moved, rel=1e-3)
    halfway = nj.load_gpu("L4").replace(l2_bytes=moved / 1.45)  # in the middle of the ramp from 1.0 to 1.9
    assert traffic(halfway)[-1] == pytest.approx((tile + moved) / 2, rel=1e-3)


def test_schedulers_issue_to_32_lanes_a_clock() -> None:
    """One multiply-add a clock for 32 lanes of every scheduler: GP100 (64 lanes, two schedulers) and GP104, Ada and
    Hopper (128, four) issue as fast as their lanes work; Volta and A100 (64, four) twice as fast. Convolutions are
    counted with four everywhere."""
    schedulers = {name: nj.load_gpu(name).schedulers_per_sm for name in ("P100", "P4", "V100", "A100", "H100", "MI210")}
    assert schedulers == {"P100": 2.0, "P4": 0.0, "V100": 0.0, "A100": 0.0, "H100": 0.0, "MI210": 0.0}

    def issue_over_peak(gpu: GPU) -> float:
        times = times_of(gpu, product_of(4096))
        return float(times.issue[0, 0]) / (2 * 4096.0**3 / float(gpu.fp32_flop_per_s))

    for name, lanes_a_slot in {"P100": 1.0, "P4": 1.0, "L4": 1.0, "H100": 1.0, "V100": 0.5, "A100": 0.5}.items():
        assert issue_over_peak(nj.load_gpu(name)) == pytest.approx(lanes_a_slot, rel=0.02), name
    gpu = nj.load_gpu("V100")
    assert issue_over_peak(gpu.replace(schedulers_per_sm=1.0)) == pytest.approx(4 * issue_over_peak(gpu))
    convolutions = jax.tree.map(jnp.asarray, random_kernels(0, 8).families["conv"])
    two, four = (times_of(gpu.replace(schedulers_per_sm=count), convolutions, "conv").issue for count in (2.0, 4.0))
    np.testing.assert_array_equal(two, four)


@pytest.mark.parametrize("name", ["elementwise", "strided", "memory", "softmax"])
def test_a_streaming_kernel_is_given_most_of_its_bandwidth(name: str) -> None:
    """Whatever the network says, DRAM and re-reads take at most e^0.3 of their ideal (0.74 of the
    bandwidth); norms may take more."""

    def excess(name: str, seed: int) -> np.ndarray:
        family, gpus = FAMILIES[name], random_gpus(seed, 512)
        batch = jax.tree.map(jnp.asarray, random_kernels(seed, 512).families[name])
        predictor = random_predictor("mixture", seed)
        assert isinstance(predictor, MixturePredictor)
        own = predictor.families[family.network]
        zeros = {part: jnp.zeros_like(getattr(own, part)) for part in ("effect", "stack", "in_model")}
        own = replace(own, memory=None, usual=None, **zeros)
        terms = replace(predictor, families={family.network: own}).terms(family, gpus, batch, isolated=True)
        times = times_of(gpus, batch, name)
        return np.asarray(terms.memory_s / jnp.maximum(times.dram.max(axis=1), times.reread.max(axis=1)))

    for seed in range(5):
        assert np.all(excess(name, seed) <= np.exp(0.3) * (1 + 1e-5))
    assert np.any(excess("norm", 0) > np.exp(0.3))


@pytest.mark.parametrize("checkpoint", ["fp32", "fp32-heldout"])
@pytest.mark.parametrize("device", ["H100", "L4", "V100-PCIE-32GB", "NVIDIA A100-PCIE-40GB"])
def test_many_rows_reduce_at_one_rate(checkpoint: str, device: str) -> None:
    """From 131,072 rows on each SM has a thousand of them in a row: eight times the rows take eight times as long."""
    gpu, rows = nj.load_gpu(device), (2.0**17, 2.0**20)
    table = table_from_kernels(
        [Kernel("softmax", "softmax", {"rows": r, "cols": 2048.0, "reads": 1.0, "writes": 1.0}) for r in rows]
    )
    for predictor in (nj.load_predictor(checkpoint), nj.load_predictor(checkpoint, device)):
        fewer_s, more_s = nj.predict_kernels(predictor, gpu, table, isolated=False)
        assert more_s / fewer_s == pytest.approx(8.0, rel=0.03)
