"""Parameters as Hugging Face transformers builds them, without memory: modules of a config on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAND_INS: dict[str, str] = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
    "mimo": "qwen2",
}
"""Types transformers lacks, and the type of the same layers: what their own modelling code calls or copies."""
TOWERS: tuple[str, ...] = ("visual", "vision", "audio", "multi_modal", "mm_projector", "embed_vision")
"""Names of modules that are no part of the language model."""
HEADS: dict[str, tuple[str, str]] = {
    "bert": ("BertForSequenceClassification", "BertForPreTraining"),
    "roberta": ("RobertaForSequenceClassification", "RobertaForMaskedLM"),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration",) * 2,
    "vit": ("ViTForImageClassification",) * 2,
}
"""Classes in inference and in training, where it is not the one for causal language."""


def elements(module: Any, values: Mapping[str, Any]) -> int:
    """Elements of the parameters of a class of transformers made from a config."""
    import torch
    import transformers

    settings = {key: value for key, value in values.items() if key != "model_type"}
    with torch.device("meta"):
        made = module(transformers.CONFIG_MAPPING[values["model_type"]](**settings))
    return sum(parameter.numel() for parameter in made.parameters())


def parameter_total(values: Mapping[str, Any], training: bool = False) -> int:
    """Elements of the parameters of a config's language model (or encoder), shared ones once.

    Raises: KeyError for a `model_type` that transformers has no class for.
    """
    import torch
    import transformers

    given = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    if isinstance(given.get("text_config"), dict):
        inner = given["text_config"]
        given["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    kind = str(given.pop("model_type"))
    kind = STAND_INS.get(kind, kind)
    if kind == "step3p7" and "text_config" not in given:
        given = {"text_config": given}
    config = transformers.CONFIG_MAPPING[kind](**given)
    with torch.device("meta"):
        if kind in HEADS:
            module = getattr(transformers, HEADS[kind][training])(config)
        else:
            try:
                module = transformers.AutoModelForCausalLM.from_config(config)
            except ValueError:
                module = transformers.AutoModelForImageTextToText.from_config(config)
    return sum(
        parameter.numel() for name, parameter in module.named_parameters() if not any(word in name for word in TOWERS)
    )
