"""Constants of the physics by hand: on machines of round figures, every number is written out as its source has it.

What no forecast pins (`test_golden`): the constants of fp32 families, and menus of tiles.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import neusight_jax as nj
from neusight_jax.arithmetic import DTYPES
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.conv import conv_dims
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import LIBRARY, Work
from neusight_jax.mixture import init_family, longer, mix, offsets
from neusight_jax.roofline import Light, PhysicalTimes, light, peak_flop_per_s, physical_times
from neusight_jax.shifts import COMPUTE, HEADS, arithmetic_shift

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
    columns = {key: jnp.asarray(size) for key, size in zip(dims, sizes, strict=True)}
    size = jnp.full(sizes[0].shape, {"fp32": 4.0, "tf32": 4.0, "fp4": 0.5}.get(dtype, 1.0 if "8" in dtype else 2.0))
    return FAMILIES[name].work(columns, size)


def times(name: str, gpu: nj.GPU = MACHINE, dtype: str = "fp32", **dims: Any) -> tuple[Work, PhysicalTimes, Light]:
    """Work, physical times and bounds of kernels on a machine."""
    work = works(name, dtype, **dims)
    index = jnp.full(work.flop.shape, DTYPES.index(dtype))
    peak = peak_flop_per_s(gpu, FAMILIES[name], index)
    found = jax.jit(lambda machine: physical_times(machine, FAMILIES[name], work, peak, index))(gpu)
    return work, found, light(gpu, work, peak)


def test_traffic_of_a_working_set_in_l2() -> None:
    """A copy of 5 MB in 10 MB of L2 sends 12 % to DRAM; of 12.25 and 16.75 MB a quarter and three quarters of the rest,
    as the ramp goes from 1.0 to 1.9 of L2. It takes no less than 64 B a clock and SM from L2: 6.4 TB/s here."""
    cols = np.array([5e6, 12.25e6, 16.75e6, 30e6]) / 8
    _, found, bounds = times("memory", rows=1.0, cols=cols, reads=1.0, writes=1.0)
    dram_s = np.array([0.12, 0.34, 0.78, 1.0]) * cols * 8 / 1e12
    np.testing.assert_allclose(found.dram[:, 1], dram_s, rtol=1e-5)
    fast = MACHINE.replace(mem_bytes_per_s=1e14)
    np.testing.assert_allclose(bounds.memory_s[1:], dram_s[1:], rtol=1e-5)
    np.testing.assert_allclose(
        times("memory", fast, rows=1.0, cols=cols, reads=1.0, writes=1.0)[2].memory_s, cols * 8 / 6.4e12, rtol=1e-5
    )


def test_arithmetic_takes_at_least_a_thousandth_of_the_traffic() -> None:
    """A fill of 80 MB does no FLOP: 80 ns for 80 us of DRAM."""
    _, found, _ = times("memory", rows=1e3, cols=2e4, reads=0.0, writes=1.0)
    np.testing.assert_allclose(found.compute[:, 0], 80e-9, rtol=1e-5)


def test_a_fused_multiply_add_for_32_lanes_of_four_schedulers() -> None:
    """64 FLOP a clock each: 25.6 TFLOP/s of issue slots here."""
    work, found, _ = times("linear", batch=1.0, m=1024.0, n=1024.0, k=1024.0)
    np.testing.assert_allclose(found.issue[:, 0], work.flop / 25.6e12, rtol=1e-5)


def test_an_element_of_an_operand_takes_twenty_multiply_adds() -> None:
    """Of one SM, over what the largest tile takes (1 + 20 · 256 / 128²): a tile of 32 × 32 needs 2.25 / 1.3125 of its
    arithmetic, one of 32 × 128 1.78125 / 1.3125, one of 128 × 128 no more than its arithmetic."""
    family, k = FAMILIES["linear"], 100.0
    _, found, _ = times("linear", batch=1.0, m=12800.0, n=12800.0, k=k)
    wave_s = dict(zip(family.tiles, np.asarray(found.compute[0, -len(family.tiles) :]), strict=True))
    for tile, over in {"32x32": 2.25 / 1.3125, "32x128": 1.78125 / 1.3125, "128x128": 1.0}.items():
        rows, cols = map(int, tile.split("x"))
        arithmetic_s = (12800 / rows) * (12800 / cols) / 100 * 2 * rows * cols * k / 1e11
        assert wave_s[tile] == pytest.approx(over * arithmetic_s, rel=1e-4), tile


@pytest.mark.parametrize(
    ("dtype", "share"),
    {"tf32": 0.13, "bf16": 0.065, "fp16": 0.065, "fp8": 0.033, "fp4": 0.017, "int8": 0.033}.items(),
)
def test_energy_of_narrow_dtypes(dtype: str, share: float) -> None:
    """20 pJ a FLOP at 16 nm, times the dtype's share; as much again to feed units of 2048 FLOP a clock, half of it for
    4096. 50 pJ a byte."""
    family = {"fp8": "gemm_fp8", "int8": "gemm_fp8", "fp4": "gemm_fp4"}.get(dtype, "gemm")
    sizes = {"batch": 1.0, "m": 4096.0, "n": 4096.0, "k": 4096.0}
    for width, feeding in ((0.0, 2.0), (2048.0, 2.0), (4096.0, 1.5)):
        work, found, _ = times(family, MACHINE.replace(matrix_flop_per_cycle=width), dtype, **sizes)
        joules = 20e-12 * share * feeding * work.flop + 50e-12 * work.bytes_moved
        np.testing.assert_allclose(found.power[:, 0], joules / 200.0, rtol=1e-5)


def test_energy_of_fp32() -> None:
    """20 pJ at 16 nm and 50 pJ a byte of 200 W; a board that promises nothing is taken to need 1 uJ a FLOP at most."""
    work, found, _ = times("linear", batch=1.0, m=4096.0, n=4096.0, k=4096.0)
    np.testing.assert_allclose(found.power[:, 0], (20e-12 * work.flop + 50e-12 * work.bytes_moved) / 200.0, rtol=1e-5)
    assert found.promised is not None
    np.testing.assert_allclose(found.promised[:, 0], 1e-6 * work.flop / 200.0, rtol=1e-3)


def test_a_row_of_a_softmax_waits() -> None:
    """128 clocks and its bytes at 16 a clock, with 2048 threads resident, twice that with 1024; rows of more than 1024
    columns in AMD's large blocks 1800 clocks, and two thirds of the bytes where they start on 16 bytes."""
    fast = MACHINE.replace(fp32_flop_per_s=1e18)
    cases = [  # columns, library, clocks
        (512.0, 0.0, 128 + 2 * 4 * 512 / 16),
        (1025.0, 0.0, 128 + 2 * 4 * 1025 / 16),
        (512.0, 1.0, 128 + 2 * 4 * 512 / 16),
        (1024.0, 1.0, 128 + 2 * 4 * 1024 / 16),
        (1028.0, 1.0, 1800 + 2 / 3 * 2 * 4 * 1028 / 16),
        (1025.0, 1.0, 1800 + 2 * 4 * 1025 / 16),
    ]
    cols, library, clocks = (np.array(column) for column in zip(*cases, strict=True))
    dims = {"rows": 1e5, "cols": cols, "reads": 1.0, "writes": 1.0, LIBRARY: library}
    for threads, hidden in ((0.0, 1.0), (2048.0, 1.0), (1024.0, 2.0)):
        _, found, _ = times("softmax", fast.replace(threads_per_sm=threads), **dims)
        one_row_s = np.asarray(found.compute[:, -len(FAMILIES["softmax"].tiles)])  # blocks of one row: 1000 waves
        np.testing.assert_allclose(one_row_s, 1e3 * clocks * hidden / 1e9, rtol=1e-4)


