"""GPU: one machine as numbers, all traced, so that a forecast can be differentiated, swept and batched over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from neusight_jax.arithmetic import DTYPES, PATHS
from neusight_jax.errors import InputError, require_fields
from neusight_jax.records import Record, cell, number
from neusight_jax.units import GB, GIB, GIGA, MEGA, MIB, TERA


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GPU(Record):
    """One device as the framework shows it (an MI250 is one of its two dies). Peaks are dense; 0 marks an absent path.

    Attributes:
      num_sms: streaming multiprocessors (AMD: compute units; Intel: Xe cores).
      clock_hz: boost clock, Hz.
      mem_bytes_per_s: device memory bandwidth, bytes/s.
      mem_bytes: device memory, bytes.
      l2_bytes: L2 cache, bytes.
      tdp_w: board power, W.
      link_bytes_per_s: bandwidth to the other GPUs, each direction, bytes/s.
      process_nm: lithography node, nm; stands for the energy of one FLOP.
      fp32_flop_per_s: peak of the fp32 vector path, FLOP/s; every chip has it.
      fp32_matrix_flop_per_s: peak of a separate fp32 matrix path (AMD), FLOP/s.
      tf32_flop_per_s: peak of tf32 matrix products, FLOP/s.
      bf16_flop_per_s: peak of bf16 matrix products, FLOP/s.
      fp16_flop_per_s: peak of fp16 matrix products accumulated in fp32, FLOP/s.
      fp8_flop_per_s: peak of fp8 matrix products accumulated in fp32, FLOP/s.
      fp4_flop_per_s: peak of fp4 matrix products, FLOP/s.
      int8_flop_per_s: peak of int8 matrix products, operations/s.
      fp64_flop_per_s: peak of the fp64 vector path, FLOP/s.
      fp64_matrix_flop_per_s: peak of a separate fp64 matrix path, FLOP/s.
      exp_per_s: exponentials of the special-function units, 1/s; 0 = 16 a clock and SM.
      matrix_flop_per_cycle: 16-bit FLOP a clock of one SM's matrix units: the wider, the less energy a FLOP takes; 0 =
        as an A100 (2048). `replace` and `vary` let it follow the 16-bit peaks; in the record it is a figure of its own.
      fp32_joule_per_flop: the most that an fp32 FLOP of the vector path takes, J; 0 = what `process_nm` says. A board
        that keeps a base clock within its power says so (`catalog.base_clock_energy`).
      memory_kind: position in `MEMORY_KINDS`; 0 = another kind. How much of its bandwidth a memory reaches goes by it.
      l2_partitions: parts of the L2 that each keep a copy of what their SMs read; 0 = one.
      warp_schedulers: of an SM, each issues one instruction of 32 lanes a clock; 0 = four.
      l1_bytes: L1 cache of an SM, shared memory included where they are one, bytes; 0 = 128 KiB.
      resident_threads: threads an SM holds at a time; 0 = 2048.
      vendor: position in `VENDORS`: whose libraries it runs.
      power_limit_w: a cap of the board's power, W; None = its own, `tdp_w`.
      clock_limit_hz: a locked clock, Hz; None = none, up to `clock_hz`.
    """

    num_sms: ArrayLike
    clock_hz: ArrayLike
    mem_bytes_per_s: ArrayLike
    mem_bytes: ArrayLike
    l2_bytes: ArrayLike
    tdp_w: ArrayLike
    link_bytes_per_s: ArrayLike
    process_nm: ArrayLike
    fp32_flop_per_s: ArrayLike
    fp32_matrix_flop_per_s: ArrayLike = 0.0
    tf32_flop_per_s: ArrayLike = 0.0
    bf16_flop_per_s: ArrayLike = 0.0
    fp16_flop_per_s: ArrayLike = 0.0
    fp8_flop_per_s: ArrayLike = 0.0
    fp4_flop_per_s: ArrayLike = 0.0
    int8_flop_per_s: ArrayLike = 0.0
    fp64_flop_per_s: ArrayLike = 0.0
    fp64_matrix_flop_per_s: ArrayLike = 0.0
    exp_per_s: ArrayLike = 0.0
    matrix_flop_per_cycle: ArrayLike = 0.0
    fp32_joule_per_flop: ArrayLike = 0.0
    memory_kind: ArrayLike = 0.0
    l2_partitions: ArrayLike = 0.0
    warp_schedulers: ArrayLike = 0.0
    l1_bytes: ArrayLike = 0.0
    resident_threads: ArrayLike = 0.0
    vendor: ArrayLike = 0.0
    power_limit_w: ArrayLike | None = None
    clock_limit_hz: ArrayLike | None = None

    def figures(self) -> dict[str, Any]:
        """All that it has: no absent paths, and names where figures are positions in a list of them."""
        figures = {name: getattr(self, name) for name in FIELDS}
        shown = (*REQUIRED_FIELDS, "vendor")
        kept = {name: value for name, value in figures.items() if name in shown or number(value) != 0.0}
        kept |= self.limits()
        if self.slopes():
            return kept
        # Several or traced figures have no place in a list of names.
        places = {name: number(value) for name, value in kept.items() if name in NAMED}
        return kept | {name: NAMED[name][int(place)] for name, place in places.items() if place is not None}

    def slopes(self) -> bool:
        """No GPU has less than one SM."""
        sms = number(self.num_sms)
        return sms is not None and sms < 1.0

    def summary(self) -> str:
        """Its sizes in a few words."""
        names = ("num_sms", "clock_hz", "mem_bytes_per_s", "mem_bytes", "fp32_flop_per_s")
        return ", ".join(cell(name, getattr(self, name)) for name in names)

    def known(self) -> dict[str, ArrayLike]:
        """All its figures by name, `LIMITS` where there are any."""
        return {name: getattr(self, name) for name in FIELDS} | self.limits()

    def limits(self) -> dict[str, ArrayLike]:
        """The cap of its power and its locked clock, those of them that there are."""
        limits = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def paths(self) -> tuple[str, ...]:
        """Names of the arithmetic paths this chip has, in the order of `arithmetic.PATHS`. Host only."""
        return tuple(path for path in PATHS if np.all(np.asarray(getattr(self, peak_field(path))) > 0))

    def peak_flop_per_s(self, path: str) -> ArrayLike:
        """Peak of one arithmetic path, FLOP/s. Host only; `InputError` listing the paths present if it is absent."""
        if path not in self.paths:
            raise InputError(f"this GPU has no arithmetic path {path!r}; expected one of {', '.join(self.paths)}")
        value: ArrayLike = getattr(self, peak_field(path))
        return value

    def matrix_paths(self) -> Float[Array, "*gpu dtype"]:
        """Peak that matrix products of each dtype run on, in the order of `arithmetic.DTYPES`, FLOP/s; 0 where absent.

        fp32 and fp64 run on the faster of their matrix path and their vector path. Works under `jit`, `grad` and
        `vmap`; the gradient goes to the path that is used.
        """

        def peak(dtype: str) -> Array:
            plain = jnp.asarray(getattr(self, peak_field(dtype)))
            if f"{dtype}_matrix" not in PATHS:
                return plain
            matrix = jnp.asarray(getattr(self, peak_field(f"{dtype}_matrix")))
            # Not `maximum`, which at equal peaks would give each half of the gradient.
            return jnp.where(matrix >= plain, matrix, plain)

        return jnp.stack([peak(dtype) for dtype in DTYPES], axis=-1)

    def replace(self, **changes: ArrayLike) -> GPU:
        """This GPU with fields replaced: a hypothetical machine. `InputError` for a field there is not.

        A new 16-bit peak brings the width of the matrix units along (`widened`). Gradients: reach all changes.
        """
        require_fields("a GPU", (*FIELDS, *LIMITS), changes)
        # Whole numbers would become integer arrays, which no gradient reaches.
        floats = {name: float(value) if type(value) is int else value for name, value in changes.items()}
        return widened(self, dataclasses.replace(self, **floats), changes)


MEMORY_KINDS: tuple[str, ...] = ("", "hbm", "gddr_ecc", "gddr", "pascal hbm", "AMD hbm")
"""Memory systems: NVIDIA's HBM since Volta, its GDDR with and without codes kept in it, Pascal's HBM, AMD's."""

