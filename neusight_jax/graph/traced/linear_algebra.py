"""FFTs and factorisations by the FLOP that textbooks count, for both front-ends.

FFTs are modelled: they move their arrays once for each axis. Of factorisations only the least is known, FLOP and bytes:
they go step by step, so that they are marked `unmodelled` and their interval is open upwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2, prod

import jax.numpy as jnp

from neusight_jax.graph.traced.operation import PRODUCT_FAMILIES, Call, Kernels, Value, is_rated, moved
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.rowwise import COUNTED
from neusight_jax.kernels.table import Kernel

COMPLEX_FLOP = 4.0
"""FLOP of a complex multiply-add over those of a real one."""

_Count = Callable[[float, float, float, bool], float]
_FLOP: dict[str, _Count] = {
    **dict.fromkeys(("cholesky",), lambda m, n, out, vectors: n**3 / 3),
    **dict.fromkeys(("lu", "det", "slogdet"), lambda m, n, out, vectors: m * n**2 - n**3 / 3),
    **dict.fromkeys(("inv", "cholesky_inverse"), lambda m, n, out, vectors: 2 * n**3),
    **dict.fromkeys(("qr", "geqrf", "householder_product"), lambda m, n, out, vectors: 2 * m * n**2 - 2 * n**3 / 3),
    **dict.fromkeys(("ormqr", "lstsq"), lambda m, n, out, vectors: 2 * m * n**2),
    **dict.fromkeys(("eigh", "eigvalsh"), lambda m, n, out, vectors: 9 * n**3 if vectors else 4 * n**3 / 3),
    **dict.fromkeys(("eig", "eigvals", "schur"), lambda m, n, out, vectors: 25 * n**3 if vectors else 10 * n**3),
    **dict.fromkeys(("hessenberg",), lambda m, n, out, vectors: 10 * n**3 / 3),
    **dict.fromkeys(("tridiagonal",), lambda m, n, out, vectors: 4 * n**3 / 3),
    **dict.fromkeys(
        ("svd", "svdvals"),
        lambda m, n, out, vectors: 14 * m * n**2 + 8 * n**3 if vectors else 4 * m * n**2 - 4 * n**3 / 3,
    ),
    **dict.fromkeys(("triangular_solve", "solve_triangular"), lambda m, n, out, vectors: n * out),
    **dict.fromkeys(("cholesky_solve", "lu_solve"), lambda m, n, out, vectors: 2 * n * out),
    **dict.fromkeys(("solve",), lambda m, n, out, vectors: 2 * n**3 / 3 + 2 * n * out),
}
"""FLOP by rows m >= columns n of a real matrix, elements of a solution, and whether vectors are wanted beside values.
Source: Golub and Van Loan, Matrix Computations, 4th edition, 2013, chapters 3 to 5, 7 and 8 (figure 8.6.1)."""
_AFFIXES = re.compile(r"^_?linalg_|(?:_factor)?(?:_ex)?$")


def factorisation(call: Call) -> Kernels | None:
    """The least that a factorisation or a solver takes; None for all other operators."""
    count = _FLOP.get(_AFFIXES.sub("", call.op))
    matrices = [value for value in call.inputs if len(value.shape) > 1]
    if count is None or not matrices:
        return None
    square = (value for value in matrices if value.shape[-1] == value.shape[-2])
    matrix = next(square, matrices[0])
    n, m = sorted(matrix.shape[-2:])
    batch = prod(matrix.shape[:-2])
    # Torch lists the shapes of vectors that its third argument says nobody wants, too.
    vectors = any(value.elements >= batch * n * n for value in call.outputs) and tuple(call.args[2:3]) != (False,)
    solution = call.outputs[0].elements / max(batch, 1)
    flop = batch * count(float(m), float(n), solution, vectors)
    return (_counted("unmodelled", call, flop * (COMPLEX_FLOP if is_complex(matrix) else 1.0)),)


def fourier(call: Call, axes: Sequence[int]) -> Kernels:
    """An FFT over axes: 5 n log2 n FLOP for n complex elements, half of that for n real ones (Frigo and Johnson, FFTW).

    Every axis is one pass over the array, read and written.
    """
    source, result = call.inputs[0], call.outputs[0]
    real = next((value for value in (source, result) if not is_complex(value)), None)
    whole = real or source
    length = prod(whole.shape[axis] for axis in axes)
    flop = (2.5 if real else 5.0) * whole.elements * log2(max(length, 2))
    return (_counted("fft", call, flop, float(len(axes))),)


def complex_product(kernel: Kernel) -> Kernel:
    """A real product as a complex one of the same sizes: [2M x 2K] · [2K x N]; other products four times over."""
    if kernel.family not in ("linear", "bmm"):
        return replace(kernel, count=kernel.count * COMPLEX_FLOP) if kernel.family in PRODUCT_FAMILIES else kernel
    dims = kernel.dims
    return replace(kernel, dims={**dims, "m": 2.0 * dims["m"], "k": 2.0 * dims["k"]})


def unrated_dtype(call: Call) -> str:
    """The dtype of a product's operands where neither has a rate; "" where one has."""
    names = [value.dtype for value in call.inputs[:2]]
    return "" if any(is_rated(name) for name in names) else names[0]


def unrated_product(call: Call, kernels: Kernels) -> Kernels:
    """Kernels of a product in a dtype that no path has: FLOP at the rate of fp32, which is the least they take."""
    flop = 0.0
    for kernel in kernels:
        if kernel.family in PRODUCT_FAMILIES:
            family = FAMILIES[kernel.family]
            dims = {**dict(family.options), **kernel.dims}
            work = family.work({name: jnp.array([float(size)]) for name, size in dims.items()}, jnp.array([4.0]))
            flop += float(work.flop[0]) * kernel.count
    return (_counted("unmodelled", call, flop),)


def _counted(op: str, call: Call, flop: float, passes: float = 1.0) -> Kernel:
    """A kernel known by its FLOP and bytes alone.

    Args:
      op: one of `rowwise.COUNTED.ops`.
      call: whose arrays it moves.
      flop: arithmetic of the whole launch, FLOP.
      passes: how often all of them are moved.
    """
    kernel = moved("unmodelled", call.inputs, call.outputs, passes)
    return replace(kernel, family=COUNTED.name, op=op, dims={**kernel.dims, "flop": flop})


def is_complex(value: Value) -> bool:
    """Whether an array holds complex numbers."""
    return value.dtype.startswith("complex")
