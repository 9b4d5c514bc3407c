"""`neusight-jax design`: the machine that does best under budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neusight_jax.cli.console import remark, show, show_json
from neusight_jax.cli.options import AsJson, BatchSize, Dtype, Fused, Mode, Models, SequenceLength, WorkloadCheckpoint
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.design.answers import Design
    from neusight_jax.gpu import GPU
    from neusight_jax.sweep.space import Range
    from neusight_jax.workload import Workload


def design(
    models: Models,
    base: Annotated[str, typer.Option("--base", help="The machine to start from: a name, or a JSON or YAML file.")],
    free: Annotated[
        list[str], typer.Option("--free", metavar="FIELD=LO:HI[:STEP]", help="A field that may vary, in base units.")
    ],
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", metavar="METRIC<=X", help="area_mm2, power_w, dollars, pin_bit_per_s, latency_s ..."),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="latency, throughput, latency_area, energy_delay, performance_per_dollar, area, power or cost.",
        ),
    ] = "latency",
    fixed: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=X", help="A figure of the base to change.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Coefficients of the cost model, a JSON or YAML file.")
    ] = None,
    pareto: Annotated[
        str | None, typer.Option("--pareto", metavar="METRIC=LO:HI:N", help="Also a front: N limits on this metric.")
    ] = None,
    target_s: Annotated[
        float | None,
        typer.Option("--target", metavar="SECONDS", help="Only say the least value of the one free field."),
    ] = None,
    batch_size: BatchSize = 1,
    sequence_length: SequenceLength = None,
    mode: Mode = "inference",
    dtype: Dtype = None,
    fused: Fused = False,
    checkpoint: WorkloadCheckpoint = None,
    starts: Annotated[int, typer.Option("--starts", help="Descents at once.")] = 3,
    steps: Annotated[int, typer.Option("--steps", help="Of each descent.")] = 15,
    rounds: Annotated[int, typer.Option("--rounds", help="Of exact refinement, 64 machines each.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal answers.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", help="A folder for design.json and report.html; new or empty.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search the machine that does best for models under budgets; peaks follow SM count and clock.

    MODEL may carry its own workload: gpt3-xl,mode=training,batch_size=2,sequence_length=2048,weight=2
    """
    from neusight_jax.files import atomic_folder, refuse_existing

    if output is not None:
        refuse_existing(output)
        from neusight_jax.plot.files import require_plot

        require_plot()
    given = {"mode": mode, "batch_size": batch_size, "sequence_length": sequence_length, "dtype": dtype}
    ranges = [_free(text) for text in free]
    budgets = dict(_budget(text) for text in budget or ())
    machine = _base(base, fixed or ())
    loads = [_load(text, given, bool(fused)) for text in models]
    from neusight_jax.checkpoint import load_predictor
    from neusight_jax.cli.workloads import default_for
    from neusight_jax.design.answers import answer, problem, read_costs, required
    from neusight_jax.design.answers import pareto as front_of
    from neusight_jax.design.report import design_tables, front_table, shown
    from neusight_jax.design.search import Search, Settings

    predictor = load_predictor(checkpoint or default_for(load.graph for load in loads))
    if target_s is not None:
        if len(ranges) != 1 or len(loads) != 1 or budgets:
            raise InputError("--target answers for one model, one --free field and no --budget")
        value = required(predictor, machine, loads[0], ranges[0], target_s)
        if as_json:
            show_json({"field": ranges[0].field, "value": value, "target_s": target_s, "workload": loads[0].name})
            return
        field = ranges[0].field
        typer.echo(f"{loads[0].name} in {shown('latency_s', target_s)} needs {field} of {shown(field, value)}")
        return
    metric, limits = _front(pareto, budgets)
    model = read_costs(costs, machine) if costs is not None else None
    asked = problem(predictor, machine, ranges, loads, objective=objective, budgets=budgets, costs=model)
    search = Search(asked, Settings(starts=starts, steps=steps, rounds=rounds))
    found = answer(search, search.run(seed), seed)
    front = front_of(search, metric, limits, seed) if metric else []
    content = {"checkpoint": checkpoint, "base": base, "objective": objective, **found.to_dict()}
    if metric:
        content["pareto"] = {"metric": metric, "designs": [each.to_dict() for each in front]}
    if output is not None:
        _write(output, content, found, front, metric, atomic_folder)
        remark(f"wrote {output}/design.json and {output}/report.html")
    if as_json:
        show_json(content)
        return
    show(design_tables(found))
    if front:
        show(front_table(front, metric))


