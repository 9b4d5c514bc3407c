"""The fitting loop: many fits (held-out GPU × seed) of one family at once, by `vmap`.

Trains through the predictor's own `forecast_kernels`, the same door as every forecast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from neusight_jax.errors import InputError
from neusight_jax.files import remove_folder, write_atomically, write_text_atomically
from neusight_jax.hardware.catalog import generation_of
from neusight_jax.hardware.cluster import Cluster, Machine, Topology
from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family
from neusight_jax.kernels.table import KernelBatch
from neusight_jax.model.checkpoint import CARD, tree_from_arrays, tree_to_arrays
from neusight_jax.model.network import Network, init_perceptron, perceptron
from neusight_jax.model.roofline import element_bytes
from neusight_jax.training.data import Rows, generations

# The networks as flax modules. Training runs these; forecasts run the same functions without flax.


class Perceptron(linen.Module):
    """The standard network: normalised features [kernel, feature] to outputs [kernel, output].

    A module of one's own has the same signature (`train(..., network=...)`), and `outputs` set for it.
    """

    hidden: tuple[int, ...] = (32, 32)
    outputs: int = 0

    @linen.compact
    def __call__(self, inputs: Float[Array, "kernel feature"]) -> Float[Array, "kernel output"]:
        """Outputs of every kernel."""
        start = partial(init_perceptron, sizes=(inputs.shape[-1], *self.hidden, self.outputs))
        names = ("weights", "biases")
        return perceptron({name: self.param(name, lambda key, name: start(key)[name], name) for name in names}, inputs)


def as_modules(parameters: Any) -> Any:
    """Parameters with the flax module of every network said; what has one keeps it."""

    def with_module(node: Any) -> Any:
        if not isinstance(node, Network) or node.module is not None:
            return node
        *hidden, outputs = (layer.shape[-1] for layer in node.parameters["weights"])
        return replace(node, module=Perceptron(tuple(hidden), outputs))

    return jax.tree.map(with_module, parameters, is_leaf=lambda node: isinstance(node, Network))


# The state of an unfinished training run, kept beside its output so that it can go on.

_ASKED = "run.json"


def kept_steps(output: Path) -> str:
    """Note on what an interrupted run left to go on with; "" for nothing."""
    if (output / CARD).is_file() or not (_folder(output) / _ASKED).is_file():
        return ""
    return "what was fitted so far is kept: the same command with --resume goes on"


def _folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")


class Saved:
    """A folder `.NAME.partial` beside the output: one file per fit, and what the run was asked to do."""

    def __init__(self, output: Path, request: Mapping[str, Any]) -> None:
        self.folder = _folder(output)
        self.request = json.loads(json.dumps(request))

    def check(self) -> None:
        """`InputError` unless there is a run to go on with, and it was asked the same."""
        path = self.folder / _ASKED
        if not path.is_file():
            raise InputError(f"nothing to resume: {self.folder} is missing; run without --resume")
        if json.loads(path.read_text()) != self.request:
            raise InputError(f"{path}: recipe, hold-out or seed differ from this run; repeat them, or drop --resume")

    def discard(self) -> None:
        """Forget the run."""
        remove_folder(self.folder)

    def save(self, name: str, state: FitState) -> None:
        """Keep the state of one fit, whole or not at all."""
        if not (self.folder / _ASKED).exists():
            write_text_atomically(self.folder / _ASKED, json.dumps(self.request))
        flat = tree_to_arrays(state)
        write_atomically(self._file(name), lambda path: save_file(flat, path))

    def load(self, name: str, fresh: FitState) -> FitState:
        """Kept state of one fit, or the fresh one, whose shapes it has.

        Raises: `InputError` for a file that cannot be read or is of other shapes.
        """
        path = self._file(name)
        if not path.is_file():
            return fresh
        try:
            flat = load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not readable ({error}); remove it to train this family again") from None
        kept = tree_from_arrays(fresh, flat, path)
        state: FitState = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), fresh, kept)  # counters are whole
        return state

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.safetensors"


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
      effect_penalty: weight of the effects of devices, generations and another vendor's libraries: they shrink to zero.
      in_model_penalty: weight of the squared residuals inside a running model.
      physics_penalty: weight of the squared distances of the physics from its priors, in widths of each.
      shape_penalty: weight of how much a network tells shapes apart, times the share of its family.
      in_model_share: share of a minibatch drawn from in-model rows, where there are any.
      softening: s in the loss mean √(r² + s²), r the log error.
    """

    steps: int = 1000
    batch_size: int = 512
    learning_rate: float = 4e-3
    weight_decay: float = 1e-2
    effect_penalty: float = 0.02
    in_model_penalty: float = 0.02
    physics_penalty: float = 0.02
    shape_penalty: float = 0.003
    in_model_share: float = 0.25
    softening: float = 0.03


