"""Messages: the collectives of one rank of a job, by stage and by what waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from neusight_jax.arithmetic import dtype_bytes
from neusight_jax.graph.configs.blocks import Attention, Decoder, Experts, Latent, Layer
from neusight_jax.job.parallelism import Group, Parallelism
from neusight_jax.job.weights import Weights
from neusight_jax.kernels.collective import OPS, expert_copies

SLOTS: tuple[str, ...] = (
    *("tensor_forward", "tensor_backward", "context_forward", "context_backward"),
    *("expert_forward", "expert_backward", "gather", "reduce", "gradients", "parameters"),
)
"""What waits for a collective: a forward or a backward pass of a micro-batch by its class, the shards of FSDP gathered
before and reduced after a pass, and once a step the gradients, and the parameters after a sharded optimizer."""


@dataclass(frozen=True)
class Message:
    """Collectives of one kind.

    Attributes:
      op: of `kernels.collective`; payload_bytes: as that family counts them.
      group: a group of `parallelism.groups`; slot: one of `SLOTS`; count: how many, on one pass of the stage.
      top_k: of an exchange with experts, how many each token goes to; `payload_bytes` are then those of one copy.
    """

    op: str
    payload_bytes: float
    group: str
    slot: str
    count: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Sizes:
    """What messages of a stage are sized by.

    Attributes:
      layers: its layers; tokens: of a micro-batch on this rank; embeds, predicts: as in `Shard`.
      weights, trained: of the stage on this rank, all and those that are trained.
      dtype: of activations; gradient_bytes: of an element of the accumulated gradients.
      narrowed_bytes: that frozen weights take less than in the dtype of the activations.
      recomputed: share of its layers that are run again as a whole.
      gathered_bytes: of an element as its shards are gathered, None = as it is stored.
    """

    layers: tuple[Layer, ...]
    tokens: float
    embeds: bool
    predicts: bool
    weights: Weights
    trained: Weights
    dtype: str
    gradient_bytes: float
    narrowed_bytes: float = 0.0
    recomputed: float = 0.0
    gathered_bytes: float | None = None


def layer_messages(model: Decoder, layout: Parallelism, own: Sizes) -> tuple[Message, ...]:
    """Those of its layers, embedding and head: sums over them."""
    return tuple(message for part in (_tensor, _context, _expert) for message in part(model, layout, own))


def parameter_messages(layout: Parallelism, own: Sizes, model: Decoder | None = None) -> tuple[Message, ...]:
    """Those of its parameters and their gradients.

    Args:
      layout: how the job is split.
      own: sizes of the stage.
      model: whose stages may share a table; None where there is one stage.
    """
    shared = () if model is None or layout.zero == 3 else _shared_table(model, layout, own)
    return (*(_sharded if layout.zero == 3 else _replicated)(layout, own), *shared)


def hidden_bytes(model: Decoder, layout: Parallelism, tokens: float, dtype: str) -> float:
    """Activations between two stages, bytes of one rank.

    Args:
      model: whose width it is.
      layout: how the job is split.
      tokens: of a micro-batch on one rank.
      dtype: of activations.
    """
    split = layout.tensor if layout.sequence_parallel else 1
    return tokens * model.hidden * dtype_bytes(dtype) / split


def _tensor(model: Decoder, layout: Parallelism, own: Sizes) -> list[Message]:
    if layout.tensor == 1:
        return []
    whole = layout.expert > 1  # experts are not split, so nothing is summed after them
    blocks = sum(
        (layer.mixer is not None) + (layer.feed_forward is not None and not (whole and _routed(layer)))
        for layer in own.layers
    )
    size = own.tokens * model.hidden * dtype_bytes(own.dtype)
    ops = ("all_gather", "reduce_scatter") if layout.sequence_parallel else ("all_reduce",)
    found = []
    for op in ops:
        found.append(Message(op, size, "tensor", "tensor_forward", blocks + own.embeds))
        found.append(Message(op, size, "tensor", "tensor_backward", blocks * (1.0 + own.recomputed) + own.predicts))
    if own.predicts:  # the largest logit, their sum and the right one's
        found.append(Message("all_reduce", 4.0 * own.tokens, "tensor", "tensor_forward", 3))
    return found


def _context(model: Decoder, layout: Parallelism, own: Sizes) -> list[Message]:
    """Keys and values round a ring, and with their gradients on the way back."""
    if layout.context == 1:
        return []
    found = []
    for layer in own.layers:
        # A layer without keys and values, such as a recurrent one, has none to send round the ring.
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            width = mixer.kv_heads * (mixer.head_size + (mixer.value_size or mixer.head_size)) / layout.tensor
        elif isinstance(mixer, Latent):
            width = mixer.heads * (mixer.nope + mixer.rope + mixer.value) / layout.tensor
        else:
            continue
        size = own.tokens * width * dtype_bytes(own.dtype)
        found.append(Message("send_recv", size, "context", "context_forward", layout.context - 1.0))
        found.append(Message("send_recv", 2.0 * size, "context", "context_backward", layout.context - 1.0))
    return found


def _expert(model: Decoder, layout: Parallelism, own: Sizes) -> list[Message]:
    """Tokens to their experts and back, each way of the pass."""
    if layout.expert == 1:
        return []
    found = []
    for layer in own.layers:
        block = layer.feed_forward
        if isinstance(block, Experts):
            tokens = own.tokens / (layout.tensor if layout.sequence_parallel else 1)
            size = tokens * (block.latent or model.hidden) * dtype_bytes(own.dtype)
            for slot, passes in (("expert_forward", 1.0), ("expert_backward", 1.0 + own.recomputed)):
                found.append(Message("all_to_all", size, "expert", slot, 2.0 * passes, block.top_k))
    return found


def _sharded(layout: Parallelism, own: Sizes) -> list[Message]:
    """FSDP: parameters of one layer after another, before each pass; gradients after."""
    layers, stored = max(len(own.layers), 1), dtype_bytes(own.dtype) - own.narrowed_bytes / max(own.weights.total, 1.0)
    sent = (
        ("all_gather", own.weights, min(own.gathered_bytes or stored, stored), "gather"),
        ("reduce_scatter", own.trained, own.gradient_bytes, "reduce"),
    )
    found = [
        Message(op, elements / layers * size, "shards" if layout.shards else group, slot, layers)
        for op, weights, size, slot in sent
        for group, elements in weights.by_group(layout).items()
        if elements > 0.0
    ]
    if layout.shards:  # each rank sums its shard with those that hold the same
        shard_bytes = own.trained.total / layout.shards * own.gradient_bytes
        found.append(Message("all_reduce", shard_bytes, "copies", "gradients"))
    return found


def _replicated(layout: Parallelism, own: Sizes) -> list[Message]:
    """Gradients of a step summed over the replicas, and where the optimizer is sharded its parameters handed round."""
    found = []
    for group, parameters in own.trained.by_group(layout).items():
        if parameters > 0.0:
            op = "reduce_scatter" if layout.zero else "all_reduce"
            found.append(Message(op, parameters * own.gradient_bytes, group, "gradients"))
            if layout.zero:
                found.append(Message("all_gather", parameters * dtype_bytes(own.dtype), group, "parameters"))
    return found


def _shared_table(model: Decoder, layout: Parallelism, own: Sizes) -> list[Message]:
    """Gradients of an embedding that the first and the last stage share."""
    if not (model.tied and own.trained == own.weights and layout.pipeline > 1 and own.embeds != own.predicts):
        return []
    table = float(model.vocabulary) * model.hidden / layout.tensor
    return [Message("all_reduce", table * own.gradient_bytes, "pipeline", "gradients")]


def _routed(layer: Layer) -> bool:
    return isinstance(layer.feed_forward, Experts)


def sizes(messages: Sequence[Message], groups: Mapping[str, Group]) -> np.ndarray:
    """Bytes, ranks, domains, operator and crossing share of every message, [message, 5]."""
    rows = [message_size(each, groups[each.group]) for each in messages]
    return np.array(rows, np.float64).reshape(-1, 5)


def message_size(message: Message, group: Group) -> tuple[float, ...]:
    """A row of `sizes`."""
    payload, share = message.payload_bytes, 1.0
    if message.top_k:
        copies, share = expert_copies(message.top_k, group.ranks, group.domains)
        payload *= copies
    return payload, group.ranks, group.domains, OPS.index(message.op), share
