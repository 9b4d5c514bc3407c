"""The one function's contract: one program for all machines, neutral to padding and order, its sums and switches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import KINDS, NETWORKS, ON_ONE_GPU, only, random_gpus, random_kernels, random_predictor, repadded

import neusight_jax as nj
from neusight_jax import sensitivities
from neusight_jax.hardware.gpu import FIELDS
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelTable, table_from_kernels
from neusight_jax.model import batching
from neusight_jax.model.batching import BLOCK
from neusight_jax.model.checkpoint import untrained
from neusight_jax.model.latency import kernel_latency
from neusight_jax.model.predictor import load_baseline
from neusight_jax.model.roofline import relaxation_switch, whole_waves

COMPILED: list[str] = []


def _note(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


@pytest.fixture(scope="module", autouse=True)
def _no_program_of_other_modules() -> None:
    jax.clear_caches()


@contextmanager
def compilations(expected: int) -> Iterator[None]:
    before = len(COMPILED)
    yield
    assert len(COMPILED) - before == expected


def _kernels(model: str, **workload: Any) -> KernelTable:
    kernels: KernelTable = nj.graph_from_config(model, batch_size=2, sequence_length=64, **workload).kernels
    return kernels


FEW = ("linear", "norm", "gemm", "conv", "decode")
"""Families of different dims: tables of up to 32 kernels of each share one program."""


def _mixed(rows: int, seed: int = 0, names: Sequence[str] = FEW) -> list[Kernel]:
    """Kernels of some families in a random order, of each at least one."""
    random = np.random.default_rng(seed)
    kernels = []
    for name in random.permutation([*names, *random.choice(names, rows - len(names))]):
        family = FAMILIES[name]
        sizes = [float(size) for size in np.exp(random.uniform(0, 7, len(family.dims))).astype(int)]
        if not family.matrix:
            sizes[2:] = [1.0] * (len(sizes) - 2)
        kernels.append(Kernel(family.name, family.ops[0], dict(zip(family.dims, sizes, strict=True))))
    return kernels


T4, H100 = nj.load_gpu("Tesla T4"), nj.load_gpu("NVIDIA H100 80GB HBM3")


def test_a_thousand_machines_are_one_program() -> None:
    kernels, gpus = only(_kernels("gpt2"), "linear", "norm"), random_gpus(0, 1000)
    forecast = jax.jit(jax.vmap(nj.latency, in_axes=(None, 0, None)))
    predictor, other = random_predictor("mixture", 0), random_predictor("mixture", 1)
    larger, others = only(_kernels("gpt2-medium"), "linear", "norm"), random_gpus(1, 1000)
    with compilations(1):
        seconds = forecast(predictor, gpus, kernels)
    assert seconds.shape == (1000,)
    with compilations(0):
        forecast(predictor, gpus, larger)
        forecast(other, others, kernels)
    few = [jax.tree.map(lambda figures, i=i: figures[i], gpus) for i in (0, 500, 999)]
    alone = [float(nj.latency(predictor, gpu, kernels)) for gpu in few]
    np.testing.assert_allclose(np.asarray(seconds)[[0, 500, 999]], alone, rtol=1e-5)


def _repeated() -> KernelTable:
    """Rows of two families, each shape three times in other places, under two operators."""
    random, kernels = np.random.default_rng(0), []
    for rows in random.permutation(np.repeat([64, 256, 1000, 4096], 3)):
        sizes = {"rows": float(rows), "cols": 512.0, "reads": 1.0, "writes": 1.0}
        kernels += [Kernel("norm", "layernorm", sizes, count=2.0), Kernel("softmax", "softmax", sizes)]
    return table_from_kernels(kernels)


@pytest.mark.parametrize("isolated", [False, True])
def test_machines_in_blocks_are_machines_alone(isolated: bool) -> None:
    """More machines than one block, the last block partly filled; each distinct kernel is evaluated once."""
    predictor, kernels, gpus = random_predictor("mixture", 5), _repeated(), random_gpus(2, 300)

    def one(gpu: nj.GPU, relaxation: Any) -> Any:
        return nj.latency(predictor, gpu, kernels, isolated=isolated, relaxation=relaxation)

    relaxation = jnp.linspace(0.0, 0.5, 300)
    many = jax.vmap(one)(gpus, relaxation)
    for place in (0, 1, 150, 299):
        alone = one(jax.tree.map(lambda figures, i=place: figures[i], gpus), relaxation[place])
        assert float(many[place]) == pytest.approx(float(alone), rel=1e-5)


def test_slopes_over_many_machines_agree() -> None:
    predictor, kernels, gpus = random_predictor("mixture", 6), only(_repeated(), "norm"), random_gpus(3, 300)
    many = jax.vmap(nj.latency, in_axes=(None, 0, None))
    each = jax.vmap(jax.grad(nj.latency, argnums=1), in_axes=(None, 0, None))(predictor, gpus, kernels)
    summed = jax.jit(jax.grad(lambda machines: jnp.sum(many(predictor, machines, kernels))))(gpus)
    _, along = jax.jvp(lambda machines: many(predictor, machines, kernels), (gpus,), (gpus,))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-30), each, summed)
    total = sum(np.asarray(slope) * figure for slope, figure in zip(*map(jax.tree.leaves, (each, gpus)), strict=True))
    np.testing.assert_allclose(along, total, rtol=1e-3)
    weights = jax.grad(lambda model: jnp.sum(many(model, gpus, kernels)))(predictor)
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(weights)) > 0.0


def test_many_predictors_and_machines() -> None:
    """Batches of anything else go as they come, over machines in blocks or under them."""
    predictors = [random_predictor("mixture", seed) for seed in (0, 1)]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *predictors)
    kernels, gpus = only(_repeated(), "norm"), random_gpus(4, 3)
    outer = jax.vmap(jax.vmap(nj.latency, in_axes=(None, 0, None)), in_axes=(0, None, None))(both, gpus, kernels)
    inner = jax.vmap(jax.vmap(nj.latency, in_axes=(0, None, None)), in_axes=(None, 0, None))(both, gpus, kernels)
    alone = nj.latency(predictors[1], jax.tree.map(lambda figures: figures[2], gpus), kernels)
    np.testing.assert_allclose(outer, inner.T, rtol=1e-5)
    assert float(outer[1, 2]) == pytest.approx(float(alone), rel=1e-5)


@pytest.mark.parametrize("launched", ["graph", "host", "eager"])
def test_many_tables_are_tables_alone(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and slopes of tables in blocks, one of them empty, are those of a loop over them."""
    monkeypatch.setattr(batching, "TABLE_ROWS", 8)
    predictor, names = random_predictor("mixture", 5), ("linear", "norm")
    tables = [replace(only(table_from_kernels(_mixed(9, seed)), *names), launched=launched) for seed in range(5)]
    tables.append(jax.tree.map(np.zeros_like, tables[0]))
    phases = np.random.default_rng(0).integers(0, 4, 32).astype(np.int32)
    tables = [
        replace(table, families={name: replace(batch, phase=phases) for name, batch in table.families.items()})
        for table in tables
    ]
    stacked = jax.tree.map(lambda *columns: np.stack(columns), *tables)
    both = jax.value_and_grad(nj.latency, argnums=1)
    alone = [both(predictor, H100, table) for table in tables]
    seconds, slopes = jax.vmap(both, in_axes=(None, None, 0))(predictor, H100, stacked)
    np.testing.assert_allclose(seconds, [value for value, _ in alone], rtol=1e-6)
    assert float(seconds[-1]) < 1e-12
    for field in FIELDS:
        each = np.array([float(getattr(slope, field)) for _, slope in alone])
        np.testing.assert_allclose(getattr(slopes, field), each, rtol=1e-5, atol=1e-6 * np.abs(each).max())
    summed = jax.grad(lambda gpu: jnp.sum(jax.vmap(nj.latency, in_axes=(None, None, 0))(predictor, gpu, stacked)))(H100)
    total = sum(float(slope.mem_bytes_per_s) for _, slope in alone)
    assert float(summed.mem_bytes_per_s) == pytest.approx(total, rel=1e-5)


