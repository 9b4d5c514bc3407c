"""Layouts: checks, stages, and which groups cross NVLink domains."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from neusight_jax import InputError
from neusight_jax.job.parallelism import AXES, GROUPS, Group, Parallelism, groups, strides


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor": 0}, "tensor is 0, expected a positive whole number"),
        ({"data": 4, "expert": 3}, "expert=3 does not divide"),
        ({"chunks": 2}, "chunks=2 needs pipeline > 1"),
        ({"zero": 4}, "zero is 4, expected one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute is 'some', expected one of none, selective, full"),
        ({"schedule": "x"}, "schedule is 'x'"),
        ({"order": ("tensor",)}, "expected a permutation of tensor, context, data, pipeline"),
    ],
)
def test_bad_layouts(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Parallelism(**given)  # type: ignore[arg-type]


def test_products_that_do_not_divide() -> None:
    layout = Parallelism(tensor=8, pipeline=4, data=2, micro_batch_size=2)
    assert layout.gpus == 64
    assert layout.micro_batches(64) == 16
    with pytest.raises(InputError, match="global_batch_size 66 is no multiple of data"):
        layout.micro_batches(66)
    with pytest.raises(InputError, match="= 64, but the cluster has 32 GPUs"):
        layout.check(32, 80, 4096)
    with pytest.raises(InputError, match="3 layers cannot fill"):
        layout.check(64, 3, 4096)


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "expected"),
    [
        (80, 4, 1, (20,) * 4),
        (61, 16, 1, (3, 3, *(4,) * 13, 3)),
        (80, 32, 1, (2, *(2,) * 14, *(3,) * 16, 2)),
        (70, 12, 1, (5, *(6,) * 10, 5)),
        (7, 2, 1, (3, 4)),
        (61, 8, 4, (1, 1, *(2,) * 29, 1)),
    ],
)
def test_layers_of_stages(layers: int, pipeline: int, chunks: int, expected: tuple[int, ...]) -> None:
    """BLOOM's 70 layers on 12 stages: embedding and head count as a layer each. The ends have one more last of all."""
    assert Parallelism(pipeline=pipeline, chunks=chunks).layers_of(layers) == expected


@pytest.mark.parametrize("layers", range(4, 130, 7))
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
def test_every_layer_has_a_stage(layers: int, pipeline: int) -> None:
    counts = Parallelism(pipeline=pipeline).layers_of(layers)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1


def test_tensor_is_innermost_and_pipeline_outermost() -> None:
    found = groups(Parallelism(tensor=8, pipeline=4, data=2, expert=8), 8)
    assert found["tensor"] == Group(8, 1)
    assert found["data"] == Group(2, 2)
    assert found["expert"] == Group(8, 1)
    assert found["expert_data"] == Group(2, 2)
    assert found["pipeline"] == Group(2, 2)
    assert groups(Parallelism(tensor=8, pipeline=4, data=2), 64)["pipeline"] == Group(2, 1)


def test_order_is_a_permutation() -> None:
    layout = Parallelism(tensor=4, data=16, order=("data", "tensor", "context", "pipeline"))
    assert groups(layout, 8)["data"] == Group(16, 2)
    assert groups(layout, 8)["tensor"] == Group(4, 4)


def test_groups_are_those_of_their_ranks() -> None:
    """Any layout, also with pipeline ranks between those of a group: sizes and domains as a list of all ranks has."""
    random = np.random.default_rng(3)

    def listed(layout: Parallelism, domain: int) -> dict[str, Group]:
        step = strides(layout)

        def members(axes: tuple[str, ...]) -> list[int]:
            places = itertools.product(*(range(getattr(layout, axis)) for axis in axes))
            return sorted(sum(step[axis] * at for axis, at in zip(axes, place, strict=True)) for place in places)

        ranks = {name: members(axes) for name, axes in GROUPS.items()}
        stage = ranks["expert"]
        ranks |= {"expert": stage[: layout.expert], "expert_data": stage[:: layout.expert]}
        ranks |= {"shards": ranks["data"][: layout.shard_ranks], "copies": ranks["data"][:: layout.shard_ranks]}
        found = {name: Group(len(own), len({rank // domain for rank in own})) for name, own in ranks.items()}
        ends = [step["pipeline"] * at for at in range(layout.pipeline)]
        crosses = len({rank // domain for rank in ends}) > 1
        return found | {"pipeline": Group(min(layout.pipeline, 2), 1 + crosses)}

    for _ in range(1000):
        ways = dict(zip(AXES, random.choice([1, 2, 3, 4, 5, 8], 4).tolist(), strict=True))
        copies = ways["tensor"] * ways["context"] * ways["data"]
        expert = int(random.choice([each for each in range(1, copies + 1) if copies % each == 0]))
        order = tuple(random.permutation(AXES).tolist()) if random.random() < 0.5 else AXES
        layout, domain = Parallelism(**ways, expert=expert, order=order), int(random.choice([1, 2, 4, 7, 8, 16, 72]))
        if expert == 1:
            layout = dataclasses.replace(layout, zero=3, shards=ways["data"])
        assert groups(layout, domain) == listed(layout, domain), (layout, domain)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    layout = Parallelism(tensor=np.int64(8), data=np.int32(2))
    assert layout == Parallelism(tensor=8, data=2)
    assert type(layout.tensor) is int
    for wrong in (True, np.True_, 2.0, 0, np.array([2, 2])):
        with pytest.raises(InputError, match="expected a positive whole number"):
            Parallelism(tensor=wrong)


def test_interleaving_needs_groups_of_micro_batches() -> None:
    layout = Parallelism(pipeline=4, chunks=2)
    assert layout.micro_batches(8) == 8
    with pytest.raises(InputError, match="6 micro-batches of a replica are no multiple of pipeline = 4"):
        layout.micro_batches(6)
