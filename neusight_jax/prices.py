"""Prices: what an hour of a GPU costs, from a file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from neusight_jax.errors import InputError
from neusight_jax.gpu_catalog import canonical_name
from neusight_jax.tables import Yaml

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """Price of an hour by GPU name (canonical where the catalog knows it), in one currency."""

    per_hour: Mapping[str, float]
    currency: str = ""

    def of(self, name: str) -> float | None:
        """Price of an hour of one GPU by its name or alias, None where it has none."""
        return self.per_hour.get(name, self.per_hour.get(canonical_name(name) or name))


def read_prices(path: str | os.PathLike[str]) -> Prices:
    """Prices from a JSON, YAML or CSV file: GPU name -> price of an hour, and `currency` if wanted.

    A CSV file has two columns, GPU and price, under a header or not.

    Raises: `InputError` when the file is not there, is no such mapping, or a price is no positive number.
    """
    file = Path(path)
    table = file.suffix.lower() == ".csv"
    try:
        text = file.read_text(encoding="utf-8")
        content = _rows(text) if table else yaml.load(text, Loader=Yaml)  # JSON is YAML
    except FileNotFoundError:
        raise InputError(f"{file}: no such price file; expected JSON, YAML or CSV, GPU: price of an hour") from None
    except (OSError, UnicodeDecodeError, ValueError, csv.Error, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:80]
        form = "CSV" if table else "JSON or YAML"
        raise InputError(f"{file}: not readable as {form} ({reason}); mend the syntax") from None
    if not isinstance(content, dict) or not content:
        raise InputError(f"{file}: expected a mapping of GPU: price of an hour, e.g. H100: 2.49")
    currency = str(content.pop("currency", ""))
    per_hour = {}
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"{file}: price of {name} is {value!r}, expected a positive number per hour, e.g. 2.49")
        per_hour[canonical_name(str(name)) or str(name)] = float(value)
    return Prices(per_hour, currency)


def _rows(text: str) -> dict[str, Any]:
    """Names and values of a CSV of two columns; a first row without a number is its header."""
    found: dict[str, Any] = {}
    header = True
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or cells[0].startswith("#"):
            continue
        if len(cells) != 2:
            raise ValueError(f"line {number} has {len(cells)} columns, expected two: GPU,price")
        try:
            found[cells[0]] = float(cells[1])
        except ValueError:
            if not header or cells[0] == "currency":
                found[cells[0]] = cells[1]  # the currency, or a price that the check names
        header = False
    return found
