"""Constants of the physics by hand: on machines of round figures, every number is written out as its source has it.

What no forecast pins (`test_golden`): the constants of fp32 families, and menus of tiles.
"""

from __future__ import annotations

import functools
import math
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import work_of

import neusight_jax as nj
from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import UNPACK, Work
from neusight_jax.kernels.gemm import TILES, unpacking
from neusight_jax.model import mixture
from neusight_jax.model.heads import HEADS, LINKED_HEADS, ChosenTile, heads_of, launched, most_times, physical_times
from neusight_jax.model.mixture import init_family, mix
from neusight_jax.model.physics import STANDARD
from neusight_jax.model.residuals import table_residual
from neusight_jax.model.roofline import LowerBounds, fetched_again, issued_flop_per_s, lower_bounds, peak_flop_per_s

MACHINE = nj.GPU(
    num_sms=100.0,
    clock_hz=1e9,
    mem_bytes_per_s=1e12,
    mem_bytes=16e9,
    l2_bytes=10e6,
    tdp_w=200.0,
    link_bytes_per_s=1e11,
    process_nm=16.0,
    fp32_flop_per_s=1e13,
    **{f"{dtype}_flop_per_s": 1e14 for dtype in DTYPES[1:]},
)
"""10 TFLOP/s of fp32, 1 TB/s, 10 MB of L2, 200 W at 16 nm, 100 SMs at 1 GHz."""


def works(name: str, dtype: str = "fp32", **dims: Any) -> Work:
    """Work of kernels of one family; sizes are numbers or lists."""
    sizes = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, np.float32)) for size in dims.values()))
    columns = dict(zip(dims, sizes, strict=True))
    return work_of(FAMILIES[name], columns, np.full(sizes[0].shape, dtype_bytes(dtype), np.float32))


def times(
    name: str, gpu: nj.GPU = MACHINE, dtype: str = "fp32", **dims: Any
) -> tuple[Work, dict[str, Any], LowerBounds]:
    """Work, physical times and bounds of kernels on a machine."""
    work = works(name, dtype, **dims)
    index = np.full(work.flop.shape, DTYPES.index(dtype), np.int32)
    return work, *_times(name)(gpu, work, index)


@functools.cache
def _times(name: str) -> Any:
    """Physical times and bounds of a family's work, by one program."""
    family = FAMILIES[name]

    @jax.jit
    def limits(gpu: nj.GPU, work: Work, index: Any) -> tuple[dict[str, Any], LowerBounds]:
        peak = peak_flop_per_s(gpu, family, index)
        at = launched(gpu, family, work, peak, index)
        most = {f"most {head}": most for head, most in most_times(at).items()}
        return {**physical_times(at), **most}, lower_bounds(gpu, work, peak)

    return limits


def test_traffic_of_a_working_set_in_l2() -> None:
    """A copy of 5 MB in 10 MB of L2 sends 12 % to DRAM; of 10 and 12 MB a quarter and three quarters of the rest, as
    the ramp goes from 0.9 to 1.3 of L2; the bound's, on the safe side, from 1.0 to 1.9. It takes no less than 64 B a
    clock and SM from L2: 6.4 TB/s here."""
    cols = np.array([5e6, 10e6, 12e6, 30e6]) / 8
    _, found, bounds = times("memory", rows=1.0, cols=cols, reads=1.0, writes=1.0)
    dram_s = np.array([0.12, 0.34, 0.78, 1.0]) * cols * 8 / 1e12
    np.testing.assert_allclose(found["dram"][:, 1], dram_s, rtol=1e-5)
    fast = MACHINE.replace(mem_bytes_per_s=1e14)
    least = np.array([0.12, 0.12, 0.12 + 0.88 * (1.2 - 1.0) / (1.9 - 1.0), 1.0]) * cols * 8 / 1e12
    np.testing.assert_allclose(bounds.memory_s, np.maximum(least, cols * 8 / 6.4e12), rtol=1e-5)
    np.testing.assert_allclose(
        times("memory", fast, rows=1.0, cols=cols, reads=1.0, writes=1.0)[2].memory_s, cols * 8 / 6.4e12, rtol=1e-5
    )


def test_arithmetic_takes_at_least_a_thousandth_of_the_traffic() -> None:
    """A fill of 80 MB does no FLOP: 80 ns for 80 us of DRAM."""
    _, found, _ = times("memory", rows=1e3, cols=2e4, reads=0.0, writes=1.0)
    np.testing.assert_allclose(found["compute"][:, 0], 80e-9, rtol=1e-5)