VENDORS: tuple[str, ...] = ("NVIDIA", "AMD", "Intel", "other")
"""Whose libraries a GPU runs; the first are the default libraries, which most measurements are of."""

NAMED: dict[str, tuple[str, ...]] = {"memory_kind": MEMORY_KINDS, "vendor": VENDORS}
"""Figures that are positions in a list of names; GPU files may give the name."""

SWITCHES: tuple[str, ...] = (
    *("fp32_joule_per_flop", "l2_partitions", "warp_schedulers", "l1_bytes", "resident_threads"),
    *NAMED,
)
"""Figures that say what kind of machine it is, not how much of something it has."""

WIDTH = "matrix_flop_per_cycle"
WIDTH_PEAKS: tuple[str, ...] = ("bf16_flop_per_s", "fp16_flop_per_s")
"""Figures that tell the width of the matrix units."""

LIMITS: dict[str, str] = {"power_limit_w": "tdp_w", "clock_limit_hz": "clock_hz"}
"""Figures of a GPU that somebody holds back, and what holds otherwise; they are absent, not 0, where nobody does."""

FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(GPU) if field.name not in LIMITS)
"""Names of the figures that every GPU has."""

REQUIRED_FIELDS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(GPU) if field.default is dataclasses.MISSING
)
"""Figures every GPU must have; the others are arithmetic paths it may lack, and what has a default."""


