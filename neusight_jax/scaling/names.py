"""What a GPU kernel's name says: its kind, the dtype of its arithmetic, the tile of a matrix product.

All that is known of names is the table `names.yaml`, tried from the top: copies and collectives; the grammars of BLAS
libraries; those of compilers; then words of the name itself, of its namespaces, and last of its template arguments.
Words are whole: `convert` is no `conv`, the namespace `fbgemm_gpu` no `gemm`, `splitKreduce_kernel` no product.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from neusight_jax.kernels.families import OPERATORS
from neusight_jax.scaling.demangle import name_parts, words
from neusight_jax.tables import table

KINDS: tuple[str, ...] = (
    *("gemm", "conv", "attention", "moe", "elementwise", "softmax", "norm", "memory", "reduce", "sort", "optimizer"),
    *("copy", "transfer", "collective", "idle", "host", "unknown"),
)
"""Kinds of work. `memory` moves data (embeddings, gathers, transposes), `copy` does so by the copy engine; `transfer`
crosses the link to the host, `idle` launched nothing, `host` is an operator of a trace without GPU kernels."""

WORK: dict[str, str] = {
    **{"gemm": "product", "softmax": "softmax", "norm": "norm"},
    **{"elementwise": "elementwise", "optimizer": "elementwise"},
    **dict.fromkeys(("memory", "reduce", "sort", "moe"), "memory"),
}
"""Kind -> work whose size a time can be turned into (`rules`); kinds that are not here have none."""


@dataclass(frozen=True)
class KernelName:
    """What a name says.

    Attributes:
      kind: one of `KINDS`, or the name of a family from outside.
      dtype: of the arithmetic, one of `arithmetic.DTYPES` or a path this package does not have (int4); None if
        the name does not say.
      tile: output tile of a matrix product, if named.
      work: "product", "vector" (a matrix times a vector), or a row-wise family; "" = none that is known.
    """

    kind: str
    dtype: str | None = None
    tile: tuple[int, int] | None = None
    work: str = ""


class Rule(NamedTuple):
    """A row of `names.yaml`: what a pattern tells, as far as it differs from the kind's own."""

    kind: str
    pattern: re.Pattern[str]
    work: str | None = None
    dtypes: Mapping[str, str] = MappingProxyType({})


@functools.cache
def rules() -> dict[str, list[Rule]]:
    """The rows of `names.yaml` by section, words of families from outside before the others; `dtypes` has a rule for
    each dtype."""
    sections = dict(table("scaling", "names"))
    parts, words_of = sections.pop("parts"), sections.pop("dtypes")

    def compiled(section: str, pattern: str) -> re.Pattern[str]:
        for name, part in parts.items():
            pattern = pattern.replace(f"<{name}>", part)
        return re.compile(pattern if section in ("copies", "libraries", "compilers") else f" (?:{pattern})(?= )")

    found = {
        section: [Rule(kind, compiled(section, pattern), *more) for kind, pattern, *more in rows]
        for section, rows in sections.items()
    }
    own = [
        Rule(family.name, compiled("words", operator.words), family.name if operator.sized else "")
        for family, operator in OPERATORS.values()
        if operator.words
    ]
    return (
        found
        | {"words": own + found["words"]}
        | {"dtypes": [Rule(dtype, compiled("dtypes", text)) for dtype, text in words_of.items()]}
    )


_WRAPPER = re.compile(r"^(?:[kK]ernel\d?|device_kernel|kentry|globalKernel|_kernel_agent|kernel_entry|launch\w*|run)$")
"""Names of wrappers: what they run is in their template arguments."""
_NUMBERS = re.compile(r"(?:[._-](?:\d+|clone|remat))+$")


@functools.lru_cache(maxsize=65536)
def read_name(name: str) -> KernelName:
    """What a kernel's name says; kind "unknown" if nothing in it is known."""
    spaces, base, arguments = name_parts(name)
    dtype = dtype_in(base) or dtype_in(arguments)
    if found := _first("copies", name.lower()):
        return KernelName(found[0].kind)
    if found := _first("collectives", words(base)):
        return KernelName("collective", dtype)
    wrapped = re.split(r"[<,>(\s]", arguments, maxsplit=1)[0].rpartition("::")[2] if _WRAPPER.match(base) else ""
    for text in (base, wrapped):
        if found := _first("libraries", text):
            return _library(*found)
    operators = re.sub(r"[^A-Za-z0-9]+", " ", f" {_NUMBERS.sub('', base)} ")
    found = None if " " in base else _first("compilers", operators)
    if not found and not _WRAPPER.match(base):
        found = _first("words", words(base))
        if found and found[0].kind == "elementwise":
            found = _first("functors", words(arguments)) or found
    found = found or _first("namespaces", words(" ".join(spaces)))
    found = found or _first("collectives", words(arguments)) or _first("words", words(arguments))
    if not found:
        return KernelName("unknown", dtype)
    work = found[0].work
    return KernelName(found[0].kind, dtype, None, WORK.get(found[0].kind, "") if work is None else work)


def dtype_in(text: str) -> str | None:
    """The first dtype whose word is in a text; None without one."""
    spaced = words(text)
    found = [(match.start(), rule.kind) for rule in rules()["dtypes"] if (match := rule.pattern.search(spaced))]
    return min(found, key=lambda each: each[0])[1] if found else None


def _first(section: str, text: str) -> tuple[Rule, re.Match[str]] | None:
    return next(((rule, found) for rule in rules()[section] if (found := rule.pattern.search(text))), None)


def _library(rule: Rule, found: re.Match[str]) -> KernelName:
    said = found.groupdict()
    kind, dtype = rule.kind, rule.dtypes.get(said.get("dtype") or "") or dtype_in(said.get("dtype") or "")
    if "op" in said:
        kind = "gemm" if said["op"] == "gemm" and "implicit_" not in said["before"] else "conv"
        dtype = _blas_dtype(**{name: text or "" for name, text in said.items()})
    if said.get("dtype") == "MX":
        dtype = "tf32"
    rows, _, columns = (said.get("tile") or "").partition("x")
    return KernelName(kind, dtype, (int(rows), int(columns)) if rows else None, WORK.get(kind, ""))


def _blas_dtype(before: str, letter: str, mma: str, inner: str, after: str, **_: str) -> str | None:
    """Dtype of a product of cuBLAS, cuDNN or CUTLASS.

    The letter is the accumulator as in BLAS (s, d, h, c, z, i), digits behind it are the shape of the tensor-core
    instruction; without them the kernel runs on vector lanes, whatever type it stores (`sgemm_fp16`).
    """
    if letter in ("d", "z"):
        return "fp64"
    if letter == "i":
        return "int8" if dtype_in(after) != "fp4" and "_s4" not in after else "int4"
    named = dtype_in(inner) or dtype_in(after) or dtype_in(before)
    if not mma and "tensorop" not in before:
        return {"s": "fp32", "c": "fp32", "gc": "fp32", "h": "fp16"}.get(letter, named)
    turing = re.search(r"(?:^|_)(?:turing_|\w+_(?:sm)?75(?:_|$))", before)
    if named == "fp32" or (named is None and mma == "1688" and letter != "h" and not turing):
        return "tf32"  # tensor cores take fp32 operands as tf32, and from Ampere on 16x8x8 is the shape for it
    return named or "fp16"
