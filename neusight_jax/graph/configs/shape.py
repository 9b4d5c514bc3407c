"""ModelShape: the sizes of a decoder as numbers that may be traced, so that a model can be searched like a chip."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import SIZES, Attention, Decoder, Dense, Experts, FeedForward, Mixer
from neusight_jax.graph.configs.build import graph_from_config, model_type
from neusight_jax.graph.configs.config import Config, language_config, read_config
from neusight_jax.graph.configs.decoder import MODEL_TYPES, read_decoder
from neusight_jax.graph.graph import Graph
from neusight_jax.kernels.family import is_traced
from neusight_jax.kernels.table import KernelTable
from neusight_jax.records import Record


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelShape(Record):
    """Sizes of a decoder; numbers, or scalars that are traced.

    Where layers differ, a size is that of most of them, and a layer that has another keeps its ratio to it: so do
    dense layers and shared experts of a mixture to `d_ff`, and the numbers of layers of each kind to `layers`.

    Attributes:
      layers: their number.
      hidden: width of the model.
      heads, kv_heads, head_size: of attention.
      d_ff: width of the feed-forward block, or of an expert.
      experts, top_k: routed experts of a layer, and how many a token takes; 0 = there are none.
      vocabulary: rows of the embedding.
      tied: whether the head is the embedding; static.
      name: of the model; config: what the sizes were read from, JSON text that says all the rest; both static.
    """

    layers: ArrayLike
    hidden: ArrayLike
    heads: ArrayLike
    kv_heads: ArrayLike
    head_size: ArrayLike
    d_ff: ArrayLike
    experts: ArrayLike
    top_k: ArrayLike
    vocabulary: ArrayLike
    tied: bool = field(metadata={"static": True})
    name: str = field(metadata={"static": True})
    config: str = field(metadata={"static": True})

    @staticmethod
    def from_config(config: str | Path | Mapping[str, Any]) -> ModelShape:
        """The shape of a decoder.

        Args:
          config: a catalog name, the path of a config.json, or a mapping with Hugging Face keys.
        Raises: `InputError` for an unusable config, and for layers that are not softmax attention with a dense block or
          routed experts.
        """
        parsed = read_config(config)
        text = json.dumps(parsed.values)
        language = language_config(parsed)
        model_type(language, dict.fromkeys(MODEL_TYPES))
        model = read_decoder(language, 1)
        _check(parsed.name, model)
        return ModelShape(**_sizes(model), tied=model.tied, name=parsed.name, config=text)

    def figures(self) -> dict[str, Any]:
        """Name, sizes, and whether the head is the embedding."""
        return {"name": self.name, **{size: getattr(self, size) for size in SIZES}, "tied": self.tied}

    def summary(self) -> str:
        """The model it was read from."""
        return f"sizes of {self.name}"

    def replace(self, **sizes: Any) -> ModelShape:
        """The same model with other sizes."""
        return replace(self, **sizes)

    @property
    def is_traced(self) -> bool:
        """Whether any size is traced."""
        return is_traced(*(getattr(self, size) for size in SIZES))

    def graph(self, **workload: Any) -> Graph:
        """A step of the model with these sizes; kernels, memory and parameters are traced as sizes are.

        Args:
          workload: as `nj.graph_from_config` takes it: batch_size, sequence_length, mode, dtype, kv_length ...
        Raises: `InputError` for an unusable workload; where sizes are traced also for activations of 32 bits, weights
          quantized module by module, and models split over GPUs.
        """
        config = Config(self.name, json.loads(self.config))
        config.shape = self
        return graph_from_config(config, **workload)

    def applied(self, name: str, model: Decoder) -> Decoder:
        """A decoder as its config has it, with the sizes of this shape.

        Args:
          name: of the model, for errors; model: of the config the shape was read from.
        """
        _check(name, model)
        before = _sizes(model)
        after = {size: _plain(getattr(self, size)) for size in SIZES}

        def sized(of_model: str, size: Any) -> Any:
            """A size of a layer: the model's, or as many times that as it was."""
            return after[of_model] if size == before[of_model] else size * (after[of_model] / before[of_model])

        def mixer(part: Mixer | None) -> Mixer | None:
            if not isinstance(part, Attention):
                return None
            names = ("heads", "kv_heads", "head_size")
            heads: dict[str, Any] = {size: sized(size, getattr(part, size)) for size in names}
            return replace(part, **_flags(part), **heads)

        def block(part: FeedForward | None) -> FeedForward | None:
            if isinstance(part, Dense):
                return replace(part, **_flags(part), inner=sized("d_ff", part.inner))
            if not isinstance(part, Experts):
                return None
            shared = sized("d_ff", part.shared) if part.shared else 0
            counts: dict[str, Any] = {"count": sized("experts", part.count), "top_k": sized("top_k", part.top_k)}
            return replace(part, **_flags(part), **counts, inner=sized("d_ff", part.inner), shared=shared)

        return replace(
            model,
            hidden=after["hidden"],
            vocabulary=after["vocabulary"],
            tied=self.tied,
            head_bias=cast(bool, int(model.head_bias)),
            sized={
                layer: replace(layer, mixer=mixer(layer.mixer), feed_forward=block(layer.feed_forward))
                for layer in model.layers
            },
            deeper=sized("layers", 1) if is_traced(after["layers"]) or after["layers"] != before["layers"] else 1,
        )