def test_tables_with_a_machine_each_and_tables_of_other_counts() -> None:
    predictor, table, gpus = random_predictor("mixture", 5), only(_repeated(), "norm"), random_gpus(4, 3)
    batch = table.families["norm"]

    def one(gpu: nj.GPU, count: Any) -> Any:
        return nj.latency(predictor, gpu, KernelTable({"norm": replace(batch, count=count)}))

    counts = np.arange(3.0, dtype=np.float32)[:, None] * batch.count
    seconds = jax.vmap(one)(gpus, counts)
    same = jax.vmap(one, in_axes=(None, 0))(T4, counts)
    outer = jax.vmap(jax.vmap(one, in_axes=(None, 0)), in_axes=(0, None))(gpus, counts)
    for place in range(3):
        gpu = jax.tree.map(lambda figures, i=place: figures[i], gpus)
        alone = float(one(gpu, counts[place]))
        assert float(seconds[place]) == pytest.approx(alone, rel=1e-6)
        assert float(outer[place, place]) == pytest.approx(alone, rel=1e-6)
        assert float(same[place]) == pytest.approx(float(one(T4, counts[place])), rel=1e-6)


def test_memory_does_not_grow_with_the_machines() -> None:
    predictor, kernels = random_predictor("mixture", 0), only(_repeated(), "norm")
    for one in (nj.latency, jax.value_and_grad(nj.latency, argnums=1)):
        many = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))
        program = many.lower(predictor, random_gpus(0, 10_000), kernels).compile()
        assert program.memory_analysis().temp_size_in_bytes < 32e6  # one array [machine, row, component] would be 15e6


