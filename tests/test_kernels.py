"""FLOP, bytes, blocks and splits by hand for each family; tables and their errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import random_kernels, work_of

from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import catalog_gpu
from neusight_jax.kernels.families import FAMILIES, family_of
from neusight_jax.kernels.family import Work
from neusight_jax.kernels.gemm import MIN_SPLIT_STEPS, SPLITS
from neusight_jax.kernels.table import Kernel, batch_from_columns, padded_length, table_from_kernels
from neusight_jax.model.physics import STANDARD
from neusight_jax.model.roofline import fetched_again


def _work(name: str, element_bytes: float = 4.0, **dims: float) -> Work:
    columns = {key: np.float32([size]) for key, size in dims.items()}
    return work_of(FAMILIES[name], columns, np.float32([element_bytes]))


def _tile(name: str, tile: str) -> int:
    return FAMILIES[name].tiles.index(tile)


@pytest.mark.parametrize("name", ["linear", "bmm"])
def test_a_matrix_product_by_hand(name: str) -> None:
    """5 products of 100×300 · 300×200."""
    work = _work(name, batch=5, m=100, n=200, k=300)
    assert float(work.flop[0]) == 2 * 5 * 100 * 200 * 300
    assert float(work.bytes_moved[0]) == 4 * 5 * (100 * 300 + 300 * 200 + 100 * 200)
    wide, small = _tile(name, "128x64"), _tile(name, "32x32")
    assert float(work.blocks[0, wide, 0]) == 5 * 1 * 4
    assert float(work.blocks[0, small, 0]) == 5 * 4 * 7
    assert float(work.block_flop[0, wide, 0]) == 2 * 128 * 64 * 300
    assert float(work.block_bytes[0, wide, 0]) == 4 * ((128 + 64) * 300 + 128 * 64)
    assert float(work.block_steps[0, wide, 0]) == 300


def _permuted_sum(plane: int, heads: int) -> Work:
    """Scores of `heads` planes and a bias with its heads innermost, fp32."""
    sizes = {"rows": heads * plane, "cols": plane, "reads": 2, "writes": 1, "scattered": 1, "window": plane * plane}
    return _work("strided", **sizes)


@pytest.mark.parametrize(
    ("name", "plane", "times"),
    [
        ("NVIDIA A100-PCIE-40GB", 512, 0.0),  # 18.9 MB between two uses of a fetch, in half of 40 MB
        ("NVIDIA A100-PCIE-40GB", 2048, 15.0),  # 302 MB
        ("T4", 512, 15.0),  # in 4 MB
        ("V100-PCIE-32GB", 320, 15.0 * (7.372800 / 6.291456 - 1.0) / 0.9),  # in 6 MiB: some of it stays
    ],
)
def test_a_permuted_operand_brings_a_whole_fetch(name: str, plane: int, times: float) -> None:
    """64 bytes for 4, again for each of the 16 heads of a fetch unless L2 keeps it."""
    work = _permuted_sum(plane, 32)
    tensor = 4 * 32 * plane * plane
    assert float(work.bytes_moved[0]) == 3 * tensor
    assert work.window_bytes is not None
    assert float(work.window_bytes[0]) == plane * plane * (64 + 4 + 4)
    again = fetched_again(catalog_gpu(name), jax.tree.map(jnp.asarray, work), STANDARD)
    assert float(jnp.asarray(again)[0]) == pytest.approx(times * tensor, rel=1e-5)


def test_half_precision_moves_half_the_bytes() -> None:
    whole, half = (_work("linear", size, batch=1, m=128, n=128, k=128) for size in (4.0, 2.0))
    assert float(half.bytes_moved[0]) * 2 == float(whole.bytes_moved[0])
    assert float(half.flop[0]) == float(whole.flop[0])
    np.testing.assert_allclose(np.asarray(half.block_bytes) * 2, whole.block_bytes)


def test_blocks_cover_the_output() -> None:
    """Padded work is at least the work, and less than one tile more on each side."""
    for m, n, k in ((1, 1, 1), (127, 129, 64), (4096, 4096, 4096), (33, 5000, 700)):
        work = _work("bmm", batch=3, m=m, n=n, k=k)
        for position, name in enumerate(FAMILIES["bmm"].tiles):
            rows, cols = (int(size) for size in name.split("x"))
            padded = float(work.blocks[0, position, 0] * work.block_flop[0, position, 0])
            assert 2 * 3 * m * n * k <= padded <= 2 * 3 * (m + rows) * (n + cols) * k


@pytest.mark.parametrize("k", [1, 100, 128, 255, 256, 700, 2048, 100_000])
def test_long_contractions_may_be_split(k: int) -> None:
    """No block gets less than the shortest loop, no work is lost, and short loops stay whole."""
    work = _work("linear", batch=1, m=64, n=64, k=k)
    position = _tile("linear", "64x64")
    splits = np.asarray(work.blocks[0, position])
    steps = np.asarray(work.block_steps[0, position])
    assert splits[0] == 1
    assert set(splits) <= {float(split) for split in range(1, max(SPLITS) + 1)}
    np.testing.assert_allclose(splits * steps, k, rtol=1e-6)
    np.testing.assert_allclose(steps * 2 * 64 * 64, work.block_flop[0, position], rtol=1e-6)
    assert np.all((splits == 1) | (steps >= MIN_SPLIT_STEPS))
    assert splits.max() == max(1, min(max(SPLITS), k // MIN_SPLIT_STEPS))


def test_batched_products_are_not_split() -> None:
    assert _work("bmm", batch=2, m=64, n=64, k=8192).blocks.shape[2] == 1


@pytest.mark.parametrize(
    ("name", "reads", "writes", "flop_each"),
    [("elementwise", 2, 1, 1), ("softmax", 1, 1, 5), ("norm", 1, 1, 6), ("memory", 1, 1, 0), ("memory", 0, 1, 0)],
)
def test_a_streaming_kernel_by_hand(name: str, reads: int, writes: int, flop_each: int) -> None:
    work = _work(name, rows=100, cols=300, reads=reads, writes=writes)
    assert float(work.flop[0]) == flop_each * 30_000
    assert float(work.bytes_moved[0]) == 4 * (reads + writes) * 30_000
    tiles = FAMILIES[name].tiles
    for position, tile in enumerate(tiles):
        size = int(tile.split()[0])
        each = size * 300 if tile.endswith("rows") else size
        blocks = -(-100 // size) if tile.endswith("rows") else -(-30_000 // size)
        assert float(work.blocks[0, position, 0]) == blocks
        # A block without arithmetic counts 1 FLOP an element, so that its time is above 0 and scales with the rates.
        assert float(work.block_flop[0, position, 0]) == max(flop_each, 1) * each
        assert float(work.block_bytes[0, position, 0]) == 4 * (reads + writes) * each


def test_every_family_agrees_with_its_menu() -> None:
    for name, batch in random_kernels(0, 256).families.items():
        family = FAMILIES[name]
        size = np.full(256, 2.0, np.float32)
        work = work_of(family, batch.dims, size)
        features = np.asarray(jax.jit(family.features)(batch.dims, size))
        assert work.blocks.shape[:2] == work.block_bytes.shape[:2] == (256, len(family.tiles))
        for values in (features, *(getattr(work, field) for field in ("flop", "bytes_moved", "blocks", "block_flop"))):
            assert np.all(np.isfinite(values))
        assert np.all(work.blocks >= 1)
        assert np.all(work.block_bytes > 0)
        assert family.name == name
        assert FAMILIES[family.network].network == family.network


def test_operators_belong_to_one_family() -> None:
    """Beside tensor cores an operator may have another family; `family_of` says which of a product's."""
    for tensor_core in (False, True):
        apart = ("gemm_", "counted")  # the latter's operators are other families' where their FLOP are not counted
        named = [name for name in FAMILIES if not any(word in name for word in apart)]
        families = [name for name in named if FAMILIES[name].tensor_core == tensor_core]
        ops = [op for name in families for op in FAMILIES[name].ops]
        assert len(ops) == len(set(ops))


