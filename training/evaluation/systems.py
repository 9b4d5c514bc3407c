"""The systems a protocol compares: each fits on the GPUs a job may see and hands back predictors.

A new system is one line in `SYSTEMS`. What is fitted by gradients fits all jobs together (`GradientSystem`); anything
else fits job by job (`JobSystem`). All forecasts then go through `Predictor.forecast_kernels`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray
from scipy.optimize import nnls

import neusight_jax
from neusight_jax.datasets.measurements import Measurements, find_measured, read_measurements
from neusight_jax.errors import InputError, unknown_name
from neusight_jax.files import refuse_existing
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Family
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.heads import TileChoice
from neusight_jax.model.network import Network, init_network
from neusight_jax.model.predictor import BASELINES as UNFITTED
from neusight_jax.model.predictor import Predictor, RooflinePredictor, bounded, load_baseline
from neusight_jax.model.rivals import (
    LEAVES,
    MAX_DEPTH,
    TREES,
    FittedBaseline,
    Forest,
    LiLine,
    MeasuredKernels,
    ThreeNumbers,
    WavePredictor,
    gbt_inputs,
    habitat_inputs,
    li_work,
)
from neusight_jax.model.roofline import peak_flop_per_s
from neusight_jax.training.data import NETWORKS, Rows, join_rows, measured_devices, model_rows, sweep_rows, thin
from neusight_jax.training.fit import Job, Settings, fit, sample_of, settings_for
from neusight_jax.training.objectives import (
    LatencyKind,
    LogErrorObjective,
    MixtureObjective,
    effect_penalties,
    members_of,
    neusight_objective,
    tile_choice,
)
from neusight_jax.training.recipes import train_command

# Fits of the baselines: lines (`li`), Habitat's network, the table of wave scaling, and boosted trees (`gbt`).

HIDDEN: dict[str, tuple[int, ...]] = {"neusight": (64, 64, 64), "habitat-mlp": (64, 64, 64, 64)}
"""Hidden layers of the baselines that have some."""
GBT_SETTINGS: dict[str, Any] = {
    "objective": "l1",  # the log error's absolute value, as the other systems are fitted
    "num_leaves": LEAVES,
    "max_depth": MAX_DEPTH,
    "learning_rate": 0.05,
    "min_data_in_leaf": 40,
    "feature_fraction": 0.7,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "verbosity": -1,
    "deterministic": True,
    "num_threads": 2,
}


def fit_li(rows: Rows, seed: int) -> Predictor:
    """The mended variant of `baselines.li`: relative errors, floors, slopes on the rate that bounds the family."""
    line = _lines(rows, relative=True)
    on_peak = rows.family.matrix
    rates = (line["peak"] if on_peak else line["bandwidth"]).to_numpy()
    scale = rates.max()
    weight = 1.0 / line["inverse_slope"].to_numpy()  # relative errors again
    design = np.stack([rates / scale, np.ones_like(rates)], axis=1) * weight[:, None]
    if len(rates) == 1:
        design[:, 1] = 0.0  # one GPU says nothing of the offset
    (per_rate, offset), _ = nnls(design, np.ones_like(rates))
    p, floor_s = per_rate / scale, float(line["intercept"].clip(lower=0.0).median())
    return _li(rows.family, 0.0 if on_peak else p, p if on_peak else 0.0, offset, floor_s)


def fit_published_li(rows: Rows, seed: int) -> Predictor:
    """The variant as NeuSight's authors coded it: least squares on seconds, bandwidth alone, no intercept."""
    line = _lines(rows, relative=False)
    bandwidths, inverse_slopes = line["bandwidth"].to_numpy(), line["inverse_slope"].to_numpy()
    design = np.stack([bandwidths, np.ones_like(bandwidths)], axis=1)
    if len(bandwidths) == 1:
        design[:, 1] = 0.0
    (p, q), *_ = np.linalg.lstsq(design / bandwidths.max(), inverse_slopes / bandwidths.max())
    return _li(rows.family, p, 0.0, q, 0.0)


def _li(family: Family, per_bandwidth: float, per_peak: float, offset: float, floor_s: float) -> Predictor:
    values = (jnp.asarray(value, jnp.float32) for value in (per_bandwidth, per_peak, offset, floor_s))
    return _one_family("li", family.network, LiLine(*values))


