"""Step: writes down one step of a transformer as a serving or training framework runs it, with fused kernels.

Norms take the residual sum with them, attention is one kernel, the gate of a feed-forward block another. Matrix
products run in the dtype of the weights, everything between them in that of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.attention import attention_kernels
from neusight_jax.graph.graph import OPTIMIZER_BYTES, RUNTIME_BYTES, Footprint, Operand
from neusight_jax.graph.operation import matrix_product
from neusight_jax.graph.requests import Requests
from neusight_jax.graph.writer import Writer
from neusight_jax.kernels.attention import attention_dims
from neusight_jax.kernels.grouped_gemm import expert_dims
from neusight_jax.kernels.table import Kernel

NARROW: tuple[str, ...] = ("fp8", "fp4", "int8")
"""Dtypes of weights only: activations beside them are bf16."""
FLASH: tuple[str, ...] = ("bf16", "fp16")
"""Activations that fused attention takes; others run as two products and a softmax."""
UNGRAPHED: dict[str, str] = {"layernorm": "norm", "softmax": "softmax", "embedding": "memory"}
"""Families of row-wise operators beside fp32 products; all others are elementwise."""
BACKWARD_ATTENTION = 2.5
"""Products of the gradient of fused attention over those of its forward pass: five for two."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a step: weights of products, activations, KV cache."""

    weights: str
    activations: str
    kv_cache: str


def precision(dtype: str, weight_dtype: str | None = None, kv_dtype: str | None = None) -> Precision:
    """Dtypes of a step: `dtype` of products, what is not said of the rest follows.

    Activations are bf16 beside eight- and four-bit products. The KV cache of an fp8 or fp4 model is fp8.
    """
    activations = "bf16" if dtype in NARROW else dtype
    cache = "fp8" if dtype in ("fp8", "fp4") else activations
    return Precision(weight_dtype or dtype, activations, kv_dtype or cache)


