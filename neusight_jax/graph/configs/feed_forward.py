"""Writers of what works on each token of a layer by itself: dense feed-forward blocks and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.blocks import Dense, Experts
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.quantization.scheme import Stored
from neusight_jax.kernels.family import UNPACK, WEIGHT_SHARE, is_traced, namespace, number
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel


def write_dense(step: Step, block: Dense, hidden: int, name: str = "mlp") -> None:
    """Write a dense feed-forward block: up, with a gate or without, activation, down.

    Args:
      step: takes the nodes.
      block: this GPU's part of the block.
      hidden: width of the model.
      name: start of the nodes' names.
    """
    tokens, inner = step.requests.tokens, block.inner
    wide = inner * (2 if block.gated else 1)
    step.linear(f"{name}.gate_up" if block.gated else f"{name}.up", tokens, wide, hidden, bias=wide * block.bias)
    reads, grad = (2, 5.0 / 3.0) if block.gated else (1, 1.5)
    step.stream(f"{name}.activation", "stream", "pointwise", tokens, inner, reads, 1, grad=grad)
    step.linear(f"{name}.down", tokens, hidden, inner, bias=hidden * block.bias)


def write_experts(step: Step, block: Experts, hidden: int, expert_parallel: int) -> None:
    """Write router, shared expert, routed experts on this device, and what stands beside them.

    Args:
      step: takes the nodes.
      block: all experts of a layer, each as wide as it is on this device.
      hidden: width of the model.
      expert_parallel: devices that hold the experts, equally many on each.
    """
    tokens = step.requests.tokens
    bias = block.count * block.router_bias + (hidden + block.count) * block.router_scales
    step.linear("mlp.router", tokens, block.count, hidden, dtype=step.precision.activations, bias=bias)
    step.stream("mlp.top_k", "reduction", "softmax", tokens, block.count, 1, 1)
    if block.beside:
        write_dense(step, Dense(block.beside, block.gated), hidden)
        for name in ("beside_norm", "experts_input_norm", "experts_norm"):
            step.norm(f"mlp.{name}", tokens, hidden)
    beside = _runs_beside(step, block)
    if is_traced(block.shared) or block.shared:
        if not beside:
            write_dense(step, Dense(block.shared, block.gated, block.bias), hidden, "mlp.shared")
            step.summed()
        step.weight(hidden * block.shared_gate)  # one more row of the router
    width = block.latent or hidden
    if block.latent:
        step.linear("mlp.latent_down", tokens, width, hidden, bias=width * block.bias)
    if block.latent_norm:
        step.norm("mlp.latent_norm", tokens, width)
    if step.shard is not None:
        # Tokens in the order of their experts and back, gradients likewise.
        step.stream("mlp.permute", "stream", "pointwise", tokens * block.top_k, width, 2, 2)
    _write_routed(step, block, width, expert_parallel, number(block.shared) if beside else 0.0)
    local = block.count / expert_parallel
    step.weight(local * (block.inner * (2 if block.gated else 1) + width) * block.bias)
    if block.latent:
        step.linear("mlp.latent_up", tokens, hidden, width, bias=hidden * block.bias)


def _runs_beside(step: Step, block: Experts) -> bool:
    """Whether the shared expert runs beside the routed ones: in their kernel (SGLang), or a second stream (vLLM,
    `shared_experts_stream`; TensorRT-LLM). Then it is so many more of them."""
    shared = is_traced(block.shared) or block.shared
    alone = not step.serving or not shared or not block.gated or bool(block.bias or block.latent)
    return not alone and step.stored("mlp.shared.gate_up") == step.stored("mlp.experts")


def _write_routed(step: Step, block: Experts, hidden: int, expert_parallel: int, beside: float) -> None:
    """The experts of a layer on this device, tokens spread at random.

    Args:
      hidden: what they read; beside: width of a shared one that runs with them, 0 = none does.

    An expert of two matrices counts as one of three that is as much narrower.
    """
    local, width = (number(namespace(size).maximum(size, 1.0)) for size in (block.count / expert_parallel, block.inner))
    tokens, matrices = step.requests.tokens, 3 if block.gated else 2
    gathered = 1.0 if step.shard is None else step.shard.gathered
    sizes = expert_dims(
        float(tokens) * gathered,
        experts=block.count,
        local_experts=local,
        top_k=block.top_k,
        hidden=hidden,
        inner=width * matrices / 3.0,
        distribution="random",
    )
    shared = beside / width
    dims = {key: number(value) for key, value in sizes.items()}
    dims |= {"rows": dims["rows"] + shared * tokens, "active": dims["active"] + shared}
    phases: tuple[list[Kernel], list[Kernel], list[Kernel]] = [], [], []
    # Layers may differ in how they store their experts: every way of storing has its share of the launches.
    for part in step.stored("mlp.experts"):
        elements = matrices * hidden * width
        stored = part.scheme.weight_bytes((matrices - 1) * width, hidden) + part.scheme.weight_bytes(hidden, width)
        step.count((local + shared) * elements * part.share, (local + shared) * stored * part.share)
        step.expert_parameters += local * elements * part.share * step.repeat
        step.ledger.add("mlp.experts", part.of_rows(tokens), (local + shared) * elements * step.repeat)
        if not step.training:
            phases[0].append(_expert_kernel(dims, part, stored / elements))
            continue
        # Training runs products of experts as one batch each, or expert by expert.
        active, grouped = dims["active"], step.shard is None or step.shard.grouped_experts
        rows, batch, count = dims["rows"] / active, active if grouped else 1.0, 1.0 if grouped else active
        for features, read in (((matrices - 1) * width, hidden), (hidden, width)):
            products = step.products(part, rows, features, read, count * part.share, batch)
            for phase, kernels in zip(phases, products, strict=True):
                phase += map(_of_an_expert, kernels)
    if step.training:
        for phase, passes in zip(phases, (matrices, 2 * matrices - 1), strict=False):
            moved = {"rows": dims["rows"], "cols": number(width), "reads": passes - 1.0, "writes": 1.0}
            phase.append(Kernel("stream", "pointwise", moved, 1.0, step.precision.activations))
    step.read(hidden, step.precision.products, step.lora is None)
    # Gate and up as they are, what the activation makes of them as the product after it reads it.
    size, narrow = (dtype_bytes(of) for of in (step.precision.activations, step.precision.products))
    down = dims["rows"] * width * narrow * float(step.lora is None)
    inside = dims["rows"] * (matrices - 1) * width * size + down
    step.emit(
        *("mlp.experts", "experts"),
        *phases,
        (tokens, hidden),
        saved_bytes=float(tokens) * hidden * size + inside,
        rebuilt_bytes=down,
    )


def _of_an_expert(kernel: Kernel) -> Kernel:
    """A product as one of experts; fp32 has no such operator."""
    tensor = kernel.family in ("linear", "bmm") and kernel.dtype != "fp32"
    return replace(kernel, op="expert") if tensor else kernel


def _expert_kernel(dims: Mapping[str, float], part: Stored, stored_bytes: float) -> Kernel:
    """The kernel of experts; `stored_bytes`: of one weight, scales included."""

    def kernel(dtype: str) -> Kernel:
        same = part.scheme.bits == 8.0 * dtype_bytes(dtype)
        narrow = {} if same else {WEIGHT_SHARE: stored_bytes / dtype_bytes(dtype)}
        narrow |= {UNPACK: part.scheme.unpack} if part.scheme.unpack else {}
        return Kernel("grouped_gemm", "experts", {**dims, **narrow}, part.share, dtype)

    return part.of_rows(dims["tokens"]).either(kernel)
