"""Tape: operators written down in order, each with the kernels eager PyTorch 2.1 launches for it.

Views launch nothing and are not written down. Pass counts are those of the real kernels, see docs/graphs.md. `fuse`
merges elementwise chains of what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.graph import Fuse, Node, Operand, Shape, Writer
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


def accumulate(shape: Shape) -> Kernel:
    """Addition of a fresh gradient to the one a parameter holds."""
    return stream("add", shape, 2, 1)


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
          op: the operator, as of `Node`.
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
          name: inside the section.
          x: rows of K elements [..., K].
          features: outputs N of each row.
          bias: whether there is one.
          backward_copies: copies of the output gradient before its products.
          tied: whether the matrix is counted elsewhere.
        """
        self.holds(features * (x.shape[-1] * (not tied) + bias))
        rows, width, out = prod(x.shape[:-1]), x.shape[-1], (*x.shape[:-1], features)
        backward = [stream("copy", out, 1, 1)] * backward_copies
        if x.grad:
            backward.append(matrix_product(1, rows, width, features, ""))
        weight = [matrix_product(1, features, width, rows, self.dtype, upright=False)]
        if bias:
            weight.append(stream("reduce", out, 1, 1 / rows))
        weight.append(accumulate((features, width)))
        if bias:
            weight.append(accumulate((1, features)))
        forward = [matrix_product(1, rows, features, width, "")]
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

        def product(m: int, n: int, k: int) -> Kernel:
            """One of the batch, which may be one alone."""
            return replace(matrix_product(batch, m, n, k, ""), family="bmm", op="bmm")

        forward = [*_copies(copies), product(m, n, k)]
        backward = [*_copies(backward_copies), product(m, k, n), product(k, n, m)]
        return self.emit(name, "matmul", [a, b], out, forward, backward)

    def unary(self, name: str, op: str, x: Tensor) -> Tensor:
        """Write an operator of one tensor, and one scalar at most.

        Args:
          name: inside the section.
          op: one of `rowwise.UNARY_OPS`: addu, mulu, divu, powu, tanh, relu, gelu.
        """
        backward = {
            "addu": [],
            "mulu": [stream("mulu", x.shape, 1, 1)],
            "divu": [stream("divu", x.shape, 1, 1)],
            "powu": [
                stream("powu", x.shape, 1, 1),
                stream("mulu", x.shape, 1, 1),
                stream("mul", x.shape, 2, 1),
            ],
        }.get(op, [stream(op, x.shape, 2, 1)])
        forward = [stream(op, x.shape, 1, 1)]
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
                backward.append(stream("mul", shape, 1 + shares[1 - position], 1))
            # The gradient of a broadcast operand is summed over its copies.
            if shares[position] < 1:
                backward.append(stream("reduce", shape, 1, shares[position]))
        forward = [stream(op, shape, shares[0] + (1 if reread else shares[1]), 1)]
        inputs = [a, Tensor(b.name, shape, b.grad) if reread else b]
        grad = a.grad or b.grad
        return self.emit(name, op, inputs, shape, forward, backward, fuse="pointwise", grad=grad)

    def add_permuted(self, x: Tensor, permuted: Tensor) -> Tensor:
        """Add a bias in place that lies with its third axis from the end (heads) innermost in memory.

        The loop runs as `x` lies, so that each element of the other brings a whole fetch, and it comes back for the
        next after a whole plane of the last two axes.
        """
        plane = float(prod(x.shape[-2:]))
        kernel = stream("add_permuted", x.shape, 2, 1)
        kernel = replace(kernel, dims={**kernel.dims, "scattered": 1.0, "window": plane})
        return self.emit("bias", "add", [x, permuted], x.shape, [kernel], fuse="pointwise")

    def scale(self, name: str, x: Tensor, weight: str) -> Tensor:
        """Product with a learned vector over the last axis."""
        self.holds(x.shape[-1])
        width, rows = x.shape[-1], prod(x.shape[:-1])
        vector = Tensor(weight, (width,), False)
        backward = [stream("mul", x.shape, 1 + 1 / rows, 1)]
        gradient = [
            stream("mul", x.shape, 2, 1),
            stream("reduce", x.shape, 1, 1 / rows),
            accumulate((1, width)),
        ]
        forward = [stream("mul", x.shape, 1 + 1 / rows, 1)]
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
        forward = [stream("reduce", x.shape, 1, share)]
        backward = [stream("divu", x.shape, share, 1)] if x.grad else []
        return self.emit(name, "mean", [x], shape, forward, backward, fuse=fuse, grad=x.grad)

    def softmax(self, name: str, x: Tensor) -> Tensor:
        """Softmax over the last axis; its gradient is a product and a row kernel."""
        forward = [stream("softmax", x.shape, 1, 1)]
        backward = [
            stream("mul", x.shape, 2, 1),
            stream("softmax_backward", x.shape, 2, 1),
        ]
        kept = backward if x.grad else ()
        return self.emit(name, "softmax", [x], x.shape, forward, kept, fuse="softmax", grad=x.grad)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Write fused attention.

        Args:
          query: [batch, heads, new tokens, width].
          key: [batch, KV heads, tokens, width].
          value: likewise; its shape is not read.
          causal: whether later keys are hidden.
        """
        batch, heads, length, width = query.shape
        sizes = {"heads": heads, "kv_heads": key.shape[1], "head_size": width, "causal": causal}
        forward, backward = fused_attention(length, key.shape[-2], self.dtype, repeat=batch, **sizes)
        return self.emit("attention.fused", "attention", [query, key, value], query.shape, [forward], [backward])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Layer norm over the last axis, with scale and shift."""
        self.holds(2 * x.shape[-1])
        rows, width = prod(x.shape[:-1]), x.shape[-1]
        forward = [stream("layernorm", x.shape, 1, 1)]
        backward = [stream("layernorm_backward", x.shape, 2, 1)]
        weight = [
            stream("layernorm_weight_gradient", x.shape, 2, 2 / rows),
            accumulate((1, width)),
            accumulate((1, width)),
        ]
        return self.emit(name, "norm", [x], x.shape, forward, backward, weight, fuse="norm")

    def dropout(self, name: str, x: Tensor, rate: float) -> Tensor:
        """Dropout; nothing in inference, and nothing at rate 0."""
        if not self.training or rate == 0:
            return x
        mask = self.mask_share
        forward = [stream("dropout", x.shape, 1, 1 + mask)]
        reads, writes = DROPOUT_GRADIENT_PASSES
        backward = [stream("dropout_backward", x.shape, mask + reads, writes)]
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
        forward = [stream("embedding", shape, 1 + index, 1)]
        weight = [
            stream("fill", table, 0, 1),
            stream("embedding_backward", shape, 2 + index, 1),
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
        kernel = [stream("copy", x.shape, 1, 1)]
        return self.emit(name, "copy", [x], x.shape, kernel, kernel if backward else ())

    def small(self, name: str, op: str, shape: Shape, reads: float = 1, writes: float = 1) -> Tensor:
        """Write a launch without gradient: masks, indices, counters.

        Args:
          name: inside the section.
          op: as of `kernel.rowwise`.
          shape: of the result.
          reads: passes over `shape` that are read.
          writes: passes that are written.
        """
        return self.emit(name, "small", (), shape, [stream(op, shape, reads, writes)], grad=False)

    def gradient_sum(self, name: str, x: Tensor, consumers: int) -> None:
        """Sum of the gradients a tensor receives from several consumers (training only)."""
        if self.training:
            kernel = stream("add", x.shape, 2, 1, consumers - 1)
            self.emit(name, "gradient_sum", [x], x.shape, (), [kernel])


def _copies(tensors: Sequence[Tensor]) -> list[Kernel]:
    return [stream("copy", item.shape, 1, 1) for item in tensors]


# Fusion: elementwise chains merged into one kernel each, as torch.compile and XLA do.
#
# A node joins its producer when it is the producer's only consumer. Matrix products, copies, gathers and reductions
# other than softmax and norm stay apart, and a chain holds one softmax or norm at most. A merged forward kernel reads
# each outer operand once and writes its result once. Its backward kernel reads the incoming gradient and the outer
# operands (inner values are computed again) and writes one gradient per outer operand that needs one; it is used where
# it moves less than the eager kernels. Weight-gradient kernels stay as they are. The sum of gradients over several
# consumers rides along with the kernel that follows: one more read each.

_FORWARD = {"pointwise": "add", "softmax": "softmax", "norm": "layernorm"}
_BACKWARD = {"pointwise": "add", "softmax": "softmax_backward", "norm": "layernorm_backward"}
"""Operators of merged kernels, by what is among them."""
_LINEAR_OPS = frozenset({"add", "addu", "mulu", "divu", "where", "dropout", "embedding"})
"""Operators whose gradient needs none of their operands."""


def fuse(nodes: Sequence[Node]) -> list[Node]:
    """Nodes with fusable chains merged, in order of execution."""
    groups = _groups(nodes)
    members: dict[int, list[Node]] = {}
    for position, node in enumerate(nodes):
        members.setdefault(groups[position], []).append(node)
    by_name = {node.name: groups[position] for position, node in enumerate(nodes)}
    merged: list[Node] = []
    for position, node in enumerate(nodes):
        chain = members[groups[position]]
        if node.op == "gradient_sum":
            merged.extend(_ride_along(node, nodes, by_name))
        elif chain[-1] is node:
            merged.append(_merge(chain) if len(chain) > 1 else node)
    return merged


def _groups(nodes: Sequence[Node]) -> list[int]:
    """Group of each node: joined with producers it alone consumes, in the same section."""
    where = {node.name: position for position, node in enumerate(nodes)}
    consumers: Counter[str] = Counter()
    for node in nodes:
        if node.op != "gradient_sum":
            consumers.update({operand.name for operand in node.operands})
    # In order of execution producers are settled before what reads them, so one pass joins whole chains.
    group = list(range(len(nodes)))
    kind = [node.fuse for node in nodes]
    # A node that may not be fused starts a group of its own and stays alone in it.
    for position, node in enumerate(nodes):
        if not node.fuse:
            continue
        for operand in node.operands:
            source = where.get(operand.name)
            # What another node reads too must be written to memory anyway.
            if source is None or source >= position or consumers[operand.name] != 1:
                continue
            if not nodes[source].fuse or nodes[source].section != node.section:
                continue
            kinds = {kind[group[source]], kind[group[position]]} - {"pointwise"}
            if len(kinds) > 1 or (kind[group[source]] == kind[group[position]] != "pointwise"):
                continue
            old, new = group[source], group[position]
            kind[new] = kinds.pop() if kinds else "pointwise"
            group = [new if item == old else item for item in group]
    return group


def _merge(chain: Sequence[Node]) -> Node:
    inner = {node.name for node in chain}
    outer: dict[str, Operand] = {}
    # A tensor that is read anew for every copy has more elements as that operand: the larger traffic counts.
    for node in chain:
        for operand in node.operands:
            largest = outer.get(operand.name)
            if operand.name not in inner and (largest is None or largest.elements < operand.elements):
                outer[operand.name] = operand
    last = chain[-1]
    size = prod(last.shape)
    reductions = [node.fuse for node in chain if node.fuse != "pointwise"]
    kind = reductions[0] if reductions else "pointwise"
    reads = sum(operand.elements for operand in outer.values()) / size
    return replace(
        last,
        op="fused(" + "+".join(node.op for node in chain) + ")",
        forward=(stream(_FORWARD[kind], last.shape, reads, 1),),
        backward=_backward(chain, outer, kind),
        weight_gradient=tuple(kernel for node in chain for kernel in node.weight_gradient),
        operands=tuple(outer.values()),
        fuse="",
    )


def _backward(chain: Sequence[Node], outer: dict[str, Operand], kind: str) -> tuple[Kernel, ...]:
    eager = tuple(kernel for node in chain for kernel in node.backward)
    if not eager:
        return ()
    last = chain[-1]
    size = prod(last.shape)
    linear = all(node.op in _LINEAR_OPS for node in chain)
    reads = 1 + (0 if linear else sum(operand.elements for operand in outer.values()) / size)
    writes = sum(operand.elements for operand in outer.values() if operand.grad) / size
    if writes == 0:
        return eager
    single = stream(_BACKWARD[kind], last.shape, reads, writes)
    return (single,) if _traffic(single) < sum(_traffic(kernel) for kernel in eager) else eager


def _traffic(kernel: Kernel) -> float:
    dims = kernel.dims
    return kernel.count * dims["rows"] * dims["cols"] * (dims["reads"] + dims["writes"])


def _ride_along(node: Node, nodes: Sequence[Node], by_name: dict[str, int]) -> list[Node]:
    (kernel,) = node.backward
    (operand,) = node.operands
    users = [
        item.name
        for item in nodes
        if item.op != "gradient_sum" and operand.name in {other.name for other in item.operands if other.grad}
    ]
    if users and len({by_name[name] for name in users}) == 1:
        return []  # the tensor has one consumer left
    return [replace(node, backward=(stream("add", node.shape, 1, 0, int(kernel.count)),))]
