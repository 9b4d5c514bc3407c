"""Prices: what an hour of a GPU costs, from a file."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from neusight_jax.errors import InputError, printable
from neusight_jax.hardware.catalog import canonical_name
from neusight_jax.records import Record
from neusight_jax.tables import read_content, read_text, refuse_twice

SECONDS_PER_HOUR = 3600.0
_EXPECTED = "a price file in JSON, YAML or CSV, GPU: price of an hour"


class PriceFile(BaseModel, extra="allow", title="Price file"):
    """What an hour of one GPU costs, by the GPU's name or alias."""

    __pydantic_extra__: dict[str, Annotated[float, Field(strict=True, gt=0, lt=1e12, title="Price of an hour")]]
    currency: str = Field("", max_length=20, description="of all prices, such as USD")


@dataclass(frozen=True)
class Prices(Record):
    """Price of an hour by GPU name or alias, in one currency, and the file they are from, "" where there is none.

    `InputError` for a price that is no positive number.
    """

    per_hour: Mapping[str, float]
    currency: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        prices = {str(name): value for name, value in self.per_hour.items()}
        try:
            PriceFile.model_validate({**prices, "currency": self.currency})
        except ValidationError as error:
            name, value = (error.errors(include_url=False)[0][part] for part in ("loc", "input"))
            what, expected = f"price of {name[0]}", "a positive number per hour, at most 1e12, e.g. 2.49"
            if name[0] == "currency":
                what, expected = "currency", "text of at most 20 characters"
            raise InputError(f"{what} is {value!r}, expected {expected}") from None
        # Several aliases of one GPU may be listed: a look-up by any of them must have one answer.
        canonical: dict[str, float] = {}
        for name, value in prices.items():
            key = canonical_name(name) or name
            if canonical.setdefault(key, float(value)) != value:
                raise InputError(f"{key} has two prices ({name} is one of its names), expected one; remove one")
        object.__setattr__(self, "per_hour", canonical)

    def summary(self) -> str:
        """Number of GPUs with a price."""
        return f"of an hour of {len(self.per_hour)} GPUs{f' in {self.currency}' if self.currency else ''}"

    def of(self, name: str) -> float | None:
        """Price of an hour of one GPU by its name or alias, None where it has none."""
        return self.per_hour.get(name, self.per_hour.get(canonical_name(name) or name))


PriceList: TypeAlias = Prices | Mapping[str, float] | str | os.PathLike[str] | None
"""Prices as callers give them: `Prices`, GPU -> price of an hour, the path of a price file, or nothing."""


def prices_of(prices: PriceList) -> Prices | None:
    """`Prices` of what a caller gave; see `read_prices`."""
    if prices is None or isinstance(prices, Prices):
        return prices
    return Prices(prices) if isinstance(prices, Mapping) else read_prices(prices)


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Prices from a JSON, YAML or CSV file: GPU name -> price of an hour, and `currency` if wanted.

    A CSV file has a name and a price in each row, below a heading or not.

    Raises: `InputError` when the file is not there, is no such mapping, or a price is no positive number.
    """
    file = Path(path)
    table = file.suffix.lower() == ".csv"
    content = _csv_prices(file) if table else read_content(file, _EXPECTED)
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: expected a mapping of GPU: price of an hour, e.g. H100: 2.49")
    try:
        return Prices(per_hour=content, currency=content.pop("currency", ""), file=str(file))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def price_in(path: str | os.PathLike[str], name: str) -> tuple[float, str]:
    """Price of an hour of one GPU in a file, and a note that says it; `InputError` where it has none."""
    prices = read_prices(path)
    price = prices.of(name)
    if price is None:
        raise InputError(f"{os.fspath(path)}: no price for {name}; add a line {name}: price of an hour")
    return price, f"an hour of one GPU costs {price:g} {prices.currency}".rstrip()


def _csv_prices(file: Path) -> dict[str, Any]:
    """Rows of name and price; a heading is left out."""
    text = read_text(file, _EXPECTED)
    try:
        rows = [[printable(cell.strip()) for cell in row] for row in csv.reader(text.splitlines()) if any(row)]
    except csv.Error as error:
        raise InputError(f"{file}: not readable as CSV ({error}); mend the syntax") from None
    if rows and len(rows[0]) > 1 and not _is_number(rows[0][1]) and rows[0][0].lower() in ("gpu", "name", "machine"):
        rows = rows[1:]
    short = [row for row in rows if len(row) != 2]
    if short:
        raise InputError(f"{file}: row {','.join(short[0])!r} is no GPU,price")
    try:
        refuse_twice(name for name, _ in rows)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return {name: float(value) if _is_number(value) else value for name, value in rows}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
