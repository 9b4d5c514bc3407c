"""Tape: operators written down in order, each with the kernels eager PyTorch 2.1 launches for it.

Views launch nothing and are not written down. Pass counts are those of the real kernels, see docs/graphs.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.writer import Writer
from neusight_jax.graph.graph import Fuse, Operand, Shape
from neusight_jax.graph.kernel import FLASH, fused_attention, matrix_product, stream
from neusight_jax.kernels.table import Kernel

DROPOUT_GRADIENT_PASSES: tuple[float, float] = (1, 1)
"""Passes read and written by the gradient of dropout, its boolean mask aside.

(1, 1) is the one fused kernel of a real backward pass. Timed operator by operator with gradient mode on, three kernels
run instead (mask to float, scale, product: 3 and 3); whole training steps of large batches fit (1, 1) better.
"""


@dataclass(frozen=True)
class Tensor:
    """A tensor on the tape: the node that made it, its shape, and whether a gradient flows back into it."""

    name: str
    shape: Shape
    grad: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view(self, *shape: int) -> Tensor:
        """The same data under another shape of equal size."""
        return Tensor(self.name, shape, self.grad)


def product(family: str, batch: int, m: int, n: int, k: int) -> Kernel:
    """A matrix product M×K · K×N, K the contraction, in the dtype of the graph.

    Args:
      family: "linear" or "bmm"; also the operator.
      batch: products of one launch.
      m: rows of the result.
      n: columns of the result.
      k: contraction.
    """
    dims = {"batch": float(batch), "m": float(m), "n": float(n), "k": float(k)}
    return Kernel(family, family, dims)


def accumulate(shape: Shape) -> Kernel:
    """Addition of a fresh gradient to the one a parameter holds."""
    return stream("elementwise", "add", shape, 2, 1)


class Tape(Writer):
    """Writes nodes down; `training` decides whether backward kernels and dropout are kept.

    Attributes:
      parameters: elements of all parameters, each once.
      dtype: of the model.
      fused_attention: whether attention is one kernel, as torch runs it in 16 bits.
    """

    def __init__(self, training: bool, dtype: str, attention: str | None = None) -> None:
        super().__init__(training)
        element_bytes = dtype_bytes(dtype)
        self.parameters = 0.0
        self.dtype, self.fused_attention = dtype, dtype in FLASH and attention != "unfused"
        self.mask_share = 1.0 / element_bytes  # a boolean is one byte
        self.index_share = 8.0 / element_bytes  # an index is eight

    def emit(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor],
        shape: Shape,
        forward: Sequence[Kernel],
        backward: Sequence[Kernel] = (),
        weight_gradient: Sequence[Kernel] = (),
        *,
        fuse: Fuse = "",
        grad: bool = True,
    ) -> Tensor:
        """Write one node down; the other methods end here. Returns its output.

        Args:
          name: inside the section.
          inputs: tensors it reads, parameters of a matrix product left out.
          shape: of its output.
          forward: kernels of one execution.
          backward: kernels of the gradient of its inputs.
          weight_gradient: kernels of the gradient of its parameters.
          fuse: whether a compiler may merge it with its neighbours, as of `Node`.
          grad: whether a gradient flows back into its output.
        """
        operands = [Operand(item.name, item.elements, item.grad) for item in inputs]
        phases = (forward, backward, weight_gradient)
        full = self.write(name, op, phases, operands, shape, fuse=fuse)
        return Tensor(full, shape, grad)

    def holds(self, elements: int) -> None:
        """Count parameters of what runs as often as the section says."""
        self.parameters += float(elements) * self.repeat

    def views(self, name: str, backward: Sequence[Kernel]) -> None:
        """Views whose gradient is copied by `backward`; forward they launch nothing."""
        self.emit(name, "views", (), (1,), (), backward)

    def linear(
        self, name: str, x: Tensor, features: int, *, bias: bool = True, backward_copies: int = 0, tied: bool = False
    ) -> Tensor:
        """x · W (+ bias) over the last axis.

        Args:
          backward_copies: copies of the output gradient before its products; tied: the matrix is counted elsewhere.
        """
        self.holds(features * (x.shape[-1] * (not tied) + bias))
        rows, width, out = prod(x.shape[:-1]), x.shape[-1], (*x.shape[:-1], features)
        backward = [stream("memory", "copy", out, 1, 1)] * backward_copies
        if x.grad:
            backward.append(product("linear", 1, rows, width, features))
        weight = [matrix_product(1, features, width, rows, self.dtype, upright=False)]
        if bias:
            weight.append(stream("memory", "reduce", out, 1, 1 / rows))
        weight.append(accumulate((features, width)))
        if bias:
            weight.append(accumulate((1, features)))
        forward = [product("linear", 1, rows, features, width)]
        return self.emit(name, "linear", [x], out, forward, backward, weight)

    def matmul(
        self, name: str, a: Tensor, b: Tensor, *, copies: Sequence[Tensor] = (), backward_copies: Sequence[Tensor] = ()
    ) -> Tensor:
        """Write a batched product (batch, heads, M, K) · (batch, heads, K, N).

        Args:
          name: inside the section.
          a: first operand [batch, heads, M, K].
          b: second operand [batch, heads, K, N].
          copies: permuted operands that are copied before the product.
          backward_copies: those copied before the two products of its gradient.
        """
        *outer, m, k = a.shape
        n, batch, out = b.shape[-1], prod(outer), (*outer, m, b.shape[-1])
        forward = [*_copies(copies), product("bmm", batch, m, n, k)]
        backward = [*_copies(backward_copies), product("bmm", batch, m, k, n), product("bmm", batch, k, n, m)]
        return self.emit(name, "matmul", [a, b], out, forward, backward)

    def unary(self, name: str, op: str, x: Tensor) -> Tensor:
        """Write an operator of one tensor, and one scalar at most.

        Args:
          name: inside the section.
          op: one of `rowwise.UNARY_OPS`: addu, mulu, divu, powu, tanh, relu, gelu.
        """
        backward = {
            "addu": [],
            "mulu": [stream("elementwise", "mulu", x.shape, 1, 1)],
            "divu": [stream("elementwise", "divu", x.shape, 1, 1)],
            "powu": [
                stream("elementwise", "powu", x.shape, 1, 1),
                stream("elementwise", "mulu", x.shape, 1, 1),
                stream("elementwise", "mul", x.shape, 2, 1),
            ],
        }.get(op, [stream("elementwise", op, x.shape, 2, 1)])
        forward = [stream("elementwise", op, x.shape, 1, 1)]
        return self.emit(name, op, [x], x.shape, forward, backward if x.grad else (), fuse="pointwise", grad=x.grad)

    def binary(self, name: str, op: str, a: Tensor, b: Tensor, *, reread: bool = False) -> Tensor:
        """Write an operator of two tensors, the smaller one broadcast.

        Args:
          name: inside the section.
          op: "add" or "mul".
          reread: whether `b` is read anew for every copy of it that the broadcast makes.
        """
        shape = a.shape if a.elements >= b.elements else b.shape
        size = prod(shape)
        shares = (a.elements / size, b.elements / size)
        backward: list[Kernel] = []
        for position, operand in enumerate((a, b)):
            if not operand.grad:
                continue
            if op == "mul":
                backward.append(stream("elementwise", "mul", shape, 1 + shares[1 - position], 1))
            # The gradient of a broadcast operand is summed over its copies.
            if shares[position] < 1:
                backward.append(stream("memory", "reduce", shape, 1, shares[position]))
        forward = [stream("elementwise", op, shape, shares[0] + (1 if reread else shares[1]), 1)]
        inputs = [a, Tensor(b.name, shape, b.grad) if reread else b]
        grad = a.grad or b.grad
        return self.emit(name, op, inputs, shape, forward, backward, fuse="pointwise", grad=grad)

    def add_permuted(self, name: str, x: Tensor, permuted: Tensor) -> Tensor:
        """x + permuted in place, where the second lies with its third axis from the end (heads) innermost in memory.

        The loop runs as `x` lies, so that each element of the other brings a whole fetch, and it comes back for the
        next after a whole plane of the last two axes.
        """
        plane = float(prod(x.shape[-2:]))
        kernel = stream("strided", "add_permuted", x.shape, 2, 1)
        kernel = replace(kernel, dims={**kernel.dims, "scattered": 1.0, "window": plane})
        return self.emit(name, "add", [x, permuted], x.shape, [kernel], fuse="pointwise")

    def scale(self, name: str, x: Tensor, weight: str) -> Tensor:
        """Product with a learned vector over the last axis."""
        self.holds(x.shape[-1])
        width, rows = x.shape[-1], prod(x.shape[:-1])
        vector = Tensor(weight, (width,), False)
        backward = [stream("elementwise", "mul", x.shape, 1 + 1 / rows, 1)]
        gradient = [
            stream("elementwise", "mul", x.shape, 2, 1),
            stream("memory", "reduce", x.shape, 1, 1 / rows),
            accumulate((1, width)),
        ]
        forward = [stream("elementwise", "mul", x.shape, 1 + 1 / rows, 1)]
        return self.emit(name, "scale", [x, vector], x.shape, forward, backward, gradient, fuse="pointwise")

    def mean(self, name: str, x: Tensor, shape: Shape, *, fuse: Fuse = "") -> Tensor:
        """Write a mean over some axes; its gradient is divided by their elements.

        Args:
          name: inside the section.
          x: the tensor.
          shape: of the result.
          fuse: as of `Node`.
        """
        share = prod(shape) / x.elements
        forward = [stream("memory", "reduce", x.shape, 1, share)]
        backward = [stream("elementwise", "divu", x.shape, share, 1)] if x.grad else []
        return self.emit(name, "mean", [x], shape, forward, backward, fuse=fuse, grad=x.grad)

    def softmax(self, name: str, x: Tensor) -> Tensor:
        """Softmax over the last axis; its gradient is a product and a row kernel."""
        forward = [stream("softmax", "softmax", x.shape, 1, 1)]
        backward = [
            stream("elementwise", "mul", x.shape, 2, 1),
            stream("softmax", "softmax_backward", x.shape, 2, 1),
        ]
        kept = backward if x.grad else ()
        return self.emit(name, "softmax", [x], x.shape, forward, kept, fuse="softmax", grad=x.grad)

    def attention(self, name: str, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Write fused attention.

        Args:
          name: inside the section.
          query: [batch, heads, new tokens, width].
          key: [batch, KV heads, tokens, width].
          value: likewise; its shape is not read.
          causal: whether later keys are hidden.
        """
        batch, heads, length, width = query.shape
        sizes = (batch, length, key.shape[-2], heads, key.shape[1], width)
        forward, backward = fused_attention(*sizes, self.dtype, causal=causal)
        return self.emit(name, "attention", [query, key, value], query.shape, [forward], [backward])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Layer norm over the last axis, with scale and shift."""
        self.holds(2 * x.shape[-1])
        rows, width = prod(x.shape[:-1]), x.shape[-1]
        forward = [stream("norm", "layernorm", x.shape, 1, 1)]
        backward = [stream("norm", "layernorm_backward", x.shape, 2, 1)]
        weight = [
            stream("norm", "layernorm_weight_gradient", x.shape, 2, 2 / rows),
            accumulate((1, width)),
            accumulate((1, width)),
        ]
        return self.emit(name, "norm", [x], x.shape, forward, backward, weight, fuse="norm")

    def dropout(self, name: str, x: Tensor, rate: float) -> Tensor:
        """Dropout; nothing in inference, and nothing at rate 0."""
        if not self.training or rate == 0:
            return x
        mask = self.mask_share
        forward = [stream("memory", "dropout", x.shape, 1, 1 + mask)]
        reads, writes = DROPOUT_GRADIENT_PASSES
        backward = [stream("memory", "dropout_backward", x.shape, mask + reads, writes)]
        return self.emit(name, "dropout", [x], x.shape, forward, backward, fuse="pointwise")

    def embedding(self, name: str, ids: Shape, table: Shape, *, tied: bool = False) -> Tensor:
        """Write a lookup of rows of a table.

        Args:
          name: inside the section.
          ids: shape of the indices.
          table: (vocabulary, width).
          tied: whether the weight is counted elsewhere.
        """
        self.holds(prod(table) * (not tied))
        shape = (*ids, table[-1])
        index = self.index_share / table[-1]
        forward = [stream("memory", "embedding", shape, 1 + index, 1)]
        weight = [
            stream("memory", "fill", table, 0, 1),
            stream("memory", "embedding_backward", shape, 2 + index, 1),
            accumulate(table),
        ]
        rows = Tensor(f"{name}.table", shape, False)
        return self.emit(name, "embedding", [rows], shape, forward, (), weight, fuse="pointwise")

    def copy(self, name: str, x: Tensor, *, backward: bool = False) -> Tensor:
        """Write a permuted tensor made contiguous.

        Args:
          name: inside the section.
          x: the tensor as it will lie.
          backward: whether its gradient is copied as well.
        """
        kernel = [stream("memory", "copy", x.shape, 1, 1)]
        return self.emit(name, "copy", [x], x.shape, kernel, kernel if backward else ())

    def small(self, name: str, op: str, shape: Shape, reads: float = 1, writes: float = 1) -> Tensor:
        """Write a launch without gradient: masks, indices, counters.

        Args:
          name: inside the section.
          op: an operator of the family "memory" or "elementwise".
          shape: of the result.
          reads: passes over `shape` that are read.
          writes: passes that are written.
        """
        family = "memory" if op in ("copy", "fill", "where", "gather", "scatter", "cumsum", "reduce", "max") else ""
        kernel = stream(family or "elementwise", op, shape, reads, writes)
        return self.emit(name, "small", (), shape, [kernel], grad=False)

    def gradient_sum(self, name: str, x: Tensor, consumers: int) -> None:
        """Sum of the gradients a tensor receives from several consumers (training only)."""
        if self.training:
            kernel = stream("elementwise", "add", x.shape, 2, 1, consumers - 1)
            self.emit(name, "gradient_sum", [x], x.shape, (), [kernel])


def _copies(tensors: Sequence[Tensor]) -> list[Kernel]:
    return [stream("memory", "copy", item.shape, 1, 1) for item in tensors]
