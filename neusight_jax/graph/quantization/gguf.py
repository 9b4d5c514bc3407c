"""GGUF: types of tensors as `llama-quantize` mixes them, by the name of the mixture, and as the header of a file says.

Source: llama.cpp, `llama-quant.cpp` for the mixtures (`schemes.yaml`) and docs/gguf.md of ggml for the header. Weights
are never read. The `gguf` package maps the whole file and brings three dependencies; the header takes 60 lines.
"""

from __future__ import annotations

import glob
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from neusight_jax.errors import InputError
from neusight_jax.tables import table

PLAIN: tuple[str, ...] = ("F32", "F16", "BF16")
"""Types that are not quantized."""
TYPES: dict[int, str] = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K"},
    **{13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
"""Types of tensors by number (ggml.h)."""
MODEL_TYPES: dict[str, str] = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"},
    **{"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3", "gpt-oss": "gpt_oss"},
}
"""`model_type` by `general.architecture`; llama with experts is mixtral."""
KEYS: dict[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys of a config by those of the metadata, after the architecture."""
LARGE_MODEL_LAYERS = 80
"""Layers of what llama.cpp calls a 70B, whose values never have fewer bits than Q5_K."""
FEW_EXPERTS = 8
"""Experts of a layer beside which attention, small then, has more bits."""


def mixture_of(weight_dtype: str | None) -> str | None:
    """The mixture that a weight dtype names, whatever its case; None for all other dtypes."""
    names = {name.lower(): name for name in table("graph.quantization", "schemes")["gguf_mixtures"]}
    return names.get((weight_dtype or "").lower())


def mixture_types(mixture: str, sizes: Mapping[str, int], tied: bool) -> dict[str, str]:
    """Types of the tensors of a model, by name, as `llama-quantize` chooses them.

    Args:
      mixture: a name of `gguf_mixtures`.
      sizes: layers, hidden, inner, attended (heads times their width), heads, kv_heads, experts.
      tied: whether the head is the embedding.
    """
    rows = table("graph.quantization", "schemes")
    rule = rows["gguf_mixtures"][mixture]
    base, layers, grouped = rule["type"], sizes["layers"], sizes["heads"] // sizes["kv_heads"] >= 4
    widths = {"ffn_down": sizes["inner"], "attn_output": sizes["attended"]}

    def fitting(kind: str, tensor: str) -> str:
        width = widths.get(tensor, sizes["hidden"])
        return kind if width % rows["gguf"][kind][2][1] == 0 else rows["gguf_narrow"].get(kind, kind)

    output = "Q8_0" if base == "Q8_0" or sizes["hidden"] % rows["gguf"][base][2][1] else "Q6_K"
    types = {"token_embd.weight": output if tied else fitting(base, "token_embd"), "output.weight": output}
    experts = "_exps" if sizes["experts"] > 1 else ""
    for layer in range(layers):
        for tensor in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            words = rule.get(tensor, {})
            kind = next((words[word] for word in words if _holds(word, layer, layers, grouped)), base)
            if tensor == "attn_v" and layers == LARGE_MODEL_LAYERS and grouped and kind in ("Q3_K", "Q4_K"):
                kind = "Q5_K"
            if sizes["experts"] == FEW_EXPERTS:
                kind = _beside_few_experts(tensor, kind, base)
            name = f"{tensor}{experts}" if tensor.startswith("ffn") else tensor
            types[f"blk.{layer}.{name}.weight"] = fitting(kind, tensor)
    return types


def _holds(word: str, layer: int, layers: int, grouped: bool) -> bool:
    """Whether a word of a mixture means a layer."""
    eighth = layers // 8
    return {
        "all": True,
        "grouped": grouped,
        "first2": layer < 2,
        "first4": layer < 4,
        "eighth": layer < eighth,
        "sixteenth": layer < layers // 16,
        "more": layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2,
    }[word]


def _beside_few_experts(tensor: str, kind: str, base: str) -> str:
    if tensor in ("attn_v", "attn_k"):
        return "Q8_0"
    return "Q5_K" if tensor == "attn_output" and base in ("Q2_K", "Q3_K", "Q4_K", "IQ3_S", "IQ4_NL", "IQ4_XS") else kind


def patterns(types: Mapping[str, str]) -> list[tuple[str, str]]:
    """Regular expressions of module names and the type of those modules, for the types of tensors by name."""
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, kind in types.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match:
            layers[match[2], kind].append(match[1])
    modules = table("graph.quantization", "schemes")["gguf_tensors"]
    return [
        (rf"layers\.(?:{'|'.join(numbers)})\.{module}$", kind)
        for tensor, module in modules.items()
        for (name, kind), numbers in layers.items()
        if name == tensor
    ]


def most_common(types: Mapping[str, str]) -> str:
    """The type of most tensors in layers that are quantized, F16 where none is."""
    counts = Counter(kind for name, kind in types.items() if name.startswith("blk.") and kind not in PLAIN)
    return counts.most_common(1)[0][0] if counts else "F16"


# The header of a file: a magic word, counts, metadata, and name, shape, type and place of every tensor.

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 26
"""No header has longer texts or lists."""


class _Header:
    """Reads a header piece by piece; `InputError` where it ends early or is none."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name

    def bytes(self, count: int) -> bytes:
        content = self.file.read(count) if count <= _MOST else b""
        if len(content) < count:
            raise InputError(f"{self.name}: its GGUF header ends early or is damaged; expected a whole file")
        return content

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.bytes(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            of, count = self.number("I"), self.number("Q")
            if count > _MOST:
                # That raises: a damaged count would fill the memory first.
                self.bytes(count)
            return [self.value(of) for _ in range(count)]
        if kind not in _SCALARS:
            raise InputError(f"{self.name}: its GGUF header has a value of type {kind}; expected 0 to 12")
        return self.number(_SCALARS[kind])


def parts_of(path: Path) -> list[Path]:
    """Files of a model that is cut into several, or the one file."""
    part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    return sorted(path.parent.glob(f"{glob.escape(part[1])}-*-of-{part[2]}.gguf")) if part else [path]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Metadata of a GGUF file and the types of its tensors by name; of a file in parts those of all parts.

    Raises: `InputError` for another file, or tensors of unknown types.
    """
    metadata: dict[str, Any] = {}
    types: dict[str, str] = {}
    # Every part of a cut model has a header; metadata of the whole stand in the first.
    for name in parts_of(path):
        with name.open("rb") as file:
            header = _Header(file, name.name)
            if header.bytes(4) != b"GGUF" or header.number("I") not in (2, 3):
                raise InputError(f"{name}: no GGUF file of version 2 or 3; expected one, a folder or a config.json")
            tensors, entries = header.number("Q"), header.number("Q")
            for _ in range(entries):
                key = header.text()
                metadata.setdefault(key, header.value(header.number("I")))
            for _ in range(tensors):
                tensor, rank = header.text(), header.number("I")
                header.bytes(8 * rank)
                kind = header.number("I")
                header.bytes(8)
                types[tensor] = TYPES.get(kind, f"type {kind}")
    return metadata, types


def config_values(path: Path) -> dict[str, Any]:
    """The config of a GGUF file in Hugging Face's spelling, and the types of its tensors as its quantization.

    Raises: `InputError` for another file, or an architecture that is not read.
    """
    metadata, types = read_header(path)
    architecture = metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        names = ", ".join(MODEL_TYPES)
        raise InputError(f"{path.name}: architecture {architecture!r} is not read from GGUF; expected one of {names}")
    values = {
        name: metadata[f"{architecture}.{key}"] for key, name in KEYS.items() if f"{architecture}.{key}" in metadata
    }
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    kind = "mixtral" if architecture == "llama" and "num_experts" in values else MODEL_TYPES[architecture]
    if kind in ("mixtral", "gpt_oss"):
        values["num_local_experts"] = values.pop("num_experts", None)
    return {
        **values,
        "model_type": kind,
        "torch_dtype": "float16",
        "tie_word_embeddings": "output.weight" not in types,
        "quantization_config": {"quant_method": "gguf", "tensors": list(types.items())},
    }
