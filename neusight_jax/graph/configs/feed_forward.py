"""Writers of what works on each token of a layer by itself: dense feed-forward blocks and routed experts."""

from __future__ import annotations

from neusight_jax.graph.configs.blocks import Dense, Experts
from neusight_jax.graph.configs.step import Step


def write_dense(step: Step, block: Dense, hidden: int, name: str = "mlp") -> None:
    """Up, with a gate or without, activation, down."""
    tokens, inner = step.requests.tokens, block.inner
    wide = inner * (2 if block.gated else 1)
    step.linear(f"{name}.gate_up" if block.gated else f"{name}.up", tokens, wide, hidden, bias=wide * block.bias)
    reads, grad = (2, 5.0 / 3.0) if block.gated else (1, 1.5)
    step.stream(f"{name}.activation", "stream", "pointwise", tokens, inner, reads, 1, grad=grad)
    step.linear(f"{name}.down", tokens, hidden, inner, bias=hidden * block.bias)


def write_experts(step: Step, block: Experts, hidden: int, expert_parallel: int) -> None:
    """Router, shared expert, routed experts on this device, and what stands beside them."""
    tokens = step.requests.tokens
    own = block.count * block.router_bias + (hidden + block.count) * block.router_scales
    step.linear("mlp.router", tokens, block.count, hidden, dtype=step.precision.activations, bias=own)
    step.stream("mlp.top_k", "reduction", "softmax", tokens, block.count, 1, 1)
    if block.beside:
        write_dense(step, Dense(block.beside, block.gated), hidden)
        for name in ("beside_norm", "experts_input_norm", "experts_norm"):
            step.norm(f"mlp.{name}", tokens, hidden)
    if block.shared:
        if not step.runs_beside(block):
            write_dense(step, Dense(block.shared, block.gated, block.bias), hidden, "mlp.shared")
        step.weight(hidden * block.shared_gate)  # one more row of the router
    width = block.latent or hidden
    if block.latent:
        step.linear("mlp.latent_down", tokens, width, hidden, bias=width * block.bias)
    if block.latent_norm:
        step.norm("mlp.latent_norm", tokens, width)
    if step.shard is not None:
        # Tokens in the order of their experts and back, gradients likewise.
        step.stream("mlp.permute", "stream", "pointwise", tokens * block.top_k, width, 2, 2)
    step.experts("mlp.experts", block, width, expert_parallel)
    local = block.count // expert_parallel
    step.weight(local * (block.inner * (2 if block.gated else 1) + width) * block.bias)
    if block.latent:
        step.linear("mlp.latent_up", tokens, hidden, width, bias=hidden * block.bias)
