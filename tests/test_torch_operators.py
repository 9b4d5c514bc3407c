"""Operators of torch as a GPU runs them: fused attention, autocast, batch norm, layouts, depthwise convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from graphs import kernels, product_flop

import neusight_jax as nj
from neusight_jax.graph.graph import Graph
from neusight_jax.graph.kernel import matrix_product
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel

torch = pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
F = torch.nn.functional


class Attention(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """8 query heads of width 16 on 2 of keys and values."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.query, self.keys = torch.nn.Linear(width, width), torch.nn.Linear(width, 64)

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, 8, 16).transpose(1, 2)
        key, value = self.keys(x).view(batch, length, 2, 2, 16).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch, length, -1).sum()


def _graph(
    module: Callable[[], Any], *shape: int, dtype: str = "float32", mode: str = "training", **options: Any
) -> Graph:
    with torch.device("meta"):
        made, x = module().to(getattr(torch, dtype)), torch.zeros(*shape, dtype=getattr(torch, dtype))
        if options.pop("channels_last", False):
            made, x = made.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return nj.graph_from_torch(
        made.train(mode == "training"), (x,), mode=mode, trace_options=nj.TraceOptions(**options)
    )


def _of(graph: Graph, *families: str) -> list[Kernel]:
    return [kernel for kernel, _ in kernels(graph) if kernel.family in families]


def test_attention_in_16_bits_is_one_kernel() -> None:
    forward, backward = _of(_graph(Attention, 2, 64, 128, dtype="bfloat16"), "prefill")
    assert forward.dims == backward.dims
    assert (forward.dims["heads"], forward.dims["kv_heads"], forward.dims["head_size"]) == (8, 2, 16)
    assert (forward.dims["queries"], forward.dims["pairs"]) == (2 * 64, 2 * 64 * 65 / 2)
    assert (forward.dtype, forward.count, backward.count) == ("bf16", 1.0, 2.5)


def test_attention_in_fp32_is_two_products_and_a_softmax_without_tf32() -> None:
    found = _of(_graph(Attention, 2, 64, 128, fp32_products="tf32"), "bmm", "prefill")
    assert [kernel.dtype for kernel in found] == ["fp32"] * (2 + 5)


def test_one_token_is_a_decode() -> None:
    class Step(Attention):
        def forward(self, x: Any) -> Any:
            key = x.view(2, 64, 8, 16).transpose(1, 2)
            return F.scaled_dot_product_attention(key[:, :, -1:], key, key)

    (kernel,) = _of(_graph(Step, 2, 64, 128, dtype="float16", mode="inference"), "decode", "prefill")
    assert (kernel.family, kernel.dims["requests"], kernel.dims["pairs"]) == ("decode", 2, 2 * 64)


