"""Which tiles a vendor's library launches: a fact of the library that takes other tiles out of the mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import random_gpus, random_kernels, random_libraries, random_predictor

import neusight_jax as nj
from neusight_jax.baselines.roofline import RooflinePredictor
from neusight_jax.gpu_catalog import known_library
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import LIBRARY
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.latency import kernel_terms
from neusight_jax.mixture import MixturePredictor, among_launched
from neusight_jax.roofline import peak_flop_per_s, physical_times
from neusight_jax.tiles import init_tile_choice, tile_scores
from neusight_jax.training.data import measured_devices, sweep_rows
from neusight_jax.training.evaluation import systems
from neusight_jax.training.evaluation.systems import fit_baseline
from neusight_jax.training.rows import Rows
from synthetic import write_synthetic_measurements

PRODUCTS = ("linear", "bmm")
A100 = "NVIDIA A100-PCIE-40GB"


def _launched(family: str, device: str) -> set[str]:
    """Names of the tiles that a device's library launches."""
    dims = {name: jnp.full(1, 512.0) for name in FAMILIES[family].dims}
    dims[LIBRARY] = jnp.full(1, known_library(device, FAMILIES[family]))
    launched = FAMILIES[family].work(dims, jnp.full(1, 4.0)).launched
    assert launched is not None
    return {name for name, yes in zip(FAMILIES[family].tiles, launched[0], strict=True) if yes}


def test_kernel_names_of_batched_products() -> None:
    """maxwell_sgemm_128x64_nn, ampere_sgemm_128x128_nn; cuBLAS counts columns first."""
    assert _launched("bmm", "Tesla P4") == _launched("bmm", "Tesla P100-PCIE-16GB") == {"64x128"}
    for device in (A100, "NVIDIA L4", "NVIDIA H100 80GB HBM3"):
        assert _launched("bmm", device) == {"128x128"}
    assert _launched("bmm", "Tesla T4") == _launched("bmm", "Tesla V100-PCIE-32GB")
    assert "64x64" in _launched("bmm", "Tesla T4")
    assert "128x64" not in _launched("linear", A100)


@pytest.mark.parametrize("family", PRODUCTS)
def test_an_unknown_library_may_launch_any_tile(family: str) -> None:
    assert _launched(family, "Intel Arc Pro B60") == set(FAMILIES[family].tiles)
    dims = {name: jnp.full(1, 512.0) for name in FAMILIES[family].dims}
    assert FAMILIES[family].work(dims, jnp.full(1, 4.0)).launched is None


def test_kernel_names_of_rocblas() -> None:
    """Cijk_Alik_Bljk_SB_MT128x64x32 for single products, no side of 32 with another of 32 or 128; any for batches."""
    for device in ("MI100", "MI210", "MI250"):
        assert _launched("linear", device) == {"32x64", "64x64", "64x128", "128x64", "128x128"}
        assert _launched("bmm", device) == set(FAMILIES["bmm"].tiles)


def _tile_slowdown(device: str, family: str) -> dict[str, float]:
    """What a product takes in each tile over what it takes if operands cost nothing to bring in."""
    gpu, home = nj.load_gpu(device), FAMILIES[family]
    dims = {name: jnp.full(1, 512.0) for name in home.dims}
    work = home.work(dims, jnp.full(1, 4.0))
    fp32 = jnp.zeros(1, int)
    peak = peak_flop_per_s(gpu, home, fp32)
    taken = physical_times(gpu, home, work, peak, fp32).compute
    plain = physical_times(gpu, home, replace(work, block_operands=None), peak, fp32).compute
    tiles = len(home.tiles)
    return dict(zip(home.tiles, np.asarray(taken / plain)[0, -tiles:].tolist(), strict=True))