def _one_family(kind: str, network: str, parameters: Any) -> Predictor:
    return FittedBaseline(kind, {network: parameters})


def _lines(rows: Rows, *, relative: bool) -> pd.DataFrame:
    """t = a · work + c on every GPU with isolated rows, by least squares on seconds or on relative errors.

    With relative errors a and c are kept at or above zero, as a time and a floor are.
    Returns: one row a GPU: inverse_slope (1 / a, work per second), intercept (c, seconds), bandwidth and peak.
    """
    rows = rows.take(rows.isolated > 0.5)
    sample = sample_of(rows, seen=False)
    work = np.asarray(li_work(rows.family, sample.batch), np.float64)
    peaks = np.asarray(peak_flop_per_s(sample.gpu, rows.family, sample.batch.dtype), np.float64)
    bandwidths = np.asarray(sample.gpu.mem_bytes_per_s, np.float64)
    lines = []
    for position in np.unique(rows.device):
        # The slope is what differs from GPU to GPU, so that each has a line of its own.
        mine = rows.device == position
        x, y = work[mine], rows.seconds[mine].astype(np.float64)
        scale = x.max()
        design = np.stack([x / scale, np.ones_like(x)], axis=1)
        if relative:
            (slope, intercept), _ = nnls(design / y[:, None], np.ones_like(y))
        else:
            slope, intercept = np.linalg.lstsq(design, y)[0]
        lines.append((scale / slope, intercept, bandwidths[mine][0], peaks[mine][0]))
    return pd.DataFrame(lines, columns=["inverse_slope", "intercept", "bandwidth", "peak"])


def start_roofline3(key: PRNGKeyArray, family: Family, rows: Rows) -> ThreeNumbers:
    """Efficiencies 0.73 and a floor of 25 us."""
    return ThreeNumbers(jnp.ones(()), jnp.ones(()), jnp.log(25e-6))


def start_habitat_mlp(key: PRNGKeyArray, family: Family, rows: Rows) -> Network:
    """A network normalised to the rows, that starts at their geometric mean."""
    sample = sample_of(rows, seen=False)
    inputs = habitat_inputs(family, sample.gpu, sample.batch, sample.isolated)
    network = init_network(key, inputs, HIDDEN["habitat-mlp"], 1, members=1)
    *biases, last = network.parameters["biases"]
    start = (*biases, last + jnp.mean(sample.log_seconds))
    return replace(network, parameters={**network.parameters, "biases": start})


def wave_predictors(rows: Rows, *, general: bool) -> Sequence[Predictor]:
    """Wave scaling from every GPU of the rows as the origin, in their order."""
    predictors = []
    for position in np.unique(rows.device):
        # What was measured on one GPU is all that wave scaling goes by.
        device_rows = rows.take((rows.device == position) & (rows.isolated > 0.5))
        measured = MeasuredKernels(
            dims=jnp.stack([jnp.asarray(device_rows.batch.dims[name]) for name in rows.family.dims], axis=1),
            op=jnp.asarray(device_rows.batch.op),
            dtype=jnp.asarray(device_rows.batch.dtype),
            seconds=jnp.asarray(device_rows.seconds),
        )
        origin = jax.tree.map(lambda column, at=position: jnp.asarray(column)[at], rows.gpus)
        predictors.append(WavePredictor(origin, {rows.family.name: measured}, general))
    return predictors


def fit_gbt(rows: Rows, seed: int) -> Predictor:
    """Trees for the log of the measured time, every GPU with equal weight, by LightGBM.

    (Not scikit-learn: LightGBM needs NumPy and SciPy only, both there with JAX, and is one wheel of a few MB.)

    Raises: `InputError` when LightGBM is not installed.
    """
    try:
        import lightgbm
    except (ImportError, OSError) as error:  # not installed, or without the libraries it links to
        raise InputError(f"the gbt baseline needs lightgbm ({error}); from the clone: `pip install '.[gbt]'`") from None
    sample = sample_of(rows, seen=False)
    prepared = jax.jit(
        lambda: gbt_inputs(rows.family, bounded(rows.family, sample.gpu, sample.batch), sample.batch, sample.isolated)
    )
    inputs = np.asarray(prepared(), np.float64)
    counts = np.bincount(rows.device, minlength=len(rows.devices))
    data = lightgbm.Dataset(inputs, np.log(rows.seconds), weight=1.0 / counts[rows.device])
    booster = lightgbm.train({**GBT_SETTINGS, "seed": seed}, data, num_boost_round=TREES)
    return _one_family("gbt", rows.family.network, forest_arrays(booster.dump_model()["tree_info"]))


