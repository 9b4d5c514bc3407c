"""Parts of a kernel's name: namespaces, the name itself, template arguments and parameters; each as lower-case words.

Names come demangled (`void at::native::foo<float>(int)`), mangled (`_ZN2at6native3fooIfEEvi`), cut off, or are plain
words (`loop_add_fusion`, `Memcpy HtoD (Pinned -> Device)`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ANONYMOUS = re.compile(r"\(anonymous namespace\)|\(anonymous\)|\{anonymous\}|<unnamed>")
_CLONE = re.compile(r"\s*\[clone [^\]]*\]|\.(?:kd|intern|constprop|isra|part)(?:\.\d+)*$")
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_QUALIFIED, _LENGTH = re.compile(r"[KVrOL]*(\d{1,4})"), re.compile(r"\d{1,4}")
_TYPED = re.compile(r"^(bf16|fp16|f16|fp8|f8|fp4|f4|int8|i8)(gemm)$")
_OPEN, _CLOSE = "<([{", ">)]}"
_BUILTIN = {"f": "float", "d": "double", "a": "signed char", "i": "int", "l": "long", "b": "bool", "v": "void"}
"""Letters of the Itanium C++ ABI for built-in types, as far as a dtype can be told by them."""


@dataclass(frozen=True)
class NameParts:
    """A kernel's name taken apart.

    Attributes:
      spaces: namespaces and classes around it, outermost first, as written.
      base: the name itself, as written.
      arguments: text of the template arguments; parameters: text of the function's parameters.
    """

    spaces: tuple[str, ...]
    base: str
    arguments: str = ""
    parameters: str = ""


def words(text: str) -> str:
    """Words of a name in lower case, one blank around each: `LayerNormForward_v2` is " layer norm forward v2 ".

    Cut at everything that is no letter or digit, and where a capital begins a word.
    """
    found = " ".join(_TYPED.sub(r"\1 \2", part.lower()) for part in _WORD.findall(text))
    return f" {found} "


def name_parts(name: str) -> NameParts:
    """A name taken apart; anything can be given, and what has no such parts is all `base`."""
    plain = name.strip()
    if plain.startswith(("_ZN", "_Z")) and (found := _mangled(plain)) is not None:
        return found
    plain = _CLONE.sub("", _ANONYMOUS.sub("anonymous", plain))
    qualified, parameters = _before_parameters(plain)
    pieces = _split(qualified, " ")
    path = _split(pieces[-1] if pieces else "", "::")
    if len(pieces) > 1 and "::" not in qualified and "<" not in qualified and pieces[0] not in ("void", "auto"):
        return NameParts((), plain)  # words, not C++
    if not path:
        return NameParts((), plain)
    base, _, arguments = path[-1].partition("<")
    around = tuple(part.partition("<")[0] for part in path[:-1])
    outer = "".join(part.partition("<")[2] for part in path[:-1])
    return NameParts(around, base, f"{outer} {arguments}".strip(), parameters)


def _before_parameters(text: str) -> tuple[str, str]:
    """What stands before the first bracket outside of template arguments, and the rest."""
    depth = 0
    for at, letter in enumerate(text):
        if letter == "(" and depth == 0 and at and not text[at - 1].isspace():
            return text[:at], text[at:]
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE and not (letter == ">" and text[at - 1] == "-"):
            depth = max(depth - 1, 0)
    return text, ""


def _split(text: str, mark: str) -> list[str]:
    """Parts of a text between marks that are outside of all brackets; empty parts are left out."""
    parts, depth, begin, at = [], 0, 0, 0
    while at < len(text):
        if depth == 0 and text.startswith(mark, at):
            parts.append(text[begin:at])
            at += len(mark)
            begin = at
            continue
        depth += text[at] in _OPEN
        if text[at] in _CLOSE:
            depth = max(depth - 1, 0)
        at += 1
    return [part for part in (*parts, text[begin:]) if part.strip()]


def _mangled(name: str) -> NameParts | None:
    """Identifiers of a name mangled by the Itanium C++ ABI: those before the template arguments, and the words in
    them. Not a whole demangler: substitutions (`S_`, `T_`) and literals are passed over. None if it is no such name.
    """
    at, identifiers = (3, []) if name.startswith("_ZN") else (2, [])
    while (length := _QUALIFIED.match(name, at)) is not None:
        at = length.end()
        identifiers.append(name[at : at + int(length[1])])
        at += int(length[1])
        if at < len(name) and name[at] in "IE":
            break
    identifiers = ["anonymous" if part.startswith("_GLOBAL__N") else part for part in identifiers]
    if not identifiers or at > len(name):
        return None
    inside: list[str] = []
    template = at < len(name) and name[at] == "I"
    while at < len(name):
        length = _LENGTH.match(name, at)
        if name[at] == "L":  # a literal, such as Li4E
            ended = name.find("E", at)
            at = ended + 1 if ended > 0 and not name.startswith("_Z", at + 1) else at + 1
        elif length is not None and int(length[0]) <= len(name) - at:
            begin = length.end()
            inside.append(name[begin : begin + int(length[0])])
            at = begin + max(int(length[0]), 1)
        else:
            inside.append(_BUILTIN.get(name[at], ""))
            at += 1
    arguments = " ".join(part for part in inside if part) if template else ""
    return NameParts(tuple(identifiers[:-1]), identifiers[-1], arguments)
