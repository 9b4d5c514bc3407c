"""Kernel families: dims, FLOP, bytes moved and tile grid, one home for each, read by importer, training and prediction.

A family is data: names and two pure functions. `work` turns dims into physical quantities, `features` into the
shape-only inputs of the utilization network. Neither sees the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

Dims: TypeAlias = Mapping[str, Float[Array, " kernel"]]
AnyDims: TypeAlias = Mapping[str, Any]
"""Dims as arrays of JAX or of NumPy [kernel], of functions that are plain arithmetic."""

LIBRARY = "library"
"""Key under which dims hold the library that runs a kernel, a number of the family's own (`Family.known_libraries`)."""

TILE = "tile"
"""Key under which dims hold the tile a kernel is known to run with, its position in the family's menu and 1; 0 = not
known, any of the menu."""

RELAXATION = "relaxation"
"""Key under which dims hold how far `whole` and `whole_down` are smoothed, 0 to 1; not there = not at all."""

WEIGHT_SHARE = "weight_share"
"""Key under which dims hold the bytes of the weights as stored, scales and zero points included, over what they take in
the dtype of the product: below 1 where a kernel reads narrow weights and multiplies them in a wider dtype."""

SCALE_BLOCK = "scale_block"
"""Key under which dims hold the elements along the contraction that share a scale in both operands; 0 = rows or whole
tensors have one."""

UNPACK = "unpack"
"""Key under which dims hold the instructions of a lane that a weight takes to be unpacked, where they were counted; 0 =
they were not, or there is nothing to unpack."""


def is_traced(*sizes: Any) -> bool:
    """Whether any of some sizes is traced: kernels may be written down for sizes nobody knows yet."""
    return any(isinstance(size, jax.core.Tracer) for size in sizes)


def number(size: Any) -> Any:
    """A size as a kernel holds it: a float, or the traced scalar it is."""
    return size if is_traced(size) else float(size)


def namespace(*sizes: Any) -> Any:
    """Where functions of some sizes are taken from: `jax.numpy` where any is traced, else NumPy."""
    return jnp if is_traced(*sizes) else np


def largest(*sizes: Any) -> Any:
    """The largest of some sizes and 0."""
    return number(functools.reduce(namespace(*sizes).maximum, sizes, 0.0))


@jax.custom_jvp
def stair(size: Array) -> Array:
    """Round up, with the slope of its ramp, max(size, 1): the mean slope over a step, where `ceil` has none."""
    return jnp.ceil(size)


