"""The same graphs in the accounting of the published NeuSight, and every deliberate difference with its reason.

Notation: ("Linear", (M, N, K)) and ("BMM", (B, M, N, K)) with N the contraction, ("VECadd", (rows, columns)),
("MEM", (shape, …)) for traffic over the listed tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

from neusight_jax.graph.configs.build import trace
from neusight_jax.graph.graph import Node, Shape, Traced
from neusight_jax.kernels.table import Kernel

Op: TypeAlias = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Difference:
    """A class of nodes for which this package launches other kernels than the reference charges, on purpose.

    Attributes:
      ops: node operators concerned.
      phase: "forward", or "backward" (weight gradients included).
      reason: why.
    """

    ops: tuple[str, ...]
    phase: str
    reason: str


DIFFERENCES: dict[str, Difference] = {
    "views": Difference(
        ("views",),
        "forward",
        "slices, split parts, new axes and `contiguous` on contiguous data move nothing; the reference charges traffic",
    ),
    "view gradients": Difference(
        ("views",), "backward", "real gradients of slices fill, copy or join; the reference charges two fills each"
    ),
    "embedding rows": Difference(
        ("embedding",), "forward", "the rows gathered are read too; position and type embeddings run as well"
    ),
    "embedding gradient": Difference(
        ("embedding",),
        "backward",
        "the scatter touches the gathered rows, not the whole table; every table has one, of its own size",
    ),
    "small kernels": Difference(
        ("small",),
        "forward",
        "masks, indices and one-element tensors launch kernels the reference costs at zero, or with other operands",
    ),
    "small gradients": Difference(
        ("small",), "backward", "masks and indices get no gradient; the reference gives them one"
    ),
    "maximum": Difference(("max",), "forward", "torch.max over the scores is a full pass; the reference costs it 0"),
    "maximum gradient": Difference(("max",), "backward", "compares, halves, selects and fills: five kernels"),
    "hidden copies": Difference(("matmul",), "forward", "torch.matmul copies permuted 4-D operands when batch > 1"),
    "gradient copies": Difference(
        ("matmul", "copy"), "backward", "gradients of permuted views are copied before the next product"
    ),
    "scalar operand": Difference(
        ("divu",), "forward", "division by a one-element tensor reads one tensor; the reference calls it tensor-tensor"
    ),
    "scalar gradient": Difference(("divu",), "backward", "a scalar operand gets no gradient"),
    "pooler": Difference(("tanh",), "forward", "the pooler's tanh is classed relu by the reference"),
    "tanh gradient": Difference(("tanh",), "backward", "one fused kernel of two reads, not a multiply and an add"),
    "mask select": Difference(
        ("where",), "forward", "the mask is boolean and broadcast: its true bytes; slicing it is a view"
    ),
    "select gradient": Difference(("where",), "backward", "one select instead of two fills"),
    "add gradient": Difference(
        ("add", "addu"), "backward", "the gradient of an add launches nothing, save a sum over a broadcast operand"
    ),
    "multiply gradient": Difference(
        ("mul", "scale"), "backward", "one product per operand that needs a gradient, and a sum over a broadcast one"
    ),
    "norm gradient": Difference(
        ("norm",), "backward", "input and parameter gradients are row kernels of several passes"
    ),
    "mean gradient": Difference(("mean",), "backward", "one division of the expanded gradient, not two fills"),
    "root gradient": Difference(("rsqrt",), "backward", "three elementwise kernels on the row means"),
    "root": Difference(("rsqrt",), "forward", "an elementwise kernel; the reference calls it memory traffic"),
    "dropout": Difference(
        ("dropout",), "forward", "the boolean mask is written as well; at rate 0 nothing runs, the reference charges it"
    ),
    "dropout gradient": Difference(("dropout",), "backward", "products with the mask and the scale, not two fills"),
    "bias gradient": Difference(
        ("linear",), "backward", "a bias gradient is a column sum; no bias, no sum and no accumulation; gradient copies"
    ),
    "gradient sum": Difference(
        ("gradient_sum",), "backward", "gradients of a tensor with several consumers are added; the reference omits it"
    ),
    "merge": Difference(("copy",), "forward", "OPT's attention output is copied by `reshape`, costed 0"),
    "routing": Difference(
        ("max_rows", "gather", "scatter"),
        "forward",
        "gathers and scatters move the chosen rows only, the reference charges whole tensors",
    ),
    "routing gradient": Difference(
        ("max_rows", "gather", "scatter"),
        "backward",
        "gradients of gathers fill and scatter once; counters and indices have none",
    ),
}
"""Deliberate differences by name. Matrix products never differ, save for the slip below."""

MATMUL_SLIP = "the reference takes any node named matmul_4… for a Linear: attention products 4 and 40 to 49 of Switch"
"""Why `reference_kernels` turns up to eleven products of a Switch Transformer into Linear; this package does not."""


def reference_kernels(
    config: str | Path | Mapping[str, Any], batch_size: int, sequence_length: int, mode: str = "inference"
) -> Counter[Op]:
    """Kernels the reference charges for a model, as a multiset over forward, backward and weight gradients.

    Arithmetic on sizes (one-element tensors) is left out. Expert gathers have the size of balanced routing.
    """
    parsed, nodes = trace(config, batch_size, sequence_length, mode)
    counts: Counter[Op] = Counter()
    for node in nodes:
        for op in (*charged(node, "forward"), *(charged(node, "backward") if mode == "training" else ())):
            counts[op] += node.repeat
    if parsed.values["model_type"] == "switch_transformers":
        _apply_matmul_slip(nodes, counts, mode)
    return counts


def charged(node: Node, phase: str) -> list[Op]:
    """What the reference charges for one execution of a node; phase "backward" includes weight gradients."""
    rule = _forward if phase == "forward" else _backward
    return [op for traced in node.traced for op in rule(traced) if not _scalar(op)]


def launched(node: Node, phase: str) -> Counter[Op]:
    """Kernels of one execution of a node in the reference's notation; traffic as a number of elements."""
    kernels = node.forward if phase == "forward" else (*node.backward, *node.weight_gradient)
    return Counter(_notation(kernel) for kernel in kernels for _ in range(int(kernel.count)))