TENSOR_SETTINGS = Settings(steps=400, batch_size=768)
"""For kernels of tensor cores: after more steps errors go on falling on the GPUs seen and rise on other architectures
(docs/retraining.md)."""
MORE_STEPS: dict[str, float] = {"gemm": 2.5, "grouped_gemm": 2.5}
"""Times these where they do not: bf16 products are the vendor's own library on every GPU, and experts in several dtypes
take longer to learn."""


def settings_for(family: Family) -> Settings:
    """Settings the mixture of a family is fitted with, unless a recipe says otherwise."""
    return with_more_steps(TENSOR_SETTINGS, family.name, MORE_STEPS) if family.tensor_core else Settings()


def with_more_steps(settings: Settings, name: str, more: Mapping[str, float]) -> Settings:
    """The settings for one family, its steps times those of `more`."""
    return replace(settings, steps=round(settings.steps * more.get(name, 1.0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sample:
    """A minibatch: kernels, each with its own GPU (fields [kernel]), switch and labels.

    Effects are one array, devices first and then generations: `device` and `generation` are positions in it, or −1.
    """

    batch: KernelBatch
    gpu: GPU
    device: Int[Array, " kernel"]
    generation: Int[Array, " kernel"]
    isolated: Float[Array, " kernel"]
    log_seconds: Float[Array, " kernel"]
    tile: Int[Array, " kernel"]
    topology: Topology | None = None

    @property
    def machine(self) -> Machine:
        """The machine of each row, its GPUs joined where the kernels need it."""
        return self.gpu if self.topology is None else Cluster(self.gpu, self.topology, 0)


class Kind(Protocol):
    """Model the loop can fit: a predictor kind, or the tile choice."""

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Untrained parameters, normalised to the rows the job may see.

        Args:
          key: of the job's seed.
          features: shape-only inputs of the rows (`row_features`).
          rows: those the job may see, of all their devices.
        """
        ...

    def loss(self, parameters: Any, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Loss of a minibatch, penalties included.

        Args:
          parameters: of one fit, as `init` makes them.
          sample: the minibatch, each row with its own GPU.
          settings: the penalties' weights and the softening.
        """
        ...


class FitState(TrainState):  # type: ignore[no-untyped-call]
    """Where a fit stands: flax's state (`params`, `opt_state`, `step`). Every leaf has a leading axis [job].

    Attributes:
      params: a dict, as flax wants it, whose one entry `fitted` is what the kind fits (`parameters`).
      best, best_loss: parameters at the end of the chunk with the lowest mean training loss, and that loss. Selected on
        training rows only: choosing by a held-out GPU would leak it.
    """

    best: Any
    best_loss: Float[Array, " job"]

    @property
    def parameters(self) -> Any:
        """Model that the kind fits."""
        return self.params["fitted"]

    @property
    def done(self) -> int:
        """Steps behind it."""
        return int(np.asarray(self.step)[0])


Progress = Callable[[FitState, np.ndarray], bool]
"""Called with (state, mean loss per job) after every chunk; False stops the fit."""


def fit(
    kind: Kind,
    rows: Rows,
    jobs: Sequence[Job],
    settings: Settings,
    progress: Progress | None = None,
    chunk: int = 100,
    state: FitState | None = None,
) -> FitState:
    """Fit every job, to the end or until `progress` says stop.

    Rows are drawn device by device with equal weight, so that a GPU with more rows counts no more. Each job sees only
    the devices it does not hold out. Minibatches depend on (seed, step) alone, so a resumed fit repeats nothing.

    Args:
      kind: what to fit; rows: measured rows; jobs: fits to run together; settings: of the optimizer.
      progress: see `Progress`; chunk: steps between its calls.
      state: where to go on from instead of starting afresh.
    Raises: `InputError` for a job that leaves out every device with rows.
    """
    source = _Source.of(rows)
    draws = _choices(np.asarray(source.counts), rows, jobs)
    in_model_rows = round(settings.batch_size * settings.in_model_share) if source.counts[1].sum() else 0
    sizes = (settings.batch_size - in_model_rows, in_model_rows)

    def step(state: FitState, key: Array, chosen: _Choices, source: _Source) -> tuple[FitState, Array]:
        """Make one step of one job; the state after it, and the loss before it.

        Args:
          key: of the minibatch.
          chosen: where the job draws from, its axis [job] taken off.
          source: all rows, the same for every job.
        """
        sample = source.draw(key, sizes, chosen)
        value, gradient = jax.value_and_grad(
            lambda parameters: state.apply_fn(parameters["fitted"], rows.family, sample, settings)
        )(state.params)
        moved: FitState = state.apply_gradients(grads=gradient)  # type: ignore[no-untyped-call]
        return moved, value

    @jax.jit
    def run_chunk(state: FitState, keys: Array, draws: _Choices, source: _Source) -> tuple[FitState, Array]:
        """Make many steps of all jobs; the state after them, and the mean loss [job].

        Args:
          state: leading axis [job].
          keys: of the minibatches [step, job].
          draws: where jobs draw from [job].
          source: all rows.
        """
        steps = jax.vmap(step, in_axes=(0, 0, 0, None))
        state, losses = jax.lax.scan(lambda state, key_row: steps(state, key_row, draws, source), state, keys)
        return jax.vmap(_with_best)(state, losses.mean(axis=0)), losses.mean(axis=0)

    state = init_state(kind, rows, jobs, settings) if state is None else state
    streams = [jax.random.fold_in(jax.random.key(job.seed), 1) for job in jobs]
    # In chunks, so that progress is shown and a run that is stopped loses little.
    while state.done < settings.steps:
        size = min(chunk, settings.steps - state.done)
        keys = jnp.stack([jax.random.split(jax.random.fold_in(s, state.done), size) for s in streams], axis=1)
        state, loss = run_chunk(state, keys, draws, source)
        if progress is not None and not progress(state, np.asarray(loss)):
            break
    return state


def _with_best(state: FitState, loss: Float[Array, ""]) -> FitState:
    """The state of one job with its parameters kept where a chunk's loss is the lowest so far."""
    best = jax.tree.map(lambda new, old: jnp.where(loss < state.best_loss, new, old), state.parameters, state.best)
    return state.replace(best=best, best_loss=jnp.minimum(loss, state.best_loss))


def init_state(kind: Kind, rows: Rows, jobs: Sequence[Job], settings: Settings) -> FitState:
    """State before the first step, leading axis [job].

    Args:
      kind: what is fitted.
      rows: of all devices; each job is normalised to those it may see.
      settings: of the optimizer, whose state is part of it.
    """
    features = row_features(rows)
    parameters = []
    for job in jobs:
        seen = np.array([name not in job.held_out for name in rows.devices])[rows.device]
        # Normalised to what a job may see alone: else a GPU that is left out would show in its features.
        parameters.append(kind.init(jax.random.key(job.seed), rows.family, features[seen], rows.take(seen)))
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps)
    optimizer = optax.adamw(schedule, weight_decay=settings.weight_decay, mask=_weights_only)
    stacked = as_modules(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parameters))
    fixed = {"apply_fn": kind.loss, "tx": optimizer, "best_loss": np.finfo(np.float32).max}
    create: Callable[..., FitState] = FitState.create
    state = jax.vmap(lambda job_parameters: create(params={"fitted": job_parameters}, best=job_parameters, **fixed))(
        stacked
    )
    # Without weak types, which would compile the loop again after its first chunk.
    started: FitState = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), state)
    return started