def test_a_fused_multiply_add_for_32_lanes_of_four_schedulers() -> None:
    """64 FLOP a clock each: 25.6 TFLOP/s of issue slots here."""
    work, found, _ = times("softmax", rows=1e5, cols=4096.0, reads=1.0, writes=1.0)
    np.testing.assert_allclose(found["issue"][:, 0], work.flop / 25.6e12, rtol=1e-5)


@pytest.mark.parametrize(("schedulers", "issue_s"), [(0.0, 1.1 * 32e-6), (1.0, 1.1 * 128e-6)])
def test_a_block_of_a_product_brings_in_its_operands(schedulers: float, issue_s: float) -> None:
    """100 blocks of 64 x 64 over 1,000 steps on 100 SMs: 8.192 MFLOP each at 100 a clock, 1.1 times them issued at 64 a
    clock and scheduler; 528,384 bytes at 28 a clock; 900 clocks."""
    gpu, tile = MACHINE.replace(warp_schedulers=schedulers), float(TILES.index((64, 64)) + 1)
    _, found, _ = times("bmm", gpu, batch=1.0, m=640.0, n=640.0, k=1000.0, tile=tile)
    arithmetic_s = (81.92e-6**12 + issue_s**12) ** (1 / 12)
    block_s = (arithmetic_s**1.33 + (528_384 / 28e9) ** 1.33) ** (1 / 1.33) + 0.9e-6
    np.testing.assert_allclose(found["compute"][:, 0], block_s, rtol=1e-4)


def test_a_matrix_instruction_runs_sixteen_times_as_long_as_it_takes_to_issue() -> None:
    """Slots that issue 25.6 TFLOP/s of vectors here keep a matrix path of 40 TFLOP/s busy, and one of 640 would be."""
    gpu = MACHINE.replace(fp32_matrix_flop_per_s=4e13)
    rates = [float(issued_flop_per_s(gpu, STANDARD, matrix)) for matrix in (False, True)]
    np.testing.assert_allclose(rates, [25.6e12, 16 * 40e12], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "share"),
    {"tf32": 0.13, "bf16": 0.065, "fp16": 0.065, "fp8": 0.033, "fp4": 0.017, "int8": 0.033, "fp64": 1.3}.items(),
)
def test_energy_of_dtypes_beside_fp32(dtype: str, share: float) -> None:
    """20 pJ a FLOP at 16 nm, times the dtype's share; as much again to feed units of 2048 FLOP a clock, half of it for
    4096. 50 pJ a byte."""
    family = {"fp8": "gemm_fp8", "int8": "gemm_fp8", "fp4": "gemm_fp4", "fp64": "linear"}.get(dtype, "gemm")
    sizes = {"batch": 1.0, "m": 4096.0, "n": 4096.0, "k": 4096.0}
    for width, feeding in ((0.0, 2.0), (2048.0, 2.0), (4096.0, 1.5)):
        work, found, _ = times(family, MACHINE.replace(matrix_flop_per_cycle=width), dtype, **sizes)
        joules = 20e-12 * share * feeding * work.flop + 50e-12 * work.bytes_moved
        np.testing.assert_allclose(found["power"][:, 0], joules / 200.0, rtol=1e-5)


def test_energy_of_fp32() -> None:
    """20 pJ at 16 nm and 50 pJ a byte of 200 W; a board that says nothing is taken to need 1 uJ a FLOP at most."""
    work, found, _ = times("linear", batch=1.0, m=4096.0, n=4096.0, k=4096.0)
    np.testing.assert_allclose(
        found["power"][:, 0], (20e-12 * work.flop + 50e-12 * work.bytes_moved) / 200.0, rtol=1e-5
    )
    np.testing.assert_allclose(found["most power"][:, 0], 1e-6 * work.flop / 200.0, rtol=1e-3)


def test_flop_an_element() -> None:
    """As NeuSight counts them: 5 for a softmax, 6 for a normalisation, none for plain memory traffic."""
    known = {"elementwise": 1, "strided": 1, "softmax": 5, "norm": 6, "memory": 0, "stream": 1, "reduction": 6}
    for name, flop in known.items():
        more = {"scattered": 1.0, "window": 1.0} if name == "strided" else {}
        work = works(name, rows=10.0, cols=64.0, reads=1.0, writes=1.0, **more)
        assert float(work.flop[0]) == flop * 640, name


