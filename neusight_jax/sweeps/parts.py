"""The rows of an unfinished sweep: a hidden folder of whole files beside the output, merged when all are there."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from neusight_jax.errors import InputError
from neusight_jax.files import remove_folder, write_atomically, write_text_atomically
from neusight_jax.records import json_text

METADATA = "neusight_jax.sweep"
"""Key of a sweep's output under which it says what it is of."""
_ASKED = "sweep.json"
_NAME = re.compile(r"rows-(\d+)-(\d+)\.parquet")


def _folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.parts")


def kept_rows(output: Path) -> str:
    """Note on what an interrupted sweep left to go on with; "" for nothing."""
    if output.exists() or not (_folder(output) / _ASKED).is_file():
        return ""
    return f"the rows so far are kept beside {output}: the same command with --resume goes on"


class Parts:
    """Folder `.NAME.parts` beside `NAME`: `sweep.json` says what was asked, `rows-START-STOP.parquet` what is done.

    Every file is written beside and renamed, so a killed sweep leaves whole files only.
    """

    def __init__(self, output: Path, request: Mapping[str, Any]) -> None:
        self.output = output
        self.folder = _folder(output)
        self.asked = json.loads(json.dumps(request))

    def complete(self, resume: bool) -> bool:
        """Whether the output is there, of what was asked: a process that was killed may have come so far.

        Raises: `InputError` when an output is in the way.
        """
        import pyarrow.parquet as pq

        if not self.output.exists():
            return False
        try:
            written = json.loads((pq.read_schema(self.output).metadata or {})[METADATA.encode()]) if resume else {}
        except (OSError, KeyError, ValueError):  # ArrowInvalid is a ValueError
            written = {}
        request = json.loads(json_text(self.asked))
        if not written or any(written.get(key) != value for key, value in request.items()):
            raise InputError(f"output {self.output} exists; remove it or give another --output")
        return True

    def open(self, resume: bool) -> None:
        """Start, or go on with what was asked before.

        Raises: `InputError` when there is an unfinished sweep and `resume` is False, or it was asked something else, or
          there is nothing to resume.
        """
        path = self.folder / _ASKED
        if not path.is_file():
            if resume and not self.output.exists():
                raise InputError(f"nothing to resume: {self.folder} is missing; run without --resume")
            return
        if not resume:
            raise InputError(f"{self.folder} holds an unfinished sweep; go on with --resume, or remove the folder")
        before = json.loads(path.read_text(encoding="utf-8"))
        for key in {**before, **self.asked}:
            if before.get(key) != self.asked.get(key):
                raise InputError(
                    f"{path}: {key} differs from this sweep; repeat the first command, or remove the folder"
                )

    def spans(self) -> list[tuple[int, int]]:
        """Row spans [start, stop) that are on disk, in order."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.glob("rows-*.parquet"))
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    def path(self, start: int, stop: int) -> Path:
        """Where the rows of a span go."""
        return self.folder / f"rows-{start:012d}-{stop:012d}.parquet"

    def missing(self, chunks: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each chunk [start, stop) lacks rows on disk."""
        spans, out = self.spans(), []
        for start, stop in chunks:
            reached = start
            # The span before the chunk may reach into it.
            for low, high in spans[max(bisect_right(spans, (start, 0)) - 1, 0) :]:
                if low > reached or reached >= stop:
                    break
                reached = max(reached, high)
            out.append(reached < stop)
        return out

    def clear(self, chunks: Sequence[tuple[int, int]], shares: Collection[tuple[int, int]] = ()) -> None:
        """Remove what there is of chunks that are not complete, but whole shares of processes."""
        for low, high in self.spans():
            if (low, high) in shares:
                continue
            place = bisect_right(chunks, (low, high)) - 1
            if any(low < stop and high > start for start, stop in chunks[max(place, 0) : place + 2]):
                self.path(low, high).unlink(missing_ok=True)

    def write(self, start: int, stop: int, table: Any) -> None:
        """Write the rows of a span, whole or not at all; with the first ones, what was asked."""
        import pyarrow.parquet as pq

        if not (self.folder / _ASKED).is_file():
            write_text_atomically(self.folder / _ASKED, json.dumps(self.asked, indent=1))
        write_atomically(self.path(start, stop), lambda path: pq.write_table(table, path, compression="zstd"))

    def merge(self, rows: int, metadata: Mapping[str, str]) -> None:
        """Stream all parts, in order, into the output and remove them.

        Raises: `InputError` unless they hold every row exactly once.
        """
        import pyarrow.parquet as pq

        spans, reached = self.spans(), 0
        for start, stop in spans:
            if start != reached:
                raise InputError(f"{self.folder}: rows {reached} to {start} are missing or repeated; run it again")
            reached = stop
        if reached != rows:
            raise InputError(f"{self.folder}: rows {reached} to {rows} are missing; go on with --resume")

        def write(path: Path) -> None:
            schema = pq.read_schema(self.path(*spans[0])).with_metadata(dict(metadata))
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for span in spans:
                    writer.write_table(pq.read_table(self.path(*span)).replace_schema_metadata(dict(metadata)))

        write_atomically(self.output, write)
        self.remove()

    def remove(self) -> None:
        """Remove what is beside the output."""
        remove_folder(self.folder)