def test_products_belong_where_their_dtype_says() -> None:
    expected = {"fp32": "bmm", "tf32": "gemm", "bf16": "gemm", "fp16": "gemm", "fp8": "gemm_fp8", "int8": "gemm_fp8"}
    for dtype, family in {**expected, "fp4": "gemm_fp4"}.items():
        table = table_from_kernels([Kernel("bmm", "bmm", {"batch": 2, "m": 3, "n": 5, "k": 7})], dtype=dtype)
        assert list(table.families) == [family]
    assert family_of("softmax", "bf16") == "softmax"


def test_features_tell_aligned_sizes_apart() -> None:
    features = [
        FAMILIES["linear"].features(
            {name: jnp.array([size], jnp.float32) for name, size in {"batch": 1, "m": 64, "n": n, "k": 64}.items()},
            jnp.array([4.0]),
        )
        for n in (64, 65)
    ]
    assert bool(jnp.any(features[0] != features[1]))


@pytest.mark.parametrize(("rows", "length"), [(0, 32), (1, 32), (32, 32), (33, 64), (1000, 1024), (1024, 1024)])
def test_padding_goes_to_the_next_power_of_two(rows: int, length: int) -> None:
    assert padded_length(rows) == length


def test_a_table_keeps_what_it_is_given() -> None:
    sizes = {"batch": 2, "m": 3, "n": 5, "k": 7}
    kernels = [
        Kernel("bmm", "bmm", sizes, 4.0),
        Kernel("softmax", "softmax_backward", {"rows": 8, "cols": 9, "reads": 2, "writes": 1}),
        Kernel("bmm", "bmm", {**sizes, "m": 11}),
    ]
    table = table_from_kernels(kernels, dtype="fp32", phase=[0, 1, 2], node=[5, 6, 7])
    assert table.num_rows == 3
    assert list(table.families) == ["bmm", "softmax"]
    bmm, softmax = table.families["bmm"], table.families["softmax"]
    assert bmm.dims["m"][:3].tolist() == [3, 11, 1]
    assert bmm.count[:3].tolist() == [4, 1, 0]
    assert bmm.row[:3].tolist() == [0, 2, -1]
    assert bmm.phase[:2].tolist() == [0, 2]
    assert bmm.node[:2].tolist() == [5, 7]
    assert bmm.dtype[0] == 0
    assert FAMILIES["softmax"].ops[softmax.op[0]] == "softmax_backward"
    assert softmax.row[0] == 1


