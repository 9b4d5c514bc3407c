"""The families this package models, by name. A new family is one new file and one line here."""

from __future__ import annotations

from neusight_jax.kernels.conv import CONV
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.gemm import BMM, LINEAR
from neusight_jax.kernels.rowwise import ELEMENTWISE, MEMORY, NORM, SOFTMAX

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LINEAR, BMM, CONV, ELEMENTWISE, SOFTMAX, NORM, MEMORY)
}
"""Every kernel family, in the order tables and forecasts hold them."""
