"""Kernel tables as CSV: which rows are kernels, what is left out, units and marks of numbers."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from trace_files import SUM_HEADER, sums

import neusight_jax as nj
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.scaling.rules import read_trace
from neusight_jax.scaling.trace import Trace

V100, T4 = "Tesla V100-PCIE-32GB", "Tesla T4"
ROOF = RooflinePredictor()
KERNELS = sums(("volta_sgemm_128x64_tn", 8_000_000, 80), ("mystery", 2_000_000, 20))
CALLS = 'Time (%),Total Time (ns),Num Calls,Avg (ns),Name\n100.0,50000000,20,2500000,"cudaDeviceSynchronize"\n'
COPIES = 'Time (%),Total Time (ns),Count,Avg (ns),Operation\n100.0,4000000,10,400000,"[CUDA memcpy Host-to-Device]"\n'
RANGES = "Time (%),Total Time (ns),Instances,Avg (ns),Style,Range\n100.0,9000000,1,9000000,PushPop,:step\n"
LAUNCHES = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Device,Strm,Name\n"
    "1000,200000,1,400,1,1,256,1,1,32,0.000,0.000,Tesla V100-PCIE-32GB (0),7,my_own_kernel\n"
    "151000,100000,2,400,1,1,256,1,1,32,0.000,0.000,Tesla V100-PCIE-32GB (0),8,my_own_kernel\n"
    "251000,50000,3,,,,,,,,,,Tesla V100-PCIE-32GB (0),7,[CUDA memcpy Host-to-Device]\n"
)


def _read(tmp_path: Path, text: str, name: str = "table.csv") -> Trace:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return read_trace(file)


def _with(report: str, text: str, source: str = "r.sqlite") -> str:
    return f"Processing [{source}] with [/opt/nsys/reports/{report}.py]...\n\n{text}\n"


def _said(trace: Trace, text: str) -> bool:
    return any(text in note for note in trace.notes)


def test_launches_and_sums(tmp_path: Path) -> None:
    trace = _read(tmp_path, LAUNCHES + "301000,,4,,,,,,,,,,,7,lost\n")
    run = nj.scale_trace(trace, V100, T4, predictor=ROOF)
    assert run.measured_s == pytest.approx(350e-6)
    assert run.busy_s == pytest.approx(300e-6)
    assert list(run.columns["count"]) == [2, 1]
    assert list(run.columns["rule"]) == ["wave", "link"]
    assert _said(trace, "1 rows without a name or duration left out")
    assert trace.gpus == ("Tesla V100-PCIE-32GB",)
    found = nj.scale_trace(_read(tmp_path, KERNELS), V100, T4, predictor=ROOF)
    assert found.measured_s == pytest.approx(10e-3)
    assert list(found.columns["rule"]) == ["inferred", "bandwidth"]
    assert any(
        "names of unknown kind, scaled by bandwidth: 20.0% of the time (mystery)" in note for note in found.notes
    )


REPORTS = [
    pytest.param(
        _with("cuda_gpu_kern_sum", KERNELS) + _with("cuda_api_sum", CALLS) + _with("osrt_sum", CALLS),
        ("cuda_api_sum, 1 rows (50 ms), left out: its rows are no kernels", "osrt_sum, 1 rows (50 ms), left out"),
        id="named",
    ),
    pytest.param(
        KERNELS + "\n" + CALLS + "\n" + COPIES + "\n" + RANGES,
        ("a table of Time (%)/Total Time (ns)/Num Calls/Avg (ns), 1 rows (50 ms), left out", "1 rows (4 ms)", "(9 ms)"),
        id="without names",
    ),
    pytest.param(
        _with("cuda_api_sum", CALLS) + _with("cuda_gpu_mem_time_sum", COPIES) + _with("cuda_gpu_kern_sum", KERNELS),
        ("cuda_gpu_mem_time_sum, 1 rows (4 ms), left out: its rows are no kernels",),
        id="kernels last",
    ),
    pytest.param(
        KERNELS.replace("Time (%)", "Time(%)").replace("Avg (ns),Med", "Average,Med") + _with("cudaapisum", CALLS),
        ("cudaapisum, 1 rows",),
        id="names before 2022",
    ),
    pytest.param(
        "Running [/opt/nsys/reports/gpukernsum.py r.sqlite]...\n" + KERNELS,
        (),
        id="script before 2023",
    ),
    pytest.param(
        _with("cuda_gpu_kern_sum", KERNELS) + _with("cuda_gpu_kern_sum:base", KERNELS.replace("_128x64_tn", "")),
        ("cuda_gpu_kern_sum:base, 2 rows (10 ms), left out: it repeats kernels of cuda_gpu_kern_sum",),
        id="the same twice",
    ),
    pytest.param(
        "Generating SQLite file r.sqlite from r.nsys-rep\nExporting 4000 events: [====100%====]\n" + KERNELS,
        (),
        id="a preamble",
    ),
]


@pytest.mark.parametrize(("text", "notes"), REPORTS)
def test_only_kernels_of_one_report_count(tmp_path: Path, text: str, notes: tuple[str, ...]) -> None:
    trace = _read(tmp_path, text)
    assert trace.kernel_s == pytest.approx(10e-3)
    assert sum(item.count for item in trace.items) == 100
    for note in notes:
        assert _said(trace, note), trace.notes
    assert sum("left out" in note for note in trace.notes) >= len(notes)


def test_launches_before_sums_of_them(tmp_path: Path) -> None:
    trace = _read(tmp_path, _with("cuda_gpu_kern_sum", KERNELS) + _with("cuda_gpu_trace", LAUNCHES))
    assert trace.kernel_s == pytest.approx(350e-6)
    assert _said(trace, "cuda_gpu_kern_sum, 2 rows (10 ms), left out: it repeats kernels of cuda_gpu_trace")


def test_two_profiles_are_added_and_said(tmp_path: Path) -> None:
    other = sums(("volta_sgemm_32x32_nn", 3_000_000, 3))
    text = _with("cuda_gpu_kern_sum", KERNELS) + _with("cuda_gpu_kern_sum", other, "rank1.sqlite")
    trace = _read(tmp_path, text)
    assert trace.kernel_s == pytest.approx(13e-3)
    assert _said(trace, "2 tables of cuda_gpu_kern_sum: their kernels are added up")


@pytest.mark.parametrize(
    ("header", "row", "delimiter"),
    [
        ("Total Time (ns)", '"8,000,000"', ","),
        ("Total Time (us)", "8000", ","),
        ("Total Time (ms)", "8.0", ","),
        ("Total Time (s)", "0.008", ","),
        ("Total Time (nsec)", "8000000", ","),
        ("Total Time", "8000000", ","),
        ("Total Time (ms)", "8,0", ";"),
        ("Total Time (ns)", "8.000.000,0", ";"),
        ("Total Time (ns)", "8 000 000", ";"),
        ("Total Time (ns)", "8000000", "\t"),
        ("TotalDurationNs", "8000000", ","),
    ],
)
def test_units_and_marks_of_numbers(tmp_path: Path, header: str, row: str, delimiter: str) -> None:
    text = delimiter.join([header, "Instances", "Name"]) + "\n" + delimiter.join([row, "80", "'k'"]) + "\n"
    assert _read(tmp_path, text).kernel_s == pytest.approx(8e-3)


def test_encodings_and_packing(tmp_path: Path) -> None:
    for encoding in ("utf-8-sig", "utf-16"):  # what a shell of Windows makes of `nsys stats ... > table.csv`
        file = tmp_path / "table.csv"
        file.write_bytes(KERNELS.replace("\n", "\r\n").encode(encoding))
        assert read_trace(file).kernel_s == pytest.approx(10e-3)
    packed = tmp_path / "table.csv.gz"
    packed.write_bytes(gzip.compress(KERNELS.encode()))
    assert read_trace(packed).kernel_s == pytest.approx(10e-3)


def test_rocprof(tmp_path: Path) -> None:
    stats = 'Name,Calls,TotalDurationNs,AverageNs,Percentage\n"Cijk_Ailk_Bljk_HHS_BH_MT64x64x32",4,9000,2250,90.0\n'
    calls = '"hipLaunchKernel",10,7000,700,70.0\n'
    trace = _read(tmp_path, stats + calls)
    assert trace.kernel_s == pytest.approx(9e-6)
    assert _said(trace, "1 rows of host calls, left out: they are no kernels (7 us)")
    assert (trace.items[0].kind, trace.items[0].dtype) == ("gemm", "fp16")
    launches = (
        "Kind,Agent_Id,Queue_Id,Kernel_Name,Correlation_Id,Start_Timestamp,End_Timestamp,"
        "Workgroup_Size_X,Workgroup_Size_Y,Workgroup_Size_Z,Grid_Size_X,Grid_Size_Y,Grid_Size_Z\n"
        'KERNEL_DISPATCH,1,1,"my_kernel",1,1000,6000,256,1,1,102400,1,1\n'
        'KERNEL_DISPATCH,1,1,"my_kernel",2,8000,9000,256,1,1,102400,1,1\n'
    )
    trace = _read(tmp_path, launches)
    assert (trace.kernel_s, trace.span_s) == (pytest.approx(6e-6), pytest.approx(8e-6))
    assert trace.items[0].launch is not None
    assert (trace.items[0].launch.blocks, trace.items[0].launch.threads) == (400, 256)


COUNTERS = "Correlation_Id,Dispatch_Id,Agent_Id,Process_Id,Kernel_Name,Counter_Name,Counter_Value,{}\n"


def test_a_dispatch_repeated_for_each_counter_is_one_kernel(tmp_path: Path) -> None:
    """rocprofv3 writes a row for each counter; with more counters than fit it replays the launch, at other times."""
    rows = [
        f"{dispatch},{dispatch},Agent 4,{process},my_kernel,{counter},7,{at + replay},{at + replay + 1000}\n"
        for process in (1, 2)
        for dispatch, at in ((1, 10_000), (2, 20_000))
        for counter, replay in (("SQ_WAVES", 0), ("FETCH_SIZE", 0), ("MfmaUtil", 5_000))
    ]
    trace = _read(tmp_path, COUNTERS.format("Start_Timestamp,End_Timestamp") + "".join(rows))
    assert trace.kernel_s == pytest.approx(4e-6)
    assert sum(item.count for item in trace.items) == 4
    assert _said(trace, "8 rows repeated for each counter of a launch, counted once (8 us)")


def test_a_row_for_each_metric_of_nsight_compute(tmp_path: Path) -> None:
    header = '"ID","Process ID","Kernel Name","Context","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    metrics = (
        ("GPU Speed Of Light", "SM Frequency", "cycle/nsecond", "1.2"),
        ("GPU Speed Of Light", "Duration", "{}", "{}"),
    )
    text = "".join(
        f'"{at}","1","my_kernel(float *)","1","{section}","{name}","{unit.format(scale)}","{value.format(size)}"\n'
        for at, (scale, size) in enumerate((("usecond", "20"), ("nsecond", "5,000"), ("msecond", "1")))
        for section, name, unit, value in metrics
    )
    trace = _read(tmp_path, "==PROF== Disconnected\n" + header + text)
    assert trace.kernel_s == pytest.approx(1.025e-3)
    assert sum(item.count for item in trace.items) == 3


def test_grid_and_block_in_one_column(tmp_path: Path) -> None:
    text = (
        "Time (%),Total Time (ns),Instances,GridXYZ,BlockXYZ,Name\n"
        '60.0,600,2," 400    1    1"," 256    1    1",my_kernel\n40.0,400,1,"8 1 1","128 1 1",my_kernel\n'
    )
    trace = _read(tmp_path, text)
    launches = [item.launch for item in trace.items]
    assert [(each.blocks, each.threads) for each in launches if each] == [(400, 256), (8, 128)]


def test_kernel_launch_and_exec_times(tmp_path: Path) -> None:
    """`cuda_kern_exec_sum` has the kernels' own mean beside that of the calls."""
    header = "PID,Count,QCount,AAvg (ns),QAvg (ns),KAvg (ns),TAvg (ns),API Name,Kernel Name"
    text = f"{header}\n1,4,4,900,50,250,1200,cudaLaunchKernel,k\n"
    assert _read(tmp_path, text).kernel_s == pytest.approx(1000e-9)