def forest_arrays(trees: list[dict[str, Any]]) -> Forest:
    """LightGBM's dumped trees as a `Forest`, padded to `TREES` trees of equal size.

    Thresholds are rounded down to float32, so that float32 inputs fall on the side they fell on in float64.
    """
    nodes, count = 2 * LEAVES - 1, max(TREES, len(trees))
    columns = {
        name: np.zeros((count, nodes), np.float32) for name in ("feature", "threshold", "left", "right", "value")
    }
    # A leaf is its own child, so that all trees can be walked as many steps down, past the leaf that is reached.
    for position, tree in enumerate(trees):
        free = iter(range(1, nodes))
        queue = [(0, tree["tree_structure"])]
        while queue:
            at, node = queue.pop()
            if "leaf_value" in node:
                children, cells = (at, at), {"value": node["leaf_value"]}
            else:
                children = (next(free), next(free))
                cells = {"feature": node["split_feature"], "threshold": _rounded_down(node["threshold"])}
                queue += list(zip(children, (node["left_child"], node["right_child"]), strict=True))
            for name, cell in {**cells, "left": children[0], "right": children[1]}.items():
                columns[name][position, at] = cell
    return Forest(**{name: jnp.asarray(cells) for name, cells in columns.items()})


def _rounded_down(value: float) -> np.float32:
    near = np.float32(value)
    return near if near <= value else np.nextafter(near, np.float32(-np.inf))


# The systems.

TILE_SETTINGS = Settings(steps=400)
ROWS_PER_DEVICE = 6000
"""Sweep rows of each GPU and family a baseline of a checkpoint is fitted to, as many as the checkpoint's own recipe."""


@dataclass(frozen=True)
class FamilyRows:
    """Rows of one family, GPUs held out included: each job leaves its own out.

    Attributes:
      rows: rows to fit to.
      every: all measured rows, for systems that look measurements up.
      tile: the family's tile choice, for systems that carry one.
    """

    rows: Rows
    every: Rows
    tile: TileChoice | None


class System(Protocol):
    """System a protocol can compare."""

    def fit(self, data: FamilyRows, jobs: Sequence[Job]) -> Mapping[str, Sequence[Predictor]]:
        """Predictors of the family by GPU: of the jobs that left it out, or of jobs that leave none out.

        One for each seed, or one where nothing is drawn at random. No job uses the rows it holds out.
        """
        ...


@dataclass(frozen=True)
class GradientSystem:
    """A kind of the fitting loop; all jobs run together.

    Attributes:
      kind: from the family's tile choice and rows to what is fitted.
      settings: from the family to those of the optimizer.
    """

    kind: Callable[[Any, Rows], LatencyKind]
    settings: Callable[[Family], Settings]

    def fit(self, data: FamilyRows, jobs: Sequence[Job]) -> dict[str, list[Predictor]]:
        """One predictor a seed: of a GPU left out as of one nobody has measured, else with what was learned of it."""
        rows, kind = data.rows, self.kind(data.tile, data.rows)
        members = members_of(fit(kind, rows, jobs, self.settings(rows.family)).best)
        out: dict[str, list[Predictor]] = {}
        for job, member in zip(jobs, members, strict=True):
            # A job that left nothing out saw every device, so it answers for each of them.
            for device in job.held_out or rows.devices:
                # One row stands for all: it says which generation, and which device if that was seen.
                place = int(np.argmax(rows.device == rows.devices.index(device)))
                sample = sample_of(rows.take(slice(place, place + 1)), seen=not job.held_out)
                out.setdefault(device, []).append(kind.predictor(member, rows.family, sample))
        return out


@dataclass(frozen=True)
class JobSystem:
    """Fits one job after the other.

    Attributes:
      fit_rows: from the rows a job may see and its seed to a predictor.
      random: whether the seed matters; if not, each GPU left out has one fit.
    """

    fit_rows: Callable[[Rows, int], Predictor]
    random: bool = False

    def fit(self, data: FamilyRows, jobs: Sequence[Job]) -> dict[str, list[Predictor]]:
        """One predictor for each seed, or one if nothing is random."""
        out: dict[str, list[Predictor]] = {}
        for job in jobs:
            devices = job.held_out or data.rows.devices
            # Another seed of a fit that draws nothing would only fit the same again.
            if self.random or devices[0] not in out:
                predictor = self.fit_rows(data.rows.without(job.held_out), job.seed)
                for device in devices:
                    out.setdefault(device, []).append(predictor)
        return out


