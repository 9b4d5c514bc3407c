"""Torch modules that write into slices, views, buffers and arguments: nothing of what they compute may vanish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from graphs import kernels, product_flop

import neusight_jax as nj
from neusight_jax.graph.graph import Graph

torch = pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")

BATCH, STEPS, WIDTH = 8, 4, 256
ROW = 2 * WIDTH * WIDTH  # FLOP of one row through a square layer


class Program(torch.nn.Module):
    """A function of a module with two square layers, `up` and `down`, and a buffer."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.register_buffer("state", torch.zeros(BATCH, STEPS, WIDTH))
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def graph_of(run: Callable[..., Any], mode: str = "inference", **options: Any) -> Graph:
    with torch.device("meta"):
        net, x = Program(run), torch.zeros(BATCH, STEPS, WIDTH)
    return nj.graph_from_torch(net, (x,), mode=mode, trace_options=nj.TraceOptions(**options))


def moved(graph: Graph) -> dict[str, tuple[float, float]]:
    """Bytes read and written by each streaming operator, by node."""
    found: dict[str, tuple[float, float]] = {}
    for node in graph.nodes:
        for kernel in (item for phase in node.phases for item in phase if "reads" in item.dims):
            size = kernel.dims["rows"] * kernel.dims["cols"] * 4 * kernel.count * node.repeat
            reads, writes = found.get(node.op, (0.0, 0.0))
            found[node.op] = (reads + size * kernel.dims["reads"], writes + size * kernel.dims["writes"])
    return found


def slice_assignment(net: Any, x: Any) -> Any:
    out = torch.empty_like(x)
    out[:, :2] = net.up(x[:, :2])
    return out


def slice_sum(net: Any, x: Any) -> Any:
    out = torch.zeros_like(x)
    out[:, 1:3] += net.up(x[:, 1:3])
    return net.down(out)


def recurrence(net: Any, x: Any) -> Any:
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for step in range(STEPS):
        state = torch.tanh(net.up(state) + net.down(x[:, step]))
        out[:, step] = state
    return out