def comparable(ops: Iterable[Op]) -> Counter[Op]:
    """Reference ops in the form of `launched`: vector and memory ops by their number of elements."""
    out: Counter[Op] = Counter()
    for kind, args in ops:
        if kind == "MEM":
            out[(kind, (sum(prod(shape) for shape in args),))] += 1
        elif kind.startswith("VEC"):
            out[(kind, (prod(args),))] += 1
        else:
            out[(kind, args)] += 1
    return out


def _notation(kernel: Kernel) -> Op:
    dims = {name: int(value) for name, value in kernel.dims.items() if name not in ("reads", "writes")}
    if kernel.family == "linear":
        return ("Linear", (dims["m"], dims["k"], dims["n"]))
    if kernel.family == "bmm":
        return ("BMM", (dims["batch"], dims["m"], dims["k"], dims["n"]))
    elements = dims["rows"] * dims["cols"]
    if kernel.family == "memory":
        return ("MEM", (round(elements * (kernel.dims["reads"] + kernel.dims["writes"])),))
    names = {"softmax_backward": "softmax", "layernorm": "ln", "add_permuted": "add"}
    return (f"VEC{names.get(kernel.op, kernel.op)}", (elements,))


def _scalar(op: Op) -> bool:
    kind, args = op
    if kind == "MEM":
        return all(prod(shape) == 1 for shape in args)
    return kind.startswith("VEC") and prod(args) == 1


def _matrix(shape: Shape) -> tuple[int, int]:
    return prod(shape[:-1]), shape[-1]


def _product(traced: Traced) -> tuple[int, int, int, int]:
    a, b = traced.inputs
    return prod(a[:-2]), a[-2], a[-1], b[-1]


def _forward(traced: Traced) -> list[Op]:
    kind = traced.kind
    if kind == "Linear":
        return [("Linear", (*_matrix(traced.inputs[0]), traced.output[-1]))]
    if kind == "BMM":
        return [("BMM", _product(traced))]
    if kind.startswith("VEC"):
        return [(kind, _matrix(traced.output))]
    if kind == "Weight":
        return []
    return [("MEM", (*traced.inputs, traced.output))]


def _backward(traced: Traced) -> list[Op]:
    kind, output = traced.kind, traced.output
    if kind == "Linear":
        m, n = _matrix(traced.inputs[0])
        k = output[-1]
        return [("Linear", (m, k, n)), ("Linear", (k, m, n)), ("VECadd", (1, k * n)), ("VECadd", (1, k))]
    if kind == "BMM":
        batch, m, n, k = _product(traced)
        return [("BMM", (batch, m, k, n)), ("BMM", (batch, n, m, k))]
    if kind == "EMBEDDING":
        return [("MEM", (traced.weight,))] * 2 + [("VECadd", (1, prod(traced.weight)))]
    if kind == "Weight":
        return [("VECadd", (1, prod(output)))]
    if kind == "rsqrt":
        return [("MEM", (*traced.inputs, output))]
    if not kind.startswith("VEC"):
        return [("MEM", traced.inputs)] * 2
    size = _matrix(output)
    name = kind.removeprefix("VEC")
    if name in ("add", "addu"):
        return [("MEM", (size,))] * len(traced.inputs)
    if name in ("mul", "div"):
        return [(kind, size)] * 2
    if name in ("pow", "powu"):
        return [(kind, size), ("VECmul", size), ("VECmulu", size)]
    if name == "tanh":
        return [("VECmulu", size), ("VECaddu", size)]
    if name == "softmax":
        return [("VECmul", size), (kind, size)]
    if name == "ln":
        return [("VECmul", size), ("VECadd", (1, size[1])), ("VECadd", (1, size[1]))]
    return [(kind, size)]


def _apply_matmul_slip(nodes: Iterable[Node], counts: Counter[Op], mode: str) -> None:
    """Turn the products the reference misnames into Linear, in the multiset."""
    sections: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "matmul":
            sections.setdefault(node.section, []).append(node)
    order: list[Node] = []
    blocks = {name: members[0].repeat for name, members in sections.items()}
    for side in ("encoder", "decoder"):
        names = [name for name in sections if name.startswith(f"{side}.")]
        for _ in range(max((blocks[name] for name in names), default=0)):
            order += [node for name in names for node in sections[name]]
    for index, node in enumerate(order):
        if not str(index).startswith("4"):
            continue
        (traced,) = node.traced
        batch, m, n, k = _product(traced)
        linear = Traced("Linear", ((batch * m, n),), (batch * m, k))
        for rule in (_forward, _backward) if mode == "training" else (_forward,):
            counts.subtract(rule(traced))
            counts.update(rule(linear))
    for op in [op for op, count in counts.items() if count == 0]:
        del counts[op]
