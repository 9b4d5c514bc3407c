"""Chrome traces read as a stream: one event at a time, whatever the size of the file.

The values are decoded by the standard library, so any JSON is taken that Python takes: whole numbers of any size, NaN
and Infinity, lone surrogates; and `nan` and `inf` as C++ prints them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from neusight_jax.errors import InputError
from neusight_jax.scaling.trace_file import encoding_of, opened

CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n\ufeff]*")
_PRINTED_BY_C = re.compile(r"-?(?:nan|inf(?:inity)?)(?:\([^)]*\))?(?![\w.])")
_DECODE = json.JSONDecoder(strict=False).raw_decode
_DECODE_LONG = json.JSONDecoder(strict=False, parse_int=float).raw_decode
"""For whole numbers of more digits than Python turns into an `int` (4300)."""


class _NotJson(Exception):
    """What is wrong, in a few words."""


class _Values:
    """JSON values of a stream, one after another; holds what is not yet decoded of the text."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.text, self.at, self.ended = stream, "", 0, False
        self.damaged = False
        first = stream.read(CHUNK)
        self.decoder = codecs.getincrementaldecoder(encoding_of(first[:4]))("replace")
        self._take(first)

    def _take(self, chunk: bytes) -> None:
        self.ended = not chunk
        text = self.decoder.decode(chunk, final=self.ended)
        self.damaged |= "\ufffd" in text and "\ufffd".encode() not in chunk
        self.text, self.at = self.text[self.at :] + text, 0

    def more(self) -> bool:
        """Read on; False at the end of the file. Doubles what is held, so that long values cost no square."""
        if not self.ended:
            self._take(self.stream.read(max(CHUNK, len(self.text) - self.at)))
        return not self.ended

    def next(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def skip(self, expected: str) -> str:
        """The next character, passed over; it has to be one of those expected."""
        found = self.next()
        if not found:
            raise _NotJson("cut off")
        if found not in expected:
            raise _NotJson(f"expected {' or '.join(expected)}, found {found!r}")
        self.at += 1
        return found

    def value(self) -> Any:
        """The next value, whole."""
        self.next()
        while True:
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                printed = _PRINTED_BY_C.match(self.text, error.pos)
                if printed:
                    self.text = f"{self.text[: error.pos]}NaN{self.text[printed.end() :]}"
                elif not (self._cut(error) and self.more()):
                    cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text.rstrip())
                    raise _NotJson("cut off" if cut else error.msg) from None
                continue
            if end == len(self.text) and self.more():  # a number may go on
                continue
            self.at = end
            return value

    def _decoded(self) -> tuple[Any, int]:
        try:
            return _DECODE(self.text, self.at)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return _DECODE_LONG(self.text, self.at)
        except RecursionError:
            raise _NotJson("nested too deep") from None

    def _cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the text held ends within the value: in a string, or so near its end that a word may go on."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 16


def read_events(path: Path, header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace one by one, from an object with `traceEvents` or a bare list.

    Args:
      header: filled with what else the object holds, as it is met; `"not UTF-8"` is added where bytes were replaced.
    Raises: `InputError` for a file that is not there, no JSON, cut off, or without events.
    """
    with opened(path) as stream:
        values = _Values(stream)
        first, found = values.next(), False
        if first not in ("{", "["):
            raise InputError(f"{path}: not JSON: expected an object or a list of events; export the trace again")
        try:
            for event in _entries(values, header):
                found = True
                if isinstance(event, dict):
                    yield event
            if values.next():
                raise _NotJson("more text after its end: several traces in one file?")
        except _NotJson as error:
            raise InputError(f"{path}: not whole JSON ({error}); export the trace again") from None
    if values.damaged:
        header["not UTF-8"] = True
    if not found:
        raise InputError(f"{path}: holds no events; expected a Chrome trace with a list `traceEvents`")


def _entries(values: _Values, header: dict[str, Any]) -> Iterator[Any]:
    """Items of the list that comes next, or of `traceEvents` of an object, whose other members go to `header`.

    A comma before the end is passed over, as trace viewers do.
    """
    end = "]" if values.skip("[{") == "[" else "}"
    while values.next() != end:
        key = values.value()
        if end == "]":
            yield key
        elif values.skip(":") and key == "traceEvents" and values.next() == "[":
            yield from _entries(values, header)
        else:
            header[str(key)] = values.value()
        if values.next() != end:
            values.skip(f",{end}")
    values.skip(end)
