"""Kernels measured alone pay their host, each operator its own way through it, and run beside part of its work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from predictors import random_predictor

import neusight_jax as nj
from neusight_jax.datasets import schema
from neusight_jax.gpu_catalog import known_library
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import LIBRARY
from neusight_jax.kernels.table import Kernel, table_from_kernels
from neusight_jax.latency import kernel_latency
from neusight_jax.mixture import MixturePredictor
from neusight_jax.roofline import WARM_SHARE, physical_times
from neusight_jax.shifts import COMPUTE, FLOOR, HEADS, POWER, op_shift
from neusight_jax.tiles import init_tile_choice
from neusight_jax.training.data import measured_devices, sweep_rows
from neusight_jax.training.fit import Job, Settings, fit, row_features
from neusight_jax.training.kinds import MixtureKind
from synthetic import FLOOR_S, write_synthetic_measurements

HOSTS_S = {"Tesla V100-PCIE-32GB": 40e-6, "Tesla T4": 25e-6}
"""Host time of an `add` on the synthetic devices."""
BEFORE = 0.55
"""Share of it before the kernel starts."""
DEARER = {"addu": 1.2, "gelu": 1.3}
"""Operators whose way through the host is longer."""


def _streams(op: str, sizes: list[float]) -> list[Kernel]:
    dims = [{"rows": size, "cols": 1024.0, "reads": 1.0, "writes": 1.0} for size in sizes]
    return [Kernel("elementwise", op, each) for each in dims]


def test_an_operators_floor_counts_alone_and_only_there() -> None:
    predictor = random_predictor("mixture", 3)
    assert isinstance(predictor, MixturePredictor)
    family = FAMILIES["elementwise"]
    place = family.ops.index("gelu")
    elementwise = predictor.families["elementwise"]
    assert elementwise.op_floor is not None
    dearer = replace(elementwise, op_floor=elementwise.op_floor.at[:, place].add(0.5))
    other = replace(predictor, families={**predictor.families, "elementwise": dearer})
    gpu = nj.load_gpu("V100")
    table = table_from_kernels([*_streams("gelu", [4.0, 64.0]), *_streams("add", [4.0, 64.0])])
    for isolated, moved in ((True, 0.5), (False, 0.0)):
        then, now = (kernel_latency(each, gpu, table, isolated=isolated)["elementwise"] for each in (other, predictor))
        np.testing.assert_allclose(np.log(then / now)[:4], [moved, moved, 0.0, 0.0], atol=0.1 if moved else 1e-6)


def test_the_shift_of_an_operator_is_of_its_floor() -> None:
    shift = np.asarray(op_shift(jnp.array([[0.1, 0.2]]), jnp.array([1, 0, 1]), True))
    np.testing.assert_allclose(shift[0, :, -1], [0.2, 0.1, 0.2])
    assert not shift[..., :-1].any()


@pytest.mark.parametrize(("name", "measured"), [("MI100", 1.81), ("MI210", 2.82)])
def test_amds_library_works_out_a_power_alone(name: str, measured: float) -> None:
    """By weights that saw no AMD GPU: a long `powu` over a `mulu`, which streams. Not in a model, which squares and
    cubes, nor on NVIDIA's GPUs."""
    predictor = nj.load_predictor("fp32-heldout")
    table = table_from_kernels([*_streams("powu", [65536.0]), *_streams("mulu", [65536.0])])
    for gpu, isolated, dearer in ((name, True, measured), (name, False, 1.0), ("A100-PCIE-40GB", True, 1.0)):
        seconds = np.asarray(kernel_latency(predictor, nj.load_gpu(gpu), table, isolated=isolated)["elementwise"])
        assert seconds[0] / seconds[1] == pytest.approx(dearer, rel=0.2 if dearer > 1.0 else 0.02)


def _by_the_law(folder: Path) -> None:
    """Latencies of streaming operators by host and kernel side by side, on a folder of the schema."""
    for op in schema.VECTOR_OPS:
        path = folder / "kernels" / f"{op}.parquet"
        frame = pd.read_parquet(path)
        reads = 2 if op in ("add", "mul", "div", "pow") else 1
        moved = 4.0 * (reads + 1) * frame["b"] * frame["h"]
        rates = frame["device"].map({name: 0.8 * float(nj.load_gpu(name).mem_bytes_per_s) for name in HOSTS_S})
        host = frame["device"].map(HOSTS_S) * DEARER.get(op, 1.0)
        frame["latency_s"] = np.maximum(host, BEFORE * host + moved / rates)
        frame.to_parquet(path)


