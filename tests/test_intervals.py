"""Intervals of kernels measured alone, row by row."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from predictors import random_predictor

import neusight_jax as nj
from neusight_jax.graph.kernel import conv_kernel
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable, table_from_kernels
from neusight_jax.model.intervals import (
    REACH,
    Intervals,
    empty_intervals,
    error_correlation,
    gpu_widening,
    kernel_interval,
    machine_distance,
    ratio_interval,
)
from neusight_jax.model.latency import in_row_order, kernel_forecasts, on_device
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.predictor import Predictor, RooflinePredictor
from synthetic import synthetic_rows

OPS = ("softmax", "linear", "ln")
BELOW, ABOVE = -0.2, 0.5


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> KernelTable:
    """Rows of three operators, shuffled: families take turns."""
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    rows = pd.concat([synthetic_rows(op, "Tesla T4", 12) for op in OPS], ignore_index=True)
    rows.sample(frac=1.0, random_state=0).to_parquet(file, index=False)
    return nj.read_kernels(file)


@pytest.fixture(scope="module")
def predictor() -> MixturePredictor:
    """Intervals of −0.2 to 0.5 in logarithms, of everything as if it had been trained on."""
    plain = random_predictor("mixture", 0)
    assert isinstance(plain, MixturePredictor)
    intervals = empty_intervals({name: each.network.center.shape[-1] for name, each in plain.families.items()})
    far = jnp.array([[-1e9], [1e9]])
    wide: Intervals = replace(
        intervals,
        kernels={name: jnp.array([BELOW, ABOVE]) for name in intervals.kernels},
        gpu_range={name: far * jnp.ones_like(part) for name, part in intervals.gpu_range.items()},
        shape_range={name: far * jnp.ones_like(part) for name, part in intervals.shape_range.items()},
    )
    return replace(plain, intervals=wide)


@jax.jit
def _lights(predictor: Predictor, gpu: nj.GPU, table: KernelTable, isolated: jax.Array) -> dict[str, jax.Array]:
    terms = kernel_forecasts(predictor, gpu, table, isolated=isolated)
    return {name: each.bounds.speed_of_light_s for name, each in terms.items()}


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA A100-PCIE-40GB", "Tesla V100-PCIE-32GB", "AMD Instinct MI100"])
@pytest.mark.parametrize("isolated", [True, False])
def test_bounds_lie_around_the_forecast(
    predictor: MixturePredictor, table: KernelTable, device: str, isolated: bool
) -> None:
    gpu = nj.load_gpu(device)
    low, high = nj.predict_kernel_intervals(predictor, gpu, table, isolated=isolated)
    seconds = nj.predict_kernels(predictor, gpu, table, isolated=isolated)
    lights = _lights(predictor, on_device(gpu), table, jnp.asarray(isolated, float))
    light = in_row_order(table, {name: np.asarray(values) for name, values in lights.items()})
    assert low.shape == high.shape == (table.num_rows,)
    assert low.dtype == high.dtype == seconds.dtype
    assert np.all(low > 0)
    assert np.all(low <= seconds)
    assert np.all(seconds <= high)
    assert np.all(low >= light * (1 - 1e-6))
    # Where nothing else binds, the bounds are the quantiles; in file order, as the forecasts are.
    np.testing.assert_allclose(low, np.maximum(seconds * np.exp(BELOW), np.minimum(light, seconds)), rtol=1e-5)
    np.testing.assert_allclose(high, seconds * np.exp(ABOVE), rtol=1e-5)


def test_they_are_those_of_isolated_kernels(tmp_path: Path) -> None:
    """A shipped checkpoint: widened as `kernel_interval` says; a GPU it was trained on has its own residuals' width."""
    synthetic_rows("softmax", "Tesla T4", 12).to_parquet(tmp_path / "rows.parquet", index=False)
    table, gpu = nj.read_kernels(tmp_path / "rows.parquet"), nj.load_gpu("Tesla T4")
    batch = table.families["softmax"]
    run = jax.jit(partial(kernel_interval, family=FAMILIES["softmax"]))
    for device in (None, "Tesla T4"):
        shipped = nj.load_predictor("fp32", device)
        low, high = nj.predict_kernel_intervals(shipped, gpu, table)
        interval = run(shipped, gpu=on_device(gpu), batch=batch)
        seconds = nj.predict_kernels(shipped, gpu, table)
        np.testing.assert_allclose(high, seconds * np.exp(np.asarray(interval.log_high)[: len(high)]), rtol=1e-5)
        assert np.all(low < high)
        if device is not None:
            own = nj.load_card("fp32")["device_intervals"]["Tesla T4"]["softmax"]
            assert np.asarray(interval.log_high / interval.widening)[0] == pytest.approx(own, rel=1e-3)


