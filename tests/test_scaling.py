"""Scaling a measured run: every reader on files written by hand, every rule by hand, and nothing dropped in silence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from trace_files import GRID, kernel, operator, write

import neusight_jax as nj
from neusight_jax.kernels.table import table_from_kernels
from neusight_jax.model.checkpoint import default_checkpoint
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.scaling.chrome import operator_kernels
from neusight_jax.scaling.rules import (
    BELIEVED,
    FAR_CARRIED,
    LIMITS,
    ScaledRun,
    limits_of,
    read_trace,
    resident_blocks,
    work_of,
)
from neusight_jax.scaling.tables import node_kernels
from neusight_jax.scaling.trace import Launch, busy_seconds, kernel_of_name

DATA = Path(__file__).resolve().parent / "data"
V100, T4 = "Tesla V100-PCIE-32GB", "Tesla T4"
ROOF = RooflinePredictor()
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"


def _events() -> list[dict[str, Any]]:
    """A run on a GPU in the profiler's format: a product, an activation, what only its name tells, and copies."""
    return [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        operator(
            "aten::addmm", 11, [[512], [1024, 256], [256, 512], [], []], ["float", "float", "float", "Scalar", ""], 0
        ),
        operator("aten::gelu", 12, [[1024, 512], []], ["float", ""], 10),
        kernel("volta_sgemm_128x64_tn", 100, 200, 11, **GRID),
        kernel(GELU, 300, 100, 12, **GRID),
        kernel("my_own_kernel(float*, int)", 400, 60, **GRID),
        kernel("another_kernel", 460, 40),
        kernel("Memcpy HtoD (Pinned -> Device)", 350, 30, cat="gpu_memcpy", bytes=1000000),
        kernel("Memcpy DtoD (Device -> Device)", 500, 10, cat="gpu_memcpy"),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 510, 20),
        kernel("flash_fwd_kernel", 530, 25, **GRID),
        kernel("softmax_warp_forward", 555, 0, **GRID),
    ]


def _row(run: ScaledRun, name: str) -> dict[str, Any]:
    frame = run.to_frame()
    found: dict[str, Any] = frame[frame["name"].str.startswith(name)].iloc[0].to_dict()
    return found


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_gpu_trace_by_hand(tmp_path: Path, name: str, bare: bool) -> None:
    file = write(tmp_path / name, _events() if bare else {"schemaVersion": 1, "traceEvents": _events()})
    run = nj.scale_trace(file, V100, T4, predictor=ROOF)
    origin, target = nj.load_gpu(V100), nj.load_gpu(T4)
    bandwidth = float(origin.mem_bytes_per_s / target.mem_bytes_per_s)
    product, gelu = _row(run, "volta_sgemm"), _row(run, "void at::native")
    assert product["rule"] == gelu["rule"] == "forecast"
    # 1024 × 256 × 512 is bound by compute on both, the activation by memory: the roofline scales them exactly so.
    assert product["ratio"] == pytest.approx(float(origin.fp32_flop_per_s / target.fp32_flop_per_s), rel=1e-4)
    assert gelu["ratio"] == pytest.approx(bandwidth, rel=1e-4)
    # 400 blocks of 256 threads: 8 fit on an SM of the V100, 4 on one of the T4; one wave on 640, three on 160.
    waves = np.ceil(400 / 160) / np.ceil(400 / 640)
    own = _row(run, "my_own_kernel")
    assert own["rule"] == "wave"
    assert own["ratio"] == pytest.approx(waves * bandwidth * 160 / 640, rel=1e-4)
    attention = _row(run, "flash_fwd")
    clock = float(origin.clock_hz / target.clock_hz)
    assert attention["ratio"] == pytest.approx(waves * (bandwidth * 160 / 640 * clock) ** 0.5, rel=1e-4)
    assert (_row(run, "another")["rule"], _row(run, "another")["ratio"]) == ("bandwidth", pytest.approx(bandwidth))
    assert _row(run, "Memcpy DtoD")["rule"] == "bandwidth"
    link = float(origin.link_bytes_per_s / target.link_bytes_per_s)
    for moved in ("Memcpy HtoD", "ncclDevKernel"):
        assert (_row(run, moved)["rule"], _row(run, moved)["ratio"]) == ("link", pytest.approx(link))
    # 485 us of kernels in 455 us: the copy to the device overlaps the activation.
    assert run.measured_s == pytest.approx(485e-6)
    assert (run.busy_s, run.span_s) == (pytest.approx(455e-6), pytest.approx(455e-6))
    assert any("streams overlap" in note for note in run.notes)
    assert any("1 GPU events of no duration" in note for note in run.notes)
    shares = {rule: part["share"] for rule, part in run.coverage().items()}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["forecast"] == pytest.approx(300 / 485)
    assert run.scaled_s == pytest.approx(float((run.columns["measured_s"] * run.columns["ratio"]).sum()))