@pytest.mark.parametrize("family", PRODUCTS)
def test_small_tiles_bring_in_more_for_their_arithmetic(family: str) -> None:
    """By hand: 20 multiply-adds an element, (64 + 128) of them for 64 * 128, against 256 for 128 * 128."""
    largest = 1 + 20 * 256 / 16384
    nvidia = _tile_slowdown(A100, family)
    assert nvidia["128x128"] == pytest.approx(1.0, rel=1e-5)
    assert nvidia["64x128"] == pytest.approx((1 + 20 * 192 / 8192) / largest, rel=1e-5)
    assert nvidia["32x32"] > nvidia["32x128"] == nvidia["128x32"] > nvidia["64x64"] > nvidia["64x128"]


@pytest.mark.parametrize("family", PRODUCTS)
def test_a_matrix_path_waits_for_its_operands(family: str) -> None:
    """MI210's multiplies at 45.3 TFLOP/s and its vector path, which brings them in, at 22.6; by hand as above."""
    largest, twice = 1 + 20 * 256 / 16384, 45.3 / 22.6
    amd = _tile_slowdown("MI210", family)
    assert amd["128x128"] == pytest.approx((1 + twice * 20 * 256 / 16384) / largest, rel=2e-3)
    assert amd["64x64"] == pytest.approx((1 + twice * 20 * 128 / 4096) / largest, rel=2e-3)


def test_arithmetic_is_never_faster_than_its_peak() -> None:
    """Not even on a matrix path that is slower than the vector path beside it."""
    gpu = nj.load_gpu("MI210").replace(fp32_matrix_flop_per_s=1e12)
    dims = {name: jnp.full(1, 4096.0) for name in FAMILIES["linear"].dims}
    work = FAMILIES["linear"].work(dims, jnp.full(1, 4.0))
    times = physical_times(gpu, FAMILIES["linear"], work, jnp.full(1, 1e12), jnp.zeros(1, int))
    assert float(times.compute.min()) >= float(work.flop[0]) / 1e12 * (1 - 1e-6)


def test_tiles_share_out_what_they_weigh_together() -> None:
    random = np.random.default_rng(0)
    mixing = jnp.asarray(random.normal(size=(2, 5, 6)))
    launched = jnp.asarray([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 1]], float)
    before, after = jax.nn.softmax(mixing), jax.nn.softmax(among_launched(mixing, launched))
    np.testing.assert_allclose(after[:, :, :2], before[:, :, :2], rtol=1e-6)
    np.testing.assert_allclose(after[:, 0], before[:, 0], rtol=1e-6)
    assert np.all(np.asarray(after[:, :, 2:])[:, np.asarray(launched) == 0] == 0.0)
    np.testing.assert_allclose(after[:, 2, 4] / after[:, 2, 5], before[:, 2, 4] / before[:, 2, 5], rtol=1e-5)


@pytest.mark.parametrize("family", PRODUCTS)
def test_the_reported_tile_is_one_that_the_library_launches(family: str) -> None:
    table = random_libraries(random_kernels(5, 200), 5)
    dims = {name: jnp.asarray(sizes) for name, sizes in table.families[family].dims.items()}
    work, features = (part(dims, jnp.full(200, 4.0)) for part in (FAMILIES[family].work, FAMILIES[family].features))
    choice = init_tile_choice(jax.random.key(0), FAMILIES[family], features)
    index = np.argmax(tile_scores(choice, random_gpus(5, 200), work, features), axis=1)
    assert work.launched is not None
    assert np.all(np.asarray(work.launched)[np.arange(200), index] == 1.0)


def test_the_quantities_of_the_largest_tile() -> None:
    dims = {"batch": jnp.ones(4), "m": jnp.full(4, 100.0), "n": jnp.full(4, 200.0), "k": jnp.full(4, 50.0)}
    work = FAMILIES["bmm"].work(dims | {LIBRARY: jnp.array([0.0, 1.0, 2.0, 3.0])}, jnp.full(4, 4.0))
    edges = np.asarray(work.largest(work.block_flop))[:, 0] / (2 * 50)
    np.testing.assert_array_equal(edges, [128 * 128, 64 * 128, 64 * 128, 128 * 128])


