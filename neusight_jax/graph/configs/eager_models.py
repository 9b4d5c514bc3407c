"""Models as Hugging Face runs them in eager PyTorch, operator by operator: GPT-2 and GPT-3, OPT, BERT, RoBERTa.

GPT-2 is pre-norm with one projection for queries, keys and values; OPT copies before its batched products; BERT and
RoBERTa are encoders, post-norm. Their heads follow the class that `architectures` names; where it names none, those of
a language model in decoders and in training (BERT with both heads of its pre-training), and else labels of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from neusight_jax.graph.configs.classes import SCORES, eager_kind, outputs
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.execution import widened_softmax
from neusight_jax.graph.configs.shard import Shard
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import FLASH, stream

ACTIVATIONS: tuple[str, ...] = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
"""Activation names of the configs that are understood; `gelu_new` is unrolled into eight kernels."""
RESERVED_POSITIONS = 2
"""Rows of OPT's position table before the first position."""


# Blocks that several of the models share.


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


def unfused_attention(
    tape: Tape, start: str, query: Tensor, key: Tensor, value: Tensor, masked: Callable[[Tensor], Tensor], drop: float
) -> Tensor:
    """Write two products and a softmax, permuted operands copied before the products; returns the context.

    Args:
      tape: takes the nodes.
      start: of their names.
      query, key, value: [batch, heads, tokens, width].
      masked: writes scale and mask of the scores.
      drop: rate of dropout of the probabilities.
    """
    scores = masked(tape.matmul(f"{start}scores", query, keys(key), copies=permuted(query, keys(key))))
    probabilities = tape.dropout(f"{start}dropout", tape.softmax(f"{start}softmax", scores), drop)
    return tape.matmul(f"{start}context", probabilities, value, copies=permuted(value), backward_copies=permuted(value))


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


def padding_mask(tape: Tape, name: str, batch: int, sequence: int) -> Tensor:
    """Write the mask of padding, made from ones; returns it.

    Args:
      tape: takes the nodes.
      name: start of their names.
      batch: sequences.
      sequence: tokens of one.
    """
    ids = (batch, 1, 1, sequence)
    tape.small(f"{name}.ones", "fill", (batch, sequence), 0)
    tape.small(f"{name}.subtract", "addu", ids)
    tape.small(f"{name}.scale", "mulu", ids)
    return Tensor(name, ids, False)


def _added(tape: Tape, name: str, dropout: str, y: Tensor, residual: Tensor, drop: float) -> Tensor:
    """The sum of a block's output after dropout with the residual, which may be a part of the tokens."""
    y = tape.dropout(dropout, Tensor(y.name, residual.shape, y.grad), drop)
    return tape.binary(name, "add", y, residual)


def _attended(tape: Tape, context: Tensor, residual: Tensor, drop: float, *, bias: bool = True) -> Tensor:
    """The context of all heads merged, projected and added to the residual."""
    y = merge_heads(tape, "attention.merge", context)
    y = tape.linear("attention.output", y, residual.shape[-1], bias=bias)
    return _added(tape, "attention.residual", "attention.output_dropout", y, residual, drop)


def _feed_forward(
    tape: Tape, x: Tensor, residual: Tensor, inner: int, act: str, drop: float, *, bias: bool = True
) -> Tensor:
    """A feed-forward block, added to the residual."""
    y = activation(tape, "mlp.activation", tape.linear("mlp.up", x, inner, bias=bias), act)
    y = tape.linear("mlp.down", y, residual.shape[-1], bias=bias)
    return _added(tape, "mlp.residual", "mlp.dropout", y, residual, drop)


def _decoder_head(tape: Tape, config: Config, x: Tensor, vocabulary: int, *, tied: bool) -> None:
    """The head of the class a decoder's config names: the vocabulary's, one that scores every token, or none.

    Args:
      x: hidden states [batch, sequence, width]; vocabulary: words whose scores this rank computes.
      tied: whether the weight is the embedding's, and counted there.
    """
    kind = eager_kind(config, "vocabulary", "none", *SCORES)
    if kind in SCORES:
        tape.linear("score", x, outputs(config, kind), bias=SCORES[kind])
    elif kind != "none":
        tape.linear("head", x, vocabulary, bias=False, tied=tied)


