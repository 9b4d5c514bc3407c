"""Products on AMD's matrix cores: rows of ROCm/aiter, scales of blocks, and the residual of a vendor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.datasets.aiter import import_aiter
from neusight_jax.datasets.measurements import read_measurements, table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.kernels.family import SCALE_BLOCK
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import OTHER_VENDOR
from neusight_jax.training.taking_over import taken_again
from neusight_jax.training.vendor import VENDOR_PRODUCTS, fit_vendor, train_vendor, vendor_products, vendor_row

BOARDS = ("AMD Instinct MI300X", "AMD Instinct MI308X")


def _config(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / name, index=False)


def _row(cu_num: int, us: float, m: int = 4096, n: int = 4096, k: int = 8192, **more: Any) -> dict[str, Any]:
    return {"cu_num": cu_num, "M": m, "N": n, "K": k, "us": us, "kernelName": "x", **more}


def test_rows_of_aiter_in_the_schema(tmp_path: Path) -> None:
    """K is the contraction of aiter, n that of the schema; names of files hold the format."""
    configs = tmp_path / "aiter" / "aiter" / "configs"
    _config(configs, "a8w8_blockscale_tuned_gemm.csv", [_row(304, 400.0), _row(304, float("inf")), _row(77, 400.0)])
    _config(configs, "a8w8_tuned_batched_gemm.csv", [_row(304, 4000.0, B=16)])
    _config(configs, "a8w8_tuned_gemm.csv", [_row(80, 50.0), _row(80, 900.0, m=1)])  # 5.5 PFLOP/s on 80 units
    _config(configs, "bf16_tuned_gemm.csv", [_row(80, 2000.0, gfx="gfx942")])
    _config(configs, "tuned_fmoe.csv", [_row(304, 400.0)])
    report = import_aiter(tmp_path / "aiter", tmp_path / "out")
    counts = {f"{BOARDS[0]} fp8": 2, f"{BOARDS[1]} bf16": 1}
    assert report.rows == counts
    assert sorted(report.left_out.values()) == [0, 1, 1, 2]
    frame = read_measurements([tmp_path / "out"]).frame.sort_values("latency_s")
    assert frame[["m", "n", "k"]].to_numpy().tolist() == [[4096, 4096, 8192]] * 3
    assert frame[SCALE_BLOCK].fillna(0.0).tolist() == [128.0, 0.0, 0.0]
    assert frame["batch"].tolist() == [1.0, 1.0, 16.0]
    with pytest.raises(InputError, match="no tuned product"):
        import_aiter(tmp_path / "out", tmp_path / "again")
    _config(tmp_path / "bad", "bf16_tuned_gemm.csv", [{"M": 1}])
    with pytest.raises(InputError, match="column cu_num is missing"):
        import_aiter(tmp_path / "bad", tmp_path / "again")


def _products(device: str, count: int, seed: int = 0) -> pd.DataFrame:
    """Rows of the schema, of products in 16 and 8 bits, half of the latter with scales of blocks."""
    generator = np.random.default_rng(seed)
    m, n, k = (2 ** generator.uniform(low, 14, count) // 32 * 32 + 32 for low in (3, 9, 9))
    dtype = np.where(np.arange(count) % 3 == 0, "bf16", "fp8")
    block = np.where(np.arange(count) % 3 == 1, 128.0, 0.0)
    sizes = {"b": 1.0, "m": m, "n": k, "k": n, SCALE_BLOCK: block}
    return pd.DataFrame({"device": device, "op": "linear", "dtype": dtype, **sizes, "latency_s": 1.0})


def _read(frame: pd.DataFrame, file: Path) -> Any:
    frame.to_parquet(file, index=False)
    return read_measurements([file])


def _with_row(predictor: MixturePredictor, numbers: tuple[float, float]) -> MixturePredictor:
    row = vendor_row(jnp.asarray(numbers))
    families = {
        name: replace(part, residual=part.residual.at[:, OTHER_VENDOR].set(row)) if name in VENDOR_PRODUCTS else part
        for name, part in predictor.families.items()
    }
    return replace(predictor, families=families)


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements of both boards that are forecasts of a vendor 20 % slower in compute and 30 % in memory."""
    predictor = nj.load_predictor("tensorcore")
    assert isinstance(predictor, MixturePredictor)
    slow, parts = _with_row(predictor, (0.2, 0.3)), []
    for seed, device in enumerate(BOARDS):
        frame = _products(device, 90, seed)
        table = table_from_frame(_read(frame, tmp_path_factory.mktemp("rows") / "linear.parquet").frame)
        parts.append(frame.assign(latency_s=nj.predict_kernels(slow, nj.load_gpu(device), table)))
    file: Path = tmp_path_factory.mktemp("measured") / "linear.parquet"
    pd.concat(parts).to_parquet(file, index=False)
    return file


