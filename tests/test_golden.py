"""Forecasts stay as they were pinned: kernels and models of tensor-core families (golden/make.py), and whole answers of
every kind of question (golden/answers.py)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from golden import answers, plain
from golden.make import (
    DTYPES,
    FILE,
    TOLERANCE,
    interval_differences,
    kernel_differences,
    kernels_of,
    model_differences,
    moved,
    read,
    relative_change,
)

import neusight_jax as nj
from neusight_jax.kernels.families import TENSOR_FAMILIES

HEADER, DIMS, PINNED = read()
SHOWN = 5


def _unmoved(differences: Iterator[str]) -> None:
    """Fail with the first differences, which are the largest of their family."""
    found = list(itertools.islice(differences, SHOWN + 1))
    listed = "\n  ".join(found[:SHOWN])
    more = "\n  and more" if len(found) > SHOWN else ""
    assert not found, f"moved by more than {TOLERANCE:g}; if that is meant, run tests/golden/make.py:\n  {listed}{more}"


def test_kernels_on_every_gpu_forecast_what_they_did() -> None:
    _unmoved(kernel_differences(HEADER, DIMS, PINNED))


def test_intervals_are_what_they_were() -> None:
    _unmoved(interval_differences(HEADER, DIMS, PINNED))


def test_whole_models_forecast_what_they_did() -> None:
    _unmoved(model_differences(HEADER))


@pytest.mark.parametrize("group", answers.QUESTIONS)
def test_answers_are_what_they_were(group: str) -> None:
    lines = list(itertools.islice(answers.moved(group, answers.read()[group], answers.ask(group)), SHOWN))
    assert not lines, "moved; if that is meant, run tests/golden/answers.py:\n  " + "\n  ".join(lines)


def test_what_answers_are_pinned() -> None:
    counts = {group: len(kept) for group, kept in answers.read().items()}
    least = {"models": 24, "jobs": 40, "layouts": 10, "services": 12, "sizes": 86, "traces": 8, "designs": 4}
    assert all(counts[group] >= count for group, count in least.items()), counts
    assert counts == {group: len({*map(answers.name_of, asked())}) for group, asked in answers.QUESTIONS.items()}
    assert answers.FILE.stat().st_size < 200e3


def test_a_moved_answer_is_named() -> None:
    old = {"a": {"total_s": 1.0, "parts": [1.0, 2.0], "gpu": "H100", "fits": None}}
    assert not [*answers.moved("jobs", old, json.loads(json.dumps(old)))]
    new = {"a": {"total_s": 1.00002, "parts": [1.0, 2.1], "gpu": "H200", "more": 1.0}}
    assert [*answers.moved("jobs", old, new)] == [
        "jobs.a.total_s: 1 -> 1.00002 (+0.002%)",
        "jobs.a.parts[1]: 2 -> 2.1 (+5.000%)",
        "jobs.a.gpu: 'H100' -> 'H200'",
        "jobs.a.fits: went",
        "jobs.a.more: came",
    ]


def test_what_is_pinned() -> None:
    """All families of tensor cores, 64 shapes each, on every GPU that the catalog had; no number is missing."""
    assert set(HEADER["families"]) == set(DTYPES) == TENSOR_FAMILIES
    assert set(HEADER["gpus"]) <= set(nj.list_gpus())
    assert len(HEADER["models"]) == 8
    assert FILE.stat().st_size < 400e3
    for name in HEADER["families"]:
        seconds = PINNED[f"seconds/{name}"]
        assert seconds.shape == (len(HEADER["gpus"]), 2, 64)
        assert not np.isnan(seconds).any()
        assert {kernel.dtype for kernel in kernels_of(HEADER, DIMS, name)} == set(DTYPES[name])
        for gpu, row in itertools.product(("NVIDIA H100 80GB HBM3", "Tesla P4"), (0, 1)):
            kernel = kernels_of(HEADER, DIMS, name)[row]
            has_path = name in ("stream", "reduction") or kernel.dtype in nj.load_gpu(gpu).paths
            assert np.isfinite(seconds[HEADER["gpus"].index(gpu), :, row]).all() == has_path, (name, gpu)


def test_a_moved_forecast_is_named() -> None:
    """One kernel a hundredth of a percent slower, one path that came, one that went, and rounding."""
    old = np.array([[1e-3, 2e-3, np.inf], [np.inf, 3e-3, 4e-3]], np.float32)
    new = np.array([[1.0001e-3, 2e-3, 5.0], [np.inf, np.nan, 4.000001e-3]], np.float32)
    assert [place for place, _ in moved(old, new)] == [(0, 2), (1, 1), (0, 0)]
    assert list(moved(old, new))[-1][1].startswith("0.00100000005 -> 0.00100010005 s (+0.0001")
    with pytest.raises(AssertionError, match=r"case 0\n    case 1\n(.*\n)+    and more"):
        _unmoved(f"case {number}" for number in range(9))


def test_the_plain_form_is_what_it_was() -> None:
    """`fp32-heldout` of commit 57867b0, forecast by its own code and by today's with its weights and figures."""
    header, arrays = plain.read()
    predictor, gpus = plain.predictor(arrays), plain.gpus(header)
    for name in plain.ARCHITECTURE["families"]:
        table, pinned = plain.kernels(arrays, name), arrays[f"seconds/{name}"]
        for place, gpu in gpus.items():
            for condition, alone in enumerate((True, False)):
                seconds = nj.predict_kernels(predictor, gpu, table, isolated=alone)
                worst = float(np.max(relative_change(pinned[place, condition], seconds)))
                assert worst < TOLERANCE, f"{name} on {header['gpus'][place]}, alone {alone}: {worst:.2g}"
