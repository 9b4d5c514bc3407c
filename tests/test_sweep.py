"""Sweeps: every row once and right, whatever the chunks, the devices, the processes, and a kill in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from predictors import NIGHTLY, random_predictor

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.hardware.variant import vary
from neusight_jax.kernels.table import Kernel, distinct
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.sweeps import run as run_module
from neusight_jax.sweeps.devices import Processes, join_processes
from neusight_jax.sweeps.parts import Parts
from neusight_jax.sweeps.space import BLOCK, Grid, Range, Samples
from neusight_jax.workloads import combined, usual_machine, workload

HOME = Path(nj.__file__).resolve().parents[1]
MEMORY = Range("mem_bytes_per_s", 1e11, 1e13, count=5)
SMS = Range("num_sms", 10, 160, count=4)
JOB: dict[str, Any] = {"global_batch_size": 2, "sequence_length": 16, "dtype": "fp32", "optimizer": None}
TINY = ("bert-tiny", "--gpu", "T4", "--batch-size", "2", "--sequence-length", "16")


def test_a_grid_is_every_combination() -> None:
    grid = Grid((SMS, MEMORY))
    points = grid.slice(0, grid.rows)
    assert grid.rows == 20
    assert list(points["num_sms"][::5]) == [10, 25, 63, 160]  # 10 · 16^(i/3), whole
    np.testing.assert_allclose(points["mem_bytes_per_s"][:5], [1e11, 10**11.5, 1e12, 10**12.5, 1e13])
    assert len({tuple(row) for row in np.stack(list(points.values()), 1)}) == 20


def test_slopes_of_every_row_are_those_of_its_field(tmp_path: Path) -> None:
    """Each slope is the difference of the same sweep a little to either side; also of a job."""
    predictor, gpus = RooflinePredictor(), {"T4": nj.load_gpu("T4")}
    works = [nj.graph_from_config("bert-tiny", 2, 16), nj.job_from_config("bert-tiny", nj.Parallelism(data=2), **JOB)]
    space = Samples((Range("mem_bytes_per_s", 1e11, 1e12), Range("clock_hz", 1e9, 2e9)), 4)
    frame = nj.sweep(predictor, gpus, works, space, tmp_path / "slopes", gradients=True).to_frame()
    plain = nj.sweep(predictor, gpus, works, space, tmp_path / "plain").to_frame()
    np.testing.assert_allclose(frame["seconds"], plain["seconds"], rtol=1e-5)
    for place, row in frame.iterrows():
        work = works[row["workload"]]
        point = {name: float(row[name]) for name in ("mem_bytes_per_s", "clock_hz")}
        base = usual_machine("T4", gpus["T4"], work)
        asked = work.kernels if isinstance(work, Graph) else work
        for name in point:
            ends = [
                float(nj.latency(predictor, vary(base, {**point, name: point[name] * factor}), asked))
                for factor in (0.99, 1.01)
            ]
            difference = (ends[1] - ends[0]) / (0.02 * point[name])
            assert row[f"slope_{name}"] == pytest.approx(
                difference, rel=0.05, abs=1e-3 * row["seconds"] / point[name]
            ), place


@pytest.mark.parametrize("method", ["sobol", "random"])
def test_any_slice_of_samples_is_part_of_the_whole(method: Any) -> None:
    space = Samples((SMS, MEMORY), 2 * BLOCK + 100, method, seed=3)
    whole = space.slice(0, space.rows)
    for start, stop in ((0, 7), (5, 6), (BLOCK - 3, BLOCK + 3), (2 * BLOCK, space.rows)):
        part = space.slice(start, stop)
        for name, values in part.items():
            np.testing.assert_array_equal(values, whole[name][start:stop])
    assert np.all((whole["num_sms"] == np.round(whole["num_sms"])) & (whole["num_sms"] >= 10))
    shares = np.log(whole["mem_bytes_per_s"] / 1e11) / np.log(100)
    np.testing.assert_allclose(np.quantile(shares, [0.1, 0.5, 0.9]), [0.1, 0.5, 0.9], atol=0.02)
    other = Samples((SMS, MEMORY), 10, method, seed=4).slice(0, 10)
    assert not np.array_equal(other["mem_bytes_per_s"], whole["mem_bytes_per_s"][:10])


def test_steps_and_plain_spacing() -> None:
    stepped = Range("l2_bytes", 1.5 * 2**20, 9.9 * 2**20, step=2**20)
    np.testing.assert_array_equal(stepped.rounded(np.array([1.0, 3.4e6, 1e12])) / 2**20, [2, 3, 9])
    plain = Range("clock_hz", 1e9, 2e9, count=3, log=False)
    np.testing.assert_allclose(Grid((plain,)).slice(0, 3)["clock_hz"], [1e9, 1.5e9, 2e9])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Range("bandwidth", 1e11, 1e12), "a GPU has no field 'bandwidth'; expected one of num_sms, "),
        (lambda: Range("num_sms", 10, 5), "10 to 5 is empty"),
        (lambda: Range("num_sms", 0, 5), "0 is not positive"),
        (lambda: Range("mem_bytes_per_s", 100, 900), "this looks like GB/s, multiply by 1e9"),
        (lambda: Range("l2_bytes", 1.1e6, 1.9e6, step=1e6), "no multiple of the step"),
        (lambda: Grid((MEMORY, MEMORY)), "two ranges"),
        (lambda: Grid((Range("num_sms", 1, 2),)), "0 points"),
        (lambda: Samples((MEMORY,), 0), "0 samples"),
        (lambda: Grid(()), "at least one field"),
    ],
)
def test_bad_spaces_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_peaks_follow_sms_and_clock() -> None:
    base = nj.load_gpu("H100")
    machine = vary(base, {"num_sms": np.array([66.0, 132.0]), "clock_hz": 2.0 * float(base.clock_hz)})
    np.testing.assert_allclose(np.asarray(machine.fp32_flop_per_s) / base.fp32_flop_per_s, [1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(machine.mem_bytes_per_s, [base.mem_bytes_per_s] * 2, rtol=1e-6)
    fixed = vary(base, {"num_sms": 66.0}, peaks_follow=False)
    assert float(fixed.fp32_flop_per_s) == pytest.approx(base.fp32_flop_per_s)
    given = vary(base, {"num_sms": 66.0, "bf16_flop_per_s": 1e15})
    assert float(given.bf16_flop_per_s) == pytest.approx(1e15)


def test_distinct_kernels_sum_to_the_same() -> None:
    predictor, gpu = random_predictor("mixture", 0), nj.load_gpu("T4")
    graphs = [nj.graph_from_config("bert-tiny", 2, size, mode) for size, mode in ((16, "training"), (32, "inference"))]
    loads = [workload(graph) for graph in graphs]
    table, counts = combined(loads)
    each = kernel_latency(predictor, gpu, table)
    for place, (graph, load) in enumerate(zip(graphs, loads, strict=True)):
        whole = float(nj.latency(predictor, gpu, graph.kernels))
        assert load.kernels.num_rows < graph.kernels.num_rows
        assert float(nj.latency(predictor, gpu, distinct(graph.kernels))) == pytest.approx(whole, rel=1e-5)
        joined = sum(float(counts[name][place] @ np.asarray(values)) for name, values in each.items())
        assert joined == pytest.approx(whole, rel=1e-5)


def _forecasts(frame: pd.DataFrame, predictor: Any, bases: dict[str, nj.GPU], graphs: Sequence[Graph]) -> np.ndarray:
    """Seconds of every row, one at a time, from what its columns say."""
    by_size = {graph.batch_size: graph.kernels for graph in graphs}
    out = []
    for row in frame.itertuples():
        machine = vary(bases[row.gpu], {"num_sms": row.num_sms, "mem_bytes_per_s": row.mem_bytes_per_s})
        out.append(float(nj.latency(predictor, machine, by_size[row.batch_size])))
    return np.array(out)


def _small(batch: int) -> Graph:
    """A graph of one product, quick to compile."""
    kernel = Kernel("linear", "linear", {"batch": 1, "m": 300 * batch, "n": 512, "k": 1024})
    node = Node("product", "linear", (kernel,), (), (), 3, "", (), (1,), "")
    return Graph("small", (node,), "inference", "fp32", batch, 300, False)


def test_rows_are_what_their_columns_say(tmp_path: Path) -> None:
    predictor = random_predictor("mixture", 1)
    gpus = {name: nj.load_gpu(name) for name in ("T4", "H100")}
    graphs = [_small(batch) for batch in (1, 2)]
    whole = nj.sweep(predictor, gpus, graphs, Grid((SMS, MEMORY)), tmp_path / "whole.parquet")
    assert (whole.rows, whole.resumed_rows) == (80, 0)
    frame = pd.read_parquet(whole.output)
    assert list(frame["sample"]) == [*range(20)] * 4
    assert list(frame["gpu"].astype(str).unique()) == ["T4", "H100"]
    some = frame.iloc[::13]
    np.testing.assert_allclose(some["seconds"], _forecasts(some, predictor, gpus, graphs), rtol=1e-5)
    nj.sweep(predictor, gpus, graphs, Grid((SMS, MEMORY)), tmp_path / "chunks.parquet", chunk=7)
    chunks = pd.read_parquet(tmp_path / "chunks.parquet")
    pd.testing.assert_frame_equal(frame, chunks, rtol=1e-6, check_categorical=False)
    assert json.loads(pq.read_schema(whole.output).metadata[b"neusight_jax.sweep"])["space"]["method"] == "grid"
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(InputError, match="exists; remove it"):
        nj.sweep(predictor, gpus, graphs, Grid((SMS, MEMORY)), tmp_path / "whole.parquet")


def test_missing_and_half_written_chunks_are_found(tmp_path: Path) -> None:
    parts, nothing = Parts(tmp_path / "x.parquet", {"a": 1}), pd.DataFrame({"sample": [0]})
    parts.open(False)
    import pyarrow as pa

    for start, stop in ((0, 10), (10, 15), (15, 20), (20, 25), (35, 40)):
        parts.write(start, stop, pa.table(nothing))
    chunks = [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]
    assert parts.missing(chunks) == [False, False, True, True, True]
    parts.clear([(20, 30), (30, 40), (40, 50)])
    assert parts.spans() == [(0, 10), (10, 15), (15, 20)]
    with pytest.raises(InputError, match="rows 20 to 50 are missing"):
        parts.merge(50, {})
    with pytest.raises(InputError, match="a differs from this sweep"):
        Parts(tmp_path / "x.parquet", {"a": 2}).open(True)
    with pytest.raises(InputError, match="unfinished sweep"):
        Parts(tmp_path / "x.parquet", {"a": 1}).open(False)
    with pytest.raises(InputError, match="nothing to resume"):
        Parts(tmp_path / "y.parquet", {"a": 1}).open(True)


@pytest.fixture(scope="module")
def users_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder as users have one: compiled programs and traces are kept in it."""
    return str(tmp_path_factory.mktemp("cache"))


