"""Collectives of programs under `shard_map`: operators, bytes, groups and domains, and a forecast on a cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.traced.operation import TraceOptions
from neusight_jax.kernels.collective import OPS
from neusight_jax.model.latency import kernel_forecasts, uncovered
from neusight_jax.model.predictor import RooflinePredictor

MESH = AbstractMesh((2, 4), ("data", "tensor"))


def traced(body: Any, gpus_per_domain: int = 0, rows: int = 64, **given: Any) -> Graph:
    """A body that gets bf16 [64 / 8, 16] on each of 8 devices."""

    def call(x: jax.Array) -> Any:
        return jax.shard_map(
            body, mesh=MESH, in_specs=P(("data", "tensor")), out_specs=P(("data", "tensor")), check_vma=False, **given
        )(x)

    options = TraceOptions(gpus_per_domain=gpus_per_domain)
    return nj.graph_from_function(call, jax.ShapeDtypeStruct((rows, 16), jnp.bfloat16), trace_options=options)


def sent(graph: Graph) -> list[tuple[str, float, float, float]]:
    """Operator, bytes, ranks and domains of every collective, in order."""
    kernels = [kernel for node in graph.nodes for kernel in node.forward if kernel.family == "collective"]
    return [
        (OPS[int(each.dims["operation"]) - 1], each.dims["bytes"], each.dims["ranks"], each.dims["domains"])
        for each in kernels
    ]


LOCAL = 8 * 16 * 2.0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x: lax.psum(x, "tensor"), ("all_reduce", LOCAL, 4, 1)),
        (lambda x: lax.psum(x, ("data", "tensor")), ("all_reduce", LOCAL, 8, 2)),
        (lambda x: lax.pmax(x, "data"), ("all_reduce", LOCAL, 2, 2)),
        (lambda x: lax.all_gather(x, "tensor", tiled=True), ("all_gather", 4 * LOCAL, 4, 1)),
        (lambda x: lax.psum_scatter(x, "tensor", tiled=True), ("reduce_scatter", LOCAL, 4, 1)),
        (lambda x: lax.all_to_all(x, "tensor", 0, 0, tiled=True), ("all_to_all", LOCAL, 4, 1)),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), ("send_recv", LOCAL, 2, 2)),
        (lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 2)]), ("send_recv", LOCAL, 2, 1)),
    ],
)
def test_each_is_a_kernel_of_its_group(body: Any, expected: tuple[str, float, float, float]) -> None:
    assert sent(traced(body, gpus_per_domain=4)) == [expected]
    assert sent(traced(body)) == [(*expected[:3], 1)]


def test_a_forward_pass_and_its_gradient_have_their_collectives() -> None:
    """Megatron's pair of products: one sum forward, and its conjugate backward where activations are replicated."""

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        def body(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
            return lax.psum(jax.nn.relu(x @ up) @ down, "tensor")

        specs = (P(None, "tensor"), P("tensor", None), P("data", None))
        out = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data", None))(*weights, x)
        return jnp.sum(out.astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1024, 4096), (4096, 1024), (512, 1024))]
    graph = nj.graph_from_function(jax.value_and_grad(loss), (shapes[0], shapes[1]), shapes[2])
    collectives = [node for node in graph.nodes if any(kernel.family == "collective" for kernel in node.forward)]
    assert len(collectives) == 1
    products = graph.kernels.families["gemm"]
    assert products.num_rows
    backward = [k for node in graph.nodes for k in (*node.backward, *node.weight_gradient) if k.family == "collective"]
    assert {k.dims["ranks"] for k in backward} <= {2.0, 4.0}
    assert backward  # gradients of weights are summed over the replicas


def test_a_loop_repeats_them_and_one_device_sends_nothing() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, _: (lax.psum(carry, "tensor"), None), x, length=3)[0]

    graph = traced(body)
    (node,) = [node for node in graph.nodes if any(kernel.family == "collective" for kernel in node.forward)]
    assert node.repeat == 3.0
    one = AbstractMesh((1,), ("tensor",))

    def alone(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda part: lax.psum(part @ part.T, "tensor"), mesh=one, in_specs=P(), out_specs=P())(x)

    assert "collective" not in nj.graph_from_function(alone, jax.ShapeDtypeStruct((8, 8), jnp.float32)).kernels.families


def test_an_axis_nobody_sized_is_one_line() -> None:
    with pytest.raises(nj.InputError, match="the size of the axis 'experts' is unknown; call it under jax"):
        nj.graph_from_function(lambda x: lax.psum(x, "experts"), jax.ShapeDtypeStruct((8,), jnp.float32))


class Nothing(RooflinePredictor):
    """Covers no family."""

    def covers(self, family: Any) -> bool:
        return False


def test_a_predictor_without_collectives_takes_the_sheet() -> None:
    table: Any = jax.tree.map(jnp.asarray, traced(lambda x: lax.psum(x, "tensor")).kernels)
    cluster = nj.load_cluster("8x H100")
    assert uncovered(Nothing(), table) == {}
    own, sheet = jax.jit(lambda on: [_terms(each, on, table).seconds for each in (Nothing(), RooflinePredictor())])(
        cluster
    )
    assert jnp.array_equal(own, sheet)


def _terms(predictor: Any, cluster: nj.Cluster, table: Any) -> Any:
    return kernel_forecasts(predictor, cluster, table)["collective"]
