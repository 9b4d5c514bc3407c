"""Meaning of `architectures` in a config: the class of the model, and with it the head, or which draft it is.

Sources: the modelling code of Hugging Face transformers 5.24 (`modeling_layers`), of Qwen2.5-Math-RM and -PRM, and of
EAGLE, EAGLE-3 and DFlash drafts as vLLM 0.24 and SGLang load them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from neusight_jax.errors import InputError
from neusight_jax.graph.configs.blocks import Attention, Decoder, Layer, by_kind
from neusight_jax.graph.configs.config import Config, shown

KINDS: tuple[tuple[str, str], ...] = (
    (r"Eagle(?!2_5_VL|VL|Chat)-?3|EAGLE-?3", "eagle3"),
    (r"Eagle(?!2_5_VL|VL|Chat)|EAGLE", "eagle"),
    (r"DFlash", "dflash"),
    (r"Medusa|MTP|NextN|Speculator|Draft|Hydra", "other draft"),
    (r"ForSequenceClassification$|ForImageClassification$", "sequence labels"),
    (r"ForTokenClassification$", "token labels"),
    (r"ForQuestionAnswering$", "answer span"),
    (r"For(Process)?RewardModel$", "reward"),
    (r"ForMaskedLM$|ForPreTraining$", "masked vocabulary"),
    (r"^$|ForCausalLM(V\d+)?$|LMHeadModel$|ForConditionalGeneration$|ForImageTextToText$", "vocabulary"),
    (r"ForVision2Seq$|ForSpeechSeq2Seq$|ChatModel$|OmniModel$|LlavaLlamaModel$", "vocabulary"),
    (r"Model$", "none"),
)
"""Kinds of classes by what is in their names, the first that matches; "" for all others."""
SCORES: dict[str, bool] = {"sequence labels": False, "token labels": True, "answer span": True}
"""Kinds of classes of a decoder that score every token, and whether the product has a bias."""
AUXILIARY = 3
"""Layers of the target whose hidden states EAGLE-3 joins, where a config does not list them."""


def class_name(config: Config) -> str:
    """The class a config names, "" where it names none."""
    names = config.values.get("architectures")
    names = [names] if isinstance(names, str) else names
    if names is None or names == []:
        return ""
    if not isinstance(names, list | tuple) or not isinstance(names[0], str) or not names[0].isidentifier():
        raise InputError(f"{config.name}: architectures is {shown(names)}, expected a list with the name of a class")
    return str(names[0])[:60]


def class_kind(config: Config) -> str:
    """The kind of the class a config names, of `KINDS`; "" with a note for one that is not known."""
    name = class_name(config)
    kind = next((kind for pattern, kind in KINDS if re.search(pattern, name)), "")
    if not kind:
        kind_of_layers = config.values.get("model_type")
        note = f"architectures {shown(name)} is no class known here: forecast as {kind_of_layers} with its usual head"
        config.notes += [note] * (note not in config.notes)
    return kind


def eager_kind(config: Config, usual: str, *others: str) -> str:
    """`class_kind` for a recorder that writes some kinds alone; a note where another is said, and then the usual one.

    Args:
      usual: what it writes where nothing is said, or for the vocabulary's head of an encoder; others: further kinds.
    """
    kind = class_kind(config) if class_name(config) else usual
    if kind in (usual, *others):
        return kind
    if kind:
        note = f"architectures {shown(class_name(config))}: its head is not written here, forecast with {usual}"
        config.notes += [note] * (note not in config.notes)
    return usual


def outputs(config: Config, kind: str) -> int:
    """Outputs of a head of labels, or of the first and last word of an answer."""
    return 2 if kind == "answer span" else config.labels()


def of_class(config: Config, model: Decoder) -> Decoder:
    """A decoder as the class its config names: with its head, attention both ways, or as a draft.

    Raises: `InputError` for a draft that is not written here.
    """
    name, kind = class_name(config), class_kind(config)
    change = CHANGES.get(kind)
    return _both_ways(config, name, model if change is None else change(config, name, model))


def generates(name: str, model: Decoder) -> None:
    """`InputError` for a model that makes no tokens."""
    if model.outputs is not None:
        raise InputError(
            f"{name}: its class has no head over the vocabulary, so no tokens are generated; expected a model for "
            "causal language, or a forward pass (predict --mode inference)"
        )


def _both_ways(config: Config, name: str, model: Decoder) -> Decoder:
    """Attention that sees later tokens, where the config or the name of the class says so."""
    word = config.values.get("use_bidirectional_attention")
    if word is not None and not isinstance(word, bool) and word not in ("all", "vision"):
        raise InputError(f"{config.name}: use_bidirectional_attention is {shown(word)}, expected true or false")
    both = word is True or word == "all" or not config.flag("is_causal", True)
    if not (both or re.search(r"Bidirectional|Bidirec|BiModel|EncoderModel", name)):
        return model
    layers: dict[Layer, list[int]] = {}
    for layer, numbers in model.layers.items():
        if not isinstance(layer.mixer, Attention):
            raise InputError(f"{config.name}: attention both ways is written for softmax attention alone")
        layers[replace(layer, mixer=replace(layer.mixer, causal=False))] = numbers
    return replace(model, layers=layers, notes=(*model.notes, "attention sees later tokens too"))


def _without_head(_: Config, name: str, model: Decoder) -> Decoder:
    return replace(model, outputs=(), tied=False, notes=(f"{name} has no head",))


def _scored(model: Decoder, name: str, *widths: int, bias: bool) -> Decoder:
    shape = " and ".join(str(width) for width in widths)
    note = f"{name}: a head of {shape} outputs a token in place of the vocabulary's"
    return replace(model, outputs=widths, head_bias=bias, tied=False, notes=(note,))


def _labelled(config: Config, name: str, model: Decoder) -> Decoder:
    kind = class_kind(config)
    return _scored(model, name, outputs(config, kind), bias=SCORES[kind])


def _rewarded(_: Config, name: str, model: Decoder) -> Decoder:
    """Qwen's reward models have two layers, one reward or two labels a step; others a value a token."""
    if not name.startswith("Qwen"):
        return _scored(model, name, 1, bias=False)
    return _scored(model, name, model.hidden, 2 if "Process" in name else 1, bias=True)