def _environment(cache: str, **changes: str) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(HOME), "XDG_CACHE_HOME": cache, **changes}
    for name in ("NEUSIGHT_JAX_CACHE", "JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS"):
        environment.pop(name, None)
    return environment


def _command(output: Path, checkpoint: Path, *options: str) -> list[str]:
    head = [sys.executable, "-m", "neusight_jax", "sweep", *TINY, "--checkpoint", str(checkpoint)]
    return [*head, "--output", str(output), *options]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.slow
def test_two_devices_and_two_processes_give_the_same_file(checkpoint: Path, tmp_path: Path, users_cache: str) -> None:
    """101 samples in chunks of 10: the last chunk leaves whole devices and processes without a row."""
    points = ("--range", "num_sms=10:160", "mem_bytes_per_s=1e11:1e13", "--samples", "101", "--chunk", "10")
    started = []

    def start(name: str, *more: str, **environment: str) -> Path:
        output = tmp_path / f"{name}.parquet"
        command = _command(output, checkpoint, *points, *more)
        log = (tmp_path / f"{name}{len(started)}.log").open("wb")
        started.append(
            (subprocess.Popen(command, env=_environment(users_cache, **environment), stderr=log, stdout=log), log)
        )
        return output

    devices = start("devices", JAX_NUM_CPU_DEVICES="2")
    port = _free_port()
    join = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id")
    processes = start("processes", *join, "0")
    start("processes", *join, "1")
    assert run([*_command(tmp_path / "one.parquet", checkpoint, *points)[3:]]) == 0
    one = pd.read_parquet(tmp_path / "one.parquet")
    assert len(one) == 101
    for process, log in started:
        code = process.wait(timeout=300)
        log.close()
        assert code == 0, Path(log.name).read_text()
    for other in (devices, processes):
        pd.testing.assert_frame_equal(one, pd.read_parquet(other), rtol=1e-6, check_categorical=False)


