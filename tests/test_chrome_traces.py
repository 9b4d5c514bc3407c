"""Chrome traces of PyTorch's and JAX's profilers: every event is counted once, or said to be left out."""

from __future__ import annotations

import gzip
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from trace_files import GRID, jax_events, kernel, operator, write

import neusight_jax as nj
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.scaling.rules import read_trace
from neusight_jax.scaling.trace import Trace

ROOF = RooflinePredictor()
A100, H100, L40S = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def _read(tmp_path: Path, events: Any, **more: Any) -> Trace:
    return read_trace(write(tmp_path / "trace.json", {**more, "traceEvents": events}))


def _said(trace: Trace, text: str) -> bool:
    return any(text in note for note in trace.notes)


# What JSON may hold


@pytest.mark.parametrize(
    "odd",
    [
        '"Sequence number": 18446744073709551615',
        f'"big": {"9" * 5000}',
        '"a": NaN, "b": Infinity, "c": -Infinity',
        '"a": nan, "b": -inf, "c": nan(ind)',
        '"huge": 1e999',
        '"text": "\\ud800 half a pair"',
        '"text": "\\u0001\x02 control"',
        '"External id": 18446744073709551615',
        '"grid": [1, null, 1]',
        '"grid": "many"',
        '"stream": [7]',
        '"correlation": {"a": 1}',
    ],
)
def test_any_valid_value_is_read(tmp_path: Path, odd: str) -> None:
    text = f'{{"traceEvents": [{{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 5, "args": {{{odd}}}}}]}}'
    trace = read_trace(write(tmp_path / "trace.json", text))
    assert trace.kernel_s == pytest.approx(5e-6)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_marks(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(json.dumps([kernel("é", 1, 5)], ensure_ascii=False).encode(encoding))
    assert [item.name for item in read_trace(file).items] == ["é"]


def test_bytes_that_are_not_utf8_are_said(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(json.dumps([kernel("k?", 1, 5)]).encode().replace(b"?", b"\xff"))
    trace = read_trace(file)
    assert trace.kernel_s == pytest.approx(5e-6)
    assert _said(trace, "not UTF-8")


def test_long_files_are_read_in_pieces(tmp_path: Path) -> None:
    """Values that lie across two pieces, and one that is longer than a piece."""
    events = [kernel(f"k{at % 7}", 10.0 * at, 5, note="x" * (at % 97)) for at in range(30000)]
    events[3]["args"]["note"] = "y" * (3 << 20)
    trace = _read(tmp_path, events)
    assert sum(item.count for item in trace.items) == 30000
    assert trace.kernel_s == pytest.approx(0.15)


def test_packed_by_content_whatever_the_name(tmp_path: Path) -> None:
    text = json.dumps([kernel("k", 1, 5)])
    plain = tmp_path / "unpacked_by_a_browser.json.gz"
    plain.write_text(text)
    packed = tmp_path / "packed.json"
    packed.write_bytes(gzip.compress(text.encode()))
    archive = tmp_path / "trace.json.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("trace.json", text)
    for file in (plain, packed, archive):
        assert read_trace(file).kernel_s == pytest.approx(5e-6)
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr("other.json", text)
    with pytest.raises(nj.InputError, match="holds 2 files"):
        read_trace(archive)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", '{"traceEvents": [{"ph": "X", "cat": "kernel"', r"not whole JSON \(cut off\)"),
        ("t.json", '{"traceEvents": [{"ph": "X"}]', r"not whole JSON \(cut off\)"),
        ("t.json", '{"traceEvents": [{]}', "not whole JSON"),
        ("t.json", '[{"a": 1} {"b": 2}]', "not whole JSON"),
        ("t.json", '[{"a": 1}]\n[{"a": 1}]', "several traces in one file"),
        ("t.json", "[" * 100000, "nested too deep"),
        ("t.json", "hello", "not JSON: expected an object or a list"),
        ("t.json", "", "not JSON: expected an object or a list"),
        ("t.json", '{"other": []}', "holds no events"),
        ("t.json", "[]", "holds no events"),
        ("t.json", '[{"ph": "M"}]', "no GPU kernel and no operator"),
        ("t.txt", "x", "unknown kind of trace"),
        ("t.json", "SQLite format 3\0", "a database"),
        ("t.sqlite", "SQLite format 3\0", "nsys stats --format csv"),
        ("t.nsys-rep", "x", "a report of Nsight Systems"),
        ("t.xplane.pb", "x", "give the"),
        ("t.pickle", "x", "a memory snapshot"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        read_trace(write(tmp_path / name, content))


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps([kernel("k", at, 1) for at in range(500)]).encode())
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(nj.InputError, match="cut off or damaged"):
        read_trace(cut)
    with pytest.raises(nj.InputError, match="no such file"):
        read_trace(tmp_path / "nowhere.json")


# PyTorch


def test_what_spans_kernels_is_not_counted_again(tmp_path: Path) -> None:
    events = [
        kernel("ampere_sgemm_128x64_nn", 0, 100),
        kernel("ProfilerStep#3", 0, 200, cat="gpu_user_annotation"),
        kernel("ProfilerStep#4", 300, 200, cat="gpu_user_annotation"),
        kernel("nccl:all_reduce", 0, 50, cat="gpu_user_annotation"),
    ]
    trace = _read(tmp_path, events)
    assert trace.kernel_s == pytest.approx(100e-6)
    assert _said(trace, "3 gpu_user_annotation events, left out: they span kernels that are counted (450 us)")
    assert _said(trace, "2 steps of the profiler's schedule")


def test_double_and_unusable_events_are_said_in_one_note(tmp_path: Path) -> None:
    twice = kernel("k", 0, 100, correlation=5)
    graph = [kernel("k", at, 1, correlation=9) for at in (200, 210)]  # launched together, at their own times
    odd = [kernel("a", 300, None), kernel("b", 310, -1), kernel("c", 320, 1e30), kernel("", 330, 7)]
    begun = {**kernel("d", 340, None), "ph": "B"}
    unplaced = {**kernel("e", 350, 3), "ts": "soon"}
    trace = _read(tmp_path, [twice, twice, *graph, *odd, begun, unplaced])
    assert trace.kernel_s == pytest.approx((100 + 2 + 7) * 1e-6)
    (note,) = [each for each in trace.notes if "left out" in each]
    assert "1 GPU events written twice, counted once (100 us)" in note
    assert "4 GPU events without a usable duration, left out" in note
    assert "1 GPU events without a usable start, left out: they cannot be placed (3 us)" in note
    assert "1 GPU events without a usable name, kept as (no name)" in note


def test_the_same_kernel_on_two_streams_is_no_double(tmp_path: Path) -> None:
    trace = _read(tmp_path, [kernel("k", 0, 100, stream=7), kernel("k", 0, 100, stream=8)])
    assert trace.kernel_s == pytest.approx(200e-6)
    assert trace.busy_s == pytest.approx(100e-6)
    assert _said(trace, "streams overlap: 200 us of kernels in 100 us")


def test_several_gpus_are_summed_and_said(tmp_path: Path) -> None:
    trace = _read(tmp_path, [kernel("k", 0, 100, device=0), kernel("k", 0, 60, device=1)])
    assert trace.kernel_s == pytest.approx(160e-6)
    assert _said(trace, "2 GPUs in this trace (device 0: 100 us, device 1: 60 us of kernels)")


def test_only_the_product_of_an_operator_is_its_work(tmp_path: Path) -> None:
    """cuBLAS launches a memset and a reduction of partial products beside the product of one `aten::mm`."""
    shapes = [[4096, 4096], [4096, 4096]]
    events = [
        operator("aten::mm", 1, shapes, ["c10::BFloat16"] * 2, 0),
        kernel("Memset (Device)", 10, 2, 1, cat="gpu_memset"),
        kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 20, 300, 1, **GRID),
        kernel("void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(x)", 330, 20, 1, **GRID),
    ]
    items = {item.kind: item for item in _read(tmp_path, events).items}
    assert items["gemm"].kernels
    assert items["gemm"].operator == items["reduce"].operator == "aten::mm"
    assert (items["gemm"].dtype, items["copy"].kernels, items["reduce"].kernels) == ("bf16", (), ())


def test_the_kernel_says_its_arithmetic_where_operands_do_not(tmp_path: Path) -> None:
    """fp32 operands on tensor cores are tf32; a name without a dtype takes that of the operands."""
    events = [
        operator("aten::mm", 1, [[512, 512], [512, 512]], ["float", "float"], 0),
        operator("aten::mm", 2, [[512, 512], [512, 512]], ["c10::Half", "c10::Half"], 10),
        operator("aten::mm", 3, [[512, 512], [512, 512]], ["double", "double"], 20),
        kernel("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage3", 20, 30, 1),
        kernel("triton_mm", 60, 30, 2),
        kernel("matmul_kernel", 100, 30, 3),
    ]
    trace = _read(tmp_path, events)
    assert [item.dtype for item in trace.items] == ["tf32", "fp16", "fp64"]
    run = nj.scale_trace(trace, A100, H100, predictor=ROOF)
    assert list(run.columns["rule"]) == ["forecast"] * 3


# Which GPU


def test_the_file_says_which_gpu(tmp_path: Path) -> None:
    properties = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}, {"id": 1, "name": "NVIDIA A100-SXM4-40GB"}]
    trace = _read(tmp_path, [kernel(ELEMENTWISE, 0, 100, device=0)], deviceProperties=properties)
    assert trace.gpus == ("NVIDIA H100 80GB HBM3",)  # the other ran nothing
    for alias in ("H100", "h100-sxm5-80gb", None):
        run = nj.scale_trace(trace, alias, L40S, predictor=ROOF)
        assert run.origin == H100
        assert not any("says it was measured" in note for note in run.notes)
    assert any("measured on NVIDIA H100 80GB HBM3, as the trace says" in note for note in run.notes)
    other = nj.scale_trace(trace, "A100-SXM4-40GB", L40S, predictor=ROOF)
    assert "NVIDIA H100 80GB HBM3, and is scaled as if on NVIDIA A100-SXM4-40GB" in other.notes[0]


