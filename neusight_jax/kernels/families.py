"""The families this package models, by name. A new family is one new file and one line here."""

from __future__ import annotations

from collections.abc import Iterable

from neusight_jax.kernels.attention import DECODE, PREFILL
from neusight_jax.kernels.collective import COLLECTIVE
from neusight_jax.kernels.conv import CONV
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.gemm import BMM, LINEAR
from neusight_jax.kernels.grouped_gemm import GROUPED_GEMM
from neusight_jax.kernels.rowwise import ELEMENTWISE, MEMORY, NORM, REDUCTION, SOFTMAX, STREAM, STRIDED
from neusight_jax.kernels.tensor_conv import TENSOR_CONV
from neusight_jax.kernels.tensor_gemm import FAMILY_BY_DTYPE, GEMM, GEMM_FP4, GEMM_FP8

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LINEAR, BMM, CONV, ELEMENTWISE, SOFTMAX, NORM, MEMORY, STRIDED),
        *(GEMM, GEMM_FP8, GEMM_FP4, GROUPED_GEMM, PREFILL, DECODE, STREAM, REDUCTION, TENSOR_CONV, COLLECTIVE),
    )
}
"""Every kernel family, in the order tables and forecasts hold them."""

TENSOR_FAMILIES: frozenset[str] = frozenset(
    name for name, family in FAMILIES.items() if family.tensor_core and family not in (TENSOR_CONV, COLLECTIVE)
)
"""Families of tensor cores and what runs between them: in a table all or none, so that others stay small."""

RARE_FAMILIES: frozenset[str] = frozenset({STRIDED.name, TENSOR_CONV.name, COLLECTIVE.name})
"""Families that few tables have kernels of: in a table only where it has."""


def family_of(family: str, dtype: str) -> str:
    """Family a kernel belongs to: products and convolutions of any dtype but fp32 run on tensor cores."""
    if family == CONV.name and FAMILY_BY_DTYPE.get(dtype) is GEMM:
        return TENSOR_CONV.name
    return FAMILY_BY_DTYPE[dtype].name if family in (LINEAR.name, BMM.name) and dtype in FAMILY_BY_DTYPE else family


def table_families(present: Iterable[str]) -> tuple[str, ...]:
    """Families a table holds, empty ones included, given those it has kernels of."""
    there = set(present)
    left_out = RARE_FAMILIES - there
    if not TENSOR_FAMILIES & there:
        left_out |= TENSOR_FAMILIES
    return tuple(name for name in FAMILIES if name not in left_out)
