"""Names: what Hugging Face calls the modules behind our nodes, and the patterns in which configs name modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from neusight_jax.errors import InputError
from neusight_jax.tables import table

Aliases = tuple[str, ...]
"""One module under the names it may have: that of its own, and those of modules fused with others."""

_TABLE = table("graph.quantization", "modules")


def known_node(node: str) -> bool:
    """Whether the table has the modules of a node."""
    return node in _TABLE["parts"] or node in _TABLE["whole"]


def modules_of(node: str, model_type: str, layer: int) -> tuple[Aliases, ...]:
    """Modules that a node runs as one, each with its names, from `layers.` on.

    A node that the table does not have is looked for under its own last name.
    """
    if node in _TABLE["whole"]:
        return (tuple(_TABLE["whole"][node]),)
    part = _TABLE["parts"].get(node) or {"around": node.split(".")[0], "own": [[node.split(".")[-1]]]}
    modules = part["own"][node == "mlp.experts" and model_type in _TABLE["ungated"] :]
    parents = {**_TABLE["parents"], **_TABLE["parents_of"].get(model_type, {})}.get(part["around"], [part["around"]])
    stems = [f"layers.{layer}.{parent}".rstrip(".") for parent in parents]
    fused = part.get("fused", [])
    return tuple(
        tuple(f"{stem}.{name}".rstrip(".") for stem in stems for name in (*names, *fused)) for names in modules
    )


@dataclass(frozen=True)
class Names:
    """Module names as a config gives them: names, names with `*`, and regular expressions.

    A name means a module, the modules in it, and every module that ends in it: "gate" is `layers.0.mlp.gate` and not
    `layers.0.mlp.gate_proj`. Regular expressions start at the name's beginning, with any of the prefixes before it.
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
        # Whoever wrote the expression saw full names, which begin with one of the prefixes.
        full = (prefix + name for name in aliases for prefix in _TABLE["prefixes"])
        return self.regular is not None and any(self.regular.match(name) for name in full)


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return (".".join(parts[start:end]) for end in ends for start in range(end))


def names(patterns: Iterable[str], where: str, regular: bool = False) -> Names:
    """`Names` from a list of a config.

    Args:
      where: the list, for errors; regular: whether all of them are regular expressions, not only those after "re:".
    Raises: `InputError` for a regular expression that is none.
    """
    exact: set[str] = set()
    globs: list[str] = []
    expressions: list[str] = []
    for text in patterns:
        if regular or text.startswith("re:") or set(text) & set("\\^$(|[+"):
            expressions.append(text.removeprefix("re:"))
        elif "*" in text or "?" in text:
            globs.append(_glob(_bare(text)))
        else:
            exact.add(_bare(text).strip("."))
    return Names(frozenset(exact - {""}), _either(globs, where), _either(expressions, where))


def _bare(text: str) -> str:
    return text.removeprefix(max((prefix for prefix in _TABLE["prefixes"] if text.startswith(prefix)), key=len))


def _glob(text: str) -> str:
    body = "".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in text.rstrip("."))
    return rf"(?:^|\.){body}(?:$|\.)"


def _either(texts: Sequence[str], where: str) -> re.Pattern[str] | None:
    # One by one first, so that the error names the pattern that is wrong.
    for text in texts:
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise InputError(f"{where}: {text!r} is no regular expression ({error})") from None
    try:
        return re.compile("|".join(f"(?:{text})" for text in dict.fromkeys(texts))) if texts else None
    except re.error as error:  # e.g. named groups of two of them
        raise InputError(f"{where}: its regular expressions do not go together ({error})") from None
