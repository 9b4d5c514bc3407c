"""Kernels measured in JAX: a loop on the device, and single calls.

The loop is one program. Its body runs the kernel once on every input set, each writing to an output that the loop
carries. Outputs are donated: no memory is allocated while the loop runs. The number of rounds is an argument: XLA lifts
kernels whose inputs stay the same out of a loop of known length, a barrier or not, but not out of one that may never
run. On a GPU it asks the host after every round of such a loop, so the same rounds of a loop that does nothing are
timed too and taken off.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from neusight_jax.errors import InputError
from neusight_jax.kernels.collective import OPS as COLLECTIVE_OPS
from neusight_jax.profiling.case import (
    MATRIX_DTYPES,
    POINTWISE,
    POSITIVE,
    UNMEASURED_DTYPES,
    Case,
    operands,
    own_operator,
)
from neusight_jax.profiling.machine import free_bytes, processor_name

_finished: Callable[[Any], Any] = jax.block_until_ready

timer: Callable[[], float] = time.perf_counter
"""The clock of the host, s."""
RANKS = "ranks"
"""Axis of the devices of a group."""
_lax: Any = lax  # its collectives have no types
_spec: Any = PartitionSpec
_EACH = _spec(RANKS)
BLOCK = 2**18
"""Random numbers drawn for an input on the CPU before they repeat."""
JAX_DTYPES: dict[str, Any] = {
    "fp32": jnp.float32,
    "tf32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp8": jnp.float8_e4m3fn,
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    **POINTWISE,
    **{"tanh": jnp.tanh, "relu": jax.nn.relu, "copy": jnp.copy},
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
}


class JaxBackend:
    """JAX on its first device: a GPU where it has one, else the CPU."""

    name = "jax"

    def __init__(self) -> None:
        self._device = jax.devices()[0]
        self.is_cpu = self._device.platform == "cpu"
        if self._device.platform not in ("cpu", "gpu"):
            raise InputError(f"JAX runs on {self._device.platform} here, expected a GPU or the CPU; set JAX_PLATFORMS")
        self.device = processor_name() if self.is_cpu else str(self._device.device_kind)

    def supports(self, case: Case) -> str:
        """Empty, or why this kernel cannot run here."""
        if case.dtype in UNMEASURED_DTYPES:
            return f"{case.dtype} is not measured"
        devices = jax.local_device_count()
        if case.op in COLLECTIVE_OPS and (case.sizes["nodes"] > 1 or case.sizes["ranks"] > devices):
            return f"{case.sizes['ranks']} ranks on {case.sizes['nodes']} nodes; JAX sees {devices} devices of one node"
        if case.dtype in MATRIX_DTYPES and (case.op not in ("linear", "bmm") or self.is_cpu):
            return f"no {case.op} in {case.dtype} here"
        return ""

    def free_bytes(self) -> float:
        """Memory that can be had on the device."""
        stats = None if self.is_cpu else self._device.memory_stats()
        if stats and "bytes_limit" in stats:
            return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
        return free_bytes()

    def versions(self) -> dict[str, str]:
        """Versions of JAX and what it runs on."""
        return {
            "jax": jax.__version__,
            "jaxlib": metadata.version("jaxlib"),
            "platform": str(self._device.client.platform_version).strip().replace("\n", ", "),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }

    def release(self) -> None:
        """Forget compiled programs: a thousand of them exhaust the memory maps of a process."""
        jax.clear_caches()  # type: ignore[no-untyped-call]

    def prepare(self, case: Case, sets: int, seed: int) -> JaxPrepared:
        """Compile a kernel and draw its inputs."""
        return JaxPrepared(case, sets, seed, on_cpu=self.is_cpu)


class JaxPrepared:
    """A kernel, its input sets and the outputs they write to.

    Args:
      on_cpu: draw fewer random numbers.
    """

    def __init__(self, case: Case, sets: int, seed: int, on_cpu: bool) -> None:
        self.sets, self._turn = sets, 0
        kernel = jax_operator(case)
        shapes = operands(case).inputs
        dtype = JAX_DTYPES[case.dtype]
        self._inputs = tuple(
            tuple(_draw((seed, set_index, index), shape, dtype, case.op, on_cpu) for index, shape in enumerate(shapes))
            for set_index in range(sets)
        )
        if case.op in COLLECTIVE_OPS:
            self._inputs = jax.tree.map(lambda operand: _on_ranks(operand, case.sizes["ranks"]), self._inputs)
        self._kernel = jax.jit(kernel)
        out, where = jax.eval_shape(kernel, *self._inputs[0]), self._inputs[0][0].sharding
        self._outputs = tuple(jnp.zeros(out.shape, out.dtype, device=where) for _ in range(sets))
        self._loop = jax.jit(functools.partial(_rounds, kernel), donate_argnums=2)
        _finished((self._inputs, self._outputs))

    def call(self) -> float:
        """Seconds of one jitted call, until its result is there."""
        inputs = self._inputs[self._turn]
        self._turn = (self._turn + 1) % self.sets
        begin = timer()
        _finished(self._kernel(*inputs))
        return timer() - begin

    def loop(self, rounds: int) -> float:
        """Seconds of `rounds` rounds on the device."""
        begin = timer()
        self._outputs = _finished(self._loop(jnp.int32(rounds), self._inputs, self._outputs))
        return timer() - begin

    def idle(self, rounds: int) -> float:
        """Seconds of as many rounds of a loop that does nothing."""
        begin = timer()
        _finished(_idle_rounds(jnp.int32(rounds)))
        return timer() - begin


def _rounds(kernel: Callable[..., Any], rounds: Any, inputs: Any, outputs: Any) -> Any:
    def once(step: Any, outputs: Any) -> Any:
        # Inputs are bound to the round, or XLA would run kernels whose inputs stay the same only once.
        held, *_ = lax.optimization_barrier((inputs, step, outputs))  # type: ignore[no-untyped-call]
        return tuple(kernel(*arrays) for arrays in held)

    return lax.fori_loop(0, rounds, once, outputs)


@jax.jit
def _idle_rounds(rounds: Any) -> Any:
    return lax.fori_loop(0, rounds, lambda _, carried: 0.5 * carried + 1.0, jnp.float32(0.0))


def _draw(seed: tuple[int, int, int], shape: tuple[int, ...], dtype: Any, op: str, on_cpu: bool) -> Any:
    """Random numbers; on the CPU a block of them over and over: drawing more would take longer than the kernel."""
    if on_cpu:
        random, size = np.random.default_rng(seed), min(math.prod(shape), BLOCK)
        block = random.random(size, np.float32) + 0.5 if op in POSITIVE else random.standard_normal(size, np.float32)
        return jnp.asarray(np.resize(block, shape)).astype(dtype)
    key = jax.random.key(hash(seed) % 2**32)
    if op in POSITIVE:
        return jax.random.uniform(key, shape, jnp.float32, 0.5, 1.5).astype(dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _ranks(count: int) -> NamedSharding:
    """One part on each of the first so many devices of this machine."""
    mesh = jax.make_mesh((count,), (RANKS,), devices=jax.local_devices()[:count])
    return NamedSharding(mesh, _EACH)


def _on_ranks(shard: Any, ranks: int) -> Any:
    """Place what one rank holds on all of them."""
    return jax.device_put(jnp.tile(shard, ranks), _ranks(ranks))


def _collective(case: Case) -> Callable[..., Any]:
    """A collective of arrays of `_on_ranks`."""
    run: Callable[..., Any] = {
        "all_reduce": lambda x: _lax.psum(x, RANKS),
        "all_gather": lambda x: _lax.all_gather(x, RANKS, tiled=True),
        "reduce_scatter": lambda x: _lax.psum_scatter(x, RANKS, tiled=True),
        "all_to_all": lambda x: _lax.all_to_all(x, RANKS, 0, 0, tiled=True),
        "send_recv": lambda x: _lax.ppermute(x, RANKS, [(0, 1)]),
    }[case.op]
    mesh = _ranks(case.sizes["ranks"]).mesh
    return jax.shard_map(run, mesh=mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False)


def jax_operator(case: Case) -> Callable[..., Any]:
    """A function of the case's inputs. fp32 products run in fp32; tf32 ones on tensor cores where there are any."""
    if operator := own_operator(case, "jax"):
        return operator
    if case.op in COLLECTIVE_OPS:
        return _collective(case)
    # fp8 has no precision to choose; fp32 must not become tf32.
    precision = lax.Precision.HIGHEST if case.dtype == "fp32" else lax.Precision.DEFAULT
    wide = jnp.bfloat16 if case.dtype == "fp8" else None
    if case.op == "linear":
        return lambda x, weight, bias: (
            jnp.matmul(x, weight, precision=precision, preferred_element_type=wide) + bias.astype(wide or bias.dtype)
        )
    if case.op == "bmm":
        return lambda x, y: jnp.matmul(x, y, precision=precision, preferred_element_type=wide)
    if case.op == "conv":
        sizes = case.sizes
        stride, padding = (sizes["stride"],) * 2, ((sizes["padding"],) * 2,) * 2
        return lambda x, window: lax.conv_general_dilated(
            x, window, stride, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), precision=precision
        )
    if case.op in ("prefill", "decode"):
        causal = bool(case.sizes["causal"])

        def attend(query: Any, key: Any, value: Any) -> Any:
            with jax.default_matmul_precision("highest" if case.dtype == "fp32" else "default"):
                return jax.nn.dot_product_attention(query, key, value, is_causal=causal)

        return attend
    if case.op == "ln":
        return _layernorm
    return _OPERATORS[case.op]


def _layernorm(x: Any, scale: Any, bias: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    norm = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)
    return norm.astype(x.dtype) * scale + bias
