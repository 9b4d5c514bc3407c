"""The front-end for PyTorch modules; skipped without torch."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from graphs import conv_kernels, kernels, product_flop, products
from torch_models import ARCHITECTURES, traced

import neusight_jax as nj
from neusight_jax.errors import InputError
from neusight_jax.graph.memory import footprint
from neusight_jax.model.predictor import load_baseline
from neusight_jax.unmeasured import unmodelled_shares


def test_without_torch_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"torch is not installed; install it with `pip install '\.\[torch\]'`"):
        nj.graph_from_torch(object())
    with pytest.raises(InputError, match="mode is 'train', expected one of inference, training"):
        nj.graph_from_torch(object(), mode="train")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")


def _meta(torch: Any, *shape: int) -> Any:
    return torch.zeros(*shape, device="meta")


def test_mlp(torch: Any) -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    graph = nj.graph_from_torch(net, (_meta(torch, 16, 32),))
    forward = {(1, 16, 64, 32): 1, (1, 8, 16, 64): 1}
    assert products(graph) == forward
    assert [node.name for node in graph.nodes] == ["0.addmm", "1.gelu", "2.addmm"]
    assert (graph.mode, graph.dtype, graph.fused) == ("inference", "fp32", False)
    step = nj.graph_from_torch(net, (_meta(torch, 16, 32),), mode="training")
    assert products(step) == {**forward, (1, 8, 64, 16): 1, (1, 16, 64, 8): 1, (1, 32, 64, 16): 1}
    # Two bias sums and the gradient of GELU.
    others = Counter(kernel.op for node in step.nodes for kernel in node.backward if kernel.family != "linear")
    assert others == {"reduce": 2, "pointwise": 1}


def test_conv_net_by_hand(torch: Any) -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 16, 3, padding=1, bias=False),
            torch.nn.GroupNorm(2, 16),
            torch.nn.ConvTranspose2d(16, 4, 4, stride=2, padding=1, bias=False),
        )
    graph = nj.graph_from_torch(net, (_meta(torch, 2, 3, 32, 32),), mode="training")
    first, second, third = 2 * 2 * 256 * 27 * 8, 2 * 2 * 64 * 72 * 16, 2 * 2 * 64 * 16 * 16 * 4
    # The gradient of the input of the first convolution is not needed; a transposed one is a gradient itself.
    assert conv_kernels(graph) == {
        "conv": pytest.approx(first + second + third),
        "conv_data_gradient": pytest.approx(second + third),
        "conv_weight_gradient": pytest.approx(first + second + third),
    }
    ops = {kernel.op for kernel, _ in kernels(graph)}
    norms = {"batchnorm_channels", "batchnorm_channels_backward", "groupnorm", "groupnorm_backward"}
    assert norms | {"pool", "pool_backward"} <= ops
    assert not [node.op for node in graph.nodes if node.op.startswith("unmodelled")]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(("kind", "options"), [("LSTM", {"batch_first": True}), ("GRU", {"bidirectional": True})])
def test_steps_of_a_long_recurrence_are_counted(
    torch: Any, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, bool], mode: str
) -> None:
    """As many kernels as where every step is traced."""

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cells = torch.nn.Linear(8, 16), getattr(torch.nn, kind)(16, 32, **options)

        def forward(self, x: Any) -> Any:
            return self.cells(self.first(x))[0].square().sum()

    graphs = []
    for longest in (7, 9):
        monkeypatch.setattr("neusight_jax.graph.traced.torch_trace.LONG_STEPS", longest)
        with torch.device("meta"):
            graphs.append(nj.graph_from_torch(Net(), (torch.zeros(9, 9, 8),), mode=mode))
    counted, traced = ([(node.name, node.shape, node.repeat, node.phases) for node in graph.nodes] for graph in graphs)
    assert counted == traced


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_cells_are_their_products(torch: Any, kind: str) -> None:
    gates = {"LSTM": 4, "GRU": 3}[kind]
    with torch.device("meta"):
        net = getattr(torch.nn, kind)(32, 64, num_layers=2)
    graph = nj.graph_from_torch(net, (_meta(torch, 10, 4, 32),))
    flop = 10 * 2 * 4 * 64 * gates * (32 + 64 + 64 + 64)
    assert product_flop(graph) == flop


def test_fusion_is_a_choice(torch: Any) -> None:
    class Chain(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tanh(torch.exp(x) * 2.0 + 1.0)

    eager = nj.graph_from_torch(Chain(), (_meta(torch, 64, 32),))
    fused = nj.graph_from_torch(Chain(), (_meta(torch, 64, 32),), trace_options=nj.TraceOptions(fused=True))
    assert eager.launches() == 4
    assert fused.launches() == 1
    assert fused.fused


def test_dropout_is_one_kernel(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)).to("meta")
    graph = nj.graph_from_torch(net, (_meta(torch, 4, 8),), mode="training")
    found = Counter(kernel.op for kernel, _ in kernels(graph))
    assert (found["dropout"], found["dropout_backward"], found["random"]) == (1, 1, 0)


def test_a_permuted_operand_is_read_against_its_order(torch: Any) -> None:
    """A position bias looked up as (query, key, head), as T5's; made contiguous it is read like any other."""

    class Biased(torch.nn.Module):
        def __init__(self, contiguous: bool) -> None:
            super().__init__()
            self.table, self.contiguous = torch.nn.Embedding(32, 16), contiguous

        def forward(self, scores: Any, buckets: Any) -> Any:
            bias = self.table(buckets).permute(2, 0, 1).unsqueeze(0)
            return scores + (bias.contiguous() if self.contiguous else bias)

    inputs = (_meta(torch, 2, 16, 256, 256), torch.zeros(256, 256, dtype=torch.long, device="meta"))
    found = {}
    for contiguous in (False, True):
        with torch.device("meta"):
            net = Biased(contiguous)
        found[contiguous] = {kernel.op: kernel for kernel, _ in kernels(nj.graph_from_torch(net, inputs))}
    permuted = found[False]["pointwise_permuted"]
    assert permuted.family == "strided"
    assert (permuted.dims["reads"], permuted.dims["scattered"], permuted.dims["window"]) == (2.0, 1.0, 256**2)
    assert "pointwise_permuted" not in found[True]
    assert found[True]["copy_permuted"].dims["window"] == 256**2