def test_products_by_the_network_of_other_products_are_twice_as_wide() -> None:
    """A convolution in bf16 of everyday size, inside the sizes that products were measured at."""
    sizes: dict[str, Any] = {"batch": 64.0, "in_channels": 512.0, "out_channels": 512.0, "groups": 1.0}
    sizes |= {"in_size": (14.0, 14.0), "out_size": (14.0, 14.0), "window": (3.0, 3.0), "stride": (1.0, 1.0)}
    batch = table_from_kernels(conv_kernel("conv", "bf16", sizes)).families["tensor_conv"]
    predictor, gpu = nj.load_predictor("tensorcore"), on_device(nj.load_gpu("H100"))
    interval = jax.jit(partial(kernel_interval, family=FAMILIES["tensor_conv"]))(predictor, gpu=gpu, batch=batch)
    assert float(interval.shape_widening[0]) == pytest.approx(2.0)


def test_without_intervals_there_is_one_line(table: KernelTable) -> None:
    gpu = nj.load_gpu("T4")
    for bare in (RooflinePredictor(), random_predictor("neusight", 0), random_predictor("mixture", 0)):
        with pytest.raises(nj.InputError, match="this predictor carries no intervals of ") as caught:
            nj.predict_kernel_intervals(bare, gpu, table)
        assert "\n" not in str(caught.value)


def test_a_table_of_one_row(predictor: MixturePredictor, tmp_path: Path) -> None:
    synthetic_rows("gelu", "Tesla T4", 1).to_parquet(tmp_path / "one.parquet", index=False)
    low, high = nj.predict_kernel_intervals(predictor, nj.load_gpu("H100"), nj.read_kernels(tmp_path / "one.parquet"))
    assert low.shape == high.shape == (1,)


def test_how_far_two_machines_are_apart() -> None:
    """By their figures in logarithms, peaks that follow the clock counted once; architectures are beyond."""
    gpu = nj.load_gpu("H100")
    wide = [gpu.replace(mem_bytes_per_s=factor * float(gpu.mem_bytes_per_s)) for factor in (1.0, 2.0, 4.0)]
    assert [machine_distance(gpu, each) for each in wide] == pytest.approx([0.0, math.log(2.0), math.log(4.0)])
    faster = vary_plainly(gpu, {"clock_hz": 2.0 * float(gpu.clock_hz)})
    assert machine_distance(faster, gpu) == pytest.approx(math.log(2.0))
    assert machine_distance(gpu, gpu.replace(mem_bytes=1e12)) == 0.0  # how much memory there is takes no time
    assert machine_distance(gpu, nj.load_gpu("H200")) < 0.5
    for other in ("A100", "MI300X", "L40S"):
        assert machine_distance(gpu, nj.load_gpu(other)) == math.inf
    pair = nj.load_cluster("2x H100")
    faster_links = pair.replace(topology=pair.topology.replace(link_bytes_per_s=9e11))
    assert machine_distance(pair, faster_links) == pytest.approx(math.log(2.0))


def test_how_far_a_gpu_widens_intervals() -> None:
    """By half of its distance to the trained range: none inside; 0.3 below and 0.4 above are at 0.5."""
    trained = jnp.array([[1.0, 1.0], [2.0, 2.0]])
    ratios = jnp.array([[1.5, 2.0], [0.7, 2.4]])
    assert gpu_widening(ratios, trained).tolist() == pytest.approx([1.0, 1.25])


def test_what_errors_share_falls_with_the_distance() -> None:
    shared = [error_correlation(distance) for distance in (0.0, 0.1, 0.7, REACH, 3.0, math.inf)]
    assert shared == sorted(shared, reverse=True)
    assert (shared[0], shared[-1]) == (1.0, 0.0)
    assert shared[3] == pytest.approx(math.exp(-0.5))
    assert error_correlation(0.6) == pytest.approx(math.exp(-1 / 8))  # half of the 1.2 over which they come apart


def test_the_interval_of_a_ratio() -> None:
    h100, h200, a100 = (nj.load_gpu(name) for name in ("H100", "H200", "A100"))
    bounds = (0.9, 1 / 0.9), (1.8, 2 / 0.9)
    half = -math.log(0.9) * math.sqrt(2.0)
    assert ratio_interval((1.0, 2.0), bounds, (h100, a100)) == pytest.approx(
        (0.5 / math.exp(half), 0.5 * math.exp(half))
    )
    near = ratio_interval((1.0, 2.0), bounds, (h100, h200))
    assert near is not None
    assert 0.5 / math.exp(half / 3.0) < near[0] < 0.5 < near[1]
    assert ratio_interval((1.0, 1.0), (bounds[0], bounds[0]), (h100, h100)) == (1.0, 1.0)
    opened = (0.9, math.inf), (0.9, math.inf)  # nobody knows, but of both alike
    assert ratio_interval((1.0, 1.0), opened, (h100, h100)) == (1.0, 1.0)
    assert ratio_interval((1.0, 1.0), opened, (h100, a100)) == pytest.approx((1e-3, 1e3))
    assert ratio_interval((1.0, 1.0), (None, bounds[0]), (h100, h100)) is None
    assert ratio_interval((0.0, 0.0), ((0.0, 0.0), (0.0, 0.0)), (h100, h100)) is None