def test_how_far_a_network_may_move_each_time() -> None:
    """Logarithms: arithmetic and DRAM never beat their ideal."""
    bounds = {
        "compute": (0.0, 2.5),
        "dram": (0.0, 1.5),
        "reread": (-3.0, 1.6),
        "onchip": (-2.0, 2.5),
        "issue": (0.1, 0.4),
        "power": (0.0, 0.45),
        "overhead": (-4.0, 2.0),
    }
    assert {name: head.bounds(FAMILIES["conv"]) for name, head in heads_of(FAMILIES["conv"]).items()} == bounds
    beside = {name: head.bounds(FAMILIES["gemm"]) for name, head in HEADS.items()}
    assert beside == {**bounds, "onchip": (-2.0, math.log(2.0)), "overhead": (-4.0, 3.0)}
    attention = {name: head.bounds(FAMILIES["prefill"]) for name, head in HEADS.items()}
    assert attention == {**bounds, "overhead": (-4.0, 3.0)}
    products = {name: head.bounds(FAMILIES["linear"]) for name, head in heads_of(FAMILIES["linear"]).items()}
    assert products == {
        **{name: bounds[name] for name in ("dram", "power")},
        **{"compute": (0.0, 0.5), "overhead": (-3.0, 1.5)},
    }
    collectives = {name: head.bounds(FAMILIES["collective"]) for name, head in LINKED_HEADS.items()}
    assert collectives == {
        "link": (0.0, 2.5),
        "dram": (-1.5, 2.0),
        "nic": (0.0, 1.5),
        "protocol": (-1.0, 1.5),
        "hops": (-2.5, 2.5),
        "far hops": (-1.5, 2.5),
        "startup": (-1.0, 4.0),
    }


def test_bytes_of_an_element() -> None:
    sizes = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5, "int8": 1, "fp64": 8}
    assert {dtype: dtype_bytes(dtype) for dtype in DTYPES} == sizes


def test_products_in_four_bits_write_sixteen_and_pack_their_activations() -> None:
    """1000 x 500 x 2000: weights in half a byte, activations read in two bytes and in half a one, results in two."""
    work = works("gemm_fp4", "fp4", batch=1.0, m=1000.0, n=500.0, k=2000.0)
    assert float(work.bytes_moved[0]) == 1000 * 2000 * 2.5 + 500 * 2000 * 0.5 + 1000 * 500 * 2


def test_operands_of_wide_units_come_in_while_they_are_multiplied() -> None:
    """A tile of 128 x 256 reads 384 bytes of fp8 for 65,536 FLOP: 6 clocks of 64 B. Units of 8,192 FLOP a clock take 8,
    and wait for nothing; units of 16,384 take 4, and libraries take larger tiles, so that operands take no longer."""
    sizes = {"batch": 1.0, "m": 128 * 100.0, "n": 256 * 100.0, "k": 4096.0}
    for width, clocks in ((8192.0, 6.0), (16384.0, 4.0)):
        gpu = MACHINE.replace(fp8_flop_per_s=width * 100 * 1e9)
        onchip = np.asarray(times("gemm_fp8", gpu, "fp8", **sizes)[1]["onchip"])[0, 1:]
        ideal = 128 * 256 * 2 * 4096.0 / width * 1e-9 * 100
        assert onchip.min() == pytest.approx(ideal * min(clocks / (65536.0 / width), 1.0), rel=0.05)


def test_rows_that_are_read_again() -> None:
    """Softmax of 2^20 rows on 100 SMs of 2048 threads. Up to 1024 columns nothing is. Of 2048, 512 threads take a row,
    and 32 KiB in and as much out are in flight on an SM: half of 128 KiB of L1, under the ramp from 0.6 to 1.4. Of
    16384, 256 KiB are twice the L1 and 26 MB 2.6 times the L2: both later passes go to DRAM again. A norm has one."""
    cols = np.array([1024.0, 2048.0, 16384.0])
    for name, again in (("softmax", 2.0), ("norm", 1.0)):
        passes = works(name, rows=2.0**20, cols=cols, reads=1.0, writes=1.0)
        bytes_again = np.asarray(fetched_again(MACHINE, passes, STANDARD))
        full = again * 2.0**20 * cols * 4
        assert bytes_again[2] == pytest.approx(full[2], rel=1e-6), name
        assert bytes_again[0] < full[0], name
        if name == "softmax":
            np.testing.assert_array_equal(bytes_again[:2], 0.0)
        larger = np.asarray(fetched_again(MACHINE.replace(l1_bytes=2.0**18), passes, STANDARD))
        assert (larger <= bytes_again).all(), name


