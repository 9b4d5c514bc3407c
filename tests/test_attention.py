"""Fused attention: keys a block visits, heads that share it, its softmax; and what a FLOP of narrow units costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictors import RATES, only, random_kernels, random_predictor, scaled, work_of

import neusight_jax as nj
from neusight_jax.arithmetic import DTYPES
from neusight_jax.kernels.attention import (
    DECODE,
    FLASH2,
    FLASH3,
    KEY_SPLITS,
    KEY_STEP,
    PREFILL,
    QUERY_TILES,
    attention_dims,
)
from neusight_jax.kernels.family import LIBRARY, Work
from neusight_jax.kernels.gemm import GEMM
from neusight_jax.model.calibrated import CalibratedPredictor
from neusight_jax.model.checkpoint import load_card, load_predictor, save_checkpoint
from neusight_jax.model.heads import launched, physical_times
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.physics import FITTED
from neusight_jax.model.roofline import element_bytes, exponentials_per_s, peak_flop_per_s


def work(family: Any, library: float = 0.0, **sizes: Any) -> Work:
    plain: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_size": 128} | sizes
    queries = np.array([plain.pop("queries", 1)])
    context = np.array([plain.pop("context", queries[0])])
    drawn = attention_dims(queries, context, **plain)
    dims = {name: np.asarray(value, np.float32) for name, value in drawn.items()} | {LIBRARY: np.float32([library])}
    return work_of(family, dims, np.float32([2.0]))


def keys_by_counting(new: int, length: int, window: int, rows: int) -> float:
    """Mean over the blocks of the keys that some query of the block sees, one query after the other."""
    first_query, counts = length - new, []
    for start in range(0, new, rows):
        seen = set[int]()
        for query in range(first_query + start, first_query + min(start + rows, new)):
            seen |= set(range(max(0, query - window + 1) if window else 0, query + 1))
        counts.append(len(seen))
    return float(np.mean(counts))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(0, 512), st.sampled_from([0, 64, 128, 200]))
def test_blocks_visit_the_keys_of_all_their_queries(blocks: int, cached: int, window: int) -> None:
    rows = QUERY_TILES[0]
    new = rows * blocks
    steps = work(PREFILL, queries=new, context=new + cached, window=window).block_steps
    counted = keys_by_counting(new, new + cached, window, rows)
    # Keys are rounded up to whole steps; a window is taken to bind for every block, also for the first.
    over = KEY_STEP + (rows / 2 if window else 0.0)
    assert counted - 1.0 <= steps[0, 0, 0] <= counted + over


def test_requests_of_any_lengths_are_never_less_than_their_pairs() -> None:
    parts = [attention_dims(np.array([n]), np.array([n]), heads=4, kv_heads=4, head_size=64) for n in (1, 1, 1, 10000)]
    summed = ("requests", "queries", "keys", "pairs", "context")
    dims = {k: np.asarray(sum(p[k] for p in parts) if k in summed else v, np.float32) for k, v in parts[0].items()}
    steps = work_of(PREFILL, dims, np.float32([2.0])).block_steps
    assert steps[0, 0, 0] >= float(dims["pairs"][0] / dims["queries"][0])


def test_flash_attention_2_runs_windowed_heads_alone() -> None:
    """A decode of a layer with a window: a block for every query head, and its keys in one piece."""
    shared = work(DECODE, 0.0, context=8192, window=4096)
    alone = work(DECODE, FLASH2, context=8192, window=4096)
    assert float(shared.blocks[0, 0, 0]) == 8
    np.testing.assert_array_equal(np.asarray(alone.blocks[0]), 32.0)
    np.testing.assert_array_equal(np.asarray(alone.block_steps[0]), 4096.0)
    for wide in (work(DECODE, library, context=8192) for library in (0.0, FLASH2, FLASH3)):
        np.testing.assert_array_equal(np.asarray(wide.blocks), np.asarray(work(DECODE, context=8192).blocks))


def test_flash_attention_2_splits_keys_of_shared_blocks_only() -> None:
    """`seqlenq_ngroups_swapped` of its source: one query, more heads than the cache has, no window."""
    sizes: dict[str, Any] = {"context": 8192, "heads": 16, "kv_heads": 16}
    assert float(work(DECODE, FLASH2, **sizes).blocks.max()) == 16.0
    assert float(work(DECODE, FLASH3, **sizes).blocks.max()) == 16.0 * KEY_SPLITS[-1]
    assert float(work(DECODE, FLASH2, **sizes | {"kv_heads": 8}).blocks.max()) == 8.0 * KEY_SPLITS[-1]


def test_flash_attention_3_lets_heads_of_a_group_share_a_block() -> None:
    """16 tokens of 4 heads are the 64 rows of one block; apart they are four blocks of 64 rows, 16 of them used."""
    apart, shared = work(PREFILL, 0.0, queries=16), work(PREFILL, FLASH3, queries=16)
    assert (float(apart.blocks[0, 0, 0]), float(shared.blocks[0, 0, 0])) == (32.0, 8.0)
    long = work(PREFILL, FLASH3, queries=4096)
    assert float(long.blocks[0, 0, 0]) == float(work(PREFILL, 0.0, queries=4096).blocks[0, 0, 0])


def test_windowed_is_a_property_of_the_layer() -> None:
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_size": 64}
    short = attention_dims(np.array([1]), np.array([100]), window=128, **sizes)
    full = attention_dims(np.array([1]), np.array([100]), **sizes)
    assert (short["windowed"][0], full["windowed"][0]) == (1.0, 0.0)
    assert all(short[name][0] == full[name][0] for name in full if name != "windowed")


def test_exponential_rate_of_hopper() -> None:
    """Shah et al., FlashAttention-3 (2024), section 1: H100 SXM5 has 3.9 TFLOPS of special functions (at 1.83 GHz)."""
    hopper = nj.load_gpu("H100").replace(clock_hz=1.83e9)
    assert float(exponentials_per_s(hopper)) == pytest.approx(3.9e12, rel=0.03)
    ultra, plain = nj.load_gpu("B300"), nj.load_gpu("B200")
    assert float(exponentials_per_s(ultra)) == pytest.approx(2 * float(exponentials_per_s(plain)), rel=0.02)


@pytest.mark.parametrize(
    ("name", "published"), [("V100", 1024), ("A100", 2048), ("H100", 4096), ("T4", 1024), ("L40S", 1024)]
)
def test_width_of_matrix_units(name: str, published: float) -> None:
    """Dense fp16 FLOP a clock of an SM, NVIDIA's architecture whitepapers; the clocks of peaks differ a little."""
    assert float(nj.load_gpu(name).matrix_flop_per_cycle) == pytest.approx(published, rel=0.1)


