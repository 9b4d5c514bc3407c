"""Trace files as bytes and text, whatever they are packed in: plain, gzip, or a zip archive of one file."""

from __future__ import annotations

import codecs
import gzip
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from neusight_jax.errors import InputError
from neusight_jax.tables import check_regular

_MARKS = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "parquet", b"SQLite format 3\x00": "sqlite"}
_BYTE_ORDERS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""A shell of Windows writes what it redirects as UTF-16."""
EXPECTED = "a trace (.json, .json.gz), a CSV or a Parquet table"
MOST_TEXT_BYTES = 256 << 20
"""Of a table of kernels, unpacked: it is read whole."""
PACKED: tuple[str, ...] = (".gz", ".zip")


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's content as a stream, unpacked by what it holds and not by its name.

    Raises: `InputError` when the file is not there, is no regular one, or what it is packed in is damaged.
    """
    check_regular(path, EXPECTED)
    try:
        with open(path, "rb", buffering=1 << 20) as file:
            kind = _kind(file.read(16))
            file.seek(0)
            if kind == "gzip":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(IO[bytes], unpacked)
            elif kind == "zip":
                with zipfile.ZipFile(file) as archive, archive.open(_member(path, archive)) as member:
                    yield member
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise InputError(f"{path}: the archive is cut off or damaged ({reason}); copy or export it again") from None


def content_kind(path: Path) -> str:
    """What a file holds once it is unpacked: "json", "parquet", "sqlite", "text" or "empty"."""
    with opened(path) as stream:
        head = stream.read(4096)
    if kind := _kind(head):
        return kind
    text = head.decode(encoding_of(head), "replace").lstrip("\ufeff \t\r\n")
    if not text:
        return "empty"
    is_row = text[0] == "[" and text[1:2].isalpha()  # of a table, such as `[CUDA memcpy],1,2`
    return "json" if text[0] in "{[" and not is_row else "text"


def encoding_of(head: bytes) -> str:
    """Encoding by a file's first bytes; UTF-8 without a byte-order mark."""
    return next((name for mark, name in _BYTE_ORDERS.items() if head.startswith(mark)), "utf-8")


def read_text(path: Path) -> str:
    """A file's whole text. `InputError` when it is not text."""
    with opened(path) as stream:
        raw = stream.read(MOST_TEXT_BYTES + 1)
    if len(raw) > MOST_TEXT_BYTES:
        raise InputError(f"{path}: more than {MOST_TEXT_BYTES:,} bytes, expected a table of at most that; cut it")
    try:
        return raw.decode(encoding_of(raw[:4]))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text (byte {error.start}); export it as UTF-8") from None


def _kind(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX")]
    if len(names) != 1:
        shown = ", ".join(names[:4]) or "nothing"
        raise InputError(f"{path}: holds {len(names)} files ({shown}), expected one trace; unpack it and give one file")
    return names[0]
