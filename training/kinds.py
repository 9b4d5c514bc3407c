"""What the fitting loop can fit: the two predictor kinds, and the tile choice both carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from neusight_jax.baselines.roofline3 import Roofline3Predictor, ThreeNumbers
from neusight_jax.kernels.family import Family
from neusight_jax.mixture import EFFECTS, FamilyMixture, MixturePredictor, init_family
from neusight_jax.neusight import OUTPUTS, NeuSightPredictor, neusight_inputs
from neusight_jax.roofline import element_bytes, peak_flop_per_s
from neusight_jax.terms import Predictor
from neusight_jax.tiles import TileChoice, choose_tile, init_tile_choice, tile_scores
from neusight_jax.training.fit import Sample, Settings, sample_of
from neusight_jax.training.rows import Rows
from neusight_jax.utilization import Network, init_network

EFFECT_WIDTH = 0.03
"""Device effects are shrunk by √(e² + width²): almost their absolute value, so that an unseen GPU gets the median
of the measured ones and not a mean that one odd machine pulls."""


def log_error_loss(log_forecast: Array, sample: Sample, settings: Settings) -> Float[Array, ""]:
    """mean √(r² + s²), r the log error: near-absolute, symmetric in too fast and too slow."""
    return jnp.mean(jnp.sqrt((log_forecast - sample.log_seconds) ** 2 + settings.softening**2))


@dataclass(frozen=True)
class MixtureKind:
    """The `mixture` predictor with one small effect per device, dropped for a device nobody has measured.

    Attributes:
      tile: the family's tile choice (fitted before).
      hidden: hidden layers of the network.
    """

    tile: TileChoice
    hidden: tuple[int, ...] = (32, 32)

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Parameters with `effect` [device, effect]."""
        parameters = init_family(key, family, features, self.hidden, members=1)
        return replace(parameters, effect=jnp.zeros((len(rows.devices), len(EFFECTS))))

    def predictor(self, parameters: FamilyMixture, family: Family, sample: Sample) -> Predictor:
        """The predictor with each row's device effect; device −1 has none."""
        effect = jnp.where((sample.device >= 0)[:, None], parameters.effect[sample.device], 0.0)
        return MixturePredictor({family.network: replace(parameters, effect=effect)}, {family.network: self.tile})

    def loss(self, parameters: FamilyMixture, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error, device effects and in-model shifts shrunk to zero."""
        log_forecast = jnp.log(forecast(self, parameters, family, sample))
        penalty = settings.effect_penalty * jnp.sum(jnp.sqrt(parameters.effect**2 + EFFECT_WIDTH**2))
        penalty += settings.shift_penalty * jnp.sum(parameters.in_model**2)
        return log_error_loss(log_forecast, sample, settings) + penalty


@dataclass(frozen=True)
class NeuSightKind:
    """The `neusight` predictor."""

    tile: TileChoice
    hidden: tuple[int, ...] = (64, 64, 64)

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """A network normalised to the paper's inputs on the rows."""
        sample = sample_of(rows)
        size = element_bytes(sample.batch.dtype)
        work = family.work(sample.batch.dims, size)
        peak = peak_flop_per_s(sample.gpu, family, sample.batch.dtype)
        tile = choose_tile(self.tile, sample.gpu, work, features)
        return init_network(key, neusight_inputs(sample.gpu, tile, peak), self.hidden, OUTPUTS, members=1)

    def predictor(self, parameters: Network, family: Family, sample: Sample) -> Predictor:
        """The predictor of one family."""
        return NeuSightPredictor({family.network: parameters}, {family.network: self.tile})

    def loss(self, parameters: Network, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error."""
        return log_error_loss(jnp.log(forecast(self, parameters, family, sample)), sample, settings)


@dataclass(frozen=True)
class Roofline3Kind:
    """The three-parameter roofline, a fitted baseline."""

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """Efficiencies 0.73 and a floor of 25 us."""
        return ThreeNumbers(jnp.ones(()), jnp.ones(()), jnp.log(25e-6))

    def predictor(self, parameters: ThreeNumbers, family: Family, sample: Sample) -> Predictor:
        """The predictor of one family."""
        return Roofline3Predictor({family.network: parameters})

    def loss(self, parameters: ThreeNumbers, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Log error."""
        return log_error_loss(jnp.log(forecast(self, parameters, family, sample)), sample, settings)


@dataclass(frozen=True)
class TileKind:
    """The tile choice, supervised by measured tiles; rows without one do not count."""

    def init(self, key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], rows: Rows) -> Any:
        """An untrained choice."""
        return init_tile_choice(key, family, features)

    def loss(self, parameters: TileChoice, family: Family, sample: Sample, settings: Settings) -> Float[Array, ""]:
        """Cross-entropy of the measured tile."""
        size = element_bytes(sample.batch.dtype)
        work = family.work(sample.batch.dims, size)
        scores = tile_scores(parameters, sample.gpu, work, family.features(sample.batch.dims, size))
        entropy = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(sample.tile, 0))
        known = jnp.where(sample.tile >= 0, 1.0, 0.0)
        return jnp.sum(entropy * known) / jnp.maximum(jnp.sum(known), 1.0)

    def choose(self, parameters: TileChoice, family: Family, sample: Sample) -> Int[Array, " kernel"]:
        """The arg-max tile of every row."""
        size = element_bytes(sample.batch.dtype)
        work = family.work(sample.batch.dims, size)
        return choose_tile(parameters, sample.gpu, work, family.features(sample.batch.dims, size)).index


LatencyKind: TypeAlias = MixtureKind | NeuSightKind | Roofline3Kind
"""Kinds that forecast a latency."""


def forecast(kind: LatencyKind, parameters: Any, family: Family, sample: Sample) -> Float[Array, " kernel"]:
    """Seconds of a sample, each row on its own GPU."""
    predictor = kind.predictor(parameters, family, sample)
    return predictor.terms(family, sample.gpu, sample.batch, isolated=sample.isolated).seconds


def stack_members(jobs: Any) -> Any:
    """Parameters of several jobs as one ensemble: [job, member = 1, ...] -> [member, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), jobs)