def test_the_same_gpu_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "trace.json", {"traceEvents": _events()})
    run = nj.scale_trace(file, V100, V100, predictor=ROOF)
    np.testing.assert_allclose(run.columns["ratio"], 1.0, rtol=1e-6)
    assert run.scaled_span_s == pytest.approx(run.span_s)


def test_names_alone_infer_a_size(tmp_path: Path) -> None:
    events = [event for event in _events() if event.get("cat") != "cpu_op"]
    run = nj.scale_trace(write(tmp_path / "trace.json", events), V100, T4, predictor=ROOF)
    product, gelu = _row(run, "volta_sgemm"), _row(run, "void at::native")
    assert product["rule"] == gelu["rule"] == "inferred"
    origin, target = nj.load_gpu(V100), nj.load_gpu(T4)
    assert product["ratio"] == pytest.approx(float(origin.fp32_flop_per_s / target.fp32_flop_per_s), rel=1e-3)
    assert gelu["ratio"] == pytest.approx(float(origin.mem_bytes_per_s / target.mem_bytes_per_s), rel=1e-3)
    assert any("name no operator" in note for note in run.notes)


def test_missing_fields_are_kept_or_counted(tmp_path: Path) -> None:
    nameless = kernel("", 700, 7)
    text = kernel("late_kernel", 800, 9)
    text["dur"] = "9"  # old exporters write numbers as text
    odd = [kernel("no_duration", 600, None), kernel("negative", 650, -5), nameless, text, {"ph": "X"}, 17]
    run = nj.scale_trace(write(tmp_path / "trace.json", _events() + odd), V100, T4, predictor=ROOF)
    assert any("2 GPU events without a usable duration, left out" in note for note in run.notes)
    assert any("1 GPU events without a usable name, kept" in note for note in run.notes)
    assert _row(run, "(no name)")["rule"] == "bandwidth"
    assert run.measured_s == pytest.approx((485 + 7 + 9) * 1e-6)


def test_a_real_trace_of_the_profiler() -> None:
    """Made on a CPU: its operators stand in for kernels, and their own times add up to the outermost ones."""
    file = DATA / "torch_cpu_trace.json"
    trace = read_trace(file)
    assert any("no GPU kernel in this trace" in note for note in trace.notes)
    works = {item.name: item.kernels[0] for item in trace.items if item.kernels}
    product = works["aten::bmm"]
    assert {name: float(size) for name, size in product.dims.items()} in (
        {"batch": 1, "m": 32, "n": 32, "k": 16},
        {"batch": 1, "m": 32, "n": 16, "k": 32},
        {"batch": 1, "m": 16, "n": 32, "k": 32},
    )
    families = {kernel.family for kernel in works.values()}
    assert families >= {"linear", "bmm", "elementwise", "softmax", "norm", "memory"}
    assert trace.kernel_s == pytest.approx(trace.busy_s, rel=1e-3)
    run = nj.scale_trace(file, V100, T4, predictor=ROOF)
    assert set(run.coverage()) <= {"forecast", "none"}
    assert run.coverage()["forecast"]["share"] > 0.2


