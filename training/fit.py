"""The fitting loop: many fits (held-out GPU × seed) of one family at once, by `vmap`.

Trains through the predictor's own `terms`, the same door as every forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from neusight_jax.gpu import GPU
from neusight_jax.kernels.families import FAMILIES
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch


@dataclass(frozen=True)
class Rows:
    """Measured rows of one network family, grouped by device.

    Attributes:
      family: family of the rows.
      batch: the kernels, not padded.
      seconds: measured latency [row].
      device: index into `devices` [row].
      isolated: 1 = a sweep's row, 0 = a node of a running model [row].
      devices: canonical device names; gpus: their specifications stacked [device].
    """

    family: Family
    batch: KernelBatch
    seconds: Float[np.ndarray, " row"]
    device: Int[np.ndarray, " row"]
    isolated: Float[np.ndarray, " row"]
    devices: tuple[str, ...]
    gpus: GPU

    def take(self, where: np.ndarray) -> Rows:
        """The rows at these positions (or under this mask)."""
        batch = jax.tree.map(lambda column: column[where], self.batch)
        return Rows(
            self.family, batch, self.seconds[where], self.device[where], self.isolated[where], self.devices, self.gpus
        )


@dataclass(frozen=True)
class Job:
    """One fit: a seed, and the devices whose rows it must not see."""

    seed: int
    held_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Settings of the optimizer, the same for every family unless a recipe says otherwise.

    Attributes:
      steps, batch_size: minibatch steps and rows a step.
      learning_rate, weight_decay: AdamW, cosine schedule to zero.
      effect_penalty: weight of the mean square of the device effects (they shrink to zero).
      shift_penalty: weight of the squared in-model shifts.
      in_model_share: share of a minibatch drawn from in-model rows, where there are any.
      softening: s in the loss mean √(r² + s²), r the log error.
    """

    steps: int = 1000
    batch_size: int = 512
    learning_rate: float = 4e-3
    weight_decay: float = 1e-2
    effect_penalty: float = 0.02
    shift_penalty: float = 0.02
    in_model_share: float = 0.25
    softening: float = 0.03


class Kind(Protocol):
    """A predictor kind as the loop sees it."""

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], devices: int) -> Any:
        """Untrained parameters of one member and one family, with one effect row per device."""

    def seconds(
        self, parameters: Any, family: Family, gpu: GPU, batch: KernelBatch, device: Array, isolated: Array
    ) -> Float[Array, " kernel"]:
        """Forecast of training rows, each on its own GPU (fields [kernel]) and with its device's effect."""

    def penalty(self, parameters: Any, settings: Settings) -> Float[Array, ""]:
        """What is added to the loss."""


Progress = Callable[[int, np.ndarray], bool]
"""Called with (steps done, running loss per job) after every chunk; False stops the fit."""