def _listed(part: Config, key: str, usual: int) -> int:
    """Number of layers of the target that a draft lists."""
    return len(part.indices(key)) if part.has(key) else usual


def _eagle(config: Config, name: str, model: Decoder) -> Decoder:
    """EAGLE: the embedding of a token joined with the target's hidden state; embedding and head are the target's."""
    note = f"{name}, a draft: its embedding and head are the target's, their time is counted and their weights are not"
    return replace(model, joined=2 * model.hidden, shared=("embedding", "head"), tied=False, notes=(note,))


def _eagle3(config: Config, name: str, model: Decoder) -> Decoder:
    """EAGLE-3: hidden states of three layers joined, read by the first layer beside the embedding; its own head."""
    inside = config.part("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    count = _listed(inside if inside.has(key) else config, key, AUXILIARY)
    order = {at: layer for layer, numbers in model.layers.items() for at in numbers}
    layers = [order[at] for at in sorted(order)]
    if not isinstance(layers[0].mixer, Attention):
        raise InputError(f"{config.name}: {name} is written for softmax attention alone")
    layers[0] = replace(layers[0], mixer=replace(layers[0].mixer, inputs=2))
    config.values.settle("norm_before_residual", "norm_before_fc", "eagle_config")
    note = (
        f"{name}, a draft: {count} hidden states of the target are joined, the first layer reads them beside the "
        "embedding; the embedding is the target's: its time is counted, its weights are not"
    )
    return replace(
        model,
        layers=by_kind(layers),
        joined=count * config.size("target_hidden_size", model.hidden),
        predicted=config.size("draft_vocab_size", model.vocabulary),
        shared=("embedding",),
        tied=False,
        notes=(note,),
    )


def _dflash(config: Config, name: str, model: Decoder) -> Decoder:
    """DFlash: a block of tokens at once, beside hidden states of the target; embedding and head are the target's."""
    count = _listed(config.part("dflash_config"), "target_layer_ids", model.depth)
    block = config.count("block_size", 0)
    config.values.settle("dflash_config", "num_target_layers", "draft_vocab_size")
    notes = [
        f"{name}, a draft: {count} hidden states of the target are joined; its embedding and head are the target's, "
        "their time is counted and their weights are not",
        f"it drafts {block} tokens at once; such a pass is --mode prefill --sequence-length {block} --kv-length N",
    ][: 1 + bool(block)]
    joined = count * model.hidden
    return replace(model, joined=joined, shared=("embedding", "head"), tied=False, notes=tuple(notes))


def _refused(config: Config, name: str, _: Decoder) -> Decoder:
    raise InputError(
        f"{config.name}: {shown(name)} is a draft that is not written here; expected an EAGLE, EAGLE-3 or DFlash "
        "draft, or a whole model"
    )


CHANGES: dict[str, Callable[[Config, str, Decoder], Decoder]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "dflash": _dflash,
    "other draft": _refused,
    **dict.fromkeys(SCORES, _labelled),
    "reward": _rewarded,
    "none": _without_head,
}
"""Change that a kind of class makes to a decoder that ends in the vocabulary's head."""
