"""Decoder-only language models: which types there are, and one step of any of them, layer by layer; and of ViT."""

from __future__ import annotations

from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import (
    Attention,
    Compressed,
    Decoder,
    DeltaNet,
    Dense,
    Experts,
    Layer,
    Mamba2,
)
from neusight_jax.graph.configs.classes import eager_kind, of_class
from neusight_jax.graph.configs.config import Config, positions_of
from neusight_jax.graph.configs.parallel import check_split, part_of, write_sums
from neusight_jax.graph.configs.readers import READERS
from neusight_jax.graph.configs.shard import Shard
from neusight_jax.graph.configs.step import Step
from neusight_jax.graph.configs.writers import WRITERS, write_experts

MODEL_TYPES: tuple[str, ...] = tuple(READERS)
"""Types of decoders."""
UNMEASURED: tuple[tuple[type, str], ...] = (
    (DeltaNet, "linear attention with the delta rule"),
    (Mamba2, "state-space scans"),
    (Compressed, "attention over compressed tokens"),
)
"""Layers none of whose own kernels was measured."""


def read_decoder(config: Config, context: int) -> Decoder:
    """Sizes from a config; `InputError` naming the key that is missing, or a `context` beyond the model's."""
    model = of_class(config, READERS[str(config.values["model_type"])](config))
    config.limit_sequence(context, "max_position_embeddings", positions=positions_of(config))
    return model if config.shape is None else config.shape.applied(config.name, model)