def with_derived(figures: Mapping[str, float]) -> dict[str, float]:
    """All figures of a GPU: those given, and the width of its matrix units where it is not among them. Host only."""
    peak = max(figures.get(name, 0.0) for name in WIDTH_PEAKS)
    derived = {WIDTH: peak / (figures["num_sms"] * figures["clock_hz"])} if peak else {}
    return derived | dict(figures)


def widened(base: GPU, gpu: GPU, changed: Iterable[str]) -> GPU:
    """A variant of a GPU whose matrix units are as much wider as its 16-bit FLOP a clock and SM are more.

    Only where a 16-bit peak is `changed` and the width is not: more SMs or another clock at the same peaks keep it, so
    that more of a rate never takes more energy.
    """
    if WIDTH in changed or not set(WIDTH_PEAKS) & set(changed):
        return gpu

    plain = all(isinstance(getattr(one, name), int | float) for one in (base, gpu) for name in FIELDS)
    # JAX dispatches every operation on its own, so plain numbers stay on the host.
    xp: Any = np if plain else jnp
    before, after = (
        xp.maximum(*(xp.asarray(getattr(one, name), float) for name in WIDTH_PEAKS))
        / (xp.asarray(one.num_sms) * xp.asarray(one.clock_hz))
        for one in (base, gpu)
    )
    old = xp.asarray(base.matrix_flop_per_cycle, float)
    has_base = (old > 0) & (before > 0)
    # The inner `where` keeps the branch that is not taken from dividing by zero, which would be a NaN gradient.
    width = xp.where(after > 0, xp.where(has_base, old * after / xp.where(has_base, before, 1.0), after), old)
    return dataclasses.replace(gpu, matrix_flop_per_cycle=float(width) if plain else width)


def peak_field(path: str) -> str:
    """Name of the field that holds the peak of an arithmetic path."""
    return f"{path}_flop_per_s"


