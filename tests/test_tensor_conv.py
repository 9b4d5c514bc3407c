"""Products whose rows do not start on 16 bytes, and convolutions on tensor cores: by hand, and what must hold."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from predictors import work_of

import neusight_jax as nj
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.families import FAMILIES, family_of
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels

H100 = nj.load_gpu("H100")


def seconds(table: KernelTable, gpu: nj.GPU = H100) -> np.ndarray[Any, Any]:
    """Of every kernel inside a model."""
    return nj.predict_kernels(nj.load_predictor("tensorcore"), gpu, table, isolated=False)


def products(*sizes: tuple[int, int, int], dtype: str = "bf16") -> KernelTable:
    """Products of these m, n, k."""
    each = [{"batch": 1, "m": m, "n": n, "k": k} for m, n, k in sizes]
    return table_from_kernels([Kernel("linear", "linear", dims, dtype=dtype) for dims in each])


def convolution(channels: int, filters: int, window: int = 3, dtype: str = "bf16", batch: int = 64) -> KernelTable:
    """A convolution of images of 56×56 pixels."""
    sizes: dict[str, Any] = {"batch": 1.0 * batch, "in_channels": 1.0 * channels, "out_channels": 1.0 * filters}
    sizes |= dict.fromkeys(("in_size", "out_size"), (56.0, 56.0))
    dims = conv_dims("conv", **sizes, window=(1.0 * window, 1.0 * window), stride=(1.0, 1.0))
    return table_from_kernels([Kernel("conv", "conv", dims, dtype=dtype)])


@pytest.mark.parametrize(
    ("dtype", "n", "load"), [("bf16", 4096, 16), ("bf16", 4098, 4), ("bf16", 4097, 2), ("tf32", 4097, 4)]
)
def test_a_load_is_as_wide_as_rows_are_aligned(dtype: str, n: int, load: int) -> None:
    """A block of 256×128 loads 256 + 128 rows of 4096 and stores 256 · 128 elements, four a clock; where all are of
    16 bytes none is counted."""
    size = 2.0 if dtype == "bf16" else 4.0
    dims = {key: np.float32([value]) for key, value in {"batch": 1, "m": 4096, "n": n, "k": 4096}.items()}
    cycles = work_of(FAMILIES["gemm"], dims, np.float32([size])).load_cycles
    assert cycles is not None
    moved = size * ((128 + 256) * 4096 + 128 * 256)
    np.testing.assert_allclose(cycles[0, -1, 0], 0.0 if load == 16 else moved / load / 4.0, rtol=1e-6)


def test_odd_vocabularies_cost_what_they_were_measured_to() -> None:
    """GPT-2's head, 50257 columns, takes several times as long as one of 50304 on an H100."""
    odd, even = seconds(products((8192, 50257, 768), (8192, 50304, 768)))
    assert 2.0 < odd / even < 8.0


def test_alignment_never_makes_a_product_faster() -> None:
    grown = [seconds(products((2048, n, n), (2048, n + 1, n + 1))) for n in (255, 1023, 4095)]
    assert all(odd > even for odd, even in grown)


def test_convolutions_beside_fp32_are_products_of_tensor_cores() -> None:
    assert family_of("conv", "fp32") == "conv"
    assert [family_of("conv", dtype) for dtype in ("bf16", "fp16", "tf32")] == ["tensor_conv"] * 3
    table = convolution(256, 256, window=1)
    assert [name for name, batch in table.families.items() if batch.num_rows] == ["tensor_conv"]
    pixels = 64 * 56 * 56
    np.testing.assert_allclose(seconds(table), seconds(products((pixels, 256, 256))), rtol=0.02)


def test_channels_are_taken_64_at_a_time_in_a_window() -> None:
    """A 3×3 window over 96 channels multiplies as much as one over 128; one of 1×1 does not."""
    dims = {
        name: np.float32([np.asarray(values)[0]])
        for name, values in convolution(96, 128).families["tensor_conv"].dims.items()
    }
    work = work_of(FAMILIES["tensor_conv"], dims, np.float32([2.0]))
    np.testing.assert_allclose(work.block_steps[0, 0, 0], 9 * 128)
    np.testing.assert_allclose(work.flop, 2 * 64 * 56 * 56 * 128 * 96 * 9, rtol=1e-6)


def test_channels_of_tf32_are_taken_16_at_a_time() -> None:
    """Padded ones too: a window over 3 channels multiplies as much as one over 16."""
    for channels in (3, 16):
        dims = {
            name: np.float32([np.asarray(values)[0]])
            for name, values in convolution(channels, 128, dtype="tf32").families["tensor_conv"].dims.items()
        }
        work = work_of(FAMILIES["tensor_conv"], dims, np.float32([4.0]))
        np.testing.assert_allclose(work.block_steps[0, 0, 0], 9 * 16)


def test_channels_that_are_not_aligned_are_padded_by_kernels_of_their_own() -> None:
    odd, even = seconds(convolution(60, 64))[0], seconds(convolution(64, 64))[0]
    assert odd > 1.5 * even


def test_its_interval_is_wider_than_that_of_a_product() -> None:
    predictor: Any = nj.load_predictor("tensorcore")
    spans = []
    for table in (convolution(256, 256, window=1), products((64 * 56 * 56, 256, 256))):
        low, high = nj.predict_kernel_intervals(predictor, H100, table)
        spans.append(np.log(high / low)[0])
    assert spans[0] > 1.5 * spans[1]


def test_gradients_of_a_convolution_are_finite_and_downhill() -> None:
    table = convolution(60, 100)
    slopes = jax.grad(nj.latency, argnums=1)(nj.load_predictor("tensorcore"), H100, table)
    assert np.isfinite([float(leaf) for leaf in jax.tree.leaves(slopes)]).all()
    assert float(slopes.mem_bytes_per_s) < 0
