"""Hugging Face models from small configs, on the meta device: no weights, no download."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import neusight_jax as nj


def _ids(torch: Any, batch: int = 2, length: int = 16) -> Any:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def _decoder(name: str, **sizes: Any) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """A causal language model by the prefix of its classes."""

    def make(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **sizes})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        return model, {"input_ids": _ids(torch), "use_cache": False}

    return make


def _encoder(name: str, head: str = "Model", **sizes: Any) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    def make(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
        model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**{**SMALL, **sizes}))
        return model, {"input_ids": _ids(torch)}

    return make


def _vision(name: str, head: str = "Model", **sizes: Any) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    def make(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
        model = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes))
        return model, {"pixel_values": torch.zeros(2, 3, 64, 64, device="meta")}

    return make


def _gpt2(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    """Its head is the table of its embedding."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _ids(torch), "use_cache": False}


def _t5(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": _ids(torch), "decoder_input_ids": _ids(torch), "use_cache": False}


def _bart(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.BartConfig(**ENCODER_DECODER)
    model = transformers.BartForConditionalGeneration(config)
    return model, {"input_ids": _ids(torch), "decoder_input_ids": _ids(torch), "use_cache": False}


def _whisper(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.WhisperConfig(
        num_mel_bins=16, max_source_positions=50, max_target_positions=32, **ENCODER_DECODER
    )
    model = transformers.WhisperForConditionalGeneration(config)
    sound = torch.zeros(2, 16, 100, device="meta")
    return model, {"input_features": sound, "decoder_input_ids": _ids(torch), "use_cache": False}


def _clip(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    text = {**SMALL, "projection_dim": 16}
    vision = {**SMALL, "image_size": 64, "patch_size": 16, "projection_dim": 16}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return model, {"input_ids": _ids(torch), "pixel_values": torch.zeros(2, 3, 64, 64, device="meta")}


def _sam(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
        "output_channels": 32,
        "mlp_dim": 64,
        "window_size": 2,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
    }
    prompt = {
        "hidden_size": 32,
        "image_size": 64,
        "patch_size": 16,
        "mask_input_channels": 4,
        "image_embedding_size": 4,
    }
    mask = {
        "hidden_size": 32,
        "mlp_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 32,
    }
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    model = transformers.SamModel(config)
    points = torch.zeros(1, 1, 1, 2, device="meta")
    labels = torch.ones(1, 1, 1, dtype=torch.long, device="meta")
    pixels = torch.zeros(1, 3, 64, 64, device="meta")
    return model, {"pixel_values": pixels, "input_points": points, "input_labels": labels, "multimask_output": False}


def _wav2vec(torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_feat_extract_layers=7, apply_spec_augment=False
    )
    return transformers.Wav2Vec2Model(config), {"input_values": torch.zeros(2, 4000, device="meta")}


TOKENS: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    **TOKENS,
}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, Callable[[Any, Any], tuple[Any, dict[str, Any]]]] = {
    "llama": _decoder("Llama", num_key_value_heads=2),
    "mistral": _decoder("Mistral", num_key_value_heads=2),
    "mixtral": _decoder("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "qwen2": _decoder("Qwen2", num_key_value_heads=2),
    "qwen3_moe": _decoder(
        "Qwen3Moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "gemma": _decoder("Gemma", num_key_value_heads=2, head_dim=8),
    "phi": _decoder("Phi"),
    "gpt_neox": _decoder("GPTNeoX"),
    "falcon": _decoder("Falcon"),
    "bloom": _decoder("Bloom", n_layer=2, n_head=4),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "gptj": _decoder("GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    "mamba": _decoder("Mamba", state_size=8),
    "mamba2": _decoder("Mamba2", state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "bert": _encoder("Bert", "ForMaskedLM"),
    "roberta": _encoder("Roberta"),
    "albert": _encoder("Albert", embedding_size=16),
    "gpt2": _gpt2,
    "distilbert": _encoder("DistilBert", dim=32, n_heads=4, n_layers=2, hidden_dim=64),
    "deberta_v2": _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "vit": _vision("ViT", **{**SMALL, "image_size": 64, "patch_size": 16}),
    "swin": _vision("Swin", image_size=64, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": _vision("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": _vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "clip": _clip,
    "sam": _sam,
    "wav2vec2": _wav2vec,
}
"""Architectures by name: (torch, transformers) -> the model and its keyword arguments."""


IMAGE_MODELS: dict[str, int] = {
    "alexnet": 224,
    "convnext_tiny": 64,
    "densenet121": 64,
    "efficientnet_b0": 64,
    "googlenet": 224,
    "inception_v3": 299,
    "maxvit_t": 224,
    "mnasnet1_0": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_large": 64,
    "regnet_y_400mf": 64,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 64,
    "segmentation.deeplabv3_mobilenet_v3_large": 64,
    "segmentation.fcn_resnet50": 64,
    "shufflenet_v2_x1_0": 64,
    "squeezenet1_1": 64,
    "swin_t": 64,
    "vgg16": 64,
    "video.r3d_18": 32,
    "vit_b_16": 224,
    "wide_resnet50_2": 64,
}
"""Models of torchvision, of their full size, and the side of a square image each takes."""


def make_image_model(name: str, torch: Any, torchvision: Any) -> tuple[Any, Any]:
    """A model of torchvision on the meta device, without weights, and its images."""
    *package, last = name.split(".")
    side = IMAGE_MODELS[name]
    models = getattr(torchvision.models, package[0]) if package else torchvision.models
    named = {"weights": None, **({"weights_backbone": None} if package == ["segmentation"] else {})}
    named |= {"init_weights": False} if last in DRAWN else {}
    with torch.device("cpu" if last in COMPUTED else "meta"):
        model = getattr(models, last)(**named)
    return model.to("meta"), torch.zeros(2, 3, *([8] if package == ["video"] else []), side, side, device="meta")


COMPUTED = ("regnet_y_400mf",)
"""Models that compute their sizes with tensors, which the meta device cannot."""
DRAWN = ("googlenet", "inception_v3")
"""Models that draw their weights with SciPy unless they are told not to."""


def make(name: str, torch: Any, transformers: Any) -> tuple[Any, dict[str, Any]]:
    """A model on the meta device and its keyword arguments."""
    with torch.device("meta"):
        model, inputs = ARCHITECTURES[name](torch, transformers)
    return model.eval(), inputs


@cache
def traced(name: str, mode: str) -> tuple[Any, Any]:
    """An architecture, or a model of torchvision, and its graph: traced once for all tests of a process."""
    torch = pytest.importorskip("torch", reason="torch is not installed; `pip install '.[torch]'`")
    library = "torchvision" if name in IMAGE_MODELS else "transformers"
    models = pytest.importorskip(library, reason=f"{library} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in IMAGE_MODELS:
            model, images = make_image_model(name, torch, models)
            return model, nj.graph_from_torch(model.eval(), (images,), mode=mode)
        model, inputs = make(name, torch, models)
        return model, nj.graph_from_torch(model, (), inputs, mode)
