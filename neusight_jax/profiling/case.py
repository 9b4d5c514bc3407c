"""One kernel to be measured, in the letters of the measurement schema, and what it needs of a machine."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neusight_jax.arithmetic import DTYPES, dtype_bytes
from neusight_jax.datasets import schema
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.kernels.families import OPERATORS
from neusight_jax.kernels.rowwise import BINARY_OPS

MEASURED_OPS: tuple[str, ...] = tuple(
    op
    for op in schema.OPS
    if op not in (*schema.EXPERT_OPS, *schema.QUANTIZE_OPS) and (op not in OPERATORS or OPERATORS[op][1].run)
)
"""Every operator that can be measured."""
FLOP_PER_ELEMENT: dict[str, float] = {"softmax": 5.0, "ln": 6.0, "copy": 0.0}
"""Arithmetic per element of row-wise operators, for planning; 1 for the others."""
MATRIX_DTYPES: tuple[str, ...] = ("tf32", "fp8")
"""Dtypes that only matrix products have."""
UNMEASURED_DTYPES: tuple[str, ...] = ("fp4", "int8")
SCALAR, POWER = 1.5, 3.0
"""Second operand of tensor-scalar operators, and of powers, as GELU takes them."""
POSITIVE: tuple[str, ...] = ("div", "pow", "powu")
"""Operators whose inputs are drawn from [0.5, 1.5): others would divide by zero or take powers of negative numbers."""
POINTWISE: dict[str, Callable[..., Any]] = {
    **{"add": operator.add, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow},
    **{"addu": lambda x: x + SCALAR, "mulu": lambda x: x * SCALAR, "divu": lambda x: x / SCALAR},
    "powu": lambda x: x**POWER,
}
"""Elementwise operators that arrays of any library have."""


@dataclass(frozen=True)
class Case:
    """One kernel: operator, dims and dtype.

    Attributes:
      op: operator of the schema.
      dims: (column, size) in the schema's letters; in a matrix product n is the contraction.
      dtype: of `arithmetic.DTYPES`.
    """

    op: str
    dims: tuple[tuple[str, int], ...]
    dtype: str = "fp32"

    @property
    def sizes(self) -> dict[str, int]:
        """Dims by column."""
        return dict(self.dims)

    @property
    def key(self) -> str:
        """A text that no other kernel has."""
        return f"{self.op} {self.dtype} " + " ".join(f"{name}={size}" for name, size in self.dims)

    def to_row(self) -> dict[str, Any]:
        """The columns of the schema that say which kernel this is."""
        return {"op": self.op, "dtype": self.dtype, **self.sizes}


def make_case(op: str, dims: Mapping[str, Any], dtype: str = "fp32") -> Case:
    """A case from columns of the schema.

    Args:
      op: operator; dims: its dims, others are ignored; `b` of linear may be absent (1); dtype: of all tensors.
    Raises: `InputError` for an unknown operator or dtype, and for dims that are no whole numbers above 0.
    """
    if op not in MEASURED_OPS:
        raise unknown_name("op", op, MEASURED_OPS)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    columns = ("b", *schema.op_columns(op)) if op == "linear" else schema.op_columns(op)
    sizes = {"b": 1, **dims} if op == "linear" else dims
    return Case(op, tuple((name, _size(op, name, sizes.get(name))) for name in columns), dtype)


def _size(op: str, name: str, value: Any) -> int:
    least = 0 if name in ("padding", "causal") else 1
    try:
        # Columns with gaps hold whole numbers as floats.
        size = int(value)
        if size == float(value) and size >= least:
            return size
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{name} of {op} is {value}, expected a whole number of at least {least}")


def own_operator(case: Case, backend: str) -> Callable[..., Any] | None:
    """A function of the case's inputs as its family gives it for "jax" or "torch"; None for built-in operators."""
    run = OPERATORS[case.op][1].run if case.op in OPERATORS else None
    return run(backend, case.sizes) if run else None


