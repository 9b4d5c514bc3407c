"""Layers of a decoder as records: what stands in one, its sizes, nothing of the workload or the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

SIZES: tuple[str, ...] = (
    *("layers", "hidden", "heads", "kv_heads", "head_size", "d_ff"),
    *("experts", "top_k", "vocabulary"),
)
"""Sizes of a model that a search may change (`shape.ModelShape`)."""


@dataclass(frozen=True)
class Indexer:
    """A small attention that chooses the keys the layer's own attention sees.

    Attributes:
      heads, size: of its queries; it has one key head.
      top_k: keys chosen, or as many as `block` keys at a time make.
      query_rank: width its queries are made from, 0 = the model's.
      block: keys chosen together.
      norms: weights of its norms.
      head_weights: whether every head has a weight made from the token.
    """

    heads: int
    size: int
    top_k: int
    query_rank: int
    block: int
    norms: int
    head_weights: bool


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped heads.

    Attributes:
      value_size: width of a value head, where it is not `head_size`.
      window: keys a query sees at most (0 = all); chunk: attention ends at multiples of it (0 = it does not).
      bias, output_bias: of the projections.
      qk_norm: "head" norms queries and keys head by head, "whole" over all heads, "plain" head by head without weights.
      gate: "head" or "element": what multiplies the result, made from the token.
      sinks: one learned logit a head.
      values: whether values have a projection; without, they are the keys.
      cached: whether it has keys and values of its own; without, those of an earlier layer.
      causal: whether later keys are hidden; inputs: vectors as wide as the model that the projections read, joined.
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int = 0
    window: int = 0
    chunk: int = 0
    bias: bool = False
    output_bias: bool = False
    qk_norm: str = ""
    gate: str = ""
    sinks: bool = False
    rotary: bool = True
    values: bool = True
    cached: bool = True
    causal: bool = True
    inputs: int = 1
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of the queries (0 = none) and of keys and values, and widths of a head.

    Attributes:
      bias: of the projections down to the ranks, and of the output.
      gate: whether a gate made from the token multiplies the result.
    """

    heads: int
    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    bias: bool = False
    gate: bool = False
    indexer: Indexer | None = None


@dataclass(frozen=True)
class Compressed:
    """Attention over a window and over older tokens compressed `ratio` to one (DeepSeek-V4); its one KV head is both.

    Attributes:
      query_rank: of the queries; output_groups, output_rank: of the output projection.
      window: last keys seen as they are.
      ratio: tokens in one entry, 0 = none; overlap: whether an entry is made of two windows.
      indexer: chooses among the entries.
    """

    heads: int
    head_size: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    ratio: int
    overlap: bool
    indexer: Indexer | None


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention with the delta rule: a state of `key_size` × `value_size` for each value head.

    Attributes:
      conv: tokens a short convolution over queries, keys and values sees.
      gates: "scalar" has one decay a head (gated delta net), "vector" one for each key channel (Kimi delta attention);
        its gates go through projections of `key_size`, with "vector_wide" that of the result does not.
      state_bytes: of an element of the state.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv: int
    gates: str
    state_bytes: float


@dataclass(frozen=True)
class Mamba2:
    """State-space layer (Mamba-2): a state of `head_size` × `state` for each head, inputs shared by groups of heads.

    Attributes:
      conv: tokens the short convolution sees; chunk: tokens of a chunk of the scan.
      bias, conv_bias: of the projections, of the convolution.
      state_bytes: of an element of the state.
    """

    heads: int
    head_size: int
    groups: int
    state: int
    conv: int
    chunk: int
    bias: bool
    conv_bias: bool
    state_bytes: float


@dataclass(frozen=True)
class Square:
    """One linear layer where other layers have attention or a feed-forward block; `name` says which."""

    name: str


@dataclass(frozen=True)
class Dense:
    """A feed-forward block; `gated`: three matrices instead of two."""

    inner: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts: how many, how many a token takes, their width, and the width of those all tokens share.

    Attributes:
      shared_gate: whether a gate made from the token multiplies the shared expert.
      gated, bias: as in `Dense`; router_bias, router_scales: further weights of the router.
      latent: width the experts work in, 0 = the model's; latent_norm: whether they read a norm of it.
      beside: a dense block in parallel with the experts, 0 = none (its width).
    """

    count: int
    top_k: int
    inner: int
    shared: int = 0
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    router_scales: bool = False
    latent: int = 0
    latent_norm: bool = False
    beside: int = 0


Mixer: TypeAlias = Attention | Latent | Compressed | DeltaNet | Mamba2 | Square
FeedForward: TypeAlias = Dense | Experts | Square


@dataclass(frozen=True)
class Layer:
    """One layer: what mixes tokens, what works on each, either may be absent.

    Attributes:
      sandwich: whether what they return is normed as well; parallel: both read the same normed input.
      post_norm: only what they return is normed.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    sandwich: bool = False
    post_norm: bool = False
    parallel: bool = False


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model.

    Attributes:
      layers: kinds of layers in order, and which layers (by number) are of each.
      norm_weights: vectors of weights a norm has.
      tied: whether the head is the embedding.
      streams: residual streams that layers read and write (hyper-connections), 1 = the usual residual.
      residual_block: layers whose sum later layers attend to (attention residuals), 0 = the usual residual.
      layer_inputs: width of an embedding each layer has of its own, 0 = none; layer_vocabulary: its rows.
      outputs: widths of the products of a head that is not the vocabulary's, () = no head; None = the vocabulary's.
      head_bias: of the head; predicted: words it knows, 0 = the vocabulary.
      joined: width of hidden states of another model that a first product brings to this one's, 0 = there are none;
      shared: what of "embedding" and "head" are another model's weights.
      notes: what else a reader should know, one line each.
      sized: layers with other sizes, numbers or traced, than those of `layers` have, by these (`ModelShape`); deeper:
        times as many as `layers` says.
    """

    hidden: int
    vocabulary: int
    tied: bool
    layers: Mapping[Layer, list[int]]
    norm_weights: int = 1
    head_bias: bool = False
    streams: int = 1
    residual_block: int = 0
    layer_inputs: int = 0
    layer_vocabulary: int = 0
    outputs: tuple[int, ...] | None = None
    predicted: int = 0
    joined: int = 0
    shared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sized: Mapping[Layer, Layer] = field(default_factory=dict)
    deeper: float = 1

    @property
    def depth(self) -> int:
        """Layers of all kinds."""
        return sum(len(numbers) for numbers in self.layers.values())


def by_kind(layers: Iterable[Layer]) -> dict[Layer, list[int]]:
    """Numbers of equal layers, in order of their first."""
    kinds: dict[Layer, list[int]] = {}
    for at, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(at)
    return kinds