def test_a_gpu_nobody_knows_is_a_note_too(tmp_path: Path) -> None:
    properties = [{"id": 0, "name": "NVIDIA GeForce GTX 9090"}]
    trace = _read(tmp_path, [kernel(ELEMENTWISE, 0, 100)], deviceProperties=properties)
    assert "GTX 9090" in nj.scale_trace(trace, "H100", L40S, predictor=ROOF).notes[0]
    with pytest.raises(nj.InputError, match="it names NVIDIA GeForce GTX 9090; say so with --from"):
        nj.scale_trace(trace, None, L40S, predictor=ROOF)
    with pytest.raises(nj.InputError, match="it does not say; say so with --from"):
        nj.scale_trace(_read(tmp_path, [kernel("k", 0, 100)]), None, L40S, predictor=ROOF)


# JAX


PRODUCT = ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 10.0, 900.0, {"hlo_op": "dot.3", "correlation_id": "7"})
DETAILS = {"kernel_details": "regs:32 static_shared:0 dynamic_shared:0 grid:400,1,1 block:256,1,1 occ_pct:50"}
FUSION = ("loop_add_fusion", 920.0, 100.0, {"hlo_op": "loop_add_fusion", "correlation_id": "8", **DETAILS})
COPIED = ("MemcpyH2D", 920.0, 50.0, {"memcpy_details": "kind_src:pinned kind_dst:device size:4096 dest:0 async:1"})
STREAMS = [(0, 14, "Stream #14(Compute)", [PRODUCT, FUSION]), (0, 15, "Stream #15(MemcpyH2D)", [COPIED])]
DERIVED = [
    (0, 1, "XLA Modules", [("jit_step(123)", 10.0, 1010.0, {})]),
    (0, 2, "XLA Ops", [("dot.3", 10.0, 900.0, {}), ("loop_add_fusion", 920.0, 100.0, {})]),
    (0, 3, "Steps", [("1", 10.0, 1010.0, {})]),
]


