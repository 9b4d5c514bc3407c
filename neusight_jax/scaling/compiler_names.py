"""Kernel names that compilers make up from operators: XLA's fusions and HLO operators, Inductor's Triton kernels."""

from __future__ import annotations

import re

from neusight_jax.scaling.demangle import words

_INDUCTOR = re.compile(r"^triton_(poi|red|per|tem|for|spl|unk|mix|cross|helion)_fused_?(.*)$")
_NUMBERS = re.compile(r"(?:[._-](?:\d+|clone|remat))+$")
_FUSION = re.compile(r"^(?:(loop|input|wrapped|triton|gemm|nested_gemm|cudnn|custom)_)?(.*?)_?(fusion)?$")
_MOVES = frozenset(
    (
        *("gather", "scatter", "transpose", "concatenate", "slice", "pad", "copy", "dynamic", "update"),
        *("reverse", "broadcast", "reshape", "bitcast", "iota"),
    )
)
"""HLO operators that compute nothing; a fusion of nothing else moves data."""
_ARITHMETIC: tuple[str, ...] = (
    *("abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert", "cosine", "divide"),
    *("erf", "exponential", "floor", "imag", "is-finite", "log", "logistic", "map", "maximum", "minimum", "multiply"),
    *("negate", "not", "or", "popcnt", "power", "real", "reduce-precision", "remainder", "rng", "round", "rsqrt"),
    *("rng-bit-generator", "select", "sign", "sine", "sqrt", "subtract", "tan", "tanh", "xor", "fusion"),
)
_OPERATORS: dict[str, str] = {
    **{"dot": "gemm", "convolution": "conv", "reduce": "reduce", "reduce-window": "reduce", "sort": "sort"},
    **{"topk": "sort", "copy": "copy", "copy-start": "copy", "copy-done": "copy", "select-and-scatter": "memory"},
    **dict.fromkeys(("gather", "scatter", "transpose", "concatenate", "slice", "pad", "reverse"), "memory"),
    **dict.fromkeys(("broadcast", "iota", "dynamic-slice", "dynamic-update-slice", "reshape"), "memory"),
    **dict.fromkeys(_ARITHMETIC, "elementwise"),
}
"""HLO operator -> kind, for kernels named after one operator."""


def compiler_kind(base: str) -> str | None:
    """Kind of a kernel by a compiler's way of naming; None for other names.

    Inductor (torch/_inductor/codegen/triton.py): poi is pointwise, red and per reduce, tem is a template named by the
    operator it stands for; the operators behind `fused` are what was fused. XLA (hlo fusion names): `loop_` computes
    element by element whatever operators it names, `input_` is a reduction, transpose or scatter, `wrapped_` one
    operator, `gemm_fusion_dot` and `triton_softmax` what they say, a bare `fusion.12` of loops most often.
    """
    inductor = _INDUCTOR.match(base)
    if inductor is not None:
        return _inductor(inductor[1], words(inductor[2]))
    stem = _NUMBERS.sub("", base)
    if re.fullmatch(r"triton_softmax(?:_fusion)?(?:_computation)?", stem):
        return "softmax"
    if stem.replace("_", "-") in _OPERATORS:
        return _OPERATORS[stem.replace("_", "-")]
    found = _FUSION.match(stem)
    if found is None or not (found[3] or found[1] in ("loop", "input", "wrapped", "gemm", "nested_gemm")):
        return None
    return _fusion(found[1] or "", found[2])


def _inductor(form: str, operators: str) -> str:
    if form in ("poi", "for", "unk", "mix"):
        moment = re.search(r" (?:adamw?|sgd|adagrad|foreach) ", operators)
        return "optimizer" if moment else "elementwise"
    if form == "tem":
        if re.search(r" (?:attention|sdpa|flex) ", operators):
            return "attention"
        return "conv" if " convolution " in operators else "gemm"
    if re.search(r" (?:softmax|log softmax) ", operators):
        return "softmax"
    normed = re.search(r" (?:layer|rms|group|batch|instance) norm | norm ", operators)
    return "norm" if normed else "reduce"


def _fusion(emitter: str, operators: str) -> str:
    named = words(operators).split()
    if emitter.endswith("gemm") or (emitter != "loop" and {"dot", "gemm"} & set(named)):
        return "gemm"
    if "convolution" in named:
        return "conv"
    if "softmax" in named:
        return "softmax"
    if "reduce" in named:
        return "reduce"
    if "sort" in named:
        return "sort"
    moved = bool(named) and set(named) <= _MOVES
    return "memory" if moved or (emitter == "input" and set(named) & _MOVES) else "elementwise"