def kernels_of(shape: ModelShape, **workload: Any) -> KernelTable:
    """Kernels of a step of a decoder, traced in its sizes: those of `nj.graph_from_config` at whole numbers.

    Args:
      shape: numbers or traced scalars.
      workload: as of `ModelShape.graph`.
    Gradients: reach all sizes, and through `nj.latency` as `kernel_latency` says.
    """
    return shape.graph(**workload).kernels


def _check(name: str, model: Decoder) -> None:
    """`InputError` for a decoder whose sizes are more than those of a shape."""
    plain = model.streams == 1 and not (model.residual_block or model.layer_inputs or model.joined or model.outputs)
    for layer in model.layers:
        mixer, block = layer.mixer, layer.feed_forward
        attends = isinstance(mixer, Attention) and not (mixer.value_size or mixer.indexer or mixer.inputs > 1)
        routed = isinstance(block, Experts) and not (block.beside or block.latent)
        plain &= (attends or mixer is None) and (routed or isinstance(block, Dense) or block is None)
    if not plain:
        raise InputError(
            f"{name}: its layers are more than attention with heads and a dense block or experts, which is all that a "
            "ModelShape says; take a model such as llama-3.1-8b or qwen3-30b-a3b"
        )


def _sizes(model: Decoder) -> dict[str, Any]:
    """Sizes of a decoder, those of layers as most of them have them."""
    common = sorted(model.layers, key=lambda layer: -len(model.layers[layer]))
    mixer: Any = next((layer.mixer for layer in common if layer.mixer is not None), Attention(0, 0, 0))
    blocks = [layer.feed_forward for layer in common if layer.feed_forward is not None]
    block: Any = next((block for block in blocks if isinstance(block, Experts)), (blocks or [Dense(0)])[0])
    routed = isinstance(block, Experts)
    return {
        "layers": model.depth,
        "hidden": model.hidden,
        **{size: getattr(mixer, size) for size in ("heads", "kv_heads", "head_size")},
        "d_ff": block.inner,
        "experts": block.count if routed else 0,
        "top_k": block.top_k if routed else 0,
        "vocabulary": model.vocabulary,
    }


def _flags(part: Any) -> dict[str, Any]:
    """Flags of a block as 0 and 1: sizes are multiplied by them, and a traced one by no truth value."""
    return {name: int(value) for name, value in vars(part).items() if isinstance(value, bool)}


def _plain(size: Any) -> Any:
    """A size as a plain number, whole where it is; as a float where it is traced."""
    if is_traced(size):
        return jnp.asarray(size, float)
    value = float(np.asarray(size))
    return int(value) if value.is_integer() else value
