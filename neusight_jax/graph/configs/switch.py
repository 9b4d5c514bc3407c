"""Switch Transformer: encoder-decoder of T5 shape with one expert per token in every n-th block.

RMS norms are unrolled and experts run one after the other, each on a fixed `batch · capacity` rows, as the eager
model does. Routing is taken as balanced: an expert receives tokens / experts of them, at most its rows.
"""

from __future__ import annotations

from typing import Any

from neusight_jax.graph.configs.classes import eager_kind
from neusight_jax.graph.configs.config import MOST_LAYERS, Config
from neusight_jax.graph.configs.eager_models import heads, merge_heads, padding_mask, unfused_attention
from neusight_jax.graph.configs.tape import Tape, Tensor
from neusight_jax.graph.kernel import stream


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
    model = _Switch(tape, config, batch, sequence)
    layers = config.size("num_layers", most=MOST_LAYERS)
    decoder_layers = config.size("num_decoder_layers", layers, MOST_LAYERS)
    sparse = _sparse_blocks(config, layers, "encoder")
    decoder_sparse = _sparse_blocks(config, decoder_layers, "decoder")

    with tape.section("encoder"):
        x = model.embed()
        mask = padding_mask(tape, "mask", batch, sequence)
    memory = model.stack("encoder", x, mask, None, layers, sparse)
    if tape.training:
        # Keys and values of every decoder block hand a gradient back to the encoder.
        tape.gradient_sum("encoder_output_gradient_sum", memory, 2 * decoder_layers)

    with tape.section("decoder"):
        x = model.embed(tied=True)
        mask = model.causal_mask()
        padding_mask(tape, "cross_mask", batch, sequence)
    x = model.stack("decoder", x, mask, memory, decoder_layers, decoder_sparse)
    x = tape.unary("head_scale", "mulu", x)
    tape.linear("head", x, model.vocabulary, bias=False, tied=config.flag("tie_word_embeddings", True))
    for side, blocks in (("encoder", sparse), ("decoder", decoder_sparse)):
        if blocks:
            with tape.section(f"{side}.router_loss"):
                model.router_loss(blocks)


def _sparse_blocks(config: Config, layers: int, side: str) -> int:
    wanted = config.count(f"num_sparse_{side}_layers", 3)
    step = layers // wanted if wanted else 0
    step = config.count(f"{side}_sparse_step", step)
    return sum(1 for block in range(layers) if step and (block % step == 1 or step == 1))