def record(
    step: Step,
    config: Config,
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    model: Decoder | None = None,
    *,
    whole_experts: bool = False,
) -> None:
    """Write one step of a decoder: what one of the GPUs does that it is split over.

    Args:
      step: takes the nodes; its requests and precision are the workload.
      config: of a type in `MODEL_TYPES`; gets notes on what was never measured or is left out.
      tensor_parallel: GPUs the layers are split over.
      expert_parallel: GPUs the experts are split over.
      model: what `read_decoder` made of the config; None = read it here.
      whole_experts: whether no expert is split over the tensor-parallel GPUs as the layers are.
    """
    model = model or read_decoder(config, max(step.requests.context))
    check_split(config.name, model, expert_parallel)
    shard = step.shard or Shard()
    replica = tensor_parallel * step.attention_ranks
    expert_parts = 1 if whole_experts or shard.expert_ranks > 1 else replica
    parts = {
        layer: part_of(config.name, model.sized.get(layer, layer), tensor_parallel, expert_parts)
        for layer in model.layers
    }
    tokens = step.requests.tokens
    vocabulary = _part(model.vocabulary, tensor_parallel)
    _check_mode(step, config, model)
    # The ranks of a job send messages of their own.
    if step.shard is None and max(replica, expert_parallel) > 1:
        write_sums(step, model, tensor_parallel, replica * (1 if whole_experts else expert_parallel))
    if shard.embeds:
        step.embedding(vocabulary, model.hidden, shared="embedding" in model.shared)
        if model.joined:
            step.linear("draft.join", tokens, model.hidden, model.joined)
        _layer_embedding(step, model, -(-model.layer_vocabulary // tensor_parallel))
    names = _section_names(list(model.layers))
    for layer, numbers in model.layers.items():
        if own_layers := shard.own(numbers):
            repeat: Any = len(own_layers) * model.deeper
            repeat = int(repeat) if isinstance(repeat, float) and repeat.is_integer() else repeat
            with step.section(names[layer], repeat, own_layers):
                _layer(step, model, parts[layer], expert_parallel)
    config.notes += _notes(config, model)
    if shard.predicts:
        _head(step, model, tensor_parallel)


def _check_mode(step: Step, config: Config, model: Decoder) -> None:
    """`InputError` for a decode of a model that sees later tokens and makes none."""
    both = any(isinstance(layer.mixer, Attention) and not layer.mixer.causal for layer in model.layers)
    if both and model.outputs is not None and step.mode == "decode":
        raise InputError(
            f"{config.name}: its attention sees later tokens and it makes none, so it has no decode step; give mode "
            "inference or prefill"
        )


def _head(step: Step, model: Decoder, tensor_parallel: int) -> None:
    """Write the end of a model; of a job also the loss, and the head's weight where the embedding is elsewhere."""
    tokens = step.requests.tokens
    if model.streams > 1:
        _collapse(step, "streams", model, model.streams)
        step.weight(model.streams + 1)
    _norm(step, "norm", model, residual=True)
    dtype = step.precision.activations
    if model.outputs is not None:
        _outputs(step, model, model.outputs)
        return
    rows, vocabulary = len(step.requests.queries) if step.serving else tokens, model.predicted or model.vocabulary
    vocabulary = _part(vocabulary, tensor_parallel)
    bias = vocabulary * model.head_bias
    tied = "head" in model.shared or (model.tied and (step.shard is None or step.shard.embeds))
    step.linear("head", rows, vocabulary, model.hidden, dtype=dtype, tied=tied, bias=bias)
    if step.serving:
        step.stream("sampling", "softmax", rows, vocabulary, 1, 1)
    elif step.shard is not None:
        # Logits widened to fp32 and reduced, then their gradient written in the dtype they came in.
        step.stream("loss", "softmax", rows, vocabulary, 3, 2, saved_bytes=4.0 * rows * vocabulary)


def _part(size: Any, devices: int) -> Any:
    """The largest of so many nearly equal parts of a size."""
    return size if devices == 1 else -(-size // devices)


def _outputs(step: Step, model: Decoder, widths: tuple[int, ...]) -> None:
    """A head of a few outputs for every token: products one after the other, with an activation between them."""
    tokens, width = step.requests.tokens, model.hidden
    for at, features in enumerate(widths):
        if at:
            step.stream("score.activation", "pointwise", tokens, width, 1, 1, grad=1.5)
        name, dtype = f"score.{at}" if len(widths) > 1 else "score", step.precision.activations
        step.linear(name, tokens, features, width, dtype=dtype, bias=features * model.head_bias)
        width = features


def _notes(config: Config, model: Decoder) -> list[str]:
    notes = list(model.notes)
    mixers = [layer.mixer for layer in model.layers]
    unmeasured = [word for kind, word in UNMEASURED if any(isinstance(mixer, kind) for mixer in mixers)]
    if any(getattr(mixer, "indexer", None) for mixer in mixers):
        unmeasured.append("attention over keys an indexer chose")
    if model.residual_block:
        unmeasured.append("attention residuals (their weights, a few vectors a layer, are not counted)")
    if unmeasured:
        notes.append(f"never measured, forecast as products and streams: {', '.join(unmeasured)}")
    # Layers that only serve to guess further tokens.
    key = config.first("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "num_mtp_layers")
    if isinstance(config.values.get(key), int) and config.values[key] > 0:
        notes.append(f"multi-token prediction ({key} {config.values[key]}) is left out, time and parameters")
    return notes


def _section_names(layers: list[Layer]) -> dict[Layer, str]:
    """Sections named after what tells the kinds of layers of a model apart."""
    names: dict[Layer, str] = {}
    for layer in layers:
        words = ["layer", *_words(layer, len(layers) > 1)]
        name, again = "_".join(words), 2
        # Kinds of layers may differ in sizes alone, which the words do not tell.
        while name in names.values():
            name, again = f"{'_'.join(words)}_{again}", again + 1
        names[layer] = name
    return names


def _words(layer: Layer, several: bool) -> list[str]:
    mixer, block = layer.mixer, layer.feed_forward
    words = []
    if isinstance(mixer, Attention):
        words += ["window"] * bool(mixer.window) + ["chunk"] * bool(mixer.chunk)
        words += ["attention"] * (block is None)
    words += ["linear"] * isinstance(mixer, DeltaNet) + ["mamba"] * isinstance(mixer, Mamba2)
    words += ["compressed"] * (isinstance(mixer, Compressed) and mixer.ratio > 0)
    words += ["indexed"] * bool(getattr(mixer, "indexer", None))
    words += ["mlp"] * (mixer is None and isinstance(block, Dense))
    words += ["experts"] * (isinstance(block, Experts) and several)
    return words


def _layer(step: Step, model: Decoder, layer: Layer, expert_parallel: int) -> None:
    hidden = model.hidden
    if layer.mixer is not None:
        if not layer.post_norm:
            _before(step, "attention", model)
        if isinstance(layer.mixer, Attention) and layer.mixer.inputs > 1:
            _norm(step, "attention_hidden_norm", model)
        WRITERS[type(layer.mixer)](step, layer.mixer, hidden)
        if layer.sandwich or layer.post_norm:
            _norm(step, "attention_post_norm", model, residual=layer.post_norm)
        else:
            step.summed()
    block = layer.feed_forward
    if block is None:
        return
    if not (layer.parallel or layer.post_norm):
        _before(step, "mlp", model)
    if isinstance(block, Experts):
        write_experts(step, block, hidden, expert_parallel)
    else:
        WRITERS[type(block)](step, block, hidden)
    if layer.sandwich or layer.post_norm:
        _norm(step, "mlp_post_norm", model, residual=layer.post_norm)
    else:
        step.summed()
    if model.layer_inputs:
        _layer_input(step, model)


def _before(step: Step, name: str, model: Decoder) -> None:
    """The norm before a block, and with residual streams the weights that mix them."""
    streams = model.streams
    if model.residual_block:
        # A token attends to the sums of the blocks before it: half of them on average, and its own.
        seen = 1.0 + model.depth / model.residual_block / 2.0
        step.stream(f"{name}_residuals", "pointwise", step.requests.tokens, model.hidden, seen, 1)
    if streams > 1:
        _collapse(step, f"{name}_streams", model, streams * (streams + 2))
        step.weight(streams * (streams + 2) + 3)
        mixed = f"{name}_streams_mix"
        step.stream(mixed, "pointwise", step.requests.tokens, model.hidden, streams + 1, streams)
    _norm(step, f"{name}_norm", model, residual=True)


def _collapse(step: Step, name: str, model: Decoder, features: int) -> None:
    """Weights of the residual streams made from all of them, and the streams summed to one."""
    tokens, wide = step.requests.tokens, model.streams * model.hidden
    step.linear(name, tokens, features, wide, dtype=step.precision.activations)
    step.stream(f"{name}_sum", "pointwise", tokens, model.hidden, model.streams, 1)


def _norm(step: Step, name: str, model: Decoder, *, residual: bool = False) -> None:
    split = 1 if step.shard is None else step.shard.sequence
    step.norm(name, -(-step.requests.tokens // split), model.hidden, residual=residual)
    # `Step.norm` counts the first vector of weights.
    step.weight((model.norm_weights - 1) * model.hidden)


def _layer_embedding(step: Step, model: Decoder, vocabulary: int) -> None:
    """Embeddings that every layer has of its own, looked up together and joined with a projection of the usual one."""
    if not model.layer_inputs:
        return
    tokens, wide = step.requests.tokens, model.depth * model.layer_inputs
    step.weight(float(vocabulary) * wide)
    step.stream("layer_embedding", "embedding", tokens, wide, 1, 1)
    step.linear("layer_projection", tokens, wide, model.hidden)
    step.norm("layer_projection_norm", tokens * model.depth, model.layer_inputs)


def _layer_input(step: Step, model: Decoder) -> None:
    """The layer's own embedding: gated by the token, projected to the model's width, normed."""
    tokens, width = step.requests.tokens, model.layer_inputs
    step.linear("layer_input.gate", tokens, width, model.hidden)
    step.stream("layer_input.activation", "pointwise", tokens, width, 2, 1)
    step.linear("layer_input.up", tokens, model.hidden, width)
    step.norm("layer_input.norm", tokens, model.hidden, residual=True)


def record_vit(step: Step, config: Config, *split: int) -> None:
    """Write one step of a vision transformer (Hugging Face ViTModel): patches and the class token are its sequence.

    Args:
      step: takes the nodes; a request is an image, its new tokens are the patches and the class token.
      config: of type "vit"; gets a note where its class has a head that is not written here.
      split: not read, as this model is never split.
    """
    del split
    hidden, heads, inner = (config.size(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    size = config.head_size("hidden_size", "num_attention_heads")
    patch, channels = config.size("patch_size", 16), config.size("num_channels", 3)
    tokens, images = step.requests.tokens, len(step.requests.queries)
    side = config.size("image_size", 224) // patch
    config.limit_sequence(max(step.requests.queries), "image_size", positions=side * side + 1)
    step.linear("patch_embedding", tokens, hidden, patch * patch * channels, bias=hidden * (side * side + 3))
    step.stream("position_embedding", "add", tokens, hidden, 2, 1)
    with step.section("layer", config.size("num_hidden_layers")):
        step.norm("attention_norm", tokens, hidden, residual=True)
        step.linear(
            "attention.qkv", tokens, 3 * hidden, hidden, bias=hidden * (4 + 3 * config.flag("qkv_bias", True)) + inner
        )
        step.attention(heads, heads, size, 2.0 * hidden, kept_per_token=0.0, causal=False)
        step.linear("attention.output", tokens, hidden, hidden)
        step.summed()
        step.norm("mlp_norm", tokens, hidden, residual=True)
        step.linear("mlp.up", tokens, inner, hidden)
        step.stream("mlp.activation", "gelu", tokens, inner, 1, 1, grad=1.5)
        step.linear("mlp.down", tokens, hidden, inner)
        step.summed()
    step.norm("norm", tokens, hidden, residual=True)
    bare = eager_kind(config, "sequence labels", "none") == "none"
    labels = hidden if bare else config.labels()
    step.linear("pooler" if bare else "head", images, labels, hidden, bias=hidden + labels)