@dataclass(frozen=True)
class WaveSystem:
    """Wave scaling. Nothing is fitted: its "seeds" are the GPUs it may scale from, each with all it was measured on.

    Attributes:
      general: the general equation, else the simplified one.
    """

    general: bool

    def fit(self, data: FamilyRows, jobs: Sequence[Job]) -> dict[str, Sequence[Predictor]]:
        """One predictor for each origin. Raises: `InputError` without a GPU left out, for there is nothing to scale."""
        if not all(job.held_out for job in jobs):
            raise InputError("wave scaling goes from one GPU to another; leave it out of the protocol `seen`")
        out: dict[str, Sequence[Predictor]] = {}
        for names in dict.fromkeys(job.held_out for job in jobs):
            out |= dict.fromkeys(names, wave_predictors(data.every.without(names), general=self.general))
        return out


SYSTEMS: dict[str, System] = {
    "mixture": GradientSystem(
        lambda tile, rows: MixtureObjective(tile, penalties=effect_penalties(rows)), settings_for
    ),
    "neusight": GradientSystem(
        lambda tile, rows: neusight_objective(tile, HIDDEN["neusight"]), lambda _: Settings(steps=2000)
    ),
    "roofline": JobSystem(lambda rows, seed: RooflinePredictor()),
    "roofline3": GradientSystem(
        lambda tile, rows: LogErrorObjective(start_roofline3, partial(_one_family, "roofline3")),
        lambda _: Settings(steps=400, learning_rate=0.05),
    ),
    "li": JobSystem(fit_li),
    "li-published": JobSystem(fit_published_li),
    "habitat-mlp": GradientSystem(
        lambda tile, rows: LogErrorObjective(start_habitat_mlp, partial(_one_family, "habitat-mlp")),
        lambda _: Settings(steps=1500),
    ),
    "habitat-wave": WaveSystem(general=True),
    "habitat-wave-simplified": WaveSystem(general=False),
    "gbt": JobSystem(fit_gbt, random=True),
}
"""Every system by name; the first is ours."""
OURS = "mixture"
DEFAULT_SYSTEMS: tuple[str, ...] = ("mixture", "neusight", "roofline3", "roofline")
"""Systems a protocol compares unless told otherwise."""
BASELINES: tuple[str, ...] = tuple(
    name for name, system in SYSTEMS.items() if name != OURS and not isinstance(system, WaveSystem)
)
"""Systems that forecast from shapes and figures alone, and so can stand beside a checkpoint."""
NEEDS: dict[str, str] = {"gbt": "lightgbm"}
"""Systems that need a package beyond the dependencies, and its module; the extra that installs it has their name."""


def chosen_systems(baselines: Sequence[str], protocol: str = "") -> tuple[tuple[str, ...], list[str]]:
    """Ours and the baselines named, `all` for every one that can run here; the default without names.

    Returns: the systems, and notes on those that `all` leaves out.
    """
    if "all" not in baselines:
        _runnable(baselines, strict=True)
        return (tuple(dict.fromkeys((OURS, *baselines))) if baselines else DEFAULT_SYSTEMS), []
    names, notes = _runnable(SYSTEMS)
    scaling = [name for name in names if isinstance(SYSTEMS[name], WaveSystem)] if protocol == "seen" else []
    if scaling:
        notes.append(f"left out: {', '.join(scaling)}: wave scaling needs a GPU left out to scale to")
    return tuple(name for name in names if name not in scaling), notes


