"""Identified machines as tables for people."""

from __future__ import annotations

from rich.console import RenderableType

from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.text import INTERVAL, between, headed, table
from neusight_jax.training.identification import Explanation, Identification, IdentifiedFigure
from neusight_jax.units import counted, figure_text


def tables(answer: Identification) -> RenderableType:
    """Figures with their intervals, and which of them have to be off."""
    header = ["figure", "sheet", "measured", INTERVAL, "still unsure"]
    figures = table("", header, map(_cells, answer.figures))
    columns = ["off from the sheet", "misfit", "odds"]
    odds = [[_off(item), f"{item.misfit:.2f}", f"{item.odds:.3g}"] for item in answer.explanations]
    explanations = table("Explanations", columns, odds)
    return headed(
        f"{answer.gpu or 'the machine'} by {counted(answer.measurements, 'measurement')}: {_errors(answer)}",
        figures,
        "still unsure: of what was unknown before",
        "",
        explanations,
        "odds: against all of them being off; a figure that need not move costs odds",
        notes=answer.notes,
    )


def report(answer: Identification) -> Report:
    """The page of an identification: figures over those of the sheet."""
    names = [figure.name for figure in answer.figures]
    ratios = [figure.value / figure.sheet for figure in answer.figures]
    ends = [(figure.low / figure.sheet, figure.high / figure.sheet) for figure in answer.figures]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [high - ratio for ratio, (_, high) in zip(ratios, ends, strict=True)],
        "arrayminus": [ratio - low for ratio, (low, _) in zip(ratios, ends, strict=True)],
    }
    points = {"type": "scatter", "mode": "markers", "x": names, "y": ratios, "error_y": bars, "showlegend": False}
    plot = Plot("Figures", [points], {"yaxis": {"title": {"text": "over the sheet"}, "type": "log"}})
    likely = answer.explanations[0]
    name = answer.gpu or "The machine"
    sentence = (
        f"Most probably off from the sheet of {name}: {_off(likely)} (odds {likely.odds:.3g}); {_errors(answer)}."
    )
    facts = {"Machine": name, "Measured": counted(answer.measurements, "measurement")}
    return Report(f"{name} identified", facts, sentence, [plot], tables(answer))


def _errors(answer: Identification) -> str:
    before, after = answer.error_percent
    return f"error {before:.1f}% with the sheet, {after:.1f}% with these figures"


def _cells(figure: IdentifiedFigure) -> list[str]:
    def text(value: float) -> str:
        return figure_text(figure.name, value)

    interval = between((figure.low, figure.high), text)
    return [figure.name, text(figure.sheet), text(figure.value), interval, f"{figure.left:.0%}"]


def _off(explanation: Explanation) -> str:
    return ", ".join(explanation.off) or "nothing"