def test_one_block_more_than_a_wave_takes_a_second_wave() -> None:
    """108 tiles of 128×128 fill an A100's 108 SMs once; the 109th runs alone (NVIDIA, Matrix Multiplication Background
    User's Guide: "wave quantization")."""
    predictor = nj.load_predictor("fp32-heldout", device=A100)
    tiles = (107, 108, 109, 216)
    table = table_from_kernels([Kernel("bmm", "bmm", {"batch": b, "m": 128, "n": 128, "k": 4096}) for b in tiles])
    seconds = nj.predict_kernels(predictor, nj.load_gpu(A100), table)
    assert seconds[1] / seconds[0] < 1.02
    assert seconds[2] / seconds[1] > 1.5
    assert seconds[3] / seconds[2] < 1.2


def test_a_gpu_without_a_name_runs_the_newest_kernels() -> None:
    """And one with an fp32 matrix path of its own another vendor's, whatever the predictor was told."""
    kernels = [Kernel("bmm", "bmm", {"batch": b, "m": 130, "n": 260, "k": 512}) for b in (3, 40, 500)]
    table, gpu = table_from_kernels(kernels), nj.load_gpu("H100")
    plain = random_predictor("mixture", 2)
    assert isinstance(plain, MixturePredictor)

    def told(number: float) -> MixturePredictor:
        family = replace(plain.families["bmm"], library=jnp.float32(number))
        return replace(plain, families={**plain.families, "bmm": family})

    def seconds(predictor: MixturePredictor, gpu: nj.GPU) -> np.ndarray:
        return np.asarray(nj.predict_kernels(predictor, gpu, table))

    np.testing.assert_array_equal(seconds(plain, gpu), seconds(told(3.0), gpu))
    assert np.all(seconds(plain, gpu) != seconds(told(1.0), gpu))
    amd = nj.load_gpu("MI210")
    np.testing.assert_array_equal(seconds(plain, amd), seconds(told(4.0), amd))
    np.testing.assert_array_equal(seconds(told(1.0), amd), seconds(told(4.0), amd))


@jax.jit
def _bmm(predictor: MixturePredictor, gpus: nj.GPU, table: nj.KernelTable) -> jax.Array:
    return kernel_terms(predictor, gpus, table, isolated=True)["bmm"].seconds


def _bmm_seconds(predictor: MixturePredictor, gpus: nj.GPU, table: nj.KernelTable) -> np.ndarray:
    return np.asarray(_bmm(predictor, gpus, nj.KernelTable({"bmm": table.families["bmm"]})))


def test_rows_may_say_which_library_ran_them() -> None:
    """As measured rows do in training: the same as a predictor that is told."""
    table = random_libraries(random_kernels(3, 64, dtypes=1), 3)
    gpus, plain = random_gpus(3, 64, absent=1.0), random_predictor("mixture", 3)
    assert isinstance(plain, MixturePredictor)
    said = _bmm_seconds(plain, gpus, table)
    libraries = np.asarray(table.families["bmm"].dims[LIBRARY])
    for number in (1.0, 2.0, 3.0):
        family = replace(plain.families["bmm"], library=jnp.float32(number))
        told = _bmm_seconds(replace(plain, families={**plain.families, "bmm": family}), gpus, table)
        np.testing.assert_array_equal(said[libraries == number], told[libraries == number])


def test_a_baseline_is_not_told_what_it_will_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of the mixture knows the libraries of a GPU by its name; one of a baseline never hears of them."""
    data = nj.read_measurements(write_synthetic_measurements(tmp_path, rows=6))
    shown: list[Rows] = []

    def fitted(rows: Rows, seed: int) -> RooflinePredictor:
        shown.append(rows)
        return RooflinePredictor()

    monkeypatch.setitem(systems.SYSTEMS, "gbt", systems.JobSystem(fitted, random=True))
    monkeypatch.setattr(systems, "_missing", lambda names: {})  # LightGBM, which this one does not need
    fit_baseline("gbt", data, measured_devices(data))
    assert {rows.family.name for rows in shown} >= set(PRODUCTS)
    assert not any(LIBRARY in rows.batch.dims for rows in shown)
    assert LIBRARY in sweep_rows(data, "bmm", measured_devices(data)).batch.dims