class Step(Writer):
    """Nodes of one step, in order.

    Attributes:
      requests, precision: the workload.
      training: whether backward kernels are written; serving: whether the KV cache is kept after the step.
      parameters, parameter_bytes: of the weights; cache_bytes: of the KV cache.
    """

    def __init__(self, requests: Requests, precision: Precision, training: bool = False, serving: bool = False) -> None:
        super().__init__(training)
        self.requests, self.precision, self.serving = requests, precision, serving
        self.parameters = self.parameter_bytes = self.cache_bytes = 0.0

    def footprint(self) -> Footprint:
        """Memory of the step. Training keeps every node's output, fp32 master weights and Adam's moments."""
        size = dtype_bytes(self.precision.activations)
        outputs = [float(np.prod(node.shape)) * size for node in self.nodes]
        kept = sum(output * node.repeat for output, node in zip(outputs, self.nodes, strict=True))
        mixed = dtype_bytes(self.precision.weights) < 4.0
        return Footprint(
            weights=self.parameter_bytes,
            gradients=self.parameter_bytes if self.training else 0.0,
            optimizer=self.parameters * (OPTIMIZER_BYTES + 4.0 * mixed) if self.training else 0.0,
            activations=kept if self.training else 2.0 * max(outputs),
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
    ) -> None:
        """Write a node."""
        operands = (Operand("input", int(np.prod(shape)), True),)
        self.write(name, op, (forward, backward, weight_gradient), operands, shape)

    def weight(self, elements: float, dtype: str | None = None) -> None:
        """Count parameters of a layer that runs as often as the section says."""
        self.parameters += elements * self.repeat
        self.parameter_bytes += elements * self.repeat * dtype_bytes(dtype or self.precision.weights)

    def linear(
        self, name: str, rows: int, features: int, width: int, *, dtype: str | None = None, tied: bool = False
    ) -> None:
        """Product of `rows` × `width` activations with a weight of `features` × `width`; `tied`: counted elsewhere."""
        own = dtype or self.precision.weights
        if not tied:
            self.weight(float(features) * width, own)
        self.emit(
            name,
            "linear",
            [matrix_product(1, rows, features, width, own)],
            [matrix_product(1, rows, width, features, own)],
            [matrix_product(1, features, width, rows, own)],
            (rows, features),
        )

    def batched(self, name: str, batch: int, rows: int, features: int, width: int) -> None:
        """A batch of products with weights of `features` × `width` each, in the dtype of the activations."""
        own = self.precision.activations
        self.weight(float(batch) * features * width, own)
        self.emit(
            name,
            "bmm",
            [matrix_product(batch, rows, features, width, own)],
            [matrix_product(batch, rows, width, features, own)],
            [matrix_product(batch, features, width, rows, own)],
            (batch, rows, features),
        )

    def stream(
        self, name: str, family: str, op: str, rows: int, cols: int, reads: float, writes: float, grad: float = 1.0
    ) -> None:
        """A kernel that streams rows × cols activations; its gradient moves `grad` times as much."""

        own = family if self.precision.activations in FLASH else UNGRAPHED.get(op, "elementwise")

        def kernel(passes: float) -> Kernel:
            dims = {"rows": float(rows), "cols": float(cols), "reads": reads * passes, "writes": writes * passes}
            return Kernel(own, op, dims, 1.0, self.precision.activations)

        self.emit(name, op, [kernel(1.0)], [kernel(grad)] if grad else [], (), (rows, cols))

    def norm(self, name: str, rows: int, cols: int, *, residual: bool = False) -> None:
        """A norm over `cols`; with `residual` it adds the residual on the way and writes the sum too."""
        passes = 2.0 if residual else 1.0
        self.weight(float(cols), self.precision.activations)
        self.stream(name, "reduction", "layernorm", rows, cols, passes, passes, grad=1.5)

    def attention(
        self,
        name: str,
        *,
        heads: int,
        kv_heads: int,
        head_size: float,
        cache_per_token: float,
        kept_per_token: float | None = None,
        window: int = 0,
        causal: bool = True,
        requests: Requests | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        """Attention of every request over its own sequence, and the KV cache it keeps.

        Args:
          head_size: mean width of query-key and value heads.
          cache_per_token: elements read of a token's keys and values; kept_per_token: those the cache of a layer keeps,
            where it is not all of them.
          requests: what the queries see, where it is not all of their sequences.
          kept_tokens: most tokens of a sequence the cache keeps (0 = all), where it is not the window.
        """
        precision, batch = self.precision, self.requests if requests is None else requests
        queries, context = np.array(batch.queries, float), np.array(batch.context, float)
        tokens = np.array(self.requests.context, float)
        most = window if kept_tokens is None else kept_tokens
        kept = np.minimum(tokens, most) if most else tokens
        of_token = cache_per_token if kept_per_token is None else kept_per_token
        self.cache_bytes += self.repeat * float(kept.sum()) * of_token * dtype_bytes(precision.kv_cache)
        shape = (batch.tokens, heads, round(head_size))
        if precision.activations not in FLASH:
            forward, backward = self._unfused(batch, heads, round(head_size))
            self.emit(name, "attention", forward, backward, (), shape)
            return
        sizes = attention_dims(
            queries,
            context,
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
        summed = ("requests", "queries", "keys", "pairs", "context")
        dims = {key: float(value.sum() if key in summed else value[0]) for key, value in sizes.items()}
        family = "decode" if max(batch.queries) == 1 else "prefill"
        kernel = Kernel(family, family, dims, 1.0, precision.activations)
        gradient = Kernel(family, family, dims, BACKWARD_ATTENTION, precision.activations)
        self.emit(name, "attention", [kernel], [gradient], (), shape)

    def _unfused(self, batch: Requests, heads: int, head_size: int) -> tuple[list[Kernel], list[Kernel]]:
        """Attention as two products and a softmax, requests of equal length together."""
        pairs = list(zip(batch.queries, batch.context, strict=True))
        forward: list[Kernel] = []
        backward: list[Kernel] = []
        for new, length in dict.fromkeys(pairs):
            sizes = (heads * pairs.count((new, length)), new, length, head_size, head_size)
            forward += attention_kernels(*sizes, self.precision.activations)
            backward += attention_kernels(*sizes, self.precision.activations, backward=True)
        return forward, backward

    def experts(
        self,
        name: str,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        inner: int,
        expert_parallel: int,
        tensor_parallel: int,
        matrices: int = 3,
    ) -> None:
        """The routed experts of a layer, those on this device, tokens spread at random.

        An expert of two `matrices` counts as one of three that is as much narrower.
        """
        local, width = max(experts // expert_parallel, 1), max(inner // tensor_parallel, 1)
        self.weight(float(matrices) * local * hidden * width)
        tokens = self.requests.tokens
        sizes = expert_dims(
            float(tokens),
            experts=experts,
            local_experts=local,
            top_k=top_k,
            hidden=hidden,
            inner=width * matrices / 3.0,
            distribution="random",
        )
        dims = {key: float(value) for key, value in sizes.items()}
        kernel = Kernel("grouped_gemm", "experts", dims, 1.0, self.precision.weights)
        # Two gradients, each with the arithmetic of the forward pass.
        self.emit(name, "experts", [kernel], [kernel], [kernel], (tokens, hidden))
