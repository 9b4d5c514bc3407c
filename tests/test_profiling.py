"""Measuring kernels: cases, plans, sampling, the loop on the device, the journal, sensors, and the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.datasets import schema
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.gpu_catalog import catalog_gpu
from neusight_jax.profiling import machine as machines
from neusight_jax.profiling import processor, sensors
from neusight_jax.profiling import run as profiles
from neusight_jax.profiling.case import MEASURED_OPS, Case, case_bytes, make_case, operands
from neusight_jax.profiling.clock import sample, spread
from neusight_jax.profiling.jax_backend import JaxBackend
from neusight_jax.profiling.jax_operators import jax_operator
from neusight_jax.profiling.journal import Journal
from neusight_jax.profiling.plans import planned

SMALL: dict[str, dict[str, int]] = {
    "linear": {"m": 6, "n": 10, "k": 4},
    "bmm": {"b": 3, "m": 5, "n": 7, "k": 2},
    "softmax": {"b": 4, "h": 9},
    "ln": {"b": 4, "h": 9},
    "conv": {
        "b": 2,
        "input_channels": 3,
        "output_channels": 5,
        "kernel_size": 3,
        "input_size": 8,
        "stride": 2,
        "padding": 1,
    },
    "prefill": {
        "batch_size": 2,
        "query_length": 6,
        "kv_length": 6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "causal": 1,
    },
    "decode": {
        "batch_size": 2,
        "query_length": 1,
        "kv_length": 6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "causal": 0,
    },
}


def small(op: str, dtype: str = "fp32") -> Case:
    return make_case(op, SMALL.get(op, {"b": 4, "h": 9}), dtype)


def write_plan(path: Path, sizes: range, op: str = "gelu") -> Path:
    pd.DataFrame({"op": op, "b": 8, "h": [64 * size for size in sizes]}).to_csv(path, index=False)
    return path


def test_operands_by_hand() -> None:
    assert operands(small("linear")).flop == 2 * 6 * 10 * 4
    assert operands(small("linear")).inputs == ((6, 10), (10, 4), (4,))
    assert operands(small("bmm")).output == (3, 5, 2)
    conv = operands(small("conv"))
    assert conv.output == (2, 4, 4, 5)  # (8 + 2 - 3) // 2 + 1
    assert conv.flop == 2 * 2 * 4 * 4 * 5 * 3 * 9
    assert operands(small("prefill")).flop == 0.5 * 4 * 2 * 4 * 6 * 6 * 8
    assert operands(small("decode")).flop == 4 * 2 * 4 * 6 * 8
    assert case_bytes(small("add", "bf16"))[0] == 2 * 3 * 36


def test_family_and_profiler_count_the_same_flop() -> None:
    """The profiler plans with its own counts; what is learned from its rows counts by the families."""
    from neusight_jax.datasets.row_checks import flop_and_bytes

    for op in ("linear", "bmm", "conv", "softmax", "ln", "gelu"):
        case = small(op)
        columns = {name: np.array([float(size)]) for name, size in case.dims}
        family, dims = schema.row_dims(op, columns)
        flop, _ = flop_and_bytes(family, dims, np.zeros(1, np.int32))
        saving = 4.0 if op == "conv" and case.sizes["stride"] == 1 else 1.0
        assert operands(case).flop == pytest.approx(saving * flop[0]), op


@pytest.mark.parametrize(
    ("op", "dims", "words"),
    [
        ("matmul", {}, "unknown op 'matmul'"),
        ("linear", {"m": 4, "n": 0, "k": 4}, "n of linear is 0"),
        ("bmm", {"m": 4, "n": 4, "k": 4}, "b of bmm is None"),
        ("gelu", {"b": 4, "h": 2.5}, "h of gelu is 2.5"),
    ],
)
def test_cases_that_cannot_be(op: str, dims: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        make_case(op, dims)


@pytest.mark.parametrize("op", MEASURED_OPS)
def test_jax_and_torch_run_the_same_operator(op: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from neusight_jax.profiling.torch_operators import torch_operator

    case = small(op)
    random = np.random.default_rng(0)
    inputs = [random.uniform(0.5, 1.5, shape).astype(np.float32) for shape in operands(case).inputs]
    ours = np.asarray(jax_operator(case)(*map(jax.numpy.asarray, inputs)))
    assert ours.shape == operands(case).output
    theirs = list(map(torch.from_numpy, inputs))
    if op == "linear":
        np.testing.assert_allclose(ours, inputs[0] @ inputs[1] + inputs[2], rtol=1e-5)
    if op == "conv":
        theirs = [theirs[0].permute(0, 3, 1, 2), theirs[1].permute(3, 2, 0, 1)]
    out = torch_operator(case)(*theirs)
    if op == "conv":
        out = out.permute(0, 2, 3, 1)
    if op in ("prefill", "decode"):
        out = out.transpose(1, 2)
    np.testing.assert_allclose(ours, out.numpy(), rtol=2e-5, atol=2e-6)


def test_plans_are_drawn_within_limits_and_stay_the_same() -> None:
    gpu = catalog_gpu("T4")
    quick = planned("quick", gpu, ("fp32",))
    assert quick == planned("quick", gpu, ("fp32",))
    assert len({case.key for case in quick}) == len(quick)
    assert {"linear", "bmm", "softmax", "ln", "conv", "prefill", "decode", "copy", "gelu"} <= {c.op for c in quick}
    for case in quick:
        assert operands(case).flop / float(gpu.fp32_flop_per_s) <= 2e-3
        assert case_bytes(case)[0] / float(gpu.mem_bytes_per_s) <= 2e-3
    both = planned("quick", gpu, ("fp32", "bf16"))
    assert len(both) == 2 * len(quick)
    full = planned("full", gpu, ("fp32",))
    assert len(full) > 10 * len(quick)
    assert {case.op for case in full} == set(MEASURED_OPS)


def test_plan_files(tmp_path: Path) -> None:
    gpu = catalog_gpu("T4")
    file = tmp_path / "plan.csv"
    file.write_text("op,b,m,n,k,h,dtype\nlinear,,8,16,4,,\ngelu,8,,,,64,bf16\ngelu,8,,,,64,bf16\n")
    assert [case.key for case in planned(str(file), gpu, ("fp16",))] == [
        "linear fp16 b=1 m=8 n=16 k=4",
        "gelu bf16 b=8 h=64",
    ]
    file.write_text("op,b,h\ngelu,8,\n")
    with pytest.raises(InputError, match=r"plan.csv row 0 \(from 0\): h of gelu is None"):
        planned(str(file), gpu, ("fp32",))
    with pytest.raises(InputError, match="unknown plan 'huge'"):
        planned("huge", gpu, ("fp32",))
    with pytest.raises(InputError, match="no such file"):
        planned(str(tmp_path / "none.csv"), gpu, ("fp32",))


class Fake:
    """A kernel of 10 us in a loop that costs 100 us, 50 us more if it runs, and 4 us a round; 60 us a call."""

    sets = 4

    def __init__(self) -> None:
        self.ran = 0

    def call(self) -> float:
        return 60e-6

    def loop(self, rounds: int) -> float:
        self.ran += rounds
        return 100e-6 + (50e-6 if rounds else 0.0) + rounds * (self.sets * 10e-6 + 4e-6)

    def idle(self, rounds: int) -> float:
        return 30e-6 + rounds * 4e-6


def test_sampling_takes_the_loop_off() -> None:
    kernel, looks = Fake(), []
    found = sample(kernel, 0.02, lambda: looks.append(1))
    assert found.loop_s == pytest.approx(10e-6)
    assert found.call_s == pytest.approx(60e-6)
    assert found.loop_spread < 1e-9
    assert looks == [1]
    # The 15 % that calls get leaves 17 ms over 8 repeats: 48 rounds of 44 us, two for the first one.
    assert found.launches == 8 * 46 * 4
    kernel.call = lambda: 20e-3  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="took the kernel out of it"):
        sample(kernel, 0.02)
    kernel.loop = lambda rounds: 100e-6  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no longer than an empty one"):
        sample(kernel, 0.02)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)  # quartiles 2 and 4


class Interrupted(Fake):
    """On a machine with other tenants: 4 ms are lost every 10 ms or so, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def loop(self, rounds: int) -> float:
        alone = super().loop(rounds)
        return alone + 4e-3 * float(self.random.poisson(alone / 10e-3))


