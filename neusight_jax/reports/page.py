"""Reports: a result as one HTML page for people, with pictures, sortable tables and a glossary; loads nothing.

Every kind of result has a function `report(result, **about) -> Report` in its module of `reports`; all share one
template, `page.html.jinja`. plotly.js is in the page once, compressed.
"""

from __future__ import annotations

import base64
import datetime
import functools
import gzip
import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from neusight_jax import __version__
from neusight_jax.errors import InputError
from neusight_jax.files import write_text_atomically
from neusight_jax.markup import markdown, markup, without_notes
from neusight_jax.records import plain
from neusight_jax.reports.text import table as text_table
from neusight_jax.tables import table

if TYPE_CHECKING:
    from neusight_jax.records import Printed, Result

GLOSSARY: dict[str, str] = table("reports", "glossary")
"""Terms of reports. A page lists those that it uses."""


@dataclass(frozen=True)
class Plot:
    """A picture: traces and layout of plotly.js, as plain values; height in pixels."""

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    caption: str = ""
    height: int = 420

    def figure(self) -> dict[str, Any]:
        """What plotly.js draws."""
        return {"data": self.traces, "layout": {**self.layout, "height": self.height}}


@dataclass(frozen=True)
class Report:
    """Content of a page.

    Attributes:
      title: of the page; facts: its header, name -> text.
      sentence: the answer in one sentence, with its interval and what it costs.
      plots, tables: below it: two plots, the tables, the other plots.
      cards: more numbers that matter, of a forecast: name, number, what goes with it.
    """

    title: str
    facts: Mapping[str, str]
    sentence: str = ""
    plots: Sequence[Plot] = ()
    tables: RenderableType = ""
    cards: Sequence[tuple[str, str, str]] = ()


def require_report(path: Path | str | None, option: str = "--report") -> None:
    """`InputError` unless the name is one of a report or picture and what it needs is there; None passes.

    Args:
      path: of a page, .html, or with --report also of Markdown, .md, which needs no extra.
      option: that gives it.
    """
    if path is None or (is_markdown(path) and option == "--report"):
        return
    if not str(path).lower().endswith((".html", ".htm")):
        either = ".html, or .md for a pull request" if option == "--report" else ".html"
        raise InputError(
            f"{option} {path}: this is a page, expected a name that ends in {either}; for a PDF print it, for a PNG "
            "press the camera on a picture"
        )
    require_pages("report")


def is_markdown(path: Path | str) -> bool:
    """Whether a report of this name is Markdown."""
    return str(path).lower().endswith(".md")


def require_pages(extra: str) -> None:
    """`InputError` unless what pages are made with is there; the message names the extra that brings it."""
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"pages need {' and '.join(missing)}; install them with `pip install '.[{extra}]'`")


def report_of(result: Printed, **about: Any) -> Report:
    """The report of a result: what its own module makes of it, its header completed.

    Args:
      about: `checkpoint` and `command` for the header; the rest goes to the module's `report`.
    """
    checkpoint, command = (str(about.pop(name, "") or "") for name in ("checkpoint", "command"))
    made: Report = importlib.import_module(f"{__package__}.{result.kind}").report(result, **about)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    last = {"Checkpoint": checkpoint, "Version": f"neusight-jax {__version__}", "Date": today, "Command": command}
    facts = {**made.facts, **last}
    return replace(made, facts={name: text for name, text in facts.items() if text})


def page_of(result: Printed, **about: Any) -> str:
    """The page of a result (`report_of`). Raises: `InputError` without the extra."""
    require_report("page.html")
    return render(report_of(result, **about))


def write_report(path: Path | str, result: Printed, **about: Any) -> None:
    """Write the report of a result, a page or Markdown by its name, whole or not at all."""
    text = markdown_of(report_of(result, **about)) if is_markdown(path) else page_of(result, **about)
    write_text_atomically(Path(path), text)


def write_plots(path: Path | str, result: Result, *plots: Plot, command: str = "") -> None:
    """Write a page of pictures alone, those of the result's report unless some are given, whole or not at all."""
    made = report_of(result, command=command)
    only = replace(made, cards=(), plots=plots or made.plots, tables="")
    write_text_atomically(Path(path), render(only))


def markdown_of(report: Report) -> str:
    """A report as Markdown for a pull request: the answer, its numbers, what it assumes, its tables; no pictures."""
    tables, assumes = without_notes(report.tables)
    facts = "\n".join(f"- {name}: {text}" for name, text in report.facts.items())
    cards = markdown(text_table("", ["", "", ""], report.cards, text_columns=3)) if report.cards else ""
    noted = "\n".join(f"- {note}" for note in assumes)
    heads = ("", "", "", "## What it assumes", "<details><summary>Figures</summary>", "## Made with")
    blocks = (f"# {report.title}", report.sentence, cards, noted, f"{markdown(tables)}\n\n</details>", facts)
    shown = [f"{head}\n\n{block}".strip() for head, block in zip(heads, blocks, strict=True) if block]
    return "\n\n".join(shown) + "\n"


def render(report: Report) -> str:
    """A report as one HTML page."""
    figures, assumes = without_notes(report.tables)
    tables = markup(figures)
    words = " ".join([tables, *(f"{plot.title} {plot.caption}" for plot in report.plots), str(report.cards)]).lower()
    glossary = {term: text for term, text in sorted(GLOSSARY.items()) if term.lower() in words}
    plots = [plot.figure() for plot in report.plots]
    page: str = template("page.html.jinja").render(
        report=report,
        assumes=assumes,
        tables=tables,
        glossary=glossary,
        plots=script_json(plots),
        plotly=packed_plotly() if plots else "",
        style=text_of("page.css"),
        script=text_of("plots.js") + text_of("page.js"),
    )
    return page


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"), default=lambda array: array.tolist())
    return text.replace("<", "\\u003c")


def text_of(name: str) -> str:
    """A file beside this module."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def template(name: str) -> Any:
    """A template beside this module; what it is given is escaped."""
    import jinja2

    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text_of(name))


@functools.cache
def gzipped_plotly() -> bytes:
    """plotly.js, compressed."""
    return gzip.compress(resources.files("plotly").joinpath("package_data/plotly.min.js").read_bytes(), 6, mtime=0)


def packed_plotly() -> str:
    """The same as base64: a third of its size."""
    return base64.b64encode(gzipped_plotly()).decode("ascii")
