"""Switch Transformer: encoder-decoder of T5 shape with one expert per token in every n-th block.

RMS norms are unrolled and experts run one after the other, each on a fixed `batch · capacity` rows, as the eager
model does. Routing is taken as balanced: an expert receives tokens / experts of them, at most its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neusight_jax.graph.configs.classes import eager_kind
from neusight_jax.graph.configs.config import MOST_LAYERS, Config
from neusight_jax.graph.configs.eager_models import heads, merge_heads, padding_mask, unfused_attention
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import stream


@dataclass(frozen=True)
class _Sizes:
    batch: int
    sequence: int
    hidden: int
    inner: int
    heads: int
    head_size: int
    experts: int
    capacity: int
    buckets: int
    vocabulary: int
    drop: float
    jitter: float
    act: str

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def square(self) -> tuple[int, int]:
        return (self.sequence, self.sequence)


def record(tape: Tape, config: Config, batch: int, sequence: int) -> None:
    """Write a forward (and backward) pass on the tape; encoder and decoder both read the sequence.

    Args:
      tape: takes the nodes; it decides whether the model trains.
      config: of type "switch_transformers"; gets a note where its class has a head that is not written here.
      batch: sequences.
      sequence: tokens of a sequence, on either side.
    """
    config.require("is_gated_act", False, False)
    eager_kind(config, "vocabulary")
    sizes = _Sizes(
        batch=batch,
        sequence=sequence,
        hidden=config.size("d_model"),
        inner=config.size("d_ff"),
        heads=config.size("num_heads"),
        head_size=config.size("d_kv", 64),
        experts=config.size("num_experts", 8),
        capacity=config.size("expert_capacity", 64),
        buckets=config.size("relative_attention_num_buckets", 32),
        vocabulary=config.size("vocab_size"),
        drop=config.rate("dropout_rate", 0.1),
        jitter=config.rate("router_jitter_noise", 0.01),
        act=config.choice("dense_act_fn", "relu", ("relu", "gelu")),
    )
    layers = config.size("num_layers", most=MOST_LAYERS)
    decoder_layers = config.size("num_decoder_layers", layers, MOST_LAYERS)
    sparse = _sparse_blocks(config, layers, "encoder")
    decoder_sparse = _sparse_blocks(config, decoder_layers, "decoder")

    with tape.section("encoder"):
        x = _embed(tape, sizes)
        mask = padding_mask(tape, "mask", batch, sequence)
    memory = _stack(tape, sizes, "encoder", x, mask, None, layers, sparse)
    if tape.training:
        # Keys and values of every decoder block hand a gradient back to the encoder.
        tape.gradient_sum("encoder_output_gradient_sum", memory, 2 * decoder_layers)

    with tape.section("decoder"):
        x = _embed(tape, sizes, tied=True)
        mask = _causal_mask(tape, sizes)
        padding_mask(tape, "cross_mask", batch, sequence)
    x = _stack(tape, sizes, "decoder", x, mask, memory, decoder_layers, decoder_sparse)
    x = tape.unary("head_scale", "mulu", x)
    tape.linear("head", x, sizes.vocabulary, bias=False, tied=config.flag("tie_word_embeddings", True))
    for side, blocks in (("encoder", sparse), ("decoder", decoder_sparse)):
        if blocks:
            with tape.section(f"{side}.router_loss"):
                _router_loss(tape, sizes, blocks)


def _sparse_blocks(config: Config, layers: int, side: str) -> int:
    wanted = config.count(f"num_sparse_{side}_layers", 3)
    step = layers // wanted if wanted else 0
    step = config.count(f"{side}_sparse_step", step)
    return sum(1 for block in range(layers) if step and (block % step == 1 or step == 1))


def _embed(tape: Tape, s: _Sizes, *, tied: bool = False) -> Tensor:
    table = (s.vocabulary, s.hidden)
    x = tape.embedding("token_embedding", (s.batch, s.sequence), table, tied=tied)
    return tape.dropout("embedding_dropout", x, s.drop)


def _causal_mask(tape: Tape, s: _Sizes) -> Tensor:
    n, full = s.sequence, (s.batch, 1, *s.square)
    tape.small("mask.arange", "fill", (1, n), 0)
    tape.small("mask.repeat", "copy", (s.batch, *s.square))
    tape.small("mask.compare", "where", (s.batch, *s.square), 1, tape.mask_share)
    tape.small("mask.float", "copy", (s.batch, *s.square), tape.mask_share, 1)
    tape.small("mask.join", "mul", full, 1 + 1 / n)
    tape.small("mask.subtract", "addu", full)
    tape.small("mask.scale", "mulu", full)
    return Tensor("mask", full, False)


def _stack(
    tape: Tape, s: _Sizes, side: str, x: Tensor, mask: Tensor, memory: Tensor | None, layers: int, sparse: int
) -> Tensor:
    with tape.section(f"{side}.bias"):
        bias = _position_bias(tape, s, mask, two_sided=memory is None)
        tape.gradient_sum("gradient_sum", bias, layers)
    with tape.section(f"{side}.attention", layers):
        x = _attention(tape, s, x, None, bias)
    if memory is not None:
        with tape.section(f"{side}.cross_bias"):
            square = (1, s.heads, *s.square)
            tape.small("zeros", "fill", square, 0)
            zeros, wide = Tensor("zeros", square, False), Tensor("mask", (s.batch, 1, 1, s.sequence), False)
            cross = _masked_bias(tape, s, zeros, wide)
        with tape.section(f"{side}.cross_attention", layers):
            x = _attention(tape, s, x, memory, cross)
    if layers > sparse:
        with tape.section(f"{side}.mlp", layers - sparse):
            y = _feed_forward(tape, s, _rms_norm(tape, "norm", x), "mlp")
            x = _residual(tape, s, "mlp", y, x)
    if sparse:
        x = _experts(tape, s, side, x, sparse)
    with tape.section(side):
        x = _rms_norm(tape, "norm", x)
        return tape.dropout("output_dropout", x, s.drop)


def _rms_norm(tape: Tape, name: str, x: Tensor) -> Tensor:
    mean = tape.mean(f"{name}.mean", tape.unary(f"{name}.square", "powu", x), (*x.shape[:-1], 1), fuse="norm")
    root = tape.unary(f"{name}.rsqrt", "powu", tape.unary(f"{name}.epsilon", "addu", mean))
    out = tape.binary(f"{name}.normalize", "mul", x, root)
    tape.gradient_sum(f"{name}.gradient_sum", x, 2)
    return tape.scale(f"{name}.scale", out, f"{name}.weight")


def _position_bias(tape: Tape, s: _Sizes, mask: Tensor, *, two_sided: bool) -> Tensor:
    n, square = s.sequence, s.square
    tape.small("query_positions", "fill", (1, n), 0)
    tape.small("key_positions", "fill", (1, n), 0)
    bits = tape.mask_share
    before = [
        ("sign", "addu", 1, bits),
        ("sign_integer", "copy", bits, 1),
        ("sign_bucket", "mulu"),
        ("sign_add", "addu"),
    ]
    # Integer kernels of the bucket computation over the table of pairs: operator, passes read and written if not one.
    kernels: list[tuple[Any, ...]] = [
        ("relative", "add", 2 / n),
        *(before if two_sided else [("zeros", "fill", 0), ("minimum", "add", 2)]),
        ("absolute", "addu"),
        ("small", "addu", 1, bits),
        ("float", "copy"),
        ("divide", "divu"),
        ("log", "powu"),
        ("log_divide", "divu"),
        ("log_scale", "mulu"),
        ("integer", "copy"),
        ("exact_add", "addu"),
        ("limit", "fill", 0),
        ("clamp", "add", 2),
        ("select", "where", 2 + bits),
        ("sum", "add", 2) if two_sided else ("sum", "addu"),
    ]
    for name, op, *passes in kernels:
        tape.small(f"bucket.{name}", op, square, *passes)
    bias = tape.embedding("relative_bias", square, (s.buckets, s.heads))
    return _masked_bias(tape, s, bias.view(1, s.heads, *square), mask)


def _masked_bias(tape: Tape, s: _Sizes, bias: Tensor, mask: Tensor) -> Tensor:
    shape = (s.batch, s.heads, *s.square)
    reads = (bias.elements + mask.elements) / (s.batch * bias.elements)
    backward = [stream("memory", "reduce", shape, 1, 1 / s.batch)] if bias.grad and s.batch > 1 else []
    kernel = stream("elementwise", "add", shape, reads, 1)
    return tape.emit("mask", "add", [bias, mask], shape, [kernel], backward, fuse="pointwise", grad=bias.grad)


def _attention(tape: Tape, s: _Sizes, x: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
    y = _rms_norm(tape, "norm", x)
    source = y if memory is None else memory
    query, key, value = (
        heads(tape.linear(name, part, s.width, bias=False, backward_copies=1), s.heads)
        for name, part in (("query", y), ("key", source), ("value", source))
    )
    if memory is None:
        tape.gradient_sum("norm_gradient_sum", y, 3)

    def biased(scores: Tensor) -> Tensor:
        """Scores with their bias, which is looked up by pair of positions and permuted, so that heads lie innermost;
        that of attention to the encoder is made of zeros."""
        if memory is None:
            return tape.add_permuted("bias", scores, bias)
        return tape.binary("bias", "add", scores, bias)

    context = unfused_attention(tape, "", query, key, value, biased, s.drop)
    y = tape.linear("output", merge_heads(tape, "merge", context), s.hidden, bias=False)
    return _residual(tape, s, "output", y, x)


def _residual(tape: Tape, s: _Sizes, name: str, y: Tensor, x: Tensor) -> Tensor:
    y = tape.dropout(f"{name}_dropout", y, s.drop)
    tape.gradient_sum(f"{name}_gradient_sum", x, 2)
    return tape.binary(f"{name}_residual", "add", x, y)


def _feed_forward(tape: Tape, s: _Sizes, x: Tensor, name: str) -> Tensor:
    y = tape.linear(f"{name}.up", x, s.inner, bias=False)
    y = tape.unary(f"{name}.activation", s.act, y)
    y = tape.dropout(f"{name}.dropout", y, s.drop)
    return tape.linear(f"{name}.down", y, s.hidden, bias=False)


def _experts(tape: Tape, s: _Sizes, side: str, x: Tensor, blocks: int) -> Tensor:
    tokens, scores = (s.batch, s.sequence), (s.batch, s.sequence, s.experts)
    rows = s.batch * s.capacity
    taken = max(1, min(rows, -(-s.batch * s.sequence // s.experts)))
    with tape.section(f"{side}.router", blocks):
        y = _rms_norm(tape, "norm", x)
        routed = y
        if tape.training and s.jitter > 0:
            tape.small("noise", "fill", y.shape, 0)
            routed = tape.binary("jitter", "mul", y, Tensor("noise", y.shape, False))
        logits = tape.linear("classifier", routed, s.experts, bias=False)
        probabilities = tape.softmax("softmax", logits)
        tape.small("argmax", "reduce", scores, 1, 1 / s.experts)
        tape.small("one_hot_zeros", "fill", scores, 0)
        tape.small("one_hot", "scatter", tokens, 1, 1)
        tape.small("cumsum", "cumsum", scores)
        tape.small("capacity", "where", scores, 1, tape.mask_share)
        kept = Tensor("one_hot", scores, False)
        tape.small("kept", "mul", scores, 1 + tape.mask_share, 1)
        share = 1 / s.experts
        top = tape.emit(
            "probability",
            "max_rows",
            [probabilities],
            (*tokens, 1),
            [stream("memory", "reduce", scores, 1, share)],
            [stream("memory", "fill", scores, 0, 1), stream("memory", "scatter", tokens, 1, 1)],
        )
        tape.small("expert_index", "reduce", kept.shape, 1, share)
        copied = tape.copy("states", y)
        tape.small("expert_rows", "fill", (rows, s.hidden), 0)
        tape.gradient_sum("norm_gradient_sum", y, 2 + s.experts)
    with tape.section(f"{side}.expert", blocks * s.experts):
        _expert(tape, s, y, rows, taken)
    with tape.section(f"{side}.combine", blocks):
        y = tape.binary("weight", "mul", top, copied)
        return _residual(tape, s, "output", y, x)


def _expert(tape: Tape, s: _Sizes, states: Tensor, rows: int, taken: int) -> None:
    tokens, buffer, part = (s.batch, s.sequence), (rows, s.hidden), (taken, s.hidden)
    tape.small("mask.bool", "where", tokens, 1, tape.mask_share)
    tape.small("count", "reduce", tokens, tape.mask_share, 0)
    tape.small("positions", "cumsum", tokens, tape.mask_share, tape.index_share)
    index = tape.index_share / s.hidden
    tape.emit(
        "gather",
        "gather",
        [states],
        part,
        [stream("memory", "gather", part, 1 + index, 1)],
        [stream("memory", "fill", states.shape, 0, 1), stream("memory", "scatter", part, 2 + index, 1)],
    )
    filled = tape.emit(
        "pack",
        "scatter",
        [],
        buffer,
        [stream("memory", "copy", part, 1, 1)],
        [stream("memory", "copy", part, 1, 1)],
    )
    out = _feed_forward(tape, s, filled, "mlp")
    tape.views("unpack", [stream("memory", "fill", buffer, 0, 1), stream("memory", "copy", part, 1, 1)])
    tape.emit(
        "scatter",
        "scatter",
        [out],
        states.shape,
        [stream("memory", "scatter", part, 1 + index, 1)],
        [stream("memory", "copy", states.shape, 1, 1), stream("memory", "gather", part, 1 + index, 1)],
    )


def _router_loss(tape: Tape, s: _Sizes, blocks: int) -> None:
    """z-loss and load-balancing loss over the logits of all sparse blocks."""
    count = blocks * s.sequence
    logits, rows, mean = (s.batch, count, s.experts), (s.batch, count), (s.batch, s.experts)
    x = Tensor("logits", logits)
    tape.small("logits", "copy", logits)
    tape.small("indices", "copy", rows)
    z = Tensor("logsumexp", rows)
    tape.small("logsumexp", "reduce", logits, 3, 1 + 1 / s.experts)
    tape.unary("square", "powu", z)
    tape.small("square_sum", "reduce", rows, 1, 0)
    p = tape.softmax("softmax", x)
    tape.small("one_hot_zeros", "fill", logits, 0)
    tape.small("one_hot", "scatter", rows, 1, 1)
    tape.small("one_hot_max", "reduce", logits)
    tokens = tape.mean("tokens_mean", Tensor("one_hot", logits, False), mean)
    product = tape.binary("product", "mul", tokens, tape.mean("probabilities_mean", p, mean))
    tape.mean("product_mean", product, (1,))
