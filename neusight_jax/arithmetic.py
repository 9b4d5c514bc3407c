"""Arithmetic paths of a GPU and the dtypes that run on them: one table, read by specifications, kernels and graphs."""

from __future__ import annotations

from typing import NamedTuple

from neusight_jax.errors import unknown_name


class Dtype(NamedTuple):
    """A dtype that a kernel may have.

    Attributes:
      bytes: of one element.
      energy: of one FLOP over that of fp32 (`physics.Physics.dtype_energy` says where it is from).
      products: family of its matrix products, "" = `linear` and `bmm`, as in fp32.
      matrix: whether a GPU may have a matrix path of it beside its vector path.
    """

    bytes: float
    energy: float
    products: str = ""
    matrix: bool = False


TABLE: dict[str, Dtype] = {
    "fp32": Dtype(4.0, 1.0, matrix=True),
    "tf32": Dtype(4.0, 0.13, "gemm"),
    "bf16": Dtype(2.0, 0.065, "gemm"),
    "fp16": Dtype(2.0, 0.065, "gemm"),
    "fp8": Dtype(1.0, 0.033, "gemm_fp8"),
    "fp4": Dtype(0.5, 0.017, "gemm_fp4"),
    "int8": Dtype(1.0, 0.033, "gemm_fp8"),
    "fp64": Dtype(8.0, 1.3, matrix=True),
}
"""Dtypes by name. Matrix products run on the path of the same name (`fp32` and `fp64` on their matrix path where it is
the faster); everything else computes on the fp32 vector path and only moves fewer bytes; fp64 has a vector path of its
own."""

DTYPES: tuple[str, ...] = tuple(TABLE)
"""Names of the dtypes; kernels have them by their position here."""

PATHS: tuple[str, ...] = tuple(
    path for name, dtype in TABLE.items() for path in ((name, f"{name}_matrix") if dtype.matrix else (name,))
)
"""Arithmetic paths a GPU may have. `fp32` and `fp64` are vector paths; `fp32_matrix` is the separate matrix path of
AMD's CDNA, `fp64_matrix` that of CDNA since the second and of tensor cores since A100."""

ELEMENT_BYTES: tuple[float, ...] = tuple(dtype.bytes for dtype in TABLE.values())
"""Bytes of one element, in the order of `DTYPES`."""


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element; `InputError` for an unknown dtype."""
    return ELEMENT_BYTES[dtype_index(dtype)]


def dtype_index(dtype: str) -> int:
    """Position of a dtype in `DTYPES`; `InputError` for an unknown one."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return DTYPES.index(dtype)
