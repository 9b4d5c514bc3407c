"""Streams: kernels that a host launches one after another, as the steps of a training framework run."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.arithmetic import dtype_index
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.gemm import GEMM, GEMM_FP8, LOAD_BYTES, flop, loaded_bytes
from neusight_jax.kernels.table import PHASES, KernelBatch, KernelTable
from neusight_jax.model.programs import one_shot
from neusight_jax.model.software import LEARNED, Software

CLASSES: tuple[str, ...] = (
    *("tensor", "experts", "eight_bits", "eight_bit_experts", "flash2", "flash2_wide", "fp32", "plain"),
)
"""Classes of kernels that software runs slower than the forecast of one by itself, each by a factor of its own
(`factors`): products and streams of tensor cores; products of experts; eight-bit products that accumulate in registers,
and those of experts; FlashAttention-2, and it on wide matrix units; families of fp32, which were measured inside long
steps, and all kernels that no host launches one by one; and products of 16 bits that run without tensor cores
(`plain_seconds`)."""
EXPERTS: tuple[int, ...] = (CLASSES.index("experts"), CLASSES.index("eight_bit_experts"))
"""Places of the products of experts among `CLASSES`."""
PLAIN = CLASSES.index("plain")
"""Place of products without tensor cores."""
SIXTEEN_BITS: tuple[int, ...] = tuple(map(dtype_index, ("bf16", "fp16")))
"""Dtypes of such products, as kernels hold them."""
WIDE_FLOP_PER_CYCLE = 3000.0
"""16-bit FLOP a clock and SM above which matrix units need instructions that FlashAttention-2 lacks: an A100 has 2048,
an H100 4096."""
BATCHED = GEMM.ops.index("bmm")
"""Operator of batched products in their family."""
EXPERT = GEMM.ops.index("expert")
"""Operator of an expert's product in its family."""


def factors(software: Software) -> Float[Array, " class"]:
    """Seconds of each of `CLASSES` in a step over those of one kernel by itself."""
    kernels = software.kernels
    by_class: dict[str, ArrayLike] = {
        "tensor": kernels,
        "experts": kernels * software.experts,
        "eight_bits": kernels * software.eight_bits,
        "eight_bit_experts": kernels * (software.experts + software.eight_bits - 1.0),
        "flash2": kernels * software.flash2,
        "flash2_wide": kernels * software.flash2 * software.flash2_wide,
        "fp32": 1.0,
        "plain": kernels / software.plain,
    }
    return jnp.stack([jnp.asarray(by_class[name], float) for name in CLASSES])


def launch_seconds(software: Software) -> Float[Array, " class"]:
    """Host time of one launch of each of `CLASSES`, seconds."""
    times = [software.expert_launch_s if at in EXPERTS else software.launch_s for at in range(len(CLASSES))]
    return jnp.stack([jnp.asarray(time_s, float) for time_s in times])


def plain_seconds(gpu: GPU, products: KernelBatch) -> Float[Array, " kernel"]:
    """Seconds at the fp32 peak of batched products of 16 bits that run without tensor cores; 0 of all others.

    Rows that do not start on 16 bytes, such as heads 108 or 150 wide, were not for tensor cores (NVIDIA, "Matrix
    Multiplication Background", requirements of cuBLAS). A library that knows matrix units wider than Ampere's has
    kernels for them, as measured on H100, so there they stay products like others.
    """
    dims = {name: jnp.asarray(size) for name, size in products.dims.items()}
    narrow = loaded_bytes((dims["k"], dims["n"]), jnp.full_like(dims["k"], 2.0), dims) < LOAD_BYTES
    batched = jnp.isin(jnp.asarray(products.dtype), jnp.array(SIXTEEN_BITS)) & (jnp.asarray(products.op) == BATCHED)
    old = jnp.asarray(gpu.matrix_flop_per_cycle) <= WIDE_FLOP_PER_CYCLE
    return jnp.where(narrow & batched & old, flop(dims) / gpu.fp32_flop_per_s, 0.0)


def classes_of(
    gpu: GPU, kernels: KernelTable, seconds: Mapping[str, Float[Array, " kernel"]], flash2: ArrayLike = 0.0
) -> dict[str, tuple[Float[Array, " kernel"], Float[Array, "class kernel"]]]:
    """Seconds of kernels by themselves, and which of `CLASSES` each is of, 1 or 0; by family.

    Args:
      gpu: scalars.
      kernels: of any number.
      seconds: of one launch of each, by family, as `latency.kernel_latency` has them.
      flash2: 1 where attention is FlashAttention-2.
    """
    if kernels.launched != "eager":  # what a host adds is in the forecasts, and nothing else runs slower
        marks = jnp.eye(len(CLASSES))[:, CLASSES.index("fp32"), None]
        return {
            name: (jnp.asarray(family_s), jnp.broadcast_to(marks, (len(CLASSES), len(family_s))))
            for name, family_s in seconds.items()
        }
    return {
        name: _classes_of_family(gpu, name, kernels.families[name], jnp.asarray(family_s), flash2)
        for name, family_s in seconds.items()
    }


