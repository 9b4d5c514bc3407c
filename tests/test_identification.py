"""Which machine explains measured kernels: figures found again, causes told apart, and what is not told said."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.hardware.variant import vary_plainly
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model.kernel_intervals import predict_kernel_intervals
from neusight_jax.training import plan
from neusight_jax.training.identification import FIGURES, LAUNCH, identify
from neusight_jax.training.prior import DEVIATIONS, error_covariance
from synthetic import synthetic_rows

DEVICE = "Tesla V100-PCIE-32GB"
GPU = nj.load_gpu(DEVICE)
"""A board that keeps its clock: of one at its watts, products do not tell it."""
PRODUCTS = ((4096, 4096, 4096), (2048, 4096, 8192), (8192, 2048, 1024), (512, 512, 512), (64, 64, 64))
SUMS = ((16384, 4096), (8192, 8192), (65536, 512), (64, 64), (128, 128))


def kernels(products: int = 5, sums: int = 5) -> KernelTable:
    """Products that compute, sums that wait for memory, and small ones of both that wait for their launch."""
    passes = {"reads": 2.0, "writes": 1.0}
    return table_from_kernels(
        [
            *(Kernel("linear", "linear", {"batch": 1.0, "m": m, "n": n, "k": k}) for m, n, k in PRODUCTS[:products]),
            *(Kernel("elementwise", "add", {"rows": b, "cols": h, **passes}) for b, h in SUMS[5 - sums :]),
        ]
    )


@pytest.fixture(scope="module")
def predictor() -> nj.model.mixture.MixturePredictor:
    """The shipped one, whose physics tell clock from memory."""
    return nj.load_predictor("fp32", DEVICE)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_figures_of_another_machine_are_found(predictor, seed: int) -> None:
    random = np.random.default_rng(seed)
    true = {"clock_hz": 1.1e9, "mem_bytes_per_s": 550e9}
    table = kernels()
    seconds = nj.predict_kernels(predictor, vary_plainly(GPU, true), table) * np.exp(random.normal(0.0, 0.02, 10))
    answer = identify(predictor, GPU, table, seconds, ["clock_hz", "mem_bytes_per_s", LAUNCH], gpu_name="V100")
    for figure in answer.figures[:2]:
        assert figure.value == pytest.approx(true[figure.name], rel=0.1), figure.name
        assert figure.low < true[figure.name] < figure.high, figure.name
    assert answer.error_percent[1] < 0.3 * answer.error_percent[0]
    assert "mem_bytes_per_s" in answer.explanations[0].off
    machine = answer.machine
    np.testing.assert_allclose(machine.fp32_flop_per_s / GPU.fp32_flop_per_s, machine.clock_hz / GPU.clock_hz)
    assert answer.to_dict()["machine"]["clock_hz"] == pytest.approx(answer.figures[0].value, rel=1e-5)
    assert "clock_hz" in str(answer)
    assert list(answer.to_frame()["name"]) == ["clock_hz", "mem_bytes_per_s", LAUNCH]


@pytest.mark.parametrize(("name", "share"), [("power_limit_w", 0.6), ("clock_limit_hz", 0.7)])
def test_a_cap_is_told_from_a_lower_clock(predictor, name: str, share: float) -> None:
    table, usual = kernels(4, 3), {"power_limit_w": GPU.tdp_w, "clock_limit_hz": GPU.clock_hz}
    seconds = nj.predict_kernels(predictor, GPU.replace(**{name: share * usual[name]}), table)
    answer = identify(predictor, GPU, table, seconds, [*usual])
    odds = {item.off: item.odds for item in answer.explanations}
    other = next(other for other in usual if other != name)
    assert odds[name,] > 3.0 * odds[other,]
    found = next(figure for figure in answer.figures if figure.name == name)
    assert found.value == pytest.approx(share * usual[name], rel=0.1)


def test_what_the_kernels_do_not_tell_is_said(predictor) -> None:
    """Small sums wait for their launch: the rest stays as wide as it was."""
    table = kernels(0, 2)
    seconds = nj.predict_kernels(predictor, GPU, table)
    answer = identify(predictor, GPU, table, seconds, ["clock_hz", "mem_bytes_per_s", LAUNCH])
    left = {figure.name: figure.left for figure in answer.figures}
    assert left[LAUNCH] < 0.4
    assert left["mem_bytes_per_s"] > 0.7
    assert any("mem_bytes_per_s" in note and note.startswith("not told") for note in answer.notes)
    assert answer.explanations[0].off == ()


def test_steps_identify_a_machine_too(predictor) -> None:
    graph = nj.graph_from_config("bert-large", 1, 64, "inference")
    slow = vary_plainly(GPU, {"clock_hz": 0.5 * GPU.clock_hz})
    seconds = nj.predict(predictor, slow, graph).total_s
    answer = identify(predictor, GPU, [(graph, seconds)], figures=["clock_hz"])
    assert 0.5 * GPU.clock_hz < answer.figures[0].value < 0.75 * GPU.clock_hz
    assert answer.figures[0].low < 0.5 * GPU.clock_hz


def test_errors_are_as_wide_as_the_intervals(predictor) -> None:
    table = kernels()
    covariance, noise = error_covariance(predictor, GPU, table)
    high = np.log(predict_kernel_intervals(predictor, GPU, table)[1] / nj.predict_kernels(predictor, GPU, table))
    np.testing.assert_allclose(np.sqrt(np.diag(covariance) + noise), high / DEVIATIONS, rtol=1e-3)
    apart, _ = error_covariance(predictor, GPU, table, tied=False)
    assert np.all(apart[:5, 5:] == 0.0)
    assert np.any(covariance[:5, 5:] > 0.01 * noise.max())


def test_unusable_questions_are_refused(predictor) -> None:
    table = kernels(1, 0)
    for figures, words in ((["clock"], "clock_hz"), ([], "no figure"), ({"clock_hz": 0.0}, "prior width")):
        with pytest.raises(nj.InputError, match=words):
            identify(predictor, GPU, table, [1e-3], figures)
    with pytest.raises(nj.InputError, match="first guess"):
        identify(predictor, GPU, table, [1e-3], ["fp8_flop_per_s"])
    with pytest.raises(nj.InputError, match="positive numbers"):
        identify(predictor, GPU, [], figures=["clock_hz"])


def test_calibrate_identifies_and_suggests(tmp_path: Path, checkpoint: Path, capsys) -> None:
    rows = tmp_path / "linear.parquet"
    synthetic_rows("linear", "Tesla T4", rows=8).to_parquet(rows, index=False)
    arguments = ["calibrate", "--gpu", "T4", "--checkpoint", str(checkpoint)]
    page = tmp_path / "page.html"
    identified = [*arguments, "--measurements", str(rows), "--identify", "--figures", "clock_hz", LAUNCH]
    assert run([*identified, "--json", "--report", str(page)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "neusight_jax.identification/1"
    assert [figure["name"] for figure in answer["figures"]] == ["clock_hz", LAUNCH]
    assert "Explanations" in page.read_text(encoding="utf-8")
    plan = tmp_path / "plan.csv"
    assert run([*arguments, "--suggest", "3", "--model", "bert-large", "--output", str(plan)]) == 0
    assert "3 kernels" in capsys.readouterr().err
    assert len(pd.read_csv(plan).dropna(subset=["op"])) == 3
    for wrong, words in (
        (["--suggest", "3"], "no model"),
        (["--identify"], "--measurements is missing"),
        (["--model", "bert-large", "--identify"], "--model: nothing asks"),
        (["--measurements", str(rows)], "--output is missing"),
    ):
        assert run([*arguments, *wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three candidates of two families."""
    passes = {"reads": 2.0, "writes": 1.0}
    few = {
        "linear": [Kernel("linear", "linear", {"batch": 1.0, "m": m, "n": n, "k": k}) for m, n, k in PRODUCTS[:3]],
        "elementwise": [Kernel("elementwise", "add", {"rows": b, "cols": h, **passes}) for b, h in SUMS[:3]],
    }
    monkeypatch.setattr(plan, "candidates", lambda family: few.get(family, []))