@pytest.mark.slow
def test_a_killed_sweep_goes_on(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], users_cache: str
) -> None:
    output = tmp_path / "killed.parquet"
    points = ("--range", "num_sms=10:160", "mem_bytes_per_s=1e11:1e13", "--samples", "4000", "--chunk", "8")
    command = _command(output, checkpoint, *points)
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, env=_environment(users_cache), stderr=nowhere, stdout=nowhere)
    folder = tmp_path / ".killed.parquet.parts"
    deadline = time.monotonic() + 120
    while len(list(folder.glob("rows-*.parquet"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    assert run(command[3:]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert run([*command[3:], "--resume", "--seed", "1"]) == 2
    assert "space differs from this sweep" in capsys.readouterr().err
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("rows-*.parquet")}
    assert run([*command[3:], "--resume", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["resumed_rows"] == 8 * len(before) > 0
    assert run([*_command(tmp_path / "whole.parquet", checkpoint, *points)[3:]]) == 0
    whole = pd.read_parquet(tmp_path / "whole.parquet")
    assert list(whole["sample"]) == list(range(4000))
    pd.testing.assert_frame_equal(whole, pd.read_parquet(output), rtol=1e-6, check_categorical=False)


KILLS = 5 if NIGHTLY else 2


@contextmanager
def _pair(
    command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that share a sweep; none is left behind. What they write lies in `folder`."""
    join = ("--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", "2", "--process-id")
    pair = []
    for index in "01":
        with (folder / f"{index}.txt").open("w") as log:
            pair.append(subprocess.Popen([*command, *join, index], env=environment, stderr=log, stdout=log, text=True))
    try:
        yield pair
    finally:
        for process in pair:
            process.kill()
            process.wait(timeout=60)


@pytest.mark.slow
def test_one_of_two_processes_killed_at_random(checkpoint: Path, tmp_path: Path, users_cache: str) -> None:
    """`KILLS` times: the other process ends in one line, and what was computed is neither lost nor doubled."""
    random = np.random.default_rng()
    points = ("--range", "num_sms=10:160", "mem_bytes_per_s=1e11:1e13", "--samples", "1000", "--chunk", "4")
    output, folder = tmp_path / "two.parquet", tmp_path / ".two.parquet.parts"
    environment, resumed = _environment(users_cache), 0
    command = _command(output, checkpoint, *points)

    def written() -> int:
        return len(list(folder.glob("rows-*.parquet")))

    for kill in range(KILLS):
        goal, deadline = resumed + int(random.integers(1, 60)), time.monotonic() + 240
        with _pair([*command, *(("--resume",) if kill else ())], environment, tmp_path) as pair:
            while written() < goal:
                assert all(process.poll() is None for process in pair), [file.read_text() for file in _logs(tmp_path)]
                assert time.monotonic() < deadline
                time.sleep(0.002)
            dead = int(random.integers(2))
            pair[dead].kill()
            assert pair[1 - dead].wait(timeout=60) == 2
        text = _logs(tmp_path)[1 - dead].read_text()
        assert [line for line in text.splitlines() if not line.startswith(("compiling", "forecasts"))] == [
            f"error: process {dead} of the sweep has ended; its rows so far are kept: start all processes "
            "again with --resume"
        ]
        assert not output.exists()
        assert written() >= goal  # nothing is computed twice
        resumed = written()
    with _pair([*command, "--resume"], environment, tmp_path) as pair:
        for process, log in zip(pair, _logs(tmp_path), strict=True):
            assert process.wait(timeout=240) == 0, log.read_text()
    assert run([*_command(tmp_path / "one.parquet", checkpoint, *points)[3:]]) == 0
    frame = pd.read_parquet(output)
    assert list(frame["sample"]) == list(range(1000))
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "one.parquet"), frame, rtol=1e-6, check_categorical=False)


def _logs(folder: Path) -> list[Path]:
    return [folder / f"{index}.txt" for index in "01"]


@contextmanager
def _joined(count: int) -> Iterator[list[Processes]]:
    """So many processes that share a sweep, all of them here."""
    place = f"127.0.0.1:{_free_port()}"
    with ThreadPoolExecutor(count) as pool:
        processes = list(pool.map(lambda index: join_processes(place, count, index, 30.0), range(count)))
        try:
            yield processes
        finally:
            for each in processes:
                each.close()


def test_processes_wait_for_each_other_and_notice_who_ends() -> None:
    with ThreadPoolExecutor(2) as pool, _joined(3) as (first, second, third):
        waiting = [pool.submit(each.barrier, "a") for each in (first, second)]
        time.sleep(0.1)
        assert not any(each.done() for each in waiting)
        third.check()
        third.barrier("a")
        for each in waiting:
            each.result(timeout=30)
        awaiting = pool.submit(first.barrier, "b")  # while the second is on its way
        time.sleep(0.1)
        third.close()
        with pytest.raises(InputError, match="process 2 of the sweep has ended"):
            awaiting.result(timeout=30)
        with pytest.raises(InputError, match=r"process 2 of the sweep has ended; .* again with --resume"):
            first.check()


def test_processes_that_were_asked_different_things_end() -> None:
    with ThreadPoolExecutor(1) as pool, _joined(2) as (first, second):
        other = pool.submit(second.barrier, "another grid")
        with pytest.raises(InputError, match="process 1 of the sweep was asked something else than process 0"):
            first.barrier("a grid")
        first.close()
        with pytest.raises(InputError, match="process 0 of the sweep has ended"):
            other.result(timeout=30)


def test_a_stranger_at_the_door_is_sent_away() -> None:
    port = _free_port()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join_processes, f"127.0.0.1:{port}", 2, 0, 30.0)
        while not waiting.done():
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                break
        second = join_processes(f"127.0.0.1:{port}", 2, 1, 30.0)
        first = waiting.result(timeout=30)
    assert (first.count, second.count) == (2, 2)
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("coordinator", "count", "index", "message"),
    [
        (None, 2, 0, "say where they meet: --coordinator"),
        (None, 1, 1, "--process-id is 1, expected 0 to 0"),
        ("127.0.0.1:1", 2, 2, "--process-id is 2, expected 0 to 1"),
        ("127.0.0.1", 2, 0, "--coordinator is '127.0.0.1', expected HOST:PORT"),
        ("127.0.0.1:99999", 2, 0, "expected HOST:PORT"),
        ("127.0.0.1:0", 2, 0, "expected HOST:PORT"),
        ("192.0.2.1:40000", 2, 0, "process 0 cannot wait there"),
        ("no.such.host.invalid:40000", 2, 1, "expected a host that is there"),
    ],
)
def test_bad_meetings_are_refused(coordinator: str | None, count: int, index: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        join_processes(coordinator, count, index)


@pytest.mark.parametrize("index", [0, 1])
def test_who_waits_in_vain_says_for_whom(index: int) -> None:
    with pytest.raises(InputError, match=f"--process-id {1 - index}$"):
        join_processes(f"127.0.0.1:{_free_port()}", 2, index, wait_s=0.1)


def test_a_complete_output_is_what_resume_wants(tmp_path: Path) -> None:
    """A process may be killed between the output's last byte and the answer."""
    predictor, gpus, graphs = random_predictor("mixture", 1), {"T4": nj.load_gpu("T4")}, [_small(1)]
    space, output = Grid((SMS, MEMORY)), tmp_path / "whole.parquet"
    written = nj.sweep(predictor, gpus, graphs, space, output)
    before = output.stat().st_mtime_ns
    resumed = nj.sweep(predictor, gpus, graphs, space, output, resume=True)
    assert (written.rows, resumed.rows, resumed.resumed_rows) == (20, 20, 20)
    assert output.stat().st_mtime_ns == before
    for other in (Grid((SMS,)), Grid((MEMORY, SMS))):
        with pytest.raises(InputError, match="exists; remove it"):
            nj.sweep(predictor, gpus, graphs, other, output, resume=True)


@pytest.mark.parametrize("relaxation", [0, 0.0, 0.5])
def test_an_exact_sweep_runs_the_exact_program(
    relaxation: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switches = []

    def forecasts(predictor: Any, base: Any, figures: Any, kernels: Any, switch: Any, energy: bool) -> Any:
        switches.append(switch)
        return {"seconds": np.ones(20, np.float32)}

    monkeypatch.setattr(run_module, "_forecasts", forecasts)
    gpus, space = {"T4": nj.load_gpu("T4")}, Grid((SMS, MEMORY))
    nj.sweep(random_predictor("mixture", 1), gpus, [_small(1)], space, tmp_path / "x.parquet", relaxation=relaxation)
    assert switches == [relaxation or None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "say what to sweep"),
        (("--grid", "num_sms=1:9:3", "--range", "clock_hz=1e9:2e9"), "say what to sweep"),
        (("--range", "clock_hz=1e9:2e9"), "say what to sweep"),
        (("--grid", "num_sms=1:9"), "expected FIELD=LO:HI:N"),
        (("--grid", "num_sms=1:9:2.5"), "expected a whole number"),
        (("--grid", "num_sms=a:9:2"), "expected numbers in base units"),
        (("--grid", "num_sms=1:9:2:cubic"), "'cubic' is no spacing"),
        (("--grid", "num_sms"), "expected FIELD=..."),
        (("--grid", "sms=1:9:2"), "a GPU has no field 'sms'; expected one of num_sms"),
        (("--range", "num_sms=1:9", "--samples", "4", "--method", "halton"), "expected sobol or random"),
        (("--grid", "num_sms=1:9:2", "--chunk", "0"), "chunk is 0"),
        (("--grid", "num_sms=1:9:2", "--relaxation", "2"), "--relaxation is 2"),
        (("--grid", "num_sms=1:9:2", "--resume"), "nothing to resume"),
        (("--grid", "num_sms=1:9:2", "--plot", "x.gif"), "expected a name that ends in .html"),
        (("--grid", "num_sms=1:9:2", "--dtype", "bf16"), "no arithmetic path 'bf16'"),
        (("--grid", "num_sms=1:9:2", "--num-processes", "2"), "say where they meet"),
    ],
)
def test_bad_requests_are_one_line(
    options: tuple[str, ...], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.parquet"
    assert run([*_command(output, checkpoint, *options)[3:]]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