@pytest.mark.parametrize(("rows", "cols"), [(2.0**20, 8192.0), (80.0, 16384.0)])
def test_rows_that_are_read_again_in_part(rows: float, cols: float) -> None:
    """1024 threads take a row. Of 8192 columns 2048 threads hold 64 bytes each, as much as the 128 KiB of L1: the ramp
    from 0.6 to 1.4 loses a half. 80 SMs hold 1.05 times the 10 MB of L2 and lose 0.56 of that half. 80 rows of twice
    the columns are 1024 threads of 128 bytes on each of 80 SMs: as much."""
    passes = works("softmax", rows=rows, cols=cols, reads=1.0, writes=1.0)
    lost = 0.5 * (80 * 2.0**17 / 10e6 - 0.6) / 0.8
    np.testing.assert_allclose(fetched_again(MACHINE, passes, STANDARD), lost * 2 * rows * cols * 4, rtol=1e-5)


def test_few_long_rows_wait_for_their_loads() -> None:
    """Layer norm of 16 rows of 2^22 numbers: 128 threads take 512 at a time, 8192 loads one after another, twice, 600
    clocks each, however many SMs are idle."""
    for sms in (100.0, 200.0):
        _, found, _ = times("norm", MACHINE.replace(num_sms=sms), rows=16.0, cols=2.0**22, reads=1.0, writes=1.0)
        assert float(np.min(found["onchip"])) == pytest.approx(2 * 8192 * 600 / 1e9, rel=1e-6)


STARTS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "softmax": (
        {"rows": 64.0, "cols": 64.0, "reads": 1.0, "writes": 1.0},
        {"compute": 0.3, "dram": 0.25, "reread": -2.0, "onchip": 0.0, "issue": 0.2, "power": 0.2, "overhead": 0.0},
    ),
    "linear": (
        {"batch": 1.0, "m": 64.0, "n": 64.0, "k": 64.0},
        {"compute": 0.1, "dram": 0.25, "power": 0.2, "overhead": 0.0},
    ),
    "collective": (
        {"bytes": 64.0, "ranks": 2.0, "domains": 1.0, "operation": 1.0},
        {"link": 0.25, "dram": 0.0, "nic": 0.25, "protocol": 0.0, "hops": 0.0, "far hops": 0.5, "startup": 2.0},
    ),
}
"""Sizes of a kernel of a family, and where the offset of each of its heads starts."""


