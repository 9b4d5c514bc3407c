"""Programs beside products of floats: fp64, complex numbers, FFTs, factorisations, dtypes without a rate, shardings."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import message

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, table_from_kernels

torch = pytest.importorskip("torch")

N = 256
FP32 = nj.load_predictor("fp32")


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_torch(run: Callable[..., Any], *inputs: Any) -> Graph:
    class Program(torch.nn.Module):
        def forward(self, *arrays: Any) -> Any:
            return run(*arrays)

    return nj.graph_from_torch(Program(), tuple(inputs))


def kernel(graph: Graph, family: str) -> Kernel:
    (only,) = [each for node in graph.nodes for each in node.forward if each.family == family]
    return only


def flop(graph: Graph) -> float:
    """FLOP of products and of what is counted."""
    total = 0.0
    for name, batch in graph.kernels.families.items():
        if FAMILIES[name].matrix or name == "counted":
            dims, count = jax.tree.map(jnp.asarray, (batch.dims, batch.count))
            total += float(jnp.sum(FAMILIES[name].work(dims, 4.0 * jnp.ones(count.shape)).flop * count))
    return total


def double() -> Graph:
    with jax.enable_x64(True):
        return nj.graph_from_function(lambda a, b: a @ b, *[array(N, N, dtype=jnp.float64)] * 2)


def test_float64_runs_at_its_own_rate() -> None:
    graph = double()
    assert (graph.dtype, graph.arithmetic) == ("fp64", ("fp64",))
    assert of_torch(torch.mm, *[torch.zeros(N, N, dtype=torch.float64)] * 2).dtype == "fp64"
    for name in ("RTX 4090", "A100-SXM4-80GB"):
        gpu = nj.load_gpu(name)
        least_s = 2 * N**3 / max(gpu.fp64_flop_per_s, gpu.fp64_matrix_flop_per_s)
        assert nj.predict(FP32, gpu, graph).total_s >= least_s
    absent = nj.load_gpu("H100").replace(fp64_flop_per_s=0.0, fp64_matrix_flop_per_s=0.0)
    assert "no arithmetic path 'fp64'" in message(nj.predict, FP32, absent, graph)


def test_float64_that_is_not_multiplied_has_its_rate_too() -> None:
    with jax.enable_x64(True):
        graph = nj.graph_from_function(lambda a: a * a + 1.0, array(4096, 4096, dtype=jnp.float64))
    only = kernel(graph, "elementwise")
    assert (only.dtype, only.dims["reads"], only.dims["writes"]) == ("fp64", 1.0, 1.0)
    slow = nj.load_gpu("RTX 4090").replace(fp64_flop_per_s=1e9)
    assert nj.predict(FP32, slow, graph).total_s >= 4096**2 / 1e9
    slopes = jax.grad(nj.latency, argnums=1)(FP32, slow, graph.kernels)
    assert slopes.fp64_flop_per_s < 0


@pytest.mark.parametrize("side", ["jax", "torch"])
def test_a_complex_product_is_four_real_ones(side: str) -> None:
    if side == "jax":
        graph = nj.graph_from_function(jnp.matmul, *[array(N, N, dtype=jnp.complex64)] * 2)
    else:
        graph = of_torch(torch.mm, *[torch.zeros(N, N, dtype=torch.complex64)] * 2)
    assert flop(graph) == 8 * N**3
    assert graph.dtype == "fp32"
    assert graph.launches() == 1


def test_complex_layers_of_a_neural_operator() -> None:
    """A Fourier layer: transform, mix channels by complex weights, transform back."""

    def layer(x: Any, weights: Any) -> Any:
        return torch.fft.irfft(torch.einsum("bci,coi->boi", torch.fft.rfft(x), weights), n=64)

    graph = of_torch(layer, torch.zeros(2, 8, 64), torch.zeros(8, 16, 33, dtype=torch.complex64))
    transforms = 2.5 * 64 * log2(64) * (2 * 8 + 2 * 16)
    assert flop(graph) == 8 * 2 * 8 * 16 * 33 + transforms


@pytest.mark.parametrize(
    ("run", "dtype", "expected"),
    [
        (jnp.fft.fft, jnp.complex64, 5 * 32 * 64 * 128 * log2(128)),
        (jnp.fft.rfft2, jnp.float32, 2.5 * 32 * 64 * 128 * log2(64 * 128)),
        (jnp.fft.fft2, jnp.complex64, 5 * 32 * 64 * 128 * log2(64 * 128)),
    ],
)
def test_fourier_transforms_count_their_flop_and_every_batch(run: Any, dtype: Any, expected: float) -> None:
    graph = nj.graph_from_function(run, array(32, 64, 128, dtype=dtype))
    assert flop(graph) == pytest.approx(expected, rel=1e-6)
    source, result = 32 * 64 * 128 * np.dtype(dtype).itemsize, 32 * 64 * (128 if dtype != jnp.float32 else 65) * 8
    dims = kernel(graph, "counted").dims
    moved = dims["rows"] * dims["cols"] * (dims["reads"] + dims["writes"]) * 4
    assert moved == (1 if run is jnp.fft.fft else 2) * (source + result)


FACTORISATIONS: dict[str, tuple[Any, Any, float]] = {
    "cholesky": (lambda a: jnp.linalg.cholesky(a), torch.linalg.cholesky, N**3 / 3),
    "qr": (lambda a: jnp.linalg.qr(a, mode="r"), torch.linalg.qr, 4 / 3 * N**3),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], torch.linalg.eigh, 9 * N**3),
    "svd": (lambda a: jnp.linalg.svd(a, full_matrices=False)[1], torch.linalg.svd, 22 * N**3),
    "values": (
        lambda a: jnp.linalg.svd(a, compute_uv=False),
        lambda a: torch.ops.aten._linalg_svd(a, False, False)[1],
        8 / 3 * N**3,
    ),
    "lu": (lambda a: jax.scipy.linalg.lu_factor(a), torch.linalg.lu_factor, 2 / 3 * N**3),
}


@pytest.mark.parametrize("name", FACTORISATIONS)
@pytest.mark.parametrize("side", ["jax", "torch"])
def test_a_factorisation_takes_at_least_its_flop_and_its_interval_is_open_upwards(name: str, side: str) -> None:
    in_jax, in_torch, expected = FACTORISATIONS[name]
    graph = nj.graph_from_function(in_jax, array(N, N)) if side == "jax" else of_torch(in_torch, torch.zeros(N, N))
    assert flop(graph) == pytest.approx(expected, rel=1e-6)
    forecast = nj.predict(FP32, nj.load_gpu("V100"), graph)
    assert forecast.interval_s is not None
    low, high = forecast.interval_s
    assert expected / nj.load_gpu("V100").fp32_flop_per_s <= low <= forecast.total_s < 100 * forecast.total_s < high
    assert any("not modelled" in note and "open upwards" in note for note in forecast.notes)


def test_a_linear_solve_is_its_factorisation_and_two_substitutions() -> None:
    graph = nj.graph_from_function(jnp.linalg.solve, array(N, N), array(N, 8))
    assert flop(graph) == pytest.approx(2 / 3 * N**3 + 2 * N * N * 8, rel=1e-6)
    graph = of_torch(torch.linalg.solve, torch.zeros(N, N), torch.zeros(N, 8))
    assert flop(graph) == pytest.approx(2 / 3 * N**3 + 2 * N * N * 8, rel=1e-6)


def test_one_unmodelled_operator_opens_the_whole_forecast_upwards_alone() -> None:
    def program(x: jax.Array, strange: bool) -> jax.Array:
        y = x @ x
        return jax.pure_callback(lambda z: z, array(N, N), y) if strange else jnp.tanh(y)

    plain, opened = (
        nj.predict(
            FP32, nj.load_gpu("V100"), nj.graph_from_function(lambda x, each=each: program(x, each), array(N, N))
        )
        for each in (False, True)
    )
    assert plain.interval_s is not None
    assert opened.interval_s is not None
    assert opened.interval_s[1] > 10 * opened.total_s > plain.interval_s[1]
    assert opened.interval_s[0] > 0.5 * opened.total_s


def test_a_product_in_a_dtype_without_a_rate_is_named_and_not_taken_for_fp32() -> None:
    for graph in (
        nj.graph_from_function(jnp.matmul, *[array(N, N, dtype=jnp.int32)] * 2),
        of_torch(torch.mm, *[torch.zeros(N, N, dtype=torch.int64)] * 2),
    ):
        forecast = nj.predict(FP32, nj.load_gpu("V100"), graph)
        assert flop(graph) == 2 * N**3
        assert any("not modelled" in note and " of int" in note for note in forecast.notes)
        assert forecast.interval_s is not None
        assert forecast.interval_s[1] > 100 * forecast.total_s


def test_products_that_were_never_measured_hold_a_factor_of_three() -> None:
    sizes = {"batch": 1.0, "m": 512.0, "n": 512.0, "k": 512.0}
    predictor, gpu = nj.load_predictor("tensorcore"), nj.load_gpu("A100-SXM4-80GB")
    table = table_from_kernels([Kernel("linear", "linear", sizes, 1.0, dtype) for dtype in ("int8", "fp64", "bf16")])
    seconds = nj.predict_kernels(predictor, gpu, table)
    _, high = nj.predict_kernel_intervals(predictor, gpu, table)
    assert np.all(high[:2] >= 2.999 * seconds[:2])
    assert high[2] < 2.9 * seconds[2]
    graph = nj.graph_from_function(
        lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32), *[array(N, N, dtype=jnp.int8)] * 2
    )
    forecast = nj.predict(predictor, gpu, graph)
    assert forecast.interval_s is not None
    assert forecast.interval_s[1] >= 2.999 * forecast.total_s
    assert any("never measured: products in int8" in note for note in forecast.notes)


MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def _constrained(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x @ x, NamedSharding(MESH, P("data", "model")))


def _inner_jit(x: jax.Array) -> jax.Array:
    return jax.jit(lambda y: y @ y, in_shardings=NamedSharding(MESH, P("model")))(x)


@pytest.mark.parametrize(
    ("run", "sharding"),
    [(_constrained, None), (_inner_jit, None), (lambda x: x @ x, NamedSharding(MESH, P(None, "model")))],
)
def test_shardings_left_to_the_compiler_are_named(run: Any, sharding: Any) -> None:
    notes = nj.graph_from_function(run, jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=sharding)).notes
    (note,) = [each for each in notes if "sharding" in each]
    assert "8 devices (mesh: data 2, model 4)" in note


def test_arrays_that_are_whole_on_every_device_are_no_sharding() -> None:
    whole = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(MESH, P()))
    assert not [note for note in nj.graph_from_function(lambda x: x @ x, whole).notes if "sharding" in note]
    assert not [note for note in nj.graph_from_function(lambda x: x @ x, jnp.ones((4, 4))).notes if "sharding" in note]