@pytest.mark.parametrize("kind", KINDS)
def test_another_machine_model_and_switch_compile_nothing(kind: str) -> None:
    first, second = (_renumbered(only(_kernels(model), "linear", "norm")) for model in ("gpt2", "gpt2-medium"))
    predictor, other = random_predictor(kind, 0), random_predictor(kind, 1)
    nj.latency(predictor, T4, first)
    nj.latency(predictor, T4, first, relaxation=0.5)
    nj.predict_kernels(predictor, T4, first)
    with compilations(0):
        nj.latency(predictor, H100, second, isolated=True, relaxation=0.25)
        nj.latency(other, H100.replace(num_sms=200), first)
        nj.predict_kernels(other, H100, second, isolated=False)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_sum(kind: str) -> None:
    kernels, predictor = only(_kernels("gpt2"), "linear", "norm"), random_predictor(kind, 2)
    plain = float(nj.latency(predictor, H100, kernels))
    padded = repadded(kernels, 256)
    assert padded.num_rows == kernels.num_rows
    assert float(nj.latency(predictor, H100, padded)) == pytest.approx(plain, rel=1e-5)
    np.testing.assert_allclose(
        nj.predict_kernels(predictor, H100, _renumbered(padded)),
        nj.predict_kernels(predictor, H100, _renumbered(kernels)),
        rtol=1e-5,
    )


def _renumbered(table: KernelTable) -> KernelTable:
    """Rows counted afresh after families were dropped."""
    start, families = 0, {}
    for name, batch in table.families.items():
        real = int((batch.row >= 0).sum())
        row = np.where(batch.row >= 0, np.arange(len(batch.row)) + start, -1).astype(np.int32)
        families[name] = replace(batch, row=row)
        start += real
    return KernelTable(families)


def test_padding_on_a_chip_without_the_path_is_no_time() -> None:
    """Rows of count 0 are no part of the sum, whatever they would cost."""
    kernels = table_from_kernels([Kernel("softmax", "softmax", {"rows": 64, "cols": 64, "reads": 1, "writes": 1})])
    assert np.isfinite(float(nj.latency(random_predictor("mixture", 0), H100, kernels)))


@pytest.mark.parametrize("kind", KINDS)
def test_order_changes_nothing(kind: str) -> None:
    kernels, predictor = _mixed(60), random_predictor(kind, 3)
    order = np.random.default_rng(1).permutation(len(kernels))
    straight, shuffled = table_from_kernels(kernels), table_from_kernels([kernels[i] for i in order])
    seconds = nj.predict_kernels(predictor, T4, straight)
    assert seconds.shape == (60,)
    assert seconds.dtype == np.float32
    np.testing.assert_allclose(nj.predict_kernels(predictor, T4, shuffled), seconds[order], rtol=1e-5)
    total = float(nj.latency(predictor, T4, straight, isolated=True))
    assert total == pytest.approx(float(nj.latency(predictor, T4, shuffled, isolated=True)), rel=1e-5)
    assert total == pytest.approx(float(seconds.sum(dtype=np.float64)), rel=1e-5)
    inside = nj.predict_kernels(predictor, T4, straight, isolated=False)
    assert float(nj.latency(predictor, T4, straight)) == pytest.approx(float(inside.sum(dtype=np.float64)), rel=1e-5)