@dataclass(frozen=True)
class Operands:
    """Arrays a kernel reads and writes.

    Attributes:
      inputs: shapes; output: shape; flop: arithmetic, FLOP; scratch: elements of fp32 between its own kernels.
    """

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    flop: float
    scratch: int = 0

    def elements(self) -> int:
        """Elements of inputs and output."""
        return sum(math.prod(shape) for shape in (*self.inputs, self.output))


def operands(case: Case) -> Operands:
    """Shapes and arithmetic of a case. Channels are innermost; attention is (batch, tokens, heads, head_dim).

    Of a collective they are those of one rank.
    """
    d = case.sizes
    if case.op in OPERATORS:
        return Operands(*OPERATORS[case.op][1].tensors(d))
    if case.op in ("linear", "bmm"):
        b, m, n, k = d["b"], d["m"], d["n"], d["k"]
        flop = 2.0 * b * m * n * k
        if case.op == "bmm":
            return Operands(((b, m, n), (b, n, k)), (b, m, k), flop)
        return Operands(((b * m, n), (n, k), (k,)), (b * m, k), flop)
    if case.op == "conv":
        return _conv(d)
    if case.op in schema.ATTENTION_OPS:
        return _attention(d)
    if case.op in COLLECTIVE_OPS:
        return _collective(case)
    shape = (d["b"], d["h"])
    flop = FLOP_PER_ELEMENT.get(case.op, 1.0) * d["b"] * d["h"]
    if case.op == "ln":
        return Operands((shape, (d["h"],), (d["h"],)), shape, flop)
    return Operands((shape,) * (2 if case.op in BINARY_OPS else 1), shape, flop)


def case_bytes(case: Case) -> tuple[float, float]:
    """Bytes of one set of inputs and its output, and of scratch memory while the kernel runs."""
    tensors = operands(case)
    return tensors.elements() * dtype_bytes(case.dtype), 4.0 * tensors.scratch


def _conv(d: Mapping[str, int]) -> Operands:
    out = (d["input_size"] + 2 * d["padding"] - d["kernel_size"]) // d["stride"] + 1
    if out < 1:
        raise InputError(f"conv: a window of {d['kernel_size']} does not fit an image of {d['input_size']}")
    image = (d["b"], d["input_size"], d["input_size"], d["input_channels"])
    window = (d["kernel_size"], d["kernel_size"], d["input_channels"], d["output_channels"])
    flop = 2.0 * d["b"] * out * out * math.prod(window)
    return Operands((image, window), (d["b"], out, out, d["output_channels"]), flop)


def _collective(case: Case) -> Operands:
    d = case.sizes
    whole = d["ranks"] * dtype_bytes(case.dtype)
    if d["bytes"] % whole:
        raise InputError(
            f"{case.op} of {d['bytes']} bytes: expected a multiple of ranks · bytes of a number = {whole:g}"
        )
    elements = int(d["bytes"] / dtype_bytes(case.dtype))
    shard = elements // d["ranks"]
    into, out = {"all_gather": (shard, elements), "reduce_scatter": (elements, shard)}.get(case.op, (elements,) * 2)
    return Operands(((into,),), (out,), 0.0)


def _attention(d: Mapping[str, int]) -> Operands:
    if d["heads"] % d["kv_heads"]:
        raise InputError(f"attention: {d['heads']} heads are no multiple of {d['kv_heads']} kv_heads")
    query = (d["batch_size"], d["query_length"], d["heads"], d["head_dim"])
    kept = (d["batch_size"], d["kv_length"], d["kv_heads"], d["head_dim"])
    scores = d["batch_size"] * d["heads"] * d["query_length"] * d["kv_length"]
    # A causal mask leaves about half of the scores to be computed.
    flop = 4.0 * scores * d["head_dim"] * (0.5 if d["causal"] else 1.0)
    return Operands((query, kept, kept), query, flop, scratch=2 * scores)