def stack_gpus(gpus: Sequence[GPU]) -> GPU:
    """Several GPUs as one record with arrays [gpu], to `vmap` over. `InputError` for an empty list."""
    if not gpus:
        raise InputError("no GPU to stack; expected at least one")
    # A limit of one GPU is an array over all: the others are limited by what they have anyway.
    limited = {
        name: _stacked([gpu.limits().get(name, getattr(gpu, usual)) for gpu in gpus])
        for name, usual in LIMITS.items()
        if any(name in gpu.limits() for gpu in gpus)
    }
    return GPU(**{name: _stacked([getattr(gpu, name) for gpu in gpus]) for name in FIELDS}, **limited)


def _stacked(values: list[ArrayLike]) -> Array:
    """Values of one figure as an array; on the host where they are known, since JAX dispatches each on its own."""
    if any(isinstance(value, jax.core.Tracer) for value in values):
        return jnp.stack([jnp.asarray(value, float) for value in values])
    return jnp.asarray(np.array(jax.device_get(values)), float)


@dataclass(frozen=True)
class _Range:
    """Values a figure may have, and other units it may have been written in.

    Attributes:
      low, high: accepted values, base unit; generous, so that hypothetical machines pass.
      usual_low, usual_high: where real machines lie; a unit is guessed if it brings the value here.
      units: (unit, factor to the base unit as a number, the same as text).
    """

    low: float
    high: float
    usual_low: float
    usual_high: float
    units: tuple[tuple[str, float, str], ...] = ()


_BANDWIDTH = (("GB/s", GB, "1e9"), ("TB/s", TERA, "1e12"), ("MB/s", MEGA, "1e6"))
_MEMORY = (("GB or GiB", GIB, "1e9 or 1073741824"), ("MiB", MIB, "1048576"), ("TB", TERA, "1e12"))
_PEAK = (("TFLOP/s", TERA, "1e12"), ("GFLOP/s", GIGA, "1e9"), ("PFLOP/s", 1e15, "1e15"))

_RANGES: dict[str, _Range] = {
    "num_sms": _Range(1.0, 1e5, 1.0, 1e3),
    "clock_hz": _Range(1e8, 1e10, 5e8, 5e9, (("MHz", MEGA, "1e6"), ("GHz", GIGA, "1e9"), ("kHz", 1e3, "1e3"))),
    "mem_bytes_per_s": _Range(1e10, 1e14, 5e10, 5e13, _BANDWIDTH),
    "mem_bytes": _Range(1e9, 1e14, 2e9, 2e12, _MEMORY),
    "l2_bytes": _Range(1e5, 1e10, 1e6, 2e9, (("MB", MIB, "1048576"), ("kB", 1024.0, "1024"))),
    "tdp_w": _Range(5.0, 1e5, 30.0, 5e3, (("kW", 1e3, "1e3"), ("mW", 1e-3, "1e-3"))),
    "link_bytes_per_s": _Range(1e8, 1e14, 4e9, 5e12, _BANDWIDTH),
    "process_nm": _Range(0.1, 200.0, 1.0, 100.0, (("metres", 1e9, "1e9"),)),
    "fp32_flop_per_s": _Range(1e10, 1e17, 1e12, 5e14, _PEAK),
    "fp32_matrix_flop_per_s": _Range(1e10, 1e17, 1e12, 5e14, _PEAK),
    "tf32_flop_per_s": _Range(1e10, 1e18, 5e12, 4e15, _PEAK),
    "bf16_flop_per_s": _Range(1e10, 1e19, 1e13, 8e15, _PEAK),
    "fp16_flop_per_s": _Range(1e10, 1e19, 1e13, 8e15, _PEAK),
    "fp8_flop_per_s": _Range(1e10, 1e19, 2e13, 2e16, _PEAK),
    "fp4_flop_per_s": _Range(1e10, 1e19, 4e13, 8e16, _PEAK),
    "int8_flop_per_s": _Range(1e10, 1e19, 2e13, 2e16, _PEAK),
    "fp64_flop_per_s": _Range(1e9, 1e17, 1e11, 2e14, _PEAK),
    "fp64_matrix_flop_per_s": _Range(1e9, 1e17, 1e11, 4e14, _PEAK),
    "matrix_flop_per_cycle": _Range(8.0, 1e6, 256.0, 65536.0),
    "fp32_joule_per_flop": _Range(1e-15, 1e-8, 1e-13, 1e-10, (("pJ", 1e-12, "1e-12"), ("nJ", 1e-9, "1e-9"))),
    "memory_kind": _Range(1.0, len(MEMORY_KINDS) - 1.0, 1.0, len(MEMORY_KINDS) - 1.0),
    "l2_partitions": _Range(1.0, 64.0, 1.0, 8.0),
    "warp_schedulers": _Range(1.0, 64.0, 1.0, 8.0),
    "l1_bytes": _Range(1024.0, 1e8, 8192.0, 1e6, (("KB", 1024.0, "1024"),)),
    "resident_threads": _Range(32.0, 1e5, 512.0, 4096.0),
    "vendor": _Range(1.0, len(VENDORS) - 1.0, 1.0, len(VENDORS) - 1.0),
    "power_limit_w": _Range(5.0, 1e5, 30.0, 5e3, (("kW", 1e3, "1e3"), ("mW", 1e-3, "1e-3"))),
    "clock_limit_hz": _Range(5e7, 1e10, 2e8, 5e9, (("MHz", MEGA, "1e6"), ("GHz", GIGA, "1e9"), ("kHz", 1e3, "1e3"))),
    "exp_per_s": _Range(1e9, 1e17, 5e11, 5e13, (("T/s", TERA, "1e12"), ("G/s", GIGA, "1e9"))),
}