def test_rows_come_back_in_the_order_of_the_file() -> None:
    kernels, predictor = _mixed(40, seed=8), random_predictor("mixture", 4)
    together = nj.predict_kernels(predictor, T4, table_from_kernels(kernels))
    alone = [nj.predict_kernels(predictor, T4, table_from_kernels([kernel]))[0] for kernel in kernels]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert len(np.unique(together)) > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_of_three_is_three_launches(kind: str) -> None:
    predictor = random_predictor(kind, 5)
    kernels = _mixed(10, seed=7)
    thrice = [Kernel(kernel.family, kernel.op, kernel.dims, 3.0) for kernel in kernels]
    counted = float(nj.latency(predictor, T4, table_from_kernels(thrice)))
    assert counted == pytest.approx(float(nj.latency(predictor, T4, table_from_kernels(kernels * 3))), rel=1e-5)
    assert counted == pytest.approx(3 * float(nj.latency(predictor, T4, table_from_kernels(kernels))), rel=1e-5)
    # One launch of a row is its latency, whatever its count.
    rows = nj.predict_kernels(predictor, T4, table_from_kernels(thrice))
    np.testing.assert_allclose(rows, nj.predict_kernels(predictor, T4, table_from_kernels(kernels)), rtol=1e-5)


def test_an_empty_table_takes_no_time() -> None:
    empty = table_from_kernels([])
    assert float(nj.latency(random_predictor("mixture", 0), T4, empty)) == 0.0
    assert nj.predict_kernels(random_predictor("mixture", 0), T4, empty).shape == (0,)


def test_a_launch_alone_pays_the_floor() -> None:
    """Untrained weights: a sweep's kernel pays a launch floor that a running model's mostly does not. On a board that
    power does not limit: alone, a kernel meets that limit in part only."""
    predictor = untrained("mixture", {"families": NETWORKS, "hidden": (8,), "members": 1})
    kernels = table_from_kernels(_mixed(40, names=list(FAMILIES)))
    board = T4.replace(tdp_w=1e6)
    alone, inside = (nj.predict_kernels(predictor, board, kernels, isolated=switch) for switch in (True, False))
    assert np.all(alone >= inside)
    # Single precision does not see a microsecond beside a minute.
    assert np.all((alone > inside)[inside < 1.0])
    default = nj.predict_kernels(predictor, board, kernels)
    np.testing.assert_array_equal(default, alone)


