"""Models whose whole steps are measured, by name: of transformers and torchvision, with random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Net = Callable[[str, int], torch.nn.Module]
"""Makes a model from the form of attention and the length of a sequence."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: `make` it, classes or words to tell apart, decoder or encoder layers (None: an image model)."""

    make: Net
    classes: int
    layers: int | None = None


def gpt2(layers: int, hidden: int, heads: int) -> Model:
    """A GPT-2; longer than 1,024 tokens where asked for."""

    def make(attention: str, length: int) -> torch.nn.Module:
        import transformers

        sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": max(length, 1024)}
        return _with_attention(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes), attention)

    return Model(make, 50257, layers)


def opt(layers: int, hidden: int, heads: int) -> Model:
    """An OPT."""

    def make(attention: str, length: int) -> torch.nn.Module:
        import transformers

        config = transformers.OPTConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            ffn_dim=4 * hidden,
            word_embed_proj_dim=hidden,
            max_position_embeddings=max(length, 2048),
        )
        return _with_attention(transformers.OPTForCausalLM, config, attention)

    return Model(make, 50272, layers)


def bert(layers: int, hidden: int, heads: int) -> Model:
    """A BERT with its language head."""

    def make(attention: str, length: int) -> torch.nn.Module:
        import transformers

        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=max(length, 512),
        )
        return _with_attention(transformers.BertForMaskedLM, config, attention)

    return Model(make, 30522, layers)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, words: int) -> Model:
    """A Llama with its own output projection."""
    return decoder(
        "Llama",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=words,
    )


def decoder(name: str, **sizes: Any) -> Model:
    """A decoder of transformers by the name of its classes."""

    def make(attention: str, length: int) -> torch.nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=max(length, 4096))
        return _with_attention(getattr(transformers, f"{name}ForCausalLM"), config, attention)

    return Model(make, sizes["vocab_size"], sizes["num_hidden_layers"])


def _with_attention(kind: type, config: Any, attention: str) -> torch.nn.Module:
    config._attn_implementation, config.use_cache = attention, False
    made: torch.nn.Module = kind(config)
    return made


def vision(name: str) -> Model:
    """A model of torchvision."""

    def make(attention: str, length: int) -> torch.nn.Module:
        import torchvision

        made: torch.nn.Module = getattr(torchvision.models, name)(weights=None)
        return made

    return Model(make, 1000)


IMAGE_BATCHES = {
    **{"resnet50": 128, "vgg16": 64, "densenet121": 64, "vit_l_16": 32},
    **{"convnext_base": 64, "resnext50_32x4d": 64, "efficientnet_b0": 128, "mobilenet_v2": 128},
}
OTHER_IMAGE_BATCHES = {
    **{"vit_b_16": 64, "swin_t": 64, "densenet161": 32, "wide_resnet50_2": 64, "efficientnet_v2_s": 64},
    **{"convnext_tiny": 128, "mnasnet1_0": 128},
}
MODELS = {
    "gpt2": gpt2(12, 768, 12),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "gpt3-xl": gpt2(24, 2048, 16),
    "opt-1.3b": opt(24, 2048, 32),
    "bert-large": bert(24, 1024, 16),
    "llama-1b": llama(16, 2048, 32, 8, 8192, 128256),
    "llama-3b": llama(28, 3072, 24, 8, 8192, 128256),
    "gpt2-tiny": gpt2(1, 64, 2),
    "gpt2-medium": gpt2(24, 1024, 16),
    "bert-base": bert(12, 768, 12),
    "pythia-1b": decoder(
        "GPTNeoX",
        **{"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 8},
        **{"intermediate_size": 8192, "vocab_size": 50304},
    ),
    "qwen2.5-0.5b": decoder(
        "Qwen2",
        **{"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    **{name: vision(name) for name in (*IMAGE_BATCHES, *OTHER_IMAGE_BATCHES, "resnet18")},
}