def row_features(rows: Rows) -> Float[Array, "row feature"]:
    """Shape-only network inputs of rows."""
    dims = jax.tree.map(jnp.asarray, rows.batch.dims)
    return rows.family.features(dims, element_bytes(jnp.asarray(rows.batch.dtype)))


def sample_of(rows: Rows, *, seen: bool = True, trained: Sequence[str] | None = None) -> Sample:
    """All rows as one sample; `seen` = False drops the device index, and with it the device effect.

    The generation stays: which kernels a GPU will run is known before it is measured. `trained` names the devices the
    parameters were fitted to, where these are not those of the rows.
    """
    names = rows.devices if trained is None else tuple(trained)
    order = generations(rows.family, names)
    generation_names = [generation_of(name, rows.family.generations) for name in rows.devices]
    places = [len(names) + order.index(name) if name in order else -1 for name in generation_names]
    groups = np.asarray(places)[rows.device]
    return Sample(
        batch=jax.tree.map(jnp.asarray, rows.batch),
        gpu=jax.tree.map(lambda column: jnp.asarray(column)[rows.device], rows.gpus),
        topology=jax.tree.map(lambda column: jnp.asarray(column)[rows.device], rows.topologies),
        device=jnp.asarray(rows.device if seen else np.full(len(rows.device), -1)),
        generation=jnp.asarray(groups),
        isolated=jnp.asarray(rows.isolated),
        log_seconds=jnp.log(jnp.asarray(rows.seconds)),
        tile=jnp.asarray(rows.tile),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Choices:
    """Where each job draws its minibatches from, the parts being sweeps and in-model rows.

    Attributes:
      log_weight: of every device [job, part, device].
      source: source of each part [job, part]: its own, or the other one where no device the job may see has rows of it.
    """

    log_weight: Float[Array, "job part device"]
    source: Int[Array, "job part"]


def _choices(counts: Int[np.ndarray, "source device"], rows: Rows, jobs: Sequence[Job]) -> _Choices:
    seen = np.array([[name not in job.held_out for name in rows.devices] for job in jobs])
    for job, devices in zip(jobs, seen & counts.any(axis=0), strict=True):
        if not devices.any():
            raise InputError(
                f"{rows.family.name}: nothing is left to fit to without {', '.join(job.held_out)}; give measurements "
                "of further GPUs (of another architecture, where whole architectures are left out)"
            )
    having = seen[:, None, :] & (counts > 0)  # [job, source, device]
    # A part with no rows the job may see is filled from the other one: sizes of minibatches are compiled in.
    sources = np.where(having.any(axis=2), np.arange(2), 1 - np.arange(2))
    weights = np.take_along_axis(having, sources[:, :, None], axis=1)
    return _Choices(jnp.asarray(np.log(weights + 1e-30)), jnp.asarray(sources))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Source:
    """All rows, and their positions by source (0 = sweep, 1 = in-model) and device: order[start : start + count].

    Arguments of the compiled loop, which would take minutes to fold them.
    """

    everything: Sample
    order: Int[Array, " row"]
    starts: Int[Array, "source device"]
    counts: Int[Array, "source device"]

    @classmethod
    def of(cls, rows: Rows) -> _Source:
        group = (rows.isolated < 0.5).astype(int) * len(rows.devices) + rows.device
        counts = np.bincount(group, minlength=2 * len(rows.devices)).reshape(2, -1)
        starts = (np.cumsum(counts.ravel()) - counts.ravel()).reshape(2, -1)
        order = np.argsort(group, kind="stable")
        return cls(sample_of(rows), *(jnp.asarray(item) for item in (order, starts, counts)))

    def draw(self, key: Array, sizes: tuple[int, int], chosen: _Choices) -> Sample:
        """A minibatch of one job, its parts of these sizes."""
        parts = []
        for part, size in enumerate(sizes):
            key, device_key, row_key = jax.random.split(key, 3)
            device = jax.random.categorical(device_key, chosen.log_weight[part], shape=(size,))
            place = (chosen.source[part], device)
            start, count = self.starts[place], self.counts[place]
            offset = jnp.floor(jax.random.uniform(row_key, (size,)) * count.astype(float)).astype(int)
            parts.append(self.order[start + offset])
        where = jnp.concatenate(parts)
        drawn: Sample = jax.tree.map(lambda column: column[where], self.everything)
        return drawn


def _weights_only(parameters: Any) -> Any:
    """Mask of the leaves weight decay applies to: the networks' weight matrices, `kernel` in layers of flax."""
    names = jax.tree_util.keystr
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(name in names(path) for name in ("weights", "kernel")), parameters
    )