def test_each_kernel_may_have_its_own_switch_and_machine() -> None:
    rows = 32
    kernels, predictor, gpus = random_kernels(8, rows), random_predictor("mixture", 8), random_gpus(8, rows)
    switch = jnp.asarray(np.arange(rows) % 2, float)
    mixed, alone, inside = (
        kernel_latency(predictor, gpus, kernels, isolated=each)
        for each in (switch, jnp.ones_like(switch), jnp.zeros_like(switch))
    )
    for name in ON_ONE_GPU:
        expected = np.where(np.asarray(switch) > 0, alone[name], inside[name])
        np.testing.assert_allclose(mixed[name], expected, rtol=1e-5)
    last = jax.tree.map(lambda figures: figures[-1], gpus)
    for name, seconds in kernel_latency(predictor, last, kernels, isolated=True).items():
        np.testing.assert_allclose(seconds[-1], alone[name][-1], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_latency_by_family_has_the_length_of_its_batch(kind: str) -> None:
    kernels = _kernels("switch-base-8", mode="training")
    predictor = random_predictor(kind, 6)
    seconds = jax.eval_shape(lambda gpu: kernel_latency(predictor, gpu, kernels), H100)
    assert {name: values.shape for name, values in seconds.items()} == {
        name: batch.row.shape for name, batch in kernels.families.items()
    }
    assert len({values.shape for values in seconds.values()}) > 1


@pytest.mark.parametrize("predictor", ["neusight", "roofline"])
def test_kinds_without_a_launch_term_ignore_the_switch(predictor: str) -> None:
    chosen = load_baseline("roofline") if predictor == "roofline" else random_predictor(predictor, 7)
    kernels = table_from_kernels(_mixed(20, names=list(FAMILIES)))
    alone, inside = (nj.predict_kernels(chosen, T4, kernels, isolated=switch) for switch in (True, False))
    np.testing.assert_array_equal(alone, inside)


def test_roofline_is_flop_over_peak_or_bytes_over_bandwidth() -> None:
    gpu = T4.replace(fp32_flop_per_s=8e12, mem_bytes_per_s=300e9)
    sizes = {"batch": 1, "m": 4096, "n": 4096, "k": 4096}
    kernels = table_from_kernels(
        [
            Kernel("linear", "linear", sizes),
            Kernel("elementwise", "add", {"rows": 1 << 14, "cols": 1 << 12, "reads": 2, "writes": 1}),
        ]
    )
    seconds = nj.predict_kernels(load_baseline("roofline"), gpu, kernels)
    np.testing.assert_allclose(seconds, [2 * 4096**3 / 8e12, 3 * 4 * (1 << 26) / 300e9], rtol=1e-5)


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(nj.InputError, match="unknown baseline 'rooflin'; nearest: roofline"):
        load_baseline("rooflin")


def test_a_missing_path_takes_forever() -> None:
    sizes = {"batch": 1, "m": 64, "n": 64, "k": 64}
    kernels = table_from_kernels([Kernel("linear", "linear", sizes)], dtype="fp8")
    predictor = random_predictor("mixture", 0)
    assert np.isinf(nj.predict_kernels(predictor, T4, kernels)[0])
    assert np.isfinite(nj.predict_kernels(predictor, H100, kernels)[0])


def test_many_rows_are_forecast_in_blocks_that_change_nothing() -> None:
    rows = 2 * BLOCK + 900
    kernels, gpus, predictor = random_kernels(4, rows), random_gpus(4, rows), random_predictor("mixture", 4)
    part = only(kernels, "softmax")
    switch = jnp.asarray(np.arange(rows) % 2, float)
    whole = kernel_latency(predictor, gpus, part, isolated=switch)["softmax"]
    assert whole.shape == (rows,)
    slopes = jax.grad(nj.latency, argnums=1)(predictor, T4, part)
    sums = 0.0
    for start in range(0, rows, BLOCK):
        own = slice(start, start + BLOCK)
        few = jax.tree.map(lambda leaf, own=own: leaf[own], part)
        machines = jax.tree.map(lambda leaf, own=own: leaf[own], gpus)
        expected = kernel_latency(predictor, machines, few, isolated=switch[own])["softmax"]
        np.testing.assert_allclose(whole[own], expected, rtol=1e-5)
        sums += np.asarray(jax.tree.leaves(jax.grad(nj.latency, argnums=1)(predictor, T4, few)))
    np.testing.assert_allclose(jax.tree.leaves(slopes), sums, rtol=1e-4)


@pytest.mark.parametrize("zero", [0, 0.0, jnp.zeros(()), None])
def test_a_relaxation_of_zero_is_the_exact_program(zero: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert relaxation_switch(zero) is None
    assert "max" not in str(jax.make_jaxpr(lambda blocks: whole_waves(blocks, jnp.float32(80.0), zero))(jnp.ones(3)))
    passed: list[Any] = []
    monkeypatch.setattr(sensitivities, "_elasticities", lambda *each: (passed.append(each[-1]) or {}, [{}]))
    monkeypatch.setattr(sensitivities, "ROWS", {"num_sms": ("num_sms",)})
    sensitivities.elasticities(random_predictor("mixture", 0), nj.load_gpu("T4"), KernelTable({}), relaxation=zero)
    assert passed == [None]


def test_a_relaxation_above_zero_or_traced_stays() -> None:
    assert relaxation_switch(0.5) == 0.5
    traced = jax.make_jaxpr(lambda relaxation: whole_waves(jnp.ones(3), jnp.float32(80.0), relaxation))(0.0)
    assert "max" in str(traced)