def view_of_a_view(net: Any, x: Any) -> Any:
    out = torch.empty(BATCH, STEPS, 2, WIDTH // 2, device=x.device)
    out[:, 0][..., :64] = net.up(x[:, 0]).view(BATCH, 2, -1)[..., :64]
    out.view(BATCH, STEPS, WIDTH)[:, 1:].copy_(net.down(x[:, 1:]))
    return out


def transposed_view(net: Any, x: Any) -> Any:
    out = x.clone()
    out.transpose(0, 1)[1:3].add_(net.up(x).transpose(0, 1)[1:3])
    return net.down(out[:, 1])


def masked_fill(net: Any, x: Any) -> Any:
    hidden = net.up(x)
    hidden.masked_fill_(hidden > 0, 0.0)
    hidden[hidden < -1] = -1.0
    return net.down(hidden)


def halves(net: Any, x: Any) -> Any:
    one, two = net.up(x).chunk(2, -1)
    one.mul_(two)
    two.zero_()
    return torch.cat([one, two], -1)


def whole_array(net: Any, x: Any) -> Any:
    out = torch.empty_like(x)
    torch.matmul(x, net.up.weight, out=out)
    same = out.view(-1)
    same.mul_(2.0)
    return out


def argument(net: Any, x: Any) -> None:
    x[:, 0] = net.up(x[:, 1])


def buffer(net: Any, x: Any) -> Any:
    net.state[:, 0].copy_(net.up(x[:, 0]))
    return x


def buffer_read_back(net: Any, x: Any) -> Any:
    net.state[:, :1] = net.up(x[:, :1])
    return net.down(net.state)


def added_rows(net: Any, x: Any) -> Any:
    out = torch.zeros(BATCH, STEPS, WIDTH, device=x.device)
    return out.index_add_(1, torch.zeros(2, dtype=torch.long, device=x.device), net.up(x[:, :2]))


def foreach(net: Any, x: Any) -> Any:
    hidden = net.up(x)
    torch._foreach_add_(list(hidden.unbind(0)), 1.0)
    return net.down(hidden)


ROWS: dict[Callable[..., Any], int] = {
    slice_assignment: 2 * BATCH,
    slice_sum: 2 * BATCH + STEPS * BATCH,
    recurrence: 2 * STEPS * BATCH,
    view_of_a_view: STEPS * BATCH,
    transposed_view: STEPS * BATCH + BATCH,
    masked_fill: 2 * STEPS * BATCH,
    halves: STEPS * BATCH,
    whole_array: STEPS * BATCH,
    argument: BATCH,
    buffer: BATCH,
    buffer_read_back: BATCH + STEPS * BATCH,
    added_rows: 2 * BATCH,
    foreach: 2 * STEPS * BATCH,
}
"""Programs, and how many rows they send through a layer, counted by hand."""


@pytest.mark.parametrize("run", ROWS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("fused", [False, True])
def test_everything_written_is_computed(run: Callable[..., Any], fused: bool) -> None:
    graph = graph_of(run, fused=fused)
    assert product_flop(graph) == ROWS[run] * ROW
    assert not [node.op for node in graph.nodes if node.op.startswith("unmodelled")]


@pytest.mark.parametrize("run", [slice_assignment, slice_sum, recurrence, view_of_a_view, masked_fill, added_rows])
def test_gradients_flow_through_what_is_written(run: Callable[..., Any]) -> None:
    """Twice the forward products, less the gradients of what needs none: the input, and a state of zeros."""
    graph = graph_of(run, "training")
    rows = {slice_sum: 2 * STEPS * BATCH + 2 * BATCH, masked_fill: 3 * STEPS * BATCH}
    # The recurrence: a weight gradient of both layers in every step, and one of the state in all but the first.
    rows[recurrence] = (3 * STEPS - 1) * BATCH
    assert product_flop(graph, 0) == ROWS[run] * ROW
    assert product_flop(graph) - product_flop(graph, 0) == rows.get(run, ROWS[run]) * ROW


def test_a_write_moves_what_it_writes() -> None:
    """A slice is read and written once, a sum into it reads both; the rest of the array stays where it is."""
    piece = BATCH * 2 * WIDTH * 4
    assert moved(graph_of(slice_assignment)) == {"copy": (piece, piece)}
    found = moved(graph_of(slice_sum))
    assert found["add"] == (2 * piece, piece)
    assert found["zeros_like"] == (0, BATCH * STEPS * WIDTH * 4)
    rows = moved(graph_of(added_rows))["index_add"]
    assert rows == (2 * piece + 2 * 8, piece)  # two indices of eight bytes


def test_what_is_overwritten_whole_needs_nothing_before() -> None:
    def overwritten(net: Any, x: Any) -> Any:
        out = net.up(x)
        out.copy_(net.down(x))
        return out

    assert product_flop(graph_of(overwritten)) == STEPS * BATCH * ROW


def test_reads_before_a_write_are_of_the_old_array() -> None:
    """The first read of `hidden` needs no product; only the second does."""

    def before(net: Any, x: Any) -> Any:
        hidden = torch.zeros_like(x)
        early = hidden + 1.0
        hidden[:, 0] = net.up(x[:, 0])
        return early

    assert product_flop(graph_of(before)) == 0


class Cached(torch.nn.Module):
    """One step of attention with a cache of keys and values in one buffer, written in five ways."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (torch.nn.Linear(64, 64, bias=False) for _ in range(4))
        self.register_buffer("cache", torch.zeros(2, 2, 4, 128, 16))
        self.write = write

    def forward(self, x: Any, position: Any) -> Any:
        query, *new = (layer(x).view(2, 1, 4, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        for at, made in enumerate(new):
            if self.write == "assignment":
                self.cache[at, :, :, position] = made
            elif self.write == "slice":
                self.cache[at, :, :, 7:8].copy_(made)
            elif self.write == "index_copy":
                self.cache[at].index_copy_(2, position, made)
            elif self.write == "index_put":
                batch, head = torch.arange(2, device=x.device), torch.arange(4, device=x.device)
                self.cache[at].index_put_((batch[:, None, None], head[None, :, None], position[None, None]), made)
            elif self.write == "scatter":
                self.cache[at].scatter_(2, position.view(1, 1, 1, 1).expand(2, 4, 1, 16), made)
        out = torch.nn.functional.scaled_dot_product_attention(query, self.cache[0], self.cache[1])
        return self.out(out.transpose(1, 2).reshape(2, 1, 64))


@pytest.mark.parametrize("write", ["assignment", "slice", "index_copy", "index_put", "scatter"])
def test_caches_written_in_place(write: str) -> None:
    with torch.device("meta"):
        inputs = torch.zeros(2, 1, 64), torch.zeros(1, dtype=torch.long)
        graph = nj.graph_from_torch(Cached(write), inputs)
    assert product_flop(graph) == 4 * 2 * 2 * 64 * 64 + 2 * 2 * 2 * 4 * 128 * 16
    written = [
        kernel.dims["rows"] * kernel.dims["cols"] * kernel.dims["writes"] * count
        for kernel, count in kernels(graph)
        if kernel.op in ("copy", "scatter")
    ]
    assert sum(written) == 2 * 2 * 4 * 16  # a key and a value of every head, not the cache


def test_batch_norm_writes_its_statistics() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8))
        graph = nj.graph_from_torch(net.train(), (torch.zeros(2, 3, 16, 16),), mode="training")
    found = Counter(kernel.op for kernel, _ in kernels(graph))
    assert (found["batchnorm_channels"], found["batchnorm_channels_backward"]) == (1, 1)
    # The counter of batches is one number, an argument of no kernel. The layout of both images changes in both passes.
    assert graph.launches() == 4 + 4


def test_forms_out_of_place_copy_the_array_first() -> None:
    def scattered(net: Any, x: Any) -> Any:
        rows = torch.zeros(2, dtype=torch.long, device=x.device)
        return x.index_copy(1, rows, net.up(x[:, :2])), torch.select_scatter(x, net.down(x[:, 0]), 1, 0)

    graph = graph_of(scattered)
    ops = Counter(kernel.op for kernel, _ in kernels(graph))
    assert (ops["copy"], ops["scatter"]) == (2, 2)
    read, written = moved(graph)["select_scatter"]
    whole, part = BATCH * STEPS * WIDTH * 4, BATCH * WIDTH * 4
    assert (read, written) == (whole + part, whole + part)


def test_the_worst_branch_of_a_cond_or_the_given_one() -> None:
    def branchy(net: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: net.up(x), lambda x: net.down(net.up(x)), (x,))

    rows = STEPS * BATCH * ROW
    assert [product_flop(graph_of(branchy, branch=branch)) for branch in ("worst", 0, 1)] == [2 * rows, 2 * rows, rows]
    with pytest.raises(nj.InputError, match="branch is 2, but a cond has 2 branches"):
        graph_of(branchy, branch=2)


def test_checkpointing_is_said_not_to_be_followed() -> None:
    from torch.utils.checkpoint import checkpoint

    def saved(net: Any, x: Any) -> Any:
        return checkpoint(lambda x: net.down(torch.relu(net.up(x))), x, use_reentrant=False)

    assert graph_of(saved).notes == ()
    (note,) = graph_of(saved, "training").notes
    assert note.startswith("activation checkpointing is not followed")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_autocast_is_followed_on_any_device(device: str, place: str) -> None:
    def mixed(net: Any, x: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            hidden = net.up(x)
        return net.down(hidden.float())

    with torch.device(place):
        net, x = Program(mixed), torch.zeros(BATCH, STEPS, WIDTH)
    graph = nj.graph_from_torch(net, (x,))
    assert [kernel.dtype for kernel, _ in kernels(graph) if kernel.family in ("linear", "bmm")] == ["bf16", "fp32"]


def test_sizes_that_depend_on_values_are_refused_in_one_line() -> None:
    def routed(net: Any, x: Any) -> Any:
        rows = (x[:, 0, 0] > 0).nonzero(as_tuple=True)[0]
        return torch.zeros_like(x).index_add_(0, rows, net.up(x[rows]))

    with pytest.raises(nj.InputError, match="the size of a tensor depends on values") as error:
        graph_of(routed)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_caches_of_transformers_go_in_and_out(kind: str) -> None:
    """A decode step: 32 keys before it in a growing cache, or room for 64."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from torch_models import SMALL

    with torch.device("meta"):
        config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
        model, ids = transformers.LlamaForCausalLM(config).eval(), torch.zeros(2, 1, dtype=torch.long)
        cache = transformers.DynamicCache()
        if kind == "static":
            cache = transformers.StaticCache(config=config, max_cache_len=64)
            cache.early_initialization(2, 2, 8, torch.float32, torch.device("meta"))
        elif kind == "dynamic":
            for layer in range(2):
                cache.update(torch.zeros(2, 2, 32, 8), torch.zeros(2, 2, 32, 8), layer)
        graph = nj.graph_from_torch(model, (), {"input_ids": ids, "past_key_values": cache})
    keys = {"none": 1, "dynamic": 33, "static": 64}[kind]
    layer = 2 * 32 * (32 + 2 * 16 + 32) + 3 * 2 * 32 * 64 + 2 * 2 * keys * 32
    angles = 2 * 2 * 4  # positions times four frequencies, by both sequences
    assert product_flop(graph) == pytest.approx(2 * (2 * layer + 2 * 32 * 96) + angles, abs=16)
    written = sum(node.repeat for node in graph.nodes if node.op == "index_copy")
    assert written == (4 if kind == "static" else 0)
