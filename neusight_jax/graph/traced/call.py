"""Call: one call of an operator of PyTorch's aten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from neusight_jax.graph.traced.operation import Value
from neusight_jax.kernels.table import Kernel


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
      op: its name without namespace, overload and the underscore of an in-place form.
      args: positional arguments, tensors as `Value`.
      inputs, outputs: the tensors among the arguments, and what it makes: what it returns, then what it writes to.
      in_place: whether it writes its result over its first argument.
    """

    op: str
    args: tuple[Any, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    in_place: bool = False


Rule: TypeAlias = Callable[[Call], tuple[Kernel, ...]]
