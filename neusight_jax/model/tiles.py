"""Tile choice as a model: score = −log(time in whole waves) · sharpness + learned preference of the shape.

Measured tiles supervise it. It is reported by every predictor; the latency of the `neusight` kind depends on
it, that of the `mixture` does not (a tile picked by GPU-dependent cost would break the monotone slopes).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from neusight_jax.hardware.gpu import GPU
from neusight_jax.kernels.family import Family, Work
from neusight_jax.model.roofline import Relaxation, whole_waves
from neusight_jax.model.utilization import Network, apply_network, init_network


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileChoice:
    """Parameters: a shape-only preference network over the tile menu (one member), and the sharpness of the score."""

    network: Network
    sharpness: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChosenTile:
    """The tile of each kernel. Relaxed quantities are geometric means over the menu.

    Attributes:
      index: arg-max tile of the menu.
      blocks, block_flop, block_bytes: of that tile, contraction not split.
      waves: waves of those blocks over the SMs.
    """

    index: Int[Array, " kernel"]
    blocks: Float[Array, " kernel"]
    block_flop: Float[Array, " kernel"]
    block_bytes: Float[Array, " kernel"]
    waves: Float[Array, " kernel"]


def init_tile_choice(
    key: PRNGKeyArray, family: Family, features: Float[Array, "row feature"], hidden: tuple[int, ...] = (32,)
) -> TileChoice:
    """An untrained choice: no preference, sharpness 1."""
    return TileChoice(init_network(key, features, hidden, len(family.tiles), 1), jnp.ones(()))


def tile_scores(
    choice: TileChoice, gpu: GPU, work: Work, features: Float[Array, "kernel feature"]
) -> Float[Array, "kernel tile"]:
    """Unnormalised log-probability of every tile of the menu."""
    num_sms = jnp.asarray(gpu.num_sms)[..., None]
    waves = jnp.ceil(work.blocks[:, :, 0] / num_sms)
    cost = jnp.log(waves * jnp.maximum(work.block_flop[:, :, 0], work.block_bytes[:, :, 0]))
    return apply_network(choice.network, features)[0] - choice.sharpness * cost


def choose_tile(
    choice: TileChoice, gpu: GPU, work: Work, features: Float[Array, "kernel feature"], relaxation: Relaxation = 0.0
) -> ChosenTile:
    """The tile of each kernel on a machine.

    Args:
      relaxation: 0 = the arg-max tile; towards 1 its quantities become the soft-max weighted geometric mean over the
        menu, so that gradients see the other tiles. Biased for any value above 0.
    """
    scores = tile_scores(choice, gpu, work, features)
    index = jnp.argmax(scores, axis=1)
    soft = 0.0 if relaxation is None else relaxation
    weight = (1.0 - soft) * jax.nn.one_hot(index, scores.shape[1]) + soft * jax.nn.softmax(scores, axis=1)

    def blend(quantity: Array) -> Array:
        return jnp.exp(jnp.sum(weight * jnp.log(jnp.maximum(quantity[:, :, 0], 1e-30)), axis=1))

    blocks = jnp.round(blend(work.blocks)) * (1.0 - soft) + blend(work.blocks) * soft
    return ChosenTile(
        index=index,
        blocks=blocks,
        block_flop=blend(work.block_flop),
        block_bytes=blend(work.block_bytes),
        waves=whole_waves(blocks, jnp.asarray(gpu.num_sms), relaxation),
    )


def largest_tile(gpu: GPU, work: Work) -> ChosenTile:
    """The last tile of the menu, for predictors that do not choose."""
    blocks = work.blocks[:, -1, 0]
    return ChosenTile(
        index=jnp.full(blocks.shape, work.blocks.shape[1] - 1),
        blocks=blocks,
        block_flop=work.block_flop[:, -1, 0],
        block_bytes=work.block_bytes[:, -1, 0],
        waves=whole_waves(blocks, jnp.asarray(gpu.num_sms), 0.0),
    )
