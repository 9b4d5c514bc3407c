"""Runs the notebooks of `docs/notebooks` and keeps what they print. `python docs/tools/notebooks.py [NAME ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def run(path: Path, timeout_s: float = 600.0) -> nbformat.NotebookNode:
    """The notebook with its outputs; raises where a cell fails."""
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":  # what a busy machine says of itself is no result
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return book


def main() -> None:
    """Runs and writes."""
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(run(path), path)


if __name__ == "__main__":
    main()
