"""OPT: decoder-only, ReLU, explicit copies before its batched products (Hugging Face OPTForCausalLM)."""

from __future__ import annotations

from math import prod

from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.execution import widened_softmax
from neusight_jax.graph.configs.layers import (
    ACTIVATIONS,
    activation,
    heads,
    keys,
    merge_heads,
    permuted,
    write_head,
)
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import FLASH, stream

RESERVED_POSITIONS = 2
"""Rows of the position table before the first position."""


def record(tape: Tape, config: Config, batch: int, sequence: int) -> None:
    """Write a forward (and backward) pass on the tape.

    Args:
      tape: takes the nodes; it decides whether the model trains.
      config: of type "opt"; gets a note where its class has a head that is not written here.
      batch: sequences.
      sequence: tokens of a sequence.
    """
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.head_size("hidden_size", "num_attention_heads")
    positions = config.limit_sequence(sequence, "max_position_embeddings")
    vocabulary, layers, inner = config.size("vocab_size"), config.size("num_hidden_layers"), config.size("ffn_dim")
    width = config.size("word_embed_proj_dim", hidden)
    act = config.choice("activation_function", "relu", ACTIVATIONS)
    before, bias = config.flag("do_layer_norm_before", True), config.flag("enable_bias", True)
    config.require("layer_norm_elementwise_affine", True, True)
    drop, attn_drop = config.rate("dropout", 0.1), config.rate("attention_dropout", 0.0)
    last_norm = before and not config.flag("_remove_final_layer_norm", False)

    x = tape.embedding("token_embedding", (batch, sequence), (vocabulary, width))
    mask = _mask(tape, batch, sequence)
    table = (positions + RESERVED_POSITIONS, hidden)
    places = tape.embedding("position_embedding", (batch, sequence), table)
    if width != hidden:
        x = tape.linear("project_in", x, hidden, bias=False)
    x = tape.binary("embedding_add", "add", x, places)

    with tape.section("layer", layers):
        residual = x
        if before:
            x = tape.norm("attention.norm", x)
        source = x
        gradients = "attention.norm_gradient_sum" if before else "attention.gradient_sum"
        context = _attention(tape, source, mask, num_heads, attn_drop, gradients, bias)
        x = merge_heads(tape, "attention.merge", context)
        x = tape.linear("attention.output", x, hidden, bias=bias)
        x = tape.dropout("attention.output_dropout", x, drop)
        x = tape.binary("attention.residual", "add", x, residual)
        tape.gradient_sum("residual_gradient_sum", residual, 2)
        x = middle = x.view(batch * sequence, hidden)
        if not before:
            x = middle = tape.norm("attention.norm", x)
        if before:
            x = tape.norm("mlp.norm", x)
        x = tape.linear("mlp.up", x, inner, bias=bias)
        x = activation(tape, "mlp.activation", x, act)
        x = tape.linear("mlp.down", x, hidden, bias=bias)
        x = tape.dropout("mlp.dropout", x, drop)
        x = tape.binary("mlp.residual", "add", x, middle)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)
        if not before:
            x = tape.norm("mlp.norm", x)

    x = x.view(batch, sequence, hidden)
    if last_norm:
        x = tape.norm("norm", x)
    if width != hidden:
        x = tape.linear("project_out", x, width, bias=False)
    write_head(tape, config, x, vocabulary, tied=config.flag("tie_word_embeddings", True))


def _attention(
    tape: Tape, source: Tensor, mask: Tensor, num_heads: int, drop: float, gradients: str, bias: bool
) -> Tensor:
    """Attention of all heads; `gradients`: name of the node that adds the gradients of its three projections."""
    query = tape.linear("attention.query", source, source.shape[-1], bias=bias)
    query = tape.unary("attention.scale", "mulu", query)
    key = tape.linear("attention.key", source, source.shape[-1], bias=bias)
    value = tape.linear("attention.value", source, source.shape[-1], bias=bias)
    # Their gradients are copied out of the heads as well.
    key, value, query = (
        tape.copy(f"attention.{name}_heads", heads(part, num_heads), backward=True)
        for name, part in (("key", key), ("value", value), ("query", query))
    )
    tape.gradient_sum(gradients, source, 3)
    if tape.fused_attention:
        return tape.attention("attention.fused", query, key, value, causal=True)
    scores = tape.matmul("attention.scores", query, keys(key))
    scores = tape.binary("attention.mask", "add", scores, mask, reread=True)  # by every head
    # Softmax and the second product see (batch·heads, sequence, sequence).
    flat = scores.view(prod(scores.shape[:2]), *scores.shape[2:])
    if tape.dtype in FLASH and not tape.training:
        kernels = widened_softmax(float(prod(flat.shape[:2])), float(flat.shape[2]), tape.dtype)
        probabilities = tape.emit("attention.softmax", "softmax", [flat], flat.shape, kernels)
    else:
        flat = _maximum(tape, scores).view(*flat.shape)
        probabilities = tape.softmax("attention.softmax", flat)
    probabilities = tape.dropout("attention.dropout", probabilities, drop)
    return tape.matmul("attention.context", probabilities.view(*scores.shape), value, backward_copies=permuted(value))


def _maximum(tape: Tape, scores: Tensor) -> Tensor:
    """torch.max(scores, lowest): one more pass over the scores; its gradient compares, halves, selects and fills."""
    bits = tape.mask_share
    tape.small("attention.lowest", "fill", (1, 1), 0)
    backward = [
        stream("memory", "where", scores.shape, 1, bits, 2),  # equal to the other operand? below it?
        stream("elementwise", "divu", scores.shape, 1, 1),
        stream("memory", "where", scores.shape, 2 + bits, 1),
        stream("memory", "where", scores.shape, 1 + bits, 1),
    ]
    forward = [stream("memory", "max", scores.shape, 1, 1)]
    return tape.emit("attention.max", "max", [scores], scores.shape, forward, backward, fuse="pointwise")


def _mask(tape: Tape, batch: int, sequence: int) -> Tensor:
    """Causal and padding masks, joined once per model, and the position ids."""
    square, ids, full = (sequence, sequence), (batch, sequence), (batch, 1, sequence, sequence)
    bits = tape.mask_share
    tape.small("mask.ones", "fill", ids, 0)
    tape.small("mask.full", "fill", square, 0)
    tape.small("mask.arange", "fill", (1, sequence), 0)
    tape.small("mask.shift", "addu", (1, sequence))
    tape.small("mask.compare", "where", square, 0, bits)
    tape.small("mask.causal", "where", square, 1 + bits, 1)
    tape.small("mask.invert", "addu", full, 0)
    tape.small("mask.padded", "where", full, 1, bits)
    tape.small("mask.padding_copy", "copy", full)
    tape.small("mask.padding", "where", full, 1 + bits, 1)
    tape.small("mask.joined", "where", full, 1, bits)
    tape.small("mask.joined_copy", "copy", full)
    tape.small("mask.fill", "where", full, 1 + bits, 1)
    tape.small("positions.cumsum", "cumsum", ids)
    tape.small("positions.mask", "mul", ids, 2)
    tape.small("positions.subtract", "addu", ids)
    tape.small("positions.offset", "addu", ids)
    return Tensor("attention_mask", full, False)