def test_a_longer_run_times_more_loops_and_not_longer_ones() -> None:
    """So medians of a run and of one ten times shorter are of the same thing, whatever else the machine does."""
    short, long = sample(Interrupted(), 0.02), sample(Interrupted(), 0.2)
    assert long.repeats >= 8 * short.repeats
    for found in (short, long):
        assert found.loop_s == pytest.approx(10e-6, rel=0.1)
    assert sample(Interrupted(), 2.0).loop_s == pytest.approx(10e-6, rel=0.02)


def test_the_loop_keeps_its_kernels() -> None:
    """Every input set's kernel stands in the body of the compiled loop, none before it."""
    prepared = JaxBackend().prepare(make_case("bmm", {"b": 2, "m": 32, "n": 48, "k": 16}), 3, 0)
    before, _, entry = prepared.compiled_text().partition("\nENTRY ")
    assert "while(" in entry
    assert "dot_general" not in entry.split("while(")[0]
    kernels = re.findall(r"= f32\[2,32,16\][^=]*(?:dot|fusion|custom-call)\([^)]*%get-tuple-element", before)
    assert len(kernels) == 3
    expected = np.asarray(jax_operator(make_case("bmm", {"b": 2, "m": 32, "n": 48, "k": 16}))(*prepared._inputs[2]))
    prepared.loop(2)
    np.testing.assert_allclose(prepared._outputs[2], expected, rtol=1e-5)
    assert prepared.call() > 0.0


