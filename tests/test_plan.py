"""Which kernels to measure first: the choice, and what `profile --list` writes of it."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import neusight_jax as nj
from neusight_jax.cli.app import run
from neusight_jax.model.calibrated import shape_kernel
from neusight_jax.training.calibration import most_telling
from neusight_jax.training.plan import PLANS, candidates, plan_kernels


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
