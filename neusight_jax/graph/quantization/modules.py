"""Names: what Hugging Face calls the modules behind our nodes, and the patterns in which configs name modules.

Source: module names of Hugging Face `transformers` and vLLM for each `model_type`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from neusight_jax.errors import InputError

Aliases = tuple[str, ...]
"""One module under the names it may have: that of its own, and those of modules fused with others."""

_PREFIXES: tuple[str, ...] = (
    *("model.", "model.language_model.", "language_model.model.", "model.decoder.", "backbone.", "transformer."),
    *("language_model.", ""),
)
"""What may stand before `layers.0.…` or `lm_head`."""

_GATED = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
_GATE_UP, _DOWN = _GATED[:2], _GATED[2:]
_QKV = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
_PARTS: dict[str, tuple[str, tuple[Aliases, ...], Aliases]] = {
    "attention.qkv": ("attention", _QKV, ("qkv_proj", "query_key_value", "Wqkv", "c_attn")),
    "attention.output": ("attention", (("o_proj", "out_proj", "dense"),), ()),
    "attention.qkv_down": (
        "attention",
        (("q_a_proj",), ("kv_a_proj_with_mqa",)),
        ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
    ),
    "attention.query_up": ("attention", (("q_b_proj",),), ()),
    "attention.kv_up": ("attention", (("kv_b_proj",),), ()),
    "attention.gate": ("attention", (("g_proj", "gate_proj"),), ()),
    "attention.indexer.query": ("attention", (("indexer.wq_b", "index_q_proj"),), ()),
    "attention.indexer.key": ("attention", (("indexer.wk", "index_k_proj"),), ()),
    "attention.indexer.weights": ("attention", (("indexer.weights_proj", "indexers_proj"),), ()),
    "linear_attention.qkv": ("linear_attention", _QKV, ("in_proj_qkv",)),
    "linear_attention.qkvz": ("linear_attention", (("in_proj_qkv",), ("in_proj_z",)), ("in_proj_qkvz",)),
    "linear_attention.gates": ("linear_attention", (("in_proj_a",), ("in_proj_b",)), ("in_proj_ba",)),
    "linear_attention.output": ("linear_attention", (("out_proj", "o_proj"),), ()),
    "mamba.in": ("mamba", (("in_proj",),), ()),
    "mamba.out": ("mamba", (("out_proj",),), ()),
    "mlp.latent_down": ("mlp", (("fc1_latent_proj",),), ()),
    "mlp.latent_up": ("mlp", (("fc2_latent_proj",),), ()),
    "mlp.gate_up": ("mlp", _GATE_UP, ("gate_up_proj",)),
    "mlp.up": ("mlp", (("up_proj", "fc1", "dense_h_to_4h"),), ()),
    "mlp.down": ("mlp", (("down_proj", "w2", "fc2", "dense_4h_to_h"),), ()),
    "mlp.shared.gate_up": ("shared", _GATE_UP, ("gate_up_proj",)),
    "mlp.shared.up": ("shared", (("up_proj",),), ()),
    "mlp.shared.down": ("shared", _DOWN, ()),
    "mlp.shared.gate": ("shared gate", ((),), ("",)),
    "mlp.experts": (
        "experts",
        tuple((*(f"experts.0.{name}" for name in names),) for names in _GATED),
        ("experts.gate_up_proj", "experts.down_proj", "experts"),
    ),
    "mlp.router": ("experts", (("gate", "router"),), ("router.gate", "router.layer")),
}
"""Nodes by name: the kind of module around them, the modules they run as one product, and names that stand for all of
those."""

_PARENTS: dict[str, Aliases] = {
    "attention": ("self_attn", "attention", "attn"),
    "mlp": ("mlp",),
    "experts": ("mlp",),
    "shared": ("mlp.shared_experts", "mlp.shared_expert"),
    "shared gate": ("mlp.shared_expert_gate",),
    "linear_attention": ("linear_attn", "self_attn"),
    "mamba": ("mamba", "mixer"),
}
_SPARSE: dict[str, Aliases] = {
    "experts": ("block_sparse_moe",),
    "shared": ("block_sparse_moe.shared_experts", "block_sparse_moe.shared_expert", "shared_mlp"),
}
_FEED_FORWARD: dict[str, Aliases] = {
    "mlp": ("feed_forward",),
    "experts": ("feed_forward",),
    "shared": ("feed_forward.shared_expert",),
}
_MIXER: dict[str, Aliases] = {
    **dict.fromkeys(("attention", "mlp", "experts", "mamba"), ("mixer",)),
    "shared": ("mixer.shared_experts", "mixer.shared_expert"),
}
_BESIDE: dict[str, Aliases] = {"experts": ("", "moe")}
_FFN: dict[str, Aliases] = {
    "attention": ("attn",),
    "mlp": ("ffn",),
    "experts": ("ffn",),
    "shared": ("ffn.shared_experts",),
}
_PARENTS_OF: dict[str, dict[str, Aliases]] = {
    **dict.fromkeys(("mixtral", "phimoe", "minimax", "minimax_m2", "granitemoe", "kimi_linear"), _SPARSE),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"), _SPARSE),
    **dict.fromkeys(("llama4", "llama4_text"), _FEED_FORWARD),
    "nemotron_h": _MIXER,
    **dict.fromkeys(("gemma4", "gemma4_text"), _BESIDE),
    "deepseek_v4": _FFN,
}
"""Those that call the modules around them otherwise than `_PARENTS`, by `model_type`."""

UNGATED: tuple[str, ...] = ("nemotron_h",)
"""Those whose experts have no gate."""
WHOLE: dict[str, Aliases] = {
    "head": ("lm_head", "head", "output", "embed_out", "score", "classifier"),
    "embedding": ("embed_tokens", "embeddings", "wte", "word_embeddings"),
}
"""Nodes outside the layers."""


def known_node(node: str) -> bool:
    """Whether the table has the modules of a node."""
    return node in _PARTS or node in WHOLE


def modules_of(node: str, model_type: str, layer: int) -> tuple[Aliases, ...]:
    """Modules that a node runs as one, each with its names, from `layers.` on.

    A node that the table does not have is looked for under its own last name.
    """
    if node in WHOLE:
        return (WHOLE[node],)
    around, own, fused = _PARTS.get(node) or (node.split(".")[0], ((node.split(".")[-1],),), ())
    if model_type in UNGATED and node == "mlp.experts":
        own = own[1:]
    parents = {**_PARENTS, **_PARENTS_OF.get(model_type, {})}.get(around, (around,))
    stems = [f"layers.{layer}.{parent}".rstrip(".") for parent in parents]
    return tuple(tuple(f"{stem}.{name}".rstrip(".") for stem in stems for name in (*names, *fused)) for names in own)


@dataclass(frozen=True)
class Names:
    """Module names as a config gives them: names, names with `*`, and regular expressions.

    A name means a module, the modules in it, and every module that ends in it: "gate" is `layers.0.mlp.gate` and not
    `layers.0.mlp.gate_proj`. Regular expressions start at the name's beginning, with any of `_PREFIXES` before it.
    """

    exact: frozenset[str]
    globs: re.Pattern[str] | None
    regular: re.Pattern[str] | None

    def match(self, aliases: Aliases) -> bool:
        """Whether one of a module's names is meant."""
        if self.exact and any(run in self.exact for name in aliases for run in _runs(name)):
            return True
        if self.globs is not None and any(self.globs.search(name) for name in aliases):
            return True
        full = (prefix + name for name in aliases for prefix in _PREFIXES)
        return self.regular is not None and any(self.regular.match(name) for name in full)


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return (".".join(parts[start:end]) for end in ends for start in range(end))


