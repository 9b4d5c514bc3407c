"""Which kernels to measure first: the choice, and what `profile --list` writes of it."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.model.calibrated import shape_kernel
from neusight_jax.training.plan import PLANS, candidates, narrowing_rows, plan_kernels
from neusight_jax.training.prior import error_covariance, most_telling


def test_profile_lists_kernels_without_measuring(checkpoint: Path, capsys) -> None:
    asked = ["profile", "--list", "--gpu", "T4", "--checkpoint", str(checkpoint)]
    assert run(asked) == 0
    assert "plan quick, Tesla T4" in " ".join(capsys.readouterr().out.split())
    assert run(["profile", "--plan", "huge"]) == 2
    assert "huge" in capsys.readouterr().err


def test_most_telling_by_hand() -> None:
    """Kernels 0 and 1 are twins of variance 1, kernel 2 stands alone with 1.5: a twin tells 2 of 3.5 and goes first."""
    covariance = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.5]])
    order = most_telling([covariance], 2, noise=0.0001)
    assert order[0] in (0, 1)
    assert order[1] == 2
    # Only its own kernel matters: the lonely one first.
    assert most_telling([covariance], 1, 1e-4, decisions=np.array([[0.0, 0.0, 1.0]])) == [2]
    assert most_telling([covariance], 1, 1e-4, allowed=np.array([False, False, True])) == [2]
    assert len(most_telling([covariance], 9, 1e-4)) == 3


def test_a_plan_beats_chance_in_expected_variance(checkpoint: Path) -> None:
    """What the plan leaves unknown, by a dense posterior worked out afresh, against random draws of as many kernels."""
    random = np.random.default_rng(0)
    points = random.normal(size=(60, 3))
    covariance = np.asarray(shape_kernel(jnp.asarray(points), jnp.asarray(points)), np.float64)

    def left(chosen: list[int]) -> float:
        block = covariance[np.ix_(chosen, chosen)] + 0.01 * np.eye(len(chosen))
        return float(np.trace(covariance - covariance[:, chosen] @ np.linalg.solve(block, covariance[chosen])))

    planned = left(most_telling([covariance], 8, 0.1))
    drawn = [left(list(random.permutation(60)[:8])) for _ in range(50)]
    assert planned < np.min(drawn)


def test_plans_hold_kernels_of_the_schema(tmp_path: Path, checkpoint: Path) -> None:
    plan = plan_kernels("quick", "T4", str(checkpoint))
    assert len(plan.frame) == sum(PLANS["quick"].values()) == 10
    assert not plan.frame[["op", "b", "m", "n", "k", "h"]].duplicated().any()
    plan.write(tmp_path / "plan.parquet")
    assert len(candidates("linear")) > 200
    filled = pd.read_parquet(tmp_path / "plan.parquet").assign(latency_s=1.0)
    filled.to_parquet(tmp_path / "filled.parquet")
    assert nj.read_kernels(tmp_path / "filled.parquet").num_rows == 10
    with pytest.raises(nj.InputError, match=r"csv or \.parquet"):
        plan.write(tmp_path / "plan.txt")


def test_kernels_that_narrow_a_total_are_of_what_it_takes_time_in() -> None:
    """Of a model of products alone nothing is learned from sums; and what is left of its variance is the least there is
    of any single kernel, by a dense posterior worked out afresh."""
    predictor, gpu = nj.load_predictor("fp32"), nj.load_gpu("T4")
    passes = {"reads": 2.0, "writes": 1.0}
    products = [Kernel("linear", "linear", {"batch": 1.0, "m": m, "n": 2048, "k": 1024}) for m in (64, 512, 4096)]
    among = table_from_kernels([*products, Kernel("elementwise", "add", {"rows": 8192, "cols": 4096, **passes})])
    of_model = Kernel("linear", "linear", {"batch": 1.0, "m": 4096, "n": 4096, "k": 4096})
    model = table_from_kernels([replace(of_model, count=9)])
    assert set(narrowing_rows(predictor, gpu, among, 3, [model])) == {0, 1, 2}
    joined = table_from_kernels([*products, of_model])
    covariance, noise = error_covariance(predictor, gpu, joined, np.arange(4) < 3, tied=False)
    left = covariance[3, 3] - covariance[3, :3] ** 2 / (np.diag(covariance)[:3] + noise[:3])
    assert narrowing_rows(predictor, gpu, among, 1, [model]) == [int(left.argmin())]
    with pytest.raises(nj.InputError, match="no model"):
        narrowing_rows(predictor, gpu, among, 1, [])
