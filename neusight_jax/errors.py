"""Errors a user can act on: one line that says what was wrong, what was expected and how to mend it."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable

BAD_INPUT = 2
"""Exit code of a program that was given something it cannot use."""
MOST_ECHOED = 200
"""Characters of a user's input that a message repeats at most."""
MOST_SHOWN = 1000
"""Characters of a message at most."""
_ECHOES = tuple(re.compile(form) for form in (r"(?<!\w)'[^']*'", r'"[^"]*"', r"\[.*\]", r"\{.*\}", r"\S+"))
"""Stretches of a message that may be a user's input: quoted, a list, a mapping, a word."""


class InputError(ValueError):
    """Bad input. The message is one line; the command line prints it and leaves with exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """A message as it is printed: one line, printable, and long input in it cut."""
    line = printable(" ".join(message[: 100 * MOST_SHOWN].split()))
    for form in _ECHOES:
        line = form.sub(lambda stretch: _cut(stretch[0], MOST_ECHOED), line)
    return _cut(line, MOST_SHOWN)


def printable(text: str) -> str:
    """Text without control characters, lone surrogates and marks that turn its direction: ? in place of each."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else " " if mark.isspace() else "?" for mark in text)


def _cut(text: str, most: int) -> str:
    """Text without its middle, where it is longer than so many characters."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def require_fields(owner: str, choices: Iterable[str], names: Iterable[str]) -> None:
    """`InputError` for the first name that an owner such as "a GPU" has no field of."""
    fields = tuple(choices)
    for name in names:
        if name not in fields:
            raise InputError(f"{owner} has no field {name!r}; expected one of {', '.join(fields)}")


def unknown_name(kind: str, name: str, choices: Iterable[str], hint: str = "") -> InputError:
    """An `InputError` for a name that is not in a list, offering the nearest names.

    Args:
      kind: what the name should be, e.g. "GPU".
      name: what was given.
      choices: the valid names (aliases welcome).
      hint: how to list all of them or to give something else, e.g. "`neusight-jax gpus` lists all".
    """
    folded = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.4)
    nearest = ", ".join(folded[key] for key in near) if near else ", ".join(sorted(folded.values())[:8])
    word = "nearest" if near else "expected one of"
    tail = f"; {hint}" if hint else ""
    return InputError(f"unknown {kind} {name!r}; {word}: {nearest}{tail}")


def run_script(main: Callable[[], None]) -> None:
    """Run what a module does as a program (`python -m ...`); bad input is one line on stderr and exit code 2."""
    try:
        main()
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(BAD_INPUT)
