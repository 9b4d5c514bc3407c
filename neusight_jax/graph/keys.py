"""Keys of a config that were read: the values remember it, and the rest is named in a note.

Keys that decide neither time nor memory are in keys.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from neusight_jax.tables import table

MOST_NAMED = 12
"""So many unread keys are named in a note, the rest counted."""


class Keys(dict[str, Any]):
    """A JSON object that remembers which of its keys were read; objects inside it do so too.

    Only `[]` and `get` read: a copy, `in` and iteration do not. `sources`: objects this one was made of; what is read
    here was read there.
    """

    def __init__(self, values: Mapping[str, Any], *sources: Mapping[str, Any]) -> None:
        super().__init__({key: _remembering(value) for key, value in dict(values).items()})
        self.read: set[str] = set()
        self._sources = [source for source in (values, *sources) if isinstance(source, Keys)]

    def __getitem__(self, key: str) -> Any:
        self._mark(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
        """The value of a key, which counts as read."""
        self._mark(key)
        return super().get(key, default)

    def _mark(self, key: str) -> None:
        self.read.add(key)
        for source in self._sources:
            source._mark(key)

    def settle(self, *names: str) -> None:
        """Keys that something else decides, or another note tells of, with all that is inside them."""
        for key in names:
            value = self.get(key)
            for inside in value if isinstance(value, list) else [value]:
                if isinstance(inside, Keys):
                    inside.settle(*inside)


def keys_of(values: Mapping[str, Any]) -> Keys:
    """A mapping as `Keys`; itself where it is one."""
    return values if isinstance(values, Keys) else Keys(values)


def _remembering(value: Any) -> Any:
    if isinstance(value, Mapping):
        return keys_of({str(key): inside for key, inside in value.items()} if type(value) is dict else value)
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        return [_remembering(entry) for entry in value]
    return value


def unread(values: Keys, path: str = "") -> Iterator[str]:
    """Keys nobody read that could matter, those inside others after a dot."""
    # What is off, has no effect or is decided elsewhere would be noise in a note on what was overlooked.
    for key, value in values.items():
        name = f"{path}{key}"
        if _off(value) or _without_effect(name) or (key not in values.read and _decided(values, key)):
            continue
        # Keys inside an object matter only where the object was read; else its name says enough.
        if key not in values.read:
            yield name
            continue
        for inside in value if isinstance(value, list) else [value]:
            if isinstance(inside, Keys):
                yield from unread(inside, f"{name}.")


def _off(value: Any) -> bool:
    """Whether a value turns something off: null, false, zero, nothing in it."""
    return value is None or value == 0 or (isinstance(value, str | list | Mapping) and not value)


def unread_notes(values: Keys) -> tuple[str, ...]:
    """A note that names the keys nobody read, if there are any."""
    names = list(dict.fromkeys(unread(values)))
    if not names:
        return ()
    shown = ", ".join(name if len(name) <= 60 else f"{name[:57]}..." for name in names[:MOST_NAMED])
    rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (f"keys of the config that were not read, so they change nothing here: {shown}{rest}",)


@cache
def _without_effect(name: str) -> bool:
    """Whether a key is in the table by its last word, or with the keys around it."""
    last, rows = name.rpartition(".")[2], table("graph", "keys")
    return any(fnmatchcase(last, word) for row in rows["anywhere"] for word in row) or any(
        fnmatchcase(name, f"*{word}") for row in rows["inside"] for word in row
    )


def _decided(values: Keys, key: str) -> bool:
    """Whether keys beside a key decide what it would."""
    for row in table("graph", "keys")["decided"]:
        if any(fnmatchcase(key, word) for word in row["keys"]):
            # `dict.get`, as `Keys.get` would mark the keys as read.
            by, same = row.get("by", ()), row.get("same_as", ())
            if any(word in values.read and dict.get(values, word) is not None for word in by):
                return True
            if any(dict.get(values, word) == dict.get(values, key) for word in same):
                return True
    return False