def fit(
    kind: Kind,
    rows: Rows,
    jobs: Sequence[Job],
    settings: Settings,
    progress: Progress | None = None,
    chunk: int = 100,
    state: Any = None,
) -> Any:
    """Parameters of every job, stacked along a first axis [job].

    Rows are drawn device by device with equal weight, so that a GPU with more rows counts no more. Each job sees only
    the devices it does not hold out.

    Args:
      kind: predictor kind; rows: measured rows; jobs: fits to run together; settings: of the optimizer.
      progress: see `Progress`; chunk: steps between its calls.
      state: parameters to start from instead of fresh ones (as returned by an earlier call).
    """
    family = rows.family
    data = _DeviceRows.of(rows)
    count = len(rows.devices)
    allowed = np.array([[name not in job.held_out for name in rows.devices] for job in jobs])
    choices = np.log(allowed[:, None, :] * (data.counts > 0) + 1e-30)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    optimizer = optax.adamw(schedule, weight_decay=settings.weight_decay)

    def loss(parameters: Any, batch: KernelBatch, device: Array, isolated: Array, log_seconds: Array) -> Array:
        gpu = jax.tree.map(lambda column: column[device], rows.gpus)
        forecast = kind.seconds(parameters, family, gpu, batch, device, isolated)
        error = jnp.sqrt((jnp.log(forecast) - log_seconds) ** 2 + settings.softening**2)
        return jnp.mean(error) + kind.penalty(parameters, settings)

    in_model_rows = round(settings.batch_size * settings.in_model_share) if data.counts[1].sum() else 0
    sizes = (settings.batch_size - in_model_rows, in_model_rows)
    arrays = jax.tree.map(jnp.asarray, (rows.batch, rows.device, rows.isolated, np.log(rows.seconds)))

    def draw(key: Array, choice: Array) -> Array:
        parts = []
        for source, size in enumerate(sizes):
            key, device_key, row_key = jax.random.split(key, 3)
            device = jax.random.categorical(device_key, choice[source], shape=(size,))
            uniform = jax.random.uniform(row_key, (size,))
            place = jnp.floor(uniform * jnp.asarray(data.counts)[source, device]).astype(int)
            parts.append(jnp.asarray(data.order)[jnp.asarray(data.starts)[source, device] + place])
        return jnp.concatenate(parts)

    def step(carry: tuple[Any, Any], key: Array, choice: Array) -> tuple[tuple[Any, Any], Array]:
        parameters, opt_state = carry
        where = draw(key, choice)
        batch, device, isolated, log_seconds = jax.tree.map(lambda column: column[where], arrays)
        value, gradient = jax.value_and_grad(loss)(parameters, batch, device, isolated, log_seconds)
        updates, opt_state = optimizer.update(gradient, opt_state, parameters)
        return (optax.apply_updates(parameters, updates), opt_state), value

    @jax.jit
    def run_chunk(carry: Any, keys: Array) -> tuple[Any, Array]:
        def one(carry: Any, key_row: Array) -> tuple[Any, Array]:
            return jax.vmap(step)(carry, key_row, jnp.asarray(choices))

        return jax.lax.scan(one, carry, keys)

    if state is None:
        state = init_jobs(kind, rows, jobs, count)
    carry = (state, jax.vmap(optimizer.init)(state))
    streams = [jax.random.fold_in(jax.random.key(job.seed), 1) for job in jobs]
    done = 0
    while done < settings.steps:
        size = min(chunk, settings.steps - done)
        keys = jnp.stack([jax.random.split(jax.random.fold_in(stream, done), size) for stream in streams], axis=1)
        carry, losses = run_chunk(carry, keys)
        done += size
        if progress is not None and not progress(done, np.asarray(losses).mean(axis=0)):
            break
    return carry[0]


def init_jobs(kind: Kind, rows: Rows, jobs: Sequence[Job], devices: int) -> Any:
    """Untrained parameters of every job, normalised to the rows the job may see."""
    from neusight_jax.roofline import element_bytes

    features = rows.family.features(
        jax.tree.map(jnp.asarray, rows.batch.dims), element_bytes(jnp.asarray(rows.batch.dtype))
    )
    states = []
    for job in jobs:
        seen = np.array([rows.devices[index] not in job.held_out for index in range(devices)])[rows.device]
        states.append(kind.init(jax.random.key(job.seed), rows.family, features[seen], devices))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


@dataclass(frozen=True)
class _DeviceRows:
    """Row positions grouped by (source, device), source 0 = sweep, 1 = in-model: order[start : start + count]."""

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Rows) -> _DeviceRows:
        source = (rows.isolated < 0.5).astype(int)
        group = source * len(rows.devices) + rows.device
        order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=2 * len(rows.devices)).reshape(2, -1)
        starts = (np.cumsum(counts.ravel()) - counts.ravel()).reshape(2, -1)
        return cls(order, starts, counts)


def predict_rows(kind: Kind, parameters: Any, rows: Rows, seen: bool) -> Float[np.ndarray, " row"]:
    """Forecast of rows by one job's parameters; `seen` = with each device's own effect."""
    gpu = jax.tree.map(lambda column: column[rows.device], rows.gpus)
    device = jnp.asarray(rows.device if seen else np.full(len(rows.device), -1))
    batch = jax.tree.map(jnp.asarray, rows.batch)
    seconds = jax.jit(kind.seconds, static_argnums=(1,))
    return np.asarray(seconds(parameters, rows.family, gpu, batch, device, jnp.asarray(rows.isolated)))


__all__ = ["FAMILIES", "Job", "Kind", "Rows", "Settings", "fit", "init_jobs", "predict_rows"]
