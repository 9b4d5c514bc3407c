"""Results: one base for all of them, the version of their layout, and text that every reader of JSON takes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from neusight_jax.printed import Printed
from neusight_jax.printed import as_text as as_text
from neusight_jax.units import duration

if TYPE_CHECKING:
    import pandas as pd


class Result(Printed):
    """Prints as a table, shows as one in a notebook, and comes as a frame, plain values and JSON.

    A subclass is a frozen dataclass with `notes`. It says its `kind`, and gives `values` and `to_frame`.
    """

    def values(self) -> dict[str, Any]:
        """What `to_dict` holds after the schema."""
        raise NotImplementedError

    def _fields(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _line(self) -> str:
        total_s = getattr(self, "total_s", None)
        return super()._line() + (f", {duration(total_s)}" if total_s is not None else "")

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

    def to_html(self, **about: Any) -> str:
        """The result as a page of its own, for a browser: pictures, tables, glossary; loads nothing (extra `report`).

        Args:
          about: `checkpoint`, `command`, `machine` (the GPU, for its roofline), for the page's head.
        Raises: `InputError` without the extra.
        """
        page: str = importlib.import_module(f"{__package__}.reports.page").page_of(self, **about)
        return page


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
