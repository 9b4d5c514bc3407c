"""GPT-2 and GPT-3: decoder-only, pre-norm, fused query-key-value projection (Hugging Face GPT2LMHeadModel)."""

from __future__ import annotations

from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.layers import (
    ACTIVATIONS,
    activation,
    heads,
    keys,
    merge_heads,
    permuted,
    write_head,
)
from neusight_jax.graph.configs.shard import Shard
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import stream


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
        super().__init__(eager.name, values, notes=eager.notes, origin=eager.origin)
        self.catalog, self.stored_bytes = eager.catalog, eager.stored_bytes
        self.eager = eager


def record(tape: Tape, config: Config, batch: int, sequence: int, shard: Shard | None = None) -> None:
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
        x = tape.norm("norm_1", x)
        qkv = tape.linear("attention.qkv", gathered(x), 3 * split)
        # Gradients of q, k and v: each copied out of its heads, then joined.
        parts = [stream("memory", "copy", (batch, sequence, split), 1, 1, 3), stream("memory", "copy", qkv.shape, 1, 1)]
        tape.views("attention.split", parts)
        query = heads(qkv.view(batch, sequence, 3 * split), 3 * num_heads)
        query = Tensor(query.name, (batch, num_heads, sequence, split // num_heads))
        seen = Tensor(query.name, (batch, num_heads, sequence * part.context, split // num_heads))
        if tape.fused_attention:
            context = tape.attention("attention.fused", query, seen, seen, causal=True)
        else:
            scores = _scores(tape, config, query, seen)
            probabilities = tape.softmax("attention.softmax", scores)
            probabilities = tape.dropout("attention.dropout", probabilities, attn_drop)
            context = tape.matmul(
                "attention.context", probabilities, seen, copies=permuted(seen), backward_copies=permuted(seen)
            )
        x = merge_heads(tape, "attention.merge", context)
        x = scattered(tape.linear("attention.output", x, hidden))
        x = tape.dropout("attention.output_dropout", x, resid_drop)
        x = middle = tape.binary("attention.residual", "add", x, residual)
        x = tape.norm("norm_2", x)
        x = tape.linear("mlp.up", gathered(x), inner)
        x = activation(tape, "mlp.activation", x, act)
        x = scattered(tape.linear("mlp.down", x, hidden))
        x = tape.dropout("mlp.dropout", x, resid_drop)
        x = tape.binary("mlp.residual", "add", x, middle)
        tape.gradient_sum("attention.gradient_sum", residual, 2)
        tape.gradient_sum("mlp.gradient_sum", middle, 2)

    if part.predicts:
        x = tape.norm("norm", x)
        tied = part.embeds and config.flag("tie_word_embeddings", True)
        write_head(tape, config, gathered(x), vocabulary, tied=tied)


def _scores(tape: Tape, config: Config, query: Tensor, seen: Tensor) -> Tensor:
    """Scores of queries and keys, scaled, with the causal mask."""
    scores = tape.matmul("attention.scores", query, keys(seen), copies=permuted(query, keys(seen)))
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
        [stream("memory", "where", scores.shape, 1 + share, 1)],
        [stream("memory", "where", scores.shape, 1 + share, 1)],
        fuse="pointwise",
    )