def test_the_loop_takes_longer_the_longer_it_is() -> None:
    prepared = JaxBackend().prepare(make_case("linear", {"m": 128, "n": 256, "k": 256}), 2, 0)
    prepared.loop(1)
    short = min(prepared.loop(4) for _ in range(5))
    long = min(prepared.loop(64) for _ in range(5))
    assert long > 4.0 * short


def test_a_processor_is_a_gpu_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(processor.processor_figures()))
    gpu = nj.load_gpu(path)
    assert gpu.num_sms == processor.cores()
    fast = processor.processor_figures([(1e15, 0.0, 1.0), (0.0, 1e12, 1.0)])
    assert fast["fp32_flop_per_s"] == pytest.approx(1.05e15)
    assert fast["mem_bytes_per_s"] == pytest.approx(1.05e12)
    assert "tdp_w" in fast["estimates"]


def test_sensors_read_what_a_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"clocks.sm": "1410", "clocks.mem": "1215", "power.draw": "251.3", "temperature.gpu": "61"}
    reading = sensors.parse_smi({**answer, "clocks_throttle_reasons.active": "0x0000000000000024"})
    assert reading == sensors.Reading(1.41e9, 1.215e9, 251.3, 61.0, "power cap, thermal")
    assert sensors.parse_smi({"clocks.sm": "[N/A]"}) == sensors.Reading()
    assert sensors.throttle_names(0x1) == ""  # idle slows nothing down

    class Nvml:
        NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

        @staticmethod
        def nvmlDeviceGetClockInfo(handle: str, which: int) -> int:
            return {1: 1980, 2: 3201}[which]

        @staticmethod
        def nvmlDeviceGetPowerUsage(handle: str) -> int:
            raise RuntimeError("not supported")

        @staticmethod
        def nvmlDeviceGetTemperature(handle: str, which: int) -> int:
            return 40

        @staticmethod
        def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:
            return 0x80

    monkeypatch.setattr(sensors, "_open_nvml", lambda: (Nvml, "first"))
    assert sensors.Sensors(wanted=True).read() == sensors.Reading(1.98e9, 3.201e9, None, 40.0, "power brake")
    assert sensors.Sensors(wanted=False).read() == sensors.Reading()


def test_what_does_not_fit_is_skipped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("op,b,h\ngelu,8,64\ngelu,4096,4096\n")
    monkeypatch.setattr(JaxBackend, "free_bytes", lambda self: 2e6)
    out = tmp_path / "out"
    assert run(["profile", "--plan", str(plan), "--output", str(out), "--seconds", "0.001"]) == 0
    said = capsys.readouterr()
    assert "does not fit: needs 0.27 GB" in " ".join(said.err.split())
    assert "1 kernels" in said.out
    assert "1 skipped" in said.out
    skipped = pd.read_csv(out / "skipped.csv")
    assert list(skipped["h"]) == [4096]
    monkeypatch.setattr(JaxBackend, "free_bytes", lambda self: 0.0)
    assert run(["profile", "--plan", str(plan), "--output", str(tmp_path / "none"), "--seconds", "0.001"]) == 2
    assert "no kernel could be measured" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_kernel_that_fails_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: JaxBackend, case: Case, sets: int, seed: int) -> object:
        if case.sizes["h"] == 128:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        return Fake()

    monkeypatch.setattr(JaxBackend, "prepare", prepare)
    card = profiles.profile(
        tmp_path / "out", plan=str(write_plan(tmp_path / "plan.csv", range(1, 4))), seconds=0.01, timing="call"
    )
    assert card["rows"] == {"gelu": 2}
    rows = pd.read_parquet(tmp_path / "out" / "kernels" / "gelu.parquet")
    assert list(rows["latency_s"]) == pytest.approx([60e-6, 60e-6])
    assert list(rows["loop_s"]) == pytest.approx([10e-6, 10e-6])
    reason = pd.read_csv(tmp_path / "out" / "skipped.csv")["reason"]
    assert list(reason) == ["failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory"]


