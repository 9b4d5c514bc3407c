"""Pieces that several architectures share: activations, attention scores, small masks."""

from __future__ import annotations

from neusight_jax.graph.configs.classes import eager_kind
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.tape import Tape, Tensor

ACTIVATIONS: tuple[str, ...] = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Activation names of the configs that are understood; `gelu_new` is unrolled into eight kernels."""
SCORES: dict[str, bool] = {"sequence labels": False, "token labels": True, "answer span": True}
"""Kinds of classes of a decoder that score every token, and whether the product has a bias."""


def activation(tape: Tape, name: str, x: Tensor, kind: str) -> Tensor:
    """Write the activation function of a feed-forward block; returns its result.

    Args:
      tape: takes the nodes.
      name: of the node, or start of the names where there are several.
      x: what it is applied to, any shape.
      kind: one of `ACTIVATIONS`.
    """
    if kind == "relu":
        return tape.unary(name, "relu", x)
    if kind != "gelu_new":
        return tape.unary(name, "gelu", x)
    half = tape.unary(f"{name}.half", "mulu", x)
    cube = tape.unary(f"{name}.cube", "powu", x)
    cube = tape.unary(f"{name}.cube_scale", "mulu", cube)
    inner = tape.binary(f"{name}.inner", "add", x, cube)
    inner = tape.unary(f"{name}.inner_scale", "mulu", inner)
    inner = tape.unary(f"{name}.tanh", "tanh", inner)
    inner = tape.unary(f"{name}.shift", "addu", inner)
    out = tape.binary(f"{name}.product", "mul", half, inner)
    tape.gradient_sum(f"{name}.gradient_sum", x, 3)
    return out


def heads(x: Tensor, num_heads: int) -> Tensor:
    """(batch, sequence, heads·D) seen as (batch, heads, sequence, D)."""
    batch, sequence, width = x.shape
    return x.view(batch, num_heads, sequence, width // num_heads)


def keys(x: Tensor) -> Tensor:
    """(batch, heads, sequence, D) seen as (batch, heads, D, sequence)."""
    batch, num_heads, sequence, size = x.shape
    return x.view(batch, num_heads, size, sequence)


def permuted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Those of the permuted 4-D tensors that torch.matmul copies: all of them, unless the batch is 1."""
    return tuple(item for item in tensors if item.shape[0] > 1)


def merge_heads(tape: Tape, name: str, x: Tensor) -> Tensor:
    """Copy (batch, heads, sequence, D) to (batch, sequence, heads·D).

    Args:
      tape: takes the node.
      name: of the node.
      x: context of all heads [batch, heads, sequence, D].
    """
    batch, num_heads, sequence, size = x.shape
    merged = tape.copy(name, x.view(batch, sequence, num_heads, size))
    return merged.view(batch, sequence, num_heads * size)


def outputs(config: Config, kind: str) -> int:
    """Outputs of a head of labels, or of the first and last word of an answer."""
    return 2 if kind == "answer span" else config.labels()


def write_head(tape: Tape, config: Config, x: Tensor, vocabulary: int, *, tied: bool) -> Tensor:
    """Write the head of the class a decoder's config names: the vocabulary's, one that scores every token, or none.

    Args:
      tape: takes the node.
      config: whose `architectures` name the class.
      x: hidden states [batch, sequence, width].
      vocabulary: words whose scores this rank computes.
      tied: whether the weight is the embedding's, and counted there.
    """
    kind = eager_kind(config, "vocabulary", "none", *SCORES)
    if kind == "none":
        return x
    if kind in SCORES:
        return tape.linear("score", x, outputs(config, kind), bias=SCORES[kind])
    return tape.linear("head", x, vocabulary, bias=False, tied=tied)