def chosen_baselines(names: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Baselines that stand beside a checkpoint, `all` for every one that can run here, and notes on those left out.

    Raises: `InputError` for any other name.
    """
    if "all" in names:
        return _runnable(BASELINES)
    for name in names:
        if isinstance(SYSTEMS.get(name), WaveSystem):
            raise InputError(f"{name} scales a time measured on another GPU; use --protocol logo, or `scale-trace`")
        if name not in BASELINES:
            raise unknown_name("baseline", name, (*BASELINES, "all"))
    _runnable(names, strict=True)
    return tuple(dict.fromkeys(names)), []


def _runnable(names: Iterable[str], *, strict: bool = False) -> tuple[tuple[str, ...], list[str]]:
    """Systems whose packages are installed, and a note on each of the others; `InputError` for these where strict."""
    runnable, notes = [], []
    for name in names:
        try:
            there = name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None
        except ValueError:  # its import was forbidden
            there = False
        why = f"the {name} baseline needs {NEEDS.get(name)}; from the clone: `pip install '.[{name}]'`"
        if strict and not there:
            raise InputError(why)
        runnable += [name] if there else []
        notes += [] if there else [f"left out: {why}"]
    return tuple(runnable), notes


def fit_tile(rows: Rows, job: Job) -> TileChoice:
    """The tile choice of a family for systems that carry one."""
    return tile_choice(rows, job.seed, lambda kind: fit(kind, rows, [job], TILE_SETTINGS).best)


def fit_baseline(name: str, data: Measurements, devices: Sequence[str], seed: int = 0) -> Predictor:
    """Fit one baseline to everything measured on the devices: sweeps, and nodes of measured models.

    Args:
      name: one of `BASELINES`.
      devices: canonical names; rows of others are not used.
    Raises: `InputError` for an unknown name, or when none of the devices was measured.
    """
    if name not in SYSTEMS and name not in UNFITTED:
        raise unknown_name("baseline", name, BASELINES)
    if name in UNFITTED:
        return load_baseline(name)
    # Families share no parameters: each is fitted by itself, of what was measured of it.
    parts: list[Predictor] = []
    for family in NETWORKS:
        swept = sweep_rows(data, family, devices)
        if not len(swept.seconds):
            continue
        rows = join_rows([thin(swept, ROWS_PER_DEVICE), model_rows(data, family, devices)])
        rows = rows.without_libraries()  # a checkpoint of a baseline is not told them when it forecasts
        if name == "neusight":
            rows = rows.take(rows.isolated > 0.5)  # it cannot tell a kernel alone from one in a model
        job = Job(seed)
        tile = fit_tile(rows, job) if name == "neusight" else None
        fits = SYSTEMS[name].fit(FamilyRows(rows, rows, tile), [job])
        parts += fits[rows.devices[0]]  # a baseline learns nothing of a single GPU
    if not parts:
        raise InputError(f"{name} must be fitted, and none of {', '.join(devices)} was measured here")
    return joined(parts)


def train_baseline(
    measurements: Sequence[Path | str],
    name: str,
    output: Path | str,
    hold_out: Sequence[str] = (),
    seed: int = 0,
    *,
    drop_invalid: bool = False,
) -> dict[str, Any]:
    """Fit a baseline and write it as a checkpoint, which `predict`, `compare` and `evaluate` take like any other.

    Args: as `recipes.train`; name: one of `BASELINES`.
    Returns: the card.
    """
    refuse_existing(output)
    _runnable([name], strict=True)
    if name in UNFITTED:
        raise InputError(f"{name} has nothing to fit; use it as `evaluate --baseline {name}`")
    hold_out = find_measured(hold_out, measurements)
    data = read_measurements(measurements, on_invalid="drop" if drop_invalid else "refuse")
    devices = [device for device in measured_devices(data) if device not in hold_out]
    predictor = fit_baseline(name, data, devices, seed)
    families = [family for family in NETWORKS if predictor.covers(FAMILIES[family])]
    card = {
        "kind": "li" if name == "li-published" else name,
        "architecture": {"families": families, "hidden": list(HIDDEN.get(name, ())), "members": 1},
        "trained_on": {"devices": devices},
        "trained_dtypes": sorted(data.frame["dtype"].unique()),
        "held_out": list(hold_out),
        "recipe": name,
        "seed": seed,
        "notes": list(data.notes),
        "version": neusight_jax.__version__,
        "made_by": train_command(name, hold_out, seed),
    }
    save_checkpoint(output, predictor, card)
    return card


def joined(parts: Sequence[Predictor]) -> Predictor:
    """Predictors of single families as one; all of one kind, each holding dicts by family."""
    merged: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, value in vars(part).items():
            if isinstance(value, dict):
                merged[name] = {**merged.get(name, {}), **value}
    return replace(parts[0], **merged)  # type: ignore[type-var]
