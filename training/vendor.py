"""Fit what another vendor's matrix products do otherwise, the networks of a checkpoint kept as they are.

The row `other_vendor` of the residual table gets two numbers, shared by all formats and by the families that were never
measured there: of the compute head, and of device memory. What a vendor's kernels lose in compute, they lose at
whatever clock a board settles at within its watts: so the power head has that of the compute head. An effect of each
GPU stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.optimize import minimize

import neusight_jax
from neusight_jax.datasets.measurements import Measurements
from neusight_jax.errors import InputError
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import SCALE_BLOCK
from neusight_jax.kernels.gemm import flop
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.intervals import BORROWED, LEVEL, UNMEASURED, Intervals, gpu_ratios, gpu_widening
from neusight_jax.model.mixture import MixturePredictor
from neusight_jax.model.residuals import EFFECTS, OTHER_VENDOR, other_vendor
from neusight_jax.training.data import Rows, devices_with, measured_devices, sweep_rows
from neusight_jax.training.fit import Settings, sample_of
from neusight_jax.training.intervals import mean_error_percent, own_width, pooled_quantile
from neusight_jax.training.objectives import EFFECT_WIDTH, MixtureObjective, forecast
from neusight_jax.training.taking_over import refit
from neusight_jax.unmeasured import VENDOR_PRODUCTS

RECIPE = "vendor"
"""Name of the recipe, of a checkpoint that forecasts the products of the first of `gpu.VENDORS` already."""
REASONED: tuple[str, ...] = ("gemm_fp4", "grouped_gemm", "prefill", "decode")
"""Families of the same matrix units and memory that take the residual over."""
COMPUTE, DRAM, POWER = (EFFECTS.index(name) for name in ("compute", "dram", "power"))
VENDOR_PENALTY, DEVICE_PENALTY = 0.005, Settings.effect_penalty
"""Cost of the residual of a vendor, and of the effect of a GPU, by their size. Many GPUs will be forecast by the first,
so that it is shrunk less."""
ROWS_OF_A_CLASS = 200
"""Rows of a GPU, a format of scales and a class of size, drawn at random; classes weigh the same."""
CLASS = 8.0
"""FLOP of the next class of size over those of the one before."""

_BY_DEVICE = ("device_effects", "device_intervals")

Products = Mapping[str, Rows]
"""Rows of products by family."""


def size_classes(rows: Rows) -> np.ndarray:
    """Class of every row, of its device, its format of scales and its FLOP: numbers from 0 [row]."""
    block = np.asarray(rows.batch.dims.get(SCALE_BLOCK, np.zeros(len(rows.seconds))))
    flops = flop({name: jnp.asarray(column) for name, column in rows.batch.dims.items()})
    size = np.floor(np.log(np.asarray(flops)) / np.log(CLASS))
    keys = np.stack([rows.device, block > 0, size], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1]).ravel()


def spread(rows: Rows) -> Rows:
    """At most `ROWS_OF_A_CLASS` rows of every class."""
    generator, classes = np.random.default_rng(0), size_classes(rows)
    parts = [np.flatnonzero(classes == place) for place in range(classes.max() + 1)]
    return rows.take(np.sort(np.concatenate([generator.permutation(part)[:ROWS_OF_A_CLASS] for part in parts])))


def vendor_row(numbers: Float[Array, "2"]) -> Float[Array, " effect"]:
    """Row of the residual table of two numbers, of compute and of device memory."""
    row = jnp.zeros(len(EFFECTS)).at[jnp.array([COMPUTE, POWER])].set(numbers[0])
    return row.at[DRAM].set(numbers[1])


def _log_seconds(predictor: MixturePredictor, rows: Rows) -> Callable[[Array, Array], Float[Array, " row"]]:
    """Log seconds of rows as a function of the row of the vendor [effect] and of an effect of each device
    [device, effect]."""
    name = rows.family.network
    parameters, objective = predictor.families[name], MixtureObjective(predictor.tiles[name])
    sample = replace(sample_of(rows), generation=jnp.full(len(rows.seconds), -1))

    @jax.jit
    def run(row: Array, effects: Array) -> Array:
        moved = replace(parameters, residual=parameters.residual.at[:, OTHER_VENDOR].set(row), effect=effects)
        return jnp.log(forecast(rows.family, objective.predictor(moved, rows.family, sample), sample))

    return run


def _least(loss: Callable[[Array], Array], size: int) -> np.ndarray:
    """Where a loss is least, from zeros."""
    slope = jax.jit(jax.value_and_grad(loss))

    def values(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, grad = slope(jnp.asarray(flat, jnp.float32))
        # SciPy steps in float64, whatever a gradient was computed in.
        return float(value), np.asarray(grad, np.float64)

    return np.asarray(minimize(values, np.zeros(size), jac=True, method="L-BFGS-B").x)


def _loss(predictor: MixturePredictor, rows: Rows) -> Callable[[Array, Array], Array]:
    """Mean size of the log errors of rows, as a function of what `_log_seconds` is one of; classes weigh the same."""
    run, log_seconds, classes = _log_seconds(predictor, rows), np.log(rows.seconds), size_classes(rows)
    weight = 1.0 / np.bincount(classes)[classes] / (classes.max() + 1)
    return lambda row, effects: jnp.sum(
        weight * jnp.sqrt((log_seconds - run(row, effects)) ** 2 + Settings.softening**2)
    )


def _cost(array: Array) -> Array:
    return jnp.sum(jnp.sqrt(array**2 + EFFECT_WIDTH**2))


def fit_vendor(predictor: MixturePredictor, products: Products) -> Float[np.ndarray, "2"]:
    """Residual of a vendor: of the compute head and of device memory, natural logarithm.

    Args:
      predictor: whose networks are kept.
      products: on GPUs of the vendor, by family; families weigh the same.
    """
    losses = [_loss(predictor, spread(rows)) for rows in products.values()]
    none = [jnp.zeros((len(rows.devices), len(EFFECTS))) for rows in products.values()]

    def loss(numbers: Array) -> Array:
        row = vendor_row(numbers)
        mean = sum((part(row, zeros) for part, zeros in zip(losses, none, strict=True)), jnp.zeros(())) / len(losses)
        return mean + VENDOR_PENALTY * _cost(numbers)

    return _least(loss, 2)


def fit_devices(
    predictor: MixturePredictor, rows: Rows, numbers: Float[np.ndarray, "2"]
) -> dict[str, Float[np.ndarray, " effect"]]:
    """Effect of each GPU in one family, beside the residual of their vendor."""
    part, row, shape = _loss(predictor, spread(rows)), vendor_row(jnp.asarray(numbers)), (-1, len(EFFECTS))

    def loss(flat: Array) -> Array:
        return part(row, flat.reshape(shape)) + DEVICE_PENALTY * _cost(flat)

    best = _least(loss, len(rows.devices) * len(EFFECTS)).reshape(shape)
    return dict(zip(rows.devices, best, strict=True))


def misses(
    predictor: MixturePredictor,
    rows: Rows,
    numbers: Float[np.ndarray, "2"],
    effects: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """log(measured / forecast) of the rows of each device.

    Args:
      predictor: whose networks are kept; rows: of one family.
      numbers: residual of the vendor; effects: of each device beside it, None = as of GPUs nobody has measured.
    """
    table = np.zeros((len(rows.devices), len(EFFECTS))) if effects is None else [effects[name] for name in rows.devices]
    log_s = _log_seconds(predictor, rows)(vendor_row(jnp.asarray(numbers)), jnp.asarray(np.array(table)))
    return rows.by_device(np.log(rows.seconds) - np.asarray(log_s))


def fit_left_out(predictor: MixturePredictor, products: Products) -> dict[str, Float[np.ndarray, "2"]]:
    """Residual of the vendor with each GPU left out, by that GPU; of a single one, as it is fitted."""
    devices = sorted({device for rows in products.values() for device in rows.devices})
    out = {}
    for device in devices:
        others = {name: rows.without([device]) for name, rows in products.items()}
        out[device] = fit_vendor(
            predictor, {name: rows for name, rows in others.items() if len(rows.seconds)} or products
        )
    return out


def left_out_misses(
    predictor: MixturePredictor, rows: Rows, numbers: Mapping[str, Float[np.ndarray, "2"]]
) -> dict[str, np.ndarray]:
    """log(measured / forecast) of the rows of each device, with the residual that was fitted without it."""
    return {device: misses(predictor, rows, numbers[device])[device] for device in rows.devices}


def unseen_width(
    predictor: MixturePredictor,
    products: Products,
    gpus: Mapping[str, GPU],
    numbers: Mapping[str, Float[np.ndarray, "2"]],
) -> float:
    """Half-width of the interval of products on a GPU of the vendor that nobody has measured, before it is widened.

    Args:
      predictor: whose networks are kept; products: by family; gpus: that they were measured on.
      numbers: of `fit_left_out`. Families and GPUs weigh the same.
    """
    assert predictor.intervals is not None
    errors = {}
    for name, rows in products.items():
        for device, logs in left_out_misses(predictor, spread(rows), numbers).items():
            wider = gpu_widening(gpu_ratios(gpus[device]), predictor.intervals.gpu_range[name])
            errors[f"{name} {device}"] = logs / float(wider)
    return pooled_quantile(errors, LEVEL)


def vendor_products(data: Measurements, devices: Sequence[str]) -> Products:
    """Measured products of those of the devices that run another vendor's libraries than the first of `gpu.VENDORS`."""
    of_vendor = [name for name in devices if bool(other_vendor(data.gpu(name)))]
    having = {name: devices_with(data, name, of_vendor) for name in VENDOR_PRODUCTS}
    return {name: sweep_rows(data, name, present) for name, present in having.items() if present}


