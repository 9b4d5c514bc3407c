"""Design search: known optima found, budgets kept, multipliers right, answers reproducible, questions inverted."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import random_predictor

import neusight_jax as nj
from neusight_jax.cli import run
from neusight_jax.cli.design import _base, _load
from neusight_jax.cli.options import WorkloadOptions
from neusight_jax.designs.answers import (
    answer,
    bound_notes,
    ends_of,
    machine_notes,
    non_dominated,
    pareto,
    problem,
    required,
    time_intervals,
    workload_notes,
)
from neusight_jax.designs.search import Found, Search, Settings
from neusight_jax.errors import InputError
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.table import Kernel
from neusight_jax.model.intervals import Intervals, gpu_ratios, range_of, ratio_interval
from neusight_jax.model.predictor import RooflinePredictor
from neusight_jax.records import as_text
from neusight_jax.reports.design import front_table, report, tables
from neusight_jax.sweeps.space import Grid, Range
from neusight_jax.workloads import workload

FEW = Settings(starts=3, steps=20, rounds=8, candidates=32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Linear:
    """A cost model with a known optimum: area = 4 · SMs + 100 · TB/s."""

    per_sm: float = 4.0

    def costs(self, gpu: nj.GPU) -> dict[str, Any]:
        return {"area_mm2": self.per_sm * jnp.asarray(gpu.num_sms) + 100.0 * jnp.asarray(gpu.mem_bytes_per_s) / 1e12}


def graph_of(name: str, kernel: Kernel) -> Graph:
    node = Node(name, kernel.op, (kernel,), (), (), 1, "", (), (1,), "")
    return Graph(name, (node,), "inference", "fp32", 1, 128, False)


# One kernel that only arithmetic bounds, and one that only memory bounds.
COMPUTE = graph_of("compute", Kernel("linear", "linear", {"batch": 1, "m": 8192, "n": 8192, "k": 8192}))
MEMORY = graph_of("memory", Kernel("elementwise", "add", {"rows": 65536, "cols": 4096, "reads": 2, "writes": 1}))
FREE = (Range("num_sms", 10, 1000), Range("mem_bytes_per_s", 1e11, 1e13))
BUDGET = {"area_mm2": 800.0}


def analytic(weights: tuple[float, float] = (1.0, 1.0), **more: Any) -> Search:
    """Roofline times t1 ∝ 1/SMs and t2 ∝ 1/bandwidth: of the area, each part gets its weight's share."""
    settings = more.pop("settings", FEW)
    loads = [workload(graph, weight) for graph, weight in zip((COMPUTE, MEMORY), weights, strict=True)]
    asked = {"budgets": BUDGET, "costs": Linear(), **more}
    return Search(problem(RooflinePredictor(), nj.load_gpu("H100"), FREE, loads, **asked), settings)


@pytest.fixture(scope="module")
def equal() -> Search:
    return analytic()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_a_known_optimum(weights: tuple[float, float], equal: Search) -> None:
    search = equal if weights == (1.0, 1.0) else analytic(weights)
    found = answer(search, search.run(0))
    share = weights[0] / sum(weights)
    assert found.feasible
    assert found.metrics["area_mm2"] <= 800.0 * (1 + 1e-5)
    assert found.free["num_sms"] == pytest.approx(800 * share / 4, rel=0.03)
    assert found.free["mem_bytes_per_s"] == pytest.approx(8e12 * (1 - share), rel=0.03)
    # log t = −Σ share · log(part) and parts scale with the budget: 1 % more area buys 1 %.
    assert found.multipliers.budgets["area_mm2"] == pytest.approx(1.0, abs=0.05)
    assert found.multipliers.residual < 0.1
    assert found.evaluations == FEW.evaluations == 3 * 20 * 4 + 3 + 8 * 32
    best = np.exp(-share * np.log(800 * share / 4) - (1 - share) * np.log(8e12 * (1 - share)))
    own = np.exp(-share * np.log(found.free["num_sms"]) - (1 - share) * np.log(found.free["mem_bytes_per_s"]))
    assert own / best < 1.002


