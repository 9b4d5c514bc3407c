"""The families there are, by name: those of this package, and those that installed packages register.

A new family is one new file, and one line here or, from outside, one entry point of the group `GROUP`
(docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from neusight_jax.errors import InputError
from neusight_jax.kernels.attention import DECODE, PREFILL
from neusight_jax.kernels.collective import COLLECTIVE
from neusight_jax.kernels.conv import CONV, TENSOR_CONV
from neusight_jax.kernels.family import Family, Operator
from neusight_jax.kernels.gemm import BMM, FAMILY_BY_DTYPE, GEMM, GEMM_FP4, GEMM_FP8, LINEAR
from neusight_jax.kernels.grouped_gemm import GROUPED_GEMM
from neusight_jax.kernels.rowwise import COUNTED, ELEMENTWISE, MEMORY, NORM, REDUCTION, SOFTMAX, STREAM, STRIDED, WINDOW

GROUP = "neusight_jax.families"
"""Entry points of this group are families (`Family`), each `name = "module:FAMILY"`."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LINEAR, BMM, CONV, ELEMENTWISE, SOFTMAX, NORM, MEMORY, STRIDED, WINDOW),
        *(GEMM, GEMM_FP8, GEMM_FP4, GROUPED_GEMM, PREFILL, DECODE, STREAM, REDUCTION, TENSOR_CONV, COLLECTIVE),
        COUNTED,
    )
}
"""Every kernel family, in the order tables and forecasts hold them."""


def _registered(point: EntryPoint, families: Iterable[Family]) -> Family:
    """The family of an entry point. `InputError` unless it is one, with names that no other family has."""
    where = f"family {point.value} of the package {point.dist.name if point.dist else 'that registers it'}"
    try:
        family = point.load()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{where} cannot be loaded ({type(error).__name__}: {reason}); mend or uninstall it") from None
    if not isinstance(family, Family):
        raise InputError(f"{where} is a {type(family).__name__}, expected a neusight_jax.kernels.family.Family")
    taken = {name for other in families for name in (other.name, *other.ops)} & {family.name, *family.ops}
    if taken:
        first = family.name if family.name in taken else min(taken)
        raise InputError(f"{where}: there is a family or operator {first!r} already; give it another name")
    foreign = {op for op, _ in family.operators} - set(family.ops)
    if foreign or family.network not in (family.name, *(other.name for other in families)):
        wrong = f"operators has {min(foreign)!r}, which is not in ops" if foreign else f"no network {family.network!r}"
        raise InputError(f"{where}: {wrong}; mend the family")
    return family


BUILT_IN: frozenset[str] = frozenset(FAMILIES)
# After the built-in families, so that no package takes a name of theirs.
for _point in entry_points(group=GROUP):
    _family = _registered(_point, FAMILIES.values())
    FAMILIES[_family.name] = _family

OPERATORS: dict[str, tuple[Family, Operator]] = {
    op: (family, operator) for family in FAMILIES.values() for op, operator in family.operators
}
"""Operators that say themselves what measurements, plans and traces need to know of them."""

TENSOR_FAMILIES: frozenset[str] = frozenset(
    name for name in BUILT_IN if FAMILIES[name].tensor_core and name not in (TENSOR_CONV.name, COLLECTIVE.name)
)
"""Families of tensor cores and what runs between them."""


def family_of(family: str, dtype: str) -> str:
    """Family a kernel belongs to: products and convolutions of any dtype but fp32 run on tensor cores."""
    if family == CONV.name and FAMILY_BY_DTYPE.get(dtype) is GEMM:
        return TENSOR_CONV.name
    return FAMILY_BY_DTYPE[dtype].name if family in (LINEAR.name, BMM.name) and dtype in FAMILY_BY_DTYPE else family
