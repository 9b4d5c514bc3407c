"""Fit the law of `model.power` to measured watts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.optimize import least_squares

import neusight_jax
from neusight_jax.datasets.measurements import table_from_frame
from neusight_jax.errors import InputError
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.checkpoint import save_checkpoint
from neusight_jax.model.latency import in_row_order, kernel_latency
from neusight_jax.model.power import MICROSECOND, REFERENCE_NM, PowerLaw, draw_of
from neusight_jax.model.predictor import Predictor
from neusight_jax.training.taking_over import refit

RECIPE = "power"
"""Name of the recipe that fits the law of power, of a checkpoint that forecasts seconds already."""
ENERGIES: tuple[str, ...] = (
    *("product_pj", "attention_pj", "decode_pj", "stream_pj"),
    *("flop16_pj", "flop8_pj", "flop4_pj", "flop32_pj", "dram_pj"),
)
"""Constants that joules are linear in, in the order of rows; that of memory, which has no volts, is the last."""
MEMORY = ENERGIES.index("dram_pj")
CONSTANTS: tuple[str, ...] = tuple(constant.name for constant in dataclasses.fields(PowerLaw))
NOISE = 0.15
"""Spread of measured over forecast watts beside the law, in logarithms."""
ROWS_OF_A_GPU = 100.0
"""Rows that one GPU counts as in a fit: rows of a sweep miss alike, so that more of them say little more."""
REGULATED = 0.985
"""Mean watts of a board at its limit, over the limit."""
SHORTEST_S = 50e-6
"""Kernels shorter than this have watts of more than themselves in a window of NVML (100 ms)."""


class Measured(NamedTuple):
    """Watts measured on one GPU, and the joules that the law gives to them.

    Attributes:
      joules: of each constant of `ENERGIES` at 1, the node left out, at the floor of the volts [constant, row].
      seconds: that they are spent in [row].
      gaps: 1 where kernels are measured alone, else 0 [row].
      watts: measured [row].
      share: clock over the boost clock [row].
      limit_w: what the board draws at its limit [row].
      group: of the row; every group weighs the same in a fit [row].
      gpu: the board.
    """

    joules: Float[np.ndarray, "constant row"]
    seconds: Float[np.ndarray, " row"]
    gaps: Float[np.ndarray, " row"]
    watts: Float[np.ndarray, " row"]
    share: Float[np.ndarray, " row"]
    limit_w: Float[np.ndarray, " row"]
    group: np.ndarray[Any, Any]
    gpu: GPU


def joules_of(gpu: GPU, table: KernelTable, seconds: Mapping[str, Any]) -> Float[np.ndarray, "constant row"]:
    """Joules of one launch for each constant of `ENERGIES` at 1, node and volts left out."""
    columns = []
    # Joules are linear in these constants: a fit asks the law for each once, and multiplies from then on.
    for name in ENERGIES:
        law = PowerLaw(**{**dict.fromkeys(CONSTANTS, 0.0), name: 1.0})
        rows = {}
        for family, batch in table.families.items():
            draw = draw_of(law, gpu, family, batch, jnp.asarray(seconds[family]))
            rows[family] = np.asarray(sum(draw.joules))
        columns.append(in_row_order(table, rows))
    return np.array(columns, np.float64)


def measured_kernels(predictor: Predictor, gpu: GPU, frame: pd.DataFrame) -> Measured:
    """Kernels of one GPU that were each run again and again.

    Args:
      predictor: whose seconds the energies are spent in.
      gpu: the board.
      frame: rows of `datasets.measurements` with power_w and, where known, power_limit_w and clock_hz.
    """
    table = table_from_frame(frame)
    of_one = kernel_latency(predictor, gpu, table, isolated=True)
    seconds = in_row_order(table, {family: np.asarray(values) for family, values in of_one.items()})
    limit_w = frame["power_limit_w"].fillna(float(np.asarray(gpu.tdp_w))).to_numpy(float)
    share = (frame["clock_hz"] / float(np.asarray(gpu.clock_hz))).fillna(1.0).to_numpy(float)
    group = (frame["family"] + " " + frame["dtype"]).to_numpy(object)
    watts = frame["power_w"].to_numpy(float)
    joules = joules_of(gpu, table, of_one)
    return Measured(joules, seconds, np.ones(len(frame)), watts, share, REGULATED * limit_w, group, gpu)


def law_watts(constants: Mapping[str, float], data: Measured) -> Float[np.ndarray, " row"]:
    """Watts by the law, within the limit of the board."""
    node = (float(np.asarray(data.gpu.process_nm)) / REFERENCE_NM) ** constants["node_exponent"]
    volts = 1.0 + constants["slope"] * np.maximum(data.share - constants["flat"], 0.0)
    energies = np.array([constants[name] for name in ENERGIES])
    core = node * energies[:MEMORY] @ data.joules[:MEMORY] * volts**2
    seconds = data.seconds + data.gaps * constants["gap_us"] * MICROSECOND
    static_w = constants["static_share"] * float(np.asarray(data.gpu.tdp_w))
    total = static_w + (core + energies[MEMORY] * data.joules[MEMORY]) / seconds
    # A smooth minimum: at the limit the clock falls, and the watts stay.
    return np.asarray(total / (1.0 + (total / data.limit_w) ** 14) ** (1.0 / 14.0))


def fit_power(sets: Sequence[Measured]) -> PowerLaw:
    """The most probable constants under the priors of `PowerLaw`; every GPU counts the same, and its groups as well."""
    priors = dataclasses.fields(PowerLaw)
    first = np.log([float(prior.default) for prior in priors])  # type: ignore[arg-type]
    widths = np.array([prior.metadata["width"] for prior in priors])
    weights = []
    for data in sets:
        _, place, size = np.unique(data.group.astype(str), return_inverse=True, return_counts=True)
        # Groups of many rows are sweeps of one kind: unweighted, they would fit the law to themselves.
        weights.append(np.sqrt(ROWS_OF_A_GPU / (size[place] * len(size))) / NOISE)

    def residuals(logs: Float[np.ndarray, " constant"]) -> Float[np.ndarray, " residual"]:
        constants = dict(zip(CONSTANTS, np.exp(logs), strict=True))
        misses = [
            np.log(law_watts(constants, data) / data.watts) * weight for data, weight in zip(sets, weights, strict=True)
        ]
        return np.concatenate([*misses, (logs - first) / widths])

    # A window of NVML that holds more than the kernel is an outlier: the loss grows with its root.
    best = np.exp(least_squares(residuals, first, loss="soft_l1").x)
    return PowerLaw(**{name: float(f"{value:.4g}") for name, value in zip(CONSTANTS, best, strict=True)})


def errors(law: PowerLaw, data: Measured) -> pd.Series:
    """Relative errors of watts, by group."""
    constants = {name: float(np.asarray(getattr(law, name))) for name in CONSTANTS}
    return pd.Series(np.abs(law_watts(constants, data) / data.watts - 1.0), index=data.group)


def train_power(
    measurements: Sequence[Path | str],
    output: Path | str,
    base: str = "tensorcore",
    hold_out: Sequence[str] = (),
    *,
    drop_invalid: bool = False,
) -> dict[str, Any]:
    """Fit the law of power to kernels with measured watts, and write a checkpoint that has it.

    Args:
      measurements: files or folders of the schema with a column power_w; rows without it, or shorter than
        `SHORTEST_S`, are left out.
      output: folder to write, new or empty.
      base: checkpoint of kind mixture, whose seconds stay as they are.
      hold_out: GPUs that are scored and not fitted.
      drop_invalid: leave bad rows out instead of refusing.
    Returns: the card, with `power_errors_percent` by GPU.
    Raises: `InputError` for bad measurements, or none with watts, or a base of another kind.
    """
    predictor, card, data, held_out = refit(measurements, output, base, hold_out, drop_invalid, "watts are")
    frame = data.frame[(data.frame["latency_s"] >= SHORTEST_S) & data.frame["power_w"].notna()]
    sets = {
        str(device): measured_kernels(predictor, data.gpu(str(device)), rows)
        for device, rows in frame.groupby("device")
    }
    fitted = [measured for device, measured in sets.items() if device not in held_out]
    if not fitted:
        raise InputError(
            f"no kernel of {SHORTEST_S * 1e6:.0f} us or more has watts in column power_w; "
            "expected some of a GPU that is not held out"
        )
    law = fit_power(fitted)
    missed = {device: round(100.0 * float(errors(law, measured).mean()), 1) for device, measured in sets.items()}
    rows = {device: len(measured.watts) for device, measured in sets.items()}
    card = {
        **card,
        "power": {"rows": rows, "held_out": held_out, "errors_percent": missed, "base": base},
        "version": neusight_jax.__version__,
        "notes": list(data.notes),
    }
    save_checkpoint(output, dataclasses.replace(predictor, power=law), card)
    return card