def test_multipliers_agree_with_another_search() -> None:
    search = analytic(budgets={"area_mm2": 800.0, "mem_bytes_per_s": 2e12})
    first = answer(search, search.run(0))
    assert first.multipliers.budgets["mem_bytes_per_s"] > 0.1
    for name, limit in (("area_mm2", 800.0), ("mem_bytes_per_s", 2e12)):
        more = search.run(0, {name: 1.1 * limit}).objective
        slope = -(more - first.objective) / np.log(1.1)
        assert first.multipliers.budgets[name] == pytest.approx(slope, abs=0.06), name
    # Without a limit on it, half of the area goes to bandwidth: 4 TB/s. Wider limits change nothing, the area does.
    front = pareto(search, "mem_bytes_per_s", [2e12, 6e12, 8e12])
    assert front[0].front_notes == (
        "points of the front coincide, mem_bytes_per_s up to 6000 GB/s, 8000 GB/s: what holds the design there is "
        "budget area_mm2 <= 800 mm2",
    )
    assert all(not each.front_notes for each in front[1:])


def test_a_loose_budget_is_worth_nothing_and_bounds_are_named(equal: Search) -> None:
    loose = {"area_mm2": 1e5}
    found = answer(equal, equal.run(0, loose), limits=loose)
    assert found.multipliers.budgets["area_mm2"] == 0.0
    assert set(found.multipliers.bounds) == {"num_sms", "mem_bytes_per_s"}
    assert found.free["num_sms"] == 1000
    assert found.multipliers.bounds["num_sms"] == pytest.approx(0.5, abs=0.01)
    assert found.at_bounds == {"num_sms": "high", "mem_bytes_per_s": "high"}
    assert (
        "num_sms ends on the high bound of its range, 1000 SMs; a wider --free may give another answer" in found.notes
    )
    assert any(note.startswith("num_sms of 1000 SMs is outside every GPU of the catalog") for note in found.notes)
    assert "note: num_sms ends on the high bound" in str(found)
    assert json.loads(found.to_json())["at_bounds"] == dict(found.at_bounds)


def test_a_goal_on_latency_and_least_area(equal: Search) -> None:
    """The dual problem: least area for a latency, a budget that needs forecasts."""
    best = answer(equal, equal.run(0))
    goal = {"latency_s": best.metrics["latency_s"]}
    dual = analytic(objective="area", budgets=goal, settings=Settings())
    for seed in range(3):
        found = answer(dual, dual.run(seed))
        assert found.feasible
        assert found.metrics["area_mm2"] == pytest.approx(800.0, rel=0.02)


def test_an_objective_with_costs_need_not_use_up_a_budget() -> None:
    """latency · area²: the fewest SMs, and of the bandwidth b (TB/s) the least of (40 + 100 b)² / √b: b = 2/15."""
    search = analytic(objective={"latency_s": 1.0, "area_mm2": 2.0})
    found = answer(search, search.run(0))
    assert found.free["num_sms"] == 10
    assert found.free["mem_bytes_per_s"] == pytest.approx(2e12 / 15, rel=0.02)


def test_no_machine_is_said_so(equal: Search) -> None:
    found = answer(equal, equal.run(0, {"area_mm2": 20.0}))
    assert not found.feasible
    assert "NO MACHINE IN THE BOUNDS KEEPS EVERY BUDGET" in str(found)


def test_a_front_falls_and_equals_single_searches(equal: Search) -> None:
    front = pareto(equal, "area_mm2", [200.0, 400.0, 800.0])
    assert [each.metrics["area_mm2"] for each in front] == pytest.approx([200, 400, 800], rel=0.01)
    times = np.array([each.metrics["latency_s"] for each in front])
    np.testing.assert_allclose(times[:-1] / times[1:], 2.0, rtol=0.02)
    assert front[-1].free == answer(equal, equal.run(0)).free
    assert non_dominated([*front, front[0]], "area_mm2") == front
    with pytest.raises(InputError, match="needs a budget on it"):
        pareto(equal, "power_w", [1.0])
    assert front[0].front_notes == ()
    # The smallest machine has 4 · 10 + 100 · 0.1 = 50 mm2, the largest 5,000.
    ends = pareto(equal, "area_mm2", [40.0, 800.0, 6000.0, 8000.0])
    assert ends[0].front_notes == (
        "no machine in the bounds keeps every budget with area_mm2 up to 40 mm2: no point there",
        "points of the front coincide, area_mm2 up to 6000 mm2, 8000 mm2: what holds the design there is "
        "the high bound of num_sms, the high bound of mem_bytes_per_s",
    )
    assert "points of the front coincide" in as_text(front_table(ends, "area_mm2"))