# GPT-2 and GPT-3.


class Respelled(Config):
    """A config in the spelling of a decoder whose layers are written fused, as training frameworks run it.

    Attributes:
      eager: the config as eager PyTorch reads it.
    """

    def __init__(self, eager: Config) -> None:
        hidden, layers = eager.size("n_embd"), eager.size("n_layer")
        values = {
            "model_type": "nemotron",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": eager.size("n_head"),
            "intermediate_size": eager.size("n_inner", 4 * hidden),
            "vocab_size": eager.size("vocab_size"),
            "max_position_embeddings": eager.size("n_positions"),
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": eager.flag("tie_word_embeddings", True),
            "no_rope_layers": [0] * layers,
            **{key: eager.values.get(key) for key in ("architectures", "num_labels", "id2label")},
        }
        kept: dict[str, Any] = {name: getattr(eager, name) for name in ("notes", "origin", "catalog", "stored_bytes")}
        super().__init__(eager.name, values, **kept)
        self.eager = eager


def record_gpt2(tape: Tape, config: Config, batch: int, sequence: int, shard: Shard | None = None) -> None:
    """Write a forward (and backward) pass on the tape.

    Args:
      tape: takes the nodes; it decides whether the model trains.
      config: of type "gpt2"; gets a note where its class has a head that is not written here.
      batch: sequences.
      sequence: tokens of a sequence that this rank has.
      shard: part of the model on this rank of a job; None = the whole model.
    """
    part = shard or Shard()
    hidden, num_heads = config.size("n_embd"), config.size("n_head")
    config.head_size("n_embd", "n_head")
    positions = config.limit_sequence(sequence * part.context, "n_positions")
    vocabulary, layers = (
        -(-config.size("vocab_size") // part.tensor),
        len(part.own(list(range(config.size("n_layer"))))),
    )
    split, inner = hidden // part.tensor, config.size("n_inner", 4 * hidden) // part.tensor
    num_heads //= part.tensor
    act = config.choice("activation_function", "gelu_new", ACTIVATIONS)
    config.require("add_cross_attention", False, False)
    attn_drop, embed_drop = config.rate("attn_pdrop", 0.1), config.rate("embd_pdrop", 0.1)
    resid_drop = config.rate("resid_pdrop", 0.1)

    def gathered(x: Tensor) -> Tensor:
        """All tokens of what norms and residuals have a part of."""
        return Tensor(x.name, (batch, sequence, hidden), x.grad)

    def scattered(x: Tensor) -> Tensor:
        """That part."""
        return Tensor(x.name, (batch, -(-sequence // part.sequence), hidden), x.grad)

    x = scattered(Tensor("input", (batch, sequence, hidden)))
    if part.embeds:
        tape.small("position_ids", "fill", (1, sequence), 0)
        tokens = tape.embedding("token_embedding", (batch, sequence), (vocabulary, hidden))
        places = tape.embedding("position_embedding", (1, sequence), (positions, hidden))
        x = tape.binary("embedding_add", "add", tokens, places)
        x = tape.dropout("embedding_dropout", scattered(x), embed_drop)

    with tape.section("layer", layers):
        residual = x
        qkv = tape.linear("attention.qkv", gathered(tape.norm("norm_1", x)), 3 * split)
        # Gradients of q, k and v: each copied out of its heads, then joined.
        parts = [stream("copy", (batch, sequence, split), 1, 1, 3), stream("copy", qkv.shape, 1, 1)]
        tape.views("attention.split", parts)
        query = Tensor(qkv.name, (batch, num_heads, sequence, split // num_heads))
        # Ranks that split a sequence gather its keys and values: queries of each see all of it.
        seen = Tensor(qkv.name, (batch, num_heads, sequence * part.context, split // num_heads))
        if tape.fused_attention:
            context = tape.attention(query, seen, seen, causal=True)
        else:
            masked = partial(_masked, tape, config)
            context = unfused_attention(tape, "attention.", query, seen, seen, masked, attn_drop)
        middle = _attended(tape, context, residual, resid_drop)
        x = _feed_forward(tape, gathered(tape.norm("norm_2", middle)), middle, inner, act, resid_drop)
        tape.gradient_sum("attention.gradient_sum", residual, 2)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)

    if part.predicts:
        x = tape.norm("norm", x)
        tied = part.embeds and config.flag("tie_word_embeddings", True)
        _decoder_head(tape, config, gathered(x), vocabulary, tied=tied)


def _masked(tape: Tape, config: Config, scores: Tensor) -> Tensor:
    """Scores scaled, with the causal mask."""
    if config.flag("scale_attn_weights", True):
        tape.small("attention.scale_value", "fill", (1, 1), 0)
        scores = tape.unary("attention.scale", "divu", scores)
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        scores = tape.unary("attention.layer_scale", "divu", scores)
    tape.small("attention.mask_value", "fill", (1, 1), 0)
    mask = Tensor("causal_mask", (1, 1, *scores.shape[2:]), False)
    share = tape.mask_share * mask.elements / scores.elements
    return tape.emit(
        "attention.mask",
        "where",
        [scores, mask],
        scores.shape,
        [stream("where", scores.shape, 1 + share, 1)],
        [stream("where", scores.shape, 1 + share, 1)],
        fuse="pointwise",
    )


# OPT.


def record_opt(tape: Tape, config: Config, batch: int, sequence: int) -> None:
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
    mask = _opt_mask(tape, batch, sequence)
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
        context = _opt_attention(tape, source, mask, num_heads, attn_drop, gradients, bias)
        x = _attended(tape, context, residual, drop, bias=bias)
        tape.gradient_sum("residual_gradient_sum", residual, 2)
        # OPT flattens tokens to rows before its feed-forward block.
        x = middle = x.view(batch * sequence, hidden)
        if not before:
            x = middle = tape.norm("attention.norm", x)
        if before:
            x = tape.norm("mlp.norm", x)
        x = _feed_forward(tape, x, middle, inner, act, drop, bias=bias)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)
        if not before:
            x = tape.norm("mlp.norm", x)

    x = x.view(batch, sequence, hidden)
    if last_norm:
        x = tape.norm("norm", x)
    if width != hidden:
        x = tape.linear("project_out", x, width, bias=False)
    _decoder_head(tape, config, x, vocabulary, tied=config.flag("tie_word_embeddings", True))


def _opt_attention(
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
        return tape.attention(query, key, value, causal=True)
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
        stream("where", scores.shape, 1, bits, 2),  # equal to the other operand? below it?
        stream("divu", scores.shape, 1, 1),
        stream("where", scores.shape, 2 + bits, 1),
        stream("where", scores.shape, 1 + bits, 1),
    ]
    forward = [stream("max", scores.shape, 1, 1)]
    return tape.emit("attention.max", "max", [scores], scores.shape, forward, backward, fuse="pointwise")


def _opt_mask(tape: Tape, batch: int, sequence: int) -> Tensor:
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


# BERT and RoBERTa.


def record_bert(tape: Tape, config: Config, batch: int, sequence: int) -> None:
    """Write a forward (and backward) pass on the tape.

    Args:
      tape: takes the nodes; it decides whether the model trains.
      config: of type "bert" or "roberta"; gets a note where its class has a head that is not written here.
      batch: sequences.
      sequence: tokens of a sequence.
    """
    roberta = config.values.get("model_type") == "roberta"
    hidden, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    config.head_size("hidden_size", "num_attention_heads")
    padding = config.count("pad_token_id", 1) if roberta else 0
    config.limit_sequence(sequence, "max_position_embeddings", padding + 1 if roberta else 0)
    layers, inner = config.size("num_hidden_layers"), config.size("intermediate_size")
    act = config.choice("hidden_act", "gelu", ACTIVATIONS)
    config.require("position_embedding_type", "absolute", "absolute")
    config.require("add_cross_attention", False, False)
    drop, attn_drop = config.rate("hidden_dropout_prob", 0.1), config.rate("attention_probs_dropout_prob", 0.1)

    mask = padding_mask(tape, "mask", batch, sequence)
    x = _embeddings(tape, config, batch, sequence, drop)

    with tape.section("layer", layers):
        source = x
        query, key, value = (
            heads(tape.linear(f"attention.{part}", x, hidden, backward_copies=1), num_heads)
            for part in ("query", "key", "value")
        )
        if tape.fused_attention:
            context = tape.attention(query, key, value, causal=False)
        else:

            def masked(scores: Tensor) -> Tensor:
                return tape.binary("attention.mask", "add", tape.unary("attention.scale", "divu", scores), mask)

            context = unfused_attention(tape, "attention.", query, key, value, masked, attn_drop)
        middle = tape.norm("attention.norm", _attended(tape, context, source, drop))
        x = _feed_forward(tape, middle, middle, inner, act, drop)
        x = tape.norm("mlp.norm", x)
        tape.gradient_sum("attention.gradient_sum", source, 4)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)

    config.values.settle("tie_word_embeddings")  # of the head of training alone
    _head(tape, config, x, act, drop)


def _embeddings(tape: Tape, config: Config, batch: int, sequence: int, drop: float) -> Tensor:
    hidden, ids = config.size("hidden_size"), (batch, sequence)
    roberta = config.values.get("model_type") == "roberta"
    positions = ids if roberta else (1, sequence)
    if roberta:
        for name, op in (("compare", "addu"), ("cumsum", "cumsum"), ("mask", "mul"), ("shift", "addu")):
            tape.small(f"position_ids.{name}", op, ids, 2 if op == "mul" else 1)
    words = tape.embedding("word_embedding", ids, (config.size("vocab_size"), hidden))
    kinds = tape.embedding("type_embedding", ids, (config.size("type_vocab_size", 2), hidden))
    x = tape.binary("embedding_add_type", "add", words, kinds)
    table = (config.size("max_position_embeddings"), hidden)
    places = tape.embedding("position_embedding", positions, table)
    x = tape.binary("embedding_add_position", "add", x, places)
    x = tape.norm("embedding_norm", x)
    return tape.dropout("embedding_dropout", x, drop)


def _first_token(tape: Tape, x: Tensor) -> Tensor:
    batch, _, hidden = x.shape
    tape.views("first_token", [stream("fill", x.shape, 0, 1), stream("copy", (batch, hidden), 1, 1)])
    return Tensor(x.name, (batch, hidden))


def _head(tape: Tape, config: Config, x: Tensor, act: str, drop: float) -> None:
    """The head that a class says; else in training the language model's, and in inference labels of the sequence."""
    usual = ("masked vocabulary", "vocabulary") if tape.training else ("sequence labels",)
    kind = eager_kind(config, *usual, "sequence labels", "token labels", "answer span", "none")
    if kind in ("token labels", "answer span"):
        tape.linear("classifier", tape.dropout("classifier_dropout", x, drop), outputs(config, kind))
    elif config.values.get("model_type") == "roberta":
        _roberta_head(tape, config, x, kind, drop)
    else:
        _bert_head(tape, config, x, kind, act, drop)


def _bert_head(tape: Tape, config: Config, x: Tensor, kind: str, act: str, drop: float) -> None:
    hidden = x.shape[-1]
    first = tape.linear("pooler", _first_token(tape, x), hidden)
    first = tape.unary("pooler.activation", "tanh", first)
    if kind == "sequence labels":
        tape.linear("classifier", tape.dropout("classifier_dropout", first, drop), config.labels())
    if kind in ("sequence labels", "none"):
        return
    tape.gradient_sum("head.gradient_sum", x, 2)
    y = tape.linear("predictions.transform", x, hidden)
    y = tape.norm("predictions.norm", activation(tape, "predictions.activation", y, act))
    tape.linear("predictions.decoder", y, config.size("vocab_size"), tied=config.flag("tie_word_embeddings", True))
    tape.linear("next_sentence", first, 2)


def _roberta_head(tape: Tape, config: Config, x: Tensor, kind: str, drop: float) -> None:
    hidden = x.shape[-1]
    if kind not in ("sequence labels", "none"):
        y = activation(tape, "head.activation", tape.linear("head.transform", x, hidden), "gelu")
        tied = config.flag("tie_word_embeddings", True)
        tape.linear("head.decoder", tape.norm("head.norm", y), config.size("vocab_size"), tied=tied)
        return
    first = tape.linear("classifier.dense", _first_token(tape, x), hidden)
    first = tape.unary("classifier.activation", "tanh", first)
    if kind == "sequence labels":
        tape.linear("classifier.output", first, config.labels())