@stair.defjvp
def _slope_of_stair(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (size,) = primals
    return stair(size), tangents[0] * jnp.heaviside(size - 1.0, 0.5)


@jax.custom_jvp
def stair_down(size: Array) -> Array:
    """Round down, with the slope of the size."""
    return jnp.floor(size)


@stair_down.defjvp
def _slope_of_stair_down(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return stair_down(*primals), tangents[0]


def _relaxation(dims: Dims, like: Array) -> Array:
    share = dims[RELAXATION]
    return share.reshape(share.shape + (1,) * (like.ndim - share.ndim))


def whole(size: Float[Array, "..."], dims: Dims) -> Float[Array, "..."]:
    """Whole tiles, blocks or steps that hold a size counted in them: ceil(size), at least 1.

    With `RELAXATION` r blended with its ramp max(size, 1), so low by less than r of them: no padding at r = 1. Slope:
    that of the ramp at any r.
    """
    if RELAXATION not in dims:
        return stair(size)
    relaxation = _relaxation(dims, size)
    return (1.0 - relaxation) * stair(size) + relaxation * jnp.maximum(size, 1.0)


def whole_down(size: Float[Array, "..."], dims: Dims) -> Float[Array, "..."]:
    """Whole parts that a size can be cut into: floor(size). With `RELAXATION` r blended with the size, so high by less
    than r of them. Slope: 1 at any r."""
    if RELAXATION not in dims:
        return stair_down(size)
    relaxation = _relaxation(dims, size)
    return (1.0 - relaxation) * stair_down(size) + relaxation * size


def is_multiple(size: Float[Array, " kernel"], to: ArrayLike, dims: Dims) -> Bool[Array, " kernel"]:
    """Whether a size is a multiple; with a `RELAXATION` above 0 so is one between whole numbers, which a search passes
    on its way from one multiple to the next. No slope."""
    exact = size % to == 0
    if RELAXATION not in dims:
        return exact
    return exact | ((dims[RELAXATION] > 0.0) & (size % 1.0 != 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Wire:
    """Traffic of kernels between GPUs, in and out of one GPU, by algorithm (`collective.ALGORITHMS`).

    Attributes:
      link_bytes, link_steps: inside a domain of fast links; messages one after another.
      nic_bytes, nic_steps: between domains, around a ring and each byte once.
      ranks: of the group inside one domain.
    """

    link_bytes: Float[Array, "kernel algorithm"]
    link_steps: Float[Array, "kernel algorithm"]
    nic_bytes: Float[Array, "kernel way"]
    nic_steps: Float[Array, "kernel way"]
    ranks: Float[Array, " kernel"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowPasses:
    """Passes of a row reduction over each of its rows, which only a cache can serve without DRAM.

    Attributes:
      again_bytes: traffic beside `Work.bytes_moved` if no cache keeps a row until it is read again, bytes.
      thread_bytes: bytes of a row, in and out, over the threads that work on it.
      threads: of all rows.
      trips: loads that a thread waits for one after another.
    """

    again_bytes: Float[Array, " kernel"]
    thread_bytes: Float[Array, " kernel"]
    threads: Float[Array, " kernel"]
    trips: Float[Array, " kernel"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """Work that kernels ask of a machine, whatever the machine.

    Axis `tile` is the family's tile menu, axis `split` the number of ways the contraction is cut (1 for most).

    Attributes:
      flop: arithmetic, FLOP; a multiply-add counts two.
      bytes_moved: compulsory memory traffic, each tensor read or written once per pass, bytes.
      blocks: thread blocks of the launch.
      block_flop: work of one full block, padding included, FLOP.
      block_bytes: traffic of one block between L2 and its SM, bytes.
      block_steps: length of the serial loop inside a block (the contraction for GEMM), in elements.
      form_flop: where libraries choose among algorithms: arithmetic of each, FLOP; else None.
      form_bytes: memory traffic of each, what it writes out in another form included, bytes.
      block_exponentials: exponentials of a softmax between the products of one block; None = there is none.
      fetched_bytes: traffic beside `bytes_moved` where operands lie in another order than the loop runs and the rest of
        a fetch is gone from L2 when the loop comes back for it, bytes; None = there are none.
      window_bytes: traffic until it comes back, bytes.
      more_launches: kernels beside the first in one operator.
      load_blocks: thread blocks where loads are narrow; None = loads never are.
      load_cycles: clocks one of those blocks takes to issue its loads and stores; 0 = they are as wide as can be.
      wire: what goes to other GPUs; None = nothing does.
      row_passes: of row reductions; None = of other kernels.
      vector_flop: fp32 FLOP of the vector path between the products, which wait for it; None = there are none.
      cold_bytes: traffic of what no kernel of a running model wrote just before, weights and the KV cache, bytes; None
        = there is none.
      slots: instructions of a lane, of a kernel that unpacks weights as they come from memory; None = none does.
      block_slots: those of one block that unpacks its weights first and scales its sums after; None likewise.
    """

    flop: Float[Array, " kernel"]
    bytes_moved: Float[Array, " kernel"]
    blocks: Float[Array, "kernel tile split"]
    block_flop: Float[Array, "kernel tile split"]
    block_bytes: Float[Array, "kernel tile split"]
    block_steps: Float[Array, "kernel tile split"]
    form_flop: Float[Array, "kernel form"] | None = None
    form_bytes: Float[Array, "kernel form"] | None = None
    block_exponentials: Float[Array, "kernel tile split"] | None = None
    fetched_bytes: Float[Array, " kernel"] | None = None
    window_bytes: Float[Array, " kernel"] | None = None
    more_launches: Float[Array, " kernel"] | float = 0.0
    load_blocks: Float[Array, "kernel tile load_split"] | None = None
    load_cycles: Float[Array, "kernel tile load_split"] | None = None
    wire: Wire | None = None
    row_passes: RowPasses | None = None
    vector_flop: Float[Array, " kernel"] | None = None
    cold_bytes: Float[Array, " kernel"] | None = None
    slots: Float[Array, " kernel"] | None = None
    block_slots: Float[Array, "kernel tile split"] | None = None

    @property
    def bound_flop(self) -> Float[Array, " kernel"]:
        """Arithmetic that no algorithm avoids, FLOP."""
        return self.flop if self.form_flop is None else jnp.min(self.form_flop, axis=1)


Sizes: TypeAlias = tuple[int, ...]
"""Range a plan draws a dim from: low, high and step (log-uniform; two thirds are multiples of the step)."""
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """One operator as measurements, plans and traces know it: what a family from outside brings of its own.

    Attributes:
      columns: (dim column of a measured row, what plans draw it from).
      dims: columns [row] -> dims of the family [row].
      tensors: sizes by column -> shapes of the inputs, shape of the output, FLOP.
      run: ("jax" or "torch", sizes by column) -> function of the inputs, which `profile` measures; None = it is not.
      words: pattern of whole words in the names of its kernels, as the section `words` of `scaling/names.yaml`.
      sized: elements moved -> dims of a kernel that moves them, by which a trace's kernel without shapes is scaled.
    """

    columns: tuple[tuple[str, Sizes], ...]
    dims: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Mapping[str, int]], tuple[tuple[Shape, ...], Shape, float]]
    run: Callable[[str, Mapping[str, int]], Callable[..., Any]] | None = None
    words: str = ""
    sized: Callable[[float], dict[str, float]] | None = None


@dataclass(frozen=True)
class Family:
    """One kernel family.

    Attributes:
      name: key in `FAMILIES` and in checkpoints.
      ops: operators that belong to it.
      dims: names of its dims.
      options: (name, value) of dims that a kernel may leave out, and what stands for them then.
      tiles: names of its tile menu, e.g. "128x64".
      matrix: whether its arithmetic runs on the matrix path of its dtype (else on the fp32 vector path).
      alternatives: whether libraries choose among algorithms: `work` gives `form_flop` and `form_bytes`.
      network: name of the family whose utilization network it uses (its own, save where nothing was measured).
      work: (dims, element_bytes [kernel]) -> Work.
      features: (dims, element_bytes [kernel]) -> shape-only network inputs [kernel, feature].
      tensor_core: whether its kernels are those of tensor cores, or run between them: measured inside CUDA graphs, so
        that a launch costs no more alone than in a model.
      generations: what devices share beside their figures, library kernels: a kind of
        `catalog.generation_of`.
      known_libraries: (generation, number of the library that does something otherwise than the rest): `work` and
        `features` find it in the dims under `LIBRARY`; not there (or 0) = as the rest, or unknown.
      l2_operands: whether arithmetic is fast enough for the way from L2 to bind it, and L2 serves all operands.
      directions: positions of the features along which a device effect may tilt (`residuals.effect_width`).
      operators: (op, what else is known of it) of a family from outside; those of the built-in ones are in the tables
        of `datasets.schema`, `profiling` and `scaling/names.yaml`.
      linked: whether its kernels send to other GPUs, so that a forecast needs the topology.
    """

    name: str
    ops: tuple[str, ...]
    dims: tuple[str, ...]
    tiles: tuple[str, ...]
    matrix: bool
    network: str
    work: Callable[[Dims, Float[Array, " kernel"]], Work]
    features: Callable[[Dims, Float[Array, " kernel"]], Float[Array, "kernel feature"]]
    options: tuple[tuple[str, float], ...] = ()
    directions: tuple[int, ...] = ()
    alternatives: bool = False
    tensor_core: bool = False
    generations: str = "blas"
    known_libraries: tuple[tuple[str, float], ...] = ()
    l2_operands: bool = False
    operators: tuple[tuple[str, Operator], ...] = ()
    linked: bool = False

    @property
    def vector_products(self) -> bool:
        """Whether its kernels are matrix products of the vector path, whose blocks bring in their own operands."""
        return self.matrix and not self.tensor_core and not self.alternatives

    def library_of(self, generation: str) -> float:
        """Number of the library that runs its kernels on a generation of devices; 0 = as the rest, or unknown."""
        return dict(self.known_libraries).get(generation, 0.0)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of its dims and of those a kernel may leave out."""
        return (*self.dims, *(name for name, _ in self.options))