def test_rows_that_are_lost_are_said(tmp_path: Path) -> None:
    broken = (
        KERNELS + "1,2\n" + '5.0,-7,1,1,1,1,1,1,"negative"\n' + '5.0,nan,1,1,1,1,1,1,"none"\n' + "5.0,9,x,1,1,1,1,1,k\n"
    )
    trace = _read(tmp_path, broken)
    assert trace.kernel_s == pytest.approx(10e-3 + 9e-9)
    (note,) = [each for each in trace.notes if "left out" in each]
    assert "1 lines that are no rows of their table, left out" in note
    assert "2 rows without a name or duration left out" in note
    assert "1 rows without a number of launches: taken as one launch" in note
    doubled = _read(tmp_path, LAUNCHES + LAUNCHES.splitlines()[1] + "\n")
    assert doubled.kernel_s == pytest.approx(350e-6)
    assert _said(doubled, "1 rows written twice, counted once (200 us)")
    cut = _read(tmp_path, "\n".join(KERNELS.splitlines()[:2]) + "\n")
    assert _said(cut, "the shares of its rows add up to 80.0 %, not 100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "no header with a column Name"),
        ("", "no header with a column Name"),
        ("Time,Name\n1,k\n", "no column Duration or Total Time"),
        ("Total Time (fortnights),Instances,Name\n1,1,k\n", "in an unknown unit; expected ns, us, ms or s"),
        (SUM_HEADER + "\n", "no row has a name and a duration"),
        (CALLS, "no kernels in it"),
        (_with("cuda_api_sum", CALLS), r"no kernels in it \(cuda_api_sum\)"),
        ('[{"Time (%)": 1}]', "named as a CSV, but holds json"),
        ("SQLite format 3\0", "named as a CSV, but holds sqlite"),
        ("PAR1", "named as a CSV, but holds parquet"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(nj.InputError, match=message):
        _read(tmp_path, text)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(KERNELS.encode() + b"\xff\xfe\x00")
    with pytest.raises(nj.InputError, match="cannot be read as UTF-8 text"):
        read_trace(file)


def test_damage_is_one_line_or_a_finite_answer(tmp_path: Path) -> None:
    dice = random.Random(0)
    read = refused = 0
    for _ in range(600):
        lines = [line.split(",") for line in dice.choice([KERNELS, LAUNCHES, KERNELS + CALLS]).splitlines()]
        row = dice.choice(lines)
        at, how = dice.randrange(len(row)), dice.random()
        if how < 0.3:
            lines = [[cell for place, cell in enumerate(each) if place != at] for each in lines]
        elif how < 0.8:
            row[at] = dice.choice(["", "x", "-5", "nan", "inf", "1e400", '"', "9" * 5000, "1e300", "0"])
        text = "\n".join(",".join(each) for each in lines) + "\n"
        if how > 0.9:
            text = text[: dice.randrange(len(text))]
        try:
            trace = _read(tmp_path, text)
        except nj.InputError:
            refused += 1
            continue
        read += 1
        assert 0.0 <= trace.busy_s <= trace.span_s * (1 + 1e-9) < 1e13
    assert min(read, refused) > 100