def test_a_fit_finds_lead_and_operators(tmp_path: Path) -> None:
    """The share before the kernel and each operator's cost are read off times that were made from them."""
    _by_the_law(write_synthetic_measurements(tmp_path, rows=300))
    data = nj.read_measurements(tmp_path)
    rows = sweep_rows(data, "elementwise", measured_devices(data))
    tile = init_tile_choice(jax.random.key(0), rows.family, row_features(rows))
    with jax.numpy_dtype_promotion("standard"):
        best = fit(MixtureKind(tile, hidden=(16,)), rows, [Job(0)], Settings(steps=600, batch_size=256)).best
    assert float(jax.nn.sigmoid(best.raw_lead)[0, 0]) == pytest.approx(BEFORE, abs=0.05)
    floors = dict(zip(rows.family.ops, np.asarray(best.op_floor)[0, 0], strict=True))
    for op, factor in DEARER.items():
        assert np.exp(floors[op] - floors["add"]) == pytest.approx(factor, rel=0.03)
    assert np.exp(floors["tanh"] - floors["add"]) == pytest.approx(1.0, rel=0.03)


def test_a_slow_host_keeps_its_floor_to_itself(tmp_path: Path) -> None:
    """Few rows of a product are as short as its floor; those of a host that takes 1.7 times as long as the others do
    not raise the floor of a GPU that nobody measured."""
    hosts_s = {"Tesla V100-PCIE-32GB": 50e-6, "Tesla T4": 50e-6, "Tesla P100-PCIE-16GB": 85e-6}
    folder = write_synthetic_measurements(tmp_path, devices=list(hosts_s), rows=1200)
    path = folder / "kernels" / "linear.parquet"
    frame = pd.read_parquet(path)
    body, host = frame["latency_s"] - FLOOR_S, frame["device"].map(hosts_s)
    frame["latency_s"] = np.maximum(host, BEFORE * host + body)
    frame[(body > 200e-6) | (np.arange(len(frame)) % 20 == 0)].to_parquet(path)
    data = nj.read_measurements(folder)
    rows = sweep_rows(data, "linear", measured_devices(data))
    tile = init_tile_choice(jax.random.key(0), rows.family, row_features(rows))
    with jax.numpy_dtype_promotion("standard"):
        best = fit(MixtureKind(tile, hidden=(16,)), rows, [Job(0)], Settings(steps=600, batch_size=256)).best
    usual_s = np.exp(float(best.log_floor_s[0, 0] + best.op_floor[0, 0, 0]))
    own = dict(zip(rows.devices, usual_s * np.exp(np.asarray(best.effect)[0, :, FLOOR]), strict=False))
    assert usual_s == pytest.approx(50e-6, rel=0.03)
    assert own["Tesla P100-PCIE-16GB"] == pytest.approx(85e-6, rel=0.05)


def test_a_split_l2_has_room_for_half() -> None:
    """A100's two partitions each keep what their SMs read (NVIDIA, A100 whitepaper): 30 MB no longer fit 40 MB."""
    gpu = nj.load_gpu("A100-PCIE-40GB")
    assert (gpu.l2_partitions, nj.load_gpu("H100").l2_partitions, nj.load_gpu("L4").l2_partitions) == (2.0, 2.0, 0.0)
    family, size = FAMILIES["elementwise"], jnp.full(1, 4.0)

    def cold_share(megabytes: float, partitions: float) -> float:
        dims = {name: jnp.ones(1) for name in family.dims} | {"rows": jnp.full(1, megabytes * 1e6 / 8.0)}
        times = physical_times(
            gpu.replace(l2_partitions=partitions),
            family,
            family.work(dims, size),
            jnp.full(1, 1e13),
            jnp.zeros(1, int),
        )
        return float(times.dram[0, 1] / times.dram[0, 0])

    assert cold_share(15.0, 2.0) == pytest.approx(WARM_SHARE)
    assert cold_share(30.0, 1.0) == pytest.approx(WARM_SHARE)
    assert 0.4 < cold_share(30.0, 2.0) < 1.0
    assert cold_share(60.0, 2.0) == 1.0


