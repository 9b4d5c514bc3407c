"""`neusight-jax design` and `codesign`: the machine, or the model and the machine, that does best under budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neusight_jax.cli.console import COMMAND, busy, remark, report_to, show, show_json
from neusight_jax.cli.options import (
    AsJson,
    JobOptions,
    Model,
    ModelOptions,
    Models,
    ReportFile,
    ServiceOptions,
    WorkloadCheckpoint,
    WorkloadOptions,
    option,
    option_names,
    takes_workload,
)
from neusight_jax.errors import InputError

if TYPE_CHECKING:
    from neusight_jax.designs.answers import Design
    from neusight_jax.designs.problem import Problem
    from neusight_jax.hardware.cluster import Machine
    from neusight_jax.hardware.gpu import GPU
    from neusight_jax.kernels.table import KernelTable
    from neusight_jax.sweeps.space import Range
    from neusight_jax.workloads import Workload


_STEPS, _ONE = ServiceOptions(), JobOptions()
_BUDGET = "Limits: area_mm2, power_w, dollars, pin_bit_per_s, latency_s, a figure of the machine."
_OBJECTIVE = (
    "latency, throughput, latency_area, energy_delay, performance_per_dollar, area, power, cost, cost_per_mtok."
)
_FREE = "Figures that may vary, in base units; with --gpus of links and network too, such as nic_bytes_per_s."
_FIXED = "Figures of the base to change; peaks follow SM count and clock."
_SIZES = (
    "Sizes that may vary: layers, hidden, heads, kv_heads, head_size, d_ff, experts, top_k, vocabulary, "
    "training_tokens; figures of the GPU too."
)
_LIMITS = (
    "Limits: loss (that of MODEL unless given), ttft_s, tpot_s, memory_bytes, parameters, train_days, those of design."
)
_GOALS = "latency (of a request), throughput, cost_per_mtok, energy, loss, total_cost, total_energy (with training)."
_TARGET = "Only say the least value of the one free field that meets this latency."


Base = Annotated[str, option("The machine to start from: a name, or a JSON or YAML file.")]


@dataclass(frozen=True)
class SearchOptions:
    """Search: what `design` and `codesign` share beside their objective and limits."""

    fixed: Annotated[list[str] | None, option(_FIXED, "--set", metavar="FIELD=X")] = None
    costs: Annotated[Path | None, option("Coefficients of the cost model, a JSON or YAML file.")] = None
    pareto: Annotated[str | None, option("Also a front: N limits on this metric.", metavar="METRIC=LO:HI:N")] = None
    starts: Annotated[int, option("Descents at once.")] = 3
    steps: Annotated[int, option("Of each descent.")] = 15
    rounds: Annotated[int, option("Of exact refinement, 64 candidates each.")] = 16
    seed: Annotated[int, option("Equal seeds give equal answers.")] = 0
    output: Annotated[Path | None, option("A folder for design.json and report.html; new or empty.")] = None
    report: ReportFile = None
    as_json: AsJson = False


@takes_workload
def design(
    models: Models,
    base: Base,
    free: Annotated[list[str], option(_FREE, metavar="FIELD=LO:HI[:STEP]")],
    budget: Annotated[list[str] | None, option(_BUDGET, metavar="METRIC<=X")] = None,
    objective: Annotated[str, option(_OBJECTIVE)] = "latency",
    target: Annotated[str | None, option(_TARGET, metavar="TIME")] = None,
    *,
    load: WorkloadOptions,
    job: JobOptions,
    serving: ServiceOptions,
    checkpoint: WorkloadCheckpoint = None,
    search: SearchOptions,
) -> None:
    """Search the machine that does best for models under budgets; peaks follow SM count and clock.

    With --gpus or any option of a layout of the cluster that trains a job, or with --tensor-parallel of the server a
    model is split over: costs are then of one GPU with its share of links and network.

    MODEL may carry its own workload, any option of it and a weight:
    gpt3-xl,mode=training,batch_size=2,sequence_length=2048,weight=2
    """
    _require_writable(search.output)
    from neusight_jax.cli.workloads import numbers
    from neusight_jax.hardware.cluster import gpu_of

    ranges, budgets, fixed = [_free(text) for text in free], _budgets(budget), search.fixed or ()
    if job.cluster is not None:
        raise InputError("--cluster has a GPU of its own; give --base, --gpus, and --set for figures of its links")
    served = gpu_of(_base(base, fixed, ())[1]) if serving.slo else None
    loads = [_load(text, load, serving, served, job) for text in models]
    name, machine = _base(base, fixed, loads if served is None else ())
    ask, header = _asking(machine, name, ranges, loads, checkpoint)
    if target is not None:
        if len(ranges) != 1 or len(models) != 1 or budgets or serving.slo:
            raise InputError("--target answers for one model, one --free field, no --budget and no --slo")
        target_s = numbers("--target", target, [target], "latency_s")[0]
        _show_target(_target(ask(), target_s), header, search.as_json)
        return
    _search(ask, machine, header, objective, budgets, search)


@takes_workload
def codesign(
    model: Model,
    base: Base,
    free: Annotated[list[str], option(_SIZES, metavar="FIELD=LO:HI[:STEP]")],
    budget: Annotated[list[str] | None, option(_LIMITS, metavar="METRIC<=X")] = None,
    objective: Annotated[str, option(_GOALS)] = "latency",
    loss: Annotated[str, option("Law of the loss: besiroglu, hoffmann, or none.")] = "besiroglu",
    *,
    use: ModelOptions,
    checkpoint: WorkloadCheckpoint = None,
    search: SearchOptions,
) -> None:
    """Search the sizes of a decoder for a GPU, or both together, with a law of the loss that they reach."""
    _require_writable(search.output)

    from neusight_jax.designs.model import model_use
    from neusight_jax.hardware.cluster import gpu_of

    ranges, budgets = [_free(text) for text in free], _budgets(budget)
    name, machine = _base(base, search.fixed or (), ())
    load = model_use(model, gpu_of(machine), loss=None if loss == "none" else loss, **asdict(use))
    ask, header = _asking(machine, name, ranges, [load], checkpoint)
    _search(ask, machine, header, objective, budgets, search)


def _search(
    ask: Callable[..., Problem],
    machine: Machine,
    header: dict[str, Any],
    objective: str,
    budgets: dict[str, float],
    options: SearchOptions,
) -> None:
    """Search, and show what was found.

    Args:
      ask: makes the problem.
      machine: the base.
      header: names that results begin with.
      objective: what is made small or large.
      budgets: limits by metric.
      options: of the command line.
    """
    from neusight_jax.designs.answers import answer, infeasible_note, read_costs
    from neusight_jax.designs.answers import pareto as front_of
    from neusight_jax.designs.search import Search, Settings
    from neusight_jax.reports.design import front_table

    seed = options.seed
    metric, limits = _front(options.pareto, budgets)
    costs = None if options.costs is None else read_costs(options.costs, machine)
    settings = Settings(starts=options.starts, steps=options.steps, rounds=options.rounds)
    search = Search(ask(objective=objective, budgets=budgets, costs=costs), settings)
    with busy("searching"):
        best = answer(search, search.run(seed), seed)
        front = front_of(search, metric, limits, seed) if metric else []
    if metric and not front:
        best = replace(best, notes=(*best.notes, infeasible_note(metric, limits)))
    content = {**best.to_dict(), "objective": objective, **_pareto_content(best, front, metric)}
    about = {**header, "front": front, "metric": metric}
    report_to(options.report, best, **about)
    if options.output is not None:
        _write(options.output, {"schema": content["schema"], **header, **content}, best, about)
        remark(f"wrote {options.output}/design.json and {options.output}/report.html")
    if options.as_json:
        show_json(content, **header)
        return
    show(best)
    if front:
        show(front_table(front, metric, best.notes))


def _pareto_content(best: Design, front: list[Design], metric: str) -> dict[str, Any]:
    from neusight_jax.reports.design import front_notes

    if not metric:
        return {}
    designs = [point.to_dict() for point in front]
    notes = list(dict.fromkeys((*best.to_dict()["notes"], *front_notes(front))))
    return {"notes": notes, "pareto": {"metric": metric, "designs": designs}}


def _asking(
    machine: Machine, name: str, ranges: list[Range], loads: list[Workload], checkpoint: str | None
) -> tuple[Callable[..., Problem], dict[str, Any]]:
    """Makes the problem, given its objective, budgets and costs; and the names that results begin with."""
    from neusight_jax.cli.predict import forecast_notes
    from neusight_jax.designs.answers import problem
    from neusight_jax.designs.loads import Service
    from neusight_jax.model.checkpoint import card_notes, default_checkpoint, load_card, load_predictor

    served = any(isinstance(load.step, Service) for load in loads)
    usual = "tensorcore" if served else max(default_checkpoint(_kernels(load)) for load in loads)
    checkpoint = checkpoint or usual
    card = load_card(checkpoint)
    notes = [
        note
        for load in loads
        for note in (
            forecast_notes(card, checkpoint, name, load.graph) if load.graph.nodes else card_notes(card, checkpoint)
        )
    ]
    notes = [note.replace("this GPU", "the base") for note in notes]
    ask = partial(problem, load_predictor(checkpoint), machine, ranges, loads, notes=notes)
    return ask, {"checkpoint": checkpoint, "base": name}


def _kernels(load: Workload) -> KernelTable:
    return load.graph.kernels if load.graph.nodes else load.kernels


def _target(problem: Problem, target_s: float) -> dict[str, Any]:
    """The least value of the one free field that meets a latency, with its workload and notes."""
    from neusight_jax.designs.answers import bound_notes, required, workload_notes
    from neusight_jax.records import schema
    from neusight_jax.workloads import workload_dict

    wanted, load = problem.free[0], problem.workloads[0]
    value = required(problem.predictor, problem.base, load, wanted, target_s)
    notes = (*problem.notes, *bound_notes(problem.free, {wanted.field: value}), *workload_notes(problem))
    return {
        "schema": schema("requirement"),
        "field": wanted.field,
        "value": value,
        "target_s": target_s,
        "name": load.name,
        "workload": workload_dict(load.graph),
        "notes": list(dict.fromkeys(notes)),
    }


def _show_target(content: dict[str, Any], header: dict[str, Any], as_json: bool) -> None:
    from neusight_jax.units import with_unit

    if as_json:
        show_json(content, **header)
        return
    field, value = content["field"], content["value"]
    typer.echo(
        f"{content['name']} in {with_unit('latency_s', content['target_s'])} needs {field} of {with_unit(field, value)}"
    )
    for note in content["notes"]:
        typer.echo(f"note: {note}")


def _require_writable(output: Path | None) -> None:
    """`InputError` where a folder cannot be written, before the work begins."""
    if output is None:
        return
    from neusight_jax.files import refuse_existing
    from neusight_jax.reports.page import require_report

    refuse_existing(output)
    require_report(output / "report.html")


def _write(output: Path, content: dict[str, Any], best: Design, about: dict[str, Any]) -> None:
    from neusight_jax.files import atomic_folder
    from neusight_jax.records import json_text
    from neusight_jax.reports.page import write_report

    with atomic_folder(output) as place:
        (place / "design.json").write_text(json_text(content), encoding="utf-8")
        write_report(place / "report.html", best, command=COMMAND.get(), **about)


def _free(text: str) -> Range:
    from neusight_jax.cli.workloads import numbers, split_assignment
    from neusight_jax.sweeps.space import Range

    field, value = split_assignment("--free", text)
    parts = value.split(":")
    if len(parts) not in (2, 3):
        raise InputError(f"--free {text!r}: expected FIELD=LO:HI or FIELD=LO:HI:STEP")
    low, high, *step = numbers("--free", text, parts, field)
    return Range(field, low, high, step=step[0] if step else 0.0)


def _budgets(texts: Sequence[str] | None) -> dict[str, float]:
    """Limits of a command line by metric."""
    from neusight_jax.cli.workloads import numbers

    budgets = {}
    for text in texts or ():
        metric, sign, value = text.partition("<=")
        if not sign or not metric.strip():
            raise InputError(f"--budget {text!r}: expected METRIC<=X, e.g. --budget 'area_mm2<=800'")
        budgets[metric.strip()] = numbers("--budget", text, [value], metric.strip())[0]
    return budgets


def _base(name: str, changes: Sequence[str], loads: Sequence[Workload]) -> tuple[str, Machine]:
    """Name and figures of the machine to start from, in its usual servers where loads occupy several GPUs."""
    from neusight_jax.cli.workloads import machine_of, numbers, split_assignment
    from neusight_jax.hardware.files import load_named_gpu
    from neusight_jax.hardware.variant import check_field, require_field, vary_plainly
    from neusight_jax.job.job import Job

    occupied = {load.name: load.graph.num_gpus for load in loads}
    if len(set(occupied.values())) > 1:
        occupancy = ", ".join(f"{load}: {gpus}" for load, gpus in occupied.items())
        raise InputError(f"the models occupy different numbers of GPUs ({occupancy}); expected one number")
    first = loads[0] if loads else None
    work = (
        None if first is None else first.step if isinstance(first.step, Job) and not first.graph.nodes else first.graph
    )
    label, machine = load_named_gpu(name) if work is None else machine_of(work, name, _ONE)
    figures = {}
    for text in changes:
        field, value = split_assignment("--set", text)
        figures[field] = numbers("--set", text, [value], field)[0]
        check_field(require_field(field, machine), figures[field], "--set")
    return label, vary_plainly(machine, figures) if figures else machine


def _load(
    text: str,
    load: WorkloadOptions,
    serving: ServiceOptions = _STEPS,
    served: GPU | None = None,
    job: JobOptions = _ONE,
) -> Workload:
    """A workload from `MODEL[,key=value...]`, the options for what it does not say; `served`: the GPU of a service."""
    from neusight_jax.cli.workloads import work_of
    from neusight_jax.workloads import workload

    name, *rest = text.split(",")
    settings: dict[str, str] = {}
    for part in rest:
        key, sign, value = part.partition("=")
        if sign:
            settings[key.strip()] = value.strip()
        elif settings and part.strip().isdigit():  # lengths of requests have commas between them too
            settings[list(settings)[-1]] += f",{part.strip()}"
        else:
            raise _no_workload(text, part)
    chosen: dict[str, Any] = {key: _value(text, key, value) for key, value in settings.items()}
    weight, jobs = chosen.pop("weight", 1.0), {key: chosen.pop(key) for key in [*chosen] if key in _JOB}
    options, layout = replace(load, **chosen), replace(job, **jobs)
    if served is not None:
        if layout.given():
            raise InputError(f"--slo is of one replica; leave {', '.join(option_names(layout.given()))} out")
        return _service(name, options, serving, served, weight)
    if serving.given():
        raise InputError(f"{', '.join(option_names(serving.given()))}: these go with --slo; give targets")
    work = work_of(name, options, layout)
    return workload(work, weight)


_LAYOUT, _DTYPES = ("tensor_parallel", "expert_parallel"), ("dtype", "weight_dtype", "kv_dtype")


def _service(name: str, load: WorkloadOptions, serving: ServiceOptions, gpu: GPU, weight: float) -> Workload:
    """A model that is served within targets."""
    from neusight_jax.designs.loads import service
    from neusight_jax.graph.traced.source_file import is_source

    other = option_names(field for field in load.given() if field not in (*_LAYOUT, *_DTYPES))
    if other or is_source(name):
        refused = ", ".join(other) or name
        raise InputError(f"with --slo the engine decides what a step is, of a decoder; leave {refused} out")
    if serving.input_tokens is None or serving.output_tokens is None:
        raise InputError("--slo needs the lengths of requests; give --input-tokens and --output-tokens")
    targets = _targets(serving.slo or "")
    layout = {field: getattr(load, field) for field in _LAYOUT}
    return service(
        name,
        gpu,
        serving.input_tokens,
        serving.output_tokens,
        **targets,
        percentile=float(serving.percentile),
        price_per_hour=serving.gpu_price,
        dtypes={field: getattr(load, field) for field in _DTYPES},
        **layout,
        weight=weight,
    )


def _targets(text: str) -> dict[str, Any]:
    """`ttft<=1s tpot<=50ms` as `ttft_s` and `tpot_s`, seconds."""
    from neusight_jax.cli.workloads import targets_of

    expected = "ttft<=TIME, tpot<=TIME or both, e.g. 'ttft<=1s tpot<=50ms'"
    return {f"{name}_s": seconds for name, seconds in targets_of(text, ("ttft", "tpot"), expected).items()}


_JOB: tuple[str, ...] = tuple(field.name for field in fields(JobOptions) if field.name not in ("gpus", "cluster"))
_FLAG: Callable[[str], Any] = {"true": True, "false": False}.__getitem__
_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys((field.name for field in fields(WorkloadOptions)), str),
    **dict.fromkeys(("batch_size", "tensor_parallel", "expert_parallel", *_JOB), int),
    "weight": float,
    "fused": _FLAG,
    "sequence_parallel": _FLAG,
    **dict.fromkeys(("recompute", "framework", "gather_dtype"), str),
    "cuda_graphs": _FLAG,
}
"""How the values of a workload are read."""


def _value(text: str, key: str, value: str) -> Any:
    if key not in _KINDS or not value:
        raise _no_workload(text, f"{key}={value}")
    try:
        return _KINDS[key](value)
    except (ValueError, KeyError):
        kind = "true or false" if _KINDS[key] is _FLAG else "a number"
        raise InputError(f"{text}: {key} is {value!r}, expected {kind}") from None


def _no_workload(text: str, part: str) -> InputError:
    return InputError(f"{text}: {part!r} is no workload, expected one of {', '.join(f'{name}=' for name in _KINDS)}")


def _front(text: str | None, budgets: dict[str, float]) -> tuple[str, list[float]]:
    """Metric and limits of a Pareto front; the widest limit becomes a budget unless there is one."""
    if text is None:
        return "", []
    import numpy as np

    from neusight_jax.cli.workloads import numbers, split_assignment

    metric, value = split_assignment("--pareto", text)
    parts = numbers("--pareto", text, value.split(":"), metric)
    if len(parts) != 3 or not 0 < parts[0] < parts[1] or parts[2] != int(parts[2]) or parts[2] < 2:
        raise InputError(f"--pareto {text!r}: expected METRIC=LO:HI:N with 0 < LO < HI and N of at least 2")
    budgets.setdefault(metric, parts[1])
    return metric, [float(limit) for limit in np.geomspace(parts[0], parts[1], int(parts[2]))]