def test_eager_and_fused_workloads_in_one_objective_are_said() -> None:
    loads = [COMPUTE, replace(MEMORY, fused=True, notes=("its own note",))]
    asked = problem(RooflinePredictor(), nj.load_gpu("H100"), FREE, loads, costs=Linear())
    own, mixed = workload_notes(asked)
    assert own == "its own note"
    assert mixed.startswith("one objective mixes eager and fused workloads: compute inference 1x128 with every")
    alike = problem(RooflinePredictor(), nj.load_gpu("H100"), FREE, [COMPUTE, MEMORY], costs=Linear())
    assert workload_notes(alike) == []


def test_a_machine_nobody_has_measured_the_like_of_is_said() -> None:
    ratios = np.stack([np.asarray(gpu_ratios(nj.load_gpu(name))) for name in ("V100", "A100")])
    intervals = Intervals(gpu_range={"linear": jnp.asarray(range_of(ratios), jnp.float32)})
    decode = workload(nj.graph_from_config("llama-3.1-8b", 1, 128, "decode", "bf16"))
    asked: Any = SimpleNamespace(predictor=SimpleNamespace(intervals=intervals), workloads=(decode,))
    seconds = {"linear": np.array([1.0]), "elementwise": np.array([0.5])}
    assert machine_notes(asked, nj.load_gpu("A100"), seconds) == []
    far, full = machine_notes(asked, nj.load_gpu("A100").replace(num_sms=400, mem_bytes=1e10), seconds)
    assert far.startswith("this GPU lies outside those trained on")
    assert "SMs 400 against 80 to 108" in far
    assert far.endswith("): extrapolated")
    # 8.03 billion weights of two bytes, 0.81 GB of runtime and a little cache.
    assert full.startswith("llama-3.1-8b decode 1x128 may not fit: it needs about 16.88")


def test_a_design_has_an_interval_and_so_has_its_gain() -> None:
    """That of its time is of the forecast, that of its change of the ratio: for twice the bandwidth it holds no 1."""
    predictor, base = nj.load_predictor("fp32"), nj.load_gpu("H100")
    loads = [workload(COMPUTE, 3.0), workload(MEMORY)]
    asked = problem(predictor, base, FREE, loads, costs=Linear())
    machine = vary_plainly(base, {"mem_bytes_per_s": 6.7e12})
    own, changes = time_intervals(asked, machine)
    assert list(own) == list(changes) == ["latency_s", *(load.name for load in loads)]
    for load in loads:
        found, before = (nj.predict(predictor, each, load.graph) for each in (machine, base))
        assert own[load.name] == found.interval_s
        pair = ratio_interval((found.total_s, before.total_s), (found.interval_s, before.interval_s), (machine, base))
        assert changes[load.name] == pair
    low, high = changes[loads[1].name]
    assert 0.4 < low < high < 0.8
    means = [own[loads[0].name][side] ** 0.75 * own[loads[1].name][side] ** 0.25 for side in (0, 1)]
    assert own["latency_s"] == pytest.approx(means)
    assert time_intervals(replace(asked, predictor=RooflinePredictor()), machine) == ({}, {})


def test_intervals_of_a_design_are_shown(equal: Search) -> None:
    found = answer(equal, equal.run(0))
    assert "interval" not in as_text(tables(found))
    shown = replace(found, intervals={"latency_s": (0.9, 1.1)}, change_intervals={"latency_s": (0.69, 0.8)})
    text = as_text(tables(shown), 200)
    assert "80% interval of the change" in text
    assert "900 ms to 1.1 s" in text
    assert "-31.0% to -20.0%" in text
    assert json.loads(shown.to_json())["change_intervals"]["latency_s"] == [0.69, 0.8]
    assert "-31.0% to -20.0%" in report(shown).sentence


