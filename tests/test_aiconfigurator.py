"""Import of aiconfigurator-core, on a small tree of its layout made here."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.datasets.aiconfigurator import import_aiconfigurator
from neusight_jax.datasets.imported import ImportReport
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def gemm(framework: str, dtype: str, source: str, rows: list[tuple[int, int, int, float]], version: str = "9") -> Any:
    frame = pd.DataFrame(rows, columns=["m", "n", "k", "latency"])
    return frame.assign(
        framework=framework, version=version, device=H100, op_name="gemm", kernel_source=source, gemm_dtype=dtype
    )


def attention(rows: list[dict[str, Any]]) -> pd.DataFrame:
    base = {
        "framework": "VLLM",
        "version": "0.24.0",
        "kernel_source": "vllm_flash_attn_fa3",
        "batch_size": 2,
        "isl": 512,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "step": 0,
        "window_size": 0,
        "latency": 0.5,
    }
    return pd.DataFrame([{**base, **row} for row in rows])


def experts(rows: list[dict[str, Any]]) -> pd.DataFrame:
    base = {
        "framework": "VLLM",
        "version": "0.24.0",
        "kernel_source": "vllm_unquantizedfusedmoe_triton_tritonexperts",
        "moe_dtype": "bfloat16",
        "num_tokens": 64,
        "hidden_size": 4096,
        "inter_size": 14336,
        "topk": 2,
        "num_experts": 8,
        "moe_tp_size": 2,
        "moe_ep_size": 4,
        "distribution": "balanced",
        "latency": 1.0,
    }
    return pd.DataFrame([{**base, **row} for row in rows])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the package's layout with a few rows of each kind, good and bad."""
    wheel = tmp_path_factory.mktemp("package") / "wheel"
    root = wheel / "aiconfigurator_core"

    def write(frame: pd.DataFrame, *parts: str) -> None:
        path = root.joinpath("systems", "data", *parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path)

    bf16, other = "bfloat16", "torch.nn.functional.linear"
    write(gemm("VLLM", bf16, other, [(64, 4096, 1024, 0.010)]), "h100_sxm", "gemm", "vllm", "9", "gemm_perf.parquet")
    write(
        pd.concat(
            [
                gemm("TRTLLM", bf16, other, [(64, 4096, 1024, 0.012), (64, 32, 1024, 0.012)]),
                # 17 us, 10 of them quantization; 2 × 8192³ FLOP in 0.1 ms would be eleven times the peak.
                gemm("TRTLLM", "fp8", "torch_flow", [(128, 2048, 512, 0.017), (8192, 8192, 8192, 0.11)]),
                gemm("TRTLLM", "fp8", "torch_flow", [(1, 2048, 512, 0.009)]),
                gemm("TRTLLM", "fp8", "another", [(128, 2048, 512, 0.5)]),
            ]
        ),
        *("h100_sxm", "gemm", "trtllm", "9", "gemm_perf.parquet"),
    )
    for name, time in (("computescale", 0.008), ("scale_matrix", 0.002)):
        scales = pd.DataFrame({"m": [1, 128, 8192], "k": [512, 512, 8192], "latency": time})
        scales = scales.assign(framework="TRTLLM", version="9", quant_dtype="fp8", kernel_source="torch_ops")
        write(scales, "h100_sxm", "quantize", "trtllm", "9", f"{name}_perf.parquet")
    write(
        gemm("SGLANG", bf16, other, [(64, 4096, 1024, 0.020)]), "h100_sxm", "gemm", "sglang", "9", "gemm_perf.parquet"
    )
    write(
        gemm("VLLM", "fp8", "CutlassFP8ScaledMMLinearKernel", [(128, 2048, 512, 0.012)]),
        *("h100_sxm", "gemm", "vllm", "10", "gemm_perf.parquet"),
    )
    write(
        attention([{}, {"isl": 8}, {"kernel_source": "vllm_triton_attn"}, {"kv_cache_dtype": "fp8"}]),
        *("h100_sxm", "attention", "vllm", "0.24.0", "context_attention_perf.parquet"),
    )
    # The older table of the A100 has no windows.
    decode = attention([{"isl": 1, "step": 1023}]).drop(columns="window_size")
    write(decode, "a100_sxm", "attention", "vllm", "0.14.0", "generation_attention_perf.parquet")
    narrow = {"moe_dtype": "w4a16_mxfp4", "latency": 0.5}
    left_out = ({"distribution": "power_law_1.2"}, {"hidden_size": 2688}, {"version": "0.19.0"})
    write(experts([{}, narrow, *left_out]), "h100_sxm", "moe", "vllm", "0.24.0", "moe_perf.parquet")
    info = wheel / "aiconfigurator_core-0.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: aiconfigurator-core")
    return wheel


