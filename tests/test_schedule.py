"""Schedules of a pipeline: closed forms, unequal stages, gradients, messages."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neusight_jax.job.schedule import ORDERS, critical_counts, pipeline_seconds, schedule_table


def step_s(name: str, ranks: int, batches: int, chunks: int, each: Any, message_s: float = 0.0) -> float:
    durations = jnp.broadcast_to(jnp.asarray(each, jnp.float32), (ranks * chunks, 3))
    return float(pipeline_seconds(schedule_table(name, ranks, batches, chunks), durations, message_s))


@pytest.mark.parametrize(("ranks", "batches"), [(2, 2), (4, 16), (8, 64), (8, 4), (12, 100)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_equal_stages(name: str, ranks: int, batches: int) -> None:
    """(m + p - 1) (f + b), for more micro-batches than ranks and for fewer."""
    assert step_s(name, ranks, batches, 1, [1.0, 2.0, 0.0]) == pytest.approx(3.0 * (batches + ranks - 1), rel=1e-6)


@pytest.mark.parametrize(("ranks", "batches", "chunks"), [(8, 64, 4), (4, 8, 2), (2, 8, 3), (16, 32, 2)])
def test_interleaved(ranks: int, batches: int, chunks: int) -> None:
    """(m + (p - 1) / v) (f + b): Narayanan et al., SC 2021."""
    each = [1.0 / chunks, 2.0 / chunks, 0.0]
    expected = 3.0 * (batches + (ranks - 1) / chunks)
    assert step_s("interleaved", ranks, batches, chunks, each) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("ranks", "batches"), [(4, 16), (8, 64), (8, 8)])
def test_zero_bubble(ranks: int, batches: int) -> None:
    """The bubble of ZB-H1 is (p - 1) (f + b - w): Qi et al., ICLR 2024."""
    own = step_s("zero-bubble", ranks, batches, 1, [1.0, 1.0, 1.0])
    assert own == pytest.approx(3.0 * batches + (ranks - 1) * (1.0 + 1.0 - 1.0), rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4), st.sampled_from(["1f1b", "gpipe"]))
def test_unequal_stages_are_a_flow_shop(stages: list[float], name: str) -> None:
    """Σ t + (m - 1) max t with forward and backward passes in proportion; of 1F1B where the last rank is the slowest,
    which then never waits, and less elsewhere: another rank's backward passes fill its gaps."""
    each = np.array(stages, np.float32)
    durations = jnp.stack([each, 2.0 * each, 0.0 * each], axis=1)
    own = float(pipeline_seconds(schedule_table(name, 4, 8), durations))
    expected = 3.0 * (each.sum() + 7 * each.max())
    if name == "gpipe" or each[-1] == each.max():
        assert own == pytest.approx(expected, rel=1e-5)
    assert 3.0 * 8 * each.max() * (1 - 1e-6) <= own <= expected * (1 + 1e-5)


def test_a_message_that_blocks_shows_twice_a_micro_batch() -> None:
    """In the steady state of 1F1B a rank waits for its neighbour's forward and backward pass."""
    silent, blocked = (step_s("1f1b", 4, 64, 1, [1.0, 2.0, 0.0], late) for late in (0.0, 0.01))
    assert 64 * 1.5 < (blocked - silent) / 0.01 < 64 * 2.5


@pytest.mark.parametrize("name", list(ORDERS))
def test_slopes_are_the_counts(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    schedule = schedule_table(name, 4, 8, chunks)
    rng = np.random.default_rng(0)
    durations = jnp.asarray(rng.uniform(0.5, 1.5, (4 * chunks, 3)), jnp.float32)
    counts, messages = critical_counts(schedule, durations, jnp.float32(0.1))
    value, slope = jax.value_and_grad(lambda own: pipeline_seconds(schedule, own, 0.1))(durations)
    np.testing.assert_allclose(slope, counts)
    assert float(value) == pytest.approx(float(jnp.sum(counts * durations) + 0.1 * messages), rel=1e-6)
    at, step = (1, 0), 1e-3
    moved = float(pipeline_seconds(schedule, durations.at[at].add(step), 0.1))
    assert moved >= float(value) + step * float(counts[at]) - 1e-4


def test_relaxation_is_a_soft_maximum_below_the_exact_one() -> None:
    schedule = schedule_table("1f1b", 3, 9)
    durations = jnp.asarray([[1.0, 2.0, 0.0], [1.01, 2.0, 0.0], [1.0, 2.02, 0.0]], jnp.float32)
    exact, soft = (float(pipeline_seconds(schedule, durations, relaxation=own)) for own in (0.0, 0.05))
    assert 0.9 * exact < soft <= exact * (1 + 1e-6)
    slope = jax.grad(lambda own: pipeline_seconds(schedule, own, relaxation=0.05))(durations)
    assert float(jnp.min(jnp.sum(slope, axis=1))) > 1.0


def test_speed() -> None:
    """Value and gradient at 16 ranks, 384 micro-batches, 4 chunks: 2.1 ms on one core of a server, bound ten times."""
    schedule = schedule_table("interleaved", 16, 384, 4)
    run = jax.jit(jax.value_and_grad(lambda own: pipeline_seconds(schedule, own)))
    durations = jnp.ones((64, 3), jnp.float32)
    jax.block_until_ready(run(durations))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(run(durations))
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.03