def test_killed_in_the_middle_and_resumed_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path / "plan.csv", range(1, 25)), tmp_path / "out"
    command = [sys.executable, "-m", "neusight_jax", "profile", "--output", str(out), "--plan", str(plan)]
    command += ["--seconds", "0.02"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    journal = tmp_path / ".out.profile" / "rows.jsonl"
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 5):
        assert first.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not out.exists()
    kept = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    assert 5 <= len(kept) < 24
    with journal.open("a") as handle:  # as if it had been cut off within a line
        handle.write('{"key": "gelu fp32 b=8 h=1536", "kern')
    assert run(["profile", "--output", str(out), "--plan", str(plan), "--resume", "--seconds", "0.02"]) == 0
    rows = pd.read_parquet(out / "kernels" / "gelu.parquet")
    skipped = pd.read_csv(out / "skipped.csv")["h"] if (out / "skipped.csv").exists() else []
    assert sorted([*rows["h"], *skipped]) == [64 * size for size in range(1, 25)]
    assert not journal.parent.exists()
    again = rows.set_index("h")["latency_s"]
    for entry in (entry for entry in kept if "row" in entry):
        assert again[entry["kernel"]["h"]] == entry["row"]["loop_s"]


def test_resuming_another_run_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    with pytest.raises(InputError, match="nothing to resume"):
        journal.resume({"plan": "quick"})
    journal.begin({"plan": "quick"}, [small("gelu")])
    with pytest.raises(InputError, match="plan 'quick', this one has 'full'"):
        journal.resume({"plan": "full"})
    journal.append({"key": "a", "row": {}})
    journal.append({"key": "a", "row": {}})
    assert journal.resume({"plan": "quick"}) == ([small("gelu")], [{"key": "a", "row": {}}])
    journal.append({"row": {}})
    with pytest.raises(InputError, match="line 3 is damaged"):
        journal.resume({"plan": "quick"})


def test_a_device_nobody_knows_needs_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        name, device, is_cpu = "jax", "NVIDIA H999", False

    with pytest.raises(InputError, match="H999 is not in the catalog; write its figures"):
        machines.find_machine(Unknown(), None)  # type: ignore[arg-type]
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"base": "H100", "name": "bench card", "num_sms": 100}))
    found = machines.find_machine(Unknown(), str(file))  # type: ignore[arg-type]
    assert found.name == "bench card"
    assert found.file is not None
    assert found.file["num_sms"] == 100.0
    with pytest.raises(InputError, match="--gpu is NVIDIA H100"):
        machines.find_machine(Unknown(), "H100")  # type: ignore[arg-type]
    Unknown.device = "NVIDIA H100 80GB HBM3"
    assert machines.find_machine(Unknown(), None).file is None  # type: ignore[arg-type]


