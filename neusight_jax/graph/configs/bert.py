"""BERT and RoBERTa: encoder-only, post-norm.

Inference: sequence classification. Training: BERT with its pre-training heads, RoBERTa with its language-model head.
`architectures` may say otherwise: labels of a sequence or of tokens, an answer's span, or no head.
"""

from __future__ import annotations

from neusight_jax.graph.configs.classes import eager_kind
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.layers import (
    ACTIVATIONS,
    activation,
    heads,
    keys,
    merge_heads,
    outputs,
    permuted,
)
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import stream


def record(tape: Tape, config: Config, batch: int, sequence: int) -> None:
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

    mask = _mask(tape, batch, sequence)
    x = _embeddings(tape, config, batch, sequence, drop)

    with tape.section("layer", layers):
        source = x
        query, key, value = (
            heads(tape.linear(f"attention.{part}", x, hidden, backward_copies=1), num_heads)
            for part in ("query", "key", "value")
        )
        if tape.fused_attention:
            context = tape.attention("attention.fused", query, key, value, causal=False)
        else:
            context = _eager_attention(tape, query, key, value, mask, attn_drop)
        x = merge_heads(tape, "attention.merge", context)
        x = tape.linear("attention.output", x, hidden)
        x = tape.dropout("attention.output_dropout", x, drop)
        x = tape.binary("attention.residual", "add", x, source)
        x = middle = tape.norm("attention.norm", x)
        x = tape.linear("mlp.up", x, inner)
        x = activation(tape, "mlp.activation", x, act)
        x = tape.linear("mlp.down", x, hidden)
        x = tape.dropout("mlp.dropout", x, drop)
        x = tape.binary("mlp.residual", "add", x, middle)
        x = tape.norm("mlp.norm", x)
        tape.gradient_sum("attention.gradient_sum", source, 4)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)

    config.values.settle("tie_word_embeddings")  # of the head of training alone
    if roberta:
        _roberta_head(tape, config, x, act, drop)
    else:
        _bert_head(tape, config, x, act, drop)


def _eager_attention(tape: Tape, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: float) -> Tensor:
    scores = tape.matmul("attention.scores", query, keys(key), copies=permuted(query, keys(key)))
    scores = tape.unary("attention.scale", "divu", scores)
    scores = tape.binary("attention.mask", "add", scores, mask)
    probabilities = tape.softmax("attention.softmax", scores)
    probabilities = tape.dropout("attention.dropout", probabilities, drop)
    return tape.matmul(
        "attention.context", probabilities, value, copies=permuted(value), backward_copies=permuted(value)
    )


def _mask(tape: Tape, batch: int, sequence: int) -> Tensor:
    ids = (batch, 1, 1, sequence)
    tape.small("ones", "fill", (batch, sequence), 0)
    tape.small("mask.subtract", "addu", ids)
    tape.small("mask.scale", "mulu", ids)
    return Tensor("attention_mask", ids, False)


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


def _first_token(tape: Tape, name: str, x: Tensor) -> Tensor:
    batch, _, hidden = x.shape
    backward = [stream("memory", "fill", x.shape, 0, 1), stream("memory", "copy", (batch, hidden), 1, 1)]
    tape.views(name, backward)
    return Tensor(x.name, (batch, hidden))


def _kind(tape: Tape, config: Config) -> str:
    """The kind of head: in training the language model's, and else labels of the sequence, unless a class says it."""
    usual = ("masked vocabulary", "vocabulary") if tape.training else ("sequence labels",)
    return eager_kind(config, *usual, "sequence labels", "token labels", "answer span", "none")


def _token_outputs(tape: Tape, config: Config, x: Tensor, kind: str, drop: float) -> bool:
    """Write the head of a class that scores tokens; whether it is one."""
    if kind not in ("token labels", "answer span"):
        return False
    tape.linear("classifier", tape.dropout("classifier_dropout", x, drop), outputs(config, kind))
    return True


def _bert_head(tape: Tape, config: Config, x: Tensor, act: str, drop: float) -> None:
    hidden, kind = x.shape[-1], _kind(tape, config)
    if _token_outputs(tape, config, x, kind, drop):
        return
    first = tape.linear("pooler", _first_token(tape, "first_token", x), hidden)
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


def _roberta_head(tape: Tape, config: Config, x: Tensor, act: str, drop: float) -> None:
    hidden, kind = x.shape[-1], _kind(tape, config)
    if _token_outputs(tape, config, x, kind, drop):
        return
    if kind not in ("sequence labels", "none"):
        y = activation(tape, "head.activation", tape.linear("head.transform", x, hidden), "gelu")
        tied = config.flag("tie_word_embeddings", True)
        tape.linear("head.decoder", tape.norm("head.norm", y), config.size("vocab_size"), tied=tied)
        return
    first = tape.linear("classifier.dense", _first_token(tape, "first_token", x), hidden)
    first = tape.unary("classifier.activation", "tanh", first)
    if kind == "sequence labels":
        tape.linear("classifier.output", first, config.labels())