def plain_number(value: float) -> str:
    """A number as one would write it: 3350, 1e10."""
    short = f"{value:.0e}"
    text = short if value >= 1e5 and float(short) == value else f"{value:g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def named_figure(field: str, name: str, where: str) -> float:
    """The figure that a name stands for, whatever its case (`NAMED`). `InputError` listing the names if it is none."""
    names = NAMED[field]
    folded = [label.lower() for label in names]
    if name.strip().lower() not in folded:
        raise InputError(
            f"{where}: {field} is {name!r}, expected one of {', '.join(label for label in names if label)}"
        )
    return float(folded.index(name.strip().lower()))


def vendor_of_name(name: str) -> dict[str, float]:
    """The figure `vendor` where a GPU's full name begins with one, such as "AMD Instinct MI100"; else none."""
    first = name.split()[:1]
    return {"vendor": float(VENDORS.index(first[0]))} if set(first) & set(VENDORS) else {}


def check_figure(field: str, value: float, where: str) -> None:
    """`InputError` unless a figure is finite, positive (an optional path may be 0) and of a believable size.

    Args:
      field: one of `FIELDS`.
      value: the figure, in the field's base unit.
      where: opens the message, e.g. the file name.
    """
    limits = _RANGES[field]
    if value == 0 and field not in REQUIRED_FIELDS:
        return
    span = f"{plain_number(limits.low)} to {plain_number(limits.high)}"
    if not np.isfinite(value):
        raise InputError(f"{where}: {field} is {value}, expected a finite number, {span}")
    if value <= 0:
        zero = "a path the chip lacks" if field.endswith("_flop_per_s") else "the default"
        absent = "" if field in REQUIRED_FIELDS else f", or 0 for {zero}"
        raise InputError(f"{where}: {field} is {plain_number(value)}, expected a positive number, {span}{absent}")
    if limits.low <= value <= limits.high:
        return
    # A wrong unit is the usual mistake: the one that brings the figure to where real machines lie is named.
    guess = "check its unit"
    for unit, factor, text in limits.units:
        if limits.usual_low <= value * factor <= limits.usual_high:
            guess = f"this looks like {unit}, multiply by {text}"
            break
    raise InputError(f"{where}: {field} is {plain_number(value)}, expected {span}; {guess}")
