"""What a run has done so far, one line per kernel, so that it can be killed at any moment and go on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.files import remove_folder, write_text_atomically
from neusight_jax.profiling.case import Case

_ASKED, _LINES = "run.json", "rows.jsonl"


def kept_kernels(output: Path) -> str:
    """What an interrupted run left to go on with, in words; "" for nothing."""
    if not (_folder(output) / _LINES).is_file():
        return ""
    return "what was measured is kept: the same command with --resume goes on"


def _folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.profile")


class Journal:
    """A folder `.NAME.profile` beside the output: what was asked, the plan, and a line of JSON for every kernel done.

    A line is appended in one write and is on disk before the next kernel starts; the end of a line that was cut off is
    dropped when the run goes on, so that kernel is measured again.
    """

    def __init__(self, output: Path) -> None:
        self.folder = _folder(output)
        self._asked, self._lines = self.folder / _ASKED, self.folder / _LINES
        self._begun = ""

    def begin(self, asked: Mapping[str, Any], cases: Sequence[Case]) -> None:
        """Forget an earlier run; what this one is to do is kept with its first kernel."""
        self.discard()
        self._begun = json.dumps({"asked": dict(asked), "plan": [vars(case) for case in cases]})

    def resume(self, asked: Mapping[str, Any]) -> tuple[list[Case], list[dict[str, Any]]]:
        """The plan, and what is done of it.

        Raises: `InputError` when there is nothing to go on with, or it was another run.
        """
        if not self._asked.is_file():
            raise InputError(f"nothing to resume: {self.folder} is missing; run without --resume")
        kept = json.loads(self._asked.read_text(encoding="utf-8"))
        for name, value in json.loads(json.dumps(dict(asked))).items():
            if kept["asked"].get(name) != value:
                raise InputError(
                    f"{self.folder} is of a run with {name} {kept['asked'].get(name)!r}, this one has {value!r}; "
                    "repeat what was asked then, or start afresh without --resume"
                )
        plan = kept["plan"]
        return [
            Case(each["op"], tuple((name, size) for name, size in each["dims"]), each["dtype"]) for each in plan
        ], self._entries()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one kernel; `entry` needs `key`."""
        if not self._asked.is_file():
            write_text_atomically(self._asked, self._begun)
        with self._lines.open("ab", buffering=0) as lines:
            lines.write((json.dumps(dict(entry)) + "\n").encode())
            os.fsync(lines)

    def discard(self) -> None:
        """Forget the run."""
        remove_folder(self.folder)

    def _entries(self) -> list[dict[str, Any]]:
        if not self._lines.is_file():
            return []
        content = self._lines.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._lines, len(whole))
        entries: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(whole.splitlines()):
            try:
                entry = json.loads(line)
                entries.setdefault(entry["key"], entry)
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{self._lines}: line {number + 1} is damaged; remove that line to measure its kernel again"
                ) from None
        return list(entries.values())