classes_once = one_shot(classes_of)
"""`classes_of` by a program that is compiled fast."""


def _classes_of_family(
    gpu: GPU, name: str, kernels: KernelBatch, seconds: Float[Array, " kernel"], flash2: ArrayLike
) -> tuple[Float[Array, " kernel"], Float[Array, "class kernel"]]:
    """`classes_of` of the kernels of one family.

    Matrix units without fp4 accumulate eight-bit products in registers, where gradients need the slower way of it
    (Transformer Engine, `use_split_accumulator`); later ones have memory of their own for that.

    Args: as `classes_of`; name: of the family.
    """
    op, family = jnp.asarray(kernels.op), FAMILIES[name]
    if not family.tensor_core:  # launched one by one; of fused kernels the launches are counted as a whole
        seconds = jnp.maximum(seconds, LEARNED.launch_s)
    none, every = jnp.zeros(op.shape), jnp.ones(op.shape)
    experts = jnp.where(op == EXPERT, every, none) if "expert" in family.ops else none
    narrow = jnp.where(jnp.asarray(gpu.fp4_flop_per_s) > 0, none, every) if name == GEMM_FP8.name else none
    wide = jnp.where(jnp.asarray(gpu.matrix_flop_per_cycle) > WIDE_FLOP_PER_CYCLE, every, none)
    older = every * flash2 if name == "prefill" else none
    lanes = plain_seconds(gpu, kernels) if name == GEMM.name else none
    plain = jnp.where(lanes > 0.0, every, none)
    fp32 = none if family.tensor_core else every
    marks = {
        "experts": experts * (1.0 - narrow),
        "eight_bits": narrow * (1.0 - experts),
        "eight_bit_experts": narrow * experts,
        "flash2": older * (1.0 - wide),
        "flash2_wide": older * wide,
        "fp32": fp32,
        "plain": plain,
    }
    marks["tensor"] = every - functools.reduce(jnp.add, marks.values())
    return jnp.where(lanes > 0.0, lanes, seconds), jnp.stack([marks[kind] for kind in CLASSES])


def longer(kernels: Array, host: Array) -> Array:
    """Nearly the maximum of the time of kernels and that of launching them, which overlap: a norm of order 4."""
    # It only keeps the powers in range and cancels out, so that no gradient need go through it.
    most = jax.lax.stop_gradient(jnp.maximum(jnp.maximum(kernels, host), 1e-12))
    return most * ((kernels / most) ** 4 + (host / most) ** 4 + 1e-12) ** 0.25


def step_seconds(
    gpu: GPU,
    kernels: KernelTable,
    seconds: Mapping[str, Float[Array, " kernel"]],
    software: Software,
    flash2: ArrayLike = 0.0,
) -> dict[str, Float[Array, " kernel"]]:
    """Seconds of kernels inside a step, by family.

    Args:
      gpu, kernels, seconds, flash2: as `classes_of`.
      software: numbers of the framework.
    """
    classes, slower = classes_of(gpu, kernels, seconds, flash2), factors(software)
    return {name: alone * (slower @ marks) for name, (alone, marks) in classes.items()}


def by_phase(kernels: KernelBatch) -> Float[Array, "phase kernel"]:
    """Launches of every kernel in each of `table.PHASES`."""
    phases = jnp.arange(len(PHASES))[:, None]
    return jnp.where(jnp.asarray(kernels.phase) == phases, jnp.asarray(kernels.count), 0.0)


def host_seconds(kernels: KernelTable, software: Software) -> Float[Array, " phase"]:
    """Host time of launching all kernels of a table."""
    total = jnp.zeros(len(PHASES))
    for name, batch in kernels.families.items():
        experts = (jnp.asarray(batch.op) == EXPERT) & ("expert" in FAMILIES[name].ops)
        of_one = jnp.where(experts, software.expert_launch_s, software.launch_s)
        total = total + by_phase(batch) @ of_one
    return total


def stream_seconds(
    kernels_s: Float[Array, "... phase"], host_s: Float[Array, "... phase"], software: Software
) -> Float[Array, "..."]:
    """Seconds of a step from those of its kernels and of their launches; with an optimizer also `Software.step_s`."""
    steps = jnp.where(host_s[..., PHASES.index("optimizer")] > 0.0, software.step_s, 0.0)
    return jnp.sum(longer(kernels_s, host_s), axis=-1) + steps
