"""Writing files and folders whole or not at all: write beside, then rename."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neusight_jax.errors import InputError


def _temporary(path: Path) -> Path:
    """A hidden name beside `path` that keeps its suffix."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}{path.suffix}")


def _cannot_write(path: Path, error: OSError) -> InputError:
    reason = error.strerror or str(error)
    return InputError(f"cannot write {path}: {reason}; nothing was written, free the space or give another --output")


def _make_parent(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_atomically(path: Path | str, write: Callable[[Path], None]) -> None:
    """Write a file whole or not at all.

    Args:
      path: where the file goes; missing parent folders are made, an existing file is replaced.
      write: writes the content to the path it is given, which lies beside `path`.
    Raises: `InputError` when the system refuses (not writable, disk full); the temporary file is removed then, and on
      any other exception including `KeyboardInterrupt`.
    """
    path = Path(path)
    _make_parent(path)
    temporary = _temporary(path)
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path | str, text: str) -> None:
    """`write_atomically` for text, as UTF-8."""

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    write_atomically(path, write)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder to fill that becomes `path` when the block ends, and is removed when the block fails.

    Args:
      path: the folder to make; may exist only if empty.
    Yields: a temporary folder beside it.
    Raises: `InputError` when `path` holds something already, or when the system refuses (not writable, disk full).
    """
    path = Path(path)
    refuse_existing(path)
    _make_parent(path)
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: Path | str) -> None:
    """`InputError` when an output folder is a file or holds something; call it before long work."""
    path = Path(path)
    if path.is_dir():
        if any(path.iterdir()):
            raise InputError(f"output folder {path} is not empty; give a new one or remove it first")
    elif path.exists():
        raise InputError(f"output {path} is a file, expected a folder; give another --output")