def test_jax_streams_are_kernels_and_nothing_else(tmp_path: Path) -> None:
    trace = _read(tmp_path, jax_events(*STREAMS, *DERIVED))
    assert trace.kernel_s == pytest.approx(1050e-6)
    items = {item.name: item for item in trace.items}
    assert (items[PRODUCT[0]].kind, items[PRODUCT[0]].dtype, items[PRODUCT[0]].operator) == ("gemm", "bf16", "dot.3")
    fusion = items["loop_add_fusion"]
    assert fusion.kind == "elementwise"
    assert fusion.launch is not None
    assert (fusion.launch.blocks, fusion.launch.threads, fusion.launch.registers) == (400, 256, 32)
    assert items["MemcpyH2D"].kind == "transfer"
    assert _said(trace, "2 events of the line 'XLA Ops', left out: they repeat the kernels' time (1 ms)")
    assert _said(trace, "1 events of the line 'XLA Modules', left out")


def test_jax_operators_stand_in_where_there_are_no_streams(tmp_path: Path) -> None:
    trace = _read(tmp_path, jax_events(*DERIVED))
    assert trace.kernel_s == pytest.approx(1000e-6)
    assert {item.kind for item in trace.items} == {"gemm", "elementwise"}


def test_jax_kernels_of_unknown_name_go_by_their_operator(tmp_path: Path) -> None:
    odd = ("my_custom_thing", 0.0, 10.0, {"hlo_op": "input_reduce_fusion.2"})
    trace = _read(tmp_path, jax_events((0, 14, "Stream #14(Compute)", [odd])))
    assert [item.kind for item in trace.items] == ["reduce"]


