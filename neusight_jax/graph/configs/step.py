"""Step: writes down one step of a transformer as a serving or training framework runs it, with fused kernels.

Norms take the residual sum with them, attention is one kernel, the gate of a feed-forward block another. Matrix
products have a dtype of their own, everything between them that of the activations. Weights may be stored narrower than
their products run: all of them alike (`Precision.weights`), or module by module (`quantization`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.errors import InputError
from neusight_jax.graph.configs.adapters import Lora, adapter_kernels
from neusight_jax.graph.configs.requests import Requests
from neusight_jax.graph.configs.shard import Shard
from neusight_jax.graph.graph import RUNTIME_BYTES, Footprint, Operand, Writer
from neusight_jax.graph.kernel import FLASH, attention_kernels, fused_attention, matrix_product, rowwise
from neusight_jax.graph.memory import saved_of
from neusight_jax.graph.quantization.quantization import Quantization
from neusight_jax.graph.quantization.scheme import Ledger, Scheme, Stored, stored_as
from neusight_jax.kernels.family import is_traced, largest, number
from neusight_jax.kernels.table import Kernel

NARROW: tuple[str, ...] = tuple(name for name in DTYPES if dtype_bytes(name) < 2.0)
"""Dtypes of products only: activations beside them are bf16."""
EIGHT_BITS: tuple[str, ...] = tuple(name for name in DTYPES if dtype_bytes(name) == 1.0)
"""Those whose measured products do not hold the quantization of their activations."""
UNFUSED: tuple[str, ...] = ("attention.output",)
"""Products whose activations come from attention, which engines quantize in a kernel of its own. The kernels before all
others, norms and activations, quantize on the way with scales that are given or one for a row (vLLM, `fuse_norm_quant`
and `fuse_act_quant`), not with one for a block."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a step: its products, weights as stored where the model has no quantization, activations, KV cache."""

    products: str
    weights: str
    activations: str
    kv_cache: str


def precision(
    dtype: str, weight_dtype: str | None = None, kv_dtype: str | None = None, quantization: Quantization | None = None
) -> Precision:
    """Dtypes of a step; what is left out follows from the dtype of the arithmetic.

    Activations are bf16 beside eight- and four-bit products. A quantized model says the rest itself: its KV cache where
    it does, and weights by module; what it leaves alone is as wide as the activations.

    Args:
      dtype: of the arithmetic of matrix products, one of `arithmetic.DTYPES`.
      weight_dtype: what all weights are stored in, one of `scheme.WEIGHT_DTYPES`; None = `dtype`. Narrower weights are
        widened to `dtype` in the products (weight-only); those as wide or wider are multiplied in their own. Not read
        beside a quantization.
      kv_dtype: of the KV cache; None = as the quantization says, else fp8 for an fp8 or fp4 model and that of the
        activations for all others.
      quantization: of the model, module by module; None = all weights are stored alike.
    """
    activations = "bf16" if dtype in NARROW else dtype
    quantized_cache = None if quantization is None else quantization.read.kv_cache
    cache = kv_dtype or quantized_cache or ("fp8" if dtype in ("fp8", "fp4") else activations)
    if quantization is not None:
        return Precision(dtype, activations, activations, cache)
    weights = weight_dtype or dtype
    narrower = stored_as(weights).bits < 8.0 * dtype_bytes(dtype) or weights not in DTYPES
    return Precision(dtype if narrower else weights, weights, activations, cache)


