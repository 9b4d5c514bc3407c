"""Vision transformer (Hugging Face ViTModel): patches as tokens, attention without mask, a plain feed-forward block."""

from __future__ import annotations

from neusight_jax.graph.configs.classes import eager_kind
from neusight_jax.graph.configs.config import Config
from neusight_jax.graph.configs.step import Step


def record(step: Step, config: Config, *split: int) -> None:
    """Write one step; the sequence is the patches and the class token.

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
    step.stream("position_embedding", "stream", "add", tokens, hidden, 2, 1)
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
        step.stream("mlp.activation", "stream", "gelu", tokens, inner, 1, 1, grad=1.5)
        step.linear("mlp.down", tokens, hidden, inner)
        step.summed()
    step.norm("norm", tokens, hidden, residual=True)
    bare = eager_kind(config, "sequence labels", "none") == "none"
    labels = hidden if bare else config.labels()
    step.linear("pooler" if bare else "head", images, labels, hidden, bias=hidden + labels)