def test_per_operator_tables(tmp_path: Path) -> None:
    import pandas as pd

    run = {"device": V100, "model": "m", "mode": "inf", "sequence_length": 8, "batch_size": 1, "option": ""}
    zero = {"backward_s": 0.0, "accumulate_s": 0.0}
    rows = [
        {"name": "size_1", "output_shape": "[1]", "forward_s": 6e-6, "layer_repeat": 2, "fw_ops": "[]"},
        {"name": "view_1", "output_shape": "[8]", "forward_s": 1e-5, "layer_repeat": 2, "fw_ops": "[]"},
        {"name": "arange", "output_shape": "[8]", "forward_s": 1.2e-5, "layer_repeat": 2, "fw_ops": "[]"},
        {
            **{"name": "fc", "output_shape": "[8, 8]", "forward_s": 5.1e-4, "layer_repeat": 2},
            "fw_ops": json.dumps([["Linear", [2048, 4096, 1024]]]),
        },
        {"name": "odd", "output_shape": "[8]", "forward_s": 1.1e-4, "layer_repeat": 1, "fw_ops": "[]"},
    ]
    frame = pd.DataFrame(
        [{**run, **row, **zero, "node_index": at, "total_s": row["forward_s"]} for at, row in enumerate(rows)]
    )
    file = tmp_path / "per_op.parquet"
    frame.to_parquet(file, index=False)
    scaled = nj.scale_trace(file, V100, T4, predictor=ROOF)
    origin, target = nj.load_gpu(V100), nj.load_gpu(T4)
    # 10 us of overhead off each: (510 − 10) us twice, and 100 us that nothing explains.
    assert scaled.measured_s == pytest.approx(1.1e-3)
    assert _row(scaled, "fc")["ratio"] == pytest.approx(
        float(origin.fp32_flop_per_s / target.fp32_flop_per_s), rel=1e-4
    )
    assert _row(scaled, "odd")["rule"] == "bandwidth"
    two = pd.concat([frame, frame.assign(batch_size=2)])
    two.to_parquet(file, index=False)
    with pytest.raises(nj.InputError, match=r"2 runs .* choose one with --select"):
        nj.scale_trace(file, V100, T4, predictor=ROOF)
    again = nj.scale_trace(file, V100, T4, predictor=ROOF, select={"batch_size": "2"})
    assert again.scaled_s == pytest.approx(scaled.scaled_s)


H100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
BF16 = ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_x")


def _alone(tmp_path: Path, *names: str) -> Path:
    """A trace of kernels of a millisecond each, without operators."""
    return write(tmp_path / "trace.json", [kernel(name, 2000.0 * at, 1000) for at, name in enumerate(names)])


def test_the_checkpoint_follows_the_dtypes(tmp_path: Path) -> None:
    """fp32 and bf16 in one trace; products of the same dtype and time scale alike, whoever named them."""
    run = nj.scale_trace(_alone(tmp_path, *BF16, "ampere_sgemm_128x64_nn"), H100, L40S)
    assert run.checkpoint == "tensorcore"
    assert any("checkpoint tensorcore, as products run in bf16: 66.7% of the time" in note for note in run.notes)
    nvjet, xmma, fp32 = (_row(run, name) for name in ("nvjet", "sm90_xmma", "ampere_sgemm"))
    assert (nvjet["dtype"], xmma["dtype"], fp32["dtype"]) == ("bf16", "bf16", "fp32")
    assert nvjet["ratio"] == pytest.approx(xmma["ratio"], rel=1e-6)
    # Peaks are 2.7 apart, and L40S reaches a smaller share of its own.
    assert 3.4 < nvjet["ratio"] < 4.2
    assert 0.7 < fp32["ratio"] < 1.3
    only = read_trace(_alone(tmp_path, "volta_sgemm_128x64_nn", GELU))
    assert default_checkpoint(work_of(only.items, nj.load_gpu(V100))) == "fp32"
    with pytest.raises(nj.InputError, match="not trained on gemm"):
        nj.scale_trace(_alone(tmp_path, *BF16), H100, L40S, predictor="fp32")