@pytest.mark.parametrize("name", STARTS)
def test_where_training_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that says nothing: e^0.3 of the ideal of arithmetic, e^0.25 of DRAM's ... whichever binds, and 2 us for
    a launch inside a model."""
    dims, starts = STARTS[name]
    family = FAMILIES[name]
    parameters: Any = init_family(jax.random.key(0), family, jnp.ones((2, 14)), (4,), 1)
    work = jax.tree.map(jnp.asarray, works(name, **dims))
    at = launched(MACHINE, family, work, jnp.full(1, 1e13), jnp.zeros(1, int))
    outputs = jnp.zeros((1, 1, 2 * len(starts)))  # one component a head, and its offset
    bounds, one = LowerBounds(*(jnp.zeros(1),) * 3), jnp.ones(1)
    tile = ChosenTile(jnp.zeros(1, int), *(one for _ in fields(ChosenTile)[1:]))
    for binding, start in starts.items():
        bound: Any = {head: jnp.full((1, 1), 1.0 if head == binding else 1e-9) for head in starts}
        monkeypatch.setattr(mixture, "physical_times", lambda at, bound=bound: bound)
        monkeypatch.setattr(mixture, "most_times", lambda at: {})
        inside: Any = table_residual(parameters.residual, MACHINE, False)
        seconds = float(mix(parameters, outputs, at, bounds, tile, inside).seconds[0])
        assert seconds == pytest.approx(math.exp(start) + 2e-6, rel=1e-6), binding


SQUARES = {
    "linear": ((32, 32), (32, 64), (64, 64), (32, 128), (128, 32), (64, 128), (128, 64), (128, 128)),
    "gemm": ((16, 64), (64, 64), (128, 128), (128, 256)),
}
SQUARES["bmm"] = SQUARES["linear"]
SPLITS = {"linear": (128, (1, 2, 4, 8, 16)), "bmm": (128, (1,)), "gemm": (256, (1, 2, 4, 8, 16, 32))}
"""Fewest steps of a block, and ways to cut the contraction."""


@pytest.mark.parametrize("name", SQUARES)
def test_menus_of_products(name: str) -> None:
    """Blocks of large primes for every tile; contractions cut evenly, in no less than the fewest steps."""
    fewest, ways = SPLITS[name]
    for k in (1000.0, 1e6):
        work = works(name, "bf16" if name == "gemm" else "fp32", batch=1.0, m=99991.0, n=99989.0, k=k)
        cut = [max(1, min(each, int(k // fewest))) for each in ways]
        np.testing.assert_allclose(work.block_steps[0, 0], [k / each for each in cut], rtol=1e-6)
        blocks = [math.ceil(99991 / rows) * math.ceil(99989 / cols) for rows, cols in SQUARES[name]]
        np.testing.assert_allclose(work.blocks[0], np.outer(blocks, cut), rtol=1e-6)
        flop = [2 * rows * cols * k for rows, cols in SQUARES[name]]
        np.testing.assert_allclose(work.block_flop[0, :, 0], flop, rtol=1e-6)


def test_menus_of_streams() -> None:
    """256 to 2048 elements, or 1 to 8 rows, a block."""
    primes = {"rows": 99991.0, "cols": 997.0, "reads": 1.0, "writes": 1.0}
    total = 99991 * 997
    for name in ("elementwise", "memory", "stream"):
        expected = [math.ceil(total / each) for each in (256, 512, 1024, 2048)]
        np.testing.assert_allclose(works(name, **primes).blocks[0, :, 0], expected, rtol=1e-6)
    for name in ("softmax", "norm", "reduction"):
        expected = [math.ceil(99991 / each) for each in (1, 2, 4, 8)]
        np.testing.assert_allclose(works(name, **primes).blocks[0, :, 0], expected, rtol=1e-6)


def test_menu_of_convolutions() -> None:
    """A 3×3 convolution of 64 images, 96 channels to 192, 56×56: direct tiles of 128 rows, Winograd's 16 products for
    2×2 outputs and 36 for 4×4, which multiply 2.25 and 4 times less (Lavin, Gray, CVPR 2016)."""
    image = 64 * 56 * 56
    sizes: dict[str, Any] = {"batch": 64.0, "in_channels": 96.0, "out_channels": 192.0, "in_size": (56.0, 56.0)}
    sizes |= {"out_size": (56.0, 56.0), "window": (3.0, 3.0), "stride": (1.0, 1.0)}
    work = works("conv", **conv_dims("conv", **sizes))
    direct = [math.ceil(image / 128) * math.ceil(192 / cols) for cols in (32, 64, 128)]
    small = [16 * math.ceil(image / 4 / 128) * math.ceil(192 / 128)]
    large = [
        36 * math.ceil(image / 16 / rows) * math.ceil(192 / cols)
        for rows, cols in ((32, 128), (128, 32), (64, 64), (128, 64))
    ]
    np.testing.assert_allclose(work.blocks[0, :, 0], [*direct, *small, *large], rtol=1e-6)
    areas = [128 * 32, 128 * 64, 128 * 128, 128 * 128, 32 * 128, 128 * 32, 64 * 64, 128 * 64]
    contractions = [96 * 9] * 3 + [96] * 5
    np.testing.assert_allclose(
        work.block_flop[0, :, 0], [2 * area * k for area, k in zip(areas, contractions, strict=True)], rtol=1e-6
    )
    total = 2 * image * 192 * 96 * 9
    assert work.form_flop is not None
    assert work.form_bytes is not None
    np.testing.assert_allclose(work.form_flop[0], [total, total / 2.25, total / 4], rtol=1e-6)
    staged = (1 + 2 * 36 / 16) * image * (96 + 192) + (1 + 2 * 36 / 9) * 9 * 96 * 192
    np.testing.assert_allclose(work.form_bytes[0, 2], 4 * staged, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "channels", "padded", "passes"),
    [("bf16", 96.0, 128.0, 0.0), ("tf32", 97.0, 112.0, 8.0), ("bf16", 97.0, 104.0, 8.0)],
)
def test_padding_of_channels_on_tensor_cores(dtype: str, channels: float, padded: float, passes: float) -> None:
    """A step takes 128 bytes of channels, in tf32 64. Channels that do not start on 16 bytes are copied to some that
    do: 8 passes over the images and 2 launches."""
    sizes: dict[str, Any] = {"batch": 64.0, "in_channels": channels, "out_channels": 192.0, "in_size": (56.0, 56.0)}
    sizes |= {"out_size": (56.0, 56.0), "window": (3.0, 3.0), "stride": (1.0, 1.0)}
    work = works("tensor_conv", dtype, **conv_dims("conv", **sizes))
    assert float(work.block_steps[0, 0, 0]) == 9 * padded
    assert work.fetched_bytes is not None
    image_bytes = 64 * 56 * 56 * channels * (4 if dtype == "tf32" else 2)
    np.testing.assert_allclose(work.fetched_bytes, passes * image_bytes, rtol=1e-6)
    np.testing.assert_allclose(work.more_launches, 2 * (passes > 0))


@pytest.mark.parametrize(("block", "each"), [(32.0, 0.0), (33.0, 4.0 / 33), (128.0, 4.0 / 128)])
def test_scales_of_blocks_beyond_what_matrix_units_take(block: float, each: float) -> None:
    """Beyond 32 elements, 4 FLOP of the vector path for every result and block of the contraction."""
    work = works("gemm_fp8", "fp8", batch=1.0, m=1024.0, n=512.0, k=4096.0, scale_block=block)
    np.testing.assert_allclose(work.vector_flop, each * 1024 * 512 * 4096, rtol=1e-6)


def test_weights_that_are_unpacked() -> None:
    """Two instructions a weight. Up to 8 rows of M each weight is unpacked once for the kernel; beyond, for every 128
    rows of a tile, and the sums of 32 products of integers take 5 instructions a row to scale."""
    rows, tile = jnp.array([8.0, 9.0, 256.0, 256.0]), jnp.array([64.0, 64.0, 129.0, 128.0])[:, None, None]
    of_kernel, of_block = jnp.full(4, 1e6), jnp.full((4, 1, 1), 1e3)
    of_kernel_slots, of_block_slots = unpacking(
        {UNPACK: jnp.full(4, 2.0)}, rows, (of_kernel, of_block), tile, jnp.array([1.0, 1.0, 1.0, 2.0])
    )
    assert of_kernel_slots is not None
    assert of_block_slots is not None
    np.testing.assert_allclose(of_kernel_slots, [2e6, 0.0, 0.0, 0.0])
    scaled = 5 / 32
    np.testing.assert_allclose(
        of_block_slots[:, 0, 0], [0.0, 1e3 * (2 + 64 * scaled), 1e3 * (4 + 129 * scaled), 2e3], rtol=1e-6
    )


def test_menus_of_experts_and_attention() -> None:
    """Blocks of 16 to 128 rows of an expert, 64 to 256 queries, 16 or 64 rows of a group; keys in 1 to 64 parts of at
    least 128, 64 at a time."""
    experts = works("grouped_gemm", "bf16", tokens=99991.0, rows=99991.0, active=1.0, hidden=1280.0, inner=640.0)
    columns = 1280 // 128 + 1280 // 128
    np.testing.assert_allclose(
        experts.blocks[0, :, 0], [math.ceil(99991 / rows) * columns for rows in (16, 64, 128)], rtol=1e-6
    )
    sizes = {"heads": 1.0, "kv_heads": 1.0, "head_size": 128.0}
    prefill = works("prefill", "bf16", **attention_dims(np.array(9973.0), np.array(9973.0), **sizes))
    np.testing.assert_allclose(prefill.blocks[0, :, 0], [math.ceil(9973 / rows) for rows in (64, 128, 256)])
    sizes = {"heads": 300.0, "kv_heads": 1.0, "head_size": 128.0}
    for keys, parts in ((1e6, (1, 2, 4, 8, 16, 32, 64)), (1000.0, (1, 2, 4, 7, 7, 7, 7))):
        decode = works("decode", "bf16", **attention_dims(np.array(1.0), np.array(keys), **sizes))
        rows = [math.ceil(300 / each) for each in (16, 64)]
        np.testing.assert_allclose(decode.blocks[0], np.outer(rows, parts), rtol=1e-6)
        steps = [math.ceil(keys / part / 64) * 64 for part in parts]
        np.testing.assert_allclose(decode.block_steps[0, 0], steps, rtol=1e-6)
