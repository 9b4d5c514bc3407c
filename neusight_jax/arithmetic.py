"""Arithmetic paths of a GPU and the dtypes that run on them: one table, read by specifications, kernels and graphs."""

from __future__ import annotations

from neusight_jax.errors import unknown_name

PATHS: tuple[str, ...] = (
    *("fp32", "fp32_matrix", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"),
    *("fp64", "fp64_matrix"),
)
"""Arithmetic paths a GPU may have. `fp32` and `fp64` are vector paths; `fp32_matrix` is the separate matrix path of
AMD's CDNA, `fp64_matrix` that of CDNA since the second and of tensor cores since A100."""

DTYPES: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8", "fp64")
"""Dtypes a kernel may have. Matrix products run on the path of the same name (`fp32` and `fp64` on their matrix path
where it is the faster); everything else computes on the fp32 vector path and only moves fewer bytes, but fp64, which
has its own."""

ELEMENT_BYTES: tuple[float, ...] = (4.0, 4.0, 2.0, 2.0, 1.0, 0.5, 1.0, 8.0)
"""Bytes of one element, in the order of `DTYPES`."""


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element; `InputError` for an unknown dtype."""
    return ELEMENT_BYTES[dtype_index(dtype)]


def dtype_index(dtype: str) -> int:
    """Position of a dtype in `DTYPES`; `InputError` for an unknown one."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    return DTYPES.index(dtype)
