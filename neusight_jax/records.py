"""Records and results as people see them: tables when printed and in notebooks, one line as `repr`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from neusight_jax.units import duration, figure_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


WIDTH = 140
"""Columns of a table as text."""
LINE = 120
"""Columns of a `repr`."""
Item = TypeVar("Item")
"""What is ranked."""


def as_text(renderable: RenderableType, width: int = WIDTH) -> str:
    """Anything rich renders, as plain text without colours."""
    from rich.console import Console

    console = Console(width=width, force_terminal=False, markup=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


class Printed:
    """Prints as a table, and shows as one in a notebook; its `repr` is one line.

    The table is made by `tables` of the module `reports.KIND`, which is found by name: reports import records, records
    no reports. A subclass is a dataclass; it has this `repr` instead of that of dataclasses.
    """

    kind: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # else dataclasses write one
            cls.__repr__ = super(cls, cls).__repr__  # type: ignore[method-assign]

    def __rich__(self) -> RenderableType:
        """Tables for people."""
        tables: RenderableType = importlib.import_module(f"{__package__}.reports.{self.kind}").tables(self)
        return tables

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._line()}>"

    def _line(self) -> str:
        """Text of the `repr`: the head of the table."""
        return next((line.strip() for line in str(self).splitlines() if line.strip()), "empty")

    def _repr_html_(self) -> str:
        from neusight_jax.markup import markup

        return markup(self.__rich__())


class Record(Printed):
    """A record of figures: a table of them with their units. Its `repr` is the call that makes it.

    A record that holds arrays, or others that do, says `summary`: its `repr` where the call takes more than a line.
    Records without it are told apart by their `repr` (`programs.one_shot`), so theirs is always the call.
    """

    kind: ClassVar[str] = "record"

    def figures(self) -> dict[str, Any]:
        """Figures that the table shows, by name: all fields, unless a record has fewer to say."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def slopes(self) -> bool:
        """Whether it holds what a gradient gives, a number per unit of each figure: its table then has no units."""
        return False

    def summary(self) -> str:
        """The record in some words, "" = the call says it."""
        return ""

    def __repr__(self) -> str:
        arguments = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not same(value, field.default):
                arguments.append(f"{field.name}={short(value)}")
        call = f"{type(self).__name__}({', '.join(arguments)})"
        summary = self.summary() if len(call) > LINE else ""
        return f"<{type(self).__name__}: {summary}>" if summary else call


def number(value: Any) -> float | None:
    """A single number that is known, else None."""
    if is_array(value):
        return float(np.asarray(value)) if np.ndim(value) == 0 and is_known(value) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def cell(name: str, value: Any) -> str:
    """A figure as tables have it, with its unit; arrays by their ends, what is traced by its shape."""
    single = number(value)
    if single is not None:
        return figure_text(name, single)
    if is_array(value):
        if not is_known(value) or not np.size(value):
            return short(value)
        flat = np.asarray(value, float).ravel()
        return f"{figure_text(name, flat.min())} to {figure_text(name, flat.max())} ({flat.size:,} values)"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(str(key), entry)}" for key, entry in value.items()) or "-"
    if isinstance(value, tuple | list) and not any(isinstance(entry, Record) for entry in value):
        return ", ".join(cell("", entry) for entry in value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else value if isinstance(value, str) else short(value)


def same(value: Any, default: Any) -> bool:
    """Whether a field has its default, so that a call need not give it."""
    return type(value) is type(default) and not is_array(value) and bool(value == default)


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy or JAX, or stands for one while a function is traced."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_known(value: Any) -> bool:
    """Whether an array has numbers: a tracer has none, nor has a shape that stands for an array."""
    import jax

    return isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer)


def form(value: Any) -> str:
    """Type and shape of an array, as JAX writes them: float32[1000]."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def short(value: Any) -> str:
    """A value in one line; arrays by what they are, those of one number as it."""
    if is_array(value):
        if not is_known(value):
            return f"traced {form(value)}"
        return repr(np.asarray(value).item()) if np.ndim(value) == 0 else form(value)
    return " ".join(repr(value).split())


# Results: one base for all of them, the version of their layout, and text that every reader of JSON takes.


class Result(Printed):
    """Prints as a table, shows as one in a notebook, and comes as a frame, plain values and JSON.

    A subclass is a frozen dataclass with `notes`. It says its `kind`, and gives `values` and `to_frame`.
    """

    def values(self) -> dict[str, Any]:
        """Content of `to_dict` after the schema."""
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
        return {str(key): plain(entry, f"{path}.{key}" if path else str(key), lost) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, f"{path}[]", lost) for entry in value]
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


def ranks_with_ties(items: Sequence[Item], ties: Callable[[Item, Item], bool]) -> Iterator[tuple[Item, int, bool]]:
    """Items with their ranks, and whether others share them.

    Args:
      items: best first.
      ties: whether an item cannot be told from the first of the rank before it: then it shares that rank.
    """
    leaders: list[tuple[int, Item]] = []
    for rank, item in enumerate(items, start=1):
        leaders.append(leaders[-1] if leaders and ties(item, leaders[-1][1]) else (rank, item))
    shared = Counter(rank for rank, _ in leaders)
    return ((item, rank, shared[rank] > 1) for item, (rank, _) in zip(items, leaders, strict=True))
