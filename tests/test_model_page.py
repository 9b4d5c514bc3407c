"""docs/model.md: its tables are those of the code. `python tests/test_model_page.py` writes the constants again."""

from __future__ import annotations

import re
from pathlib import Path

from neusight_jax.model.heads import HEADS, PRODUCT_HEADS, Head
from neusight_jax.model.physics import CONSTANTS, STANDARD

PAGE = Path(__file__).resolve().parents[1] / "docs" / "model.md"
HEADER = "| constant | value | width | source |\n| --- | --- | --- | --- |\n"


def constants() -> str:
    """The table of constants."""
    rows = []
    for name, item in CONSTANTS.items():
        value = getattr(STANDARD, name)
        text = ", ".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
        width = item.metadata["width"]
        rows.append(f"| `{name}` | {text} | {f'{width:g}' if width else 'fixed'} | {item.metadata['source']} |\n")
    return HEADER + "".join(rows)


def between(text: str) -> re.Match[str]:
    """What stands between the marks."""
    found = re.search(r"(?<=<!-- constants -->\n).*?(?=<!-- end -->)", text, re.DOTALL)
    assert found
    return found


def test_the_table_of_constants_is_that_of_the_code() -> None:
    assert between(PAGE.read_text()).group() == constants()


def said(part: str) -> dict[str, tuple[str, float, float, float]]:
    """Heads of the tables in a part of the page."""
    rows = re.findall(r"^\| (\w+) \| .* \| (\w+) \| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|$", part, re.M)
    return {name: (joined, float(low), float(high), float(start)) for name, joined, low, high, start in rows}


def coded(heads: dict[str, Head]) -> dict[str, tuple[str, float, float, float]]:
    """Heads of the code, as the page says them."""
    return {name: (head.joined, head.low, head.high, head.start) for name, head in heads.items()}


def test_the_tables_of_heads_are_those_of_the_code() -> None:
    all_families, products = PAGE.read_text().split("| head of products |")
    assert said(all_families) == coded(HEADS)
    assert {**coded(HEADS), **said(products)} == {**coded(HEADS), **coded(PRODUCT_HEADS)}
    assert set(said(products)) | {"dram", "power"} == set(PRODUCT_HEADS)


if __name__ == "__main__":
    page = PAGE.read_text()
    found = between(page)
    PAGE.write_text(page[: found.start()] + constants() + page[found.end() :])