def _percents(errors: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    return {name: {gpu: mean_error_percent(logs) for gpu, logs in of.items()} for name, of in errors.items()}


def train_vendor(
    measurements: Sequence[Path | str],
    output: Path | str,
    base: str = "tensorcore",
    hold_out: Sequence[str] = (),
    *,
    drop_invalid: bool = False,
) -> dict[str, Any]:
    """Fit the residual of another vendor's matrix products and write a checkpoint that has it.

    Args:
      measurements: files or folders of the schema; GPUs of the first vendor in it are left out.
      output: folder to write, new or empty.
      base: checkpoint of kind mixture with intervals, whose networks stay as they are.
      hold_out: GPUs that are scored and not fitted.
      drop_invalid: leave bad rows out instead of refusing.
    Returns: the card, with `vendor`: the two numbers, and errors in percent by family and GPU.
    Raises: `InputError` for bad measurements, none of another vendor, or a base of another kind.
    """
    what = "a vendor's residual is"
    predictor, card, data, held_out = refit(measurements, output, base, hold_out, drop_invalid, what)
    if predictor.intervals is None:
        raise InputError(f"checkpoint {base} is no mixture with intervals; a vendor's residual is fitted to one")
    products = vendor_products(data, [name for name in measured_devices(data) if name not in held_out])
    apart = vendor_products(data, held_out)
    if not products and not apart:
        raise InputError("no product in 16 or 8 bits of another vendor's GPU among these measurements; expected some")
    gpus = {device: data.gpu(device) for rows in products.values() for device in rows.devices}
    # Where all are held out nothing is known of the vendor, and the interval says so.
    numbers = fit_vendor(predictor, products) if products else np.zeros(2)
    left_out = fit_left_out(predictor, products)
    effects = {name: fit_devices(predictor, rows, numbers) for name, rows in products.items()}
    seen = {name: misses(predictor, rows, numbers, effects[name]) for name, rows in products.items()}
    errors = {
        "training": seen,
        "left out": {name: left_out_misses(predictor, rows, left_out) for name, rows in products.items()},
        "held out": {name: misses(predictor, rows, numbers) for name, rows in apart.items()},
    }
    width = unseen_width(predictor, products, gpus, left_out) if products else UNMEASURED[1]
    row = vendor_row(jnp.asarray(numbers, jnp.float32))
    families = {
        name: replace(part, residual=part.residual.at[:, OTHER_VENDOR].set(row))
        if name in (*VENDOR_PRODUCTS, *REASONED)
        else part
        for name, part in predictor.families.items()
    }
    made = replace(predictor, families=families, intervals=_with_vendor(predictor.intervals, width))
    card = {
        **card,
        **_entries(card, products, effects, seen),
        "held_out": sorted({*card["held_out"], *held_out} - {*gpus}),
        "vendor": {
            "rows": {name: len(rows.seconds) for name, rows in products.items()},
            **{"compute": round(float(numbers[0]), 4), "dram": round(float(numbers[1]), 4), "width": round(width, 4)},
            "held_out": held_out,
            "reasoned": list(REASONED),
            "errors_percent": {kind: _percents(of) for kind, of in errors.items() if of},
        },
        "version": neusight_jax.__version__,
        "notes": list(dict.fromkeys([*card.get("notes", ()), *data.notes])),
    }
    # Families taken over stand last in a card, as `taken_over` writes it.
    last = {key: card.pop(key) for key in ("taken_over",) if key in card}
    save_checkpoint(output, made, card | last)
    return card | last


def _with_vendor(intervals: Intervals, width: float) -> Intervals:
    """Intervals with those of the vendor: of products this half-width, of other families of tensor cores `BORROWED`
    times that beyond their own."""
    pairs = dict.fromkeys(VENDOR_PRODUCTS, jnp.array([-width, width], jnp.float32))
    outward = jnp.array([-width, width], jnp.float32) * BORROWED
    for name, pair in intervals.kernels.items():
        if FAMILIES[name].tensor_core and not FAMILIES[name].linked and name not in pairs:
            pairs[name] = pair + outward
    return replace(intervals, other_vendor={**intervals.other_vendor, **dict(sorted(pairs.items()))})


def _entries(
    card: Mapping[str, Any],
    products: Products,
    effects: Mapping[str, Mapping[str, np.ndarray]],
    seen: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, Any]:
    """Entries of a card with the GPUs of the vendor among those trained on, and no other ones of an earlier fit."""
    earlier = card.get("vendor", {}).get("errors_percent", {}).get("training", {})
    percents = {name: {**of, "training": dict(of["training"])} for name, of in card["errors_percent"].items()}
    tables = {key: {gpu: dict(of) for gpu, of in card.get(key, {}).items()} for key in _BY_DEVICE}
    # GPUs of an earlier fit need not be among these measurements: what stands of them is of another residual.
    for name, gpus in earlier.items():
        for gpu in gpus:
            percents[name]["training"].pop(gpu, None)
            for table in tables.values():
                table[gpu].pop(name, None)
    for name, rows in products.items():
        for gpu in rows.devices:
            errors = seen[name] if len(seen[name]) > 1 else {**seen[name], "": seen[name][gpu]}
            percents[name]["training"][gpu] = mean_error_percent(seen[name][gpu])
            entries = ([round(float(value), 5) for value in effects[name][gpu]], round(own_width(errors, gpu), 4))
            for key, entry in zip(_BY_DEVICE, entries, strict=True):
                tables[key].setdefault(gpu, {})[name] = entry
    kept = {key: {gpu: of for gpu, of in table.items() if of} for key, table in tables.items()}
    gone = {gpu for gpus in earlier.values() for gpu in gpus}
    devices = sorted({*card["trained_on"]["devices"]} - gone | {*kept[_BY_DEVICE[0]]})
    return {"trained_on": {**card["trained_on"], "devices": devices}, "errors_percent": percents, **kept}