@pytest.mark.parametrize(
    ("kernel", "dtype", "message"),
    [
        (Kernel("pool", "pool", {}), "fp32", "unknown kernel family 'pool'; expected one of linear, bmm, conv"),
        (
            Kernel("norm", "softmax", {"rows": 1, "cols": 1, "reads": 1, "writes": 1}),
            "fp32",
            "family norm has no op 'softmax'; expected one of layernorm",
        ),
        (
            Kernel("linear", "linear", {"batch": 1, "m": 1, "n": 1, "k": 1}),
            "fp23",
            "unknown dtype 'fp23'; nearest: fp32",
        ),
    ],
)
def test_wrong_kernels_are_refused(kernel: Kernel, dtype: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        table_from_kernels([kernel], dtype=dtype)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_become_a_padded_batch() -> None:
    family, rows = FAMILIES["elementwise"], 3
    columns: dict[str, Any] = {name: np.full(rows, 16.0) for name in family.dims}
    batch = batch_from_columns(
        family,
        ["add", "gelu", "add"],
        columns,
        dtype=np.zeros(rows, int),
        count=np.ones(rows),
        phase=np.zeros(rows, int),
        node=np.arange(rows),
        row=np.arange(rows),
    )
    assert len(batch.row) == 32
    assert [family.ops[index] for index in batch.op[:rows]] == ["add", "gelu", "add"]
    assert all(np.all(sizes[rows:] == 1.0) for sizes in batch.dims.values())