class Step(Writer):
    """Nodes of one step, in order.

    Attributes:
      requests, precision, mode, quantization: the workload.
      training: whether backward kernels are written.
      serving: whether the KV cache is kept after the step, and of the logits those of each request's last token only.
      parameters, parameter_bytes: of the weights; expert_parameters: of routed experts; cache_bytes: of the KV cache;
        context_bytes: of one more token of every request, where it keeps them all.
      lora: adapters that alone are trained, None = all weights are; adapted: names of products that could have one;
        adapters: elements of those there are.
      expert_skew: of the popularity of experts, as of `grouped_gemm.expert_dims`.
      attention_ranks: of an engine's replica that hold requests of their own and share the experts (data-parallel
        attention); the requests are those of one.
      norms_in_sums: whether residual norms are part of the kernel that sums over tensor-parallel ranks before them.
      ledger: how weights are stored, for the notes.
      shard: of a job, what one rank has of the step, and with it what else a training framework runs: the loss, tokens
        sorted by expert, casts to eight and four bits. None = the plain step.
    """

    def __init__(
        self,
        requests: Requests,
        precision: Precision,
        mode: str = "inference",
        quantization: Quantization | None = None,
        shard: Shard | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__(mode == "training")
        self.shard, self.lora = shard, lora
        self.requests, self.precision, self.mode = requests, precision, mode
        self.serving = mode in ("prefill", "decode")
        self.quantization = quantization
        self.parameters = self.parameter_bytes = self.cache_bytes = self.expert_parameters = 0.0
        self.context_bytes = 0.0
        self.adapters, self.adapted = 0.0, list[str]()
        self.norms_in_sums, self.expert_skew, self.attention_ranks = False, 0.0, 1
        self.ledger = Ledger()
        if lora is not None and not self.training:
            raise InputError(f"adapters (lora) are trained, but mode is {mode}; expected mode training")
        if self.training and lora is None and (quantization is not None or self._narrow):
            stored = f"{precision.weights} weights" if quantization is None else f"weights in {quantization.method}"
            raise InputError(
                f"{stored} are not trained; expected weight_dtype (--weight-dtype) bf16, say, for the model before "
                "quantization, adapters beside them (lora, --lora-rank), or a forward pass"
            )

    @property
    def trained(self) -> float:
        """Elements of what is trained."""
        return self.adapters if self.lora else self.parameters

    @property
    def gathered(self) -> float:
        """Tokens that meet a rank's experts over those of the rank."""
        return float(self.attention_ranks) if self.shard is None else self.shard.gathered

    def weight_notes(self, weight_dtype: str | None, quantized: bool) -> tuple[str, ...]:
        """Notes on how weights are stored, where a config says so or they are narrower than their products.

        Args:
          weight_dtype: the dtype asked for, if any; quantized: whether the config has a quantization.
        """
        if self.quantization is not None:
            method = self.quantization.method
            blind = [node for node in self.ledger.nodes if self.quantization.blind(node)]
            guessed = (f"{method} goes by module names; those of {', '.join(blind)} are guessed",) if blind else ()
            return (self.ledger.sentence(method, self.precision.activations), *guessed)
        if weight_dtype is None or not (quantized or self._narrow):
            return ()
        means = "as asked for, in place of the config's quantization" if quantized else "as asked for"
        return (self.ledger.sentence(means, self.precision.activations),)

    @property
    def _narrow(self) -> bool:
        """Whether all weights are stored narrower than their products run."""
        return stored_as(self.precision.weights).bits < 8.0 * dtype_bytes(self.precision.products)

    @property
    def graphed(self) -> bool:
        """Whether the kernels between products are those of frameworks that capture CUDA graphs, as in 16 bits."""
        return self.precision.activations in FLASH

    def footprint(self) -> Footprint:
        """Memory of the step, without states (`optimizers.with_states`)."""
        outputs = [self._bytes_of(node.shape) for node in self.nodes]
        return Footprint(
            weights=self.parameter_bytes,
            activations=saved_of(self.nodes).peak() if self.training else 2.0 * largest(*outputs),
            kv_cache=0.0 if self.training or not self.serving else self.cache_bytes,
            runtime=RUNTIME_BYTES,
        )

    def emit(
        self,
        name: str,
        op: str,
        forward: Sequence[Kernel],
        backward: Sequence[Kernel] = (),
        weight_gradient: Sequence[Kernel] = (),
        shape: tuple[int, ...] = (1,),
        *,
        adapter: bool = False,
        saved_bytes: float | None = None,
        rebuilt_bytes: float = 0.0,
    ) -> None:
        """Write a node; beside adapters only they have gradients of weights.

        Args:
          name: inside the section.
          op: the operator, as of `Node`.
          forward: kernels of one execution.
          backward: kernels of the gradient of the activations.
          weight_gradient: kernels of the gradient of the weights.
          shape: of the output.
          adapter: whether it is a product of an adapter.
          saved_bytes: what a training step keeps of one execution; None = the output.
          rebuilt_bytes: as of `Node`.
        """
        operands = (Operand("input", prod(shape), True),)
        learned = () if self.lora and not adapter else weight_gradient
        kept = self._bytes_of(shape) if saved_bytes is None else saved_bytes
        kept, rebuilt = (kept, rebuilt_bytes) if self.training else (0.0, 0.0)
        self.write(name, op, (forward, backward, learned), operands, shape, saved_bytes=kept, rebuilt_bytes=rebuilt)

    def _bytes_of(self, shape: Sequence[int]) -> float:
        """Bytes of a tensor in the dtype of the activations."""
        elements: float = number(prod(shape))
        return elements * dtype_bytes(self.precision.activations)

    def read(self, width: int, dtype: str, learned: bool) -> None:
        """Settle what a training step keeps of the node before, whose output a product reads.

        The gradient of its weight needs that in the dtype of the product; a frozen weight needs nothing of it
        (Transformer Engine, `save_for_backward` of `Linear`).

        Args:
          width: of the product's contraction.
          dtype: of the product.
          learned: whether its weight has a gradient.
        """
        last = self.nodes[-1] if self.training and self.nodes else None
        if last is None or last.section != self._section or is_traced(width, *last.shape):
            return  # of traced sizes nobody asks for the memory of training
        if prod(last.shape[1:]) != width:
            return
        if last.op in ("linear", "bmm", "embedding"):
            return
        written, operand = self._bytes_of(last.shape), float(prod(last.shape)) * dtype_bytes(dtype) * learned
        if last.op == "attention":  # its own gradient reads its output too
            more = operand if dtype_bytes(dtype) < dtype_bytes(self.precision.activations) else 0.0
            self.nodes[-1] = replace(last, saved_bytes=last.saved_bytes + more)
        else:
            self.nodes[-1] = replace(last, saved_bytes=last.saved_bytes - written + operand, rebuilt_bytes=operand)

    def summed(self) -> None:
        """Keep nothing of the output written last: it is added to the residual, which the next norm keeps."""
        if not self.training:
            return
        # An adapter stands behind the product whose result it is added to.
        at = -2 if self.nodes[-1].name.endswith(".lora") else -1
        node = self.nodes[at]
        self.nodes[at] = replace(node, saved_bytes=largest(node.saved_bytes - self._bytes_of(node.shape)))

    def weight(self, elements: float) -> None:
        """Count parameters in the dtype of the activations, of a layer that runs as often as the section says."""
        self.count(elements, elements * dtype_bytes(self.precision.activations))

    def count(self, elements: float, stored_bytes: float) -> None:
        """Count parameters stored in so many bytes, of a layer that runs as often as the section says."""
        self.parameters += elements * self.repeat
        self.parameter_bytes += stored_bytes * self.repeat

    def keep(self, elements: float, dtype: str) -> None:
        """Count elements of the KV cache and the like that a layer keeps for the next step of its requests."""
        self.cache_bytes += self.repeat * float(elements) * dtype_bytes(dtype)

    def stored(
        self, name: str, dtype: str | None = None, tied: bool = False, parts: Sequence[int] = ()
    ) -> list[Stored]:
        """Storage of a node's weights in the layers of this section.

        Args:
          name: inside the section.
          dtype: of those that are not quantized.
          tied: whether the weight is the embedding's.
          parts: outputs of each module that the node runs as one; empty = equally many.
        """
        shares: dict[Scheme | None, float] = {None: 1.0}
        if self.quantization is not None:
            shares = self.quantization.shares("embedding" if tied else name, self.layers, parts)
        return [self._stored(share, scheme, dtype) for scheme, share in shares.items()]

    def _stored(self, share: float, scheme: Scheme | None, dtype: str | None) -> Stored:
        dtypes = self.precision
        if scheme is None:
            if dtype is not None or self.quantization is not None:
                plain = dtype or dtypes.activations
                return Stored(share, stored_as(plain), plain, plain=True)
            return Stored(share, stored_as(dtypes.weights), dtypes.products)
        if dtypes.products in NARROW and 8.0 * dtype_bytes(dtypes.products) >= scheme.bits:
            return Stored(share, scheme, dtypes.products)
        return Stored(
            share, scheme, scheme.arithmetic or dtypes.activations, dtypes.activations if scheme.arithmetic else ""
        )

    def embedding(self, vocabulary: int, hidden: int, *, shared: bool = False) -> None:
        """The rows of the new tokens looked up; `shared`: whether the weights are another model's."""
        for part in () if shared else self.stored("embedding", self.precision.activations):
            elements = number(vocabulary) * hidden
            self.count(elements * part.share, part.scheme.weight_bytes(vocabulary, hidden) * part.share)
            self.ledger.add("embedding", part.of_rows(self.requests.tokens), elements)
        self.stream("embedding", "embedding", self.requests.tokens, hidden, 1, 1, saved_bytes=0.0)

    def linear(
        self,
        name: str,
        rows: int,
        features: int,
        width: int,
        *,
        bias: float = 0.0,
        dtype: str | None = None,
        tied: bool = False,
        parts: Sequence[int] = (),
    ) -> None:
        """Product of `rows` × `width` activations with a weight of `features` × `width`.

        Args:
          name: inside the section.
          rows: activations, M of the product.
          features: outputs of one, its N.
          width: inputs of one, its K.
          bias: elements of biases and the like.
          dtype: of a weight that is not quantized; None = that of the step.
          tied: whether the weight is counted elsewhere.
          parts: as of `stored`.
        """
        phases: tuple[list[Kernel], list[Kernel], list[Kernel]] = [], [], []
        # Products outside layers, and those kept in a dtype of their own (routers, heads), get no adapter.
        adaptable = self.lora is not None and bool(self._section) and dtype is None
        adapter = self.lora if self.lora is not None and adaptable and self.lora.has(name) else None
        self.read(width, dtype or self.precision.products, self.lora is None or adapter is not None)
        # Layers may differ in how they store a weight: every way of storing has its share of the launches.
        for part in self.stored(name, dtype, tied, parts):
            elements = number(features) * width
            if not tied:
                self.count(elements * part.share, part.scheme.weight_bytes(features, width) * part.share)
            self.ledger.add(name, part.of_rows(rows), elements * self.repeat)
            for phase, kernels in zip(phases, self.products(part, rows, features, width, part.share), strict=True):
                phase += kernels
            eight = part.dtype in EIGHT_BITS and not part.scheme.unpack  # llama.cpp has kernels of its own
            if self.serving and eight and (part.scheme.group[0] > 1 or name in UNFUSED):
                phases[0].append(self._quantized(rows, width, part))
        self.emit(name, "linear", *phases, (rows, features))
        self.weight(bias)
        self.adapted += [name] * adaptable
        if adapter is not None:
            elements, activations = adapter.elements(features, width), self.precision.activations
            self.weight(elements)
            self.adapters += elements * self.repeat
            phases = adapter_kernels(rows, features, width, adapter.rank, activations, self.graphed)
            self.emit(f"{name}.lora", "linear", *phases, (rows, adapter.rank), adapter=True)

    def products(
        self, part: Stored, rows: float, features: int, width: int, count: float, batch: float = 1.0
    ) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
        """Products of activations with weights, and of their gradients; kernels of forward, backward, weight gradient.

        Args:
          part: how the weights are stored and multiplied.
          rows: activations, M of the forward product.
          features: outputs, its N.
          width: contraction, its K.
          count: launches of each kernel, the share of `part` included.
          batch: products of one launch, each with weights of its own.
        """

        part = part.of_rows(rows)
        narrow = part.weight_share(features, width, part.dtype)
        if self.training and narrow < 1.0:
            plain = Stored(part.share, stored_as(part.dtype), part.dtype)
            forward, backward, gradient = self.products(plain, rows, features, width, count)
            # Training has no products that read narrow weights: they are written in the dtype of the activations before
            # each (bitsandbytes, `MatMul4Bit`: `dequantize_4bit`, then cuBLAS, in both directions).
            sizes, dtype = (features, width, narrow, 1.0), self.precision.activations
            widened = rowwise("pointwise", *sizes, dtype, count, graphed=self.graphed)
            return [widened, *forward], [widened, *backward], gradient

        def product(dtype: str) -> Kernel:
            share = part.weight_share(features, width, dtype)
            return matrix_product(batch, rows, features, width, dtype, count, share, part.scheme.unpack)

        forward = [part.either(product)]
        backward = [matrix_product(batch, rows, width, features, part.dtype, count, narrow)]
        gradient = [matrix_product(batch, features, width, rows, part.dtype, count, upright=False)]
        if self.shard is not None and part.dtype in NARROW:
            # What is multiplied is cast, and kept transposed for the gradients of weights as well.
            times, copies = batch * count / part.share, 1.0 if self.lora else 2.0
            forward.append(self.cast(times * rows, width, part, copies))
            backward.append(self.cast(times * rows, features, part, copies))
        return forward, backward, gradient

    def _quantized(self, rows: int, cols: int, part: Stored) -> Kernel:
        """Activations brought to the dtype of a product, with a scale for every few of them where weights have some."""
        kernel = self.cast(rows, cols, part)
        if part.scheme.group[0] > 1:
            kernel = replace(kernel, family="reduction", op="quantize_rows")
        # Where a GPU lacks the path, weights are widened and activations stay as they are.
        return replace(kernel, path=part.dtype, instead=replace(kernel, count=0.0)) if part.instead else kernel

    def cast(self, rows: float, cols: float, part: Stored, copies: float = 1.0) -> Kernel:
        """A kernel that casts activations to the dtype of a product.

        Args:
          rows: activations.
          cols: features of one.
          part: whose products they go into; the kernel is launched as often as its share says.
          copies: what is written, 2 = as they are and transposed.
        """
        dtype = self.precision.activations
        written = copies * dtype_bytes(part.dtype) / dtype_bytes(dtype)
        return rowwise("quantize", rows, cols, 1.0, written, dtype, part.share, graphed=True)

    def batched(self, name: str, batch: int, rows: int, features: int, width: int, *, learned: bool = True) -> None:
        """Write a batch of products with weights, or of two activations, in the dtype of the activations.

        Engines widen such weights when they load a quantized model.

        Args:
          name: inside the section.
          batch: products of one launch, each with a weight of its own: heads, or groups.
          rows: activations of each product.
          features: outputs of each.
          width: contraction of each.
          learned: whether the second operand is a weight.
        """
        dtype = self.precision.activations
        forward = [matrix_product(batch, rows, features, width, dtype)]
        backward = [matrix_product(batch, rows, width, features, dtype)]
        gradient: list[Kernel] = []
        if learned:
            self.weight(float(batch) * features * width)
            gradient.append(matrix_product(batch, features, width, rows, dtype, upright=False))
        else:
            backward.append(matrix_product(batch, width, features, rows, dtype))
        self.emit(name, "bmm", forward, backward, gradient, (batch, rows, features))

    def stream(
        self,
        name: str,
        op: str,
        rows: int,
        cols: int,
        reads: float,
        writes: float,
        grad: float = 1.0,
        saved_bytes: float | None = None,
    ) -> None:
        """Write a kernel that streams activations.

        Args:
          name: inside the section.
          op: as of `kernel.rowwise`.
          rows: activations.
          cols: features of one.
          reads: passes over rows × cols that are read.
          writes: passes that are written.
          grad: traffic of the gradient over that of the forward kernel; 0 = no kernel.
          saved_bytes: as of `emit`.
        """

        def kernel(passes: float) -> Kernel:
            sizes, dtype = (rows, cols, reads * passes, writes * passes), self.precision.activations
            return rowwise(op, *sizes, dtype, graphed=self.graphed)

        gradient = [kernel(grad)] if grad else []
        self.emit(name, op, [kernel(1.0)], gradient, (), (rows, cols), saved_bytes=saved_bytes)

    def norm(self, name: str, rows: int, cols: int, *, residual: bool = False) -> None:
        """Write a norm.

        Args:
          name: inside the section.
          rows: vectors that are normed.
          cols: width of each, and elements of the norm's weight.
          residual: whether it adds the residual on the way, and writes the sum too, which a training step keeps.
        """
        passes = 2.0 if residual else 1.0
        self.weight(number(cols))
        if not (residual and self.norms_in_sums):
            kept = passes * self._bytes_of((rows, cols))
            self.stream(name, "layernorm", rows, cols, passes, passes, grad=1.5, saved_bytes=kept)

    def attention(
        self,
        heads: float,
        kv_heads: float,
        head_size: float,
        cache_per_token: float,
        *,
        kept_per_token: float | None = None,
        window: int = 0,
        causal: bool = True,
        requests: Requests | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        """Attention of every request over its own sequence, and the KV cache it keeps.

        Args:
          heads: query heads.
          kv_heads: heads of keys and values.
          head_size: mean width of query-key and value heads.
          cache_per_token: elements read of a token's keys and values.
          kept_per_token: those the cache of a layer keeps, where it is not all of them.
          window: last keys a query sees, 0 = all.
          causal: whether later keys are hidden.
          requests: what the queries see, where it is not all of their sequences.
          kept_tokens: most tokens of a sequence the cache keeps (0 = all), where it is not the window.
        """
        precision, batch = self.precision, self.requests if requests is None else requests
        queries, context = np.array(batch.queries, float), np.array(batch.context, float)
        tokens = np.array(self.requests.context, float)
        most = window if kept_tokens is None else kept_tokens
        # A windowed cache is a ring: new tokens take the place of those that left the window.
        kept = np.minimum(tokens, most) if most else tokens
        of_token = cache_per_token if kept_per_token is None else kept_per_token
        token_bytes = self.repeat * of_token * dtype_bytes(precision.kv_cache)
        self.cache_bytes += float(kept.sum()) * token_bytes
        self.context_bytes += 0.0 if most else len(batch.context) * token_bytes
        shape: Any = (batch.tokens, *(size if is_traced(size) else round(size) for size in (heads, head_size)))
        if self.shard is not None and self.shard.context > 1:
            # Causal attention is balanced over the ranks: each does its part of the pairs of every sequence.
            queries, context = queries * self.shard.context, context * self.shard.context
            heads, kv_heads = heads / self.shard.context, max(kv_heads / self.shard.context, 1.0)
        if precision.activations not in FLASH or (self.shard is not None and not self.shard.flash):
            forward, backward = self._unfused(batch, round(heads), round(head_size))
            scores = self._score_bytes(batch, round(heads))
            kept = self._bytes_of(shape) + scores
            self.emit("attention", "attention", forward, backward, (), shape, saved_bytes=kept, rebuilt_bytes=scores)
            return
        kernel, gradient = fused_attention(
            queries,
            context,
            precision.activations,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            window=window,
            causal=causal,
            # What the cache really holds of a token, over two vectors a KV head in the activations' dtype.
            kv_share=cache_per_token
            / (2.0 * kv_heads * head_size)
            * (dtype_bytes(precision.kv_cache) / dtype_bytes(precision.activations)),
        )
        self.emit("attention", "attention", [kernel], [gradient], (), shape)

    @property
    def _drops(self) -> bool:
        """Whether unfused attention has dropout."""
        return self.shard is not None and self.precision.activations in FLASH

    def _score_bytes(self, batch: Requests, heads: int) -> float:
        """What unfused attention keeps of its scores: those after softmax, with dropout its mask and output too
        (Korthikanti et al., "Reducing Activation Recomputation", 2022, section 4.1)."""
        pairs = float(np.dot(batch.queries, batch.context)) * heads
        size = dtype_bytes(self.precision.activations)
        return pairs * (2.0 * size + 1.0 if self._drops else size)

    def _unfused(self, batch: Requests, heads: int, head_size: int) -> tuple[list[Kernel], list[Kernel]]:
        """Attention as two products and a softmax, requests of equal length together."""
        pairs = list(zip(batch.queries, batch.context, strict=True))
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        for new, length in dict.fromkeys(pairs):
            sizes = (heads * pairs.count((new, length)), new, length, head_size, head_size)
            forward += attention_kernels(*sizes, self.precision.activations)
            backward += attention_kernels(*sizes, self.precision.activations, backward=True)
            if self._drops:  # its mask a byte an element
                rows = float(sizes[0]) * new
                kernel = rowwise("pointwise", rows, length, 1.0, 1.5, self.precision.activations, graphed=True)
                forward.append(kernel)
                backward.append(kernel)
        return forward, backward