def test_the_residual_of_a_vendor_is_found_again(made_up: Path) -> None:
    predictor = nj.load_predictor("tensorcore")
    assert isinstance(predictor, MixturePredictor)
    products = vendor_products(read_measurements([made_up]), BOARDS)
    assert list(products) == list(VENDOR_PRODUCTS)
    numbers = fit_vendor(predictor, products)
    np.testing.assert_allclose(numbers, [0.2, 0.3], atol=0.03)
    # Two other numbers fit worse: the check above could fail.
    assert not np.allclose(numbers, [0.3, 0.2], atol=0.03)


def test_a_board_held_out_leaves_no_trace(made_up: Path, tmp_path: Path) -> None:
    """Nothing of it in weights or card, also where the base has it; networks and other vendors stay as they are."""
    held, base = BOARDS[1], nj.load_predictor("tensorcore")
    card = train_vendor([made_up], tmp_path / "out", hold_out=[held])
    made = nj.load_predictor(tmp_path / "out")
    assert isinstance(made, MixturePredictor)
    assert isinstance(base, MixturePredictor)
    assert held not in card["device_effects"]
    assert held not in card["trained_on"]["devices"]
    assert held in card["held_out"]
    assert card["vendor"]["errors_percent"]["held out"]["gemm"][held] < 10.0
    for name in base.families:
        for old, new in zip(
            jax.tree.leaves(base.families[name].network), jax.tree.leaves(made.families[name].network), strict=True
        ):
            np.testing.assert_array_equal(old, new)
    table = table_from_frame(read_measurements([made_up]).frame)
    for gpu, moves in (("H100", False), ("MI355X", True)):
        pair = [nj.predict_kernels(predictor, nj.load_gpu(gpu), table) for predictor in (base, made)]
        assert np.allclose(*pair, rtol=1e-6) is not moves, gpu


def test_scales_of_blocks_take_time_of_the_vector_path(tmp_path: Path) -> None:
    predictor, gpu = nj.load_predictor("tensorcore"), nj.load_gpu("MI300X")
    frame = _products(BOARDS[0], 30).assign(dtype="fp8")

    def seconds(block: float, machine: Any = gpu) -> Any:
        table = table_from_frame(_read(frame.assign(scale_block=block), tmp_path / "linear.parquet").frame)
        return nj.predict_kernels(predictor, machine, table)

    plain, scaled = seconds(0.0), seconds(128.0)
    # Matrix units take the scales of 32 elements themselves.
    np.testing.assert_array_equal(seconds(32.0), plain)
    assert np.all(scaled >= plain)
    assert 1.1 < np.max(scaled / plain) < 1.4  # 4 FLOP slots beside 256 FLOP, at 1/16 of the rate: a quarter
    assert np.all(seconds(128.0, gpu.replace(fp32_flop_per_s=2 * gpu.fp32_flop_per_s)) <= scaled * (1 + 1e-6))


def test_what_no_amd_gpu_was_measured_for_is_said_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "llama-3.2-1b", "--mode", "decode", "--batch-size", "1", "--sequence-length", "128"]
    words += ["--checkpoint", "tensorcore", "--dtype", "bf16"]
    assert run([*words, "--gpu", "MI300X"]) == 0
    output = "".join(capsys.readouterr())
    assert "never measured on this vendor's GPUs: decode" in " ".join(output.split())
    assert run([*words, "--gpu", "MI300X", "--strict"]) == 2
    assert "refused by --strict: never measured" in capsys.readouterr().err
    assert run([*words, "--gpu", "H100", "--strict"]) == 0


def test_the_shipped_residual_survives_taking_over() -> None:
    """Families taken over again leave products, their GPUs and their intervals as they are."""
    again, card = taken_again("tensorcore", "fp32")
    before = nj.load_predictor("tensorcore")
    assert isinstance(before, MixturePredictor)
    row = before.families["gemm"].residual[:, OTHER_VENDOR]
    assert np.any(np.asarray(row) != 0.0)
    np.testing.assert_array_equal(again.families["gemm"].residual[:, OTHER_VENDOR], row)
    assert set(card["device_effects"][BOARDS[0]]) == set(VENDOR_PRODUCTS)
    assert again.intervals is not None
    assert set(VENDOR_PRODUCTS) <= set(again.intervals.other_vendor)
