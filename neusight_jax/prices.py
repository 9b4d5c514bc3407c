"""Prices: what an hour of a GPU costs, from a file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from neusight_jax.errors import InputError
from neusight_jax.gpu_catalog import canonical_name
from neusight_jax.printed import Record
from neusight_jax.tables import Yaml

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Prices(Record):
    """Price of an hour by GPU name or alias, in one currency, and the file they are from, "" where there is none.

    `InputError` for a price that is no positive number.
    """

    per_hour: Mapping[str, float]
    currency: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        for name, value in self.per_hour.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"price of {name} is {value!r}, expected a positive number per hour, e.g. 2.49")
        canonical = {canonical_name(str(name)) or str(name): float(value) for name, value in self.per_hour.items()}
        object.__setattr__(self, "per_hour", canonical)

    def summary(self) -> str:
        """How many they are."""
        return f"of an hour of {len(self.per_hour)} GPUs{f' in {self.currency}' if self.currency else ''}"

    def of(self, name: str) -> float | None:
        """Price of an hour of one GPU by its name or alias, None where it has none."""
        return self.per_hour.get(name, self.per_hour.get(canonical_name(name) or name))


PriceList: TypeAlias = Prices | Mapping[str, float] | str | os.PathLike[str] | None
"""What callers give: `Prices`, GPU -> price of an hour, the path of a price file, or nothing."""


def prices_of(given: PriceList) -> Prices | None:
    """`Prices` of what a caller gave; see `read_prices`."""
    if given is None or isinstance(given, Prices):
        return given
    return Prices(given) if isinstance(given, Mapping) else read_prices(given)


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Prices from a JSON, YAML or CSV file: GPU name -> price of an hour, and `currency` if wanted.

    A CSV file has a name and a price in each row, below a heading or not.

    Raises: `InputError` when the file is not there, is no such mapping, or a price is no positive number.
    """
    file = Path(path)
    table = file.suffix.lower() == ".csv"
    try:
        text = file.read_text(encoding="utf-8")
        content = _csv_prices(text) if table else yaml.load(text, Loader=Yaml)  # JSON is YAML
    except FileNotFoundError:
        raise InputError(f"{file}: no such price file; expected JSON, YAML or CSV, GPU: price of an hour") from None
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        reason, form = " ".join(str(error).split())[:80], "CSV" if table else "JSON or YAML"
        raise InputError(f"{file}: not readable as {form} ({reason}); mend the syntax") from None
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: expected a mapping of GPU: price of an hour, e.g. H100: 2.49")
    currency = str(content.pop("currency", ""))
    try:
        return Prices(content, currency, str(file))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _csv_prices(text: str) -> dict[str, Any]:
    """Rows of name and price; a heading is left out."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if any(row)]
    if rows and len(rows[0]) > 1 and not _is_number(rows[0][1]) and rows[0][0].lower() in ("gpu", "name", "machine"):
        rows = rows[1:]
    short = [row for row in rows if len(row) != 2]
    if short:
        raise ValueError(f"row {','.join(short[0])!r} is no GPU,price")
    return {name: float(value) if _is_number(value) else value for name, value in rows}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
