"""Tile choice: an entry of the menu when exact, a blend with gradients when relaxed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import NETWORKS, ON_ONE_GPU, random_gpus, random_kernels, random_predictor

import neusight_jax as nj
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Work
from neusight_jax.model.heads import TileChoice, choose_tile, init_tile_choice, largest_tile, tile_scores

ROWS = 64
GPU = nj.load_gpu("Tesla V100-PCIE-32GB")


@cache
def _case(name: str) -> tuple[Work, jax.Array]:
    dims = {key: np.minimum(values, 4096.0) for key, values in random_kernels(2, ROWS).families[name].dims.items()}
    size = np.full(ROWS, 4.0, np.float32)
    case: tuple[Work, jax.Array] = jax.jit(
        lambda dims, size: (FAMILIES[name].work(dims, size), FAMILIES[name].features(dims, size))
    )(dims, size)
    return case


@cache
def _choice(name: str) -> TileChoice:
    choice: TileChoice = random_predictor("mixture", 3).tiles[name]  # type: ignore[attr-defined]
    return choice


@pytest.mark.parametrize("name", [name for name in NETWORKS if name in ON_ONE_GPU])
def test_the_exact_choice_is_an_entry_of_the_menu(name: str) -> None:
    work, features = _case(name)
    tile = choose_tile(_choice(name), GPU, work, features)
    scores = tile_scores(_choice(name), GPU, work, features)
    at = np.asarray(tile.index)
    np.testing.assert_array_equal(at, np.argmax(scores, axis=1))
    everyone = np.arange(ROWS)
    blocks = np.asarray(work.blocks)[everyone, at, 0]
    np.testing.assert_allclose(tile.blocks, blocks, rtol=1e-5)
    np.testing.assert_allclose(tile.block_flop, np.asarray(work.block_flop)[everyone, at, 0], rtol=1e-5)
    np.testing.assert_allclose(tile.block_bytes, np.asarray(work.block_bytes)[everyone, at, 0], rtol=1e-5)
    few = blocks < 1e4
    assert few.sum() > 10
    np.testing.assert_array_equal(np.asarray(tile.waves)[few], np.ceil(blocks / 80)[few])


def test_no_preference_means_the_fastest_tile() -> None:
    """3000 blocks' worth of rows: the menu entry with the least whole-wave work."""
    work, features = _case("linear")
    plain = init_tile_choice(jax.random.key(0), FAMILIES["linear"], features)
    index = np.asarray(choose_tile(plain, GPU, work, features).index)
    waves = np.ceil(np.asarray(work.blocks)[:, :, 0] / 80)
    cost = waves * np.maximum(np.asarray(work.block_flop)[:, :, 0], np.asarray(work.block_bytes)[:, :, 0])
    np.testing.assert_allclose(cost[np.arange(ROWS), index], cost.min(axis=1), rtol=1e-5)
    assert len(set(index)) > 1


def test_a_strong_preference_wins() -> None:
    work, features = _case("linear")
    plain = init_tile_choice(jax.random.key(0), FAMILIES["linear"], features)
    biases = (*plain.network.parameters["biases"][:-1], plain.network.parameters["biases"][-1].at[:, 2].set(1e3))
    fond = replace(plain, network=replace(plain.network, parameters={**plain.network.parameters, "biases": biases}))
    assert np.all(np.asarray(choose_tile(fond, GPU, work, features).index) == 2)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name in ON_ONE_GPU])
def test_a_relaxed_choice_lies_inside_the_menu_and_has_gradients(name: str) -> None:
    work, features = _case(name)

    def total(choice: TileChoice) -> jax.Array:
        tile = choose_tile(choice, GPU, work, features, 1.0)
        return jnp.sum(jnp.log(tile.block_flop) + jnp.log(tile.waves))

    tile = choose_tile(_choice(name), GPU, work, features, 1.0)
    menu = np.asarray(work.block_flop)[:, :, 0]
    assert np.all(np.asarray(tile.block_flop) <= menu.max(axis=1) * 1.0001)
    assert np.all(np.asarray(tile.block_flop) >= menu.min(axis=1) * 0.9999)
    slopes = jax.grad(total)(_choice(name))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slopes))
    assert np.any(np.asarray(slopes.network.parameters["biases"][-1]) != 0.0)


def test_each_kernel_may_have_its_own_machine() -> None:
    work, features = _case("linear")
    gpus = random_gpus(4, ROWS)
    together = choose_tile(_choice("linear"), gpus, work, features)
    for row in (0, 17, 63):
        one = jax.tree.map(lambda figures, row=row: figures[row], gpus)
        alone = choose_tile(_choice("linear"), one, work, features)
        assert int(together.index[row]) == int(alone.index[row])
        assert float(together.waves[row]) == float(alone.waves[row])


def test_the_largest_tile_is_the_last() -> None:
    work, _ = _case("softmax")
    tile = largest_tile(GPU, work)
    assert np.all(np.asarray(tile.index) == len(FAMILIES["softmax"].tiles) - 1)
    np.testing.assert_array_equal(tile.blocks, work.blocks[:, -1, 0])
    np.testing.assert_array_equal(tile.waves, np.ceil(np.asarray(work.blocks)[:, -1, 0] / 80))
