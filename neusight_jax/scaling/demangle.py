"""Parts of a kernel's name: namespaces, the name itself, template arguments; and the words of each.

Names come demangled (`void at::native::foo<float>(int)`), mangled (`_ZN2at6native3fooIfEEvi`), cut off, or are plain
words (`loop_add_fusion`, `Memcpy HtoD (Pinned -> Device)`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
    found = " ".join(_TYPED.sub(r"\1 \2", part.lower()) for part in _WORD.findall(text))
    return f" {found} "


def name_parts(name: str) -> NameParts:
    """A name taken apart; anything can be given, and what has no such parts is all `base`."""
    plain = name.strip()
    if plain.startswith("_Z") and (found := _mangled(plain)) is not None:
        return found
    plain = _CLONE.sub("", _ANONYMOUS.sub("anonymous", plain))
    outside, inside, depth = "", "", 0
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