def test_the_softmax_is_time_of_its_own() -> None:
    """More exponentials a second make attention faster; without a softmax nothing changes."""
    gpu, predictor = nj.load_gpu("B200"), random_predictor("mixture", 0, 2)
    faster = gpu.replace(exp_per_s=4 * float(exponentials_per_s(gpu)))
    kernels = random_kernels(0, 256)
    before, after = (kernel_latency(predictor, one, kernels, isolated=True) for one in (gpu, faster))
    for name, seconds in before.items():
        now, then = np.asarray(seconds), np.asarray(after[name])
        if name in ("prefill", "decode"):
            assert (then <= now * (1 + 1e-5)).all()
            assert (then < 0.999 * now).any()
        else:
            np.testing.assert_array_equal(then, now)


def test_narrow_units_throttle() -> None:
    """T4 and V100 have equal units, but 70 and 300 W for 65 and 125 TFLOP/s: only T4 is bound by its power."""
    shares = {}
    dims = {d: np.full(1, 8192.0, np.float32) for d in GEMM.dims} | {"batch": np.ones(1, np.float32)}
    dtype = np.array([DTYPES.index("fp16")], np.int32)

    @jax.jit
    def power_over_arithmetic(gpu: nj.GPU, dims: Any, dtype: Any) -> Any:
        work, peak = GEMM.work(dims, element_bytes(dtype)), peak_flop_per_s(gpu, GEMM, dtype)
        times = physical_times(launched(gpu, GEMM, work, peak, dtype))
        return times["power"][0, 0] * peak[0] / work.flop[0]

    for name in ("T4", "V100", "H100"):
        shares[name] = float(power_over_arithmetic(nj.load_gpu(name), dims, dtype))
    assert shares["T4"] > 2.5
    assert shares["V100"] < 1.4
    assert shares["H100"] < 1.1


