"""Objectives of the fitting loop: the predictor kinds, their baselines, and the tile choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from neusight_jax.kernels.family import TILE, Family
from neusight_jax.model.heads import HEADS, TileChoice, choose_tile, init_tile_choice, tile_scores
from neusight_jax.model.mixture import FamilyMixture, MixturePredictor, init_family
from neusight_jax.model.network import Network, apply_network, init_network
from neusight_jax.model.neusight import OUTPUTS, NeuSightPredictor, neusight_inputs
from neusight_jax.model.predictor import Predictor
from neusight_jax.model.residuals import EFFECTS, IN_MODEL, MEMORY, OTHER_VENDOR, effect_width
from neusight_jax.model.roofline import element_bytes, peak_flop_per_s
from neusight_jax.training.data import Rows
from neusight_jax.training.fit import Kind, Sample, Settings, row_features, sample_of

EFFECT_SHARES: dict[str, float] = {
    "linear": 4.0,
    **{"gemm": 0.5, "gemm_fp8": 0.25, "gemm_fp4": 0.25, "prefill": 0.25, "decode": 0.25},
    **{"grouped_gemm": 0.1, "collective": 0.01},
}
"""Weight of the effects of a family over `Settings.effect_penalty`: less where libraries differ from one architecture
to the next more than machines do, so that what belongs to one of them does not bend what is said of all; more where the
physics says so much that a device has little to add, so that the middle is one that most devices share."""
SHAPE_SHARES: dict[str, float] = {
    **dict.fromkeys(("linear", "bmm", "grouped_gemm"), 1.0),
    **dict.fromkeys(("decode", "gemm_fp4", "reduction"), 7.0),
}
"""Cost of telling shapes apart over `Settings.shape_penalty`; 0 of the rest. Where the times of the heads say most, or
few architectures were measured, a network that tells shapes apart learns what one library does on them."""
EFFECT_WIDTH = 0.03
"""Device effects are shrunk by √(e² + width²): almost their absolute value, so that an unseen GPU gets the median
of the measured ones and not a mean that one odd machine pulls."""
DRAM_COST = 0.25
"""Cost of the residual of a kind of memory over one of a device: memory systems differ more than boards do."""


def log_error_loss(log_forecast: Array, sample: Sample, settings: Settings) -> Float[Array, ""]:
    """mean √(r² + s²), r the log error: near-absolute, symmetric in too fast and too slow."""
    return jnp.mean(jnp.sqrt((log_forecast - sample.log_seconds) ** 2 + settings.softening**2))


def generation_mask(family: Family) -> Bool[np.ndarray, " effect"]:
    """Mask of the effects a generation shares: heads of matrix products. Floors and launches are the host's, save in
    CUDA graphs."""
    shared = np.array([family.tensor_core or name not in ("overhead", "floor") for name in EFFECTS])
    width = effect_width(family) // len(EFFECTS)
    return np.concatenate([shared, np.repeat(shared, width - 1)]) & (family.matrix or family.linked)


def effect_penalties(rows: Rows) -> tuple[float, ...]:
    """Penalty of each effect of the rows: 1 for a device; less for an older generation of kernels than for the newest.

    Whoever asks for a GPU nobody has measured asks for a newer one, so the oldest kernels should set the middle least.
    """
    process_nm, minority = np.asarray(rows.gpus.process_nm), rows.of_minority_vendor
    order = np.asarray(rows.generation)
    newest = [float(process_nm[order == index].min()) for index in range(max(order) + 1)]
    best = float(process_nm[~minority].min())
    return (*[1.0] * len(rows.devices), *[min(best / size, 1.0) for size in newest])


@dataclass(frozen=True)
class MixtureObjective:
    """The `mixture` predictor with a small effect per device and per generation, dropped for an unmeasured device.

    Attributes:
      tile: the family's tile choice (fitted before).
      hidden: hidden layers of the network.
      penalties: what each effect costs, devices and then generations (`effect_penalties`); empty = 1 for all.
      network: a user's own flax module in place of the hidden layers.
    """

    tile: TileChoice
    hidden: tuple[int, ...] = (32, 32)
    penalties: tuple[float, ...] = ()
    network: Any = None

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Parameters with `effect` [device and then generation, effect].

        Args: as of `fit.Kind.init`.
        """
        parameters = init_family(key, family, features, self.hidden, 1, self.network)
        groups = len(rows.devices) + len(set(rows.generation))
        return replace(parameters, effect=jnp.zeros((groups, effect_width(family))))

    def predictor(self, parameters: FamilyMixture, family: Family, sample: Sample) -> Predictor:
        """The predictor with the effects of each row's device and generation; index −1 has none."""
        devices = jnp.where((sample.device >= 0)[:, None], parameters.effect[sample.device], 0.0)
        mask = (sample.generation >= 0)[:, None] & generation_mask(family)
        generations = jnp.where(mask, parameters.effect[sample.generation], 0.0)
        effect = devices + generations
        return MixturePredictor({family.network: replace(parameters, effect=effect)}, {family.network: self.tile})

    def loss(self, parameters: FamilyMixture, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error; residuals shrunk to zero, constants of the physics towards their priors.

        Args: as of `fit.Kind.loss`.
        """
        log_forecast = jnp.log(
            forecast(family, self.predictor(parameters, family, sample), _on_own_tiles(sample, family))
        )
        shrunk, table = (jnp.sqrt(array**2 + EFFECT_WIDTH**2) for array in (parameters.effect, parameters.residual[0]))
        costs = jnp.asarray(self.penalties or (1.0,) * len(shrunk))
        share = EFFECT_SHARES.get(family.name, 1.0)
        penalty = share * settings.effect_penalty * jnp.sum(costs[:, None] * shrunk)
        vendor, memory = jnp.sum(table[OTHER_VENDOR]), jnp.sum(table[MEMORY:, EFFECTS.index("dram")])
        penalty += share * settings.effect_penalty * (vendor + DRAM_COST * memory)
        penalty += settings.in_model_penalty * jnp.sum(parameters.residual[0, IN_MODEL, : len(HEADS)] ** 2)
        penalty += settings.physics_penalty * jnp.sum(parameters.physics**2)
        # The network is run once more only where what it says costs something.
        cost = SHAPE_SHARES.get(family.name, 0.0) * settings.shape_penalty
        if cost:
            features = family.features(sample.batch.dims, element_bytes(sample.batch.dtype))
            outputs = apply_network(parameters.network, features)
            penalty += cost * jnp.mean(jnp.sum(jnp.var(outputs, axis=1), axis=-1))
        return log_error_loss(log_forecast, sample, settings) + penalty


def _on_own_tiles(sample: Sample, family: Family) -> Sample:
    """The sample, each product of the vector path with the tile it was measured with; a forecast takes the fastest."""
    if not family.vector_products:
        return sample
    dims = {**sample.batch.dims, TILE: sample.tile + 1.0}
    return replace(sample, batch=replace(sample.batch, dims=dims))


@dataclass(frozen=True)
class LogErrorObjective:
    """A predictor without effects of devices, fitted by gradients to its log error alone.

    Attributes:
      start: parameters before the first step, from the key of the seed, the family, and the rows the job may see.
      predictor_of: the predictor of one family, from the name of its network and its parameters.
    """

    start: Callable[[PRNGKeyArray, Family, Rows], Any]
    predictor_of: Callable[[str, Any], Predictor]

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Parameters as `start` has them.

        Args: as of `fit.Kind.init`.
        """
        return self.start(key, family, rows)

    def predictor(self, parameters: Any, family: Family, sample: Sample) -> Predictor:
        """The predictor of one family."""
        return self.predictor_of(family.network, parameters)

    def loss(self, parameters: Any, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error.

        Args: as of `fit.Kind.loss`.
        """
        log_forecast = jnp.log(forecast(family, self.predictor(parameters, family, sample), sample))
        return log_error_loss(log_forecast, sample, settings)


def neusight_objective(
    tile: TileChoice, hidden: tuple[int, ...] = (64, 64, 64), network: Any = None
) -> LogErrorObjective:
    """The `neusight` predictor; its network is normalised to the paper's inputs on the rows."""

    def start(key: PRNGKeyArray, family: Family, rows: Rows) -> Network:
        sample = sample_of(rows)
        work = family.work(sample.batch.dims, element_bytes(sample.batch.dtype))
        peak = peak_flop_per_s(sample.gpu, family, sample.batch.dtype)
        chosen = choose_tile(tile, sample.gpu, work, row_features(rows))
        return init_network(key, neusight_inputs(sample.gpu, chosen, peak), hidden, OUTPUTS, 1, network)

    return LogErrorObjective(start, lambda name, parameters: NeuSightPredictor({name: parameters}, {name: tile}))


@dataclass(frozen=True)
class TileObjective:
    """The tile choice, supervised by measured tiles; rows without one do not count."""

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Untrained choice.

        Args: as of `fit.Kind.init`.
        """
        return init_tile_choice(key, family, features)

    def loss(self, parameters: TileChoice, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Cross-entropy of the measured tile.

        Args: as of `fit.Kind.loss`.
        """
        size = element_bytes(sample.batch.dtype)
        work = family.work(sample.batch.dims, size)
        scores = tile_scores(parameters, sample.gpu, work, family.features(sample.batch.dims, size))
        # Rows without a tile (-1) need some label; their weight below is 0.
        entropy = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(sample.tile, 0))
        weights = jnp.where(sample.tile >= 0, 1.0, 0.0)
        return jnp.sum(entropy * weights) / jnp.maximum(jnp.sum(weights), 1.0)

    def choose(self, parameters: TileChoice, family: Family, sample: Sample) -> Int[Array, " kernel"]:
        """The arg-max tile of every row."""
        size = element_bytes(sample.batch.dtype)
        work = family.work(sample.batch.dims, size)
        return choose_tile(parameters, sample.gpu, work, family.features(sample.batch.dims, size)).index


@runtime_checkable
class LatencyKind(Kind, Protocol):
    """A kind of the fitting loop that forecasts a latency."""

    def predictor(self, parameters: Any, family: Family, sample: Sample) -> Predictor:
        """The predictor of one family, with the device effects of the sample's rows."""
        ...


def forecast(family: Family, predictor: Predictor, sample: Sample) -> Float[Array, " kernel"]:
    """Seconds of a sample, each row on its own GPU.

    Args:
      family: of all rows.
      predictor: that a kind makes of the parameters of one fit.
      sample: rows of any number of devices.
    """
    return predictor.forecast_kernels(family, sample.machine, sample.batch, isolated=sample.isolated).seconds


seconds_of = jax.jit(forecast, static_argnames="family")


def residuals_of(
    kind: LatencyKind, members: Sequence[Any], rows: Rows, *, seen: bool, trained: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """log(measured / forecast) of rows by device, members averaged as logarithms.

    Args:
      kind: of what was fitted.
      members: parameters of each fit, without an axis [job].
      rows: of one family; seen, trained: as of `sample_of`.
    """
    sample = sample_of(rows, seen=seen, trained=trained)
    forecasts = [seconds_of(rows.family, kind.predictor(member, rows.family, sample), sample) for member in members]
    return rows.by_device(np.log(rows.seconds) - np.mean(np.log(np.asarray(forecasts)), axis=0))


def members_of(stacked: Any) -> list[Any]:
    """Parameters of each fit by themselves, from those of all with a leading axis [job]."""
    count = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda leaf, at=at: leaf[at], stacked) for at in range(count)]


def tile_choice(rows: Rows, seed: int, fitted: Callable[[Kind], Any]) -> TileChoice:
    """The tile choice of a family, the first of the parameters `fitted` [job]; untrained where no tile was measured."""
    if not (rows.tile >= 0).any():
        return init_tile_choice(jax.random.key(seed), rows.family, row_features(rows))
    choice: TileChoice = members_of(fitted(TileObjective()))[0]
    return choice


def stack_members(jobs: Any) -> Any:
    """Parameters of several jobs as one ensemble: [job, member = 1, ...] -> [member, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), jobs)