def test_autocast_computes_in_fp32_what_a_gpu_does() -> None:
    class Cast(Attention):
        def forward(self, x: Any) -> Any:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = self.query(x)
                y = F.layer_norm(y, y.shape[-1:]).bfloat16()
                return y.pow(3).tanh().mean() + super().forward(x)

    graph = _graph(Cast, 2, 64, 128, mode="inference")
    found = {node.op: node.forward[0].dtype for node in graph.nodes}
    assert {kernel.dtype for kernel in _of(graph, "linear", "prefill")} == {"bf16"}
    # On a CPU both would be computed in bf16.
    assert (found["native_layer_norm"], found["pow"]) == ("fp32", "fp32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_norm_by_layout(dtype: str) -> None:
    """A block a channel where its pixels lie together; bytes of fp32 in every dtype."""
    size, shape = 4 * 8 * 6 * 6, (4, 8, 6, 6)
    for channels_last, family in ((False, "norm"), (True, "memory")):
        found = _of(_graph(lambda: torch.nn.BatchNorm2d(8), *shape, dtype=dtype, channels_last=channels_last), family)
        norms = [kernel for kernel in found if kernel.op.startswith("batchnorm")]
        # The kernel of a channel goes over its rows once more by itself.
        assert [kernel.dims["reads"] for kernel in norms] == ([2, 4] if channels_last else [1, 2])
        assert {kernel.dtype for kernel in norms} == {"fp32"}
        assert norms[0].dims["rows"] * norms[0].dims["cols"] == size
        assert norms[0].dims["rows"] == (size / 8 if channels_last else 8)
    (known,) = _of(_graph(lambda: torch.nn.BatchNorm2d(8), *shape, dtype=dtype, mode="inference"), "memory")
    assert (known.op, known.dims["reads"], known.dims["writes"]) == ("batchnorm", 1, 1)


@pytest.mark.parametrize(
    ("dtype", "channels_last", "products", "copies"),
    [
        ("float32", False, "fp32", 0),
        ("float32", False, "tf32", 4),
        ("bfloat16", False, "fp32", 4),
        ("bfloat16", True, "fp32", 0),
    ],
)
def test_tensor_cores_want_channels_innermost(dtype: str, channels_last: bool, products: str, copies: int) -> None:
    """Image and result are copied, and for the gradient of the filter both again; that of the image is not wanted."""
    graph = _graph(
        lambda: torch.nn.Conv2d(8, 16, 3),
        *(2, 8, 9, 9),
        dtype=dtype,
        channels_last=channels_last,
        fp32_convolutions=products,
    )
    assert Counter(kernel.op for kernel in _of(graph, "memory"))["copy"] == copies


def test_fp32_convolutions_run_in_tf32_where_the_gpu_has_it() -> None:
    """PyTorch's default; products stay in fp32, and a GPU without it runs all in fp32, in the order of the images."""
    graph = _graph(lambda: torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Linear(10, 4)), 2, 8, 12, 12)
    assert graph.dtype == "fp32"
    assert any("as PyTorch's default is" in note for note in graph.notes)
    assert Counter(kernel.dtype for kernel in _of(graph, "conv")) == {"tf32": 2}
    assert {kernel.dtype for kernel in _of(graph, "linear")} == {"fp32"}
    old = graph.on(("fp32",))
    assert Counter(kernel.dtype for kernel in _of(old, "conv")) == {"fp32": 2}
    assert [kernel.count for kernel in _of(old, "memory") if kernel.op == "copy"] == [0.0] * 4
    exact = _graph(lambda: torch.nn.Conv2d(8, 16, 3), 2, 8, 12, 12, fp32_convolutions="fp32")
    assert {kernel.dtype for kernel in _of(exact, "conv")} == {"fp32"}
    assert not exact.notes


def test_a_gradient_over_three_axes_stays_on_the_vector_path() -> None:
    """64 channels a block, all 27 taps of each of 6x6x6 pixels, inside the image or not."""
    graph = _graph(lambda: torch.nn.ConvTranspose3d(8, 24, 3, bias=False), 2, 8, 4, 4, 4, mode="inference")
    (kernel,) = _of(graph, "conv")
    assert (kernel.op, kernel.dtype) == ("conv_data_gradient", "fp32")
    assert (kernel.dims["m"], kernel.dims["n"], kernel.dims["k"]) == (2 * 6**3, 64, 8 * 27)
    assert kernel.dims["image"] == 2 * 24 * 6**3
    forward = _of(_graph(lambda: torch.nn.Conv3d(8, 24, 3, bias=False), 2, 8, 4, 4, 4, mode="inference"), "conv")
    assert [kernel.dtype for kernel in forward] == ["tf32"]


def test_pooling_loads_its_windows_and_writes_the_places_of_maxima() -> None:
    (pool,) = _of(_graph(lambda: torch.nn.MaxPool2d(3, 2, 1), 2, 8, 12, 12, mode="inference"), "window")
    assert (pool.op, pool.dims["taps"], pool.dims["reads"], pool.dims["writes"]) == ("pool", 9, 4, 3)
    graph = _graph(lambda: torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.AvgPool2d(2)), 2, 8, 12, 12)
    taps = {kernel.op: kernel.dims["taps"] for kernel in _of(graph, "window")}
    assert taps == {"pool": 4, "pool_backward": 1}  # a quarter as many results have 4 each


def test_cumulative_sums_join_their_elements_in_a_tree() -> None:
    """Of 4096 rows and columns 16 threads take a row: 5 levels; other axes are walked along."""

    class Sum(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self, axis: int, start: int = 0) -> None:
            super().__init__()
            self.axis, self.start = axis, start

        def forward(self, x: Any) -> Any:
            return x[:, self.start :].cumsum(self.axis)

    for axis, taps in ((1, 1 + 5 / 2), (0, 1)):
        (scan,) = _of(_graph(lambda axis=axis: Sum(axis), 4096, 4096, mode="inference"), "window", "memory")
        assert (scan.op, scan.dims["taps"]) == ("scan", taps)
    found = _of(_graph(lambda: Sum(1, 1), 4096, 4096, mode="inference"), "window", "memory")
    assert [kernel.op for kernel in found] == ["copy", "scan"]  # what is not contiguous is copied first


