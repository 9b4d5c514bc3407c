"""How a function or module is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neusight_jax.errors import InputError
from neusight_jax.kernels.table import Kernel
from neusight_jax.printed import Record

PRODUCT_FAMILIES = frozenset({"linear", "bmm", "conv"})
"""Families whose kernels multiply."""


@dataclass(frozen=True)
class TraceOptions(Record):
    """How a function or module is read.

    Attributes:
      fused: whether operations are fused into kernels as a compiler would; None = as the framework runs (JAX fused,
        torch not).
      while_trips: how often the body of every `while_loop` runs; None = a function with one is refused.
      branch: which branch of a `cond` or `switch` runs: "worst" (most FLOP + 50 FLOP per byte) or its index.
      fp32_products: arithmetic path of fp32 matrix products and convolutions, "fp32" or "tf32".
      name: of the graph; "" = that of the function or module.
      gpus_per_domain: neighbouring devices of a mesh that share fast links; 0 = all of it.
      parameters: arguments of a JAX function that hold parameters, by name or position ("0"); None = as use tells.
    """

    fused: bool | None = None
    while_trips: int | None = None
    branch: str | int = "worst"
    fp32_products: str = "fp32"
    name: str = ""
    parameters: tuple[str, ...] | None = None
    gpus_per_domain: int = 0

    def __post_init__(self) -> None:
        trips = self.while_trips
        if trips is not None and (isinstance(trips, bool) or not isinstance(trips, int) or trips < 0):
            raise InputError(f"while_trips is {trips!r}, expected a whole number of at least 0, or None")
        if self.branch != "worst" and (isinstance(self.branch, bool) or not isinstance(self.branch, int)):
            raise InputError(f"branch is {self.branch!r}, expected 'worst' or the index of a branch")
        if self.fp32_products not in ("fp32", "tf32"):
            raise InputError(f"fp32_products is {self.fp32_products!r}, expected 'fp32' or 'tf32'")


def on_path(kernel: Kernel, path: str) -> Kernel:
    """An fp32 product moved to another arithmetic path; other kernels as they are."""
    if kernel.family in PRODUCT_FAMILIES and kernel.dtype == "fp32":
        return replace(kernel, dtype=path)
    return kernel
