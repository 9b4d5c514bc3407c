"""Walk: what the walkers of jaxprs and of aten graphs share as they write operations down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.graph import UNMODELLED
from neusight_jax.graph.traced.assembly import loop_cost
from neusight_jax.graph.traced.call import Call, Kernels
from neusight_jax.graph.traced.linear_algebra import complex_product, is_complex, unrated_dtype, unrated_product
from neusight_jax.graph.traced.operation import Kind, Operation
from neusight_jax.graph.traced.trace_options import PRODUCT_FAMILIES, TraceOptions, on_path


class Walk:
    """Operations of a program, in order.

    Attributes:
      options: how to read it.
      memory: array -> the array whose memory it is, where that is another.
    """

    def __init__(self, options: TraceOptions) -> None:
        self.options = options
        self.operations: list[Operation] = []
        self.memory: dict[int, int] = {}

    def operation(
        self,
        call: Call,
        kind: Kind,
        kernels: Kernels,
        *,
        known: bool,
        axes: Sequence[int],
        scope: Iterable[str],
        full_name: str,
        **place: Any,
    ) -> Operation:
        """A call as an operation.

        Args:
          kind: how it runs; kernels: of its own, for kind "opaque".
          known: whether it is modelled; if not, `full_name` says what it is.
          axes: of a reduction.
          scope: where it stands in the program; place: repeat, loop body.
        """
        # The fused attention of fp32 has no tf32.
        if self.options.fp32_products != "fp32" and "attention" not in call.op:
            kernels = tuple(on_path(kernel, self.options.fp32_products) for kernel in kernels)
        if any(kernel.family in PRODUCT_FAMILIES for kernel in kernels):
            if unrated := unrated_dtype(call):
                kernels, known, full_name = unrated_product(call, kernels), False, f"{full_name} of {unrated}"
            elif is_complex(call.inputs[0]):
                kernels = tuple(complex_product(kernel) for kernel in kernels)
        loop, reduced = call.outputs[0].shape if call.outputs else (), 1
        if kind in ("row", "column"):
            loop = call.inputs[0].shape
            reduced = prod(loop[axis] for axis in axes)
        return Operation(
            name=".".join((*scope, call.op)),
            op=call.op if known else f"{UNMODELLED} {full_name}",
            kind=kind,
            inputs=call.inputs,
            outputs=call.outputs,
            loop=loop,
            kernels=kernels,
            phase=call.phase,
            reduced=reduced,
            **place,
        )

    def branch(self, walks: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """Results of the branch of a condition that the options choose: one by its number, or that of most work."""
        chosen = self.options.branch
        if isinstance(chosen, int) and chosen not in range(len(walks)):
            raise InputError(f"branch is {chosen}, but a cond has {len(walks)} branches; expected one from 0")
        start, walked = len(self.operations), []
        for walk in walks if chosen == "worst" else (walks[int(chosen)],):
            results = walk()
            walked.append((self.operations[start:], results))
            del self.operations[start:]
        operations, results = max(walked, key=lambda pair: loop_cost(pair[0]))
        self.operations += operations
        return results