def test_what_reductions_see_of_a_shape() -> None:
    """From 65,536 rows on a softmax looks the same; a row of more than 1024 columns takes a block of threads."""
    rows, cols = jnp.array([65000.0, 65536.0, 70000.0, 1e6, 1e6]), jnp.array([1024.0] * 4 + [1025.0])
    features = FAMILIES["softmax"].features({"rows": rows, "cols": cols}, jnp.full(5, 4.0))
    np.testing.assert_array_equal(features[1], features[2])
    np.testing.assert_array_equal(features[1], features[3])
    assert float(features[0, 0]) < float(features[1, 0])
    assert [float(wide) for wide in features[:, -1]] == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_flop_an_element() -> None:
    """As NeuSight counts them: 5 for a softmax, 6 for a normalisation, none for plain memory traffic."""
    known = {"elementwise": 1, "strided": 1, "softmax": 5, "norm": 6, "memory": 0, "stream": 1, "reduction": 6}
    for name, flop in known.items():
        more = {"scattered": 1.0, "window": 1.0} if name == "strided" else {}
        work = works(name, rows=10.0, cols=64.0, reads=1.0, writes=1.0, **more)
        assert float(work.flop[0]) == flop * 640, name


def test_powers_on_amd() -> None:
    """250 FLOP an element for `pow` and `powu`, alone; one for every other operator, and on NVIDIA's GPUs."""
    family = FAMILIES["elementwise"]
    ops = jnp.array([family.ops.index(op) for op in ("pow", "powu", "mul")])
    amd = MACHINE.replace(fp32_matrix_flop_per_s=2e13)
    for gpu, isolated, dearer in ((amd, True, 250.0), (amd, False, 1.0), (MACHINE, True, 1.0)):
        shift = arithmetic_shift(family, gpu, ops, isolated)[0]
        np.testing.assert_allclose(jnp.exp(shift[:, COMPUTE]), [dearer, dearer, 1.0], rtol=1e-5)