def test_a_suggestion_settles_a_ranking(few_candidates: None) -> None:
    """Of three GPUs the ratio of the best two is narrowed, more than by kernels at random."""
    predictor, names = nj.load_predictor("fp32"), ["T4", "V100", "A10"]
    gpus = [nj.load_gpu(name) for name in names]
    work, among = kernels(2, 3), kernels()
    totals = [float(nj.latency(predictor, gpu, work)) for gpu in gpus]
    which, covariance, noise, aims = plan.undecided(predictor, gpus, among, [work])
    assert which == np.argsort(totals)[:2].tolist()
    each = len(noise) // 2

    def left(rows: list[int]) -> float:
        """Variance of the log ratio once these are measured."""
        places = [which.index(at // among.num_rows) * each + at % among.num_rows for at in rows]
        seen = covariance[np.ix_(places, places)] + np.diag(noise[places])
        across = aims[0] @ covariance[:, places]
        return float(aims[0] @ covariance @ aims[0] - across @ np.linalg.solve(seen, across))

    order = plan.narrowing_rows(predictor, gpus, among, 3, [work])
    random = np.random.default_rng(0)
    rows = [place * among.num_rows + at for place in which for at in range(among.num_rows)]
    drawn = [left(random.choice(rows, 3, replace=False).tolist()) for _ in range(40)]
    assert left(order) <= min(drawn) + 1e-9
    assert left(order) < 0.6 * left([])
    assert {at // among.num_rows for at in order} == set(which)
    chosen = nj.suggest(predictor, gpus, [work], 4, gpu_name=names)
    assert set(chosen.frame.device) == {names[place] for place in which}
    with pytest.raises(nj.InputError, match="1 names for 3 GPUs"):
        nj.suggest(predictor, gpus, [work], 4)


def test_equal_machines_have_a_ratio_that_is_known(few_candidates: None) -> None:
    """Errors of machines that are alike go together; of two architectures each has its own."""
    predictor, work = nj.load_predictor("fp32"), kernels(2, 3)

    def variance(*gpus: nj.GPU) -> float:
        _, covariance, _, aims = plan.undecided(predictor, gpus, kernels(1, 1), [work])
        return float(aims[0] @ covariance @ aims[0])

    assert variance(GPU, GPU) == pytest.approx(0.0, abs=1e-9)
    # The spread of a measurement is that of a fit to the rows of both.
    assert variance(GPU, nj.load_gpu("T4")) == pytest.approx(variance(GPU) + variance(nj.load_gpu("T4")), rel=0.1)


def test_figures_that_are_looked_for_by_default_can_be() -> None:
    assert set(FIGURES) <= set(nj.training.identification.MOVABLE)