def test_bounds_of_a_range_on_its_grain() -> None:
    stepped = Range("num_sms", 41, 159, step=8)  # 48 to 152
    assert ends_of([stepped], {"num_sms": 152.0}) == {"num_sms": "high"}
    assert ends_of([stepped], {"num_sms": 48.0}) == {"num_sms": "low"}
    assert ends_of([stepped], {"num_sms": 144.0}) == {}
    fixed = Range("mem_bytes_per_s", 2e12, 2e12)
    assert bound_notes([fixed], {"mem_bytes_per_s": 2e12}) == [
        "mem_bytes_per_s ends on the low and high bound of its range, 2000 GB/s"
    ]


STEPPED = (Range("num_sms", 40, 160, count=25), Range("mem_bytes_per_s", 1e12, 6e12, count=25))
POWER = {"area_mm2": 550.0, "power_w": 500.0}


@pytest.fixture(scope="module")
def learned() -> Search:
    """A mixture with whole waves, the shipped cost model, two budgets, steps."""
    free = (*STEPPED, Range("l2_bytes", 16 * 2**20, 128 * 2**20, count=6, step=2**20))
    graphs = [
        graph_of("product", Kernel("linear", "linear", {"batch": 1, "m": 4096, "n": 3000, "k": 2048})),
        graph_of("sum", Kernel("elementwise", "add", {"rows": 16384, "cols": 2048, "reads": 2, "writes": 1})),
    ]
    return Search(problem(random_predictor("mixture", 3), nj.load_gpu("H100"), free, graphs, budgets=POWER), FEW)


def test_it_beats_a_grid(learned: Search) -> None:
    grid = Grid(learned.problem.free)
    points = np.log(np.stack(list(grid.slice(0, grid.rows).values()), axis=1))
    best = learned.evaluate(points).min()
    assert np.isfinite(best)
    for seed in range(3):
        found = learned.run(seed)
        assert found.feasible
        assert found.objective <= best + 0.005, seed


def test_equal_seeds_give_equal_answers(learned: Search) -> None:
    first, again = learned.run(5), learned.run(5)
    np.testing.assert_array_equal(first.logs, again.logs)
    assert first.objective == again.objective
    assert first.trace == again.trace


def test_the_answer_is_exact_and_on_the_steps(learned: Search) -> None:
    found = answer(learned, learned.run(0))
    assert found.free["num_sms"] == round(found.free["num_sms"])
    assert found.free["l2_bytes"] % 2**20 == 0
    for load in learned.problem.workloads:
        exact = float(nj.latency(learned.problem.predictor, found.gpu, load.graph.kernels))
        assert found.seconds[load.name] == pytest.approx(exact, rel=1e-4)
    assert found.objective == pytest.approx(np.log(found.metrics["latency_s"]), abs=1e-4)
    assert json.loads(found.to_json())["gpu"]["num_sms"] == found.free["num_sms"]
    assert found.base_seconds[learned.problem.workloads[0].name] == pytest.approx(
        float(nj.latency(learned.problem.predictor, nj.load_gpu("H100"), learned.problem.workloads[0].kernels)),
        rel=1e-5,
    )