def test_how_far_a_network_may_move_each_time() -> None:
    """Logarithms: arithmetic and DRAM never beat their ideal; sums stream at 0.74 of the bandwidth and more."""
    bounds = {
        "compute": (0.0, 2.5),
        "dram": (0.0, 1.5),
        "reread": (-3.0, 1.6),
        "onchip": (-2.0, 2.5),
        "issue": (0.1, 0.4),
        "power": (0.0, 0.45),
        "overhead": (-4.0, 2.0),
    }
    assert dict(zip(HEADS, offsets(FAMILIES["linear"]), strict=True)) == bounds
    for name in ("elementwise", "softmax"):
        streamed = {**bounds, "dram": (0.0, 0.3), "reread": (-3.0, 0.3)}
        assert dict(zip(HEADS, offsets(FAMILIES[name]), strict=True)) == streamed
    assert dict(zip(HEADS, offsets(FAMILIES["gemm"]), strict=True)) == {**bounds, "overhead": (-4.0, 3.0)}


def test_where_training_starts() -> None:
    """A network that says nothing: e^0.3 of the ideal of arithmetic, e^0.25 of DRAM's ... whichever binds, and 2 us for
    a launch inside a model."""
    starts = {"compute": 0.3, "dram": 0.25, "reread": -2.0, "onchip": 0.0, "issue": 0.2, "power": 0.2, "overhead": 0.0}
    parameters: Any = init_family(jax.random.key(0), FAMILIES["linear"], jnp.ones((2, 14)), (4,), 1)
    outputs = jnp.zeros((1, 1, 2 * len(HEADS)))  # one component a head, and its offset
    bounds = Light(*(jnp.zeros(1),) * 3)
    for binding, start in starts.items():
        bound: Any = {head: jnp.full((1, 1), 1.0 if head == binding else 1e-9) for head in HEADS}
        args: Any = (
            parameters,
            outputs,
            PhysicalTimes(**bound),
            bounds,
            None,
            jnp.zeros(8),
            offsets(FAMILIES["linear"]),
        )
        seconds = float(mix(*args, isolated=False).seconds[0])
        assert seconds == pytest.approx(math.exp(start) + 2e-6, rel=1e-6), binding


def test_a_kernel_and_the_host_beside_it() -> None:
    """The norm of order 24: 2.9 % where both take as long, nothing where one takes a tenth more than half."""
    assert float(longer(jnp.array(1.0), jnp.array(1.0))) == pytest.approx(2 ** (1 / 24), rel=1e-6)
    assert float(longer(jnp.array(0.5), jnp.array(1.0))) == pytest.approx(1.0, rel=1e-6)


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


@pytest.mark.parametrize(
    ("name", "library", "launched"),
    [
        ("linear", 1.0, "64x64 32x128 128x32"),
        ("linear", 2.0, "32x32 32x64 64x64 32x128 128x32 64x128 128x128"),
        ("linear", 3.0, "32x32 32x64 32x128 128x32 64x128 128x128"),
        ("linear", 4.0, "32x64 64x64 64x128 128x64 128x128"),
        ("bmm", 1.0, "64x128"),
        ("bmm", 2.0, "64x64 32x128 128x32 64x128"),
        ("bmm", 3.0, "128x128"),
    ],
)
def test_tiles_that_libraries_launch(name: str, library: float, launched: str) -> None:
    """Names of measured kernels: maxwell_, volta_ and ampere_sgemm, rows and columns as the family counts them."""
    found = works(name, batch=1.0, m=512.0, n=512.0, k=512.0, **{LIBRARY: library}).launched
    assert found is not None
    assert {tile for tile, yes in zip(FAMILIES[name].tiles, found[0], strict=True) if yes} == set(launched.split())


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