def test_half_precision(torch: Any) -> None:
    net = torch.nn.Linear(32, 64, dtype=torch.bfloat16, device="meta")
    graph = nj.graph_from_torch(net, (torch.zeros(16, 32, dtype=torch.bfloat16, device="meta"),))
    assert graph.dtype == "bf16"


def test_what_cannot_be_exported_is_one_line(torch: Any) -> None:
    class Branchy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    for device in ("cpu", "meta"):
        with pytest.raises(InputError, match=r"^Branchy: torch.export cannot trace it.*torch.where") as error:
            nj.graph_from_torch(Branchy(), (torch.zeros(3, device=device),))
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"module is a int, expected a torch\.nn\.Module"):
        nj.graph_from_torch(3)
    with pytest.raises(InputError, match="nothing in it requires a gradient"):
        nj.graph_from_torch(torch.nn.ReLU(), (torch.zeros(3),), mode="training")


QUICK = ("llama", "mixtral", "t5", "vit", "mamba", "clip")
"""Architectures traced in every run; the others, and these in training, are marked slow. `benchmarks/architectures.py`
has all of both."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "inference") for name in QUICK),
        *(
            pytest.param(name, mode, marks=pytest.mark.slow)
            for mode, names in (("inference", set(ARCHITECTURES) - set(QUICK)), ("training", QUICK))
            for name in sorted(names)
        ),
    ],
)
def test_transformers_architectures(name: str, mode: str, record_property: Any) -> None:
    """Forecasts of a small model of each, from its config; the share of what is not modelled is small."""
    _, graph = traced(name, mode)
    forecast = nj.predict(load_baseline("roofline"), nj.load_gpu("V100-PCIE-32GB"), graph)
    assert forecast.total_s > 0
    columns = {**forecast.columns}
    names = {node.name: at for at, node in enumerate(graph.nodes)}
    columns["node"] = columns["node"].copy()
    for at, node in enumerate(forecast.columns["node"]):
        columns["node"][at] = names[node]
    share = sum(unmodelled_shares(graph, columns).values())
    record_property("unmodelled", share)
    print(f"{name}, {mode}: unmodelled {share:.1%} of the time")  # noqa: T201 - shown by pytest -s
    assert share < 0.05


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "inference") for name in ("resnet18", "mobilenet_v3_large")),
        *((name, "training") for name in ("gpt2", "albert", "t5", "mixtral", "clip")),
    ],
)
def test_weights_of_architectures_are_exact(name: str, mode: str) -> None:
    """`sum(p.numel())`, to the byte; benchmarks/parameters.py has 50 architectures."""
    model, graph = traced(name, mode)
    parameters, found = list(model.parameters()), footprint(graph)
    assert graph.parameters == sum(item.numel() for item in parameters)
    assert found.weights == sum(item.numel() * item.element_size() for item in parameters)
    if graph.mode == "training":
        assert (found.gradients, found.optimizer) == (found.weights, 2 * found.weights)
    assert found.buffers >= sum(item.numel() for item in model.buffers())


def test_experts_train_as_grouped_products() -> None:
    """Mixtral's experts run as products over groups; their gradients are two products of the same size each."""

    def grouped(mode: str) -> tuple[float, list[str]]:
        _, graph = traced("mixtral", mode)
        flop = sum(
            2.0 * kernel.dims["batch"] * kernel.dims["m"] * kernel.dims["n"] * kernel.dims["k"] * count
            for kernel, count in kernels(graph)
            if kernel.family == "bmm" and kernel.dims["batch"] == 4  # as many groups as experts
        )
        return flop, [node.op for node in graph.nodes if node.op.startswith("unmodelled")]

    # 2 layers; 2 · 16 tokens go to 2 experts each, up and gate in one product of 2 · 64 columns, then down.
    forward = 2 * 2 * (2 * 16 * 2) * 32 * (2 * 64 + 64)
    assert grouped("inference") == (forward, [])
    assert grouped("training") == (3 * forward, [])


