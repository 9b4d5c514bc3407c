"""Writing files and folders whole or not at all: write beside, then rename.

What is being written is known to `abandon`, for a program that has to stop at once and cannot wait for the writer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from neusight_jax.errors import InputError


@dataclass(eq=False)
class _Writing:
    """A file or folder on its way.

    Attributes:
      temporary, path: where it is filled, and where it goes.
      whole: whether it is filled and being renamed; result: whether it is what a user asked for.
    """

    temporary: Path
    path: Path
    whole: bool = False
    result: bool = True


_ONGOING: list[_Writing] = []
_WRITTEN: deque[Path] = deque(maxlen=64)


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")


@contextmanager
def _ongoing(writing: _Writing) -> Iterator[_Writing]:
    """Known to `abandon` while the block runs; settled when it ends."""
    _ONGOING.append(writing)
    try:
        yield writing
    finally:
        _settle(writing)
        _ONGOING.remove(writing)


def _settle(writing: _Writing) -> None:
    """Note what was renamed; remove what was not."""
    if writing.whole and not writing.temporary.exists():
        _WRITTEN.extend([writing.path] if writing.result else [])
    elif writing.temporary.is_dir():
        shutil.rmtree(writing.temporary, ignore_errors=True)
    else:
        writing.temporary.unlink(missing_ok=True)


@contextmanager
def _beside(path: Path, result: bool = True) -> Iterator[Path]:
    """A hidden name beside `path` that keeps its suffix; what the block writes there becomes `path`, or is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _ongoing(_Writing(_hidden(path), path, result=result)) as writing:
            yield writing.temporary
            writing.whole = True
            os.replace(writing.temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"cannot write {path}: {reason}; nothing was written, free the space or give another --output"
        ) from error


def forget_written() -> None:
    """A new command begins: it has written nothing yet."""
    _WRITTEN.clear()


def abandon(within_s: float = 0.3) -> list[Path]:
    """Remove all that is half-written, whatever its writer does meanwhile.

    Args:
      within_s: how long to try again while the writer goes on making files, seconds.
    Returns: the last files and folders that this process has written and that are still there.
    """
    deadline = time.monotonic() + within_s
    for writing in list(_ONGOING):
        _settle(writing)
        while writing.temporary.exists() and time.monotonic() < deadline:
            _settle(writing)
    return [path for path in dict.fromkeys(_WRITTEN) if path.exists()]


def write_atomically(path: Path | str, write: Callable[[Path], object], *, result: bool = True) -> None:
    """Write a file whole or not at all.

    Args:
      path: where the file goes; missing parent folders are made, an existing file is replaced.
      write: writes the content to the path it is given, which lies beside `path`.
      result: what a user asked for, not something kept on the side; an interrupted command names the first.
    Raises: `InputError` when the system refuses (not writable, disk full); the temporary file is removed then, and on
      any other exception including `KeyboardInterrupt`.
    """
    with _beside(Path(path), result) as temporary:
        write(temporary)


def write_text_atomically(path: Path | str, text: str) -> None:
    """`write_atomically` for text, as UTF-8."""
    write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"))


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder to fill that becomes `path` when the block ends, and is removed when the block fails.

    Args:
      path: the folder to make; may exist only if empty.
    Yields: a temporary folder beside it.
    Raises: `InputError` when `path` holds something already, or when the system refuses (not writable, disk full).
    """
    refuse_existing(path)
    with _beside(Path(path)) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder among the system's temporary files that is gone when the block ends."""
    with _ongoing(_Writing(Path(tempfile.mkdtemp(prefix="neusight-jax-")), Path())) as writing:
        yield writing.temporary


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there, whole or not at all."""
    with _ongoing(_Writing(_hidden(path), path)) as writing, suppress(FileNotFoundError):
        os.replace(path, writing.temporary)


def refuse_existing(path: Path | str) -> None:
    """`InputError` when an output folder is a file or holds something; call it before long work."""
    path = Path(path)
    if path.is_dir():
        if any(path.iterdir()):
            raise InputError(f"output folder {path} is not empty; give a new one or remove it first")
    elif path.exists():
        raise InputError(f"output {path} is a file, expected a folder; give another --output")