def _write(output: Path, content: dict[str, Any], found: Design, front: list[Design], metric: str, folder: Any) -> None:
    from neusight_jax.plot.report import design_page

    with folder(output) as place:
        (place / "design.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        (place / "report.html").write_text(design_page(found, front, metric), encoding="utf-8")


def _free(text: str) -> Range:
    from neusight_jax.cli.workloads import numbers, split_assignment
    from neusight_jax.sweep.space import Range

    field, value = split_assignment("--free", text)
    parts = value.split(":")
    if len(parts) not in (2, 3):
        raise InputError(f"--free {text!r}: expected FIELD=LO:HI or FIELD=LO:HI:STEP")
    low, high, *step = numbers("--free", text, parts)
    return Range(field, low, high, step=step[0] if step else 0.0)


def _budget(text: str) -> tuple[str, float]:
    from neusight_jax.cli.workloads import numbers

    metric, sign, value = text.partition("<=")
    if not sign or not metric.strip():
        raise InputError(f"--budget {text!r}: expected METRIC<=X, e.g. --budget 'area_mm2<=800'")
    return metric.strip(), numbers("--budget", text, [value])[0]


def _base(name: str, changes: list[str] | tuple[str, ...]) -> GPU:
    from neusight_jax.cli.workloads import numbers, split_assignment
    from neusight_jax.gpu import check_figure
    from neusight_jax.gpu_file import load_gpu
    from neusight_jax.hypothetical import require_field

    machine = load_gpu(name)
    for text in changes:
        field, value = split_assignment("--set", text)
        figure = numbers("--set", text, [value])[0]
        check_figure(require_field(field), figure, "--set")
        machine = machine.replace(**{field: figure})
    return machine


def _load(text: str, given: dict[str, Any], fused: bool) -> Workload:
    """A workload from `MODEL[,key=value...]`."""
    from neusight_jax.cli.workloads import graph_of, split_assignment
    from neusight_jax.workload import workload

    name, *rest = text.split(",")
    chosen, weight = dict(given), 1.0
    for part in rest:
        key, value = split_assignment("MODEL", part) if "=" in part else (part, "")
        try:
            if key in ("batch_size", "sequence_length"):
                chosen[key] = int(value)
            elif key == "weight":
                weight = float(value)
            elif key in ("mode", "dtype") and value:
                chosen[key] = value
            else:
                raise InputError(
                    f"{text}: {part!r} is no workload, expected mode=, batch_size=, sequence_length=, dtype= or weight="
                )
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{text}: {key} is {value!r}, expected a number") from None
    graph = graph_of(name, chosen["batch_size"], chosen["sequence_length"], chosen["mode"], chosen["dtype"], fused)
    return workload(graph, weight)


def _front(text: str | None, budgets: dict[str, float]) -> tuple[str, list[float]]:
    """Metric and limits of a Pareto front; the widest limit becomes a budget unless there is one."""
    if text is None:
        return "", []
    import numpy as np

    from neusight_jax.cli.workloads import numbers, split_assignment

    metric, value = split_assignment("--pareto", text)
    parts = numbers("--pareto", text, value.split(":"))
    if len(parts) != 3 or not 0 < parts[0] < parts[1] or parts[2] != int(parts[2]) or parts[2] < 2:
        raise InputError(f"--pareto {text!r}: expected METRIC=LO:HI:N with 0 < LO < HI and N of at least 2")
    budgets.setdefault(metric, parts[1])
    return metric, [float(limit) for limit in np.geomspace(parts[0], parts[1], int(parts[2]))]
