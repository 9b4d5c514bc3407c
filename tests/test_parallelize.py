"""Layouts: the search finds what a forecast of every layout finds, drops what does not fit, and says what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_job import MODEL, MOE, PREDICTOR, cluster

from neusight_jax import InputError, Parallelism, Space, job_from_config, parallelize, predict
from neusight_jax.cli.app import run
from neusight_jax.hardware.prices import Prices, read_prices
from neusight_jax.job.schedule import pipeline_end, pipeline_seconds, schedule_table
from neusight_jax.layouts.answers import Layouts

NARROW = Space(micro_batch_sizes=(1, 2), chunks=(1, 2), zero=(0, 1, 3), recompute=("none",))


def search(config: dict[str, Any] = MODEL, count: int = 8, **given: Any) -> Layouts:
    given = {"global_batch_size": 16, "sequence_length": 1024, "space": NARROW, **given}
    return parallelize(PREDICTOR, cluster(count, 4), config, **given)


def layout_of(values: dict[str, Any]) -> Parallelism:
    return Parallelism(**{name: value for name, value in values.items() if name != "gpus"})


@pytest.mark.parametrize("config", [MODEL, MOE])
def test_forecasts_are_those_of_single_jobs(config: dict[str, Any]) -> None:
    found = search(config, top=200)
    rng = np.random.default_rng(0)
    choices = found.machines[0].choices
    for at in rng.choice(len(choices), 4, replace=False):
        step = choices[at].step
        layout = layout_of(dict(step.workload["layout"]))
        own = job_from_config(config, layout, global_batch_size=16, sequence_length=1024)
        assert step.total_s == pytest.approx(predict(PREDICTOR, cluster(8, 4), own).total_s, rel=1e-5)
        assert step.memory.total == pytest.approx(own.plan.memory.total, rel=1e-9)
    seconds = [item.step.total_s for item in choices]
    assert seconds == sorted(seconds)
    assert any(item.step.workload["layout"]["expert"] > 1 for item in choices) == (config is MOE)


@pytest.mark.parametrize(("layers", "recompute"), [(5, "none"), (6, "full:1"), (7, "norm,activation")])
def test_stages_of_unequal_layers_are_those_of_single_jobs(layers: int, recompute: str) -> None:
    """Layers that ranks do not divide: inner stages of two lengths, in the search as in a forecast."""
    config = {**MODEL, "num_hidden_layers": layers}
    narrow = Space(micro_batch_sizes=(1,), chunks=(1,), zero=(0,), sequence_parallel=(False,), recompute=(recompute,))
    choices = search(config, 4, top=200, space=narrow).machines[0].choices
    steps = [each.step for each in choices if dict(each.step.workload["layout"])["pipeline"] == 4]
    assert steps
    for step in steps:
        own = job_from_config(
            config, layout_of(dict(step.workload["layout"])), global_batch_size=16, sequence_length=1024
        )
        assert step.total_s == pytest.approx(predict(PREDICTOR, cluster(4, 4), own).total_s, rel=1e-5)
        assert step.memory.total == pytest.approx(own.plan.memory.total, rel=1e-9)


def test_the_first_few_are_those_of_all() -> None:
    every, few = (search(top=top).machines[0].choices for top in (500, 3))
    assert [item.step.total_s for item in few] == [item.step.total_s for item in every[:3]]


def test_ranks_ties_and_reasons() -> None:
    choices = search(top=200).machines[0].choices
    assert choices[0].rank == 1
    assert choices[0].tie == (choices[1].rank == 1)
    assert "faster than the next" in choices[0].why
    assert choices[-1].rank > 1


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    roomy = search().machines[0]
    least, most = (f(item.step.memory.total for item in search(top=200).machines[0].choices) for f in (min, max))
    small = cluster(8, 4)
    small = small.replace(gpu=small.gpu.replace(mem_bytes=(least + most) / 2))
    given: dict[str, Any] = {"global_batch_size": 16, "sequence_length": 1024, "space": NARROW, "top": 200}
    found = parallelize(PREDICTOR, small, MODEL, **given).machines[0]
    assert roomy.too_large == 0 < found.too_large < found.tried == roomy.tried
    assert all(item.step.fits for item in found.choices)
    lacking = [step.memory_bytes - float(small.gpu.mem_bytes) for step in found.near_misses]
    assert 0.0 < min(lacking) <= max(lacking) <= 0.1 * float(small.gpu.mem_bytes)
    seconds = [step.total_s for step in found.near_misses]
    assert seconds == sorted(seconds)
    assert len(lacking) == min(found.near, 3)
    assert found.near <= found.too_large
    assert str(parallelize(PREDICTOR, small, MODEL, **given)).count("nearly fits") == len(lacking)
    assert f"{found.near:,} of them by less than 10%" in found.verdict
    tiny = small.replace(gpu=small.gpu.replace(mem_bytes=least - 2**30))
    none = parallelize(PREDICTOR, tiny, MODEL, **given)
    assert none.best is None
    assert "none of" in none.machines[0].verdict
    assert "needs 1.0 GiB more than a GPU has" in str(none)


def test_several_machines_and_prices() -> None:
    clusters = {f"{count}x H100": cluster(count, 4) for count in (4, 8)}
    given: dict[str, Any] = {"global_batch_size": 16, "sequence_length": 1024, "space": NARROW}
    fast = parallelize(PREDICTOR, clusters, MODEL, **given)
    assert [each.gpus for each in fast.machines] == [8, 4]
    cheap = parallelize(PREDICTOR, clusters, MODEL, prices=Prices({"NVIDIA H100 80GB HBM3": 2.0}, "USD"), **given)
    assert cheap.machines[0].gpus == 4  # what is exposed and waits grows with the GPUs
    best = cheap.best
    assert best is not None
    assert best.cost_per_million_tokens == pytest.approx(4 * 2.0 / 3600 / best.step.tokens_per_s * 1e6)
    frame = cheap.to_frame()
    assert len(frame) == 10
    assert "per 1M tokens" in str(cheap)


def test_bad_searches() -> None:
    with pytest.raises(InputError, match=r"no layout divides .* over 8 GPUs; give a global batch size"):
        search(
            {**MODEL, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}, global_batch_size=1
        )
    with pytest.raises(InputError, match="chunks of a space of layouts is empty"):
        Space(chunks=())
    with pytest.raises(InputError, match="recompute is 'some', expected one of none, selective, full"):
        Space(recompute=("some",))
    with pytest.raises(InputError, match="unknown optimizer 'x'"):
        search(optimizer="x")


def test_prices_from_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("gpu,price\nH100,2.5\nA100 80GB, 1.5\n")
    assert read_prices(file).per_hour["NVIDIA H100 80GB HBM3"] == 2.5
    file.write_text("H100,cheap\n")
    with pytest.raises(InputError, match="price of H100 is 'cheap', expected a positive number"):
        read_prices(file)
    file.write_text("H100;2.5\n")
    with pytest.raises(InputError, match=r"row 'H100;2\.5' is no GPU,price"):
        read_prices(file)


@pytest.mark.parametrize(("name", "ranks", "batches", "chunks"), [("1f1b", 4, 8, 1), ("interleaved", 2, 4, 2)])
def test_the_end_of_a_pipeline_needs_no_program(name: str, ranks: int, batches: int, chunks: int) -> None:
    rng = np.random.default_rng(0)
    table = schedule_table(name, ranks, batches, chunks)
    durations, late = rng.uniform(1.0, 2.0, (3, ranks * chunks, 3)).astype(np.float32), np.float32([0.1, 0.0, 0.5])
    found = pipeline_end(table, durations, late)
    for one, own, message in zip(found, durations, late, strict=True):
        assert one == pytest.approx(float(pipeline_seconds(table, own, message)), rel=1e-5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    assert run(["parallelize", str(file), "--gpu", "H100", "--global-batch-size", "8", "--sequence-length", "64"]) == 2
    assert "how many? give --gpus" in capsys.readouterr().err
    bad = ["parallelize", str(file), "--gpu", "H100", "--gpus", "7", "--global-batch-size", "2"]
    assert run([*bad, "--sequence-length", "64", "--recompute", "some"]) == 2
    assert "recompute is 'some'" in capsys.readouterr().err


BERT = {"model_type": "bert", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 1024, "vocab_size": 1024, "max_position_embeddings": 128, "type_vocab_size": 2}


def test_replicas_of_what_is_not_split_are_those_of_single_jobs() -> None:
    sizes: dict[str, Any] = {"global_batch_size": 64, "sequence_length": None}
    choices = search(BERT, top=200, space=Space(), **sizes).machines[0].choices
    tried = [layout_of(dict(item.step.workload["layout"])) for item in choices]
    assert {(layout.micro_batch_size, layout.zero) for layout in tried} == {
        *((size, level) for size in (1, 2, 4) for level in (0, 1, 3)),
        *((8, level) for level in (0, 1, 2, 3)),
    }
    for item, layout in zip(choices, tried, strict=True):
        own = job_from_config(BERT, layout, **sizes)
        assert item.step.total_s == predict(PREDICTOR, cluster(8, 4), own).total_s
    assert [item.step.total_s for item in choices] == sorted(item.step.total_s for item in choices)


def test_replicas_that_do_not_fit_are_counted() -> None:
    small = cluster(8, 4)
    least, most = (
        job_from_config(BERT, Parallelism(data=8, zero=level, micro_batch_size=size), global_batch_size=64)
        for size, level in ((1, 3), (8, 0))
    )
    room = 0.5 * (least.plan.memory.total + most.plan.memory.total)
    machine = parallelize(
        PREDICTOR, small.replace(gpu=small.gpu.replace(mem_bytes=room)), BERT, global_batch_size=64, top=200
    ).machines[0]
    assert machine.too_large > 0
    assert len(machine.choices) == machine.tried - machine.too_large > 0
    with pytest.raises(InputError, match="no layout divides"):
        parallelize(PREDICTOR, small, BERT, global_batch_size=12)
    with pytest.raises(InputError, match="sequence_length is None"):
        parallelize(PREDICTOR, small, MODEL, global_batch_size=16)
