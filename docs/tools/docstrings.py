"""Docstrings as Markdown: `Args: a: ...; b: ...` becomes a list, `Returns:` and `Raises:` stand out."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Reference|Example|Note|Yields)\s*:\s*(.*)$")
NAME = re.compile(r"(^|(?<=[.;] ))([a-z_]\w*(?:, \w+)*): ")


def markdown(text: str) -> str:
    """The docstring with its sections as lists and bold words."""
    lines: list[str] = []
    inside = ""
    for line in text.splitlines():
        found = SECTION.match(line)
        if found:
            inside = found.group(1)
            named = f"**{inside}:** {found.group(2)}".rstrip()
            lines += ["", named, *([""] if inside in ("Args", "Attributes") else [])]
        elif inside in ("Args", "Attributes") and line.strip():
            starts = re.match(r"^\s{2}\w", line) is not None
            item = NAME.sub(lambda m: f"{m.group(1)}`{m.group(2)}`: ", line.strip())
            lines.append(f"- {item}" if starts else f"  {item}")
        else:
            inside = inside if line.startswith("  ") or not line.strip() else ""
            lines.append(line.strip() if inside else line)
    return "\n".join(lines)


class Sections(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every object."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