def names(given: Iterable[str], where: str, regular: bool = False) -> Names:
    """`Names` from a list of a config.

    Args:
      where: the list, for errors; regular: whether all of them are regular expressions, not only those after "re:".
    Raises: `InputError` for a regular expression that is none.
    """
    exact: set[str] = set()
    globs: list[str] = []
    expressions: list[str] = []
    for text in given:
        if regular or text.startswith("re:") or set(text) & set("\\^$(|[+"):
            expressions.append(text.removeprefix("re:"))
        elif "*" in text or "?" in text:
            globs.append(_glob(_bare(text)))
        else:
            exact.add(_bare(text).strip("."))
    return Names(frozenset(exact - {""}), _either(globs, where), _either(expressions, where))


def _bare(text: str) -> str:
    return text.removeprefix(max((prefix for prefix in _PREFIXES if text.startswith(prefix)), key=len))


def _glob(text: str) -> str:
    body = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in text.rstrip("."))
    return rf"(?:^|\.){body}(?:$|\.)"


def _either(texts: Sequence[str], where: str) -> re.Pattern[str] | None:
    for text in texts:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{where}: {text!r} is no regular expression ({error})") from None
    try:
        return re.compile("|".join(f"(?:{text})" for text in dict.fromkeys(texts))) if texts else None
    except re.error as error:  # e.g. named groups of two of them
        raise InputError(f"{where}: its regular expressions do not go together ({error})") from None
