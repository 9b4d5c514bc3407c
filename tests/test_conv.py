"""The convolution family: dims of every pass by hand, its work, its tiles, and its rows of the measurement schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictors import work_of as family_work

import neusight_jax as nj
from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import read_kernels, read_measurements
from neusight_jax.kernels.conv import CHANNELS, CONV, OPS, TILES, conv_dims
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.predictor import load_baseline
from synthetic import synthetic_rows

LAYER: dict[str, Any] = {
    "batch": 32,
    "in_channels": 128,
    "out_channels": 256,
    "in_size": (28, 28),
    "out_size": (28, 28),
    "window": (3, 3),
    "stride": (1, 1),
}


def dims_of(op: str, **changes: Any) -> dict[str, float]:
    return {name: float(size) for name, size in conv_dims(op, **{**LAYER, **changes}).items()}


def work_of(dims: dict[str, float], element_bytes: float = 4.0) -> Any:
    columns = {name: np.float32([size]) for name, size in dims.items()}
    return family_work(CONV, columns, np.float32([element_bytes]))


def test_passes_by_hand() -> None:
    rows = 32 * 28 * 28
    elements = {"pixels": 784, "image": rows * 128, "filter": 9 * 128 * 256, "result": rows * 256}
    tiles = {2: 32 * 14 * 14, 4: 32 * 7 * 7}
    forward = {"batch": 1, "m": rows, "n": 256, "k": 128 * 9, **elements}
    winograd = {"m_2x2": tiles[2], "k_2x2": 128, "m_4x4": tiles[4], "k_4x4": 128}
    assert dims_of("conv") == {**forward, **winograd, CHANNELS: 128}
    data = dims_of("conv_data_gradient")
    assert (data["m"], data["n"], data["k"], data["m_4x4"], data["k_4x4"]) == (rows, 128, 256 * 9, tiles[4], 256)
    weight = dims_of("conv_weight_gradient")
    assert (weight["m"], weight["n"], weight["k"]) == (128 * 9, 256, rows)
    assert (weight["m_4x4"], weight["k_4x4"]) == (128, tiles[4])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stride": (2, 2), "out_size": (14, 14)},
        {"window": (5, 5)},
        {"window": (1, 7)},
        {"groups": 32},
        {"in_size": (28,), "out_size": (26,), "window": (3,), "stride": (1,)},
        {"in_size": (8, 28, 28), "out_size": (8, 28, 28), "window": (3, 3, 3), "stride": (1, 1, 1)},
    ],
)
def test_every_pass_is_as_much_work(changes: dict[str, Any]) -> None:
    layer = {**LAYER, **changes}
    pixels, taps = np.prod(layer["out_size"]), np.prod(layer["window"])
    expected = 2.0 * 32 * pixels * taps * 128 * 256 / layer.get("groups", 1)
    for op in OPS:
        assert float(work_of(dims_of(op, **changes)).flop[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "gain"),
    [
        ({}, 4.0),
        ({"stride": (2, 2), "out_size": (14, 14)}, 1.0),
        ({"window": (5, 5)}, 1.0),
        ({"dilation": (2, 2)}, 1.0),
    ],
)
def test_winograd_saves_a_quarter_where_it_applies(changes: dict[str, Any], gain: float) -> None:
    for op in OPS:
        work = work_of(dims_of(op, **changes))
        assert float(work.flop[0] / work.bound_flop[0]) == pytest.approx(gain)
    half = work_of(dims_of("conv", **changes), 2.0)
    assert float(half.bound_flop[0]) == float(half.flop[0])  # not in 16 bits


def test_tiles_by_hand() -> None:
    """32·28·28 = 25,088 rows, 256 columns; F(4×4) has 36 products of 1,568 rows, F(2×2) 16 of 6,272."""
    work = work_of(dims_of("conv"))
    blocks = dict(zip(CONV.tiles, np.asarray(work.blocks[0, :, 0]), strict=True))
    assert blocks["128x64"] == 196 * 4
    assert blocks["winograd_2x2 128x128"] == 16 * 49 * 2
    assert blocks["winograd_4x4 64x64"] == 36 * 25 * 4
    flop = dict(zip(CONV.tiles, np.asarray(work.block_flop[0, :, 0]), strict=True))
    assert flop["128x64"] == 2 * 128 * 64 * 1152
    assert flop["winograd_4x4 64x64"] == 2 * 64 * 64 * 128
    # Without Winograd its tiles are those of the direct form.
    plain = work_of(dims_of("conv", window=(5, 5)))
    sizes = [(rows, cols) for _, rows, cols in TILES]
    first, last = sizes.index((128, 64)), len(sizes) - 1
    assert sizes[last] == (128, 64)
    assert plain.blocks[0, first, 0] == plain.blocks[0, last, 0]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blocks_cover_the_output(data: st.DataObject) -> None:
    sizes = st.integers(1, 512)
    side = data.draw(st.integers(3, 64))
    layer = {
        "batch": data.draw(st.integers(1, 64)),
        "in_channels": data.draw(sizes),
        "out_channels": data.draw(sizes),
        "in_size": (side, side),
        "out_size": (side, side),
    }
    for op in OPS:
        work = work_of(dims_of(op, **layer))
        done = np.asarray(work.blocks * work.block_flop)[0]
        forms = np.array([tile[0] for tile in TILES])
        assert (done[forms == 0] >= float(work.flop[0]) * (1 - 1e-4)).all()
        assert (done >= float(work.bound_flop[0]) * (1 - 1e-4)).all()


def test_measured_rows_become_dims() -> None:
    columns = {
        name: np.array([float(size)])
        for name, size in {
            "b": 32,
            "input_channels": 128,
            "output_channels": 256,
            "kernel_size": 3,
            "input_size": 28,
            "stride": 1,
            "padding": 1,
        }.items()
    }
    family, dims = schema.row_dims("conv", columns)
    assert family == "conv"
    assert {name: float(values[0]) for name, values in dims.items()} == dims_of("conv")
    strided = schema.row_dims("conv", {**columns, "stride": np.array([2.0])})[1]
    assert float(strided["pixels"][0]) == 14 * 14


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "winograd_2x2 128x128"),
        ("maxwell_sgemm_64x64_nn", "winograd_4x4 64x64"),
        ("cudnn_infer_volta_scudnn_128x32_relu_small_nn_v1", "128x32"),
        ("cudnn_infer_maxwell_scudnn_128x32_3dconv_fprop_small_nn_v0", None),
        ("void explicit_convolve_sgemm<float, int, 128>", None),
    ],
)
def test_tile_of_a_kernel_name(kernel: str, tile: str | None) -> None:
    assert schema.parse_conv_tile(kernel) == tile
    assert tile is None or tile in CONV.tiles


def test_rows_are_read_and_forecast(tmp_path: Path) -> None:
    rows = synthetic_rows("conv", "Tesla T4", 16)
    rows.to_parquet(tmp_path / "conv.parquet")
    frame = read_measurements(tmp_path / "conv.parquet").frame
    assert set(frame["family"]) == {"conv"}
    table = read_kernels(tmp_path / "conv.parquet")
    architecture = {"families": ["conv"], "hidden": [8], "members": 1}
    seconds = nj.predict_kernels(untrained("mixture", architecture), nj.load_gpu("T4"), table)
    assert seconds.shape == (16,)
    assert np.isfinite(seconds).all()
    fast = rows.assign(latency_s=1e-9)
    fast.to_parquet(tmp_path / "conv.parquet")
    with pytest.raises(nj.InputError, match=r"16 of 16 measurement rows are bad \(16 too fast\)"):
        read_measurements(tmp_path / "conv.parquet")


def test_direct_speed_is_not_too_fast(tmp_path: Path) -> None:
    """Winograd runs at twice the direct form's peak, and that is no bad row."""
    row = synthetic_rows("conv", "Tesla V100-PCIE-32GB", 1)
    row = row.assign(b=32, input_channels=512, output_channels=512, input_size=28)
    flop = 2 * 32 * 28 * 28 * 9 * 512 * 512
    peak = float(nj.load_gpu("V100-PCIE-32GB").fp32_flop_per_s)
    row.assign(latency_s=flop / peak / 2).to_parquet(tmp_path / "conv.parquet")
    assert len(read_measurements(tmp_path / "conv.parquet").frame) == 1
    row.assign(latency_s=flop / peak / 4.2).to_parquet(tmp_path / "conv.parquet")
    with pytest.raises(nj.InputError, match="1 too fast"):
        read_measurements(tmp_path / "conv.parquet")


def test_textbook_roofline_counts_all_flop() -> None:
    table = table_from_kernels([Kernel("conv", "conv", dims_of("conv"))])
    gpu = nj.load_gpu("V100-PCIE-32GB")
    seconds = nj.predict_kernels(load_baseline("roofline"), gpu, table)
    assert float(seconds[0]) == pytest.approx(2 * 25088 * 256 * 1152 / float(gpu.fp32_flop_per_s), rel=1e-5)
    slope = jax.grad(nj.latency, argnums=1)(load_baseline("roofline"), gpu, table)
    assert float(slope.fp32_flop_per_s) < 0