def test_losses_are_elements_and_their_sum() -> None:
    class Loss(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def forward(self, x: Any) -> Any:
            return F.mse_loss(x, x.flip(0)) + F.binary_cross_entropy_with_logits(x, x.flip(0))

    graph = _graph(Loss, 64, 32, mode="inference")
    launched = {node.op: [(kernel.op, kernel.count) for kernel in node.forward] for node in graph.nodes}
    assert launched["mse_loss"] == [("pointwise", 1), ("reduce", 1)]
    assert launched["binary_cross_entropy_with_logits"] == [("pointwise", 4), ("reduce", 1)]


def test_a_product_with_a_vector_streams_the_matrix() -> None:
    class Product(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def forward(self, x: Any) -> Any:
            return x @ x[0]

    (kernel,) = _of(_graph(Product, 64, 64, mode="inference"), "linear", "memory")
    assert (kernel.family, kernel.dims["rows"] * kernel.dims["cols"]) == ("memory", 64 * 64)


def test_depthwise_convolutions_stream_and_load_every_tap() -> None:
    graph = _graph(lambda: torch.nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8, bias=False), 2, 8, 12, 12)
    image, result, filters = 2 * 8 * 144, 2 * 8 * 36, 8 * 9
    forward, weights = _of(graph, "window")
    moved = {kernel.op: [kernel.dims[each] * result for each in ("reads", "writes")] for kernel in (forward, weights)}
    assert moved == {
        "depthwise_conv": pytest.approx([image + filters, result]),
        "depthwise_conv_weight_gradient": pytest.approx([image + result, filters]),
    }
    assert product_flop(graph) == 0.0
    assert not _of(graph, "conv")
    dims = {name: jnp.full(1, value) for name, value in forward.dims.items()}
    work = FAMILIES["window"].work(dims, jnp.full(1, 2.0))
    assert float(work.flop[0]) == 2 * 9 * result
    assert work.load_blocks is not None
    assert work.load_cycles is not None
    np.testing.assert_allclose(work.load_cycles[0, :, 0], np.array([256, 512, 1024, 2048]) * (9 + 1) / 4)


def test_the_gradient_of_the_image_of_a_depthwise_convolution() -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(8, 8, 1, bias=False)
            self.second = torch.nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False)

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)).sum()

    ops = {kernel.op: kernel for kernel in _of(_graph(Net, 2, 8, 12, 12), "window")}
    gradient = ops["depthwise_conv_data_gradient"]
    assert gradient.dims["taps"] == 25
    assert gradient.dims["rows"] * gradient.dims["cols"] == 2 * 8 * 144


def test_alignment_of_the_gradient_of_weights_is_that_of_both_results() -> None:
    """Its contraction lies in no row of memory; an odd vocabulary counts wherever it stands."""
    product = matrix_product(1, 50257, 768, 8192, "bf16", upright=False)
    assert (product.dims["m"], product.dims["n"]) == (768, 50257)
    assert matrix_product(1, 768, 50257, 8192, "bf16", upright=False).dims == product.dims
    assert matrix_product(1, 50257, 768, 8192, "fp32", upright=False).dims["m"] == 50257
    graph = _graph(lambda: torch.nn.Linear(64, 99, bias=False), 32, 64, dtype="bfloat16")
    gradient = [kernel.dims for kernel in _of(graph, "linear")][-1]
    assert (gradient["m"], gradient["n"], gradient["k"]) == (64, 99, 32)


def test_products_with_one_matrix_are_one_product() -> None:
    class Net(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(16, 24))

        def forward(self, x: Any) -> Any:
            return torch.bmm(x, self.weight.expand(4, 16, 24))

    (product,) = _of(_graph(Net, 4, 8, 16, mode="inference"), "linear", "bmm")
    assert (product.family, product.dims["m"]) == ("linear", 32)


def test_the_gradient_of_a_softmax_is_a_product_and_a_kernel() -> None:
    class Net(Attention):
        def forward(self, x: Any) -> Any:
            return self.query(x).softmax(-1).square().sum()

    graph = _graph(Net, 2, 64, 128)
    found = [kernel for kernel, _ in kernels(graph) if kernel.op in ("mul", "softmax_backward")]
    assert [(kernel.op, kernel.dims["reads"], kernel.dims["writes"]) for kernel in found] == [
        ("mul", 2, 1),
        ("softmax_backward", 2, 1),
    ]
