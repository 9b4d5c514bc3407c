"""Measuring kernels: the command, its journal, resuming, what it skips, and reading what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from small_kernels import SMALL, Fake, small

from neusight_jax.cli import run
from neusight_jax.datasets.measurements import read_measurements
from neusight_jax.errors import InputError
from neusight_jax.profiling import machine as machines
from neusight_jax.profiling import run as profiles
from neusight_jax.profiling.case import Case
from neusight_jax.profiling.jax_backend import JaxBackend
from neusight_jax.profiling.run import Journal


def write_plan(path: Path, sizes: range, op: str = "gelu") -> Path:
    pd.DataFrame({"op": op, "b": 8, "h": [64 * size for size in sizes]}).to_csv(path, index=False)
    return path


def test_what_does_not_fit_is_skipped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text("op,b,h\ngelu,8,64\ngelu,4096,4096\n")
    monkeypatch.setattr(JaxBackend, "free_bytes", lambda self: 2e6)
    out = tmp_path / "out"
    assert run(["profile", "--plan", str(plan), "--output", str(out), "--seconds", "0.02"]) == 0
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


COLLECTIVES = """
import jax, numpy as np
from neusight_jax.profiling.case import make_case
from neusight_jax.profiling.jax_backend import _on_ranks, jax_operator

own = np.arange(8, dtype=np.float32)
for op, each in {
    "all_reduce": [4 * own] * 4,
    "all_gather": [np.tile(own, 4)] * 4,
    "reduce_scatter": list((4 * own).reshape(4, 2)),
    "all_to_all": [np.tile(own[2 * rank : 2 * rank + 2], 4) for rank in range(4)],
    "send_recv": [0 * own, own, 0 * own, 0 * own],
}.items():
    case = make_case(op, {"bytes": 32, "ranks": 4, "nodes": 1})
    np.testing.assert_array_equal(jax_operator(case)(_on_ranks(own, 4)), np.concatenate(each))
"""


def test_messages_between_devices_are_measured(tmp_path: Path) -> None:
    """Four devices of the CPU; groups that are not here are skipped and said."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **flags}
    subprocess.run([sys.executable, "-c", COLLECTIVES], env=environment, check=True)
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    rows = [f"{op},65536,4,1" for op in ops] + ["send_recv,65536,2,1", "all_reduce,65536,8,1", "all_reduce,65536,4,2"]
    plan, out = tmp_path / "plan.csv", tmp_path / "out"
    plan.write_text("\n".join(["op,bytes,ranks,nodes", *rows]) + "\n")
    command = [sys.executable, "-m", "neusight_jax", "profile", "--output", str(out), "--plan", str(plan)]
    subprocess.run([*command, "--seconds", "0.02", "--dtype", "bf16"], env=environment, check=True)
    frame = read_measurements(out).frame
    assert set(frame["family"]) == {"collective"}
    assert len(frame) == 5
    reasons = pd.read_csv(out / "skipped.csv")["reason"]
    assert list(reasons) == [
        f"{group}; JAX sees 4 devices of one node" for group in ("8 ranks on 1 nodes", "4 ranks on 2 nodes")
    ]


def test_killed_in_the_middle_and_resumed_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path / "plan.csv", range(1, 13)), tmp_path / "out"
    command = [sys.executable, "-m", "neusight_jax", "profile", "--output", str(out), "--plan", str(plan)]
    command += ["--seconds", "0.02"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    journal = tmp_path / ".out.profile" / "rows.jsonl"
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 3):
        assert first.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not out.exists()
    kept = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    assert 3 <= len(kept) < 12
    with journal.open("a") as handle:  # as if it had been cut off within a line
        handle.write('{"key": "gelu fp32 b=8 h=768", "kern')
    assert run(["profile", "--output", str(out), "--plan", str(plan), "--resume", "--seconds", "0.02"]) == 0
    rows = pd.read_parquet(out / "kernels" / "gelu.parquet")
    skipped = pd.read_csv(out / "skipped.csv")["h"] if (out / "skipped.csv").exists() else []
    assert sorted([*rows["h"], *skipped]) == [64 * size for size in range(1, 13)]
    assert not journal.parent.exists()
    again = rows.set_index("h")["latency_s"]
    for entry in (entry for entry in kept if "row" in entry):
        assert again[entry["kernel"]["h"]] == entry["row"]["loop_s"]


def test_resuming_another_run_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out")
    with pytest.raises(InputError, match="nothing to resume"):
        journal.resume({"plan": "quick"})
    journal.begin({"plan": "quick"}, [small("gelu")])
    assert not list(tmp_path.iterdir())  # nothing to go on with before the first kernel
    journal.append({"key": "a", "row": {}})
    with pytest.raises(InputError, match="plan 'quick', this one has 'full'"):
        journal.resume({"plan": "full"})
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
