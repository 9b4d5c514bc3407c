"""Measures the pages: words, sentences, dead links, spelling. `python docs/tools/check.py` prints what it finds.

Exit code 1 where a page is too long, its sentences are, a link leads nowhere or a word is misspelt.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
MOST_WORDS, MEDIAN_SENTENCE = 2000, 18
WORD = re.compile(r"\S*\w\S*")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """The pages of the site and the texts beside the code."""
    return [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def sentences(text: str) -> list[str]:
    """Sentences of the running text: no code, tables, headings or comments; a list item ends a sentence."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|^[#|].*$|^\s*\$ .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.|:) ", text)
    found = [sentence for part in parts for sentence in re.split(r"(?<=[.?!:;])\s+(?=[A-Z\"*`(\[])", part)]
    return [each for each in found if len(WORD.findall(each)) > 1]


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as Markdown readers make them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower())).strip("-") for head in heads}


def dead_links(page: Path) -> list[str]:
    """Links to files or headings that are not there."""
    out = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        file = page.parent / name if name else page
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8"))
        ):
            out.append(target)
    return out


def misspelt() -> list[str]:
    """Lines of codespell, where it is installed."""
    if importlib.util.find_spec("codespell_lib") is None:
        return []
    files = [str(page) for page in (*pages(), ROOT / "CHANGELOG.md")]
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", "mape", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def measured() -> dict[str, tuple[int, float]]:
    """Page -> its words, code and tables included, and the median length of its sentences."""
    out = {}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        lengths = [len(WORD.findall(each)) for each in sentences(text)]
        out[str(page.relative_to(ROOT))] = (len(WORD.findall(text)), median(lengths) if lengths else 0.0)
    return out


def main() -> int:
    """Prints every page and what is wrong."""
    wrong = [f"{page.relative_to(ROOT)}: {target} leads nowhere" for page in pages() for target in dead_links(page)]
    table = measured()
    for name, (words, length) in table.items():
        print(f"{words:6d} words  {length:5.1f} a sentence  {name}")
        if words > MOST_WORDS or length > MEDIAN_SENTENCE:
            wrong.append(f"{name}: {words} words, median sentence {length:g}")
    print(f"{sum(words for words, _ in table.values()):6d} words")
    wrong += misspelt()
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
