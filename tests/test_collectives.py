"""Collectives: bytes and steps by hand, physics on random clusters, the catalog of nodes and files of one's own."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from predictors import PEAKS, random_gpus, random_predictor

import neusight_jax as nj
from neusight_jax.datasets.measurements import table_from_frame
from neusight_jax.datasets.row_checks import check_rows
from neusight_jax.graph.kernel import collective_kernel
from neusight_jax.hardware.catalog import list_gpus
from neusight_jax.hardware.cluster import TOPOLOGY_FIELDS, Cluster, Topology, stack_clusters
from neusight_jax.hardware.files import load_named_cluster, node_topology
from neusight_jax.kernels.collective import COLLECTIVE, OPS, collective_dims, expert_copies
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelBatch, KernelTable, table_from_kernels
from neusight_jax.model.heads import LINKED_HEADS, launched, physical_times
from neusight_jax.model.latency import kernel_forecasts, kernel_latency, on_device
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.tables import table

CLUSTERS = 20_000
SLACK = 1e-4
FASTER = ("link_bytes_per_s", "nic_bytes_per_s", "pair_share")
RATES = ("clock_hz", "mem_bytes_per_s", "tdp_w", *PEAKS)


def random_collectives(seed: int, rows: int) -> KernelTable:
    """Collectives of all operators, sizes log-uniform; not padded, so that rows pair with clusters."""
    random = np.random.default_rng([seed, 11])
    domains = 2.0 ** random.integers(0, 8, rows)
    ranks = domains * 2.0 ** random.integers(0, 7, rows)
    ranks = np.where(ranks == 1, 2.0, ranks)
    operation = 1.0 + random.integers(len(OPS), size=rows).astype(np.float32)
    dims = {"bytes": np.exp(random.uniform(np.log(64), np.log(1e11), rows)), "ranks": ranks, "domains": domains}
    dims |= {
        "operation": operation,
        "software": random.integers(0, 3, rows),
        "crossing_share": random.uniform(0.1, 1, rows),
    }
    place = np.arange(rows, dtype=np.int32)
    none: Any = np.zeros(rows, np.int32)
    batch = KernelBatch(
        dims={name: np.asarray(values, np.float32) for name, values in dims.items()},
        op=operation.astype(np.int32) - 1,
        dtype=random.choice(np.array([0, 2, 4], np.int32), rows),
        count=np.ones(rows, np.float32),
        phase=none,
        node=place,
        row=place,
    )
    return KernelTable({"collective": batch})


def random_clusters(seed: int, count: int) -> Cluster:
    """Clusters [count], every figure log-uniform over more than real ones span."""
    random = np.random.default_rng([seed, 12])

    def draw(low: float, high: float) -> np.ndarray:
        return np.exp(random.uniform(np.log(low), np.log(high), count)).astype(np.float32)

    topology = Topology(
        0,
        link_bytes_per_s=draw(1e9, 1e13),
        nic_bytes_per_s=draw(1e8, 1e12),
        link_latency_s=draw(1e-7, 1e-5),
        nic_latency_s=draw(5e-7, 5e-5),
        pair_share=random.choice(np.array([1.0, 0.5, 0.125], np.float32), count),
        switch_reduction=random.choice(np.array([0.0, 1.0], np.float32), count),
        oversubscription=random.choice(np.array([1.0, 2.0], np.float32), count),
    )
    return Cluster(random_gpus(seed, count), topology, 0)


def predictor_of(seed: int) -> MixturePredictor:
    """Random weights of the family alone."""
    found = random_predictor("mixture", seed)
    assert isinstance(found, MixturePredictor)
    return MixturePredictor({"collective": found.families["collective"]}, {"collective": found.tiles["collective"]})


def moved(cluster: Cluster, name: str, factor: Any) -> Cluster:
    return replace(cluster, topology=replace(cluster.topology, **{name: getattr(cluster.topology, name) * factor}))


def test_no_cluster_is_slower_with_a_faster_link_or_beats_its_bytes() -> None:
    """Zero violations among 20,000 random clusters and random weights."""
    predictor, kernels, clusters = predictor_of(3), random_collectives(3, CLUSTERS), random_clusters(3, CLUSTERS)
    base = np.asarray(kernel_latency(predictor, clusters, kernels)["collective"])
    assert np.all(np.isfinite(base) & (base > 0))
    more = 1.0 + np.random.default_rng(0).exponential(1.0, CLUSTERS).astype(np.float32)
    better = [
        moved(
            clusters, name, np.minimum(more, 1.0 / getattr(clusters.topology, name)) if name == "pair_share" else more
        )
        for name in FASTER
    ]
    better += [moved(clusters, name, 1.0 / more) for name in ("link_latency_s", "nic_latency_s")]
    better += [replace(clusters, gpu=replace(clusters.gpu, mem_bytes_per_s=clusters.gpu.mem_bytes_per_s * more))]
    better += [
        replace(clusters, topology=replace(clusters.topology, **{name: value}))
        for name, value in (("oversubscription", jnp.ones(CLUSTERS)), ("switch_reduction", jnp.ones(CLUSTERS)))
    ]
    for machine in better:
        faster = np.asarray(kernel_latency(predictor, machine, kernels)["collective"])
        assert np.sum(~(faster <= base * (1 + SLACK))) == 0
    dims, joined = kernels.families["collective"].dims, clusters.topology
    here = dims["ranks"] / dims["domains"]
    least = (
        np.where(dims["operation"] == 1, 1.0, (here - 1) / dims["ranks"])
        * dims["bytes"]
        * (here > 1)
        * (dims["operation"] < 5)
    )
    assert np.sum(~(base >= (1 - SLACK) * least / np.asarray(joined.link_bytes_per_s))) == 0


def test_times_scale_with_all_rates() -> None:
    """Elasticities of all rates and of one over the latencies sum to −1 less the launch floor; a control that lacks the
    latencies does not."""
    predictor, kernels = predictor_of(5), jax.tree.map(jnp.asarray, random_collectives(5, 256))
    clusters = random_clusters(5, 256)

    def log_s(scale: jax.Array, latencies: float) -> jax.Array:
        gpu = replace(
            clusters.gpu, **{name: getattr(clusters.gpu, name) * jnp.exp(scale) for name in RATES if name != "tdp_w"}
        )
        gpu = replace(gpu, exp_per_s=clusters.gpu.exp_per_s * jnp.exp(scale), tdp_w=clusters.gpu.tdp_w * jnp.exp(scale))
        joined = clusters.topology
        for name in ("link_bytes_per_s", "nic_bytes_per_s"):
            joined = replace(joined, **{name: getattr(joined, name) * jnp.exp(scale)})
        for name in ("link_latency_s", "nic_latency_s"):
            joined = replace(joined, **{name: getattr(joined, name) * jnp.exp(-latencies * scale)})
        machine = on_device(Cluster(gpu, joined, 0))
        terms = kernel_forecasts(predictor, machine, kernels, isolated=True)["collective"]
        return jnp.log(terms.seconds)

    slope = jax.jit(jax.jacfwd(log_s))
    elasticity = np.asarray(slope(jnp.zeros(()), 1.0))
    seconds = np.exp(np.asarray(jax.jit(log_s)(jnp.zeros(()), 1.0)))
    floor = np.exp(
        np.asarray(predictor.families["collective"].log_floor_s)[0] + _floor_residual(predictor, clusters, kernels)
    )
    np.testing.assert_allclose(elasticity, -1 + floor / seconds, atol=1e-3)
    assert np.max(np.abs(np.asarray(slope(jnp.zeros(()), 0.0)) + 1 - floor / seconds)) > 0.05


def _floor_residual(predictor: MixturePredictor, clusters: Cluster, kernels: KernelTable) -> np.ndarray:
    from neusight_jax.model.residuals import FLOOR, device_residual, table_residual

    own, batch = predictor.families["collective"], kernels.families["collective"]
    features = COLLECTIVE.features(
        jax.tree.map(jnp.asarray, batch.dims), jnp.array([4.0, 4.0, 2.0, 2.0, 1.0])[batch.dtype]
    )
    found = device_residual(own.effect, own.network, COLLECTIVE, features) + table_residual(
        own.residual, clusters.gpu, True
    )
    return np.asarray(jnp.broadcast_to(found, (1, *found.shape[1:]))[0, :, FLOOR])


def test_bytes_and_steps_by_hand() -> None:
    """1 MB among 8 H100, and among 16 in two nodes."""
    cluster = nj.load_cluster("16x H100")

    def times(op: str, ranks: float, domains: float) -> dict[str, np.ndarray]:
        dims = {name: np.float32([value]) for name, value in collective_dims(op, 1e6, ranks, domains).items()}
        return {name: np.asarray(values)[0] for name, values in bounds(dims).items()}

    @jax.jit
    def bounds(dims: Any) -> Any:
        work, none = COLLECTIVE.work(dims, jnp.full(1, 2.0)), jnp.zeros(1, int)
        at = launched(cluster.gpu, COLLECTIVE, work, jnp.full(1, 1e13), none, topology=cluster.topology)
        return physical_times(at)

    inside = times("all_reduce", 8, 1)
    ring = 2 * 7 / 8 * 1e6 / 450e9
    np.testing.assert_allclose(inside["link"], [ring, ring, 1e6 / 450e9, 7e6 / 450e9], rtol=1e-5)
    np.testing.assert_allclose(inside["hops"][:4], np.array([14, 6, 2, 1]) * 0.6e-6, rtol=1e-5)
    np.testing.assert_allclose(times("all_gather", 8, 1)["link"], 7 / 8 * 1e6 / 450e9, rtol=1e-5)
    across = times("all_reduce", 16, 2)
    np.testing.assert_allclose(across["nic"], np.array([2 * 15 / 16, 2 * 1 / 2]) * 1e6 / 8 / 50e9, rtol=1e-5)
    np.testing.assert_allclose(across["far hops"], np.array([2, 2]) * 2.7e-6, rtol=1e-5)
    np.testing.assert_allclose(times("send_recv", 2, 2)["nic"], 1e6 / 50e9, rtol=1e-5)
    np.testing.assert_allclose(times("all_to_all", 16, 2)["nic"], 8 / 16 * 1e6 / 50e9, rtol=1e-5)
    sizes = collective_dims("all_to_all", 1e6, 16, 2)
    unsaid = bounds({name: np.float32([sizes[name]]) for name in COLLECTIVE.dims})  # every copy crosses
    np.testing.assert_allclose(unsaid["nic"][0], 8 / 16 * 1e6 / 50e9, rtol=1e-5)
    assert expert_copies(1, 8) == pytest.approx((1.0, 1.0))
    assert expert_copies(8, 1) == pytest.approx((1.0, 1.0))


def test_a_gradient_reaches_link_and_network() -> None:
    predictor = predictor_of(7)
    kernels = [collective_kernel("all_reduce", 1e8, 8), collective_kernel("all_gather", 1e9, 64, 8)]
    batch, cluster = table_from_kernels(kernels, dtype="bf16"), nj.load_cluster("64x B200")
    slopes = jax.grad(nj.latency, argnums=1)(predictor, cluster, batch)
    assert slopes.count == 64
    assert float(slopes.topology.link_bytes_per_s) < 0
    assert float(slopes.topology.nic_bytes_per_s) < 0
    plain = jax.grad(nj.latency, argnums=1)(predictor, cluster.gpu, batch)
    assert float(plain.link_bytes_per_s) < 0
    stacked = stack_clusters([cluster, nj.load_cluster("64x H100")])
    both = jax.vmap(nj.latency, in_axes=(None, 0, None))(predictor, stacked, batch)
    np.testing.assert_allclose(both[0], nj.latency(predictor, cluster, batch), rtol=1e-5)


def test_every_gpu_of_the_catalog_has_its_usual_node() -> None:
    nodes = table("datasets", "nodes")
    listed = [gpu for entry in nodes.values() for gpu in entry["gpus"]]
    assert sorted(listed) == sorted(list_gpus())
    for name, entry in nodes.items():
        figures = {figure for figure in entry if figure in TOPOLOGY_FIELDS}
        assert figures == set(entry["sources"]), name
        node_topology(name, nj.load_gpu((entry["gpus"] or ["H100"])[0]))


def test_clusters_by_name_and_file(tmp_path: Path) -> None:
    cluster = nj.load_cluster("64x H100")
    assert (cluster.count, cluster.domains, cluster.topology.gpus_per_domain) == (64, 8, 8)
    assert cluster.topology.link_bytes_per_s == cluster.gpu.link_bytes_per_s
    assert nj.load_cluster("72 x GB200 NVL72").domains == 1
    own = tmp_path / "own.yaml"
    own.write_text("gpu: H100\ncount: 16\ntopology: {node: HGX H100 4-GPU, nic_bytes_per_s: 100 GB/s}\n")
    assert nj.load_cluster(own).topology.pair_share == pytest.approx(1 / 3)
    assert nj.load_cluster(own).topology.nic_bytes_per_s == 1e11
    assert nj.load_cluster(own).domains == 4


def test_as_many_gpus_as_a_board_without_a_switch_are_on_it() -> None:
    """Four of them: a pair has a third of the links. Two are of a server with a switch."""
    four, name = nj.load_cluster("4x H100"), load_named_cluster("4x H100")[0]
    assert four.topology.pair_share == pytest.approx(1 / 3)
    assert name == "4x NVIDIA H100 80GB HBM3 in HGX H100 4-GPU"
    assert [nj.load_cluster(f"{count}x H100").topology.pair_share for count in (2, 8)] == [1.0, 1.0]


def test_a_message_inside_a_node_is_near_the_sheet() -> None:
    """64 MiB from GPU to GPU: public runs of p2pBandwidthLatencyTest have 360 to 390 GB/s on H100, of 450 on the sheet;
    longer messages never take less, and one between nodes takes longer."""
    predictor, sizes = nj.load_predictor("tensorcore"), 2.0 ** np.arange(10, 32)

    def seconds(domains: int) -> Any:
        rows = [collective_kernel("send_recv", size, 2, domains) for size in sizes.tolist()]
        return nj.predict_kernels(predictor, nj.load_cluster("16x H100"), table_from_kernels(rows), isolated=False)

    near, far = seconds(1), seconds(2)
    assert 250e9 < sizes[16] / near[16] < 450e9
    assert np.all(np.diff(near) > 0)
    assert np.all(far >= near)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gpu: H100\n", "count is missing"),
        ("gpu: H100\ncount: 0\n", "bad.yaml: count is 0, expected a whole number of GPUs"),
        ("gpu: H100\ncount: true\n", "count is True, expected a whole number of GPUs"),
        ("gpu: [1]\ncount: 2\n", "gpu is .*, expected the name or file of a GPU, or a mapping of its figures"),
        ("gpu: {base: H100, clock: 1}\ncount: 2\n", "unknown field of gpu 'clock'; nearest: clock_hz"),
        ("gpu: {clock_hz: 2 GHz}\ncount: 2\n", "bad.yaml: missing num_sms, mem_bytes_per_s"),
        ("gpu: H100\ncount: 8\ntopology: [1]\n", "topology is .*, expected the name of a server, or a mapping"),
        ("gpu: H100\ncount: 8\ntopology: {nic_bytes_per_s: 400Gbit/s}\n", "in bit/s, expected B/s, e.g. 5e10"),
        ("gpu: H100\ncount: 8\ntopology: {nic_bytes_per_s: 400}\n", "nic_bytes_per_s is 400, expected bytes/s"),
        ("gpu: H100\ncount: 8\ntopology: {nics: 4}\n", "unknown field of topology"),
        ("gpu: H100\ncount: 8\ntopology: DGX H10\n", "nearest: .*DGX H100"),
        ("gpu: H100\ncount: 8\nnodes: 1\n", "unknown field 'nodes'"),
    ],
)
def test_a_bad_cluster_file_is_one_line(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(nj.InputError, match=said):
        nj.load_cluster(file)


def test_bad_names_are_one_line() -> None:
    for name, said in {
        "H100": "expected a count and a GPU",
        "0x H100": "count is 0, expected a whole number of GPUs",
        "8x H1000": "unknown GPU",
    }.items():
        with pytest.raises(nj.InputError, match=re.escape(said)):
            nj.load_cluster(name)
    with pytest.raises(nj.InputError, match="unknown collective"):
        collective_kernel("all_reduced", 1e6, 8)
    with pytest.raises(nj.InputError, match="at least one rank in each"):
        collective_kernel("all_reduce", 1e6, 2, 4)
    with pytest.raises(nj.InputError, match="has no field 'nic'"):
        nj.load_cluster("8x H100").topology.replace(nic=1.0)


def test_rows_of_the_schema_become_kernels() -> None:
    import pandas as pd

    raw = pd.DataFrame(
        {
            "device": "H100",
            "op": ["all_reduce", "all_to_all"],
            "ranks": 8,
            "nodes": [1, 2],
            "bytes": 1048576,
            "dtype": "bf16",
            "latency_s": 1e-4,
        }
    )
    frame, problems = check_rows(raw, "rows")
    assert not problems.bad.any()
    batch = table_from_frame(frame).families["collective"]
    assert batch.dims["domains"][:2].tolist() == [1.0, 2.0]
    assert batch.dims["operation"][:2].tolist() == [1.0, 4.0]
    assert batch.dims["crossing_share"][:2].tolist() == [1.0, 1.0]
    assert check_rows(raw.assign(ranks=0), "rows")[1].bad.all()
    assert FAMILIES["collective"] is COLLECTIVE


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "clusters.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    exec(compile(blocks[0], "clusters.md", "exec"), {})
    assert "-" in capsys.readouterr().out  # more of the network is less time


def test_the_page_has_the_heads_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "clusters.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| [^|]* \| (overlaps|limits|adds) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.M)
    said = {name: (joined, float(low), float(high), float(start)) for name, joined, low, high, start in rows}
    assert said == {name: (head.joined, head.low, head.high, head.start) for name, head in LINKED_HEADS.items()}
