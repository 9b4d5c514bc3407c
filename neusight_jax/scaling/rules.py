"""The rule each measured kernel is scaled by: time on the target over time on the origin.

    forecast   forecast on the target / forecast on the origin, of the work the trace's shapes describe; by a predictor
               that was fitted, what sets the measurement apart from the forecast is carried over in part (`carried`)
    inferred   the same for work of the kind the name says, of the size that would take the measured time on the origin
    wave       Habitat's wave scaling from grid and block, fully memory-bound where nothing else is known
    bandwidth  origin bandwidth / target bandwidth
    link       the same of the links, for copies to the host and collectives
    none       time that is no kernel's: unchanged

Every measured second falls under exactly one of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import ArrayLike

from neusight_jax.arithmetic import DTYPES
from neusight_jax.errors import InputError
from neusight_jax.hardware.catalog import canonical_name, fold_name, gpu_info
from neusight_jax.hardware.files import load_named_gpu
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import Kernel, KernelTable, by_family, table_from_kernels
from neusight_jax.model.checkpoint import card_notes, default_checkpoint, load_card, load_predictor
from neusight_jax.model.intervals import gpu_ratios
from neusight_jax.model.latency import predict_kernels
from neusight_jax.model.power import at_clock, draw_of_step, power_law, settle
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.rivals import wave_ratio
from neusight_jax.records import Result
from neusight_jax.scaling.trace import PACKED, Launch, Measured, Trace, content_kind, is_product


def figure(value: ArrayLike) -> float:
    """A GPU figure as a number."""
    return float(np.asarray(value))


def product_peaks(gpu: GPU) -> dict[str, float]:
    """Dtypes a GPU multiplies matrices in, and the peak of each, FLOP/s."""
    return {dtype: float(peak) for dtype, peak in zip(DTYPES, np.asarray(gpu.matrix_paths()), strict=True) if peak > 0}


# What a scaled run takes for granted, as notes: where it was measured, what names did not say, the checkpoint.


def origin_of(trace: Trace) -> str:
    """The GPU that a trace says it was measured on. `InputError` when it names none, several, or one unknown."""
    names = sorted({name for gpu in trace.gpus if (name := canonical_name(gpu)) is not None})
    if len(names) == 1:
        return names[0]
    claim = f"it names {', '.join(trace.gpus)}" if trace.gpus else "it does not say"
    raise InputError(f"{trace.source}: on which GPU was it measured? {claim}; say so with --from GPU")


def origin_notes(trace: Trace, request: str | GPU | None, origin: str) -> list[str]:
    """A note when a trace says another GPU than the one it is scaled from, or when its word was taken.

    Args:
      request: what the user gave; origin: its name in the catalog, or in its file.
    """
    if request is None and trace.gpus:
        return [f"measured on {origin}, as the trace says"]
    same = (origin, fold_name(origin))
    others = [gpu for gpu in trace.gpus if (canonical_name(gpu) or gpu) not in same and fold_name(gpu) not in same]
    if not others:
        return []
    return [
        f"the trace says it was measured on {', '.join(others)}, and is scaled as if on {origin}: unless that is where "
        "it ran, give --from the GPU it names"
    ]


def assumed(
    items: Sequence[Measured],
    rules: Sequence[str],
    origin: Machine,
    target: Machine,
    checkpoint: str,
    *,
    chosen: bool,
) -> list[str]:
    """Notes on what was assumed of a run's kernels, with shares of the measured time.

    Args:
      rules: of every item.
      checkpoint: "" for a predictor given as such; chosen: whether it was chosen here.
    """
    here, there = product_peaks(origin.gpu), product_peaks(target.gpu)
    ruled = list(zip(items, rules, strict=True))
    products = [item for item in items if item.multiplies]
    unknown = [pair for pair in ruled if pair[0].kind == "unknown" and pair[1] not in ("forecast", "none")]
    tf32 = [item for item in products if item.dtype == "tf32"]
    assumptions = {
        f"names of unknown kind, scaled by {' and '.join(sorted({rule for _, rule in unknown}))}": [
            item for item, _ in unknown
        ],
        "products whose names say no dtype, taken to be fp32": [item for item in products if not item.dtype_said],
        f"products in a dtype that {origin.name} has no path for here, scaled by grid and bandwidth alone": [
            item for item in products if item.lacks_path(here)
        ],
        "products in tf32, taken to run in fp32 where a GPU has no tf32": []
        if {"tf32"} <= here.keys() & there.keys()
        else tf32,
    }
    forecast = [item for item, rule in ruled if rule in ("forecast", "inferred") and item.multiplies]
    notes = _checkpoint_notes([item for item in forecast if item.dtype != "fp32"], items, checkpoint, chosen=chosen)
    notes += [f"{text}: {_share(which, items)}" for text, which in assumptions.items() if which]
    for name in dict.fromkeys((origin.name, target.name)):
        if canonical_name(name) == name and (estimates := gpu_info(name).estimates):
            notes.append(f"figures of {name} that are estimates, not public: {', '.join(estimates)}")
    return notes


def _checkpoint_notes(
    products: Sequence[Measured], items: Sequence[Measured], checkpoint: str, *, chosen: bool
) -> list[str]:
    """Why a checkpoint was chosen, and which of the products that are not in fp32 it never saw the dtype of."""
    if not checkpoint:
        return []
    trained: list[str] = load_card(checkpoint).get("trained_dtypes") or []
    unseen = [item for item in products if trained and item.dtype not in trained]
    dtypes, new = (", ".join(sorted({item.dtype for item in group})) for group in (products, unseen))
    notes = []
    if chosen and products:
        notes.append(f"checkpoint {checkpoint}, as products run in {dtypes}: {_share(products, items)}")
    if unseen:
        caveat = f"{checkpoint} was trained on {', '.join(trained)} only, its {new} is an extrapolation"
        notes.append(f"{caveat}: {_share(unseen, items)}")
    return notes


def _share(part: Sequence[Measured], items: Sequence[Measured]) -> str:
    """Share of the measured time, and the names with the most of it."""
    total = sum(item.seconds for item in items)
    share = sum(item.seconds for item in part) / total if total > 0.0 else 0.0
    names = list(dict.fromkeys(item.name for item in sorted(part, key=lambda item: -item.seconds)))
    shown = ", ".join(name[:48] for name in names[:2])
    return f"{share:.1%} of the time ({shown}{f' and {len(names) - 2} more' if len(names) > 2 else ''})"


# Blocks an SM can hold at a time, from a launch and the limits of its architecture.
#
# Limits are of NVIDIA's CUDA programming guide, "Technical specifications per compute capability"; another architecture
# is taken as Hopper. Registers are handed out in blocks of 256 per warp, as in the occupancy calculator.


class Limits(NamedTuple):
    """Limits of one SM: threads, blocks, shared memory in bytes; 65536 registers on all of them."""

    threads: int
    blocks: int
    shared_bytes: int


REGISTERS, WARP = 65536, 32
LIMITS: dict[str, Limits] = {
    "pascal": Limits(2048, 32, 64 << 10),
    "volta": Limits(2048, 32, 96 << 10),
    "turing": Limits(1024, 16, 64 << 10),
    "ampere": Limits(2048, 32, 164 << 10),
    "ampere, 128 lanes": Limits(1536, 16, 100 << 10),
    "ada": Limits(1536, 24, 100 << 10),
    "hopper": Limits(2048, 32, 228 << 10),
    "blackwell": Limits(2048, 32, 228 << 10),
    "blackwell_rtx": Limits(1536, 24, 100 << 10),
}
DEFAULT = LIMITS["hopper"]


def limits_of(gpu_name: str) -> Limits:
    """Limits of a GPU of the catalog by its architecture (Ampere's GA10x apart from GA100); any other: `DEFAULT`."""
    if canonical_name(gpu_name) is None:
        return DEFAULT
    info = gpu_info(gpu_name)
    wide = LIMITS.get(f"{info.architecture}, {info.lanes_per_sm:.0f} lanes")
    return wide or LIMITS.get(info.architecture, DEFAULT)


def resident_blocks(launch: Launch, limits: Limits) -> float:
    """Blocks of a launch one SM holds at a time, at least 1."""
    warps = math.ceil(launch.threads / WARP)
    bounds = [limits.threads // (warps * WARP), limits.blocks]
    if launch.registers > 0:
        per_warp = math.ceil(launch.registers * WARP / 256) * 256
        bounds.append(REGISTERS // per_warp // warps)
    if launch.shared_bytes > 0:
        bounds.append(int(limits.shared_bytes // launch.shared_bytes))
    # A kernel that was measured did run, whatever the limits of an architecture that is taken for another say.
    return float(max(min(bounds), 1))


ALL_KNOWN = 0.9995
"""Share of a run's time from which nobody is told that some of its work is not known."""
RULES: tuple[str, ...] = ("forecast", "inferred", "wave", "bandwidth", "link", "none")
FAR_CARRIED = 0.5
"""Share of a kernel's log deviation from its forecast that is carried to a GPU unlike the origin. One measurement
cannot tell what is odd about the kernel (carried) from what is odd about the origin (not carried): taken as equal."""
BELIEVED = math.log(2.0)
"""Largest log deviation of which a part is left behind; beyond, the work cannot be what its shapes say."""
GAMMA: dict[str, float] = {"attention": 0.5, "conv": 0.5}
"""Memory-boundedness of kinds that are neither; 1 for anything else, as Habitat does without hardware counters."""


@dataclass(frozen=True)
class Machine:
    """A GPU as the rules see it.

    Attributes:
      gpu: figures; limits: what an SM holds.
      predictor: what forecasts it; with its measured effect where it has one.
      name: for people.
    """

    gpu: GPU
    limits: Limits
    predictor: Predictor
    name: str = ""


def scaling(
    items: Sequence[Measured], origin: Machine, target: Machine, *, plain: bool = False
) -> tuple[list[str], np.ndarray]:
    """Rule and ratio of every item.

    Args:
      plain: carry all of a kernel's deviation from its forecast to the target, as Habitat does.
    Raises: `InputError` when the target lacks the arithmetic path of a product, or a predictor its family.
    """
    rules, ratios = [""] * len(items), np.ones(len(items))
    peaks = product_peaks(origin.gpu)
    work = [item.work_on(origin.gpu, peaks) for item in items]
    for at, (item, kernels) in enumerate(zip(items, work, strict=True)):
        if _covered(kernels, origin, target):
            rules[at] = "forecast" if item.kernels else "inferred"
        else:
            work[at] = ()
    before, after = (_forecasts(work, items, machine) for machine in (origin, target))
    # Ratios come last: one table of all kernels is one compiled program for each machine.
    share = 1.0 if plain else carried(origin, target)
    for at, item in enumerate(items):
        if rules[at]:
            ratios[at] = after[at] / before[at]
            if rules[at] == "forecast" and item.seconds > 0.0:
                # Far from the origin only a part of what sets the kernel apart is believed to be its own.
                deviation = math.log(item.seconds / (max(item.count, 1.0) * before[at]))
                ratios[at] *= math.exp((share - 1.0) * min(max(deviation, -BELIEVED), BELIEVED))
        else:
            rules[at], ratios[at] = plain_rule(item, origin, target)
    return rules, ratios


def carried(origin: Machine, target: Machine) -> float:
    """Share of a kernel's log deviation from its forecast that goes with it: 1 to a like GPU, `FAR_CARRIED` far away.

    The distance is the sum of |log| of the `GPU_RATIOS` of one over the other. All is carried where either predictor
    knows nothing of its own errors: a bound or a baseline is not near enough for its deviations to mean anything.
    """
    if any(getattr(machine.predictor, "intervals", None) is None for machine in (origin, target)):
        return 1.0
    apart = np.abs(np.asarray(gpu_ratios(origin.gpu)) - np.asarray(gpu_ratios(target.gpu))).sum()
    return FAR_CARRIED + (1.0 - FAR_CARRIED) * math.exp(-float(apart))


def work_of(items: Sequence[Measured], origin: GPU) -> KernelTable:
    """Work of all items that have some, by shapes or by name and time on the origin, in its dtypes, as one table."""
    peaks = product_peaks(origin)
    return table_from_kernels(
        replace(kernel, dtype=item.dtype_on(peaks)) for item in items for kernel in item.work_on(origin, peaks)
    )


def _covered(kernels: Sequence[Kernel], *machines: Machine) -> bool:
    families = {FAMILIES[kernel.family] for kernel in kernels}
    return bool(families) and all(machine.predictor.covers(family) for machine in machines for family in families)


def _forecasts(work: Sequence[tuple[Kernel, ...]], items: Sequence[Measured], machine: Machine) -> np.ndarray:
    """Seconds of the work of every item, 1 where there is none; one table of all, so that one program is compiled."""
    out, peaks = np.ones(len(items)), product_peaks(machine.gpu)
    chosen = [at for at, kernels in enumerate(work) if kernels]
    if not chosen:
        return out
    dtypes = {at: items[at].dtype_on(peaks) for at in chosen}
    products = [at for at in chosen if is_product(work[at])]
    # Asked before the forecast, so that the error says which products lack a path.
    for dtype in sorted({dtypes[at] for at in products}):
        try:
            machine.gpu.peak_flop_per_s(dtype)
        except InputError as error:
            same = [items[at] for at in products if dtypes[at] == dtype]
            kinds = (
                f"{len(same)} kinds of products in {dtype} ({max(same, key=lambda item: item.seconds).name[:60]} ...)"
            )
            raise InputError(f"the run has {kinds}, and {error}; scale it to a GPU that has the path") from None
    _, seconds, owner = _launches([items[at] for at in chosen], [work[at] for at in chosen], machine)
    out[chosen] = np.bincount(owner, weights=seconds, minlength=len(chosen))
    return out


def _launches(
    items: Sequence[Measured], work: Sequence[Sequence[Kernel]], machine: Machine
) -> tuple[KernelTable, np.ndarray, np.ndarray]:
    """One launch of every item on a machine: its kernels as a table, their seconds [row], and whose they are [row]."""
    peaks = product_peaks(machine.gpu)
    table = table_from_kernels(
        replace(kernel, count=1.0, dtype=item.dtype_on(peaks))
        for item, kernels in zip(items, work, strict=True)
        for kernel in kernels
    )
    seconds = np.asarray(predict_kernels(machine.predictor, machine.gpu, table, isolated=False), np.float64)
    return table, seconds, np.repeat(np.arange(len(items)), [len(kernels) for kernels in work])


def run_energy(
    items: Sequence[Measured], rules: Sequence[str], scaled_s: np.ndarray, origin: Machine, target: Machine
) -> tuple[float, float]:
    """Joules of a scaled run's kernels on the target, and the share of their time that is of known work.

    Kernels of known work draw what `model.power` says of them in their scaled time, all at one clock; others draw the
    mean of those, and time that is no kernel's draws static power. (0, 0) where no work is known.

    Args:
      items, rules: of the run, and how each was scaled (`scaling`).
      scaled_s: seconds of all launches on the target [item].
    """
    here, gpu = product_peaks(origin.gpu), at_clock(target.gpu, 1.0)
    places = [at for at, rule in enumerate(rules) if rule in ("forecast", "inferred") and scaled_s[at] > 0.0]
    if not places:
        return 0.0, 0.0
    running = [items[at] for at in places]
    table, forecast, owner = _launches(running, [item.work_on(origin.gpu, here) for item in running], target)
    forecast_s = np.bincount(owner, weights=forecast, minlength=len(places))
    count = np.array([max(item.count, 1.0) for item in running])
    launch_s = by_family(table, forecast * (scaled_s[places] / count / forecast_s)[owner])
    counts = by_family(table, count[owner])
    law = power_law(target.predictor)
    # A board's controller averages over many kernels, so that all of them run at one clock.
    draw = draw_of_step(law, gpu, table, launch_s, counts, jnp.asarray(scaled_s[places].sum()))
    drawn = settle(law, gpu, draw).power_w
    limit_w = np.inf if target.gpu.power_limit_w is None else figure(target.gpu.power_limit_w)
    idle = np.array([rule == "none" for rule in rules])
    kernels_s, idle_s = float(scaled_s[~idle].sum()), float(scaled_s[idle].sum())
    joules = min(figure(drawn), limit_w) * kernels_s + figure(law.static_share * gpu.tdp_w) * idle_s
    return joules, float(scaled_s[places].sum()) / kernels_s


def plain_rule(item: Measured, origin: Machine, target: Machine) -> tuple[str, float]:
    """The rule of an item whose work is not known."""
    if item.kind in ("idle", "host"):
        return "none", 1.0
    if item.kind in ("collective", "transfer"):
        return "link", figure(origin.gpu.link_bytes_per_s) / figure(target.gpu.link_bytes_per_s)
    if item.launch is None or item.kind == "copy":
        return "bandwidth", figure(origin.gpu.mem_bytes_per_s) / figure(target.gpu.mem_bytes_per_s)
    gamma = jnp.asarray(GAMMA.get(item.kind, 1.0))
    resident = (resident_blocks(item.launch, machine.limits) for machine in (origin, target))
    return "wave", float(wave_ratio(origin.gpu, target.gpu, gamma, item.launch.blocks, *resident))


# `read_trace`: the one door for traces of all kinds, by name and by what the file holds.

EXPECTED = "expected .json or .json.gz (PyTorch's or JAX's profiler), .csv (Nsight Systems, rocprof) or .parquet"
_AS_CSV = "write it as CSV: `nsys stats --format csv --report cuda_gpu_trace FILE`"
_ELSEWHERE: dict[str, str] = {
    **dict.fromkeys((".nsys-rep", ".qdrep", ".qdstrm"), f"a report of Nsight Systems; {_AS_CSV}"),
    **dict.fromkeys((".sqlite", ".db"), f"a database; {_AS_CSV}, or `rocprofv3 --output-format csv`"),
    ".ncu-rep": "a report of Nsight Compute, which times kernels one by one; record the run with Nsight Systems",
    ".pb": "a profile in XProf's own format; give the *.trace.json.gz beside it",
    **dict.fromkeys((".pickle", ".pkl"), "a memory snapshot, which has no times; record the run with torch.profiler"),
}
"""Suffix -> what such a file is and how to get what can be read."""


def read_trace(path: str | os.PathLike[str], origin: str = "", select: Mapping[str, str] | None = None) -> Trace:
    """Read a trace.

    Args:
      path: the file; or the folder that `jax.profiler.trace` wrote.
      origin: device of a per-operator table with several. select: column -> value, for one with several runs.
    Raises: `InputError` for one that is not there, damaged or of another kind.
    """
    file = Path(path)
    if not file.exists():
        raise InputError(f"{file}: no such file; expected a trace (.json, .json.gz), a CSV or a Parquet table")
    suffix = "" if file.is_dir() else _suffix(file)
    if suffix == ".parquet":
        from neusight_jax.scaling.tables import read_per_op

        return read_per_op(file, origin or None, select)
    if suffix in (".csv", ".tsv"):
        from neusight_jax.scaling.tables import read_kernel_csv

        return read_kernel_csv(file)
    kind = "json" if file.is_dir() else content_kind(file)
    if kind == "sqlite" or suffix in _ELSEWHERE:
        raise InputError(f"{file}: {_ELSEWHERE[suffix if suffix in _ELSEWHERE else '.sqlite']}")
    if kind == "json" or suffix in (".json", ".trace"):
        from neusight_jax.scaling.chrome import read_chrome

        return read_chrome(file)
    raise InputError(f"{file}: unknown kind of trace; {EXPECTED}")


def _suffix(file: Path) -> str:
    """Suffix of a file's name, that of what is packed where it is."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while len(suffixes) > 1 and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


# `scale_trace`: a run measured on one GPU, forecast on others.


@dataclass(frozen=True)
class ScaledRun(Result):
    """A measured run and its forecast on another GPU. Seconds.

    Attributes:
      source, origin, target: names, for people.
      columns: per kind of launch: name, operator, kind, dtype, rule, count, measured_s, ratio, scaled_s; times of all
        its launches together.
      busy_s, span_s: of the measured run, see `Trace`.
      energy_j: joules of all kernels on the target (`run_energy`), 0 where none is known.
      notes: what was odd in the trace, left out or assumed.
      checkpoint: what forecast it; "" for a predictor given as such.
    """

    kind: ClassVar[str] = "scaled_run"
    source: str
    origin: str
    target: str
    columns: dict[str, np.ndarray]
    busy_s: float
    span_s: float
    notes: tuple[str, ...] = ()
    checkpoint: str = ""
    energy_j: float = 0.0

    @property
    def power_w(self) -> float:
        """Mean watts of the target while kernels run."""
        return self.energy_j / self.scaled_s if self.scaled_s > 0.0 else 0.0

    @property
    def measured_s(self) -> float:
        """Seconds of all kernels on the origin."""
        return float(np.sum(self.columns["measured_s"]))

    @property
    def scaled_s(self) -> float:
        """Seconds of all kernels on the target."""
        return float(np.sum(self.columns["scaled_s"]))

    @property
    def scaled_span_s(self) -> float:
        """The whole run on the target: kernels overlap in the same share, time without kernels is unchanged."""
        share = self.scaled_s / self.measured_s if self.measured_s > 0 else 1.0
        return self.busy_s * share + (self.span_s - self.busy_s)

    def coverage(self) -> dict[str, dict[str, float]]:
        """Per rule that was used: kinds of launches, seconds measured and scaled, share of the measured time."""
        total, frame = self.measured_s, self.to_frame()
        sums = frame.groupby("rule").agg({"name": "size", "measured_s": "sum", "scaled_s": "sum"})
        ordered = sums.rename(columns={"name": "kernels"}).reindex([rule for rule in RULES if rule in sums.index])
        shares: Any = ordered.assign(share=ordered["measured_s"] / (total or 1.0)).to_dict("index")
        return dict(shares)

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of launch."""
        return pd.DataFrame(self.columns)

    def most_expensive(self, count: int = 10) -> list[dict[str, Any]]:
        """The kinds of launches with the most measured time, as plain values."""
        rows: list[Any] = self.to_frame().nlargest(count, "measured_s").to_dict("records")
        return rows

    def values(self) -> dict[str, Any]:
        """Totals, coverage by rule, the ten kinds of launches with the most measured time, all notes."""
        return {
            **self._fields("source", "origin", "target", "checkpoint", "measured_s", "scaled_s"),
            "measured_span_s": self.span_s,
            "scaled_span_s": self.scaled_span_s,
            **(self._fields("energy_j", "power_w") if self.energy_j else {}),
            "coverage": self.coverage(),
            "most_expensive": self.most_expensive(),
            "notes": self.notes,
        }


def scale_trace(
    trace: str | os.PathLike[str] | Trace,
    origin: str | GPU | None,
    target: str | GPU,
    *,
    predictor: str | Predictor | None = None,
    select: Mapping[str, str] | None = None,
    plain: bool = False,
) -> ScaledRun:
    """Forecast a run measured on one GPU on another, real or hypothetical.

    Every kernel's measured time is multiplied by the forecast on the target over the forecast on the origin where its
    work is known, and scaled by a simpler rule where it is not (`rules`); `ScaledRun.coverage` says how much of the
    time each rule carries. A GPU the checkpoint measured is forecast with its own effect, so that what is odd about the
    origin alone is not carried to the target; and of what still sets a kernel apart from its forecast only a part is,
    the smaller the less the two GPUs are alike (`rules.carried`).

    Args:
      trace: a Chrome trace of the PyTorch profiler or of JAX's (.json, .json.gz, or JAX's folder), a CSV of Nsight
        Systems or rocprof, a per-operator Parquet table, or a `Trace` already read.
      origin, target: names, files or records of GPUs; origin None = the GPU that the trace names.
      predictor: a checkpoint name or path, or a predictor (used as it is for both GPUs); None = `tensorcore` when any
        product of the run computes in another dtype than fp32, else `fp32`.
      select: for per-operator tables with several runs: column -> value.
      plain: measured time times forecast over forecast, all deviations carried.
    Raises: `InputError` for an unreadable trace, one that names no GPU where origin is None, or a target that lacks an
      arithmetic path of the run.
    """
    device = load_named_gpu(origin)[0] if isinstance(origin, str) else ""
    read = trace if isinstance(trace, Trace) else read_trace(trace, device, select)
    measured_on = origin_of(read) if origin is None else origin
    checkpoint = predictor if predictor is not None else default_checkpoint(work_of(read.items, _named(measured_on)[1]))
    here, there = (_machine(gpu, checkpoint) for gpu in (measured_on, target))
    rules, ratios = scaling(read.items, here, there, plain=plain)
    names = ("name", "operator", "kind", "dtype")
    columns = {name: np.array([getattr(item, name) for item in read.items], object) for name in names}
    measured = np.array([item.seconds for item in read.items])
    columns |= {"rule": np.array(rules, object), "count": np.array([item.count for item in read.items])}
    columns |= {"measured_s": measured, "ratio": ratios, "scaled_s": measured * ratios}
    checkpoint_name = checkpoint if isinstance(checkpoint, str) else ""
    notes = [
        *(card_notes(load_card(checkpoint_name), checkpoint_name) if checkpoint_name else ()),
        *origin_notes(read, origin, here.name),
        *read.notes,
        *assumed(read.items, rules, here, there, checkpoint_name, chosen=predictor is None),
    ]
    spans = (read.busy_s, read.span_s)
    joules, known_share = run_energy(read.items, rules, columns["scaled_s"], here, there)
    if joules and known_share < ALL_KNOWN:
        notes.append(
            f"joules: {known_share:.1%} of the time on {there.name} is of kernels whose work is known; the others "
            "count at their mean draw"
        )
    return ScaledRun(read.source, here.name, there.name, columns, *spans, tuple(notes), checkpoint_name, joules)


def _named(gpu: str | GPU) -> tuple[str, GPU]:
    return ("the given GPU", gpu) if isinstance(gpu, GPU) else load_named_gpu(gpu)


def _machine(gpu: str | GPU, predictor: str | Predictor) -> Machine:
    """A machine; a catalog name the checkpoint measured is forecast with its effect, a file or record is not."""
    name, record = _named(gpu)
    chosen = predictor
    if isinstance(chosen, str):
        measured = not isinstance(gpu, GPU) and canonical_name(gpu) in load_card(chosen).get("device_effects", {})
        chosen = load_predictor(chosen, name if measured else None)
    return Machine(record, limits_of(name), chosen, name)