def test_rows_too_fast_for_the_device_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"base": "T4", "name": "slow card", "fp32_flop_per_s": 1e10}))
    plan = tmp_path / "plan.csv"
    plan.write_text("op,m,n,k\nlinear,1024,1024,1024\nlinear,8,8,8\n")
    monkeypatch.setattr(JaxBackend, "prepare", lambda self, case, sets, seed: Fake())
    card = profiles.profile(tmp_path / "out", plan=str(plan), seconds=0.01, gpu=str(file))
    assert card["rows"] == {"linear": 1}
    assert "speed of light" in pd.read_csv(tmp_path / "out" / "skipped.csv")["reason"][0]
    read_measurements(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--output is missing"),
        (["--output", "x", "--backend", "mlx"], "unknown backend 'mlx'"),
        (["--output", "x", "--timing", "sundial"], "unknown timing 'sundial'"),
        (["--output", "x", "--seconds", "0"], "expected a number above 0"),
        (["--output", "x", "--plan", "huge"], "unknown plan 'huge'"),
        (["--output", "x", "--dtype", "fp31", "--plan", "plan.csv"], "unknown dtype 'fp31'"),
        (["--output", "x", "--gpu", "H100"], "leave --gpu out"),
        (["--output", "x", "--resume"], "nothing to resume"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plan(tmp_path / "plan.csv", range(1, 2))
    assert run(["profile", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
    assert not (tmp_path / "x").exists()


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plan, out = write_plan(tmp_path / "plan.csv", range(1, 4)), tmp_path / "out"
    asked = ["profile", "--plan", str(plan), "--output", str(out), "--seconds", "0.01"]
    done: list[Case] = []

    def prepare(self: JaxBackend, case: Case, sets: int, seed: int) -> object:
        done.append(case)
        if len(done) == 3:
            raise KeyboardInterrupt
        return Fake()

    monkeypatch.setattr(JaxBackend, "prepare", prepare)
    assert run(asked) == 130
    assert "--resume goes on" in capsys.readouterr().err
    assert not out.exists()
    assert run([*asked, "--resume"]) == 0
    assert len(done) == 4  # the third twice, the others once
    assert len(pd.read_parquet(out / "kernels" / "gelu.parquet")) == 3


def test_torch_measures_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    plan = tmp_path / "plan.csv"
    plan.write_text("op,b,h,m,n,k\ngelu,8,64,,,\nlinear,,,16,32,8\n")
    out = tmp_path / "out"
    asked = ["profile", "--plan", str(plan), "--output", str(out), "--seconds", "0.005", "--backend", "torch"]
    assert run([*asked, "--dtype", "fp32", "bf16", "fp8"]) == 0
    data = read_measurements(out)
    assert sorted(data.frame["dtype"]) == ["bf16", "bf16", "fp32", "fp32"]
    assert set(pd.read_csv(out / "skipped.csv")["reason"]) == {"fp8 is not measured with torch"}
    card = json.loads((out / "card.json").read_text())
    assert "torch" in card["versions"]
    assert "CPU that stands in for a GPU" in card["provenance"]


def test_attention_rows_are_taken(tmp_path: Path) -> None:
    row = {"device": "Tesla T4", "op": "decode", "latency_s": 1e-3, **SMALL["decode"]}
    (tmp_path / "kernels").mkdir()
    pd.DataFrame([row, row]).to_parquet(tmp_path / "kernels" / "decode.parquet")
    data = read_measurements(tmp_path)
    assert list(data.frame["family"]) == ["decode", "decode"]
    # Two requests of six kept tokens, as the plan of SMALL has it; every new token sees all of them.
    kept = SMALL["decode"]["batch_size"] * SMALL["decode"]["kv_length"]
    assert (data.frame["keys"][0], data.frame["pairs"][0]) == (kept, kept)


def test_a_folder_brings_its_own_device(tmp_path: Path) -> None:
    row = {"device": "bench card", "op": "gelu", "latency_s": 1e-3, "b": 8, "h": 64}
    for name in ("one", "two"):
        (tmp_path / name / "kernels").mkdir(parents=True)
        pd.DataFrame([row]).to_parquet(tmp_path / name / "kernels" / "gelu.parquet")
    with pytest.raises(InputError, match="1 unknown device"):
        read_measurements(tmp_path / "one")
    for name, count in (("one", 64), ("two", 32)):
        figures = {"base": "A10", "name": "bench card", "num_sms": count}
        (tmp_path / name / "gpu.json").write_text(json.dumps(figures))
    data = read_measurements(tmp_path / "one", devices=["bench card"])
    assert data.gpu("bench card").num_sms == 64
    assert read_measurements(tmp_path / "two" / "kernels" / "gelu.parquet").gpu("bench card").num_sms == 32
    both = read_measurements([tmp_path / "one", tmp_path / "two"])
    assert both.gpu("bench card").num_sms == 64
    assert "with other figures; the first ones are taken" in both.notes[0]
    (tmp_path / "two" / "gpu.json").write_text(json.dumps({"base": "A10", "name": "Tesla T4"}))
    with pytest.raises(InputError, match="Tesla T4 is in the catalog"):
        read_measurements(tmp_path / "two")