def test_jax_several_gpus_and_names(tmp_path: Path) -> None:
    events = jax_events(STREAMS[0], (1, 14, "Stream #14(Compute)", [PRODUCT]))
    trace = _read(tmp_path, events, metadata={"device_name": "NVIDIA H100 80GB HBM3"})
    assert trace.kernel_s == pytest.approx(1900e-6)
    assert _said(trace, "2 GPUs in this trace")
    assert trace.gpus == ("NVIDIA H100 80GB HBM3",)


def test_jax_without_a_gpu_is_refused(tmp_path: Path) -> None:
    name = {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/host:CPU"}}
    timed = {"ph": "X", "pid": 7, "tid": 1, "ts": 1, "dur": 5, "name": "dot", "args": {"hlo_op": "dot"}}
    with pytest.raises(nj.InputError, match=r"a trace of jax\.profiler without a GPU"):
        _read(tmp_path, [name, timed])
    name["args"] = {"name": "/device:TPU:0"}
    with pytest.raises(nj.InputError, match="a trace of a TPU"):
        _read(tmp_path, [name, timed])


def test_the_folder_jax_writes(tmp_path: Path) -> None:
    session = tmp_path / "plugins" / "profile" / "2026_01_02_03_04_05"
    session.mkdir(parents=True)
    content = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": jax_events(*STREAMS)}
    write(session / "perfetto_trace.json.gz", content)
    assert read_trace(tmp_path).kernel_s == pytest.approx(1050e-6)
    write(session / "host.trace.json.gz", content)
    assert read_trace(tmp_path).source == "host.trace.json.gz"
    assert read_trace(tmp_path / "plugins").kernel_s == pytest.approx(1050e-6)
    older = session.parent / "2025_01_02_03_04_05"
    older.mkdir()
    write(older / "host.trace.json.gz", {"traceEvents": jax_events(DERIVED[1])})
    assert _said(read_trace(tmp_path), "2 sessions in this folder: read the last, 2026_01_02_03_04_05")
    write(session / "other.trace.json.gz", content)
    with pytest.raises(nj.InputError, match="2 hosts"):
        read_trace(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(nj.InputError, match="a folder without a trace"):
        read_trace(empty)


# Damage


ODD: list[Any] = [None, True, -1, 1e308, float("nan"), float("inf"), 2**64, 10**30, "x", "", [], {}, [None], "\ud800"]


def _damaged(content: Any, dice: random.Random) -> str:
    """JSON with a value taken out or made another, or text cut off or changed."""
    tree = json.loads(json.dumps(content))
    places: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        places += [(node, key) for key in keys]
        stack += [node[key] for key in keys if isinstance(node[key], dict | list)]
    node, key = dice.choice(places)
    if dice.random() < 0.3:
        del node[key]
    else:
        node[key] = dice.choice(ODD)
    text = json.dumps(tree)
    if dice.random() < 0.3:
        text = text[: dice.randrange(len(text))]
    elif dice.random() < 0.3:
        at = dice.randrange(len(text))
        text = text[:at] + chr(dice.randrange(32, 127)) + text[at + 1 :]
    return text


def test_damage_is_one_line_or_a_finite_answer(tmp_path: Path) -> None:
    dice = random.Random(0)
    torch_events = [
        operator("aten::mm", 1, [[64, 64], [64, 64]], ["float", "float"], 0),
        kernel("ampere_sgemm_32x32_nn", 10, 20, 1, **GRID),
        kernel("Memcpy HtoD (Pinned -> Device)", 40, 5, cat="gpu_memcpy"),
    ]
    torch_trace = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "traceEvents": torch_events}
    read = refused = 0
    for content in (torch_trace, {"traceEvents": jax_events(*STREAMS, *DERIVED)}):
        for _ in range(300):
            file = write(tmp_path / "trace.json", _damaged(content, dice))
            try:
                trace = read_trace(file)
            except nj.InputError:
                refused += 1
                continue
            read += 1
            assert 0.0 <= trace.busy_s <= trace.span_s * (1 + 1e-9) + 1e-12 < 1e13
            "".join([*trace.notes, *(item.name for item in trace.items)]).encode()
    assert min(read, refused) > 100
