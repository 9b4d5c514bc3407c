"""Parts of measuring kernels: cases, operators, plans, sampling, the loop on the device, the processor, machine."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_kernels import Fake, small

import neusight_jax as nj
from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.datasets import schema
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import catalog_gpu
from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.profiling import machine
from neusight_jax.profiling.case import MEASURED_OPS, case_bytes, make_case, operands
from neusight_jax.profiling.clock import sample, spread
from neusight_jax.profiling.jax_backend import JaxBackend, jax_operator
from neusight_jax.profiling.plans import planned

OF_ONE_DEVICE = tuple(op for op in MEASURED_OPS if op not in COLLECTIVE_OPS)


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


@pytest.mark.parametrize("op", OF_ONE_DEVICE)
def test_jax_and_torch_run_the_same_operator(op: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from neusight_jax.profiling.torch_backend import torch_operator

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
    assert {case.op for case in full} == set(OF_ONE_DEVICE)


def test_messages_divide_by_their_ranks() -> None:
    cases = planned("collectives", catalog_gpu("T4"), ("fp32", "bf16"))
    assert {case.op for case in cases} == set(COLLECTIVE_OPS)
    assert len({case.key for case in cases}) == len(cases)
    assert {case.sizes["ranks"] for case in cases} == {2, 4, 8}
    for case in cases:
        (inputs,), out = operands(case).inputs, operands(case).output
        shard = case.sizes["bytes"] // dtype_bytes(case.dtype) // case.sizes["ranks"]
        assert inputs[0] == shard * (1 if case.op == "all_gather" else case.sizes["ranks"])
        assert out[0] == shard * (1 if case.op == "reduce_scatter" else case.sizes["ranks"])
    with pytest.raises(InputError, match="expected a multiple of ranks"):
        operands(make_case("all_reduce", {"bytes": 1024, "ranks": 3, "nodes": 1}))


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


def test_sampling_takes_the_loop_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, looks = Fake(), []
    found = sample(kernel, 0.02, lambda _: looks.append(1))
    assert found.loop_s == pytest.approx(10e-6)
    assert found.call_s == pytest.approx(60e-6)
    assert found.loop_spread < 1e-9
    assert looks == [1]
    # Before the sensors are read it runs without a pause.
    looped: list[float] = []
    whole = kernel.loop

    def recorded(rounds: int) -> float:
        looped.append(whole(rounds))
        return looped[-1]

    monkeypatch.setattr(kernel, "loop", recorded)
    before: list[float] = []
    sample(kernel, 0.02, lambda run: before.append(run() and looped[-1]), window_s=0.15)
    assert before[0] >= 0.15
    monkeypatch.setattr(kernel, "loop", whole)
    # The 15 % that calls get leaves 17 ms over 8 repeats: 48 rounds of 44 us, two for the first one.
    assert found.launches == 8 * 46 * 4
    monkeypatch.setattr(kernel, "call", lambda: 20e-3)
    with pytest.raises(RuntimeError, match="took the kernel out of it"):
        sample(kernel, 0.02)
    monkeypatch.setattr(kernel, "loop", lambda rounds: 100e-6)
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
    compiled = prepared._loop.lower(jnp.int32(2), prepared._inputs, prepared._outputs).compile()
    before, _, entry = str(compiled.as_text()).partition("\nENTRY ")
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
    path.write_text(json.dumps(machine.processor_figures()))
    gpu = nj.load_gpu(path)
    assert gpu.num_sms == machine.cores()
    fast = machine.processor_figures([(1e15, 0.0, 1.0), (0.0, 1e12, 1.0)])
    assert fast["fp32_flop_per_s"] == pytest.approx(1.05e15)
    assert fast["mem_bytes_per_s"] == pytest.approx(1.05e12)
    assert "tdp_w" in fast["estimates"]


def test_sensors_read_what_a_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"clocks.sm": "1410", "clocks.mem": "1215", "power.draw": "251.3", "temperature.gpu": "61"}
    answer |= {"power.limit": "400"}
    reading = machine.parse_smi({**answer, "clocks_throttle_reasons.active": "0x0000000000000024"})
    assert reading == machine.Reading(1.41e9, 1.215e9, 251.3, 400.0, 61.0, "power cap, thermal")
    assert machine.parse_smi({"clocks.sm": "[N/A]"}) == machine.Reading()
    assert machine.throttle_names(0x1) == ""  # idle slows nothing down

    class Nvml:
        NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

        @staticmethod
        def nvmlDeviceGetClockInfo(handle: str, which: int) -> int:
            return {1: 1980, 2: 3201}[which]

        @staticmethod
        def nvmlDeviceGetPowerUsage(handle: str) -> int:
            raise RuntimeError("not supported")

        @staticmethod
        def nvmlDeviceGetPowerManagementLimit(handle: str) -> int:
            return 700000

        @staticmethod
        def nvmlDeviceGetTemperature(handle: str, which: int) -> int:
            return 40

        @staticmethod
        def nvmlDeviceGetCurrentClocksThrottleReasons(handle: str) -> int:
            return 0x80

    monkeypatch.setattr(machine, "_open_nvml", lambda: (Nvml, "first"))
    assert machine.Sensors(wanted=True).read() == machine.Reading(
        1.98e9, 3.201e9, None, pytest.approx(700.0), 40.0, "power brake"
    )
    assert machine.Sensors(wanted=False).read() == machine.Reading()


def test_watts_are_of_the_joules_a_board_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that turns every 20 ms, at 100 W for a moment and 300 W from then on."""
    begun = time.perf_counter()

    class Nvml:
        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(handle: str) -> int:
            turns = int((time.perf_counter() - begun) / 0.02)
            return 20 * (100 * min(turns, 3) + 300 * max(turns - 3, 0))

    monkeypatch.setattr(machine, "_open_nvml", lambda: (Nvml, "first"))
    watts = machine.Sensors(wanted=True).while_running(lambda: time.sleep(0.5)).power_w
    assert watts == pytest.approx(300.0, rel=0.15)  # this machine may be busy
    assert machine.mean_watts([(0.0, 5.0), (1.0, 5.0), (2.0, 8.0), (3.0, 8.0), (4.0, 18.0)]) == 5.0
    assert machine.mean_watts([(0.0, 5.0), (1.0, 6.0)]) is None
