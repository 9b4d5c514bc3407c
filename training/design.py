"""Which kernels to measure first: those that tell most about all the others, before any is measured.

Under the prior of `calibration` the uncertainty of every kernel on a machine is known in advance, and so is how far
one measurement lowers it. Kernels are taken greedily, each the one that lowers the summed variance of the workload
most, given those taken already.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


def most_telling(
    covariances: Sequence[Float[np.ndarray, "kernel kernel"]],
    count: int,
    noise: float,
    weight: Float[np.ndarray, " kernel"] | None = None,
    allowed: np.ndarray | None = None,
) -> list[int]:
    """Positions of the kernels to measure, the most telling first.

    Args:
      covariances: prior covariance of the log errors of the same kernels, one for each machine considered; the gain is
        averaged over machines, each in units of its own variance before any measurement.
      count: how many to take; noise: of a measurement, standard deviation of its logarithm.
      weight: how much each kernel matters (default: all alike); allowed: mask of those that may be taken.
    """
    left = np.array([matrix / max(np.trace(matrix), 1e-30) for matrix in covariances])
    variance = np.array([noise**2 / max(np.trace(matrix), 1e-30) for matrix in covariances])[:, None]
    importance = np.ones(left.shape[1]) if weight is None else np.asarray(weight)
    open_to = np.ones(left.shape[1], bool) if allowed is None else np.array(allowed, bool)
    chosen: list[int] = []
    for _ in range(min(count, int(open_to.sum()))):
        own = np.einsum("mkk->mk", left) + variance
        gain = np.sum(np.einsum("t,mtk->mk", importance, left**2) / own, axis=0)
        best = int(np.argmax(np.where(open_to, gain, -np.inf)))
        open_to[best] = False
        chosen.append(best)
        left -= left[:, :, best, None] * left[:, best, None, :] / own[:, best, None, None]
    return chosen
