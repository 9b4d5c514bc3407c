"""Results: one base for all of them, the version of their layout, and text that every reader of JSON takes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType

WIDTH = 140
"""Columns of a table as text."""


class Result:
    """Prints as a table, shows as one in a notebook, and comes as a frame, plain values and JSON.

    A subclass is a frozen dataclass with `notes`. It says its `kind`, and gives `values` and `to_frame`. Its table is
    made by `tables` of the module `reports.KIND`, which is found by name: reports import records, records no reports.
    """

    kind: ClassVar[str]

    def values(self) -> dict[str, Any]:
        """What `to_dict` holds after the schema."""
        raise NotImplementedError

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def to_frame(self) -> pd.DataFrame:
        """The result as a table."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the schema, the whole workload, the result and its notes."""
        content: dict[str, Any] = plain({"schema": schema(self.kind), **self.values()})
        return content

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json_text(self.to_dict())

    def __rich__(self) -> RenderableType:
        """Tables for people."""
        tables: RenderableType = importlib.import_module(f"{__package__}.reports.{self.kind}").tables(self)
        return tables

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        from neusight_jax.reports.markup import markup

        return markup(self.__rich__())

    def to_html(self, **about: Any) -> str:
        """The result as a page of its own, for a browser: pictures, tables, glossary; loads nothing (extra `report`).

        Args:
          about: `checkpoint`, `command`, `machine` (the GPU, for its roofline), for the page's head.
        Raises: `InputError` without the extra.
        """
        page: str = importlib.import_module(f"{__package__}.reports.page").page_of(self, **about)
        return page


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """Anything rich renders, as plain text without colours."""
    console = _console(width, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def _console(width: int, **options: Any) -> Console:
    from rich.console import Console

    return Console(width=width, force_terminal=False, markup=False, **options)


def schema(kind: str, version: int = 1) -> str:
    """Name and version of a result's layout, its first key: a reader that knows the version knows the keys."""
    return f"neusight_jax.{kind}/{version}"


def plain(value: Any, path: str = "", lost: dict[str, None] | None = None) -> Any:
    """Mappings, records, sequences, paths and NumPy scalars as what JSON has.

    With `lost`, what is not finite becomes None; `lost` collects the paths, entries of one list as one.
    """
    if dataclasses.is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"{path}.{key}" if path else str(key), lost) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, f"{path}[]", lost) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    if lost is not None and isinstance(value, float) and not math.isfinite(value):
        lost[path] = None
        return None
    return str(value) if isinstance(value, Path) else value


def json_text(content: Any) -> str:
    """JSON text of plain values. Numbers that are not finite become null, and the notes of the result say which."""
    lost: dict[str, None] = {}
    finite = plain(content, lost=lost)
    if lost and isinstance(finite, dict):
        finite["notes"] = [*finite.get("notes", ()), f"null where there is no finite number: {', '.join(lost)}"]
    return json.dumps(finite, indent=1, allow_nan=False)