class _Switch:
    """Writes the parts of a model on a tape; a wrong size in its config stops it before the first."""

    def __init__(self, tape: Tape, config: Config, batch: int, sequence: int) -> None:
        self.tape, self.batch, self.sequence, self.square = tape, batch, sequence, (sequence, sequence)
        self.hidden = config.size("d_model")
        self.inner = config.size("d_ff")
        self.heads = config.size("num_heads")
        self.width = self.heads * config.size("d_kv", 64)
        self.experts = config.size("num_experts", 8)
        self.capacity = config.size("expert_capacity", 64)
        self.buckets = config.size("relative_attention_num_buckets", 32)
        self.vocabulary = config.size("vocab_size")
        self.drop = config.rate("dropout_rate", 0.1)
        self.jitter = config.rate("router_jitter_noise", 0.01)
        self.act = config.choice("dense_act_fn", "relu", ("relu", "gelu"))

    def embed(self, *, tied: bool = False) -> Tensor:
        table = (self.vocabulary, self.hidden)
        x = self.tape.embedding("token_embedding", (self.batch, self.sequence), table, tied=tied)
        return self.tape.dropout("embedding_dropout", x, self.drop)

    def causal_mask(self) -> Tensor:
        n, full = self.sequence, (self.batch, 1, *self.square)
        self.tape.small("mask.arange", "fill", (1, n), 0)
        self.tape.small("mask.repeat", "copy", (self.batch, *self.square))
        self.tape.small("mask.compare", "where", (self.batch, *self.square), 1, self.tape.mask_share)
        self.tape.small("mask.float", "copy", (self.batch, *self.square), self.tape.mask_share, 1)
        self.tape.small("mask.join", "mul", full, 1 + 1 / n)
        self.tape.small("mask.subtract", "addu", full)
        self.tape.small("mask.scale", "mulu", full)
        return Tensor("mask", full, False)

    def stack(self, side: str, x: Tensor, mask: Tensor, memory: Tensor | None, layers: int, sparse: int) -> Tensor:
        """Write the blocks of one side; returns their normed output.

        Args:
          side: "encoder" or "decoder", the start of the names.
          x: embedded tokens [batch, sequence, width].
          mask: of attention.
          memory: output of the encoder, of the decoder alone.
          layers: blocks.
          sparse: those of them with experts.
        """
        with self.tape.section(f"{side}.bias"):
            bias = self._position_bias(mask, two_sided=memory is None)
            self.tape.gradient_sum("gradient_sum", bias, layers)
        with self.tape.section(f"{side}.attention", layers):
            x = self._attention(x, None, bias)
        if memory is not None:
            with self.tape.section(f"{side}.cross_bias"):
                square = (1, self.heads, *self.square)
                self.tape.small("zeros", "fill", square, 0)
                zeros, wide = Tensor("zeros", square, False), Tensor("mask", (self.batch, 1, 1, self.sequence), False)
                cross = self._masked_bias(zeros, wide)
            with self.tape.section(f"{side}.cross_attention", layers):
                x = self._attention(x, memory, cross)
        if layers > sparse:
            with self.tape.section(f"{side}.mlp", layers - sparse):
                y = self._feed_forward(self._rms_norm(x), "mlp")
                x = self._residual("mlp", y, x)
        if sparse:
            x = self._experts(side, x, sparse)
        with self.tape.section(side):
            x = self._rms_norm(x)
            return self.tape.dropout("output_dropout", x, self.drop)

    def _rms_norm(self, x: Tensor) -> Tensor:
        mean = self.tape.mean("norm.mean", self.tape.unary("norm.square", "powu", x), (*x.shape[:-1], 1), fuse="norm")
        root = self.tape.unary("norm.rsqrt", "powu", self.tape.unary("norm.epsilon", "addu", mean))
        out = self.tape.binary("norm.normalize", "mul", x, root)
        self.tape.gradient_sum("norm.gradient_sum", x, 2)
        return self.tape.scale("norm.scale", out, "norm.weight")

    def _position_bias(self, mask: Tensor, *, two_sided: bool) -> Tensor:
        n, square = self.sequence, self.square
        self.tape.small("query_positions", "fill", (1, n), 0)
        self.tape.small("key_positions", "fill", (1, n), 0)
        bits = self.tape.mask_share
        before = [
            ("sign", "addu", 1, bits),
            ("sign_integer", "copy", bits, 1),
            ("sign_bucket", "mulu"),
            ("sign_add", "addu"),
        ]
        # Integer kernels of the buckets over the table of pairs: operator, passes read and written if not one.
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
            self.tape.small(f"bucket.{name}", op, square, *passes)
        bias = self.tape.embedding("relative_bias", square, (self.buckets, self.heads))
        return self._masked_bias(bias.view(1, self.heads, *square), mask)

    def _masked_bias(self, bias: Tensor, mask: Tensor) -> Tensor:
        shape = (self.batch, self.heads, *self.square)
        reads = (bias.elements + mask.elements) / (self.batch * bias.elements)
        backward = [stream("reduce", shape, 1, 1 / self.batch)] if bias.grad and self.batch > 1 else []
        kernel = stream("add", shape, reads, 1)
        return self.tape.emit("mask", "add", [bias, mask], shape, [kernel], backward, fuse="pointwise", grad=bias.grad)

    def _attention(self, x: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
        y = self._rms_norm(x)
        source = y if memory is None else memory
        query, key, value = (
            heads(self.tape.linear(name, part, self.width, bias=False, backward_copies=1), self.heads)
            for name, part in (("query", y), ("key", source), ("value", source))
        )
        if memory is None:
            self.tape.gradient_sum("norm_gradient_sum", y, 3)

        def biased(scores: Tensor) -> Tensor:
            """Scores with their bias: looked up by pair of positions and permuted, so that heads lie innermost; of
            attention to the encoder made of zeros."""
            if memory is None:
                return self.tape.add_permuted(scores, bias)
            return self.tape.binary("bias", "add", scores, bias)

        context = unfused_attention(self.tape, "", query, key, value, biased, self.drop)
        y = self.tape.linear("output", merge_heads(self.tape, "merge", context), self.hidden, bias=False)
        return self._residual("output", y, x)

    def _residual(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        y = self.tape.dropout(f"{name}_dropout", y, self.drop)
        self.tape.gradient_sum(f"{name}_gradient_sum", x, 2)
        return self.tape.binary(f"{name}_residual", "add", x, y)

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        y = self.tape.linear(f"{name}.up", x, self.inner, bias=False)
        y = self.tape.unary(f"{name}.activation", self.act, y)
        y = self.tape.dropout(f"{name}.dropout", y, self.drop)
        return self.tape.linear(f"{name}.down", y, self.hidden, bias=False)

    def _experts(self, side: str, x: Tensor, blocks: int) -> Tensor:
        tokens, scores = (self.batch, self.sequence), (self.batch, self.sequence, self.experts)
        rows = self.batch * self.capacity
        # Experts run on buffers as large as their capacity, full or not; only tokens there are get copied.
        taken = max(1, min(rows, -(-self.batch * self.sequence // self.experts)))
        with self.tape.section(f"{side}.router", blocks):
            y = self._rms_norm(x)
            routed = y
            if self.tape.training and self.jitter > 0:
                self.tape.small("noise", "fill", y.shape, 0)
                routed = self.tape.binary("jitter", "mul", y, Tensor("noise", y.shape, False))
            logits = self.tape.linear("classifier", routed, self.experts, bias=False)
            probabilities = self.tape.softmax("softmax", logits)
            self.tape.small("argmax", "reduce", scores, 1, 1 / self.experts)
            self.tape.small("one_hot_zeros", "fill", scores, 0)
            self.tape.small("one_hot", "scatter", tokens, 1, 1)
            self.tape.small("cumsum", "cumsum", scores)
            self.tape.small("capacity", "where", scores, 1, self.tape.mask_share)
            kept = Tensor("one_hot", scores, False)
            self.tape.small("kept", "mul", scores, 1 + self.tape.mask_share, 1)
            share = 1 / self.experts
            top = self.tape.emit(
                "probability",
                "max_rows",
                [probabilities],
                (*tokens, 1),
                [stream("reduce", scores, 1, share)],
                [stream("fill", scores, 0, 1), stream("scatter", tokens, 1, 1)],
            )
            self.tape.small("expert_index", "reduce", kept.shape, 1, share)
            copied = self.tape.copy("states", y)
            self.tape.small("expert_rows", "fill", (rows, self.hidden), 0)
            self.tape.gradient_sum("norm_gradient_sum", y, 2 + self.experts)
        with self.tape.section(f"{side}.expert", blocks * self.experts):
            self._expert(y, rows, taken)
        with self.tape.section(f"{side}.combine", blocks):
            y = self.tape.binary("weight", "mul", top, copied)
            return self._residual("output", y, x)

    def _expert(self, states: Tensor, rows: int, taken: int) -> None:
        tokens, buffer, part = (self.batch, self.sequence), (rows, self.hidden), (taken, self.hidden)
        self.tape.small("mask.bool", "where", tokens, 1, self.tape.mask_share)
        self.tape.small("count", "reduce", tokens, self.tape.mask_share, 0)
        self.tape.small("positions", "cumsum", tokens, self.tape.mask_share, self.tape.index_share)
        index = self.tape.index_share / self.hidden
        self.tape.emit(
            "gather",
            "gather",
            [states],
            part,
            [stream("gather", part, 1 + index, 1)],
            [stream("fill", states.shape, 0, 1), stream("scatter", part, 2 + index, 1)],
        )
        filled = self.tape.emit(
            "pack",
            "scatter",
            [],
            buffer,
            [stream("copy", part, 1, 1)],
            [stream("copy", part, 1, 1)],
        )
        out = self._feed_forward(filled, "mlp")
        self.tape.views("unpack", [stream("fill", buffer, 0, 1), stream("copy", part, 1, 1)])
        self.tape.emit(
            "scatter",
            "scatter",
            [out],
            states.shape,
            [stream("scatter", part, 1 + index, 1)],
            [stream("copy", states.shape, 1, 1), stream("gather", part, 1 + index, 1)],
        )

    def router_loss(self, blocks: int) -> None:
        """z-loss and load-balancing loss over the logits of all sparse blocks."""
        count = blocks * self.sequence
        logits, rows, mean = (self.batch, count, self.experts), (self.batch, count), (self.batch, self.experts)
        x = Tensor("logits", logits)
        self.tape.small("logits", "copy", logits)
        self.tape.small("indices", "copy", rows)
        z = Tensor("logsumexp", rows)
        self.tape.small("logsumexp", "reduce", logits, 3, 1 + 1 / self.experts)
        self.tape.unary("square", "powu", z)
        self.tape.small("square_sum", "reduce", rows, 1, 0)
        p = self.tape.softmax("softmax", x)
        self.tape.small("one_hot_zeros", "fill", logits, 0)
        self.tape.small("one_hot", "scatter", rows, 1, 1)
        self.tape.small("one_hot_max", "reduce", logits)
        tokens = self.tape.mean("tokens_mean", Tensor("one_hot", logits, False), mean)
        product = self.tape.binary("product", "mul", tokens, self.tape.mean("probabilities_mean", p, mean))
        self.tape.mean("product_mean", product, (1,))