def test_dtypes_pick_the_path(tmp_path: Path) -> None:
    names = (*BF16, "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "nvjet_qqtst_128x128_128x6_2x1_v_bz_TNN")
    run = nj.scale_trace(_alone(tmp_path, *names), H100, L40S, predictor=ROOF)
    here, there = nj.load_gpu(H100), nj.load_gpu(L40S)
    for name, dtype in (("nvjet_tst", "bf16"), ("volta_fp16", "fp16"), ("nvjet_qq", "fp8")):
        assert _row(run, name)["dtype"] == dtype
        peaks = float(here.peak_flop_per_s(dtype)) / float(there.peak_flop_per_s(dtype))  # type: ignore[arg-type]
        assert _row(run, name)["ratio"] == pytest.approx(peaks, rel=1e-3)
    with pytest.raises(nj.InputError, match=r"1 kinds of products in fp8 \(nvjet_qqtst.* no arithmetic path 'fp8'"):
        nj.scale_trace(_alone(tmp_path, *names), H100, "A100-SXM4-40GB", predictor=ROOF)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    """tf32 is fp32 on a GPU without it, fp64 has its own rate, a dtype the origin lacks goes by bandwidth. All said."""
    names = ("ampere_s1688gemm_128x128_ldg8_stages_32x3_nn", "ampere_dgemm_64x64_nn", "matmul_kernel")
    run = nj.scale_trace(_alone(tmp_path, *names), "A100-SXM4-40GB", V100, predictor=ROOF)
    here, there = nj.load_gpu("A100-SXM4-40GB"), nj.load_gpu(V100)
    ratio = float(here.tf32_flop_per_s) / float(there.fp32_flop_per_s)
    assert _row(run, "ampere_s1688")["ratio"] == pytest.approx(ratio, rel=0.02)
    ratio = float(here.fp64_matrix_flop_per_s) / float(there.fp64_flop_per_s)
    assert _row(run, "ampere_dgemm")["ratio"] == pytest.approx(ratio, rel=0.02)
    said = " ".join(run.notes)
    assert "products in tf32, taken to run in fp32 where a GPU has no tf32: 33.3% of the time" in said
    assert "products whose names say no dtype, taken to be fp32: 33.3% of the time (matmul_kernel)" in said
    bf16 = nj.scale_trace(_alone(tmp_path, BF16[0]), V100, T4, predictor=ROOF)
    assert _row(bf16, "nvjet")["rule"] == "bandwidth"
    assert any("Tesla V100-PCIE-32GB has no path for here" in note for note in bf16.notes)


def test_a_matrix_times_a_vector_is_bound_by_memory(tmp_path: Path) -> None:
    name = "void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16, 4>(x)"
    run = nj.scale_trace(_alone(tmp_path, name), H100, L40S, predictor=ROOF)
    here, there = nj.load_gpu(H100), nj.load_gpu(L40S)
    bandwidth = float(here.mem_bytes_per_s) / float(there.mem_bytes_per_s)
    assert (run.columns["kind"][0], run.columns["dtype"][0]) == ("gemm", "bf16")
    assert float(run.columns["ratio"][0]) == pytest.approx(bandwidth, rel=1e-3)


def test_results_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from neusight_jax.cli.app import run as command

    properties = [{"id": 0, "name": "Tesla V100-PCIE-32GB"}]
    file = write(tmp_path / "t.json", {"deviceProperties": properties, "traceEvents": [kernel("mystery", 0, 100)]})
    assert command(["scale-trace", str(file), "--to", "T4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert next(iter(found)) == "schema"
    assert found["schema"] == "neusight_jax.scaled_runs/1"
    assert found["runs"][0]["schema"] == "neusight_jax.scaled_run/1"
    (run,) = found["runs"]
    assert (found["checkpoint"], run["checkpoint"], run["origin"], run["target"]) == ("fp32", "fp32", V100, T4)
    assert run["notes"][0] == "measured on Tesla V100-PCIE-32GB, as the trace says"
    assert "names of unknown kind, scaled by bandwidth: 100.0% of the time (mystery)" in run["notes"]
    assert run["most_expensive"][0]["rule"] == "bandwidth"
    assert command(["scale-trace", str(file), "--from", "A100-PCIE-40GB", "--to", "T4"]) == 0
    assert "note: the trace says it was measured on Tesla V100-PCIE-32GB, and is scaled" in capsys.readouterr().out
    bare = write(tmp_path / "bare.json", [kernel("mystery", 0, 100)])
    assert command(["scale-trace", str(bare), "--to", "T4"]) == 2
    assert "on which GPU was it measured? it does not say; say so with --from GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    "listed",
    [
        *("nope", '{"a": 1}', "[1]", "[[1, 2]]", '[["Linear", [1, 2]]]', '[["Linear", "abc"]]', '[["MEM", 5]]'),
        *('[["VECgelu", [null, 2]]]', '[["BMM", [1, null, 2, 3]]]', '[["Linear", [-1, 2, 3]]]', "[" * 50000),
    ],
)
def test_kernels_of_a_node_are_checked(listed: str) -> None:
    with pytest.raises(nj.InputError, match="node 'fc' lists the kernels"):
        node_kernels(listed, {"name": "fc"})


def test_operators() -> None:
    (product,) = operator_kernels("aten::mm", [[64, 32], [32, 16]])
    assert dict(product.dims) == {"batch": 1, "m": 64, "n": 16, "k": 32}
    (same,) = operator_kernels("aten::linear", [[4, 16, 32], [16, 32], [16]])
    assert dict(same.dims) == {"batch": 1, "m": 64, "n": 16, "k": 32}
    (add,) = operator_kernels("aten::add_", [[8, 4], [4], []])
    assert dict(add.dims) == {"rows": 8, "cols": 4, "reads": 1.125, "writes": 1}
    tokens_first = operator_kernels("aten::_flash_attention_forward", [[2, 64, 8, 16], *[[2, 96, 4, 16]] * 2])
    heads_first = [[2, 8, 64, 16], *[[2, 4, 96, 16]] * 2]
    backward = operator_kernels("aten::_scaled_dot_product_flash_attention_backward", [[2, 8, 64, 16], *heads_first])
    assert tokens_first == operator_kernels("aten::_scaled_dot_product_cudnn_attention", heads_first) == backward
    (attention,) = tokens_first
    assert (attention.family, attention.dims["queries"], attention.dims["kv_heads"]) == ("prefill", 128, 4)
    assert attention.dims["pairs"] == 2 * sum(range(33, 97))
    flash: dict[str, Any] = {"operator": "aten::_flash_attention_forward", "work": tokens_first}
    assert kernel_of_name("pytorch_flash::flash_fwd_kernel", 1e-3, 1.0, **flash).kernels == tokens_first
    assert kernel_of_name("ampere_sgemm_128x64_tn", 1e-3, 1.0, **flash).kernels == ()
    (step,) = operator_kernels("aten::_efficient_attention_forward", [[2, 1, 8, 16], *[[2, 96, 8, 16]] * 2])
    assert step.family == "decode"
    assert operator_kernels("aten::_flash_attention_forward", [[128, 8, 16], *[[192, 4, 16]] * 2]) == ()
    assert operator_kernels("aten::mm", [[64, 32], [33, 16]]) == ()
    assert operator_kernels("aten::view", [[8, 4]]) == ()
    assert operator_kernels("aten::relu", [[0, 4]]) == ()


def test_occupancy_by_hand() -> None:
    # 64 registers × 32 threads = 2048 a warp, 65536 / 2048 = 32 warps; of 8 warps a block, 4 blocks.
    assert resident_blocks(Launch(1, 256, 64), LIMITS["volta"]) == 4
    assert resident_blocks(Launch(1, 256, 32), LIMITS["volta"]) == 8
    assert resident_blocks(Launch(1, 256, 32), LIMITS["turing"]) == 4
    assert resident_blocks(Launch(1, 32), LIMITS["volta"]) == 32
    assert resident_blocks(Launch(1, 128, 0, 48 << 10), LIMITS["volta"]) == 2
    assert resident_blocks(Launch(1, 1024, 255), LIMITS["volta"]) == 1


def test_chips_of_an_architecture_may_differ() -> None:
    """CUDA programming guide, compute capabilities 8.0, 8.6 and 12.0."""
    shared = {name: limits_of(name).shared_bytes >> 10 for name in ("A100", "A10", "RTX PRO 6000", "B200")}
    assert shared == {"A100": 164, "A10": 100, "RTX PRO 6000": 100, "B200": 228}


def test_busy_time_is_the_union() -> None:
    assert busy_seconds(np.array([0.0, 1.0, 5.0, 5.5]), np.array([2.0, 3.0, 1.0, 0.1])) == (5.0, 6.0)
    assert busy_seconds(np.array([]), np.array([])) == (0.0, 0.0)


def test_cross_gpu_on_real_runs(measurements: Path) -> None:
    """All ordered pairs of the five measured NVIDIA GPUs; docs/scaling.md has the figures."""
    from benchmarks.cross_gpu import SYSTEMS, cross_gpu, cross_gpu_errors

    names = ["P4", "P100", "V100-PCIE-32GB", "T4", "A100-PCIE-40GB"]
    frame = cross_gpu([measurements / "fp32"], "fp32-heldout", names)
    found = cross_gpu_errors(frame).set_index("system")["mean"]
    assert len(frame) >= 50
    assert found["scale_trace"] <= 8.0
    assert found["scale_trace"] < 0.7 * min(found[name] for name in SYSTEMS if name.startswith("habitat"))


def test_sums_of_nodes_by_hand(tmp_path: Path) -> None:
    """3 ms twice and 4 ms once, each with 20 us before it starts, against a label of 12 ms."""
    from benchmarks.node_sums import node_sums

    run = {"device": "Tesla T4", "model": "m", "mode": "inf", "sequence_length": 8, "batch_size": 1, "option": ""}
    plain = {"backward_s": 0.0, "accumulate_s": 0.0, "fw_ops": "[]", "bw_ops": "[]", "acc_ops": "[]"}
    nodes = [
        {**run, **plain, "name": "size", "forward_s": 10e-6, "layer_repeat": 1.0, "output_shape": "[1]"},
        {**run, **plain, "name": "view", "forward_s": 20e-6, "layer_repeat": 1.0, "output_shape": "[8]"},
        {**run, **plain, "name": "a", "forward_s": 3.02e-3, "layer_repeat": 2.0, "output_shape": "[8]"},
        {**run, **plain, "name": "b", "forward_s": 4.02e-3, "layer_repeat": 1.0, "output_shape": "[8]"},
    ]
    (tmp_path / "models").mkdir()
    table = pd.DataFrame(nodes).assign(
        node_index=range(4), fx_target=lambda frame: frame["name"], total_s=lambda frame: frame["forward_s"]
    )
    table.to_parquet(tmp_path / "models" / "per_op.parquet")
    label = {**run, "num_layers": 2, "e2e_s": 12e-3, "forward_s": 12e-3, "backward_s": float("nan")}
    pd.DataFrame([label]).to_csv(tmp_path / "models" / "end_to_end.csv", index=False)
    (found,) = node_sums(tmp_path).to_dict("records")
    assert found["nodes_s"] == pytest.approx(10e-3)
    assert found["timed_s"] == pytest.approx(10e-3 + 90e-6)
    assert found["error"] == pytest.approx(100.0 * (10 / 12 - 1))
    assert found["timed_error"] == pytest.approx(100.0 * (10.09 / 12 - 1))


def test_part_of_a_deviation_is_carried(tmp_path: Path) -> None:
    """By hand: a product measured at 1.5 times its forecast, another at five times, of a fitted predictor."""
    fitted = nj.load_predictor("fp32")
    origin, target = nj.load_gpu(V100), nj.load_gpu(T4)
    (product,) = operator_kernels("aten::mm", [[1024, 512], [512, 256]])
    table = table_from_kernels([product])
    here_s, there_s = (float(nj.predict_kernels(fitted, gpu, table, isolated=False)[0]) for gpu in (origin, target))

    def ratio(times: float, to: Any, *, plain: bool = False, predictor: Any = fitted) -> float:
        events = [
            operator("aten::mm", 11, [[1024, 512], [512, 256]], ["float", "float"], 0),
            kernel("volta_sgemm_128x64_tn", 100, 1e6 * times * here_s, 11, **GRID),
        ]
        file = write(tmp_path / f"{times}{plain}.json", {"traceEvents": events})
        run = nj.scale_trace(file, origin, to, predictor=predictor, plain=plain)
        return float(run.columns["ratio"][0])

    whole = there_s / here_s
    assert ratio(1.5, target, plain=True) == pytest.approx(whole, rel=1e-5)
    # SMs, FLOP per byte, FLOP per joule, L2 per SM of the two.
    figures = []
    for gpu in (origin, target):
        sms, peak = float(gpu.num_sms), float(gpu.fp32_flop_per_s)
        figures.append((sms, peak / float(gpu.mem_bytes_per_s), peak / float(gpu.tdp_w), float(gpu.l2_bytes) / sms))
    apart = sum(abs(math.log(one / other)) for one, other in zip(*figures, strict=True))
    share = FAR_CARRIED + (1 - FAR_CARRIED) * math.exp(-apart)
    assert ratio(1.5, target) == pytest.approx(whole * 1.5 ** (share - 1), rel=1e-4)
    assert ratio(5.0, target) == pytest.approx(whole * math.exp((share - 1) * BELIEVED), rel=1e-4)
    # All of it to the same GPU, and by a predictor that knows nothing of its errors.
    assert ratio(1.5, origin) == pytest.approx(1.0, rel=1e-6)
    assert ratio(1.5, target, predictor=ROOF) == pytest.approx(ratio(3.0, target, predictor=ROOF), rel=1e-6)
