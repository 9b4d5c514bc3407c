"""Forecast: its columns, sums, phases and texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from predictors import KINDS, random_predictor

import neusight_jax as nj
from neusight_jax.forecast import BOUNDS, COLUMNS, Forecast
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.model.predictor import load_baseline
from neusight_jax.model.software import LEARNED

PROMISED = ("node", "op", "family", "phase", "dtype", "count", "flop", "bytes", "tile", "waves", "utilization")
PROMISED += ("bound", "seconds")
"""Columns that tools outside rely on."""
H100 = nj.load_gpu("NVIDIA H100 80GB HBM3")


def _graph(mode: str = "training", dtype: str = "fp32") -> Graph:
    """Fused, so that training has tables of the sizes of inference: one program for both."""
    return nj.graph_from_config("gpt2", batch_size=2, sequence_length=64, mode=mode, dtype=dtype, fused=True)


@pytest.fixture(scope="module", params=[*KINDS, "roofline"])
def forecast(request: pytest.FixtureRequest) -> Forecast:
    kind = str(request.param)
    predictor = load_baseline("roofline") if kind == "roofline" else random_predictor(kind, 0)
    return nj.predict(predictor, H100, _graph(), gpu_name="a GPU", notes=("weights are random",))


def test_one_row_is_one_distinct_kernel(forecast: Forecast) -> None:
    frame, graph = forecast.to_frame(), _graph()
    assert set(PROMISED) <= set(frame.columns)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == graph.kernels.num_rows
    assert frame["count"].sum() == graph.launches()
    assert set(frame["node"]) <= {node.name for node in graph.nodes}
    assert set(frame["bound"]) <= set(BOUNDS)
    assert set(frame["dtype"]) == {"fp32"}
    for family, rows in frame.groupby("family"):
        assert set(rows["op"]) <= set(FAMILIES[str(family)].ops)
        assert set(rows["tile"]) <= set(FAMILIES[str(family)].tiles)
    assert not frame.drop(columns=["seconds_low", "seconds_high"]).isna().any().any()
    assert (frame["seconds"] > 0).all()
    assert (frame["waves"] >= 1).all()
    assert ((frame["utilization"] > 0) & (frame["utilization"] <= 1)).all()


def test_totals_are_sums_of_rows(forecast: Forecast) -> None:
    frame = forecast.to_frame()
    cost = (frame["seconds"].astype(float) * frame["count"].astype(float)).groupby(frame["phase"]).sum()
    assert forecast.total_s == pytest.approx(cost.sum(), rel=1e-6)
    assert forecast.forward_s == pytest.approx(cost["forward"], rel=1e-6)
    assert forecast.backward_s == pytest.approx(cost["backward"] + cost["weight_gradient"], rel=1e-6)
    assert forecast.weight_gradient_s == pytest.approx(cost["weight_gradient"], rel=1e-6)
    assert forecast.forward_s + forecast.backward_s == pytest.approx(forecast.total_s, rel=1e-9)
    for column in ("node", "family", "phase", "bound"):
        shares = forecast.seconds_by(column)
        assert sum(shares.values()) == pytest.approx(forecast.total_s)
        assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_the_total_is_the_latency() -> None:
    for kind in KINDS:
        predictor = random_predictor(kind, 1)
        total = float(nj.latency(predictor, H100, _graph().kernels))
        assert nj.predict(predictor, H100, _graph()).total_s == pytest.approx(total, rel=1e-5)


def test_json_is_plain_and_whole(forecast: Forecast) -> None:
    read = json.loads(forecast.to_json())
    for name in ("total_s", "forward_s", "backward_s"):
        assert read[name] == getattr(forecast, name)
    assert read["mode"] == "training"
    assert read["model"] == "gpt2"
    assert read["gpu"] == "a GPU"
    null = "null where there is no finite number: most_expensive[].seconds_low, most_expensive[].seconds_high"
    assert read["notes"] == ["weights are random", null]  # no intervals
    assert {row["seconds_high"] for row in read["most_expensive"]} == {None}
    assert read["launches"] == _graph().launches()
    frame = forecast.to_frame()
    assert read["flop"] == pytest.approx((frame["flop"].astype(float) * frame["count"]).sum(), rel=1e-6)


def test_text_names_the_ten_most_expensive(forecast: Forecast) -> None:
    text = str(forecast)
    top = forecast.most_expensive()
    costs = [row["total_s"] for row in top]
    assert len(top) == 10
    assert costs == sorted(costs, reverse=True)
    frame = forecast.to_frame()
    assert costs[0] == pytest.approx((frame["seconds"] * frame["count"]).max())
    lines = text.split("Ten most expensive kernels")[1].splitlines()
    rows = [line for line in lines if any(line.startswith(row["node"]) for row in top)]
    assert len(rows) == 10
    for row, line in zip(top, rows, strict=True):
        assert line.startswith(row["node"])
        assert row["bound"] in line
    assert "gpt2 on a GPU: training, batch 2, sequence 64, fp32, fused" in text
    assert "note: weights are random" in text


def test_inference_has_no_backward() -> None:
    forecast = nj.predict(random_predictor("mixture", 0), H100, _graph("inference"))
    assert forecast.backward_s == 0
    assert forecast.weight_gradient_s == 0
    assert forecast.forward_s == forecast.total_s > 0
    assert set(forecast.to_frame()["phase"]) == {"forward"}


def test_training_runs_the_forward_of_inference() -> None:
    """Same kernels forward, so the same seconds; more launches in all."""
    predictor = random_predictor("mixture", 0)
    training, inference = (nj.predict(predictor, H100, _graph(mode)) for mode in ("training", "inference"))
    assert training.total_s > inference.total_s
    assert training.forward_s >= inference.forward_s * (1 - 1e-6)


def test_a_dtype_the_chip_lacks_is_refused() -> None:
    graph = _graph("inference", "fp8")
    with pytest.raises(nj.InputError) as caught:
        nj.predict(load_baseline("roofline"), nj.load_gpu("Tesla P100-PCIE-16GB"), graph)
    message = str(caught.value)
    assert "no arithmetic path 'fp8'" in message
    assert "fp32" in message.split("expected one of")[1]
    assert "\n" not in message
    assert nj.predict(load_baseline("roofline"), H100, graph).total_s > 0


def test_launch_bound_kernels_are_named() -> None:
    """Tiny work on a machine fast at everything: what is left is the launch."""
    fast = H100.replace(**{name: 1e6 * float(getattr(H100, name)) for name in ("mem_bytes_per_s", "clock_hz", "tdp_w")})
    fast = fast.replace(fp32_flop_per_s=1e6 * float(H100.fp32_flop_per_s))
    shares = nj.predict(random_predictor("mixture", 2), fast, _graph()).seconds_by("bound")
    assert shares == pytest.approx({"launch": sum(shares.values())})


def test_big_products_are_compute_bound_and_copies_memory_bound() -> None:
    forecast = nj.predict(
        load_baseline("roofline"), H100, nj.graph_from_config("gpt2", batch_size=8, sequence_length=1024)
    )
    frame = forecast.to_frame()
    frame = frame[frame["seconds"] > LEARNED.launch_s]
    assert set(frame.loc[(frame["family"] == "linear"), "bound"]) == {"compute"}
    assert set(frame.loc[frame["family"].isin(["memory", "norm", "elementwise"]), "bound"]) == {"memory"}
    assert np.isclose(frame.loc[frame["family"] == "memory", "flop"].sum(), 0.0)
