"""Meaning of a GPU kernel's name: its kind, the dtype of its arithmetic, the tile of a matrix product.

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
from neusight_jax.tables import table

# Parts of a kernel's name: namespaces, the name itself, template arguments; and the words of each.
#
# Names come demangled (`void at::native::foo<float>(int)`), mangled (`_ZN2at6native3fooIfEEvi`), cut off, or are plain
# words (`loop_add_fusion`, `Memcpy HtoD (Pinned -> Device)`).

_ANONYMOUS = re.compile(r"\(anonymous namespace\)|\(anonymous\)|\{anonymous\}|<unnamed>")
_CLONE = re.compile(r"\s*\[clone [^\]]*\]|\.(?:kd|intern|constprop|isra|part)(?:\.\d+)*$")
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_TYPED = re.compile(r"^(bf16|fp16|f16|fp8|f8|fp4|f4|int8|i8)(gemm)$")
_QUALIFIED, _LENGTH = re.compile(r"[KVrOL]*(\d{1,4})"), re.compile(r"(\d{1,4})")
_BUILTIN = {"f": "float", "d": "double", "a": "signed char", "i": "int", "l": "long", "b": "bool", "v": "void"}
"""Letters of the Itanium C++ ABI for built-in types, as far as a dtype can be told by them."""


class NameParts(NamedTuple):
    """A kernel's name taken apart.

    Attributes:
      spaces: namespaces and classes around it, outermost first, as written.
      base: the name itself, as written; arguments: text of the template arguments.
    """

    spaces: tuple[str, ...]
    base: str
    arguments: str = ""


def words(text: str) -> str:
    """Words of a name in lower case, one blank around each: `LayerNormForward_v2` is " layer norm forward v2 ".

    Cut at everything that is no letter or digit, and where a capital begins a word.
    """
    spaced = " ".join(_TYPED.sub(r"\1 \2", part.lower()) for part in _WORD.findall(text))
    return f" {spaced} "


def name_parts(name: str) -> NameParts:
    """A name taken apart; anything can be given, and what has no such parts is all `base`."""
    plain = name.strip()
    if plain.startswith("_Z") and (parts := _mangled(plain)) is not None:
        return parts
    plain = _CLONE.sub("", _ANONYMOUS.sub("anonymous", plain))
    outside, inside, depth = "", "", 0
    # Template arguments are kept apart, as their words say less than those of the name itself.
    for at, letter in enumerate(plain):
        if letter == "(" and not depth and at and not plain[at - 1].isspace():
            return _parts(plain, plain[:at], outside, inside)  # what follows are the function's parameters
        if letter in ">)]}" and plain[at - 1 : at] != "-":
            depth = max(depth - 1, 0)
        if depth:
            inside += letter
        elif letter not in "<([{>)]}":
            outside += letter
            inside = "" if letter.isspace() else inside
        depth += letter in "<([{"
    return _parts(plain, plain, outside, inside)


def _parts(plain: str, qualified: str, outside: str, inside: str) -> NameParts:
    """Parts of a name by what stands outside and inside of its template brackets; words that are no C++ are a base."""
    pieces = outside.split()
    is_text = len(pieces) > 1 and not re.search("::|<", qualified) and pieces[0] not in ("void", "auto")
    path = [] if is_text or not pieces else [part for part in pieces[-1].split("::") if part]
    return NameParts(tuple(path[:-1]), path[-1], inside) if path else NameParts((), plain)


def _mangled(name: str) -> NameParts | None:
    """Identifiers of a name mangled by the Itanium C++ ABI: those before the template arguments, and the words in
    them. Not a whole demangler: substitutions (`S_`, `T_`) and literals are passed over. None if it is no such name.
    """
    at, path, inside = 3 if name.startswith("_ZN") else 2, list[str](), list[str]()
    while name[at : at + 1] not in ("I", "E") and (length := _QUALIFIED.match(name, at)):
        at = length.end() + int(length[1])
        path.append("anonymous" if name.startswith("_GLOBAL__N", length.end()) else name[length.end() : at])
    if not path or at > len(name):
        return None
    end = len(name) if name[at : at + 1] == "I" else at
    # Literals say nothing of a kernel; types may be all that tells its dtype, built-in ones by a single letter.
    while at < end:
        length = _LENGTH.match(name, at)
        if name[at] == "L":  # a literal, such as Li4E
            ended = name.find("E", at)
            at = ended if ended > 0 and not name.startswith("_Z", at + 1) else at
        elif length and int(length[1]) <= len(name) - at:
            at = length.end() + max(int(length[1]), 1) - 1
            inside.append(name[length.end() : at + 1])
        else:
            inside.append(_BUILTIN.get(name[at], ""))
        at += 1
    return NameParts(tuple(path[:-1]), path[-1], " ".join(filter(None, inside)))


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
    """Meaning of a kernel's name.

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

    by_section = {
        section: [Rule(kind, compiled(section, pattern), *more) for kind, pattern, *more in rows]
        for section, rows in sections.items()
    }
    family_rules = [
        Rule(family.name, compiled("words", operator.words), family.name if operator.sized else "")
        for family, operator in OPERATORS.values()
        if operator.words
    ]
    return (
        by_section
        | {"words": family_rules + by_section["words"]}
        | {"dtypes": [Rule(dtype, compiled("dtypes", text)) for dtype, text in words_of.items()]}
    )