def test_fewer_resident_threads_hide_less() -> None:
    """Turing keeps 1024 threads on an SM, Ada 1536, the others 2048 (CUDA programming guide, compute capabilities)."""
    named = {name: nj.load_gpu(name).threads_per_sm for name in ("T4", "L4", "V100", "H100", "MI210")}
    assert named == {"T4": 1024.0, "L4": 1536.0, "V100": 0.0, "H100": 0.0, "MI210": 0.0}
    gpu, size = nj.load_gpu("V100"), jnp.full(1, 4.0)

    def row_s(family: str, threads: float) -> float:
        dims = {"rows": jnp.full(1, 8e5), "cols": jnp.full(1, 512.0), "reads": jnp.ones(1), "writes": jnp.ones(1)}
        work = FAMILIES[family].work(dims, size)
        machine = gpu.replace(threads_per_sm=threads)
        return float(
            physical_times(machine, FAMILIES[family], work, jnp.full(1, 1e30), jnp.zeros(1, int)).compute[0, 2]
        )

    assert row_s("softmax", 0.0) == row_s("softmax", 2048.0)
    assert row_s("softmax", 1024.0) == pytest.approx(2 * row_s("softmax", 2048.0), rel=1e-5)
    assert row_s("norm", 1024.0) == row_s("norm", 2048.0)


def test_large_blocks_for_a_wide_row_cost_more_clocks() -> None:
    """MI100's and MI210's framework takes 1,024 threads for a row of more than 1,024 columns; by hand, in clocks: 1,800
    and 8 bytes an element at 16 a clock, two thirds of it where the row is aligned and kept in shared memory."""
    assert {name: known_library(name, FAMILIES["softmax"]) for name in ("MI210", "MI250", "V100", "H100")} == {
        **{"MI210": 1.0, "MI250": 1.0},
        **{"V100": 0.0, "H100": 0.0},
    }

    def cycles(cols: float, library: float) -> float:
        dims = {"rows": jnp.full(1, 8e5), "cols": jnp.full(1, cols), "reads": jnp.ones(1), "writes": jnp.ones(1)}
        work = FAMILIES["softmax"].work(dims | {LIBRARY: jnp.full(1, library)}, jnp.full(1, 4.0))
        assert work.waiting_cycles is not None
        return float(work.waiting_cycles[0, 0, 0])

    assert cycles(2047.0, 1.0) == pytest.approx(1800 + 2047 * 8 / 16)
    assert cycles(2048.0, 1.0) == pytest.approx(1800 + 2048 * 8 / 16 * 2 / 3)
    assert cycles(2048.0, 0.0) == pytest.approx(128 + 2048 * 8 / 16)
    assert cycles(1024.0, 1.0) == cycles(1024.0, 0.0)


def test_another_vendors_softmax_takes_large_blocks_whatever_its_name() -> None:
    """A GPU with an fp32 matrix path of its own; the forecast is that of a predictor that was told."""
    table = table_from_kernels([Kernel("softmax", "softmax", {"rows": 8e4, "cols": 2048, "reads": 1, "writes": 1})])
    predictor = random_predictor("mixture", 1)
    assert isinstance(predictor, MixturePredictor)
    own = replace(predictor.families["softmax"], library=jnp.float32(1.0))
    told = replace(predictor, families={**predictor.families, "softmax": own})
    amd, nvidia = nj.load_gpu("MI250"), nj.load_gpu("V100")
    assert nj.predict_kernels(predictor, amd, table) == nj.predict_kernels(told, amd, table)
    assert nj.predict_kernels(predictor, nvidia, table) < nj.predict_kernels(told, nvidia, table)


def test_what_power_gains_inside_models_stays_with_one_vendor() -> None:
    """And nothing else does: every other head shifts on both."""
    table = table_from_kernels([Kernel("linear", "linear", {"batch": 1, "m": 8192, "n": 8192, "k": 8192})])
    plain = random_predictor("mixture", 1)
    assert isinstance(plain, MixturePredictor)

    def seconds(gpu: nj.GPU, head: int) -> float:
        own = plain.families["linear"]
        moved = jnp.where(jnp.arange(len(HEADS)) == head, 1.5, jnp.zeros_like(own.in_model))
        families = {**plain.families, "linear": replace(own, in_model=moved)}
        return float(nj.latency(replace(plain, families=families), gpu, table))

    never = len(HEADS)
    for name, power_moves in (("T4", True), ("MI210", False)):
        gpu = nj.load_gpu(name)
        assert (seconds(gpu, POWER) > seconds(gpu, never)) is power_moves
        assert seconds(gpu, COMPUTE) > seconds(gpu, never)