def test_the_least_bandwidth_for_a_latency() -> None:
    """Memory-bound roofline: bytes / target, by hand."""
    moved = 3 * 65536 * 4096 * 4.0
    wanted = Range("mem_bytes_per_s", 1e11, 1e13)
    value = required(RooflinePredictor(), nj.load_gpu("H100"), MEMORY, wanted, 1e-3)
    assert value == pytest.approx(moved / 1e-3, rel=1e-4)
    assert required(RooflinePredictor(), nj.load_gpu("H100"), MEMORY, wanted, 1.0) == pytest.approx(1e11)
    with pytest.raises(InputError, match=r"does not get to 1e-05 s: 0\.000322.* s at mem_bytes_per_s = 1e\+13"):
        required(RooflinePredictor(), nj.load_gpu("H100"), MEMORY, wanted, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "speed"}, "unknown objective 'speed'"),
        ({"objective": {"area": 1.0}}, "unknown metric 'area'; nearest: area_mm2"),
        ({"budgets": {"watts": 3.0}}, "unknown metric 'watts'"),
        ({"budgets": {"area_mm2": -3.0}}, "budget of area_mm2 is -3.0, expected a positive number"),
    ],
)
def test_bad_problems(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        analytic(**change)


def test_peaks_follow_figures_that_are_set() -> None:
    """As they follow free ones: half of the SMs at the same clock have half of the peaks."""
    base, half = nj.load_gpu("H100"), _base("H100", ["num_sms=66", "mem_bytes_per_s=2e12"], ())[1]
    assert isinstance(half, nj.GPU)
    assert half.bf16_flop_per_s == pytest.approx(0.5 * base.bf16_flop_per_s)
    assert (half.num_sms, half.mem_bytes_per_s, half.tdp_w) == (66.0, pytest.approx(2e12), 700.0)


def test_workloads_of_a_command_line() -> None:
    """Any option, lengths of requests with commas between them."""
    load = _load(
        "llama-3.2-1b,batch_size=2,sequence_length=64,128,kv_length=100,200,weight=3", WorkloadOptions(mode="prefill")
    )
    assert (load.weight, load.graph.options["new_tokens"], load.graph.options["kv_length"]) == (
        3.0,
        [64, 128],
        [100, 200],
    )
    assert _load("bert-tiny,fused=true,sequence_length=16", WorkloadOptions()).graph.fused


def test_found_is_plain() -> None:
    assert Found(np.zeros(1), 0.0, True, 1, ()).feasible


CLI = ("design", "bert-tiny,batch_size=2,sequence_length=16", "--base", "H100", "--free", "num_sms=20:200")
QUICK = ("--starts", "2", "--steps", "2", "--rounds", "1")


def test_the_command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    more = ("mem_bytes_per_s=1e12:8e12", "--budget", "area_mm2<=600", "--pareto", "area_mm2=300:600:2")
    output = tmp_path / "out"
    arguments = [*CLI, *more, *QUICK, "--checkpoint", str(checkpoint), "--output", str(output)]
    assert run([*arguments, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["metrics"]["area_mm2"] <= 600.001
    assert content["feasible"]
    assert json.loads((output / "design.json").read_text()) == content
    assert "Pareto front" in (output / "report.html").read_text()
    assert run(arguments) == 2
    assert "not empty" in capsys.readouterr().err


def test_the_command_inverts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [*CLI[:4], "--free", "mem_bytes_per_s=1e11:1e13", "--checkpoint", str(checkpoint), "--target"]
    assert run([*base, "10"]) == 0
    assert "needs mem_bytes_per_s of 100 GB/s" in capsys.readouterr().out
    assert run([*base, "1e-9"]) == 2
    assert "change more than this field" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "area_mm2=3"), "expected METRIC<=X"),
        (("--budget", "area_mm2<=big"), "expected numbers in base units"),
        (("--budget", "area<=3"), "unknown metric 'area'"),
        (("--free", "num_sms=3"), "expected FIELD=LO:HI or FIELD=LO:HI:STEP"),
        (("--free", "num_sms=30:60"), "num_sms is given twice"),
        (("--set", "tdp=3"), "a GPU has no field 'tdp'"),
        (("--set", "tdp_w=-3"), "tdp_w is -3, expected a positive number"),
        (("--pareto", "area_mm2=3:2:4"), "expected METRIC=LO:HI:N"),
        (("--objective", "speed"), "unknown objective 'speed'"),
        (("--target", "1", "--budget", "area_mm2<=3"), "--target answers for one model"),
        (("--costs", "nowhere.yaml"), "no such file; expected a file of costs"),
        (("--starts", "0"), "starts is 0, expected at least 1"),
    ],
)
def test_bad_commands_are_one_line(
    options: tuple[str, ...], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*CLI, *options, "--checkpoint", str(checkpoint)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("part", ["mode", "colour=red", "batch_size=x", "weight=0"])
def test_bad_workloads_are_one_line(part: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["design", f"bert-tiny,{part}", *CLI[2:], "--checkpoint", str(checkpoint)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