_WRAPPER = re.compile(r"^(?:[kK]ernel\d?|device_kernel|kentry|globalKernel|_kernel_agent|kernel_entry|launch\w*|run)$")
"""Names of wrappers: what they run is in their template arguments."""
_NUMBERS = re.compile(r"(?:[._-](?:\d+|clone|remat))+$")


@functools.lru_cache(maxsize=65536)
def read_name(name: str) -> KernelName:
    """Meaning of a kernel's name; kind "unknown" if nothing in it is known."""
    spaces, base, arguments = name_parts(name)
    dtype = dtype_in(base) or dtype_in(arguments)
    if hit := _first("copies", name.lower()):
        return KernelName(hit[0].kind)
    if hit := _first("collectives", words(base)):
        return KernelName("collective", dtype)
    wrapped = re.split(r"[<,>(\s]", arguments, maxsplit=1)[0].rpartition("::")[2] if _WRAPPER.match(base) else ""
    # From the surest to the least sure: libraries name kernels by a grammar, most others by words.
    for text in (base, wrapped):
        if hit := _first("libraries", text):
            return _library(*hit)
    operators = re.sub(r"[^A-Za-z0-9]+", " ", f" {_NUMBERS.sub('', base)} ")
    hit = None if " " in base else _first("compilers", operators)
    if not hit and not _WRAPPER.match(base):
        hit = _first("words", words(base))
        if hit and hit[0].kind == "elementwise":
            hit = _first("functors", words(arguments)) or hit
    hit = hit or _first("namespaces", words(" ".join(spaces)))
    hit = hit or _first("collectives", words(arguments)) or _first("words", words(arguments))
    if not hit:
        return KernelName("unknown", dtype)
    work = hit[0].work
    return KernelName(hit[0].kind, dtype, None, WORK.get(hit[0].kind, "") if work is None else work)


def dtype_in(text: str) -> str | None:
    """The first dtype whose word is in a text; None without one."""
    spaced = words(text)
    hits = [(match.start(), rule.kind) for rule in rules()["dtypes"] if (match := rule.pattern.search(spaced))]
    return min(hits, key=lambda hit: hit[0])[1] if hits else None


def _first(section: str, text: str) -> tuple[Rule, re.Match[str]] | None:
    return next(((rule, match) for rule in rules()[section] if (match := rule.pattern.search(text))), None)


def _library(rule: Rule, match: re.Match[str]) -> KernelName:
    groups = match.groupdict()
    kind, dtype = rule.kind, rule.dtypes.get(groups.get("dtype") or "") or dtype_in(groups.get("dtype") or "")
    if "op" in groups:
        kind = "gemm" if groups["op"] == "gemm" and "implicit_" not in groups["before"] else "conv"
        dtype = _blas_dtype(**{name: text or "" for name, text in groups.items()})
    if groups.get("dtype") == "MX":
        dtype = "tf32"
    rows, _, columns = (groups.get("tile") or "").partition("x")
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
    dtype = dtype_in(inner) or dtype_in(after) or dtype_in(before)
    if not mma and "tensorop" not in before:
        return {"s": "fp32", "c": "fp32", "gc": "fp32", "h": "fp16"}.get(letter, dtype)
    turing = re.search(r"(?:^|_)(?:turing_|\w+_(?:sm)?75(?:_|$))", before)
    if dtype == "fp32" or (dtype is None and mma == "1688" and letter != "h" and not turing):
        return "tf32"  # tensor cores take fp32 operands as tf32, and from Ampere on 16x8x8 is the shape for it
    return dtype or "fp16"
