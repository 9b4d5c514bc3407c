"""The 80 % intervals of kernels, one by one and in the order of their file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from neusight_jax.errors import InputError
from neusight_jax.hardware.cluster import Machine, gpu_of, on_device
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.table import KernelTable
from neusight_jax.model.intervals import has_intervals, kernel_interval
from neusight_jax.model.latency import in_row_order, kernel_forecasts, predict_kernels, require_covered
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.roofline import Isolated, Relaxation


def predict_kernel_intervals(
    predictor: Predictor,
    machine: Machine,
    table: KernelTable,
    *,
    isolated: Isolated = True,
    relaxation: Relaxation = 0.0,
) -> tuple[Float[np.ndarray, " row"], Float[np.ndarray, " row"]]:
    """The 80 % interval of one launch per row of a table, in the order of its file, seconds.

    Quantiles of log(measured / forecast) of kernels measured alone, on GPUs that the fits had not seen (of a GPU that
    the predictor was loaded for and that was trained on, its own residuals), widened as `intervals` is. So 80 % is for
    `isolated=True`; the interval of a kernel inside a model is the same one around another forecast.

    Args: as `latency.predict_kernels`.
    Returns: low and high, float32 [rows]: 0 < speed of light ≤ low ≤ `predict_kernels` ≤ high. A GPU without the
      kernel's arithmetic path gives infinity for both.
    Raises: `InputError` for a predictor that carries no intervals, of all the table's families.
    """
    require_covered(predictor, table)
    for name, batch in table.families.items():
        if batch.num_rows and not has_intervals(predictor, FAMILIES[name]):
            raise InputError(
                f"this predictor carries no intervals of {name}; take a checkpoint of kind mixture, such as fp32 or "
                "tensorcore (`neusight-jax checkpoints`)"
            )
    seconds = predict_kernels(predictor, machine, table, isolated=isolated, relaxation=relaxation)
    bounds = _bounds(predictor, on_device(machine), table, isolated)
    log_low, log_high, light_s = (
        in_row_order(table, {name: np.asarray(parts[at]) for name, parts in bounds.items()}) for at in range(3)
    )
    low = np.minimum(np.maximum(seconds * np.exp(log_low), light_s), seconds)
    return low, np.maximum(seconds * np.exp(log_high), seconds)


@jax.jit
def _bounds(
    predictor: Predictor, machine: Machine, table: KernelTable, isolated: Isolated
) -> dict[str, tuple[Array, Array, Array]]:
    """By family, the logarithms of the bounds over the forecast, and the speed of light in seconds [kernel]."""
    out = {}
    for name, batch in table.families.items():
        family = FAMILIES[name]
        interval = kernel_interval(predictor, family, gpu_of(machine), batch)
        part = KernelTable({name: batch})
        light = kernel_forecasts(predictor, machine, part, isolated=jnp.asarray(isolated, float))[name].bounds
        out[name] = (interval.log_low, interval.log_high, light.speed_of_light_s)
    return out
