"""Files as they are read: bytes, text, JSON and YAML of users, checked on the way in, and tables beside the code."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from neusight_jax.errors import InputError, printable

MOST_BYTES = 64 << 20
"""Of a description: GPU, cluster, config, prices, card. Real ones have kilobytes."""
MOST_NESTED = 100
"""Lists and mappings inside one another. Real files have under ten."""
_KINDS = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}


class Yaml(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML that also reads `3.35e12` as a number, which YAML 1.1 takes for text, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; `InputError` naming the key that it has twice."""
        merge = "tag:yaml.org,2002:merge"
        refuse_twice(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != merge)
        content: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return content


Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


@cache
def table(package: str, name: str) -> dict[str, Any]:
    """Content of `name.yaml` of a package below `neusight_jax` (such as "datasets"); not to be changed."""
    text = resources.files(f"neusight_jax.{package}").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.load(text, Loader=Yaml)
    return content


def check_regular(path: Path, expected: str, most_bytes: int | None = None) -> None:
    """`InputError` unless a path is a regular file: devices and pipes may never end. `expected`: what it should be."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected {expected}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({_reason(error)}); expected {expected}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS.items() if is_kind(status.st_mode)), "no regular file")
        raise InputError(f"{path} is {kind}, expected {expected}")
    if os.path.realpath(path).startswith(("/proc/", "/sys/")):  # regular by name, and some never end
        raise InputError(f"{path} is a file of the operating system, expected {expected}")
    if most_bytes is not None and status.st_size > most_bytes:
        raise InputError(f"{path}: {status.st_size:,} bytes, expected {expected} of at most {most_bytes:,} bytes")


def read_bytes(path: Path, expected: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Content of a regular file; `InputError` for anything else, and for one of more than `most_bytes`."""
    check_regular(path, expected, most_bytes)
    try:
        with open(path, "rb") as file:
            content = file.read(most_bytes + 1)  # it may have grown
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({_reason(error)}); expected {expected}") from None
    if len(content) > most_bytes:
        raise InputError(f"{path}: more than {most_bytes:,} bytes, expected {expected} of at most that")
    return content


def read_text(path: Path, expected: str, most_bytes: int = MOST_BYTES) -> str:
    """Text of a regular file in UTF-8, with a byte-order mark or without."""
    try:
        return read_bytes(path, expected, most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text (byte {error.start}); expected {expected}; save it as UTF-8"
        ) from None


def read_content(path: Path, expected: str) -> Any:
    """Content of a user's file: JSON by its suffix, else YAML.

    Raises: `InputError` for bad syntax, a key given twice, aliases, or values nested deeper than `MOST_NESTED`.
    """
    is_json = path.suffix.lower() == ".json"
    return parse_content(read_text(path, expected), str(path), expected, is_json=is_json)


def parse_content(text: str, where: str, expected: str, *, is_json: bool = True) -> Any:
    """Parse a text in JSON or YAML; `InputError` as `read_content`.

    Names are made printable, and whole numbers that no float holds are infinite, so that checks of ranges refuse them.

    Args:
      where: file or other place the text is from; opens every message.
      expected: what the text should have been, for messages.
      is_json: JSON, else YAML.
    """
    form = "JSON" if is_json else "YAML"
    try:
        return _checked(json.loads(text, object_pairs_hook=_mapping) if is_json else _yaml(text), MOST_NESTED)
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; expected {expected}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except Exception as error:  # YAML's tags raise what they like: `!!int ""` is an IndexError
        raise InputError(f"{where}: not {form}: {_syntax(error)}; expected {expected}; mend the syntax") from None


def _yaml(text: str) -> Any:
    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=Yaml)):
        raise InputError("has a YAML alias (*name), expected every value written out; a few of them make billions")
    return yaml.load(text, Loader=Yaml)


def _checked(value: Any, levels: int) -> Any:
    """A value with printable text, and no number that overflows."""
    if levels == 0:
        raise RecursionError
    if isinstance(value, dict):
        return {_checked(key, levels - 1): _checked(entry, levels - 1) for key, entry in value.items()}
    if isinstance(value, list):
        return [_checked(entry, levels - 1) for entry in value]
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int) and abs(value).bit_length() > 1023:
        return math.inf if value > 0 else -math.inf
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    refuse_twice(key for key, _ in pairs)
    return dict(pairs)


def refuse_twice(keys: Iterable[str]) -> None:
    """`InputError` naming the first key that is there twice."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            raise InputError(f"{key!r} is given twice, expected once; remove one of them")
        seen.add(key)


def _syntax(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}"
    mark = getattr(error, "problem_mark", None)
    where = f" at line {mark.line + 1}" if mark is not None else ""
    return f"{getattr(error, 'problem', error) or type(error).__name__}{where}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
