"""Errors of forecasts as tables for people."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from neusight_jax.markup import NOTE
from neusight_jax.reports.page import Plot, Report
from neusight_jax.reports.plots import bars_with_interval
from neusight_jax.reports.text import table
from neusight_jax.training.evaluation.scores import Evaluation, View

SHOWN = 40
"""Bars in the picture of errors, the largest."""


def tables(evaluation: Evaluation) -> RenderableType:
    """The views with a title that have rows, and the notes."""
    titled = [view for view in evaluation.views if view.title and len(view.frame)]
    shown = (table(view.title, [*view.columns], view.cells(), view.text_columns) for view in titled)
    return Group(*shown, *(Text(f"{NOTE}{note}") for note in evaluation.notes))


def report(evaluation: Evaluation) -> Report:
    """The page of an evaluation: mean errors as bars, the largest first."""
    views = [view for view in evaluation.views if "mean" in view.frame and len(view.frame)]
    pictures = [_bars(view) for view in views]
    facts = {name: str(value) for name, value in evaluation.about.items() if isinstance(value, str | int)}
    means = [f"{_what(view)}, {_means(view)}" for view in views]
    sentence = f"Mean absolute error: {'; '.join(means)}." if means else evaluation.headline
    return Report("Errors of forecasts", facts, sentence, pictures, tables(evaluation))


def _what(view: View) -> str:
    """What the errors of a view are of."""
    return view.title.partition(":")[0].lower() or "kernels and whole models"


def _means(view: View) -> str:
    """Mean error of every system of a view; its rows count equally."""
    if "system" not in view.frame:
        return f"{view.frame['mean'].mean():.1f} %"
    systems = view.frame.groupby("system", sort=False)["mean"].mean()
    return ", ".join(f"{system} {mean:.1f} %" for system, mean in systems.items())


def _bars(view: View) -> Plot:
    worst = view.frame.sort_values("mean", ascending=False)[:SHOWN]
    keys = [name for name in view.columns if name in worst and worst[name].dtype == object]
    names = [" ".join(str(row[key]) for key in keys) for row in worst.to_dict("records")]
    places = [f"{place}. {name}" for place, name in enumerate(names, start=1)]
    return bars_with_interval(f"Mean error, {_what(view)}", places, [*map(float, worst["mean"])], None, "%")