@pytest.mark.parametrize("rows", [100, 10])
def test_every_row_of_a_grouped_product_counts(torch: Any, rows: int) -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(64, 512, 1024, dtype=torch.bfloat16))
            self.x = torch.nn.Parameter(torch.zeros(rows, 512, dtype=torch.bfloat16))

        def forward(self, ends: Any) -> Any:
            return torch._grouped_mm(self.x, self.w, offs=ends)

    with torch.device("meta"):
        net, ends = Experts(), torch.zeros(64, dtype=torch.int32)
    flop = 2 * rows * 512 * 1024
    for mode, products_of_a_step in (("inference", 1), ("training", 3)):
        graph = nj.graph_from_torch(net, (ends,), mode=mode)
        assert product_flop(graph) == pytest.approx(products_of_a_step * flop, rel=1e-12)
        assert not [node.op for node in graph.nodes if node.op.startswith("unmodelled")]


def test_embedding_bags_read_the_rows_they_pick(torch: Any) -> None:
    with torch.device("meta"):
        net, ids = torch.nn.EmbeddingBag(1_000_000, 64), torch.zeros(4, 10, dtype=torch.long)
        graph = nj.graph_from_torch(net, (ids,))
    (gather,) = (kernel for kernel, _ in kernels(graph) if kernel.op == "gather")
    read = gather.dims["rows"] * gather.dims["cols"] * gather.dims["reads"] * 4
    assert read == 4 * 10 * (64 * 4 + 8)


def test_an_operator_unlike_its_rule_is_not_modelled() -> None:
    """Another library may have an operator of a known name with other arguments."""
    from neusight_jax.graph.traced.aten import Call, kernels_of_call
    from neusight_jax.graph.traced.operation import Value

    vector = Value(0, (8,), 8.0, 4.0, "float32")
    found, modelled = kernels_of_call(Call("grouped_mm_fallback_backward", (vector,), (vector,), (vector,)))
    assert not modelled
    assert [kernel.op for kernel in found] == ["unmodelled"]