@pytest.fixture(scope="module")
def report(package: Path, tmp_path_factory: pytest.TempPathFactory) -> ImportReport:
    """The package, imported."""
    return import_aiconfigurator(package, tmp_path_factory.mktemp("imported") / "out")


def test_rows_taken_and_counted(report: ImportReport) -> None:
    assert report.source == "of aiconfigurator-core 0.12.0"
    experts = {"experts_bfloat16": 1, "experts_w4a16_mxfp4": 1}
    assert report.rows == {"gemm_bf16": 1, "gemm_fp8": 1, "prefill": 1, "decode": 1, **experts}
    left_out = report.left_out
    assert left_out["gemm_bf16", "n or k below 64"] == 1
    assert left_out["gemm_fp8", "faster than light (warm in a cache)"] == 1
    assert left_out["prefill", "fewer than 16 new tokens"] == 1
    assert left_out["prefill", "a fallback or trial kernel"] == 1
    assert left_out["prefill", "another dtype of tensors or cache"] == 1
    assert left_out["gemm_fp8", "not a time"] == 1  # shorter than its quantization
    for reason in ("uneven spread of tokens", "experts of two matrices", "another version"):
        assert left_out["experts_bfloat16", reason] == 1
    assert "Apache License" in (report.output / "ATTRIBUTION").read_text()


def test_what_the_rows_mean(report: ImportReport) -> None:
    frame = read_measurements(report.output).frame.set_index("family")
    product = frame.loc["gemm"]
    assert (product["device"], product["dtype"], product["latency_s"]) == (H100, "bf16", pytest.approx(12e-6))
    assert (product["m"], product["n"], product["k"]) == (64, 4096, 1024)  # our K is the package's k, the contraction
    eight = frame.loc["gemm_fp8"]
    assert (eight["dtype"], eight["latency_s"]) == ("fp8", pytest.approx(7e-6))  # its quantization taken off
    prefill = frame.loc["prefill"]
    assert (prefill["requests"], prefill["queries"], prefill["pairs"]) == (2, 1024, 2 * 512 * 513 / 2)
    decode = frame.loc["decode"]
    assert (decode["device"], decode["queries"], decode["keys"], decode["context"]) == (A100, 2, 2048, 2048)
    wide, narrow = (row for _, row in frame.loc["grouped_gemm"].iterrows())
    assert (wide["rows"], wide["active"], wide["inner"], wide["weight_share"]) == (64 * 2 / 4, 2, 7168, 1.0)
    assert (narrow["dtype"], narrow["weight_share"]) == ("bf16", 4.25 / 16)


def test_watts_are_read_where_a_version_has_them(package: Path, tmp_path: Path) -> None:
    measured = shutil.copytree(package, tmp_path / "measured")
    for file in measured.rglob("gemm_perf.parquet"):
        table = pd.read_parquet(file)
        table.assign(power=[450.0] * len(table), power_limit=700.0).to_parquet(file)
    report = import_aiconfigurator(measured, tmp_path / "out")
    frame = read_measurements(report.output).frame.set_index("family")
    assert frame.loc["gemm", "power_w"] == pytest.approx(450.0)
    assert frame.loc["gemm", "power_limit_w"] == pytest.approx(700.0)
    assert frame.loc["prefill", ["power_w", "clock_hz"]].isna().all()


def test_a_wheel_is_read_too(package: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "aiconfigurator_core-0.12.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            archive.write(path, path.relative_to(package))
    assert sum(import_aiconfigurator(wheel, tmp_path / "out").rows.values()) == 6


def test_sources_that_hold_nothing(package: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the wheel of aiconfigurator-core"):
        import_aiconfigurator(tmp_path, tmp_path / "out")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK no")
    with pytest.raises(InputError, match="not a whole wheel"):
        import_aiconfigurator(broken, tmp_path / "out")
    for column in ("latency", "m"):
        spoilt = shutil.copytree(package, tmp_path / column)
        for file in spoilt.rglob("gemm_perf.parquet"):
            pd.read_parquet(file).drop(columns=column).to_parquet(file)
        with pytest.raises(InputError, match=f"column '{column}' is missing"):
            import_aiconfigurator(spoilt, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "aiconfigurator", str(package), "--output", str(tmp_path / "out")]) == 0
    assert "6 rows of aiconfigurator-core 0.12.0" in capsys.readouterr().out
    assert run(["import", "aiconfigurator", str(package), "--output", str(tmp_path / "out")]) == 2


def test_imported_rows_are_forecast(report: ImportReport) -> None:
    table = nj.read_kernels(report.output / "kernels" / "decode.parquet")
    assert list(table.families) == ["decode"]
    from neusight_jax.model.predictor import load_baseline

    seconds = nj.predict_kernels(load_baseline("roofline"), nj.load_gpu(A100), table)
    assert seconds.shape == (1,)
    assert 0 < seconds[0] < 0.5e-3
