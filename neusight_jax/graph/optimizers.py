"""Optimizers: the memory streams of one step, and the states they keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.graph.graph import Graph, Node
from neusight_jax.graph.kernel import matrix_product, rowwise
from neusight_jax.graph.memory import footprint, parameter_count, training_bytes
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel


@dataclass(frozen=True)
class Optimizer:
    """Cost of a step of an optimizer for each parameter.

    Attributes:
      step_bytes: memory traffic a step takes as much time as, whatever the dtype of the parameters, bytes.
      state_bytes: its states, bytes.
      launch_parameters: parameters one launch covers.
      orthogonalizes: whether the update of every matrix is made orthogonal, by `orthogonalizing_kernels`.
    """

    step_bytes: float
    state_bytes: float
    launch_parameters: float
    orthogonalizes: bool = False


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(41.0, 8.0, 2e7),
    "adamw-foreach": Optimizer(131.0, 8.0, 2e6),
    "adamw-8bit": Optimizer(33.0, 2.0, 2e6),
    "adafactor": Optimizer(72.0, 0.0, 2e6),
    "lion": Optimizer(20.0, 4.0, 2e6),
    "muon": Optimizer(30.0, 4.0, 2e6, orthogonalizes=True),
    "sgd": Optimizer(12.0, 0.0, 2e7),
    "sgd-momentum": Optimizer(20.0, 4.0, 2e7),
}
"""Fused AdamW reads gradient, weight and two moments and writes three of them, 28 bytes in fp32, but is bound by its
instructions: measured here with PyTorch on an H200, 105e9 parameters a second in fp32 and bf16 alike, 46 bytes of its
4.8 TB/s, of which a stream reaches nine tenths. The foreach form with `capturable` moves 119 to 144 bytes. Eight-bit
moments save 3 of 4 bytes each way; SGD reads gradient and weight and writes the weight, momentum adds a state. Lion
(Chen et al., 2023) in one kernel a tensor, as bitsandbytes has it, moves what momentum does. Adafactor (Shazeer and
Stern, 2018) in transformers runs squares, means, update, clip and step one after another; it keeps a row and a column
of each matrix. Muon (Jordan et al., 2024) reads gradient and momentum and writes the momentum, takes the norm of the
update, scales it in 16 bits, and reads it again with the weight; tables of words, which AdamW updates, count alike."""
NEWTON_SCHULZ_STEPS = 5
"""Of Muon, as published and in Megatron-LM."""
COLS = 1024.0
"""Columns a flat stream of parameters is laid out in."""


def optimizer_of(name: str) -> Optimizer:
    """An optimizer by name; `InputError` listing them for an unknown one."""
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def flat_stream(parameters: float, moved_bytes: float, tensor_cores: bool, launches: float = 1.0) -> Kernel:
    """A kernel that moves so many bytes of every parameter, in fp32.

    Args:
      parameters: elements, all launches together.
      moved_bytes: traffic of one parameter, bytes, half of it read and half written.
      tensor_cores: whether it runs between kernels of tensor cores.
      launches: kernels it is cut into.
    """
    rows = max(parameters / launches / COLS, 1.0)
    passes = moved_bytes / 8.0
    return rowwise("pointwise", rows, COLS, passes, passes, "fp32", launches, graphed=tensor_cores)


def optimizer_kernels(name: str, parameters: float, tensor_cores: bool) -> tuple[Kernel, ...]:
    """Kernels of one update of so many parameters."""
    costs = optimizer_of(name)
    launches = max(parameters / costs.launch_parameters, 1.0)
    return (flat_stream(parameters, costs.step_bytes, tensor_cores, launches),)


def step_kernels(name: str, parameters: float, tensor_cores: bool) -> tuple[Kernel, ...]:
    """Kernels of one update of so many parameters by a training framework, which clips gradients by their norm."""
    clip = flat_stream(parameters, 4.0, tensor_cores)
    return (clip, *optimizer_kernels(name, parameters, tensor_cores))


def orthogonalizing_kernels(graph: Graph) -> Iterator[tuple[str, Kernel]]:
    """Products by which Muon orthogonalizes the update of every matrix of a graph, and the operators they belong to.

    A step of Newton and Schulz of a matrix X with narrow side m and wide side n is A = X Xᵀ, B = b A + c A², and
    a X + B X: 4 m² n + 2 m³ FLOP, in 16 bits where there are tensor cores. Matrices are taken as they are stored: those
    of queries, keys and values as one, and of tensor parallelism each rank's part by itself (Megatron-LM's blockwise
    mode). The output projection is AdamW's. Of experts, those count that tokens meet.
    """
    tensor_cores = any(FAMILIES[family].tensor_core for family in graph.kernels.families)
    # Muon updates matrices of hidden layers alone, after which products are named.
    for node in graph.nodes:
        if node.op not in ("linear", "experts") or node.name == "head":
            continue
        for kernel in node.forward:
            if kernel.family not in ("linear", "bmm"):
                continue
            # A tall matrix is transposed first, as X Xᵀ is then the smaller square.
            narrow, wide = sorted((kernel.dims["n"], kernel.dims["k"]))
            launches = NEWTON_SCHULZ_STEPS * kernel.dims["batch"] * kernel.count * node.repeat
            for n, k in ((narrow, wide), (narrow, narrow), (wide, narrow)):
                yield node.op, matrix_product(1.0, narrow, n, k, "bf16" if tensor_cores else graph.dtype, launches)


def with_states(graph: Graph, optimizer: str | None, gradient_dtype: str) -> Graph:
    """A graph with the memory of gradients and of an optimizer's states, and a step of the optimizer at its end.

    Args:
      optimizer: of `OPTIMIZERS`; None = no step, and the states of Adam in memory; gradient_dtype: of gradients.
    Raises: `InputError` for an unknown optimizer or dtype, or either of them with another workload than training.
    """
    gradient_bytes = dtype_bytes(gradient_dtype)
    if graph.mode != "training":
        if optimizer is not None:
            raise InputError(f"mode is {graph.mode}; an optimizer goes with mode training, leave it out")
        if gradient_dtype != "fp32":
            raise InputError(f"mode is {graph.mode}; gradient_dtype goes with mode training, leave it out")
        return graph
    costs = optimizer_of(optimizer or "adamw")
    parameters = parameter_count(graph) if graph.trained is None else graph.trained
    states = training_bytes(parameters, dtype_bytes(graph.dtype), gradient_bytes, costs.state_bytes)
    changed = replace(
        graph,
        footprint=replace(footprint(graph), **states),
        options={**graph.options, "optimizer": optimizer, "gradient_dtype": gradient_dtype},
        notes=(*graph.notes, *state_notes(graph.dtype, gradient_dtype, optimizer)),
    )
    if optimizer is None:
        return changed
    tensor_cores = any(FAMILIES[family].tensor_core for family in graph.kernels.families)
    update = step_kernels if graph.launched == "eager" else optimizer_kernels
    kernels = update(optimizer, parameters, tensor_cores)
    if costs.orthogonalizes and parameters == parameter_count(graph):
        kernels += tuple(kernel for _, kernel in orthogonalizing_kernels(graph))
    node = Node("optimizer", "optimizer", (), (), (), 1, "", (), (1,), "", kernels)
    return replace(changed, nodes=(*graph.nodes, node))


def state_notes(dtype: str, gradient_dtype: str, optimizer: str | None) -> tuple[str, ...]:
    """Note on the bytes a trained weight takes, where there is a choice: of weights below four bytes."""
    if dtype_bytes(dtype) >= 4.0:
        return ()
    size, costs = max(dtype_bytes(dtype), 2.0), optimizer_of(optimizer or "adamw")
    total = size + sum(training_bytes(1.0, size, dtype_bytes(gradient_dtype), costs.state_bytes).values())
    other = "bf16" if gradient_dtype == "fp32" else "fp32"
    return (
        f"a trained weight takes {total:g} bytes: {size:g} of its own, gradient in {gradient_dtype}, states of "
        f"{optimizer or 'adamw'} and an fp32 copy; --gradient-dtype {other} for the other convention",
    )