def test_a_named_gpu_brings_its_libraries() -> None:
    """RTX 4090 is not measured, but runs FlashAttention 2; H200 runs FlashAttention 3; a B200 neither."""
    attention = only(nj.graph_from_config("gpt-oss-20b", 64, 4096, "decode", "bf16").kernels, "decode")
    for device, slower in (("RTX 4090", True), ("H200", True), ("B200", False)):
        named: Any = load_predictor("tensorcore", device)
        number = named.families["decode"].library
        assert (number is not None) == slower
        if slower:
            gpu = nj.load_gpu(device)
            without = replace(named.families["decode"], library=None)
            unaware = replace(named, families=named.families | {"decode": without})
            assert nj.latency(named, gpu, attention) > nj.latency(unaware, gpu, attention)


def test_flash_attention_3_plans_and_combines_in_kernels_of_their_own() -> None:
    """2 us for each, however fast the GPU: one for a prefill, one for a decode or two if layers have windows."""
    kernels, gpu = only(random_kernels(3, 64), "prefill", "decode"), nj.load_gpu("H100")
    predictor: Any = random_predictor("mixture", 0, 1)
    for name in ("prefill", "decode"):
        windowed = np.asarray(kernels.families[name].dims["windowed"])
        launches = 1.0 + (windowed if name == "decode" else 0.0 * windowed)
        one = replace(predictor.families[name], physics=jnp.zeros(len(FITTED)))

        def seconds(library: Any, machine: Any, name: str = name, one: Any = one) -> np.ndarray:
            known = replace(predictor, families=predictor.families | {name: replace(one, library=library)})
            return np.asarray(kernel_latency(known, machine, kernels, isolated=True)[name])

        fast, flash3 = scaled(gpu, RATES, 1e5), jnp.asarray(FLASH3)
        short = seconds(None, gpu) < 1e-3
        assert set(windowed[short]) == {0.0, 1.0}
        extra = seconds(flash3, fast)[short] - seconds(None, fast)[short]
        np.testing.assert_allclose(extra, 2e-6 * launches[short], rtol=2e-2)


def test_flash_attention_3_takes_128_keys_at_a_time() -> None:
    for library, padded in ((0.0, 192.0), (FLASH3, 256.0)):
        assert float(work(DECODE, library, context=130).block_steps[0, 0, 0]) == padded
        assert float(work(PREFILL, library, queries=1, context=130).block_steps[0, 0, 0]) == padded


def test_libraries_outlive_a_file(tmp_path: Path) -> None:
    """A calibrated checkpoint is written with the libraries of its GPU, and read back with them."""
    named: Any = load_predictor("tensorcore", "L40S")
    card = load_card("tensorcore")
    save_checkpoint(tmp_path / "plain", named, {key: card[key] for key in ("kind", "architecture")})
    calibrated = {"kind": "calibrated", "architecture": {**card["architecture"], "points": {}}}
    save_checkpoint(tmp_path / "calibrated", CalibratedPredictor(named), calibrated)
    plain: Any = load_predictor(tmp_path / "plain")
    tuned: Any = load_predictor(tmp_path / "calibrated")
    for read in (plain, tuned.base):
        assert float(read.families["decode"].library) == FLASH2
        assert read.families["prefill"].library is None
